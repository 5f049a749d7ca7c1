"""Verdicts: of one source from its tables, and over all sources."""

import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from string import Formatter
from typing import Any

import pandas as pd
from pandas.errors import UndefinedVariableError

from makespan.errors import InputError, TraceError, unknown_name
from makespan.files import read_bytes
from makespan.tables import CLAIMS, JOINED_CLAIMS, TableSchema, parse_csv, read_sealed

# ------------------------------------------------------------------------------------------------
# What a statement or a goal compares, as data: a value of a table, and the limit that it must keep.

_OPERATORS: Mapping[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    ">=": operator.ge,
    ">": operator.gt,
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """A value of a table, and the limit that it must keep.

    Expressions are those of `pandas.DataFrame.eval` over the columns of the table.

    Parameters
    ----------
    table
        Name of the table.
    rows
        Which rows count, an expression that is true or false for each; all rows if empty.
    pivot
        ``index / columns / values``: one row for each value of the columns ``index``, one column for each
        value of ``columns``, and in the cells the mean of ``values``. The table as it is if empty; one row if
        ``index`` is empty.
    value
        Expression for one number, or for one number per row.
    operator, limit
        ``<``, ``<=``, ``==``, ``>=`` or ``>``, and the limit that every number must keep; a missing number
        does not. Without an operator ``value`` is itself true or false, and the limit is NaN.

    Raises
    ------
    UnknownNameError, TraceError
        There is no such operator; an operator without a limit, or the reverse; a pivot of fewer parts.
    """

    table: str
    rows: str
    pivot: str
    value: str
    operator: str
    limit: float

    def __post_init__(self) -> None:
        if self.operator and self.operator not in _OPERATORS:
            raise unknown_name(f"comparison {self.value!r}: operator", self.operator, _OPERATORS)
        if bool(self.operator) == math.isnan(self.limit):
            raise TraceError(f"comparison {self.value!r}: expected both an operator and a limit, or neither")
        if self.pivot and self.pivot.count("/") != 2:
            raise TraceError(
                f"comparison {self.value!r}: found pivot {self.pivot!r}; expected index / columns / values"
            )

    def compared(self, table: pd.DataFrame) -> "_Compared | None":
        """Return the rows that count and the values to compare; None if there is no value.

        There is none without a row that counts, and where a pivot lacks a column of the value, for example
        that of a policy that did not run.

        Raises
        ------
        TraceError
            An expression names a column that the table does not have.
        """
        try:
            rows = table[_evaluated(self.rows, table).astype(bool)] if self.rows else table
            wide = _pivoted(rows, self.pivot) if self.pivot and len(rows) else rows
        except (KeyError, UndefinedVariableError) as error:
            raise TraceError(f"table {self.table}, comparison {self.value!r}: {error}") from None
        if wide.empty:
            return None
        try:
            value = _evaluated(self.value, wide)
        except UndefinedVariableError as error:
            if self.pivot:
                return None
            raise TraceError(f"table {self.table}, comparison {self.value!r}: {error}") from None
        values = value if isinstance(value, pd.Series) else pd.Series([value]).dropna()
        return None if values.empty else _Compared(wide, values)

    def holds(self, values: "pd.Series[Any]") -> "pd.Series[bool]":
        """Return for each value whether it keeps the limit."""
        kept = _OPERATORS[self.operator](values, self.limit) if self.operator else values
        return kept.fillna(False).astype(bool)


@dataclass(frozen=True, slots=True)
class _Compared:
    """Rows of a table that count, and the values that are compared, one at least."""

    rows: pd.DataFrame
    values: "pd.Series[Any]"


def _pivoted(rows: pd.DataFrame, pivot: str) -> pd.DataFrame:
    index, columns, values = (part.split() for part in pivot.split("/"))
    if not index:
        rows, index = rows.assign(**{"": 0}), [""]
    wide = rows.pivot_table(index=index, columns=columns[0], values=values[0], aggfunc="mean", sort=False)
    return wide.rename_axis(columns=None)


def _evaluated(expression: str, rows: pd.DataFrame, **further: object) -> Any:
    return rows.eval(expression, engine="python", local_dict=further)


class _Shown(Formatter):
    """Fill in a text whose fields are expressions over the compared rows; all cells of a column are shown."""

    def __init__(self, found: _Compared, holds: "pd.Series[bool]") -> None:
        self._rows, self._values = found.rows, {"value": found.values, "holds": holds}

    def get_field(self, field_name: str, args: object, kwargs: object) -> tuple[Any, str]:
        return _evaluated(field_name, self._rows, **self._values), field_name

    def format_field(self, value: Any, format_spec: str) -> str:
        cells = value if isinstance(value, pd.Series) else [value]
        return " ".join(format(cell, format_spec) for cell in cells)


# ------------------------------------------------------------------------------------------------
# What a paper hands in: statements, the tables that decide them, and the checks.

Tables = Mapping[str, pd.DataFrame]
_COMPARED = ("table", "rows", "pivot", "value", "operator", "limit", "shown")
_COLUMNS = (
    *("artifact", "statement", "published", "tolerance"),
    *_COMPARED,
    *("check", "subject", "sources", "fails_on", "note"),
)


@dataclass(frozen=True, slots=True)
class Claim:
    """Subject, limit, configuration and table that a check is given.

    What the subject means (model, column or jobs) depends on the check; the limit is the number that
    decides, NaN if the check needs none; the options are what checks must know of the configuration; the
    table is the name of the one that the check reads, or from whose name it derives those that it reads.
    """

    subject: str
    limit: float
    options: Mapping[str, str]
    table: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of a check: the value for people, whether the statement holds, and a note for readers.

    ``holds`` is None where there are results and they decide nothing; the note then says why.
    """

    reproduced: str
    holds: bool | None
    note: str = ""


Check = Callable[[Tables, Claim], Finding | None]
"""Return what the tables say of a claim, or None if they have no row that decides it."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """The statements of a paper and what decides them.

    Parameters
    ----------
    paper, package
        Name of the paper, for people, and the package that holds ``claims.csv``.
    checks
        Functions that decide what no comparison can, by the name in the column ``check``.
    tables
        Schemas of all tables that the checks may read, by the name under which they ask for them.
    """

    paper: str
    package: str
    checks: Mapping[str, Check]
    tables: Mapping[str, TableSchema]

    def statements(self) -> pd.DataFrame:
        """Read the statements and how each is decided: the columns of ``claims.csv``, all text.

        A statement has the parts of a `Comparison` and ``shown``, the text that reports it; or a ``check``
        with its ``subject`` and ``limit``, and perhaps the ``table`` that it reads; or neither, and the note
        says why nothing decides it. Fields of ``shown``, in braces, are expressions: ``@value`` is what is
        compared, ``@holds`` says where it keeps the limit. ``sources`` names the only sources that decide a
        statement, if not all do; ``fails_on`` those on which it fails with all lists, sizes and delays; fewer
        may leave it undecided.

        Raises
        ------
        UnknownNameError, TraceError
            A check, table or operator does not exist; a column is missing, a statement occurs twice, is
            decided in two ways, or in none and has no note; a limit is not a number.
        """
        with resources.files(self.package).joinpath("claims.csv").open(encoding="utf-8") as stream:
            table: pd.DataFrame = pd.read_csv(stream, dtype=str, keep_default_na=False)
        where = f"{self.package}: claims.csv"
        missing = [name for name in _COLUMNS if name not in table.columns]
        if missing:
            required = ", ".join(_COLUMNS)
            raise TraceError(f"{where}: lacks column(s) {', '.join(missing)}; required: {required}")
        self._check_rows(table, where)
        return table[list(_COLUMNS)]

    def _check_rows(self, table: pd.DataFrame, where: str) -> None:
        again = table[table.duplicated(["artifact", "statement"])]
        for artifact, statement in zip(again["artifact"], again["statement"], strict=True):
            raise TraceError(f"{where}: {artifact}: {statement!r} occurs twice; expected it once")
        for row in _records(table):
            of = f"{where}: {row['statement']!r}"
            if row["check"] and row["check"] not in self.checks:
                raise unknown_name(f"{of}: check", row["check"], self.checks)
            if row["check"] and row["value"]:
                raise TraceError(f"{of} has a check and a value; expected one of them")
            if not row["check"] and not row["value"] and not row["note"]:
                raise TraceError(f"{of} has neither check nor value; expected one, or a note that says why")
            if (row["value"] or row["table"]) and row["table"] not in self.tables:
                raise unknown_name(f"{of}: table", row["table"], self.tables)
            if row["value"] and not row["shown"]:
                raise TraceError(f"{of} has a value and no text that shows it; expected the column 'shown'")
            try:
                _limit(row)
                if row["value"]:
                    _comparison(row)
            except InputError as error:
                raise TraceError(f"{of}: {error}") from None


def _limit(row: Mapping[str, str]) -> float:
    try:
        return float(row["limit"]) if row["limit"] else math.nan
    except ValueError:
        raise TraceError(f"limit {row['limit']!r}; expected a number") from None


def _comparison(row: Mapping[str, str]) -> Comparison:
    return Comparison(limit=_limit(row), **{name: row[name] for name in _COMPARED[:5]})


def number(table: pd.DataFrame, column: str) -> "pd.Series[float]":
    """Return a column as numbers, missing cells as NaN; those without a schema come as text."""
    return pd.to_numeric(table[column]).astype("float64")


# ------------------------------------------------------------------------------------------------
# Verdicts: of one source from its tables, and over all sources.

_VERDICTS = {True: "holds", False: "fails", None: "undecided"}
_STRONGEST = ("fails", "holds", "undecided", "not run")
_KEY = ("paper", "artifact", "statement")


class _NotBuilt(Exception):
    """A check asks for a table that its source does not have; the ledger then says so."""


class _Built(dict[str, pd.DataFrame]):
    """The tables of a source; those that it lacks are told apart from names that no paper has."""

    def __init__(self, tables: Tables, ledger: Ledger) -> None:
        super().__init__(tables)
        self._known = ledger.tables
        self.asked: set[str] = set()

    def __getitem__(self, name: str) -> pd.DataFrame:
        self.asked.add(name)
        return super().__getitem__(name)

    def __missing__(self, name: str) -> pd.DataFrame:
        if name in self._known:
            raise _NotBuilt(name)
        raise KeyError(name)


def judge(
    ledger: Ledger,
    tables: Tables,
    source: str,
    options: Mapping[str, str],
    *,
    shown: str = "",
    untimed: Collection[str] = (),
) -> pd.DataFrame:
    """Compare every statement of a paper with the results of one source; raises as `Ledger.statements`.

    Parameters
    ----------
    tables, options
        Result tables by name; what the checks must know of the configuration.
    shown, untimed
        What iteration times are said to be, see `makespan.tables.shown_source`, the source itself unless
        given; tables that do not depend on them. Where they are not those of the source the note says so.

    Returns
    -------
    pandas.DataFrame
        Schema `makespan.tables.CLAIMS`, one row per statement. The verdict is ``holds`` or ``fails`` if the
        results decide it, ``undecided`` if there are results and they cannot, for example because they
        spread too far, and ``not run`` if there are none; the note has the reason.
    """
    built, records = _Built(tables, ledger), []
    for row in _records(ledger.statements()):
        built.asked.clear()
        record = _judged(row, ledger, built, source, options)
        if shown not in ("", source) and record["verdict"] != "not run" and built.asked - set(untimed):
            record["note"] = _joined(record["note"], f"iteration times: {shown}")
        records.append(record)
    return CLAIMS.validate(pd.DataFrame(records), where="claims")


def _records(table: pd.DataFrame) -> list[dict[str, str]]:
    return [{str(name): str(cell) for name, cell in row.items()} for row in table.to_dict("records")]


def _judged(
    row: Mapping[str, str], ledger: Ledger, tables: Tables, source: str, options: Mapping[str, str]
) -> dict[str, str]:
    record = {"paper": ledger.paper, "reproduced": "", "verdict": "not run"}
    record |= {name: row[name] for name in ("artifact", "statement", "published", "tolerance", "note")}
    if row["sources"] and source not in row["sources"].split():
        return record | {"note": _joined(row["note"], f"applies to source {row['sources']}")}
    if not row["check"] and not row["value"]:
        return record
    try:
        if row["value"]:
            finding = _found(_comparison(row), tables, row["shown"])
        else:
            claim = Claim(row["subject"], _limit(row), options, row["table"])
            finding = ledger.checks[row["check"]](tables, claim)
    except _NotBuilt as absent:
        return record | {"note": _joined(row["note"], f"no table {absent} of the paper's models")}
    if finding is None:
        return record | {"note": _joined(row["note"], "the results have no row that decides it")}
    return record | {
        "reproduced": finding.reproduced,
        "verdict": _VERDICTS[None if finding.holds is None else bool(finding.holds)],
        "note": _joined(row["note"], finding.note),
    }


def _found(comparison: Comparison, tables: Tables, shown: str) -> Finding | None:
    found = comparison.compared(tables[comparison.table])
    if found is None:
        return None
    holds = comparison.holds(found.values)
    try:
        return Finding(_Shown(found, holds).format(shown), bool(holds.all()))
    except UndefinedVariableError as error:
        raise TraceError(f"table {comparison.table}, shown as {shown!r}: {error}") from None


def join_claims(by_source: Mapping[str, Sequence[pd.DataFrame]]) -> pd.DataFrame:
    """Judge every statement over all sources.

    A statement fails if it fails on any source that decides it, and holds if it holds on all of those.
    If no source decides it, it is undecided where one has tried, else not run. A source to which a statement
    does not apply, or whose tables do not decide it, has no say. The note is that of the sources that
    decide, or the reason why none does; what only some of them say names the source.

    Parameters
    ----------
    by_source
        Ledgers of the papers (schema `makespan.tables.CLAIMS`), by source.

    Returns
    -------
    pandas.DataFrame
        Schema `makespan.tables.JOINED_CLAIMS`, one row per statement, with the columns
        ``reproduced_<source>`` and ``verdict_<source>`` of each source.
    """
    statements: dict[tuple[str, ...], dict[str, dict[str, str]]] = {}
    for source, ledgers in by_source.items():
        for row in (row for ledger in ledgers for row in _records(ledger)):
            statements.setdefault(tuple(row[name] for name in _KEY), {})[source] = row
    rows = [_over_sources(found, list(by_source)) for found in statements.values()]
    further = [f"{kind}_{source}" for source in by_source for kind in ("reproduced", "verdict")]
    frame = pd.DataFrame(rows, columns=[*JOINED_CLAIMS.names, *further])
    return JOINED_CLAIMS.validate(frame, where="joined claims")


def _over_sources(found: Mapping[str, Mapping[str, str]], sources: Sequence[str]) -> dict[str, str]:
    verdicts = {row["verdict"] for row in found.values()}
    verdict = next(name for name in _STRONGEST if name in verdicts)
    says = {"fails", "holds"} if verdict in ("fails", "holds") else {verdict}
    deciding = {source: row for source, row in found.items() if row["verdict"] in says}
    first = next(iter(found.values()))
    record = {name: first[name] for name in (*_KEY, "published", "tolerance")}
    record["verdict"] = verdict
    record["note"] = _note({source: row["note"] for source, row in deciding.items()})
    for source in sources:
        own = found.get(source, {"reproduced": "", "verdict": "not run"})
        record |= {f"{name}_{source}": own[name] for name in ("reproduced", "verdict")}
    return record


def _note(notes: Mapping[str, str]) -> str:
    """Join the notes of sources: parts that all share once, and the rest with the source before it."""
    parts = {source: note.split("; ") for source, note in notes.items()}
    shared = [part for part in next(iter(parts.values())) if all(part in others for others in parts.values())]
    rest = {source: "; ".join(part for part in own if part not in shared) for source, own in parts.items()}
    return _joined(*shared, *(f"{source}: {text}" for source, text in rest.items() if text))


def _joined(*notes: str) -> str:
    return "; ".join(note for note in notes if note)


# ------------------------------------------------------------------------------------------------
# Goals that this project sets itself beyond what papers state, and what the results reach.


@dataclass(frozen=True, slots=True)
class Target:
    """A goal: a number of a result table, and the limit that it must keep.

    Parameters
    ----------
    name
        What is measured.
    comparison
        The number and its limit; the table is one below ``results/``, as ``<source>/<paper>/<table>`` without
        ``.csv``.
    unit
        Unit of the limit.
    kind
        What the goal guards: ``prediction``, ``schedule``, ``lead`` or ``live``.
    """

    name: str
    comparison: Comparison
    unit: str
    kind: str

    def value(self, table: pd.DataFrame) -> float:
        """Return the number in a table; raises `TraceError` if it lacks a column or a single row."""
        found = self.comparison.compared(table)
        values = [] if found is None else [float(value) for value in found.values]
        if len(values) != 1:
            raise TraceError(
                f"target {self.name!r}: table {self.comparison.table} has {len(values)} values; expected one"
            )
        return values[0]

    def is_met(self, value: float) -> bool:
        """Tell whether a number keeps the limit."""
        return bool(self.comparison.holds(pd.Series([value])).all())


_TARGET_COLUMNS = ("name", "table", "rows", "value", "operator", "limit", "unit", "kind")


def read_targets(path: str | Path) -> list[Target]:
    """Read a list of goals, a CSV file with the parts of `Target` and of its `Comparison` as columns.

    Raises
    ------
    UnknownNameError, TraceError
        There are other columns; an operator does not exist; a limit is not a number.
    """
    expected = "a list of targets"
    content = read_bytes(path, expected, TraceError)
    table: pd.DataFrame = parse_csv(content, str(path), expected, dtype=str, keep_default_na=False)
    if tuple(table.columns) != _TARGET_COLUMNS:
        raise TraceError(
            f"{path}: found columns {', '.join(table.columns)}; expected {', '.join(_TARGET_COLUMNS)}"
        )
    return [
        Target(row["name"], _comparison(row | {"pivot": ""}), row["unit"], row["kind"])
        for row in _records(table)
    ]


def measured_targets(targets: Iterable[Target], results: str | Path) -> pd.DataFrame:
    """Compare goals with what was built in a directory of results.

    The table has the columns ``kind, name, value, goal, state``, one row a goal; ``state`` is ``met``,
    ``missed`` or ``not built``, and the value is then NaN. Raises as `Target.value`.
    """
    rows = []
    for target in targets:
        path = Path(results) / f"{target.comparison.table}.csv"
        value = target.value(_result(path)) if path.is_file() else float("nan")
        state = ("met" if target.is_met(value) else "missed") if path.is_file() else "not built"
        goal = f"{target.comparison.operator} {target.comparison.limit:g} {target.unit}"
        rows.append((target.kind, target.name, value, goal, state))
    return pd.DataFrame(rows, columns=["kind", "name", "value", "goal", "state"])


def _result(path: Path) -> pd.DataFrame:
    table: pd.DataFrame = parse_csv(read_sealed(path, "a result"), str(path), "a result")
    return table
