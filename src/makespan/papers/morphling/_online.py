"""Choosing a plan with a fitted model that learns from the runs it causes (online refit)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from makespan.hardware import ClusterSpec
from makespan.perf import Fit, TableFit, measured_from_table, points_from_table, rank_plans
from makespan.plans import ExecutionPlan, Placement, write_exec_plan
from makespan.tables import THROUGHPUT

__all__ = ["Choice", "Knowledge", "Limit", "known_from", "settle"]

_Key = tuple[str, str, int]


@dataclass(frozen=True, slots=True)
class Limit:
    """Resources that a job may use: GPUs on each node, and CPU threads a GPU."""

    placement: Placement
    cpu_threads: int


@dataclass(frozen=True, slots=True)
class Choice:
    """A plan, its iteration time [s], and how many plans were run to find it.

    Where nothing can run the plan is empty and the time 0.
    """

    plan: str
    iter_time_s: float
    n_tried: int = 0


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What a scheduler knows of a job.

    Parameters
    ----------
    fit
        The performance model, fitted to everything observed.
    observed
        Iteration time [s] of each run so far, by plan, placement and CPU threads; 0 if it failed.
    """

    fit: Fit
    observed: Mapping[_Key, float]


def known_from(sampled: TableFit) -> Knowledge:
    """Start with the sampled rows of a throughput table."""
    rows = sampled.frame[sampled.fitted]
    cells = zip(rows["exec_plan"], rows["placement"], rows["cpu_threads"], rows["iter_time_s"], strict=True)
    observed = {(str(plan), str(place), int(threads)): float(time) for plan, place, threads, time in cells}
    return Knowledge(sampled.fit, observed)


def settle(
    knowledge: Knowledge,
    limit: Limit,
    candidates: Mapping[str, ExecutionPlan],
    times: Mapping[str, float],
    cluster: ClusterSpec,
) -> tuple[Choice, Knowledge]:
    """Run the plan expected to be fastest until no other plan is expected to be faster.

    A plan that has run is expected to take what it took, any other what the model predicts. Every
    run is added to the observations and the model is fitted again before the next choice.

    Parameters
    ----------
    knowledge
        What is known before.
    limit
        The resources.
    candidates
        Plans that may be tried, by their text.
    times
        What a run of each candidate takes [s], 0 if it fails; looked at only after the choice.
    cluster
        Where the job runs; decides which plans fit in memory.

    Returns
    -------
    tuple of Choice and Knowledge
        The plan that stays, and what is known afterwards.
    """
    tried = 0
    while True:
        plan = _expected_fastest(knowledge, limit, candidates, cluster)
        if plan is None:
            return Choice("", 0.0, tried), knowledge
        key = (plan, limit.placement.text, limit.cpu_threads)
        if key in knowledge.observed:
            return Choice(plan, knowledge.observed[key], tried), knowledge
        tried += 1
        knowledge = _learn(knowledge, key, times[plan])


def _expected_fastest(
    knowledge: Knowledge, limit: Limit, candidates: Mapping[str, ExecutionPlan], cluster: ClusterSpec
) -> str | None:
    ranked = rank_plans(knowledge.fit, limit.placement, cluster, limit.cpu_threads, list(candidates.values()))
    expected: list[tuple[float, int, str]] = []
    for rank, entry in enumerate(ranked):
        plan = write_exec_plan(entry.plan)
        known = knowledge.observed.get((plan, limit.placement.text, limit.cpu_threads))
        if known != 0.0:  # a plan that failed is not expected to run
            expected.append((entry.iter_time_s if known is None else known, rank, plan))
    return min(expected)[2] if expected else None


def _learn(knowledge: Knowledge, key: _Key, time_s: float) -> Knowledge:
    observed = {**knowledge.observed, key: time_s}
    if time_s <= 0:
        return replace(knowledge, observed=observed)
    row = _observation(key, time_s, knowledge.fit)
    points = points_from_table(row, knowledge.fit.workload, knowledge.fit.environment)
    return Knowledge(knowledge.fit.refit(points, measured_from_table(row)), observed)


def _observation(key: _Key, time_s: float, fit: Fit) -> pd.DataFrame:
    """Write a run as a throughput table of one row, without phases."""
    plan, placement, cpu_threads = key
    row = {
        "workload": fit.workload,
        "exec_plan": plan,
        "placement": placement,
        "cpu_threads": cpu_threads,
        "global_batch_size": fit.points.workload.global_batch_size,
        "iter_time_s": time_s,
        "forward_s": np.nan,
        "overlap_sync_s": np.nan,
        "optimize_s": np.nan,
        "feasible": True,
        "clean": True,
        "flag": "",
        "provenance": "observed",
    }
    return THROUGHPUT.validate(pd.DataFrame([row]), where="observation")
