"""Draw a figure: results/<source>/<paper>/figures/<figure>.pdf, .png, .csv and its caption, .txt."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from makespan.logs import logged_to
from makespan.plots import save_figure
from makespan.tables import read_provenances, shown_source


def main(
    draw: str, paths: Mapping[str, str], stem: str, source: str, options: Mapping[str, Any], caption: str
) -> None:
    """Call the drawing function, ``module:function``, and save the figure with its table and its caption."""
    module, function = draw.split(":")
    figure, table = getattr(import_module(module), function)(paths, source, **options)
    save_figure(figure, table, stem, caption)


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        stem = snakemake.output.pdf.removesuffix(".pdf")
        given, paths = snakemake.params, dict(snakemake.input.items())
        shown = shown_source(snakemake.wildcards.source, read_provenances(paths.pop("times")))
        main(given.draw, paths, stem, shown, given.options, f"{given.title}\n\n{given.caption}")
