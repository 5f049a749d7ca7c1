"""Which plans of a workload are profiled, in which job, and the small model behind a workload."""

import itertools
import json
import logging
import math
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, mean, median
from typing import IO, TYPE_CHECKING, Any

from makespan.errors import InputError, MakespanError
from makespan.files import read_text, write_text
from makespan.hardware import NodeSpec
from makespan.plans import ExecutionPlan, Placement, PlanFamily, read_plan, resolve_micro_batch
from makespan.runtime import Launcher, describe_machine
from makespan.training import RunResult, SmallModel, TrainingJob, train_all, unsupported_reasons
from makespan.workloads import Workload

if TYPE_CHECKING:
    import pandas as pd

_log = logging.getLogger(__name__)


# ------------------------------------------------------------------------------------------------
# Which plans of a workload are profiled, in which job, and the small model behind a workload.

_WORDS = tuple(family.word for family in PlanFamily if family.word and not family.is_model_parallel)
_FAMILIES = {"gpt2": "gpt", "llama": "llama", "bert": "bert", "t5": "t5", "vit": "vit"}


@dataclass(frozen=True, slots=True)
class ProfilePoint:
    """One point to measure: execution plan in trace notation, processes on each node, CPU threads of each."""

    exec_plan: str
    placement: Placement
    cpu_threads: int


def model_of(workload: Workload) -> SmallModel:
    """Return the model that trains for a workload; an `InputError` says that it cannot be trained here."""
    spec, first = workload.model, workload.model.blocks[0]
    if spec.family not in _FAMILIES:
        raise InputError(
            f"workload {workload.key!r}: models of family {spec.family!r} cannot be trained here; "
            f"accepted: {', '.join(_FAMILIES)}"
        )
    sizes = {name: getattr(first, name) for name in ("hidden", "heads", "kv_heads", "ffn", "seq")}
    return SmallModel(_FAMILIES[spec.family], spec.n_layers, vocab=spec.vocab, **sizes)


def profile_points(
    workload: Workload, placements: Iterable[Placement], cpu_threads: int
) -> list[ProfilePoint]:
    """List every plan of the families of a workload, the rows of the sampling design and those held out.

    For each placement come the data-parallel families, then all degrees of model parallelism.
    """
    return [
        ProfilePoint(text, placement, cpu_threads)
        for placement in placements
        for text in (*_WORDS, *_degrees(placement.n_gpus))
        if _is_used(workload, text, placement)
    ]


def _degrees(n: int) -> Iterator[str]:
    for pp in range(1, n + 1):
        for tp in range(1, n // pp + 1):
            if n % (pp * tp) == 0:
                degrees = (pp, tp, n // (pp * tp))
                yield ("" if max(degrees) <= 9 else "-").join(map(str, degrees))


def _is_used(workload: Workload, text: str, placement: Placement) -> bool:
    try:
        plan = read_plan(text, n_gpus=placement.n_gpus, global_batch_size=workload.global_batch_size)
    except MakespanError:
        return False
    return plan.plan_family.title in workload.families


def point_plan(point: ProfilePoint, workload: Workload, node: NodeSpec) -> ExecutionPlan:
    """Return the plan of a point with its micro-batch size, as the performance model assumes it."""
    plan = read_plan(
        point.exec_plan,
        n_gpus=point.placement.n_gpus,
        global_batch_size=workload.global_batch_size,
        cpu_threads=point.cpu_threads,
    )
    return resolve_micro_batch(plan, workload, node)


def profile_batches(
    points: Sequence[ProfilePoint], points_per_job: int | None
) -> dict[str, list[ProfilePoint]]:
    """Divide points of a workload into jobs that each need the same processes throughout.

    Jobs are named ``<placement>.<number>``. Without ``points_per_job`` all points of a placement are one
    job, which starts their processes once.
    """
    by_placement: dict[str, list[ProfilePoint]] = {}
    for point in points:
        by_placement.setdefault(point.placement.text, []).append(point)
    return {
        f"{text}.{number}": members[start : start + size]
        for text, members in by_placement.items()
        for size in [points_per_job or len(members)]
        for number, start in enumerate(range(0, len(members), size))
    }


# ------------------------------------------------------------------------------------------------
# What a profile has measured so far: kept in a file, so that an interrupted one goes on, and counted.

_EXPECTED = "what an interrupted profile measured"
_OF_A_MOMENT = ("load", "slurm")  # in the description of a machine


class Measurements:
    """Named values of a profile, each written to a file as soon as it is there.

    The file has a line for the settings and one for each value. A profile with equal settings on the same
    machine goes on with them; another one begins anew, and says so. Threads may share one.

    Parameters
    ----------
    path
        The file, which comes into being with the first value; None to keep nothing.
    settings
        Whatever a value depends on beside its name, plain.
    total
        Runs to measure in all.
    progress
        Is told how many runs are done, and of how many, with every value and every heartbeat; or None.
    tell
        Is told in a line what was found.
    """

    def __init__(
        self,
        path: Path | None = None,
        settings: Mapping[str, Any] | None = None,
        total: int = 0,
        progress: Callable[[int, int], None] | None = None,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._path, self._total, self._tell = path, total, tell
        self._progress = progress or (lambda done, total: None)
        self._values: dict[str, tuple[int, Any]] = {}
        self._stream: IO[str] | None = None
        self._lock = threading.Lock()
        if path is not None:
            self._head = json.loads(json.dumps({"machine": _machine(), "settings": dict(settings or {})}))
            self._load(path)
        self._done = sum(n_runs for n_runs, _ in self._values.values())
        if self._done:
            tell(f"{path}: {self._done} of {total} runs are measured, going on")
        self._progress(self._done, total)

    def __contains__(self, name: str) -> bool:
        """Whether there is a value of this name."""
        return name in self._values

    def __getitem__(self, name: str) -> Any:
        """Return a value by its name."""
        return self._values[name][1]

    def add(self, name: str, value: Any, n_runs: int = 1) -> None:
        """Keep a plain value, which took so many runs."""
        with self._lock:
            if self._path is not None:
                self._write(self._path, _line(name, n_runs, value))
            self._values[name] = (n_runs, value)
            self._done += n_runs
            self._progress(self._done, self._total)

    def measure(self, name: str, how: Callable[[], Any], n_runs: int = 1) -> Any:
        """Return the value of this name, which is measured if it is not there."""
        if name not in self:
            self.add(name, how(), n_runs)
        return self[name]

    def skip(self, n_runs: int) -> None:
        """Count runs that cannot be made as done."""
        self._done += n_runs

    def beat(self) -> None:
        """Tell that the measurement goes on."""
        with self._lock:
            self._progress(self._done, self._total)

    def remove(self) -> None:
        """Remove the file, when what is measured is written elsewhere."""
        if self._stream is not None:
            self._stream.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _load(self, path: Path) -> None:
        if not path.exists():
            return
        first, *others = _lines(path) or [None]
        if first == self._head:
            self._values = {one["name"]: (one["n_runs"], one["value"]) for one in others}
            return
        found = first.get("machine") if isinstance(first, dict) else None
        what = "with other settings" if found == self._head["machine"] else "on another machine"
        self._tell(f"{path}: was measured {what}, beginning anew")

    def _write(self, path: Path, line: str) -> None:
        if self._stream is None:  # whole lines only: the last one of a killed process may be cut
            kept = (_line(name, *value) for name, value in self._values.items())
            write_text("".join([json.dumps(self._head), "\n", *kept]), path)
            self._stream = path.open("a", encoding="utf-8")
        self._stream.write(line)
        self._stream.flush()


def _line(name: str, n_runs: int, value: Any) -> str:
    return json.dumps({"name": name, "n_runs": n_runs, "value": value}) + "\n"


def _lines(path: Path) -> list[Any]:
    """Values of the whole lines of a file."""
    found: list[Any] = []
    for line in read_text(path, _EXPECTED).splitlines(keepends=True):
        try:
            found.append(json.loads(line if line.endswith("\n") else ""))
        except ValueError:
            break
    return found


def _machine() -> dict[str, Any]:
    """Describe what is the same as long as the machine is."""
    found = {name: value for name, value in describe_machine().items() if name not in _OF_A_MOMENT}
    return found | {"host": socket.gethostname()}


def train_missing(
    jobs: Mapping[str, TrainingJob],
    read: Callable[[RunResult], Any],
    launcher: Launcher,
    kept: Measurements,
    run_dir: str | Path | None = None,
    beside: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> list[Any]:
    """Return what is read of the runs of named jobs; those not kept are trained, beside others, and kept."""
    missing = [name for name in jobs if name not in kept]
    names = iter(missing)

    def note(results: Sequence[RunResult]) -> None:
        for result, name in zip(results, names, strict=False):
            kept.add(name, read(result))
        kept.beat()

    if missing:
        with beside():
            train_all([jobs[name] for name in missing], launcher=launcher, run_dir=run_dir, on_beat=note)
    return [kept[name] for name in jobs]


# ------------------------------------------------------------------------------------------------
# The profiler: real iteration times of a workload under many plans, with phases and noise.

_PHASES = {
    "iter_time_s": "step_s", "forward_s": "forward_s", "overlap_sync_s": "backward_sync_s",
    "optimize_s": "optimizer_s",
}  # fmt: skip
_KEYS = ("exec_plan", "placement", "cpu_threads")


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
