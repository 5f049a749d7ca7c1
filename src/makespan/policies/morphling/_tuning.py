"""Every number of the policies that is a choice, in one place."""

import math
from dataclasses import dataclass

__all__ = ["NON_CLAIRVOYANT", "CLAIRVOYANT", "Tuning"]


@dataclass(frozen=True, slots=True)
class Tuning:
    """Parameters of both variants, found by search over perturbed arrival times, not on one trace."""

    arrival_memory_s: float = 3600.0  # age at which an arrival counts 1/e in the arrival rate
    start_horizon_s: float = 3600.0  # arrivals within it are those that a starting job delays
    growth_horizon_s: float = 240.0  # the same for a job that takes more devices, which it can give back
    cost_tolerance: float = 1.15  # ratio of its least cost at which a job starts at once rather than wait
    ageing_s: float = 12000.0  # waiting time that halves the area by which a job queues
    guarantee_factor: float = 0.3  # on the area of guaranteed jobs in the queue; 0 serves them first
    critical_ratio: float = 1.3  # of the time that all other work needs, which a critical job takes alone
    critical_delays: float = 4.0  # jobs shorter than this many restart delays are never critical
    last_weight: float = 0.5  # how many jobs the end of the schedule counts as
    grain_s: float = 30.0  # finish times closer than this are one instant to the lookahead
    max_foreseen: int = 64  # blocked jobs, from the head of the queue, that the lookahead follows
    min_gain_s: float = 100.0  # least sum of finish times that a preemption saves
    min_wait_delays: float = 0.5  # jobs that wait less than this many restart delays preempt nobody
    max_preempting: int = 4  # blocked jobs, from the head of the queue, that may preempt others
    max_preemptions: int = 12  # in one decision
    min_saving_s: float = 1.0  # by which a starting job ends earlier with more devices
    min_growth_s: float = 60.0  # by which a running job ends earlier with more, restart and devices paid for
    min_growth_share: float = 0.1  # the same as a share of what it has left; both must hold
    gate_share: float = 0.0  # of its time that a running job must not spend on restarts to grow (paper: 0.97)


CLAIRVOYANT = Tuning()
"""Parameters of `morphling-work`."""

NON_CLAIRVOYANT = Tuning(
    ageing_s=1e5, critical_ratio=math.inf, last_weight=0.0, max_preempting=2, gate_share=0.97
)
"""Parameters of `morphling`: no job is called critical and no end foreseen by estimates alone."""
