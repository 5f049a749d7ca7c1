"""Schemas of the tables that only this paper has, and of its printed cells."""

from pathlib import Path

import pandas as pd

from makespan.errors import unknown_name
from makespan.tables import read_csv, table_schema

__all__ = ["PUBLISHED", "read_published"]

_MODEL = ("model", "text", "", "model, by its name in the authors' job list")
_BATCH = ("micro_batch_size", "int", "samples", "samples a micro-batch")
_POLICY = ("policy", "text", "", "name of the policy")

_CELLS = {
    "fig11": (
        *(_MODEL, _BATCH),
        ("published_disable_s", "float", "s", "micro-batch without keeping contexts apart"),
        ("published_enable_s", "float", "s", "micro-batch with context switches"),
    ),
    "fig12": (
        *(_MODEL, _BATCH),
        ("gpu", "text", "", "type of GPU"),
        ("published_baseline_s", "float", "s", "step without determinism"),
        ("published_d1_s", "float", "s", "step under D1"),
        ("published_d1d2_s", "float", "s", "step under D1+D2"),
        ("published_d1d2_stock_s", "float", "s", "the same with the stock kernels of reduction and dropout"),
    ),
    "fig14": (
        _POLICY,
        ("published_avg_jct_s", "float", "s", "mean completion time"),
        ("published_makespan_s", "float", "s", "round of the last completion, from time 0"),
    ),
    "fig15": (
        _POLICY,
        ("time_s", "float", "s", "round"),
        ("published_gpus", "int", "1", "GPUs held"),
    ),
}
PUBLISHED = {
    artifact: table_schema(
        f"published_{artifact}", *cells, ("source", "text", "", "where the cell is printed")
    )
    for artifact, cells in _CELLS.items()
}


def read_published(artifact: str, path: str | Path) -> pd.DataFrame:
    """Read the paper's cells of ``fig11``, ``fig12``, ``fig14`` or ``fig15``, each with its source.

    Raises
    ------
    UnknownNameError, MissingDataError, TraceError
        No such artifact, no such file, or a column or cell without an accepted value.
    """
    if artifact not in PUBLISHED:
        raise unknown_name("artifact", artifact, PUBLISHED)
    return read_csv(path, PUBLISHED[artifact])
