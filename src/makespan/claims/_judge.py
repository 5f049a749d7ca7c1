"""Verdicts: of one source from its tables, and over all sources."""

import math
from collections.abc import Collection, Mapping, Sequence

import pandas as pd

from makespan.claims._ledger import Claim, Ledger, Tables
from makespan.tables import CLAIMS, JOINED_CLAIMS

__all__ = ["join_claims", "judge"]

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
    """Say once what all sources say, and who says the rest."""
    parts = {source: note.split("; ") for source, note in notes.items()}
    shared = [part for part in next(iter(parts.values())) if all(part in others for others in parts.values())]
    rest = {source: "; ".join(part for part in own if part not in shared) for source, own in parts.items()}
    return _joined(*shared, *(f"{source}: {text}" for source, text in rest.items() if text))


def _joined(*notes: str) -> str:
    return "; ".join(note for note in notes if note)
