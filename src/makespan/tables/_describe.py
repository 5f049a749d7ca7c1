"""The reference page of the tables, generated from their schemas."""

from collections.abc import Iterable, Mapping

from makespan.tables._catalogue import SCHEMAS
from makespan.tables._schema import TableSchema

__all__ = ["tables_page"]

_HEAD = """# Tables

Every file that one stage writes and another reads follows a schema. Required columns come first and
in this order; further columns may follow. This page is generated from `makespan.tables`.

Beside every result of the workflow, `x.csv`, lies its seal, `.x.csv.sum`: rows and checksum. A stage refuses
a table that is not what was written; one without a seal is yours and is held against the schema alone.
"""


def tables_page(papers: Mapping[str, Iterable[TableSchema]]) -> str:
    """Return the Markdown page of every table and column: the shared ones, then those of each paper."""
    parts = [_HEAD, *(_section(schema) for schema in SCHEMAS)]
    for paper, schemas in papers.items():
        parts += [f"# Tables of {paper}\n", *(_section(schema) for schema in schemas)]
    return "\n".join(parts)


def _section(schema: TableSchema) -> str:
    rows = [
        f"| `{column.name}` | {column.kind}{', may be empty' if column.nullable else ''} "
        f"| {column.unit} | {column.description} |"
        for column in schema.columns
    ]
    head = ["| column | type | unit | meaning |", "| --- | --- | --- | --- |"]
    return "\n".join([f"## `{schema.name}`", "", *head, *rows, ""])
