"""Read the authors' traces: results/published/throughput/<workload>.csv."""

from collections.abc import Sequence
from pathlib import Path

from makespan.logs import logged_to
from makespan.tables import THROUGHPUT, write_csv
from makespan.throughput import PublishedSource, read_register


def main(
    tables: Sequence[str], workloads: Sequence[str], directory: str, register: str, default_cpu_threads: int
) -> None:
    """Check, convert and flag one trace a workload."""
    source = PublishedSource(Path(directory), default_cpu_threads, read_register(register))
    for workload, path in zip(workloads, tables, strict=True):
        write_csv(source.load(workload), path, THROUGHPUT)


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        given = snakemake.params
        main(
            snakemake.output.tables,
            given.workloads,
            given.directory,
            snakemake.input.register,
            given.default_cpu_threads,
        )
