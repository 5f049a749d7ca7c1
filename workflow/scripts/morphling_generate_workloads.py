"""Generate the job lists: results/<source>/morphling/workloads/<list>.csv."""

from collections.abc import Mapping
from typing import Any

from makespan.logs import logged_to
from makespan.papers.morphling import generated_workloads
from makespan.tables import JOBS, THROUGHPUT, read_csv, write_result


def main(tables: Mapping[str, str], lists: Mapping[str, str], options: Mapping[str, Any]) -> None:
    """Write one table a job list."""
    frames = {workload: read_csv(path, THROUGHPUT) for workload, path in tables.items()}
    generated = generated_workloads(frames, **options)
    for name, path in lists.items():
        write_result(generated[name], path, JOBS)


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        given = snakemake.params
        tables = dict(zip(given.workloads, snakemake.input.tables, strict=True))
        main(tables, dict(snakemake.output.items()), given.options)
