"""Plan pipelines, or lose their nodes: results/emulated/oobleck/reconfiguration.csv and others."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from makespan.logs import logged_to
from makespan.papers.oobleck import read_published
from makespan.tables import write_result


def main(
    experiment: str, cells: Mapping[str, str], paths: Mapping[str, str], options: Mapping[str, Any]
) -> None:
    """Call the experiment, ``module:function``, and write its tables."""
    module, function = experiment.split(":")
    printed = {name: read_published(name, path) for name, path in cells.items()}
    for name, table in getattr(import_module(module), function)(printed, options).items():
        write_result(table, paths[name])


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        given = snakemake.params
        cells, paths = dict(snakemake.input.items()), dict(snakemake.output.items())
        main(given.experiment, cells, paths, given.options)
