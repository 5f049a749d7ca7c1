"""Studies that vary one thing: arrivals, load, share of large models, length of a round, size."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median

import pandas as pd

from makespan.papers.morphling._lists import means, of_size
from makespan.papers.morphling._tables import LARGE_MODELS, LOAD, ROUNDS, SCALE, STUDY
from makespan.studies import Case, Scenario, limited_statistics, measures, run_all
from makespan.tables import TableSchema
from makespan.throughput import ReferenceTimes
from makespan.traces import scaled, with_large_share, with_load
from makespan.workloads import JobSpec

__all__ = ["STUDIES", "scale_study"]

_REPEATS, _WITHIN_S = 2, 1.5
"""How often a simulation whose time is measured runs again, while all took less than so long together [s]."""

Jobs = tuple[JobSpec, ...]
Study = tuple[pd.DataFrame, pd.DataFrame]


def load_study(
    base: Scenario,
    lists: Mapping[int, Jobs],
    times: ReferenceTimes,
    policies: Sequence[str],
    factors: Sequence[float],
    delay_s: float,
    interval_s: float,
    n_processes: int = 1,
) -> Study:
    """Let jobs arrive faster and slower.

    Returns one row a simulation (schema `LOAD`), and means with confidence intervals over seeds (`STUDY`).
    All studies take the iteration times, for those that draw other jobs.
    """
    base = replace(base, restart_delay_s=delay_s, interval_s=interval_s)

    def at(factor: float, _: int, jobs: Jobs) -> Scenario:
        return replace(base, jobs=with_load(jobs, factor))

    return _vary(LOAD, "load_factor", factors, lists, at, policies, n_processes)


def large_models_study(
    base: Scenario,
    lists: Mapping[int, Jobs],
    times: ReferenceTimes,
    policies: Sequence[str],
    shares: Sequence[float],
    delay_s: float,
    interval_s: float,
    n_processes: int = 1,
) -> Study:
    """Replace jobs so that a share of all trains large models; otherwise as `load_study`."""
    stats = limited_statistics(times)
    base = replace(base, restart_delay_s=delay_s, interval_s=interval_s)

    def at(share: float, seed: int, jobs: Jobs) -> Scenario:
        return replace(base, jobs=with_large_share(jobs, share, seed, times, stats=stats))

    return _vary(LARGE_MODELS, "large_share", shares, lists, at, policies, n_processes)


def rounds_study(
    base: Scenario,
    lists: Mapping[int, Jobs],
    times: ReferenceTimes,
    policies: Sequence[str],
    intervals_s: Sequence[float],
    delay_s: float,
    n_processes: int = 1,
) -> Study:
    """Ask policies more and less often; otherwise as `load_study`. 0 asks after each event."""

    def at(interval_s: float, _: int, jobs: Jobs) -> Scenario:
        return replace(base, jobs=jobs, restart_delay_s=delay_s, interval_s=interval_s)

    return _vary(ROUNDS, "interval_s", intervals_s, lists, at, policies, n_processes)


STUDIES: Mapping[str, Callable[..., Study]] = {
    "load": load_study,
    "large_models": large_models_study,
    "rounds": rounds_study,
}
"""Studies over seeds by name."""


def _vary(
    schema: TableSchema,
    parameter: str,
    values: Sequence[float],
    lists: Mapping[int, Jobs],
    at: Callable[[float, int, Jobs], Scenario],
    policies: Sequence[str],
    n_processes: int,
) -> Study:
    """Run every policy on the scenario at each value of the parameter and each seed."""
    keys = list(itertools.product(values, lists, policies))
    cases = [
        Case(replace(at(value, seed, lists[seed]), name=f"{parameter} {value} seed {seed}"), policy)
        for value, seed, policy in keys
    ]
    runs = zip(keys, run_all(cases, n_processes), strict=True)
    rows = pd.DataFrame(
        {"policy": run.policy, parameter: value, "seed": seed} | measures(run)
        for (value, seed, _), run in runs
    )
    return schema.validate(rows, where=schema.name), _summary(rows, parameter)


def _summary(rows: pd.DataFrame, parameter: str) -> pd.DataFrame:
    """Summarise a study over its seeds; schema `STUDY`."""
    table = means(rows, [parameter, "policy"]).rename(columns={parameter: "value", "n": "seeds"})
    return STUDY.validate(table.assign(parameter=parameter), where="study")


def scale_study(
    base: Scenario,
    policies: Sequence[str],
    sizes: Sequence[tuple[int, int]],
    delay_s: float,
    interval_s: float,
    n_processes: int = 1,
) -> pd.DataFrame:
    """Measure what scheduling costs on larger clusters with more jobs; schema `SCALE`, then metrics.

    Sizes are pairs: copies of each job, and copies of the cluster. Every simulation runs three times; those
    that run at the same time share caches and memory, and take a little longer.
    """
    base = replace(base, restart_delay_s=delay_s, interval_s=interval_s)
    scenarios = [
        replace(
            base,
            cluster=of_size(base.cluster, factor * base.cluster.n_gpus),
            jobs=tuple(scaled(base.jobs, copies, seed=1)),
        )
        for copies, factor in sizes
    ]
    cases = [
        Case(larger, name, repeats=_REPEATS, repeat_within_s=_WITHIN_S)
        for larger in scenarios
        for name in policies
    ]
    rows = []
    for case, run in zip(cases, run_all(cases, n_processes), strict=True):
        n_decisions = max(run.result.n_decisions, 1)
        decisions_s = [run.decision_wall_s, *(wall_s / n_decisions for _, wall_s in run.repeat_walls_s)]
        cost = {
            "policy": run.policy,
            "jobs": run.metrics.n_jobs,
            "gpus": case.scenario.cluster.n_gpus,
            **_spread("wall_s", [run.result.wall_s, *(wall_s for wall_s, _ in run.repeat_walls_s)]),
            **_spread("decision_wall_s", decisions_s),
            "n_decisions": run.result.n_decisions,
        }
        rows.append(cost | measures(run))
    return SCALE.validate(pd.DataFrame(rows), where="scale")


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    return {name: median(values), f"fastest_{name}": min(values), f"slowest_{name}": max(values)}
