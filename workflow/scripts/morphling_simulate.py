"""Run one of the cluster experiments: results/<source>/morphling/<experiment>.csv and what belongs to it."""

from collections.abc import Mapping
from typing import Any

from makespan.logs import logged_to
from makespan.papers import morphling
from makespan.studies import Scenario
from makespan.tables import ALLOCATION, EVENTS, JCT, PERTURBED, SCALE, STUDY, TABLE4, write_csv
from makespan.throughput import ReferenceTimes


def main(
    name: str,
    scenarios: Mapping[str, Scenario],
    times: ReferenceTimes,
    paths: Mapping[str, str],
    drawn: Mapping[str, Any],
    options: Mapping[str, Any],
) -> None:
    """Write the tables of an experiment."""
    base = scenarios["base"]
    if name == "table4":
        made = morphling.compare_policies(scenarios, **options)
        found = {"table4": (made.table, TABLE4), "jct": (made.jct, JCT)}
        found |= {"allocation": (made.allocation, ALLOCATION), "schedule": (made.schedule, EVENTS)}
    elif name in morphling.STUDIES:
        study, schema = morphling.STUDIES[name]
        rows, means = study(base, morphling.seeded_lists(base.jobs, times, **drawn), times, **options)
        found = {name: (rows, schema), f"{name}_summary": (means, STUDY)}
    elif name == "perturbed":
        found = {name: (morphling.perturbed_arrivals(scenarios, **options), PERTURBED)}
    elif name == "scale":
        found = {name: (morphling.scale_study(base, **options), SCALE)}
    else:
        found = {name: (morphling.getting_started(scenarios, **options), TABLE4)}
    for table, (rows, schema) in found.items():
        write_csv(rows, paths[table], schema)


if "snakemake" in globals():
    with logged_to(snakemake.log[0]):
        inputs, given = snakemake.input, snakemake.params
        tables = dict(zip(given.workloads, inputs.tables, strict=True))
        lists = dict(zip(given.lists, inputs.lists, strict=True))
        scenarios = morphling.read_scenarios(tables, inputs.predictions, lists, given.cluster)
        paths, options = dict(snakemake.output.items()), dict(given.options, n_processes=snakemake.threads)
        draw = "perturbed" if snakemake.wildcards.source == "published" else "generated"
        times, drawn = morphling.read_times(tables), dict(given.drawn, draw=draw)
        main(given.experiment, scenarios, times, paths, drawn, options)
