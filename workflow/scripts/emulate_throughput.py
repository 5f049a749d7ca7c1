"""Emulate the throughput tables: results/emulated/throughput/<workload>.csv."""

from collections.abc import Mapping, Sequence
from typing import Any

from makespan.hardware import cluster
from makespan.logs import logged_to
from makespan.tables import THROUGHPUT, write_result
from makespan.throughput import EmulatedSource


def main(
    tables: Sequence[str], workloads: Sequence[str], cluster_name: str, options: Mapping[str, Any]
) -> None:
    """Write one table a workload."""
    source = EmulatedSource(cluster=cluster(cluster_name), **options)
    for workload, path in zip(workloads, tables, strict=True):
        write_result(source.load(workload), path, THROUGHPUT)


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        given = snakemake.params
        main(snakemake.output.tables, given.workloads, given.cluster, given.options)
