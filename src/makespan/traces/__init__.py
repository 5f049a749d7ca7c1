"""Throughput sources, job traces and data sets.

Every source gives the same table (`makespan.tables.THROUGHPUT`), so nothing downstream knows
where the numbers come from::

    source = PublishedSource(directory, default_cpu_threads=12)
    frame = source.load("roberta")

Job traces are read from the artifacts of the papers and from public traces, each with a report of
what was dropped or repaired, or generated; transformations change load, models and guarantees::

    times = ReferenceTimes({key: source.load(key) for key in source.workload_keys()})
    trace = generate_jobs("base", 406, 1, times)
"""

from makespan.traces._artifact import phase_unit, read_artifact_trace
from makespan.traces._check import check_jobs
from makespan.traces._clean import flag_anomalies
from makespan.traces._datasets import (
    Dataset,
    Opener,
    check_content,
    fetch,
    find_dataset,
    locate,
    read_register,
    verify,
)
from makespan.traces._easyscale import EASYSCALE_JOBS, read_easyscale_jobs
from makespan.traces._emulated import EmulatedSource
from makespan.traces._generate import VARIANTS, generate_jobs
from makespan.traces._helios import read_helios_jobs, read_helios_quota
from makespan.traces._jobs import (
    JobTrace,
    jobs_from_table,
    jobs_table,
    read_jobs,
    read_morphling_jobs,
)
from makespan.traces._mapping import WorkloadMapping, map_requests
from makespan.traces._measured import MeasuredSource
from makespan.traces._oobleck import read_oobleck_nodes
from makespan.traces._openb import NODE_LIST, read_openb_nodes, read_openb_pods
from makespan.traces._pai import read_pai_jobs, read_pai_machines
from makespan.traces._philly import read_philly_jobs, read_philly_machines
from makespan.traces._published import PublishedSource
from makespan.traces._reference import Reference, ReferenceTimes
from makespan.traces._report import Finding, ReadReport
from makespan.traces._requests import RequestTrace
from makespan.traces._sources import SOURCE_NAMES, ThroughputSource
from makespan.traces._statistics import Request, WorkloadStatistics, statistics
from makespan.traces._table import read_throughput
from makespan.traces._transform import (
    scaled,
    with_best_plan,
    with_guarantees,
    with_large_share,
    with_load,
    with_perturbed_arrivals,
)

__all__ = [
    "EASYSCALE_JOBS",
    "NODE_LIST",
    "SOURCE_NAMES",
    "VARIANTS",
    "Dataset",
    "EmulatedSource",
    "Finding",
    "JobTrace",
    "MeasuredSource",
    "Opener",
    "PublishedSource",
    "ReadReport",
    "Reference",
    "ReferenceTimes",
    "Request",
    "RequestTrace",
    "ThroughputSource",
    "WorkloadMapping",
    "WorkloadStatistics",
    "check_content",
    "check_jobs",
    "fetch",
    "find_dataset",
    "flag_anomalies",
    "generate_jobs",
    "jobs_from_table",
    "jobs_table",
    "locate",
    "map_requests",
    "phase_unit",
    "read_artifact_trace",
    "read_easyscale_jobs",
    "read_helios_jobs",
    "read_helios_quota",
    "read_jobs",
    "read_morphling_jobs",
    "read_oobleck_nodes",
    "read_openb_nodes",
    "read_openb_pods",
    "read_pai_jobs",
    "read_pai_machines",
    "read_philly_jobs",
    "read_philly_machines",
    "read_register",
    "read_throughput",
    "scaled",
    "statistics",
    "verify",
    "with_best_plan",
    "with_guarantees",
    "with_large_share",
    "with_load",
    "with_perturbed_arrivals",
]
