"""Confidence intervals of means."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

__all__ = ["half_widths", "intervals"]

_LEVEL = 0.95


def half_widths(groups: "pd.api.typing.SeriesGroupBy[float, Any]") -> npt.NDArray[np.float64]:
    """Return half the width of the 95 % confidence interval of the mean of each group, (n_groups,).

    The interval is that of Student's t, and missing for a group of one.
    """
    from scipy import special  # takes a while, and most figures have no bands

    n = groups.count().to_numpy(float)
    quantile = special.stdtrit(np.maximum(n - 1.0, 1.0), 0.5 + _LEVEL / 2.0)
    return np.asarray(quantile * groups.std(ddof=1).to_numpy(float) / np.sqrt(n), dtype=np.float64)


def intervals(rows: pd.DataFrame, by: Sequence[str], columns: Sequence[str]) -> pd.DataFrame:
    """Return geometric means and their 95 % confidence intervals, because times are positive and skewed.

    One row a group in the order of appearance: the columns ``by``, ``n``, the rows of the group, and for
    each of the columns ``<column>_mean``, ``_low`` and ``_high``. The interval is for
    the mean of the logarithms, and missing for a single row.
    """
    keys = [rows[name] for name in by]
    table = rows.groupby(list(by), sort=False).size().rename("n").reset_index()
    for column in columns:
        logs = np.log(rows[column]).groupby(keys, sort=False)
        mean = logs.mean().to_numpy(dtype=float)
        half = half_widths(logs)
        table[f"{column}_mean"] = np.exp(mean)
        table[f"{column}_low"], table[f"{column}_high"] = np.exp(mean - half), np.exp(mean + half)
    return table
