"""Check tables of the authors or of the user: results/<source>/throughput/<workload>.csv."""

from collections.abc import Sequence
from pathlib import Path

from makespan.logs import logged_to
from makespan.tables import THROUGHPUT, write_result
from makespan.throughput import MeasuredSource, PublishedSource, ThroughputSource, read_register


def main(tables: Sequence[str], workloads: Sequence[str], source: ThroughputSource) -> None:
    """Check, convert and flag one table a workload."""
    for workload, path in zip(workloads, tables, strict=True):
        write_result(source.load(workload), path, THROUGHPUT)


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        given, register = snakemake.params, snakemake.input.get("register")
        source: ThroughputSource = MeasuredSource(Path(given.directory))
        if register is not None:
            threads = given.default_cpu_threads
            source = PublishedSource(Path(given.directory), threads, read_register(register))
        main(snakemake.output.tables, given.workloads, source)
