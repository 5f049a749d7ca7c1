"""Cells of job traces: files read as text, numbers and times, and the report of every repair.

Readers record a `Finding` for all rows that they drop or repair; rows read minus rows dropped are rows kept.
"""

import codecs
import csv
import importlib
import io
import logging
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, Literal

import numpy as np
import pandas as pd
from pandas.api.types import is_numeric_dtype

from makespan.errors import TraceError, cell_error
from makespan.files import PARQUET, is_standard_input, open_seekable, read_text
from makespan.tables import parse_csv, read_sealed, refuse_uneven_rows
from makespan.units import HOUR

_LOG = logging.getLogger(__name__)

# --- Repairs: one table for all readers, and the account of them ---

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
NO_RUN = "does not state sequence, batch, precision or software; those of 'makespan plan' are taken"
NO_PLAN = "states no plan; the fastest one is taken"
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
UNEVEN_BATCH = "its GPUs cannot share the batch evenly; rounded"
_DROPPED = (
    UNSTARTED, RUNNING, CANCELLED, MACHINES, NO_TASK, NO_SUBMISSION, NO_GPU, NOT_TIMED, REVERSED, INSTANT,
    NAME_AGAIN, NAME_REPLACED, NODE_AGAIN, LARGER,
)  # fmt: skip
_REPAIRED = (
    EARLY, CONTRADICTED, GPU_PART, CPU_PART, GPU_REQUEST_MISSING, GPU_TYPE, MODEL, STEPS, GPU_CHANGES,
    NO_OFFER, PART_UNTIMED, PART_REVERSED, LATE_ROW, NAME_NUMBERED, QUOTA_TOTAL, STRAY_CELLS, FLAG,
    DURATION_MISSING, NO_RUN, NO_PLAN, NO_STATE, NO_GUARANTEE, NO_PROMISE, ZONED, SOME_ZONED, HOUR_TIME,
    SHORT_TIME, THOUSANDS, DECIMAL_COMMA, OTHER_CASE, OTHER_LINE_ENDS, COMMENT_LINES, UNEVEN_BATCH,
)  # fmt: skip
REPAIRS: Mapping[str, Literal["dropped", "repaired"]] = MappingProxyType(
    {reason: "dropped" if reason in _DROPPED else "repaired" for reason in (*_DROPPED, *_REPAIRED)}
)
"""Treatment of each kind of defect, by the reason in reports; the same in every reader."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One reason for which rows were dropped or repaired, or values were ignored.

    Parameters
    ----------
    action, reason
        Treatment and its reason; see `REPAIRS`.
    rows
        The data rows concerned, counted from one as in the file; empty if the whole file is concerned.
    gpu_hours
        GPUs times duration of these rows after the repair [GPU·h]; None if no row states both.
    added_gpu_hours
        Change of their GPU time by the repair [GPU·h].
    n_untimed
        Number of these rows that do not state both GPUs and duration.
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
                "reported as dropped; expected an account without a remainder"
            )

    @property
    def gpu_hours_read(self) -> float | None:
        """GPU time of all rows as the file states it [GPU·h]; rows that state none count as 0."""
        if self.gpu_hours is None:
            return None
        dropped = sum(finding.gpu_hours or 0.0 for finding in self.findings if finding.action == "dropped")
        return self.gpu_hours + dropped - sum(finding.added_gpu_hours for finding in self.findings)

    @property
    def text(self) -> str:
        """The account as text: one line per finding."""
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

    ``before`` has the numbers of GPUs before a repair that changes these, in the mean over the duration.
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
        return None, 0.0, 0  # in some formats the raw text cells have the same names
    durations = frame["duration_s"].where(frame["duration_s"] >= 0)
    hours = frame["n_gpus"].astype("float64") * durations.astype("float64") / HOUR
    n_untimed = int(hours.isna().sum())
    return (None if n_untimed == len(hours) else float(hours.sum())), 0.0, n_untimed


def in_order(frame: pd.DataFrame, findings: list[Finding]) -> pd.DataFrame:
    """Sort rows by submission and report those that are out of order."""
    late = frame["submit_time_s"].diff() < 0
    repair(frame, late, LATE_ROW, findings)
    return frame.sort_values("submit_time_s", kind="stable")


def _rows(frame: pd.DataFrame, wrong: "pd.Series[bool]") -> tuple[int, ...]:
    return tuple(int(row) for row in frame[ROW].to_numpy()[np.flatnonzero(wrong.to_numpy())])


def finish_report(
    where: str,
    n_read: int,
    n_kept: int,
    findings: Iterable[Finding],
    *,
    logged: int = 0,
    kept: pd.DataFrame | None = None,
) -> ReadReport:
    """Build the report, log all findings except the first ``logged``, and reject a trace with no row left.

    ``kept`` has the remaining rows, for their GPU time.
    """
    hours = None if kept is None else _gpu_time(kept)[0]
    # Cells of several columns that were repaired for the same reason make one finding.
    merged: dict[object, Finding] = {}
    for number, finding in enumerate(findings):
        is_of_cells = finding.action == "repaired" and finding.gpu_hours is None
        key = finding.reason if is_of_cells else number
        # The same repair in several columns counts each row once.
        rows = {*finding.rows, *(merged[key].rows if key in merged else ())}
        merged[key] = replace(finding, rows=tuple(sorted(rows)))
    report = ReadReport(where, n_read, n_kept, tuple(merged.values()), hours)
    if n_kept == 0:
        raise TraceError(f"{where}: no job left of {n_read} rows; expected at least one\n{report.text}")
    for finding in report.findings[logged:]:
        _LOG.warning("%s: %s", where, finding.text)
    return report


# --- Files: separators, headers, Parquet; each repair appends its finding ---

FLAGS = "0 or 1, true or false"
"""Accepted spellings of a flag, for messages."""
_TRUE, _FALSE = ("1", "1.0", "true"), ("0", "0.0", "false")
_SHOWN = 5
_PROBE_BYTES = 1 << 16
_LARGEST = 2.0**53
_MOST_PARQUET_CELLS = 1 << 26  # a limit on cells, since equal values take almost no space in the file
_EXPECTED = "a job trace"
_AS_TEXT: dict[str, Any] = {"dtype": str, "keep_default_na": False}
_MISSING = ("", "none", "nan", "nat", "null", "unknown", "na", "<na>")
_SEPARATORS = (",", ";", "\t", "|", " ")
_EXCEL_SEPARATOR = re.compile(r'"?sep=(.)"?')
_PLAIN_TIME = r"\d{4}-\d{2}-\d{2}[ T]\d{2}:\d{2}:\d{2}(?:\.\d{1,9})?"
_TIME = re.compile(
    r"(?P<year>\d{4})[-/](?P<month>\d{1,2})[-/](?P<day>\d{1,2})[ T](?P<hour>\d{1,2})(?::(?P<minute>\d{2}))?"
    r"(?::(?P<second>\d{2}(?:\.\d{1,9})?))? ?(?P<zone>Z|UTC|[+-]\d{2}:?\d{2})?"
)
_EPOCH = r"\d{9,19}(?:\.\d+)?"  # seconds to nanoseconds since 1970, from 1973 on
_EPOCH_DIGITS = 11  # as seconds until the year 5138; three more for each unit below
_GROUPED = r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?"
_DECIMAL_COMMA = r"[+-]?\d+,\d+"
Required = Sequence[str] | Callable[[list[str]], Sequence[str]]
"""Columns, or those of a file by the columns that it has."""
TIME = "a time such as 2020-06-09 18:41:01, 2020-06-09T18:41:01+08:00 or 1591728061"
"""Accepted spellings of times, for messages."""


def read_raw(path: str | Path, findings: list[Finding]) -> str:
    """Read a text file without Windows line ends and byte order mark; changed line ends are a finding."""
    text = read_text(path, _EXPECTED, TraceError)
    if not text.strip():
        raise TraceError(f"{path}: the file is empty; expected a job trace with at least one job")
    _note_line_ends(text.encode(), findings)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _note_line_ends(content: bytes, findings: list[Finding]) -> None:
    if b"\r\n" in content:
        findings.append(Finding("repaired", OTHER_LINE_ENDS))


def read_lines(path: str | Path, columns: Sequence[str], findings: list[Finding]) -> list[list[str]]:
    """Read the stripped cells of all lines that are not blank; lines may differ in length.

    ``columns`` are those of the list, with or without a header line; they identify the separator.
    """
    text = read_raw(path, findings)
    separator, n_skipped = _dialect(text[:_PROBE_BYTES].encode(), columns, len(columns), findings)
    read = csv.reader(text.splitlines()[n_skipped:], delimiter=separator, skipinitialspace=True)
    try:
        lines = [[cell.strip() for cell in line] for line in read]
    except csv.Error as error:
        raise TraceError(
            f"{path}: line {n_skipped + read.line_num}: cannot be read as CSV: {error}"
        ) from None
    filled = [line for line in lines if len(line) > 1 or any(line)]
    if not filled:
        raise TraceError(f"{path}: no rows; expected a trace with at least one")
    return filled


def read_cells(
    path: str | Path,
    required: Required,
    findings: list[Finding],
    header: Sequence[str] | None = None,
    *,
    optional: Required = (),
    hint: Callable[[list[str]], str] | None = None,
) -> pd.DataFrame:
    """Read columns of a trace as stripped text, with row numbers in column `ROW`; see `iter_cells`."""
    pieces = iter_cells(path, required, findings, header=header, optional=optional, hint=hint)
    return next(iter(pieces))


def iter_cells(
    path: str | Path,
    required: Required,
    findings: list[Finding],
    *,
    header: Sequence[str] | None = None,
    optional: Required = (),
    hint: Callable[[list[str]], str] | None = None,
    chunk_rows: int | None = None,
) -> Iterator[pd.DataFrame]:
    """Read a trace in pieces, from CSV with any usual separator or from Parquet, compressed or not.

    Parameters
    ----------
    path
        The file.
    required, optional
        Required columns, and columns that are read if present and left out of the result otherwise. Both may
        be functions of the columns of the file. Case does not matter.
    findings
        Repairs are appended.
    header
        Names of the columns of a file without header line; the same line at its top is accepted.
    hint
        Returns, from the columns of the file, advice for the error if one is missing.
    chunk_rows
        Rows per piece; all if None.
    """
    where = str(path)
    stated = (names([]) if callable(names) else names for names in (required, optional))
    known = [*(header or ()), *chain.from_iterable(stated)]
    with _opened(path, chunk_rows) as stream:
        head = _head(stream)
        if head.startswith(PARQUET):
            yield _parquet(stream, required, optional, where, findings, hint)
            return
        separator, n_skipped = _dialect(head, known, len(header or ()), findings)
        first = _first_line(stream, where, separator, n_skipped, findings)
        has_header = header is None or [name.lower() for name in first] == [name.lower() for name in header]
        columns = first if has_header else list(header or ())
        columns, chosen = _chosen(columns, required, optional, where, findings, hint)
        uneven = {"columns": None if has_header else columns, "separator": separator, "n_skipped": n_skipped}
        options = {
            "sep": separator,
            "skipinitialspace": True,
            "index_col": False,
            "header": None,
            "skiprows": n_skipped + has_header,
            "names": range(len(columns)),  # positions, as a name that is not read may occur twice
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
                        raise TraceError(f"{where}: no rows; expected a trace with at least one")
                    # The parser fills short lines with empty cells; an empty last cell may mean one.
                    if not is_even and bool((piece[len(columns) - 1] == "").any()):
                        refuse_uneven_rows(stream, where, **uneven)  # type: ignore[arg-type]
                        is_even = True
                    # The first column of each name counts.
                    places = {name: place for place, name in reversed(list(enumerate(columns)))}
                    kept = {name: piece[places[name]].str.strip() for name in chosen}
                    cells = pd.DataFrame(kept, index=piece.index).reset_index(drop=True)
                    cells = cells.assign(**{ROW: np.arange(read_rows + 1, read_rows + len(cells) + 1)})
                    cells.attrs["separator"] = separator
                    yield cells
                    read_rows += len(piece)
        except (pd.errors.ParserError, pd.errors.ParserWarning) as error:
            refuse_uneven_rows(stream, where, **uneven)  # type: ignore[arg-type]
            raise TraceError(f"{where}: cannot be read as CSV: {error}") from None
        except UnicodeDecodeError as error:
            found = f"byte 0x{error.object[error.start]:02x} is not UTF-8"
            raise TraceError(f"{where}: cannot be read as CSV: {found}; save it in UTF-8 or UTF-16") from None


@contextmanager
def _opened(path: str | Path, chunk_rows: int | None) -> Iterator[IO[bytes]]:
    """Open a trace: a copy in memory, or the file itself if it is read in pieces, without limit of size."""
    if chunk_rows is None:
        yield io.BytesIO(read_sealed(path, _EXPECTED, binary=PARQUET))
        return
    with open_seekable(path, _EXPECTED, TraceError, largest=None, binary=PARQUET) as stream:
        yield stream


def first_cells(path: str | Path, known: Sequence[str], expected: str) -> list[str]:
    """Return the first line of a table in any form but Parquet, by which a reader for the table is chosen.

    Parameters
    ----------
    known
        Names of columns; they identify the separator, and distinguish comments from a header.
    expected
        Description of the file, for messages.

    Raises
    ------
    MissingDataError, TraceError
        There is no such file; it cannot be read, or cannot be read again, as a pipe; it is empty.
    """
    if is_standard_input(path) or (Path(path).exists() and not Path(path).is_file()):
        raise TraceError(f"{path}: is no regular file; expected {expected} in one, as it is read twice")
    content = read_sealed(path, expected)
    if not content.removeprefix(codecs.BOM_UTF8).strip():
        raise TraceError(f"{path}: the file is empty; expected {expected} with at least one")
    stream = io.BytesIO(content)
    separator, n_skipped = _dialect(_head(stream), known, 0, [])
    return _first_line(stream, str(path), separator, n_skipped, [])


def _head(stream: IO[bytes]) -> bytes:
    head = stream.read(_PROBE_BYTES)
    stream.seek(0)
    return head


def _dialect(head: bytes, known: Sequence[str], n_cells: int, findings: list[Finding]) -> tuple[str, int]:
    """Find the separator and the number of lines before the table.

    Lines that begin with # are comments, unless they name columns. A line ``sep=;`` of Excel states the
    separator. Otherwise it is the one that finds the most known names; ties go to the one that gives
    ``n_cells`` cells, then to the one that gives the most cells.
    """
    lines = head.decode("utf-8-sig", errors="replace").splitlines()
    names = {name.lower() for name in known}
    stated, n_skipped = None, 0
    for line in lines:
        excel = _EXCEL_SEPARATOR.fullmatch(line.strip())
        stated = excel.group(1) if excel else stated
        is_comment = line.startswith("#") and not names & set(_split(line, ",")[1:])
        if not (excel or is_comment or not line.strip()):
            break
        n_skipped += 1
    if any(line.strip() for line in lines[:n_skipped]):
        findings.append(Finding("repaired", COMMENT_LINES))
    line = lines[n_skipped] if n_skipped < len(lines) else ""
    if stated in _SEPARATORS:
        return str(stated), n_skipped
    cells = {separator: _split(line, separator) for separator in _SEPARATORS}

    def fit(separator: str) -> tuple[int, bool, int]:
        line = cells[separator]
        # Cells often contain spaces, so for a space only known names count.
        n_cells_found = 0 if separator == " " else len(line)
        return len(names & set(line)), 0 < n_cells == n_cells_found, n_cells_found

    return max(_SEPARATORS, key=fit), n_skipped


def _split(line: str, separator: str) -> list[str]:
    try:
        cells = next(csv.reader([line], delimiter=separator, skipinitialspace=True), [])
    except csv.Error:
        return []
    return [cell.strip().lower() for cell in cells]


def _first_line(
    stream: IO[bytes], where: str, separator: str, n_skipped: int, findings: list[Finding]
) -> list[str]:
    """Read the cells of the first line, and note the line ends."""
    head = _head(stream)
    if not head.removeprefix(codecs.BOM_UTF8).strip():
        raise TraceError(f"{where}: the file is empty; expected a job trace with at least one job")
    _note_line_ends(head, findings)
    options = {"sep": separator, "header": None, "nrows": 1, "skiprows": n_skipped, "skipinitialspace": True}
    first: pd.DataFrame = parse_csv(stream, where, "CSV", **options, **_AS_TEXT)
    stream.seek(0)
    names = [str(name).strip() for name in first.iloc[0]]
    return [names[0].removeprefix("#").strip(), *names[1:]]


def _chosen(
    columns: list[str],
    required: Required,
    optional: Required,
    where: str,
    findings: list[Finding],
    hint: Callable[[list[str]], str] | None,
) -> tuple[list[str], list[str]]:
    """Return the names of all columns, known ones in their usual case, and the names of those to read."""
    wanted, further = (list(names(columns) if callable(names) else names) for names in (required, optional))
    usual = {name.lower(): name for name in (*wanted, *further)}
    right = set(usual.values())
    spelled = [name if name in right else usual.get(name.lower(), name) for name in columns]
    if spelled != columns:
        changed = ", ".join(before for before, after in zip(columns, spelled, strict=True) if before != after)
        findings.append(Finding("repaired", f"{OTHER_CASE}: {changed}"))
    times = Counter(spelled)
    missing = [name for name in wanted if name not in times]
    if missing:
        raise lacking(missing, columns, wanted, where, "" if hint is None else hint(columns))
    chosen = list(dict.fromkeys([*wanted, *(name for name in further if name in times)]))
    twice = [name for name in chosen if times[name] > 1]
    if twice:
        raise TraceError(f"{where}: column(s) {', '.join(twice)} occur twice; expected each name once")
    return spelled, chosen


def lacking(
    missing: Sequence[str], columns: Sequence[str], required: Sequence[str], where: str, hint: str = ""
) -> TraceError:
    """Build the error for missing columns."""
    return TraceError(
        f"{where}: lacks column(s) {', '.join(missing)}; found: {', '.join(columns) or 'none'}; "
        f"required: {', '.join(required)}{hint and '; '}{hint}"
    )


def _parquet(
    stream: IO[bytes],
    required: Required,
    optional: Required,
    where: str,
    findings: list[Finding],
    hint: Callable[[list[str]], str] | None,
) -> pd.DataFrame:
    """Read a Parquet table as text; numbers and times are checked as those of CSV."""
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise TraceError(
            f"{where}: Parquet needs the package pyarrow; install it, or save the table as CSV"
        ) from None
    try:
        file = parquet.ParquetFile(stream)
        found = [str(name) for name in file.schema_arrow.names]
        columns, chosen = _chosen(found, required, optional, where, findings, hint)
        n_rows = file.metadata.num_rows
        if n_rows * len(chosen) > _MOST_PARQUET_CELLS:
            accepted = f"at most {_MOST_PARQUET_CELLS // len(chosen)}"
            raise TraceError(f"{where}: has {n_rows} rows of {len(chosen)} columns; expected {accepted}")
        stream.seek(0)
        table = pd.read_parquet(
            stream, engine="pyarrow", columns=[found[columns.index(name)] for name in chosen]
        )
    except (OSError, ValueError) as error:  # those of pyarrow derive from them
        raise TraceError(f"{where}: cannot be read as Parquet: {' '.join(str(error).split())}") from None
    if table.empty:
        raise TraceError(f"{where}: no rows; expected a trace with at least one")
    texts = {name: as_text(table.iloc[:, number]) for number, name in enumerate(chosen)}
    return pd.DataFrame(texts).assign(**{ROW: np.arange(1, len(table) + 1)})


def as_text(values: "pd.Series[Any]") -> "pd.Series[str]":
    """Return the cells of a column as in a text file, empty where they are missing."""
    is_dated = pd.api.types.is_datetime64_any_dtype(values)
    text = values.dt.strftime("%Y-%m-%d %H:%M:%S.%f%z") if is_dated else values.astype(str)
    return text.astype(object).where(values.notna(), "").astype(str).str.strip().reset_index(drop=True)


# --- Cells: names, flags, numbers and times ---


def reject(cells: pd.DataFrame, wrong: "pd.Series[bool]", column: str, accepted: str, where: str) -> None:
    """Raise for the first cell of a column where ``wrong`` is true, if there is one."""
    if bool(wrong.any()):
        first = cells.iloc[np.flatnonzero(wrong.to_numpy())[:1]]
        raise cell_error(where, int(first[ROW].iloc[0]), column, first[column].tolist()[0], accepted)


def is_missing(cells: "pd.Series[str]") -> "pd.Series[bool]":
    """Return a mask of cells without value: empty, None, nan, null, NA or Unknown."""
    return cells.str.lower().isin(_MISSING)


def one_of(cells: pd.DataFrame, column: str, accepted: Sequence[str], where: str) -> "pd.Series[str]":
    """Read a column of names in any case; return them as they are spelled in ``accepted``."""
    spelled = {name.lower(): name for name in accepted}
    names = cells[column].str.lower().map(spelled)
    reject(cells, names.isna(), column, ", ".join(accepted), where)
    return names


def flags(cells: pd.DataFrame, column: str, where: str) -> "pd.Series[bool]":
    """Read a column of flags; missing ones are false."""
    text, missing = cells[column].str.lower(), is_missing(cells[column])
    reject(cells, ~missing & ~text.isin([*_TRUE, *_FALSE]), column, FLAGS, where)
    return text.isin(_TRUE)


def further_columns(names: Iterable[str], known: Iterable[str]) -> list[str]:
    """Return the columns that are not known, without those whose name occurs twice or is empty."""
    columns, expected = list(names), {name.lower() for name in known}
    times = Counter(name.lower() for name in columns)
    return [name for name in columns if name and name.lower() not in expected and times[name.lower()] == 1]


def report_further(cells: pd.DataFrame, known: Iterable[str], findings: list[Finding]) -> None:
    """Report columns that are not known and have no effect, unless all their cells are 0 or empty."""
    read = {*known, ROW}
    further = (name for name in cells if name not in read)
    used = (name for name in further if not (is_missing(cells[name]) | cells[name].isin(_FALSE)).all())
    reported = list(islice(used, _SHOWN + 1))
    if reported:
        shown = ", ".join(repr(str(name)) for name in reported[:_SHOWN])
        shown += ", ..." if len(reported) > _SHOWN else ""
        findings.append(Finding("ignored", f"columns that have no effect: {shown}"))


def names(cells: pd.DataFrame, column: str, where: str) -> "pd.Series[str]":
    """Read a column of names; raises if one is missing."""
    reject(cells, cells[column] == "", column, "a name", where)
    return cells[column]


def numbers(
    cells: pd.DataFrame,
    column: str,
    where: str,
    accepted: str,
    *,
    findings: list[Finding],
    least: float = -np.inf,
    is_whole: bool = False,
) -> "pd.Series[float]":
    """Read a column of numbers from ``least`` to 2^53, the limit of exact floats; missing ones are NaN.

    Commas between thousands are removed, and a decimal comma becomes a point; each repair is a finding.
    """
    missing, text = is_missing(cells[column]), cells[column]
    if bool(text.str.contains(",", regex=False).any()):
        grouped = text.str.fullmatch(_GROUPED)
        if cells.attrs.get("separator") == ";":
            # Files separated by semicolons use decimal commas, but 3,600 remains ambiguous.
            reject(cells, grouped, column, f"{accepted}, without a comma before three digits", where)
        decimal = text.str.fullmatch(_DECIMAL_COMMA) & ~grouped
        repair(cells, grouped, THOUSANDS, findings)
        repair(cells, decimal, DECIMAL_COMMA, findings)
        text = text.mask(grouped, text.str.replace(",", "", regex=False))
        text = text.mask(decimal, text.str.replace(",", ".", regex=False))
    values = pd.to_numeric(text.mask(missing), errors="coerce").astype("float64")
    reject(cells, ~missing & ~(values >= least), column, accepted, where)
    limit = f"{accepted}, up to {_LARGEST:.0f}, as larger numbers are not kept exactly"
    reject(cells, ~missing & (values > _LARGEST), column, limit, where)
    if is_whole:
        reject(cells, ~missing & (values % 1 != 0), column, accepted, where)
    return values


def times(
    columns: Sequence[tuple[pd.DataFrame, str]], where: str, findings: list[Finding]
) -> "list[pd.Series[float]]":
    """Read all columns of dates with time of day of one trace, as seconds; missing cells become NaN.

    A time is local to the trace, or has a zone, or counts seconds, milli-, micro- or nanoseconds since 1970.
    All columns are read together: if only some times have a zone, those without one are clear only if every
    zone is UTC.
    """
    read = [_parsed(cells, column, where, findings) for cells, column in columns]
    is_zoned = any(bool(offsets.notna().any()) for _, offsets in read)
    if not is_zoned:
        return [seconds for seconds, _ in read]
    is_utc = all(bool((offsets.isna() | (offsets == 0)).all()) for _, offsets in read)
    result = []
    for (cells, column), (seconds, offsets) in zip(columns, read, strict=True):
        local = seconds.notna() & offsets.isna()
        if not is_utc:
            reject(cells, local, column, "a time with a zone, as other times of the file have one", where)
        repair(cells, offsets.notna(), ZONED, findings)
        repair(cells, local, SOME_ZONED, findings)
        result.append(seconds - offsets.fillna(0.0))
    return result


def _parsed(
    cells: pd.DataFrame, column: str, where: str, findings: list[Finding]
) -> "tuple[pd.Series[float], pd.Series[float]]":
    """Return the times of a column as stated [s], and the offsets of their zones [s], NaN without one."""
    text, missing = cells[column].astype("str"), is_missing(cells[column])
    none = pd.Series(np.nan, index=cells.index, dtype="float64")
    if bool((missing | text.str.fullmatch(_PLAIN_TIME)).all()):
        seconds = _seconds(text.mask(missing))
        reject(cells, ~missing & seconds.isna(), column, f"{TIME}, or nothing", where)
        return seconds, none
    epoch = text.str.fullmatch(_EPOCH)
    digits = text.where(epoch, "").str.replace(r"\..*", "", regex=True).str.len()
    unit = 1000.0 ** np.ceil((digits - _EPOCH_DIGITS).clip(lower=0) / 3)
    parts = text.where(text.str.fullmatch(_TIME.pattern)).str.extract(_TIME)
    date = parts["year"] + "-" + parts["month"].str.zfill(2) + "-" + parts["day"].str.zfill(2)
    minute, second = parts["minute"].fillna("00"), parts["second"].fillna("00")
    seconds = _seconds(date + " " + parts["hour"].str.zfill(2) + ":" + minute + ":" + second)
    seconds = seconds.mask(epoch, pd.to_numeric(text.where(epoch), errors="coerce").astype("float64") / unit)
    reject(cells, ~missing & seconds.isna(), column, f"{TIME}, or nothing", where)
    read = seconds.notna() & ~epoch
    repair(cells, read & parts["minute"].isna(), HOUR_TIME, findings)
    repair(cells, read & parts["minute"].notna() & parts["second"].isna(), SHORT_TIME, findings)
    zone = parts["zone"].replace({"Z": "+00:00", "UTC": "+00:00"}).str.replace(":", "")
    hours, minutes = (pd.to_numeric(zone.str[part]) for part in (slice(1, 3), slice(3, 5)))
    offsets = (hours * 3600.0 + minutes * 60.0) * zone.str[0].map({"+": 1.0, "-": -1.0})
    return seconds, offsets.astype("float64").mask(epoch, 0.0)


def _seconds(text: "pd.Series[str]") -> "pd.Series[float]":
    parsed = pd.to_datetime(text, format="ISO8601", errors="coerce")
    seconds = parsed.to_numpy(dtype="datetime64[us]").astype("float64") / 1e6
    return pd.Series(seconds, index=text.index).mask(parsed.isna())


def unique_counts(
    cells: pd.DataFrame, name_column: str, column: str, where: str, findings: list[Finding]
) -> dict[str, int]:
    """Return the GPUs of each machine; raises for fractions and for machines with two different counts."""
    accepted = "a whole number of GPUs, 0 or more"
    counts = numbers(cells, column, where, accepted, least=0, is_whole=True, findings=findings).fillna(0)
    gpus: dict[str, int] = {}
    machines = names(cells, name_column, where)
    for row, name, count in zip(cells[ROW], machines, counts.astype("int64"), strict=True):
        if gpus.setdefault(str(name), int(count)) != int(count):
            accepted = f"{gpus[str(name)]} as in an earlier row of {name!r}"
            raise cell_error(where, int(row), column, int(count), accepted)
    return gpus
