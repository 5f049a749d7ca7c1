"""Draw Fig. 8, throughput across jobs: results/<source>/morphling/figures/fig8.*."""

from makespan.logs import logged_to
from makespan.plots import plot_sharing, save_figure
from makespan.tables import FIG8, read_csv


def main(table: str, stem: str, source: str) -> None:
    """Draw the figure and save it with the table behind it."""
    shares = read_csv(table, FIG8)
    save_figure(plot_sharing(shares, source), shares, stem)


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        stem = snakemake.output.pdf.removesuffix(".pdf")
        main(snakemake.input.table, stem, snakemake.wildcards.source)
