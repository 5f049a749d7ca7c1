"""The job: one training run that a user submits."""

import math
from dataclasses import dataclass

from makespan.errors import InputError

__all__ = ["JobSpec"]


@dataclass(frozen=True, slots=True)
class JobSpec:
    """One row of a job trace; checked on construction.

    Parameters
    ----------
    job_id
        Name, unique in its trace.
    submit_time_s
        When the job enters the system [s].
    workload
        Key of what it trains.
    n_gpus, n_cpus
        Devices and CPU threads that the user asks for.
    plan
        Execution plan that the user asks for, in trace notation.
    steps
        Optimiser steps to run.
    is_guaranteed
        Whether the job must run at least as fast as with what it asks for; otherwise it is best-effort.
    tenant
        Owner of a quota, empty if there is none.
    duration_s
        Run time that the trace states for the request [s]; information only, the engine never reads it.

    Raises
    ------
    InputError
        A name is empty, a time is negative or not a number, or a count is below its least value.
    """

    job_id: str
    submit_time_s: float
    workload: str
    n_gpus: int
    n_cpus: int
    plan: str
    steps: int
    is_guaranteed: bool = False
    tenant: str = ""
    duration_s: float | None = None

    def __post_init__(self) -> None:
        """Check names, times and counts."""
        for name in ("job_id", "workload", "plan"):
            if not getattr(self, name):
                raise self._error(name, "a text that is not empty")
        if not (math.isfinite(self.submit_time_s) and self.submit_time_s >= 0):
            raise self._error("submit_time_s", "a finite time in s, not negative")
        if self.duration_s is not None and not (math.isfinite(self.duration_s) and self.duration_s >= 0):
            raise self._error("duration_s", "a finite time in s, not negative, or None")
        for name, least in (("n_gpus", 1), ("n_cpus", 0), ("steps", 0)):
            value = getattr(self, name)
            if not math.isfinite(value) or value < least or value != int(value):
                raise self._error(name, f"a whole number >= {least}")

    def _error(self, name: str, accepted: str) -> InputError:
        return InputError(f"job {self.job_id!r}: {name} is {getattr(self, name)!r}; accepted: {accepted}")
