"""Cells of job traces as they come, and the account of what was dropped or repaired: never silent."""

import codecs
import io
import logging
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import pandas as pd

from makespan.errors import TraceError, cell_error
from makespan.files import open_seekable, read_text
from makespan.tables import parse_csv, read_sealed, refuse_uneven_rows

__all__ = [
    "ROW",
    "TIME",
    "Finding",
    "ReadReport",
    "datetimes",
    "drop",
    "finish_report",
    "in_order",
    "is_missing",
    "is_time",
    "iter_cells",
    "names",
    "numbers",
    "one_of",
    "read_cells",
    "read_raw",
    "refuse",
    "repair",
    "unique_counts",
]

_LOG = logging.getLogger(__name__)
_SHOWN_ROWS = 5
_PROBE_BYTES = 1 << 16
_LARGEST = 2.0**53
_EXPECTED = "a job trace"
_AS_TEXT: dict[str, Any] = {"dtype": str, "keep_default_na": False}
_MISSING = ("", "none", "nan", "null", "unknown", "na")
_TIME = r"\d{4}-\d{2}-\d{2}[ T]\d{2}:\d{2}:\d{2}(\.\d{1,6})?"

Required = Sequence[str] | Callable[[list[str]], Sequence[str]]

ROW = "_row"
"""Column that carries the row number of the file, counted from one, through the cleaning."""

TIME = "a time without zone such as 2020-06-09 18:41:01 or 2020-06-09T18:41:01"
"""What `is_time` accepts, for messages."""


# --- the account ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Finding:
    """One reason for which rows were dropped or repaired, or values were ignored.

    ``rows`` are the data rows concerned, counted from one as in the file; empty if the whole file is meant.
    """

    action: Literal["dropped", "repaired", "ignored"]
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
    """Account of a file: rows (of nested files: jobs) read, rows kept, and a finding for each difference."""

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
    def text(self) -> str:
        """The account for a reader: one line a finding."""
        head = f"{self.where}: {self.n_read} rows read, {self.n_kept} kept"
        return "\n".join([head, *(f"  {finding.text}" for finding in self.findings)])


def drop(frame: pd.DataFrame, wrong: "pd.Series[bool]", reason: str, findings: list[Finding]) -> pd.DataFrame:
    """Leave out the rows where ``wrong`` is true and append the finding, if there are any."""
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


def in_order(frame: pd.DataFrame, findings: list[Finding]) -> pd.DataFrame:
    """Sort rows by their submission and report those that come late."""
    late = frame["submit_time_s"].diff() < 0
    repair(frame, late, "submitted before the row above; rows sorted", findings)
    return frame.sort_values("submit_time_s", kind="stable")


def _rows(frame: pd.DataFrame, wrong: "pd.Series[bool]") -> tuple[int, ...]:
    return tuple(int(row) for row in frame[ROW].to_numpy()[np.flatnonzero(wrong.to_numpy())])


def finish_report(
    where: str, n_read: int, n_kept: int, findings: Iterable[Finding], *, logged: int = 0
) -> ReadReport:
    """Build the report, log all findings but the first ``logged``, and refuse a trace with nothing left."""
    report = ReadReport(where, n_read, n_kept, tuple(findings))
    if n_kept == 0:
        raise TraceError(f"{where}: no job left of {n_read} rows; accepted: at least one\n{report.text}")
    for finding in report.findings[logged:]:
        _LOG.warning("%s: %s", where, finding.text)
    return report


# --- files ------------------------------------------------------------------------------------------


def read_raw(path: str | Path, findings: list[Finding]) -> str:
    """Read a text file, take Windows line ends and a byte order mark off, and say so."""
    text = read_text(path, _EXPECTED, TraceError)
    if not text.strip():
        raise TraceError(f"{path}: the file is empty; accepted: a job trace with at least one job")
    _note_line_ends(text.encode(), findings)
    return text.replace("\r\n", "\n")


def _note_line_ends(content: bytes, findings: list[Finding]) -> None:
    if b"\r\n" in content:
        findings.append(Finding("repaired", "Windows line ends, read as Unix ones"))


def read_cells(
    path: str | Path, required: Required, findings: list[Finding], header: Sequence[str] | None = None
) -> pd.DataFrame:
    """Read the required columns of a CSV trace as stripped text, with row numbers in column `ROW`.

    What is required may depend on the columns there are. ``header`` names those of a file without header
    line; the same line at its top is accepted.
    """
    return next(iter(iter_cells(path, required, findings, header=header)))


def iter_cells(
    path: str | Path,
    required: Required,
    findings: list[Finding],
    *,
    header: Sequence[str] | None = None,
    chunk_rows: int | None = None,
) -> Iterator[pd.DataFrame]:
    """Read a CSV trace in pieces of ``chunk_rows`` rows, see `read_cells`; in one piece if None."""
    where = str(path)
    with _opened(path, chunk_rows) as stream:
        first = _first_line(stream, where, findings)
        has_header = header is None or first == list(header)
        columns = first if has_header else list(header or ())
        chosen = required(columns) if callable(required) else required
        _require(columns, chosen, where)
        options = {
            "skipinitialspace": True,
            "index_col": False,
            "header": None,
            "skiprows": 1 if has_header else 0,
            "names": range(len(columns)),  # a name may occur twice where it is not read
            "iterator": True,
            "chunksize": chunk_rows,
        }
        read_rows, is_even = 0, False
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", pd.errors.ParserWarning)
                pieces = parse_csv(stream, where, "CSV", **_AS_TEXT, **options)
                for piece in [pieces.read()] if chunk_rows is None else pieces:
                    if piece.empty and read_rows == 0:
                        raise TraceError(f"{where}: no rows; accepted: a trace with at least one")
                    # Cells that are not there are read as empty ones, and the last one is among them.
                    if not is_even and bool((piece[len(columns) - 1] == "").any()):
                        refuse_uneven_rows(stream, where, None if has_header else columns)
                        is_even = True
                    yield _cells(piece, columns, chosen, read_rows)
                    read_rows += len(piece)
        except (pd.errors.ParserError, pd.errors.ParserWarning) as error:
            refuse_uneven_rows(stream, where, None if has_header else columns)
            raise TraceError(f"{where}: cannot be read as CSV: {error}") from None
        except UnicodeDecodeError as error:
            raise TraceError(f"{where}: cannot be read as CSV: {error}") from None


@contextmanager
def _opened(path: str | Path, chunk_rows: int | None) -> Iterator[IO[bytes]]:
    """Open a trace: all of it, or, to be read in pieces, the file itself, however large."""
    if chunk_rows is None:
        yield io.BytesIO(read_sealed(path, _EXPECTED))
        return
    with open_seekable(path, _EXPECTED, TraceError, largest=None) as stream:
        yield stream


def _cells(piece: pd.DataFrame, columns: Sequence[str], required: Sequence[str], offset: int) -> pd.DataFrame:
    kept = {name: piece[columns.index(name)].str.strip() for name in required}
    stripped = pd.DataFrame(kept).reset_index(drop=True)
    return stripped.assign(**{ROW: np.arange(offset + 1, offset + len(stripped) + 1)})


def _first_line(stream: IO[bytes], where: str, findings: list[Finding]) -> list[str]:
    """Read the cells of the first line, and note the line ends."""
    head = stream.read(_PROBE_BYTES)
    stream.seek(0)
    if not head.removeprefix(codecs.BOM_UTF8).strip():
        raise TraceError(f"{where}: the file is empty; accepted: a job trace with at least one job")
    _note_line_ends(head, findings)
    first: pd.DataFrame = parse_csv(stream, where, "CSV", header=None, nrows=1, **_AS_TEXT)
    stream.seek(0)
    return [str(name).strip() for name in first.iloc[0]]


def _require(columns: Sequence[str], required: Sequence[str], where: str) -> None:
    missing = [name for name in required if name not in columns]
    if missing:
        raise TraceError(
            f"{where}: lacks column(s) {', '.join(missing)}; found: {', '.join(columns) or 'none'}; "
            f"required: {', '.join(required)}"
        )
    twice = [name for name in required if columns.count(name) > 1]
    if twice:
        raise TraceError(f"{where}: column(s) {', '.join(twice)} occur twice; accepted: each name once")


# --- cells ------------------------------------------------------------------------------------------


def refuse(cells: pd.DataFrame, wrong: "pd.Series[bool]", column: str, accepted: str, where: str) -> None:
    """Raise for the first cell of a column where ``wrong`` is true, if there is one."""
    if bool(wrong.any()):
        first = cells.iloc[np.flatnonzero(wrong.to_numpy())[:1]]
        raise cell_error(where, int(first[ROW].iloc[0]), column, first[column].tolist()[0], accepted)


def is_missing(cells: "pd.Series[str]") -> "pd.Series[bool]":
    """Say which cells hold no value: empty, None, nan, null, NA or Unknown."""
    return cells.str.lower().isin(_MISSING)


def one_of(cells: pd.DataFrame, column: str, accepted: Sequence[str], where: str) -> "pd.Series[str]":
    """Read a column of names in any case; return them as they are spelled in ``accepted``."""
    spelled = {name.lower(): name for name in accepted}
    names = cells[column].str.lower().map(spelled)
    refuse(cells, names.isna(), column, ", ".join(accepted), where)
    return names


def names(cells: pd.DataFrame, column: str, where: str) -> "pd.Series[str]":
    """Read a column of names, none of which may be missing."""
    refuse(cells, cells[column] == "", column, "a name", where)
    return cells[column]


def numbers(
    cells: pd.DataFrame,
    column: str,
    where: str,
    accepted: str,
    *,
    least: float = -np.inf,
    is_whole: bool = False,
) -> "pd.Series[float]":
    """Read a column of numbers, from ``least`` to the largest that is kept exactly; missing ones are NaN."""
    missing = is_missing(cells[column])
    values = pd.to_numeric(cells[column].mask(missing), errors="coerce").astype("float64")
    right = (values <= _LARGEST) & (values >= least)
    refuse(cells, ~missing & ~right, column, accepted, where)
    if is_whole:
        refuse(cells, ~missing & (values % 1 != 0), column, accepted, where)
    return values


def is_time(text: str) -> bool:
    """Say whether a text is a date and a time of day, see `TIME`, as far as its form says."""
    return re.fullmatch(_TIME, text) is not None


def datetimes(cells: pd.DataFrame, column: str, where: str) -> "pd.Series[float]":
    """Read a column of dates with time of day as seconds; missing cells become NaN."""
    missing = is_missing(cells[column])
    formed = cells[column].str.fullmatch(_TIME)
    parsed = pd.to_datetime(cells[column].where(formed), format="ISO8601", errors="coerce")
    refuse(cells, ~missing & parsed.isna(), column, f"{TIME}, or nothing", where)
    seconds = parsed.to_numpy(dtype="datetime64[us]").astype("float64") / 1e6
    return pd.Series(seconds, index=cells.index).mask(missing)


def unique_counts(cells: pd.DataFrame, name_column: str, column: str, where: str) -> dict[str, int]:
    """Return the GPUs of each machine, refusing parts of one and machines with two different counts."""
    accepted = "a whole number of GPUs, 0 or more"
    counts = numbers(cells, column, where, accepted, least=0, is_whole=True).fillna(0)
    found: dict[str, int] = {}
    machines = names(cells, name_column, where)
    for row, name, count in zip(cells[ROW], machines, counts.astype("int64"), strict=True):
        if found.setdefault(str(name), int(count)) != int(count):
            accepted = f"{found[str(name)]} as in an earlier row of {name!r}"
            raise cell_error(where, int(row), column, int(count), accepted)
    return found
