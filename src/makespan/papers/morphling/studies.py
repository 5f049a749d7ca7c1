"""Studies of the cluster: knowledge, parameters, readings, load, rounds, CPU threads, size."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from statistics import median
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
from pydantic import Field, model_validator

from makespan.errors import InputError
from makespan.hardware import cluster as cluster_named
from makespan.numerics import intervals
from makespan.papers.experiment import Experiment, Figure, Given
from makespan.papers.morphling.cluster import (
    COMPARED,
    OnLists,
    PolicyName,
    Seed,
    Simulated,
    Time,
    TraceName,
    of_size,
)
from makespan.papers.morphling.comparisons import CHOSEN, REQUESTED, columns_of, means
from makespan.papers.morphling.job_lists import Draw, Jobs
from makespan.papers.morphling.performance import WorkloadKey
from makespan.policies import policy as policy_named
from makespan.settings import Block, Count, option, shared
from makespan.sim import Policy
from makespan.studies import (
    PREDICTION_MODES,
    PredictionMode,
    Run,
    Scenario,
    SimulationSpec,
    generated_jobs,
    limited_statistics,
    measures,
    predicted_catalogue,
    predictions,
    run_all,
    with_predictions,
)
from makespan.throughput import EmulatedSource, ReferenceTimes
from makespan.traces import scaled, statistics, with_large_share, with_load
from makespan.units import HOUR
from makespan.workloads import JobSpec

RivalName = Literal[
    "sia", "synergy", "antman", "gavel", "gavel-ftf", "gavel-makespan", "tiresias", "sjf", "srtf"
]
PositiveTime = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
_choice = partial(option, source="a choice")
_study_seeds = partial(_choice, "seeds of the job lists", min_length=1)
_policies = partial(_choice, "policies", min_length=1)
_figures = partial(option, source="Morphling, simulation figures", min_length=1)
_compared = partial(option, source="Morphling, Table 4", min_length=1)


def _chosen(scenarios: Mapping[str, Scenario], traces: Iterable[str]) -> dict[str, Scenario]:
    """Return the scenarios of some traces."""
    return {trace: scenarios[trace] for trace in traces}


def _each_seed(seeds: Sequence[int]) -> dict[Draw, Sequence[int]]:
    """Return the seeds of shifted or generated lists."""
    return {"shifted": seeds, "generated": seeds}


# ------------------------------------------------------------------------------------------------
# What it is worth to know more: every policy on the same job lists, told less and told more.

_LEAST = PREDICTION_MODES[0]


class Knowledge(OnLists):
    """Study of prior knowledge: every policy on the same job lists, told less and told more."""

    name = "knowledge"
    tables = {"knowledge": "what policies know beforehand, and what knowing more is worth"}
    figures = (
        Figure(
            "knowledge",
            "Knowledge",
            "Average completion time by the knowledge of policies: the rows "
            "sampled for the performance model; also the times that users state "
            "with their requests; or all times. Means of {job lists: largest "
            "knowledge.lists} with 95 % intervals as lines with caps, on {source} "
            "iteration times. Numbers above the bars are the share of starts and "
            "changes for which the policy knew the true time [%].",
            tables=("knowledge",),
        ),
    )

    delay_s: float = shared("morphling.simulation.restart_delays_s.0")
    interval_s: float = shared("morphling.simulation.interval_s")
    traces: tuple[TraceName, ...] = _choice(
        "traces that lists are drawn from", ("base", "mt"), changes="knowledge", min_length=1
    )
    seeds: tuple[Seed, ...] = _study_seeds(
        (201, 202, 203, 204, 205, 206, 207, 208, 209, 210), changes="knowledge"
    )
    policies: tuple[PolicyName, ...] = _policies(
        ("morphling", "morphling-lookahead", "morphling-work", "sia"), changes="knowledge"
    )

    def compute(self, given: Given) -> dict[str, pd.DataFrame]:
        """Return the table; what policies know is studied, so that what is configured does not count."""
        return self.simulated(self.sampled(given), given)

    def simulated(self, scenarios: Mapping[str, Scenario], given: Given) -> dict[str, pd.DataFrame]:
        """Return means over lists; ratios are to what comes of sampled rows on the same list."""
        traces = _chosen(scenarios, self.traces)
        lists = self.lists_of(traces, _each_seed(self.seeds), given)
        keys, cases = [], []
        for mode in PREDICTION_MODES:
            informed = {trace: with_predictions(base, mode) for trace, base in traces.items()}
            for (trace, draw, seed), jobs in lists.items():
                scenario = replace(
                    informed[trace], jobs=jobs, restart_delay_s=self.delay_s, interval_s=self.interval_s
                )
                keys += [(trace, draw, seed, policy, mode) for policy in self.policies]
                cases += [SimulationSpec(scenario, policy) for policy in self.policies]
        rows = pd.DataFrame(keys, columns=["trace", "draw", "seed", "policy", "mode"])
        runs = run_all(cases, given.n_threads)
        for column in ("avg_jct_s", "makespan_s"):
            rows[column] = [getattr(run.metrics, column) for run in runs]
        rows["known_starts"] = [run.result.known_starts for run in runs]
        # The same list and policy with the least knowledge is what the others are compared with.
        of_list, by = ["trace", "draw", "seed", "policy"], ["trace", "policy", "mode"]
        least = rows[rows["mode"] == _LEAST].set_index(of_list)["avg_jct_s"]
        base = least.reindex(pd.MultiIndex.from_frame(rows[of_list])).to_numpy(float)
        ratios = intervals(rows.assign(jct_ratio=rows["avg_jct_s"] / base), by, ["jct_ratio"])
        known = rows.groupby(by, sort=False)["known_starts"].mean().to_numpy(float)
        summary = means(rows, by).rename(columns={"n": "lists"})
        return {"knowledge": summary.merge(ratios.drop(columns="n"), on=by).assign(known_starts=known)}


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
_of_rivals = partial(_choice, changes="rivals")


class Rivals(OnLists):
    """Parameters of rivals, which are chosen on lists that nothing else uses.

    A variant differs from what is shipped in one parameter, and is compared with that on the same lists.
    """

    name = "rivals"
    tables = {"rivals": "what other values of their parameters do to rivals, on lists of their own"}
    figures = (
        Figure(
            "rivals",
            "Parameters of rivals",
            "Average completion time of a rival with another value of one "
            "parameter over that with the shipped value, or its makespan if the "
            "rival minimises that; on lists that no other result uses and on "
            "{source} iteration times. Means of {runs: largest rivals.runs} per "
            "mark, with 95 % intervals of several as lines with caps; above 1, "
            "the dotted line, the shipped value is better. An arrow at the edge "
            "holds a value beyond the axis.",
            tables=("rivals",),
        ),
    )

    interval_s: float = shared("morphling.simulation.interval_s")
    seeds: tuple[Seed, ...] = _of_rivals("seeds of the lists", (1101,), min_length=1)
    traces: tuple[TraceName, ...] = _of_rivals("traces that lists are drawn from", ("base",), min_length=1)
    restart_delays_s: tuple[Time, ...] = _of_rivals(
        "time without progress after every start and change", (260.0,), unit="s", min_length=1
    )
    policies: tuple[RivalName, ...] = _of_rivals(
        "rivals", ("sia", "synergy", "antman", "tiresias"), min_length=1
    )

    def simulated(self, scenarios: Mapping[str, Scenario], given: Given) -> dict[str, pd.DataFrame]:
        """Run every variant of every rival on every list and delay."""
        traces = _chosen(scenarios, self.traces)
        lists = self.lists_of(traces, _each_seed(self.seeds), given)
        changed_one = [
            (policy_named(name), *variant)
            for name in self.policies
            for variant in variants(name, VALUES[name])
        ]
        settings = [(key, jobs, delay_s) for key, jobs in lists.items() for delay_s in self.restart_delays_s]
        cases = [
            SimulationSpec(
                replace(scenarios[key[0]], jobs=jobs, restart_delay_s=delay_s, interval_s=self.interval_s),
                changed,
            )
            for _, _, _, changed in changed_one
            for key, jobs, delay_s in settings
        ]
        runs = iter(run_all(cases, given.n_threads))
        rows = [
            {"policy": shipped.name, "parameter": parameter, "value": value, "setting": number}
            | {name: getattr(next_run.metrics, name) for name in ("avg_jct_s", "makespan_s")}
            for shipped, parameter, value, _ in changed_one
            for number, next_run in zip(range(len(settings)), runs, strict=False)
        ]
        # A variant is compared with what is shipped, by the metric that the rival makes small.
        table, by = pd.DataFrame(rows), ["policy", "setting"]
        shipped_rows = table[table["parameter"] == ""][[*by, "avg_jct_s", "makespan_s"]]
        joined = table.merge(shipped_rows, on=by, suffixes=("", "_shipped"), sort=False)
        is_makespan = joined["policy"].isin(AIMS_AT_MAKESPAN)
        ratios = joined["avg_jct_s"] / joined["avg_jct_s_shipped"]
        joined["ratio"] = ratios.mask(is_makespan, joined["makespan_s"] / joined["makespan_s_shipped"])
        summary = intervals(joined, ["policy", "parameter", "value"], ["avg_jct_s", "makespan_s", "ratio"])
        names = {"n": "runs", "avg_jct_s_mean": "jct_mean_s", "makespan_s_mean": "makespan_mean_s"}
        return {"rivals": summary.rename(columns=names)[columns_of("rivals")]}


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
    """Write the value of a parameter as the tables have it."""
    if isinstance(value, tuple):
        return " ".join(f"{number:g}" for number in value)
    if isinstance(value, str):
        return value
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else f"{value:g}"


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
_of_readings = partial(_choice, changes="readings")


class Readings(OnLists):
    """Alternative readings of the rules that the paper states, exchanged one at a time."""

    name = "readings"
    tables = {"readings": "what other readings of the paper's rules do to its scheduler"}

    interval_s: float = shared("morphling.simulation.interval_s")
    seeds: tuple[Seed, ...] = _of_readings("seeds of the lists", (201,), min_length=1)
    traces: tuple[TraceName, ...] = _of_readings(
        "traces that lists are drawn from", ("base", "mt"), min_length=1
    )
    restart_delays_s: tuple[Time, ...] = _of_readings(
        "time without progress after every start and change", (260.0,), unit="s", min_length=1
    )

    def simulated(self, scenarios: Mapping[str, Scenario], given: Given) -> dict[str, pd.DataFrame]:
        """Run `morphling` with each alternative reading on every list and delay."""
        traces = _chosen(scenarios, self.traces)
        lists = self.lists_of(traces, _each_seed(self.seeds), given)
        shipped: Any = policy_named("morphling")
        policies = list(variants("morphling", ALTERNATIVES))
        four = {name: ALTERNATIVES[name][1] for name in _FOUR}
        policies.append((ALL_BEFORE, "exchanged", replace(shipped, **four)))
        keys, cases = [], []
        for reading, value, changed in policies:
            for (trace, _, seed), jobs in lists.items():
                for delay_s in self.restart_delays_s:
                    setting = {"trace": trace, "seed": seed, "restart_delay_s": delay_s}
                    keys.append(setting | {"reading": reading, "value": value})
                    scenario = replace(
                        scenarios[trace], jobs=jobs, restart_delay_s=delay_s, interval_s=self.interval_s
                    )
                    cases.append(SimulationSpec(scenario, changed))
        runs = run_all(cases, given.n_threads)
        rows = pd.DataFrame([key | measures(run) for key, run in zip(keys, runs, strict=True)])
        # Ratios are to the shipped readings on the same list.
        of_list, metrics = ["trace", "seed", "restart_delay_s"], ["avg_jct_s", "makespan_s"]
        as_shipped = rows[rows["reading"] == ""][[*of_list, *metrics]]
        joined = rows.merge(as_shipped, on=of_list, suffixes=("", "_shipped"), sort=False)
        for name, ratio in zip(metrics, ("jct_ratio", "makespan_ratio"), strict=True):
            joined[ratio] = joined[name] / joined[f"{name}_shipped"]
        by = ["trace", "restart_delay_s", "reading", "value"]
        table = intervals(joined, by, [*metrics, "jct_ratio", "makespan_ratio"])
        names = {"n": "lists", "avg_jct_s_mean": "jct_mean_s", "makespan_s_mean": "makespan_mean_s"}
        return {"readings": table.rename(columns=names)[columns_of("readings")]}


# ------------------------------------------------------------------------------------------------
# Where CPU threads bind: jobs that offload, with the threads of their request and with chosen ones.

_OFFLOADING = ("llama7", "zero-offload", (1, 2, 4, 8))
"""What offloading jobs train, with which plan, and on how many GPUs."""
_of_threads = partial(_choice, changes="threads")


class Threads(Experiment):
    """Mixes of jobs whose speed depends on CPU threads and others: with requested threads, and with chosen.

    Both know the same, and jobs request the same.
    """

    name = "threads"
    tables = {"threads": "policies with requested and with chosen numbers of CPU threads where jobs offload"}
    figures = (
        Figure(
            "threads",
            "CPU threads",
            "Average completion time with the CPU threads of the request over "
            "that with threads chosen by the policy, against the share of jobs "
            "that offload a large model on few GPUs, on {source} iteration times. "
            "Means of {job lists: values threads.seed}, with 95 % intervals as "
            "lines with caps; above 1, the dotted line, choosing pays. An arrow "
            "at the edge holds a value beyond the axis.",
            tables=("threads",),
            sources=("emulated",),
        ),
    )
    sources = ("emulated",)
    is_timed = True
    minutes = 15

    cluster: str = shared("cluster")
    calibration: str = shared("throughput.emulated.calibration")
    emulator_seed: int = shared("throughput.emulated.seed")
    noise: float = shared("throughput.emulated.noise")
    form: str = shared("performance_model.experiment_form")
    told: PredictionMode = shared("morphling.simulation.predictions")
    delay_s: float = shared("morphling.simulation.restart_delays_s.0")
    interval_s: float = shared("morphling.simulation.interval_s")
    workloads: tuple[WorkloadKey, ...] = _of_threads(
        "workloads that jobs train", ("vit", "roberta", "bert", "t5", "gpt2", "llama7"), min_length=1
    )
    cpu_threads: tuple[Count, ...] = _of_threads(
        "CPU threads per GPU among which policies may choose; jobs request 8", (8, 2, 4, 12, 24), min_length=2
    )
    shares: tuple[Share, ...] = _of_threads("shares of jobs that offload", (1.0,), min_length=1)
    seeds: tuple[Seed, ...] = _of_threads(
        "seeds of the job lists", (201, 202, 203, 204, 205, 206, 207, 208, 209, 210), min_length=1
    )
    jobs: Count = _of_threads("jobs of each list", 200)
    policies: tuple[PolicyName, ...] = _of_threads(
        "policies that are compared", ("synergy", "morphling"), min_length=1
    )

    @model_validator(mode="after")
    def _threads_of_requests_are_among_them(self) -> "Threads":
        asked = statistics().cpus_per_gpu
        if asked not in self.cpu_threads:
            raise ValueError(f"cpu_threads with {asked}, which jobs request, among them")
        return self

    def n_threads(self, all_cores: int) -> int:
        """Return four cores."""
        return 4

    def policies_run(self) -> Sequence[str]:
        """Return the policies that are compared."""
        return self.policies

    def compute(self, given: Given) -> dict[str, pd.DataFrame]:
        """Run every policy on every mix, with the threads of a request and with all."""
        asked = statistics().cpus_per_gpu
        spec = cluster_named(self.cluster)
        source = EmulatedSource(spec, self.calibration, self.emulator_seed, self.noise, self.cpu_threads)
        tables = {key: source.load(key) for key in self.workloads}
        known = predictions(tables, spec.name, self.form)
        as_asked = {key: table[table["cpu_threads"] == asked] for key, table in tables.items()}
        times = ReferenceTimes({key: table.reset_index(drop=True) for key, table in as_asked.items()})
        catalogues = {
            choice: predicted_catalogue(of_choice, known, spec.nodes[0])
            for choice, of_choice in ((REQUESTED, times.tables), (CHOSEN, tables))
        }
        keys = list(product(self.shares, self.seeds, self.policies, catalogues))
        lists = {
            seed: generated_jobs("base", self.jobs, seed, times, max_gpus=spec.n_gpus).jobs
            for seed in self.seeds
        }
        cases = []
        for share, seed, policy, choice in keys:
            name = f"offload {share:g}, seed {seed}, threads {choice}"
            mix = with_offload(lists[seed], share, seed, times, asked)
            base = Scenario(
                name, mix, spec, catalogues[choice], self.delay_s, self.interval_s, source=source.name
            )
            cases.append(SimulationSpec(with_predictions(base, self.told), policy, keeps_tables=True))
        runs = zip(keys, run_all(cases, given.n_threads), strict=True)
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
        return {"threads": rows}


def with_offload(
    jobs: Iterable[JobSpec], share: float, seed: int, times: ReferenceTimes, cpus_per_gpu: int
) -> tuple[JobSpec, ...]:
    """Make a random share of the jobs train a large model, offloaded on few GPUs.

    They keep submission and GPU time, so that the load stays.
    """
    listed = list(jobs)
    key, plan, sizes = _OFFLOADING
    chosen = np.random.default_rng([seed, len(listed)]).permutation(len(listed))[: round(share * len(listed))]
    for position, number in enumerate(chosen.tolist()):
        job, n_gpus = listed[number], sizes[position % len(sizes)]
        if job.duration_s is None:
            raise InputError(f"job {job.job_id!r}: no nominal duration; expected jobs that state one")
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
    """Return the mean number of CPU threads per GPU that jobs held, weighted by GPU time."""
    events = run.result.events
    rows = events[events["job_id"] != ""].sort_values(["job_id", "seq"])
    until_s = rows.groupby("job_id")["time_s"].shift(-1)
    # Guests take no CPU threads.
    held_gpu_s = rows["n_gpus"].where(rows["nodes"] != "", 0) * (until_s - rows["time_s"]).fillna(0.0)
    return float((held_gpu_s * rows["cpu_threads"]).sum() / held_gpu_s.sum())


# ------------------------------------------------------------------------------------------------
# Studies that vary one thing: arrivals, load, share of large models, length of a round, size.


class _Varied(OnLists):
    """Studies of one parameter on lists like the base list: a row per simulation, and means over seeds."""

    delay_s: float = shared("morphling.simulation.restart_delays_s.0")

    def vary(
        self,
        parameter: str,
        values: Sequence[float],
        at: Callable[[float, int, Jobs], Scenario],
        seeds: Sequence[int],
        policies: Sequence[str],
        base: Scenario,
        given: Given,
    ) -> dict[str, pd.DataFrame]:
        """Run every policy on the scenario ``at`` each value of the parameter, seed and jobs of its list."""
        drawn = self.lists_of({"base": base}, _each_seed(seeds), given)
        lists = {seed: jobs for (_, _, seed), jobs in drawn.items()}
        keys = list(itertools.product(values, lists, policies))
        cases = [
            SimulationSpec(
                replace(at(value, seed, lists[seed]), name=f"{parameter} {value} seed {seed}"), policy
            )
            for value, seed, policy in keys
        ]
        runs = zip(keys, run_all(cases, given.n_threads), strict=True)
        rows = pd.DataFrame(
            {"policy": run.policy, parameter: value, "seed": seed} | measures(run)
            for (value, seed, _), run in runs
        )
        summary = means(rows, [parameter, "policy"]).rename(columns={parameter: "value", "n": "seeds"})
        return {self.name: rows, f"{self.name}_summary": summary.assign(parameter=parameter)}


class Load(_Varied):
    """Arrival rates."""

    name = "load"
    tables = {
        "load": "completion time and makespan against the arrival rate",
        "load_summary": "means over job lists with confidence intervals",
    }
    figures = (
        Figure(
            "load",
            "Load",
            "Average completion time and makespan against the arrival rate, on "
            "{source} iteration times: means of {job lists: values load.seed}, "
            "with bands for 95 % confidence that end where a panel does. Light "
            "grey lines are the policies of the other panels.",
            tables=("load",),
        ),
    )
    unjudged = frozenset({"load_summary"})

    interval_s: float = shared("morphling.simulation.interval_s")
    factors: tuple[PositiveTime, ...] = _figures(
        "arrival rates over that of the list", (0.5, 2.0), changes="load"
    )
    seeds: tuple[Seed, ...] = _study_seeds((201, 202, 203, 204, 205, 206, 207, 208, 209, 210), changes="load")
    policies: tuple[PolicyName, ...] = _compared(
        "policies",
        COMPARED,
        changes="load",
    )

    def simulated(self, scenarios: Mapping[str, Scenario], given: Given) -> dict[str, pd.DataFrame]:
        """Vary the arrival rate of jobs."""
        base = replace(scenarios["base"], restart_delay_s=self.delay_s, interval_s=self.interval_s)

        def at(factor: float, _: int, jobs: Jobs) -> Scenario:
            return replace(base, jobs=with_load(jobs, factor))

        return self.vary("load_factor", self.factors, at, self.seeds, self.policies, base, given)


class LargeModels(_Varied):
    """Shares of large models."""

    name = "large_models"
    tables = {
        "large_models": "completion time and makespan against the share of large models",
        "large_models_summary": "means over job lists with confidence intervals",
    }
    figures = (
        Figure(
            "large_models",
            "Large models",
            "Average completion time and makespan against the share of jobs that "
            "train large models, on {source} iteration times: means of {job "
            "lists: values large_models.seed}, with bands for 95 % confidence "
            "that end where a panel does. Light grey lines are the policies of "
            "the other panels.",
            tables=("large_models",),
        ),
    )
    unjudged = frozenset({"large_models_summary"})

    interval_s: float = shared("morphling.simulation.interval_s")
    shares: tuple[Share, ...] = _figures(
        "shares of jobs that train large models", (0.0, 1.0), changes="large_models"
    )
    seeds: tuple[Seed, ...] = _study_seeds(
        (201, 202, 203, 204, 205, 206, 207, 208, 209, 210), changes="large_models"
    )
    policies: tuple[PolicyName, ...] = _compared(
        "policies",
        COMPARED,
        changes="large_models",
    )

    def simulated(self, scenarios: Mapping[str, Scenario], given: Given) -> dict[str, pd.DataFrame]:
        """Replace jobs so that a share of all trains large models."""
        times = ReferenceTimes(given.times)
        stats = limited_statistics(times)
        base = replace(scenarios["base"], restart_delay_s=self.delay_s, interval_s=self.interval_s)

        def at(share: float, seed: int, jobs: Jobs) -> Scenario:
            return replace(base, jobs=with_large_share(jobs, share, seed, times, stats=stats))

        return self.vary("large_share", self.shares, at, self.seeds, self.policies, base, given)


class Rounds(_Varied):
    """Lengths of a scheduling round."""

    name = "rounds"
    tables = {
        "rounds": "completion time and makespan against the length of a round",
        "rounds_summary": "means over job lists with confidence intervals",
    }
    figures = (
        Figure(
            "rounds",
            "Length of a round",
            "Average completion time and makespan against the length of a "
            "scheduling round, on {source} iteration times: means of {job lists: "
            "values rounds.seed}, with bands for 95 % confidence that end where a "
            "panel does. Light grey lines are the policies of the other panels.",
            tables=("rounds",),
        ),
    )
    unjudged = frozenset({"rounds", "rounds_summary"})

    intervals_s: tuple[Time, ...] = _choice(
        "lengths of a round; 0 asks after each event",
        (0.0, 60.0, 300.0),
        unit="s",
        changes="rounds",
        min_length=1,
    )
    seeds: tuple[Seed, ...] = _study_seeds((201, 202, 203), changes="rounds")
    policies: tuple[PolicyName, ...] = _policies(
        ("morphling-lookahead", "morphling-work", "gavel", "tiresias", "srtf"), changes="rounds"
    )

    def simulated(self, scenarios: Mapping[str, Scenario], given: Given) -> dict[str, pd.DataFrame]:
        """Ask policies more and less often; 0 asks after each event."""
        base = scenarios["base"]

        def at(interval_s: float, _: int, jobs: Jobs) -> Scenario:
            return replace(base, jobs=jobs, restart_delay_s=self.delay_s, interval_s=interval_s)

        return self.vary("interval_s", self.intervals_s, at, self.seeds, self.policies, base, given)


_REPEATS, _WITHIN_S = 2, 1.5
"""How often a simulation whose time is measured runs again, while all took less than so long together [s]."""


class ScaleSize(Block):
    """One size of the scale study."""

    jobs: int = _choice("copies of each job", changes="scale", ge=1)
    gpus: int = _choice("copies of the cluster", changes="scale", ge=1)


class Scale(Simulated):
    """Larger clusters with more jobs.

    A simulation runs three times, once if it is long; the two that run at the same time share caches and
    memory, and take a little longer.
    """

    name = "scale"
    tables = {"scale": "wall time of simulations and decisions against jobs and GPUs"}
    figures = (
        Figure(
            "scale",
            "Scale",
            "Wall time of whole simulations and of single decisions against jobs and GPUs, on "
            "{source} iteration times: medians of up to {simulations: largest scale.simulations}, with "
            "lines with caps from the fastest to the slowest. Both axes are logarithmic.",
            tables=("scale",),
        ),
    )
    unjudged = frozenset({"scale"})

    delay_s: float = shared("morphling.simulation.restart_delays_s.0")
    interval_s: float = shared("morphling.simulation.interval_s")
    sizes: tuple[ScaleSize, ...] = _figures(
        "sizes",
        (
            ScaleSize(jobs=1, gpus=1),
            ScaleSize(jobs=2, gpus=2),
            ScaleSize(jobs=5, gpus=4),
            ScaleSize(jobs=10, gpus=8),
        ),
        source="Morphling, scalability: 10x jobs, 8x GPUs",
        changes="scale",
    )
    policies: tuple[PolicyName, ...] = _policies(
        ("fifo", "synergy", "morphling-work", "morphling-lookahead"), changes="scale"
    )

    def n_threads(self, all_cores: int) -> int:
        """Return two cores."""
        return 2

    def simulated(self, scenarios: Mapping[str, Scenario], given: Given) -> dict[str, pd.DataFrame]:
        """Measure what scheduling costs; a row per size and policy, with metrics behind the schema."""
        base = replace(scenarios["base"], restart_delay_s=self.delay_s, interval_s=self.interval_s)
        larger = [
            replace(
                base,
                cluster=of_size(base.cluster, size.gpus * base.cluster.n_gpus),
                jobs=tuple(scaled(base.jobs, size.jobs, seed=1)),
            )
            for size in self.sizes
        ]
        cases = [
            SimulationSpec(one, name, repeats=_REPEATS, repeat_within_s=_WITHIN_S)
            for one in larger
            for name in self.policies
        ]
        rows = []
        for case, run in zip(cases, run_all(cases, given.n_threads), strict=True):
            n_decisions = max(run.result.n_decisions, 1)
            decisions_s = [run.decision_wall_s, *(wall_s / n_decisions for _, wall_s in run.repeat_walls_s)]
            cost = {
                "policy": run.policy,
                "jobs": run.metrics.n_jobs,
                "gpus": case.scenario.cluster.n_gpus,
                "simulations": 1 + len(run.repeat_walls_s),
                **_spread("wall_s", [run.result.wall_s, *(wall_s for wall_s, _ in run.repeat_walls_s)]),
                **_spread("decision_wall_s", decisions_s),
                "n_decisions": run.result.n_decisions,
            }
            rows.append(cost | measures(run))
        return {"scale": pd.DataFrame(rows)}


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    return {name: median(values), f"fastest_{name}": min(values), f"slowest_{name}": max(values)}
