"""Measurement anomalies, found by rule from measured columns alone, before any model is fitted."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from makespan.plans import Placement, PlanFamily, read_plan
from makespan.workloads import Workload

__all__ = ["FLAG_FAILED", "FLAG_HALF_BATCH", "FLAG_SLOW_FORWARD", "CleanRule", "flag_anomalies"]

FLAG_FAILED = "failed run"
FLAG_SLOW_FORWARD = "slow forward on odd placements"
FLAG_HALF_BATCH = "half batch on one GPU"

_DATA_PARALLEL = (
    PlanFamily.DP,
    PlanFamily.GC,
    PlanFamily.ZERO_DP,
    PlanFamily.ZERO_OFFLOAD,
    PlanFamily.ZERO_OFFLOAD_GC,
)

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class CleanRule:
    """Thresholds of the anomaly rule.

    Parameters
    ----------
    slow_forward_ratio
        A plan family of a workload has slow odd placements if the median over its multi-node rows
        with an odd count on some node, of the forward phase over that of the other rows with as
        many GPUs, exceeds this ratio [1]. Healthy families stay below 1.15.
    half_batch_ratio
        One GPU has twice the samples of two GPUs, so its forward and backward phases take about
        twice as long. Below this ratio [1] the row cannot have run the whole batch.
    """

    slow_forward_ratio: float = 1.25
    half_batch_ratio: float = 1.3


@dataclass(frozen=True, slots=True)
class _Rows:
    family: npt.NDArray[np.object_]
    n_gpus: npt.NDArray[np.int64]
    is_single_node: Bools
    is_odd: Bools
    forward_s: npt.NDArray[np.float64]
    compute_s: npt.NDArray[np.float64]


def flag_anomalies(frame: pd.DataFrame, spec: Workload, rule: CleanRule | None = None) -> pd.DataFrame:
    """Fill the columns ``clean`` and ``flag`` of the measured rows of one workload.

    Three rules, none of which looks at a prediction: a run that failed; a data-parallel family
    whose forward phase is slow on multi-node placements with an odd number of GPUs on some node
    (all such rows of the family are flagged, because one host cause affects them alike); a row on
    one GPU whose forward and backward phases are too short for the whole batch.

    Parameters
    ----------
    frame
        Schema `makespan.tables.THROUGHPUT`, rows of one workload.
    spec
        The workload.
    rule
        Thresholds; the default ones if not given.

    Returns
    -------
    pandas.DataFrame
        A copy with both columns filled; ``flag`` is empty where ``clean`` is true.
    """
    limits = rule or CleanRule()
    ran = np.flatnonzero(frame["feasible"].to_numpy(dtype=bool))
    rows = _rows(frame.iloc[ran], spec)
    flag = np.full(len(frame), FLAG_FAILED, dtype=object)
    flag[ran] = ""
    flag[ran[_slow_forward(rows, limits.slow_forward_ratio)]] = FLAG_SLOW_FORWARD
    flag[ran[_half_batch(rows, limits.half_batch_ratio)]] = FLAG_HALF_BATCH
    return frame.assign(clean=flag == "", flag=flag.astype(str))


def _rows(frame: pd.DataFrame, spec: Workload) -> _Rows:
    placements = [Placement.parse(text) for text in frame["placement"]]
    plans = [
        read_plan(text, n_gpus=place.n_gpus, global_batch_size=spec.global_batch_size)
        for text, place in zip(frame["exec_plan"], placements, strict=True)
    ]
    family = np.empty(len(frame), dtype=object)
    family[:] = [plan.plan_family for plan in plans]
    single = np.array([place.n_nodes == 1 for place in placements], dtype=bool)
    odd = np.array([any(count % 2 for count in place.gpus_per_node) for place in placements], dtype=bool)
    forward = frame["forward_s"].to_numpy(dtype=np.float64)
    return _Rows(
        family=family,
        n_gpus=np.array([place.n_gpus for place in placements], dtype=np.int64),
        is_single_node=single,
        is_odd=odd & ~single,
        forward_s=forward,
        compute_s=forward + frame["overlap_sync_s"].to_numpy(dtype=np.float64),
    )


def _slow_forward(rows: _Rows, limit: float) -> Bools:
    slow = np.zeros(len(rows.family), dtype=bool)
    for family in _DATA_PARALLEL:
        members = rows.family == family
        odd = np.flatnonzero(members & rows.is_odd)
        ratios = [_forward_ratio(rows, members & ~rows.is_odd, int(row)) for row in odd]
        known = np.array([ratio for ratio in ratios if np.isfinite(ratio)])
        if known.size and float(np.median(known)) > limit:
            slow[odd] = True
    return slow


def _forward_ratio(rows: _Rows, peers: Bools, row: int) -> float:
    reference = rows.forward_s[peers & (rows.n_gpus == rows.n_gpus[row]) & (rows.forward_s > 0)]
    return float(rows.forward_s[row] / np.median(reference)) if reference.size else float("nan")


def _half_batch(rows: _Rows, limit: float) -> Bools:
    short = np.zeros(len(rows.family), dtype=bool)
    for family in _DATA_PARALLEL:
        members = (rows.family == family) & rows.is_single_node & (rows.compute_s > 0)
        one, two = members & (rows.n_gpus == 1), members & (rows.n_gpus == 2)
        if one.any() and two.any():
            short[one] = rows.compute_s[one] < limit * float(np.median(rows.compute_s[two]))
    return short
