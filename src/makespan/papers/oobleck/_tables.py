"""Schemas of the tables that only this paper has, and of its printed cells."""

from pathlib import Path

import pandas as pd

from makespan.papers.oobleck._tables_execution import EXECUTED
from makespan.papers.oobleck._tables_live import LIVE_SCHEMAS
from makespan.papers.oobleck._tables_planning import PLANNED, PLANNING_CELLS
from makespan.papers.oobleck._tables_reconfiguration import RECONFIGURATION, RECONFIGURATION_CELLS
from makespan.papers.oobleck._tables_simulation import SIMULATED, SIMULATED_CELLS
from makespan.tables import printed_schemas, read_printed

__all__ = ["PUBLISHED", "SCHEMAS", "read_published"]

SCHEMAS = (*PLANNED.values(), RECONFIGURATION, *EXECUTED.values(), *SIMULATED.values(), *LIVE_SCHEMAS)
PUBLISHED = printed_schemas({**PLANNING_CELLS, **RECONFIGURATION_CELLS, **SIMULATED_CELLS})


def read_published(artifact: str, path: str | Path) -> pd.DataFrame:
    """Read the paper's cells of an artifact, one of `PUBLISHED`, each with its source.

    Raises
    ------
    UnknownNameError, MissingDataError, TraceError
        No such artifact, no such file, or a column or cell without an accepted value.
    """
    return read_printed(artifact, path, PUBLISHED)
