"""The cluster with nodes that fail: what failures cost under each policy, and each way to recover from them.

Job lists are generated like those of the other studies, but longer, as failures are rare in a list of short
jobs: times between arrivals and steps are stretched by a factor, which leaves the load as it is.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated

import pandas as pd
from pydantic import Field

from makespan.numerics import intervals
from makespan.papers.experiment import Figure, Given
from makespan.papers.morphling.cluster import PolicyName, Seed, Simulated, of_size
from makespan.papers.morphling.comparisons import columns_of
from makespan.papers.morphling.job_lists import Jobs
from makespan.settings import Count, option, shared
from makespan.sim import (
    CHECKPOINT_INTERVAL_S,
    CHECKPOINT_S,
    PAUSES_S,
    FailureModel,
    Recovery,
    RecoveryKind,
    expected_goodput,
)
from makespan.studies import Run, Scenario, SimulationSpec, generated_jobs, run_all
from makespan.throughput import ReferenceTimes
from makespan.traces import with_load
from makespan.units import DAY

_of_failures = partial(option, source="a choice, made before the first run", changes="failures")
_artifact = partial(option, source="Oobleck SOSP'23 artifact, GPT-3 2.7B", changes="failures")
RESTART: RecoveryKind = "restart"
"""Recovery that all others are compared with."""
_GPUS = 64  # of the cluster for which lists are generated


class Failures(Simulated):
    """Failures at several rates, on clusters of several sizes, under policies and kinds of recovery."""

    name = "failures"
    tables = {
        "failures": "goodput and completion time under failures, simulation by simulation",
        "failures_summary": "means over seeds with confidence intervals, beside the analytic model",
        "failures_gains": "every kind of recovery beside restarts, on the same lists and failures",
    }
    figures = (
        Figure(
            "failures",
            "Goodput under failures",
            "Share of GPU time that went into steps that were kept, against the failures a day of the whole "
            "cluster, on {source} iteration times: geometric means of {seeds: values failures.seed}, with "
            "95 % intervals as lines with caps. The dotted line is the analytic model of restarts without "
            "queueing (Daly).",
            tables=("failures", "failures_summary"),
            draw="failures_goodput",
        ),
        Figure(
            "failures_jct",
            "Completion time under failures",
            "Average completion time against the failures a day of the whole cluster, on {source} "
            "iteration times: geometric means of {seeds: values failures.seed}, with 95 % intervals as "
            "lines with caps. Both axes are logarithmic.",
            tables=("failures", "failures_summary"),
        ),
    )
    sources = ("emulated",)
    minutes = 10

    delay_s: float = shared("morphling.simulation.restart_delays_s.0")
    interval_s: float = shared("morphling.simulation.interval_s")
    gpus: tuple[Count, ...] = _of_failures("sizes of the cluster", (64, 256), unit="GPUs", min_length=1)
    jobs: Count = _of_failures("jobs of a list for each 64 GPUs", 32)
    stretch: float = _of_failures(
        "factor of the durations of jobs and of the times between their arrivals", 10.0, gt=0, le=1000
    )
    per_day: tuple[Annotated[float, Field(gt=0)], ...] = _of_failures(
        "failures a day of the whole cluster, each above 0", (1.0, 3.0, 10.0, 30.0, 100.0), min_length=1
    )
    repair_s: float = _of_failures(
        "mean time until a node is back, exponentially distributed", 3600.0, unit="s", gt=0
    )
    recoveries: tuple[RecoveryKind, ...] = _of_failures(
        "kinds of recovery, compared with restart", (RESTART, "elastic", "resilient"), min_length=1
    )
    checkpoint_interval_s: float = _of_failures(
        "training between checkpoints", CHECKPOINT_INTERVAL_S, unit="s", gt=0
    )
    checkpoint_s: float = _artifact("time to write a checkpoint", CHECKPOINT_S, unit="s", ge=0)
    elastic_pause_s: float = option(
        "time until an elastic job goes on",
        PAUSES_S["elastic"],
        unit="s",
        source="Morphling, section 8: restart delay of 78 s",
        changes="failures",
        ge=0,
    )
    resilient_pause_s: float = _artifact(
        "regrouping of a resilient job", PAUSES_S["resilient"], unit="s", ge=0
    )
    f: Count = _of_failures("nodes that a resilient job may lose at a time", 1)
    seeds: tuple[Seed, ...] = _of_failures(
        "seeds of job lists and failures, which no parameter was chosen on",
        (301, 302, 303, 304),
        min_length=1,
    )
    policies: tuple[PolicyName, ...] = _of_failures(
        "policies", ("fifo", "sia", "morphling-lookahead"), min_length=1
    )

    def simulated(self, scenarios: Mapping[str, Scenario], given: Given) -> dict[str, pd.DataFrame]:
        """Run every policy with every kind of recovery on the same lists and failures."""
        times = ReferenceTimes(given.times)
        keys, cases, expected = [], [], []
        for gpus, seed in itertools.product(self.gpus, self.seeds):
            where = of_size(scenarios["base"].cluster, gpus)
            listed = stretched(gpus, self.jobs, self.stretch, seed, times)
            base = replace(
                scenarios["base"],
                jobs=listed,
                cluster=where,
                restart_delay_s=self.delay_s,
                interval_s=self.interval_s,
            )
            for per_day in self.per_day:
                model = FailureModel(per_day, repair_s=self.repair_s, seed=seed)
                failing = replace(base, failures=model.events(where), failures_end_s=model.end_s)
                for kind, policy in itertools.product(self.recoveries, self.policies):
                    recovery = self.recovery(kind)
                    name = f"failures {per_day:g} a day, {gpus} GPUs, {kind}, seed {seed}"
                    keys.append((gpus, per_day, kind, policy, seed))
                    cases.append(SimulationSpec(replace(failing, recovery=recovery, name=name), policy))
                    is_modelled = kind == RESTART
                    expected.append(
                        expected_of(base, self.delay_s, per_day, recovery) if is_modelled else float("nan")
                    )
        runs = run_all(cases, given.n_threads)
        table = pd.DataFrame(keys, columns=["gpus", "per_day", "recovery", "policy", "seed"])
        table = table.assign(**_measured(runs), expected_goodput=expected)
        return {
            "failures": table[columns_of("failures")],
            "failures_summary": summarised(table),
            "failures_gains": gains(table),
        }

    def recovery(self, kind: RecoveryKind) -> Recovery:
        """Return a kind of recovery with the costs that are configured."""
        pauses_s = {"elastic": self.elastic_pause_s, "resilient": self.resilient_pause_s}
        tolerated = self.f if kind == "resilient" else None
        checkpoints = self.checkpoint_interval_s, self.checkpoint_s
        return Recovery(kind, *checkpoints, pause_s=pauses_s.get(kind), f=tolerated)


def _measured(runs: Sequence[Run]) -> dict[str, list[float]]:
    goodputs = [run.goodput for run in runs if run.goodput is not None]
    held = [one.held_gpu_s for one in goodputs]
    parts = ("lost_gpu_s", "checkpoint_gpu_s", "recovery_gpu_s", "restart_gpu_s")
    shares = {
        name.replace("_gpu_s", "_share"): [
            getattr(one, name) / total for one, total in zip(goodputs, held, strict=True)
        ]
        for name in parts
    }
    return {
        "jobs": [run.metrics.n_jobs for run in runs],
        "avg_jct_s": [run.metrics.avg_jct_s for run in runs],
        "makespan_s": [run.metrics.makespan_s for run in runs],
        "goodput": [one.ratio for one in goodputs],
        **shares,
        "n_interruptions": [one.n_interruptions for one in goodputs],
        "recovery_time_s": [one.recovery_s for one in goodputs],
    }


def stretched(gpus: int, jobs: int, stretch: float, seed: int, times: ReferenceTimes) -> Jobs:
    """Generate a list for a cluster of so many GPUs, with the load of the Base list and longer jobs.

    Parameters
    ----------
    jobs
        Jobs for each 64 GPUs.
    stretch
        Factor of steps and of times between arrivals.
    """
    size = gpus / _GPUS
    listed = generated_jobs("base", max(round(jobs * size), 1), seed, times).jobs
    longer = tuple(
        replace(
            job,
            steps=max(round(job.steps * stretch), 1),
            duration_s=None if job.duration_s is None else job.duration_s * stretch,
        )
        for job in listed
    )
    return with_load(longer, size / stretch)


def expected_of(scenario: Scenario, delay_s: float, per_day: float, recovery: Recovery) -> float:
    """Return the goodput of restarts by the analytic model, if each job runs as requested and alone [1].

    A job holds the fewest nodes for its GPUs, which fail at their part of the rate of the cluster. It starts
    once, and then makes progress as `makespan.sim.expected_goodput` says.
    """
    fitting, node = scenario.catalogue.on(scenario.cluster), scenario.cluster.node
    useful = held = 0.0
    for job in scenario.jobs:
        requested = fitting.requested(job)
        share = requested.n_nodes * node.n_gpus / scenario.cluster.n_gpus
        mtbf_s = DAY / (per_day * share) if per_day else float("inf")
        work_s = (job.steps + scenario.extra_steps) * requested.iter_time_s
        pace = expected_goodput(recovery, mtbf_s, delay_s)
        useful += requested.n_gpus * work_s
        held += requested.n_gpus * (delay_s + (work_s / pace if pace else float("inf")))
    return useful / held


def summarised(table: pd.DataFrame) -> pd.DataFrame:
    """Return geometric means over seeds with 95 % intervals, and the mean of the analytic model."""
    by = ["gpus", "per_day", "recovery", "policy"]
    names = {"n": "seeds"} | {f"avg_jct_s_{end}": f"jct_{end}_s" for end in ("mean", "low", "high")}
    summary = intervals(table, by, ["goodput", "avg_jct_s"]).rename(columns=names)
    expected = table.groupby(by, sort=False)["expected_goodput"].mean().to_numpy(float)
    return summary.assign(expected_goodput=expected)[columns_of("failures_summary")]


def gains(table: pd.DataFrame) -> pd.DataFrame:
    """Return what each kind of recovery gains over restarts on the same list and failures.

    Ratios are geometric means over seeds with 95 % intervals: goodput over that of restarts, and the average
    completion time of restarts over its own; above 1, the kind is better.
    """
    setting = ["gpus", "per_day", "policy", "seed"]
    base = table[table["recovery"] == RESTART][[*setting, "goodput", "avg_jct_s"]]
    others = table[table["recovery"] != RESTART]
    joined = others.merge(base, on=setting, suffixes=("", "_restart"), sort=False)
    if joined.empty:
        return pd.DataFrame(columns=columns_of("failures_gains"))
    joined["goodput_ratio"] = joined["goodput"] / joined["goodput_restart"]
    joined["jct_ratio"] = joined["avg_jct_s_restart"] / joined["avg_jct_s"]
    by = ["gpus", "per_day", "policy", "recovery"]
    summary = intervals(joined, by, ["goodput_ratio", "jct_ratio"]).rename(columns={"n": "seeds"})
    return summary[columns_of("failures_gains")]
