"""The cluster experiments: completion times and makespan (Fig. 14), GPUs over time (Fig. 15), sensitivity."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import pandas as pd

from makespan.hardware import ClusterSpec, cluster
from makespan.papers.easyscale._jobs import ClusterJobs, cluster_jobs, pooled
from makespan.papers.easyscale._profile import published_profile
from makespan.papers.easyscale._tables import FIG14, FIG14_JOBS, FIG15, SENSITIVITY
from makespan.sim import RestartDelays
from makespan.studies import Case, Run, Scenario, run_all

__all__ = ["CONCURRENT", "SERIAL", "cluster_experiments"]

CONCURRENT, SERIAL = "fifo", "fifo-serial"
"""Gang scheduling as clusters do it, to which gains refer, and what the paper's bar is of."""

Charge = Literal["every", "first_only"]


@dataclass(frozen=True, slots=True)
class _Setting:
    """One setting of the simulations: what differs from the default, and times [s]."""

    parameter: str
    value: str
    interval_s: float
    restart_delay_s: float
    charge: Charge


def cluster_experiments(
    table: pd.DataFrame,
    cells: Mapping[str, pd.DataFrame],
    *,
    cluster_name: str,
    gang_policies: Sequence[str],
    elastic_policies: Sequence[str],
    interval_s: float,
    restart_delay_s: float,
    charge: Charge,
    intervals_s: Sequence[float],
    restart_delays_s: Sequence[float],
    jobs: Mapping[str, Any],
    n_processes: int = 1,
) -> dict[str, pd.DataFrame]:
    """Simulate a job list under all policies; return the tables ``fig14, fig14_jobs, fig15, sensitivity``.

    Parameters
    ----------
    table, cells
        Job list of schema `makespan.traces.EASYSCALE_JOBS`; printed cells of figs 11, 12, 14 and 15 by name.
    cluster_name
        Cluster of the catalogue whose devices are simulated as one pool a type.
    gang_policies, elastic_policies
        Policies that know jobs by their gangs alone, and those that may run them on other GPUs.
    interval_s, restart_delay_s, charge
        Length of a round, time without progress after a start or change [s], and which of these it follows.
    intervals_s, restart_delays_s, jobs
        What the sensitivity table varies, one at a time [s]; further options of `cluster_jobs`.

    Raises
    ------
    ImpossibleScheduleError
        A schedule breaks a rule of the validator.
    """
    where = pooled(cluster(cluster_name))
    found = cluster_jobs(table, where, published_profile(cells["fig11"], cells["fig12"]), **jobs)
    base = _Setting("default", "", interval_s, restart_delay_s, charge)
    settings = [base, *_varied(base, intervals_s, restart_delays_s)]
    cases = [
        (setting, Case(_scenario(found, where, setting, is_gang=is_gang), name, keeps_tables=setting is base))
        for setting in settings
        for is_gang, names in ((True, gang_policies), (False, elastic_policies))
        for name in names
    ]
    runs = run_all([case for _, case in cases], n_processes)
    first_s = min(job.submit_time_s for job in found.jobs)
    rows = [
        {"parameter": setting.parameter, "value": setting.value, "policy": run.policy}
        | _measures(run, first_s)
        for (setting, _), run in zip(cases, runs, strict=True)
    ]
    own = [run for (setting, _), run in zip(cases, runs, strict=True) if setting is base]
    return {
        "fig14": _fig14(own, first_s, interval_s, cells["fig14"]),
        "fig14_jobs": _fig14_jobs(own, set(found.clamped)),
        "fig15": _fig15(own, where, interval_s, cells["fig15"]),
        "sensitivity": SENSITIVITY.validate(pd.DataFrame(rows), where="sensitivity"),
    }


def _varied(
    base: _Setting, intervals_s: Sequence[float], restart_delays_s: Sequence[float]
) -> list[_Setting]:
    other: Charge = "first_only" if base.charge == "every" else "every"
    rounds = [replace(base, parameter="interval_s", value=f"{s:g}", interval_s=s) for s in intervals_s]
    delays = [
        replace(base, parameter="restart_delay_s", value=f"{s:g}", restart_delay_s=s)
        for s in restart_delays_s
    ]
    return [*rounds, *delays, replace(base, parameter="charge", value=other, charge=other)]


def _scenario(found: ClusterJobs, where: ClusterSpec, setting: _Setting, *, is_gang: bool) -> Scenario:
    delays = RestartDelays.constant if setting.charge == "every" else RestartDelays.first_start_only
    name = f"{setting.parameter} {setting.value}".strip()
    catalogue = found.catalogue.gangs() if is_gang else found.catalogue
    cost = delays(setting.restart_delay_s)
    return Scenario(name, found.jobs, where, catalogue, cost, setting.interval_s)


def _measures(run: Run, first_s: float) -> dict[str, float]:
    """Return the metrics of a run, of whose jobs the first is submitted at ``first_s`` [s]."""
    found = run.metrics
    names = ("avg_jct_s", "p50_jct_s", "p95_jct_s", "makespan_s", "reconfigurations_per_job")
    return {name: getattr(found, name) for name in names} | {
        "makespan_from_zero_s": first_s + found.makespan_s
    }


def _fig14(runs: Sequence[Run], first_s: float, interval_s: float, cells: pd.DataFrame) -> pd.DataFrame:
    table = pd.DataFrame(
        {"policy": run.policy, "jobs": run.metrics.n_jobs} | _measures(run, first_s) for run in runs
    )
    ends_s = table["makespan_from_zero_s"]
    table["makespan_round_s"] = [math.ceil(end_s / interval_s) * interval_s for end_s in ends_s]
    base = table.set_index("policy")
    table["jct_gain"] = base["avg_jct_s"].get(CONCURRENT, math.nan) / table["avg_jct_s"]
    table["makespan_gain"] = base["makespan_from_zero_s"].get(CONCURRENT, math.nan) / ends_s
    table["jct_gain_to_serial"] = base["avg_jct_s"].get(SERIAL, math.nan) / table["avg_jct_s"]
    printed = cells.drop(columns="source")
    return FIG14.validate(table.merge(printed, on="policy", how="left"), where="fig14")


def _fig14_jobs(runs: Sequence[Run], clamped: set[str]) -> pd.DataFrame:
    parts = []
    for run in runs:
        jobs = run.result.outcomes
        jct_s = jobs["finish_time_s"] - jobs["submit_time_s"]
        is_clamped = jobs["job_id"].isin(clamped)
        parts.append(jobs.assign(policy=run.policy, jct_s=jct_s, is_clamped=is_clamped)[FIG14_JOBS.names])
    return FIG14_JOBS.validate(pd.concat(parts, ignore_index=True), where="fig14_jobs")


def _fig15(runs: Sequence[Run], where: ClusterSpec, interval_s: float, cells: pd.DataFrame) -> pd.DataFrame:
    last_s = cells.groupby("policy")["time_s"].max()
    held = pd.concat(
        _held(run, where, interval_s, float(last_s.get(run.policy, 0.0))).assign(policy=run.policy)
        for run in runs
    )
    printed = cells.drop(columns="source")
    return FIG15.validate(held.merge(printed, on=["policy", "time_s"], how="left"), where="fig15")


def _held(run: Run, where: ClusterSpec, interval_s: float, last_s: float) -> pd.DataFrame:
    """Return the GPUs of each type held after each round, to the last completion and ``last_s`` [s]."""
    types = [node.gpu_type.partition("-")[0] for node in where.nodes]
    changes = []
    before: dict[str, dict[str, int]] = {}
    events = run.result.events
    for time_s, job_id, nodes in zip(events["time_s"], events["job_id"], events["nodes"], strict=True):
        shares = (share.split(":") for share in nodes.split())
        now = {types[int(node)]: int(count) for node, count in shares}
        old = before.get(job_id, {})
        before[job_id] = now
        changes.append({name: now.get(name, 0) - old.get(name, 0) for name in types} | {"time_s": time_s})
    totals = pd.DataFrame(changes).groupby("time_s").sum().cumsum()
    n_rounds = math.ceil(max(float(totals.index.max()), last_s) / interval_s)
    rounds = pd.Index([interval_s * number for number in range(n_rounds + 1)], name="time_s")
    held = totals.reindex(rounds, method="ffill").fillna(0).astype("int64")
    return held.assign(gpus=held.sum(axis=1)).reset_index()
