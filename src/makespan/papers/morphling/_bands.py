"""Mean and confidence band over seeds."""

import numpy as np
import pandas as pd
from scipy import special

from makespan.tables import STUDY

__all__ = ["study_summary"]

_CONFIDENCE = 0.95
_MEASURES = (("avg_jct_s", "jct"), ("makespan_s", "makespan"))


def study_summary(rows: pd.DataFrame, parameter: str) -> pd.DataFrame:
    """Summarise a study over its seeds, in logarithms, because times are positive and skewed.

    Parameters
    ----------
    rows
        One row a simulation: ``policy``, the parameter, ``seed``, ``avg_jct_s`` and ``makespan_s`` [s].
    parameter
        Name of the column that is varied.

    Returns
    -------
    pandas.DataFrame
        Schema `makespan.tables.STUDY`: geometric means and their 95 % confidence intervals (Student's t),
        which are missing for a single seed.
    """
    groups = rows.groupby([parameter, "policy"], sort=False)
    keys = groups.size().rename("seeds").reset_index().rename(columns={parameter: "value"})
    table = keys.assign(parameter=parameter)
    n = table["seeds"].to_numpy(dtype=float)
    quantile = special.stdtrit(np.maximum(n - 1.0, 1.0), 0.5 + _CONFIDENCE / 2.0)
    for column, name in _MEASURES:
        logs = np.log(rows[column]).groupby([rows[parameter], rows["policy"]], sort=False)
        mean = logs.mean().to_numpy(dtype=float)
        half = quantile * logs.std(ddof=1).to_numpy(dtype=float) / np.sqrt(n)
        table[f"{name}_mean_s"] = np.exp(mean)
        table[f"{name}_low_s"], table[f"{name}_high_s"] = np.exp(mean - half), np.exp(mean + half)
    return STUDY.validate(table, where="study")
