"""Every number of the policies that is a choice, in one place."""

from dataclasses import dataclass

__all__ = ["CLAIRVOYANT", "NON_CLAIRVOYANT", "Tuning"]


@dataclass(frozen=True, slots=True)
class Tuning:
    """Parameters of both variants, one set each for all lists, delays and sizes of clusters.

    Parameters
    ----------
    arrival_memory_s
        Age at which an arrival counts 1/e in the arrival rate [s].
    start_horizon_s, growth_horizon_s
        Arrivals within it are those that a starting job delays, or one that takes more devices, which it can
        give back [s].
    cost_tolerance
        Ratio of its least cost at which a job starts at once rather than wait.
    ageing_s
        Waiting time that halves the area by which a job queues [s].
    guarantee_factor
        On the area of guaranteed jobs in the queue; 0 serves them first.
    last_weight
        How many jobs the end of the schedule counts as.
    min_growth_share
        Share of the time left by which a running job ends earlier with more devices, restart and devices
        paid for.
    """

    arrival_memory_s: float = 3600.0
    start_horizon_s: float = 3600.0
    growth_horizon_s: float = 240.0
    cost_tolerance: float = 1.15
    ageing_s: float = 12000.0
    guarantee_factor: float = 0.3
    last_weight: float = 0.5
    min_growth_share: float = 0.1
    grain_s: float = 30.0
    max_foreseen: int = 64
    max_preempting: int = 4
    max_preemptions: int = 12
    look_again_s: float = 600.0


CLAIRVOYANT = Tuning()
"""Parameters of `morphling-work`."""

NON_CLAIRVOYANT = Tuning(ageing_s=1e5, last_weight=0.0, guarantee_factor=1.0)
"""Parameters of the variant that does not know run times."""
