"""Schemas of the tables that cross a workflow stage, and atomic reading and writing.

A stage reads only files that earlier stages wrote, and each of those files has its schema
here: column names, types, units and meanings.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from makespan.errors import MissingDataError, TraceError

__all__ = [
    "CLAIMS",
    "FIG7",
    "FIG8",
    "FIT",
    "SENSITIVITY",
    "SENSITIVITY_FAMILIES",
    "TABLE2",
    "TABLE2_ROWS",
    "THROUGHPUT",
    "Column",
    "TableSchema",
    "atomic_path",
    "read_csv",
    "write_csv",
    "write_text",
]

Kind = Literal["text", "int", "float", "bool"]
_TRUE, _FALSE = ("true", "1"), ("false", "0")


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table.

    Parameters
    ----------
    name
        Header of the column.
    kind
        ``text``, ``int``, ``float`` or ``bool``.
    unit
        Unit of the values, ``"1"`` for a pure number, empty for text.
    description
        What a value means.
    nullable
        Whether a value may be missing (NaN); only for ``float``.
    """

    name: str
    kind: Kind
    unit: str
    description: str
    nullable: bool = False


@dataclass(frozen=True, slots=True)
class TableSchema:
    """The columns of a table; further columns may follow them.

    Parameters
    ----------
    name
        What the table is called in messages.
    columns
        The required columns, in the order in which they are written.
    """

    name: str
    columns: tuple[Column, ...]

    @property
    def names(self) -> list[str]:
        """Names of the required columns, in order."""
        return [column.name for column in self.columns]

    def validate(self, frame: pd.DataFrame, where: str) -> pd.DataFrame:
        """Check a table and convert its columns to their types.

        Parameters
        ----------
        frame
            Table with at least the required columns; values may still be text.
        where
            File or producer, for the message.

        Returns
        -------
        pandas.DataFrame
            Required columns first, in schema order, then any further ones; new index.

        Raises
        ------
        TraceError
            A column is missing or a value has the wrong type; names row and column.
        """
        missing = [name for name in self.names if name not in frame.columns]
        if missing:
            found = ", ".join(str(name) for name in frame.columns) or "none"
            raise TraceError(
                f"{where}: table {self.name!r} lacks column(s) {', '.join(missing)}; "
                f"found: {found}; required: {', '.join(self.names)}"
            )
        further = [name for name in frame.columns if name not in self.names]
        result = frame[[*self.names, *further]].reset_index(drop=True).copy()
        for column in self.columns:
            result[column.name] = _convert(result[column.name], column, where)
        return result


def _convert(values: pd.Series, column: Column, where: str) -> pd.Series:
    if column.kind == "text":
        return values.astype(object).where(values.notna(), "").astype(str)
    if column.kind == "bool":
        return _convert_bool(values, column, where)
    numbers = pd.to_numeric(values, errors="coerce").astype("float64")
    wrong = numbers.isna() & (values.notna() | (not column.nullable))
    if column.kind == "int":
        wrong |= numbers.notna() & (numbers != np.floor(numbers))
    _raise_first(wrong, values, column, where)
    return numbers.astype("int64") if column.kind == "int" else numbers


def _convert_bool(values: pd.Series, column: Column, where: str) -> pd.Series:
    text = values.astype(str).str.lower()
    _raise_first(~text.isin([*_TRUE, *_FALSE]), values, column, where)
    return text.isin(_TRUE).astype(bool)


def _raise_first(wrong: "pd.Series[bool]", values: pd.Series, column: Column, where: str) -> None:
    if not bool(wrong.any()):
        return
    row = int(np.flatnonzero(wrong.to_numpy())[0])
    accepted = {"int": "a whole number", "float": "a number", "bool": "true or false"}
    raise TraceError(
        f"{where}: row {row + 1}, column {column.name!r}: found {values.iloc[row]!r}; "
        f"accepted: {accepted[column.kind]}" + (f" in {column.unit}" if column.unit else "")
    )


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


def _columns(*rows: tuple[Any, ...]) -> tuple[Column, ...]:
    return tuple(Column(*row) for row in rows)


THROUGHPUT = TableSchema(
    "throughput",
    _columns(
        ("workload", "text", "", "key of the workload"),
        ("exec_plan", "text", "", "execution plan in trace notation"),
        ("placement", "text", "", "GPUs on each node, one digit a node"),
        ("cpu_threads", "int", "1", "CPU threads a GPU"),
        ("global_batch_size", "int", "samples", "samples an optimiser step"),
        ("iter_time_s", "float", "s", "time of one optimiser step; missing if infeasible", True),
        ("forward_s", "float", "s", "reported forward phase, where there is one", True),
        ("overlap_sync_s", "float", "s", "reported backward and synchronisation phase", True),
        ("optimize_s", "float", "s", "reported optimiser phase", True),
        ("feasible", "bool", "", "whether the plan can run in this placement"),
        ("clean", "bool", "", "whether no measurement anomaly was found"),
        ("flag", "text", "", "the anomaly, empty for clean rows"),
        ("provenance", "text", "", "emulated, published, measured or interpolated"),
    ),
)

FIT = TableSchema(
    "fit",
    _columns(
        ("workload", "text", "", "key of the workload"),
        ("form", "text", "", "form of the performance model"),
        ("parameter", "text", "", "name of the fitted parameter"),
        ("value", "float", "", "fitted value", True),
        ("std_err", "float", "", "standard error of the value", True),
        ("identified", "bool", "", "whether the observations determine the parameter"),
    ),
)

TABLE2 = TableSchema(
    "table2",
    _columns(
        ("model", "text", "", "key of the workload"),
        ("plan_family", "text", "", "family of execution plans"),
        ("form", "text", "", "form of the performance model"),
        ("n_fit", "int", "1", "rows used in the fit"),
        ("n_validate", "int", "1", "clean rows held out"),
        ("avg_error_pct", "float", "%", "mean relative error of held-out clean rows", True),
        ("p95_error_pct", "float", "%", "95th percentile of the same", True),
        ("max_error_pct", "float", "%", "largest of the same", True),
        ("avg_error_all_rows_pct", "float", "%", "mean over all held-out rows", True),
    ),
)

TABLE2_ROWS = TableSchema(
    "table2_rows",
    _columns(
        ("model", "text", "", "key of the workload"),
        ("exec_plan", "text", "", "execution plan in trace notation"),
        ("placement", "text", "", "GPUs on each node"),
        ("form", "text", "", "form of the performance model"),
        ("fitted", "bool", "", "whether the row was used in the fit"),
        ("clean", "bool", "", "whether no measurement anomaly was found"),
        ("measured_s", "float", "s", "iteration time in the throughput table"),
        ("predicted_s", "float", "s", "iteration time of the fitted model"),
        ("error_pct", "float", "%", "relative error of the prediction"),
    ),
)

SENSITIVITY = TableSchema(
    "sensitivity",
    _columns(
        ("model", "text", "", "key of the workload"),
        ("gpus", "int", "1", "GPUs at the most"),
        ("best_plan", "text", "", "fastest feasible plan, empty if none"),
        ("throughput_samples_per_s", "float", "samples/s", "its throughput, 0 if none"),
    ),
)

SENSITIVITY_FAMILIES = TableSchema(
    "sensitivity_families",
    _columns(
        ("model", "text", "", "key of the workload"),
        ("plan_family", "text", "", "family of execution plans"),
        ("gpus", "int", "1", "GPUs used"),
        ("cpu_threads", "int", "1", "CPU threads a GPU"),
        ("plan", "text", "", "fastest feasible plan of the family"),
        ("throughput_samples_per_s", "float", "samples/s", "its throughput"),
    ),
)

FIG7 = TableSchema(
    "fig7",
    _columns(
        ("strategy", "text", "", "how the plan is chosen"),
        ("stage", "text", "", "resource limit in force"),
        ("gpus", "int", "1", "GPUs of the stage"),
        ("plan", "text", "", "plan that runs, empty if none can"),
        ("iter_time_s", "float", "s", "iteration time, 0 if nothing can run"),
        ("throughput_samples_per_s", "float", "samples/s", "throughput, 0 if nothing can run"),
        ("published_iter_time_s", "float", "s", "value in the paper's figure", True),
    ),
)

FIG8 = TableSchema(
    "fig8",
    _columns(
        ("scheduler", "text", "", "who divides the GPUs"),
        ("job", "text", "", "key of the workload"),
        ("gpus", "int", "1", "GPUs given to the job"),
        ("plan", "text", "", "plan that runs"),
        ("speedup", "float", "1", "throughput over that of the job alone on all GPUs"),
        ("published_speedup", "float", "1", "value in the paper's figure", True),
    ),
)

CLAIMS = TableSchema(
    "claims",
    _columns(
        ("paper", "text", "", "paper that makes the statement"),
        ("artifact", "text", "", "table or figure"),
        ("statement", "text", "", "the statement in our words"),
        ("published", "text", "", "published value"),
        ("reproduced", "text", "", "value found here"),
        ("tolerance", "text", "", "what counts as agreement"),
        ("verdict", "text", "", "holds, fails or not run"),
        ("note", "text", "", "explanation"),
    ),
)
