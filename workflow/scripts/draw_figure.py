"""Draw a figure: results/<source>/<paper>/figures/<figure>.pdf, .png, .svg, .csv and its caption, .txt."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from makespan.logs import logged_to
from makespan.papers import paper_named
from makespan.papers.experiment import with_counts
from makespan.plots import save_figure
from makespan.tables import read_csv, read_provenances, shown_source


def main(
    paper: str, draw: str, paths: Mapping[str, str], stem: str, source: str, options: Mapping[str, Any],
    caption: str,
) -> None:  # fmt: skip
    """Call the drawing function, ``module:function``, and save the figure with its table and caption."""
    schema_of = paper_named(paper).schema_of
    tables = {name: read_csv(path, schema_of(name)) for name, path in paths.items()}
    module, function = draw.split(":")
    figure, table = getattr(import_module(module), function)(tables, source, **options)
    save_figure(figure, table, stem, with_counts(caption, tables))


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        stem, paper = snakemake.output.pdf.removesuffix(".pdf"), snakemake.wildcards.paper
        given, paths = snakemake.params, dict(snakemake.input.items())
        shown = shown_source(snakemake.wildcards.source, read_provenances(paths.pop("times")))
        main(paper, given.draw, paths, stem, shown, given.options, f"{given.title}\n\n{given.caption}")
