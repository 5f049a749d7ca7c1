"""Make tables of Oobleck that rest on no trace: results/<source>/oobleck/templates.csv and others."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from makespan.logs import logged_to
from makespan.papers.oobleck import read_published
from makespan.tables import write_result


def main(experiment: str, cells: Mapping[str, str], paths: Sequence[str], options: Mapping[str, Any]) -> None:
    """Call the experiment, ``module:function``, and write its tables in their order."""
    module, function = experiment.split(":")
    printed = {name: read_published(name, cell) for name, cell in cells.items()}
    tables = getattr(import_module(module), function)(printed, options)
    for path, table in zip(paths, tables.values(), strict=True):
        write_result(table, path)


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        given = snakemake.params
        cells = dict(zip(given.cells, snakemake.input, strict=True))
        main(given.experiment, cells, list(snakemake.output), given.options)
