"""The placement: how many devices a job holds on each node, and all placements of a number of devices."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from makespan.errors import NotationError, PlanError

__all__ = ["Placement", "enumerate_placements"]

_SEPARATOR = "-"


@dataclass(frozen=True, slots=True)
class Placement:
    """Devices of a job on each node, as a multiset.

    The order of the nodes has no meaning: counts are sorted on construction, so equal
    placements compare equal.

    Parameters
    ----------
    gpus_per_node
        Devices on each node that holds at least one, each at least 1.

    Raises
    ------
    PlanError
        No node, or a count below 1.
    """

    gpus_per_node: tuple[int, ...]

    def __post_init__(self) -> None:
        """Check and sort the counts."""
        if not self.gpus_per_node or min(self.gpus_per_node) < 1:
            raise PlanError(f"placement {self.gpus_per_node}: accepted: one count or more, each >= 1")
        object.__setattr__(self, "gpus_per_node", tuple(sorted(self.gpus_per_node)))

    @classmethod
    def parse(cls, text: str) -> "Placement":
        """Read a placement: one digit a node, or counts joined by ``-``.

        A single node with ten devices or more is written with a trailing ``-``, as ``16-``.

        Examples
        --------
        >>> Placement.parse("35").gpus_per_node
        (3, 5)
        >>> Placement.parse("16-16").n_gpus
        32

        Raises
        ------
        NotationError
            The text is not a placement.
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
        """Return the placement on as few nodes as possible, all full but perhaps one.

        Raises
        ------
        PlanError
            A count is below 1.
        """
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
    """Return every placement of some devices on a cluster of equal nodes.

    Parameters
    ----------
    n_gpus
        Devices to place.
    gpus_per_node, n_nodes
        Size of the cluster.

    Returns
    -------
    tuple of Placement
        All multisets, fewest nodes first, then by counts; empty if they do not fit.
    """
    found = [Placement(counts) for counts in _partitions(n_gpus, gpus_per_node, n_nodes)]
    return tuple(sorted(found, key=lambda p: (p.n_nodes, p.gpus_per_node)))


def _partitions(total: int, largest: int, parts: int) -> Iterator[tuple[int, ...]]:
    if total == 0:
        yield ()
        return
    if parts == 0:
        return
    for first in range(min(total, largest), 0, -1):
        for rest in _partitions(total - first, first, parts - 1):
            yield (first, *rest)
