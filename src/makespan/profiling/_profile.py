"""The profiler: real iteration times of a workload under many plans, with phases and noise."""

import itertools
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, mean, median
from typing import TYPE_CHECKING, Any

from makespan.errors import InputError
from makespan.hardware import NodeSpec
from makespan.plans import ExecutionPlan
from makespan.profiling._design import ProfilePoint, model_of, point_plan
from makespan.profiling._measurements import Measurements, train_missing
from makespan.runtime import Launcher, describe_machine
from makespan.training import RunResult, TrainingJob, unsupported_reasons
from makespan.workloads import Workload

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Procedure", "measure_points", "measured_by", "profile_record", "profile_table"]

_PHASES = {
    "iter_time_s": "step_s", "forward_s": "forward_s", "overlap_sync_s": "backward_sync_s",
    "optimize_s": "optimizer_s",
}  # fmt: skip
_KEYS = ("exec_plan", "placement", "cpu_threads")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Procedure:
    """How a point is measured; an `InputError` names a number that is too small.

    Parameters
    ----------
    warmup_steps
        Steps of a run that are thrown away: they allocate, compile and fill caches.
    steps
        Steps of a run that are timed; the run counts with their median.
    repetitions
        Runs of each point, all points in turn, so that slow drifts of the machine show as noise.
    is_paced
        Whether an iteration counts with the mean pace at which the steps of a run follow each other, as the
        end of a job depends on it, instead of the median of the steps alone.
    """

    warmup_steps: int = 1
    steps: int = 3
    repetitions: int = 5
    is_paced: bool = False

    def __post_init__(self) -> None:
        """Check ranges."""
        for name, least in (("warmup_steps", 0), ("steps", 1), ("repetitions", 1)):
            if getattr(self, name) < least:
                raise InputError(f"{name} is {getattr(self, name)}; accepted: a whole number >= {least}")


def measured_by(workloads: Iterable[Workload], procedure: Procedure) -> dict[str, Any]:
    """Return the models of workloads and how they are measured, as settings of `Measurements`."""
    models = {spec.key: [spec.global_batch_size, asdict(model_of(spec))] for spec in workloads}
    return {"models": models, "procedure": asdict(procedure)}


def measure_points(
    workload: Workload,
    points: Sequence[ProfilePoint],
    node: NodeSpec,
    launcher: Launcher,
    procedure: Procedure,
    run_dir: str | Path | None = None,
    kept: Measurements | None = None,
    where: str = "",
    beside: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> dict[str, Any]:
    """Train each point for a few steps and time it.

    Parameters
    ----------
    workload, points, node
        What is trained, and points of it on one and the same placement; the node decides the
        micro-batch size, as in the performance model.
    launcher, procedure, run_dir
        Starts the processes, once for all points; steps and repetitions; directory in which the
        processes meet, seen by all nodes, None for a temporary one.
    kept, where, beside
        Where runs are kept as they end, to go on with them after an interrupt, or None; the part
        of their names that tells devices apart; what goes on meanwhile, begun only if a run is to be made.

    Returns
    -------
    dict
        Plain values: ``workload``, ``machine`` (see `describe_machine`), ``device``,
        ``procedure``, and for each of the ``points`` the times of every run [s], as the procedure takes them.
    """
    plans = [point_plan(point, workload, node) for point in points]
    reasons = [unsupported_reasons(plan, model_of(workload), launcher.n_devices) for plan in plans]
    kept = kept or Measurements()
    group = f"{workload.key} on {points[0].placement.text}{where}"
    machine = kept.measure(f"{group}: machine", describe_machine, 0)
    kept.skip(sum(map(bool, reasons)) * procedure.repetitions)
    names = [
        f"{group}: {point.exec_plan}, micro-batch {plan.micro_batch_size}"
        for point, plan in zip(points, plans, strict=True)
    ]
    able = {name: plan for name, plan, why in zip(names, plans, reasons, strict=True) if not why}
    jobs = _jobs(workload, able, procedure)
    found = train_missing(jobs, lambda run: _medians(run, procedure), launcher, kept, run_dir, beside)
    runs = {name: found[index :: len(able)] for index, name in enumerate(able)}
    return {
        "workload": workload.key,
        "device": found[0]["device"] if found else launcher.device,
        "machine": machine,
        "procedure": asdict(procedure),
        "points": [
            {
                **dict(zip(_KEYS, (point.exec_plan, point.placement.text, point.cpu_threads), strict=True)),
                "micro_batch_size": plan.micro_batch_size,
                "reason": "; ".join(why),
                "runs": [{phase: run[phase] for phase in _PHASES} for run in runs.get(name, [])],
            }
            for name, point, plan, why in zip(names, points, plans, reasons, strict=True)
        ],
    }


def _jobs(
    workload: Workload, plans: Mapping[str, ExecutionPlan], procedure: Procedure
) -> dict[str, TrainingJob]:
    """Name the runs of named plans, all plans in turn."""
    model, n_steps = model_of(workload), procedure.warmup_steps + procedure.steps
    return {
        f"{name}, run {number + 1}": TrainingJob(model, plan, n_steps)
        for number in range(procedure.repetitions)
        for name, plan in plans.items()
    }


def _medians(run: RunResult, procedure: Procedure) -> dict[str, Any]:
    timed = run.times[procedure.warmup_steps :]
    phases = {name: median(getattr(step, source) for step in timed) for name, source in _PHASES.items()}
    if procedure.is_paced:
        phases["iter_time_s"] = fmean(run.paces_s[procedure.warmup_steps :])
    return {"device": run.device, **phases}


def profile_table(parts: Sequence[Mapping[str, Any]], workload: Workload) -> "pd.DataFrame":
    """Join parts, results of `measure_points` of one workload, into its throughput table.

    The times of a point are medians over its runs, in whichever part, each of which counts with its median
    step or its mean pace. Points that cannot be trained are infeasible and have no time.
    """
    import pandas as pd  # the design is read without it

    from makespan.tables import THROUGHPUT

    for part in parts:
        if part["workload"] != workload.key:
            raise InputError(f"a profile of {part['workload']!r}; accepted: profiles of {workload.key!r}")
    rows = [_row(point, workload) for point in _points(parts)]
    return THROUGHPUT.validate(pd.DataFrame(rows), where=f"profile of {workload.key}")


def _points(parts: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the points of parts; one that was measured in several has the runs of all."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for part in parts:
        for point in part["points"]:
            key = tuple(point[name] for name in _KEYS)
            known = found.get(key, {"runs": []})
            found[key] = {**point, "runs": [*known["runs"], *point["runs"]]}
    return list(found.values())


def _row(point: Mapping[str, Any], workload: Workload) -> dict[str, object]:
    runs = point["runs"]
    times = {phase: median(run[phase] for run in runs) if runs else math.nan for phase in _PHASES}
    return {
        "workload": workload.key,
        **{name: point[name] for name in _KEYS},
        "global_batch_size": workload.global_batch_size,
        **times,
        "feasible": bool(runs),
        "clean": True,
        "flag": "",
        "provenance": "measured",
    }


def profile_record(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Describe what stands behind a throughput table, from the same parts, to be kept beside it.

    ``repeatability_pct``, of each of the points and as their mean, is the mean relative difference
    between two runs of the same point [%], that is, the error of a prediction that has seen the point.
    """
    points = [_noise(point) for point in _points(parts)]
    known = [point["repeatability_pct"] for point in points if point["repeatability_pct"] is not None]
    machines: list[Mapping[str, Any]] = []
    for part in parts:
        if part["machine"] not in machines:
            machines.append(part["machine"])
    return {
        "workload": parts[0]["workload"],
        "procedure": parts[0]["procedure"],
        "devices": sorted({part["device"] for part in parts}),
        "machines": machines,
        "repeatability_pct": mean(known) if known else None,
        "points": points,
    }


def _noise(point: Mapping[str, Any]) -> dict[str, Any]:
    times = [run["iter_time_s"] for run in point["runs"]]
    pairs = [100.0 * abs(a - b) / b for a, b in itertools.permutations(times, 2)]
    kept = {name: point[name] for name in (*_KEYS, "micro_batch_size", "reason")}
    return kept | {"n_runs": len(times), "repeatability_pct": mean(pairs) if pairs else None}
