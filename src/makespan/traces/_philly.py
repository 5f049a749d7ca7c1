"""Reader of the Philly trace: nested JSON, one entry a job with all its scheduling attempts.

Format: the data description of Jeon et al., "Analysis of Large-Scale Multi-Tenant GPU Clusters
for DNN Training Workloads", ATC 2019. An attempt may lack its start or end; an open end of the
last attempt means that the job still ran when the trace was taken.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pandas as pd

from makespan.errors import TraceError
from makespan.traces._files import cell_error, numbers, read_cells, read_raw
from makespan.traces._report import ROW, Finding, ReadReport, drop, finish_report, repair
from makespan.traces._requests import RequestTrace, finish_requests

__all__ = ["read_philly_jobs", "read_philly_machines"]

_STATUSES = ("Pass", "Killed", "Failed")
_MISSING = (None, "", "None", "null")
_MACHINE_HEADER = ("machineId", "number of GPUs", "single GPU mem")
_TIME_ACCEPTED = "a time such as 2017-10-07 01:12:09, or null"


@dataclass(frozen=True, slots=True)
class _Attempts:
    """What the attempts of one job add up to."""

    n_gpus: int = 0
    duration_s: float = float("nan")
    is_open: bool = False
    n_incomplete: int = 0
    n_reversed: int = 0
    changes_gpus: bool = False
    unknown_machine: bool = False


def read_philly_jobs(
    path: str | Path, *, machines: Mapping[str, int] | None = None, keep_cancelled: bool = False
) -> RequestTrace:
    """Read the job log of the Philly trace (``cluster_job_log``).

    The duration is the sum over complete attempts; the GPUs are those of the last attempt.

    Parameters
    ----------
    path
        The JSON file.
    machines
        GPUs of each machine, see `read_philly_machines`; if given, jobs on unknown machines or on
        more GPUs of a machine than it has are dropped.
    keep_cancelled
        Whether jobs that their user killed are kept.

    Returns
    -------
    RequestTrace
        The tenant is the virtual cluster.

    Raises
    ------
    MissingDataError
        There is no such file.
    TraceError
        The file is empty or no JSON list of jobs, a value cannot be read, or no job is left.
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
        raise TraceError(
            f"{where}: line {error.lineno}, column {error.colno}: no JSON: {error.msg}"
        ) from None
    if not isinstance(entries, list) or not entries:
        raise TraceError(f"{where}: found {type(entries).__name__}; accepted: a JSON list with a job or more")
    return entries


def _row(row: int, entry: Any, machines: Mapping[str, int] | None, where: str) -> dict[str, object]:
    if not isinstance(entry, dict):
        raise cell_error(
            where, row, "job", entry, "an object with jobid, status, vc, submitted_time, attempts"
        )
    for key in ("jobid", "status", "submitted_time", "attempts"):
        if key not in entry:
            raise cell_error(where, row, key, "nothing", "jobid, status, vc, submitted_time, attempts")
    if entry["status"] not in _STATUSES:
        raise cell_error(where, row, "status", entry["status"], ", ".join(_STATUSES))
    attempts = entry["attempts"] or []
    if not isinstance(attempts, list) or not all(isinstance(attempt, dict) for attempt in attempts):
        raise cell_error(
            where, row, "attempts", attempts, "a list of objects with start_time, end_time, detail"
        )
    found = _attempts(row, attempts, machines, where)
    return {
        "job_id": str(entry["jobid"]),
        "submit_time_s": _time(row, "submitted_time", entry["submitted_time"], where),
        "n_cpus": 0,
        "tenant": str(entry.get("vc") or ""),
        "status": entry["status"],
        "n_attempts": len(attempts),
        ROW: row,
        **{name: getattr(found, name) for name in _Attempts.__slots__},
    }


def _attempts(
    row: int, attempts: Sequence[dict[str, Any]], machines: Mapping[str, int] | None, where: str
) -> _Attempts:
    if not attempts:
        return _Attempts()
    spans = [
        (
            _time(row, "start_time", attempt.get("start_time"), where),
            _time(row, "end_time", attempt.get("end_time"), where),
        )
        for attempt in attempts
    ]
    lengths = [end - start for start, end in spans if start == start and end == end]
    forward = [length for length in lengths if length >= 0]
    held = [_gpus(row, attempt, where) for attempt in attempts]
    counts = [sum(gpus.values()) for gpus in held]
    return _Attempts(
        n_gpus=counts[-1],
        duration_s=sum(forward) if forward else (lengths[0] if lengths else float("nan")),
        is_open=spans[-1][0] == spans[-1][0] and spans[-1][1] != spans[-1][1],
        n_incomplete=len(spans) - len(lengths),
        n_reversed=len(lengths) - len(forward),
        changes_gpus=len(set(counts)) > 1,
        unknown_machine=machines is not None
        and any(count > machines.get(name, 0) for gpus in held for name, count in gpus.items()),
    )


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
        return float("nan")
    try:
        return (datetime.fromisoformat(str(value)) - datetime(1970, 1, 1)).total_seconds()
    except (ValueError, TypeError):
        raise cell_error(where, row, column, value, _TIME_ACCEPTED) from None


def read_philly_machines(path: str | Path) -> tuple[dict[str, int], ReadReport]:
    """Read the machine list of the Philly trace (``cluster_machine_list``).

    Parameters
    ----------
    path
        CSV file with or without header: machine, number of GPUs, memory of one GPU.

    Returns
    -------
    tuple
        GPUs of each machine, and the report.

    Raises
    ------
    MissingDataError
        There is no such file.
    TraceError
        The file is empty, a count cannot be read, or a machine occurs with two counts.
    """
    where, findings = str(path), list[Finding]()
    cells = read_cells(path, _MACHINE_HEADER, findings, header=_MACHINE_HEADER)
    counts = numbers(cells, _MACHINE_HEADER[1], where, "a number of GPUs, 0 or more", least=0).fillna(0)
    machines: dict[str, int] = {}
    for row, name, count in zip(cells[ROW], cells[_MACHINE_HEADER[0]], counts, strict=True):
        if machines.setdefault(name, int(count)) != int(count):
            accepted = f"{machines[name]} as in an earlier row of machine {name!r}"
            raise cell_error(where, int(row), _MACHINE_HEADER[1], int(count), accepted)
    again = cells[_MACHINE_HEADER[0]].duplicated()
    kept = drop(cells, again, "machine occurs again with the same GPUs", findings)
    return machines, finish_report(where, len(cells), len(kept), findings)
