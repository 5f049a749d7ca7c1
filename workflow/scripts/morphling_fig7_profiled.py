"""Adapt a profiled workload to changing limits: results/measured/morphling/fig7.csv."""

from collections.abc import Mapping, Sequence

from makespan.logs import logged_to
from makespan.papers.morphling import FIG7, measured_fig7
from makespan.tables import THROUGHPUT, read_csv, write_csv


def main(
    throughput: str, table: str, environment: str, form: str, stages: Sequence[Mapping[str, object]]
) -> None:
    """Write plan and iteration time of every strategy at every stage."""
    write_csv(measured_fig7(read_csv(throughput, THROUGHPUT), stages, environment, form), table, FIG7)


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        given = snakemake.params
        main(snakemake.input.table, snakemake.output.table, given.environment, given.form, given.stages)
