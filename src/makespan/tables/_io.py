"""Atomic writing, and reading with the schema and, of results, the checksum checked."""

import hashlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import pandas as pd

from makespan.errors import TraceError, unknown_name
from makespan.files import atomic_path, read_bytes, read_json, write_json, write_text
from makespan.tables._schema import TableSchema

__all__ = [
    "atomic_path", "parse_csv", "read_csv", "read_printed", "read_sealed", "write_csv", "write_result",
    "write_text",
]  # fmt: skip


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
    return checked.to_csv(index=False, lineterminator="\n")


def _seal_path(path: str | Path) -> Path:
    return Path(path).with_name(f".{Path(path).name}.sum")


def _seal(content: bytes) -> dict[str, Any]:
    return {"rows": content.count(b"\n") - 1, "sha256": hashlib.sha256(content).hexdigest()}


def read_sealed(path: str | Path, expected: str) -> bytes:
    """Content of a table; `TraceError` if it is not that of its seal, where there is one.

    ``expected`` names the table for messages; raises `MissingDataError` if there is none.
    """
    content = read_bytes(path, expected, TraceError)
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
    """
    stream = io.BytesIO(content) if isinstance(content, bytes) else content
    try:
        return pd.read_csv(stream, encoding="utf-8-sig", **options)
    except (pd.errors.EmptyDataError, pd.errors.ParserError, UnicodeDecodeError) as error:
        raise TraceError(f"{where}: cannot be read as {expected}: {error}") from None


def read_csv(path: str | Path, schema: TableSchema) -> pd.DataFrame:
    """Read and check a CSV table, see `TableSchema.validate`; raises `MissingDataError` if there is none.

    A table of `write_result` that is not what was written is a `TraceError`.
    """
    expected = f"table {schema.name!r}"
    content = read_sealed(path, expected)
    options = {"dtype": object, "keep_default_na": False, "na_values": ["", "nan"]}
    return schema.validate(parse_csv(content, str(path), expected, **options), where=str(path))


def read_printed(artifact: str, path: str | Path, schemas: Mapping[str, TableSchema]) -> pd.DataFrame:
    """Read the cells that a paper prints, as `read_csv`; `UnknownNameError` if no artifact has this name."""
    if artifact not in schemas:
        raise unknown_name("artifact", artifact, schemas)
    return read_csv(path, schemas[artifact])
