"""Fit profiled workloads: results/measured/morphling/fits/<workload>.csv and the tables of Table 2."""

import json
from collections.abc import Sequence
from pathlib import Path

from makespan.logs import logged_to
from makespan.papers.morphling import TABLE2, TABLE2_ROWS, TABLE2_SUMMARY, fit_workload, measured_table2
from makespan.tables import FIT, THROUGHPUT, read_csv, write_csv


def main(
    tables: Sequence[str],
    records: Sequence[str],
    fits: Sequence[str],
    results: tuple[str, str, str],
    environment: str,
    forms: Sequence[str],
) -> None:
    """Fit every form to every workload, predict every row and summarise the errors."""
    throughput = [read_csv(table, THROUGHPUT) for table in tables]
    fitted = [fit_workload(table, environment, forms) for table in throughput]
    for (parameters, _), path in zip(fitted, fits, strict=True):
        write_csv(parameters, path, FIT)
    noise = [json.loads(Path(record).read_text(encoding="utf-8")) for record in records]
    made = measured_table2([rows for _, rows in fitted], throughput, noise)
    for table, path, schema in zip(made, results, (TABLE2_ROWS, TABLE2, TABLE2_SUMMARY), strict=True):
        write_csv(table, path, schema)


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        inputs, made, given = snakemake.input, snakemake.output, snakemake.params
        results = (made.rows, made.table, made.summary)
        main(inputs.tables, inputs.records, made.fits, results, given.environment, given.forms)
