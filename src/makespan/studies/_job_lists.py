"""The jobs of a scenario that are generated."""

import math
from dataclasses import replace

from makespan.errors import InputError, TraceError
from makespan.throughput import ReferenceTimes
from makespan.traces import (
    VARIANTS,
    JobTrace,
    WorkloadStatistics,
    generate_jobs,
    statistics,
    with_load,
)
from makespan.traces import Request as StatedRequest
from makespan.units import HOUR

__all__ = ["GENERATED", "generated_jobs", "left_out", "limited_statistics"]

GENERATED = ("naive", *VARIANTS)
"""Workloads that are known by name: a short one for getting started, and the variants of the generator."""

_MAX_JOBS = 100_000
_NAIVE_JOBS = 10
_NAIVE_SPAN_S = 5400.0  # as the authors' list; in the hours of the Base workload ten jobs never meet


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

    However many jobs, they arrive at the rate of the whole list, so that the load stays the same.

    Parameters
    ----------
    name, n_jobs
        One of `GENERATED`, and jobs; None for 10 of ``naive``, and as many as the Base trace has of others.
    seed, times
        Of all random choices; iteration times of the source.
    max_gpus, span_s
        GPUs of the cluster, None for no limit; time from first to last submission of ``naive`` [s].
    """
    if n_jobs is not None and not 1 <= n_jobs <= _MAX_JOBS:
        raise InputError(f"{n_jobs} jobs; accepted: from 1 to {_MAX_JOBS}, as more take hours to simulate")
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
    jobs = with_load(trace.jobs, 1.0 / rate)
    return replace(trace, jobs=jobs, report=replace(trace.report, where=origin))


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


def left_out(known: WorkloadStatistics, possible: WorkloadStatistics) -> str:
    """Return which requests are left out, by workload, empty if none."""
    absent: dict[str, set[int]] = {}
    for offer in known.requests:
        if offer not in possible.requests:
            absent.setdefault(offer.workload, set()).add(offer.n_gpus)
    if not absent:
        return ""
    texts = (f"{key} on {', '.join(map(str, sorted(counts)))}" for key, counts in absent.items())
    return f", without what cannot run here ({'; '.join(texts)} GPUs)"
