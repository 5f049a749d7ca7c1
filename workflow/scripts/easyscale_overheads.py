"""Measure memory and time of logical workers: results/measured/easyscale/fig10.csv to fig13.csv."""

from collections.abc import Mapping
from typing import Any

from makespan.logs import logged_to
from makespan.papers.easyscale import measure_overheads, read_published
from makespan.tables import write_result


def main(figure: str, table: str, published: str, options: Mapping[str, Any]) -> None:
    """Measure one figure and write its table, with the printed cells beside."""
    write_result(measure_overheads(figure, options, read_published(figure, published)), table)


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        given = snakemake.params
        main(given.figure, snakemake.output.table, snakemake.input.published, given.options)
