"""Cells of the paper's tables and figures, to stand beside what is reproduced."""

from pathlib import Path

import pandas as pd

from makespan.errors import unknown_name
from makespan.tables import Column, TableSchema, read_csv

__all__ = ["PUBLISHED", "read_published"]


def _text(name: str, description: str) -> Column:
    return Column(name, "text", "", description)


_SOURCE = _text("source", "where the cell is printed")

PUBLISHED = {
    "table2": TableSchema(
        "published_table2",
        (
            _text("model", "key of the workload"),
            _text("plan_family", "family of execution plans"),
            Column("published_avg_error_pct", "float", "%", "average prediction error"),
            Column("published_max_error_pct", "float", "%", "largest prediction error"),
            _SOURCE,
        ),
    ),
    "fig7": TableSchema(
        "published_fig7",
        (
            _text("strategy", "how the plan is chosen"),
            _text("stage", "resource limit in force"),
            _text("published_plan", "plan that ran, where the paper names it"),
            Column("published_iter_time_s", "float", "s", "iteration time, 0 if nothing can run"),
            _SOURCE,
        ),
    ),
    "fig8": TableSchema(
        "published_fig8",
        (
            _text("scheduler", "who divides the GPUs"),
            _text("job", "key of the workload"),
            Column("published_gpus", "int", "1", "GPUs given to the job"),
            _text("published_plan", "plan that ran, where the paper names it"),
            Column("published_speedup", "float", "1", "throughput over that of the job alone"),
            _SOURCE,
        ),
    ),
    "table4": TableSchema(
        "published_table4",
        (
            _text("trace", "name of the job list"),
            _text("policy", "name of the policy"),
            Column("restart_delay_s", "float", "s", "restart delay"),
            Column("interval_s", "float", "s", "length of a round"),
            _text("reading", "printed by the released simulator, or possible: without its error"),
            Column("published_avg_jct_s", "float", "s", "mean completion time"),
            Column("published_makespan_s", "float", "s", "last finish minus first submission"),
            _SOURCE,
        ),
    ),
    "fig9": TableSchema(
        "published_fig9",
        (
            _text("run", "plan, or other seed"),
            Column("mean_abs_difference", "float", "1", "mean distance to the loss of TP8"),
            Column("max_abs_difference", "float", "1", "largest distance, losses averaged over windows"),
            _SOURCE,
        ),
    ),
}


def read_published(artifact: str, path: str | Path) -> pd.DataFrame:
    """Read the cells of one table or figure of the paper.

    Parameters
    ----------
    artifact
        ``table2``, ``table4``, ``fig7``, ``fig8`` or ``fig9``.
    path
        CSV file with the cells and their source.

    Returns
    -------
    pandas.DataFrame
        The cells; columns are those that the experiment of that name takes as ``published``.

    Raises
    ------
    UnknownNameError
        No such artifact.
    MissingDataError
        There is no such file.
    TraceError
        A column is missing or a cell has no accepted value.
    """
    if artifact not in PUBLISHED:
        raise unknown_name("artifact", artifact, PUBLISHED)
    return read_csv(path, PUBLISHED[artifact])
