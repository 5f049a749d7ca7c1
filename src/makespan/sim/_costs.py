"""What a start or a change of a job costs."""

import math
from dataclasses import dataclass
from typing import Protocol

from makespan.errors import InputError
from makespan.sim._catalogue import Allocation
from makespan.workloads import JobSpec

__all__ = ["RestartCost", "RestartDelays", "restart_cost"]


class RestartCost(Protocol):
    """Time without progress at the beginning of each allocation; engine and validator ask the same value."""

    @property
    def expected_s(self) -> float:
        """What policies reckon with for any change [s]."""

    def __call__(self, job: JobSpec, old: Allocation | None, new: Allocation) -> float:
        """Return the time between getting an allocation and making progress on it [s].

        The old one is what the job held last, even if it has waited since; None at its first start.
        """


@dataclass(frozen=True, slots=True)
class RestartDelays:
    """Fixed delays by the kind of change, finite and not negative, or an InputError.

    Parameters
    ----------
    first_start_s, replan_s, move_s
        At the first start, where the configuration changes, and where the same one starts again [s].
    """

    first_start_s: float
    replan_s: float
    move_s: float

    def __post_init__(self) -> None:
        """Check the delays."""
        for name in ("first_start_s", "replan_s", "move_s"):
            _check_delay(name, getattr(self, name))

    @classmethod
    def constant(cls, delay_s: float) -> "RestartDelays":
        """Return one delay [s] for every start and every change."""
        return cls(delay_s, delay_s, delay_s)

    @classmethod
    def first_start_only(cls, delay_s: float) -> "RestartDelays":
        """Return a delay [s] at the first start and none at changes."""
        return cls(delay_s, 0.0, 0.0)

    @classmethod
    def changes_only(cls, delay_s: float) -> "RestartDelays":
        """Return a delay [s] at every change and every start but the first."""
        return cls(0.0, delay_s, delay_s)

    @property
    def expected_s(self) -> float:
        """Longest of the delays [s]."""
        return max(self.first_start_s, self.replan_s, self.move_s)

    def __call__(self, job: JobSpec, old: Allocation | None, new: Allocation) -> float:
        """Return the delay of a start or change [s]."""
        if old is None:
            return self.first_start_s
        return self.move_s if old.configuration is new.configuration else self.replan_s


def restart_cost(restart_delay_s: float | RestartCost) -> RestartCost:
    """Return a cost, given as such or as one delay [s], not negative and finite or an InputError."""
    if not isinstance(restart_delay_s, int | float):
        return restart_delay_s
    _check_delay("restart_delay_s", restart_delay_s)
    return RestartDelays.constant(restart_delay_s)


def _check_delay(name: str, delay_s: float) -> None:
    if not (math.isfinite(delay_s) and delay_s >= 0):
        raise InputError(f"{name} is {delay_s!r}; accepted: a finite time in s, not negative")
