"""Readers of public traces whose jobs have parts: attempts in Philly, tasks and instances in PAI.

Formats: the data descriptions of Jeon et al., "Analysis of Large-Scale Multi-Tenant GPU Clusters", ATC 2019
(nested JSON; an open end of the last attempt means that the job still ran when the trace was taken), and of
Weng et al., "MLaaS in the Wild", NSDI 2022 (CPU and GPU requests are percentages of one device and hold for
each instance of a task; the files come without header line, one with the published names is accepted).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from makespan.errors import TraceError, cell_error
from makespan.traces._cells import (
    ROW,
    Finding,
    ReadReport,
    drop,
    finish_report,
    is_missing,
    iter_cells,
    names,
    numbers,
    one_of,
    read_cells,
    read_raw,
    repair,
    times,
    unique_counts,
)
from makespan.traces._repairs import (
    CANCELLED,
    GPU_CHANGES,
    GPU_REQUEST_MISSING,
    MACHINES,
    NO_TASK,
    NODE_AGAIN,
    PART_REVERSED,
    PART_UNTIMED,
    RUNNING,
    UNSTARTED,
)
from makespan.traces._requests import RequestTrace, finish_requests

__all__ = [
    "PAI_MACHINE",
    "PHILLY_MACHINE",
    "read_pai_jobs",
    "read_pai_machines",
    "read_philly_jobs",
    "read_philly_machines",
]

_PASSED = ("Pass", "Killed", "Failed")
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
_UNFINISHED = {"Running": RUNNING, "Waiting": UNSTARTED}
_PERCENT = 100.0
_SPAN: dict[str, Any] = {"first_s": "min", "last_s": "max", "has_reversed": "any", "has_untimed": "any"}
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
    frame = pd.DataFrame([_row(number, entry, where) for number, entry in enumerate(entries, 1)])
    attempts = pd.DataFrame(
        _attempts(entries, machines, where), columns=[ROW, "start_time", "end_time", "n_gpus", "is_unknown"]
    ).astype({"start_time": "str", "end_time": "str", "n_gpus": "int64", "is_unknown": bool})
    stamps = [(frame, "submitted_time"), (attempts, "start_time"), (attempts, "end_time")]
    submit_s, start_s, end_s = times(stamps, where, findings)
    length_s = end_s - start_s
    attempts = attempts.assign(
        start_s=start_s.where(length_s >= 0),
        is_incomplete=length_s.isna(),
        is_reversed=length_s < 0,
        forward_s=length_s.where(length_s >= 0),
        length_s=length_s,
        is_open=start_s.notna() & end_s.isna(),
    )
    of_job = attempts.groupby(ROW)
    parts = of_job.agg(
        n_gpus=("n_gpus", "last"),
        n_counts=("n_gpus", "nunique"),
        start_s=("start_s", "min"),
        length_s=("length_s", "first"),
        is_incomplete=("is_incomplete", "any"),
        is_reversed=("is_reversed", "any"),
        is_open=("is_open", "last"),
        is_unknown=("is_unknown", "any"),
    )
    parts = parts.assign(forward_s=of_job["forward_s"].sum(min_count=1))
    frame = frame.assign(submit_time_s=submit_s).join(parts, on=ROW)
    flags = ("is_incomplete", "is_reversed", "is_open", "is_unknown")
    frame = frame.assign(
        # Where every attempt is reversed, the sum of none says less than the first of them.
        duration_s=frame["forward_s"].fillna(frame["length_s"]),
        n_gpus=frame["n_gpus"].fillna(0),
        **{name: frame[name].eq(True) for name in flags},
    )
    outcome: pd.Series[Any] = pd.Series(np.nan, index=frame.index, dtype=object)
    outcome = outcome.mask(frame["status"] == "Killed", CANCELLED).mask(frame["is_open"], RUNNING)
    frame = frame.assign(outcome=outcome.mask(frame["n_counts"].isna(), UNSTARTED))
    is_out = frame["outcome"].isin((UNSTARTED, RUNNING)) | ((frame["outcome"] == CANCELLED) & ~keep_cancelled)
    frame = drop(frame, ~is_out & frame["is_unknown"], MACHINES, findings)
    usable = (frame["duration_s"] >= 0) & ~is_out[frame.index]
    for wrong, reason in (
        (frame["is_incomplete"], PART_UNTIMED),
        (frame["is_reversed"], PART_REVERSED),
        (frame["n_counts"] > 1, GPU_CHANGES),
    ):
        repair(frame, wrong & usable, reason, findings)
    columns = [
        "job_id", "submit_time_s", "n_gpus", "n_cpus", "duration_s", "tenant", "status", "outcome", "start_s",
        ROW,
    ]  # fmt: skip
    return finish_requests(frame[columns], findings, where, len(entries), keep_cancelled=keep_cancelled)


def _entries(text: str, where: str) -> list[Any]:
    n_above = 0
    try:
        try:
            entries = json.loads(text)
        except json.JSONDecodeError as error:
            if error.msg != "Extra data" or not text.lstrip().startswith("{"):
                raise
            entries = []  # one object a line, as large logs are kept
            for line in text.splitlines():
                entries += [json.loads(line)] if line.strip() else []
                n_above += 1
    except json.JSONDecodeError as error:
        place = f"line {n_above + error.lineno}, column {error.colno}"
        raise TraceError(f"{where}: {place}: no JSON: {error.msg}") from None
    except (ValueError, RecursionError):
        accepted = "lists within lists as the authors write them"
        raise TraceError(f"{where}: nested too deeply or numbers too long; accepted: {accepted}") from None
    if not isinstance(entries, list) or not entries:
        raise TraceError(f"{where}: found {type(entries).__name__}; accepted: a JSON list with a job or more")
    return entries


def _row(row: int, entry: Any, where: str) -> dict[str, object]:
    if not isinstance(entry, dict):
        raise cell_error(where, row, "job", entry, f"an object with {_JOB_KEYS}")
    for key in ("jobid", "status", "submitted_time", "attempts"):
        if key not in entry:
            raise cell_error(where, row, key, "nothing", _JOB_KEYS)
    if not isinstance(entry["jobid"], str | int) or entry["jobid"] == "":
        raise cell_error(where, row, "jobid", entry["jobid"], "a name")
    status = {name.lower(): name for name in _PASSED}.get(str(entry["status"]).lower())
    if status is None:
        raise cell_error(where, row, "status", entry["status"], ", ".join(_PASSED))
    return {
        "job_id": str(entry["jobid"]),
        "submitted_time": _stamp(entry["submitted_time"]),
        "n_cpus": 0,
        "tenant": str(entry.get("vc") or ""),
        "status": status,
        ROW: row,
    }


def _attempts(
    entries: Sequence[dict[str, Any]], machines: Mapping[str, int] | None, where: str
) -> Iterator[tuple[int, str, str, int, bool]]:
    """List the attempts of all jobs: row of the job, times, GPUs, and whether it is on machines unknown."""
    for row, entry in enumerate(entries, 1):
        attempts = entry["attempts"] or []
        if not isinstance(attempts, list) or not all(isinstance(attempt, dict) for attempt in attempts):
            accepted = "a list of objects with start_time, end_time, detail"
            raise cell_error(where, row, "attempts", attempts, accepted)
        for attempt in attempts:
            gpus = _gpus(row, attempt, where)
            is_unknown = machines is not None and any(n > machines.get(name, 0) for name, n in gpus.items())
            stamps = (_stamp(attempt.get(name)) for name in ("start_time", "end_time"))
            yield row, *stamps, sum(gpus.values()), is_unknown  # type: ignore[misc]


def _stamp(value: object) -> str:
    return "" if value is None else str(value)


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


def read_philly_machines(path: str | Path) -> tuple[dict[str, int], ReadReport]:
    """Read the machine list of the Philly trace (``cluster_machine_list``): GPUs by machine, and the report.

    A machine that occurs with two counts is refused.
    """
    where, findings = str(path), list[Finding]()
    cells = read_cells(path, PHILLY_MACHINE, findings, header=PHILLY_MACHINE)
    name, count, _ = PHILLY_MACHINE
    machines = unique_counts(cells, name, count, where, findings)
    kept = drop(cells, cells[name].duplicated(), NODE_AGAIN, findings)
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
    spans = _spans(instances, _INSTANCE, findings) if instances else _spans(tasks, _TASK, findings)
    submit_s, end_s = (
        numbers(cells, name, where, _SECONDS, least=0, findings=findings)
        for name in ("start_time", "end_time")
    )
    frame = pd.DataFrame(
        {
            "job_id": names(cells, "job_name", where),
            "submit_time_s": submit_s,
            "stated_end_s": end_s,
            "tenant": cells["user"],
            "status": status,
            "outcome": status.map(_UNFINISHED),
            ROW: cells[ROW],
        }
    )
    frame = frame.join(requests, on="job_id").join(spans, on="job_id")
    frame = frame.assign(gpu=frame["gpu"].fillna(""), states_all=frame["states_all"].eq(True))
    # Times of a job come from instances or tasks, and from the job where these say nothing.
    frame = frame.assign(
        start_s=frame["first_s"].fillna(frame["submit_time_s"]),
        end_s=frame["last_s"].fillna(frame["stated_end_s"]),
    )
    frame = frame.assign(duration_s=frame["end_s"] - frame["start_s"])
    for reason in (RUNNING, UNSTARTED):
        frame = drop(frame, frame["outcome"] == reason, reason, findings)
    frame = drop(frame, frame["n_gpus"].isna(), NO_TASK, findings)
    if machines is not None and instances is not None:
        known = frame["machines"].map(lambda names: isinstance(names, frozenset) and names <= set(machines))
        frame = drop(frame, ~known.astype(bool), MACHINES, findings)
    is_timed = frame["start_s"].notna() & frame["end_s"].notna()
    is_untimed = frame["has_untimed"].eq(True) | frame["stated_end_s"].isna()
    repair(frame, is_untimed & is_timed, PART_UNTIMED, findings)
    is_reversed = (frame["stated_end_s"] < frame["submit_time_s"]) | frame["has_reversed"].eq(True)
    repair(frame, is_reversed & is_timed & (frame["duration_s"] >= 0), PART_REVERSED, findings)
    repair(frame, ~frame["states_all"] & (frame["n_gpus"] > 0), GPU_REQUEST_MISSING, findings)
    columns = [
        "job_id", "submit_time_s", "n_gpus", "n_cpus", "tenant", "status", "gpu", "start_s", "end_s", ROW,
    ]  # fmt: skip
    return finish_requests(frame[columns], findings, where, len(cells))


def _requests(path: str | Path, findings: list[Finding]) -> pd.DataFrame:
    """Sum the requests of the tasks of each job [devices]."""
    where = str(path)
    cells = read_cells(path, _TASK, findings, header=_TASK)
    count, gpu, cpu = (
        numbers(cells, column, where, f"{accepted}, 0 or more", least=0, findings=findings)
        for column, accepted in (
            ("inst_num", "a number of instances"),
            ("plan_gpu", "percent of a GPU"),
            ("plan_cpu", "percent of a CPU"),
        )
    )
    count = count.fillna(1)
    asked = pd.DataFrame(
        {
            "n_gpus": gpu.fillna(0) * count / _PERCENT,
            "n_cpus": cpu.fillna(0) * count / _PERCENT,
            "states_all": gpu.notna(),
            "gpu": cells["gpu_type"].mask(is_missing(cells["gpu_type"]) | ~(gpu > 0), ""),
        }
    )
    of_job = asked.groupby(cells["job_name"])
    sums = of_job[["n_gpus", "n_cpus"]].sum()
    types = of_job["gpu"].agg(lambda names: "|".join(sorted(set(names) - {""})))
    return sums.assign(states_all=of_job["states_all"].all(), gpu=types)


def _spans(path: str | Path, header: tuple[str, ...], findings: list[Finding]) -> pd.DataFrame:
    """Find first start, last end and machines of each job in a table of tasks or instances."""
    wanted = [name for name in ("job_name", "start_time", "end_time", "machine") if name in header]
    pieces = [
        _piece_spans(cells, str(path), findings)
        for cells in iter_cells(path, wanted, findings, header=header, chunk_rows=_CHUNK_ROWS)
    ]
    grouped = pd.concat(pieces).groupby("job_name")
    spans = grouped.agg(_SPAN)
    if "machines" in pieces[0]:
        unions = {job: frozenset().union(*names) for job, names in grouped["machines"]}
        spans["machines"] = pd.Series(unions, dtype=object)
    return spans


def _piece_spans(cells: pd.DataFrame, where: str, findings: list[Finding]) -> pd.DataFrame:
    parts = pd.DataFrame(
        {
            name: numbers(cells, column, where, _SECONDS, least=0, findings=findings)
            for name, column in (("first_s", "start_time"), ("last_s", "end_time"))
        }
    )
    # A start or end of zero stands for a time that was not recorded.
    parts = parts.mask(parts == 0.0)
    is_reversed, is_untimed = parts["last_s"] < parts["first_s"], parts.isna().any(axis=1)
    parts = parts.mask(is_reversed).assign(has_reversed=is_reversed, has_untimed=is_untimed)
    spans = parts.groupby(cells["job_name"]).agg(_SPAN)
    if "machine" in cells:
        sets = {job: frozenset(names) for job, names in cells.groupby("job_name")["machine"]}
        spans["machines"] = pd.Series(sets, dtype=object)
    return spans


def read_pai_machines(path: str | Path) -> dict[str, int]:
    """Read the machine table (``pai_machine_spec``): GPUs by machine; two counts of one are refused."""
    where, findings = str(path), list[Finding]()
    cells = read_cells(path, PAI_MACHINE, findings, header=PAI_MACHINE)
    machines = unique_counts(cells, "machine", "cap_gpu", where, findings)
    kept = drop(cells, cells["machine"].duplicated(), NODE_AGAIN, findings)
    finish_report(where, len(cells), len(kept), findings)
    return machines
