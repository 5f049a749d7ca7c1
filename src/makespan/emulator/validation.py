"""Calibration of the emulator to measured rows, and its validation under leave-out protocols.

A calibration is a robust least-squares fit of the logarithms of the constants, with Gaussian priors. A
protocol decides which rows a fit sees and which rows judge it. Calibration sets exist at several levels of
knowledge, from public constants (L0) to all rows of a model (L3).
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from itertools import combinations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from makespan.arguments import typed
from makespan.emulator.constants import CONSTANTS, CalibrationSet, prior_theta, theta_array, theta_mapping
from makespan.emulator.model import FEATURE_NAMES, Features, feature_table, phases, predict, predict_terms
from makespan.emulator.points import Point, points_from_frame
from makespan.errors import FitError, InputError, TraceError, unknown_name
from makespan.files import read_preset
from makespan.hardware import ClusterSpec
from makespan.least_squares import forward_differences, least_squares
from makespan.plans import PlanFamily
from makespan.tables import THROUGHPUT
from makespan.workloads import Workload, workload as load_workload

# --- Observations: measured rows with their features ---

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
_MOST_APART = 100  # factor between measured times and those of public constants, which err by 36 %
_Text = NDArray[np.str_]


@dataclass(frozen=True, slots=True)
class Observations:
    """Measured rows with their features; all arrays have one entry per row.

    Parameters
    ----------
    software
        Training software that ran the row, see `makespan.workloads.Stack.software`.
    exec_plan, placement, clean
        The row in trace notation, and a mask of the rows without a flagged measurement anomaly.
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


@typed
def observe(frames: Mapping[str, pd.DataFrame], cluster: ClusterSpec) -> Observations:
    """Collect the feasible rows of throughput tables, given by workload key.

    Workloads whose traced configuration is not clear (``Workload.used_for_calibration``) are left out.

    Raises
    ------
    InputError, TraceError
        No table has a feasible row; a row cannot be read; times of a workload are not in seconds.
    """
    tables = {key: THROUGHPUT.validate(frame, f"trace of {key}") for key, frame in frames.items()}
    parts = [
        _observe_workload(load_workload(key), table[table["feasible"]], cluster)
        for key, table in tables.items()
        if load_workload(key).used_for_calibration
    ]
    parts = [part for part in parts if len(part)]
    for part in parts:
        _check_unit(part)
    if not parts:
        raise InputError("no feasible row in the tables given; at least one measured row is needed")
    joined = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in Observations.__dataclass_fields__
        if name != "features"
    }
    features = {name: np.concatenate([part.features[name] for part in parts]) for name in FEATURE_NAMES}
    return Observations(**joined, features=features)


def _check_unit(data: Observations) -> None:
    """Reject the rows of a workload if most times cannot be in seconds: a fit would follow milliseconds."""
    ratio = float(np.median(data.iter_time_s / predict(prior_theta(), data.features)))
    if not 1 / _MOST_APART <= ratio <= _MOST_APART:
        raise TraceError(
            f"trace of {data.workload[0]}: the median of iter_time_s is {ratio:.2g} times that of the public "
            f"constants; expected 1/{_MOST_APART} to {_MOST_APART} times, and seconds"
        )


def _observe_workload(spec: Workload, frame: pd.DataFrame, cluster: ClusterSpec) -> Observations:
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
    """Return a phase column with NaN for rows whose stack has a phase style other than ``styles``.

    Style ``3d`` reports a meaningful optimiser phase for model-parallel rows only, style ``zero`` meaningful
    phases for other rows only.
    """
    meaningful = np.zeros(len(points), dtype=bool)
    for row, point in enumerate(points):
        style = spec.for_plan(point.plan).stack.phase_style
        meaningful[row] = style in styles and (style == "3d") == point.plan.is_model_parallel
    numbers = values.to_numpy(dtype=np.float64)
    return np.where(meaningful & (numbers > 0), numbers, np.nan)


# --- Calibration: the fit, protocols of seen and held-out rows, and calibration sets of every level ---

_Array = NDArray[np.float64]
_Mask = NDArray[np.bool_]
_FOLDS = 5
_FEW = 3
# Constants fitted on other models become the priors when rows of a new model refine them. These factors widen
# the priors: for a few rows, and for many.
_FEW_SD = 1.0
_MANY_SD = 2.0
_ANCHOR_TRUST = 0.5  # share of the anchor's residual that is attributed to the model's compute
_ANCHOR_RANGE = (0.5, 2.0)
_COMPUTE = ("forward", "backward", "recompute")
_DIGEST_BYTES = 16
_REFINED_LEVELS = ("L1a", "L2", "L3")
_SCALE_LOG = 0.08  # scale of the robust loss: residuals beyond 8 % count linearly
_WEIGHT_FORWARD, _WEIGHT_OPTIMIZE = 0.2, 0.1
_STEP_LOG, _TOLERANCE, _BOUND_TOLERANCE_LOG = 1e-5, 1e-9, 1e-3


@dataclass(frozen=True, slots=True)
class CalibrationFit:
    """Result of a calibration.

    Parameters
    ----------
    theta, std_err_log
        Constants, and standard errors of their logarithms, (n_constants,).
    cost
        Value of the objective.
    active_bounds
        Names of the constants at their upper bound of 1.
    correlation
        Of the logarithms, (n_constants, n_constants).
    """

    theta: _Array
    n_rows: int
    cost: float
    active_bounds: tuple[str, ...]
    correlation: _Array
    std_err_log: _Array


@typed
def calibrate(
    observations: Observations,
    *,
    prior: _Array | None = None,
    sd_log: _Array | None = None,
    max_evaluations: int = 100,
) -> CalibrationFit:
    """Fit the constants to measured rows.

    Soft-L1 loss on log iteration times, small weights on the phases that the stacks report,
    Gaussian priors on the logarithms, and weights with which each model counts about equally.

    Parameters
    ----------
    observations
        The rows; flagged rows should be left out.
    prior, sd_log
        Centre of the priors and standard deviations of the logarithms, (n_constants,); the defaults if not
        given.

    Raises
    ------
    FitError
        There are no rows, or a residual is not finite.
    """
    if not len(observations):
        raise FitError("no measured row to calibrate with; at least one is needed")
    centre = np.log(prior_theta() if prior is None else prior)
    spread = np.array([constant.sd_log for constant in CONSTANTS]) if sd_log is None else sd_log
    upper = np.array([constant.upper_log for constant in CONSTANTS])
    residuals = partial(_residuals, observations, centre, spread)
    start = np.minimum(centre, upper - 1e-3)
    if not np.all(np.isfinite(residuals(start))):
        raise FitError("a residual is not finite at the prior; check the measured rows and the hardware")
    log_theta, cost = least_squares(
        residuals,
        start,
        (-np.inf, upper),
        _STEP_LOG,
        tolerance=_TOLERANCE,
        gradient_tolerance=_TOLERANCE,
        max_evaluations=max_evaluations,
    )
    jacobian = forward_differences(residuals, log_theta, _STEP_LOG)
    covariance = np.linalg.inv(np.einsum("ij,ik->jk", jacobian, jacobian))
    std_err = np.sqrt(np.diag(covariance))
    return CalibrationFit(
        theta=np.exp(log_theta),
        n_rows=len(observations),
        cost=cost,
        active_bounds=tuple(
            CONSTANTS[i].name for i in np.flatnonzero(log_theta > upper - _BOUND_TOLERANCE_LOG)
        ),
        correlation=covariance / np.outer(std_err, std_err),
        std_err_log=std_err,
    )


def _soft_l1(residual: _Array) -> _Array:
    """Return r' such that r'^2 is the soft-L1 loss of r, which makes plain least squares robust."""
    scaled = residual / _SCALE_LOG
    return np.sign(residual) * np.sqrt(2.0 * (np.sqrt(1.0 + scaled**2) - 1.0))


def _residuals(data: Observations, centre: _Array, spread: _Array, theta_log: _Array) -> _Array:
    """Return the residuals of one vector, or of a matrix of vectors, one row each."""
    terms = predict_terms(np.exp(theta_log), data.features)
    total = np.asarray(sum(terms.values()))
    # Square roots of weights with which each model counts the same; their mean is 1.
    _, inverse, counts = np.unique(data.model, return_inverse=True, return_counts=True)
    share = 1.0 / counts[inverse]
    weight = np.asarray(np.sqrt(share * len(share) / share.sum()))
    forward, _, optimize = phases("zero", terms, data.features)
    parts = [
        _soft_l1(np.log(total) - np.log(data.iter_time_s)) * weight,
        _WEIGHT_FORWARD * weight * _soft_l1(_log_ratio(forward, data.forward_s)),
        _WEIGHT_OPTIMIZE * weight * _soft_l1(_log_ratio(optimize, data.optimize_s)),
        (theta_log - centre) / spread,
    ]
    return np.concatenate(parts, axis=-1)


def _log_ratio(predicted: _Array, measured: _Array) -> _Array:
    known = np.isfinite(measured)
    ratio = np.where(known, predicted / np.where(known, measured, 1.0), 1.0)
    return np.asarray(np.log(np.maximum(ratio, 1e-12)))


@dataclass(frozen=True, slots=True)
class Protocol:
    """Predictions under a protocol."""

    predicted_s: _Array
    held_out: _Mask
    thetas: Mapping[str, _Array]
    anchors: Mapping[str, float]


def public_constants(data: Observations) -> Protocol:
    """Predict with the priors (level L0)."""
    predicted = predict(prior_theta(), data.features)
    return Protocol(predicted, np.ones(len(data), dtype=bool), {}, {})


def leave_out(data: Observations, groups: NDArray[np.str_]) -> Protocol:
    """Fit the clean rows without each group (models, software or plan classes) and predict its rows."""
    predicted = np.full(len(data), np.nan)
    thetas: dict[str, _Array] = {}
    for group in dict.fromkeys(groups):
        members = groups == group
        thetas[str(group)] = calibrate(data.subset(data.clean & ~members)).theta
        predicted[members] = predict(thetas[str(group)], data.subset(members).features)
    return Protocol(predicted, np.ones(len(data), dtype=bool), thetas, {})


def anchor_rows(data: Observations, kinds: NDArray[np.str_]) -> dict[str, int]:
    """Choose an anchor row for every kind, such as a workload: a small clean row on one node without offload.

    Rows without offload are preferred to rows with it, then one node to several, then numbers of GPUs close
    to four. Ties go to the first plan class and the first row.
    """
    rank = {name: index for index, name in enumerate(PLAN_CLASSES)}
    chosen: dict[str, tuple[tuple[float, ...], int]] = {}
    for row in np.flatnonzero(data.clean):
        key = (
            float(data.plan_class[row] == "offload"),
            float(data.n_nodes[row] > 1),
            abs(float(data.n_gpus[row]) - 4.0),
            float(rank[str(data.plan_class[row])]),
            float(row),
        )
        name = str(kinds[row])
        if name not in chosen or key < chosen[name][0]:
            chosen[name] = (key, int(row))
    return {name: row for name, (_, row) in chosen.items()}


def anchor_scale(theta: _Array, data: Observations, row: int) -> float:
    """Return the factor on compute that one measured row suggests, damped because the row has scatter."""
    mask = np.arange(len(data)) == row
    terms = predict_terms(theta, data.subset(mask).features)
    compute = sum(float(terms[name][0]) for name in _COMPUTE)
    total = sum(float(values[0]) for values in terms.values())
    exact = (float(data.iter_time_s[row]) - (total - compute)) / compute
    return float(np.clip(exact, *_ANCHOR_RANGE) ** _ANCHOR_TRUST)


def anchored(data: Observations, base: Protocol, groups: NDArray[np.str_]) -> Protocol:
    """Add one measured row per workload and group to a protocol that left groups out (level L1a)."""
    predicted, held_out = base.predicted_s.copy(), np.ones(len(data), dtype=bool)
    anchors: dict[str, float] = {}
    # A workload whose rows are in several groups, such as two kinds of software, gets an anchor in each.
    split = {name for name in set(data.workload) if len(set(groups[data.workload == name])) > 1}
    pairs = zip(data.workload, groups, strict=True)
    kinds = np.array([f"{name}, {group}" if name in split else name for name, group in pairs], dtype=np.str_)
    for name, row in anchor_rows(data, kinds).items():
        theta = base.thetas[str(groups[row])]
        anchors[name] = anchor_scale(theta, data, row)
        members = kinds == name
        predicted[members] = predict(theta, data.subset(members).features, anchors[name])
        held_out[row] = False
    return Protocol(predicted, held_out, base.thetas, anchors)


def few_shot(data: Observations, base: Protocol) -> Protocol:
    """Refine the fit that excluded a model by up to three of its rows per plan class (level L2)."""
    splits = []
    for model in base.thetas:
        members = data.model == model
        seen = few_rows(data, members & data.clean)
        splits.append((model, seen, members & ~seen))
    return _refined(data, base, splits, many=False)


def five_fold(data: Observations, base: Protocol) -> Protocol:
    """Refine by four fifths of the placements of a model and predict the last fifth (level L3)."""
    # The placements of a workload go to the folds in turn.
    fold, splits = np.zeros(len(data), dtype=np.int64), []
    for workload in dict.fromkeys(data.workload):
        members = data.workload == workload
        order = {text: index for index, text in enumerate(sorted(set(data.placement[members])))}
        fold[members] = [order[text] % _FOLDS for text in data.placement[members]]
    for model in base.thetas:
        members = data.model == model
        splits += [(model, members & data.clean & (fold != k), members & (fold == k)) for k in range(_FOLDS)]
    return _refined(data, base, splits, many=True)


def refine(data: Observations, prior: _Array, *, many: bool) -> _Array:
    """Return constants fitted to rows of one model, with priors around constants that have not seen it."""
    width = _MANY_SD if many else _FEW_SD
    spread = width * np.array([constant.sd_log for constant in CONSTANTS])
    return calibrate(data, prior=prior, sd_log=spread).theta


def _refined(
    data: Observations, base: Protocol, splits: Iterable[tuple[str, _Mask, _Mask]], *, many: bool
) -> Protocol:
    """Refine by the first rows of each split and predict its other rows."""
    predicted, held_out = base.predicted_s.copy(), np.zeros(len(data), dtype=bool)
    for model, seen, rest in splits:
        theta = refine(data.subset(seen), base.thetas[model], many=many)
        predicted[rest] = predict(theta, data.subset(rest).features)
        held_out |= rest
    return Protocol(predicted, held_out, base.thetas, {})


def few_rows(data: Observations, candidates: _Mask) -> _Mask:
    """Choose up to three rows per plan class: the two smallest on one node and one on several."""
    seen = np.zeros(len(data), dtype=bool)
    for workload in dict.fromkeys(data.workload[candidates]):
        for plan_class in PLAN_CLASSES:
            members = candidates & (data.workload == workload) & (data.plan_class == plan_class)
            rows = sorted(np.flatnonzero(members), key=lambda row: (data.n_gpus[row], data.n_nodes[row], row))
            single = [row for row in rows if data.n_nodes[row] == 1]
            several = [row for row in rows if data.n_nodes[row] > 1]
            middle = several[len(several) // 2 : len(several) // 2 + 1]
            chosen = (single[: _FEW - len(middle)] + middle)[:_FEW]
            chosen += [row for row in several if row not in chosen][: _FEW - len(chosen)]
            seen[chosen] = True
    return seen


def data_digest(data: Observations) -> str:
    """Return a BLAKE2b digest of the measured rows that does not depend on their order."""
    rows = zip(data.workload, data.exec_plan, data.placement, data.iter_time_s, strict=True)
    lines = sorted(
        f"{workload}|{plan}|{placement}|{float(time)!r}" for workload, plan, placement, time in rows
    )
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=_DIGEST_BYTES).hexdigest()


@typed
def calibration_set(
    name: str,
    observations: Observations,
    source: str,
    progress: Callable[[int, int, str], object] | None = None,
) -> CalibrationSet:
    """Fit the constants to all models, and once more for each model without it.

    Parameters
    ----------
    observations, source
        Measured rows (the fits leave out flagged ones), and their description.
    progress
        Is told how many fits are done, of how many, and which one runs now.

    Returns
    -------
    CalibrationSet
        Level L1: a workload is emulated with the fit that has not seen its model.
    """
    clean = observations.subset(observations.clean)
    models = [str(model) for model in np.unique(clean.model)]

    def fit(done: int, doing: str, rows: Observations) -> CalibrationFit:
        if progress is not None:
            progress(done, 1 + len(models), doing)
        return calibrate(rows)

    overall = fit(0, "the fit to all models", clean)
    without = {
        model: theta_mapping(fit(done, f"the fit without {model}", clean.subset(clean.model != model)).theta)
        for done, model in enumerate(models, start=1)
    }
    return CalibrationSet(
        name=name,
        level="L1",
        source=source,
        data_digest=data_digest(clean),
        n_rows=len(clean),
        constants=theta_mapping(overall.theta),
        without=without if len(without) > 1 else {},
        active_bounds=overall.active_bounds,
    )


@typed
def refined_set(
    name: str, observations: Observations, source: str, level: str, base: CalibrationSet
) -> CalibrationSet:
    """Refine a calibration by measured rows of the models that it will predict.

    Parameters
    ----------
    observations, source
        Measured rows (flagged ones are not used), and their description.
    level
        ``L1a``: one row per workload sets a factor on its compute. ``L2``: up to three rows per plan
        class. ``L3``: all rows.
    base
        Constants to start from: for each model those that have not seen it.

    Raises
    ------
    UnknownNameError
        ``level`` is none of these.
    """
    if level not in _REFINED_LEVELS:
        raise unknown_name("refined calibration level", level, _REFINED_LEVELS)
    clean = observations.subset(observations.clean)
    everything = np.ones(len(clean), dtype=bool)
    anchors: dict[str, float] = {}
    refined: dict[str, dict[str, float]] = {}
    if level == "L1a":
        rows = anchor_rows(clean, clean.workload)
        used = np.isin(np.arange(len(clean)), list(rows.values()))
        for key, row in rows.items():
            anchors[key] = anchor_scale(base.for_workload(load_workload(key)).vector, clean, row)
    else:
        used = few_rows(clean, everything) if level == "L2" else everything
        for model in np.unique(clean.model):
            prior = theta_array(base.without.get(str(model), base.constants))
            rows_of_model = clean.subset(used & (clean.model == model))
            refined[str(model)] = theta_mapping(refine(rows_of_model, prior, many=level == "L3"))
    return CalibrationSet(
        name=name,
        level=level,
        source=source,
        data_digest=data_digest(clean.subset(used)),
        n_rows=int(used.sum()),
        constants=base.constants,
        without=base.without if level == "L1a" else {},
        refined=refined,
        anchors=anchors,
    )


# --- Validation: agreement with measured traces under every protocol, one table, and its targets ---

_CLOSE = 0.05  # a plan within 5 % of the best one counts as good
_APART = 0.10  # pairs further apart than 10 % should be ordered right
_HIGHER_IS_BETTER = ("within_pct", "order_pct", "order_apart_pct", "points_per_s")
_SPEED_POINTS = 100_000
_SPEED_REPEATS = 3
_MIN_MODELS = 2
_N_GROUPS_OF_FITS = 6


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
    """Return the regret per placement, and 1 or 0 per pair of plans there for a right or wrong order."""
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
    """Bound of a figure of the validation, an aim beyond it, and that of an earlier study (NaN for none)."""

    protocol: str
    metric: str  # a field of `Agreement` or ``points_per_s``
    must: float
    source: str
    known: str  # measured rows that a prediction has seen
    reference: float = float("nan")
    aim: float | None = None

    @property
    def higher_is_better(self) -> bool:
        """True for metrics of which larger values are better."""
        return self.metric in _HIGHER_IS_BETTER

    def reached_by(self, value: float, bound: float | None) -> bool:
        """Return True if a value is at least as good as a bound; NaN never is."""
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
    """Result of `validate`: the figures of all protocols, and one row per target in ``table``.

    Columns of the table: ``protocol, metric, reached, must, aim, reference, verdict`` (aim, must or missed),
    and ``known``, the measured rows that the predictions had seen.
    """

    table: pd.DataFrame
    agreements: Mapping[str, Agreement]
    anchors: Mapping[str, float]
    active_bounds: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """True if every bound holds."""
        return bool((self.table["verdict"] != "missed").all())

    @property
    def by_model(self) -> pd.DataFrame:
        """Mean relative error [%] of each model under each protocol."""
        return pd.DataFrame({name: found.by_model for name, found in self.agreements.items()}).T

    @property
    def by_software(self) -> pd.DataFrame:
        """Mean relative error [%] of the rows of each training software under each protocol."""
        return pd.DataFrame({name: found.by_software for name, found in self.agreements.items()}).T


@typed
def validate(data: Observations, progress: Callable[[int, int, str], object] | None = None) -> Validation:
    """Run all protocols on measured rows, clean and flagged, and compare the figures with the targets.

    Parameters
    ----------
    progress
        Is told how many groups of fits are done, of how many, and which one runs now.

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

    def tell(done: int, doing: str) -> None:
        if progress is not None:
            progress(done, _N_GROUPS_OF_FITS, doing)

    tell(0, "fits without each model")
    by_model = leave_out(data, data.model)
    tell(1, "fits without each training software")
    by_software = leave_out(data, data.software)
    tell(2, "fits without each plan class")
    by_class = leave_out(data, data.plan_class)
    with_anchor = anchored(data, by_model, data.model)
    everything = np.ones(len(data), dtype=bool)
    tell(3, "fits to a few rows of each model")
    refined_by_few = few_shot(data, by_model)
    tell(4, "fits to four fifths of each model")
    refined_by_many = five_fold(data, by_model)
    tell(5, "the fit to all rows")
    active_bounds = calibrate(data.subset(data.clean)).active_bounds
    figures = {
        "L0": _judge(data, public_constants(data)),
        "LOMO": _judge(data, by_model),
        "L1a": _judge(data, with_anchor),
        "LOSO": _judge(data, by_software),
        "LOSO+anchor": _judge(data, anchored(data, by_software, data.software)),
        "L2": _judge(data, refined_by_few),
        "5-fold": _judge(data, refined_by_many),
        "LOPO": _judge(data, by_class),
        "LOPO, no offload": _judge(data, by_class, data.clean & (data.plan_class != "offload")),
        "LOPO, offload": _judge(data, by_class, data.clean & (data.plan_class == "offload")),
        "LOMO, all rows": _judge(data, by_model, everything),
    }
    points_per_s = predict_speed(data)
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
    return Validation(
        table=pd.DataFrame(records, columns=columns),
        agreements=figures,
        anchors=with_anchor.anchors,
        active_bounds=active_bounds,
    )


def _judge(data: Observations, protocol: Protocol, rows: _Mask | None = None) -> Agreement:
    chosen = data.clean if rows is None else rows
    return agreement(data, protocol.predicted_s, chosen & protocol.held_out)


def predict_speed(data: Observations) -> float:
    """Measure the speed of the time model on computed features [points/s]."""
    codes = np.arange(_SPEED_POINTS) % len(data)
    features = {name: values[codes] for name, values in data.features.items()}
    theta = prior_theta()
    best = float("inf")  # the fastest repetition is the one that other processes disturbed least
    for _ in range(_SPEED_REPEATS):
        start = time.perf_counter()
        predict(theta, features)
        best = min(best, time.perf_counter() - start)
    return _SPEED_POINTS / best
