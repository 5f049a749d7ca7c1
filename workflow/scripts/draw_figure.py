"""Draw a figure: results/<source>/<paper>/figures/<figure>.pdf, .png, .svg, .csv and its caption, .txt."""

from importlib import import_module

from makespan.logs import logged_to
from makespan.papers import paper_named
from makespan.papers.experiment import with_counts
from makespan.plots import save_figure
from makespan.tables import read_csv, read_provenances, shown_source

with logged_to(snakemake.log[0]):
    params, paths = snakemake.params, dict(snakemake.input.items())
    source = shown_source(snakemake.wildcards.source, read_provenances(paths.pop("times")))
    paper = paper_named(snakemake.wildcards.paper)
    tables = {name: read_csv(path, paper.schema_of(name)) for name, path in paths.items()}
    module, function = params.draw.split(":")
    figure, table = getattr(import_module(module), function)(tables, source, **params.options)
    stem = snakemake.output.pdf.removesuffix(".pdf")
    caption = with_counts(f"{params.title}\n\n{params.caption}", tables)
    save_figure(figure, table, stem, caption)
