"""Predict what policies decide by: results/<source>/morphling/predictions.csv."""

from collections.abc import Mapping
from typing import Any

from makespan.logs import logged_to
from makespan.studies import predictions
from makespan.tables import PREDICTIONS, THROUGHPUT, read_csv, write_result
from makespan.traces import read_jobs


def main(
    tables: Mapping[str, str], lists: Mapping[str, str], knowledge: str, options: Mapping[str, Any]
) -> None:
    """Write predicted times, and which of them are known."""
    frames = {workload: read_csv(path, THROUGHPUT) for workload, path in tables.items()}
    jobs = [job for path in lists.values() for job in read_jobs(path).jobs]
    write_result(predictions(frames, jobs, **options), knowledge, PREDICTIONS)


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        inputs, given = snakemake.input, snakemake.params
        tables = dict(zip(given.workloads, inputs.tables, strict=True))
        lists = dict(zip(given.lists, inputs.lists, strict=True))
        main(tables, lists, snakemake.output.predictions, given.options)
