"""What must hold before a simulation starts."""

import math
from collections.abc import Sequence

from makespan.errors import InputError
from makespan.hardware import ClusterSpec
from makespan.sim._catalogue import Catalogue
from makespan.sim._policy import Policy
from makespan.workloads import JobSpec

__all__ = ["check_jobs", "check_options", "round_length"]


def check_jobs(
    jobs: Sequence[JobSpec], cluster: ClusterSpec, catalogue: Catalogue, where: str = "trace"
) -> None:
    """Check that every job can be run as requested on the empty cluster.

    Parameters
    ----------
    jobs
        The trace.
    cluster
        Where it runs.
    catalogue
        What fits there, see `Catalogue.on`.
    where
        File or producer, for messages.

    Raises
    ------
    InputError
        A name occurs twice, the catalogue knows nothing that stands for a request, or a job asks for
        more GPUs or CPU threads than there are; names the row (the first is 1) and the job.
    UnknownNameError
        The catalogue lacks a workload.
    """
    rows: dict[str, int] = {}
    known: set[tuple[str, str, int, int]] = set()
    for row, job in enumerate(jobs, start=1):
        if job.job_id in rows:
            raise InputError(
                f"{where}: row {row}: job name {job.job_id!r} is that of row {rows[job.job_id]}; accepted: "
                "one row for each name"
            )
        rows[job.job_id] = row
        key = (job.workload, job.plan, job.n_gpus, job.n_cpus)
        if key not in known:
            _check_request(f"{where}: row {row}, job {job.job_id!r}", job, cluster, catalogue)
            known.add(key)


def _check_request(where: str, job: JobSpec, cluster: ClusterSpec, catalogue: Catalogue) -> None:
    if job.n_gpus > cluster.n_gpus:
        raise InputError(
            f"{where}: asks for {job.n_gpus} GPUs; accepted: at most the {cluster.n_gpus} of cluster "
            f"{cluster.name!r}, or it would wait for ever"
        )
    threads = sum(node.cpu_threads for node in cluster.nodes)
    if job.n_cpus > threads:
        raise InputError(
            f"{where}: asks for {job.n_cpus} CPU threads; accepted: at most the {threads} of {cluster.name!r}"
        )
    try:
        catalogue.requested(job)
    except InputError as error:
        raise type(error)(f"{where}, on cluster {cluster.name!r}: {error}") from error


def check_options(checkpoint_interval_s: float | None, extra_steps: float) -> None:
    """Refuse an interval that is not positive, and work that is negative or not finite."""
    if checkpoint_interval_s is not None and not checkpoint_interval_s > 0:
        raise InputError(f"checkpoint_interval_s is {checkpoint_interval_s!r}; accepted: positive, or None")
    if not (math.isfinite(extra_steps) and extra_steps >= 0):
        raise InputError(f"extra_steps is {extra_steps!r}; accepted: a finite number >= 0")


def round_length(policy: Policy, interval_s: float | None) -> float | None:
    """Return the length of a round [s], or None if the policy is asked after each event.

    Parameters
    ----------
    policy
        Its own length is the default.
    interval_s
        What the experiment wants: None for the default, 0 for no rounds.

    Raises
    ------
    InputError
        The length is negative or not finite.
    """
    length_s = policy.interval_s if interval_s is None else interval_s
    if length_s is not None and not (math.isfinite(length_s) and length_s >= 0):
        raise InputError(f"interval_s is {length_s!r}; accepted: a finite time in s, or 0 for no rounds")
    return length_s or None
