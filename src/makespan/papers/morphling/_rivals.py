"""The parameters of rivals, varied one at a time on job lists that no other result uses."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from makespan.confidence import intervals
from makespan.papers.morphling._lists import Draw
from makespan.papers.morphling._tables import RIVALS
from makespan.policies import policy as policy_named
from makespan.sim import Policy
from makespan.studies import Case, Scenario, run_all
from makespan.units import HOUR
from makespan.workloads import JobSpec

__all__ = ["AIMS_AT_MAKESPAN", "VALUES", "sweep_rivals", "variants"]

Jobs = tuple[JobSpec, ...]
List = tuple[str, Draw, int]

_SPREAD = {"max_slowdown": (1.0, 1.25, 1.5, 2.0)}
_TURNS = {
    "turn_s": (360.0, 1440.0),
    "turn_delays": (0.0, 3.0, 12.0),
    "advantage": (1.0, 2.0, 4.0, 8.0),
} | _SPREAD
_QUEUES_H = ((1, 4), (2, 8), (4, 8), (4, 16), (4, 64), (8, 16), (16,))

VALUES: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "sia": {
        "start_factor": (1.0, 2.0, None),
        "growth": (2.0, 4.0, None),
        "power": (-0.25, -0.5, -1.0),
        "queueing_penalty": (1.1, 2.0, 4.0, 8.0),
    }
    | _SPREAD,
    "synergy": {"tolerance": (0.02, 0.05, 0.1)} | _SPREAD,
    "antman": {"shares": (True, False), "least_pace": (0.0, 0.1, 0.25, 0.5)} | _SPREAD,
    "gavel": _TURNS,
    "gavel-ftf": _TURNS,
    "gavel-makespan": _TURNS,
    "tiresias": {
        "thresholds_gpu_s": tuple(tuple(hours * HOUR for hours in queues) for queues in _QUEUES_H),
        "promotion": (None, 2.0, 8.0),
    }
    | _SPREAD,
    "sjf": {"max_stretch": (1.0, 1.25, 1.5, 2.0)},
    "srtf": {"min_advantage": (0.0, 2.0, 4.0, 6.0, 8.0), "max_stretch": (1.0, 1.25, 1.5, 2.0)},
}
"""Values of the parameters of each rival; what is shipped is among them."""

AIMS_AT_MAKESPAN = ("gavel-makespan",)
"""Rivals that are judged by their makespan, as that is what they make small; others by average JCT."""


def sweep_rivals(
    scenarios: Mapping[str, Scenario],
    lists: Mapping[List, Jobs],
    policies: Sequence[str],
    delays_s: Sequence[float],
    interval_s: float,
    n_processes: int = 1,
) -> pd.DataFrame:
    """Run every variant of every rival on every list and delay; schema `RIVALS`.

    A variant differs from what is shipped in one parameter, and is compared with that on the same lists.
    """
    changed_one = [
        (policy_named(name), *variant) for name in policies for variant in variants(name, VALUES[name])
    ]
    settings = [(key, jobs, delay_s) for key, jobs in lists.items() for delay_s in delays_s]
    cases = [
        Case(replace(scenarios[key[0]], jobs=jobs, restart_delay_s=delay_s, interval_s=interval_s), changed)
        for _, _, _, changed in changed_one
        for key, jobs, delay_s in settings
    ]
    runs = iter(run_all(cases, n_processes))
    rows = [
        {"policy": shipped.name, "parameter": parameter, "value": value, "setting": number}
        | {name: getattr(next_run.metrics, name) for name in ("avg_jct_s", "makespan_s")}
        for shipped, parameter, value, _ in changed_one
        for number, next_run in zip(range(len(settings)), runs, strict=False)
    ]
    return RIVALS.validate(_compared(pd.DataFrame(rows)), where="rivals")


def variants(
    name: str, values_by_parameter: Mapping[str, tuple[Any, ...]]
) -> Iterator[tuple[str, str, Policy]]:
    """Yield parameter, value as text and policy: first what is shipped, then each other value alone."""
    shipped: Any = policy_named(name)
    yield "", "", shipped
    for parameter, values in values_by_parameter.items():
        for value in values:
            if value != getattr(shipped, parameter):
                yield parameter, _text(value), replace(shipped, **{parameter: value})


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return " ".join(f"{one:g}" for one in value)
    if isinstance(value, str):
        return value
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else f"{value:g}"


def _compared(rows: pd.DataFrame) -> pd.DataFrame:
    """Means over lists and delays, and ratios to what is shipped, of the metric that a rival makes small."""
    shipped = rows[rows["parameter"] == ""][["policy", "setting", "avg_jct_s", "makespan_s"]]
    joined = rows.merge(shipped, on=["policy", "setting"], suffixes=("", "_shipped"), sort=False)
    is_makespan = joined["policy"].isin(AIMS_AT_MAKESPAN)
    ratios = joined["avg_jct_s"] / joined["avg_jct_s_shipped"]
    joined["ratio"] = ratios.mask(is_makespan, joined["makespan_s"] / joined["makespan_s_shipped"])
    table = intervals(joined, ["policy", "parameter", "value"], ["avg_jct_s", "makespan_s", "ratio"])
    names = {"n": "runs", "avg_jct_s_mean": "jct_mean_s", "makespan_s_mean": "makespan_mean_s"}
    return table.rename(columns=names)[list(RIVALS.names)]
