"""Readers of public traces whose jobs have parts: attempts in Philly, tasks and instances in PAI.

Formats: the data descriptions of Jeon et al., "Analysis of Large-Scale Multi-Tenant GPU Clusters", ATC 2019
(nested JSON; an open end of the last attempt means that the job still ran when the trace was taken), and of
Weng et al., "MLaaS in the Wild", NSDI 2022 (CPU and GPU requests are percentages of one device and hold for
each instance of a task; the files come without header line, one with the published names is accepted).
"""

import json
import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pandas as pd

from makespan.errors import TraceError, cell_error
from makespan.traces._cells import (
    ROW,
    TIME,
    Finding,
    ReadReport,
    drop,
    finish_report,
    is_time,
    iter_cells,
    names,
    numbers,
    one_of,
    read_cells,
    read_raw,
    repair,
    unique_counts,
)
from makespan.traces._requests import RequestTrace, finish_requests, whole

__all__ = [
    "PAI_MACHINE",
    "PHILLY_MACHINE",
    "read_pai_jobs",
    "read_pai_machines",
    "read_philly_jobs",
    "read_philly_machines",
]

_PASSED = ("Pass", "Killed", "Failed")
_MISSING = (None, "", "None", "null")
_JOB_KEYS = "jobid, status, vc, submitted_time, attempts"
PHILLY_MACHINE: tuple[str, ...] = ("machineId", "number of GPUs", "single GPU mem")

_JOB = ("job_name", "inst_id", "user", "status", "start_time", "end_time")
_TASK = (
    "job_name", "task_name", "inst_num", "status", "start_time", "end_time",
    "plan_cpu", "plan_mem", "plan_gpu", "gpu_type",
)  # fmt: skip
_INSTANCE = (
    "job_name", "task_name", "inst_name", "worker_name", "inst_id", "status",
    "start_time", "end_time", "machine",
)  # fmt: skip
PAI_MACHINE: tuple[str, ...] = ("machine", "gpu_type", "cap_cpu", "cap_mem", "cap_gpu")
_STATUSES = ("Terminated", "Failed", "Running", "Waiting")
_PERCENT = 100.0
_ROUNDING = 1e-9
_CHUNK_ROWS = 1_000_000
_SECONDS = "a time in seconds, or nothing"


# --- Philly -----------------------------------------------------------------------------------------


def read_philly_jobs(
    path: str | Path, *, machines: Mapping[str, int] | None = None, keep_cancelled: bool = False
) -> RequestTrace:
    """Read the job log of the Philly trace (``cluster_job_log``); the tenant is the virtual cluster.

    The duration is the sum over complete attempts; the GPUs are those of the last attempt. With ``machines``
    (GPUs of each, see `read_philly_machines`), jobs on unknown machines or on more GPUs of a machine than it
    has are dropped; ``keep_cancelled`` keeps jobs that their user killed.
    """
    where, findings = str(path), list[Finding]()
    entries = _entries(read_raw(path, findings), where)
    frame = pd.DataFrame([_row(number, entry, machines, where) for number, entry in enumerate(entries, 1)])
    frame = drop(frame, frame["n_attempts"] == 0, "no scheduling attempt", findings)
    frame = drop(frame, frame["is_open"], "running at the end of the trace", findings)
    if not keep_cancelled:
        frame = drop(frame, frame["status"] == "Killed", "cancelled", findings)
    frame = drop(frame, frame["unknown_machine"], "machines contradict the machine list", findings)
    usable = frame["duration_s"] >= 0
    for column, reason in (
        ("n_incomplete", "an attempt lacks its start or end; it is left out"),
        ("n_reversed", "an attempt ends before it starts; it is left out"),
        ("changes_gpus", "attempts differ in their GPUs; those of the last one are taken"),
    ):
        repair(frame, (frame[column] > 0) & usable, reason, findings)
    columns = ["job_id", "submit_time_s", "n_gpus", "n_cpus", "duration_s", "tenant", "status", ROW]
    return finish_requests(frame[columns], findings, where, len(entries))


def _entries(text: str, where: str) -> list[Any]:
    try:
        entries = json.loads(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise TraceError(f"{where}: {place}: no JSON: {error.msg}") from None
    except (ValueError, RecursionError):
        accepted = "lists within lists as the authors write them"
        raise TraceError(f"{where}: nested too deeply or numbers too long; accepted: {accepted}") from None
    if not isinstance(entries, list) or not entries:
        raise TraceError(f"{where}: found {type(entries).__name__}; accepted: a JSON list with a job or more")
    return entries


def _row(row: int, entry: Any, machines: Mapping[str, int] | None, where: str) -> dict[str, object]:
    if not isinstance(entry, dict):
        raise cell_error(where, row, "job", entry, f"an object with {_JOB_KEYS}")
    for key in ("jobid", "status", "submitted_time", "attempts"):
        if key not in entry:
            raise cell_error(where, row, key, "nothing", _JOB_KEYS)
    if not isinstance(entry["jobid"], str | int) or entry["jobid"] == "":
        raise cell_error(where, row, "jobid", entry["jobid"], "a name")
    if entry["status"] not in _PASSED:
        raise cell_error(where, row, "status", entry["status"], ", ".join(_PASSED))
    attempts = entry["attempts"] or []
    if not isinstance(attempts, list) or not all(isinstance(attempt, dict) for attempt in attempts):
        accepted = "a list of objects with start_time, end_time, detail"
        raise cell_error(where, row, "attempts", attempts, accepted)
    return {
        "job_id": str(entry["jobid"]),
        "submit_time_s": _time(row, "submitted_time", entry["submitted_time"], where),
        "n_cpus": 0,
        "tenant": str(entry.get("vc") or ""),
        "status": entry["status"],
        "n_attempts": len(attempts),
        ROW: row,
        **_attempts(row, attempts, machines, where),
    }


def _attempts(
    row: int, attempts: Sequence[dict[str, Any]], machines: Mapping[str, int] | None, where: str
) -> dict[str, object]:
    """Add up the attempts of one job."""
    spans = [
        [_time(row, name, attempt.get(name), where) for name in ("start_time", "end_time")]
        for attempt in attempts
    ]
    lengths = [end - start for start, end in spans if start == start and end == end]
    forward = [length for length in lengths if length >= 0]
    held = [_gpus(row, attempt, where) for attempt in attempts]
    counts = [sum(gpus.values()) for gpus in held]
    parts = [part for gpus in held for part in gpus.items()]
    return {
        "n_gpus": counts[-1] if counts else 0,
        "duration_s": sum(forward) if forward else lengths[0] if lengths else math.nan,
        "is_open": bool(spans) and not math.isnan(spans[-1][0]) and math.isnan(spans[-1][1]),
        "n_incomplete": len(spans) - len(lengths),
        "n_reversed": len(lengths) - len(forward),
        "changes_gpus": len(set(counts)) > 1,
        "unknown_machine": machines is not None and any(n > machines.get(name, 0) for name, n in parts),
    }


def _gpus(row: int, attempt: Mapping[str, Any], where: str) -> dict[str, int]:
    """Count the distinct GPUs of an attempt on each machine."""
    found: dict[str, set[str]] = {}
    detail = attempt.get("detail") or []
    try:
        for part in detail:
            found.setdefault(str(part["ip"]), set()).update(str(gpu) for gpu in part["gpus"])
    except (TypeError, KeyError):
        raise cell_error(where, row, "detail", detail, "a list of objects with ip and gpus") from None
    return {name: len(gpus) for name, gpus in found.items()}


def _time(row: int, column: str, value: object, where: str) -> float:
    """Return a time of the trace in seconds, NaN where it is missing."""
    if value in _MISSING:
        return math.nan
    if isinstance(value, str) and is_time(value):
        try:
            return (datetime.fromisoformat(value) - datetime(1970, 1, 1)).total_seconds()
        except ValueError:
            pass  # formed like a time, but there is no such day or hour
    raise cell_error(where, row, column, value, f"{TIME}, or null")


def read_philly_machines(path: str | Path) -> tuple[dict[str, int], ReadReport]:
    """Read the machine list of the Philly trace (``cluster_machine_list``): GPUs by machine, and the report.

    A machine that occurs with two counts is refused.
    """
    where, findings = str(path), list[Finding]()
    cells = read_cells(path, PHILLY_MACHINE, findings, header=PHILLY_MACHINE)
    name, count, _ = PHILLY_MACHINE
    machines = unique_counts(cells, name, count, where)
    kept = drop(cells, cells[name].duplicated(), "machine occurs again with the same GPUs", findings)
    return machines, finish_report(where, len(cells), len(kept), findings)


# --- PAI --------------------------------------------------------------------------------------------


def read_pai_jobs(
    jobs: str | Path,
    tasks: str | Path,
    instances: str | Path | None = None,
    *,
    machines: dict[str, int] | None = None,
) -> RequestTrace:
    """Read the PAI tables into one row a job; the tenant is the user.

    The GPUs of a job are the sum over its tasks of instances times request, rounded up to whole
    devices. It holds them from the first start to the last end of its instances, or of its tasks
    where the instance table is not given.

    The files are ``pai_job_table``, ``pai_task_table`` and, optionally, ``pai_instance_table``; with the last
    and ``machines`` (GPUs of each, see `read_pai_machines`), jobs on unknown machines are dropped.
    """
    where, findings = str(jobs), list[Finding]()
    cells = read_cells(jobs, _JOB, findings, header=_JOB)
    status = one_of(cells, "status", _STATUSES, where)
    requests = _requests(tasks, findings)
    spans = _spans(instances, _INSTANCE, findings) if instances else _spans(tasks, _TASK, [])
    frame = pd.DataFrame(
        {
            "job_id": names(cells, "job_name", where),
            "submit_time_s": numbers(cells, "start_time", where, _SECONDS, least=0),
            "end_s": numbers(cells, "end_time", where, _SECONDS, least=0),
            "tenant": cells["user"],
            "status": status,
            ROW: cells[ROW],
        }
    )
    frame = frame.join(requests, on="job_id").join(spans, on="job_id")
    frame = drop(frame, frame["status"] == "Running", "running at the end of the trace", findings)
    frame = drop(frame, frame["status"] == "Waiting", "never started", findings)
    frame = drop(frame, frame["n_gpus"].isna(), "no task of that job in the task table", findings)
    if machines is not None and instances is not None:
        known = frame["machines"].map(lambda names: isinstance(names, frozenset) and names <= set(machines))
        frame = drop(frame, ~known.astype(bool), "machines contradict the machine table", findings)
    frame = _held(frame, findings)
    rounded = whole(frame, "n_gpus", where)
    shared = (rounded - frame["n_gpus"]) > _ROUNDING
    repair(frame, shared, "asks for a part of a GPU; rounded up to whole ones", findings)
    return finish_requests(frame.assign(n_gpus=rounded), findings, where, len(cells))


def _requests(path: str | Path, findings: list[Finding]) -> pd.DataFrame:
    """Sum the requests of the tasks of each job [devices]."""
    where = str(path)
    cells = read_cells(path, _TASK, findings, header=_TASK)
    count = numbers(cells, "inst_num", where, "a number of instances, 0 or more", least=0).fillna(1)
    gpu = numbers(cells, "plan_gpu", where, "percent of a GPU, 0 or more", least=0).fillna(0)
    cpu = numbers(cells, "plan_cpu", where, "percent of a CPU, 0 or more", least=0).fillna(0)
    asked = pd.DataFrame({"n_gpus": gpu * count / _PERCENT, "n_cpus": cpu * count / _PERCENT})
    return asked.groupby(cells["job_name"]).sum()


def _spans(path: str | Path, header: tuple[str, ...], findings: list[Finding]) -> pd.DataFrame:
    """Find first start, last end and machines of each job in a table of tasks or instances."""
    wanted = [name for name in ("job_name", "start_time", "end_time", "machine") if name in header]
    pieces = [
        _piece_spans(cells, str(path))
        for cells in iter_cells(path, wanted, findings, header=header, chunk_rows=_CHUNK_ROWS)
    ]
    grouped = pd.concat(pieces).groupby("job_name")
    spans = grouped.agg({"first_s": "min", "last_s": "max"})
    if "machines" in pieces[0]:
        unions = {job: frozenset().union(*names) for job, names in grouped["machines"]}
        spans["machines"] = pd.Series(unions, dtype=object)
    return spans


def _piece_spans(cells: pd.DataFrame, where: str) -> pd.DataFrame:
    times = pd.DataFrame(
        {
            "first_s": numbers(cells, "start_time", where, _SECONDS, least=0),
            "last_s": numbers(cells, "end_time", where, _SECONDS, least=0),
        }
    )
    # A start or end of zero stands for a time that was not recorded.
    grouped = times.mask(times == 0.0).groupby(cells["job_name"])
    spans = grouped.agg({"first_s": "min", "last_s": "max"})
    if "machine" in cells:
        sets = {job: frozenset(names) for job, names in cells.groupby("job_name")["machine"]}
        spans["machines"] = pd.Series(sets, dtype=object)
    return spans


def _held(frame: pd.DataFrame, findings: list[Finding]) -> pd.DataFrame:
    """Take the held time from instances or tasks, and from the job where they say nothing."""
    start = frame["first_s"].fillna(frame["submit_time_s"])
    end = frame["last_s"].fillna(frame["end_s"])
    guessed = (frame["first_s"].isna() | frame["last_s"].isna()) & start.notna() & end.notna()
    repair(frame, guessed, "parts lack their start or end; those of the job are taken", findings)
    gone = ["first_s", "last_s", "end_s", "machines"]
    return frame.assign(duration_s=end - start).drop(columns=gone, errors="ignore")


def read_pai_machines(path: str | Path) -> dict[str, int]:
    """Read the machine table (``pai_machine_spec``): GPUs by machine; two counts of one are refused."""
    cells = read_cells(path, PAI_MACHINE, [], header=PAI_MACHINE)
    return unique_counts(cells, "machine", "cap_gpu", str(path))
