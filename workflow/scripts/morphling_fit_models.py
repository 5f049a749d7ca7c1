"""Fit the performance model: results/<source>/morphling/fits/<workload>.csv and the tables of Table 2."""

from collections.abc import Sequence

from makespan.files import read_json
from makespan.logs import logged_to
from makespan.papers.morphling import TABLE2, TABLE2_ROWS, TABLE2_SUMMARY, fit_workloads, table2_results
from makespan.tables import FIT, THROUGHPUT, read_csv, write_result


def main(
    tables: Sequence[str], fits: Sequence[str], results: Sequence[str], cluster: str, forms: Sequence[str],
    published: str | None, records: Sequence[str],
) -> None:  # fmt: skip
    """Fit every form to every workload, predict every row and summarise the errors."""
    throughput = [read_csv(table, THROUGHPUT) for table in tables]
    fitted = fit_workloads(throughput, cluster, forms, holds_out_kinds=published is None)
    for (parameters, _), path in zip(fitted, fits, strict=True):
        write_result(parameters, path, FIT)
    noise = [read_json(record) for record in records]
    made = table2_results([rows for _, rows in fitted], throughput, published, noise)
    for table, path, schema in zip(made, results, (TABLE2_ROWS, TABLE2, TABLE2_SUMMARY), strict=True):
        write_result(table, path, schema)


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        inputs, made, given = snakemake.input, snakemake.output, snakemake.params
        results = (made.rows, made.table, made.summary)
        cells, records = inputs.get("published"), inputs.get("records", [])
        main(inputs.tables, made.fits, results, given.cluster, given.forms, cells, records)
