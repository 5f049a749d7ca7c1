"""Draw GPUs by plan family over time: results/<source>/morphling/figures/allocation.*."""

from makespan.hardware import cluster
from makespan.logs import logged_to
from makespan.papers.morphling import allocation_figure_table
from makespan.plots import plot_allocation, save_figure
from makespan.tables import ALLOCATION, read_csv


def main(table: str, stem: str, source: str, cluster_name: str) -> None:
    """Draw the figure and save it with the table behind it."""
    wide = allocation_figure_table(read_csv(table, ALLOCATION))
    save_figure(plot_allocation(wide, source, cluster(cluster_name).n_gpus), wide, stem)


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        stem = snakemake.output.pdf.removesuffix(".pdf")
        main(snakemake.input.table, stem, snakemake.wildcards.source, snakemake.params.cluster)
