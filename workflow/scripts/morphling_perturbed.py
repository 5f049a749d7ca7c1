"""Shift all arrivals: results/<source>/morphling/perturbed.csv."""

from collections.abc import Mapping
from typing import Any

from makespan.logs import logged_to
from makespan.papers.morphling import Bench, perturbed_arrivals, read_bench
from makespan.tables import PERTURBED, write_csv


def main(bench: Bench, table: str, options: Mapping[str, Any]) -> None:
    """Write mean and spread over shifts."""
    write_csv(perturbed_arrivals(bench, **options), table, PERTURBED)


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        inputs, given = snakemake.input, snakemake.params
        tables = dict(zip(given.workloads, inputs.tables, strict=True))
        lists = dict(zip(given.lists, inputs.lists, strict=True))
        bench = read_bench(tables, inputs.knowledge, lists, given.cluster, snakemake.threads)
        main(bench, snakemake.output.table, given.options)
