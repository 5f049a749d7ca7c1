"""Studies that vary one thing: arrivals, load, share of large models, length of a round, size."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import pandas as pd

from makespan.hardware import ClusterSpec, homogeneous
from makespan.papers.morphling._tables import LARGE_MODELS, LOAD, PERTURBED, ROUNDS, SCALE, STUDY
from makespan.papers.morphling._workloads import generated_base
from makespan.studies import Case, Scenario, intervals, limited_statistics, measures, run_all
from makespan.tables import TableSchema
from makespan.throughput import ReferenceTimes
from makespan.traces import scaled, with_large_share, with_load, with_perturbed_arrivals
from makespan.workloads import JobSpec

__all__ = [
    "STUDIES",
    "Draw",
    "large_models_study",
    "load_study",
    "perturbed_arrivals",
    "rounds_study",
    "scale_study",
    "seeded_lists",
    "study_summary",
]

Jobs = tuple[JobSpec, ...]
Draw = Literal["generated", "perturbed"]
Study = tuple[pd.DataFrame, pd.DataFrame]


def seeded_lists(
    base: Jobs, times: ReferenceTimes, seeds: Sequence[int], draw: Draw, std_s: float
) -> dict[int, Jobs]:
    """Return a variant of the Base list for each seed.

    Parameters
    ----------
    base
        The list.
    times
        Iteration times of the source.
    seeds
        Seeds.
    draw
        ``generated``: a new list with the same statistics and as many jobs; ``perturbed``: the same jobs with
        shifted arrivals.
    std_s
        Standard deviation of the shifts [s].
    """
    if draw == "generated":
        return {seed: generated_base(times, seed, len(base)) for seed in seeds}
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

    Parameters
    ----------
    base
        Cluster and catalogue.
    lists
        Job lists by seed.
    times
        Iteration times of the source, for studies that draw other jobs.
    policies
        Names.
    factors
        Arrival rates over that of the lists.
    delay_s, interval_s
        Restart delay and length of a round [s].
    n_processes
        Simulations at the same time.

    Returns
    -------
    tuple of pandas.DataFrame
        One row a simulation (schema `LOAD`), and means with confidence intervals over
        seeds (schema `STUDY`).
    """
    base = replace(base, restart_delay_s=delay_s, interval_s=interval_s)
    cases = {
        (value, seed): replace(base, jobs=with_load(jobs, value))
        for value in factors
        for seed, jobs in lists.items()
    }
    rows = _vary(cases, policies, "load_factor", n_processes)
    return LOAD.validate(rows, where="load"), study_summary(rows, "load_factor")


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
    """Replace jobs so that a share of all trains large models.

    Parameters and results are as in `load_study`, with ``shares`` from 0 to 1 in place of the factors, and
    schema `LARGE_MODELS`.
    """
    stats = limited_statistics(times)
    base = replace(base, restart_delay_s=delay_s, interval_s=interval_s)
    cases = {
        (value, seed): replace(base, jobs=with_large_share(jobs, value, seed, times, stats=stats))
        for value in shares
        for seed, jobs in lists.items()
    }
    rows = _vary(cases, policies, "large_share", n_processes)
    return LARGE_MODELS.validate(rows, where="large_models"), study_summary(rows, "large_share")


def rounds_study(
    base: Scenario,
    lists: Mapping[int, Jobs],
    times: ReferenceTimes,
    policies: Sequence[str],
    intervals_s: Sequence[float],
    delay_s: float,
    n_processes: int = 1,
) -> Study:
    """Ask policies more and less often.

    Parameters and results are as in `load_study`, with lengths of a round in place of the factors (0 asks
    after each event) and schema `ROUNDS`.
    """
    base = replace(base, restart_delay_s=delay_s)
    cases = {
        (value, seed): replace(base, jobs=jobs, interval_s=value)
        for value in intervals_s
        for seed, jobs in lists.items()
    }
    rows = _vary(cases, policies, "interval_s", n_processes)
    return ROUNDS.validate(rows, where="rounds"), study_summary(rows, "interval_s")


STUDIES: Mapping[str, tuple[Callable[..., Study], TableSchema]] = {
    "load": (load_study, LOAD),
    "large_models": (large_models_study, LARGE_MODELS),
    "rounds": (rounds_study, ROUNDS),
}
"""Studies over seeds by name, and the schema of their rows."""


def _vary(
    scenarios: Mapping[tuple[float, int], Scenario],
    policies: Sequence[str],
    parameter: str,
    n_processes: int,
) -> pd.DataFrame:
    """Run every policy on every scenario, which a value of the parameter and a seed name."""
    keys = [key for key in scenarios for _ in policies]
    cases = [
        Case(replace(scenario, name=f"{parameter} {value} seed {seed}"), policy)
        for (value, seed), scenario in scenarios.items()
        for policy in policies
    ]
    return pd.DataFrame(
        [
            {"policy": run.policy, parameter: value, "seed": seed} | measures(run)
            for (value, seed), run in zip(keys, run_all(cases, n_processes), strict=True)
        ]
    )


def study_summary(rows: pd.DataFrame, parameter: str) -> pd.DataFrame:
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
    """Shift all arrivals and report mean and spread.

    Parameters
    ----------
    scenarios
        Cluster, catalogue and jobs by name of the job list.
    traces, policies
        Names.
    delays_s, interval_s
        Restart delays and length of a round [s].
    seeds, std_s
        Seeds and standard deviation [s] of the shifts.
    n_processes
        Simulations at the same time.

    Returns
    -------
    pandas.DataFrame
        Schema `PERTURBED`, one row a trace, policy and restart delay.
    """
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
    """Measure what scheduling costs on larger clusters with more jobs.

    Parameters
    ----------
    base
        Cluster, catalogue and jobs, which are repeated.
    policies
        Names.
    sizes
        Pairs: copies of each job, and copies of the cluster.
    delay_s, interval_s
        Restart delay and length of a round [s].
    n_processes
        Simulations at the same time; more than one makes the measured times longer.

    Returns
    -------
    pandas.DataFrame
        Schema `SCALE`, then metrics of the schedules.
    """
    base = replace(base, restart_delay_s=delay_s, interval_s=interval_s)
    rows = []
    for copies, factor in sizes:
        larger = replace(
            base, cluster=enlarged(base.cluster, factor), jobs=tuple(scaled(base.jobs, copies, seed=1))
        )
        for run in run_all([Case(larger, name) for name in policies], n_processes):
            cost = {
                "policy": run.policy,
                "jobs": run.metrics.n_jobs,
                "gpus": larger.cluster.n_gpus,
                "wall_s": run.result.wall_s,
                "decision_wall_s": run.decision_wall_s,
                "n_decisions": run.result.n_decisions,
            }
            rows.append(cost | measures(run))
    return SCALE.validate(pd.DataFrame(rows), where="scale")


def enlarged(cluster: ClusterSpec, factor: int) -> ClusterSpec:
    """Return a cluster with several times as many nodes, all like the first one."""
    n_nodes = factor * cluster.n_nodes
    return homogeneous(cluster.nodes[0], n_nodes, cluster.network, name=f"{cluster.name} x{factor}")
