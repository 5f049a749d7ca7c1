"""Statistics from which synthetic workloads are drawn."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

import numpy as np
import numpy.typing as npt

from makespan.errors import InputError, unknown_name
from makespan.units import HOUR

__all__ = ["Request", "WorkloadStatistics", "apportion", "statistics"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Request:
    """What users ask for, and how often.

    Parameters
    ----------
    workload
        Key of the workload.
    n_gpus
        GPUs.
    plan
        Execution plan in trace notation.
    weight
        Relative frequency.
    """

    workload: str
    n_gpus: int
    plan: str
    weight: float


@dataclass(frozen=True, slots=True)
class WorkloadStatistics:
    """Statistics of a job list.

    Parameters
    ----------
    n_jobs, span_s
        Jobs, and time between the first and the last submission [s].
    cpus_per_gpu
        CPU threads requested for each GPU.
    gpu_hours
        GPUs times nominal duration of all jobs [h].
    guaranteed_share
        Share of guaranteed jobs in the multi-tenant variant.
    large
        Workloads that count as large.
    arrivals_per_hour
        Submissions in each hour of the span.
    duration_share, duration_s
        Nominal durations [s] at shares of the jobs.
    heaviness
        Location and spread of the logarithm of the duration, by workload.
    heaviness_per_log_gpus
        What the logarithm of the GPUs adds to the location.
    requests
        What is asked for.
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


@cache
def statistics(name: str = "base") -> WorkloadStatistics:
    """Return the packaged statistics of that name.

    Raises
    ------
    UnknownNameError
        There are none.
    """
    folder = resources.files("makespan.traces").joinpath("presets")
    names = [entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml")]
    if name not in names:
        raise unknown_name("workload statistics", name, names)
    data = tomllib.loads(folder.joinpath(f"{name}.toml").read_text("utf-8"))
    return WorkloadStatistics(
        n_jobs=data["n_jobs"],
        span_s=data["span_s"],
        cpus_per_gpu=data["cpus_per_gpu"],
        gpu_hours=data["gpu_hours"],
        guaranteed_share=data["guaranteed_jobs"] / data["n_jobs"],
        large=tuple(data["large"]),
        arrivals_per_hour=tuple(data["arrivals_per_hour"]),
        duration_share=tuple(data["durations"]["share"]),
        duration_s=tuple(data["durations"]["time_s"]),
        heaviness={
            key: (location, spread) for key, (location, spread) in data["heaviness"]["workloads"].items()
        },
        heaviness_per_log_gpus=data["heaviness"]["per_log_gpus"],
        requests=tuple(
            Request(entry["workload"], n_gpus, plan, weight)
            for entry in data["requests"]
            for n_gpus, plan, weight in entry["plans"]
        ),
    )


def apportion(weights: Floats, total: int) -> Ints:
    """Divide a total by weights, not all 0, into whole numbers, largest remainders first."""
    values = np.asarray(weights, dtype=np.float64)
    if total < 0 or not values.size or (values < 0).any() or not values.sum() > 0:
        raise InputError(
            f"cannot divide {total} by weights {values.tolist()}; accepted: 0 or more, not all 0"
        )
    exact = values * (total / values.sum())
    parts: Ints = np.floor(exact).astype(np.int64)
    order = np.argsort(-(exact - parts), kind="stable")
    parts[order[: total - int(parts.sum())]] += 1
    return parts
