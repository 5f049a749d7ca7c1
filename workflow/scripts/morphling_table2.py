"""Summarise prediction errors: results/<source>/morphling/table2.csv and table2_summary.csv."""

from makespan.logs import logged_to
from makespan.papers.morphling import (
    TABLE2,
    TABLE2_ROWS,
    TABLE2_SUMMARY,
    read_published,
    table2,
    table2_summary,
)
from makespan.tables import read_csv, write_csv


def main(rows: str, published: str, table: str, summary: str) -> None:
    """Write errors by model, plan family and form, and over all models."""
    predicted = read_csv(rows, TABLE2_ROWS)
    write_csv(table2(predicted, read_published("table2", published)), table, TABLE2)
    write_csv(table2_summary(predicted), summary, TABLE2_SUMMARY)


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        inputs, outputs = snakemake.input, snakemake.output
        main(inputs.rows, inputs.published, outputs.table, outputs.summary)
