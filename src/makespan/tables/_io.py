"""Atomic writing, and reading with the schema checked."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pandas as pd

from makespan.errors import MissingDataError, TraceError
from makespan.tables._schema import TableSchema

__all__ = ["atomic_path", "read_csv", "write_csv", "write_text"]


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Give a temporary path that replaces ``path`` when the block ends without error.

    The directory is created. A failed block leaves neither the target nor the temporary
    file behind, so a reader never sees half a file.

    Parameters
    ----------
    path
        Where the finished file goes.

    Yields
    ------
    pathlib.Path
        Where to write; in the same directory and with the same suffix as ``path``.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{target.stem}-", suffix=target.suffix, dir=target.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(text: str, path: str | Path) -> None:
    """Write a text file atomically, in UTF-8 with Unix line ends."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")


def write_csv(frame: pd.DataFrame, path: str | Path, schema: TableSchema | None = None) -> None:
    """Write a table as CSV, atomically and byte-identical for equal tables.

    Parameters
    ----------
    frame
        The table; its index is not written.
    path
        Target file.
    schema
        If given, the table is checked first and its columns are put in schema order.

    Raises
    ------
    TraceError
        The table does not follow ``schema``.
    """
    checked = frame if schema is None else schema.validate(frame, where=str(path))
    write_text(checked.to_csv(index=False, lineterminator="\n"), path)


def read_csv(path: str | Path, schema: TableSchema) -> pd.DataFrame:
    """Read and check a CSV table.

    Parameters
    ----------
    path
        File to read.
    schema
        What the table must contain.

    Returns
    -------
    pandas.DataFrame
        The checked table, see `TableSchema.validate`.

    Raises
    ------
    MissingDataError
        There is no such file.
    TraceError
        The file is empty or does not follow the schema.
    """
    try:
        frame: pd.DataFrame = pd.read_csv(
            path, dtype=object, encoding="utf-8-sig", keep_default_na=False, na_values=["", "nan"]
        )
    except FileNotFoundError:
        raise MissingDataError(f"{path}: no such file; expected table {schema.name!r}") from None
    except (pd.errors.EmptyDataError, pd.errors.ParserError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: cannot be read as table {schema.name!r}: {error}") from None
    return schema.validate(frame, where=str(path))
