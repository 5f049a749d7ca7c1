"""Predict what policies decide by: results/<source>/morphling/predictions.csv."""

from collections.abc import Mapping
from typing import Any

from makespan.logs import logged_to
from makespan.studies import predictions
from makespan.tables import PREDICTIONS, THROUGHPUT, read_csv, write_result


def main(tables: Mapping[str, str], knowledge: str, options: Mapping[str, Any]) -> None:
    """Write predicted times, and which of them are known."""
    frames = {workload: read_csv(path, THROUGHPUT) for workload, path in tables.items()}
    write_result(predictions(frames, **options), knowledge, PREDICTIONS)


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        given = snakemake.params
        tables = dict(zip(given.workloads, snakemake.input.tables, strict=True))
        main(tables, snakemake.output.predictions, given.options)
