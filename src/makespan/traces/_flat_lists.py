"""Readers of public traces that are one list of jobs: Helios, and the pods of openb.

Formats: the data descriptions of Hu et al., "Characterization and Prediction of Deep Learning Workloads",
SC 2021 (times are local, without a zone), and of Weng et al., "Beware of Fragmentation", ATC 2023 (CPUs and
shares of a GPU in thousandths, memory in MiB, times in seconds from an undisclosed origin). Beside them, the
daily quotas of Helios and the nodes of openb.
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
    datetimes,
    drop,
    finish_report,
    is_missing,
    names,
    numbers,
    one_of,
    read_cells,
    refuse,
    repair,
)
from makespan.traces._requests import RequestTrace, finish_requests
from makespan.units import GIB

__all__ = [
    "NODES",
    "NODE_LIST",
    "read_helios_jobs",
    "read_helios_quota",
    "read_openb_nodes",
    "read_openb_pods",
]

_HELIOS = (
    "job_id", "user", "vc", "gpu_num", "cpu_num", "node_num", "state",
    "submit_time", "start_time", "end_time", "duration",
)  # fmt: skip
_STATES = ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "RUNNING", "PENDING", "SUSPENDED")
_UNFINISHED = {"RUNNING": "running at the end of the trace", "PENDING": "never started"}
_DURATION_TOLERANCE_S = 1.0
_DATE_LENGTH = len("2020-09-01")
_GPUS = "a number of GPUs, 0 or more"
_WHOLE_GPUS = "a whole number of GPUs, 0 or more"

_PODS = (
    "name", "cpu_milli", "num_gpu", "gpu_milli", "qos", "pod_phase",
    "creation_time", "deletion_time", "scheduled_time",
)  # fmt: skip
_PHASES = ("Succeeded", "Running", "Pending", "Failed")
NODES: tuple[str, ...] = ("sn", "cpu_milli", "memory_mib", "gpu", "model")
_MILLI = 1000.0
_MIB = GIB / 1024
_SECONDS = "a time in seconds, or nothing"

NODE_LIST: TableSchema = table_schema(
    "node_list",
    ("node_id", "text", "", "name of the node"),
    ("n_gpus", "int", "1", "GPUs of the node"),
    ("n_cpus", "int", "1", "CPUs of the node"),
    ("memory_bytes", "float", "B", "host memory"),
    ("gpu", "text", "", "type of its GPUs, empty if it has none"),
)


def _finish(frame: pd.DataFrame, findings: list[Finding], where: str, n_read: int) -> RequestTrace:
    """Take durations from start to end, and submissions that come after the start from the start."""
    early = frame["start_s"] < frame["submit_time_s"]
    repair(frame, early, "starts before its submission; submission set to the start", findings)
    timed = frame.assign(
        submit_time_s=frame["submit_time_s"].mask(early, frame["start_s"]),
        duration_s=frame["end_s"] - frame["start_s"],
    )
    return finish_requests(timed.drop(columns=["start_s", "end_s"]), findings, where, n_read)


def read_helios_jobs(path: str | Path, *, keep_cancelled: bool = False) -> RequestTrace:
    """Read the job list of one Helios cluster (``cluster_log.csv``); the tenant is the virtual cluster.

    ``keep_cancelled`` keeps jobs that their user cancelled; they held GPUs all the same.
    """
    where, findings = str(path), list[Finding]()
    cells = read_cells(path, _HELIOS, findings)
    frame = pd.DataFrame(
        {
            "job_id": names(cells, "job_id", where),
            "status": one_of(cells, "state", _STATES, where),
            "submit_time_s": datetimes(cells, "submit_time", where),
            "start_s": datetimes(cells, "start_time", where),
            "end_s": datetimes(cells, "end_time", where),
            "stated_s": numbers(cells, "duration", where, "a duration in seconds"),
            "n_gpus": numbers(cells, "gpu_num", where, _GPUS, least=0).fillna(0),
            "n_cpus": numbers(cells, "cpu_num", where, "a number of CPUs, 0 or more", least=0).fillna(0),
            "tenant": cells["vc"],
            ROW: cells[ROW],
        }
    )
    for state, reason in _UNFINISHED.items():
        frame = drop(frame, frame["status"] == state, reason, findings)
    if not keep_cancelled:
        frame = drop(frame, frame["status"] == "CANCELLED", "cancelled", findings)
    stated_s = frame.pop("stated_s")
    contradicts = (stated_s - (frame["end_s"] - frame["start_s"])).abs() > _DURATION_TOLERANCE_S
    repair(frame, contradicts, "duration contradicts start and end, which are taken", findings)
    return _finish(frame, findings, where, len(cells))


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
            name: numbers(cells, name, where, _WHOLE_GPUS, least=0, is_whole=True).fillna(0)
            for name in (*tenants, "total")
        }
    )
    differs = quota.pop("total") != quota.sum(axis=1)
    repair(cells, differs, "total differs from the sum of the virtual clusters, which is taken", findings)
    table = quota.assign(date=cells["date"]).melt("date", var_name="tenant", value_name="n_gpus")
    report = finish_report(where, len(cells), len(cells), findings)
    return table.astype({"n_gpus": "int64"}).sort_values(["date", "tenant"], ignore_index=True), report


def _tenants(names: Iterable[str]) -> list[str]:
    return [name for name in names if name not in ("date", "total", ROW)]


def read_openb_pods(path: str | Path) -> RequestTrace:
    """Read a pod list (``openb_pod_list_*.csv``); the tenant is the class of service.

    Pods that were still there at the last deletion time of the file ran at its end and are dropped;
    requests for a share of a GPU get a whole one.
    """
    where, findings = str(path), list[Finding]()
    cells = read_cells(path, _PODS, findings)
    cpus = numbers(cells, "cpu_milli", where, "thousandths of a CPU, 0 or more", least=0).fillna(0)
    frame = pd.DataFrame(
        {
            "job_id": names(cells, "name", where),
            "status": one_of(cells, "pod_phase", _PHASES, where),
            "submit_time_s": numbers(cells, "creation_time", where, _SECONDS, least=0),
            "start_s": numbers(cells, "scheduled_time", where, _SECONDS, least=0),
            "end_s": numbers(cells, "deletion_time", where, _SECONDS, least=0),
            "n_gpus": numbers(cells, "num_gpu", where, _GPUS, least=0).fillna(0),
            "n_cpus": np.ceil(cpus / _MILLI),
            "share": numbers(cells, "gpu_milli", where, "thousandths of a GPU, 0 or more", least=0) / _MILLI,
            "tenant": cells["qos"],
            ROW: cells[ROW],
        }
    )
    frame = drop(frame, frame["start_s"].isna() & frame["submit_time_s"].notna(), "never scheduled", findings)
    at_end = (frame["end_s"] == frame["end_s"].max()) & frame["end_s"].duplicated(keep=False)
    running = (frame["status"] == "Running") & at_end
    frame = drop(frame, running, "running at the end of the trace", findings)
    shared = (frame["n_gpus"] == 1) & (frame.pop("share") < 1.0)
    repair(frame, shared, "asks for a part of a GPU; rounded up to a whole one", findings)
    return _finish(frame, findings, where, len(cells))


def read_openb_nodes(path: str | Path) -> tuple[pd.DataFrame, ReadReport]:
    """Read a node list (``openb_node_list_*.csv``): schema `NODE_LIST`, and the report.

    Nodes without GPU are kept; a node that occurs twice with different resources is refused.
    """
    where, findings = str(path), list[Finding]()
    cells = read_cells(path, NODES, findings)
    gpus = numbers(cells, "gpu", where, _WHOLE_GPUS, least=0, is_whole=True).fillna(0)
    cpus, mebibytes = (
        numbers(cells, name, where, "a number, 0 or more", least=0).fillna(0)
        for name in ("cpu_milli", "memory_mib")
    )
    table = pd.DataFrame(
        {
            "node_id": names(cells, "sn", where),
            "n_gpus": gpus,
            "n_cpus": np.floor(cpus / _MILLI),
            "memory_bytes": mebibytes * _MIB,
            "gpu": cells["model"].mask(is_missing(cells["model"]), ""),
        }
    )
    same, table = table.duplicated(), table.assign(**{ROW: cells[ROW]})
    kept = drop(table, same, "node occurs again with the same resources", findings)
    again = kept["node_id"].duplicated()
    refuse(cells.loc[kept.index], again, "sn", "one row a node, or equal ones", where)
    report = finish_report(where, len(cells), len(kept), findings)
    return NODE_LIST.validate(kept.drop(columns=ROW), where), report
