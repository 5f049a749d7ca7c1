"""Synthetic workloads of any size and seed, and changes of workloads.

Generated workloads have the statistics of the Base trace of Morphling. Counts (models, GPUs, plans,
submissions per hour) are apportioned exactly and the quantiles of the durations are stratified, so the seed
decides which job gets which value and when it arrives, but not the statistics of the whole list.

Changes of load, models, guarantees, plans, arrivals and size take jobs and return new ones in order of
submission; all other properties stay. Random changes take a seed, and the draw for a job depends only on the
seed and the name of the job, not on the other jobs in the list.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from makespan.arguments import check_fields, check_range, typed
from makespan.errors import InputError, shown, unknown_name
from makespan.files import read_preset
from makespan.numerics import named_rng, named_uniforms
from makespan.throughput import ReferenceTimes
from makespan.traces.cells import finish_report
from makespan.traces.jobs import JobTrace
from makespan.units import HOUR
from makespan.workloads import JobSpec

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Jobs = tuple[JobSpec, ...]
VARIANTS = ("base", "bp", "mt")
"""Variants: user-chosen plans, best measured plans, and part of the jobs guaranteed."""
_GPU_HOURS_TOLERANCE = 0.05
_ATTEMPTS = 200
_MOST_JOBS = 10_000_000
_JITTER = 0.3  # of the distance between neighbouring quantiles


@dataclass(frozen=True, slots=True)
class Request:
    """A request of a user: workload, GPUs, plan in trace notation, and the relative frequency."""

    workload: str
    n_gpus: int
    plan: str
    weight: float

    def __post_init__(self) -> None:
        check_fields(self, positive=("n_gpus", "weight"))


@dataclass(frozen=True, slots=True)
class WorkloadStatistics:
    """Statistics of a job list.

    Parameters
    ----------
    n_jobs, span_s, gpu_hours
        Jobs, time between the first and the last submission [s], GPUs times nominal duration of all jobs [h].
    cpus_per_gpu
        CPU threads requested per GPU.
    guaranteed_share, large
        Share of guaranteed jobs in the multi-tenant variant, and workloads that count as large.
    arrivals_per_hour
        Submissions in each hour of the span.
    duration_share, duration_s
        Nominal durations [s] at shares of the jobs.
    heaviness, heaviness_per_log_gpus
        Location and spread of the logarithm of the duration, by workload, and the slope of the location over
        the logarithm of the GPUs.
    """

    n_jobs: int
    span_s: float
    cpus_per_gpu: int
    gpu_hours: float
    guaranteed_share: float
    large: tuple[str, ...]
    arrivals_per_hour: tuple[int, ...]
    duration_share: tuple[float, ...]
    duration_s: tuple[float, ...]
    heaviness: Mapping[str, tuple[float, float]]
    heaviness_per_log_gpus: float
    requests: tuple[Request, ...]

    def durations(self, share: Floats) -> Floats:
        """Return the nominal duration [s] at each share of the jobs, log-linear between the known ones."""
        logs = np.interp(share, self.duration_share, np.log(self.duration_s))
        return np.asarray(np.exp(logs), dtype=np.float64)

    def hours(self) -> list[tuple[float, float, int]]:
        """Return start [s], end [s] and submissions of each hour of the span."""
        return [
            (hour * HOUR, min((hour + 1) * HOUR, self.span_s), count)
            for hour, count in enumerate(self.arrivals_per_hour)
        ]


@typed
@cache
def statistics(name: str = "base") -> WorkloadStatistics:
    """Return the packaged statistics of that name."""
    folder = resources.files("makespan.traces").joinpath("presets")
    names = [entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml")]
    if name not in names:
        raise unknown_name("workload statistics", name, names)
    data = read_preset("makespan.traces", name)
    return WorkloadStatistics(
        **{key: data[key] for key in ("n_jobs", "span_s", "cpus_per_gpu", "gpu_hours")},
        guaranteed_share=data["guaranteed_jobs"] / data["n_jobs"],
        large=tuple(data["large"]),
        arrivals_per_hour=tuple(data["arrivals_per_hour"]),
        duration_share=tuple(data["durations"]["share"]),
        duration_s=tuple(data["durations"]["time_s"]),
        heaviness={key: tuple(pair) for key, pair in data["heaviness"]["workloads"].items()},
        heaviness_per_log_gpus=data["heaviness"]["per_log_gpus"],
        requests=tuple(
            Request(entry["workload"], n_gpus, plan, weight)
            for entry in data["requests"]
            for n_gpus, plan, weight in entry["plans"]
        ),
    )


# --- Generation ---


@typed
def generate_jobs(
    variant: str, n_jobs: int, seed: int, times: ReferenceTimes, *, stats: WorkloadStatistics | None = None
) -> JobTrace:
    """Generate a workload; raises `TraceError` if the source has no throughput for a request.

    Parameters
    ----------
    variant
        One of `VARIANTS`: ``base``; ``bp``, where the requested plan is the best one measured for
        the requested GPUs; ``mt``, where part of the jobs is guaranteed. Steps and arrivals of one
        seed are the same in all variants.
    n_jobs
        Number of jobs; the span of time does not depend on it.
    times
        Reference times, by which steps follow from nominal durations.
    stats
        Statistics to draw from; the packaged ones of the Base trace if not given.
    """
    if variant not in VARIANTS or n_jobs < 1:
        raise InputError(
            f"cannot generate {n_jobs} jobs of variant {variant!r}; "
            f"expected 1 or more, of {', '.join(VARIANTS)}"
        )
    check_range("seed", seed)
    known = stats or statistics()
    # The order of the draws (requests, arrivals, durations) is fixed: another order gives other jobs.
    rng = np.random.default_rng([seed, n_jobs])
    counts = apportion(np.array([request.weight for request in known.requests]), n_jobs)
    chosen = rng.permutation(np.repeat(np.arange(len(counts)), counts))
    requests = [known.requests[number] for number in chosen]
    arrivals = _arrivals(n_jobs, rng, known)
    durations = _durations(requests, rng, known)
    jobs = tuple(
        JobSpec(
            job_id=f"{request.workload}-{number}",
            submit_time_s=float(submit),
            workload=request.workload,
            n_gpus=request.n_gpus,
            n_cpus=known.cpus_per_gpu * request.n_gpus,
            plan=request.plan,
            steps=times.steps(request.workload, request.n_gpus, request.plan, float(duration)),
            duration_s=float(duration),
        )
        for number, (request, submit, duration) in enumerate(zip(requests, arrivals, durations, strict=True))
    )
    if variant == "bp":
        jobs = with_best_plan(jobs, times)
    elif variant == "mt":
        # By position, not by name, so that generated lists stay the same from version to version.
        order = np.random.default_rng([seed, *b"guarantees"]).permutation(n_jobs)
        jobs = _guaranteed(jobs, set(order[: round(known.guaranteed_share * n_jobs)].tolist()))
    where = f"generated {variant} workload, seed {seed}"
    return JobTrace(jobs, finish_report(where, len(jobs), len(jobs), ()))


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
    """Assign a duration to every job so that the quantiles and the GPU-hours of the whole are met."""
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
    # Heavy workloads get long durations, with random ranks; draws are repeated until the GPU-hours fit.
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


@typed
def apportion(weights: Floats, total: int) -> Ints:
    """Divide a total by weights, not all 0, into whole numbers, largest remainders first."""
    try:
        values = np.asarray(weights, dtype=np.float64)
    except (TypeError, ValueError):
        values = np.empty(0)
    if total < 0 or values.ndim != 1 or not values.size or (values < 0).any() or not values.sum() > 0:
        raise InputError(f"cannot divide {total} by weights {shown(weights)}; expected 0 or more, not all 0")
    exact = values * (total / values.sum())
    parts: Ints = np.floor(exact).astype(np.int64)
    order = np.argsort(-(exact - parts), kind="stable")
    parts[order[: total - int(parts.sum())]] += 1
    return parts


# --- Changes ---


@typed
def with_load(jobs: Iterable[JobSpec], factor: float) -> Jobs:
    """Scale the arrival rate of jobs by a factor; their order stays."""
    if not 0 < factor < float("inf"):
        raise InputError(f"load factor {factor}; expected a finite number above 0")
    return tuple(replace(job, submit_time_s=job.submit_time_s / factor) for job in jobs)


@typed
def with_best_plan(jobs: Iterable[JobSpec], times: ReferenceTimes) -> Jobs:
    """Replace every requested plan by the fastest one measured with as many GPUs; steps stay."""
    return tuple(replace(job, plan=times.best(job.workload, job.n_gpus).plan) for job in jobs)


@typed
def with_guarantees(jobs: Iterable[JobSpec], share: float, seed: int) -> Jobs:
    """Guarantee exactly a share of the jobs, from 0 to 1, drawn at random."""
    listed = tuple(jobs)
    _check_share(share)
    return _guaranteed(listed, set(_ranked(listed, seed, "guarantees")[: round(share * len(listed))]))


def _guaranteed(jobs: Jobs, chosen: Collection[int]) -> Jobs:
    return tuple(replace(job, is_guaranteed=number in chosen) for number, job in enumerate(jobs))


@typed
def with_large_share(
    jobs: Iterable[JobSpec],
    share: float,
    seed: int,
    times: ReferenceTimes,
    *,
    stats: WorkloadStatistics | None = None,
) -> Jobs:
    """Replace as few jobs as necessary so that a share of all, from 0 to 1, trains large models.

    A replaced job keeps its submission, nominal duration, which it must have, guarantee and tenant; model,
    GPUs and plan are drawn from the statistics, and its steps follow from the duration.
    """
    known, listed = stats or statistics(), list(jobs)
    _check_share(share)
    is_large = np.array([job.workload in known.large for job in listed], dtype=bool)
    missing = round(share * len(listed)) - int(is_large.sum())
    candidates = np.flatnonzero(~is_large if missing > 0 else is_large)
    ranked = _ranked([listed[number] for number in candidates], seed, "large models")
    replaced = candidates[ranked[: abs(missing)]]
    offers = [request for request in known.requests if (request.workload in known.large) == (missing > 0)]
    drawn = drawn_requests(offers, [listed[number].job_id for number in replaced], seed, "large model")
    for number, request in zip(replaced, drawn, strict=True):
        job = listed[number]
        if job.duration_s is None:
            raise InputError(f"job {job.job_id!r}: no nominal duration; expected jobs that state one")
        listed[number] = replace(
            job,
            job_id=f"{request.workload}-for-{job.job_id}",
            workload=request.workload,
            n_gpus=request.n_gpus,
            n_cpus=known.cpus_per_gpu * request.n_gpus,
            plan=request.plan,
            steps=times.steps(request.workload, request.n_gpus, request.plan, job.duration_s),
        )
    return tuple(listed)


def drawn_requests(offers: Sequence[Request], names: Sequence[str], seed: int, purpose: str) -> list[Request]:
    """Draw a request for each name, in proportion to the weights; raises `InputError` without any offer."""
    if names and not offers:
        raise InputError(f"{len(names)} jobs to draw, no request to draw from; expected at least one")
    bounds = np.cumsum([offer.weight for offer in offers]) / sum(offer.weight for offer in offers)
    at = np.searchsorted(bounds, named_uniforms(seed, purpose, names), side="right")
    return [offers[number] for number in np.minimum(at, len(offers) - 1)]


def _ranked(jobs: Sequence[JobSpec], seed: int, purpose: str) -> list[int]:
    """Return the positions of jobs in a random order; two jobs keep their order in any subset."""
    drawn = named_uniforms(seed, purpose, (job.job_id for job in jobs))
    return [int(number) for number in np.argsort(drawn, kind="stable")]


@typed
def with_perturbed_arrivals(jobs: Iterable[JobSpec], std_s: float, seed: int) -> Jobs:
    """Shift every submission by Gaussian noise of a standard deviation [s], not below zero."""
    listed = tuple(jobs)
    if not 0 <= std_s < np.inf:
        raise InputError(f"standard deviation of arrivals {std_s}; expected a finite time in s, 0 or more")

    def moved(job: JobSpec) -> JobSpec:
        shift_s = named_rng(seed, "arrivals", job.job_id).normal(0.0, std_s)
        return replace(job, submit_time_s=max(0.0, job.submit_time_s + shift_s))

    return _ordered(map(moved, listed))


@typed
def subsampled(jobs: Iterable[JobSpec], share: float, seed: int) -> Jobs:
    """Keep a share of the jobs, above 0 and up to 1 and at least one job, drawn at random, in their order."""
    listed = tuple(jobs)
    if not 0.0 < share <= 1.0:
        raise InputError(f"share of jobs {share}; expected a number above 0, up to 1")
    n_kept = max(round(share * len(listed)), min(len(listed), 1))
    return tuple(listed[number] for number in sorted(_ranked(listed, seed, "subsample")[:n_kept]))


@typed
def scaled(jobs: Iterable[JobSpec], copies: int, seed: int, *, std_s: float = 600.0) -> Jobs:
    """Submit every job several times; the further copies arrive with Gaussian noise [s]."""
    listed = tuple(jobs)
    if copies < 1 or copies * len(listed) > _MOST_JOBS:
        raise InputError(f"{copies} copies of each job; expected 1 or more, and {_MOST_JOBS:,} jobs at most")
    result = list(listed)
    for number in range(1, copies):
        renamed = (replace(job, job_id=f"{job.job_id}/{number}") for job in listed)
        result += with_perturbed_arrivals(renamed, std_s, seed)
    return _ordered(result)


def _ordered(jobs: Iterable[JobSpec]) -> Jobs:
    return tuple(sorted(jobs, key=attrgetter("submit_time_s")))


def _check_share(share: float) -> None:
    if not 0.0 <= share <= 1.0:
        raise InputError(f"share of jobs {share}; expected a number from 0 to 1")
