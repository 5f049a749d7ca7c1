"""Draw what scheduling costs against size: results/<source>/morphling/figures/scale.*."""

from makespan.logs import logged_to
from makespan.plots import plot_scale, save_figure
from makespan.tables import SCALE, read_csv


def main(table: str, stem: str, source: str) -> None:
    """Draw the figure and save it with the table behind it."""
    rows = read_csv(table, SCALE)
    save_figure(plot_scale(rows, source), rows, stem)


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        stem = snakemake.output.pdf.removesuffix(".pdf")
        main(snakemake.input.table, stem, snakemake.wildcards.source)
