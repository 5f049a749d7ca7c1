"""Compare policies on all job lists: results/<source>/morphling/table4.csv and what is drawn with it."""

from collections.abc import Mapping
from typing import Any

from makespan.logs import logged_to
from makespan.papers.morphling import compare_policies
from makespan.studies import Scenario, read_scenarios
from makespan.tables import ALLOCATION, EVENTS, JCT, TABLE4, write_csv


def main(scenarios: Mapping[str, Scenario], paths: Mapping[str, str], options: Mapping[str, Any]) -> None:
    """Write Table 4, completion times, GPUs over time and one schedule."""
    found = compare_policies(scenarios, **options)
    write_csv(found.table, paths["table"], TABLE4)
    write_csv(found.jct, paths["jct"], JCT)
    write_csv(found.allocation, paths["allocation"], ALLOCATION)
    write_csv(found.schedule, paths["schedule"], EVENTS)


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        inputs, given = snakemake.input, snakemake.params
        tables = dict(zip(given.workloads, inputs.tables, strict=True))
        lists = dict(zip(given.lists, inputs.lists, strict=True))
        scenarios = read_scenarios(tables, inputs.knowledge, lists, given.cluster)
        options = dict(given.options, n_processes=snakemake.threads)
        main(scenarios, dict(snakemake.output.items()), options)
