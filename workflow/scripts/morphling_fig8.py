"""Divide one node between jobs: results/<source>/morphling/fig8.csv."""

from collections.abc import Mapping

from makespan.logs import logged_to
from makespan.papers.morphling import FIG8, fig8, read_published
from makespan.tables import THROUGHPUT, read_csv, write_result


def main(tables: Mapping[str, str], published: str, table: str, gpus: int) -> None:
    """Write GPUs, plan and speed-up of every job under every scheduler."""
    frames = {workload: read_csv(path, THROUGHPUT) for workload, path in tables.items()}
    write_result(fig8(frames, gpus, read_published("fig8", published)), table, FIG8)


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        inputs, given = snakemake.input, snakemake.params
        paths = dict(zip(given.workloads, inputs.tables, strict=True))
        main(paths, inputs.published, snakemake.output.table, given.gpus)
