"""Goals that this project sets itself beyond what papers state, and what the results reach."""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path

import pandas as pd

from makespan.claims._ledger import number
from makespan.errors import TraceError, unknown_name
from makespan.files import read_bytes
from makespan.tables import parse_csv, read_sealed

__all__ = ["Target", "measured_targets", "read_targets"]

_STATISTICS = {
    "value": lambda values: float(values.iloc[0]),
    "mean absolute": lambda values: float(values.abs().mean()),
}
_COMPARISONS = ("<=", ">=")


@dataclass(frozen=True, slots=True)
class Target:
    """A goal: a number of a result table, and the threshold that it must keep.

    Parameters
    ----------
    name
        What is measured.
    table, column
        Result table below ``results/``, as ``<source>/<paper>/<table>`` without ``.csv``, and its column.
    rows
        Which rows count, as ``column=value; column=value``; all if empty.
    relative_to
        Columns of ``rows`` and the values that they have in the row by which the number is divided;
        empty for the number itself.
    statistic
        ``value`` of the only row, or ``mean absolute`` over the rows.
    comparison, threshold, unit
        ``<=`` or ``>=``, and the threshold in the unit of the column.
    kind
        What the goal guards: ``prediction``, ``schedule``, ``lead`` or ``live``.
    """

    name: str
    table: str
    column: str
    rows: str
    relative_to: str
    statistic: str
    comparison: str
    threshold: float
    unit: str
    kind: str

    def __post_init__(self) -> None:
        if self.statistic not in _STATISTICS:
            raise unknown_name(f"target {self.name!r}: statistic", self.statistic, _STATISTICS)
        if self.comparison not in _COMPARISONS:
            raise unknown_name(f"target {self.name!r}: comparison", self.comparison, _COMPARISONS)

    def value(self, table: pd.DataFrame) -> float:
        """Return the number in a table; refuses one without the columns or the row."""
        wanted, divisor = _cells(self.rows), _cells(self.relative_to)
        value = self._statistic(table, wanted)
        return value / self._statistic(table, wanted | divisor) if divisor else value

    def is_met(self, value: float) -> bool:
        """Say whether a number keeps the threshold."""
        return value <= self.threshold if self.comparison == "<=" else value >= self.threshold

    def _statistic(self, table: pd.DataFrame, wanted: dict[str, str]) -> float:
        missing = [column for column in (*wanted, self.column) if column not in table.columns]
        if missing:
            raise TraceError(f"target {self.name!r}: table {self.table} lacks column(s) {', '.join(missing)}")
        kept = table
        for column, text in wanted.items():
            kept = kept[kept[column].map(lambda cell, text=text: _equal(cell, text)).astype(bool)]
        if len(kept) != 1 and (self.statistic == "value" or kept.empty):
            where = f"target {self.name!r}: table {self.table}"
            raise TraceError(f"{where} has {len(kept)} rows with {wanted}; accepted: one")
        return _STATISTICS[self.statistic](number(kept, self.column))


def _cells(text: str) -> dict[str, str]:
    """Read ``column=value; column=value``."""
    pairs = [pair.partition("=") for pair in text.split(";") if pair.strip()]
    return {column.strip(): value.strip() for column, _, value in pairs}


def _equal(cell: object, text: str) -> bool:
    try:
        return float(str(cell)) == float(text)
    except ValueError:
        return str(cell) == text


def read_targets(path: str | Path) -> list[Target]:
    """Read a list of goals, a CSV file; raises `TraceError` unless its columns are the fields of `Target`."""
    names = [field.name for field in fields(Target)]
    expected = "a list of targets"
    content = read_bytes(path, expected, TraceError)
    table: pd.DataFrame = parse_csv(content, str(path), expected, dtype=str, keep_default_na=False)
    if list(table.columns) != names:
        raise TraceError(f"{path}: found columns {', '.join(table.columns)}; accepted: {', '.join(names)}")
    try:
        return [
            _target({str(name): str(cell) for name, cell in row.items()}) for row in table.to_dict("records")
        ]
    except ValueError as error:
        raise TraceError(f"{path}: column 'threshold': {error}; accepted: a number") from None


def _target(cells: dict[str, str]) -> Target:
    return Target(threshold=float(cells.pop("threshold")), **cells)


def measured_targets(targets: Iterable[Target], results: str | Path) -> pd.DataFrame:
    """Compare goals with what was built in a directory of results.

    The table has the columns ``kind, name, value, goal, state``, one row a goal; ``state`` is ``met``,
    ``missed`` or ``not built``, and the value is then NaN. Raises as `Target.value`.
    """
    rows = []
    for target in targets:
        path = Path(results) / f"{target.table}.csv"
        value = target.value(_result(path)) if path.is_file() else float("nan")
        state = ("met" if target.is_met(value) else "missed") if path.is_file() else "not built"
        goal = f"{target.comparison} {target.threshold:g} {target.unit}"
        rows.append((target.kind, target.name, value, goal, state))
    return pd.DataFrame(rows, columns=["kind", "name", "value", "goal", "state"])


def _result(path: Path) -> pd.DataFrame:
    table: pd.DataFrame = parse_csv(read_sealed(path, "a result"), str(path), "a result")
    return table
