"""Assembling a scenario: cluster, throughput, jobs, and what policies know."""

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from makespan.errors import InputError, MissingDataError, TraceError, unknown_name
from makespan.hardware import ClusterSpec
from makespan.perf import environment_names
from makespan.sim import Catalogue, RestartCost, check_jobs
from makespan.studies._catalogue import TableCatalogue
from makespan.studies._clusters import Site, TypedSource, emulated_cluster, largest_pool, pools, site
from makespan.studies._formats import published_list, read_trace
from makespan.studies._job_lists import GENERATED, generated_jobs
from makespan.studies._predictions import PredictionMode, exactly, predicted_catalogue
from makespan.studies._predictions import predictions as predicted
from makespan.studies._runs import Scenario
from makespan.tables import shown_source
from makespan.throughput import (
    SOURCE_NAMES,
    EmulatedSource,
    MeasuredSource,
    PublishedSource,
    ReferenceTimes,
    ThroughputSource,
    shipped_register,
)
from makespan.traces import (
    JobTrace,
    ReadReport,
    WorkloadMapping,
    map_requests,
    statistics,
    with_load,
)
from makespan.traces import Request as StatedRequest
from makespan.workloads import JobSpec, is_in_zoo

__all__ = ["scenario"]

_CALIBRATION, _NOISE_SEED, _NOISE_SCALE = "L1", 0, 1.0
_CPU_THREADS = 12  # a GPU, where published tables do not say: an even share of the node of the testbed
_FORM = "extended"
_STDIN = "-"
ROUND_S, RESTART_DELAY_S = 60.0, 260.0  # of the simulator released with Morphling, as in the experiments
_PUBLISHED_DIR = "MAKESPAN_PUBLISHED_DIR"


def scenario(
    workload: str | Path | Sequence[JobSpec] = "naive",
    *,
    n_jobs: int | None = None,
    seed: int = 1,
    load: float = 1.0,
    source: str = "emulated",
    cluster_name: str | Path | ClusterSpec = "a800-64",
    n_nodes: int | None = None,
    gpus_per_node: int | None = None,
    restart_delay_s: float | RestartCost = RESTART_DELAY_S,
    interval_s: float | None = ROUND_S,
    predictions: PredictionMode | None = None,
    file_format: str = "auto",
    tasks: Path | None = None,
    epoch_time_s: float | None = None,
    published_dir: Path | None = None,
    measured_dir: Path | None = None,
    gpus: Mapping[str, str] | None = None,
) -> Scenario:
    """Assemble a scenario: read or generate the jobs, load throughput, check that every job can run.

    Parameters
    ----------
    workload
        A job list (a path), jobs, or a generated workload: ``naive`` (10 jobs), ``base``, ``bp`` (best
        plans), ``mt`` (multi-tenant). With source published, a name means the authors' list.
    n_jobs, seed, load
        Jobs to generate, at the rate of the whole list, or to take of a list; seed of what is generated,
        models of foreign traces too; arrival rate over that of the list.
    source, cluster_name, n_nodes, gpus_per_node
        Where iteration times come from, ``emulated``, ``published`` or ``measured``; cluster of the
        catalogue, list of nodes (see `makespan.traces.read_nodes`) or cluster itself, and other numbers of
        nodes or of GPUs in each. With several types of GPU a job holds GPUs of one type at a time.
    restart_delay_s, interval_s
        Time without progress after every start and change [s]; length of a round [s], None for the policy's
        own, 0 to decide after each event. By default as in the simulator released with Morphling.
    predictions
        What policies decide by: ``exact``, the source's own times; ``sampled``, those of a model fitted to
        a few sampled rows, the default if the cluster has its constants and the zoo all workloads; or
        ``requests``, the same, and users state with each job what its request takes.
    file_format, tasks, epoch_time_s, published_dir, measured_dir
        As for `read_trace`; directories with published files, ``MAKESPAN_PUBLISHED_DIR`` unless given, and
        with ``<workload>.csv`` tables, of a cluster with several types of GPU in a directory for each.
    gpus
        Devices of the catalogue that stand for types of GPU in a list of nodes, by these.

    Raises
    ------
    MakespanError
        A name is unknown, a file is missing or broken, or a job can never run; says which.
    """
    place = site(cluster_name, n_nodes, gpus_per_node, gpus)
    where = place.cluster
    reader = _Reader(workload, source, file_format, n_jobs, seed, tasks, epoch_time_s, published_dir)
    throughput = _throughput(source, where, reader, measured_dir)
    with _reports_printed_once():
        trace, times = reader.read(throughput, where)
    jobs = with_load(trace.jobs if n_jobs is None else trace.jobs[:n_jobs], load)
    mode, origin = predictions or _usual_mode(place.environment, jobs), trace.report.where
    known = _catalogue(jobs, times, throughput, place, mode, origin)
    report = trace.report.text + (f"; load {load:g}" if load != 1 else "")
    report = "\n".join(filter(None, (place.report, report)))
    given = reader.name, jobs, where, known, restart_delay_s, interval_s
    return Scenario(*given, source=_shown(throughput, times, jobs), predictions=mode, report=report)


def _usual_mode(environment: str | None, jobs: Iterable[JobSpec]) -> PredictionMode:
    """Return what policies know unless told otherwise: predictions, where all workloads are of the zoo."""
    is_known = all(is_in_zoo(key) for key in {job.workload for job in jobs})
    return "sampled" if is_known and environment else "exact"


def _throughput(
    source: str, where: ClusterSpec, reader: "_Reader", measured_dir: Path | None
) -> ThroughputSource:
    """Return the source of iteration times, with a part for each type of GPU if there are several."""
    parts = pools(where)
    if source == "emulated":
        found = {
            gpu_type: EmulatedSource(emulated_cluster(pool), _CALIBRATION, _NOISE_SEED, _NOISE_SCALE)
            for gpu_type, pool in parts.items()
        }
        return TypedSource(found) if len(found) > 1 else next(iter(found.values()))
    if source == "published" and len(parts) > 1:
        raise InputError(
            f"source published: its times are of one type of GPU, cluster {where.name!r} has "
            f"{', '.join(parts)}; accepted: source emulated, or measured"
        )
    if source == "published":
        return PublishedSource(reader.published(), _CPU_THREADS, shipped_register())
    if source != "measured":
        raise unknown_name("source of throughput", source, SOURCE_NAMES)
    if measured_dir is None:
        accepted = "a directory with the tables as --measured-dir (measured_dir)"
        raise MissingDataError(f"source measured: accepted: {accepted}")
    if len(parts) == 1:
        return MeasuredSource(Path(measured_dir))
    folders = {gpu_type: Path(measured_dir) / gpu_type for gpu_type in parts}
    if not any(folder.is_dir() for folder in folders.values()):
        raise MissingDataError(
            f"{measured_dir}: no tables for the types of GPU of cluster {where.name!r}; accepted: a "
            f"directory for each, {', '.join(parts)}, with the <workload>.csv of what it can train"
        )
    return TypedSource({gpu_type: MeasuredSource(folder) for gpu_type, folder in folders.items()})


@dataclass(frozen=True, slots=True)
class _Reader:
    """What says which jobs a scenario has; as for `scenario`."""

    workload: str | Path | Sequence[JobSpec]
    source: str
    file_format: str
    n_jobs: int | None
    seed: int
    tasks: Path | None
    epoch_time_s: float | None
    published_dir: Path | None

    @property
    def name(self) -> str:
        if not isinstance(self.workload, str | Path):
            return "jobs"
        if str(self.workload) in (_STDIN, *GENERATED):
            return "stdin" if str(self.workload) == _STDIN else str(self.workload)
        return Path(self.workload).stem

    def published(self) -> Path:
        """Return the directory with the published files."""
        given = self.published_dir or os.environ.get(_PUBLISHED_DIR)
        if given is None:
            raise MissingDataError(
                "source published: accepted: a directory with the published files as published_dir, by "
                f"--published-dir or by the environment variable {_PUBLISHED_DIR}"
            )
        if not Path(given).is_dir():
            raise MissingDataError(f"{given}: no such directory with the published files")
        return Path(given)

    def read(self, source: ThroughputSource, where: ClusterSpec) -> tuple[JobTrace, ReferenceTimes]:
        """Return the jobs and the throughput of what they train."""
        if not isinstance(self.workload, str | Path):
            jobs = tuple(self.workload)
            return JobTrace(jobs, ReadReport("jobs", len(jobs), len(jobs))), _times(source, jobs)
        path = self._path(str(self.workload))
        if path is None:
            times = _times(source, statistics().requests)
            name = str(self.workload)
            return generated_jobs(name, self.n_jobs, self.seed, times, max_gpus=largest_pool(where)), times
        own = source.batch_of if isinstance(source, MeasuredSource | TypedSource) else None
        found = read_trace(
            path, self.file_format, tasks=self.tasks, epoch_time_s=self.epoch_time_s, batch_of=own
        )
        if isinstance(found, JobTrace):
            return found, _times(source, found.jobs)
        times = _times(source, statistics().requests)
        mapping = WorkloadMapping.like_base(self.seed, max_gpus=largest_pool(where))
        return map_requests(found, mapping, times), times

    def _path(self, text: str) -> Path | None:
        """Return the job list that is meant, or None if the workload is to be generated."""
        is_foreign = self.file_format not in ("auto", "morphling")
        is_path = text == _STDIN or Path(text).exists() or bool(Path(text).suffix) or "/" in text
        if is_foreign or (is_path and text not in GENERATED):
            return Path(text)
        if text not in GENERATED:
            raise unknown_name("workload or file", text, GENERATED)
        return published_list(self.published(), text) if self.source == "published" else None


def _times(source: ThroughputSource, users: Iterable[JobSpec | StatedRequest]) -> ReferenceTimes:
    return ReferenceTimes({key: source.load(key) for key in dict.fromkeys(user.workload for user in users)})


def _shown(source: ThroughputSource, times: ReferenceTimes, jobs: Sequence[JobSpec]) -> str:
    """Return what the iteration times of the jobs are said to be."""
    keys = sorted({job.workload for job in jobs})
    return shown_source(source.name, (kind for key in keys for kind in times.tables[key]["provenance"]))


def _catalogue(
    jobs: Sequence[JobSpec],
    times: ReferenceTimes,
    throughput: ThroughputSource,
    place: Site,
    mode: PredictionMode,
    origin: str,
) -> Catalogue:
    """Return what jobs may run as, by the truth or by a fitted model, after a check that all can run."""
    if not jobs:
        raise TraceError(f"{origin}: no job; accepted: at least one")
    where, parts = place.cluster, pools(place.cluster)
    tables = {key: times.tables[key] for key in sorted({job.workload for job in jobs})}
    for key, table in tables.items():
        if not table["feasible"].any():
            raise TraceError(
                f"{origin}: workload {key!r}: no row of its table is feasible; expected at least one"
            )
    if isinstance(throughput, TypedSource):
        by_type = [
            TableCatalogue.from_tables([table], node=parts[gpu_type].nodes[0], gpu_type=gpu_type)
            for key in tables
            for gpu_type, table in throughput.tables(key).items()
        ]
        exact = TableCatalogue.joined(by_type)
    else:
        exact = TableCatalogue.from_tables(tables, node=next(iter(parts.values())).nodes[0])
    check_jobs(jobs, where, exact.on(where), origin)
    if mode == "exact" and (place.environment is None or not all(map(is_in_zoo, tables))):
        return exact
    if place.environment is None:
        raise InputError(
            f"{mode} predictions: no constants of the performance model for cluster {where.name!r}; "
            f"accepted: {', '.join(environment_names())}, or exact predictions"
        )
    found = predicted(tables, place.environment, _FORM)
    catalogue = predicted_catalogue(tables, found, where.nodes[0])
    return exactly(catalogue) if mode == "exact" else catalogue


@contextmanager
def _reports_printed_once() -> Iterator[None]:
    """Keep the readers' reports out of the log while a block runs; the scenario carries them."""
    log = logging.getLogger("makespan.traces._cells")
    handler = logging.NullHandler()
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
