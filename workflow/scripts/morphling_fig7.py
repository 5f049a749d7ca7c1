"""Adapt one job to changing limits: results/<source>/morphling/fig7.csv."""

from collections.abc import Mapping, Sequence

from makespan.logs import logged_to
from makespan.papers.morphling import FIG7, fig7, read_published
from makespan.tables import THROUGHPUT, read_csv, write_csv


def main(
    tables: Sequence[str],
    published: str,
    table: str,
    cluster: str,
    form: str,
    stages: Sequence[Mapping[str, object]],
) -> None:
    """Write plan and iteration time of every strategy at every stage."""
    (throughput,) = (read_csv(path, THROUGHPUT) for path in tables)
    write_csv(fig7(throughput, stages, read_published("fig7", published), cluster, form), table, FIG7)


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        inputs, given = snakemake.input, snakemake.params
        main(inputs.tables, inputs.published, snakemake.output.table, given.cluster, given.form, given.stages)
