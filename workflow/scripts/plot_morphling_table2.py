"""Draw the prediction error by model and plan family: results/<source>/morphling/figures/table2.*."""

from collections.abc import Sequence

from makespan.logs import logged_to
from makespan.plots import plot_error_bars, save_figure
from makespan.tables import TABLE2, read_csv


def main(table: str, stem: str, source: str, forms: Sequence[str], shown: str) -> None:
    """Draw the figure and save it with the table behind it."""
    errors = read_csv(table, TABLE2)
    other = next((form for form in forms if form != shown), shown)
    save_figure(plot_error_bars(errors, source, shown, other), errors, stem)


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        stem = snakemake.output.pdf.removesuffix(".pdf")
        given = snakemake.params
        main(snakemake.input.table, stem, snakemake.wildcards.source, given.forms, given.shown)
