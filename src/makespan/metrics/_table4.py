"""The table that compares policies on traces (Morphling, Table 4)."""

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from makespan.metrics._summary import Summary
from makespan.tables import TABLE4

__all__ = ["table4", "table4_row"]

_BASE = "morphling"
_FURTHER = (
    "p95_jct_s",
    "avg_queueing_delay_s",
    "avg_waiting_time_s",
    "avg_slowdown",
    "avg_finish_time_fairness",
    "max_finish_time_fairness",
)
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
    """Return one row of `TABLE4`, the ratios still missing, and after it further metrics.

    These are ``p95_jct_s``, ``avg_queueing_delay_s``, ``avg_waiting_time_s`` [s], ``avg_slowdown``,
    ``avg_finish_time_fairness`` and ``max_finish_time_fairness``, as in `Summary`.

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
        **{name: getattr(found, name) for name in _FURTHER},
    }


def table4(rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Return the table of some rows, with the ratios to the policy ``morphling`` filled in.

    A ratio compares with the row of that policy for the same trace, restart delay and round; it is
    missing where there is none. Above 1, the policy takes longer. Columns beyond the schema are kept.

    Raises
    ------
    TraceError
        A row lacks a column or has a wrong value.
    """
    listed = list(rows)
    further = dict.fromkeys(name for row in listed for name in row if name not in TABLE4.names)
    table = pd.DataFrame(listed, columns=[*TABLE4.names, *further])
    base = table.loc[table["policy"] == _BASE, [*_SETTING, "avg_jct_s", "makespan_s"]]
    base = base.drop_duplicates(_SETTING)
    joined = table[_SETTING].merge(base, on=_SETTING, how="left")
    table["jct_ratio_to_morphling"] = (table["avg_jct_s"] / joined["avg_jct_s"]).astype(float)
    table["makespan_ratio_to_morphling"] = (table["makespan_s"] / joined["makespan_s"]).astype(float)
    return TABLE4.validate(table, where="table4")
