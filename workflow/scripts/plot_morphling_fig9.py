"""Draw Fig. 9, accuracy under reconfiguration: results/measured/morphling/figures/fig9.*."""

from makespan.logs import logged_to
from makespan.plots import plot_accuracy, save_figure
from makespan.tables import FIG9, FIG9_SUMMARY, read_csv


def main(table: str, summary: str, stem: str, limit: float) -> None:
    """Draw the figure and save it with the table behind it."""
    losses = read_csv(table, FIG9)
    figure = plot_accuracy(losses, read_csv(summary, FIG9_SUMMARY), limit, "measured")
    save_figure(figure, losses, stem)


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        inputs, stem = snakemake.input, snakemake.output.pdf.removesuffix(".pdf")
        main(inputs.table, inputs.summary, stem, snakemake.params.limit)
