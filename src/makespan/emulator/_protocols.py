"""Calibration: the fit, which rows it sees and which it is judged by, and calibration sets of any level.

Robust least squares on log times with priors, phases and model weights.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from makespan.emulator._calibration import CONSTANTS, CalibrationSet, prior_theta, theta_array, theta_mapping
from makespan.emulator._observations import PLAN_CLASSES, Observations
from makespan.emulator._timemodel import phases, predict, predict_terms
from makespan.errors import FitError, unknown_name
from makespan.least_squares import forward_differences, least_squares
from makespan.workloads import workload as load_workload

__all__ = [
    "CalibrationFit",
    "Protocol",
    "anchor_rows",
    "anchor_scale",
    "anchored",
    "calibrate",
    "calibration_set",
    "data_digest",
    "few_rows",
    "few_shot",
    "five_fold",
    "leave_out",
    "public_constants",
    "refine",
    "refined_set",
]

_Array = NDArray[np.float64]
_Mask = NDArray[np.bool_]
_FOLDS = 5
_FEW = 3
_FEW_SD = 1.0  # how far a few rows of a new model may move constants fitted on other models,
_MANY_SD = 2.0  # and how far all its rows may, as factors on the spread of the priors
_ANCHOR_TRUST = 0.5  # share of the anchor's residual that is put down to the model's compute
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


def calibrate(
    observations: Observations,
    *,
    prior: _Array | None = None,
    sd_log: _Array | None = None,
    max_evaluations: int = 100,
) -> CalibrationFit:
    """Fit the constants to measured rows.

    Soft-L1 loss on log iteration times, small weights on the phases that the stacks report,
    Gaussian priors on the logarithms, and weights that let each model count about equally.

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
    found, cost = least_squares(
        residuals,
        start,
        (-np.inf, upper),
        _STEP_LOG,
        tolerance=_TOLERANCE,
        gradient_tolerance=_TOLERANCE,
        max_evaluations=max_evaluations,
    )
    jacobian = forward_differences(residuals, found, _STEP_LOG)
    covariance = np.linalg.inv(np.einsum("ij,ik->jk", jacobian, jacobian))
    std_err = np.sqrt(np.diag(covariance))
    return CalibrationFit(
        theta=np.exp(found),
        n_rows=len(observations),
        cost=cost,
        active_bounds=tuple(CONSTANTS[i].name for i in np.flatnonzero(found > upper - _BOUND_TOLERANCE_LOG)),
        correlation=covariance / np.outer(std_err, std_err),
        std_err_log=std_err,
    )


def _soft_l1(residual: _Array) -> _Array:
    """Return r' with r'^2 the soft-L1 loss of r, so that plain least squares is robust."""
    scaled = residual / _SCALE_LOG
    return np.sign(residual) * np.sqrt(2.0 * (np.sqrt(1.0 + scaled**2) - 1.0))


def _residuals(data: Observations, centre: _Array, spread: _Array, theta_log: _Array) -> _Array:
    """Residuals for one vector or for a matrix of vectors, one row each."""
    terms = predict_terms(np.exp(theta_log), data.features)
    total = np.asarray(sum(terms.values()))
    weight = _model_weights(data)
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


def _model_weights(data: Observations) -> _Array:
    """Square roots of weights with which each model counts the same, mean weight 1."""
    _, inverse, counts = np.unique(data.model, return_inverse=True, return_counts=True)
    weight = 1.0 / counts[inverse]
    return np.asarray(np.sqrt(weight * len(weight) / weight.sum()))


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
    """Choose the anchor of every kind of rows, such as a workload: a small row on one node without offload.

    Among clean rows: no offload before offload, one node before several, then closest to four
    GPUs, then the order of plan classes and of the rows.
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
    """Return the factor on compute that one measured row suggests; part of its residual is scatter."""
    mask = np.arange(len(data)) == row
    terms = predict_terms(theta, data.subset(mask).features)
    compute = sum(float(terms[name][0]) for name in _COMPUTE)
    total = sum(float(values[0]) for values in terms.values())
    exact = (float(data.iter_time_s[row]) - (total - compute)) / compute
    return float(np.clip(exact, *_ANCHOR_RANGE) ** _ANCHOR_TRUST)


def anchored(data: Observations, base: Protocol, groups: NDArray[np.str_]) -> Protocol:
    """Add one measured row a workload, and a group of it, to a protocol that left groups out (level L1a)."""
    predicted, held_out = base.predicted_s.copy(), np.ones(len(data), dtype=bool)
    anchors: dict[str, float] = {}
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
    """Refine the fit that excluded a model by up to three of its rows a plan class (level L2)."""
    splits = []
    for model in base.thetas:
        members = data.model == model
        seen = few_rows(data, members & data.clean)
        splits.append((model, seen, members & ~seen))
    return _refined(data, base, splits, many=False)


def five_fold(data: Observations, base: Protocol) -> Protocol:
    """Refine by four fifths of the placements of a model and predict the last fifth (level L3)."""
    fold, splits = _fold_of(data), []
    for model in base.thetas:
        members = data.model == model
        splits += [(model, members & data.clean & (fold != k), members & (fold == k)) for k in range(_FOLDS)]
    return _refined(data, base, splits, many=True)


def refine(data: Observations, prior: _Array, *, many: bool) -> _Array:
    """Return constants fitted to rows of one model around those that have not seen it."""
    width = _MANY_SD if many else _FEW_SD
    spread = width * np.array([constant.sd_log for constant in CONSTANTS])
    return calibrate(data, prior=prior, sd_log=spread).theta


def _refined(
    data: Observations, base: Protocol, splits: Iterable[tuple[str, _Mask, _Mask]], *, many: bool
) -> Protocol:
    """Refine by the first rows of each split and predict its others."""
    predicted, held_out = base.predicted_s.copy(), np.zeros(len(data), dtype=bool)
    for model, seen, rest in splits:
        theta = refine(data.subset(seen), base.thetas[model], many=many)
        predicted[rest] = predict(theta, data.subset(rest).features)
        held_out |= rest
    return Protocol(predicted, held_out, base.thetas, {})


def few_rows(data: Observations, candidates: _Mask) -> _Mask:
    """Choose up to three rows a plan class: the two smallest on one node and one on several."""
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


def _fold_of(data: Observations) -> NDArray[np.int64]:
    """Return the fold of each row: the placements of a workload go to the folds in turn."""
    fold = np.zeros(len(data), dtype=np.int64)
    for workload in dict.fromkeys(data.workload):
        members = data.workload == workload
        order = {text: index for index, text in enumerate(sorted(set(data.placement[members])))}
        fold[members] = [order[text] % _FOLDS for text in data.placement[members]]
    return fold


def data_digest(data: Observations) -> str:
    """Return a BLAKE2b digest of the measured rows, whatever their order."""
    rows = zip(data.workload, data.exec_plan, data.placement, data.iter_time_s, strict=True)
    lines = sorted(
        f"{workload}|{plan}|{placement}|{float(time)!r}" for workload, plan, placement, time in rows
    )
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=_DIGEST_BYTES).hexdigest()


def calibration_set(name: str, observations: Observations, source: str) -> CalibrationSet:
    """Fit the constants to all models, and once more for each model without it.

    Parameters
    ----------
    observations, source
        Measured rows, of which flagged ones are left out of the fits; and what they are.

    Returns
    -------
    CalibrationSet
        Level L1: a workload is emulated with the fit that has not seen its model.
    """
    clean = observations.subset(observations.clean)
    overall = calibrate(clean)
    without = {
        str(model): theta_mapping(calibrate(clean.subset(clean.model != model)).theta)
        for model in np.unique(clean.model)
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


def refined_set(
    name: str, observations: Observations, source: str, level: str, base: CalibrationSet
) -> CalibrationSet:
    """Refine a calibration by measured rows of the models it is to be used for.

    Parameters
    ----------
    observations, source
        Measured rows, of which flagged ones are not used; and what they are.
    level
        ``L1a``: one row a workload sets a factor on its compute. ``L2``: up to three rows a plan
        class. ``L3``: all rows.
    base
        Constants to start from; of each model those that have not seen it.

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
