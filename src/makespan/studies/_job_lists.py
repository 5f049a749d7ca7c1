"""The jobs of a scenario: generated, the authors' lists, or read from a trace of any known format."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from makespan.errors import InputError, TraceError, unknown_name
from makespan.tables import REQUESTS
from makespan.throughput import ReferenceTimes
from makespan.traces import (
    VARIANTS,
    JobTrace,
    RequestTrace,
    WorkloadStatistics,
    generate_jobs,
    read_easyscale_jobs,
    read_helios_jobs,
    read_jobs,
    read_morphling_jobs,
    read_openb_pods,
    read_pai_jobs,
    read_philly_jobs,
    statistics,
)
from makespan.traces import Request as StatedRequest
from makespan.units import HOUR

__all__ = ["FORMATS", "GENERATED", "generated_jobs", "limited_statistics", "published_list", "read_trace"]

GENERATED = ("naive", *VARIANTS)
"""Workloads that are known by name: a short one for getting started, and the variants of the generator."""

FORMATS = ("auto", "morphling", "philly", "helios", "pai", "openb", "easyscale")
"""Formats of traces; jobs of the last five do not say what they train."""

_NAIVE_JOBS = 10
_NAIVE_SPAN_S = 5400.0  # as the authors' list; in the hours of the Base workload ten jobs never meet
_PAI_TASKS = "pai_task_table.csv"
_PUBLISHED_LAYOUTS = ("morphling/workloads", "workloads", "simulator/workloads")
_READERS: Mapping[str, Callable[[Path], JobTrace | RequestTrace]] = {
    "auto": read_jobs,
    "morphling": read_morphling_jobs,
    "philly": read_philly_jobs,
    "helios": read_helios_jobs,
    "openb": read_openb_pods,
}


def read_trace(
    path: str | Path,
    file_format: str = "auto",
    *,
    tasks: Path | None = None,
    epoch_time_s: float | None = None,
) -> JobTrace | RequestTrace:
    """Read a trace.

    Parameters
    ----------
    path, file_format
        The job list; one of ``auto`` (the table ``jobs`` or a list of the Morphling artifact), ``morphling``,
        ``philly``, ``helios``, ``pai``, ``openb`` and ``easyscale``.
    tasks, epoch_time_s
        Format pai: the task table, beside the job table unless given. Format easyscale, whose lists give
        epochs only: how long one takes with all logical workers [s].

    Returns
    -------
    JobTrace or RequestTrace
        Jobs that are ready to run, or, from the last five formats, requests that do not say what they train
        (`makespan.traces.map_requests` chooses). Both have a report of what was dropped and repaired.

    Raises
    ------
    MakespanError
        The format is unknown, a file is missing or broken, or something that the format needs is not given.
    """
    place = Path(path)
    if file_format in _READERS:
        return _READERS[file_format](place)
    if file_format == "pai":
        return read_pai_jobs(place, tasks or place.with_name(_PAI_TASKS))
    if file_format != "easyscale":
        raise unknown_name("format of a trace", file_format, FORMATS)
    if epoch_time_s is None:
        raise InputError(
            f"{path}: lists of this format state epochs, not durations; accepted: --epoch-time "
            "(epoch_time_s) with the seconds of an epoch"
        )
    return _easyscale(place, epoch_time_s)


def _easyscale(path: Path, epoch_time_s: float) -> RequestTrace:
    table, report = read_easyscale_jobs(path)
    origin_s = float(table["submit_time_s"].min())
    requests = pd.DataFrame(
        {
            "job_id": table["job_id"],
            "submit_time_s": table["submit_time_s"] - origin_s,
            "n_gpus": table["max_parallelism"],
            "n_cpus": np.zeros(len(table), dtype=np.int64),
            "duration_s": table["epochs"] * epoch_time_s,
            "tenant": table["home_gpu"],
            "status": "",
        }
    )
    return RequestTrace(REQUESTS.validate(requests, str(path)), report, origin_s)


def published_list(directory: Path, name: str) -> Path:
    """Return where a directory with published files has a job list, or where it should."""
    file = f"{name}.csv" if name == "naive" else f"workload-{name}.csv"
    candidates = [directory / layout / file for layout in _PUBLISHED_LAYOUTS]
    return next((path for path in candidates if path.is_file()), candidates[0])


def generated_jobs(
    name: str,
    n_jobs: int | None,
    seed: int,
    times: ReferenceTimes,
    *,
    max_gpus: int | None = None,
    span_s: float | None = None,
) -> JobTrace:
    """Generate a workload of requests that can run; the report says which cannot.

    Parameters
    ----------
    name, n_jobs
        One of `GENERATED`, and jobs; None for 10 of ``naive``, and as many as the Base trace has of others.
    seed, times
        Of all random choices; iteration times of the source.
    max_gpus, span_s
        GPUs of the cluster, None for no limit; time from first to last submission of ``naive`` [s].
    """
    known, stats = statistics(), limited_statistics(times, max_gpus)
    variant, count = name, n_jobs or known.n_jobs
    if name == "naive":
        span_s = span_s or _NAIVE_SPAN_S
        hours = math.ceil(span_s / HOUR)
        stats = replace(stats, span_s=span_s, arrivals_per_hour=(1,) * hours)
        variant, count = "base", n_jobs or _NAIVE_JOBS
    trace = generate_jobs(variant, count, seed, times, stats=stats)
    origin = f"generated {name} workload, seed {seed}{_left_out(known, stats)}"
    return replace(trace, report=replace(trace.report, where=origin))


def limited_statistics(times: ReferenceTimes, max_gpus: int | None = None) -> WorkloadStatistics:
    """Return the statistics of the Base trace, of requests alone that the source has and the GPUs can hold.

    Raises
    ------
    TraceError
        None is left.
    """
    known, available = statistics(), set(times.workload_keys())

    def can_run(offer: StatedRequest) -> bool:
        fits = max_gpus is None or offer.n_gpus <= max_gpus
        return fits and offer.workload in available and offer.n_gpus in times.gpu_counts(offer.workload)

    requests = tuple(offer for offer in known.requests if can_run(offer))
    if not requests:
        limit = "" if max_gpus is None else f" on at most {max_gpus} GPUs"
        raise TraceError(
            f"workloads with throughput{limit}: {', '.join(sorted(available)) or 'none'}; accepted: at least "
            f"one of {', '.join(sorted({offer.workload for offer in known.requests}))}"
        )
    return replace(known, requests=requests, large=tuple(key for key in known.large if key in available))


def _left_out(known: WorkloadStatistics, possible: WorkloadStatistics) -> str:
    """Say which requests are left out, by workload."""
    absent: dict[str, set[int]] = {}
    for offer in known.requests:
        if offer not in possible.requests:
            absent.setdefault(offer.workload, set()).add(offer.n_gpus)
    if not absent:
        return ""
    texts = (f"{key} on {', '.join(map(str, sorted(counts)))}" for key, counts in absent.items())
    return f", without what cannot run here ({'; '.join(texts)} GPUs)"
