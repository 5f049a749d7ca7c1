"""Schedule more jobs on larger clusters: results/<source>/morphling/scale.csv."""

from collections.abc import Mapping
from typing import Any

from makespan.logs import logged_to
from makespan.papers.morphling import Bench, read_bench, scale_study
from makespan.tables import SCALE, write_csv


def main(bench: Bench, table: str, options: Mapping[str, Any]) -> None:
    """Write what scheduling costs at every size."""
    write_csv(scale_study(bench, **options), table, SCALE)


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        inputs, given = snakemake.input, snakemake.params
        tables = dict(zip(given.workloads, inputs.tables, strict=True))
        lists = dict(zip(given.lists, inputs.lists, strict=True))
        bench = read_bench(tables, inputs.knowledge, lists, given.cluster, snakemake.threads)
        main(bench, snakemake.output.table, given.options)
