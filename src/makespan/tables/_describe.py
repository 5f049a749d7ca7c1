"""The reference page of the tables, generated from their schemas."""

from makespan.tables._catalogue import SCHEMAS
from makespan.tables._schema import TableSchema

__all__ = ["tables_page"]

_HEAD = """# Tables

Every file that one stage writes and another reads follows a schema. Required columns come first and
in this order; further columns may follow. This page is generated from `makespan.tables`.
"""


def tables_page() -> str:
    """Return the Markdown page that lists every table and column."""
    return "\n".join([_HEAD, *(_section(schema) for schema in SCHEMAS)])


def _section(schema: TableSchema) -> str:
    rows = [
        f"| `{column.name}` | {column.kind}{', may be empty' if column.nullable else ''} "
        f"| {column.unit} | {column.description} |"
        for column in schema.columns
    ]
    head = ["| column | type | unit | meaning |", "| --- | --- | --- | --- |"]
    return "\n".join([f"## `{schema.name}`", "", *head, *rows, ""])
