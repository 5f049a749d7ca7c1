"""The schemas that several papers use; those of one paper alone stand in that paper."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pandas as pd

from makespan.tables.schema import TableSchema, schemas_of


def _timed_where_feasible(frame: pd.DataFrame) -> tuple[npt.NDArray[np.bool_], str, str]:
    wrong = frame["feasible"].to_numpy(dtype=bool) & ~_is_time(frame["iter_time_s"])
    return wrong, "iter_time_s", "a positive time where feasible is true"


def _predicted(frame: pd.DataFrame) -> tuple[npt.NDArray[np.bool_], str, str]:
    for name in ("computing_share", "moving_share"):
        outside = ~frame[name].between(0.0, 1.0).to_numpy(dtype=bool)
        if outside.any():
            return outside, name, "a share from 0 to 1"
    return ~_is_time(frame["predicted_iter_time_s"]), "predicted_iter_time_s", "a positive time"


def _is_time(values: "pd.Series[float]") -> npt.NDArray[np.bool_]:
    return ((values > 0) & (values < np.inf)).to_numpy(dtype=bool)


_SCHEMAS = schemas_of("makespan.tables")

THROUGHPUT = replace(_SCHEMAS["throughput"], rule=_timed_where_feasible)
FIT = _SCHEMAS["fit"]
SENSITIVITY = _SCHEMAS["sensitivity"]
SENSITIVITY_FAMILIES = _SCHEMAS["sensitivity_families"]
REQUESTS = _SCHEMAS["requests"]
JOBS = _SCHEMAS["jobs"]
PREDICTIONS = replace(_SCHEMAS["predictions"], rule=_predicted)
FAILURES = _SCHEMAS["failures"]
EVENTS = _SCHEMAS["events"]
OUTCOMES = _SCHEMAS["outcomes"]
LOSSES = _SCHEMAS["losses"]
JOB_GOODPUT = _SCHEMAS["job_goodput"]
JOB_METRICS = _SCHEMAS["job_metrics"]
COMPARISON = _SCHEMAS["comparison"]
LIVE = _SCHEMAS["live"]
LIVE_SUMMARY = _SCHEMAS["live_summary"]
LIVE_JOBS = _SCHEMAS["live_jobs"]
LIVE_FAILURES = _SCHEMAS["live_failures"]
CLAIMS = _SCHEMAS["claims"]
JOINED_CLAIMS = _SCHEMAS["joined_claims"]
SCHEMAS = (
    THROUGHPUT, FIT, SENSITIVITY, SENSITIVITY_FAMILIES, REQUESTS, JOBS, PREDICTIONS, FAILURES,
    EVENTS, OUTCOMES, LOSSES, JOB_GOODPUT, JOB_METRICS, COMPARISON, LIVE, LIVE_SUMMARY, LIVE_JOBS,
    LIVE_FAILURES, CLAIMS, JOINED_CLAIMS,
)  # fmt: skip
"""All of the above, in the order in which a run writes them."""


# ------------------------------------------------------------------------------------------------
# The reference page of the tables, generated from their schemas.

_HEAD = """# Tables

Every file that one stage writes and another reads follows a schema. Required columns come first and
in this order; further columns may follow. This page is generated from `makespan.tables`.

Beside every result of the workflow, `x.csv`, lies its seal, `.x.csv.sum`: rows and checksum. A stage refuses
a table that is not what was written; one without a seal is yours and is held against the schema alone.
"""


def tables_page(papers: Mapping[str, Iterable[TableSchema]]) -> str:
    """Return the Markdown page of every table and column: the shared ones, then those of each paper."""
    parts = [_HEAD, *(_section(schema) for schema in SCHEMAS)]
    for paper, schemas in papers.items():
        parts += [f"# Tables of {paper}\n", *(_section(schema) for schema in schemas)]
    return "\n".join(parts)


def _section(schema: TableSchema) -> str:
    rows = [
        f"| `{column.name}` | {column.kind}{', may be empty' if column.nullable else ''} "
        f"| {column.unit} | {column.description} |"
        for column in schema.columns
    ]
    head = ["| column | type | unit | meaning |", "| --- | --- | --- | --- |"]
    return "\n".join([f"## `{schema.name}`", "", *head, *rows, ""])
