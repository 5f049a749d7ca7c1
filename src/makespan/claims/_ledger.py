"""What a paper hands in: statements, the tables that decide them, and the checks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources

import pandas as pd

from makespan.errors import TraceError, unknown_name
from makespan.tables import TableSchema

__all__ = ["Check", "Claim", "Finding", "Ledger", "Tables", "number"]

Tables = Mapping[str, pd.DataFrame]

_COLUMNS = (
    "artifact", "statement", "published", "tolerance", "check", "subject", "limit", "sources", "fails_on",
    "note",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Claim:
    """What a check is about.

    What the subject means (model, column or jobs) depends on the check; the limit is the number that
    decides, NaN if the check needs none; the options are what checks must know of the configuration.
    """

    subject: str
    limit: float
    options: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found: the value for people, whether the statement holds, and what a reader must know.

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
