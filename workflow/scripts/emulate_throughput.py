"""Emulate the throughput tables: results/emulated/throughput/<workload>.csv."""

from makespan.hardware import cluster
from makespan.logs import logged_to
from makespan.tables import THROUGHPUT, write_result
from makespan.throughput import EmulatedSource

with logged_to(snakemake.log[0]):
    params = snakemake.params
    source = EmulatedSource(cluster=cluster(params.cluster), **params.options)
    for workload, path in zip(params.workloads, snakemake.output.tables, strict=True):
        write_result(source.load(workload), path, THROUGHPUT)
