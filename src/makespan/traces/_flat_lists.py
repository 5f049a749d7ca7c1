"""Readers of public traces that are one list of jobs, and of the lists of nodes and quotas beside them.

Formats: the data descriptions of Hu et al., "Characterization and Prediction of Deep Learning Workloads",
SC 2021 (Helios; times are local, without a zone; states are those of Slurm), of Weng et al., "Beware of
Fragmentation", ATC 2023 (openb; CPUs and shares of a GPU in thousandths, memory in MiB, times in seconds from
an undisclosed origin), and of Duan et al., "GFS", ASPLOS 2026 (the spot trace of Alibaba; requests hold for
each worker, times in seconds from the first submission).
"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pandas as pd

from makespan.errors import TraceError
from makespan.tables import TableSchema, table_schema
from makespan.traces._cells import (
    ROW,
    Finding,
    ReadReport,
    drop,
    finish_report,
    is_missing,
    names,
    numbers,
    one_of,
    read_cells,
    refuse,
    repair,
    times,
)
from makespan.traces._repairs import (
    CANCELLED,
    NO_STATE,
    NODE_AGAIN,
    QUOTA_TOTAL,
    RUNNING,
    UNSTARTED,
)
from makespan.traces._requests import RequestTrace, finish_requests
from makespan.units import GIB

__all__ = [
    "NODES",
    "NODE_LIST",
    "SPOT_NODES",
    "read_helios_jobs",
    "read_helios_quota",
    "read_openb_nodes",
    "read_openb_pods",
    "read_spot_jobs",
    "read_spot_nodes",
]

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

    Columns ``job_id, gpu_num, submit_time, start_time, end_time`` and, where they are there, ``vc``,
    ``cpu_num``, ``state`` (any state of Slurm) and ``duration`` [s].

    ``keep_cancelled`` keeps jobs that their user cancelled; they held GPUs all the same.
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

    Returns a table ``date, tenant, n_gpus``, and the report: days on which the stated total differs
    from the sum, which is taken.
    """
    where, findings = str(path), list[Finding]()
    cells = read_cells(path, lambda names: ["date", *_tenants(names), "total"], findings)
    tenants = _tenants(cells.columns)
    if not tenants:
        raise TraceError(f"{path}: no virtual cluster; accepted: columns date, one a virtual cluster, total")
    dates = pd.to_datetime(cells["date"], format="%Y-%m-%d", errors="coerce")
    wrong = dates.isna() | (cells["date"].str.len() != _DATE_LENGTH)
    refuse(cells, wrong, "date", "a date such as 2020-09-01", where)
    refuse(cells, cells["date"].duplicated(), "date", "one row a day", where)
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
        "the list says what pods ask for, not when: add the times of the three columns" if is_untimed else ""
    )


def read_openb_pods(path: str | Path) -> RequestTrace:
    """Read a pod list (``openb_pod_list_*.csv``); the tenant is the class of service.

    Pods that were still there at the last deletion time of the file ran at its end and are dropped; requests
    for a share of a GPU get a whole one. Lists of five columns, without times, are refused.
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

    Nodes without GPU are kept; a node that occurs twice with different resources is refused.
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
    return _finish_nodes(table, cells, "sn", where, findings)


def _finish_nodes(
    table: pd.DataFrame, cells: pd.DataFrame, column: str, where: str, findings: list[Finding]
) -> tuple[pd.DataFrame, ReadReport]:
    """Leave out nodes that occur again, and refuse those that do with other resources."""
    same, table = table.duplicated(), table.assign(**{ROW: cells[ROW]})
    kept = drop(table, same, NODE_AGAIN, findings)
    again = kept["node_id"].duplicated()
    refuse(cells.loc[kept.index], again, column, "one row a node, or equal ones", where)
    report = finish_report(where, len(cells), len(kept), findings)
    return NODE_LIST.validate(kept.drop(columns=ROW), where), report


def read_spot_jobs(path: str | Path) -> RequestTrace:
    """Read the job list of Alibaba's spot GPU trace (``job_info_df.csv``); the tenant is the organization.

    Jobs of type HP are guaranteed, spot jobs are not. GPUs and CPUs are those of a worker times the workers.
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

    The list does not state memory; a node that occurs twice with different resources is refused.
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
    return _finish_nodes(table, cells, "node_name", where, findings)
