"""What it is worth to know more: every policy on the same job lists, told less and told more."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pandas as pd

from makespan.papers.morphling._tables import KNOWLEDGE
from makespan.studies import PREDICTION_MODES, Case, Scenario, intervals, knowing, run_all
from makespan.traces import with_perturbed_arrivals

__all__ = ["knowledge_study"]

_LEAST = PREDICTION_MODES[0]
_MEASURED = {"avg_jct_s": "jct_{}_s", "makespan_s": "makespan_{}_s", "jct_ratio": "jct_ratio_{}"}


def knowledge_study(
    scenarios: Mapping[str, Scenario],
    traces: Sequence[str],
    policies: Sequence[str],
    seeds: Sequence[int],
    std_s: float,
    delay_s: float,
    interval_s: float,
    n_processes: int = 1,
) -> pd.DataFrame:
    """Run policies on job lists with shifted arrivals, with every amount of knowledge; schema `KNOWLEDGE`.

    Policies know sampled rows in the scenarios; ratios are to what comes of that on the same list.
    """
    keys, cases = [], []
    for trace in traces:
        base = replace(scenarios[trace], restart_delay_s=delay_s, interval_s=interval_s)
        for mode in PREDICTION_MODES:
            told = knowing(base, mode)
            for seed in seeds:
                shifted = replace(told, jobs=with_perturbed_arrivals(base.jobs, std_s, seed))
                keys += [(trace, policy, mode, seed) for policy in policies]
                cases += [Case(shifted, policy) for policy in policies]
    rows = pd.DataFrame(keys, columns=["trace", "policy", "mode", "seed"])
    runs = run_all(cases, n_processes)
    for column in ("avg_jct_s", "makespan_s"):
        rows[column] = [getattr(run.metrics, column) for run in runs]
    rows["known_starts"] = [run.result.known_starts for run in runs]
    return KNOWLEDGE.validate(_summary(rows), where=KNOWLEDGE.name)


def _summary(rows: pd.DataFrame) -> pd.DataFrame:
    """Return means over the seeds with their intervals, of the ratio to the least knowledge too."""
    own = ["trace", "policy", "seed"]
    least = rows[rows["mode"] == _LEAST].set_index(own)["avg_jct_s"]
    base = least.reindex(pd.MultiIndex.from_frame(rows[own])).to_numpy(float)
    rows = rows.assign(jct_ratio=rows["avg_jct_s"] / base)
    by = ["trace", "policy", "mode"]
    known = rows.groupby(by, sort=False)["known_starts"].mean().to_numpy(float)
    names = {
        f"{column}_{end}": title.format(end)
        for column, title in _MEASURED.items()
        for end in ("mean", "low", "high")
    }
    table = intervals(rows, by, list(_MEASURED)).rename(columns=names | {"n": "lists"})
    return table.assign(known_starts=known)
