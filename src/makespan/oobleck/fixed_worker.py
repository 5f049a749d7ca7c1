"""Process of one node under a fixed plan: ``python -m makespan.oobleck.fixed_worker <run directory>``."""

import importlib
import sys
import time
from typing import Any

import torch

from makespan.files import write_json
from makespan.oobleck.requests import FIXED_RUNS, FixedRun
from makespan.oobleck.stage import StageExecutor
from makespan.runtime import Identity, RunDirectory, choose_device, end_worker, run_worker

PRELOAD = ("torch._dynamo",)
"""Modules that the first step of an optimizer loads, which takes long."""


def _run(directory: RunDirectory, who: Identity, number: int, run: FixedRun) -> None:
    """Take part in one run, and write its observations."""
    plan = run.plan
    node = plan.nodes[who.rank]
    executor = StageExecutor(run.job, who.device, timeout_s=who.timeout_s, pass_order=run.pass_order)
    # The stubs of torch hide its public stores.
    meeting = importlib.import_module("torch.distributed").FileStore
    executor.connect(plan, node, meeting(str(directory.path / f"store-{number}"), len(plan.nodes)))
    executor.hold(executor.stage_layers)
    seen: dict[str, Any] = {"losses": [], "iter_times_s": [], "n_sums": [], "checksums": []}
    for iteration in range(run.n_iterations):
        begun = time.perf_counter()
        executor.compute(iteration)
        facts = executor.reduce()
        executor.apply()
        seen["iter_times_s"].append(time.perf_counter() - begun)
        seen["losses"].append(facts.loss)
        seen["n_sums"].append(facts.n_sums)
        if run.with_checksums:
            seen["checksums"].append({layer: executor.checksum(layer) for layer in executor.layers})
        if who.rank == 0:
            directory.write_progress({"run": number, "iteration": iteration})
    if run.with_states:
        states = {layer: executor.layer_state(layer) for layer in executor.layers}
        torch.save(states, directory.path / f"states-{number}-{node}.pt")
    write_json(seen, directory.path / f"seen-{number}-{node}.json")
    executor.disconnect()


def run_nodes(directory: RunDirectory, who: Identity) -> None:
    """Take part, one after the other, in those runs of the request that have a node for this rank."""
    torch.set_num_threads(who.threads)
    choose_device(who)
    runs: list[FixedRun] = FIXED_RUNS.validate_python(directory.request())
    for number, run in enumerate(runs):
        if who.rank < len(run.plan.nodes):
            _run(directory, who, number, run)


if __name__ == "__main__":
    end_worker(run_worker(sys.argv[1], run_nodes))
