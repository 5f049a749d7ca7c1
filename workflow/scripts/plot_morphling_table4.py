"""Draw Table 4: results/<source>/morphling/figures/table4.*."""

from makespan.logs import logged_to
from makespan.papers.morphling import read_published
from makespan.plots import plot_table4, save_figure
from makespan.tables import TABLE4, read_csv


def main(table: str, published: str, stem: str, source: str, delay_s: float) -> None:
    """Draw the figure and save it with the table behind it."""
    rows = read_csv(table, TABLE4)
    cells = read_published("table4", published)
    marks = cells[cells["reading"] == "printed"].rename(columns=lambda name: name.removeprefix("published_"))
    figure = plot_table4(rows, source, delay_s, marks, "released simulator, impossible schedules")
    save_figure(figure, rows, stem)


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        stem = snakemake.output.pdf.removesuffix(".pdf")
        inputs = snakemake.input
        main(inputs.table, inputs.published, stem, snakemake.wildcards.source, snakemake.params.delay_s)
