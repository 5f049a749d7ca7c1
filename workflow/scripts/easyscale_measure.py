"""Train for Fig. 9, the accuracy gap or Figs 10 to 13: results/measured/easyscale/fig9.csv and others."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from makespan.logs import logged_to
from makespan.papers.easyscale import read_published
from makespan.tables import write_result


def main(
    experiment: str, cells: Mapping[str, str], paths: Mapping[str, str], options: Mapping[str, Any]
) -> None:
    """Call the experiment, ``module:function``, and write its tables, with the printed cells beside."""
    module, function = experiment.split(":")
    printed = {name: read_published(name, path) for name, path in cells.items()}
    for name, table in getattr(import_module(module), function)(printed, **options).items():
        write_result(table, paths[name])


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        given = snakemake.params
        main(given.experiment, dict(snakemake.input.items()), dict(snakemake.output.items()), given.options)
