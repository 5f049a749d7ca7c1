"""Metrics of each job, and whether guarantees were kept."""

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from makespan.metrics._steps import integral
from makespan.sim import EventKind
from makespan.tables import EVENTS, OUTCOMES

__all__ = ["guarantee_breaches", "jct_distribution", "job_metrics", "sla_attainment"]

_TOLERANCE = 1e-9  # of rounding, relative


def job_metrics(
    outcomes: pd.DataFrame, *, n_gpus: int, restart_delay_s: float, extra_steps: int = 1
) -> pd.DataFrame:
    """Return the metrics of each job, one row a job in the order of the outcomes.

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
    n_gpus
        Devices of the cluster.
    restart_delay_s
        Restart delay of the simulation [s].
    extra_steps
        Steps that each job ran beyond its own.

    Returns
    -------
    pandas.DataFrame
        Of schema `makespan.tables.JOB_METRICS`.

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


def jct_distribution(outcomes: pd.DataFrame) -> pd.DataFrame:
    """Return the empirical distribution of completion times.

    Returns
    -------
    pandas.DataFrame
        ``jct_s`` ascending [s], and ``fraction`` of the jobs that took at most as long.
    """
    jct_s = np.sort((outcomes["finish_time_s"] - outcomes["submit_time_s"]).to_numpy(dtype=float))
    return pd.DataFrame({"jct_s": jct_s, "fraction": np.arange(1, len(jct_s) + 1) / max(len(jct_s), 1)})


def guarantee_breaches(events: pd.DataFrame, outcomes: pd.DataFrame) -> pd.DataFrame:
    """Return the events at which a guaranteed job was wronged.

    A guaranteed job is wronged if, once started, it loses its devices by decision, or is given a
    configuration whose step takes longer than the requested one. Devices lost to the failure of
    a node are nobody's decision and do not count, nor does the restart delay of a change to
    something as fast or faster.

    Parameters
    ----------
    events
        Table of schema `makespan.tables.EVENTS`.
    outcomes
        Table of schema `makespan.tables.OUTCOMES`, for guarantees and reference times.

    Returns
    -------
    pandas.DataFrame
        Rows of the events with the further column ``reference_iter_time_s``.

    Raises
    ------
    TraceError
        A table does not follow its schema.
    """
    table = EVENTS.validate(events, where="events")
    jobs = OUTCOMES.validate(outcomes, where="outcomes")
    references = jobs.loc[jobs["is_guaranteed"], ["job_id", "reference_iter_time_s"]]
    rows = table.merge(references, on="job_id", how="inner").sort_values("seq", ignore_index=True)
    limit_s = rows["reference_iter_time_s"] * (1 + _TOLERANCE)
    given = rows["kind"].isin([EventKind.STARTED.value, EventKind.RECONFIGURED.value])
    slower = given & (rows["iter_time_s"] > limit_s)
    return rows[slower | (rows["kind"] == EventKind.SUSPENDED.value)].reset_index(drop=True)


def sla_attainment(events: pd.DataFrame, outcomes: pd.DataFrame) -> float:
    """Return the share of guaranteed jobs that were never wronged; NaN if there are none.

    Raises
    ------
    TraceError
        A table does not follow its schema.
    """
    wronged = set(guarantee_breaches(events, outcomes)["job_id"])
    guaranteed = outcomes.loc[outcomes["is_guaranteed"].astype(bool), "job_id"]
    if guaranteed.empty:
        return float("nan")
    return 1.0 - len(wronged) / len(guaranteed)


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
