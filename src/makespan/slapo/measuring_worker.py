"""Worker that times scheduled models: ``python -m makespan.slapo.measuring_worker <run directory>``.

A request has a ``task``: ``steps`` verifies and times schedules in sequence in all processes of the run;
``search`` runs strategies that find the fastest point within a memory budget, in one process.
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from makespan.runtime import Identity, RunDirectory, end_worker, join, run_worker
from makespan.slapo.library import apply_schedule
from makespan.slapo.memory import saved_tensors
from makespan.slapo.schedule import create_schedule
from makespan.slapo.tuning import Measuring, Point, Precision, Space, strategy_named, tune
from makespan.slapo.verification import Verify
from makespan.training.zoo import build_family, family_batch, family_loss, family_spec

PRELOAD = ("torch._dynamo",)
"""Modules that fused operations load slowly: a fork server loads them once for all processes of a launch."""
Record = dict[str, Any]
_BATCH, _RATIO = "global_batch_size", "ckpt_ratio"
_REPEATS = 2


def kept_bytes(model: nn.Module, batch: Any, budget_bytes: int | None = None) -> int:
    """Return the bytes that forward pass and loss save for the backward pass in this process [B]."""
    with saved_tensors(model, budget_bytes=budget_bytes) as kept:
        family_loss(model(*batch.inputs), batch.targets)
    return kept.n_bytes


def timed_passes(model: nn.Module, batch: Any, request: Mapping[str, Any]) -> Iterator[float]:
    """Iterate over the times of forward plus backward passes after the warm-up [s]."""
    for number in range(request["warmup_passes"] + request["passes"]):
        model.zero_grad(set_to_none=True)
        begun = time.perf_counter()
        torch.autograd.backward(family_loss(model(*batch.inputs), batch.targets))
        seconds = time.perf_counter() - begun
        if number >= request["warmup_passes"]:
            yield seconds


def _steps(directory: RunDirectory, who: Identity, request: Mapping[str, Any]) -> list[Record]:
    """Verify the model with each variant of a schedule, and measure its memory and times."""
    batch = family_batch(family_spec(request["family"], request["size"]), request["batch"], request["seed"])
    rows = []
    for variant in request["variants"]:
        sch = create_schedule(build_family(request["family"], request["size"], seed=request["seed"]))
        with Verify(sch, tuple(batch.inputs), seed=request["seed"]) as verified:
            apply_schedule(sch, request["family"], **variant["options"])
        comparisons = verified.report.comparisons if verified.report else ()
        outputs, gradients = (
            [
                comparison.max_rel_error
                for comparison in comparisons
                if comparison.kind.endswith(kind) and comparison.max_rel_error >= 0
            ]
            for kind in ("output", "gradient")
        )
        record = {
            "saved_bytes": kept_bytes(sch.mod, batch),
            "parameter_bytes": sum(
                parameter.numel() * parameter.element_size() for parameter in sch.mod.parameters()
            ),
            "times_s": list(timed_passes(sch.mod, batch, request)),
            "output_error": max(outputs),
            "gradient_error": max(gradients),
        }
        everything = [record] * who.size
        dist.all_gather_object(everything, record)
        compilers = {str(step.arguments["compiler"]) for step in sch.metadata.journal if step.op == "fuse"}
        rows.append(
            {"name": variant["name"], "processes": everything, "compiler": " ".join(sorted(compilers))}
        )
    return rows


def _search(directory: RunDirectory, who: Identity, request: Mapping[str, Any]) -> list[Record]:
    """Run strategies in sequence; their common database measures each point once."""
    spec = family_spec(request["family"], request["size"])

    def declare(space: Space) -> None:
        space.create_symbol(_BATCH, request["batches"])
        space.create_symbol(_RATIO, request["ratios"])

    def evaluate(point: Point) -> Measuring:
        size = int(point[_BATCH])
        batch = family_batch(spec, size, request["seed"])
        sch = create_schedule(build_family(request["family"], request["size"], seed=request["seed"]))
        apply_schedule(sch, request["family"], ckpt_ratio=float(point[_RATIO]))
        n_bytes = kept_bytes(sch.mod, batch, request["budget_bytes"])
        for seconds in timed_passes(sch.mod, batch, request):
            yield size / seconds, {"saved_bytes": n_bytes}
        return None

    rows = []
    for name in request["strategies"]:
        # Times of one point vary by more than those of neighbours differ: repeat, or noise would choose.
        result = tune(
            declare, evaluate, strategy_named(name), db=directory.path / "points.jsonl", seed=request["seed"],
            repeats=_REPEATS, precision=Precision(),
        )  # fmt: skip
        rows += [
            {
                "strategy": name,
                "explored_order": order,
                _BATCH: evaluation.point[_BATCH],
                _RATIO: evaluation.point[_RATIO],
                "status": evaluation.status,
                "throughput_samples_per_s": evaluation.value,
                "saved_bytes": evaluation.info.get("saved_bytes"),
            }
            for order, evaluation in enumerate(result.history, start=1)
        ]
    return rows


_TASKS: Mapping[str, Callable[[RunDirectory, Identity, Mapping[str, Any]], list[Record]]] = {
    "steps": _steps,
    "search": _search,
}


def _work(directory: RunDirectory, who: Identity) -> None:
    join(directory, who)
    request = directory.request()
    rows = _TASKS[request["task"]](directory, who, request)
    if who.rank == 0:
        directory.write_result(rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    end_worker(run_worker(sys.argv[1], _work))
