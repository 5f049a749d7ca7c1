"""Metrics of a schedule: pure functions from the tables of a simulation to numbers and tables.

Everything is computed from `makespan.tables.EVENTS` and `makespan.tables.OUTCOMES`, so a new metric
never needs a new simulation. `live_summary` is of live runs, `makespan.tables.LIVE`.
"""

from makespan.metrics._devices import (
    allocation_by_family,
    allocation_over_time,
    fragmentation_over_time,
    fragmentation_ratio,
    gpu_allocation_ratio,
)
from makespan.metrics._idle import IdleSpell, idle_spells
from makespan.metrics._jobs import Summary, guarantee_breaches, job_metrics, sla_attainment, summary
from makespan.metrics._live import live_summary
from makespan.metrics._steps import time_average

__all__ = [
    "IdleSpell",
    "Summary",
    "allocation_by_family",
    "allocation_over_time",
    "fragmentation_over_time",
    "fragmentation_ratio",
    "gpu_allocation_ratio",
    "guarantee_breaches",
    "idle_spells",
    "job_metrics",
    "live_summary",
    "sla_attainment",
    "summary",
    "time_average",
]
