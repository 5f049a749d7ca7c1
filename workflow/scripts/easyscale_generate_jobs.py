"""Generate the job list: results/<source>/easyscale/jobs.csv."""

from makespan.logs import logged_to
from makespan.papers.easyscale import generated_jobs
from makespan.tables import write_result
from makespan.traces import EASYSCALE_JOBS


def main(seed: int, jobs: int, path: str) -> None:
    """Write one list."""
    write_result(generated_jobs(seed, jobs), path, EASYSCALE_JOBS)


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        main(**snakemake.params.options, path=snakemake.output.jobs)
