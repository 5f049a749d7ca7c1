"""Confidence intervals of means."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

__all__ = ["half_widths"]

_LEVEL = 0.95


def half_widths(groups: "pd.api.typing.SeriesGroupBy[float, Any]") -> npt.NDArray[np.float64]:
    """Return half the width of the 95 % confidence interval of the mean of each group, (n_groups,).

    The interval is that of Student's t, and missing for a group of one.
    """
    from scipy import special  # takes a while, and most figures have no bands

    n = groups.count().to_numpy(float)
    quantile = special.stdtrit(np.maximum(n - 1.0, 1.0), 0.5 + _LEVEL / 2.0)
    return np.asarray(quantile * groups.std(ddof=1).to_numpy(float) / np.sqrt(n), dtype=np.float64)
