"""Studies: scenarios as values, many validated simulations in a pool, and comparisons.

A `Scenario` is everything that a simulation needs, except the policy; `scenario` assembles one from names
and files. `run` simulates one under one policy, `run_all` a list of `Case` in processes, and `attempt_all`
goes on where one fails; every schedule is validated. `comparison` makes a table of the runs, with ratios to a
baseline, and `demand` says how much of the cluster the jobs ask for. `TableCatalogue` holds what jobs may run
as, from throughput tables.
"""

from makespan.studies._assembly import scenario
from makespan.studies._catalogue import TableCatalogue
from makespan.studies._clusters import read_cluster, resized
from makespan.studies._comparison import Demand, comparison, demand, measures, nobody_waited
from makespan.studies._formats import read_trace
from makespan.studies._job_lists import generated_jobs, limited_statistics
from makespan.studies._pool import Attempt, RunError, attempt_all, run_all
from makespan.studies._predictions import PREDICTION_MODES, PredictionMode, predicted_catalogue, predictions
from makespan.studies._runs import (
    Case,
    ImpossibleScheduleError,
    Run,
    Scenario,
    resolved,
    run,
    violation_lines,
)
from makespan.studies._stored import knowing, read_scenarios, read_times

__all__ = [
    "PREDICTION_MODES",
    "Attempt",
    "Case",
    "Demand",
    "ImpossibleScheduleError",
    "PredictionMode",
    "Run",
    "RunError",
    "Scenario",
    "TableCatalogue",
    "attempt_all",
    "comparison",
    "demand",
    "generated_jobs",
    "knowing",
    "limited_statistics",
    "measures",
    "nobody_waited",
    "predicted_catalogue",
    "predictions",
    "read_cluster",
    "read_scenarios",
    "read_times",
    "read_trace",
    "resized",
    "resolved",
    "run",
    "run_all",
    "scenario",
    "violation_lines",
]
