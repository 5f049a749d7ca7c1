"""Draw predicted against measured iteration times: results/<source>/morphling/figures/prediction.*."""

from makespan.logs import logged_to
from makespan.plots import plot_prediction, save_figure
from makespan.tables import TABLE2_ROWS, read_csv


def main(table: str, stem: str, source: str, form: str) -> None:
    """Draw the figure and save it with the table behind it."""
    rows = read_csv(table, TABLE2_ROWS)
    save_figure(plot_prediction(rows, source, form), rows[rows["form"] == form], stem)


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        stem = snakemake.output.pdf.removesuffix(".pdf")
        main(snakemake.input.table, stem, snakemake.wildcards.source, snakemake.params.form)
