"""Profiler: measured iteration times of a workload under many plans, with phases and noise.

The points to measure and the jobs that measure them, the file that lets an interrupted profile resume, and
the measurement itself with its table and record.
"""

import itertools
import json
import logging
import math
import socket
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, mean, median
from typing import IO, TYPE_CHECKING, Any

from makespan.arguments import check_fields
from makespan.errors import InputError, MakespanError
from makespan.files import parse_json, read_text, write_text
from makespan.hardware import NodeSpec
from makespan.plans import ExecutionPlan, Placement, PlanFamily, read_plan, resolve_micro_batch
from makespan.runtime import Launcher, describe_machine
from makespan.training import RunResult, SmallModel, TrainingJob, train_all, unsupported_reasons
from makespan.workloads import Workload

if TYPE_CHECKING:
    import pandas as pd

_log = logging.getLogger(__name__)


# --- Points -----------------------------------------------------------------------------------------

_WORDS = tuple(family.word for family in PlanFamily if family.word and not family.is_model_parallel)
_FAMILIES = {"gpt2": "gpt", "llama": "llama", "bert": "bert", "t5": "t5", "vit": "vit"}


@dataclass(frozen=True, slots=True)
class ProfilePoint:
    """One point to measure: execution plan in trace notation, processes per node, CPU threads per process."""

    exec_plan: str
    placement: Placement
    cpu_threads: int


def model_of(workload: Workload) -> SmallModel:
    """Return the small model that stands for a workload; an `InputError` names another family."""
    spec, first = workload.model, workload.model.blocks[0]
    if spec.family not in _FAMILIES:
        raise InputError(
            f"workload {workload.key!r}: models of family {spec.family!r} cannot be trained here; "
            f"expected {', '.join(_FAMILIES)}"
        )
    sizes = {name: getattr(first, name) for name in ("hidden", "heads", "kv_heads", "ffn", "seq")}
    return SmallModel(_FAMILIES[spec.family], spec.n_layers, vocab=spec.vocab, **sizes)


def profile_points(
    workload: Workload, placements: Iterable[Placement], cpu_threads: int
) -> list[ProfilePoint]:
    """List every plan of the families of a workload: rows of the sampling design and held-out ones.

    For each placement come the data-parallel families, then all degrees of model parallelism.
    """
    points = []
    for placement in placements:
        n_gpus = placement.n_gpus
        degrees = [
            (pp, tp, n_gpus // (pp * tp))
            for pp in range(1, n_gpus + 1)
            for tp in range(1, n_gpus // pp + 1)
            if n_gpus % (pp * tp) == 0
        ]
        notations = [("" if max(each) <= 9 else "-").join(map(str, each)) for each in degrees]
        for text in (*_WORDS, *notations):
            try:
                plan = read_plan(text, n_gpus=n_gpus, global_batch_size=workload.global_batch_size)
            except MakespanError:  # this placement and batch have no such plan
                continue
            if plan.plan_family.title in workload.families:
                points.append(ProfilePoint(text, placement, cpu_threads))
    return points


def point_plan(point: ProfilePoint, workload: Workload, node: NodeSpec) -> ExecutionPlan:
    """Return the plan of a point, with the micro-batch size that the performance model assumes."""
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
    """Divide the points of a workload into jobs that each use one set of processes throughout.

    Jobs are named ``<placement>.<number>``. Without ``points_per_job`` all points of a placement form one
    job, which starts its processes once.
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


# --- Measurements so far ----------------------------------------------------------------------------

_EXPECTED = "the measurements of an interrupted profile"
_TRANSIENT = ("load", "slurm")  # keys in the description of a machine
_MOST_DIFFERENCES = 3


class Measurements:
    """Named values of a profile, each written to a file as soon as it is measured.

    The file has one line for the settings and one per value. A profile with equal settings on the same
    machine resumes from it; any other starts from scratch and reports it. Threads may share an instance.

    Parameters
    ----------
    path
        The file, created with the first value; None to write no file.
    settings
        Plain values of everything that a value depends on besides its name.
    total
        Total number of runs to measure.
    progress
        Called with the number of finished runs and the total at every value and every heartbeat; or None.
    tell
        Called with a line of text about an existing file.
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
        self._is_other = False
        self._lock = threading.Lock()
        if path is not None:
            machine = {
                name: value for name, value in describe_machine().items() if name not in _TRANSIENT
            } | {"host": socket.gethostname()}
            # Through JSON and back, so that it compares equal to a head that was read from the file.
            self._head = json.loads(json.dumps({"machine": machine, "settings": dict(settings or {})}))
            self._load(path)
        self._done = sum(n_runs for n_runs, _ in self._values.values())
        if self._done:
            tell(f"{path}: resuming, {self._done} of {total} runs are measured")
        self._progress(self._done, total)

    def __contains__(self, name: str) -> bool:
        """Return True if there is a value of this name."""
        return name in self._values

    def __getitem__(self, name: str) -> Any:
        """Return a value by its name."""
        return self._values[name][1]

    def add(self, name: str, value: Any, n_runs: int = 1) -> None:
        """Store a plain value that took ``n_runs`` runs to measure."""
        with self._lock:
            if self._path is not None:
                self._write(self._path, _line(name, n_runs, value))
            self._values[name] = (n_runs, value)
            self._done += n_runs
            self._progress(self._done, self._total)

    def measure(self, name: str, how: Callable[[], Any], n_runs: int = 1) -> Any:
        """Return the value of this name; call ``how`` to measure it if it is missing."""
        if name not in self:
            self.add(name, how(), n_runs)
        return self[name]

    def skip(self, n_runs: int) -> None:
        """Count infeasible runs as done."""
        self._done += n_runs

    def beat(self) -> None:
        """Report progress without a new value."""
        with self._lock:
            self._progress(self._done, self._total)

    def remove(self) -> None:
        """Remove the file, once its values have been written elsewhere."""
        if self._stream is not None:
            self._stream.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _load(self, path: Path) -> None:
        if not path.exists():
            return
        lines: list[Any] = []
        for line in read_text(path, _EXPECTED).splitlines(keepends=True):
            try:
                lines.append(parse_json(line if line.endswith("\n") else ""))
            except ValueError:  # the last line of a killed process may be cut
                break
        first, *others = lines or [None]
        if first == self._head:
            self._values = {entry["name"]: (entry["n_runs"], entry["value"]) for entry in others}
            return
        machine = first.get("machine") if isinstance(first, dict) else None
        difference = "with other settings" if machine == self._head["machine"] else "on another machine"
        changed = "; ".join(_differences(first, self._head)[:_MOST_DIFFERENCES])
        self._is_other = True
        self._tell(
            f"{path}: was measured {difference}; {changed}; starting anew, its runs go to {_old(path)}"
        )

    def _write(self, path: Path, line: str) -> None:
        if self._stream is None:  # rewrite the file before appending: its last line may be cut
            if self._is_other:
                path.replace(_old(path))
            kept = (_line(name, *value) for name, value in self._values.items())
            write_text("".join([json.dumps(self._head), "\n", *kept]), path)
            self._stream = path.open("a", encoding="utf-8")
        self._stream.write(line)
        self._stream.flush()


def _old(path: Path) -> Path:
    return path.with_name(f"{path.name}.old")


def _differences(found: Any, expected: Any, where: str = "") -> list[str]:
    """Return one text for each plain value in which two values of JSON differ, with its place."""
    if not (isinstance(found, dict) and isinstance(expected, dict)):
        return [] if found == expected else [f"{where or 'head'}: found {found!r}, expected {expected!r}"]
    names = dict.fromkeys((*found, *expected))
    return [
        text
        for name in names
        for text in _differences(found.get(name), expected.get(name), f"{where}.{name}".removeprefix("."))
    ]


def _line(name: str, n_runs: int, value: Any) -> str:
    return json.dumps({"name": name, "n_runs": n_runs, "value": value}) + "\n"


def train_missing(
    jobs: Mapping[str, TrainingJob],
    read: Callable[[RunResult], Any],
    launcher: Launcher,
    kept: Measurements,
    run_dir: str | Path | None = None,
    alongside: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> list[Any]:
    """Train the named jobs that are not stored, in the context ``alongside``; return the values of all."""
    missing = [name for name in jobs if name not in kept]
    names = iter(missing)  # results arrive in the order of the jobs

    def note(results: Sequence[RunResult]) -> None:
        for result, name in zip(results, names, strict=False):
            kept.add(name, read(result))
        kept.beat()

    if missing:
        with alongside():
            train_all([jobs[name] for name in missing], launcher=launcher, run_dir=run_dir, on_beat=note)
    return [kept[name] for name in jobs]


# --- Profiles ---------------------------------------------------------------------------------------

_PHASES = {
    "iter_time_s": "step_s", "forward_s": "forward_s", "overlap_sync_s": "backward_sync_s",
    "optimize_s": "optimizer_s",
}  # fmt: skip
_KEYS = ("exec_plan", "placement", "cpu_threads")


@dataclass(frozen=True, slots=True)
class Procedure:
    """Procedure for measuring a point; an `InputError` names a number that is too small.

    Parameters
    ----------
    warmup_steps
        Steps of a run that are discarded: they allocate, compile and fill caches.
    steps
        Steps of a run that are timed; the time of the run is their median.
    repetitions
        Runs per point, all points in turn, so that slow drifts of the machine show as noise.
    is_paced
        Whether the iteration time is the mean interval between the starts of steps, on which the end of a job
        depends, instead of the median of the steps alone.
    """

    warmup_steps: int = 1
    steps: int = 3
    repetitions: int = 5
    is_paced: bool = False

    def __post_init__(self) -> None:
        """Check ranges."""
        check_fields(self, "", positive=("steps", "repetitions"), not_negative=("warmup_steps",))


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
    alongside: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> dict[str, Any]:
    """Train each point for a few steps and time it.

    Parameters
    ----------
    workload, points, node
        Workload to train, and its points, all with the same placement; the node determines the micro-batch
        size, as in the performance model.
    launcher, procedure, run_dir
        Launcher of the processes, which start once for all points; steps and repetitions; directory in which
        the processes meet, visible to all nodes, None for a temporary one.
    kept, where, alongside
        Store of finished runs from which an interrupted profile resumes, or None; suffix of their names that
        distinguishes devices; context that surrounds the training, entered only if a run is missing.

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
    model, n_steps = model_of(workload), procedure.warmup_steps + procedure.steps
    # All plans in turn, then all again: a drift of the machine affects all of them alike.
    jobs = {
        f"{name}, run {number + 1}": TrainingJob(model, plan, n_steps)
        for number in range(procedure.repetitions)
        for name, plan in able.items()
    }

    def medians_of(run: RunResult) -> dict[str, Any]:
        timed = run.times[procedure.warmup_steps :]
        phases = {name: median(getattr(step, source) for step in timed) for name, source in _PHASES.items()}
        if procedure.is_paced:
            phases["iter_time_s"] = fmean(run.paces_s[procedure.warmup_steps :])
        return {"device": run.device, **phases}

    medians = train_missing(jobs, medians_of, launcher, kept, run_dir, alongside)
    runs = {name: medians[index :: len(able)] for index, name in enumerate(able)}
    return {
        "workload": workload.key,
        "device": medians[0]["device"] if medians else launcher.device,
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


def profile_table(parts: Sequence[Mapping[str, Any]], workload: Workload) -> "pd.DataFrame":
    """Join parts, results of `measure_points` of one workload, into its throughput table.

    The times of a point are medians over its runs in all parts; the time of a run is its median step or its
    mean pace. Points that cannot be trained are infeasible and have no time.
    """
    import pandas as pd  # the design is read without it

    from makespan.tables import THROUGHPUT

    for part in parts:
        if part["workload"] != workload.key:
            raise InputError(f"a profile of {part['workload']!r}; expected profiles of {workload.key!r}")
    rows: list[dict[str, object]] = []
    for point in _points(parts):
        runs = point["runs"]
        times = {phase: median(run[phase] for run in runs) if runs else math.nan for phase in _PHASES}
        rows.append(
            {
                "workload": workload.key,
                **{name: point[name] for name in _KEYS},
                "global_batch_size": workload.global_batch_size,
                **times,
                "feasible": bool(runs),
                "clean": True,
                "flag": "",
                "provenance": "measured",
            }
        )
    return THROUGHPUT.validate(pd.DataFrame(rows), where=f"profile of {workload.key}")


def _points(parts: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the points of all parts; a point that was measured in several parts has the runs of all."""
    merged: dict[tuple[Any, ...], dict[str, Any]] = {}
    for part in parts:
        for point in part["points"]:
            key = tuple(point[name] for name in _KEYS)
            earlier = merged.get(key, {"runs": []})
            merged[key] = {**point, "runs": [*earlier["runs"], *point["runs"]]}
    return list(merged.values())


def profile_record(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Describe how a throughput table was measured, from the same parts, for a record beside it.

    ``repeatability_pct``, of each point and as their mean, is the mean relative difference between two runs
    of the same point [%], that is, the error of a prediction that has seen the point.
    """
    points = []
    for point in _points(parts):
        times = [run["iter_time_s"] for run in point["runs"]]
        pairs = [100.0 * abs(a - b) / b for a, b in itertools.permutations(times, 2)]
        values = {name: point[name] for name in (*_KEYS, "micro_batch_size", "reason")}
        points.append(values | {"n_runs": len(times), "repeatability_pct": mean(pairs) if pairs else None})
    measured = [point["repeatability_pct"] for point in points if point["repeatability_pct"] is not None]
    machines: list[Mapping[str, Any]] = []
    for part in parts:
        if part["machine"] not in machines:
            machines.append(part["machine"])
    return {
        "workload": parts[0]["workload"],
        "procedure": parts[0]["procedure"],
        "devices": sorted({part["device"] for part in parts}),
        "machines": machines,
        "repeatability_pct": mean(measured) if measured else None,
        "points": points,
    }
