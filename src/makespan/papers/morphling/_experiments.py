"""The cluster experiments by their names, each with all tables that it writes."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from makespan.papers.morphling._studies import STUDIES, perturbed_arrivals, scale_study, seeded_lists
from makespan.papers.morphling._table4 import compare_policies, getting_started
from makespan.studies import Scenario
from makespan.throughput import ReferenceTimes

__all__ = ["run_experiment"]


def run_experiment(
    name: str,
    scenarios: Mapping[str, Scenario],
    times: ReferenceTimes,
    drawn: Mapping[str, Any],
    options: Mapping[str, Any],
) -> dict[str, pd.DataFrame]:
    """Run a cluster experiment.

    Parameters
    ----------
    name
        A key of `EXPERIMENT_TABLES`.
    scenarios, times
        From `read_scenarios` and `read_times`.
    drawn
        Of a study over seeds: what `seeded_lists` takes.
    options
        What the function of the experiment takes.

    Returns
    -------
    dict
        The tables of `EXPERIMENT_TABLES` by name.
    """
    if name in STUDIES:
        base, (study, _) = scenarios["base"], STUDIES[name]
        rows, means = study(base, seeded_lists(base.jobs, times, **drawn), times, **options)
        return {name: rows, f"{name}_summary": means}
    if name == "table4":
        made = compare_policies(scenarios, **options)
        found = {"jct": made.jct, "allocation": made.allocation, "schedule": made.schedule}
        return {name: made.table} | found
    if name == "perturbed":
        return {name: perturbed_arrivals(scenarios, **options)}
    if name == "scale":
        return {name: scale_study(scenarios["base"], **options)}
    return {name: getting_started(scenarios, **options)}
