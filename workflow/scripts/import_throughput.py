"""Check tables of the authors or of the user: results/<source>/throughput/<workload>.csv."""

from pathlib import Path

from makespan.logs import logged_to
from makespan.tables import THROUGHPUT, write_result
from makespan.throughput import MeasuredSource, PublishedSource, read_register

with logged_to(snakemake.log[0]):
    params, register = snakemake.params, snakemake.input.get("register")
    directory = Path(params.directory)
    if register is None:
        source = MeasuredSource(directory)
    else:
        source = PublishedSource(directory, params.default_cpu_threads, read_register(register))
    for workload, path in zip(params.workloads, snakemake.output.tables, strict=True):
        write_result(source.load(workload), path, THROUGHPUT)
