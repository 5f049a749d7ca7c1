"""Traces that do not say what their jobs train."""

from pathlib import Path

import numpy as np
import pandas as pd

from makespan.errors import InputError
from makespan.tables import REQUESTS
from makespan.traces import (
    RequestTrace,
    read_easyscale_jobs,
    read_helios_jobs,
    read_openb_pods,
    read_pai_jobs,
    read_philly_jobs,
)

__all__ = ["FOREIGN", "read_foreign"]

_PAI_TASKS = "pai_task_table.csv"

FOREIGN = ("philly", "helios", "pai", "openb", "easyscale")
"""Formats whose jobs are mapped to workloads of the zoo."""


def read_foreign(
    file_format: str, path: Path, tasks: Path | None = None, epoch_time_s: float | None = None
) -> RequestTrace:
    """Read a trace that names devices and durations, but no models.

    Parameters
    ----------
    file_format
        One of `FOREIGN`.
    path
        The job list.
    tasks
        Format pai: the task table; beside the job table unless given.
    epoch_time_s
        Format easyscale: how long an epoch takes with all logical workers [s], because these lists give
        epochs only.

    Raises
    ------
    MakespanError
        A file is missing or broken, or an option that the format needs is not given.
    """
    if file_format == "philly":
        return read_philly_jobs(path)
    if file_format == "helios":
        return read_helios_jobs(path)
    if file_format == "pai":
        return read_pai_jobs(path, tasks or path.with_name(_PAI_TASKS))
    if file_format == "openb":
        return read_openb_pods(path)
    if epoch_time_s is None:
        raise InputError(
            f"{path}: lists of this format state epochs, not durations; accepted: --epoch-time with "
            "the seconds of an epoch"
        )
    return _easyscale(path, epoch_time_s)


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
    return RequestTrace(REQUESTS.validate(requests, str(path)), report, origin_s)
