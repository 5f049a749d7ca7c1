"""Metrics of each job, whether guarantees were kept, and all metrics of one simulation in one record."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from makespan.hardware import ClusterSpec
from makespan.metrics._devices import gpu_allocation_ratio
from makespan.metrics._steps import integral
from makespan.sim import EventKind
from makespan.tables import EVENTS, OUTCOMES

__all__ = ["Summary", "guarantee_breaches", "job_metrics", "sla_attainment", "summary"]

_TOLERANCE = 1e-9  # of rounding, relative


def job_metrics(
    outcomes: pd.DataFrame, *, n_gpus: int, restart_delay_s: float, extra_steps: int = 1
) -> pd.DataFrame:
    """Return the metrics of each job, schema `makespan.tables.JOB_METRICS`, in the order of the outcomes.

    Alone, a job starts at its submission with what it asked for, so it takes one restart delay and its
    steps at the reference time.

    Finish-time fairness compares with a cluster that is split evenly and for good: the share of a job
    is the devices of the cluster over the mean number of jobs in the system during its own stay, itself
    included. With a share below its request the job would run as requested, but only for the same part
    of the time; with a larger one it runs as alone. 1 is fair, more is worse than the equal split
    (the measure of Themis, NSDI 2020, with this definition of the share).

    Parameters
    ----------
    outcomes
        Table of schema `makespan.tables.OUTCOMES`.
    n_gpus, restart_delay_s
        Devices of the cluster, and restart delay of the simulation [s].
    extra_steps
        Steps that each job ran beyond its own.

    Raises
    ------
    TraceError
        The table does not follow its schema.
    """
    table = OUTCOMES.validate(outcomes, where="outcomes")
    submit_s, finish_s = (table[name].to_numpy(dtype=float) for name in ("submit_time_s", "finish_time_s"))
    jct_s = finish_s - submit_s
    steps = table["steps"].to_numpy(dtype=float) + extra_steps
    work_s = steps * table["reference_iter_time_s"].to_numpy(dtype=float)
    alone_s = restart_delay_s + work_s
    share = n_gpus / _mean_jobs_in_system(submit_s, finish_s)
    shared_s = restart_delay_s + work_s * np.maximum(table["n_gpus"].to_numpy(dtype=float) / share, 1.0)
    return pd.DataFrame(
        {
            "job_id": table["job_id"],
            "jct_s": jct_s,
            "queueing_delay_s": table["first_start_s"].to_numpy(dtype=float) - submit_s,
            "run_alone_s": alone_s,
            "slowdown": _ratio(jct_s, alone_s),
            "finish_time_fairness": _ratio(jct_s, shared_s),
            "n_reconfigurations": table["n_restarts"].to_numpy(dtype=np.int64) + 1,
        }
    )


def guarantee_breaches(events: pd.DataFrame, outcomes: pd.DataFrame) -> pd.DataFrame:
    """Return the events at which a guaranteed job was wronged, with the column ``reference_iter_time_s``.

    A guaranteed job is wronged if, once started, it loses its devices by decision, or is given a
    configuration whose step takes longer than the requested one. Devices lost to the failure of
    a node are nobody's decision and do not count, nor does the restart delay of a change to
    something as fast or faster.

    Raises
    ------
    TraceError
        A table does not follow its schema, `makespan.tables.EVENTS` or `makespan.tables.OUTCOMES`.
    """
    table = EVENTS.validate(events, where="events")
    jobs = OUTCOMES.validate(outcomes, where="outcomes")
    references = jobs.loc[jobs["is_guaranteed"], ["job_id", "reference_iter_time_s"]]
    rows = table.merge(references, on="job_id", how="inner").sort_values("seq", ignore_index=True)
    limit_s = rows["reference_iter_time_s"] * (1 + _TOLERANCE)
    changes = EventKind.STARTED, EventKind.RECONFIGURED, EventKind.SHARING
    given = rows["kind"].isin([kind.value for kind in changes])
    slower = given & (rows["iter_time_s"] > limit_s)
    return rows[slower | (rows["kind"] == EventKind.SUSPENDED.value)].reset_index(drop=True)


def sla_attainment(events: pd.DataFrame, outcomes: pd.DataFrame) -> float:
    """Return the share of guaranteed jobs that were never wronged; NaN if there are none."""
    wronged = set(guarantee_breaches(events, outcomes)["job_id"])
    n_guaranteed = int(outcomes["is_guaranteed"].astype(bool).sum())
    return 1.0 - len(wronged) / n_guaranteed if n_guaranteed else float("nan")


def _ratio(value: NDArray[np.float64], base: NDArray[np.float64]) -> NDArray[np.float64]:
    """Divide; a job without any work compares as 1 if it took no time, otherwise as infinite."""
    empty = np.where(value > 0, np.inf, 1.0)
    return np.divide(value, base, out=empty, where=base > 0)


def _mean_jobs_in_system(submit_s: NDArray[np.float64], finish_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the mean number of jobs in the system over each job's stay, itself included, at least 1."""
    if len(submit_s) == 0:
        return np.ones(0)
    times_s = np.concatenate([submit_s, finish_s])
    changes = np.concatenate([np.ones(len(submit_s)), -np.ones(len(finish_s))])
    order = np.argsort(times_s, kind="stable")
    times_s, present = times_s[order], np.cumsum(changes[order])
    stay_s = finish_s - submit_s
    area = integral(times_s, present, finish_s) - integral(times_s, present, submit_s)
    mean = np.divide(area, stay_s, out=np.ones(len(stay_s)), where=stay_s > 0)
    return np.maximum(mean, 1.0)


@dataclass(frozen=True, slots=True)
class Summary:
    """Metrics of one simulation; NaN where there is nothing to average.

    Parameters
    ----------
    n_jobs, makespan_s
        Jobs that finished; last finish minus first submission [s].
    avg_jct_s, p50_jct_s, p95_jct_s, p99_jct_s
        Completion time: mean and percentiles, interpolated linearly [s].
    avg_queueing_delay_s, avg_waiting_time_s, max_waiting_time_s
        Mean of first start minus submission; mean and largest time without devices, also after a
        suspension [s].
    avg_slowdown, avg_finish_time_fairness, max_finish_time_fairness
        Mean completion time over duration alone; mean and worst fairness, see `job_metrics` for the share.
    gpu_allocation_ratio
        Device time held over device time present, from first submission to last finish.
    reconfigurations_per_job
        Restart delays begun a job, the first start included.
    sla_attainment
        Share of guaranteed jobs whose guarantee was kept strictly.
    """

    n_jobs: int
    avg_jct_s: float
    p50_jct_s: float
    p95_jct_s: float
    p99_jct_s: float
    makespan_s: float
    avg_queueing_delay_s: float
    avg_waiting_time_s: float
    max_waiting_time_s: float
    avg_slowdown: float
    avg_finish_time_fairness: float
    max_finish_time_fairness: float
    gpu_allocation_ratio: float
    reconfigurations_per_job: float
    sla_attainment: float


def summary(
    events: pd.DataFrame,
    outcomes: pd.DataFrame,
    cluster: ClusterSpec,
    *,
    restart_delay_s: float,
    extra_steps: int = 1,
) -> Summary:
    """Return all metrics of one simulation from its tables, nodes and options.

    Raises
    ------
    TraceError
        A table does not follow its schema.
    """
    jobs = job_metrics(
        outcomes, n_gpus=cluster.n_gpus, restart_delay_s=restart_delay_s, extra_steps=extra_steps
    )
    p50_s, p95_s, p99_s = _percentiles(jobs["jct_s"], (50, 95, 99))
    return Summary(
        n_jobs=len(jobs),
        avg_jct_s=float(jobs["jct_s"].mean()),
        p50_jct_s=p50_s,
        p95_jct_s=p95_s,
        p99_jct_s=p99_s,
        makespan_s=float(outcomes["finish_time_s"].max() - outcomes["submit_time_s"].min()),
        avg_queueing_delay_s=float(jobs["queueing_delay_s"].mean()),
        avg_waiting_time_s=float(outcomes["waiting_time_s"].mean()),
        max_waiting_time_s=float(outcomes["waiting_time_s"].max()),
        avg_slowdown=float(jobs["slowdown"].mean()),
        avg_finish_time_fairness=float(jobs["finish_time_fairness"].mean()),
        max_finish_time_fairness=float(jobs["finish_time_fairness"].max()),
        gpu_allocation_ratio=gpu_allocation_ratio(events, cluster),
        reconfigurations_per_job=float(jobs["n_reconfigurations"].mean()),
        sla_attainment=sla_attainment(events, outcomes),
    )


def _percentiles(values: pd.Series, which: tuple[int, ...]) -> tuple[float, ...]:
    if values.empty:
        return (float("nan"),) * len(which)
    return tuple(float(value) for value in np.percentile(values.to_numpy(dtype=float), which))
