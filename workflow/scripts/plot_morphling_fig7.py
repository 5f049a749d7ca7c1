"""Draw Fig. 7, adaptation to changing limits: results/<source>/morphling/figures/fig7.*."""

from makespan.logs import logged_to
from makespan.plots import plot_adaptation, save_figure
from makespan.tables import FIG7, read_csv
from makespan.units import MINUTE
from makespan.workloads import workload


def main(table: str, stem: str, source: str, workload_key: str, stage_duration_s: float) -> None:
    """Draw the figure and save it with the table behind it."""
    stages = read_csv(table, FIG7)
    batch = workload(workload_key).global_batch_size
    save_figure(plot_adaptation(stages, source, stage_duration_s / MINUTE, batch), stages, stem)


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        stem = snakemake.output.pdf.removesuffix(".pdf")
        given = snakemake.params
        main(snakemake.input.table, stem, snakemake.wildcards.source, given.workload, given.stage_duration_s)
