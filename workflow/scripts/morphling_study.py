"""Vary one thing over seeds: one row a simulation, and means with confidence intervals."""

from collections.abc import Mapping
from typing import Any

from makespan.logs import logged_to
from makespan.papers.morphling import STUDIES, seeded_lists
from makespan.studies import Scenario, read_scenarios, read_times
from makespan.tables import STUDY, write_csv
from makespan.throughput import ReferenceTimes


def main(
    name: str,
    base: Scenario,
    times: ReferenceTimes,
    paths: Mapping[str, str],
    drawn: Mapping[str, Any],
    options: Mapping[str, Any],
) -> None:
    """Write the table of a study and its summary."""
    study, schema = STUDIES[name]
    rows, means = study(base, seeded_lists(base.jobs, times, **drawn), times, **options)
    write_csv(rows, paths["table"], schema)
    write_csv(means, paths["summary"], STUDY)


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        inputs, given = snakemake.input, snakemake.params
        tables = dict(zip(given.workloads, inputs.tables, strict=True))
        lists = dict(zip(given.lists, inputs.lists, strict=True))
        scenarios = read_scenarios(tables, inputs.knowledge, lists, given.cluster)
        outputs, options = dict(snakemake.output.items()), dict(given.options, n_processes=snakemake.threads)
        main(given.study, scenarios["base"], read_times(tables), outputs, given.drawn, options)
