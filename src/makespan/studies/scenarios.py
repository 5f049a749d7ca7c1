"""Assembly of scenarios: from names and files, from generated jobs, or from tables of the workflow.

Durations that a list states become work by the times of one cluster. If work is kept, that is the cluster on
which the list was recorded, so that every simulated cluster gets the same jobs.
"""

import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from makespan.arguments import check_range, typed
from makespan.errors import InputError, MissingDataError, TraceError, unknown_name
from makespan.hardware import ClusterSpec, cluster, cluster_names, homogeneous, pools
from makespan.perf import environment_names
from makespan.sim import (
    Catalogue,
    FailureModel,
    Failures,
    PlacementRule,
    Recovery,
    RecoveryKind,
    RestartCost,
    Scenario,
    check_jobs,
    node_events,
)
from makespan.studies.catalogue import (
    PREDICTION_MODES,
    PredictionMode,
    predicted_catalogue,
    predictions as predicted,
    with_exact_times,
    with_predicted_times,
)
from makespan.studies.clusters import (
    Site,
    TypedSource,
    emulated_cluster,
    exact_catalogue,
    largest_pool,
    site,
    with_models,
)
from makespan.studies.requests import (
    KEPT,
    TOO_LARGE,
    Kept,
    TooLarge,
    fitting,
    settled,
    with_planned,
    with_steps,
)
from makespan.tables import shown_source
from makespan.throughput import (
    SOURCE_NAMES,
    EmulatedSource,
    MeasuredSource,
    Profile,
    ProfiledSource,
    PublishedSource,
    ReferenceTimes,
    ThroughputSource,
    check_published_gpus,
    find_dataset,
    is_planned,
    planned_workload,
    shipped_register,
    verify,
)
from makespan.traces import (
    VARIANTS,
    Finding,
    JobTrace,
    ReadReport,
    Request as StatedRequest,
    RequestTrace,
    WorkloadMapping,
    WorkloadStatistics,
    generate_jobs,
    listed_jobs,
    map_requests,
    read_easyscale_jobs,
    read_gavel_jobs,
    read_gavel_throughputs,
    read_helios_jobs,
    read_jobs,
    read_morphling_jobs,
    read_openb_pods,
    read_pai_jobs,
    read_philly_jobs,
    read_pollux_jobs,
    read_profiled_jobs,
    read_requests,
    read_spot_jobs,
    read_tiresias_jobs,
    request_trace,
    statistics,
    with_load,
)
from makespan.units import HOUR
from makespan.workloads import JobSpec, is_in_zoo

# --- Scenarios from tables of the workflow ---


def table_scenarios(
    times: Mapping[str, pd.DataFrame],
    predictions: pd.DataFrame,
    lists: Mapping[str, pd.DataFrame],
    cluster_name: str,
) -> dict[str, Scenario]:
    """Return a scenario for each job list from tables by name, without restart delay and rounds.

    Policies know the sampled rows; `with_predictions` tells them more.

    Parameters
    ----------
    times, lists
        Throughput tables by workload, and jobs by list (schemas `makespan.tables.THROUGHPUT` and `JOBS`).
    predictions
        Table of `predictions`.
    """
    hardware = cluster(cluster_name)
    catalogue = predicted_catalogue(times, predictions, hardware.nodes[0])
    return {
        name: Scenario(name, listed_jobs(jobs), hardware, catalogue, predictions="sampled", made_for=hardware)
        for name, jobs in lists.items()
    }


@typed
def with_predictions(scenario: Scenario, mode: PredictionMode) -> Scenario:
    """Return a scenario of mode sampled with the knowledge of policies in another mode."""
    if mode not in PREDICTION_MODES:
        raise unknown_name("predictions", mode, PREDICTION_MODES)
    if mode != "exact":
        return replace(scenario, predictions=mode)
    return replace(scenario, catalogue=with_exact_times(scenario.catalogue), predictions=mode)


# --- Traces ---

FORMATS = (
    "auto", "morphling", "requests", "philly", "helios", "pai", "openb", "spot", "tiresias", "pollux",
    "gavel", "easyscale",
)  # fmt: skip
"""Formats of traces; only jobs of the first two name workloads known here."""
_PAI_TASKS, _GAVEL_THROUGHPUTS = "pai_task_table.csv", "simulation_throughputs.json"
_WITH_SECOND_FILE = ("pai", "gavel")
_WITH_CANCELLED = {"philly": read_philly_jobs, "helios": read_helios_jobs}
_PACKED = (".gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
_NAMING = {"auto": read_jobs, "morphling": read_morphling_jobs}  # lists that name what jobs train
_READERS: Mapping[str, Callable[[Path], JobTrace | RequestTrace]] = {
    "philly": read_philly_jobs,
    "helios": read_helios_jobs,
    "openb": read_openb_pods,
    "requests": read_requests,
    "spot": read_spot_jobs,
    "tiresias": read_tiresias_jobs,
    "pollux": read_pollux_jobs,
}


@typed
def read_trace(
    path: str | Path,
    file_format: str = "auto",
    *,
    tasks: Path | None = None,
    epoch_time_s: float | None = None,
    batch_of: Callable[[str], int | None] | None = None,
    profiles: Callable[[str], Profile] | None = None,
    keep_cancelled: bool = False,
) -> JobTrace | RequestTrace:
    """Read a trace.

    Parameters
    ----------
    path
        The job list.
    file_format
        ``auto`` (the table ``jobs`` or a list of the Morphling artifact), ``morphling``, ``requests`` (the
        table of that name), ``philly``, ``helios``, ``pai``, ``openb``, ``spot`` (Alibaba 2026),
        ``tiresias``, ``pollux`` (also Sia), ``gavel`` or ``easyscale``.
    tasks
        Second file of formats that have one, packed or not (default: in the directory of the first): the task
        table of pai, the table of throughputs of gavel.
    epoch_time_s
        Format easyscale: time of an epoch with all logical workers [s]; its lists give epochs only.
    batch_of
        Formats auto and morphling: global batch of measured workloads, see `makespan.traces.read_jobs`.
    profiles
        Format pollux: profile of an application, see `makespan.traces.read_profiled_jobs`.
    keep_cancelled
        Formats philly and helios: keep jobs that their user cancelled; they held GPUs too.

    Returns
    -------
    JobTrace or RequestTrace
        Jobs that are ready to run, or, from formats after the second, requests that name no workload known
        here (`makespan.traces.map_requests` chooses). Both have a report of dropped and repaired rows.

    Raises
    ------
    MakespanError
        The format is unknown, a file is missing or broken, or an argument that the format needs is missing.
    """
    place = Path(path)
    if file_format in FORMATS:
        refuse_unused(f"{path}: format {file_format!r}", file_format, tasks, epoch_time_s, keep_cancelled)
    if keep_cancelled:
        return _WITH_CANCELLED[file_format](place, keep_cancelled=True)
    if file_format == "pollux" and profiles is not None:
        return read_profiled_jobs(place, profiles)
    if file_format in _NAMING:
        return _NAMING[file_format](place, batch_of)
    if file_format in _READERS:
        return _READERS[file_format](place)
    if file_format == "pai":
        return read_pai_jobs(place, tasks or _beside(place, _PAI_TASKS))
    if file_format == "gavel":
        rates = tasks or _beside(place, _GAVEL_THROUGHPUTS)
        is_there = tasks is not None or rates.is_file()
        return read_gavel_jobs(place, read_gavel_throughputs(rates) if is_there else None)
    if file_format != "easyscale":
        raise unknown_name("format of a trace", file_format, FORMATS)
    if epoch_time_s is None:
        raise InputError(
            f"{path}: lists of this format state epochs, not durations; expected --epoch-time "
            "(epoch_time_s) with the seconds of an epoch"
        )
    table, report = read_easyscale_jobs(place)
    requests = pd.DataFrame(
        {
            "job_id": table["job_id"],
            "submit_time_s": table["submit_time_s"],
            "n_gpus": table["max_parallelism"],
            "duration_s": table["epochs"] * epoch_time_s,
            "tenant": table["home_gpu"],
        }
    )
    reason = "what a row trains, its batch size and where it may run have no effect: models are drawn"
    extended = replace(report, findings=(*report.findings, Finding("ignored", reason)))
    return request_trace(requests, str(place), before=extended)


def refuse_unused(
    what: str, file_format: str, tasks: Path | None, epoch_time_s: float | None, keep_cancelled: bool
) -> None:
    """Raise `InputError` for an argument of `read_trace` without effect; ``what`` names the trace."""
    if tasks is not None and file_format not in _WITH_SECOND_FILE:
        accepted = "leave tasks out (--tasks), or choose format pai or gavel"
        raise InputError(f"{what} has no second file, got tasks '{tasks}'; {accepted}")
    if epoch_time_s is not None and file_format != "easyscale":
        accepted = "leave epoch_time_s out (--epoch-time), or choose format easyscale"
        raise InputError(f"{what} states no epochs, got epoch_time_s {epoch_time_s}; {accepted}")
    if keep_cancelled and file_format not in _WITH_CANCELLED:
        accepted = "leave keep_cancelled out (--keep-cancelled), or choose format philly or helios"
        raise InputError(f"{what} does not say which jobs were cancelled; {accepted}")


def _beside(path: Path, name: str) -> Path:
    """Return the second file of a trace, packed or not; the plain name if there is none."""
    stem = name.partition(".")[0]
    names = (name, stem, *(f"{packed}{end}" for packed in (name, stem) for end in _PACKED))
    candidates = (path.with_name(text) for text in names)
    return next((place for place in candidates if place.is_file()), path.with_name(name))


def published_list(directory: Path, name: str) -> Path:
    """Return the path of a job list in a directory with published files; rejects a modified one."""
    stem = name if name == "naive" else f"workload-{name}"
    return verify(find_dataset(shipped_register(), f"morphling-workloads-{stem}"), directory)


# --- Generated jobs ---

GENERATED = ("naive", *VARIANTS)
"""Workloads known by name: a short one for getting started, and the variants of the generator."""
_MAX_JOBS = 100_000
_NAIVE_JOBS = 10
_NAIVE_SPAN_S = 5400.0  # as the authors' list; in the hours of the Base workload ten jobs never overlap


@typed
def generated_jobs(
    name: str,
    n_jobs: int | None,
    seed: int,
    times: ReferenceTimes,
    *,
    max_gpus: int | None = None,
    span_s: float | None = None,
) -> JobTrace:
    """Generate a workload of requests that can run; the report names those that cannot.

    Any number of jobs arrives at the rate of the whole list, so that the load stays the same.

    Parameters
    ----------
    name, n_jobs
        One of `GENERATED`, and number of jobs (default: 10 of ``naive``, else as many as the Base trace has).
    seed, times
        Seed of all random choices; iteration times of the source.
    max_gpus, span_s
        GPUs of the cluster, None for no limit; time from first to last submission of ``naive`` [s].
    """
    if n_jobs is not None and not 1 <= n_jobs <= _MAX_JOBS:
        raise InputError(f"n_jobs is {n_jobs}; expected 1 to {_MAX_JOBS}, as more take hours to simulate")
    known, stats = statistics(), limited_statistics(times, max_gpus)
    variant, count = name, n_jobs or known.n_jobs
    rate = count / known.n_jobs
    if name == "naive":
        count, rate = n_jobs or _NAIVE_JOBS, 1.0
        span_s = span_s or _NAIVE_SPAN_S * count / _NAIVE_JOBS
        hours = math.ceil(span_s / HOUR)
        stats = replace(stats, span_s=span_s, arrivals_per_hour=(1,) * hours)
        variant = "base"
    trace = generate_jobs(variant, count, seed, times, stats=stats)
    origin = f"generated {name} workload, seed {seed}{left_out(known, stats)}"
    jobs = trace.jobs if rate == 1 else with_load(trace.jobs, 1.0 / rate)
    return replace(trace, jobs=jobs, report=replace(trace.report, where=origin))


def limited_statistics(times: ReferenceTimes, max_gpus: int | None = None) -> WorkloadStatistics:
    """Return the statistics of the Base trace, limited to requests that the source has and the GPUs can hold.

    Raises
    ------
    TraceError
        No request is left.
    """
    known, available = statistics(), set(times.workload_keys())

    def can_run(offer: StatedRequest) -> bool:
        fits = max_gpus is None or offer.n_gpus <= max_gpus
        return fits and offer.workload in available and offer.n_gpus in times.gpu_counts(offer.workload)

    requests = tuple(offer for offer in known.requests if can_run(offer))
    if not requests:
        limit = "" if max_gpus is None else f" on at most {max_gpus} GPUs"
        raise TraceError(
            f"workloads with throughput{limit}: {', '.join(sorted(available)) or 'none'}; expected at least "
            f"one of {', '.join(sorted({offer.workload for offer in known.requests}))}"
        )
    return replace(known, requests=requests, large=tuple(key for key in known.large if key in available))


def left_out(known: WorkloadStatistics, possible: WorkloadStatistics) -> str:
    """Return the requests that are left out in words, by workload; empty if there are none."""
    absent: dict[str, set[int]] = {}
    for offer in known.requests:
        if offer not in possible.requests:
            absent.setdefault(offer.workload, set()).add(offer.n_gpus)
    if not absent:
        return ""
    texts = (f"{key} on {', '.join(map(str, sorted(counts)))}" for key, counts in absent.items())
    return f", without what cannot run here ({'; '.join(texts)} GPUs)"


# --- Assembly ---

_CALIBRATION, _NOISE_SEED, _NOISE_SCALE = "L1", 0, 1.0
_CPU_THREADS = 12  # per GPU, if published tables do not say: an even share of the node of the testbed
_FORM = "extended"
_TESTBED = "a800-64"  # the cluster for which the durations of generated lists hold
_STDIN = "-"
ROUND_S, RESTART_DELAY_S = 60.0, 260.0  # of the simulator released with Morphling, as in the experiments
_PUBLISHED_DIR = "MAKESPAN_PUBLISHED_DIR"


@typed
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
    keep: Kept | None = None,
    recorded_on: str | None = None,
    too_large: TooLarge = "drop",
    placement: PlacementRule = "best-fit",
    keep_cancelled: bool = False,
    failures: Failures | None = None,
    recovery: RecoveryKind | Recovery | Mapping[str, Recovery] | None = None,
) -> Scenario:
    """Assemble a scenario: read or generate the jobs, load throughput, check that every job can run.

    Parameters
    ----------
    workload
        A job list (a path), jobs, or a generated workload: ``naive`` (10 jobs), ``base``, ``bp`` (best
        plans), ``mt`` (multi-tenant). With source published, a name means the authors' list. Jobs may train
        models of the user or of the planning catalogue, see `makespan.throughput.planned_workload`; their
        times are predicted, whatever the source.
    n_jobs, seed, load
        Jobs to generate, at the rate of the whole list, or to take from a list; seed of generated jobs and of
        the models of foreign traces; arrival rate over that of the list.
    source, cluster_name, n_nodes, gpus_per_node
        Source of iteration times, ``emulated``, ``published`` or ``measured``; cluster of the catalogue, list
        of nodes (see `makespan.traces.read_nodes`), machines (a text such as ``64xh100-80``, or a file, see
        `makespan.hardware.read_pools`) or cluster itself, and other numbers of nodes or of GPUs in each. With
        several types of GPU a job holds GPUs of one type at a time.
    restart_delay_s, interval_s
        Time without progress after every start and change [s]; length of a round [s], None for the policy's
        own, 0 to decide after each event. By default as in the simulator released with Morphling.
    predictions
        Times that policies decide by: ``exact``, the source's own; ``sampled``, those of a model fitted to
        a few sampled rows, the default if the cluster has its constants and the zoo all workloads; or
        ``requests``, the same, and users state with each job the time of its request.
    file_format, tasks, epoch_time_s, published_dir, measured_dir
        As for `read_trace`; directories with published files (default: ``MAKESPAN_PUBLISHED_DIR``), and with
        ``<workload>.csv`` tables, one directory per type of GPU for a cluster with several types. With format
        pollux, the latter may be the directory of profiles of Pollux or Sia.
    gpus
        Devices of the catalogue that stand in for types of GPU in a list of nodes, by type.
    keep, recorded_on
        ``durations``: jobs take as long as their list states, on this cluster and as requested, the default
        of foreign and generated lists. ``work``: they do the same steps on every cluster, the default of
        lists that state steps; if a list states durations, the steps are those that fill them on cluster
        ``recorded_on`` (default for generated lists: ``a800-64``).
    too_large
        Jobs that request more GPUs or CPU threads than the cluster has: ``drop`` leaves them out and reports
        them, ``reject`` raises.
    placement
        Nodes that policies prefer among those with enough free GPUs: ``best-fit``, those with the fewest,
        which keeps whole nodes free, or ``worst-fit``, those with the most, which spreads jobs.
    keep_cancelled
        As for `read_trace`.
    failures, recovery
        Failures of nodes: a file, a `makespan.sim.FailureModel` or events, see `makespan.sim.node_events`;
        and the recovery of jobs, a kind with its defaults, a `makespan.sim.Recovery`, or one for each job by
        name. With failures, jobs without a recovery restart from checkpoints; so do those without a name in a
        mapping.

    Raises
    ------
    MakespanError
        A name is unknown, a file is missing or broken, or a job can never run.
    """
    check_range("seed", seed)
    if n_jobs is not None:
        check_range("n_jobs", n_jobs, 1)
    if predictions not in (None, *PREDICTION_MODES):
        raise unknown_name("predictions", predictions, PREDICTION_MODES)
    place = site(cluster_name, n_nodes, gpus_per_node, gpus)
    where = place.cluster
    events, origin_of_failures = ((), "") if failures is None else node_events(failures, where)
    if recovery is None and failures is not None:
        recovery = "restart"
    reader = _Reader(
        workload, source, file_format, n_jobs, seed, tasks, epoch_time_s, published_dir, keep_cancelled
    )
    throughput = _throughput(source, where, reader, measured_dir)
    choice = _Choice(keep, recorded_on, too_large)
    with _reports_printed_once():
        listed = reader.read(throughput, place, choice)
    throughput = listed.source or throughput
    trace, origin = listed.trace, listed.trace.report.where
    rows = trace.rows or tuple(range(1, len(trace.jobs) + 1))
    few = (f"  {n_jobs} jobs are asked for; the list has {len(rows)}, which all run",)
    missing = few if n_jobs is not None and n_jobs > len(rows) else ()
    jobs, rows, lines = fitting(trace.jobs[:n_jobs], rows[:n_jobs], where, too_large, origin)
    jobs, planned_lines = with_planned(jobs, rows, listed.times, throughput, where, origin)
    jobs, rows, times, changed = settled(
        jobs,
        rows,
        listed.times,
        throughput,
        where,
        origin,
        is_drawn=listed.is_drawn,
        states_cpus=listed.states_cpus,
    )
    # After `settled`, which may have replaced plans: durations hold for the plans that run.
    if keep == "durations" and not listed.is_drawn:
        jobs = with_steps(jobs, rows, times, origin)
    jobs = with_load(jobs, load)
    keys = sorted({job.workload for job in jobs})
    is_fitted = place.environment is not None and all(map(_has_a_model, keys))
    mode: PredictionMode = predictions or ("sampled" if is_fitted else "exact")
    known = _catalogue(jobs, times, throughput, place, mode, origin)
    head = trace.report.text + (f"; load {load:g}" if load != 1 else "")
    return Scenario(
        reader.name,
        jobs,
        where,
        known,
        restart_delay_s,
        interval_s,
        source=shown_source(
            throughput.name, (kind for key in keys for kind in times.tables[key]["provenance"])
        ),
        predictions=mode,
        report="\n".join(
            filter(
                None,
                [
                    place.report,
                    head,
                    *missing,
                    *listed.lines,
                    *lines,
                    *planned_lines,
                    *changed,
                    origin_of_failures,
                ],
            )
        ),
        kept=listed.kept,
        made_for=where,
        placement=placement,
        failures=events,
        recovery=_recovery_of(recovery, trace.jobs, jobs),
        failures_end_s=failures.end_s if isinstance(failures, FailureModel) and failures.per_day else None,
    )


def _recovery_of(
    recovery: RecoveryKind | Recovery | Mapping[str, Recovery] | None,
    listed: Iterable[JobSpec],
    kept: Iterable[JobSpec],
) -> Recovery | Mapping[str, Recovery] | None:
    """Return the recovery of a scenario; of a mapping, without jobs of the list that were left out."""
    if isinstance(recovery, Mapping):
        left_out = {job.job_id for job in listed} - {job.job_id for job in kept}
        return {name: one for name, one in recovery.items() if name not in left_out}
    return Recovery(recovery) if isinstance(recovery, str) else recovery


@dataclass(frozen=True, slots=True)
class _Choice:
    """Choices of how to treat a job list: the quantity to keep, and jobs that are too large."""

    keep: Kept | None
    recorded_on: str | None
    too_large: TooLarge

    def __post_init__(self) -> None:
        if self.keep not in (None, *KEPT):
            raise unknown_name("keep", str(self.keep), KEPT)
        if self.too_large not in TOO_LARGE:
            raise unknown_name("too_large", self.too_large, TOO_LARGE)
        if self.recorded_on is not None and self.keep != "work":
            raise InputError(
                f"recorded_on {self.recorded_on!r} says on which cluster durations become work; expected "
                f"keep 'work' with it, got {self.keep!r}"
            )

    def of_stated_steps(self, where: str) -> str:
        """Return the quantity that is kept of a list that states steps, in words."""
        if self.recorded_on is not None:
            raise InputError(
                f"{where}: recorded_on {self.recorded_on!r}, but the list states steps, which are its work "
                "on every cluster; leave recorded_on out"
            )
        return "durations kept" if self.keep == "durations" else "steps kept"

    def of_durations(self, where: str, source: ThroughputSource, usual: str | None) -> ThroughputSource:
        """Return the source whose times turn durations into steps: the given one, or of another cluster."""
        if self.keep != "work":
            return source
        emulated = next(iter(source.parts.values())) if isinstance(source, TypedSource) else source
        if not isinstance(emulated, EmulatedSource):
            raise InputError(
                f"{where}: keep 'work' needs the times of another cluster, which source {source.name!r} does "
                "not have; use source 'emulated', or keep 'durations'"
            )
        name = self.recorded_on or usual
        if name is None:
            raise InputError(
                f"{where}: keep 'work' needs the cluster on which the durations were recorded; give "
                f"recorded_on (--recorded-on), one of {', '.join(cluster_names())}"
            )
        recorded = cluster(name)
        return replace(emulated, cluster=homogeneous(recorded.node, recorded.n_nodes, recorded.network, name))


def _throughput(
    source: str, where: ClusterSpec, reader: "_Reader", measured_dir: Path | None
) -> ThroughputSource:
    """Return the source of iteration times, with a part for each type of GPU if there are several."""
    parts = pools(where)
    if measured_dir is not None and source in SOURCE_NAMES and source != "measured":
        raise InputError(
            f"source {source!r} reads no tables of your own, got measured_dir '{measured_dir}'; leave it out "
            "(--measured-dir), or choose source 'measured'"
        )
    if reader.published_dir is not None and source in SOURCE_NAMES and source != "published":
        raise InputError(
            f"source {source!r} reads no published files, got published_dir '{reader.published_dir}'; leave "
            "it out (--published-dir), or choose source 'published'"
        )
    if source == "emulated":
        emulated = {
            gpu_type: EmulatedSource(emulated_cluster(pool), _CALIBRATION, _NOISE_SEED, _NOISE_SCALE)
            for gpu_type, pool in parts.items()
        }
        return TypedSource(emulated) if len(emulated) > 1 else next(iter(emulated.values()))
    if source == "published":
        check_published_gpus(where)
        return PublishedSource(reader.published(), _CPU_THREADS, shipped_register())
    if source != "measured":
        raise unknown_name("source of throughput", source, SOURCE_NAMES)
    if measured_dir is None:
        accepted = "a directory with the tables as --measured-dir (measured_dir)"
        raise MissingDataError(f"source measured: expected {accepted}")
    if not Path(measured_dir).is_dir():
        raise MissingDataError(
            f"{measured_dir}: no measured traces, as there is no such directory; expected one with "
            "<workload>.csv tables (--measured-dir)"
        )
    if reader.file_format == "pollux" and ProfiledSource.is_there(Path(measured_dir)):
        profiled = {gpu_type: ProfiledSource(Path(measured_dir), gpu_type) for gpu_type in parts}
        return TypedSource(profiled) if len(profiled) > 1 else next(iter(profiled.values()))
    if len(parts) == 1:
        return MeasuredSource(Path(measured_dir))
    folders = {gpu_type: Path(measured_dir) / gpu_type for gpu_type in parts}
    if not any(folder.is_dir() for folder in folders.values()):
        raise MissingDataError(
            f"{measured_dir}: no tables for the types of GPU of cluster {where.name!r}; expected a "
            f"directory for each, {', '.join(parts)}, with the <workload>.csv of what it can train"
        )
    return TypedSource({gpu_type: MeasuredSource(folder) for gpu_type, folder in folders.items()})


@dataclass(frozen=True, slots=True)
class _Listed:
    """A job list, the iteration times of its workloads, and the quantity that is kept of it, in words.

    ``lines`` are added to the report of the reader; ``is_drawn``: models, plans and steps are drawn, not
    listed; ``states_cpus``: CPU threads are listed; ``source`` has models of the user, too, if there are any.
    """

    trace: JobTrace
    times: ReferenceTimes
    kept: str
    lines: tuple[str, ...] = ()
    is_drawn: bool = False
    states_cpus: bool = True
    source: ThroughputSource | None = None


@dataclass(frozen=True, slots=True)
class _Reader:
    """Arguments of `scenario` that determine the jobs, and their reading."""

    workload: str | Path | Sequence[JobSpec]
    source: str
    file_format: str
    n_jobs: int | None
    seed: int
    tasks: Path | None
    epoch_time_s: float | None
    published_dir: Path | None
    keep_cancelled: bool

    @property
    def name(self) -> str:
        if not isinstance(self.workload, str | Path):
            return "jobs"
        if str(self.workload) in (_STDIN, *GENERATED):
            return "stdin" if str(self.workload) == _STDIN else str(self.workload)
        return Path(self.workload).stem

    def published(self) -> Path:
        """Return the directory with the published files."""
        directory = self.published_dir or os.environ.get(_PUBLISHED_DIR)
        if not directory:
            raise MissingDataError(
                "source published: expected a directory with the published files as published_dir, by "
                f"--published-dir or by the environment variable {_PUBLISHED_DIR}"
            )
        if not Path(directory).is_dir():
            raise MissingDataError(f"{directory}: no such directory; expected one with the published files")
        return Path(directory)

    def read(self, source: ThroughputSource, place: Site, choice: _Choice) -> "_Listed":
        """Return the jobs and the iteration times of their workloads.

        Models, plans and steps are drawn by the times that turn durations into work, so that every cluster
        gets the same jobs if work is kept.
        """
        where = place.cluster
        if not isinstance(self.workload, str | Path):
            if self.file_format != "auto":
                raise InputError(
                    f"jobs in Python have no file format, got file_format {self.file_format!r}; leave it out"
                )
            refuse_unused("jobs", "auto", self.tasks, self.epoch_time_s, self.keep_cancelled)
            jobs = tuple(
                replace(job, workload=planned_workload(job.workload).key) if is_planned(job.workload) else job
                for job in self.workload
            )
            trace = JobTrace(jobs, ReadReport("jobs", len(jobs), len(jobs)))
            return _stated(trace, source, place, choice.of_stated_steps("jobs"))
        path = self._path(str(self.workload))
        if path is None:
            name = str(self.workload)
            refuse_unused(name, "auto", self.tasks, self.epoch_time_s, self.keep_cancelled)
            by = choice.of_durations(name, source, _TESTBED)
            times, most, kept = self._drawn_by(by, source, where)
            trace = generated_jobs(name, self.n_jobs, self.seed, times, max_gpus=most)
            return _Listed(
                trace, _times(source, statistics().requests), kept, is_drawn=True, states_cpus=False
            )
        batch_of = source.batch_of if isinstance(source, MeasuredSource | TypedSource) else None
        requests = read_trace(
            path,
            self.file_format,
            tasks=self.tasks,
            epoch_time_s=self.epoch_time_s,
            batch_of=batch_of,
            profiles=_profiles(source),
            keep_cancelled=self.keep_cancelled,
        )
        if isinstance(requests, JobTrace):
            return _stated(requests, source, place, choice.of_stated_steps(str(path)))
        largest = int(requests.table["n_gpus"].max())
        if choice.too_large == "reject" and largest > largest_pool(where):
            raise InputError(
                f"{path}: a job requests {largest} GPUs, more than the {largest_pool(where)} of cluster "
                f"{where.name!r}; choose a larger cluster, or let such jobs be dropped"
            )
        times, most, kept = self._drawn_by(choice.of_durations(str(path), source, None), source, where)
        possible = limited_statistics(times, most)
        mapping = replace(WorkloadMapping.like_base(self.seed, largest_pool(where)), offers=possible.requests)
        absent = left_out(statistics(), possible)
        lines = (f"  models are drawn{absent.removeprefix(',')}",) if absent else ()
        trace = map_requests(requests, mapping, times)
        stated = bool((requests.table["n_cpus"] > 0).any())
        usual = _times(source, statistics().requests)
        return _Listed(trace, usual, kept, lines, is_drawn=True, states_cpus=stated)

    @staticmethod
    def _drawn_by(
        by: ThroughputSource, source: ThroughputSource, where: ClusterSpec
    ) -> tuple[ReferenceTimes, int, str]:
        """Return times and most GPUs of drawn jobs, and the quantity that is kept, in words."""
        times = _times(by, statistics().requests)
        if by is source or not isinstance(by, EmulatedSource):
            return times, largest_pool(where), "durations kept"
        return times, by.cluster.n_gpus, f"work on {by.cluster.name} kept"

    def _path(self, text: str) -> Path | None:
        """Return the path of the job list, or None if the workload is to be generated."""
        is_foreign = self.file_format not in ("auto", "morphling")
        is_path = text == _STDIN or Path(text).exists() or bool(Path(text).suffix) or "/" in text
        if is_foreign or (is_path and text not in GENERATED):
            return Path(text)
        if text not in GENERATED:
            raise unknown_name("workload or file", text, GENERATED)
        return published_list(self.published(), text) if self.source == "published" else None


def _profiles(source: ThroughputSource) -> Callable[[str], Profile] | None:
    """Return the function of a source that returns profiles, of the first type of GPU that has one."""
    parts = source.parts.values() if isinstance(source, TypedSource) else (source,)
    profiled = [part for part in parts if isinstance(part, ProfiledSource)]

    def profile(application: str) -> Profile:
        missing = list[MissingDataError]()
        for part in profiled:
            try:
                return part.profile(application)
            except MissingDataError as error:
                missing.append(error)
        raise missing[0]

    return profile if profiled else None


def _stated(trace: JobTrace, source: ThroughputSource, place: Site, kept: str) -> _Listed:
    """Return a list that states what jobs train, which may be models of the user."""
    full = with_models(source, place, dict.fromkeys(job.workload for job in trace.jobs))
    return _Listed(trace, _times(full, trace.jobs), kept, source=full)


def _has_a_model(key: str) -> bool:
    """Return True if the layers of a workload are known, which the fitted performance model needs."""
    return is_in_zoo(key) or is_planned(key)


def _times(source: ThroughputSource, users: Iterable[JobSpec | StatedRequest]) -> ReferenceTimes:
    return ReferenceTimes({key: source.load(key) for key in dict.fromkeys(user.workload for user in users)})


def _catalogue(
    jobs: Sequence[JobSpec],
    times: ReferenceTimes,
    throughput: ThroughputSource,
    place: Site,
    mode: PredictionMode,
    origin: str,
) -> Catalogue:
    """Return the configurations of jobs, with exact or fitted predictions, and check that all can run."""
    if not jobs:
        raise TraceError(f"{origin}: no jobs; expected at least one")
    where = place.cluster
    tables = {key: times.tables[key] for key in sorted({job.workload for job in jobs})}
    exact = exact_catalogue(tables, throughput, where)
    check_jobs(jobs, where, exact.on(where), origin)
    if mode == "exact" and (place.environment is None or not all(map(_has_a_model, tables))):
        return exact
    if place.environment is None:
        raise InputError(
            f"{mode} predictions: no constants of the performance model for cluster {where.name!r}; "
            f"expected {', '.join(environment_names())}, or exact predictions"
        )
    predicted_times = predicted(tables, place.environment, _FORM)
    catalogue = with_predicted_times(exact, predicted_times)
    return with_exact_times(catalogue) if mode == "exact" else catalogue


@contextmanager
def _reports_printed_once() -> Iterator[None]:
    """Keep the readers' reports out of the log while a block runs; the scenario carries them."""
    log = logging.getLogger("makespan.traces.cells")
    handler = logging.NullHandler()
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
