"""The jobs of a scenario that are read: a trace of any known format, and where the authors' lists lie."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from makespan.errors import InputError, unknown_name
from makespan.tables import REQUESTS
from makespan.throughput import find_dataset, shipped_register, verify
from makespan.traces import (
    Finding,
    JobTrace,
    RequestTrace,
    read_easyscale_jobs,
    read_helios_jobs,
    read_jobs,
    read_morphling_jobs,
    read_openb_pods,
    read_pai_jobs,
    read_philly_jobs,
)

__all__ = ["FORMATS", "published_list", "read_trace"]

FORMATS = ("auto", "morphling", "philly", "helios", "pai", "openb", "easyscale")
"""Formats of traces; jobs of the last five do not say what they train."""

_PAI_TASKS = "pai_task_table.csv"
_READERS: Mapping[str, Callable[[Path], JobTrace | RequestTrace]] = {
    "auto": read_jobs,
    "morphling": read_morphling_jobs,
    "philly": read_philly_jobs,
    "helios": read_helios_jobs,
    "openb": read_openb_pods,
}


def read_trace(
    path: str | Path,
    file_format: str = "auto",
    *,
    tasks: Path | None = None,
    epoch_time_s: float | None = None,
) -> JobTrace | RequestTrace:
    """Read a trace.

    Parameters
    ----------
    path
        The job list.
    file_format
        One of ``auto`` (the table ``jobs`` or a list of the Morphling artifact), ``morphling``, ``philly``,
        ``helios``, ``pai``, ``openb`` and ``easyscale``.
    tasks
        Format pai: the task table; beside the job table unless given.
    epoch_time_s
        Format easyscale: how long an epoch takes with all logical workers [s]; its lists give epochs only.

    Returns
    -------
    JobTrace or RequestTrace
        Jobs that are ready to run, or, from the last five formats, requests that do not say what they train
        (`makespan.traces.map_requests` chooses). Both have a report of what was dropped and repaired.

    Raises
    ------
    MakespanError
        The format is unknown, a file is missing or broken, or something that the format needs is not given.
    """
    place = Path(path)
    if file_format in _READERS:
        return _READERS[file_format](place)
    if file_format == "pai":
        return read_pai_jobs(place, tasks or place.with_name(_PAI_TASKS))
    if file_format != "easyscale":
        raise unknown_name("format of a trace", file_format, FORMATS)
    if epoch_time_s is None:
        raise InputError(
            f"{path}: lists of this format state epochs, not durations; accepted: --epoch-time "
            "(epoch_time_s) with the seconds of an epoch"
        )
    return _easyscale(place, epoch_time_s)


def _easyscale(path: Path, epoch_time_s: float) -> RequestTrace:
    table, report = read_easyscale_jobs(path)
    origin_s = float(table["submit_time_s"].min())
    requests = pd.DataFrame(
        {
            "job_id": table["job_id"],
            "submit_time_s": table["submit_time_s"] - origin_s,
            "n_gpus": table["max_parallelism"],
            "n_cpus": np.zeros(len(table), dtype=np.int64),
            "duration_s": table["epochs"] * epoch_time_s,
            "tenant": table["home_gpu"],
            "status": "",
        }
    )
    reason = "what a row trains, its batch size and where it may run have no effect: models are drawn"
    told = replace(report, findings=(*report.findings, Finding("ignored", reason)))
    return RequestTrace(REQUESTS.validate(requests, str(path)), told, origin_s)


def published_list(directory: Path, name: str) -> Path:
    """Return where a directory with published files has a job list; refuses one that was changed."""
    stem = name if name == "naive" else f"workload-{name}"
    return verify(find_dataset(shipped_register(), f"morphling-workloads-{stem}"), directory)
