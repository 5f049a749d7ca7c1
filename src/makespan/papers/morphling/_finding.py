"""What a check is given and what it returns.

A check returns what it found, or None if the tables have no row that decides the statement. It
may ask for a table that was not built; the ledger then says so.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pandas as pd

__all__ = ["Check", "Claim", "Finding", "Tables", "number"]

Tables = Mapping[str, pd.DataFrame]


@dataclass(frozen=True, slots=True)
class Claim:
    """What a check is about.

    Parameters
    ----------
    subject
        Model, column or jobs; its meaning depends on the check.
    limit
        Number that decides, NaN if the check needs none.
    form
        Form of the performance model that the experiments use.
    """

    subject: str
    limit: float
    form: str


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found.

    Parameters
    ----------
    reproduced
        The value, for people.
    holds
        Whether the statement holds.
    note
        What a reader must know.
    """

    reproduced: str
    holds: bool
    note: str = ""


Check = Callable[[Tables, Claim], Finding | None]


def number(table: pd.DataFrame, column: str) -> "pd.Series[float]":
    """Return a column as numbers; columns that no schema names come as text from a file."""
    return pd.to_numeric(table[column]).astype("float64")
