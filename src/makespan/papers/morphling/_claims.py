"""The claims ledger: every statement of the paper, and whether the results bear it out."""

import math
from collections.abc import Mapping
from importlib import resources

import pandas as pd

from makespan.errors import TraceError
from makespan.papers.morphling._checks import CHECKS, CLAIM_TABLES
from makespan.papers.morphling._finding import Claim, Tables
from makespan.tables import CLAIMS

__all__ = ["evaluate_claims", "read_claims"]

PAPER = "Morphling"
_COLUMNS = (
    "artifact", "statement", "published", "tolerance", "check", "subject", "limit", "sources", "note",
)  # fmt: skip


def read_claims() -> pd.DataFrame:
    """Read the statements of the paper and how each is checked.

    Returns
    -------
    pandas.DataFrame
        Columns ``artifact, statement, published, tolerance, check, subject, limit, sources, note``,
        all text. ``sources`` names the only source to which a check applies, if any.
    """
    path = resources.files("makespan.papers.morphling").joinpath("claims.csv")
    with path.open(encoding="utf-8") as stream:
        table: pd.DataFrame = pd.read_csv(stream, dtype=str, keep_default_na=False)
    return table[list(_COLUMNS)]


def evaluate_claims(tables: Tables, source: str, form: str) -> pd.DataFrame:
    """Compare every statement of the paper with the results of one source.

    Parameters
    ----------
    tables
        Result tables by name, see `CLAIM_TABLES`; a statement about a table that is absent is not
        judged.
    source
        Name of the throughput source behind the tables.
    form
        Form of the performance model that the experiments use.

    Returns
    -------
    pandas.DataFrame
        Schema `makespan.tables.CLAIMS`, one row a statement. The verdict is ``holds`` or ``fails``
        if the results decide it, and ``not run`` with the reason in the note if they do not.

    Raises
    ------
    TraceError
        The ledger names a check that does not exist.
    """
    rows = read_claims()
    records = [
        _judge(dict(zip(_COLUMNS, cells, strict=True)), tables, source, form)
        for cells in rows.itertuples(index=False)
    ]
    return CLAIMS.validate(pd.DataFrame(records), where="claims")


def _judge(row: Mapping[str, str], tables: Tables, source: str, form: str) -> dict[str, str]:
    record = {"paper": PAPER, "reproduced": "", "verdict": "not run"}
    record |= {name: row[name] for name in ("artifact", "statement", "published", "tolerance", "note")}
    if row["check"] not in CHECKS:
        raise TraceError(f"claims: unknown check {row['check']!r}; accepted: {', '.join(sorted(CHECKS))}")
    if row["sources"] and source not in row["sources"].split():
        return record | {"note": _join(row["note"], f"applies to source {row['sources']}")}
    limit = float(row["limit"]) if row["limit"] else math.nan
    try:
        finding = CHECKS[row["check"]](tables, Claim(row["subject"], limit, form))
    except KeyError as error:
        if error.args[0] not in CLAIM_TABLES:
            raise
        return record | {"note": _join(row["note"], f"no table {error.args[0]} of the paper's models")}
    if finding is None:
        return record | {"note": row["note"] or "the results have no row that decides it"}
    return record | {
        "reproduced": finding.reproduced,
        "verdict": "holds" if finding.holds else "fails",
        "note": _join(row["note"], finding.note),
    }


def _join(*notes: str) -> str:
    return "; ".join(note for note in notes if note)
