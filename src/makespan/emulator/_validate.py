"""Validation against measured traces: every protocol, one table, and its targets."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from makespan.emulator._calibrate import calibrate
from makespan.emulator._constants import prior_theta
from makespan.emulator._metrics import Agreement, agreement
from makespan.emulator._observations import Observations
from makespan.emulator._protocols import (
    Protocol,
    anchored,
    few_shot,
    five_fold,
    leave_out,
    public_constants,
)
from makespan.emulator._timemodel import predict
from makespan.errors import InputError
from makespan.presets import read_preset

__all__ = ["Target", "Validation", "predict_speed", "targets", "validate"]

_HIGHER_IS_BETTER = ("within_pct", "order_pct", "order_apart_pct", "points_per_s")
_SPEED_POINTS = 100_000
_SPEED_REPEATS = 3
_MIN_MODELS = 2


@dataclass(frozen=True, slots=True)
class Target:
    """What a figure of the validation should reach.

    Parameters
    ----------
    protocol, metric
        Name of the protocol, and a field of `makespan.emulator.Agreement` or ``points_per_s``.
    must
        Bound that has to hold.
    aim
        Goal; None without one.
    reference
        What an earlier study of the same structure reached.
    source
        Where the target comes from.
    """

    protocol: str
    metric: str
    must: float
    reference: float
    source: str
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
    return tuple(Target(**entry) for entry in read_preset("makespan.emulator", "targets")["target"])


@dataclass(frozen=True, slots=True)
class Validation:
    """Result of `validate`.

    Parameters
    ----------
    table
        One row a target: ``protocol, metric, reached, must, aim, reference, verdict``; the verdict
        is ``aim``, ``must`` or ``missed``.
    agreements
        By protocol, all figures.
    anchors
        By workload, the factor on compute used at level L1a.
    active_bounds
        Constants at their bound of 1 in the fit to all models.
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


def validate(data: Observations) -> Validation:
    """Run all protocols on measured rows and compare the figures with the targets.

    Parameters
    ----------
    data
        Measured rows of two models or more, clean and flagged.

    Raises
    ------
    InputError
        There are fewer than two models or two stacks, so nothing can be left out.
    """
    for name, values in (("model", data.model), ("software stack", data.stack)):
        if len(set(values)) < _MIN_MODELS:
            raise InputError(
                f"validation leaves one {name} out, but the rows are of {', '.join(sorted(set(values)))} "
                "only; give traces of two or more"
            )
    by_model = leave_out(data, data.model)
    by_stack = leave_out(data, data.stack)
    by_class = leave_out(data, data.plan_class)
    with_anchor = anchored(data, by_model, data.model)
    everything = np.ones(len(data), dtype=bool)
    figures = {
        "L0": _judge(data, public_constants(data)),
        "LOMO": _judge(data, by_model),
        "L1a": _judge(data, with_anchor),
        "LOSO": _judge(data, by_stack),
        "LOSO+anchor": _judge(data, anchored(data, by_stack, data.stack)),
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


def _judge(data: Observations, protocol: Protocol, rows: NDArray[np.bool_] | None = None) -> Agreement:
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
        records.append(
            {
                "protocol": target.protocol,
                "metric": target.metric,
                "reached": value,
                "must": target.must,
                "aim": float("nan") if target.aim is None else target.aim,
                "reference": target.reference,
                "verdict": "aim" if aimed else "must" if met else "missed",
            }
        )
    return pd.DataFrame(records)
