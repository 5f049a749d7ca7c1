"""Tables over several simulations: their metrics, and ratios to a baseline."""

from collections.abc import Iterable
from typing import Any

import pandas as pd

from makespan.studies._runs import Run
from makespan.tables import COMPARISON

__all__ = ["comparison", "measures"]

_SETTING = ["trace", "restart_delay_s", "rounds"]

_FURTHER = (
    *("p95_jct_s", "avg_queueing_delay_s", "avg_waiting_time_s", "avg_slowdown"),
    *("avg_finish_time_fairness", "max_finish_time_fairness"),
)
_RATIOS = {"jct_ratio": "avg_jct_s", "makespan_ratio": "makespan_s"}
_MEASURES = (
    *("avg_jct_s", "makespan_s", "p50_jct_s", "p99_jct_s"),
    *("gpu_allocation_ratio", "reconfigurations_per_job"),
)


def comparison(runs: Iterable[Run], baseline: str) -> pd.DataFrame:
    """Return one row a simulation, with ratios to a baseline.

    The baseline is the policy of this name in the same scenario, restart delay and given round. Ratios are
    missing where it did not run; above 1, a policy takes longer. Returns schema
    `makespan.tables.COMPARISON`, then further metrics of `makespan.metrics.Summary`.
    """
    listed = list(runs)
    table = pd.DataFrame([_row(run) for run in listed], columns=[*COMPARISON.names, *_FURTHER])
    rounds = [float("nan") if run.given_interval_s is None else run.given_interval_s for run in listed]
    settings = table[["trace", "restart_delay_s", *_RATIOS.values()]].assign(rounds=rounds)
    base = settings[table["policy"] == baseline].drop_duplicates(_SETTING)
    joined = settings[_SETTING].merge(base, on=_SETTING, how="left")
    for ratio, column in _RATIOS.items():
        table[ratio] = (table[column] / joined[column]).astype(float)
    return COMPARISON.validate(table, where="comparison")


def _row(run: Run) -> dict[str, Any]:
    found = run.metrics
    given = {
        "trace": run.scenario,
        "policy": run.policy,
        "restart_delay_s": float(run.restart_delay_s),
        "interval_s": float(run.interval_s) if run.interval_s else float("nan"),
        "jobs": found.n_jobs,
        "wall_s": float(run.result.wall_s),
        **dict.fromkeys(_RATIOS, float("nan")),
    }
    names = [name for name in (*COMPARISON.names, *_FURTHER) if name not in given]
    return given | {name: getattr(found, name) for name in names}


def measures(run: Run) -> dict[str, float]:
    """Return the metrics that studies report of every simulation, by column."""
    return {name: getattr(run.metrics, name) for name in _MEASURES}
