"""Every number of our policies that is a choice, in one place."""

from dataclasses import dataclass
from math import inf

__all__ = ["CLAIRVOYANT", "NON_CLAIRVOYANT", "Tuning"]


@dataclass(frozen=True, slots=True)
class Tuning:
    """Parameters of both variants, one set each for all lists, restart delays and sizes of clusters.

    The first nine are searched by ``benchmarks/search_policies.py``, others bound the effort of a decision.

    Parameters
    ----------
    start_horizon_s, growth_horizon_s, preempt_horizon_s
        Arrivals within it are those that a starting job delays, one that takes more devices, which it can
        give back, or one that takes them from others [s].
    cost_tolerance
        Ratio of its least cost at which a job starts at once rather than wait.
    guarantee_factor, preempt_factor
        On the area of guaranteed jobs: in the queue, where 0 serves them first, and where it is priced, as
        they preempt others.
    blocking_limit
        Share of the time that it has waited and will run itself for which a guaranteed job, which nothing
        stops, may keep arrivals waiting, all of them together; one that would keep them longer is held back.
    last_share
        Share of all known jobs that the end of the schedule counts as.
    min_growth_share
        Share of the time left by which a running job ends earlier with more devices, restart and devices
        paid for.
    arrival_memory_s
        Age at which an arrival counts 1/e in the arrival rate [s].
    look_again_s
        Period after which to decide again while devices are free beside running jobs [s].
    grain_s
        Finish times closer than this are one instant to the lookahead [s].
    max_foreseen, max_preempting
        Blocked jobs, from the head of the queue, that the lookahead follows, and that may preempt others.
    max_trials, max_preemptions
        Preemptions that are tried, by what they could save at most, for each that is carried out, and these
        in one decision.
    """

    start_horizon_s: float = 300.0
    growth_horizon_s: float = 150.0
    preempt_horizon_s: float = 700.0
    cost_tolerance: float = 1.3
    guarantee_factor: float = 0.13
    preempt_factor: float = 1.3
    blocking_limit: float = 2.7
    last_share: float = 0.32
    min_growth_share: float = 0.14
    arrival_memory_s: float = 3600.0
    look_again_s: float = 600.0
    grain_s: float = 30.0
    max_foreseen: int = 64
    max_preempting: int = 8
    max_trials: int = 4
    max_preemptions: int = 12


CLAIRVOYANT = Tuning()
"""Parameters of `morphling-work`."""

NON_CLAIRVOYANT = Tuning(
    start_horizon_s=4800.0,
    growth_horizon_s=140.0,
    preempt_horizon_s=400.0,
    cost_tolerance=1.0,
    guarantee_factor=0.12,
    preempt_factor=0.28,
    blocking_limit=inf,
    last_share=0.02,
    min_growth_share=0.05,
)
"""Parameters of `morphling-lookahead`, which foresees no end by estimates alone."""
