"""One node of a run under a plan that does not change: ``python -m ... <run directory>``."""

import importlib
import sys
import time
from typing import Any

import torch

from makespan.files import write_json
from makespan.papers.oobleck.runtime._executor import StageExecutor
from makespan.papers.oobleck.runtime._job import job_from
from makespan.papers.oobleck.runtime._plans import plan_from
from makespan.runtime import Identity, RunDirectory, choose_device, end_worker, run_worker

__all__ = ["run_node"]

OF_SEVERAL = ("torch._dynamo",)
"""What a step of an optimizer loads when it is first done."""


def run_node(directory: RunDirectory, who: Identity) -> None:
    """Take part in the iterations that the request asks for, and write what was seen of them."""
    torch.set_num_threads(who.threads)
    choose_device(who)
    request: dict[str, Any] = directory.request()
    plan = plan_from(request["plan"])
    node = plan.nodes[who.rank]
    executor = StageExecutor(job_from(request["job"]), who.device, timeout_s=who.timeout_s)
    # The stubs of torch hide its public stores.
    store = importlib.import_module("torch.distributed").FileStore(str(directory.path / "store"), who.size)
    executor.connect(plan, node, store)
    executor.hold(executor.stage_layers)
    found: dict[str, Any] = {"losses": [], "iter_times_s": [], "n_sums": [], "checksums": []}
    for iteration in range(request["n_iterations"]):
        begun = time.perf_counter()
        executor.compute(iteration)
        facts = executor.reduce()
        executor.apply()
        found["iter_times_s"].append(time.perf_counter() - begun)
        found["losses"].append(facts.loss)
        found["n_sums"].append(facts.n_sums)
        if request["with_checksums"]:
            found["checksums"].append({layer: executor.checksum(layer) for layer in executor.layers})
        if who.rank == 0:
            directory.write_progress({"iteration": iteration})
    if request["with_states"]:
        states = {layer: executor.layer_state(layer) for layer in executor.layers}
        torch.save(states, directory.path / f"states-{node}.pt")
    write_json(found, directory.path / f"seen-{node}.json")


if __name__ == "__main__":
    end_worker(run_worker(sys.argv[1], run_node))
