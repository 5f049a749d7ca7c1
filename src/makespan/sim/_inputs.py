"""What must hold before a simulation starts."""

import math
from collections.abc import Iterable, Sequence

from makespan.errors import InputError
from makespan.hardware import ClusterSpec
from makespan.sim._catalogue import Catalogue
from makespan.sim._events import NodeEvent, NodeEventKind
from makespan.sim._policy import Policy
from makespan.workloads import JobSpec

__all__ = ["absent_nodes", "check_jobs", "check_times", "ordered_failures", "round_length"]


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


def check_times(restart_delay_s: float, checkpoint_interval_s: float | None, extra_steps: int) -> None:
    """Check the options of a simulation.

    Raises
    ------
    InputError
        A time is negative or not finite, or the number of steps is negative.
    """
    if not (math.isfinite(restart_delay_s) and restart_delay_s >= 0):
        raise InputError(
            f"restart_delay_s is {restart_delay_s!r}; accepted: a finite time in s, not negative"
        )
    if checkpoint_interval_s is not None and not checkpoint_interval_s > 0:
        raise InputError(f"checkpoint_interval_s is {checkpoint_interval_s!r}; accepted: positive, or None")
    if extra_steps < 0:
        raise InputError(f"extra_steps is {extra_steps!r}; accepted: a whole number >= 0")


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


def ordered_failures(failures: Iterable[NodeEvent], cluster: ClusterSpec) -> list[NodeEvent]:
    """Return node events by time, and check that they do not contradict each other.

    Raises
    ------
    InputError
        A node does not exist, fails while it is down or joins while it is up.
    """
    ordered = sorted(failures, key=lambda event: (event.time_s, event.node_id))
    is_up: dict[int, bool] = {}
    for event in ordered:
        if event.node_id >= cluster.n_nodes:
            raise InputError(
                f"node event at {event.time_s} s: node {event.node_id}; accepted: 0 to {cluster.n_nodes - 1}"
            )
        joins = event.kind is NodeEventKind.JOINED
        if is_up.get(event.node_id, not joins) == joins:
            raise InputError(
                f"node event at {event.time_s} s: node {event.node_id} {event.kind.value} while it is "
                f"{'up' if joins else 'down'}; accepted: the two kinds in turn"
            )
        is_up[event.node_id] = joins
    return ordered


def absent_nodes(ordered: Iterable[NodeEvent]) -> list[int]:
    """Return the nodes whose first event is that they join."""
    first: dict[int, NodeEventKind] = {}
    for event in ordered:
        first.setdefault(event.node_id, event.kind)
    return sorted(node for node, kind in first.items() if kind is NodeEventKind.JOINED)
