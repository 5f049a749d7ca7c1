"""Schemas of the tables that cross a workflow stage, and atomic reading and writing.

A stage reads only files that earlier stages wrote, and each of those files has a schema: column
names, types, units and meanings. Those of one paper alone stand in that paper.
"""

from makespan.tables._catalogue import (
    CLAIMS,
    COMPARISON,
    EVENTS,
    FAILURES,
    FIT,
    JOB_METRICS,
    JOBS,
    JOINED_CLAIMS,
    LIVE,
    LIVE_JOBS,
    LIVE_SUMMARY,
    OUTCOMES,
    PREDICTIONS,
    REQUESTS,
    SCHEMAS,
    SENSITIVITY,
    SENSITIVITY_FAMILIES,
    THROUGHPUT,
)
from makespan.tables._describe import tables_page
from makespan.tables._io import (
    atomic_path,
    check_length,
    parse_csv,
    read_csv,
    read_printed,
    read_sealed,
    refuse_uneven_rows,
    write_csv,
    write_result,
    write_text,
)
from makespan.tables._provenance import (
    ON_DEMAND,
    PROVENANCES,
    read_provenances,
    shown_source,
    source_label,
)
from makespan.tables._schema import Column, TableSchema, printed_schemas, table_schema

__all__ = [
    "CLAIMS",
    "COMPARISON",
    "EVENTS",
    "FAILURES",
    "FIT",
    "JOBS",
    "JOB_METRICS",
    "JOINED_CLAIMS",
    "LIVE",
    "LIVE_JOBS",
    "LIVE_SUMMARY",
    "ON_DEMAND",
    "OUTCOMES",
    "PREDICTIONS",
    "PROVENANCES",
    "REQUESTS",
    "SCHEMAS",
    "SENSITIVITY",
    "SENSITIVITY_FAMILIES",
    "THROUGHPUT",
    "Column",
    "TableSchema",
    "atomic_path",
    "check_length",
    "parse_csv",
    "printed_schemas",
    "read_csv",
    "read_printed",
    "read_provenances",
    "read_sealed",
    "refuse_uneven_rows",
    "shown_source",
    "source_label",
    "table_schema",
    "tables_page",
    "write_csv",
    "write_result",
    "write_text",
]
