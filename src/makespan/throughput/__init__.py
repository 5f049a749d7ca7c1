"""Where iteration times come from: emulated, published or measured tables, and the register of data sets.

Every source gives the same table (`makespan.tables.THROUGHPUT`), so nothing downstream knows
where the numbers come from::

    source = PublishedSource(directory, default_cpu_threads=12)
    frame = source.load("roberta")
"""

from makespan.throughput._published import PublishedSource, check_published_gpus, flag_anomalies
from makespan.throughput._reference import ReferenceTimes, placement_order, reference_plan
from makespan.throughput._register import (
    Dataset,
    fetch,
    find_dataset,
    locate,
    read_register,
    shipped_register,
    verify,
)
from makespan.throughput._sources import SOURCE_NAMES, EmulatedSource, ThroughputSource
from makespan.throughput._tables import MeasuredSource

__all__ = [
    "SOURCE_NAMES",
    "Dataset",
    "EmulatedSource",
    "MeasuredSource",
    "PublishedSource",
    "ReferenceTimes",
    "ThroughputSource",
    "check_published_gpus",
    "fetch",
    "find_dataset",
    "flag_anomalies",
    "locate",
    "placement_order",
    "read_register",
    "reference_plan",
    "shipped_register",
    "verify",
]
