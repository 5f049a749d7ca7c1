"""Draw completion time against load: results/<source>/morphling/figures/load.*."""

from makespan.logs import logged_to
from makespan.plots import plot_load, save_figure
from makespan.tables import LOAD, read_csv


def main(table: str, stem: str, source: str) -> None:
    """Draw the figure and save it with the table behind it."""
    rows = read_csv(table, LOAD)
    save_figure(plot_load(rows, source), rows, stem)


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        stem = snakemake.output.pdf.removesuffix(".pdf")
        main(snakemake.input.table, stem, snakemake.wildcards.source)
