"""Reader of throughput tables in the canonical schema, for results and for own measurements."""

import math
from pathlib import Path

import pandas as pd

from makespan.errors import TraceError
from makespan.tables import THROUGHPUT, read_csv
from makespan.throughput._rows import RowNames, canonical_rows, check_times
from makespan.workloads import Workload, workload

__all__ = ["read_throughput"]


def read_throughput(path: str | Path) -> pd.DataFrame:
    """Read a canonical throughput table and check its rows.

    Parameters
    ----------
    path
        CSV file of schema `makespan.tables.THROUGHPUT`, of one workload.

    Returns
    -------
    pandas.DataFrame
        The checked table.

    Raises
    ------
    MissingDataError
        There is no such file.
    TraceError
        The file is empty or a cell has no accepted value; names row and column.
    UnknownNameError
        The workload is not in the zoo.
    """
    frame = read_csv(path, THROUGHPUT)
    where = str(path)
    keys = sorted(set(frame["workload"]))
    if len(keys) != 1:
        found = ", ".join(keys) or "no rows"
        raise TraceError(f"{where}: column 'workload': found {found}; accepted: one workload a file")
    names = RowNames(where=where, iter_time="iter_time_s")
    spec = workload(keys[0])
    _check_values(frame, spec, names)
    return canonical_rows(frame, spec, names)


def _check_values(frame: pd.DataFrame, spec: Workload, names: RowNames) -> None:
    accepted: dict[str, str | int] = {
        "workload": spec.key,
        "global_batch_size": spec.global_batch_size,
    }
    for column, wanted in accepted.items():
        for row, value in enumerate(frame[column]):
            if value != wanted:
                raise names.error(row, column, value, str(wanted))
    for row, (threads, feasible, time) in enumerate(
        zip(frame["cpu_threads"], frame["feasible"], frame["iter_time_s"], strict=True)
    ):
        if threads < 1:
            raise names.error(row, "cpu_threads", threads, "a whole number, at least 1")
        if feasible and not (math.isfinite(time) and time > 0):
            raise names.error(row, "iter_time_s", time, "a positive time where feasible is true")
        if not feasible and not math.isnan(time):
            raise names.error(row, "iter_time_s", time, "no value where feasible is false")
    phases = frame[["forward_s", "overlap_sync_s", "optimize_s"]].fillna(0.0)
    check_times(phases, {name: name for name in phases.columns}, names)
