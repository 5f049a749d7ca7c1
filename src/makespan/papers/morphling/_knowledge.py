"""What it is worth to know more: every policy on the same job lists, told less and told more."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pandas as pd

from makespan.confidence import intervals
from makespan.papers.morphling._lists import List, means
from makespan.papers.morphling._tables import KNOWLEDGE
from makespan.studies import PREDICTION_MODES, Case, Scenario, knowing, run_all
from makespan.workloads import JobSpec

__all__ = ["knowledge_study"]

_LEAST = PREDICTION_MODES[0]


def knowledge_study(
    scenarios: Mapping[str, Scenario],
    lists: Mapping[List, tuple[JobSpec, ...]],
    policies: Sequence[str],
    delay_s: float,
    interval_s: float,
    n_processes: int = 1,
) -> pd.DataFrame:
    """Run policies on job lists, with every amount of knowledge; schema `KNOWLEDGE`.

    Policies know sampled rows in the scenarios; ratios are to what comes of that on the same list.
    """
    keys, cases = [], []
    for mode in PREDICTION_MODES:
        told = {trace: knowing(scenarios[trace], mode) for trace in dict.fromkeys(key[0] for key in lists)}
        for (trace, draw, seed), jobs in lists.items():
            of_list = replace(told[trace], jobs=jobs, restart_delay_s=delay_s, interval_s=interval_s)
            keys += [(trace, draw, seed, policy, mode) for policy in policies]
            cases += [Case(of_list, policy) for policy in policies]
    rows = pd.DataFrame(keys, columns=["trace", "draw", "seed", "policy", "mode"])
    runs = run_all(cases, n_processes)
    for column in ("avg_jct_s", "makespan_s"):
        rows[column] = [getattr(run.metrics, column) for run in runs]
    rows["known_starts"] = [run.result.known_starts for run in runs]
    return KNOWLEDGE.validate(_summary(rows), where=KNOWLEDGE.name)


def _summary(rows: pd.DataFrame) -> pd.DataFrame:
    """Return means over lists with their intervals, of the ratio to the least knowledge too."""
    own, by = ["trace", "draw", "seed", "policy"], ["trace", "policy", "mode"]
    least = rows[rows["mode"] == _LEAST].set_index(own)["avg_jct_s"]
    base = least.reindex(pd.MultiIndex.from_frame(rows[own])).to_numpy(float)
    ratios = intervals(rows.assign(jct_ratio=rows["avg_jct_s"] / base), by, ["jct_ratio"]).drop(columns="n")
    known = rows.groupby(by, sort=False)["known_starts"].mean().to_numpy(float)
    return means(rows, by).rename(columns={"n": "lists"}).merge(ratios, on=by).assign(known_starts=known)
