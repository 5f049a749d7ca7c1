"""Workloads of the live scheduler, from the packaged preset."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from makespan.errors import unknown_name
from makespan.presets import read_preset
from makespan.workloads import JobSpec

__all__ = ["LiveSettings", "LiveWorkload", "live_jobs", "live_settings", "live_workload", "live_workloads"]

_PACKAGE, _PRESET, _SETTINGS = "makespan.live", "live", "measurement"
_GAP_JITTER = 0.4  # of the mean interval, to both sides


@dataclass(frozen=True, slots=True)
class LiveWorkload:
    """Statistics of a live workload.

    Parameters
    ----------
    name
        Key in the preset.
    jobs, seed
        Number of jobs, and which of all such workloads it is.
    workloads
        Share of the jobs that trains each small workload.
    slots
        Share of the jobs that asks for a number of slots.
    plans
        Plans that are asked for, in turn, by number of slots.
    median_duration_s, duration_log_sd
        Log-normal run time alone as requested [s].
    mean_interval_s
        Mean time between submissions [s].
    source
        Where the numbers come from.
    """

    name: str
    jobs: int
    seed: int
    workloads: Mapping[str, float]
    slots: Mapping[int, float]
    plans: Mapping[int, tuple[str, ...]]
    median_duration_s: float
    duration_log_sd: float
    mean_interval_s: float
    source: str


@dataclass(frozen=True, slots=True)
class LiveSettings:
    """How a live run is measured and timed.

    Parameters
    ----------
    policy_restart_delay_s
        The restart delay for which parameters of policies are made [s]; the time that they see is
        stretched so that the measured one looks as long.
    warmup_steps, steps, repetitions
        Of the profile, see `Procedure`.
    restart_steps
        Steps of each run with which the restart delay is measured.
    checkpoint_interval_s
        Wall time between the checkpoints of a job [s].
    source
        Where the numbers come from.
    """

    policy_restart_delay_s: float
    warmup_steps: int
    steps: int
    repetitions: int
    restart_steps: int
    checkpoint_interval_s: float
    source: str


def live_workloads() -> tuple[str, ...]:
    """Return the names of the live workloads."""
    return tuple(name for name in read_preset(_PACKAGE, _PRESET) if name != _SETTINGS)


def live_settings() -> LiveSettings:
    """Return how live runs are measured."""
    return LiveSettings(**read_preset(_PACKAGE, _PRESET)[_SETTINGS])


def live_workload(name: str) -> LiveWorkload:
    """Return a live workload.

    Raises
    ------
    UnknownNameError
        There is none of that name.
    """
    if name not in live_workloads():
        raise unknown_name("live workload", name, live_workloads())
    entry = dict(read_preset(_PACKAGE, _PRESET)[name])
    slots = {int(count): share for count, share in entry.pop("slots").items()}
    plans = {int(count): tuple(texts) for count, texts in entry.pop("plans").items()}
    return LiveWorkload(name=name, slots=slots, plans=plans, **entry)


def live_jobs(spec: LiveWorkload, iter_time_s: Callable[[str, int, str], float], seed: int) -> list[JobSpec]:
    """Generate the jobs of a workload.

    Shares are apportioned and quantiles of the durations stratified, so that a seed decides which
    job gets what, and not how much work there is.

    Parameters
    ----------
    spec
        The statistics.
    iter_time_s
        Measured time of a step [s] by workload, slots and plan.
    seed
        Of the order and the arrivals, together with the seed of the workload.

    Returns
    -------
    list of JobSpec
        In the order of submission; the first at 0 s.
    """
    rng = np.random.default_rng([spec.seed, seed])
    keys = rng.permutation(np.array(_apportion(spec.workloads, spec.jobs)))
    slots = rng.permutation(np.array(_apportion(spec.slots, spec.jobs)))
    normal = NormalDist(sigma=spec.duration_log_sd)
    spread = [np.exp(normal.inv_cdf((rank + 0.5) / spec.jobs)) for rank in range(spec.jobs)]
    durations_s = rng.permutation(spec.median_duration_s * np.array(spread))
    gaps_s = spec.mean_interval_s * (1 + _GAP_JITTER * rng.uniform(-1, 1, spec.jobs))
    submit_s = np.concatenate([[0.0], np.cumsum(gaps_s)[:-1]])
    taken: dict[int, int] = {}
    jobs = []
    for number, (key, n_slots) in enumerate(zip(keys.tolist(), slots.tolist(), strict=True)):
        plans = spec.plans[n_slots]
        plan = plans[taken.setdefault(n_slots, 0) % len(plans)]
        taken[n_slots] += 1
        duration_s = float(durations_s[number])
        steps = max(round(duration_s / iter_time_s(key, n_slots, plan)), 1)
        jobs.append(
            JobSpec(f"{number:02d}-{key}", float(submit_s[number]), key, n_slots, n_slots, plan, steps,
                    duration_s=duration_s)
        )  # fmt: skip
    return jobs


def _apportion(shares: Mapping[Any, float], total: int) -> list[Any]:
    """Return each value as often as its share says, largest remainders first."""
    whole = sum(shares.values())
    exact = {value: total * share / whole for value, share in shares.items()}
    counts = {value: int(number) for value, number in exact.items()}
    rest = sorted(exact, key=lambda value: counts[value] - exact[value])
    for value in rest[: total - sum(counts.values())]:
        counts[value] += 1
    return [value for value, count in counts.items() for _ in range(count)]
