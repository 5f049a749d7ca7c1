"""The profiler: measure a machine and the iteration times of small workloads on it.

- `measure_points` trains plans of one placement for a few steps; `profile_table` joins such parts
  into a throughput table, `profile_record` into the record beside it
- `Measurements` keeps what is measured, so that an interrupted profile goes on, and counts it
- `measure_rates` measures the machine itself, `environment_text` writes that for the performance
  model
- `profiling_launcher` and `allocation_launcher` choose where the processes run
"""

from makespan.profiling._design import ProfilePoint, model_of, point_plan, profile_batches, profile_points
from makespan.profiling._measurements import Measurements
from makespan.profiling._profile import (
    Procedure,
    measure_points,
    measured_by,
    profile_record,
    profile_table,
)
from makespan.profiling._rates import (
    allocation_launcher,
    environment_text,
    measure_rates,
    profiling_launcher,
    rate_runs,
)

__all__ = [
    "Measurements",
    "Procedure",
    "ProfilePoint",
    "model_of",
    "point_plan",
    "profile_batches",
    "profile_points",
    "allocation_launcher",
    "environment_text",
    "measure_points",
    "measure_rates",
    "measured_by",
    "profile_record",
    "profile_table",
    "profiling_launcher",
    "rate_runs",
]
