"""Every policy on many job lists and sizes of the cluster: means, intervals, and who is ahead of whom."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import pandas as pd

from makespan.confidence import intervals
from makespan.errors import InputError
from makespan.hardware import ClusterSpec, homogeneous
from makespan.papers.morphling._pairs import paired
from makespan.papers.morphling._tables import LISTS, LISTS_PAIRS, LISTS_SUMMARY
from makespan.sim import check_jobs
from makespan.studies import Case, Scenario, generated_jobs, measures, run_all
from makespan.throughput import ReferenceTimes
from makespan.traces import subsampled, with_perturbed_arrivals
from makespan.workloads import JobSpec

__all__ = [
    "Draw",
    "compare_on_lists",
    "drawn_lists",
    "means",
    "of_size",
]

Jobs = tuple[JobSpec, ...]
Draw = Literal["shifted", "subsampled", "generated"]
List = tuple[str, Draw, int]
"""Trace, how the list was drawn, seed."""

_SETTING = ["trace", "gpus", "restart_delay_s"]
_LIST = ["draw", "seed"]


def drawn_lists(
    traces: Mapping[str, Jobs],
    times: ReferenceTimes,
    seeds: Mapping[Draw, Sequence[int]],
    is_generated: bool,
    std_s: float,
    share: float,
) -> dict[List, Jobs]:
    """Draw job lists like those of the traces, by seed.

    Those of the authors are shifted in time or subsampled; of a trace that is generated itself as many jobs
    are generated again.
    """

    def draw(trace: str, how: Draw, seed: int) -> Jobs:
        jobs = traces[trace]
        if how == "shifted":
            return with_perturbed_arrivals(jobs, std_s, seed)
        if how == "subsampled":
            return subsampled(jobs, share, seed)
        return generated_jobs(trace, len(jobs), seed, times).jobs

    ways = [how for how in seeds if (how == "generated") == is_generated]
    keys = [(trace, how, seed) for trace in traces for how in ways for seed in seeds[how]]
    return {key: draw(*key) for key in keys}


def compare_on_lists(
    scenarios: Mapping[str, Scenario],
    lists: Mapping[List, Jobs],
    policies: Sequence[str],
    ablations: Sequence[str],
    gpus: Sequence[int],
    delays_s: Sequence[float],
    interval_s: float,
    n_processes: int = 1,
) -> dict[str, pd.DataFrame]:
    """Run every policy on every list, cluster size and restart delay, and compare each with all others.

    Jobs that a cluster cannot run as requested are left out there. Ablations run on the lists of the first
    trace, with the first size and delay.
    """
    first = next(iter(lists))[0], gpus[0], delays_s[0]
    clusters = {n_gpus: of_size(next(iter(scenarios.values())).cluster, n_gpus) for n_gpus in gpus}
    keys, cases = [], []
    for (trace, draw, seed), jobs in lists.items():
        for n_gpus, cluster in clusters.items():
            base = replace(scenarios[trace], cluster=cluster, interval_s=interval_s)
            base = replace(base, jobs=tuple(job for job in jobs if _can_run(job, base)))
            for delay_s in delays_s:
                scenario = replace(base, name=f"{trace}, {draw} {seed}", restart_delay_s=delay_s)
                further = ablations if (trace, n_gpus, delay_s) == first else ()
                for policy in (*policies, *further):
                    keys.append({"trace": trace, "draw": draw, "seed": seed, "gpus": n_gpus})
                    cases.append(Case(scenario, policy))
    runs = zip(keys, run_all(cases, n_processes), strict=True)
    rows = pd.DataFrame(
        key
        | {"restart_delay_s": run.restart_delay_s, "policy": run.policy, "jobs": run.metrics.n_jobs}
        | measures(run)
        | {"sla_attainment": run.metrics.sla_attainment}
        for key, run in runs
    )
    return {
        "lists": LISTS.validate(rows, where="lists"),
        "lists_summary": _summary(rows),
        "lists_pairs": _pairs(rows[rows["policy"].isin(policies)]),
    }


def _can_run(job: JobSpec, scenario: Scenario) -> bool:
    try:
        check_jobs((job,), scenario.cluster, scenario.catalogue.on(scenario.cluster))
    except InputError:
        return False
    return True


def of_size(cluster: ClusterSpec, n_gpus: int) -> ClusterSpec:
    """Return a cluster of nodes like the first one with so many GPUs in all."""
    n_nodes, rest = divmod(n_gpus, cluster.node.n_gpus)
    if rest or not n_nodes:
        raise InputError(
            f"a cluster of {n_gpus} GPUs; accepted: a multiple of the {cluster.node.n_gpus} of a node"
        )
    return homogeneous(cluster.node, n_nodes, cluster.network, name=f"{cluster.name} with {n_gpus} GPUs")


def _summary(rows: pd.DataFrame) -> pd.DataFrame:
    """Return mean and interval of every policy in every setting; schema `LISTS_SUMMARY`."""
    by = [*_SETTING, "policy"]
    kept = rows.groupby(by, sort=False)["sla_attainment"].min()
    table = means(rows, by).rename(columns={"n": "lists"}).assign(sla_attainment=kept.to_numpy(float))
    return LISTS_SUMMARY.validate(table, where="lists_summary")


def means(rows: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """Return geometric means of average JCT and makespan over lists, with their 95 % intervals, and ``n``."""
    names = {
        f"{column}_{end}": f"{name}_{end}_s"
        for column, name in (("avg_jct_s", "jct"), ("makespan_s", "makespan"))
        for end in ("mean", "low", "high")
    }
    return intervals(rows, by, ["avg_jct_s", "makespan_s"]).rename(columns=names)


def _pairs(rows: pd.DataFrame) -> pd.DataFrame:
    """Compare every policy with all that know no more than it; schema `LISTS_PAIRS`."""
    return LISTS_PAIRS.validate(paired(rows, _SETTING, _LIST), where="lists_pairs")
