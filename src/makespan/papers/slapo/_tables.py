"""Schemas of the tables that only this paper has, and of its printed cells."""

from pathlib import Path

import pandas as pd

from makespan.papers.slapo._tables_measured import MEASURED, MEASURED_CELLS
from makespan.papers.slapo._tables_modelled import MODELLED, MODELLED_CELLS
from makespan.papers.slapo._tables_tuning import TUNED, TUNING_CELLS
from makespan.papers.slapo._tables_verification import VERIFIED
from makespan.tables import printed_schemas, read_printed

__all__ = ["PUBLISHED", "SCHEMAS", "read_published"]

SCHEMAS = (*TUNED.values(), *MODELLED.values(), *VERIFIED.values(), *MEASURED.values())
PUBLISHED = printed_schemas({**TUNING_CELLS, **MODELLED_CELLS, **MEASURED_CELLS})


def read_published(artifact: str, path: str | Path) -> pd.DataFrame:
    """Read the paper's cells of an artifact, one of `PUBLISHED`, each with its source.

    Raises
    ------
    UnknownNameError, MissingDataError, TraceError
        No such artifact, no such file, or a column or cell without an accepted value.
    """
    return read_printed(artifact, path, PUBLISHED)
