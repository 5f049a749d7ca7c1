"""Table 2 and Fig. 7 on profiled workloads, which the paper does not have."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from makespan.papers.morphling._fig7 import fig7
from makespan.papers.morphling._published import read_published
from makespan.papers.morphling._table2 import table2, table2_rows, table2_summary
from makespan.papers.morphling._tables import TABLE2_ROWS
from makespan.plans import Placement, read_plan

__all__ = ["measured_fig7", "measured_table2", "table2_results"]

_NOTHING_PUBLISHED = ("published_avg_error_pct", "published_max_error_pct")
_ALL = "all"


def table2_results(
    rows: Sequence[pd.DataFrame],
    throughput: Iterable[pd.DataFrame],
    published: str | None,
    records: Iterable[Mapping[str, Any]],
) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Return the tables of `measured_table2`, or of the paper's workloads if there is a file of its cells."""
    if published is None:
        return measured_table2(rows, throughput, records)
    cells = read_published("table2", published)
    joined = table2_rows(rows, cells)
    return joined, table2(joined, cells), table2_summary(joined)


def measured_table2(
    rows: Sequence[pd.DataFrame], throughput: Iterable[pd.DataFrame], records: Iterable[Mapping[str, Any]]
) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Summarise prediction errors on profiled workloads, with the repeatability beside them.

    Parameters
    ----------
    rows
        Second tables of `fit_workload`, one a workload.
    throughput
        Throughput table of each workload; decides the family of each point.
    records
        Record beside each throughput table: ``workload``, and ``points`` with their keys and
        ``repeatability_pct``, the mean relative difference between two runs [%].

    Returns
    -------
    tuple of pandas.DataFrame
        All rows (schema `TABLE2_ROWS`), errors a plan family (schema
        `TABLE2`, then empty cells of the paper) and errors a workload and over all
        (schema `TABLE2_SUMMARY`). The last two end in ``repeatability_pct`` [%],
        the mean over the points of the family or scope.
    """
    joined = TABLE2_ROWS.validate(pd.concat(rows, ignore_index=True), where="table2_rows")
    noise = pd.concat(
        [_noise(frame, record) for frame, record in zip(throughput, records, strict=True)], ignore_index=True
    )
    cells = (
        joined[["model", "plan_family"]]
        .drop_duplicates()
        .assign(**dict.fromkeys(_NOTHING_PUBLISHED, float("nan")))
    )
    by_family = noise.groupby(["model", "plan_family"], as_index=False)["repeatability_pct"].mean()
    errors = table2(joined, cells).merge(by_family, how="left", on=["model", "plan_family"])
    summary = table2_summary(joined)
    scopes = {_ALL: noise["repeatability_pct"].mean()} | dict(
        noise.groupby("model")["repeatability_pct"].mean()
    )
    summary = summary[summary["scope"].isin(scopes)].reset_index(drop=True)
    return joined, errors, summary.assign(repeatability_pct=summary["scope"].map(scopes))


def _noise(throughput: pd.DataFrame, record: Mapping[str, Any]) -> pd.DataFrame:
    batch = int(throughput["global_batch_size"].iloc[0])
    return pd.DataFrame(
        [
            {
                "model": record["workload"],
                "plan_family": read_plan(
                    point["exec_plan"],
                    n_gpus=Placement.parse(point["placement"]).n_gpus,
                    global_batch_size=batch,
                ).plan_family.title,
                "repeatability_pct": point["repeatability_pct"],
            }
            for point in record["points"]
        ]
    ).astype({"repeatability_pct": float})


def measured_fig7(
    throughput: pd.DataFrame, stages: Iterable[Mapping[str, object]], environment: str, form: str
) -> pd.DataFrame:
    """Run a profiled workload through resource limits under each strategy; see `fig7`.

    Parameters
    ----------
    throughput
        Schema `makespan.tables.THROUGHPUT`, one workload.
    stages
        Resource limits in order.
    environment
        Path of the environment file, or name of an environment.
    form
        Form of the performance model that Morphling asks.

    Returns
    -------
    pandas.DataFrame
        As `fig7`, without cells of the paper.
    """
    nothing = pd.DataFrame(
        {
            "strategy": pd.Series(dtype=str),
            "stage": pd.Series(dtype=str),
            "published_plan": pd.Series(dtype=str),
            "published_iter_time_s": pd.Series(dtype=float),
        }
    )
    return fig7(throughput, stages, nothing, environment, form)
