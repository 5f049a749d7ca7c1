"""Cost of each reading of the rules: the policy `morphling` with one of them exchanged at a time."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from makespan.confidence import intervals
from makespan.papers.morphling._lists import Draw
from makespan.papers.morphling._rivals import variants
from makespan.papers.morphling._tables import READINGS
from makespan.policies import policy as policy_named
from makespan.studies import Case, Scenario, measures, run_all
from makespan.workloads import JobSpec

__all__ = ["ALTERNATIVES", "ALL_BEFORE", "exchange_readings"]

ALTERNATIVES: Mapping[str, tuple[Any, ...]] = {
    "starving_takes": (True, False),
    "age_since": ("submission", "waiting"),
    "forces_smaller": (True, False),
    "gate_counts": ("own", "all"),
    "age_limit_s": (3600.0, 900.0, 14400.0, 200000.0),
    "starving_order": ("age", "slope"),
    "starving_passes_gates": (False, True),
    "old_yield": (True, False),
    "victim_counts": (True, False),
    "gate_time": ("held", "progress"),
    "gives_back": (True, False),
    "restarts_stopped": (True, False),
    "shape_order": ("nodes", "speed"),
}
"""Ways to read the rules where the paper leaves room, the one that `morphling` takes first."""

_FOUR = ("starving_takes", "age_since", "forces_smaller", "gate_counts")
ALL_BEFORE = "first four together"
"""Name of the variant in which the first four readings are exchanged at once."""


def exchange_readings(
    scenarios: Mapping[str, Scenario],
    lists: Mapping[tuple[str, Draw, int], tuple[JobSpec, ...]],
    delays_s: Sequence[float],
    interval_s: float,
    n_processes: int = 1,
) -> pd.DataFrame:
    """Run `morphling` with each alternative reading on every list and delay; schema `READINGS`."""
    shipped: Any = policy_named("morphling")
    policies = list(variants("morphling", ALTERNATIVES))
    four = {name: ALTERNATIVES[name][1] for name in _FOUR}
    policies.append((ALL_BEFORE, "exchanged", replace(shipped, **four)))
    keys, cases = [], []
    for reading, value, changed in policies:
        for (trace, _, seed), jobs in lists.items():
            for delay_s in delays_s:
                setting = {"trace": trace, "seed": seed, "restart_delay_s": delay_s}
                keys.append(setting | {"reading": reading, "value": value})
                given = replace(scenarios[trace], jobs=jobs, restart_delay_s=delay_s, interval_s=interval_s)
                cases.append(Case(given, changed))
    runs = run_all(cases, n_processes)
    rows = pd.DataFrame([key | measures(run) for key, run in zip(keys, runs, strict=True)])
    return READINGS.validate(_compared(rows), where="readings")


def _compared(rows: pd.DataFrame) -> pd.DataFrame:
    """Return means over lists, and ratios to the shipped readings on the same list."""
    where, names = ["trace", "seed", "restart_delay_s"], ["avg_jct_s", "makespan_s"]
    shipped = rows[rows["reading"] == ""][[*where, *names]]
    joined = rows.merge(shipped, on=where, suffixes=("", "_shipped"), sort=False)
    for name, ratio in zip(names, ("jct_ratio", "makespan_ratio"), strict=True):
        joined[ratio] = joined[name] / joined[f"{name}_shipped"]
    by = ["trace", "restart_delay_s", "reading", "value"]
    table = intervals(joined, by, [*names, "jct_ratio", "makespan_ratio"])
    renamed = {"n": "lists", "avg_jct_s_mean": "jct_mean_s", "makespan_s_mean": "makespan_mean_s"}
    return table.rename(columns=renamed)[list(READINGS.names)]
