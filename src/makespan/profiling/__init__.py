"""Profiler: measure a machine and the iteration times of small workloads on it.

- `measure_points` trains plans of one placement for a few steps; `profile_table` joins such parts into a
  throughput table, `profile_record` into the record of their measurement
- `Measurements` stores and counts finished runs, so that an interrupted profile can resume
- `measure_rates` measures the machine, `environment_text` writes the result for the performance model
- `measure_own` times steps of a model of one's own, as rows that `makespan.planning.read_measured` reads
- `profiling_launcher` and `allocation_launcher` choose the launcher of the processes
"""

from makespan.profiling.own import MakeStep as MakeStep, measure_own as measure_own
from makespan.profiling.profile import (
    Measurements as Measurements,
    Procedure as Procedure,
    ProfilePoint as ProfilePoint,
    measure_points as measure_points,
    measured_by as measured_by,
    model_of as model_of,
    point_plan as point_plan,
    profile_batches as profile_batches,
    profile_points as profile_points,
    profile_record as profile_record,
    profile_table as profile_table,
)
from makespan.profiling.rates import (
    allocation_launcher as allocation_launcher,
    environment_text as environment_text,
    measure_rates as measure_rates,
    measured_on as measured_on,
    profiling_launcher as profiling_launcher,
    rate_runs as rate_runs,
)
