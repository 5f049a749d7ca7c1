"""All metrics of one simulation in one record."""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from makespan.hardware import ClusterSpec
from makespan.metrics._devices import gpu_allocation_ratio
from makespan.metrics._jobs import job_metrics, sla_attainment

__all__ = ["Summary", "summary"]


@dataclass(frozen=True, slots=True)
class Summary:
    """Metrics of one simulation; NaN where there is nothing to average.

    Parameters
    ----------
    n_jobs
        Jobs that finished.
    avg_jct_s, p50_jct_s, p95_jct_s, p99_jct_s
        Completion time: mean and percentiles, interpolated linearly [s].
    makespan_s
        Last finish minus first submission [s].
    avg_queueing_delay_s
        Mean of first start minus submission [s].
    avg_waiting_time_s
        Mean time without devices, also after a suspension [s].
    avg_slowdown
        Mean completion time over duration alone.
    avg_finish_time_fairness, max_finish_time_fairness
        Mean and worst; see `job_metrics` for the share.
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
    """Return all metrics of one simulation.

    Parameters
    ----------
    events, outcomes
        Its tables.
    cluster
        Its nodes.
    restart_delay_s, extra_steps
        Its options.

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
