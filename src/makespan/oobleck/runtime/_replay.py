"""Repeat a resilient run in one process, and compare what came of both."""

from collections.abc import Sequence
from pathlib import Path

import torch

from makespan.oobleck.planning import HybridPlan
from makespan.oobleck.runtime._engine import layer_file
from makespan.oobleck.runtime._job import ChainJob
from makespan.oobleck.runtime._oracle import Oracle

__all__ = ["replay"]


def replay(
    job: ChainJob, plans: Sequence[tuple[int, HybridPlan]], iterations: int, checkpoint: Path
) -> tuple[list[float], bool]:
    """Repeat iterations from the start under a log of plans.

    Parameters
    ----------
    job, plans, iterations
        What was trained, each plan with the first iteration under it, and how long.
    checkpoint
        What the run left after these iterations.

    Returns
    -------
    tuple
        Loss of each iteration, and whether parameters, buffers and optimizer state of all layers have the
        same bits.
    """
    torch.set_num_threads(1)
    oracle = Oracle(job)
    losses = [
        oracle.iterate(iteration, [plan for first, plan in plans if first <= iteration][-1])
        for iteration in range(iterations)
    ]
    equal = True
    for layer in range(oracle.n_layers):
        found = torch.load(checkpoint / layer_file(layer), weights_only=True)
        wanted = oracle.state(layer)
        equal &= found.keys() == wanted.keys() and all(torch.equal(found[one], wanted[one]) for one in found)
    return losses, equal
