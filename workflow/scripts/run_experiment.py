"""Run an experiment of a paper on the cells that it prints: results/<source>/<paper>/<table>.csv."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from makespan.logs import logged_to
from makespan.tables import write_result


def main(
    experiment: str, cells: Mapping[str, str], paths: Mapping[str, str], options: Mapping[str, Any]
) -> None:
    """Call the experiment, ``module:function``, and write its tables, with the printed cells beside."""
    module, function = experiment.split(":")
    paper = import_module(module)
    printed = {name: paper.read_published(name, path) for name, path in cells.items()}
    for name, table in getattr(paper, function)(printed, **options).items():
        write_result(table, paths[name])


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        given = snakemake.params
        main(given.experiment, dict(snakemake.input.items()), dict(snakemake.output.items()), given.options)
