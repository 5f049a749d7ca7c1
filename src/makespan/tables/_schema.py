"""What a table must contain, and the check of every cell."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd

from makespan.errors import TraceError

__all__ = ["Column", "TableSchema", "columns"]

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


def columns(*rows: tuple[Any, ...]) -> tuple[Column, ...]:
    """Return one `Column` a row of its arguments."""
    return tuple(Column(*row) for row in rows)


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
