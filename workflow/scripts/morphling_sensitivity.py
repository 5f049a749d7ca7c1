"""Compute sensitivity curves: results/<source>/morphling/sensitivity.csv and sensitivity_families.csv."""

from collections.abc import Mapping, Sequence
from typing import Any

from makespan.logs import logged_to
from makespan.papers.morphling import sensitivity
from makespan.tables import SENSITIVITY, SENSITIVITY_FAMILIES, THROUGHPUT, read_csv, write_result


def main(tables: Sequence[str], envelope: str, families: str, options: Mapping[str, Any]) -> None:
    """Write the best plan, and the best of every family, against GPUs."""
    best, by_family = sensitivity([read_csv(table, THROUGHPUT) for table in tables], **options)
    write_result(best, envelope, SENSITIVITY)
    write_result(by_family, families, SENSITIVITY_FAMILIES)


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        main(snakemake.input.tables, *snakemake.output, snakemake.params.options)
