"""Job traces and failure traces: readers, generators, transformations.

Job traces are read from the artifacts of the papers and from public traces, each with a report of
what was dropped or repaired, or generated; transformations change load, models and guarantees::

    times = ReferenceTimes({key: source.load(key) for key in source.workload_keys()})
    trace = generate_jobs("base", 406, 1, times)

Readers take the path of a file, which may be compressed, have another usual separator, or be in UTF-16. They
raise `MissingDataError` if there is none, and `TraceError` with file, row, column and what is accepted, if it
is empty, lacks a column, a cell cannot be read or no job is left. `REPAIRS` lists what all repair alike.
"""

from makespan.traces._artifacts import EASYSCALE_JOBS, read_easyscale_jobs, read_oobleck_nodes
from makespan.traces._cells import Finding, ReadReport
from makespan.traces._flat_lists import (
    NODE_LIST,
    read_helios_jobs,
    read_helios_quota,
    read_openb_nodes,
    read_openb_pods,
    read_spot_jobs,
    read_spot_nodes,
)
from makespan.traces._jobs import JobTrace, jobs_table, read_jobs, read_morphling_jobs, write_jobs
from makespan.traces._nested_lists import (
    read_pai_jobs,
    read_pai_machines,
    read_philly_jobs,
    read_philly_machines,
)
from makespan.traces._node_lists import read_nodes
from makespan.traces._repairs import REPAIRS
from makespan.traces._requests import RequestTrace, WorkloadMapping, map_requests
from makespan.traces._scheduler_lists import (
    read_gavel_jobs,
    read_gavel_throughputs,
    read_pollux_jobs,
    read_requests,
    read_tiresias_jobs,
    request_trace,
)
from makespan.traces._synthetic import (
    VARIANTS,
    Request,
    WorkloadStatistics,
    apportion,
    generate_jobs,
    scaled,
    statistics,
    subsampled,
    with_best_plan,
    with_guarantees,
    with_large_share,
    with_load,
    with_perturbed_arrivals,
)

__all__ = [
    "EASYSCALE_JOBS",
    "NODE_LIST",
    "REPAIRS",
    "VARIANTS",
    "Finding",
    "JobTrace",
    "ReadReport",
    "Request",
    "RequestTrace",
    "WorkloadMapping",
    "WorkloadStatistics",
    "apportion",
    "generate_jobs",
    "jobs_table",
    "map_requests",
    "read_easyscale_jobs",
    "read_gavel_jobs",
    "read_gavel_throughputs",
    "read_helios_jobs",
    "read_helios_quota",
    "read_jobs",
    "read_morphling_jobs",
    "read_nodes",
    "read_oobleck_nodes",
    "read_openb_nodes",
    "read_openb_pods",
    "read_pai_jobs",
    "read_pai_machines",
    "read_philly_jobs",
    "read_philly_machines",
    "read_pollux_jobs",
    "read_requests",
    "read_spot_jobs",
    "read_spot_nodes",
    "read_tiresias_jobs",
    "request_trace",
    "scaled",
    "statistics",
    "subsampled",
    "with_best_plan",
    "with_guarantees",
    "with_large_share",
    "with_load",
    "with_perturbed_arrivals",
    "write_jobs",
]
