"""Schedule more jobs on larger clusters: results/<source>/morphling/scale.csv."""

from collections.abc import Mapping
from typing import Any

from makespan.logs import logged_to
from makespan.papers.morphling import scale_study
from makespan.studies import Scenario, read_scenarios
from makespan.tables import SCALE, write_csv


def main(base: Scenario, table: str, options: Mapping[str, Any]) -> None:
    """Write what scheduling costs at every size."""
    write_csv(scale_study(base, **options), table, SCALE)


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        inputs, given = snakemake.input, snakemake.params
        tables = dict(zip(given.workloads, inputs.tables, strict=True))
        lists = dict(zip(given.lists, inputs.lists, strict=True))
        scenarios = read_scenarios(tables, inputs.knowledge, lists, given.cluster)
        main(scenarios["base"], snakemake.output.table, dict(given.options, n_processes=snakemake.threads))
