"""Draw throughput against CPU threads: results/<source>/morphling/figures/sensitivity_cpu.*."""

from makespan.logs import logged_to
from makespan.papers.morphling import cpu_sensitivity_figure_table
from makespan.plots import plot_cpu_sensitivity, save_figure
from makespan.tables import SENSITIVITY_FAMILIES, read_csv


def main(families: str, stem: str, source: str) -> None:
    """Draw the figure and save it with the table behind it."""
    table = cpu_sensitivity_figure_table(read_csv(families, SENSITIVITY_FAMILIES))
    save_figure(plot_cpu_sensitivity(table, source), table, stem)


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        stem = snakemake.output.pdf.removesuffix(".pdf")
        main(snakemake.input.families, stem, snakemake.wildcards.source)
