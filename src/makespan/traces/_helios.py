"""Reader of the Helios traces: one job list a cluster and a table of daily quotas.

Format: the data description of Hu et al., "Characterization and Prediction of Deep Learning
Workloads in Large-Scale GPU Datacenters", SC 2021. Times are local, without a zone.
"""

import re
from pathlib import Path

import pandas as pd

from makespan.errors import TraceError
from makespan.traces._files import cell_error, datetimes, numbers, read_cells
from makespan.traces._report import ROW, Finding, ReadReport, drop, finish_report, repair
from makespan.traces._requests import RequestTrace, finish_requests

__all__ = ["read_helios_jobs", "read_helios_quota"]

_COLUMNS = (
    "job_id", "user", "vc", "gpu_num", "cpu_num", "node_num", "state",
    "submit_time", "start_time", "end_time", "duration",
)  # fmt: skip
_STATES = ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "RUNNING", "PENDING", "SUSPENDED")
_UNFINISHED = {"RUNNING": "running at the end of the trace", "PENDING": "never started"}
_DURATION_TOLERANCE_S = 1.0
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")


def read_helios_jobs(path: str | Path, *, keep_cancelled: bool = False) -> RequestTrace:
    """Read the job list of one Helios cluster (``cluster_log.csv``).

    Parameters
    ----------
    path
        The file.
    keep_cancelled
        Whether jobs that their user cancelled are kept; they held GPUs all the same.

    Returns
    -------
    RequestTrace
        The tenant is the virtual cluster.

    Raises
    ------
    MissingDataError
        There is no such file.
    TraceError
        The file is empty, lacks a column, a cell cannot be read, or no job is left.
    """
    where, findings = str(path), list[Finding]()
    cells = read_cells(path, _COLUMNS, findings)
    _check_states(cells, where)
    frame = pd.DataFrame(
        {
            "job_id": cells["job_id"],
            "submit_time_s": datetimes(cells, "submit_time", where),
            "start_s": datetimes(cells, "start_time", where),
            "end_s": datetimes(cells, "end_time", where),
            "stated_s": numbers(cells, "duration", where, "a duration in seconds"),
            "n_gpus": numbers(cells, "gpu_num", where, "a number of GPUs, 0 or more", least=0).fillna(0),
            "n_cpus": numbers(cells, "cpu_num", where, "a number of CPUs, 0 or more", least=0).fillna(0),
            "tenant": cells["vc"],
            "status": cells["state"].str.upper(),
            ROW: cells[ROW],
        }
    )
    for state, reason in _UNFINISHED.items():
        frame = drop(frame, frame["status"] == state, reason, findings)
    if not keep_cancelled:
        frame = drop(frame, frame["status"] == "CANCELLED", "cancelled", findings)
    return finish_requests(_durations(frame, findings), findings, where, len(cells))


def _check_states(cells: pd.DataFrame, where: str) -> None:
    unknown = ~cells["state"].str.upper().isin(_STATES)
    for row, state in zip(cells[ROW][unknown], cells["state"][unknown], strict=True):
        raise cell_error(where, int(row), "state", state, ", ".join(_STATES))


def _durations(frame: pd.DataFrame, findings: list[Finding]) -> pd.DataFrame:
    """Take durations from start and end; the stated one may contradict them."""
    duration = frame["end_s"] - frame["start_s"]
    contradicts = (frame["stated_s"] - duration).abs() > _DURATION_TOLERANCE_S
    repair(frame, contradicts, "duration contradicts start and end, which are taken", findings)
    early = frame["start_s"] < frame["submit_time_s"]
    repair(frame, early, "starts before its submission; submission set to the start", findings)
    submit = frame["submit_time_s"].mask(early, frame["start_s"])
    return frame.assign(duration_s=duration, submit_time_s=submit).drop(
        columns=["start_s", "end_s", "stated_s"]
    )


def read_helios_quota(path: str | Path) -> tuple[pd.DataFrame, ReadReport]:
    """Read the daily GPU quota of the virtual clusters (``cluster_gpu_number.csv``).

    Parameters
    ----------
    path
        The file.

    Returns
    -------
    tuple
        A table ``date, tenant, n_gpus`` (text, text, whole number), and the report: days on which
        the stated total differs from the sum, which is taken.

    Raises
    ------
    MissingDataError
        There is no such file.
    TraceError
        The file is empty, lacks a column, or a cell cannot be read.
    """
    where, findings = str(path), list[Finding]()
    tenants = _tenants(path)
    cells = read_cells(path, ["date", *tenants, "total"], findings)
    _check_dates(cells, where)
    quota = pd.DataFrame(
        {
            name: numbers(cells, name, where, "a number of GPUs, 0 or more", least=0).fillna(0)
            for name in (*tenants, "total")
        }
    )
    wrong = quota["total"] != quota[list(tenants)].sum(axis=1)
    repair(cells, wrong, "total differs from the sum of the virtual clusters, which is taken", findings)
    table = (
        quota[list(tenants)].assign(date=cells["date"]).melt("date", var_name="tenant", value_name="n_gpus")
    )
    report = finish_report(where, len(cells), len(cells), findings)
    return table.astype({"n_gpus": "int64"}).sort_values(["date", "tenant"], ignore_index=True), report


def _tenants(path: str | Path) -> tuple[str, ...]:
    findings: list[Finding] = []
    read_cells(path, ("date", "total"), findings)
    first: pd.DataFrame = pd.read_csv(path, nrows=0, encoding="utf-8-sig")
    names = tuple(str(name).strip() for name in first.columns if str(name).strip() not in ("date", "total"))
    if not names:
        raise TraceError(f"{path}: no virtual cluster; accepted: columns date, one a virtual cluster, total")
    return names


def _check_dates(cells: pd.DataFrame, where: str) -> None:
    seen: set[str] = set()
    for row, date in zip(cells[ROW], cells["date"], strict=True):
        if not _DATE.fullmatch(date):
            raise cell_error(where, int(row), "date", date, "a date such as 2020-09-01")
        if date in seen:
            raise cell_error(where, int(row), "date", date, "one row a day")
        seen.add(date)
