"""Job traces that name models and plans: the canonical table and the Morphling artifact's lists."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import pandas as pd

from makespan.arguments import typed
from makespan.errors import InputError, MissingDataError, NotationError, UnknownNameError, cell_error
from makespan.planning import model_names
from makespan.plans import DEFAULT_CPU_THREADS, PLAN_TEXTS, read_plan, stated_cpu_threads, write_plan
from makespan.tables import JOBS, write_csv
from makespan.throughput import FASTEST, is_planned, planned_workload, requested_label
from makespan.traces.cells import (
    DURATION_MISSING,
    FLAGS,
    NO_GUARANTEE,
    NO_PLAN,
    NO_RUN,
    ROW,
    Finding,
    ReadReport,
    finish_report,
    flags,
    further_columns,
    in_order,
    is_missing,
    numbers,
    read_cells,
    reject,
    repair,
    report_further,
)
from makespan.units import whole
from makespan.workloads import JobSpec, is_in_zoo, resolve_workload_key, workload, workload_keys

_MORPHLING = {
    "job_id": "name",
    "submit_time_s": "submission_time",
    "workload": "application",
    "n_gpus": "num_gpus",
    "n_cpus": "num_cpus",
    "plan": "exec_plan",
    "steps": "steps",
    "is_guaranteed": "is_sla",
    "duration_s": "duration",
}
_CANONICAL = {name: name for name in JOBS.names}
BatchOf = Callable[[str], int | None]
_OPTIONAL = ("is_guaranteed", "tenant", "duration_s")
_RUN = ("seq", "batch", "precision", "stack")  # columns on models of the user
_FOREIGN = {
    "requests": {"submit_time_s", "duration_s"},
    "helios": {"gpu_num", "submit_time"},
    "openb": {"num_gpu", "gpu_milli"},
    "spot": {"gpu_request", "worker_num"},
    "tiresias": {"num_gpu", "submit_time"},
    "pollux": {"num_replicas", "application"},
    "easyscale": {"max_parallelism", "application"},
}


@dataclass(frozen=True, slots=True)
class JobTrace:
    """A job trace that can be simulated, in order of submission, and the report of how it was made."""

    jobs: tuple[JobSpec, ...]
    report: ReadReport
    rows: tuple[int, ...] = ()  # data row of each job in its file, for messages; empty if there is none


@typed
def jobs_table(jobs: Iterable[JobSpec]) -> pd.DataFrame:
    """Return jobs as a table of schema `JOBS`."""
    rows = [[getattr(job, name) for name in JOBS.names] for job in jobs]
    table = pd.DataFrame(rows, columns=JOBS.names)
    return JOBS.validate(table.astype({"duration_s": "float64"}), where="jobs")


def listed_jobs(table: pd.DataFrame) -> tuple[JobSpec, ...]:
    """Return the jobs of a table of schema `JOBS` as `jobs_table` makes it, in order of submission."""
    return _specs(JOBS.validate(table, "jobs").sort_values("submit_time_s", kind="stable"))


@typed
def write_jobs(jobs: Iterable[JobSpec], path: str | Path) -> None:
    """Write jobs, in order of submission, as a list that `read_jobs` reads back unchanged.

    ``-`` stands for the standard output. Raises `InputError` for names that would be read back changed.
    """
    listed = sorted(jobs, key=attrgetter("submit_time_s"))
    for job in listed:
        for name in ("job_id", "workload", "plan", "tenant"):
            value = getattr(job, name)
            if value != value.strip() or not value.isprintable():
                accepted = "a text of printable characters without spaces around it"
                raise InputError(f"job {job.job_id!r}: {name} is {value!r}; expected {accepted}")
    write_csv(jobs_table(listed), path, JOBS)


@typed
def read_morphling_jobs(path: str | Path, batch_of: BatchOf | None = None) -> JobTrace:
    """Read a job list of the Morphling artifact; ``batch_of`` and errors are as for `read_jobs`.

    Columns ``name, submission_time`` [s], ``duration`` [s], ``application, num_gpus, num_cpus,
    exec_plan, steps, is_sla``; other columns such as ``bandwidth`` have no effect and are
    reported. A missing duration is accepted, because the run time of a job follows from its steps, and so is
    a list without ``is_sla``.
    """
    findings: list[Finding] = []

    def optional(names: list[str]) -> list[str]:
        return [*_MORPHLING.values(), *further_columns(names, _MORPHLING.values())]

    cells = read_cells(path, _needed(_MORPHLING), findings, optional=optional, hint=_hint)
    return _job_trace(cells, _MORPHLING, str(path), findings, batch_of)


@typed
def read_jobs(path: str | Path, batch_of: BatchOf | None = None) -> JobTrace:
    """Read a job trace that names models and plans, in either of two forms.

    The canonical form has the columns of `JOBS`; ``is_guaranteed``, ``tenant`` and ``duration_s`` may be
    missing. Its workload may be a model of the user: the path of a file that `makespan.planning.read_model`
    reads, relative to the list, or a name of the planning catalogue, with columns ``seq``, ``batch``,
    ``precision`` and ``stack`` for what differs from the defaults of `makespan.throughput.planned_workload`.
    The plan of such a job is a layout such as ``tp4 pp2 mb1``, in the notation of tables, or empty for the
    fastest. The form of the Morphling artifact is recognised by its column ``submission_time``. Plans
    and workloads come back in canonical notation.

    Parameters
    ----------
    batch_of
        Returns the global batch of a workload with measurements of the user, and None for others (these must
        be in the zoo); for example `makespan.throughput.MeasuredSource.batch_of`.

    Raises
    ------
    MissingDataError, TraceError
        See `makespan.traces`; or a workload or plan is unknown, the degrees of a plan do not multiply
        to the GPUs, a number is missing, negative or not finite, or a name occurs twice.
    """
    findings: list[Finding] = []

    def form_of(names: list[str]) -> dict[str, str]:
        found = {name.lower() for name in names}
        is_artifact = not set(_needed(_CANONICAL)) <= found and "submission_time" in found
        return _MORPHLING if is_artifact else _CANONICAL

    def optional(names: list[str]) -> list[str]:
        known = (form[name] for form in (_CANONICAL, _MORPHLING) for name in _OPTIONAL if name in form)
        form = form_of(names)
        run = _RUN if form is _CANONICAL else ()
        return [*known, *run, *further_columns(names, [*form.values(), *run])]

    cells = read_cells(path, lambda names: _needed(form_of(names)), findings, optional=optional, hint=_hint)
    form = _CANONICAL if "submit_time_s" in cells else _MORPHLING
    return _job_trace(cells, form, str(path), findings, batch_of)


def _needed(form: dict[str, str]) -> list[str]:
    """Return the columns of a form without which jobs cannot be read."""
    return [column for name, column in form.items() if name not in _OPTIONAL]


def _hint(columns: list[str]) -> str:
    """Return advice if a list seems to have another format."""
    found = {name.lower() for name in columns}
    for name, signature in _FOREIGN.items():
        if signature <= found:
            return f"such columns are those of format {name} (--format {name})"
    # Formats without a header: the first line has cells of the first job.
    first = columns[0].strip() if columns else ""
    if first.startswith(("[", "{")):
        return "the file is JSON, as lists of Philly are (--format philly)"
    if any(name.startswith("python") for name in found):
        return "a command in the first line is that of a trace of Gavel (--format gavel)"
    if found & {"terminated", "failed", "running", "waiting"}:
        return "a state in the first line is that of a job table of Alibaba PAI (--format pai)"
    return ""


def _job_trace(
    cells: pd.DataFrame,
    columns: dict[str, str],
    where: str,
    findings: list[Finding],
    batch_of: BatchOf | None,
) -> JobTrace:
    report_further(cells, [*columns.values(), *(_RUN if columns is _CANONICAL else ())], findings)
    frame = pd.DataFrame({ROW: cells[ROW], "job_id": cells[columns["job_id"]]})
    first: dict[str, int] = {}
    for row, name in zip(frame[ROW], frame["job_id"], strict=True):
        if not name:
            raise cell_error(where, int(row), columns["job_id"], name, "a name")
        if name in first:
            accepted = f"names that occur once; row {first[name]} has the same"
            raise cell_error(where, int(row), columns["job_id"], name, accepted)
        first[name] = int(row)
    frame["submit_time_s"] = _required(
        cells, columns["submit_time_s"], where, "a time in s, 0 or more", 0, findings
    )
    for name, least in (("n_gpus", 1), ("n_cpus", 0), ("steps", 1)):
        accepted = f"a whole number, {least} or more"
        counts = _required(cells, columns[name], where, accepted, least, findings, is_whole=True)
        frame[name] = counts.astype("int64")
    frame["duration_s"] = math.nan
    if columns["duration_s"] in cells:
        frame["duration_s"] = numbers(
            cells, columns["duration_s"], where, "a time in s, 0 or more", least=0, findings=findings
        )
    repair(frame, frame["duration_s"].isna(), DURATION_MISSING, findings)
    frame["is_guaranteed"] = False
    if columns["is_guaranteed"] in cells:
        column = columns["is_guaranteed"]
        reject(cells, is_missing(cells[column]), column, FLAGS, where)
        frame["is_guaranteed"] = flags(cells, column, where)
    else:
        findings.append(Finding("repaired", NO_GUARANTEE))
    frame["tenant"] = cells[columns["tenant"]] if columns.get("tenant") in cells else ""
    if (frame["tenant"] != "").any():
        reason = "tenants have no effect, as there are no quotas; the table of outcomes has them"
        findings.append(Finding("ignored", reason))
    batches = {name: batch_of(name) for name in dict.fromkeys(cells[columns["workload"]]) if batch_of}
    measured = {name: batch for name, batch in batches.items() if batch is not None}
    keys = _keys(cells, columns, measured, where, findings)
    frame["workload"] = keys
    is_fastest = pd.Series(
        [not text and is_planned(key) for text, key in zip(cells[columns["plan"]], keys, strict=True)],
        index=frame.index,
    )
    repair(frame, is_fastest, NO_PLAN, findings)
    frame["plan"] = _plans(cells, columns["plan"], keys, measured, frame, where)
    ordered = in_order(frame, findings)
    report = finish_report(where, len(cells), len(frame), findings, kept=frame)
    return JobTrace(_specs(ordered), report, tuple(ordered[ROW].tolist()))


def _keys(
    cells: pd.DataFrame,
    columns: dict[str, str],
    measured: Mapping[str, int],
    where: str,
    findings: list[Finding],
) -> list[str]:
    """Return the workload of each row: a key of the zoo, of measurements, or of a model of the user."""
    stated = [name for name in _RUN if columns is _CANONICAL and name in cells]
    folder = Path() if where == "-" else Path(where).parent
    known: dict[tuple[str, ...], str] = {}
    keys: list[str] = []
    lacks: list[bool] = []
    facts = zip(*(cells[name] for name in (columns["workload"], *stated)), strict=True)
    for row, (name, *values) in zip(cells[ROW], facts, strict=True):
        run = {what: value for what, value in zip(stated, values, strict=True) if value}
        is_own = is_planned(name) or (bool(run) and name in model_names())
        lacks.append(is_own and len(run) < len(_RUN) and " seq" not in name)
        if (name, *values) in known:
            keys.append(known[name, *values])
            continue
        if name in measured and not is_in_zoo(name):
            keys.append(name)
            continue
        if run and not is_own:
            accepted = f"nothing in column {next(iter(run))!r}: it is for models of your own"
            raise cell_error(where, int(row), columns["workload"], name, accepted)
        try:
            key = _own_key(name, run, folder, where, int(row)) if is_own else resolve_workload_key(name)
        except UnknownNameError as error:
            if is_own:
                raise cell_error(where, int(row), columns["workload"], name, str(error)) from error
            accepted = ", ".join(workload_keys())
            accepted += "; a model of your own, as a file or one of " + ", ".join(model_names())
            accepted += "; or a workload with measurements of its own (source measured)"
            raise cell_error(where, int(row), columns["workload"], name, accepted) from error
        except (InputError, MissingDataError) as error:
            raise cell_error(where, int(row), columns["workload"], name, f"a model ({error})") from error
        keys.append(key)
        known[name, *values] = key
    repair(cells, pd.Series(lacks, index=cells.index), NO_RUN, findings)
    return keys


def _own_key(name: str, run: Mapping[str, str], folder: Path, where: str, row: int) -> str:
    """Return the key of a model of the user; a file is looked for beside the list first."""
    counts: dict[str, int] = {}
    for what in ("seq", "batch"):
        if what in run:
            count = whole(run[what])
            if not count:
                raise cell_error(where, row, what, run[what], "a whole number, 1 or more")
            counts[what] = count
    beside = folder / name.partition(" seq")[0]
    if name.partition(" seq")[0] not in model_names() and beside.exists():
        name = str(folder / name)
    return planned_workload(
        name,
        seq=counts.get("seq"),
        batch=counts.get("batch"),
        precision=run.get("precision"),
        stack_name=run.get("stack"),
    ).key


def _specs(table: pd.DataFrame) -> tuple[JobSpec, ...]:
    specs = []
    for row in table[JOBS.names].itertuples(index=False, name=None):
        values: dict[str, Any] = dict(zip(JOBS.names, row, strict=True))
        if math.isnan(values["duration_s"]):
            values["duration_s"] = None
        specs.append(JobSpec(**values))
    return tuple(specs)


def _required(
    cells: pd.DataFrame,
    column: str,
    where: str,
    accepted: str,
    least: float,
    findings: list[Finding],
    *,
    is_whole: bool = False,
) -> "pd.Series[float]":
    reject(cells, is_missing(cells[column]), column, accepted, where)
    return numbers(cells, column, where, accepted, least=least, is_whole=is_whole, findings=findings)


def _plans(
    cells: pd.DataFrame,
    column: str,
    keys: list[str],
    measured: Mapping[str, int],
    frame: pd.DataFrame,
    where: str,
) -> list[str]:
    """Read the plans; CPU threads in the text of a plan must agree with those of the row, if it has any."""
    known: dict[tuple[str, str, int, int], str] = {}  # long traces repeat few different requests
    requests = list(zip(cells[column], keys, frame["n_gpus"], frame["n_cpus"], strict=True))
    for row, request in zip(cells[ROW], requests, strict=True):
        if request in known:
            continue
        text, key, gpus, cpus = request
        if is_planned(key):
            batch = planned_workload(key).training.global_batch
            try:
                requested_label(text, int(gpus), batch)
            except InputError as error:
                accepted = f"{FASTEST}, a layout such as tp4 pp2 mb1, or {PLAN_TEXTS} ({error})"
                raise cell_error(where, int(row), column, text, accepted) from error
            known[request] = text or FASTEST
            continue
        batch = measured[key] if key in measured else workload(key).global_batch_size
        usual = int(cpus) // int(gpus) or DEFAULT_CPU_THREADS
        try:
            plan = read_plan(text, n_gpus=int(gpus), global_batch_size=batch, cpu_threads=usual)
            stated = stated_cpu_threads(text)
        except NotationError as error:
            raise cell_error(where, int(row), column, text, f"{PLAN_TEXTS} ({error})") from error
        except InputError as error:
            accepted = f"degrees that multiply to the GPUs, {gpus}, and split the batch of the job ({error})"
            raise cell_error(where, int(row), column, text, accepted) from error
        if stated is not None and cpus and stated != usual:
            accepted = f"{usual} CPU threads per GPU: the row requests {cpus} CPU threads for {gpus} GPU(s)"
            raise cell_error(where, int(row), column, text, accepted)
        # The suffix stays only where no column says the same.
        known[request] = write_plan(plan, cpu_threads=0 if stated and not cpus else usual)
    return [known[request] for request in requests]
