"""Measured rows beside their features, as calibration and validation need them."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from makespan.emulator._features import FEATURE_NAMES, Features, feature_table
from makespan.emulator._points import Point, points_from_frame
from makespan.errors import InputError
from makespan.hardware import ClusterSpec
from makespan.plans import PlanFamily
from makespan.workloads import Workload, workload

__all__ = ["PLAN_CLASSES", "Observations", "observe"]

PLAN_CLASSES = ("dp", "gc", "zero", "offload", "3d")
"""Classes of plans that are held out together."""

_CLASS_OF_FAMILY = {
    PlanFamily.DP: "dp",
    PlanFamily.GC: "gc",
    PlanFamily.ZERO_DP: "zero",
    PlanFamily.ZERO_OFFLOAD: "offload",
    PlanFamily.ZERO_OFFLOAD_GC: "offload",
    PlanFamily.TP_GA: "3d",
    PlanFamily.TP_PP: "3d",
    PlanFamily.DP_TP_PP: "3d",
}

_Text = NDArray[np.str_]


@dataclass(frozen=True, slots=True)
class Observations:
    """Measured rows with their features; all arrays have one entry a row.

    Parameters
    ----------
    software
        Training software that ran the row, see `makespan.workloads.Stack.software`.
    exec_plan, placement, clean
        The row in trace notation, and whether no measurement anomaly was flagged.
    iter_time_s, forward_s, optimize_s
        Measured time and phases [s]; a phase is NaN where the stack reports no meaningful one.
    """

    workload: _Text
    model: _Text
    software: _Text
    plan_class: _Text
    exec_plan: _Text
    placement: _Text
    n_gpus: NDArray[np.int64]
    n_nodes: NDArray[np.int64]
    clean: NDArray[np.bool_]
    iter_time_s: NDArray[np.float64]
    forward_s: NDArray[np.float64]
    optimize_s: NDArray[np.float64]
    features: Features

    def __len__(self) -> int:
        return len(self.iter_time_s)

    def subset(self, mask: NDArray[np.bool_]) -> "Observations":
        """Return the rows of a mask, (n_rows,)."""
        chosen = {name: getattr(self, name)[mask] for name in self.__dataclass_fields__ if name != "features"}
        features = {name: values[mask] for name, values in self.features.items()}
        return Observations(**chosen, features=features)


def observe(frames: Mapping[str, pd.DataFrame], cluster: ClusterSpec) -> Observations:
    """Collect the feasible rows of throughput tables, given by workload key.

    Workloads whose traced configuration is not clear (``Workload.used_for_calibration``) are left out.

    Raises
    ------
    InputError, TraceError
        No table has a feasible row; a row cannot be read.
    """
    parts = [
        _one(workload(key), frame[frame["feasible"]], cluster)
        for key, frame in frames.items()
        if workload(key).used_for_calibration
    ]
    parts = [part for part in parts if len(part)]
    if not parts:
        raise InputError("no feasible row in the tables given; at least one measured row is needed")
    joined = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in Observations.__dataclass_fields__
        if name != "features"
    }
    features = {name: np.concatenate([part.features[name] for part in parts]) for name in FEATURE_NAMES}
    return Observations(**joined, features=features)


def _one(spec: Workload, frame: pd.DataFrame, cluster: ClusterSpec) -> Observations:
    points = points_from_frame(spec, frame, where=f"trace of {spec.key}")
    table = feature_table(spec, cluster)
    codes = table.codes(points)
    count = len(points)
    return Observations(
        workload=np.full(count, spec.key),
        model=np.full(count, spec.model.key),
        software=np.array([spec.for_plan(point.plan).stack.software for point in points], dtype=np.str_),
        plan_class=np.array([_CLASS_OF_FAMILY[point.plan.plan_family] for point in points], dtype=np.str_),
        exec_plan=frame["exec_plan"].to_numpy(dtype=np.str_),
        placement=frame["placement"].to_numpy(dtype=np.str_),
        n_gpus=np.array([point.placement.n_gpus for point in points], dtype=np.int64),
        n_nodes=np.array([point.placement.n_nodes for point in points], dtype=np.int64),
        clean=frame["clean"].to_numpy(dtype=bool),
        iter_time_s=frame["iter_time_s"].to_numpy(dtype=np.float64),
        forward_s=_where_meaningful(spec, points, frame["forward_s"], ("zero",)),
        optimize_s=_where_meaningful(spec, points, frame["optimize_s"], ("zero", "3d")),
        features=table.features(codes),
    )


def _where_meaningful(
    spec: Workload, points: list[Point], values: pd.Series, styles: tuple[str, ...]
) -> NDArray[np.float64]:
    """Keep a phase column where the phase style of the row's stack is one of ``styles``.

    Under style ``3d`` only model-parallel rows report the optimiser; under style ``zero`` only
    data-parallel rows follow the attribution.
    """
    meaningful = np.zeros(len(points), dtype=bool)
    for row, point in enumerate(points):
        style = spec.for_plan(point.plan).stack.phase_style
        meaningful[row] = style in styles and (style == "3d") == point.plan.is_model_parallel
    numbers = values.to_numpy(dtype=np.float64)
    return np.where(meaningful & (numbers > 0), numbers, np.nan)
