"""From options to what a simulation needs: cluster, jobs and catalogue."""

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from makespan.cli._foreign import FOREIGN, read_foreign
from makespan.cli._options import CALIBRATION, NAIVE_JOBS, TRACE_CPU_THREADS, WORKLOADS
from makespan.errors import InputError, MissingDataError, unknown_name
from makespan.hardware import ClusterSpec, NodeSpec, cluster, homogeneous
from makespan.perf import environment_names
from makespan.sim import Catalogue
from makespan.studies import Scenario, TableCatalogue
from makespan.throughput import (
    EmulatedSource,
    MeasuredSource,
    PublishedSource,
    ReferenceTimes,
    ThroughputSource,
)
from makespan.traces import (
    JobTrace,
    WorkloadMapping,
    WorkloadStatistics,
    check_jobs,
    generate_jobs,
    map_requests,
    read_jobs,
    read_morphling_jobs,
    statistics,
)
from makespan.traces import Request as StatedRequest
from makespan.units import HOUR
from makespan.workloads import JobSpec

__all__ = ["Request", "machines", "prepare"]

_FORM = "extended"
_NAIVE_SPAN_S = (
    5400.0  # about that of the authors' list; in the hours of the Base workload ten jobs never meet
)
_NOISE_SEED, _NOISE_SCALE = 0, 1.0
_PUBLISHED_LISTS = ("morphling/workloads", "workloads", "simulator/workloads")
_PUBLISHED_NAMES = {name: f"{name}.csv" if name == "naive" else f"workload-{name}.csv" for name in WORKLOADS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the command line asks for; see the options of the same names."""

    workload: str
    source: str
    file_format: str = "auto"
    n_jobs: int | None = None
    published_dir: Path | None = None
    measured_dir: Path | None = None
    tasks: Path | None = None
    epoch_time_s: float | None = None
    cluster_name: str = "a800-64"
    nodes: int | None = None
    gpus_per_node: int | None = None
    seed: int = 1
    predictions: str = "exact"
    restart_delay_s: float = 78.0
    interval_s: float | None = None


def prepare(request: Request) -> Scenario:
    """Read or generate the jobs, load throughput, and check that every job can run.

    Raises
    ------
    MakespanError
        A name is unknown, a file is missing or broken, or a job can never run; says which.
    """
    where = machines(request.cluster_name, request.nodes, request.gpus_per_node)
    source = _source(request, where)
    with _reports_printed_once():
        trace, times = _jobs(request, source, where)
    jobs = trace.jobs if request.n_jobs is None else trace.jobs[: request.n_jobs]
    check_jobs(jobs, where, times, trace.report.where)
    used = {key: times.tables[key] for key in sorted({job.workload for job in jobs})}
    catalogue = _catalogue(request, used, jobs, where.nodes[0])
    name = request.workload if request.workload in WORKLOADS else Path(request.workload).stem
    return Scenario(
        name,
        jobs,
        where,
        catalogue,
        request.restart_delay_s,
        request.interval_s,
        source=source.name,
        predictions=request.predictions,
        report=trace.report.text,
    )


def machines(name: str, n_nodes: int | None, gpus_per_node: int | None) -> ClusterSpec:
    """Return a cluster of the catalogue, with another number of nodes or of devices in each.

    CPU threads, memory and network cards of a node follow its devices in proportion.

    Raises
    ------
    UnknownNameError
        The catalogue has no such cluster.
    """
    base = cluster(name)
    if n_nodes is None and gpus_per_node is None:
        return base
    node, count = base.nodes[0], n_nodes or base.n_nodes
    if gpus_per_node is not None and gpus_per_node != node.n_gpus:
        node = replace(
            node,
            n_gpus=gpus_per_node,
            n_nics=math.ceil(gpus_per_node / node.gpus_per_nic),
            cpu_threads=node.cpu_threads_per_gpu * gpus_per_node,
            host_memory_bytes=node.host_memory_bytes * gpus_per_node / node.n_gpus,
        )
    return homogeneous(node, count, base.network, name=f"{name} as {count} x {node.n_gpus}")


def _source(request: Request, where: ClusterSpec) -> ThroughputSource:
    if request.source == "emulated":
        return EmulatedSource(_emulated(request, where), CALIBRATION, _NOISE_SEED, _NOISE_SCALE)
    if request.source == "published":
        return PublishedSource(_published(request), TRACE_CPU_THREADS)
    if request.measured_dir is None:
        raise MissingDataError("source measured: give the directory with the tables by --measured-dir")
    return MeasuredSource(request.measured_dir)


def _emulated(request: Request, where: ClusterSpec) -> ClusterSpec:
    """Return what is emulated: no fewer nodes than in the catalogue, because jobs are drawn by its times.

    Noise follows the name of a cluster, so with the same kind of node the name stays too.
    """
    base = cluster(request.cluster_name)
    whole = machines(request.cluster_name, max(where.n_nodes, base.n_nodes), request.gpus_per_node)
    return replace(whole, name=base.name) if whole.nodes[0] == base.nodes[0] else whole


def _published(request: Request) -> Path:
    if request.published_dir is None:
        raise MissingDataError(
            "source published: give a directory with the published files by --published-dir or by the "
            "environment variable MAKESPAN_PUBLISHED_DIR"
        )
    if not request.published_dir.is_dir():
        raise MissingDataError(f"{request.published_dir}: no such directory with the published files")
    return request.published_dir


def _jobs(request: Request, source: ThroughputSource, where: ClusterSpec) -> tuple[JobTrace, ReferenceTimes]:
    """Return the jobs and the throughput of what they train."""
    if request.file_format in FOREIGN:
        found = read_foreign(request.file_format, Path(request.workload), request.tasks, request.epoch_time_s)
        times = _times(source, (offer.workload for offer in statistics().requests))
        mapping = WorkloadMapping.like_base(request.seed, max_gpus=where.n_gpus)
        return map_requests(found, mapping, times), times
    path = _file(request)
    if path is not None:
        trace = read_morphling_jobs(path) if request.file_format == "morphling" else read_jobs(path)
        return trace, _times(source, (job.workload for job in trace.jobs))
    times = _times(source, (offer.workload for offer in statistics().requests))
    return _generated(request, times, where), times


def _generated(request: Request, times: ReferenceTimes, where: ClusterSpec) -> JobTrace:
    """Generate the workload of requests that can run here; say which cannot."""
    known = statistics()
    possible = tuple(offer for offer in known.requests if _can_run(offer, times, where))
    if not possible:
        raise InputError(f"workload {request.workload!r}: nothing it asks for can run on {where.name!r}")
    stats = replace(known, requests=possible)
    variant, count = request.workload, request.n_jobs or known.n_jobs
    if variant == "naive":
        hours = math.ceil(_NAIVE_SPAN_S / HOUR)
        stats = replace(stats, span_s=_NAIVE_SPAN_S, arrivals_per_hour=(1,) * hours)
        variant, count = "base", request.n_jobs or NAIVE_JOBS
    trace = generate_jobs(variant, count, request.seed, times, stats=stats)
    where_from = f"generated {request.workload} workload, seed {request.seed}{_without(known, possible)}"
    return replace(trace, report=replace(trace.report, where=where_from))


def _without(known: WorkloadStatistics, possible: Sequence[StatedRequest]) -> str:
    """Say which requests are left out, by workload."""
    absent: dict[str, set[int]] = {}
    for offer in known.requests:
        if offer not in possible:
            absent.setdefault(offer.workload, set()).add(offer.n_gpus)
    if not absent:
        return ""
    texts = (f"{key} on {', '.join(map(str, sorted(counts)))}" for key, counts in absent.items())
    return f", without what cannot run here ({'; '.join(texts)} GPUs)"


def _can_run(offer: StatedRequest, times: ReferenceTimes, where: ClusterSpec) -> bool:
    return offer.n_gpus <= where.n_gpus and offer.n_gpus in times.gpu_counts(offer.workload)


def _file(request: Request) -> Path | None:
    """Return the job list that is meant, or None if the workload is to be generated."""
    name = request.workload
    if name not in WORKLOADS:
        if Path(name).is_file() or Path(name).suffix or "/" in name:
            return Path(name)
        raise unknown_name("workload or file", name, WORKLOADS)
    if request.source != "published":
        return None
    root = _published(request)
    candidates = [root / layout / _PUBLISHED_NAMES[name] for layout in _PUBLISHED_LISTS]
    return next((path for path in candidates if path.is_file()), candidates[0])


def _times(source: ThroughputSource, keys: Iterable[str]) -> ReferenceTimes:
    return ReferenceTimes({key: source.load(key) for key in dict.fromkeys(keys)})


def _catalogue(
    request: Request, tables: Mapping[str, pd.DataFrame], jobs: Sequence[JobSpec], node: NodeSpec
) -> Catalogue:
    """Return what jobs may run as, predicted by a fitted model or by the truth."""
    if request.predictions == "exact":
        return TableCatalogue.from_tables(tables, node=node)
    if request.cluster_name not in environment_names():
        raise InputError(
            f"--predictions fitted: no constants of the performance model for cluster "
            f"{request.cluster_name!r}; accepted: {', '.join(environment_names())}, or --predictions exact"
        )
    from makespan.papers.morphling import predicted_catalogue, predictions

    knowledge = predictions(tables, jobs, request.cluster_name, _FORM, "fitted")
    return predicted_catalogue(tables, knowledge, node)


@contextmanager
def _reports_printed_once() -> Iterator[None]:
    """Keep the readers' reports out of the log while a block runs; the command prints them itself."""
    log = logging.getLogger("makespan.traces._cells")
    handler = logging.NullHandler()
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
