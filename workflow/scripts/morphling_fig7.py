"""Adapt one job to changing limits: results/<source>/morphling/fig7.csv."""

from collections.abc import Mapping, Sequence

from makespan.logs import logged_to
from makespan.papers.morphling import FIG7, fig7, measured_fig7, read_published
from makespan.tables import THROUGHPUT, read_csv, write_result

Stages = Sequence[Mapping[str, object]]


def main(throughput: str, published: str | None, table: str, cluster: str, form: str, stages: Stages) -> None:
    """Write plan and iteration time of every strategy at every stage; a profile has no published cells."""
    times = read_csv(throughput, THROUGHPUT)
    if published is None:
        write_result(measured_fig7(times, stages, cluster, form), table, FIG7)
    else:
        write_result(fig7(times, stages, read_published("fig7", published), cluster, form), table, FIG7)


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        (times,), cells, given = snakemake.input.tables, snakemake.input.get("published"), snakemake.params
        main(times, cells, snakemake.output.table, given.cluster, given.form, given.stages)
