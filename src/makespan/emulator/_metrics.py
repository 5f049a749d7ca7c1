"""Agreement of predicted and measured iteration times: errors, best plan, order."""

from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from makespan.emulator._observations import Observations

__all__ = ["Agreement", "agreement", "relative_errors"]

_Array = NDArray[np.float64]
_Mask = NDArray[np.bool_]

_CLOSE = 0.05  # a plan within 5 % of the best one counts as good
_APART = 0.10  # pairs further apart than 10 % should be ordered right


@dataclass(frozen=True, slots=True)
class Agreement:
    """Agreement over a set of rows.

    Parameters
    ----------
    n_rows
        Rows compared.
    mape_pct, median_pct, p90_pct
        Mean, median and 90th percentile of the relative error [%].
    within_pct
        Share of (workload, placement) whose predicted best plan is within 5 % of the measured
        best one [%].
    regret_pct
        Mean excess of the predicted best plan over the measured best one [%].
    order_pct, order_apart_pct
        Share of pairs of plans in the right order: all pairs, and those more than 10 % apart [%].
    by_model
        Mean relative error of each model [%].
    """

    n_rows: int
    mape_pct: float
    median_pct: float
    p90_pct: float
    within_pct: float
    regret_pct: float
    order_pct: float
    order_apart_pct: float
    by_model: dict[str, float]


def relative_errors(predicted_s: _Array, measured_s: _Array) -> _Array:
    """Return the error of each prediction, relative to the measurement [1]."""
    return np.asarray(np.abs(predicted_s / measured_s - 1.0))


def agreement(data: Observations, predicted_s: _Array, mask: _Mask) -> Agreement:
    """Compare predictions with measurements.

    Parameters
    ----------
    data
        Measured rows.
    predicted_s
        Predicted iteration times [s], (n_rows,).
    mask
        Rows to compare, (n_rows,).
    """
    errors = 100.0 * relative_errors(predicted_s, data.iter_time_s)
    chosen = errors[mask]
    regrets, pairs, apart = _ranking(data, predicted_s, mask)
    return Agreement(
        n_rows=int(mask.sum()),
        mape_pct=float(chosen.mean()),
        median_pct=float(np.median(chosen)),
        p90_pct=float(np.quantile(chosen, 0.9)),
        within_pct=100.0 * _mean([float(regret <= _CLOSE) for regret in regrets]),
        regret_pct=100.0 * _mean(regrets),
        order_pct=100.0 * _mean(pairs),
        order_apart_pct=100.0 * _mean(apart),
        by_model={
            str(model): float(errors[mask & (data.model == model)].mean())
            for model in dict.fromkeys(data.model[mask])
        },
    )


def _mean(values: list[float]) -> float:
    return float(np.mean(values)) if values else float("nan")


def _ranking(
    data: Observations, predicted_s: _Array, mask: _Mask
) -> tuple[list[float], list[float], list[float]]:
    """Return regrets a placement, and for each pair of plans there whether its order is right."""
    groups: dict[tuple[str, str], list[int]] = {}
    for row in np.flatnonzero(mask):
        groups.setdefault((str(data.workload[row]), str(data.placement[row])), []).append(int(row))
    regrets: list[float] = []
    pairs: list[float] = []
    apart: list[float] = []
    for rows in groups.values():
        if len(rows) < 2:
            continue
        measured, predicted = data.iter_time_s[rows], predicted_s[rows]
        regrets.append(float(measured[np.argmin(predicted)] / measured.min() - 1.0))
        for first, second in combinations(range(len(rows)), 2):
            right = float((measured[first] < measured[second]) == (predicted[first] < predicted[second]))
            pairs.append(right)
            if abs(np.log(measured[first] / measured[second])) > np.log(1.0 + _APART):
                apart.append(right)
    return regrets, pairs, apart
