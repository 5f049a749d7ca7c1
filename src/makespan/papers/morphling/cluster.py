"""The cluster experiments on the job lists of a source, Table 4 among them, and on many other lists."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, ClassVar, Literal

import pandas as pd
from pydantic import Field

from makespan.errors import InputError
from makespan.hardware import ClusterSpec, homogeneous
from makespan.metrics import allocation_by_family, idle_spells, job_metrics
from makespan.papers.experiment import SOURCES, Experiment, Explore, Figure, Given
from makespan.papers.morphling.comparisons import columns_of, means, paired
from makespan.papers.morphling.job_lists import JOB_LISTS, NAIVE, Draw, Jobs, List, drawn_lists
from makespan.policies import policy_names
from makespan.settings import Block, Count, one_of, option, shared
from makespan.sim import check_jobs
from makespan.studies import (
    PredictionMode,
    Run,
    Scenario,
    SimulationSpec,
    comparison,
    measures,
    run_all,
    table_scenarios,
    with_predictions,
)
from makespan.throughput import ReferenceTimes
from makespan.workloads import JobSpec

BASELINE = "morphling-lookahead"
"""Policy that the ratios of Table 4 compare with."""
PolicyName = Annotated[str, one_of(policy_names)]
TraceName = Literal["base", "bp", "mt"]
Time = Annotated[float, Field(ge=0)]
Seed = Annotated[int, Field(ge=0)]
_REPEATED = ("morphling", "morphling-lookahead", "morphling-work")
COMPARED = (
    *_REPEATED, "sia", "synergy", "antman", "gavel", "tiresias", "fifo", "sjf", "srtf",
)  # fmt: skip
"""Policies that are compared by default: the paper's, ours, and rivals that run on any list."""
_SETTING = ["trace", "gpus", "restart_delay_s"]
_LIST = ["draw", "seed"]


class Simulated(Experiment):
    """Simulations of the cluster, of which every schedule is validated.

    Raises `makespan.studies.ImpossibleScheduleError` if a schedule breaks a rule of the validator.
    """

    reads = ("predictions", *(f"workloads/{name}" for name in JOB_LISTS))
    sources: ClassVar[tuple[str, ...]] = SOURCES
    is_timed = True
    minutes = 30

    workloads: tuple[str, ...] = shared("morphling.simulation.workloads")
    cluster: str = shared("cluster")
    told: PredictionMode = shared("morphling.simulation.predictions")

    def timed_workloads(self, source: str, profiled: Sequence[str]) -> Sequence[str]:
        """Return the workloads that jobs train."""
        return self.workloads

    def n_threads(self, all_cores: int) -> int:
        """Return four cores."""
        return 4

    def policies_run(self) -> Sequence[str]:
        """Return the policies that are options of the experiment, else that of the paper alone."""
        names: Sequence[str] = getattr(self, "policies", ("morphling",))
        return names

    def compute(self, given: Given) -> dict[str, pd.DataFrame]:
        """Return the tables, of scenarios whose policies know what is configured."""
        sampled = self.sampled(given)
        return self.simulated(
            {name: with_predictions(base, self.told) for name, base in sampled.items()}, given
        )

    def sampled(self, given: Given) -> dict[str, Scenario]:
        """Return a scenario per job list, without restart delay and rounds; policies know sampled rows."""
        lists = {name: given.tables[f"workloads/{name}"] for name in JOB_LISTS}
        return table_scenarios(given.times, given.tables["predictions"], lists, self.cluster)

    def simulated(self, scenarios: Mapping[str, Scenario], given: Given) -> dict[str, pd.DataFrame]:
        """Return the tables of given scenarios; every experiment says how."""
        raise NotImplementedError


class OnLists(Simulated):
    """Simulations on several job lists, which are drawn from those of the source."""

    std_s: float = shared("morphling.simulation.lists.std_s")

    def lists_of(
        self, scenarios: Mapping[str, Scenario], seeds: Mapping[Draw, Sequence[int]], given: Given,
        share: float = 1.0,
    ) -> dict[List, Jobs]:  # fmt: skip
        """Draw lists like those of scenarios: shifted or subsampled ones of the authors, else generated."""
        jobs = {trace: one.jobs for trace, one in scenarios.items()}
        is_generated = given.source != "published"
        return drawn_lists(jobs, ReferenceTimes(given.times), seeds, is_generated, self.std_s, share)


# ------------------------------------------------------------------------------------------------
# Every policy on the lists of the source.


class GettingStarted(Simulated):
    """All policies on the short job list, one simulation after the other, as wall times are measured."""

    name = "getting_started"
    tables = {"getting_started": "all policies on ten jobs"}

    policies: tuple[str, ...] = shared("morphling.simulation.policies")
    restart_delays_s: tuple[float, ...] = shared("morphling.simulation.restart_delays_s")
    interval_s: float = shared("morphling.simulation.interval_s")

    def n_threads(self, all_cores: int) -> int:
        """Return one core."""
        return 1

    def simulated(self, scenarios: Mapping[str, Scenario], given: Given) -> dict[str, pd.DataFrame]:
        """Return a row per restart delay and policy."""
        naive = replace(scenarios[NAIVE], interval_s=self.interval_s)
        short = [replace(naive, restart_delay_s=delay_s) for delay_s in self.restart_delays_s]
        cases = [
            SimulationSpec(scenario, name, keeps_tables=True) for scenario in short for name in self.policies
        ]
        return {"getting_started": _table(run_all(cases, given.n_threads), cases)}


class Table4(Simulated):
    """All policies on every job list at every restart delay, three of them twice."""

    name = "table4"
    tables = {
        "table4": "all policies on three job lists, two restart delays",
        "jct": "completion time of every job behind it",
        "allocation": "GPUs held over time by plan family",
        "schedule": "who held which GPU when",
    }
    figures = (
        Figure(
            "table4",
            "Table 4",
            "Average completion time and makespan of every policy on every job "
            "list, one validated simulation per row on {source} iteration times. "
            "The number at the left is the ratio to Morphling-lookahead. Hollow "
            "diamonds are the values that the released simulator prints; its "
            "schedules are not published. Times are points on a logarithmic axis "
            "where one is more than three times the median, and else bars.",
            tables=("table4",),
            cells=("table4",),
            options={"delay_s": "morphling.simulation.restart_delays_s.0"},
        ),
        Figure(
            "jct_cdf",
            "Completion times",
            "Share of jobs that completed within a time, by policy and job list, on {source} "
            "iteration times: one simulation per line, with the first restart delay. The axis of "
            "times is logarithmic; a line further to the left is better.",
            tables=("jct",),
            options={"policies": "morphling.simulation.policies"},
            explore=Explore(
                "shares",
                ("jct_s",),
                by=("policy",),
                panels=("trace",),
                unit_x="completion time [s]",
                unit_y="share of jobs",
            ),
        ),
        Figure(
            "allocation",
            "GPUs over time",
            "GPUs held over time by family of the execution plan, one simulation per panel, on "
            "{source} iteration times. The dashed line is the whole cluster: white below it are "
            "idle GPUs.",
            tables=("allocation",),
            options={"cluster_name": "cluster"},
            explore=Explore(
                "areas",
                ("time_s",),
                panels=("policy",),
                unit_x="time [s]",
                unit_y="GPUs",
            ),
        ),
        Figure(
            "gantt",
            "Schedule",
            "GPUs that jobs of one simulation held over time, one line per GPU, by family of the "
            "execution plan, on {source} iteration times. Restart delays are light grey, and thin "
            "lines separate the nodes.",
            tables=("schedule",),
            explore=Explore(
                "spans",
                ("start_s", "ready_s", "end_s"),
                ("node", "gpu"),
                by=("plan_family",),
                unit_x="time [s]",
                unit_y="node and GPU",
            ),
        ),
    )
    unjudged = frozenset({"jct", "allocation", "schedule"})

    policies: tuple[str, ...] = shared("morphling.simulation.policies")
    restart_delays_s: tuple[float, ...] = shared("morphling.simulation.restart_delays_s")
    interval_s: float = shared("morphling.simulation.interval_s")
    traces: tuple[str, ...] = shared("morphling.simulation.traces")
    shown: tuple[str, ...] = shared("morphling.simulation.shown")

    def simulated(self, scenarios: Mapping[str, Scenario], given: Given) -> dict[str, pd.DataFrame]:
        """Return the comparison, and of the first delay the tables that are drawn."""
        first_delay_s = self.restart_delays_s[0]
        cases = [
            SimulationSpec(
                replace(scenarios[trace], restart_delay_s=delay_s, interval_s=self.interval_s),
                name,
                keeps_tables=delay_s == first_delay_s,
                repeats=int(name in _REPEATED and delay_s == first_delay_s),
            )
            for trace in self.traces
            for delay_s in self.restart_delays_s
            for name in self.policies
        ]
        runs = run_all(cases, given.n_threads)
        drawn = [run for run, case in zip(runs, cases, strict=True) if case.keeps_tables]
        first = {run.policy: run for run in drawn if run.scenario == self.traces[0]}
        chosen = [name for name in self.shown if name in first]
        times = []
        for run in drawn:
            n_gpus, delay_s = scenarios[run.scenario].cluster.n_gpus, run.restart_delay_s
            jobs = job_metrics(run.result.outcomes, n_gpus=n_gpus, restart_delay_s=delay_s)
            times.append(jobs[["job_id", "jct_s"]].assign(trace=run.scenario, policy=run.policy))
        held = []
        for name in chosen:
            wide = allocation_by_family(first[name].result.events)
            wide["time_s"] -= wide["time_s"].iloc[0]
            long = wide.melt("time_s", var_name="plan_family", value_name="gpus")
            held.append(long.assign(policy=name))
        return {
            "table4": _table(runs, cases),
            "jct": pd.concat(times)[columns_of("jct")],
            "allocation": pd.concat(held, ignore_index=True),
            "schedule": first[chosen[0]].result.events,
        }


def _table(runs: Sequence[Run], cases: Sequence[SimulationSpec]) -> pd.DataFrame:
    table = comparison(runs, BASELINE)
    ratios = {name: f"{name}_to_lookahead" for name in ("jct_ratio", "makespan_ratio")}
    # Longest time with most devices free beside a job that they would speed up; NaN without tables.
    idle_s = []
    for run, case in zip(runs, cases, strict=True):
        if not case.keeps_tables:
            idle_s.append(float("nan"))
            continue
        given, delay_s = case.scenario, run.restart_delay_s
        spells = idle_spells(run.result.events, given.jobs, given.cluster, given.catalogue, delay_s)
        idle_s.append(max((spell.end_s - spell.start_s for spell in spells), default=0.0))
    return table.rename(columns=ratios).assign(
        n_decisions=[run.result.n_decisions for run in runs],
        n_repeats=[run.n_repeats for run in runs],
        n_identical=[run.n_identical for run in runs],
        decision_wall_s=[run.decision_wall_s for run in runs],
        idle_s=idle_s,
    )


# ------------------------------------------------------------------------------------------------
# Every policy on many job lists and sizes of the cluster: means, intervals, and who is ahead of whom.

_choice = partial(option, source="a choice")
_seeds = partial(_choice, changes="lists", min_length=1)
_of_lists = partial(_choice, changes="lists")


class Seeds(Block):
    """Seeds of job lists, none of which was looked at while a policy or a parameter was chosen."""

    shifted: tuple[Seed, ...] = _seeds(
        "lists of the authors with shifted arrivals", (201, 202, 203, 204, 205)
    )
    subsampled: tuple[Seed, ...] = _seeds("subsamples of the lists of the authors", (201, 202, 203, 204, 205))
    generated: tuple[Seed, ...] = _seeds(
        "generated lists, of sources without lists of the authors",
        (201, 202, 203, 204, 205, 206, 207, 208, 209, 210),
    )


class Lists(OnLists):
    """Many job lists: whether a result rests on one file.

    Jobs that a cluster cannot run as requested are left out there. Ablations run on the lists of the first
    trace, with the first size and delay.
    """

    name = "lists"
    tables = {
        "lists": "policies on many other job lists: shifted, subsampled, generated",
        "lists_summary": "means over these lists with confidence intervals",
        "lists_pairs": "every policy beside each that knows no more, list by list",
    }
    figures = (
        Figure(
            "lists",
            "Many lists",
            "Average completion time and makespan of every policy: means of {job "
            "lists: largest lists_summary.lists}, which are shifted, subsampled "
            "or generated, with 95 % intervals as lines with caps, on {source} "
            "iteration times. Hollow marks break guarantees on some list. An "
            "arrow at the edge holds where an interval ends beyond the panel.",
            tables=("lists_summary",),
        ),
        Figure(
            "ablation",
            "Ablation",
            "Average completion time of Morphling with plans or resources fixed, "
            "relative to the whole policy, and of the best policy that knows no "
            "more and reconfigures nothing: means of {job lists: largest "
            "lists_summary.lists} on {source} iteration times.",
            tables=("lists", "lists_summary"),
        ),
    )
    unjudged = frozenset({"lists_summary"})

    interval_s: float = shared("morphling.simulation.interval_s")
    seeds: Seeds = option("seeds of the lists", Seeds())
    std_s: float = option(
        "standard deviation of shifted arrivals",
        900.0,
        unit="s",
        source="a choice: more than a restart, less than the span",
        changes="lists, knowledge, load, large_models, rounds",
        gt=0,
    )
    share: float = _of_lists("share of the jobs that a subsample keeps", 0.8, gt=0, le=1)
    traces: tuple[TraceName, ...] = _of_lists(
        "traces that lists are drawn from", ("base", "mt"), min_length=1
    )
    gpus: tuple[Count, ...] = _of_lists(
        "sizes of the cluster, in whole nodes; jobs that it cannot run as requested are left out",
        (64,),
        unit="GPU",
        min_length=1,
    )
    restart_delays_s: tuple[Time, ...] = _of_lists(
        "time without progress after every start and change", (260.0,), unit="s", min_length=1
    )
    policies: tuple[PolicyName, ...] = _of_lists(
        "policies that are compared with one another",
        COMPARED,
        min_length=1,
    )
    ablations: tuple[PolicyName, ...] = _of_lists(
        "policies that run besides on the first trace, with the first size and delay",
        (
            "morphling-e",
            "morphling-r",
            "morphling-n",
            "morphling-lookahead-s",
            "morphling-work-s",
            "morphling-lookahead-e",
            "morphling-lookahead-r",
            "morphling-lookahead-n",
            "morphling-work-e",
            "morphling-work-r",
            "morphling-work-n",
        ),
    )

    def policies_run(self) -> Sequence[str]:
        """Return the policies that are compared, and the ablations."""
        return (*self.policies, *self.ablations)

    def simulated(self, scenarios: Mapping[str, Scenario], given: Given) -> dict[str, pd.DataFrame]:
        """Return a row per simulation, means over lists, and every policy beside each that knows no more."""
        seeds: dict[Draw, Sequence[int]] = {
            "shifted": self.seeds.shifted,
            "subsampled": self.seeds.subsampled,
            "generated": self.seeds.generated,
        }
        lists = self.lists_of({trace: scenarios[trace] for trace in self.traces}, seeds, given, self.share)
        first = next(iter(lists))[0], self.gpus[0], self.restart_delays_s[0]
        clusters = {n_gpus: of_size(next(iter(scenarios.values())).cluster, n_gpus) for n_gpus in self.gpus}
        keys, cases = [], []
        for (trace, draw, seed), jobs in lists.items():
            for n_gpus, cluster in clusters.items():
                base = replace(scenarios[trace], cluster=cluster, interval_s=self.interval_s)
                base = replace(base, jobs=tuple(job for job in jobs if _can_run(job, base)))
                for delay_s in self.restart_delays_s:
                    scenario = replace(base, name=f"{trace}, {draw} {seed}", restart_delay_s=delay_s)
                    further = self.ablations if (trace, n_gpus, delay_s) == first else ()
                    for policy in (*self.policies, *further):
                        keys.append({"trace": trace, "draw": draw, "seed": seed, "gpus": n_gpus})
                        cases.append(SimulationSpec(scenario, policy))
        runs = zip(keys, run_all(cases, given.n_threads), strict=True)
        rows = pd.DataFrame(
            key
            | {"restart_delay_s": run.restart_delay_s, "policy": run.policy, "jobs": run.metrics.n_jobs}
            | measures(run)
            | {"sla_attainment": run.metrics.sla_attainment}
            for key, run in runs
        )
        compared = rows[rows["policy"].isin(self.policies)]
        pairs = paired(compared, _SETTING, _LIST)
        by = [*_SETTING, "policy"]
        kept = rows.groupby(by, sort=False)["sla_attainment"].min()
        summary = means(rows, by).rename(columns={"n": "lists"}).assign(sla_attainment=kept.to_numpy(float))
        return {"lists": rows, "lists_summary": summary, "lists_pairs": pairs}


def _can_run(job: JobSpec, scenario: Scenario) -> bool:
    """Return True if the cluster of a scenario can run a job as requested."""
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
            f"a cluster of {n_gpus} GPUs; expected a multiple of the {cluster.node.n_gpus} of a node"
        )
    return homogeneous(cluster.node, n_nodes, cluster.network, name=f"{cluster.name} with {n_gpus} GPUs")
