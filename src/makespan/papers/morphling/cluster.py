"""What it is worth to know more: every policy on the same job lists, told less and told more."""

import itertools
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np
import pandas as pd

from makespan.errors import InputError, TraceError
from makespan.hardware import ClusterSpec, cluster as cluster_named, homogeneous
from makespan.metrics import allocation_by_family, idle_spells, job_metrics
from makespan.numerics import intervals
from makespan.papers.morphling.tables import (
    ALLOCATION,
    BASELINE,
    JCT,
    KNOWLEDGE,
    LARGE_MODELS,
    LISTS,
    LISTS_PAIRS,
    LISTS_SUMMARY,
    LOAD,
    READINGS,
    RIVALS,
    ROUNDS,
    SCALE,
    STUDY,
    TABLE4,
    THREADS,
)
from makespan.policies import policy as policy_named
from makespan.sim import Policy, check_jobs
from makespan.studies import (
    PREDICTION_MODES,
    Case,
    PredictionMode,
    Run,
    Scenario,
    comparison,
    generated_jobs,
    knowing,
    limited_statistics,
    measures,
    predicted_catalogue,
    predictions,
    run_all,
)
from makespan.tables import EVENTS, TableSchema
from makespan.throughput import Dataset, EmulatedSource, ReferenceTimes, find_dataset, verify
from makespan.traces import (
    VARIANTS,
    jobs_table,
    read_morphling_jobs,
    scaled,
    statistics,
    subsampled,
    with_large_share,
    with_load,
    with_perturbed_arrivals,
)
from makespan.units import HOUR
from makespan.workloads import JobSpec

_LOG = logging.getLogger(__name__)


# ------------------------------------------------------------------------------------------------
# Who is ahead of whom, from tables alone: ratios on the same list, means over lists with their intervals.

CLAIRVOYANT = frozenset(
    (
        *(f"morphling-work{ending}" for ending in ("", "-s", "-e", "-r", "-n")),
        *("gavel-ftf", "gavel-makespan", "sjf", "srtf"),
    )
)
"""Policies that know run times. Named here, so that no table or figure depends on the code of policies."""
RECONFIGURING = ("sia",)
"""Policies of others that change plans or resources of jobs; under the rest they run as requested."""
CHOSEN, REQUESTED = "chosen", "requested"
"""CPU threads of a job: what its policy chose, or what it requested."""


def paired(rows: pd.DataFrame, setting: Sequence[str], lists: Sequence[str]) -> pd.DataFrame:
    """Divide the times of rivals by those of each policy on the same list.

    Parameters
    ----------
    rows
        One row a simulation: ``policy, avg_jct_s, makespan_s``, the columns below, and ``sla_attainment``
        where there are guarantees.
    setting, lists
        Columns that say under which conditions, and on which list.

    Returns
    -------
    pandas.DataFrame
        One row a setting, policy and rival that knows no more: ``lists``, geometric means of the ratios with
        95 % intervals, the lists on which the policy is ahead, and the least share of guarantees that the
        rival keeps.
    """
    measured = ["avg_jct_s", "makespan_s"]
    columns = [*setting, *lists, *measured, *(["sla_attainment"] if "sla_attainment" in rows else [])]
    parts = []
    for name in dict.fromkeys(rows["policy"]):
        own = rows[rows["policy"] == name][[*setting, *lists, *measured]]
        for rival in rivals_of(str(name), rows["policy"]):
            others = rows[rows["policy"] == rival][columns]
            joined = own.merge(others, on=[*setting, *lists], suffixes=("", "_rival"))
            ratios = joined.assign(policy=name, rival=rival)
            for column in measured:
                ratios[column] = joined[f"{column}_rival"] / joined[column]
            parts.append(ratios)
    if not parts:
        return pd.DataFrame(columns=LISTS_PAIRS.names)
    every, by = pd.concat(parts, ignore_index=True), [*setting, "policy", "rival"]
    names = {"avg_jct_s": "jct", "makespan_s": "makespan"}
    table = intervals(every, by, measured).rename(
        columns={"n": "lists"}
        | {
            f"{old}_{end}": f"{new}_ratio_{end}"
            for old, new in names.items()
            for end in ("mean", "low", "high")
        }
    )
    groups = every.groupby(by, sort=False)
    for old, new in names.items():
        table[f"{new}_wins"] = groups[old].agg(lambda ratios: int((ratios > 1).sum())).to_numpy()
    if "sla_attainment" in every:
        table["rival_sla_attainment"] = groups["sla_attainment"].min().to_numpy(float)
    return table


def rivals_of(name: str, policies: "Sequence[str] | pd.Series[str]") -> list[str]:
    """Return the other policies that know no more than this one does."""
    others = (str(other) for other in dict.fromkeys(policies) if other != name)
    return [other for other in others if name in CLAIRVOYANT or other not in CLAIRVOYANT]


def threads_worth(rows: pd.DataFrame) -> pd.DataFrame:
    """Average JCT with requested over that with chosen threads: means over lists with their intervals.

    One row a policy and share: ``n`` lists, ``ratio_mean``, ``ratio_low`` and ``ratio_high``.
    """
    by = ["policy", "offload_share"]
    wide = rows.pivot(index=[*by, "seed"], columns="threads", values="avg_jct_s")
    ratios = (wide[REQUESTED] / wide[CHOSEN]).rename("ratio").reset_index()
    return intervals(ratios, by, ["ratio"])


# ------------------------------------------------------------------------------------------------
# Every policy on many job lists and sizes of the cluster: means, intervals, and who is ahead of whom.

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
        "lists_summary": _list_summary(rows),
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


def _list_summary(rows: pd.DataFrame) -> pd.DataFrame:
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


# ------------------------------------------------------------------------------------------------
# What it is worth to know more: every policy on the same job lists, told less and told more.

_LEAST = PREDICTION_MODES[0]


def knowledge_study(
    scenarios: Mapping[str, Scenario],
    lists: Mapping[List, tuple[JobSpec, ...]],
    policies: Sequence[str],
    delay_s: float,
    interval_s: float,
    n_processes: int = 1,
) -> pd.DataFrame:
    """Run policies on job lists, with every amount of knowledge; schema `KNOWLEDGE`.

    Policies know sampled rows in the scenarios; ratios are to what comes of that on the same list.
    """
    keys, cases = [], []
    for mode in PREDICTION_MODES:
        told = {trace: knowing(scenarios[trace], mode) for trace in dict.fromkeys(key[0] for key in lists)}
        for (trace, draw, seed), jobs in lists.items():
            of_list = replace(told[trace], jobs=jobs, restart_delay_s=delay_s, interval_s=interval_s)
            keys += [(trace, draw, seed, policy, mode) for policy in policies]
            cases += [Case(of_list, policy) for policy in policies]
    rows = pd.DataFrame(keys, columns=["trace", "draw", "seed", "policy", "mode"])
    runs = run_all(cases, n_processes)
    for column in ("avg_jct_s", "makespan_s"):
        rows[column] = [getattr(run.metrics, column) for run in runs]
    rows["known_starts"] = [run.result.known_starts for run in runs]
    return KNOWLEDGE.validate(_knowledge_summary(rows), where=KNOWLEDGE.name)


def _knowledge_summary(rows: pd.DataFrame) -> pd.DataFrame:
    """Return means over lists with their intervals, of the ratio to the least knowledge too."""
    own, by = ["trace", "draw", "seed", "policy"], ["trace", "policy", "mode"]
    least = rows[rows["mode"] == _LEAST].set_index(own)["avg_jct_s"]
    base = least.reindex(pd.MultiIndex.from_frame(rows[own])).to_numpy(float)
    ratios = intervals(rows.assign(jct_ratio=rows["avg_jct_s"] / base), by, ["jct_ratio"]).drop(columns="n")
    known = rows.groupby(by, sort=False)["known_starts"].mean().to_numpy(float)
    return means(rows, by).rename(columns={"n": "lists"}).merge(ratios, on=by).assign(known_starts=known)


# ------------------------------------------------------------------------------------------------
# The parameters of rivals, varied one at a time on job lists that no other result uses.

_SPREAD = {"max_slowdown": (1.0, 1.25, 1.5, 2.0)}
_TURNS = {
    "turn_s": (360.0, 1440.0),
    "turn_delays": (0.0, 3.0, 12.0),
    "advantage": (1.0, 2.0, 4.0, 8.0),
} | _SPREAD
_QUEUES_H = ((1, 4), (2, 8), (4, 8), (4, 16), (4, 64), (8, 16), (16,))
VALUES: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "sia": {
        "start_factor": (1.0, 2.0, None),
        "growth": (2.0, 4.0, None),
        "power": (-0.25, -0.5, -1.0),
        "queueing_penalty": (1.1, 2.0, 4.0, 8.0),
    }
    | _SPREAD,
    "synergy": {"tolerance": (0.02, 0.05, 0.1)} | _SPREAD,
    "antman": {"shares": (True, False), "least_pace": (0.0, 0.1, 0.25, 0.5)} | _SPREAD,
    "gavel": _TURNS,
    "gavel-ftf": _TURNS,
    "gavel-makespan": _TURNS,
    "tiresias": {
        "thresholds_gpu_s": tuple(tuple(hours * HOUR for hours in queues) for queues in _QUEUES_H),
        "promotion": (None, 2.0, 8.0),
    }
    | _SPREAD,
    "sjf": {"max_stretch": (1.0, 1.25, 1.5, 2.0)},
    "srtf": {"min_advantage": (0.0, 2.0, 4.0, 6.0, 8.0), "max_stretch": (1.0, 1.25, 1.5, 2.0)},
}
"""Values of the parameters of each rival; what is shipped is among them."""
AIMS_AT_MAKESPAN = ("gavel-makespan",)
"""Rivals that are judged by their makespan, as that is what they make small; others by average JCT."""


def sweep_rivals(
    scenarios: Mapping[str, Scenario],
    lists: Mapping[List, Jobs],
    policies: Sequence[str],
    delays_s: Sequence[float],
    interval_s: float,
    n_processes: int = 1,
) -> pd.DataFrame:
    """Run every variant of every rival on every list and delay; schema `RIVALS`.

    A variant differs from what is shipped in one parameter, and is compared with that on the same lists.
    """
    changed_one = [
        (policy_named(name), *variant) for name in policies for variant in variants(name, VALUES[name])
    ]
    settings = [(key, jobs, delay_s) for key, jobs in lists.items() for delay_s in delays_s]
    cases = [
        Case(replace(scenarios[key[0]], jobs=jobs, restart_delay_s=delay_s, interval_s=interval_s), changed)
        for _, _, _, changed in changed_one
        for key, jobs, delay_s in settings
    ]
    runs = iter(run_all(cases, n_processes))
    rows = [
        {"policy": shipped.name, "parameter": parameter, "value": value, "setting": number}
        | {name: getattr(next_run.metrics, name) for name in ("avg_jct_s", "makespan_s")}
        for shipped, parameter, value, _ in changed_one
        for number, next_run in zip(range(len(settings)), runs, strict=False)
    ]
    return RIVALS.validate(_compared(pd.DataFrame(rows)), where="rivals")


def variants(
    name: str, values_by_parameter: Mapping[str, tuple[Any, ...]]
) -> Iterator[tuple[str, str, Policy]]:
    """Yield parameter, value as text and policy: first what is shipped, then each other value alone."""
    shipped: Any = policy_named(name)
    yield "", "", shipped
    for parameter, values in values_by_parameter.items():
        for value in values:
            if value != getattr(shipped, parameter):
                yield parameter, _text(value), replace(shipped, **{parameter: value})


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return " ".join(f"{one:g}" for one in value)
    if isinstance(value, str):
        return value
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else f"{value:g}"


def _compared(rows: pd.DataFrame) -> pd.DataFrame:
    """Means over lists and delays, and ratios to what is shipped, of the metric that a rival makes small."""
    shipped = rows[rows["parameter"] == ""][["policy", "setting", "avg_jct_s", "makespan_s"]]
    joined = rows.merge(shipped, on=["policy", "setting"], suffixes=("", "_shipped"), sort=False)
    is_makespan = joined["policy"].isin(AIMS_AT_MAKESPAN)
    ratios = joined["avg_jct_s"] / joined["avg_jct_s_shipped"]
    joined["ratio"] = ratios.mask(is_makespan, joined["makespan_s"] / joined["makespan_s_shipped"])
    table = intervals(joined, ["policy", "parameter", "value"], ["avg_jct_s", "makespan_s", "ratio"])
    names = {"n": "runs", "avg_jct_s_mean": "jct_mean_s", "makespan_s_mean": "makespan_mean_s"}
    return table.rename(columns=names)[list(RIVALS.names)]


# ------------------------------------------------------------------------------------------------
# Studies that vary one thing: arrivals, load, share of large models, length of a round, size.

_REPEATS, _WITHIN_S = 2, 1.5
"""How often a simulation whose time is measured runs again, while all took less than so long together [s]."""
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
    return schema.validate(rows, where=schema.name), _study_summary(rows, parameter)


def _study_summary(rows: pd.DataFrame, parameter: str) -> pd.DataFrame:
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


# ------------------------------------------------------------------------------------------------
# Where CPU threads bind: jobs that offload, with the threads of their request and with chosen ones.

_OFFLOADING = ("llama7", "zero-offload", (1, 2, 4, 8))
"""What offloading jobs train, with which plan, and on how many GPUs."""


def threads_study(
    source: EmulatedSource,
    workloads: Sequence[str],
    form: str,
    mode: PredictionMode,
    policies: Sequence[str],
    shares: Sequence[float],
    seeds: Sequence[int],
    n_jobs: int,
    delay_s: float,
    interval_s: float,
    n_processes: int = 1,
) -> pd.DataFrame:
    """Run every policy on mixes of jobs that offload and others, with the threads of a request and with all.

    Both know the same, and jobs request the same; schema `THREADS`.

    Raises
    ------
    InputError
        What jobs request is not among the numbers of CPU threads of the source.
    """
    asked = statistics().cpus_per_gpu
    if asked not in source.cpu_threads:
        raise InputError(
            f"CPU threads {source.cpu_threads}; accepted: {asked}, which jobs request, among them"
        )
    spec = cluster_named(source.cluster.name)
    tables = {key: source.load(key) for key in workloads}
    known = predictions(tables, spec.name, form)
    as_asked = {key: table[table["cpu_threads"] == asked] for key, table in tables.items()}
    times = ReferenceTimes({key: table.reset_index(drop=True) for key, table in as_asked.items()})
    catalogues = {
        choice: predicted_catalogue(given, known, spec.nodes[0])
        for choice, given in ((REQUESTED, times.tables), (CHOSEN, tables))
    }
    keys = list(product(shares, seeds, policies, catalogues))
    lists = {seed: generated_jobs("base", n_jobs, seed, times, max_gpus=spec.n_gpus).jobs for seed in seeds}
    cases = []
    for share, seed, policy, choice in keys:
        name, jobs = f"offload {share:g}, seed {seed}, threads {choice}", lists[seed]
        mix = with_offload(jobs, share, seed, times, asked)
        given = name, mix, spec, catalogues[choice], delay_s, interval_s
        scenario = knowing(Scenario(*given, source=source.name), mode)
        cases.append(Case(scenario, policy, keeps_tables=True))
    runs = zip(keys, run_all(cases, n_processes), strict=True)
    rows = pd.DataFrame(
        {
            "policy": policy,
            "offload_share": share,
            "seed": seed,
            "threads": choice,
            "avg_jct_s": run.metrics.avg_jct_s,
            "makespan_s": run.metrics.makespan_s,
            "threads_per_gpu": _threads_per_gpu(run),
        }
        for (share, seed, policy, choice), run in runs
    )
    return THREADS.validate(rows, where="threads")


def with_offload(
    jobs: Iterable[JobSpec], share: float, seed: int, times: ReferenceTimes, cpus_per_gpu: int
) -> tuple[JobSpec, ...]:
    """Let a share of the jobs, drawn at random, train a large model offloaded on few GPUs instead.

    They keep submission and GPU time, so that the load stays.
    """
    listed = list(jobs)
    key, plan, sizes = _OFFLOADING
    chosen = np.random.default_rng([seed, len(listed)]).permutation(len(listed))[: round(share * len(listed))]
    for position, number in enumerate(chosen.tolist()):
        job, n_gpus = listed[number], sizes[position % len(sizes)]
        if job.duration_s is None:
            raise InputError(f"job {job.job_id!r}: no nominal duration; accepted: jobs that state one")
        duration_s = job.duration_s * job.n_gpus / n_gpus
        listed[number] = replace(
            job,
            workload=key,
            plan=plan,
            n_gpus=n_gpus,
            n_cpus=cpus_per_gpu * n_gpus,
            duration_s=duration_s,
            steps=times.steps(key, n_gpus, plan, duration_s),
        )
    return tuple(listed)


def _threads_per_gpu(run: Run) -> float:
    """CPU threads that jobs held for each of their GPUs, over the time that they held them."""
    events = run.result.events
    rows = events[events["job_id"] != ""].sort_values(["job_id", "seq"])
    until_s = rows.groupby("job_id")["time_s"].shift(-1)
    held_gpu_s = rows["n_gpus"] * (until_s - rows["time_s"]).fillna(0.0)
    return float((held_gpu_s * rows["cpu_threads"]).sum() / held_gpu_s.sum())


# ------------------------------------------------------------------------------------------------
# The job lists of the cluster experiments: generated, or those of the authors.

NAIVE = "naive"
"""The short job list for getting started."""
_DATASETS = {NAIVE: "naive", **{name: f"workload-{name}" for name in VARIANTS}}


def generated_workloads(
    tables: Mapping[str, pd.DataFrame], seed: int, n_jobs: int, naive_jobs: int, naive_span_s: float
) -> dict[str, pd.DataFrame]:
    """Generate all job lists; schema `makespan.tables.JOBS`, by name.

    Only workloads of the throughput tables (schema `makespan.tables.THROUGHPUT`, by workload) are requested.
    The short list has jobs and a span of its own, the time from its first to its last submission [s].
    """
    times = ReferenceTimes(tables)
    lists = {NAIVE: generated_jobs(NAIVE, naive_jobs, seed, times, span_s=naive_span_s)}
    lists |= {name: generated_jobs(name, n_jobs, seed, times) for name in VARIANTS}
    return {name: jobs_table(trace.jobs) for name, trace in lists.items()}


def published_workloads(
    directory: str | Path, register: Iterable[Dataset], workloads: Collection[str]
) -> dict[str, pd.DataFrame]:
    """Read the authors' job lists; schema `makespan.tables.JOBS`, by name.

    Parameters
    ----------
    directory, register
        A directory with the published files, and their checksums.
    workloads
        Jobs that train anything else are left out; how many is logged.

    Raises
    ------
    MissingDataError, ChecksumError
        A file is not there or not the registered one.
    TraceError
        No job is left.
    """
    entries = tuple(register)
    return {
        name: _published_list(find_dataset(entries, f"morphling-workloads-{stem}"), directory, workloads)
        for name, stem in _DATASETS.items()
    }


def _published_list(dataset: Dataset, directory: str | Path, workloads: Collection[str]) -> pd.DataFrame:
    jobs = read_morphling_jobs(verify(dataset, directory)).jobs
    kept = [job for job in jobs if job.workload in workloads]
    if not kept:
        raise TraceError(f"{dataset.path}: no job trains {', '.join(sorted(workloads))}")
    if len(kept) < len(jobs):
        others = len(jobs) - len(kept)
        _LOG.warning("%s: %d of %d jobs train other workloads", dataset.path, others, len(jobs))
    return jobs_table(kept)


# ------------------------------------------------------------------------------------------------
# The cluster experiments by their names, each with all tables that it writes; Table 4 among them.

_REPEATED = ("morphling", "morphling-lookahead", "morphling-work")


def compare_policies(
    scenarios: Mapping[str, Scenario],
    traces: Sequence[str],
    policies: Sequence[str],
    delays_s: Sequence[float],
    interval_s: float,
    shown: Collection[str],
    n_processes: int = 1,
) -> dict[str, pd.DataFrame]:
    """Run every policy on every job list at every restart delay, three of them twice."""
    cases = [
        Case(
            replace(scenarios[trace], restart_delay_s=delay_s, interval_s=interval_s),
            name,
            keeps_tables=delay_s == delays_s[0],
            repeats=int(name in _REPEATED and delay_s == delays_s[0]),
        )
        for trace in traces
        for delay_s in delays_s
        for name in policies
    ]
    runs = run_all(cases, n_processes)
    drawn = [run for run, case in zip(runs, cases, strict=True) if case.keeps_tables]
    first = {run.policy: run for run in drawn if run.scenario == traces[0]}
    chosen = [name for name in shown if name in first]
    times = pd.concat([_completion_times(run, scenarios[run.scenario].cluster) for run in drawn])
    return {
        "table4": _table(runs, cases),
        "jct": JCT.validate(times, where="jct"),
        "allocation": _allocation([first[name] for name in chosen]),
        "schedule": EVENTS.validate(first[chosen[0]].result.events, where="schedule"),
    }


def getting_started(
    scenarios: Mapping[str, Scenario],
    policies: Sequence[str],
    delays_s: Sequence[float],
    interval_s: float,
    n_processes: int = 1,
) -> pd.DataFrame:
    """Run every policy on the short job list; schema `TABLE4`."""
    naive = replace(scenarios[NAIVE], interval_s=interval_s)
    short = [replace(naive, restart_delay_s=delay_s) for delay_s in delays_s]
    cases = [Case(scenario, name, keeps_tables=True) for scenario in short for name in policies]
    return _table(run_all(cases, n_processes), cases)


def _table(runs: Sequence[Run], cases: Sequence[Case]) -> pd.DataFrame:
    table = comparison(runs, BASELINE)
    ratios = {name: f"{name}_to_lookahead" for name in ("jct_ratio", "makespan_ratio")}
    table = table.rename(columns=ratios).assign(
        n_decisions=[run.result.n_decisions for run in runs],
        n_repeats=[run.n_repeats for run in runs],
        n_identical=[run.n_identical for run in runs],
        decision_wall_s=[run.decision_wall_s for run in runs],
        idle_s=[_idle_s(run, case) for run, case in zip(runs, cases, strict=True)],
    )
    return TABLE4.validate(table, where="table4")


def _idle_s(run: Run, case: Case) -> float:
    """Longest time with most devices free beside a job that they would speed up [s]; NaN without tables."""
    if not case.keeps_tables:
        return float("nan")
    given = case.scenario
    spells = idle_spells(run.result.events, given.jobs, given.cluster, given.catalogue, run.restart_delay_s)
    return max((spell.end_s - spell.start_s for spell in spells), default=0.0)


def _completion_times(run: Run, cluster: ClusterSpec) -> pd.DataFrame:
    delay_s = run.restart_delay_s
    jobs = job_metrics(run.result.outcomes, n_gpus=cluster.n_gpus, restart_delay_s=delay_s)
    names = {"trace": run.scenario, "policy": run.policy}
    return pd.DataFrame(names | {"job_id": jobs["job_id"], "jct_s": jobs["jct_s"]})


def _allocation(runs: Iterable[Run]) -> pd.DataFrame:
    parts = []
    for run in runs:
        wide = allocation_by_family(run.result.events)
        wide["time_s"] -= wide["time_s"].iloc[0]
        long = wide.melt("time_s", var_name="plan_family", value_name="gpus")
        parts.append(long.assign(policy=run.policy))
    return ALLOCATION.validate(pd.concat(parts, ignore_index=True), where="allocation")


def run_experiment(
    name: str,
    scenarios: Mapping[str, Scenario],
    times: ReferenceTimes,
    mode: PredictionMode,
    drawn: Mapping[str, Any],
    options: Mapping[str, Any],
) -> dict[str, pd.DataFrame]:
    """Run a cluster experiment and return its tables by name.

    Parameters
    ----------
    name
        A key of `EXPERIMENT_TABLES`.
    scenarios, times
        From `makespan.studies.read_scenarios` and `read_times`.
    mode
        What policies know, where that is not what is studied.
    drawn, options
        What draws the job lists of an experiment on several; what its function takes.

    Raises
    ------
    ImpossibleScheduleError
        A schedule breaks a rule of the validator.
    """
    sampled, scenarios = scenarios, {key: knowing(base, mode) for key, base in scenarios.items()}
    if name in STUDIES:
        base = scenarios["base"]
        lists = {key[-1]: jobs for key, jobs in drawn_lists({"base": base.jobs}, times, **drawn).items()}
        rows, means = STUDIES[name](base, lists, times, **options)
        return {name: rows, f"{name}_summary": means}
    if name == "table4":
        return compare_policies(scenarios, **options)
    if name in ("lists", "knowledge"):
        chosen = dict(options)
        jobs = {trace: scenarios[trace].jobs for trace in chosen.pop("traces")}
        if name == "knowledge":
            return {name: knowledge_study(sampled, drawn_lists(jobs, times, **drawn), **chosen)}
        return compare_on_lists(scenarios, drawn_lists(jobs, times, **drawn), **chosen)
    if name in ("rivals", "readings"):
        chosen = dict(options)
        jobs = {trace: scenarios[trace].jobs for trace in chosen.pop("traces")}
        vary = sweep_rivals if name == "rivals" else exchange_readings
        return {name: vary(scenarios, drawn_lists(jobs, times, **drawn), **chosen)}
    if name == "scale":
        return {name: scale_study(scenarios["base"], **options)}
    return {name: getting_started(scenarios, **options)}


# ------------------------------------------------------------------------------------------------
# Cost of each reading of the rules: the policy `morphling` with one of them exchanged at a time.

ALTERNATIVES: Mapping[str, tuple[Any, ...]] = {
    "starving_takes": (True, False),
    "age_since": ("submission", "waiting"),
    "forces_smaller": (True, False),
    "gate_counts": ("own", "all"),
    "age_limit_s": (3600.0, 900.0, 14400.0, 200000.0),
    "starving_order": ("age", "slope"),
    "starving_passes_gates": (False, True),
    "old_yield": (True, False),
    "victim_counts": (True, False),
    "gate_time": ("held", "progress"),
    "gives_back": (True, False),
    "restarts_stopped": (True, False),
    "shape_order": ("nodes", "speed"),
}
"""Ways to read the rules where the paper leaves room, the one that `morphling` takes first."""
_FOUR = ("starving_takes", "age_since", "forces_smaller", "gate_counts")
ALL_BEFORE = "first four together"
"""Name of the variant in which the first four readings are exchanged at once."""


def exchange_readings(
    scenarios: Mapping[str, Scenario],
    lists: Mapping[tuple[str, Draw, int], tuple[JobSpec, ...]],
    delays_s: Sequence[float],
    interval_s: float,
    n_processes: int = 1,
) -> pd.DataFrame:
    """Run `morphling` with each alternative reading on every list and delay; schema `READINGS`."""
    shipped: Any = policy_named("morphling")
    policies = list(variants("morphling", ALTERNATIVES))
    four = {name: ALTERNATIVES[name][1] for name in _FOUR}
    policies.append((ALL_BEFORE, "exchanged", replace(shipped, **four)))
    keys, cases = [], []
    for reading, value, changed in policies:
        for (trace, _, seed), jobs in lists.items():
            for delay_s in delays_s:
                setting = {"trace": trace, "seed": seed, "restart_delay_s": delay_s}
                keys.append(setting | {"reading": reading, "value": value})
                given = replace(scenarios[trace], jobs=jobs, restart_delay_s=delay_s, interval_s=interval_s)
                cases.append(Case(given, changed))
    runs = run_all(cases, n_processes)
    rows = pd.DataFrame([key | measures(run) for key, run in zip(keys, runs, strict=True)])
    return READINGS.validate(_readings_compared(rows), where="readings")


def _readings_compared(rows: pd.DataFrame) -> pd.DataFrame:
    """Return means over lists, and ratios to the shipped readings on the same list."""
    where, names = ["trace", "seed", "restart_delay_s"], ["avg_jct_s", "makespan_s"]
    shipped = rows[rows["reading"] == ""][[*where, *names]]
    joined = rows.merge(shipped, on=where, suffixes=("", "_shipped"), sort=False)
    for name, ratio in zip(names, ("jct_ratio", "makespan_ratio"), strict=True):
        joined[ratio] = joined[name] / joined[f"{name}_shipped"]
    by = ["trace", "restart_delay_s", "reading", "value"]
    table = intervals(joined, by, [*names, "jct_ratio", "makespan_ratio"])
    renamed = {"n": "lists", "avg_jct_s_mean": "jct_mean_s", "makespan_s_mean": "makespan_mean_s"}
    return table.rename(columns=renamed)[list(READINGS.names)]
