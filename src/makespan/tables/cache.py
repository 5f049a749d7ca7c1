"""Cache of computed tables on disk, by the content of what they follow from.

Fits of packaged tables are the same in every process, and take most of its time. A table is kept under a hash
of its inputs and of the code that computes it, so that nothing has to be invalidated: after any change the
hash is another one. ``MAKESPAN_CACHE_DIR`` names the directory; an empty value turns the cache off.
"""

import hashlib
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd

from makespan.errors import TraceError
from makespan.files import write_text
from makespan.tables.io import csv_text, parse_csv
from makespan.tables.schema import TableSchema

_LOG = logging.getLogger(__name__)
_VARIABLE = "MAKESPAN_CACHE_DIR"
_MOST_FILES = 512  # a few kilobytes each; the oldest go
_DTYPES: dict[str, Any] = {"text": "str", "int": "int64", "float": "float64", "bool": bool}


def cached_table(
    schema: TableSchema, inputs: object, packages: tuple[str, ...], compute: Callable[[], pd.DataFrame]
) -> pd.DataFrame:
    """Return a table from the cache, or compute and keep it.

    Parameters
    ----------
    schema
        Schema of the table; one with further columns is not kept.
    inputs
        Everything that the table follows from; its ``repr`` must tell different inputs apart.
    packages
        Packages, with their data files, and modules that compute the table.
    compute
        Computes the table.
    """
    folder = _folder()
    if folder is None:
        return compute()
    # Without the rule of the schema: the ``repr`` of a function has its address, another one per process.
    parts = (schema.name, schema.columns, inputs, [_fingerprint(name) for name in packages])
    key = hashlib.sha256(repr(parts).encode())
    path = folder / f"{schema.name}-{key.hexdigest()[:32]}.csv"
    with suppress(OSError, ValueError, TraceError):  # no such file, or one that is damaged: it is computed
        return _read(path, schema)
    table = compute()
    if list(table.columns) == schema.names:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_text(csv_text(table), path)
            kept = sorted(folder.glob("*.csv"), key=lambda file: file.stat().st_mtime_ns)
            for oldest in kept[:-_MOST_FILES]:
                oldest.unlink(missing_ok=True)
        except OSError as error:
            _LOG.debug("%s: not kept: %s", path, error)
    return table


def _folder() -> Path | None:
    given = os.environ.get(_VARIABLE)
    if given is not None:
        return Path(given) if given else None
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base, "makespan")


@cache
def _fingerprint(name: str) -> str:
    """Return a hash over the files of a package, code and data, or over a module."""
    spec = find_spec(name)
    home = Path(str(spec.origin if spec else None))
    files = sorted(home.parent.rglob("*")) if home.name == "__init__.py" else [home]
    digest = hashlib.sha256()
    for path in files:
        if path.is_file() and "__pycache__" not in path.parts:
            digest.update(f"{path.relative_to(home.parent)}\n".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _read(path: Path, schema: TableSchema) -> pd.DataFrame:
    numbers = [column.name for column in schema.columns if column.kind == "float"]
    kinds = {column.name: _DTYPES[column.kind] for column in schema.columns if column.kind != "float"}
    # Python reads a number back with the bits that were written, which the parser of pandas does not promise.
    exact = dict.fromkeys(numbers, lambda text: float(text or "nan"))
    content = path.read_bytes()
    table: pd.DataFrame = parse_csv(
        content, str(path), "a cached table", dtype=kinds, keep_default_na=False, converters=exact
    )
    if list(table.columns) != schema.names:
        raise ValueError(f"{path}: other columns")
    return table.astype(dict.fromkeys(numbers, "float64"))
