"""Tables over several simulations: their metrics, ratios to a baseline, and what the jobs ask for."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from makespan.studies._runs import Run, Scenario
from makespan.tables import COMPARISON

__all__ = ["Demand", "comparison", "demand", "measures", "nobody_waited"]

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


@dataclass(frozen=True, slots=True)
class Demand:
    """GPUs that the jobs of a scenario ask for, if each starts at its submission and runs as requested.

    Parameters
    ----------
    load
        Device time over that of the cluster between the first and the last submission [1]; NaN if all jobs
        are submitted at once.
    most_gpus
        Largest number of GPUs at a time.
    """

    load: float
    most_gpus: int


def demand(scenario: Scenario) -> Demand:
    """Return how much of the cluster the jobs of a scenario ask for."""
    jobs, fitting = scenario.jobs, scenario.catalogue.on(scenario.cluster)
    start_s = np.array([job.submit_time_s for job in jobs])
    gpus = np.array([job.n_gpus for job in jobs], dtype=np.int64)
    work_s = np.array([job.steps * fitting.requested(job).iter_time_s for job in jobs])
    span_s = float(np.ptp(start_s)) if len(jobs) else 0.0
    load = float(gpus @ work_s) / (scenario.cluster.n_gpus * span_s) if span_s > 0 else float("nan")
    times_s, changes = np.concatenate([start_s, start_s + work_s]), np.concatenate([gpus, -gpus])
    order = np.lexsort((changes, times_s))  # at the same time, devices are given back first
    return Demand(load, int(np.cumsum(changes[order]).max(initial=0)))


def nobody_waited(runs: Iterable[Run]) -> bool:
    """Whether no job of any of these runs waited for longer than a round of its policy."""
    return all(run.metrics.max_waiting_time_s <= (run.interval_s or 0.0) for run in runs)
