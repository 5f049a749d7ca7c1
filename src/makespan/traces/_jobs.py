"""Job traces that name models and plans: the canonical table and the Morphling artifact's lists."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from makespan.errors import InputError, cell_error
from makespan.plans import DEFAULT_CPU_THREADS, PLAN_TEXTS, read_plan, stated_cpu_threads, write_plan
from makespan.tables import JOBS
from makespan.traces._cells import (
    ROW,
    Finding,
    ReadReport,
    finish_report,
    in_order,
    is_missing,
    numbers,
    read_cells,
    refuse,
    repair,
)
from makespan.workloads import JobSpec, resolve_workload_key, workload, workload_keys

__all__ = ["JobTrace", "jobs_table", "read_jobs", "read_morphling_jobs"]

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
_SHOWN = 5
_TRUE, _FALSE = ("1", "1.0", "true"), ("0", "0.0", "false")


@dataclass(frozen=True, slots=True)
class JobTrace:
    """A job trace that can be simulated, in order of submission, and how it was read or made."""

    jobs: tuple[JobSpec, ...]
    report: ReadReport
    rows: tuple[int, ...] = ()  # data row of each job in its file, for messages; empty if there is none


def jobs_table(jobs: Iterable[JobSpec]) -> pd.DataFrame:
    """Return jobs as a table of schema `JOBS`."""
    rows = [[getattr(job, name) for name in JOBS.names] for job in jobs]
    table = pd.DataFrame(rows, columns=JOBS.names)
    return JOBS.validate(table.astype({"duration_s": "float64"}), where="jobs")


def read_morphling_jobs(path: str | Path) -> JobTrace:
    """Read a job list of the Morphling artifact; raises as `read_jobs`.

    Columns ``name, submission_time`` [s], ``duration`` [s], ``application, num_gpus, num_cpus,
    exec_plan, steps, is_sla``; other columns such as ``bandwidth`` have no effect, which is
    reported. A missing duration is
    accepted, because the steps decide how long a job runs.
    """
    findings: list[Finding] = []
    cells = read_cells(path, lambda names: [*_MORPHLING.values(), *_further(names, _MORPHLING)], findings)
    return _job_trace(cells, _MORPHLING, str(path), findings)


def read_jobs(path: str | Path) -> JobTrace:
    """Read a job trace that names models and plans, in either of two forms.

    The canonical form has the columns of `JOBS`; the form of the Morphling artifact is recognised
    by its column ``submission_time``. Plans and workloads come back in canonical notation.

    Raises
    ------
    MissingDataError, TraceError
        See `makespan.traces`; or a workload or plan is unknown, the degrees of a plan do not multiply
        to the GPUs, a number is missing, negative or not finite, or a name occurs twice.
    """
    findings: list[Finding] = []

    def columns(names: list[str]) -> list[str]:
        is_artifact = not set(JOBS.names) <= set(names) and "submission_time" in names
        form = _MORPHLING if is_artifact else _CANONICAL
        return [*form.values(), *_further(names, form)]

    cells = read_cells(path, columns, findings)
    form = _CANONICAL if "submit_time_s" in cells else _MORPHLING
    return _job_trace(cells, form, str(path), findings)


def _further(names: Iterable[str], form: dict[str, str]) -> list[str]:
    """Return the columns that a form does not know, without those whose name occurs twice or is empty."""
    listed = list(names)
    return [name for name in listed if name and name not in form.values() and listed.count(name) == 1]


def _report_further(cells: pd.DataFrame, form: dict[str, str], findings: list[Finding]) -> None:
    """Report columns that have no effect, unless all their cells are 0 or empty."""
    further = [name for name in cells if name not in (*form.values(), ROW)]
    told = [name for name in further if not (is_missing(cells[name]) | cells[name].isin(_FALSE)).all()]
    if told:
        names = ", ".join(repr(str(name)) for name in told[:_SHOWN]) + (", ..." if len(told) > _SHOWN else "")
        findings.append(Finding("ignored", f"columns that have no effect: {names}"))


def _job_trace(cells: pd.DataFrame, columns: dict[str, str], where: str, findings: list[Finding]) -> JobTrace:
    _report_further(cells, columns, findings)
    frame = pd.DataFrame({ROW: cells[ROW], "job_id": cells[columns["job_id"]]})
    _check_names(frame, columns["job_id"], where)
    frame["submit_time_s"] = _required(cells, columns["submit_time_s"], where, "a time in s, 0 or more", 0)
    for name, least in (("n_gpus", 1), ("n_cpus", 0), ("steps", 1)):
        frame[name] = _counts(cells, columns[name], where, least)
    frame["duration_s"] = numbers(cells, columns["duration_s"], where, "a time in s, 0 or more", least=0)
    repair(frame, frame["duration_s"].isna(), "duration missing; the steps decide", findings)
    frame["is_guaranteed"] = _flags(cells, columns["is_guaranteed"], where)
    frame["tenant"] = cells[columns["tenant"]] if "tenant" in columns else ""
    keys = _workloads(cells, columns["workload"], where)
    frame["workload"] = keys
    frame["plan"] = _plans(cells, columns["plan"], keys, frame, where)
    ordered = in_order(frame, findings)
    report = finish_report(where, len(cells), len(frame), findings)
    specs = tuple(_spec(row) for row in ordered[JOBS.names].itertuples(index=False, name=None))
    return JobTrace(specs, report, tuple(ordered[ROW].tolist()))


def _spec(row: tuple[object, ...]) -> JobSpec:
    values: dict[str, Any] = dict(zip(JOBS.names, row, strict=True))
    if math.isnan(values["duration_s"]):
        values["duration_s"] = None
    return JobSpec(**values)


def _check_names(frame: pd.DataFrame, column: str, where: str) -> None:
    first: dict[str, int] = {}
    for row, name in zip(frame[ROW], frame["job_id"], strict=True):
        if not name:
            raise cell_error(where, int(row), column, name, "a name")
        if name in first:
            accepted = f"names that occur once; row {first[name]} has the same"
            raise cell_error(where, int(row), column, name, accepted)
        first[name] = int(row)


def _required(
    cells: pd.DataFrame, column: str, where: str, accepted: str, least: float, *, is_whole: bool = False
) -> "pd.Series[float]":
    refuse(cells, is_missing(cells[column]), column, accepted, where)
    return numbers(cells, column, where, accepted, least=least, is_whole=is_whole)


def _counts(cells: pd.DataFrame, column: str, where: str, least: int) -> "pd.Series[int]":
    accepted = f"a whole number, {least} or more"
    return _required(cells, column, where, accepted, least, is_whole=True).astype("int64")


def _flags(cells: pd.DataFrame, column: str, where: str) -> "pd.Series[bool]":
    text = cells[column].str.lower()
    refuse(cells, ~text.isin([*_TRUE, *_FALSE]), column, "0 or 1, true or false", where)
    return text.isin(_TRUE)


def _workloads(cells: pd.DataFrame, column: str, where: str) -> list[str]:
    keys = []
    for row, name in zip(cells[ROW], cells[column], strict=True):
        try:
            keys.append(resolve_workload_key(name))
        except InputError as error:
            raise cell_error(where, int(row), column, name, ", ".join(workload_keys())) from error
    return keys


def _plans(cells: pd.DataFrame, column: str, keys: list[str], frame: pd.DataFrame, where: str) -> list[str]:
    """Read the plans; one that names its CPU threads must agree with those requested, if any are."""
    known: dict[tuple[str, str, int, int], str] = {}
    requests = list(zip(cells[column], keys, frame["n_gpus"], frame["n_cpus"], strict=True))
    for row, request in zip(cells[ROW], requests, strict=True):
        if request in known:
            continue
        text, key, gpus, cpus = request
        batch, usual = workload(key).global_batch_size, int(cpus) // int(gpus) or DEFAULT_CPU_THREADS
        try:
            plan = read_plan(text, n_gpus=int(gpus), global_batch_size=batch, cpu_threads=usual)
            stated = stated_cpu_threads(text)
        except InputError as error:
            raise cell_error(where, int(row), column, text, f"{PLAN_TEXTS} ({error})") from error
        if stated is not None and cpus and stated != usual:
            accepted = f"{usual} CPU threads per GPU: the row requests {cpus} CPU threads for {gpus} GPU(s)"
            raise cell_error(where, int(row), column, text, accepted)
        # The suffix stays only where no column says the same.
        known[request] = write_plan(plan, cpu_threads=0 if stated and not cpus else usual)
    return [known[request] for request in requests]
