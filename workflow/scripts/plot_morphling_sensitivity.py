"""Draw sensitivity curves: results/<source>/morphling/figures/sensitivity.*."""

from makespan.logs import logged_to
from makespan.papers.morphling import sensitivity_figure_table
from makespan.plots import plot_sensitivity, save_figure
from makespan.tables import SENSITIVITY, SENSITIVITY_FAMILIES, read_csv


def main(envelope: str, families: str, stem: str, source: str) -> None:
    """Draw the figure and save it with the table behind it."""
    table = sensitivity_figure_table(
        read_csv(envelope, SENSITIVITY), read_csv(families, SENSITIVITY_FAMILIES)
    )
    save_figure(plot_sensitivity(table, source), table, stem)


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        stem = snakemake.output.pdf.removesuffix(".pdf")
        main(snakemake.input.envelope, snakemake.input.families, stem, snakemake.wildcards.source)
