"""Reader of the job lists of the EasyScale artifact.

Columns ``name, time`` [s], ``application, max_parallelism, batch_size, epochs,
enable_heterogeneous_deterministic`` and ``preferred_gpu``. The published list repeats names, is
not in order of time, and holds a stray ninth column and a flag of 40; each is repaired and reported.
"""

from pathlib import Path
from typing import Literal

import pandas as pd

from makespan.tables import Column, TableSchema
from makespan.traces._files import cell_error, is_missing, numbers, read_raw
from makespan.traces._report import ROW, Finding, ReadReport, drop, finish_report, repair

__all__ = ["EASYSCALE_JOBS", "read_easyscale_jobs"]

EASYSCALE_JOBS = TableSchema(
    "easyscale_jobs",
    (
        Column("job_id", "text", "", "name of the job, unique"),
        Column("submit_time_s", "float", "s", "when it enters the system"),
        Column("workload", "text", "", "what it trains"),
        Column("max_parallelism", "int", "1", "logical workers"),
        Column("micro_batch_size", "int", "samples", "samples a logical worker and step"),
        Column("epochs", "float", "1", "passes over the data"),
        Column("is_heterogeneous", "bool", "", "whether it may run on mixed GPU types"),
        Column("home_gpu", "text", "", "GPU type that it prefers"),
    ),
)

_NAMES = (
    "name", "time", "application", "max_parallelism", "batch_size", "epochs",
    "enable_heterogeneous_deterministic", "preferred_gpu",
)  # fmt: skip


def read_easyscale_jobs(
    path: str | Path, dedup: Literal["rename", "artifact"] = "rename"
) -> tuple[pd.DataFrame, ReadReport]:
    """Read an EasyScale job list.

    Parameters
    ----------
    path
        CSV file.
    dedup
        What becomes of a name that occurs again: ``"rename"`` keeps every row and numbers the
        later ones; ``"artifact"`` does as the released simulator, where a later row replaces the
        earlier one at its position and nothing is sorted.

    Returns
    -------
    tuple
        Schema `EASYSCALE_JOBS`, in order of submission if renamed, and the report.

    Raises
    ------
    MissingDataError
        There is no such file.
    TraceError
        The file is empty or lacks a column, or a cell cannot be read.
    """
    where, findings = str(path), list[Finding]()
    cells = _cells(path, findings)
    frame = _frame(cells, where, findings)
    n_read = len(frame)
    again = frame["job_id"].duplicated()
    if dedup == "artifact":
        last = frame.groupby("job_id", sort=False).tail(1).set_index("job_id")
        kept = drop(frame, again, "name occurs again; this row replaces the first one", findings)
        frame = last.loc[kept["job_id"]].reset_index()
        report = finish_report(where, n_read, len(frame), findings)
        return EASYSCALE_JOBS.validate(frame.drop(columns=ROW), where), report
    repair(frame, again, "name occurs again; number appended", findings)
    number = (frame.groupby("job_id").cumcount() + 1).astype(str)
    frame = frame.assign(job_id=frame["job_id"].mask(again, frame["job_id"] + "#" + number))
    late = frame["submit_time_s"].diff() < 0
    repair(frame, late, "submitted before the row above; rows sorted", findings)
    report = finish_report(where, n_read, len(frame), findings)
    ordered = frame.sort_values("submit_time_s", kind="stable").drop(columns=ROW)
    return EASYSCALE_JOBS.validate(ordered, where), report


def _cells(path: str | Path, findings: list[Finding]) -> pd.DataFrame:
    """Split the lines by hand: their lengths differ, which a CSV parser refuses."""
    lines = [line.split(",") for line in read_raw(path, findings).splitlines() if line.strip()]
    where, n = str(path), len(_NAMES)
    if tuple(name.strip() for name in lines[0][:n]) != _NAMES:
        raise cell_error(where, 0, "header", ",".join(lines[0]), ",".join(_NAMES))
    if len(lines) == 1:
        raise cell_error(where, 1, "name", "nothing", "at least one job")
    stray = [row for row, line in enumerate(lines[1:], 1) if len(line) > n]
    if stray:
        findings.append(Finding("repaired", "cells beyond the last named column; ignored", tuple(stray)))
    for row, line in enumerate(lines[1:], 1):
        if len(line) < n:
            raise cell_error(where, row, _NAMES[len(line)], "nothing", f"{n} cells a row")
    body = [[cell.strip() for cell in line[:n]] for line in lines[1:]]
    return pd.DataFrame(body, columns=list(_NAMES)).assign(**{ROW: range(1, len(body) + 1)})


def _frame(cells: pd.DataFrame, where: str, findings: list[Finding]) -> pd.DataFrame:
    for column in _NAMES:
        missing = is_missing(cells[column])
        for row, value in zip(cells[ROW][missing], cells[column][missing], strict=True):
            raise cell_error(where, int(row), column, value, "a value")
    accepted = "a number, 0 or more"
    flag = numbers(cells, "enable_heterogeneous_deterministic", where, "0 or 1", least=0)
    odd = ~flag.isin([0.0, 1.0])
    repair(cells, odd, "flag is neither 0 nor 1; read as 1", findings)
    return pd.DataFrame(
        {
            "job_id": cells["name"],
            "submit_time_s": numbers(cells, "time", where, accepted, least=0),
            "workload": cells["application"],
            "max_parallelism": numbers(cells, "max_parallelism", where, "1 or more", least=1),
            "micro_batch_size": numbers(cells, "batch_size", where, "1 or more", least=1),
            "epochs": numbers(cells, "epochs", where, accepted, least=0),
            "is_heterogeneous": flag > 0,
            "home_gpu": cells["preferred_gpu"].str.lower(),
            ROW: cells[ROW],
        }
    )
