"""Atomic writing, and reading with the schema checked."""

from pathlib import Path

import pandas as pd

from makespan.errors import MissingDataError, TraceError
from makespan.files import atomic_path, write_text
from makespan.tables._schema import TableSchema

__all__ = ["atomic_path", "read_csv", "write_csv", "write_text"]


def write_csv(frame: pd.DataFrame, path: str | Path, schema: TableSchema | None = None) -> None:
    """Write a table as CSV without its index, atomically and byte-identical for equal tables.

    If a schema is given, the table is checked first, see `TableSchema.validate`.
    """
    checked = frame if schema is None else schema.validate(frame, where=str(path))
    write_text(checked.to_csv(index=False, lineterminator="\n"), path)


def read_csv(path: str | Path, schema: TableSchema) -> pd.DataFrame:
    """Read and check a CSV table, see `TableSchema.validate`; raises `MissingDataError` if there is none."""
    try:
        frame: pd.DataFrame = pd.read_csv(
            path, dtype=object, encoding="utf-8-sig", keep_default_na=False, na_values=["", "nan"]
        )
    except FileNotFoundError:
        raise MissingDataError(f"{path}: no such file; expected table {schema.name!r}") from None
    except (pd.errors.EmptyDataError, pd.errors.ParserError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: cannot be read as table {schema.name!r}: {error}") from None
    return schema.validate(frame, where=str(path))
