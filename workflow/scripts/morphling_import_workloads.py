"""Read the authors' job lists: results/published/morphling/workloads/<list>.csv."""

from collections.abc import Mapping, Sequence

from makespan.logs import logged_to
from makespan.papers.morphling import published_workloads
from makespan.tables import JOBS, write_result
from makespan.throughput import read_register


def main(directory: str, register: str, workloads: Sequence[str], lists: Mapping[str, str]) -> None:
    """Check and convert one table a job list."""
    found = published_workloads(directory, read_register(register), workloads)
    for name, path in lists.items():
        write_result(found[name], path, JOBS)


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        given = snakemake.params
        lists = dict(snakemake.output.items())
        main(given.directory, snakemake.input.register, given.workloads, lists)
