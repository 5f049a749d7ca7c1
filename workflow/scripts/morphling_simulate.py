"""Run one of the cluster experiments: results/<source>/morphling/<experiment>.csv and what belongs to it."""

from collections.abc import Mapping
from typing import Any

from makespan.logs import logged_to
from makespan.papers.morphling import run_experiment
from makespan.studies import read_scenarios, read_times
from makespan.tables import write_result


def main(name: str, inputs: Mapping[str, Any], paths: Mapping[str, str], given: Mapping[str, Any]) -> None:
    """Write the tables of an experiment."""
    scenarios = read_scenarios(inputs["tables"], inputs["predictions"], inputs["lists"], given["cluster"])
    times, settings = read_times(inputs["tables"]), (given["mode"], given["drawn"], given["options"])
    for table, rows in run_experiment(name, scenarios, times, *settings).items():
        write_result(rows, paths[table])


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        inputs, given = dict(snakemake.input.items()), dict(snakemake.params.items())
        inputs["tables"] = dict(zip(given["workloads"], snakemake.input.tables, strict=True))
        inputs["lists"] = dict(zip(given["lists"], snakemake.input.lists, strict=True))
        given["options"] = dict(given["options"], n_processes=snakemake.threads)
        given["drawn"] = dict(given["drawn"], is_generated=snakemake.wildcards.source != "published")
        main(given["experiment"], inputs, dict(snakemake.output.items()), given)
