"""From points to a throughput table: emulation with noise, and the explanation of a point."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from makespan.emulator._calibration import Calibration, CalibrationSet, load_calibration
from makespan.emulator._feature_table import FeatureTable, feature_table
from makespan.emulator._features import Features
from makespan.emulator._noise import Anomalies, NoiseModel, Stragglers, row_generator
from makespan.emulator._phases import phases
from makespan.emulator._points import Point
from makespan.emulator._timemodel import TERM_NAMES, predict_terms
from makespan.hardware import ClusterSpec
from makespan.plans import write_plan
from makespan.tables import THROUGHPUT
from makespan.workloads import Workload

__all__ = ["Disturbances", "Explanation", "emulate", "explain", "iteration_time_s"]

_Array = NDArray[np.float64]

_COMPUTE_TERMS = ("forward", "backward", "recompute")


@dataclass(frozen=True, slots=True)
class Disturbances:
    """What makes a measured row differ from the model.

    Parameters
    ----------
    noise
        Scatter of all rows.
    stragglers, anomalies
        Optional defects; None for none.
    """

    noise: NoiseModel = field(default_factory=NoiseModel)
    stragglers: Stragglers | None = None
    anomalies: Anomalies | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """One emulated point, term by term.

    Parameters
    ----------
    point
        The point, with its micro-batch size resolved.
    feasible, reason, warnings
        The memory verdict.
    memory_bytes, host_memory_bytes
        Memory by component [B].
    terms_s
        Terms of the iteration [s]; they add up to `iter_time_s`.
    calibration
        The constants used.
    """

    point: Point
    feasible: bool
    reason: str
    warnings: tuple[str, ...]
    memory_bytes: dict[str, float]
    host_memory_bytes: dict[str, float]
    terms_s: dict[str, float]
    calibration: Calibration

    @property
    def iter_time_s(self) -> float:
        """Iteration time without noise [s]; NaN if the plan cannot run."""
        return sum(self.terms_s.values()) if self.feasible else float("nan")


def _constants(calibration: CalibrationSet | Calibration, workload: Workload) -> Calibration:
    return calibration.for_workload(workload) if isinstance(calibration, CalibrationSet) else calibration


def iteration_time_s(
    workload: Workload,
    points: Sequence[Point],
    cluster: ClusterSpec,
    calibration: CalibrationSet | Calibration,
) -> _Array:
    """Return the exact iteration times of points [s], (n_points,); NaN where infeasible."""
    constants = _constants(calibration, workload)
    table = feature_table(workload, cluster)
    codes = table.codes(points)
    terms = predict_terms(constants.vector, table.features(codes), constants.compute_scale)
    total = np.asarray(sum(terms[name] for name in TERM_NAMES))
    return np.where(table.feasible(codes), total, np.nan)


def emulate(
    workload: Workload,
    points: Sequence[Point],
    cluster: ClusterSpec,
    calibration: CalibrationSet | Calibration | None = None,
    *,
    seed: int = 0,
    noise: float = 0.0,
    disturbances: Disturbances | None = None,
) -> pd.DataFrame:
    """Emulate the throughput table of points.

    Parameters
    ----------
    workload
        What is trained.
    points
        Plans in placements, for example of `makespan.emulator.trace_points`.
    cluster
        Where.
    calibration
        Constants; the shipped level L1 if not given.
    seed
        Global seed. A row depends on it and on itself, not on the other rows.
    noise
        Scale of the measurement noise; 0 gives the exact value of the model.
    disturbances
        Sizes of the noise, stragglers and anomalies; the defaults if not given.

    Returns
    -------
    pandas.DataFrame
        Schema `makespan.tables.THROUGHPUT`, one row a point in their order; an infeasible point
        has no times.
    """
    constants = _constants(calibration or load_calibration(), workload)
    kinds = disturbances or Disturbances()
    table = feature_table(workload, cluster)
    codes = table.codes(points)
    x = table.features(codes)
    terms = predict_terms(constants.vector, x, constants.compute_scale)
    if kinds.anomalies is not None:
        terms = _half_batches(terms, x, points, kinds.anomalies)
    if noise > 0 or kinds.stragglers is not None or kinds.anomalies is not None:
        terms = _disturbed(terms, workload, points, cluster.name, seed, noise, kinds)
    frame = _frame(workload, points, terms, x, table, codes)
    if kinds.anomalies is not None and kinds.anomalies.missing_share:
        kept = [
            row_generator(seed, f"missing:{cluster.name}", workload.key, point).random()
            >= kinds.anomalies.missing_share
            for point in points
        ]
        frame = frame[kept].reset_index(drop=True)
    return frame


def _half_batches(
    terms: dict[str, _Array], x: Features, points: Sequence[Point], anomalies: Anomalies
) -> dict[str, _Array]:
    """Let data-parallel rows that need accumulation run one micro-batch."""
    if not anomalies.half_batch_when_short:
        return terms
    affected = np.array([not point.plan.is_model_parallel for point in points]) & (x["microbatches"] > 1)
    divisor = np.where(affected, x["microbatches"], 1.0)
    return {name: values / divisor if name in _COMPUTE_TERMS else values for name, values in terms.items()}


def _disturbed(
    terms: dict[str, _Array],
    workload: Workload,
    points: Sequence[Point],
    cluster: str,
    seed: int,
    noise: float,
    kinds: Disturbances,
) -> dict[str, _Array]:
    factors = np.ones((len(TERM_NAMES), len(points)))
    extra = np.zeros(len(points))
    compute_rows = [TERM_NAMES.index(name) for name in _COMPUTE_TERMS]
    for column, point in enumerate(points):
        rng = row_generator(seed, cluster, workload.key, point)
        n_nodes = point.placement.n_nodes
        factors[:, column] = kinds.noise.factors(rng, len(TERM_NAMES), multi_node=n_nodes > 1, scale=noise)
        if kinds.stragglers is not None:
            factors[compute_rows, column] *= kinds.stragglers.compute_factor(rng, n_nodes)
        if kinds.anomalies is not None:
            bound = workload.for_plan(point.plan)
            volume = bound.model.parameters * bound.stack.gradient_bytes
            extra[column] = kinds.anomalies.extra_time_s(point, volume)
    disturbed = {name: terms[name] * factors[row] for row, name in enumerate(TERM_NAMES)}
    disturbed["gradient_exchange"] = disturbed["gradient_exchange"] + extra
    return disturbed


def _frame(
    workload: Workload,
    points: Sequence[Point],
    terms: dict[str, _Array],
    x: Features,
    table: FeatureTable,
    codes: NDArray[np.int64],
) -> pd.DataFrame:
    feasible = table.feasible(codes)
    total = np.asarray(sum(terms[name] for name in TERM_NAMES))
    styles = np.array([workload.for_plan(point.plan).stack.phase_style for point in points], dtype=np.str_)
    columns = np.full((3, len(points)), np.nan)
    for style in sorted(set(styles)):
        columns = np.where(styles == style, np.stack(phases(str(style), terms, x)), columns)
    forward, overlap, optimize = np.where(feasible, columns, np.nan)
    frame = pd.DataFrame(
        {
            "workload": workload.key,
            "exec_plan": [write_plan(point.plan, cpu_threads=point.plan.cpu_threads) for point in points],
            "placement": [point.placement.text for point in points],
            "cpu_threads": [point.plan.cpu_threads for point in points],
            "global_batch_size": workload.global_batch_size,
            "iter_time_s": np.where(feasible, total, np.nan),
            "forward_s": forward,
            "overlap_sync_s": overlap,
            "optimize_s": optimize,
            "feasible": feasible,
            "clean": True,
            "flag": "",
            "provenance": "emulated",
        }
    )
    return THROUGHPUT.validate(frame, where=f"emulated trace of {workload.key}")


def explain(
    workload: Workload,
    point: Point,
    cluster: ClusterSpec,
    calibration: CalibrationSet | Calibration | None = None,
) -> Explanation:
    """Emulate one point without noise and keep every term."""
    constants = _constants(calibration or load_calibration(), workload)
    table = feature_table(workload, cluster)
    code = table.codes([point])
    verdict = table.verdict(int(code[0]))
    terms = predict_terms(constants.vector, table.features(code), constants.compute_scale)
    return Explanation(
        point=Point(table.plan(int(code[0])), point.placement),
        feasible=verdict.feasible,
        reason=verdict.reason,
        warnings=verdict.warnings,
        memory_bytes=dict(verdict.bytes_by_component),
        host_memory_bytes=dict(verdict.host_bytes_by_component),
        terms_s={name: float(terms[name][0]) for name in TERM_NAMES},
        calibration=constants,
    )
