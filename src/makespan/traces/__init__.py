"""Job traces and failure traces: readers, generators, transformations.

Job traces are generated, or read from the artifacts of the papers and from public traces, with a report of
all rows that were dropped or repaired. Transformations change load, models and guarantees::

    times = ReferenceTimes({key: source.load(key) for key in source.workload_keys()})
    trace = generate_jobs("base", 406, 1, times)

Readers take the path of a file, which may be compressed, separated by any usual character, or in UTF-16.
They raise `MissingDataError` if there is no such file. They raise `TraceError`, with file, row, column and
accepted values, if the file is empty or lacks a column, a cell cannot be read, or no job is left. `REPAIRS`
lists the defects that all readers repair in the same way.
"""

from makespan.traces.cells import (
    REPAIRS as REPAIRS,
    Finding as Finding,
    ReadReport as ReadReport,
)
from makespan.traces.jobs import (
    JobTrace as JobTrace,
    jobs_table as jobs_table,
    listed_jobs as listed_jobs,
    read_jobs as read_jobs,
    read_morphling_jobs as read_morphling_jobs,
    write_jobs as write_jobs,
)
from makespan.traces.nodes import (
    read_node_events as read_node_events,
    read_nodes as read_nodes,
)
from makespan.traces.readers import (
    EASYSCALE_JOBS as EASYSCALE_JOBS,
    NODE_LIST as NODE_LIST,
    read_easyscale_jobs as read_easyscale_jobs,
    read_gavel_jobs as read_gavel_jobs,
    read_gavel_throughputs as read_gavel_throughputs,
    read_helios_jobs as read_helios_jobs,
    read_helios_quota as read_helios_quota,
    read_oobleck_nodes as read_oobleck_nodes,
    read_openb_nodes as read_openb_nodes,
    read_openb_pods as read_openb_pods,
    read_pai_jobs as read_pai_jobs,
    read_pai_machines as read_pai_machines,
    read_philly_jobs as read_philly_jobs,
    read_philly_machines as read_philly_machines,
    read_pollux_jobs as read_pollux_jobs,
    read_profiled_jobs as read_profiled_jobs,
    read_requests as read_requests,
    read_spot_jobs as read_spot_jobs,
    read_spot_nodes as read_spot_nodes,
    read_tiresias_jobs as read_tiresias_jobs,
    request_trace as request_trace,
)
from makespan.traces.requests import (
    RequestTrace as RequestTrace,
    WorkloadMapping as WorkloadMapping,
    map_requests as map_requests,
)
from makespan.traces.synthetic import (
    VARIANTS as VARIANTS,
    Request as Request,
    WorkloadStatistics as WorkloadStatistics,
    apportion as apportion,
    generate_jobs as generate_jobs,
    scaled as scaled,
    statistics as statistics,
    subsampled as subsampled,
    with_best_plan as with_best_plan,
    with_guarantees as with_guarantees,
    with_large_share as with_large_share,
    with_load as with_load,
    with_perturbed_arrivals as with_perturbed_arrivals,
)
