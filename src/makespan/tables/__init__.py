"""Schemas of the tables that cross a workflow stage, and atomic reading and writing.

A stage reads only files that earlier stages wrote, and each of those files has a schema: column
names, types, units and meanings. Those of one paper alone stand in that paper.
"""

from makespan.tables.cache import cached_table as cached_table
from makespan.tables.catalogue import (
    CLAIMS as CLAIMS,
    COMPARISON as COMPARISON,
    EVENTS as EVENTS,
    FAILURES as FAILURES,
    FIT as FIT,
    JOB_GOODPUT as JOB_GOODPUT,
    JOB_METRICS as JOB_METRICS,
    JOBS as JOBS,
    JOINED_CLAIMS as JOINED_CLAIMS,
    LIVE as LIVE,
    LIVE_FAILURES as LIVE_FAILURES,
    LIVE_JOBS as LIVE_JOBS,
    LIVE_SUMMARY as LIVE_SUMMARY,
    LOSSES as LOSSES,
    OUTCOMES as OUTCOMES,
    PREDICTIONS as PREDICTIONS,
    REQUESTS as REQUESTS,
    SCHEMAS as SCHEMAS,
    SENSITIVITY as SENSITIVITY,
    SENSITIVITY_FAMILIES as SENSITIVITY_FAMILIES,
    THROUGHPUT as THROUGHPUT,
    tables_page as tables_page,
)
from makespan.tables.io import (
    ON_DEMAND as ON_DEMAND,
    PROVENANCES as PROVENANCES,
    check_length as check_length,
    csv_text as csv_text,
    parse_csv as parse_csv,
    read_csv as read_csv,
    read_provenances as read_provenances,
    read_sealed as read_sealed,
    refuse_uneven_rows as refuse_uneven_rows,
    shown_source as shown_source,
    source_label as source_label,
    write_csv as write_csv,
    write_result as write_result,
)
from makespan.tables.schema import (
    Column as Column,
    TableSchema as TableSchema,
    schemas_of as schemas_of,
    table_schema as table_schema,
)
