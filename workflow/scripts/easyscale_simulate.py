"""Simulate the job list under all policies: results/<source>/easyscale/fig14.csv, fig15.csv and others."""

from collections.abc import Mapping
from typing import Any

from makespan.logs import logged_to
from makespan.papers.easyscale import cluster_experiments, read_published
from makespan.tables import read_csv, write_result
from makespan.traces import EASYSCALE_JOBS


def main(jobs: str, cells: Mapping[str, str], paths: Mapping[str, str], options: Mapping[str, Any]) -> None:
    """Write the tables."""
    printed = {name: read_published(name, path) for name, path in cells.items()}
    for name, table in cluster_experiments(read_csv(jobs, EASYSCALE_JOBS), printed, **options).items():
        write_result(table, paths[name])


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        cells = dict(snakemake.input.items())
        options = dict(snakemake.params.options, n_processes=snakemake.threads)
        main(cells.pop("jobs"), cells, dict(snakemake.output.items()), options)
