"""Run an experiment on the job list: results/<source>/easyscale/fig14.csv, serving.csv and others."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from makespan.logs import logged_to
from makespan.papers.easyscale import read_published
from makespan.tables import read_csv, write_result
from makespan.traces import EASYSCALE_JOBS


def main(
    experiment: str, jobs: str, cells: Mapping[str, str], paths: Mapping[str, str], options: Mapping[str, Any]
) -> None:
    """Call the experiment, ``module:function``, and write its tables."""
    module, function = experiment.split(":")
    printed = {name: read_published(name, path) for name, path in cells.items()}
    tables = getattr(import_module(module), function)(read_csv(jobs, EASYSCALE_JOBS), printed, **options)
    for name, table in tables.items():
        write_result(table, paths[name])


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        cells, given = dict(snakemake.input.items()), snakemake.params
        options = dict(given.options, n_processes=snakemake.threads)
        main(given.experiment, cells.pop("jobs"), cells, dict(snakemake.output.items()), options)
