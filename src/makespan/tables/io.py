"""Atomic writing, and reading with the schema and, of results, the checksum checked."""

import csv
import hashlib
import io
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, Any

import pandas as pd

from makespan.errors import TraceError, cell_error
from makespan.files import read_bytes, read_json, write_json, write_text
from makespan.tables.catalogue import THROUGHPUT
from makespan.tables.schema import TableSchema

# ------------------------------------------------------------------------------------------------
# Atomic writing, and reading with the schema and, of results, the checksum checked.


def write_csv(frame: pd.DataFrame, path: str | Path, schema: TableSchema | None = None) -> None:
    """Write a table as CSV without its index, atomically and byte-identical for equal tables.

    If a schema is given, the table is checked first, see `TableSchema.validate`.
    """
    write_text(_text(frame, path, schema), path)


def write_result(frame: pd.DataFrame, path: str | Path, schema: TableSchema | None = None) -> None:
    """Write a table as `write_csv` does and its seal beside it: rows and checksum, in a hidden file.

    Whoever reads the table refuses it if it was cut short or changed since. A table without a seal is
    anybody's own.
    """
    text = _text(frame, path, schema)
    write_text(text, path)
    write_json(_seal(text.encode()), _seal_path(path), indent=1)


def _text(frame: pd.DataFrame, path: str | Path, schema: TableSchema | None) -> str:
    checked = frame if schema is None else schema.validate(frame, where=str(path))
    return csv_text(checked)


def csv_text(frame: pd.DataFrame, *, header: bool = True) -> str:
    """Return a table as CSV without its index, with its header line or without."""
    return frame.to_csv(index=False, header=header, lineterminator="\n")


def _seal_path(path: str | Path) -> Path:
    return Path(path).with_name(f".{Path(path).name}.sum")


def _seal(content: bytes) -> dict[str, Any]:
    return {"rows": content.count(b"\n") - 1, "sha256": hashlib.sha256(content).hexdigest()}


def read_sealed(path: str | Path, expected: str, *, binary: bytes | None = None) -> bytes:
    """Content of a table; `TraceError` if it is not that of its seal, where there is one.

    ``expected`` names the table for messages, ``binary`` the first bytes of a format that is accepted
    although it is no text; raises `MissingDataError` if there is none.
    """
    content = read_bytes(path, expected, TraceError, binary=binary)
    seal, found = read_json(_seal_path(path), TraceError), _seal(content)
    if isinstance(seal, dict) and seal.keys() == found.keys() and seal != found:
        was, now = (f"{one['rows']} rows, sha256 {one['sha256'][:12]}" for one in (seal, found))
        raise TraceError(
            f"{path}: found {now}; it was written with {was}, and cut short or changed since; build it "
            f"again, or remove {_seal_path(path)} if the change is meant"
        )
    return content


def parse_csv(content: bytes | IO[bytes], where: str, expected: str, **options: Any) -> Any:
    """Parse CSV in UTF-8 by `pandas.read_csv`; what it cannot read is a `TraceError`.

    ``options`` are those of pandas; with a chunk size the result is its iterator, and errors may come later.
    A header that names a column twice is an error, too.
    """
    stream = io.BytesIO(content) if isinstance(content, bytes) else content
    if not {"header", "names"} & options.keys():
        _refuse_repeated_names(stream, where)
    try:
        return pd.read_csv(stream, encoding="utf-8-sig", **options)
    except UnicodeDecodeError as error:
        found = f"byte 0x{error.object[error.start]:02x} is not UTF-8"
        raise TraceError(
            f"{where}: cannot be read as {expected}: {found}; save it in UTF-8 or UTF-16"
        ) from None
    except (pd.errors.EmptyDataError, pd.errors.ParserError) as error:
        raise TraceError(f"{where}: cannot be read as {expected}: {error}") from None


def _refuse_repeated_names(stream: IO[bytes], where: str) -> None:
    """Raise `TraceError` if the first line names a column twice: pandas renames the second one."""
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="replace", newline="")
    try:
        names = next((row for row in csv.reader(text) if any(map(str.strip, row))), [])
    except csv.Error:
        names = []  # the parser has its own words
    finally:
        text.detach()
        stream.seek(0)
    times = Counter(filter(None, map(str.strip, names)))
    if twice := [name for name in times if times[name] > 1]:
        raise TraceError(f"{where}: column(s) {', '.join(twice)} occur twice; expected each name once")


def check_length(row: int, cells: Sequence[str], columns: Sequence[str], where: str) -> None:
    """Raise `TraceError` for a row, counted from one, that has fewer cells than columns, or more."""
    n = len(columns)
    if len(cells) < n:
        raise cell_error(where, row, columns[len(cells)], "nothing", f"{n} cells a row, not {len(cells)}")
    if len(cells) > n:
        raise cell_error(where, row, f"number {n + 1}", cells[n], f"{n} cells a row, not {len(cells)}")


def refuse_uneven_rows(
    stream: IO[bytes],
    where: str,
    columns: Sequence[str] | None = None,
    *,
    separator: str = ",",
    n_skipped: int = 0,
) -> None:
    """Raise `TraceError` for the first row of another length, see `check_length`.

    The parser of `parse_csv` fills short rows up, and refuses long ones without their number. Without
    ``columns`` the first line after ``n_skipped`` names them. The stream stays where it is.
    """
    position = stream.tell()
    stream.seek(0)
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="replace", newline="")
    for _ in range(n_skipped):
        text.readline()
    read = csv.reader(text, delimiter=separator, skipinitialspace=True, strict=True)
    lines = (cells for cells in read if any(map(str.strip, cells)))
    try:
        names = [name.strip() for name in next(lines, [])] if columns is None else columns
        for row, cells in enumerate(lines, 1):
            check_length(row, cells, names, where)
    except csv.Error:
        pass  # no CSV for this reader either; the parser has its own words
    finally:
        text.detach()
        stream.seek(position)


def read_csv(path: str | Path, schema: TableSchema) -> pd.DataFrame:
    """Read and check a CSV table, see `TableSchema.validate`; raises `MissingDataError` if there is none.

    A table of `write_result` that is not what was written is a `TraceError`.
    """
    expected = f"table {schema.name!r}"
    content = read_sealed(path, expected)
    if not _seal_path(path).is_file():
        refuse_uneven_rows(io.BytesIO(content), str(path))
    options = {"dtype": object, "keep_default_na": False, "na_values": ["", "nan"], "index_col": False}
    return schema.validate(parse_csv(content, str(path), expected, **options), where=str(path))


# ------------------------------------------------------------------------------------------------
# Where numbers are said to come from: the column ``provenance`` decides, not the source that has them.

ON_DEMAND = "emulated on demand"
"""Provenance of rows that the emulator computes because a job requests a plan that the table lacks."""
PROVENANCES = ("emulated", "published", "measured", "interpolated", "predicted", ON_DEMAND)
"""What the column ``provenance`` of a throughput table may say of a row."""
_LABELS = {
    "emulated": "emulated testbed",
    "published": "published measurements",
    "measured": "own measurements",
    "predicted": "predicted steps",
}


def shown_source(source: str, provenances: Iterable[str]) -> str:
    """Return what a source is called in titles, notes and records.

    Parameters
    ----------
    source
        Source as which iteration times were given: ``emulated``, ``published`` or ``measured``.
    provenances
        The column ``provenance`` of every throughput table that was used.

    Returns
    -------
    str
        The name of the source where all rows are its own; else what they are, and as what they were given.
    """
    kinds = {"emulated" if kind == ON_DEMAND else kind for kind in provenances}
    found = [name for name in PROVENANCES if name in kinds] + sorted(kinds - set(PROVENANCES))
    if found in ([], [source]):
        return source
    what = found[0] if len(found) == 1 else f"mixed {' and '.join(found)}"
    return f"{what}, given as {source}"


def read_provenances(paths: Iterable[str | Path]) -> list[str]:
    """Return what throughput tables say of each of their rows; raises as `read_csv`."""
    return [str(name) for path in paths for name in read_csv(path, THROUGHPUT)["provenance"]]


def source_label(shown: str) -> str:
    """Return what figures say of a source, given its name or what `shown_source` returns."""
    return _LABELS.get(shown, shown)
