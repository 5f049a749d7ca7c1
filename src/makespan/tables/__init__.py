"""Schemas of the tables that cross a workflow stage, and atomic reading and writing.

A stage reads only files that earlier stages wrote, and each of those files has its schema
here: column names, types, units and meanings.
"""

from makespan.tables._catalogue import (
    CLAIMS,
    FIG7,
    FIG8,
    FIT,
    JOINED_CLAIMS,
    SCHEMAS,
    SENSITIVITY,
    SENSITIVITY_FAMILIES,
    TABLE2,
    TABLE2_ROWS,
    TABLE2_SUMMARY,
    THROUGHPUT,
)
from makespan.tables._describe import tables_page
from makespan.tables._io import atomic_path, read_csv, write_csv, write_text
from makespan.tables._live import LIVE, LIVE_JOBS
from makespan.tables._schema import Column, TableSchema
from makespan.tables._simulation import (
    ALLOCATION,
    COMPARISON,
    EVENTS,
    FAILURES,
    JCT,
    JOB_METRICS,
    OUTCOMES,
    PERTURBED,
    PREDICTIONS,
    TABLE4,
)
from makespan.tables._training import FIG9, FIG9_SUMMARY
from makespan.tables._workloads import JOBS, LARGE_MODELS, LOAD, REQUESTS, ROUNDS, SCALE, STUDY

__all__ = [
    "ALLOCATION",
    "CLAIMS",
    "EVENTS",
    "FAILURES",
    "FIG7",
    "FIG8",
    "FIG9",
    "FIG9_SUMMARY",
    "FIT",
    "JCT",
    "JOBS",
    "JOINED_CLAIMS",
    "JOB_METRICS",
    "LARGE_MODELS",
    "LIVE",
    "LIVE_JOBS",
    "LOAD",
    "OUTCOMES",
    "PERTURBED",
    "REQUESTS",
    "ROUNDS",
    "SCALE",
    "SCHEMAS",
    "SENSITIVITY",
    "SENSITIVITY_FAMILIES",
    "PREDICTIONS",
    "STUDY",
    "TABLE2",
    "TABLE2_ROWS",
    "TABLE2_SUMMARY",
    "TABLE4",
    "COMPARISON",
    "THROUGHPUT",
    "Column",
    "TableSchema",
    "atomic_path",
    "read_csv",
    "tables_page",
    "write_csv",
    "write_text",
]
