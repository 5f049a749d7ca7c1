"""Vary one thing over seeds: one row a simulation, and means with confidence bands."""

from collections.abc import Mapping
from typing import Any

from makespan.logs import logged_to
from makespan.papers.morphling import (
    large_models_study,
    load_study,
    read_scenarios,
    read_times,
    rounds_study,
    seeded_lists,
)
from makespan.studies import Scenario
from makespan.tables import LARGE_MODELS, LOAD, ROUNDS, STUDY, write_csv
from makespan.throughput import ReferenceTimes

# What runs, the schema of its rows, and whether it draws other jobs, which takes their iteration times.
STUDIES = {
    "load": (load_study, LOAD, False),
    "large_models": (large_models_study, LARGE_MODELS, True),
    "rounds": (rounds_study, ROUNDS, False),
}


def main(
    name: str,
    base: Scenario,
    times: ReferenceTimes,
    paths: Mapping[str, str],
    drawn: Mapping[str, Any],
    options: Mapping[str, Any],
) -> None:
    """Write the table of a study and its summary."""
    study, schema, draws_jobs = STUDIES[name]
    more = {"times": times} if draws_jobs else {}
    rows, means = study(base, seeded_lists(base.jobs, times, **drawn), **more, **options)
    write_csv(rows, paths["table"], schema)
    write_csv(means, paths["summary"], STUDY)


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        inputs, given = snakemake.input, snakemake.params
        tables = dict(zip(given.workloads, inputs.tables, strict=True))
        lists = dict(zip(given.lists, inputs.lists, strict=True))
        scenarios = read_scenarios(tables, inputs.knowledge, lists, given.cluster)
        outputs = dict(snakemake.output.items())
        options = dict(given.options, n_processes=snakemake.threads)
        main(given.study, scenarios["base"], read_times(tables), outputs, given.drawn, options)
