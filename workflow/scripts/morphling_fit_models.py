"""Fit the performance model: results/<source>/morphling/fits/<workload>.csv and table2_rows.csv."""

from collections.abc import Sequence

from makespan.logs import logged_to
from makespan.papers.morphling import TABLE2_ROWS, fit_workload, read_published, table2_rows
from makespan.tables import FIT, THROUGHPUT, read_csv, write_csv


def main(
    tables: Sequence[str], published: str, fits: Sequence[str], rows: str, cluster: str, forms: Sequence[str]
) -> None:
    """Fit every form to every workload and predict every row."""
    results = [fit_workload(read_csv(table, THROUGHPUT), cluster, forms) for table in tables]
    for (parameters, _), path in zip(results, fits, strict=True):
        write_csv(parameters, path, FIT)
    predictions = [predicted for _, predicted in results]
    write_csv(table2_rows(predictions, read_published("table2", published)), rows, TABLE2_ROWS)


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        inputs, outputs, given = snakemake.input, snakemake.output, snakemake.params
        main(inputs.tables, inputs.published, outputs.fits, outputs.rows, given.cluster, given.forms)
