"""Text of job traces as they come: byte order marks, Windows line ends, missing headers."""

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from makespan.errors import MissingDataError, TraceError
from makespan.traces._report import ROW, Finding

__all__ = [
    "cell_error",
    "datetimes",
    "is_missing",
    "iter_cells",
    "numbers",
    "read_cells",
    "read_raw",
    "require",
]

_PROBE_BYTES = 1 << 16
_LARGEST = 2.0**53
_MISSING = ("", "none", "nan", "null", "unknown", "na")


def cell_error(where: str, row: int, column: str, found: object, accepted: str) -> TraceError:
    """Build the error for one cell; ``row`` counts data rows from one."""
    return TraceError(f"{where}: row {row}, column {column!r}: found {found!r}; accepted: {accepted}")


def read_raw(path: str | Path, findings: list[Finding]) -> str:
    """Read a text file, take Windows line ends and a byte order mark off, and say so.

    Parameters
    ----------
    path
        The file.
    findings
        List to append to.

    Raises
    ------
    MissingDataError
        There is no such file.
    TraceError
        The file is empty or is not UTF-8 text.
    """
    try:
        content = Path(path).read_bytes()
    except (FileNotFoundError, IsADirectoryError):
        raise MissingDataError(f"{path}: no such file; expected a job trace") from None
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: not readable as text: {error}; accepted: UTF-8") from None
    if not text.strip():
        raise TraceError(f"{path}: the file is empty; accepted: a job trace with at least one job")
    _note_line_ends(content, findings)
    return text.replace("\r\n", "\n")


def _note_line_ends(content: bytes, findings: list[Finding]) -> None:
    if b"\r\n" in content:
        findings.append(Finding("repaired", "Windows line ends, read as Unix ones"))


def read_cells(
    path: str | Path,
    required: Sequence[str],
    findings: list[Finding],
    header: Sequence[str] | None = None,
) -> pd.DataFrame:
    """Read a CSV trace as text, one row a line, with row numbers in column `ROW`.

    Parameters
    ----------
    path
        The file.
    required
        Columns that it must have; only these are returned.
    findings
        List to append to.
    header
        Columns of a file without header line; the same line at its top is accepted.

    Returns
    -------
    pandas.DataFrame
        Text without surrounding blanks; missing cells are empty.

    Raises
    ------
    MissingDataError
        There is no such file.
    TraceError
        The file is empty, lacks a column, has a row of another length or is not text.
    """
    return next(iter(iter_cells(path, required, findings, header=header)))


def iter_cells(
    path: str | Path,
    required: Sequence[str],
    findings: list[Finding],
    *,
    header: Sequence[str] | None = None,
    chunk_rows: int | None = None,
) -> Iterator[pd.DataFrame]:
    """Read a CSV trace in pieces of ``chunk_rows`` rows, see `read_cells`; in one piece if None."""
    where = str(path)
    first = _first_line(path, where, findings)
    has_header = header is None or first == list(header)
    require(first if has_header else list(header or ()), required, where)
    read_rows = 0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)
            pieces = pd.read_csv(
                path,
                dtype=str,
                encoding="utf-8-sig",
                keep_default_na=False,
                skipinitialspace=True,
                index_col=False,
                header=0 if has_header else None,
                names=None if has_header else list(header or ()),
                iterator=True,
                chunksize=chunk_rows,
            )
            for piece in [pieces.read()] if chunk_rows is None else pieces:
                if piece.empty and read_rows == 0:
                    raise TraceError(f"{where}: no rows; accepted: a trace with at least one")
                yield _cells(piece, required, read_rows)
                read_rows += len(piece)
    except (pd.errors.ParserError, pd.errors.ParserWarning, UnicodeDecodeError) as error:
        raise TraceError(f"{where}: cannot be read as CSV: {error}") from None


def _cells(piece: pd.DataFrame, required: Sequence[str], offset: int) -> pd.DataFrame:
    frame = piece.rename(columns=str.strip)[list(required)].fillna("")
    stripped = pd.DataFrame({name: frame[name].str.strip() for name in required}).reset_index(drop=True)
    return stripped.assign(**{ROW: np.arange(offset + 1, offset + len(stripped) + 1)})


def _first_line(path: str | Path, where: str, findings: list[Finding]) -> list[str]:
    """Read the names of the first line, and note the line ends."""
    if not Path(path).is_file():
        raise MissingDataError(f"{where}: no such file; expected a job trace")
    with Path(path).open("rb") as file:
        _note_line_ends(file.read(_PROBE_BYTES), findings)
    try:
        first: pd.DataFrame = pd.read_csv(path, dtype=str, encoding="utf-8-sig", header=None, nrows=1)
    except pd.errors.EmptyDataError:
        raise TraceError(f"{where}: the file is empty; accepted: a job trace with at least one job") from None
    except (pd.errors.ParserError, UnicodeDecodeError) as error:
        raise TraceError(f"{where}: cannot be read as CSV: {error}") from None
    return [str(name).strip() for name in first.iloc[0].fillna("")]


def require(names: Sequence[str], required: Sequence[str], where: str) -> None:
    """Check that a file has the columns it needs.

    Raises
    ------
    TraceError
        One is missing.
    """
    missing = [name for name in required if name not in names]
    if missing:
        raise TraceError(
            f"{where}: lacks column(s) {', '.join(missing)}; found: {', '.join(names) or 'none'}; "
            f"required: {', '.join(required)}"
        )


def is_missing(cells: "pd.Series[str]") -> "pd.Series[bool]":
    """Say which cells hold no value: empty, None, nan, null, NA or Unknown."""
    return cells.str.lower().isin(_MISSING)


def numbers(
    frame: pd.DataFrame, column: str, where: str, accepted: str, *, least: float = -np.inf
) -> "pd.Series[float]":
    """Read a column of numbers; missing cells become NaN.

    Parameters
    ----------
    frame
        Text cells with row numbers.
    column
        Which column.
    where
        The file, for messages.
    accepted
        What is accepted, for messages.
    least
        Smallest accepted value.

    Raises
    ------
    TraceError
        A cell is neither missing nor a number from ``least`` to the largest that is kept exactly;
        names row and column.
    """
    cells = frame[column]
    missing = is_missing(cells)
    values = pd.to_numeric(cells.mask(missing), errors="coerce").astype("float64")
    wrong = ~missing & ~((values <= _LARGEST) & (values >= least))
    if bool(wrong.any()):
        at = int(np.flatnonzero(wrong.to_numpy())[0])
        raise cell_error(where, int(frame[ROW].iloc[at]), column, cells.iloc[at], accepted)
    return values


def datetimes(frame: pd.DataFrame, column: str, where: str) -> "pd.Series[float]":
    """Read a column of dates with time of day as seconds; missing cells become NaN.

    Raises
    ------
    TraceError
        A cell is neither missing nor of the form 2020-06-09 18:41:01; names row and column.
    """
    cells = frame[column]
    missing = is_missing(cells)
    parsed = pd.to_datetime(cells.mask(missing), format="%Y-%m-%d %H:%M:%S", errors="coerce")
    wrong = ~missing & parsed.isna()
    if bool(wrong.any()):
        at = int(np.flatnonzero(wrong.to_numpy())[0])
        accepted = "a time such as 2020-06-09 18:41:01, or nothing"
        raise cell_error(where, int(frame[ROW].iloc[at]), column, cells.iloc[at], accepted)
    seconds = parsed.to_numpy(dtype="datetime64[s]").astype("float64")
    return pd.Series(seconds, index=cells.index).mask(missing)
