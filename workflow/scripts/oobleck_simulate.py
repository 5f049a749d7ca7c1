"""Simulate systems that lose nodes: results/<source>/oobleck/fig9.csv and others."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from makespan.logs import logged_to
from makespan.papers.oobleck import generated_traces, published_traces, read_published
from makespan.tables import write_result
from makespan.throughput import read_register


def traces_of(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Generate traces, or read those of the authors."""
    if "seeds" in given:
        return generated_traces(given["seeds"])
    return published_traces(given["names"], given["directory"], read_register(given["register"]))


def main(
    experiment: str, traces: Mapping[str, Any], cells: Mapping[str, str], paths: Mapping[str, str],
    options: Mapping[str, Any],
) -> None:  # fmt: skip
    """Call the experiment, ``module:function``, and write its tables."""
    module, function = experiment.split(":")
    printed = {name: read_published(name, path) for name, path in cells.items()}
    for name, table in getattr(import_module(module), function)(traces, printed, **options).items():
        write_result(table, paths[name])


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        given = snakemake.params
        cells = {name: path for name, path in snakemake.input.items() if name != "files"}
        traces = traces_of(given.traces)
        main(given.experiment, traces, cells, dict(snakemake.output.items()), given.options)
