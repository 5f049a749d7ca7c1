"""Read the authors' job list: results/published/easyscale/jobs.csv."""

from typing import Literal

from makespan.logs import logged_to
from makespan.papers.easyscale import published_jobs
from makespan.tables import write_result
from makespan.throughput import read_register
from makespan.traces import EASYSCALE_JOBS


def main(directory: str, register: str, dedup: Literal["rename", "artifact"], path: str) -> None:
    """Check and convert the list."""
    write_result(published_jobs(directory, read_register(register), dedup), path, EASYSCALE_JOBS)


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        given = snakemake.params
        main(given.directory, snakemake.input.register, given.dedup, snakemake.output.jobs)
