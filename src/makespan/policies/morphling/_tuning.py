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
    min_gain_s
        Least sum of finish times that a preemption saves [s].
    min_growth_share
        Share of the time left by which a running job ends earlier with more devices, restart and devices
        paid for.
    gate_share
        Share of its time that a running job must not spend on restarts to grow; 0.97 in the paper.
    """

    arrival_memory_s: float = 3600.0
    start_horizon_s: float = 3600.0
    growth_horizon_s: float = 240.0
    cost_tolerance: float = 1.15
    ageing_s: float = 12000.0
    guarantee_factor: float = 0.3
    last_weight: float = 0.5
    try_last: bool = False
    lw_rate: float = 0.0
    lw_n: float = 0.0
    critical_weight: float = 0.0
    critical_power: float = 1.0
    min_gain_s: float = 100.0
    min_growth_share: float = 0.1
    gate_share: float = 0.0
    grain_s: float = 30.0
    max_foreseen: int = 64
    max_preempting: int = 4
    max_preemptions: int = 12
    look_again_s: float = 900.0


CLAIRVOYANT = Tuning()
"""Parameters of `morphling-work`."""

NON_CLAIRVOYANT = Tuning(ageing_s=1e5, last_weight=0.0, max_preempting=2, gate_share=0.97)
"""Parameters of the variant that does not know run times."""
