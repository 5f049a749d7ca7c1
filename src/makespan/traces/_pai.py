"""Reader of the Alibaba PAI trace of 2020: tables of jobs, tasks and instances.

Format: the data description of Weng et al., "MLaaS in the Wild: Workload Analysis and Scheduling
in Large-Scale Heterogeneous GPU Clusters", NSDI 2022. A job has tasks, a task has instances; CPU
and GPU requests are percentages of one device and hold for each instance of a task. The files
come without header line; one with the published names is accepted.
"""

from pathlib import Path

import numpy as np
import pandas as pd

from makespan.errors import TraceError
from makespan.traces._files import cell_error, iter_cells, numbers, read_cells
from makespan.traces._report import ROW, Finding, drop, repair
from makespan.traces._requests import RequestTrace, finish_requests, whole

__all__ = ["read_pai_jobs", "read_pai_machines"]

_JOB = ("job_name", "inst_id", "user", "status", "start_time", "end_time")
_TASK = (
    "job_name", "task_name", "inst_num", "status", "start_time", "end_time",
    "plan_cpu", "plan_mem", "plan_gpu", "gpu_type",
)  # fmt: skip
_INSTANCE = (
    "job_name", "task_name", "inst_name", "worker_name", "inst_id", "status",
    "start_time", "end_time", "machine",
)  # fmt: skip
_MACHINE = ("machine", "gpu_type", "cap_cpu", "cap_mem", "cap_gpu")
_STATUSES = ("Terminated", "Failed", "Running", "Waiting")
_PERCENT = 100.0
_ROUNDING = 1e-9
_CHUNK_ROWS = 1_000_000
_SECONDS = "a time in seconds, or nothing"


def read_pai_jobs(
    jobs: str | Path,
    tasks: str | Path,
    instances: str | Path | None = None,
    *,
    machines: dict[str, int] | None = None,
) -> RequestTrace:
    """Read the PAI tables into one row a job.

    The GPUs of a job are the sum over its tasks of instances times request, rounded up to whole
    devices. It holds them from the first start to the last end of its instances, or of its tasks
    where the instance table is not given.

    Parameters
    ----------
    jobs, tasks, instances
        ``pai_job_table``, ``pai_task_table`` and, optionally, ``pai_instance_table``.
    machines
        GPUs of each machine, see `read_pai_machines`; with ``instances``, jobs on unknown machines
        are dropped.

    Returns
    -------
    RequestTrace
        The tenant is the user.

    Raises
    ------
    MissingDataError
        A file is not there.
    TraceError
        A file is empty or lacks a column, a cell cannot be read, or no job is left.
    """
    where, findings = str(jobs), list[Finding]()
    cells = read_cells(jobs, _JOB, findings, header=_JOB)
    _check_status(cells, where)
    requests = _requests(tasks, findings)
    spans = _spans(instances, _INSTANCE, findings) if instances else _spans(tasks, _TASK, [])
    frame = pd.DataFrame(
        {
            "job_id": cells["job_name"],
            "submit_time_s": numbers(cells, "start_time", where, _SECONDS, least=0),
            "end_s": numbers(cells, "end_time", where, _SECONDS, least=0),
            "tenant": cells["user"],
            "status": cells["status"].str.capitalize(),
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
    frame = _durations(frame, findings)
    frame = _whole_devices(frame, findings, where)
    return finish_requests(frame, findings, where, len(cells))


def _check_status(cells: pd.DataFrame, where: str) -> None:
    unknown = ~cells["status"].str.capitalize().isin(_STATUSES)
    for row, status in zip(cells[ROW][unknown], cells["status"][unknown], strict=True):
        raise cell_error(where, int(row), "status", status, ", ".join(_STATUSES))


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
    where = str(path)
    wanted = [name for name in ("job_name", "start_time", "end_time", "machine") if name in header]
    pieces = [
        _piece_spans(cells, where)
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


def _durations(frame: pd.DataFrame, findings: list[Finding]) -> pd.DataFrame:
    """Take the held time from instances or tasks, and from the job where they say nothing."""
    start = frame["first_s"].fillna(frame["submit_time_s"])
    end = frame["last_s"].fillna(frame["end_s"])
    guessed = (frame["first_s"].isna() | frame["last_s"].isna()) & start.notna() & end.notna()
    repair(frame, guessed, "parts lack their start or end; those of the job are taken", findings)
    return frame.assign(duration_s=end - start).drop(
        columns=["first_s", "last_s", "end_s", "machines"], errors="ignore"
    )


def _whole_devices(frame: pd.DataFrame, findings: list[Finding], where: str) -> pd.DataFrame:
    rounded = whole(frame, "n_gpus", where)
    shared = (rounded - frame["n_gpus"]) > _ROUNDING
    repair(frame, shared, "asks for a part of a GPU; rounded up to whole ones", findings)
    return frame.assign(n_gpus=rounded)


def read_pai_machines(path: str | Path) -> dict[str, int]:
    """Read the machine table (``pai_machine_spec``): GPUs of each machine.

    Raises
    ------
    MissingDataError
        There is no such file.
    TraceError
        The file is empty, a count cannot be read, or a machine occurs with two counts.
    """
    where = str(path)
    cells = read_cells(path, _MACHINE, [], header=_MACHINE)
    counts = numbers(cells, "cap_gpu", where, "a number of GPUs, 0 or more", least=0).fillna(0)
    return unique_counts(cells, "machine", counts, "cap_gpu", where)


def unique_counts(
    cells: pd.DataFrame, name_column: str, counts: "pd.Series[float]", column: str, where: str
) -> dict[str, int]:
    """Return counts by name, refusing names with two different ones.

    Raises
    ------
    TraceError
        A name occurs with two counts, or a count is no whole number.
    """
    found: dict[str, int] = {}
    for row, name, count in zip(cells[ROW], cells[name_column], counts, strict=True):
        if not np.isfinite(count) or count != int(count):
            raise cell_error(where, int(row), column, count, "a whole number of GPUs")
        if found.setdefault(str(name), int(count)) != int(count):
            accepted = f"{found[str(name)]} as in an earlier row of {name!r}"
            raise cell_error(where, int(row), column, int(count), accepted)
    if not found:
        raise TraceError(f"{where}: no machine; accepted: at least one")
    return found
