"""What a reader of job traces dropped or repaired, and why: cleaning is never silent."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd

from makespan.errors import TraceError

__all__ = ["Finding", "ReadReport", "drop", "finish_report", "repair"]

_LOG = logging.getLogger(__name__)
_SHOWN_ROWS = 5

ROW = "_row"
"""Column that carries the row number of the file, counted from one, through the cleaning."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One reason for which rows were dropped or repaired.

    Parameters
    ----------
    action
        ``"dropped"`` or ``"repaired"``.
    reason
        What was wrong and, for a repair, what was done about it.
    rows
        Data rows concerned, counted from one as in the file; empty if the whole file is meant.
    """

    action: Literal["dropped", "repaired"]
    reason: str
    rows: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """The finding in one line."""
        if not self.rows:
            return f"{self.action}: {self.reason} (whole file)"
        shown = ", ".join(str(row) for row in self.rows[:_SHOWN_ROWS])
        more = ", ..." if len(self.rows) > _SHOWN_ROWS else ""
        noun = "row" if len(self.rows) == 1 else "rows"
        return f"{self.action} {len(self.rows)} {noun}: {self.reason} ({noun} {shown}{more})"


@dataclass(frozen=True, slots=True)
class ReadReport:
    """Account of one file: rows read, rows kept, and a finding for each difference.

    Parameters
    ----------
    where
        The file.
    n_read
        Data rows (of nested files: jobs) found.
    n_kept
        Rows of the result.
    findings
        In the order in which the rules were applied.

    Raises
    ------
    TraceError
        The dropped rows do not account for the difference between read and kept ones.
    """

    where: str
    n_read: int
    n_kept: int
    findings: tuple[Finding, ...] = ()

    def __post_init__(self) -> None:
        dropped = sum(len(finding.rows) for finding in self.findings if finding.action == "dropped")
        if self.n_read - dropped != self.n_kept:
            raise TraceError(
                f"{self.where}: read {self.n_read} rows and kept {self.n_kept}, but {dropped} are "
                "reported as dropped; accepted: an account without a remainder"
            )

    @property
    def n_dropped(self) -> int:
        """Rows left out."""
        return self.n_read - self.n_kept

    @property
    def is_clean(self) -> bool:
        """Whether nothing was dropped or repaired."""
        return not self.findings

    @property
    def text(self) -> str:
        """The account for a reader: one line a finding."""
        head = f"{self.where}: {self.n_read} rows read, {self.n_kept} kept"
        return "\n".join([head, *(f"  {finding.text}" for finding in self.findings)])

    def count(self, reason_part: str) -> int:
        """Return the number of rows whose reason contains a text."""
        return sum(len(finding.rows) for finding in self.findings if reason_part in finding.reason)

    def table(self) -> pd.DataFrame:
        """Return one row a finding: ``where, action, reason, rows``."""
        return pd.DataFrame(
            {
                "where": self.where,
                "action": [finding.action for finding in self.findings],
                "reason": [finding.reason for finding in self.findings],
                "rows": [len(finding.rows) for finding in self.findings],
            }
        )


def drop(frame: pd.DataFrame, wrong: "pd.Series[bool]", reason: str, findings: list[Finding]) -> pd.DataFrame:
    """Leave out the rows where ``wrong`` is true and append the finding, if there are any.

    Parameters
    ----------
    frame
        Rows with their file row numbers in column `ROW`.
    wrong
        Which of them to leave out.
    reason
        Why.
    findings
        List to append to.

    Returns
    -------
    pandas.DataFrame
        The other rows.
    """
    rows = _rows(frame, wrong)
    if not rows:
        return frame
    findings.append(Finding("dropped", reason, rows))
    return frame[~wrong]


def repair(frame: pd.DataFrame, wrong: "pd.Series[bool]", reason: str, findings: list[Finding]) -> None:
    """Append the finding that the rows where ``wrong`` is true are repaired, if there are any."""
    rows = _rows(frame, wrong)
    if rows:
        findings.append(Finding("repaired", reason, rows))


def _rows(frame: pd.DataFrame, wrong: "pd.Series[bool]") -> tuple[int, ...]:
    return tuple(int(row) for row in frame[ROW].to_numpy()[np.flatnonzero(wrong.to_numpy())])


def finish_report(
    where: str, n_read: int, n_kept: int, findings: Iterable[Finding], *, logged: int = 0
) -> ReadReport:
    """Build the report, log each finding, and refuse a trace of which nothing is left.

    Parameters
    ----------
    where
        The file.
    n_read, n_kept
        Rows found and kept.
    findings
        Why they differ, and what was repaired.
    logged
        How many of the first findings were logged before.

    Raises
    ------
    TraceError
        No row is left; the message lists the findings.
    """
    report = ReadReport(where, n_read, n_kept, tuple(findings))
    if n_kept == 0:
        raise TraceError(f"{where}: no job left of {n_read} rows; accepted: at least one\n{report.text}")
    for finding in report.findings[logged:]:
        _LOG.warning("%s: %s", where, finding.text)
    return report
