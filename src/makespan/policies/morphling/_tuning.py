"""Every number of the policies that is a choice, in one place."""

import math
from dataclasses import dataclass

__all__ = ["NON_CLAIRVOYANT", "CLAIRVOYANT", "Tuning"]


@dataclass(frozen=True, slots=True)
class Tuning:
    """Parameters of both variants, found by search over perturbed arrival times, not on one trace.

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
    critical_ratio
        Share of the time that all other work needs which a critical job takes alone.
    critical_delays
        Jobs shorter than this many restart delays are never critical.
    last_weight
        How many jobs the end of the schedule counts as.
    grain_s
        Finish times closer than this are one instant to the lookahead [s].
    max_foreseen
        Blocked jobs, from the head of the queue, that the lookahead follows.
    min_gain_s
        Least sum of finish times that a preemption saves [s].
    min_wait_delays
        Jobs that wait less than this many restart delays preempt nobody.
    max_preempting, max_preemptions
        Blocked jobs, from the head of the queue, that may preempt others, and preemptions in one decision.
    min_saving_s
        Time by which a starting job ends earlier with more devices [s].
    min_growth_s, min_growth_share
        Time by which a running job ends earlier with more devices, restart and devices paid for [s], and the
        same as a share of what it has left; both must hold.
    gate_share
        Share of its time that a running job must not spend on restarts to grow; 0.97 in the paper.
    """

    arrival_memory_s: float = 3600.0
    start_horizon_s: float = 3600.0
    growth_horizon_s: float = 240.0
    cost_tolerance: float = 1.15
    ageing_s: float = 12000.0
    guarantee_factor: float = 0.3
    critical_ratio: float = 1.3
    critical_delays: float = 4.0
    last_weight: float = 0.5
    grain_s: float = 30.0
    max_foreseen: int = 64
    min_gain_s: float = 100.0
    min_wait_delays: float = 0.5
    max_preempting: int = 4
    max_preemptions: int = 12
    min_saving_s: float = 1.0
    min_growth_s: float = 60.0
    min_growth_share: float = 0.1
    gate_share: float = 0.0


CLAIRVOYANT = Tuning()
"""Parameters of `morphling-work`."""

NON_CLAIRVOYANT = Tuning(
    ageing_s=1e5, critical_ratio=math.inf, last_weight=0.0, max_preempting=2, gate_share=0.97
)
"""Parameters of `morphling-lookahead`: no job is called critical and no end foreseen by estimates alone."""
