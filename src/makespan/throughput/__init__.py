"""Where iteration times come from: emulated, published or measured tables, and the register of data sets.

Every source gives the same table (`makespan.tables.THROUGHPUT`), so nothing downstream knows
where the numbers come from::

    source = PublishedSource(directory, default_cpu_threads=12)
    frame = source.load("roberta")
"""

from makespan.throughput._published import (
    PublishedSource,
    flag_anomalies,
    phase_unit,
    read_artifact_trace,
)
from makespan.throughput._reference import Reference, ReferenceTimes, placement_order, reference_plan
from makespan.throughput._register import (
    Dataset,
    Opener,
    check_content,
    fetch,
    find_dataset,
    locate,
    read_register,
    verify,
)
from makespan.throughput._sources import SOURCE_NAMES, EmulatedSource, ThroughputSource
from makespan.throughput._tables import MeasuredSource, read_throughput

__all__ = [
    "SOURCE_NAMES",
    "Dataset",
    "EmulatedSource",
    "MeasuredSource",
    "Opener",
    "PublishedSource",
    "Reference",
    "ReferenceTimes",
    "ThroughputSource",
    "check_content",
    "fetch",
    "find_dataset",
    "flag_anomalies",
    "locate",
    "phase_unit",
    "placement_order",
    "read_artifact_trace",
    "read_register",
    "read_throughput",
    "reference_plan",
    "verify",
]
