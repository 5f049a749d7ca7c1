"""From points to a throughput table: emulation with seeded noise, and the explanation of a point."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from makespan.draws import named_rng, named_seed
from makespan.emulator._calibration import Calibration, CalibrationSet, load_calibration
from makespan.emulator._features import Features, feature_table
from makespan.emulator._points import Point
from makespan.emulator._timemodel import TERM_NAMES, phases, predict, predict_terms
from makespan.errors import InputError
from makespan.hardware import ClusterSpec
from makespan.plans import write_plan
from makespan.rounding import significant
from makespan.tables import THROUGHPUT
from makespan.workloads import Workload

__all__ = [
    "MAX_NOISE",
    "Anomalies",
    "Disturbances",
    "Explanation",
    "NoiseModel",
    "Stragglers",
    "emulate",
    "explain",
    "iteration_time_s",
    "row_seed",
]

MAX_NOISE = 50.0
"""Largest scale of the noise: the time of a row then spreads by a factor of e, which is no measurement."""

_Array = NDArray[np.float64]
_COMPUTE_TERMS = ("forward", "backward", "recompute")


@dataclass(frozen=True, slots=True)
class NoiseModel:
    """Scatter of measured rows around the value of the model.

    Parameters
    ----------
    sigma_run_single_node, sigma_run_multi_node, samples
        Standard deviation of the logarithm of one measured iteration [1], an assumption, and how many
        a row averages, as in the published traces.
    sigma_environment
        Standard deviation of the logarithm that a whole row shares [1]; published rows that the
        model considers equivalent differ by 0.6 to 3.5 %.
    """

    sigma_run_single_node: float = 0.015
    sigma_run_multi_node: float = 0.025
    samples: int = 19
    sigma_environment: float = 0.02

    def factors(self, rng: np.random.Generator, n_terms: int, *, multi_node: bool, scale: float) -> _Array:
        """Draw one factor for each term of a row, (n_terms,); their mean is 1."""
        run = self.sigma_run_multi_node if multi_node else self.sigma_run_single_node
        sigma = scale * run / math.sqrt(self.samples)
        environment = scale * self.sigma_environment
        draws = rng.standard_normal(n_terms + 1)
        shared = math.exp(environment * draws[0] - environment**2 / 2)
        return np.asarray(shared * np.exp(sigma * draws[1:] - sigma**2 / 2))


@dataclass(frozen=True, slots=True)
class Stragglers:
    """Nodes that compute slowly, each with a probability in a row.

    Parameters
    ----------
    probability, mean_slowdown
        Of a node being slow, and mean of the exponential share by which its compute takes longer [1].
    """

    probability: float
    mean_slowdown: float

    def __post_init__(self) -> None:
        if not 0 <= self.probability <= 1 or self.mean_slowdown < 0:
            raise InputError(
                f"stragglers: probability {self.probability} and mean_slowdown {self.mean_slowdown}; "
                "accepted: a probability in [0, 1] and a slowdown >= 0"
            )

    def compute_factor(self, rng: np.random.Generator, n_nodes: int) -> float:
        """Draw the factor on compute: that of the slowest node."""
        slow = rng.random(n_nodes) < self.probability
        extra = rng.exponential(self.mean_slowdown, n_nodes) if self.mean_slowdown else np.zeros(n_nodes)
        return float(1.0 + np.max(slow * extra))


@dataclass(frozen=True, slots=True)
class Anomalies:
    """Defects of real measurements, for robustness tests; all off by default.

    Parameters
    ----------
    odd_path_bytes_per_s
        Bandwidth of a slow path on multi-node placements with an odd number of GPUs on some
        node: the gradient volume over this adds to the iteration [B/s]; 0 for none.
    half_batch_when_short
        Whether a data-parallel run that would need accumulation runs one micro-batch only.
    missing_share
        Share of rows that are left out [1].
    """

    odd_path_bytes_per_s: float = 0.0
    half_batch_when_short: bool = False
    missing_share: float = 0.0

    def __post_init__(self) -> None:
        if self.odd_path_bytes_per_s < 0 or not 0 <= self.missing_share < 1:
            raise InputError(
                f"anomalies: odd_path_bytes_per_s {self.odd_path_bytes_per_s} and missing_share "
                f"{self.missing_share}; accepted: >= 0, and in [0, 1)"
            )

    def extra_time_s(self, point: Point, gradient_bytes: float) -> float:
        """Return the time that the slow path adds to a row [s]."""
        counts = point.placement.gpus_per_node
        is_odd = len(counts) > 1 and any(count % 2 for count in counts)
        if not (is_odd and self.odd_path_bytes_per_s and point.plan.dp > 1):
            return 0.0
        return gradient_bytes / self.odd_path_bytes_per_s


def row_seed(global_seed: int, cluster: str, workload: str, point: Point) -> int:
    """Return a 64-bit seed that depends on the row alone, not on what else is emulated."""
    return named_seed(global_seed, cluster, workload, point.text)


def _row_generator(global_seed: int, cluster: str, workload: str, point: Point) -> np.random.Generator:
    return named_rng(global_seed, cluster, workload, point.text)


@dataclass(frozen=True, slots=True)
class Disturbances:
    """What makes a measured row differ from the model: scatter, and optional defects."""

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
    feasible, reason, warnings, memory_bytes, host_memory_bytes
        The memory verdict, and memory by component [B].
    terms_s
        Terms of the iteration [s]; they add up to `iter_time_s`.
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


def iteration_time_s(
    workload: Workload,
    points: Sequence[Point],
    cluster: ClusterSpec,
    calibration: CalibrationSet | Calibration,
) -> _Array:
    """Return the exact iteration times of points [s], (n_points,); NaN where infeasible."""
    constants = calibration.for_workload(workload)
    table = feature_table(workload, cluster)
    codes = table.codes(points)
    total = predict(constants.vector, table.features(codes), constants.compute_scale)
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
    points
        Plans in placements, for example of `trace_points`.
    calibration
        Constants; the shipped level L1 if not given.
    seed, noise
        Seed of all rows (a row depends on it and on itself alone), and scale of the measurement noise; with 0
        a row has the exact value of the model. At most `MAX_NOISE`.
    disturbances
        Sizes of the noise, stragglers and anomalies; the defaults if not given.

    Returns
    -------
    pandas.DataFrame
        Schema `makespan.tables.THROUGHPUT`, one row a point in their order; an infeasible point
        has no times.
    """
    if not 0.0 <= noise <= MAX_NOISE:
        raise InputError(f"noise is {noise}; accepted: a scale from 0 to {MAX_NOISE:g}")
    constants = (calibration or load_calibration()).for_workload(workload)
    kinds = disturbances or Disturbances()
    table = feature_table(workload, cluster)
    codes = table.codes(points)
    x = table.features(codes)
    terms = predict_terms(constants.vector, x, constants.compute_scale)
    if kinds.anomalies is not None and kinds.anomalies.half_batch_when_short:
        terms = _half_batches(terms, x, points)
    if noise > 0 or kinds.stragglers is not None or kinds.anomalies is not None:
        terms = _disturbed(terms, workload, points, cluster.name, seed, noise, kinds)
    frame = _frame(workload, points, terms, x, table.feasible(codes))
    if kinds.anomalies is not None and kinds.anomalies.missing_share:
        kept = [
            _row_generator(seed, f"missing:{cluster.name}", workload.key, point).random()
            >= kinds.anomalies.missing_share
            for point in points
        ]
        frame = frame[kept].reset_index(drop=True)
    return frame


def _half_batches(terms: dict[str, _Array], x: Features, points: Sequence[Point]) -> dict[str, _Array]:
    """Let data-parallel rows that need accumulation run one micro-batch."""
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
        rng = _row_generator(seed, cluster, workload.key, point)
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
    feasible: NDArray[np.bool_],
) -> pd.DataFrame:
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
            "iter_time_s": significant(np.where(feasible, total, np.nan)),
            "forward_s": significant(forward),
            "overlap_sync_s": significant(overlap),
            "optimize_s": significant(optimize),
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
    constants = (calibration or load_calibration()).for_workload(workload)
    table = feature_table(workload, cluster)
    code = table.codes([point])
    verdict = table.verdicts[code[0]]
    software = workload.for_plan(point.plan).stack
    label = () if software.calibrated else (f"no measured row stands behind stack {software.label}",)
    terms = predict_terms(constants.vector, table.features(code), constants.compute_scale)
    return Explanation(
        point=Point(table.plans[code[0]], point.placement),
        feasible=verdict.feasible,
        reason=verdict.reason,
        warnings=verdict.warnings + label,
        memory_bytes=dict(verdict.bytes_by_component),
        host_memory_bytes=dict(verdict.host_bytes_by_component),
        terms_s={name: float(terms[name][0]) for name in TERM_NAMES},
        calibration=constants,
    )
