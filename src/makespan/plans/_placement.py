"""The placement of a job on nodes, the communication groups of its plan there, and the cards that they share.

Ranks fill the nodes in order; tensor rank runs fastest, then data, then pipeline. A group spreads its
traffic evenly over the cards of its members on a node.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from makespan.errors import NotationError, PlanError

__all__ = ["Placement", "RankGroups", "boundary_flows", "card_loads", "cards_by_node", "enumerate_placements"]

_SEPARATOR = "-"
Position = tuple[int, int]
"""Node, and device or network card there."""
Cards = dict[int, tuple[set[int], int]]


@dataclass(frozen=True, slots=True)
class Placement:
    """Devices of a job on each node that holds at least one, as a multiset.

    The order of the nodes has no meaning: counts, at least 1, are sorted on construction, so equal
    placements compare equal.
    """

    gpus_per_node: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.gpus_per_node or min(self.gpus_per_node) < 1:
            raise PlanError(f"placement {self.gpus_per_node}: accepted: one count or more, each >= 1")
        object.__setattr__(self, "gpus_per_node", tuple(sorted(self.gpus_per_node)))

    @classmethod
    def parse(cls, text: str) -> "Placement":
        """Read a placement: one digit a node, or counts joined by ``-``.

        A single node with ten devices or more is written with a trailing ``-``, as ``16-``; raises
        `NotationError` for other texts.

        Examples
        --------
        >>> Placement.parse("35").gpus_per_node
        (3, 5)
        >>> Placement.parse("16-16").n_gpus
        32

        """
        stripped = text.strip()
        joined = _SEPARATOR in stripped
        parts = stripped.removesuffix(_SEPARATOR).split(_SEPARATOR) if joined else list(stripped)
        if not parts or not all(part.isascii() and part.isdigit() and int(part) for part in parts):
            raise NotationError(
                f"placement {text!r} cannot be read; accepted: one digit 1-9 a node, such as "
                "'4444', or counts joined by '-', such as '16-16'"
            )
        return cls(tuple(int(part) for part in parts))

    @classmethod
    def packed(cls, n_gpus: int, gpus_per_node: int) -> "Placement":
        """Return the placement on as few nodes as possible, all full but perhaps one; counts are >= 1."""
        if n_gpus < 1 or gpus_per_node < 1:
            raise PlanError(f"cannot pack {n_gpus} GPUs on nodes of {gpus_per_node}; accepted: both >= 1")
        full, rest = divmod(n_gpus, gpus_per_node)
        return cls((gpus_per_node,) * full + ((rest,) if rest else ()))

    @property
    def text(self) -> str:
        """The placement in trace notation, smallest count first."""
        joint = "" if max(self.gpus_per_node) <= 9 else _SEPARATOR
        text = joint.join(str(count) for count in self.gpus_per_node)
        return text if joint == "" or self.n_nodes > 1 else f"{text}{_SEPARATOR}"

    @property
    def n_gpus(self) -> int:
        """Devices on all nodes."""
        return sum(self.gpus_per_node)

    @property
    def n_nodes(self) -> int:
        """Nodes that hold at least one device."""
        return len(self.gpus_per_node)

    def fits(self, gpus_per_node: int, n_nodes: int) -> bool:
        """Whether an empty cluster of equal nodes could hold the placement."""
        return self.n_nodes <= n_nodes and self.gpus_per_node[-1] <= gpus_per_node


@lru_cache(maxsize=4096)
def enumerate_placements(n_gpus: int, gpus_per_node: int, n_nodes: int) -> tuple[Placement, ...]:
    """Return every placement on a cluster of equal nodes: fewest nodes first, then by counts."""
    found = [Placement(counts) for counts in _partitions(n_gpus, gpus_per_node, n_nodes)]
    return tuple(sorted(found, key=lambda p: (p.n_nodes, p.gpus_per_node)))


def _partitions(total: int, largest: int, parts: int) -> Iterator[tuple[int, ...]]:
    if total == 0:
        yield ()
    elif parts > 0:
        for first in range(min(total, largest), 0, -1):
            for rest in _partitions(total - first, first, parts - 1):
                yield (first, *rest)


@dataclass(frozen=True, slots=True)
class RankGroups:
    """Positions of all ranks, in order, and of the members of each tensor- and data-parallel group."""

    ranks: list[Position]
    tensor: list[list[Position]]
    data: list[list[Position]]

    @classmethod
    def of(cls, gpus_per_node: Sequence[int], pp: int, tp: int, dp: int) -> "RankGroups":
        """Arrange the ranks of a plan; the degrees multiply to the devices."""
        ranks = [(node, local) for node, count in enumerate(gpus_per_node) for local in range(count)]
        width = tp * dp
        stages = [ranks[first : first + width] for first in range(0, pp * width, width)]
        return cls(
            ranks=ranks,
            tensor=[stage[first : first + tp] for stage in stages for first in range(0, width, tp)],
            data=[stage[offset::tp] for stage in stages for offset in range(tp)],
        )


def cards_by_node(group: Iterable[Position], gpus_per_nic: Sequence[int]) -> Cards:
    """Return the cards and the number of members of a group on each node, given the devices a card there."""
    found: Cards = {}
    for node, local in group:
        cards, count = found.get(node, (set(), 0))
        cards.add(local // gpus_per_nic[node])
        found[node] = (cards, count + 1)
    return found


def card_loads(groups: Iterable[Cards]) -> dict[Position, float]:
    """Add up the shares of traffic that concurrent groups, those across nodes, push through each card.

    A load of 1 is all the traffic that one group has at a node.
    """
    load: defaultdict[Position, float] = defaultdict(float)
    for by_node in groups:
        if len(by_node) > 1:
            for node, (cards, _) in by_node.items():
                for card in cards:
                    load[node, card] += 1.0 / len(cards)
    return load


def boundary_flows(
    ranks: Sequence[Position], first: int, width: int, gpus_per_nic: Sequence[int]
) -> tuple[Counter[Position], Counter[Position]]:
    """Count what each card sends and receives over a pipeline boundary that leaves its node.

    The sending stage has ``width`` ranks from ``first`` on; ``gpus_per_nic`` devices of a node share a card.
    """
    pairs = zip(ranks[first : first + width], ranks[first + width : first + 2 * width], strict=True)
    sent: Counter[Position] = Counter()
    received: Counter[Position] = Counter()
    for (node, local), (to_node, to_local) in pairs:
        if node != to_node:
            sent[node, local // gpus_per_nic[node]] += 1
            received[to_node, to_local // gpus_per_nic[to_node]] += 1
    return sent, received
