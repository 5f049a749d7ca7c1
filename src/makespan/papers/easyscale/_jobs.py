"""From a job list of EasyScale to what is simulated: cluster, jobs, and what they may run as."""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from makespan.easyscale._catalogue import PLAN, JobKind, PlannedCatalogue
from makespan.errors import InputError, TraceError, unknown_name
from makespan.hardware import ClusterSpec, NodeSpec
from makespan.papers.easyscale._profile import Profile
from makespan.throughput import Dataset, find_dataset, verify
from makespan.traces import EASYSCALE_JOBS, read_easyscale_jobs
from makespan.workloads import JobSpec

__all__ = ["ClusterJobs", "cluster_jobs", "pooled", "published_jobs"]

_LOG = logging.getLogger(__name__)
_DATASET = "easyscale-workload"

Infeasible = Literal["clamp", "reject"]


@dataclass(frozen=True, slots=True)
class ClusterJobs:
    """What is simulated.

    Parameters
    ----------
    jobs, catalogue
        Jobs in order of submission, and what they may run as.
    clamped, rejected
        Names of the jobs whose gang is larger than the cluster has GPUs of its type: those that run on all
        of them instead, and those that are left out.
    """

    jobs: tuple[JobSpec, ...]
    catalogue: PlannedCatalogue
    clamped: tuple[str, ...]
    rejected: tuple[str, ...]


def published_jobs(
    directory: str | Path, register: Iterable[Dataset], dedup: Literal["rename", "artifact"]
) -> pd.DataFrame:
    """Read the authors' job list; schema `makespan.traces.EASYSCALE_JOBS`.

    Parameters
    ----------
    directory, register
        A directory with the published files, and their checksums.
    dedup
        What becomes of names that occur again, as for `makespan.traces.read_easyscale_jobs`.

    Raises
    ------
    MissingDataError, ChecksumError
        The file is not there or not the registered one.
    """
    table, report = read_easyscale_jobs(verify(find_dataset(register, _DATASET), directory), dedup)
    _LOG.info("%s", report.text)
    return table


def pooled(cluster: ClusterSpec) -> ClusterSpec:
    """Return a cluster with one node a type of device, because the layout of nodes plays no part here."""
    groups: dict[str, list[NodeSpec]] = {}
    for node in cluster.nodes:
        groups.setdefault(node.gpu_type, []).append(node)
    nodes = tuple(
        replace(
            group[0],
            name=f"{gpu_type} pool",
            n_gpus=sum(node.n_gpus for node in group),
            n_nics=sum(node.n_nics for node in group),
            cpu_threads=sum(node.cpu_threads for node in group),
            host_memory_bytes=sum(node.host_memory_bytes for node in group),
        )
        for gpu_type, group in groups.items()
    )
    return replace(cluster, name=f"{cluster.name}, one pool a type", nodes=nodes)


def cluster_jobs(
    table: pd.DataFrame,
    cluster: ClusterSpec,
    profile: Profile,
    samples_per_epoch: Mapping[str, float],
    *,
    infeasible: Infeasible = "clamp",
    d2_penalty: bool = False,
) -> ClusterJobs:
    """Return jobs and catalogue for a job list.

    Parameters
    ----------
    table, cluster
        A list of schema `makespan.traces.EASYSCALE_JOBS`, and the cluster, see `pooled`.
    profile, samples_per_epoch
        Times of micro-batches, and samples of an epoch by model, a real number.
    infeasible
        What becomes of a gang that is larger than the cluster has GPUs of its home type: it runs on all
        of them, its logical workers sharing GPUs (``clamp``), or it is left out (``reject``).
    d2_penalty
        Whether jobs on several types at once take longer, by the printed cost of D2.

    Raises
    ------
    InputError, TraceError, UnknownNameError
        The cluster lacks a type, no job is left, or a model is unknown.
    """
    checked = EASYSCALE_JOBS.validate(table, where="job list")
    available = dict.fromkeys(cluster.gpu_types, 0)
    for node in cluster.nodes:
        available[node.gpu_type] += node.n_gpus
    kinds: dict[str, JobKind] = {}
    jobs: list[JobSpec] = []
    too_large: list[str] = []
    for row in checked.to_dict("records"):
        kind = _kind(row, tuple(available), profile, samples_per_epoch, d2_penalty)
        if kind.n_logical_workers > available[kind.home]:
            too_large.append(str(row["job_id"]))
            if infeasible == "reject":
                continue
        kinds[kind.key] = kind
        name, submit_s = str(row["job_id"]), float(row["submit_time_s"])
        jobs.append(JobSpec(name, submit_s, kind.key, kind.n_logical_workers, 0, PLAN, kind.steps))
    if not jobs:
        raise TraceError("job list: no job; accepted: at least one whose GPUs the cluster has")
    if too_large:
        _LOG.warning("gangs larger than the cluster, %s: %s", infeasible, ", ".join(too_large))
    lists = (tuple(too_large), ()) if infeasible == "clamp" else ((), tuple(too_large))
    return ClusterJobs(tuple(jobs), PlannedCatalogue(kinds.values()), *lists)


def _kind(
    row: Mapping[Any, Any],
    types: tuple[str, ...],
    profile: Profile,
    samples_per_epoch: Mapping[str, float],
    d2_penalty: bool,
) -> JobKind:
    model, home = str(row["workload"]), _full_name(str(row["home_gpu"]), types)
    n_samples, n_workers = int(row["micro_batch_size"]), int(row["max_parallelism"])
    if model not in samples_per_epoch:
        raise unknown_name("model with a number of samples an epoch", model, samples_per_epoch)
    epochs, is_mixed = float(row["epochs"]), bool(row["is_heterogeneous"])
    allowed = types if is_mixed else (home,)

    def times(under_d2: bool) -> tuple[tuple[str, float], ...]:
        return tuple(
            (name, profile.micro_batch_s(model, _short_name(name), n_samples, under_d2=under_d2))
            for name in sorted(allowed)
        )

    return JobKind(
        key=f"{model} {n_workers}x{n_samples}, {epochs:g} epochs, {home}{' or any' if is_mixed else ''}",
        n_logical_workers=n_workers,
        home=home,
        micro_batch_s=times(under_d2=False),
        mini_batches=samples_per_epoch[model] * epochs / (n_samples * n_workers),
        mixed_micro_batch_s=times(under_d2=True) if d2_penalty and is_mixed else (),
    )


def _short_name(gpu_type: str) -> str:
    """Return a type of GPU as the paper writes it, without its memory."""
    return gpu_type.partition("-")[0]


def _full_name(short: str, types: tuple[str, ...]) -> str:
    found = [name for name in types if _short_name(name) == short]
    if len(found) != 1:
        raise InputError(
            f"type of GPU {short!r} of a job list; accepted: {', '.join(_short_name(name) for name in types)}"
        )
    return found[0]
