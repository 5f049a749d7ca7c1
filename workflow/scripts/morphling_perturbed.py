"""Shift all arrivals: results/<source>/morphling/perturbed.csv."""

from collections.abc import Mapping
from typing import Any

from makespan.logs import logged_to
from makespan.papers.morphling import perturbed_arrivals
from makespan.studies import Scenario, read_scenarios
from makespan.tables import PERTURBED, write_csv


def main(scenarios: Mapping[str, Scenario], table: str, options: Mapping[str, Any]) -> None:
    """Write mean and spread over shifts."""
    write_csv(perturbed_arrivals(scenarios, **options), table, PERTURBED)


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        inputs, given = snakemake.input, snakemake.params
        tables = dict(zip(given.workloads, inputs.tables, strict=True))
        lists = dict(zip(given.lists, inputs.lists, strict=True))
        scenarios = read_scenarios(tables, inputs.knowledge, lists, given.cluster)
        main(scenarios, snakemake.output.table, dict(given.options, n_processes=snakemake.threads))
