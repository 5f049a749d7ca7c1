"""Validation against measured traces: agreement under every protocol, one table, and its targets."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import combinations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from makespan.emulator._calibration import prior_theta
from makespan.emulator._observations import Observations
from makespan.emulator._protocols import (
    Protocol,
    anchored,
    calibrate,
    few_shot,
    five_fold,
    leave_out,
    public_constants,
)
from makespan.emulator._timemodel import predict
from makespan.errors import InputError
from makespan.presets import read_preset

__all__ = [
    "Agreement",
    "Target",
    "Validation",
    "agreement",
    "predict_speed",
    "targets",
    "validate",
]

_Array = NDArray[np.float64]
_Mask = NDArray[np.bool_]
_CLOSE = 0.05  # a plan within 5 % of the best one counts as good
_APART = 0.10  # pairs further apart than 10 % should be ordered right
_HIGHER_IS_BETTER = ("within_pct", "order_pct", "order_apart_pct", "points_per_s")
_SPEED_POINTS = 100_000
_SPEED_REPEATS = 3
_MIN_MODELS = 2


@dataclass(frozen=True, slots=True)
class Agreement:
    """Agreement over a set of rows."""

    n_rows: int
    mape_pct: float
    median_pct: float
    p90_pct: float
    within_pct: float
    regret_pct: float
    order_pct: float
    order_apart_pct: float
    by_model: dict[str, float]
    by_software: dict[str, float]


def agreement(data: Observations, predicted_s: _Array, mask: _Mask) -> Agreement:
    """Compare predictions with measurements."""
    errors = 100.0 * np.abs(predicted_s / data.iter_time_s - 1.0)
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
        by_model=_means(errors, data.model, mask),
        by_software=_means(errors, data.software, mask),
    )


def _means(errors: _Array, groups: NDArray[np.str_], mask: _Mask) -> dict[str, float]:
    names = dict.fromkeys(groups[mask])
    return {str(name): float(errors[mask & (groups == name)].mean()) for name in names}


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


@dataclass(frozen=True, slots=True)
class Target:
    """What a figure of the validation has to and should reach, and an earlier study of the structure did."""

    protocol: str
    metric: str  # a field of `Agreement` or ``points_per_s``
    must: float
    reference: float
    source: str
    known: str  # measured rows that a prediction has seen
    aim: float | None = None

    @property
    def higher_is_better(self) -> bool:
        """Whether larger values are better."""
        return self.metric in _HIGHER_IS_BETTER

    def reached_by(self, value: float, bound: float | None) -> bool:
        """Return whether a value is at least as good as a bound; NaN never is."""
        if bound is None:
            return True
        return value >= bound if self.higher_is_better else value <= bound


@cache
def targets() -> tuple[Target, ...]:
    """Return all targets, in the order of the table."""
    read = read_preset("makespan.emulator", "targets")
    return tuple(Target(**entry, known=read["known"][entry["protocol"]]) for entry in read["target"])


@dataclass(frozen=True, slots=True)
class Validation:
    """Result of `validate`: the figures of all protocols, and one row a target in ``table``.

    Columns of the table: ``protocol, metric, reached, must, aim, reference, verdict`` (aim, must or missed),
    and ``known``, the measured rows that the predictions had seen.
    """

    table: pd.DataFrame
    agreements: Mapping[str, Agreement]
    anchors: Mapping[str, float]
    active_bounds: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether every bound holds."""
        return bool((self.table["verdict"] != "missed").all())

    @property
    def by_model(self) -> pd.DataFrame:
        """Mean relative error [%] of each model under each protocol."""
        return pd.DataFrame({name: found.by_model for name, found in self.agreements.items()}).T

    @property
    def by_software(self) -> pd.DataFrame:
        """Mean relative error [%] of the rows of each training software under each protocol."""
        return pd.DataFrame({name: found.by_software for name, found in self.agreements.items()}).T


def validate(data: Observations) -> Validation:
    """Run all protocols on measured rows, clean and flagged, and compare the figures with the targets.

    Raises
    ------
    InputError
        There are fewer than two models or kinds of training software, so nothing can be left out.
    """
    for name, values in (("model", data.model), ("training software", data.software)):
        if len(set(values)) < _MIN_MODELS:
            raise InputError(
                f"validation leaves one {name} out, but the rows are of {', '.join(sorted(set(values)))} "
                "only; give traces of two or more"
            )
    by_model = leave_out(data, data.model)
    by_software = leave_out(data, data.software)
    by_class = leave_out(data, data.plan_class)
    with_anchor = anchored(data, by_model, data.model)
    everything = np.ones(len(data), dtype=bool)
    figures = {
        "L0": _judge(data, public_constants(data)),
        "LOMO": _judge(data, by_model),
        "L1a": _judge(data, with_anchor),
        "LOSO": _judge(data, by_software),
        "LOSO+anchor": _judge(data, anchored(data, by_software, data.software)),
        "L2": _judge(data, few_shot(data, by_model)),
        "5-fold": _judge(data, five_fold(data, by_model)),
        "LOPO": _judge(data, by_class),
        "LOPO, no offload": _judge(data, by_class, data.clean & (data.plan_class != "offload")),
        "LOMO, all rows": _judge(data, by_model, everything),
    }
    return Validation(
        table=_table(figures, predict_speed(data)),
        agreements=figures,
        anchors=with_anchor.anchors,
        active_bounds=calibrate(data.subset(data.clean)).active_bounds,
    )


def _judge(data: Observations, protocol: Protocol, rows: _Mask | None = None) -> Agreement:
    chosen = data.clean if rows is None else rows
    return agreement(data, protocol.predicted_s, chosen & protocol.held_out)


def predict_speed(data: Observations) -> float:
    """Measure how many points a second the time model predicts from ready features."""
    codes = np.arange(_SPEED_POINTS) % len(data)
    features = {name: values[codes] for name, values in data.features.items()}
    theta = prior_theta()
    best = float("inf")
    for _ in range(_SPEED_REPEATS):
        start = time.perf_counter()
        predict(theta, features)
        best = min(best, time.perf_counter() - start)
    return _SPEED_POINTS / best


def _table(figures: Mapping[str, Agreement], points_per_s: float) -> pd.DataFrame:
    records = []
    for target in targets():
        if target.metric == "points_per_s":
            value = points_per_s
        else:
            value = float(getattr(figures[target.protocol], target.metric))
        met = target.reached_by(value, target.must)
        aimed = met and target.reached_by(value, target.aim)
        aim = float("nan") if target.aim is None else target.aim
        verdict = "aim" if aimed else "must" if met else "missed"
        figures_of = (target.protocol, target.metric, value, target.must, aim, target.reference)
        records.append((*figures_of, verdict, target.known))
    columns = ["protocol", "metric", "reached", "must", "aim", "reference", "verdict", "known"]
    return pd.DataFrame(records, columns=columns)
