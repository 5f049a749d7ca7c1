"""Draw who held which GPU when: results/<source>/morphling/figures/gantt.*."""

from makespan.logs import logged_to
from makespan.plots import job_spans, plot_gantt, save_figure
from makespan.tables import EVENTS, read_csv


def main(table: str, stem: str, source: str) -> None:
    """Draw the figure and save it with the table behind it."""
    events = read_csv(table, EVENTS)
    spans = job_spans(events.assign(time_s=events["time_s"] - events["time_s"].min()))
    save_figure(plot_gantt(spans, source), spans, stem)


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        stem = snakemake.output.pdf.removesuffix(".pdf")
        main(snakemake.input.table, stem, snakemake.wildcards.source)
