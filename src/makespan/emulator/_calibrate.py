"""Calibration: robust least squares on log times with priors, phases and model weights."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from makespan.emulator._calibration import CONSTANT_NAMES, CONSTANTS, prior_theta
from makespan.emulator._observations import Observations
from makespan.emulator._timemodel import phases, predict_terms
from makespan.errors import FitError
from makespan.least_squares import forward_differences, least_squares

__all__ = ["CalibrationFit", "calibrate"]

_Array = NDArray[np.float64]

_SCALE_LOG = 0.08  # scale of the robust loss: residuals beyond 8 % count linearly
_WEIGHT_FORWARD, _WEIGHT_OPTIMIZE = 0.2, 0.1
_STEP_LOG = 1e-5
_TOLERANCE = 1e-9
_BOUND_TOLERANCE_LOG = 1e-3


@dataclass(frozen=True, slots=True)
class CalibrationFit:
    """Result of a calibration.

    Parameters
    ----------
    theta
        Constants, (n_constants,).
    n_rows
        Measured rows used.
    cost
        Value of the objective.
    active_bounds
        Names of the constants at their upper bound of 1.
    correlation
        Correlation matrix of the logarithms, (n_constants, n_constants).
    std_err_log
        Standard errors of the logarithms, (n_constants,).
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
    prior
        Centre of the priors, (n_constants,); the public constants if not given.
    sd_log
        Standard deviations of the priors, (n_constants,); the defaults if not given.
    max_evaluations
        Bound on the evaluations of the solver.

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
    problem = _Problem(observations, centre, spread)
    start = np.minimum(centre, upper - 1e-3)
    if not np.all(np.isfinite(problem.residuals(start))):
        raise FitError("a residual is not finite at the prior; check the measured rows and the hardware")
    found, cost = least_squares(
        problem.residuals,
        start,
        (-np.inf, upper),
        _STEP_LOG,
        tolerance=_TOLERANCE,
        gradient_tolerance=_TOLERANCE,
        max_evaluations=max_evaluations,
    )
    active = tuple(
        name
        for name, value, bound in zip(CONSTANT_NAMES, found, upper, strict=True)
        if value > bound - _BOUND_TOLERANCE_LOG
    )
    correlation, std_err = _covariance(forward_differences(problem.residuals, found, _STEP_LOG))
    return CalibrationFit(
        theta=np.exp(found),
        n_rows=len(observations),
        cost=cost,
        active_bounds=active,
        correlation=correlation,
        std_err_log=std_err,
    )


def _covariance(jacobian: _Array) -> tuple[_Array, _Array]:
    covariance = np.linalg.inv(np.einsum("ij,ik->jk", jacobian, jacobian))
    std_err = np.sqrt(np.diag(covariance))
    return covariance / np.outer(std_err, std_err), std_err


def _soft_l1(residual: _Array) -> _Array:
    """Return r' with r'^2 the soft-L1 loss of r, so that plain least squares is robust."""
    scaled = residual / _SCALE_LOG
    return np.sign(residual) * np.sqrt(2.0 * (np.sqrt(1.0 + scaled**2) - 1.0))


@dataclass(frozen=True, slots=True)
class _Problem:
    observations: Observations
    centre: _Array
    spread: _Array

    def residuals(self, theta_log: _Array) -> _Array:
        """Residuals for one vector or for a matrix of vectors, one row each."""
        data = self.observations
        terms = predict_terms(np.exp(theta_log), data.features)
        total = np.asarray(sum(terms.values()))
        weight = _model_weights(data)
        forward, _, optimize = phases("zero", terms, data.features)
        parts = [
            _soft_l1(np.log(total) - np.log(data.iter_time_s)) * weight,
            _WEIGHT_FORWARD * weight * _soft_l1(_log_ratio(forward, data.forward_s)),
            _WEIGHT_OPTIMIZE * weight * _soft_l1(_log_ratio(optimize, data.optimize_s)),
            (theta_log - self.centre) / self.spread,
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
