"""Compute sensitivity curves: results/<source>/morphling/sensitivity.csv and sensitivity_families.csv."""

from collections.abc import Sequence

from makespan.logs import logged_to
from makespan.papers.morphling import sensitivity
from makespan.tables import SENSITIVITY, SENSITIVITY_FAMILIES, THROUGHPUT, read_csv, write_result


def main(
    tables: Sequence[str],
    envelope: str,
    families: str,
    cluster: str,
    form: str,
    max_gpus: int,
    cpu_threads: Sequence[int],
) -> None:
    """Write the best plan, and the best of every family, against GPUs."""
    frames = [read_csv(table, THROUGHPUT) for table in tables]
    best, by_family = sensitivity(frames, cluster, form, max_gpus, cpu_threads)
    write_result(best, envelope, SENSITIVITY)
    write_result(by_family, families, SENSITIVITY_FAMILIES)


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        given = dict(snakemake.params.items())
        given.pop("code")
        main(snakemake.input.tables, snakemake.output.envelope, snakemake.output.families, **given)
