"""Verdicts: of one source from its tables, and over all sources."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path

import pandas as pd

from makespan.errors import TraceError, unknown_name
from makespan.files import read_bytes
from makespan.tables import CLAIMS, JOINED_CLAIMS, TableSchema, parse_csv, read_sealed

# ------------------------------------------------------------------------------------------------
# What a paper hands in: statements, the tables that decide them, and the checks.

Tables = Mapping[str, pd.DataFrame]
_COLUMNS = (
    "artifact", "statement", "published", "tolerance", "check", "subject", "limit", "sources", "fails_on",
    "note",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Claim:
    """Subject, limit and configuration that a check is given.

    What the subject means (model, column or jobs) depends on the check; the limit is the number that
    decides, NaN if the check needs none; the options are what checks must know of the configuration.
    """

    subject: str
    limit: float
    options: Mapping[str, str]


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
        How statements are checked, by the name in the column ``check``.
    tables
        Schemas of all tables that the checks may read, by the name under which they ask for them.
    """

    paper: str
    package: str
    checks: Mapping[str, Check]
    tables: Mapping[str, TableSchema]

    def statements(self) -> pd.DataFrame:
        """Read the statements and how each is checked: the columns of ``claims.csv``, all text.

        ``sources`` names the only sources that decide a statement, if not all do; ``fails_on`` those on
        which it fails with all lists, sizes and delays; fewer may leave it undecided. Without a ``check`` the
        note says why nothing decides it.

        Raises
        ------
        UnknownNameError, TraceError
            A check does not exist; a column is missing, a statement occurs twice, or lacks check and note.
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
        for name in table["check"]:
            if name and name not in self.checks:
                raise unknown_name(f"{where}: check", name, self.checks)
        again = table[table.duplicated(["artifact", "statement"])]
        for artifact, statement in zip(again["artifact"], again["statement"], strict=True):
            raise TraceError(f"{where}: {artifact}: {statement!r} occurs twice; accepted: once")
        for statement in table["statement"][(table["check"] == "") & (table["note"] == "")]:
            raise TraceError(
                f"{where}: {statement!r} has no check; accepted: a check, or a note that says why"
            )


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
        Schema `makespan.tables.CLAIMS`, one row a statement. The verdict is ``holds`` or ``fails`` if the
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
    if not row["check"]:
        return record
    limit = float(row["limit"]) if row["limit"] else math.nan
    try:
        finding = ledger.checks[row["check"]](tables, Claim(row["subject"], limit, options))
    except _NotBuilt as absent:
        return record | {"note": _joined(row["note"], f"no table {absent} of the paper's models")}
    if finding is None:
        return record | {"note": _joined(row["note"], "the results have no row that decides it")}
    return record | {
        "reproduced": finding.reproduced,
        "verdict": _VERDICTS[None if finding.holds is None else bool(finding.holds)],
        "note": _joined(row["note"], finding.note),
    }


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
        Schema `makespan.tables.JOINED_CLAIMS`, one row a statement, with the columns
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
        """Tell whether a number keeps the threshold."""
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
