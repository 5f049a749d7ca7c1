"""The policies on a cluster of today with models of today, on the job lists of the testbed's study.

Arrivals, numbers of GPUs, nominal durations and seeds are those of the generated lists; every workload of the
zoo is exchanged for a model, in order of size. Times of steps are predicted (`makespan.planning`), so that no
source of iteration times plays a part but in the durations of the lists.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import pandas as pd
from pydantic import model_validator

from makespan.errors import InputError
from makespan.papers.experiment import Experiment, Figure, Given
from makespan.papers.morphling.cluster import COMPARED, PolicyName, Seed
from makespan.papers.morphling.comparisons import means, paired
from makespan.papers.morphling.job_lists import Jobs
from makespan.settings import Block, Count, option, shared
from makespan.studies import (
    PredictionMode,
    SimulationSpec,
    generated_jobs,
    measures,
    run_all,
    scenario,
    site,
    with_models,
)
from makespan.throughput import EmulatedSource, ReferenceTimes, best_plans, planned_workload
from makespan.workloads import JobSpec

_of_today = partial(option, source="a choice, made before the first run", changes="today")
_PLANS = {"ga": "zero-dp+zero1", "zero-dp": "zero-dp+zero3", "zero-offload": "zero-dp+zero3+gc"}
"""Plans of today for those that users of the lists ask for; with degrees, the optimizer is sharded."""


class Exchange(Block):
    """A model that takes the place of a workload."""

    workload: str = _of_today("workload of the job lists")
    model: str = _of_today("model of the planning catalogue, or path of its file")


class Today(Experiment):
    """The same lists on other hardware with other models: which conclusions carry over."""

    name = "today"
    tables = {
        "today": "policies on a cluster of today with models of today, list by list",
        "today_summary": "means over these lists with confidence intervals",
        "today_pairs": "every policy beside each that knows no more, on these lists",
    }
    figures = (
        Figure(
            "today",
            "Models of today",
            "Average completion time and makespan of every policy on a cluster of today with models of "
            "today, whose steps are predicted, beside those on the testbed, on {source} iteration times: "
            "geometric means of {job lists: values today.seed} and of {job lists: largest "
            "lists_summary.lists}, with 95 % intervals as lines with caps. Lists have the same arrivals, "
            "GPUs and durations.",
            tables=("today", "today_summary", "lists_summary"),
        ),
    )
    sources = ("emulated",)
    is_timed = True
    unjudged = frozenset({"today_summary"})
    minutes = 30

    workloads: tuple[str, ...] = shared("morphling.simulation.workloads")
    told: PredictionMode = shared("morphling.simulation.predictions")
    delay_s: float = shared("morphling.simulation.restart_delays_s.0")
    interval_s: float = shared("morphling.simulation.interval_s")
    jobs: Count = shared("morphling.simulation.job_lists.jobs")
    machines: str = _of_today("cluster: a text such as 64xh100-80, or a file", "64xh100-80")
    models: tuple[Exchange, ...] = _of_today(
        "models in place of the workloads of the lists, in order of size",
        (
            Exchange(workload="vit", model="qwen3-0.6b"),
            Exchange(workload="bert", model="qwen3-1.7b"),
            Exchange(workload="roberta", model="qwen3-4b"),
            Exchange(workload="t5", model="qwen3-8b"),
            Exchange(workload="gpt2", model="llama3-8b"),
            Exchange(workload="llama7", model="mixtral-8x7b"),
            Exchange(workload="llama30", model="llama3-70b"),
        ),
        min_length=1,
    )
    seq: Count = _of_today("tokens of a sample", 4096)
    batch: Count = _of_today(
        "samples of a step; 3 and 5 divide it, as they do the 24, 40 and 48 GPUs that jobs request", 240
    )
    seeds: tuple[Seed, ...] = _of_today(
        "seeds of the job lists, the first of those of the testbed", (201, 202, 203, 204, 205), min_length=1
    )
    policies: tuple[PolicyName, ...] = _of_today("policies that are compared", COMPARED, min_length=1)

    @model_validator(mode="after")
    def _workloads_differ(self) -> "Today":
        if len({one.workload for one in self.models}) != len(self.models):
            raise ValueError("models in place of different workloads")
        return self

    def timed_workloads(self, source: str, profiled: Sequence[str]) -> Sequence[str]:
        """Return the workloads of the job lists."""
        return self.workloads

    def n_threads(self, all_cores: int) -> int:
        """Return four cores."""
        return 4

    def policies_run(self) -> Sequence[str]:
        """Return the policies that are compared."""
        return self.policies

    def compute(self, given: Given) -> dict[str, pd.DataFrame]:
        """Return a row per simulation, means over lists, and every policy beside each that knows no more.

        Raises
        ------
        InputError
            A workload of the lists has no model in its place.
        """
        models = {one.workload: one.model for one in self.models}
        if missing := sorted(set(self.workloads) - models.keys()):
            raise InputError(f"models: none in place of {', '.join(missing)}; expected one for each workload")
        times = ReferenceTimes(given.times)
        keys = {
            name: planned_workload(models[name], seq=self.seq, batch=self.batch).key
            for name in self.workloads
        }
        place = site(self.machines)
        base = EmulatedSource(place.cluster, "L1", 0, 0.0)  # of no job: all train models of today
        source = with_models(base, place, keys.values())
        tables = {name: source.load(key) for name, key in keys.items()}
        at, cases = [], []
        for seed in self.seeds:
            listed = generated_jobs("base", self.jobs, seed, times).jobs
            one = scenario(
                exchanged(listed, keys, tables, place.cluster.gpus_per_node),
                cluster_name=self.machines,
                restart_delay_s=self.delay_s,
                interval_s=self.interval_s,
                predictions=self.told,
            )
            at += [seed] * len(self.policies)
            cases += [SimulationSpec(replace(one, name=f"today {seed}"), policy) for policy in self.policies]
        rows = pd.DataFrame(
            {"trace": "base", "seed": seed, "policy": run.policy, "jobs": run.metrics.n_jobs} | measures(run)
            for seed, run in zip(at, run_all(cases, given.n_threads), strict=True)
        )
        pairs = paired(rows, ["trace"], ["seed"])
        summary = means(rows, ["trace", "policy"]).rename(columns={"n": "lists"})
        return {"today": rows, "today_summary": summary, "today_pairs": pairs}


def exchanged(
    jobs: Jobs, keys: Mapping[str, str], tables: Mapping[str, pd.DataFrame], gpus_per_node: int
) -> Jobs:
    """Return jobs that train models of today, with the arrivals, GPUs and durations of a list.

    A job whose model has no plan on as many GPUs gets the next larger number that fills nodes, for a duration
    that keeps its GPU time. Its plan is that of today for the plan it asked for; where that does not fit, the
    fastest that does.

    Parameters
    ----------
    keys, tables
        Key and throughput table of the model in place of each workload.
    gpus_per_node
        GPUs that fill a node.
    """
    times = ReferenceTimes({keys[name]: table for name, table in tables.items()})
    best = {name: best_plans(table) for name, table in tables.items()}
    found: list[JobSpec] = []
    for job in jobs:
        fastest, key = best[job.workload], keys[job.workload]
        whole = [n for n in fastest if n >= job.n_gpus and (n <= gpus_per_node or n % gpus_per_node == 0)]
        if not whole:
            raise InputError(f"job {job.job_id!r}: no plan of {key!r} fits on {job.n_gpus} GPUs or more")
        n_gpus = job.n_gpus if job.n_gpus in fastest else min(whole)
        plan = _PLANS.get(job.plan, f"{job.plan}+zero1") if n_gpus == job.n_gpus else fastest[n_gpus]
        if times.requested(key, n_gpus, plan).plan != plan:
            plan = fastest[n_gpus]
        duration_s = (job.duration_s or 0.0) * job.n_gpus / n_gpus
        found.append(
            replace(
                job,
                workload=key,
                n_gpus=n_gpus,
                n_cpus=job.n_cpus // job.n_gpus * n_gpus,
                plan=plan,
                duration_s=duration_s,
                steps=times.steps(key, n_gpus, plan, duration_s),
            )
        )
    return tuple(found)
