"""Communication groups of a plan on a placement, and the network cards that they share.

Ranks fill the nodes in order; tensor rank runs fastest, then data, then pipeline. A group spreads its
traffic evenly over the cards of its members on a node.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["RankGroups", "boundary_flows", "card_loads", "cards_by_node"]

Position = tuple[int, int]
"""Node, and device or network card there."""

Cards = dict[int, tuple[set[int], int]]


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
    """Return the cards and the number of members of a group on each node.

    Parameters
    ----------
    group
        Positions of the members.
    gpus_per_nic
        By node, the adjacent devices that share a card.
    """
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
    load: dict[Position, float] = {}
    for by_node in groups:
        if len(by_node) > 1:
            for node, (cards, _) in by_node.items():
                for card in cards:
                    load[node, card] = load.get((node, card), 0.0) + 1.0 / len(cards)
    return load


def boundary_flows(
    ranks: Sequence[Position], first: int, width: int, gpus_per_nic: Sequence[int]
) -> tuple[Counter[Position], Counter[Position]]:
    """Count what each card sends and receives over a pipeline boundary that leaves its node.

    Parameters
    ----------
    ranks, gpus_per_nic
        Positions of all ranks, and devices a card by node.
    first, width
        First rank of the sending stage, and ranks a stage.
    """
    pairs = zip(ranks[first : first + width], ranks[first + width : first + 2 * width], strict=True)
    sent: Counter[Position] = Counter()
    received: Counter[Position] = Counter()
    for (node, local), (to_node, to_local) in pairs:
        if node != to_node:
            sent[node, local // gpus_per_nic[node]] += 1
            received[to_node, to_local // gpus_per_nic[to_node]] += 1
    return sent, received
