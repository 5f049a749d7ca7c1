"""Checks of a job trace against the cluster and the throughput source, before anything runs."""

from collections.abc import Sequence

from makespan.errors import MakespanError, TraceError, cell_error
from makespan.hardware import ClusterSpec
from makespan.throughput import ReferenceTimes
from makespan.workloads import JobSpec

__all__ = ["check_jobs"]


def check_jobs(
    jobs: Sequence[JobSpec], cluster: ClusterSpec, times: ReferenceTimes, where: str = "jobs"
) -> None:
    """Check that every job of a trace can run.

    Parameters
    ----------
    jobs
        The trace.
    cluster
        Where it is to run.
    times
        Throughput of the source.
    where
        File or producer, for messages.

    Raises
    ------
    TraceError
        There is no job; a name occurs twice; a job asks for more GPUs or CPU threads than the
        cluster has; or the source has no throughput for a request. Names row, column and the
        accepted values.
    """
    if not jobs:
        raise TraceError(f"{where}: no job; accepted: at least one")
    threads = sum(node.cpu_threads for node in cluster.nodes)
    first: dict[str, int] = {}
    known: set[tuple[str, int, str]] = set()
    for row, job in enumerate(jobs, 1):
        if job.job_id in first:
            accepted = f"names that occur once; row {first[job.job_id]} has the same"
            raise cell_error(where, row, "job_id", job.job_id, accepted)
        first[job.job_id] = row
        if job.n_gpus > cluster.n_gpus:
            raise cell_error(
                where, row, "n_gpus", job.n_gpus, f"up to {cluster.n_gpus}, all of {cluster.name}"
            )
        if job.n_cpus > threads:
            raise cell_error(where, row, "n_cpus", job.n_cpus, f"up to {threads}, all of {cluster.name}")
        request = (job.workload, job.n_gpus, job.plan)
        if request not in known:
            _check_throughput(row, job, times, where)
            known.add(request)


def _check_throughput(row: int, job: JobSpec, times: ReferenceTimes, where: str) -> None:
    try:
        times.requested(job.workload, job.n_gpus, job.plan)
    except MakespanError as error:
        if job.workload not in times.tables:
            accepted = ", ".join(times.workload_keys()) or "none"
            raise cell_error(
                where, row, "workload", job.workload, f"workloads with throughput: {accepted}"
            ) from error
        raise cell_error(where, row, "n_gpus", job.n_gpus, f"a request with throughput ({error})") from error
