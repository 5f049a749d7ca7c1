"""Generated traces: failures at a fixed distance."""

import numpy as np

from makespan.errors import InputError
from makespan.papers.oobleck.simulators._traces import NodeEvent, NodeTrace
from makespan.presets import preset_entry, read_preset
from makespan.units import MS

__all__ = ["FAILURE_TRACES", "generate_failures"]

_PACKAGE = "makespan.papers.oobleck"

FAILURE_TRACES = tuple(read_preset(_PACKAGE, "failures"))
"""Names of the presets, from rare to frequent failures."""


def generate_failures(name: str, seed: int) -> NodeTrace:
    """Generate a trace in which a node is lost again and again at a fixed distance.

    Parameters
    ----------
    name
        One of `FAILURE_TRACES`.
    seed
        Decides which nodes are lost. When they are is the same for all, so systems that do not ask which node
        it is have the same run under every seed.

    Returns
    -------
    NodeTrace
        All nodes at time 0, then the losses.

    Raises
    ------
    UnknownNameError
        There is no such preset.
    """
    preset = preset_entry(_PACKAGE, "failures", "failure trace", name)
    n_nodes, n_removals, period_ms = preset["n_nodes"], preset["n_removals"], round(preset["period_s"] / MS)
    if n_removals > n_nodes:
        raise InputError(
            f"failure trace {name!r}: {n_removals} removals; accepted: up to {n_nodes}, its nodes"
        )
    lost = np.random.default_rng(seed).permutation(n_nodes)[:n_removals]
    added = [NodeEvent(0, True, f"node{index + 1}") for index in range(n_nodes)]
    removed = [
        NodeEvent((turn + 1) * period_ms, False, f"node{index + 1}")
        for turn, index in enumerate(lost.tolist())
    ]
    return NodeTrace(name, (*added, *removed))
