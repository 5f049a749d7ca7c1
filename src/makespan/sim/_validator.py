"""The validator: replays an events table on its own and reports what could not have happened."""

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from makespan.hardware import ClusterSpec
from makespan.sim._catalogue import Catalogue
from makespan.workloads import JobSpec

__all__ = ["Violation", "validate_schedule"]


@dataclass(frozen=True, slots=True)
class Violation:
    """Something in a schedule that is not possible.

    Parameters
    ----------
    rule
        Key of the rule that is broken.
    time_s, seq
        Row of the events table; -1 where the table as a whole is concerned.
    job_id
        Job concerned, or empty.
    message
        What was found and what is accepted.
    """

    rule: str
    time_s: float
    seq: int
    job_id: str
    message: str


def validate_schedule(
    events: pd.DataFrame,
    jobs: Sequence[JobSpec],
    cluster: ClusterSpec,
    catalogue: Catalogue,
    restart_delay_s: float,
    *,
    interval_s: float | None = None,
    checkpoint_interval_s: float | None = None,
    extra_steps: int = 1,
    outcomes: pd.DataFrame | None = None,
) -> list[Violation]:
    """Check a schedule; an empty list means that it is possible."""
    raise NotImplementedError
