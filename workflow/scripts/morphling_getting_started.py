"""Run the short job list: results/<source>/morphling/getting_started.csv."""

from collections.abc import Mapping
from typing import Any

from makespan.logs import logged_to
from makespan.papers.morphling import getting_started
from makespan.studies import Scenario, read_scenarios
from makespan.tables import TABLE4, write_csv


def main(scenarios: Mapping[str, Scenario], table: str, options: Mapping[str, Any]) -> None:
    """Write one row a policy and restart delay."""
    write_csv(getting_started(scenarios, **options), table, TABLE4)


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        inputs, given = snakemake.input, snakemake.params
        tables = dict(zip(given.workloads, inputs.tables, strict=True))
        lists = dict(zip(given.lists, inputs.lists, strict=True))
        scenarios = read_scenarios(tables, inputs.knowledge, lists, given.cluster)
        main(scenarios, snakemake.output.table, dict(given.options, n_processes=snakemake.threads))
