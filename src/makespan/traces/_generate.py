"""Synthetic workloads with the statistics of the Base trace of Morphling, for any size and seed.

Counts (models, GPUs, plans, submissions an hour) are apportioned exactly and the quantiles of the
durations are stratified, so a seed decides which job gets which value and when it arrives, but not
the statistics of the whole.
"""

import numpy as np
import numpy.typing as npt

from makespan.errors import InputError
from makespan.throughput._reference import ReferenceTimes
from makespan.traces._jobs import JobTrace
from makespan.traces._report import finish_report
from makespan.traces._statistics import Request, WorkloadStatistics, apportion, statistics
from makespan.traces._transform import with_best_plan, with_guarantees
from makespan.units import HOUR
from makespan.workloads import JobSpec

__all__ = ["VARIANTS", "generate_jobs"]

Floats = npt.NDArray[np.float64]

VARIANTS = ("base", "bp", "mt")
"""User-chosen plans; best measured plans; part of the jobs guaranteed."""

_GPU_HOURS_TOLERANCE = 0.05
_ATTEMPTS = 200
_JITTER = 0.3  # of the distance between neighbouring quantiles


def generate_jobs(
    variant: str,
    n_jobs: int,
    seed: int,
    times: ReferenceTimes,
    *,
    stats: WorkloadStatistics | None = None,
) -> JobTrace:
    """Generate a workload.

    Parameters
    ----------
    variant
        One of `VARIANTS`: ``base``; ``bp``, where the requested plan is the best one measured for
        the requested GPUs; ``mt``, where part of the jobs is guaranteed. Steps and arrivals of one
        seed are the same in all variants.
    n_jobs
        Jobs; they are spread over the same span of time whatever their number.
    seed
        Seed of all random choices.
    times
        Iteration times of the throughput source; steps follow from nominal durations by them.
    stats
        Statistics to draw from; the packaged ones of the Base trace if not given.

    Returns
    -------
    JobTrace
        In order of submission.

    Raises
    ------
    InputError
        The variant is unknown or a count is below 1.
    UnknownNameError, TraceError
        The source has no throughput for a request of the statistics.
    """
    if variant not in VARIANTS or n_jobs < 1:
        raise InputError(
            f"cannot generate {n_jobs} jobs of variant {variant!r}; "
            f"accepted: 1 or more, of {', '.join(VARIANTS)}"
        )
    known = stats or statistics()
    base = _base(n_jobs, np.random.default_rng([seed, n_jobs]), times, known)
    jobs = {
        "base": lambda: base,
        "bp": lambda: with_best_plan(base, times),
        "mt": lambda: with_guarantees(base, known.guaranteed_share, seed),
    }[variant]()
    where = f"generated {variant} workload, seed {seed}"
    return JobTrace(jobs, finish_report(where, len(jobs), len(jobs), ()))


def _base(
    n_jobs: int, rng: np.random.Generator, times: ReferenceTimes, stats: WorkloadStatistics
) -> tuple[JobSpec, ...]:
    counts = apportion(np.array([request.weight for request in stats.requests]), n_jobs)
    chosen = rng.permutation(np.repeat(np.arange(len(counts)), counts))
    requests = [stats.requests[number] for number in chosen]
    arrivals = _arrivals(n_jobs, rng, stats)
    durations = _durations(requests, rng, stats)
    return tuple(
        JobSpec(
            job_id=f"{request.workload}-{number}",
            submit_time_s=float(submit),
            workload=request.workload,
            n_gpus=request.n_gpus,
            n_cpus=stats.cpus_per_gpu * request.n_gpus,
            plan=request.plan,
            steps=times.steps(request.workload, request.n_gpus, request.plan, float(duration)),
            duration_s=float(duration),
        )
        for number, (request, submit, duration) in enumerate(zip(requests, arrivals, durations, strict=True))
    )


def _arrivals(n_jobs: int, rng: np.random.Generator, stats: WorkloadStatistics) -> Floats:
    """Spread the jobs over the hours of the span, on whole seconds; the first one comes at zero."""
    hours = stats.hours()
    counts = apportion(np.array([count for _, _, count in hours], dtype=np.float64), n_jobs)
    drawn = [rng.uniform(start, end, count) for (start, end, _), count in zip(hours, counts, strict=True)]
    arrivals: Floats = np.floor(np.sort(np.concatenate(drawn)))
    arrivals[0] = 0.0
    if n_jobs > 1:
        arrivals[-1] = np.floor(stats.span_s)
    return arrivals


def _durations(requests: list[Request], rng: np.random.Generator, stats: WorkloadStatistics) -> Floats:
    """Give every job a duration so that the whole meets the quantiles and the GPU-hours."""
    n_jobs = len(requests)
    step = 1.0 / max(n_jobs - 1, 1)
    shares = np.clip(np.linspace(0.0, 1.0, n_jobs) + rng.uniform(-_JITTER, _JITTER, n_jobs) * step, 0.0, 1.0)
    values = np.sort(stats.durations(shares))
    gpus = np.array([request.n_gpus for request in requests], dtype=np.float64)
    location, spread = (
        np.array([stats.heaviness[request.workload][part] for request in requests]) for part in (0, 1)
    )
    location = location + stats.heaviness_per_log_gpus * np.log(gpus)
    target = stats.gpu_hours * HOUR * n_jobs / stats.n_jobs
    best, best_error = values, np.inf
    for _ in range(_ATTEMPTS):
        durations = np.empty(n_jobs)
        durations[np.argsort(location + spread * rng.standard_normal(n_jobs))] = values
        error = abs(float(durations @ gpus) / target - 1.0)
        if error < best_error:
            best, best_error = durations, error
        if error <= _GPU_HOURS_TOLERANCE:
            break
    return best
