"""Time of one collective over a group: flat ring, tree for small messages, hierarchical.

The time model uses the flat ring for the large messages of gradient exchange; this module is
for single messages of any size and for questions about the choice of algorithm.
"""

import math
from dataclasses import dataclass
from typing import Literal

from makespan.emulator._geometry import Group
from makespan.errors import unknown_name

__all__ = ["ALGORITHMS", "CollectiveLatency", "all_reduce_time_s"]

Algorithm = Literal["auto", "ring", "tree", "hier"]
ALGORITHMS = ("auto", "ring", "tree", "hier")


@dataclass(frozen=True, slots=True)
class CollectiveLatency:
    """Fixed times of a collective: the tuning table that NCCL publishes (simple protocol).

    Parameters
    ----------
    base_s
        Once a call [s].
    local_step_s, network_step_s
        One step inside a node and between nodes [s].
    """

    base_s: float = 8.4e-6
    local_step_s: float = 3.4e-6
    network_step_s: float = 9.6e-6


def all_reduce_time_s(
    n_bytes: float,
    group: Group,
    *,
    efficiency_intra: float = 1.0,
    efficiency_inter: float = 1.0,
    algorithm: Algorithm = "auto",
    latency: CollectiveLatency | None = None,
) -> float:
    """Return the time of one all-reduce [s].

    Parameters
    ----------
    n_bytes
        Size of the tensor on each rank [B].
    group
        The group, with its shares of links and cards.
    efficiency_intra, efficiency_inter
        Share of the link inside a node and of the cards that is reached [1].
    algorithm
        ``ring``: 2 (n - 1) steps; ``tree``: 2 log2(nodes) network steps; ``hier``: reduce-scatter
        in the nodes, all-reduce of the shares between them, all-gather in the nodes; ``auto``: the
        fastest.
    latency
        Fixed times; the published defaults if not given.

    Raises
    ------
    UnknownNameError
        There is no such algorithm.
    """
    if algorithm not in ALGORITHMS:
        raise unknown_name("collective algorithm", algorithm, ALGORITHMS)
    if group.n_ranks == 1:
        return 0.0
    fixed = latency or CollectiveLatency()
    intra = group.intra_bandwidth_bytes_per_s * efficiency_intra
    inter = group.inter_bandwidth_bytes_per_s * efficiency_inter
    link = min(inter, intra) if group.crosses_nodes else intra
    times = {"ring": _ring(n_bytes, group, link, fixed), "tree": _tree(n_bytes, group, link, fixed)}
    if group.crosses_nodes:
        card = group.card_bandwidth_bytes_per_s * efficiency_inter
        times["hier"] = _hierarchical(n_bytes, group, intra, card, fixed)
    if algorithm == "auto":
        return min(times.values())
    return times.get(algorithm, times["ring"])


def _ring(n_bytes: float, group: Group, link: float, fixed: CollectiveLatency) -> float:
    n, nodes = group.n_ranks, group.n_nodes
    network = nodes if group.crosses_nodes else 0
    share_of_steps = network / n
    steps = 2 * (n - 1)
    step = share_of_steps * fixed.network_step_s + (1 - share_of_steps) * fixed.local_step_s
    return fixed.base_s + steps * step + 2 * (n - 1) / n * n_bytes / link


def _tree(n_bytes: float, group: Group, link: float, fixed: CollectiveLatency) -> float:
    local = 2 * (group.n_local - 1) * fixed.local_step_s
    between = 2 * math.log2(group.n_nodes) * fixed.network_step_s
    return fixed.base_s + local + between + 2 * n_bytes / link


def _hierarchical(n_bytes: float, group: Group, intra: float, card: float, fixed: CollectiveLatency) -> float:
    local, nodes = group.n_local, group.n_nodes
    inside = 2 * (local - 1) / local * n_bytes / intra + 2 * (local - 1) * fixed.local_step_s
    between = 2 * (nodes - 1) / nodes * (n_bytes / local) / card
    return fixed.base_s + inside + between + 2 * (nodes - 1) * fixed.network_step_s
