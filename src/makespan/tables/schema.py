"""Table schemas: required columns with types and units, the check of every cell, and schemas as data."""

import csv
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

from makespan.errors import TraceError, cell_error, shown

# ------------------------------------------------------------------------------------------------
# What a table must contain, and the check of every cell.

Kind = Literal["text", "int", "float", "bool"]
Rule = Callable[[pd.DataFrame], tuple[npt.NDArray[np.bool_], str, str]]
_DTYPES: dict[str, Any] = {"text": "str", "int": "int64", "float": "float64", "bool": bool}
_TRUE, _FALSE = ("true", "1"), ("false", "0")
_LARGEST = 2**53


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table.

    The unit is ``"1"`` for a pure number and empty for text; only a ``float`` may be missing (NaN).
    """

    name: str
    kind: Kind
    unit: str
    description: str
    nullable: bool = False


@dataclass(frozen=True, slots=True)
class TableSchema:
    """The required columns of a table, in the order in which they are written; further ones may follow.

    ``rule`` says of a table with converted columns which rows contradict themselves, in which column, and
    what is accepted there.
    """

    name: str
    columns: tuple[Column, ...]
    rule: Rule | None = None

    @property
    def names(self) -> list[str]:
        """Names of the required columns, in order."""
        return [column.name for column in self.columns]

    def validate(self, frame: pd.DataFrame, where: str) -> pd.DataFrame:
        """Check a table, whose values may still be text, and convert its columns to their types.

        Required columns come first, in schema order, then any further ones; the index is new. Raises
        `TraceError`, which names ``where`` (file or producer), row and column.
        """
        if not isinstance(frame, pd.DataFrame):
            raise TraceError(f"{where}: table {self.name!r} is {shown(frame)}; expected a pandas.DataFrame")
        if not frame.columns.is_unique:
            again = shown(frame.columns[frame.columns.duplicated()][0])
            raise TraceError(f"{where}: table {self.name!r} has two columns {again}; expected each name once")
        missing = [name for name in self.names if name not in frame.columns]
        if missing:
            found = ", ".join(str(name) for name in frame.columns) or "none"
            raise TraceError(
                f"{where}: table {self.name!r} lacks column(s) {', '.join(missing)}; "
                f"found: {found}; required: {', '.join(self.names)}"
            )
        further = [name for name in frame.columns if name not in self.names]
        result = frame[[*self.names, *further]].reset_index(drop=True)  # copied where it is written to
        for column in self.columns:
            if not _is_converted(result[column.name], column):
                result[column.name] = _convert(result[column.name], column, where)
        if self.rule is not None:
            wrong, column_name, accepted = self.rule(result)
            for row in np.flatnonzero(wrong)[:1]:
                raise cell_error(
                    where, int(row) + 1, column_name, result[column_name].tolist()[row], accepted
                )
        return result


def table_schema(name: str, *rows: tuple[Any, ...], rule: Rule | None = None) -> TableSchema:
    """Return the schema of a table; each row has the fields of a `Column`."""
    return TableSchema(name, tuple(Column(*row) for row in rows), rule)


_CELL_SOURCE = Column("source", "text", "", "where the cell is printed")
_CELLS = "published_"


@cache
def schemas_of(package: str) -> dict[str, TableSchema]:
    """Return the schemas in ``tables.csv`` of a package, by table.

    The file, if there is one, has one row per column; several tables with the same columns share rows, their
    names separated by spaces. ``published_<artifact>`` are cells that a paper prints, each with its source.
    """
    columns: dict[str, list[Column]] = {}
    file = resources.files(package).joinpath("tables.csv")
    text = file.read_text("utf-8") if file.is_file() else ""
    for row in csv.DictReader(text.splitlines()):
        kind: Any = row["type"]
        column = Column(row["column"], kind, row["unit"], row["description"], row["may_be_empty"] == "yes")
        for table in row["table"].split():
            columns.setdefault(table, []).append(column)
    paper = package.rpartition(".papers.")[2] if ".papers." in package else ""
    found = {}
    for table, own in columns.items():
        is_printed = table.startswith(_CELLS)
        name = f"{paper}_{table}" if paper and not is_printed else table
        found[table] = TableSchema(name, (*own, *([_CELL_SOURCE] * is_printed)))
    return found


def _is_converted(values: pd.Series, column: Column) -> bool:
    """Tell whether values are as `_convert` would leave them, as in tables that were validated before."""
    if values.dtype != _DTYPES[column.kind]:
        return False
    if column.kind in ("int", "bool") or (column.kind == "float" and column.nullable):
        return True  # cannot, or may, hold missing values
    return not values.hasnans


def _convert(values: pd.Series, column: Column, where: str) -> pd.Series:
    if column.kind == "text":
        return values.astype(object).where(values.notna(), "").astype(str)
    if column.kind == "bool":
        text = values.astype(str).str.lower()
        _raise_first(~text.isin([*_TRUE, *_FALSE]), values, column, where)
        return text.isin(_TRUE).astype(bool)
    numbers = pd.to_numeric(values, errors="coerce").astype("float64")
    wrong = numbers.isna() & (values.notna() | (not column.nullable))
    if column.kind == "int":
        wrong |= numbers.notna() & (numbers != np.floor(numbers))
    _raise_first(wrong, values, column, where)
    if column.kind == "int":
        limit = f", from {-_LARGEST:.0f} to {_LARGEST:.0f}, as larger numbers are not kept exactly"
        _raise_first(numbers.abs() > _LARGEST, values, column, where, limit)
    return numbers.astype("int64") if column.kind == "int" else numbers


def _raise_first(
    wrong: "pd.Series[bool]", values: pd.Series, column: Column, where: str, limit: str = ""
) -> None:
    if not bool(wrong.any()):
        return
    row = int(np.flatnonzero(wrong.to_numpy())[0])
    accepted = {"int": "a whole number", "float": "a number", "bool": "true or false"}
    raise TraceError(
        f"{where}: row {row + 1}, column {column.name!r}: found {values.tolist()[row]!r}; "
        f"expected {accepted[column.kind]}" + (f" in {column.unit}" if column.unit else "") + limit
    )
