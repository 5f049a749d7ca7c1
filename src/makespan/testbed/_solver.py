"""A small bounded least-squares solver without threads.

The problems here have two dozen unknowns and about a thousand residuals, and validation solves
sixty of them. The dense factorisations of a general solver run in the threads of the linear
algebra library, which makes such small problems slow on a busy machine and their last digits
depend on the number of threads. This one works on the normal equations; a test compares it with
`scipy.optimize.least_squares`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Solution", "bounded_least_squares"]

_Array = NDArray[np.float64]

_DAMPING_START, _DAMPING_MIN, _DAMPING_MAX = 1e-3, 1e-12, 1e12
_TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class Solution:
    """Where the solver stopped.

    Parameters
    ----------
    x
        Unknowns, (n,).
    cost
        Half the sum of squared residuals.
    n_evaluations
        Residual evaluations, without those of the derivatives.
    """

    x: _Array
    cost: float
    n_evaluations: int


def bounded_least_squares(
    residuals: Callable[[_Array], _Array],
    jacobian: Callable[[_Array], _Array],
    start: _Array,
    upper: _Array,
    max_evaluations: int,
) -> Solution:
    """Minimise half the sum of squared residuals below upper bounds.

    Levenberg-Marquardt steps; unknowns at their bound whose gradient points outwards stay there,
    and a step is cut back to the bounds.

    Parameters
    ----------
    residuals, jacobian
        Functions of the unknowns, (n,) to (m,) and (m, n).
    start
        First guess, within the bounds, (n,).
    upper
        Upper bounds, infinite where there is none, (n,).
    max_evaluations
        Bound on residual evaluations.
    """
    x = np.minimum(start, upper)
    value = residuals(x)
    cost, damping, count = _half_square(value), _DAMPING_START, 1
    while count < max_evaluations and damping < _DAMPING_MAX:
        slope = jacobian(x)
        gradient, curvature = _normal_equations(slope, value)
        free = ~((x >= upper) & (gradient < 0.0))
        if not np.any(np.abs(gradient[free]) > _TOLERANCE * max(cost, 1.0)):
            break
        improved = False
        while not improved and count < max_evaluations and damping < _DAMPING_MAX:
            trial = np.minimum(x + _step(gradient, curvature, free, damping), upper)
            trial_value = residuals(trial)
            trial_cost, count = _half_square(trial_value), count + 1
            improved = trial_cost < cost
            damping = max(damping / 5.0, _DAMPING_MIN) if improved else damping * 4.0
        if not improved:
            break
        gain = cost - trial_cost
        x, value, cost = trial, trial_value, trial_cost
        if gain < _TOLERANCE * cost:
            break
    return Solution(x, cost, count)


def _half_square(value: _Array) -> float:
    return float(0.5 * np.add.reduce(value * value))


def _normal_equations(slope: _Array, value: _Array) -> tuple[_Array, _Array]:
    """Return J^T r and J^T J, summed in a fixed order."""
    gradient = np.einsum("ij,i->j", slope, value)
    return gradient, np.einsum("ij,ik->jk", slope, slope)


def _step(gradient: _Array, curvature: _Array, free: NDArray[np.bool_], damping: float) -> _Array:
    step = np.zeros_like(gradient)
    inner = curvature[np.ix_(free, free)]
    damped = inner + damping * np.diag(np.diag(inner))
    step[free] = np.linalg.solve(damped, -gradient[free])
    return step
