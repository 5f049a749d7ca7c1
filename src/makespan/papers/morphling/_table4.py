"""Table 4: every policy on every job list, at several restart delays; and a short list to start with."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import pandas as pd

from makespan.metrics import allocation_by_family, job_metrics, table4, table4_row
from makespan.papers.morphling._bench import Bench, Run, Setting, run_all
from makespan.papers.morphling._names import NAIVE
from makespan.tables import ALLOCATION, EVENTS, JCT, TABLE4

__all__ = ["Table4", "compare_policies", "getting_started"]

_REPEATED = ("morphling", "morphling-work")


@dataclass(frozen=True, slots=True)
class Table4:
    """Table 4 and what is drawn from the same simulations.

    Parameters
    ----------
    table
        Schema `makespan.tables.TABLE4`, then further columns of metrics.
    jct
        Schema `makespan.tables.JCT`: every job at the first restart delay.
    allocation
        Schema `makespan.tables.ALLOCATION`: devices by plan family over time on the first list.
    schedule
        Schema `makespan.tables.EVENTS`: the schedule of one policy on the first list.
    """

    table: pd.DataFrame
    jct: pd.DataFrame
    allocation: pd.DataFrame
    schedule: pd.DataFrame


def compare_policies(
    bench: Bench,
    traces: Sequence[str],
    policies: Sequence[str],
    delays_s: Sequence[float],
    interval_s: float,
    shown: Collection[str],
) -> Table4:
    """Run every policy on every job list at every restart delay.

    Parameters
    ----------
    bench
        Cluster, catalogue and job lists.
    traces, policies
        Names.
    delays_s
        Restart delays [s]; the first one is shown in figures.
    interval_s
        Length of a round [s].
    shown
        Policies whose allocation over time is kept; of the first one also the schedule.

    Raises
    ------
    ImpossibleScheduleError
        A schedule breaks a rule of the validator.
    """
    settings = [
        Setting(
            trace, name, delay_s, interval_s,
            keeps_tables=delay_s == delays_s[0],
            repeats=int(name in _REPEATED and delay_s == delays_s[0]),
        )
        for trace in traces
        for delay_s in delays_s
        for name in policies
    ]  # fmt: skip
    runs = run_all(settings, bench)
    drawn = [run for run in runs if run.setting.keeps_tables]
    first = {run.setting.policy: run for run in drawn if run.setting.trace == traces[0]}
    chosen = [name for name in shown if name in first]
    return Table4(
        table=_table(runs),
        jct=JCT.validate(pd.concat([_completion_times(run, bench) for run in drawn]), where="jct"),
        allocation=_allocation([first[name] for name in chosen]),
        schedule=EVENTS.validate(first[chosen[0]].events, where="schedule"),
    )


def getting_started(
    bench: Bench, policies: Sequence[str], delays_s: Sequence[float], interval_s: float
) -> pd.DataFrame:
    """Run every policy on the short job list; schema `makespan.tables.TABLE4`."""
    return _table(
        run_all(
            [Setting(NAIVE, name, delay_s, interval_s) for delay_s in delays_s for name in policies], bench
        )
    )


def _table(runs: Iterable[Run]) -> pd.DataFrame:
    rows = [
        table4_row(
            run.setting.trace,
            run.setting.policy,
            run.found,
            restart_delay_s=run.setting.restart_delay_s,
            interval_s=run.setting.interval_s,
            wall_s=run.wall_s,
        )
        | {
            "n_decisions": run.n_decisions,
            "n_repeats": run.setting.repeats,
            "n_identical": run.n_identical,
            "decision_wall_s": run.decision_wall_s,
        }
        for run in runs
    ]
    return TABLE4.validate(table4(rows), where="table4")


def _completion_times(run: Run, bench: Bench) -> pd.DataFrame:
    jobs = job_metrics(run.outcomes, n_gpus=bench.cluster.n_gpus, restart_delay_s=run.setting.restart_delay_s)
    return pd.DataFrame(
        {
            "trace": run.setting.trace,
            "policy": run.setting.policy,
            "job_id": jobs["job_id"],
            "jct_s": jobs["jct_s"],
        }
    )


def _allocation(runs: Iterable[Run]) -> pd.DataFrame:
    parts = []
    for run in runs:
        wide = allocation_by_family(run.events)
        wide["time_s"] -= wide["time_s"].iloc[0]
        long = wide.melt("time_s", var_name="plan_family", value_name="gpus")
        parts.append(long.assign(policy=run.setting.policy))
    return ALLOCATION.validate(pd.concat(parts, ignore_index=True), where="allocation")
