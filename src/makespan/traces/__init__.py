"""Throughput sources and data sets: emulated, published and measured iteration times.

Every source gives the same table (`makespan.tables.THROUGHPUT`), so nothing downstream knows
where the numbers come from::

    source = PublishedSource(directory, default_cpu_threads=12)
    frame = source.load("roberta")
"""

from makespan.traces._artifact import phase_unit, read_artifact_trace
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
from makespan.traces._emulated import EmulatedSource
from makespan.traces._measured import MeasuredSource
from makespan.traces._published import PublishedSource
from makespan.traces._sources import SOURCE_NAMES, ThroughputSource
from makespan.traces._table import read_throughput

__all__ = [
    "SOURCE_NAMES",
    "Dataset",
    "EmulatedSource",
    "MeasuredSource",
    "Opener",
    "PublishedSource",
    "ThroughputSource",
    "check_content",
    "fetch",
    "find_dataset",
    "flag_anomalies",
    "locate",
    "phase_unit",
    "read_artifact_trace",
    "read_register",
    "read_throughput",
    "verify",
]
