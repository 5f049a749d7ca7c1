"""The cluster experiments by their names, each with all tables that it writes; Table 4 among them."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from makespan.hardware import ClusterSpec
from makespan.metrics import allocation_by_family, idle_spells, job_metrics
from makespan.papers.morphling._knowledge import knowledge_study
from makespan.papers.morphling._lists import compare_on_lists, drawn_lists
from makespan.papers.morphling._readings import exchange_readings
from makespan.papers.morphling._rivals import sweep_rivals
from makespan.papers.morphling._studies import STUDIES, scale_study
from makespan.papers.morphling._tables import ALLOCATION, BASELINE, JCT, TABLE4
from makespan.papers.morphling._workloads import NAIVE
from makespan.studies import Case, PredictionMode, Run, Scenario, comparison, knowing, run_all
from makespan.tables import EVENTS
from makespan.throughput import ReferenceTimes

__all__ = ["compare_policies", "getting_started", "run_experiment"]

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
