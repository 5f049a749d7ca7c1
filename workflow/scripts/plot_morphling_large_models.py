"""Draw the study of large models: results/<source>/morphling/figures/large_models.*."""

from makespan.logs import logged_to
from makespan.plots import plot_large_models, save_figure
from makespan.tables import LARGE_MODELS, read_csv


def main(table: str, stem: str, source: str) -> None:
    """Draw the figure and save it with the table behind it."""
    rows = read_csv(table, LARGE_MODELS)
    save_figure(plot_large_models(rows, source), rows, stem)


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        stem = snakemake.output.pdf.removesuffix(".pdf")
        main(snakemake.input.table, stem, snakemake.wildcards.source)
