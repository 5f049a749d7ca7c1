"""The table behind the figure of devices over time."""

import pandas as pd

__all__ = ["allocation_figure_table"]


def allocation_figure_table(allocation: pd.DataFrame) -> pd.DataFrame:
    """Give every plan family a column.

    Parameters
    ----------
    allocation
        Schema `makespan.tables.ALLOCATION`.

    Returns
    -------
    pandas.DataFrame
        ``policy, time_s`` and one column a family, 0 where a policy never uses it; policies keep their order.
    """
    parts = []
    for policy, rows in allocation.groupby("policy", sort=False):
        wide = rows.pivot_table(index="time_s", columns="plan_family", values="gpus", aggfunc="last")
        parts.append(wide.reset_index().assign(policy=policy))
    table = pd.concat(parts, ignore_index=True)
    families = sorted(str(name) for name in table.columns if name not in ("policy", "time_s"))
    return table[["policy", "time_s", *families]].fillna(0)
