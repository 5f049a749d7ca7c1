"""Quantities that are constant between instants."""

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

__all__ = ["integral", "level", "time_average"]


def integral(times_s: ArrayLike, values: ArrayLike, at_s: ArrayLike) -> NDArray[np.float64]:
    """Integrate a step function, 0 before its first time, up to each of some times [s], any shape."""
    times, heights, ends = (np.asarray(x, dtype=np.float64) for x in (times_s, values, at_s))
    areas = np.concatenate([[0.0], np.cumsum(np.diff(times) * heights[:-1])])
    last = np.searchsorted(times, ends, side="right") - 1
    inside = np.maximum(last, 0)
    return np.where(last < 0, 0.0, areas[inside] + (ends - times[inside]) * heights[inside])


def time_average(times_s: ArrayLike, values: ArrayLike, start_s: float, end_s: float) -> float:
    """Return the mean of a step function over a span of time [s]; NaN if the span is empty."""
    if not end_s > start_s:
        return float("nan")
    start, end = integral(times_s, values, np.array([start_s, end_s]))
    return float((end - start) / (end_s - start_s))


def level(times_s: pd.Series, changes: pd.Series) -> pd.Series:
    """Add up changes, in any order of time, and return the value after each instant, by time [s]."""
    return changes.groupby(times_s.to_numpy()).sum().sort_index().cumsum().rename_axis("time_s")
