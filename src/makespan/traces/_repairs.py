"""The repairs of job traces: one table for all readers, and the account of what they did."""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

import numpy as np
import pandas as pd
from pandas.api.types import is_numeric_dtype

from makespan.errors import TraceError
from makespan.units import HOUR

__all__ = [
    "CANCELLED", "COMMENT_LINES", "CONTRADICTED", "CPU_PART", "DECIMAL_COMMA", "DURATION_MISSING", "EARLY",
    "FLAG", "GPU_CHANGES", "GPU_PART", "GPU_REQUEST_MISSING", "GPU_TYPE", "HOUR_TIME", "INSTANT", "LARGER",
    "LATE_ROW", "MACHINES", "MODEL", "NAME_AGAIN", "NAME_NUMBERED", "NAME_REPLACED", "NODE_AGAIN",
    "NOT_TIMED", "NO_GPU", "NO_GUARANTEE", "NO_OFFER", "NO_PROMISE", "NO_STATE", "NO_SUBMISSION", "NO_TASK",
    "OTHER_CASE", "OTHER_LINE_ENDS", "PART_REVERSED", "PART_UNTIMED", "QUOTA_TOTAL", "REPAIRS", "REVERSED",
    "ROW", "RUNNING", "SHORT_TIME", "SOME_ZONED", "STEPS", "STRAY_CELLS", "THOUSANDS", "UNSTARTED", "ZONED",
    "Finding", "ReadReport", "drop", "finish_report", "in_order", "repair",
]  # fmt: skip

_LOG = logging.getLogger(__name__)
_SHOWN_ROWS = 5

ROW = "_row"
"""Column that carries the row number of the file, counted from one, through the cleaning."""

UNSTARTED = "never started"
RUNNING = "running at the end of the trace"
CANCELLED = "cancelled"
MACHINES = "machines contradict the machine list"
NO_TASK = "no task of that job in the task table"
NO_SUBMISSION = "submission time missing"
NO_GPU = "no GPU requested"
NOT_TIMED = "end or start missing"
REVERSED = "ends before it starts"
INSTANT = "held its GPUs for no time"
NAME_AGAIN = "job name occurs again; the first row is kept"
EARLY = "starts before its submission; submission set to the start"
CONTRADICTED = "duration contradicts start and end, which are taken"
GPU_PART = "asks for a part of a GPU; rounded up to whole ones"
CPU_PART = "asks for a part of a CPU; rounded up to whole ones"
GPU_REQUEST_MISSING = "a part of the job states no GPUs; it counts as none"
GPU_TYPE = "asks for a type of GPU; it runs on those of the cluster"
LARGER = "asks for more than {} GPUs"
NO_OFFER = "no offer with as many GPUs; the next smaller count is taken"
MODEL = "names what it trains; it trains what is chosen for it here"
STEPS = "states steps; durations follow from the throughputs given"
GPU_CHANGES = "attempts differ in their GPUs; those of the last one are taken"
PART_UNTIMED = "a part lacks its start or end; what the others or the job state is taken"
PART_REVERSED = "a part ends before it starts; it is left out"
NODE_AGAIN = "node occurs again with the same resources"
QUOTA_TOTAL = "total differs from the sum of the virtual clusters, which is taken"
NAME_NUMBERED = "name occurs again; number appended"
NAME_REPLACED = "name occurs again; this row replaces the first one"
STRAY_CELLS = "cells beyond the last named column; ignored"
FLAG = "flag is neither 0 nor 1; read as 1"
LATE_ROW = "submitted before the row above; rows sorted"
DURATION_MISSING = "duration missing; the steps decide"
NO_GUARANTEE = "no column says which jobs are guaranteed; none is"
NO_PROMISE = "does not say whether it is guaranteed; it is not"
NO_STATE = "no column says how jobs ended; all count as ended"
ZONED = "times state a zone or count seconds since 1970; read in UTC"
SOME_ZONED = "these times state no zone beside others in UTC; read in UTC too"
HOUR_TIME = "a time without minutes; minutes and seconds are taken as zero"
SHORT_TIME = "a time without seconds; they are taken as zero"
THOUSANDS = "numbers with commas between thousands; read without"
DECIMAL_COMMA = "numbers with a decimal comma; read with a point"
OTHER_CASE = "column names in another case"
OTHER_LINE_ENDS = "Windows line ends, read as Unix ones"
COMMENT_LINES = "lines before the header; left out"

_DROPPED = (
    UNSTARTED, RUNNING, CANCELLED, MACHINES, NO_TASK, NO_SUBMISSION, NO_GPU, NOT_TIMED, REVERSED, INSTANT,
    NAME_AGAIN, NAME_REPLACED, NODE_AGAIN, LARGER,
)  # fmt: skip
_REPAIRED = (
    EARLY, CONTRADICTED, GPU_PART, CPU_PART, GPU_REQUEST_MISSING, GPU_TYPE, MODEL, STEPS, GPU_CHANGES,
    NO_OFFER, PART_UNTIMED, PART_REVERSED, LATE_ROW, NAME_NUMBERED, QUOTA_TOTAL, STRAY_CELLS, FLAG,
    DURATION_MISSING, NO_STATE, NO_GUARANTEE, NO_PROMISE, ZONED, SOME_ZONED, HOUR_TIME, SHORT_TIME, THOUSANDS,
    DECIMAL_COMMA, OTHER_CASE, OTHER_LINE_ENDS, COMMENT_LINES,
)  # fmt: skip
REPAIRS: Mapping[str, Literal["dropped", "repaired"]] = MappingProxyType(
    {reason: "dropped" if reason in _DROPPED else "repaired" for reason in (*_DROPPED, *_REPAIRED)}
)
"""What is done about each kind of defect, by the reason that reports give, in every reader alike."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One reason for which rows were dropped or repaired, or values were ignored.

    Parameters
    ----------
    action, reason
        What was done, and why; see `REPAIRS`.
    rows
        The data rows concerned, counted from one as in the file; empty if the whole file is meant.
    gpu_hours
        GPUs times duration of these rows after the repair [GPU·h]; None if no row states both.
    added_gpu_hours
        Difference that the repair makes to their GPU time [GPU·h].
    n_untimed
        How many of the rows do not state GPUs and duration.
    """

    action: Literal["dropped", "repaired", "ignored"]
    reason: str
    rows: tuple[int, ...] = ()
    gpu_hours: float | None = None
    added_gpu_hours: float = 0.0
    n_untimed: int = 0

    @property
    def text(self) -> str:
        """The finding in one line."""
        if not self.rows:
            return f"{self.action}: {self.reason} (whole file)"
        shown = ", ".join(str(row) for row in self.rows[:_SHOWN_ROWS])
        more = ", ..." if len(self.rows) > _SHOWN_ROWS else ""
        noun = "row" if len(self.rows) == 1 else "rows"
        return f"{self.action} {len(self.rows)} {noun}{self._time}: {self.reason} ({noun} {shown}{more})"

    @property
    def _time(self) -> str:
        if not self.gpu_hours:
            return ""
        parts = [f"{_shown(self.gpu_hours)} GPU-hours"]
        if self.added_gpu_hours:
            direction = "more" if self.added_gpu_hours > 0 else "fewer"
            parts.append(f"{_shown(abs(self.added_gpu_hours))} {direction} than stated")
        if self.n_untimed:
            parts.append(f"{self.n_untimed} of unknown time")
        return f" ({', '.join(parts)})"


@dataclass(frozen=True, slots=True)
class ReadReport:
    """Account of a file: rows (of nested files: jobs) read, rows kept, and a finding for each difference.

    ``gpu_hours`` is the GPU time of the rows kept [GPU·h]; None for tables that state none.
    """

    where: str
    n_read: int
    n_kept: int
    findings: tuple[Finding, ...] = ()
    gpu_hours: float | None = None

    def __post_init__(self) -> None:
        dropped = sum(len(finding.rows) for finding in self.findings if finding.action == "dropped")
        if self.n_read - dropped != self.n_kept:
            raise TraceError(
                f"{self.where}: read {self.n_read} rows and kept {self.n_kept}, but {dropped} are "
                "reported as dropped; accepted: an account without a remainder"
            )

    @property
    def gpu_hours_read(self) -> float | None:
        """GPU time of all rows as the file states it [GPU·h], as far as it does."""
        if self.gpu_hours is None:
            return None
        dropped = sum(one.gpu_hours or 0.0 for one in self.findings if one.action == "dropped")
        return self.gpu_hours + dropped - sum(one.added_gpu_hours for one in self.findings)

    @property
    def text(self) -> str:
        """The account for a reader: one line a finding."""
        head = f"{self.where}: {self.n_read} rows read, {self.n_kept} kept"
        if self.gpu_hours is not None and self.gpu_hours_read is not None:
            head += f"; {_shown(self.gpu_hours_read)} GPU-hours read, {_shown(self.gpu_hours)} kept"
        return "\n".join([head, *(f"  {finding.text}" for finding in self.findings)])


def _shown(hours: float) -> str:
    return f"{hours:.1f}" if hours >= 10 or hours == 0 else f"{hours:.2g}"


def drop(frame: pd.DataFrame, wrong: "pd.Series[bool]", reason: str, findings: list[Finding]) -> pd.DataFrame:
    """Leave out the rows where ``wrong`` is true and append the finding, if there are any."""
    rows = _rows(frame, wrong)
    if not rows:
        return frame
    findings.append(Finding("dropped", reason, rows, *_gpu_time(frame[wrong.to_numpy()])))
    return frame[~wrong]


def repair(
    frame: pd.DataFrame,
    wrong: "pd.Series[bool]",
    reason: str,
    findings: list[Finding],
    *,
    before: "pd.Series[float] | None" = None,
) -> None:
    """Append the finding that the rows where ``wrong`` is true are repaired, if there are any.

    ``before`` has the numbers of GPUs before a repair that changes them.
    """
    rows = _rows(frame, wrong)
    if not rows:
        return
    concerned = frame[wrong.to_numpy()]
    hours, added, n_untimed = _gpu_time(concerned)
    if before is not None and hours is not None:
        added = hours - (_gpu_time(concerned.assign(n_gpus=before[wrong.to_numpy()]))[0] or 0.0)
    findings.append(Finding("repaired", reason, rows, hours, added, n_untimed))


def _gpu_time(frame: pd.DataFrame) -> tuple[float | None, float, int]:
    """Return the GPU time of rows [GPU·h], no difference, and how many rows do not state theirs."""
    if not {"n_gpus", "duration_s"} <= set(frame.columns) or not is_numeric_dtype(frame["n_gpus"]):
        return None, 0.0, 0  # cells as they are in the file have the same names in some formats
    durations = frame["duration_s"].where(frame["duration_s"] >= 0)
    hours = frame["n_gpus"].astype("float64") * durations.astype("float64") / HOUR
    n_untimed = int(hours.isna().sum())
    return (None if n_untimed == len(hours) else float(hours.sum())), 0.0, n_untimed


def in_order(frame: pd.DataFrame, findings: list[Finding]) -> pd.DataFrame:
    """Sort rows by their submission and report those that come late."""
    late = frame["submit_time_s"].diff() < 0
    repair(frame, late, LATE_ROW, findings)
    return frame.sort_values("submit_time_s", kind="stable")


def _rows(frame: pd.DataFrame, wrong: "pd.Series[bool]") -> tuple[int, ...]:
    return tuple(int(row) for row in frame[ROW].to_numpy()[np.flatnonzero(wrong.to_numpy())])


def _merged(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Make one finding of those that repair cells of several columns for the same reason."""
    merged: dict[object, Finding] = {}
    for number, finding in enumerate(findings):
        is_of_cells = finding.action == "repaired" and finding.gpu_hours is None
        key = finding.reason if is_of_cells else number
        rows = {*finding.rows, *(merged[key].rows if key in merged else ())}
        merged[key] = replace(finding, rows=tuple(sorted(rows)))
    return tuple(merged.values())


def finish_report(
    where: str,
    n_read: int,
    n_kept: int,
    findings: Iterable[Finding],
    *,
    logged: int = 0,
    kept: pd.DataFrame | None = None,
) -> ReadReport:
    """Build the report, log all findings but the first ``logged``, and refuse a trace with nothing left.

    ``kept`` has the rows that are left, for their GPU time.
    """
    hours = None if kept is None else _gpu_time(kept)[0]
    report = ReadReport(where, n_read, n_kept, _merged(findings), hours)
    if n_kept == 0:
        raise TraceError(f"{where}: no job left of {n_read} rows; accepted: at least one\n{report.text}")
    for finding in report.findings[logged:]:
        _LOG.warning("%s: %s", where, finding.text)
    return report
