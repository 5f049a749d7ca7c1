"""Draw completion time against the length of a round: results/<source>/morphling/figures/rounds.*."""

from makespan.logs import logged_to
from makespan.plots import plot_rounds, save_figure
from makespan.tables import ROUNDS, read_csv


def main(table: str, stem: str, source: str) -> None:
    """Draw the figure and save it with the table behind it."""
    rows = read_csv(table, ROUNDS)
    save_figure(plot_rounds(rows, source), rows, stem)


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        stem = snakemake.output.pdf.removesuffix(".pdf")
        main(snakemake.input.table, stem, snakemake.wildcards.source)
