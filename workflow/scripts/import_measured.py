"""Check the user's own tables: results/measured/throughput/<workload>.csv."""

from collections.abc import Sequence
from pathlib import Path

from makespan.logs import logged_to
from makespan.tables import THROUGHPUT, write_csv
from makespan.throughput import MeasuredSource


def main(tables: Sequence[str], workloads: Sequence[str], directory: str) -> None:
    """Check and copy one table a workload."""
    source = MeasuredSource(Path(directory))
    for workload, path in zip(workloads, tables, strict=True):
        write_csv(source.load(workload), path, THROUGHPUT)


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        main(snakemake.output.tables, snakemake.params.workloads, snakemake.params.directory)
