"""Readers of public job traces, and of the lists of nodes and quotas that come with them.

Every reader returns a `RequestTrace` or a table, with a report of its repairs. The head of each part
describes the formats.
"""

import ast
import csv
import heapq
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from makespan.errors import MakespanError, TraceError, cell_error
from makespan.files import parse_json, read_text
from makespan.tables import TableSchema, check_length, table_schema
from makespan.throughput import Profile
from makespan.traces.cells import (
    CANCELLED,
    FLAG,
    GPU_CHANGES,
    GPU_REQUEST_MISSING,
    MACHINES,
    NAME_AGAIN,
    NAME_NUMBERED,
    NAME_REPLACED,
    NO_PROMISE,
    NO_STATE,
    NO_TASK,
    NODE_AGAIN,
    PART_REVERSED,
    PART_UNTIMED,
    QUOTA_TOTAL,
    ROW,
    RUNNING,
    STEPS,
    STRAY_CELLS,
    UNEVEN_BATCH,
    UNSTARTED,
    Finding,
    ReadReport,
    as_text,
    drop,
    finish_report,
    flags,
    further_columns,
    in_order,
    is_missing,
    iter_cells,
    lacking,
    names,
    numbers,
    one_of,
    read_cells,
    read_lines,
    read_raw,
    reject,
    repair,
    report_further,
    times,
    unique_counts,
)
from makespan.traces.jobs import JobTrace
from makespan.traces.requests import RequestTrace, finish_requests
from makespan.units import DAY, GIB, MS, whole
from makespan.workloads import JobSpec

# --- Traces that are one list of jobs: Helios, openb, Alibaba spot ---
#
# Formats: the data descriptions of Hu et al., "Characterization and Prediction of Deep Learning Workloads",
# SC 2021 (Helios; times are local, without a zone; states are those of Slurm), of Weng et al., "Beware of
# Fragmentation", ATC 2023 (openb; CPUs and shares of a GPU in thousandths, memory in MiB, times in seconds
# from an undisclosed origin), and of Duan et al., "GFS", ASPLOS 2026 (the spot trace of Alibaba; requests
# are per worker, times in seconds from the first submission).

_HELIOS = ("job_id", "gpu_num", "submit_time", "start_time", "end_time")
_HELIOS_MORE = ("vc", "cpu_num", "state", "duration")
_ENDED = (
    "COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "BOOT_FAIL",
    "DEADLINE", "REVOKED", "SUSPENDED",
)  # fmt: skip
_UNENDED = {
    "RUNNING": RUNNING,
    "COMPLETING": RUNNING,
    "STOPPED": RUNNING,
    "RESIZING": RUNNING,
    "PENDING": UNSTARTED,
    "CONFIGURING": UNSTARTED,
    "REQUEUED": UNSTARTED,
}
_CANCELLED_BY = r"CANCELLED( by .*|\+)"  # as sacct writes it
_DATE_LENGTH = len("2020-09-01")
_GPUS = "a number of GPUs, 0 or more"
_WHOLE_GPUS = "a whole number of GPUs, 0 or more"
_PODS = ("name", "num_gpu", "gpu_milli", "creation_time", "deletion_time", "scheduled_time")
_PODS_MORE = ("cpu_milli", "gpu_spec", "qos", "pod_phase")
_PHASES = ("Succeeded", "Running", "Pending", "Failed", "Unknown")
NODES: tuple[str, ...] = ("sn", "cpu_milli", "memory_mib", "gpu", "model")
_MILLI = 1000.0
_MIB = GIB / 1024
_SECONDS = "a time in seconds, or nothing"
_CPUS = "a number of CPUs, 0 or more"
_SPOT = ("job_name", "gpu_request", "worker_num", "submit_time", "duration")
_SPOT_MORE = ("organization", "gpu_model", "cpu_request", "job_type")
_JOB_TYPES = ("HP", "Spot")
SPOT_NODES: tuple[str, ...] = ("node_name", "gpu_model", "gpu_capacity_num", "cpu_num")
NODE_LIST: TableSchema = table_schema(
    "node_list",
    ("node_id", "text", "", "name of the node"),
    ("n_gpus", "int", "1", "GPUs of the node"),
    ("n_cpus", "int", "1", "CPUs of the node"),
    ("memory_bytes", "float", "B", "host memory, missing if the list does not say", True),
    ("gpu", "text", "", "type of its GPUs, empty if it has none"),
)


def _optional(cells: pd.DataFrame, column: str) -> "pd.Series[str]":
    """Return a column of text, empty cells where the file does not have it."""
    if column in cells:
        return cells[column].mask(is_missing(cells[column]), "")
    return pd.Series("", index=cells.index)


def read_helios_jobs(path: str | Path, *, keep_cancelled: bool = False) -> RequestTrace:
    """Read the job list of one Helios cluster (``cluster_log.csv``); the tenant is the virtual cluster.

    Columns ``job_id, gpu_num, submit_time, start_time, end_time`` and, if present, ``vc``, ``cpu_num``,
    ``state`` (any state of Slurm) and ``duration`` [s].

    ``keep_cancelled`` keeps jobs that their user cancelled; they held GPUs too.
    """
    where, findings = str(path), list[Finding]()
    cells = read_cells(path, _HELIOS, findings, optional=_HELIOS_MORE)
    if "state" in cells:
        by_user = cells["state"].str.fullmatch(_CANCELLED_BY, case=False)
        cells["state"] = cells["state"].mask(by_user, "CANCELLED")
        status = one_of(cells, "state", (*_ENDED, *_UNENDED), where)
    else:
        findings.append(Finding("repaired", NO_STATE))
        status = pd.Series("", index=cells.index)
    stamps = ("submit_time", "start_time", "end_time")
    submit_s, start_s, end_s = times([(cells, name) for name in stamps], where, findings)
    frame = pd.DataFrame(
        {
            "job_id": names(cells, "job_id", where),
            "status": status,
            "outcome": status.map(_UNENDED | {"CANCELLED": CANCELLED}),
            "submit_time_s": submit_s,
            "start_s": start_s,
            "end_s": end_s,
            "n_gpus": numbers(cells, "gpu_num", where, _GPUS, least=0, findings=findings).fillna(0),
            "n_cpus": 0.0,
            "tenant": _optional(cells, "vc"),
            ROW: cells[ROW],
        }
    )
    if "cpu_num" in cells:
        frame["n_cpus"] = numbers(cells, "cpu_num", where, _CPUS, least=0, findings=findings).fillna(0)
    if "duration" in cells:
        frame["duration_s"] = numbers(cells, "duration", where, "a duration in seconds", findings=findings)
    return finish_requests(frame, findings, where, len(cells), keep_cancelled=keep_cancelled)


def read_helios_quota(path: str | Path) -> tuple[pd.DataFrame, ReadReport]:
    """Read the daily GPU quota of the virtual clusters (``cluster_gpu_number.csv``).

    Returns a table ``date, tenant, n_gpus``, and the report: days on which the stated total differs from the
    sum (the sum is used).
    """
    where, findings = str(path), list[Finding]()
    cells = read_cells(path, lambda names: ["date", *_tenants(names), "total"], findings)
    tenants = _tenants(cells.columns)
    if not tenants:
        raise TraceError(f"{path}: no virtual cluster; expected columns date, one per virtual cluster, total")
    dates = pd.to_datetime(cells["date"], format="%Y-%m-%d", errors="coerce")
    wrong = dates.isna() | (cells["date"].str.len() != _DATE_LENGTH)
    reject(cells, wrong, "date", "a date such as 2020-09-01", where)
    reject(cells, cells["date"].duplicated(), "date", "one row per day", where)
    quota = pd.DataFrame(
        {
            name: numbers(cells, name, where, _WHOLE_GPUS, least=0, is_whole=True, findings=findings).fillna(
                0
            )
            for name in (*tenants, "total")
        }
    )
    differs = quota.pop("total") != quota.sum(axis=1)
    repair(cells, differs, QUOTA_TOTAL, findings)
    table = quota.assign(date=cells["date"]).melt("date", var_name="tenant", value_name="n_gpus")
    report = finish_report(where, len(cells), len(cells), findings)
    return table.astype({"n_gpus": "int64"}).sort_values(["date", "tenant"], ignore_index=True), report


def _tenants(names: Iterable[str]) -> list[str]:
    return [name for name in names if name.lower() not in ("", "date", "total", ROW)]


def _without_times(columns: list[str]) -> str:
    is_untimed = not {"creation_time", "scheduled_time", "deletion_time"} & {name.lower() for name in columns}
    return (
        "the list states requests of pods without times: add the three columns of times" if is_untimed else ""
    )


def read_openb_pods(path: str | Path) -> RequestTrace:
    """Read a pod list (``openb_pod_list_*.csv``); the tenant is the class of service.

    Pods in phase Running whose deletion time is the last time of the file still ran when the trace was taken;
    they are dropped. Requests for a share of a GPU get a whole one. Lists of five columns, without times, are
    rejected.
    """
    where, findings = str(path), list[Finding]()
    cells = read_cells(path, _PODS, findings, optional=_PODS_MORE, hint=_without_times)
    if "pod_phase" in cells:
        status = one_of(cells, "pod_phase", _PHASES, where)
    else:
        findings.append(Finding("repaired", NO_STATE))
        status = pd.Series("", index=cells.index)
    submit_s, end_s, start_s = (
        numbers(cells, f"{name}_time", where, _SECONDS, least=0, findings=findings)
        for name in ("creation", "deletion", "scheduled")
    )
    gpus = numbers(cells, "num_gpu", where, _GPUS, least=0, findings=findings).fillna(0)
    accepted = "thousandths of a GPU, 0 or more"
    share = numbers(cells, "gpu_milli", where, accepted, least=0, findings=findings) / _MILLI
    # Pods that still ran when the trace was taken have its last time as their deletion time.
    unstarted = (start_s.isna() & submit_s.notna()) | (status == "Pending")
    started_s = end_s.mask(unstarted)
    at_end = (started_s == started_s.max()) & started_s.duplicated(keep=False) & (status == "Running")
    outcome = pd.Series(np.nan, index=cells.index, dtype=object).mask(at_end, RUNNING)
    frame = pd.DataFrame(
        {
            "job_id": names(cells, "name", where),
            "status": status,
            "outcome": outcome.mask(unstarted, UNSTARTED),
            "submit_time_s": submit_s,
            "start_s": start_s,
            "end_s": end_s,
            "n_gpus": gpus * share.clip(lower=1.0 / _MILLI, upper=1.0).fillna(1.0),
            "n_devices": gpus,
            "n_cpus": 0.0,
            "tenant": _optional(cells, "qos"),
            "gpu": _optional(cells, "gpu_spec"),
            ROW: cells[ROW],
        }
    )
    if "cpu_milli" in cells:
        accepted = "thousandths of a CPU, 0 or more"
        cpus = numbers(cells, "cpu_milli", where, accepted, least=0, findings=findings)
        frame["n_cpus"] = cpus.fillna(0) / _MILLI
    return finish_requests(frame, findings, where, len(frame))


def read_openb_nodes(path: str | Path) -> tuple[pd.DataFrame, ReadReport]:
    """Read a node list (``openb_node_list_*.csv``): schema `NODE_LIST`, and the report.

    Nodes without GPU are kept; a node that occurs twice with different resources is rejected.
    """
    where, findings = str(path), list[Finding]()
    cells = read_cells(path, NODES, findings)
    gpus = numbers(cells, "gpu", where, _WHOLE_GPUS, least=0, is_whole=True, findings=findings).fillna(0)
    cpus, mebibytes = (
        numbers(cells, name, where, "a number, 0 or more", least=0, findings=findings).fillna(0)
        for name in ("cpu_milli", "memory_mib")
    )
    table = pd.DataFrame(
        {
            "node_id": names(cells, "sn", where),
            "n_gpus": gpus.fillna(0),
            "n_cpus": np.floor(cpus / _MILLI),
            "memory_bytes": mebibytes * _MIB,
            "gpu": _optional(cells, "model"),
        }
    )
    return finish_nodes(table, cells, "sn", where, findings)


def finish_nodes(
    table: pd.DataFrame, cells: pd.DataFrame, column: str, where: str, findings: list[Finding]
) -> tuple[pd.DataFrame, ReadReport]:
    """Drop nodes that occur again with equal resources, reject others, and return the checked table."""
    same, table = table.duplicated(), table.assign(**{ROW: cells[ROW]})
    kept = drop(table, same, NODE_AGAIN, findings)
    again = kept["node_id"].duplicated()
    reject(cells.loc[kept.index], again, column, "one row per node, or equal ones", where)
    report = finish_report(where, len(cells), len(kept), findings)
    return NODE_LIST.validate(kept.drop(columns=ROW), where), report


def read_spot_jobs(path: str | Path) -> RequestTrace:
    """Read the job list of Alibaba's spot GPU trace (``job_info_df.csv``); the tenant is the organization.

    Jobs of type HP are guaranteed, spot jobs are not. GPUs and CPUs are those per worker times the workers.
    """
    where, findings = str(path), list[Finding]()
    cells = read_cells(path, _SPOT, findings, optional=_SPOT_MORE)
    workers, gpus = (
        numbers(cells, name, where, accepted, least=0, findings=findings)
        for name, accepted in (("worker_num", "a number of workers, 0 or more"), ("gpu_request", _GPUS))
    )
    frame = pd.DataFrame(
        {
            "job_id": names(cells, "job_name", where),
            "status": "",
            "submit_time_s": numbers(cells, "submit_time", where, _SECONDS, least=0, findings=findings),
            "duration_s": numbers(cells, "duration", where, "a duration in seconds", findings=findings),
            "n_gpus": (workers * gpus).fillna(0),
            "n_cpus": 0.0,
            "tenant": _optional(cells, "organization"),
            "gpu": _optional(cells, "gpu_model"),
            "is_guaranteed": False,
            ROW: cells[ROW],
        }
    )
    if "cpu_request" in cells:
        cpus = numbers(cells, "cpu_request", where, _CPUS, least=0, findings=findings)
        frame["n_cpus"] = (workers * cpus).fillna(0)
    if "job_type" in cells:
        frame["is_guaranteed"] = one_of(cells, "job_type", _JOB_TYPES, where) == "HP"
    return finish_requests(frame, findings, where, len(frame))


def read_spot_nodes(path: str | Path) -> tuple[pd.DataFrame, ReadReport]:
    """Read the nodes of Alibaba's spot GPU trace (``node_info_df.csv``): schema `NODE_LIST`, and the report.

    The list does not state memory; a node that occurs twice with different resources is rejected.
    """
    where, findings = str(path), list[Finding]()
    cells = read_cells(path, SPOT_NODES, findings)
    gpus, cpus = (
        numbers(cells, name, where, accepted, least=0, is_whole=True, findings=findings).fillna(0)
        for name, accepted in (
            ("gpu_capacity_num", _WHOLE_GPUS),
            ("cpu_num", "a whole number of CPUs, 0 or more"),
        )
    )
    table = pd.DataFrame(
        {
            "node_id": names(cells, "node_name", where),
            "n_gpus": gpus,
            "n_cpus": cpus,
            "memory_bytes": np.nan,
            "gpu": _optional(cells, "gpu_model"),
        }
    )
    return finish_nodes(table, cells, "node_name", where, findings)


# --- Traces whose jobs have parts: attempts in Philly, tasks and instances in PAI ---
#
# Formats: the data descriptions of Jeon et al., "Analysis of Large-Scale Multi-Tenant GPU Clusters", ATC
# 2019 (nested JSON; an open end of the last attempt means that the job still ran when the trace was taken),
# and of Weng et al., "MLaaS in the Wild", NSDI 2022 (CPU and GPU requests are percentages of one device and
# are per instance of a task; the files come without header line, one with the published names is accepted).

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


def read_philly_jobs(
    path: str | Path, *, machines: Mapping[str, int] | None = None, keep_cancelled: bool = False
) -> RequestTrace:
    """Read the job log of the Philly trace (``cluster_job_log``); the tenant is the virtual cluster.

    The duration is the sum over complete attempts; the GPUs are those of the last attempt. With ``machines``
    (GPUs of each, see `read_philly_machines`), jobs on unknown machines or on more GPUs than a machine has
    are dropped; ``keep_cancelled`` keeps jobs that their user killed.
    """
    where, findings = str(path), list[Finding]()
    entries = _philly_entries(read_raw(path, findings), where)
    frame = pd.DataFrame([_philly_row(number, entry, where) for number, entry in enumerate(entries, 1)])
    attempts = pd.DataFrame(
        _philly_attempts(entries, machines, where),
        columns=[ROW, "start_time", "end_time", "n_gpus", "is_unknown"],
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
        held_gpu_s=attempts["n_gpus"] * length_s.where(length_s >= 0),
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
    sums = of_job[["forward_s", "held_gpu_s"]].sum(min_count=1)
    parts = parts.join(sums)
    frame = frame.assign(submit_time_s=submit_s).join(parts, on=ROW)
    flags = ("is_incomplete", "is_reversed", "is_open", "is_unknown")
    frame = frame.assign(
        # If all attempts are reversed there is no sum; the negative length of the first marks the job.
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
    repair(frame, frame["is_incomplete"] & usable, PART_UNTIMED, findings)
    repair(frame, frame["is_reversed"] & usable, PART_REVERSED, findings)
    held = frame["held_gpu_s"] / frame["duration_s"]  # GPUs of a job in the mean over its attempts
    repair(frame, (frame["n_counts"] > 1) & usable, GPU_CHANGES, findings, before=held)
    columns = [
        "job_id", "submit_time_s", "n_gpus", "n_cpus", "duration_s", "tenant", "status", "outcome", "start_s",
        ROW,
    ]  # fmt: skip
    return finish_requests(frame[columns], findings, where, len(entries), keep_cancelled=keep_cancelled)


def _philly_entries(text: str, where: str) -> list[Any]:
    n_above = 0
    try:
        try:
            entries = parse_json(text)
        except json.JSONDecodeError as error:
            if error.msg != "Extra data" or not text.lstrip().startswith("{"):
                raise
            entries = []  # one object per line, the form of large logs
            for line in text.splitlines():
                entries += [parse_json(line)] if line.strip() else []
                n_above += 1
    except json.JSONDecodeError as error:
        place = f"line {n_above + error.lineno}, column {error.colno}"
        raise TraceError(f"{where}: {place}: no JSON: {error.msg}") from None
    except ValueError:
        accepted = "lists within lists as the authors write them"
        raise TraceError(f"{where}: nested too deeply or numbers too long; expected {accepted}") from None
    if not isinstance(entries, list) or not entries:
        raise TraceError(f"{where}: found {type(entries).__name__}; expected a JSON list with a job or more")
    return entries


def _philly_row(row: int, entry: Any, where: str) -> dict[str, object]:
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


def _philly_attempts(
    entries: Sequence[dict[str, Any]], machines: Mapping[str, int] | None, where: str
) -> Iterator[tuple[int, str, str, int, bool]]:
    """Yield the attempts of all jobs: row of the job, times, GPUs, and True if a machine is unknown."""
    for row, entry in enumerate(entries, 1):
        attempts = entry["attempts"] or []
        if not isinstance(attempts, list) or not all(isinstance(attempt, dict) for attempt in attempts):
            accepted = "a list of objects with start_time, end_time, detail"
            raise cell_error(where, row, "attempts", attempts, accepted)
        for attempt in attempts:
            distinct: dict[str, set[str]] = {}  # GPUs by machine
            detail = attempt.get("detail") or []
            try:
                for part in detail:
                    distinct.setdefault(str(part["ip"]), set()).update(str(gpu) for gpu in part["gpus"])
            except (TypeError, KeyError):
                accepted = "a list of objects with ip and gpus"
                raise cell_error(where, row, "detail", detail, accepted) from None
            gpus = {name: len(names) for name, names in distinct.items()}
            is_unknown = machines is not None and any(n > machines.get(name, 0) for name, n in gpus.items())
            stamps = (_stamp(attempt.get(name)) for name in ("start_time", "end_time"))
            yield row, *stamps, sum(gpus.values()), is_unknown  # type: ignore[misc]


def _stamp(value: object) -> str:
    return "" if value is None else str(value)


def read_philly_machines(path: str | Path) -> tuple[dict[str, int], ReadReport]:
    """Read the machine list of the Philly trace (``cluster_machine_list``): GPUs by machine, and the report.

    A machine that occurs with two counts is rejected.
    """
    where, findings = str(path), list[Finding]()
    cells = read_cells(path, PHILLY_MACHINE, findings, header=PHILLY_MACHINE)
    name, count, _ = PHILLY_MACHINE
    machines = unique_counts(cells, name, count, where, findings)
    kept = drop(cells, cells[name].duplicated(), NODE_AGAIN, findings)
    return machines, finish_report(where, len(cells), len(kept), findings)


def read_pai_jobs(
    jobs: str | Path,
    tasks: str | Path,
    instances: str | Path | None = None,
    *,
    machines: dict[str, int] | None = None,
) -> RequestTrace:
    """Read the PAI tables into one row per job; the tenant is the user.

    The GPUs of a job are the sum over its tasks of instances times request, rounded up to whole
    devices. It holds them from the first start to the last end of its instances, or of its tasks
    where the instance table is not given.

    The files are ``pai_job_table``, ``pai_task_table`` and, optionally, ``pai_instance_table``; with the last
    and ``machines`` (GPUs of each, see `read_pai_machines`), jobs on unknown machines are dropped.
    """
    where, findings = str(jobs), list[Finding]()
    cells = read_cells(jobs, _JOB, findings, header=_JOB)
    status = one_of(cells, "status", _STATUSES, where)
    requests = _task_requests(tasks, findings)
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
    # Times of a job come from its instances or tasks, or from the job table where these have none.
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


def _task_requests(path: str | Path, findings: list[Finding]) -> pd.DataFrame:
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
    pieces = []
    # The instance table has millions of rows, so each piece is reduced to spans before the next one is read.
    for cells in iter_cells(path, wanted, findings, header=header, chunk_rows=_CHUNK_ROWS):
        parts = pd.DataFrame(
            {
                name: numbers(cells, column, str(path), _SECONDS, least=0, findings=findings)
                for name, column in (("first_s", "start_time"), ("last_s", "end_time"))
            }
        )
        # A start or end of zero stands for a time that was not recorded.
        parts = parts.mask(parts == 0.0)
        is_reversed, is_untimed = parts["last_s"] < parts["first_s"], parts.isna().any(axis=1)
        parts = parts.mask(is_reversed).assign(has_reversed=is_reversed, has_untimed=is_untimed)
        piece = parts.groupby(cells["job_name"]).agg(_SPAN)
        if "machine" in cells:
            sets = {job: frozenset(names) for job, names in cells.groupby("job_name")["machine"]}
            piece["machines"] = pd.Series(sets, dtype=object)
        pieces.append(piece)
    grouped = pd.concat(pieces).groupby("job_name")
    spans = grouped.agg(_SPAN)
    if "machines" in pieces[0]:
        unions = {job: frozenset().union(*names) for job, names in grouped["machines"]}
        spans["machines"] = pd.Series(unions, dtype=object)
    return spans


def read_pai_machines(path: str | Path) -> dict[str, int]:
    """Read the machine table (``pai_machine_spec``): GPUs by machine; two counts of one are rejected."""
    where, findings = str(path), list[Finding]()
    cells = read_cells(path, PAI_MACHINE, findings, header=PAI_MACHINE)
    machines = unique_counts(cells, "machine", "cap_gpu", where, findings)
    kept = drop(cells, cells["machine"].duplicated(), NODE_AGAIN, findings)
    finish_report(where, len(cells), len(kept), findings)
    return machines


# --- Job lists of other schedulers (Tiresias, Pollux, Sia, Gavel), and requests in tables of the user ---
#
# Formats: the simulators released with Gu et al., "Tiresias", NSDI 2019, with Qiao et al., "Pollux", OSDI
# 2021, and Jayaram Subramanya et al., "Sia", SOSP 2023 (one form), and with Narayanan et al., "Gavel", OSDI
# 2020 (traces without header line, separated by tabs; cells grew from six to ten over the years). Times are
# in seconds.

_REQUESTS = ("job_id", "submit_time_s", "n_gpus", "duration_s")
_REQUESTS_MORE = ("n_cpus", "tenant", "status", "gpu", "is_guaranteed")
_TIRESIAS = ("job_id", "num_gpu", "submit_time", "duration")
_POLLUX = ("name", "time", "num_replicas", "duration")
_PROFILED = ("name", "time", "application", "num_replicas", "batch_size")
ProfileOf = Callable[[str], Profile]
_DURATION = "a duration in seconds"
_AFTER_FLAG = {
    3: ("total_steps", "arrival_time", "scale_factor"),
    4: ("needs_data_dir", "total_steps", "arrival_time", "scale_factor"),
    5: ("needs_data_dir", "total_steps", "scale_factor", "SLO", "arrival_time"),
    6: ("needs_data_dir", "total_steps", "scale_factor", "priority_weight", "SLO", "arrival_time"),
}


def read_requests(path: str | Path) -> RequestTrace:
    """Read a table of requests: columns ``job_id, submit_time_s, n_gpus, duration_s`` of schema `REQUESTS`.

    Its columns ``n_cpus, tenant, status``, and ``gpu`` and ``is_guaranteed`` of `RequestTrace`, are
    optional. Further columns have no effect and are reported.
    """
    findings = list[Finding]()
    known = (*_REQUESTS, *_REQUESTS_MORE)
    cells = read_cells(
        path,
        _REQUESTS,
        findings,
        optional=lambda names: [*_REQUESTS_MORE, *further_columns(names, known)],
    )
    return _requests_of(cells, str(path), findings)


def request_trace(
    table: pd.DataFrame, where: str = "table of requests", *, before: ReadReport | None = None
) -> RequestTrace:
    """Check and repair a table of requests in memory; columns and rules are those of `read_requests`.

    ``where`` names the table in the report and in messages, and ``before`` is the report of the step that
    made the table; rows are then those of the table. Raises `TraceError` as readers do.
    """
    missing = [name for name in _REQUESTS if name not in table]
    if missing:
        raise lacking(missing, [str(name) for name in table.columns], _REQUESTS, where)
    if table.empty:
        raise TraceError(f"{where}: no rows; expected a trace with at least one")
    known = (*_REQUESTS, *_REQUESTS_MORE)
    further = further_columns([name for name in table if isinstance(name, str)], known)
    columns = [*(name for name in known if name in table), *further]
    cells = pd.DataFrame({name: as_text(table[name]) for name in columns})
    findings = [] if before is None else list(before.findings)
    return _requests_of(cells.assign(**{ROW: np.arange(1, len(cells) + 1)}), where, findings, before)


def _requests_of(
    cells: pd.DataFrame, where: str, findings: list[Finding], before: ReadReport | None = None
) -> RequestTrace:
    report_further(cells, (*_REQUESTS, *_REQUESTS_MORE), findings)
    frame = pd.DataFrame(
        {
            "job_id": names(cells, "job_id", where),
            "submit_time_s": numbers(cells, "submit_time_s", where, _SECONDS, findings=findings),
            "n_gpus": numbers(cells, "n_gpus", where, _GPUS, least=0, findings=findings).fillna(0),
            "n_cpus": 0.0,
            "duration_s": numbers(cells, "duration_s", where, _DURATION, findings=findings),
            "tenant": "",
            "status": "",
            ROW: cells[ROW],
        }
    )
    if "n_cpus" in cells:
        frame["n_cpus"] = numbers(cells, "n_cpus", where, _CPUS, least=0, findings=findings).fillna(0)
    for name in ("tenant", "status", "gpu"):
        if name in cells:
            frame[name] = cells[name].mask(is_missing(cells[name]), "")
    if "is_guaranteed" in cells:
        repair(frame, is_missing(cells["is_guaranteed"]), NO_PROMISE, findings)
        frame["is_guaranteed"] = flags(cells, "is_guaranteed", where)
    n_read = len(cells) if before is None else before.n_read
    return finish_requests(frame, findings, where, n_read, before=before)


def read_tiresias_jobs(path: str | Path) -> RequestTrace:
    """Read a job list of Tiresias: ``job_id, num_gpu, submit_time, duration`` [s] and ``model_name``."""
    findings = list[Finding]()
    cells = read_cells(path, _TIRESIAS, findings, optional=("model_name",))
    usual = {
        "num_gpu": "n_gpus",
        "submit_time": "submit_time_s",
        "duration": "duration_s",
        "model_name": "model",
    }
    return _named(cells, usual, str(path), findings)


def _without_duration(columns: list[str]) -> str:
    return (
        "published lists state the model of a job but not its run time: give the profiles that come with "
        "them (--source measured --measured-dir simulator/traces), or add a column duration, in seconds"
    )


def read_pollux_jobs(path: str | Path) -> RequestTrace:
    """Read a job list of Pollux or Sia: ``name, time, num_replicas, duration`` [s] and ``application``.

    The published lists have no column ``duration``, because their simulators look it up in profiles of the
    applications; `read_profiled_jobs` does so, too.
    """
    findings = list[Finding]()
    cells = read_cells(path, _POLLUX, findings, optional=("application",), hint=_without_duration)
    usual = {"name": "job_id", "time": "submit_time_s", "num_replicas": "n_gpus", "duration": "duration_s"}
    return _named(cells, usual | {"application": "model"}, str(path), findings)


def read_profiled_jobs(path: str | Path, profiles: ProfileOf) -> JobTrace:
    """Read a job list of Pollux or Sia whose applications have profiles.

    Each job trains its application with the batch that the list states, data parallel, for all of its epochs.
    A batch that its GPUs cannot share evenly is rounded as in those simulators.

    Parameters
    ----------
    path
        The list: ``name, time, application, num_replicas, batch_size``.
    profiles
        Returns the profile of an application, `makespan.throughput.ProfiledSource.profile`.
    """
    where, findings = str(path), list[Finding]()
    cells = read_cells(path, _PROFILED, findings)
    names(cells, "name", where)
    submit_s = numbers(cells, "time", where, _SECONDS, least=0, findings=findings)
    reject(cells, submit_s.isna(), "time", _SECONDS, where)
    counts = {}
    for column, accepted in (("num_replicas", "GPUs, 1 or more"), ("batch_size", "samples, 1 or more")):
        values = numbers(cells, column, where, accepted, least=1, is_whole=True, findings=findings)
        reject(cells, values.isna(), column, accepted, where)
        counts[column] = values.astype("int64")
    frame = pd.DataFrame(
        {
            "job_id": cells["name"],
            "submit_time_s": submit_s,
            "n_gpus": counts["num_replicas"],
            ROW: cells[ROW],
        }
    )
    known: dict[tuple[str, int, int], tuple[str, str, int]] = {}
    for row, request in zip(
        cells[ROW], zip(cells["application"], *counts.values(), strict=True), strict=True
    ):
        application, n_gpus, batch = request
        if request in known:
            continue
        try:
            profile = profiles(application)
        except MakespanError as error:
            raise cell_error(where, int(row), "application", application, f"a profile ({error})") from error
        sizes = list(profile.progress)
        if not sizes[0] <= batch <= sizes[-1]:
            raise cell_error(where, int(row), "batch_size", batch, f"{sizes[0]} to {sizes[-1]} samples")
        split = profile.split(batch, n_gpus)
        if not profile.samples[0] <= split.micro_batch_size <= profile.samples[1]:
            accepted = "{} to {} samples per GPU, as profiled".format(*profile.samples)
            raise cell_error(where, int(row), "num_replicas", n_gpus, f"{accepted}; batch {batch}")
        real = split.global_batch_size
        known[request] = f"{application}-{real}", split.plan, profile.steps(real)
    requests = list(zip(cells["application"], *counts.values(), strict=True))
    chosen = pd.DataFrame([known[request] for request in requests], columns=["workload", "plan", "steps"])
    rounded = [not known[request][0].endswith(f"-{request[2]}") for request in requests]
    repair(frame, pd.Series(rounded, index=frame.index), UNEVEN_BATCH, findings)
    findings.append(Finding("ignored", "batch sizes never change; jobs of Pollux and Sia adapt them"))
    again = frame["job_id"].duplicated()
    ordered = in_order(drop(frame.join(chosen.set_axis(frame.index)), again, NAME_AGAIN, findings), findings)
    jobs = tuple(
        JobSpec(str(name), float(at_s), str(key), int(n_gpus), int(n_gpus), str(plan), int(steps))
        for name, at_s, n_gpus, key, plan, steps in zip(
            *(ordered[it] for it in ("job_id", "submit_time_s", "n_gpus", "workload", "plan", "steps")),
            strict=True,
        )
    )
    report = finish_report(where, len(cells), len(jobs), findings)
    return JobTrace(jobs, report, tuple(ordered[ROW].tolist()))


def _named(
    cells: pd.DataFrame, usual: Mapping[str, str], where: str, findings: list[Finding]
) -> RequestTrace:
    """Read cells into requests by the column names of their format, which messages use too."""
    of = {ours: theirs for theirs, ours in usual.items()}
    frame = pd.DataFrame(
        {
            "job_id": names(cells, of.get("job_id", "job_id"), where),
            "submit_time_s": numbers(cells, of["submit_time_s"], where, _SECONDS, least=0, findings=findings),
            "n_gpus": numbers(cells, of["n_gpus"], where, _GPUS, least=0, findings=findings).fillna(0),
            "n_cpus": 0.0,
            "duration_s": numbers(cells, of["duration_s"], where, _DURATION, findings=findings),
            "tenant": "",
            "status": "",
            ROW: cells[ROW],
        }
    )
    if of["model"] in cells:
        frame["model"] = cells[of["model"]]
    return finish_requests(frame, findings, where, len(cells))


def read_gavel_jobs(
    path: str | Path, steps_per_s: Mapping[tuple[str, int], float] | None = None
) -> RequestTrace:
    """Read a trace of Gavel; names count from 0 as its simulator does.

    Parameters
    ----------
    path
        The trace.
    steps_per_s
        Throughput of each type of job on a number of GPUs [steps/s], see `read_gavel_throughputs`; required,
        because traces state steps alone.
    """
    where, findings = str(path), list[Finding]()
    if steps_per_s is None:
        raise TraceError(
            f"{where}: traces of Gavel state steps, not durations; expected the table of throughputs that "
            "comes with them, simulation_throughputs.json, beside the list or as --tasks"
        )
    cells = _gavel_cells(read_raw(path, findings), where)
    counts = numbers(
        cells, "scale_factor", where, "GPUs, 1 or more", least=1, is_whole=True, findings=findings
    )
    steps = numbers(cells, "total_steps", where, "a number of steps, 0 or more", least=0, findings=findings)
    reject(cells, counts.isna(), "scale_factor", "GPUs, 1 or more", where)
    pairs = list(zip(cells["job_type"], counts.astype("int64"), strict=True))
    unknown = pd.Series([pair not in steps_per_s for pair in pairs], index=cells.index)
    reject(cells, unknown, "job_type", "a type with a throughput for as many GPUs", where)
    rates = np.array([steps_per_s[pair] for pair in pairs])
    frame = pd.DataFrame(
        {
            "job_id": (cells[ROW] - 1).astype("str"),
            "submit_time_s": numbers(cells, "arrival_time", where, _SECONDS, least=0, findings=findings),
            "n_gpus": counts,
            "n_cpus": 0.0,
            "duration_s": steps / rates,
            "tenant": "",
            "status": "",
            "model": cells["job_type"],
            ROW: cells[ROW],
        }
    )
    findings.append(Finding("repaired", STEPS))
    return finish_requests(frame, findings, where, len(cells))


def _gavel_cells(text: str, where: str) -> pd.DataFrame:
    """Name the cells by their position relative to the option for steps, the first cell with a dash.

    The number of cells after the option tells the version of the format, see `_AFTER_FLAG`.
    """
    lines = [line for line in csv.reader(text.splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE) if line]
    first = [cell.strip() for cell in lines[0]]
    flag = next((at for at, cell in enumerate(first) if at > 1 and cell.startswith("-")), len(first))
    after = _AFTER_FLAG.get(len(first) - flag - 1)
    if after is None:
        found = f"{len(first)} cells in the first line"
        accepted = (
            "job type, command, working directory where there is one, option for steps, and 3 to 6 numbers"
        )
        raise TraceError(f"{where}: no trace of Gavel: {found}; expected, separated by tabs: {accepted}")
    columns = ["job_type", *(f"command_{number}" for number in range(1, flag)), "num_steps_arg", *after]
    for row, line in enumerate(lines, 1):
        check_length(row, line, columns, where)
    stripped = [[cell.strip() for cell in line] for line in lines]
    cells = pd.DataFrame(stripped, columns=columns, dtype="str")
    return cells.assign(**{ROW: np.arange(1, len(lines) + 1)})


def read_gavel_throughputs(path: str | Path, gpu: str = "v100") -> dict[tuple[str, int], float]:
    """Read a table of throughputs of Gavel (JSON) [steps/s], by type of job and GPUs, for one type of GPU."""
    where = str(path)
    try:
        table: Any = json.loads(read_text(path, "throughputs of Gavel", TraceError))
        found = {ast.literal_eval(key): float(rates["null"]) for key, rates in table[gpu].items()}
        return {(str(name), int(count)): rate for (name, count), rate in found.items() if rate > 0}
    except (
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        SyntaxError,
        RecursionError,
        MemoryError,
    ) as error:
        accepted = f'an object {gpu} with "(\'type of job\', GPUs)": {{"null": steps per second}}'
        raise TraceError(
            f"{where}: no throughputs of Gavel for {gpu}: {type(error).__name__}; expected {accepted}"
        ) from None


# --- Artifacts of EasyScale (job lists) and Oobleck (availability of nodes) ---
#
# The published EasyScale list repeats names, is not in order of time, and holds a stray ninth column and a
# flag of 40; each is repaired and reported. Oobleck's files have no header: time [ms], ``add`` or
# ``remove``, name of the node. Times do not decrease, a node is added once, and a removed node never returns
# under the same name.

EASYSCALE_JOBS = table_schema(
    "easyscale_jobs",
    ("job_id", "text", "", "name of the job, unique"),
    ("submit_time_s", "float", "s", "when it enters the system"),
    ("workload", "text", "", "what it trains"),
    ("max_parallelism", "int", "1", "logical workers"),
    ("micro_batch_size", "int", "samples", "samples a logical worker and step"),
    ("epochs", "float", "1", "passes over the data"),
    ("is_heterogeneous", "bool", "", "whether it may run on mixed GPU types"),
    ("home_gpu", "text", "", "GPU type that it prefers"),
)
_COUNT = "a whole number, 1 or more"
_EASYSCALE = (
    "name", "time", "application", "max_parallelism", "batch_size", "epochs",
    "enable_heterogeneous_deterministic", "preferred_gpu",
)  # fmt: skip


def read_easyscale_jobs(
    path: str | Path, dedup: Literal["rename", "artifact"] = "rename"
) -> tuple[pd.DataFrame, ReadReport]:
    """Read an EasyScale job list: schema `EASYSCALE_JOBS`, and the report.

    ``dedup`` decides how repeated names are handled: ``"rename"`` keeps every row in order of submission and
    numbers the later ones; ``"artifact"`` follows the released simulator, where a later row replaces the
    earlier one at its position and rows are not sorted.
    """
    where, findings = str(path), list[Finding]()
    cells = _easyscale_cells(path, findings)
    for column in _EASYSCALE:
        reject(cells, is_missing(cells[column]), column, "a value", where)
    accepted = "a number, 0 or more"
    flag = numbers(cells, "enable_heterogeneous_deterministic", where, "0 or 1", least=0, findings=findings)
    repair(cells, ~flag.isin([0.0, 1.0]), FLAG, findings)
    submit_s = numbers(cells, "time", where, accepted, least=0, findings=findings)
    workers, batch = (
        numbers(cells, column, where, _COUNT, least=1, is_whole=True, findings=findings)
        for column in ("max_parallelism", "batch_size")
    )
    frame = pd.DataFrame(
        {
            "job_id": cells["name"],
            "submit_time_s": submit_s,
            "workload": cells["application"],
            "max_parallelism": workers,
            "micro_batch_size": batch,
            "epochs": numbers(cells, "epochs", where, accepted, least=0, findings=findings),
            "is_heterogeneous": flag > 0,
            "home_gpu": cells["preferred_gpu"].str.lower(),
            ROW: cells[ROW],
        }
    )
    n_read = len(frame)
    again = frame["job_id"].duplicated()
    if dedup == "artifact":
        last = frame.groupby("job_id", sort=False).tail(1).set_index("job_id")
        kept = drop(frame, again, NAME_REPLACED, findings)
        frame = last.loc[kept["job_id"]].reset_index()
        report = finish_report(where, n_read, len(frame), findings)
        return EASYSCALE_JOBS.validate(frame.drop(columns=ROW), where), report
    repair(frame, again, NAME_NUMBERED, findings)
    number = (frame.groupby("job_id").cumcount() + 1).astype(str)
    frame = frame.assign(job_id=frame["job_id"].mask(again, frame["job_id"] + "#" + number))
    ordered = in_order(frame, findings).drop(columns=ROW)
    report = finish_report(where, n_read, len(frame), findings)
    return EASYSCALE_JOBS.validate(ordered, where), report


def _easyscale_cells(path: str | Path, findings: list[Finding]) -> pd.DataFrame:
    """Split the lines without a CSV parser, which would reject lines of different lengths."""
    lines = read_lines(path, _EASYSCALE, findings)
    where, n = str(path), len(_EASYSCALE)
    if tuple(name.lower() for name in lines[0][:n]) != _EASYSCALE:
        raise cell_error(where, 0, "header", ",".join(lines[0]), ",".join(_EASYSCALE))
    if len(lines) == 1:
        raise cell_error(where, 1, "name", "nothing", "at least one job")
    stray = [row for row, line in enumerate(lines[1:], 1) if len(line) > n]
    if stray:
        findings.append(Finding("repaired", STRAY_CELLS, tuple(stray)))
    for row, line in enumerate(lines[1:], 1):
        check_length(row, line[:n], _EASYSCALE, where)
    body = [line[:n] for line in lines[1:]]
    return pd.DataFrame(body, columns=list(_EASYSCALE)).assign(**{ROW: range(1, len(body) + 1)})


_OOBLECK = ("time", "event", "node")
_EVENTS = {"add": "joined", "remove": "failed"}
_LONGEST_MS = round(3652 * DAY / MS)  # simulators take steps of seconds


def read_oobleck_nodes(path: str | Path) -> tuple[pd.DataFrame, ReadReport]:
    """Read a node availability trace: a table ``time_s, node_id, kind, node``, and the report.

    ``kind`` is ``joined`` or ``failed``; ``node`` is the name in the trace. ``node_id`` is the lowest free
    slot of the cluster when the node joins, so there are never more slots than nodes alive at once.
    Decreasing times, unknown events, and nodes that are added twice or removed while absent are rejected.
    """
    where, findings = str(path), list[Finding]()
    lines = read_lines(path, _OOBLECK, findings)
    rows, slots, free, before = [], dict[str, int](), list[int](), 0
    gone: set[str] = set()
    for number, line in enumerate(lines, 1):
        check_length(number, line, _OOBLECK, where)
        time, event, node = line
        time_ms = whole(time)
        if time_ms is None or time_ms > _LONGEST_MS:
            accepted = f"a whole number of ms, up to {_LONGEST_MS} (ten years)"
            raise cell_error(where, number, "time", time, accepted)
        if event not in _EVENTS:
            raise cell_error(where, number, "event", event, "add, remove")
        if not node:
            raise cell_error(where, number, "node", node, "a name")
        if time_ms < before:
            accepted = f"times that do not fall; the row above has {before}"
            raise cell_error(where, number, "time", time_ms, accepted)
        before = time_ms
        if event == "add" and (node in slots or node in gone):
            raise cell_error(where, number, "node", node, "a node that was not added before")
        if event == "remove" and node not in slots:
            accepted = f"a node that is there: {', '.join(sorted(slots)) or 'none'}"
            raise cell_error(where, number, "node", node, accepted)
        if event == "add":
            slots[node] = heapq.heappop(free) if free else len(slots)
        rows.append((time_ms * MS, slots[node], _EVENTS[event], node))
        if event == "remove":
            heapq.heappush(free, slots.pop(node))
            gone.add(node)
    table = pd.DataFrame(rows, columns=["time_s", "node_id", "kind", "node"])
    return table, finish_report(where, len(lines), len(table), findings)
