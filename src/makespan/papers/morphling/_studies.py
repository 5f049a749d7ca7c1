"""Studies that vary one thing: arrivals, load, share of large models, length of a round, size."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Literal

import pandas as pd

from makespan.hardware import ClusterSpec, homogeneous
from makespan.papers.morphling._tables import LARGE_MODELS, LOAD, PERTURBED, ROUNDS, SCALE, STUDY
from makespan.studies import Case, Scenario, generated_jobs, intervals, limited_statistics, measures, run_all
from makespan.tables import TableSchema
from makespan.throughput import ReferenceTimes
from makespan.traces import scaled, with_large_share, with_load, with_perturbed_arrivals
from makespan.workloads import JobSpec

__all__ = ["STUDIES", "perturbed_arrivals", "scale_study", "seeded_lists"]

_REPEATS, _WITHIN_S = 2, 1.5
"""How often a simulation whose time is measured runs again, while all took less than so long together [s]."""

Jobs = tuple[JobSpec, ...]
Study = tuple[pd.DataFrame, pd.DataFrame]


def seeded_lists(
    base: Jobs,
    times: ReferenceTimes,
    seeds: Sequence[int],
    draw: Literal["generated", "perturbed"],
    std_s: float,
) -> dict[int, Jobs]:
    """Return for each seed a new list like the Base list, or the same jobs with arrivals shifted."""
    if draw == "generated":
        return {seed: generated_jobs("base", len(base), seed, times).jobs for seed in seeds}
    return {seed: with_perturbed_arrivals(base, std_s, seed) for seed in seeds}


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
    table = intervals(rows, [parameter, "policy"], ["avg_jct_s", "makespan_s"])
    names = {parameter: "value", "n": "seeds"} | {
        f"{column}_{end}": f"{name}_{end}_s"
        for column, name in (("avg_jct_s", "jct"), ("makespan_s", "makespan"))
        for end in ("mean", "low", "high")
    }
    return STUDY.validate(table.rename(columns=names).assign(parameter=parameter), where="study")


def perturbed_arrivals(
    scenarios: Mapping[str, Scenario],
    traces: Sequence[str],
    policies: Sequence[str],
    delays_s: Sequence[float],
    interval_s: float,
    seeds: Sequence[int],
    std_s: float,
    n_processes: int = 1,
) -> pd.DataFrame:
    """Shift all arrivals and report mean and spread; schema `PERTURBED`."""
    cases = [
        Case(replace(shifted, restart_delay_s=delay_s, interval_s=interval_s), policy)
        for base in (scenarios[trace] for trace in traces)
        for shifted in (replace(base, jobs=with_perturbed_arrivals(base.jobs, std_s, seed)) for seed in seeds)
        for delay_s in delays_s
        for policy in policies
    ]
    rows = [
        {"trace": run.scenario, "policy": run.policy, "restart_delay_s": run.restart_delay_s}
        | {name: getattr(run.metrics, name) for name in ("avg_jct_s", "makespan_s", "sla_attainment")}
        for run in run_all(cases, n_processes)
    ]
    groups = pd.DataFrame(rows).groupby(["trace", "policy", "restart_delay_s"], sort=False)
    table = groups.agg(
        seeds=("avg_jct_s", "size"),
        avg_jct_s=("avg_jct_s", "mean"),
        avg_jct_std_s=("avg_jct_s", "std"),
        makespan_s=("makespan_s", "mean"),
        makespan_std_s=("makespan_s", "std"),
        sla_attainment=("sla_attainment", "min"),
    )
    return PERTURBED.validate(table.reset_index(), where="perturbed")


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
        replace(base, cluster=enlarged(base.cluster, factor), jobs=tuple(scaled(base.jobs, copies, seed=1)))
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


def enlarged(cluster: ClusterSpec, factor: int) -> ClusterSpec:
    """Return a cluster with several times as many nodes, all like the first one."""
    n_nodes = factor * cluster.n_nodes
    return homogeneous(cluster.node, n_nodes, cluster.network, name=f"{cluster.name} x{factor}")
