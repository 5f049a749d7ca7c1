"""Who is ahead of whom, from tables alone: ratios on the same list, means over lists with their intervals."""

from collections.abc import Sequence

import pandas as pd

from makespan.numerics import intervals
from makespan.papers.experiment import paper_named

CLAIRVOYANT = frozenset(
    (
        *(f"morphling-work{ending}" for ending in ("", "-s", "-e", "-r", "-n")),
        *("gavel-ftf", "gavel-makespan", "sjf", "srtf"),
    )
)
"""Policies that know run times. Named here, so that no table or figure depends on the code of policies."""
RECONFIGURING = ("sia",)
"""Policies of others that change plans or resources of jobs; under the rest they run as requested."""
CHOSEN, REQUESTED = "chosen", "requested"
"""CPU threads of a job: what its policy chose, or what it requested."""


def paired(rows: pd.DataFrame, setting: Sequence[str], lists: Sequence[str]) -> pd.DataFrame:
    """Divide the times of rivals by those of each policy on the same list.

    Parameters
    ----------
    rows
        One row per simulation: ``policy, avg_jct_s, makespan_s``, the columns below, and ``sla_attainment``
        where there are guarantees.
    setting, lists
        Columns that say under which conditions, and on which list.

    Returns
    -------
    pandas.DataFrame
        One row per setting, policy and rival that knows no more: ``lists``, geometric means of the ratios
        with 95 % intervals, the lists on which the policy is ahead, and the least share of guarantees that
        the rival keeps.
    """
    measured = ["avg_jct_s", "makespan_s"]
    columns = [*setting, *lists, *measured, *(["sla_attainment"] if "sla_attainment" in rows else [])]
    parts = []
    for name in dict.fromkeys(rows["policy"]):
        own = rows[rows["policy"] == name][[*setting, *lists, *measured]]
        for rival in rivals_of(str(name), rows["policy"]):
            others = rows[rows["policy"] == rival][columns]
            joined = own.merge(others, on=[*setting, *lists], suffixes=("", "_rival"))
            ratios = joined.assign(policy=name, rival=rival)
            for column in measured:
                ratios[column] = joined[f"{column}_rival"] / joined[column]
            parts.append(ratios)
    if not parts:
        return pd.DataFrame(columns=columns_of("lists_pairs"))
    every, by = pd.concat(parts, ignore_index=True), [*setting, "policy", "rival"]
    names = {"avg_jct_s": "jct", "makespan_s": "makespan"}
    table = intervals(every, by, measured).rename(
        columns={"n": "lists"}
        | {
            f"{old}_{end}": f"{new}_ratio_{end}"
            for old, new in names.items()
            for end in ("mean", "low", "high")
        }
    )
    groups = every.groupby(by, sort=False)
    for old, new in names.items():
        table[f"{new}_wins"] = groups[old].agg(lambda ratios: int((ratios > 1).sum())).to_numpy()
    if "sla_attainment" in every:
        table["rival_sla_attainment"] = groups["sla_attainment"].min().to_numpy(float)
    return table


def rivals_of(name: str, policies: "Sequence[str] | pd.Series[str]") -> list[str]:
    """Return the other policies that know no more than this one does."""
    others = (str(other) for other in dict.fromkeys(policies) if other != name)
    return [other for other in others if name in CLAIRVOYANT or other not in CLAIRVOYANT]


def threads_worth(rows: pd.DataFrame) -> pd.DataFrame:
    """Average JCT with requested over that with chosen threads: means over lists with their intervals.

    One row per policy and share: ``n`` lists, ``ratio_mean``, ``ratio_low`` and ``ratio_high``.
    """
    by = ["policy", "offload_share"]
    wide = rows.pivot(index=[*by, "seed"], columns="threads", values="avg_jct_s")
    ratios = (wide[REQUESTED] / wide[CHOSEN]).rename("ratio").reset_index()
    return intervals(ratios, by, ["ratio"])


def means(rows: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """Return geometric means of average JCT and makespan over lists, with their 95 % intervals, and ``n``."""
    names = {
        f"{column}_{end}": f"{name}_{end}_s"
        for column, name in (("avg_jct_s", "jct"), ("makespan_s", "makespan"))
        for end in ("mean", "low", "high")
    }
    return intervals(rows, by, ["avg_jct_s", "makespan_s"]).rename(columns=names)


def columns_of(table: str) -> list[str]:
    """Return the columns of a result table of the paper."""
    return paper_named("morphling").schema_of(table).names
