"""The table that compares policies on traces (Morphling, Table 4)."""

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from makespan.metrics._summary import Summary
from makespan.tables import Column, TableSchema

__all__ = ["TABLE4", "table4", "table4_row"]

TABLE4 = TableSchema(
    "table4",
    (
        Column("trace", "text", "", "name of the trace"),
        Column("policy", "text", "", "name of the policy"),
        Column("restart_delay_s", "float", "s", "restart delay of every start and change"),
        Column("interval_s", "float", "s", "length of a round; missing if asked after each event", True),
        Column("jobs", "int", "1", "jobs that finished"),
        Column("avg_jct_s", "float", "s", "mean completion time", True),
        Column("p50_jct_s", "float", "s", "median completion time", True),
        Column("p99_jct_s", "float", "s", "99th percentile of completion time", True),
        Column("makespan_s", "float", "s", "last finish minus first submission", True),
        Column("gpu_allocation_ratio", "float", "1", "device time held over device time present", True),
        Column("reconfigurations_per_job", "float", "1", "restart delays a job, first start included", True),
        Column("sla_attainment", "float", "1", "share of guarantees kept; missing without guarantees", True),
        Column("jct_ratio_to_morphling", "float", "1", "mean completion time over that of morphling", True),
        Column("makespan_ratio_to_morphling", "float", "1", "makespan over that of morphling", True),
        Column("wall_s", "float", "s", "wall clock time of the simulation"),
    ),
)

_BASE = "morphling"
_SETTING = ["trace", "restart_delay_s", "interval_s"]


def table4_row(
    trace: str,
    policy: str,
    found: Summary,
    *,
    restart_delay_s: float,
    interval_s: float | None,
    wall_s: float,
) -> dict[str, Any]:
    """Return one row of `TABLE4`, the ratios still missing.

    Parameters
    ----------
    trace, policy
        Names.
    found
        Metrics of the simulation.
    restart_delay_s
        Its restart delay [s].
    interval_s
        Its rounds [s]; None or 0 if the policy was asked after each event.
    wall_s
        How long it took [s].
    """
    missing = float("nan")
    return {
        "trace": trace,
        "policy": policy,
        "restart_delay_s": float(restart_delay_s),
        "interval_s": float(interval_s) if interval_s else missing,
        "jobs": found.n_jobs,
        "avg_jct_s": found.avg_jct_s,
        "p50_jct_s": found.p50_jct_s,
        "p99_jct_s": found.p99_jct_s,
        "makespan_s": found.makespan_s,
        "gpu_allocation_ratio": found.gpu_allocation_ratio,
        "reconfigurations_per_job": found.reconfigurations_per_job,
        "sla_attainment": found.sla_attainment,
        "jct_ratio_to_morphling": missing,
        "makespan_ratio_to_morphling": missing,
        "wall_s": float(wall_s),
    }


def table4(rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Return the table of some rows, with the ratios to the policy ``morphling`` filled in.

    A ratio compares with the row of that policy for the same trace, restart delay and round; it is
    missing where there is none. Above 1, the policy takes longer.

    Raises
    ------
    TraceError
        A row lacks a column or has a wrong value.
    """
    table = pd.DataFrame(list(rows), columns=list(TABLE4.names))
    base = table.loc[table["policy"] == _BASE, [*_SETTING, "avg_jct_s", "makespan_s"]]
    base = base.drop_duplicates(_SETTING)
    joined = table[_SETTING].merge(base, on=_SETTING, how="left")
    table["jct_ratio_to_morphling"] = (table["avg_jct_s"] / joined["avg_jct_s"]).astype(float)
    table["makespan_ratio_to_morphling"] = (table["makespan_s"] / joined["makespan_s"]).astype(float)
    return TABLE4.validate(table, where="table4")
