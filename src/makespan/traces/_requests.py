"""The canonical table of what a foreign trace asked for: devices and time, but no model."""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from makespan.tables import REQUESTS
from makespan.traces._files import cell_error
from makespan.traces._report import ROW, Finding, ReadReport, drop, finish_report, repair

__all__ = ["RequestTrace", "finish_requests", "whole"]

_LARGEST_REQUEST = 1e6


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """Jobs of a trace that does not say what they train.

    Parameters
    ----------
    table
        Schema `REQUESTS`, in order of submission.
    report
        What was dropped or repaired.
    origin_s
        Submission time of the first job in the clock of the trace [s].
    """

    table: pd.DataFrame
    report: ReadReport
    origin_s: float


def finish_requests(frame: pd.DataFrame, findings: list[Finding], where: str, n_read: int) -> RequestTrace:
    """Apply the rules that all traces share and build the canonical table.

    Jobs without a positive number of GPUs or a positive duration and repeated names are dropped;
    rows that are not in order of submission are sorted. Each is reported.

    Parameters
    ----------
    frame
        Columns of `REQUESTS` and `ROW`; times in the clock of the trace, NaN where missing.
    findings
        What was found so far.
    where
        The file.
    n_read
        Rows of the file.

    Raises
    ------
    TraceError
        No job is left, or a request is larger than any cluster.
    """
    frame = frame.assign(n_gpus=whole(frame, "n_gpus", where), n_cpus=whole(frame, "n_cpus", where))
    kept = drop(frame, frame["submit_time_s"].isna(), "submission time missing", findings)
    kept = drop(kept, ~(kept["n_gpus"] > 0), "no GPU requested", findings)
    kept = drop(kept, kept["duration_s"].isna(), "end or start missing", findings)
    kept = drop(kept, kept["duration_s"] < 0, "ends before it starts", findings)
    kept = drop(kept, kept["duration_s"] == 0, "held its GPUs for no time", findings)
    again = kept["job_id"].duplicated()
    kept = drop(kept, again, "job name occurs again; the first row is kept", findings)
    late = kept["submit_time_s"].diff() < 0
    repair(kept, late, "submitted before the row above; rows sorted", findings)
    report = finish_report(where, n_read, len(kept), findings)
    ordered = kept.sort_values("submit_time_s", kind="stable")
    origin_s = float(ordered["submit_time_s"].iloc[0])
    shifted = ordered.assign(submit_time_s=ordered["submit_time_s"] - origin_s).drop(columns=ROW)
    return RequestTrace(REQUESTS.validate(shifted, where), report, origin_s)


def whole(frame: pd.DataFrame, column: str, where: str) -> "pd.Series[float]":
    """Round requests in fractions of a device up; NaN stays NaN.

    Raises
    ------
    TraceError
        A request is larger than any cluster; names row and column.
    """
    values = frame[column]
    wrong = values > _LARGEST_REQUEST
    for row, value in zip(frame[ROW][wrong], values[wrong], strict=True):
        raise cell_error(where, int(row), column, value, f"up to {_LARGEST_REQUEST:g} devices a job")
    return pd.Series(np.ceil(values.round(9).to_numpy()), index=values.index)
