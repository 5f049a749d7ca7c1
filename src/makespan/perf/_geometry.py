"""Which network cards the communication groups of a plan share on a placement."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

__all__ = ["Geometry", "geometry"]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Geometry:
    """Load of network cards under the groups of a plan.

    A load of 1 means that a group has the rate of one card, 2 half of it, 0.5 that of two cards.

    Parameters
    ----------
    ring_load
        Largest load met by a data-parallel group; 0 if none leaves its node.
    tp_load, tp_local_share
        Mean over the pipeline stages of the largest load met by a tensor-parallel group, and the
        share of the stages whose groups all stay inside a node.
    pp_load, pp_local_hops
        Sum over the stage boundaries of the largest number of flows on a card, and the number of
        boundaries that stay inside nodes.
    """

    ring_load: float
    tp_load: float
    tp_local_share: float
    pp_load: float
    pp_local_hops: float


@lru_cache(maxsize=65536)
def geometry(gpus_per_node: tuple[int, ...], pp: int, tp: int, dp: int, gpus_per_nic: int) -> Geometry:
    """Derive the card loads of a plan on a placement.

    Ranks fill the nodes in order; tensor rank runs fastest, then data, then pipeline. A group
    spreads its traffic evenly over the cards of its members on a node, and the rate of a group
    follows its most loaded card.

    Parameters
    ----------
    gpus_per_node
        GPUs on each node.
    pp, tp, dp
        Degrees, with ``pp tp dp`` GPUs in all.
    gpus_per_nic
        Adjacent GPUs that share a network card.

    Returns
    -------
    Geometry
        Loads, cached by all arguments.
    """
    node = np.repeat(np.arange(len(gpus_per_node)), gpus_per_node)
    local = np.concatenate([np.arange(count) for count in gpus_per_node])
    card = node * (max(gpus_per_node) // gpus_per_nic + 1) + local // gpus_per_nic
    shape = (pp, dp, tp)
    ring = _group_loads(
        node.reshape(shape).swapaxes(1, 2).reshape(-1, dp),
        card.reshape(shape).swapaxes(1, 2).reshape(-1, dp),
    )
    tensor = _group_loads(node.reshape(-1, tp), card.reshape(-1, tp)).reshape(pp, dp).max(axis=1)
    boundary = _boundary_flows(node.reshape(pp, -1), card.reshape(pp, -1))
    return Geometry(
        ring_load=float(ring.max()),
        tp_load=float(tensor.mean()),
        tp_local_share=float((tensor == 0).mean()),
        pp_load=float(boundary.sum()),
        pp_local_hops=float((boundary == 0).sum()),
    )


def _group_loads(node: Ints, card: Ints) -> Floats:
    """Return the largest card load that each group (row) meets, 0 inside a node."""
    crosses = node.min(axis=1) != node.max(axis=1)
    loads = np.zeros(len(node))
    if not crosses.any():
        return loads
    group = np.repeat(np.flatnonzero(crosses), node.shape[1])
    n_cards = int(card.max()) + 1
    keys, first = np.unique(group * n_cards + card[crosses].ravel(), return_index=True)
    owner, used = keys // n_cards, keys % n_cards
    group_node = owner * (int(node.max()) + 1) + node[crosses].ravel()[first]
    cards_there = np.bincount(group_node)[group_node]
    card_load = np.bincount(used, weights=1.0 / cards_there, minlength=n_cards)
    np.maximum.at(loads, owner, card_load[used])
    return loads


def _boundary_flows(node: Ints, card: Ints) -> Floats:
    """Return, for each stage boundary, the most flows that a card sends or receives."""
    flows = np.zeros(max(len(node) - 1, 0))
    for index in range(len(flows)):
        crosses = node[index] != node[index + 1]
        if crosses.any():
            sent = np.bincount(card[index][crosses])
            received = np.bincount(card[index + 1][crosses])
            flows[index] = max(sent.max(), received.max())
    return flows
