"""Worker that verifies library schedules: ``python -m makespan.slapo.verify_worker <run directory>``."""

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from makespan.runtime import Identity, RunDirectory, choose_device, end_worker, join, run_worker
from makespan.slapo.errors import VerificationError
from makespan.slapo.library import apply_schedule
from makespan.slapo.planned import apply_plan
from makespan.slapo.schedule import create_schedule
from makespan.slapo.verification import Verify, VerifyReport
from makespan.training.zoo import build_family, family_batch, family_spec

PRELOAD = ("torch.distributed", "torch._dynamo")
"""Modules that the parent of forked workers loads once."""
_N_PARTS = 3
"""Parts of a verification in progress: build, schedule, compare."""


def verify_cases(directory: RunDirectory, who: Identity) -> None:
    """Verify the schedules of the request; the first process writes one row per schedule."""
    torch.set_num_threads(who.threads)
    join(directory, who)
    request, device = directory.request(), torch.device(choose_device(who))
    rows: list[dict[str, Any]] = []

    def tell(part: int, doing: str) -> None:
        done, total = len(rows) * _N_PARTS + part, len(request["cases"]) * _N_PARTS
        directory.write_progress({"done": done, "total": total, "doing": f"{case['family']}: {doing}"})

    for case in request["cases"]:
        report = _verify_case(case, request, device, tell)
        errors = {
            kind: max(report.largest(kind)[1], report.largest(f"layer {kind}")[1])
            for kind in ("output", "input gradient", "parameter gradient")
        }
        wrong = [str(comparison) for comparison in report.comparisons if comparison.fault]
        rows.append(
            {
                "steps": len(report.steps),
                "outputs": report.count("output"),
                "gradients": report.count("parameter gradient"),
                "not_compared": len(report.not_compared),
                "output_error": errors["output"],
                "input_gradient_error": errors["input gradient"],
                "gradient_error": errors["parameter gradient"],
                "is_equal": report.is_equal,
                "fault": "; ".join([*report.faults, *wrong[:1], *map(str, report.divergences)]),
                "report": str(report),
            }
        )
    if who.rank == 0:
        directory.write_result(rows)


def _verify_case(
    case: Mapping[str, Any],
    request: Mapping[str, Any],
    device: torch.device,
    tell: Callable[[int, str], None],
) -> VerifyReport:
    family, seed = case["family"], request["seed"]
    tell(0, "building the model")
    model = build_family(family, request["size"], seed=seed).to(device)
    batch = family_batch(family_spec(family, request["size"]), request["samples"], seed)
    schedule = create_schedule(model)
    # Only images could be the output of another model and need a gradient; a mask is never trained.
    trained = [name for name in inspect.signature(model.forward).parameters if name == "images"]
    check = Verify(
        schedule, batch.inputs, device=device, input_grads=trained, seed=seed, by_layers=request["by_layers"]
    )
    try:
        with check:
            tell(1, "applying the schedule")
            if case.get("plan") is None:
                apply_schedule(schedule, family, **case["options"])
            else:
                apply_plan(schedule, case["plan"], batch.inputs)
            tell(2, "comparing outputs and gradients")
    except VerificationError:
        if check.report is None:
            raise
    if check.report is None:
        raise VerificationError(f"{family}: nothing was verified")
    return check.report


if __name__ == "__main__":
    end_worker(run_worker(sys.argv[1], verify_cases))
