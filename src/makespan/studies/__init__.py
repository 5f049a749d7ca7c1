"""Studies: scenarios as values, many validated simulations in a pool, comparisons and intervals.

A `Scenario` is everything that a simulation needs, except the policy. `run` simulates one under one policy,
`run_all` a list of `Case` in processes; every schedule is validated. `comparison` makes a table of the runs,
with ratios to a baseline, and `intervals` means over lists with confidence intervals. `TableCatalogue`
holds what jobs may run as, from throughput tables.
"""

from makespan.studies._catalogue import TableCatalogue
from makespan.studies._comparison import comparison, intervals, measures
from makespan.studies._pool import Progress, RunError, run_all
from makespan.studies._runs import Case, ImpossibleScheduleError, Run, run, violation_lines
from makespan.studies._scenario import Scenario

__all__ = [
    "Case",
    "ImpossibleScheduleError",
    "Progress",
    "Run",
    "RunError",
    "Scenario",
    "TableCatalogue",
    "comparison",
    "intervals",
    "measures",
    "run",
    "run_all",
    "violation_lines",
]
