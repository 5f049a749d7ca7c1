"""Where the ranks of a plan sit, and what bandwidth each communication group gets there.

Ranks fill the nodes of a placement in order; the rank order is tensor fastest, then data, then
pipeline. A group that spans nodes spreads its traffic evenly over the network cards of its
members on each node, and cards are shared by all groups of the same kind that cross the node.
"""

from dataclasses import dataclass
from functools import lru_cache

from makespan.errors import PlanError
from makespan.hardware import Network, NodeSpec
from makespan.plans import RankGroups, boundary_flows, card_loads, cards_by_node

__all__ = ["Boundary", "Geometry", "Group", "geometry", "intra_bandwidth"]

_Position = tuple[int, int]  # node, local index
_PAIR = 2


@dataclass(frozen=True, slots=True)
class Group:
    """The slowest communication group of one kind."""

    n_ranks: int
    n_nodes: int
    n_local: int
    intra_bandwidth_bytes_per_s: float
    inter_bandwidth_bytes_per_s: float
    card_bandwidth_bytes_per_s: float

    @property
    def crosses_nodes(self) -> bool:
        """Whether any group of this kind spans more than one node."""
        return self.n_nodes > 1


@dataclass(frozen=True, slots=True)
class Boundary:
    """The slowest transfer between two neighbouring pipeline stages."""

    crosses_nodes: bool
    bandwidth_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Geometry:
    """Groups and boundaries of a plan in a placement."""

    tensor: Group
    data: Group
    boundaries: tuple[Boundary, ...]


def intra_bandwidth(node: NodeSpec, n_local: int) -> float:
    """Return the bandwidth [B/s] of a device of ``n_local``; beyond bridged pairs, that of the host link."""
    if node.intra_kind == "pair" and n_local > _PAIR:
        return node.pcie_bandwidth_bytes_per_s
    return node.intra_bandwidth_bytes_per_s


@lru_cache(maxsize=200_000)
def geometry(
    gpus_per_node: tuple[int, ...], nodes: tuple[NodeSpec, ...], network: Network, pp: int, tp: int, dp: int
) -> Geometry:
    """Place the ranks of a plan and work out the bandwidth of its groups."""
    n_gpus = sum(gpus_per_node)
    if pp * tp * dp != n_gpus:
        raise PlanError(f"PP {pp} x TP {tp} x DP {dp} = {pp * tp * dp} GPUs, but {n_gpus} are placed")
    kinds = nodes if len(nodes) == len(gpus_per_node) else (nodes[0],) * len(gpus_per_node)
    groups = RankGroups.of(gpus_per_node, pp, tp, dp)
    return Geometry(
        tensor=_slowest_group(groups.tensor, kinds, network),
        data=_slowest_group(groups.data, kinds, network),
        boundaries=tuple(
            _boundary(groups.ranks, stage * tp * dp, tp * dp, kinds, network) for stage in range(pp - 1)
        ),
    )


def _slowest_group(groups: list[list[_Position]], kinds: tuple[NodeSpec, ...], network: Network) -> Group:
    """Share the cards among concurrent groups and return the figures of the slowest."""
    members = [cards_by_node(group, [kind.gpus_per_nic for kind in kinds]) for group in groups]
    load = card_loads(members)
    inter = card_share = float("inf")
    intra = min(
        intra_bandwidth(kinds[node], count) for by_node in members for node, (_, count) in by_node.items()
    )
    for by_node in members:
        if len(by_node) == 1:
            continue
        for node, (cards, _) in by_node.items():
            bandwidth = kinds[node].nic_bandwidth_bytes_per_s * network.bandwidth_factor
            # A group pushes the share 1 / len(cards) of its traffic through each of its cards.
            share = bandwidth / max(load[node, index] for index in cards)
            inter = min(inter, share)
            card_share = min(card_share, share / len(cards))
    crosses = inter < float("inf")
    return Group(
        n_ranks=len(groups[0]),
        n_nodes=max(len(by_node) for by_node in members),
        n_local=max(count for by_node in members for _, count in by_node.values()),
        intra_bandwidth_bytes_per_s=intra,
        inter_bandwidth_bytes_per_s=inter if crosses else intra,
        card_bandwidth_bytes_per_s=card_share if crosses else intra,
    )


def _boundary(
    ranks: list[_Position], first: int, width: int, kinds: tuple[NodeSpec, ...], network: Network
) -> Boundary:
    senders, _ = boundary_flows(ranks, first, width, [kind.gpus_per_nic for kind in kinds])
    rates = [
        kinds[node].nic_bandwidth_bytes_per_s * network.bandwidth_factor / count
        for (node, _), count in senders.items()
    ] or [intra_bandwidth(kinds[node], _PAIR) for node, _ in ranks[first : first + width]]
    return Boundary(bool(senders), min(rates))
