"""Make a table of Oobleck that rests on no trace: results/<source>/oobleck/templates.csv and others."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from makespan.logs import logged_to
from makespan.papers.oobleck import read_published
from makespan.tables import write_result


def main(experiment: str, cells: Mapping[str, str], path: str, options: Mapping[str, Any]) -> None:
    """Call the experiment, ``module:function``, and write its table."""
    module, function = experiment.split(":")
    printed = {name: read_published(name, cell) for name, cell in cells.items()}
    (table,) = getattr(import_module(module), function)(printed, options).values()
    write_result(table, path)


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        given = snakemake.params
        cells = dict(zip(given.cells, snakemake.input, strict=True))
        main(given.experiment, cells, snakemake.output[0], given.options)
