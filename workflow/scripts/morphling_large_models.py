"""Vary the share of large models: results/<source>/morphling/large_models.csv and its summary."""

from collections.abc import Mapping
from typing import Any

from makespan.logs import logged_to
from makespan.papers.morphling import Bench, large_models_study, read_bench, read_times, seeded_lists
from makespan.tables import LARGE_MODELS, STUDY, write_csv
from makespan.traces import ReferenceTimes


def main(
    bench: Bench,
    times: ReferenceTimes,
    paths: Mapping[str, str],
    drawn: Mapping[str, Any],
    options: Mapping[str, Any],
) -> None:
    """Write one row a simulation, and means with confidence bands."""
    rows, means = large_models_study(
        bench, seeded_lists(bench.jobs["base"], times, **drawn), times, **options
    )
    write_csv(rows, paths["table"], LARGE_MODELS)
    write_csv(means, paths["summary"], STUDY)


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        inputs, given = snakemake.input, snakemake.params
        tables = dict(zip(given.workloads, inputs.tables, strict=True))
        lists = dict(zip(given.lists, inputs.lists, strict=True))
        bench = read_bench(tables, inputs.knowledge, lists, given.cluster, snakemake.threads)
        main(bench, read_times(tables), dict(snakemake.output.items()), given.drawn, given.options)
