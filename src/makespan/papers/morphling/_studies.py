"""Studies that vary one thing: arrivals, load, share of large models, length of a round, size."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import pandas as pd

from makespan.hardware import ClusterSpec, homogeneous
from makespan.papers.morphling._bands import study_summary
from makespan.papers.morphling._bench import Bench, Run, Setting, run_all
from makespan.papers.morphling._workloads import generated_base, limited_statistics
from makespan.tables import LARGE_MODELS, LOAD, PERTURBED, ROUNDS, SCALE
from makespan.throughput import ReferenceTimes
from makespan.traces import scaled, with_large_share, with_load, with_perturbed_arrivals
from makespan.workloads import JobSpec

__all__ = [
    "Draw",
    "large_models_study",
    "load_study",
    "perturbed_arrivals",
    "rounds_study",
    "scale_study",
    "seeded_lists",
]

Jobs = tuple[JobSpec, ...]
Draw = Literal["generated", "perturbed"]
Study = tuple[pd.DataFrame, pd.DataFrame]
_BASE = "base"


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
    bench: Bench,
    lists: Mapping[int, Jobs],
    policies: Sequence[str],
    factors: Sequence[float],
    delay_s: float,
    interval_s: float,
) -> Study:
    """Let jobs arrive faster and slower.

    Parameters
    ----------
    bench
        Cluster and catalogue.
    lists
        Job lists by seed.
    policies
        Names.
    factors
        Arrival rates over that of the lists.
    delay_s, interval_s
        Restart delay and length of a round [s].

    Returns
    -------
    tuple of pandas.DataFrame
        One row a simulation (schema `makespan.tables.LOAD`), and means with confidence bands over
        seeds (schema `makespan.tables.STUDY`).
    """
    cases = {(value, seed): with_load(jobs, value) for value in factors for seed, jobs in lists.items()}
    rows = _vary(bench, cases, policies, "load_factor", lambda _: (delay_s, interval_s))
    return LOAD.validate(rows, where="load"), study_summary(rows, "load_factor")


def large_models_study(
    bench: Bench,
    lists: Mapping[int, Jobs],
    times: ReferenceTimes,
    policies: Sequence[str],
    shares: Sequence[float],
    delay_s: float,
    interval_s: float,
) -> Study:
    """Replace jobs so that a share of all trains large models.

    Parameters and results are as in `load_study`, with ``shares`` from 0 to 1 in place of the factors,
    ``times`` of the source for the steps of replaced jobs, and schema `makespan.tables.LARGE_MODELS`.
    """
    stats = limited_statistics(times)
    cases = {
        (value, seed): with_large_share(jobs, value, seed, times, stats=stats)
        for value in shares
        for seed, jobs in lists.items()
    }
    rows = _vary(bench, cases, policies, "large_share", lambda _: (delay_s, interval_s))
    return LARGE_MODELS.validate(rows, where="large_models"), study_summary(rows, "large_share")


def rounds_study(
    bench: Bench,
    lists: Mapping[int, Jobs],
    policies: Sequence[str],
    intervals_s: Sequence[float],
    delay_s: float,
) -> Study:
    """Ask policies more and less often.

    Parameters and results are as in `load_study`, with lengths of a round in place of the factors (0 asks
    after each event) and schema `makespan.tables.ROUNDS`.
    """
    cases = {(value, seed): jobs for value in intervals_s for seed, jobs in lists.items()}
    rows = _vary(bench, cases, policies, "interval_s", lambda value: (delay_s, value))
    return ROUNDS.validate(rows, where="rounds"), study_summary(rows, "interval_s")


def _vary(
    bench: Bench,
    cases: Mapping[tuple[float, int], Jobs],
    policies: Sequence[str],
    parameter: str,
    times_of: Callable[[float], tuple[float, float]],
) -> pd.DataFrame:
    """Run every policy on every case, which a value of the parameter and a seed name."""
    keys = {f"{parameter} {value} seed {seed}": (value, seed) for value, seed in cases}
    jobs = {name: cases[key] for name, key in keys.items()}
    settings = [
        Setting(name, policy, *times_of(value)) for name, (value, _) in keys.items() for policy in policies
    ]
    rows = [
        {"policy": run.setting.policy, parameter: keys[run.setting.trace][0]}
        | {"seed": keys[run.setting.trace][1]}
        | _measures(run)
        for run in run_all(settings, replace(bench, jobs=jobs))
    ]
    return pd.DataFrame(rows)


def _measures(run: Run) -> dict[str, float]:
    found = run.found
    return {
        "avg_jct_s": found.avg_jct_s,
        "makespan_s": found.makespan_s,
        "p50_jct_s": found.p50_jct_s,
        "p99_jct_s": found.p99_jct_s,
        "gpu_allocation_ratio": found.gpu_allocation_ratio,
        "reconfigurations_per_job": found.reconfigurations_per_job,
    }


def perturbed_arrivals(
    bench: Bench,
    traces: Sequence[str],
    policies: Sequence[str],
    delays_s: Sequence[float],
    interval_s: float,
    seeds: Sequence[int],
    std_s: float,
) -> pd.DataFrame:
    """Shift all arrivals and report mean and spread.

    Parameters
    ----------
    bench
        Cluster, catalogue and job lists.
    traces, policies
        Names.
    delays_s, interval_s
        Restart delays and length of a round [s].
    seeds, std_s
        Seeds and standard deviation [s] of the shifts.

    Returns
    -------
    pandas.DataFrame
        Schema `makespan.tables.PERTURBED`, one row a trace, policy and restart delay.
    """
    shifted = {
        f"{trace}/{seed}": with_perturbed_arrivals(bench.jobs[trace], std_s, seed)
        for trace in traces
        for seed in seeds
    }
    settings = [
        Setting(name, policy, delay_s, interval_s)
        for name in shifted
        for delay_s in delays_s
        for policy in policies
    ]
    rows = [
        {
            "trace": run.setting.trace.partition("/")[0],
            "policy": run.setting.policy,
            "restart_delay_s": run.setting.restart_delay_s,
            "avg_jct_s": run.found.avg_jct_s,
            "makespan_s": run.found.makespan_s,
            "sla_attainment": run.found.sla_attainment,
        }
        for run in run_all(settings, replace(bench, jobs=shifted))
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
    bench: Bench,
    policies: Sequence[str],
    sizes: Sequence[tuple[int, int]],
    delay_s: float,
    interval_s: float,
) -> pd.DataFrame:
    """Measure what scheduling costs on larger clusters with more jobs.

    Parameters
    ----------
    bench
        Cluster, catalogue and job lists; the Base list is repeated.
    policies
        Names.
    sizes
        Pairs: copies of each job, and copies of the cluster.
    delay_s, interval_s
        Restart delay and length of a round [s].

    Returns
    -------
    pandas.DataFrame
        Schema `makespan.tables.SCALE`, then metrics of the schedules.
    """
    rows = []
    for copies, factor in sizes:
        jobs = scaled(bench.jobs[_BASE], copies, seed=1)
        larger = replace(bench, cluster=enlarged(bench.cluster, factor), jobs={_BASE: jobs})
        for run in run_all([Setting(_BASE, name, delay_s, interval_s) for name in policies], larger):
            rows.append(
                {
                    "policy": run.setting.policy,
                    "jobs": run.found.n_jobs,
                    "gpus": larger.cluster.n_gpus,
                    "wall_s": run.wall_s,
                    "decision_wall_s": run.decision_wall_s,
                    "n_decisions": run.n_decisions,
                }
                | _measures(run)
            )
    return SCALE.validate(pd.DataFrame(rows), where="scale")


def enlarged(cluster: ClusterSpec, factor: int) -> ClusterSpec:
    """Return a cluster with several times as many nodes, all like the first one."""
    n_nodes = factor * cluster.n_nodes
    return homogeneous(cluster.nodes[0], n_nodes, cluster.network, name=f"{cluster.name} x{factor}")
