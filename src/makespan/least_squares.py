"""Bounded least squares with forward differences that evaluate all columns in one call."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from scipy import optimize

__all__ = ["forward_differences", "least_squares"]

Floats = npt.NDArray[np.float64]
Residuals = Callable[[Floats], Floats]


def forward_differences(residuals: Residuals, z: Floats, step: float) -> Floats:
    """Return the Jacobian at ``z``, (n_residuals, n_parameters).

    Residuals map parameters of shape (..., n_parameters) to shape (..., n_residuals).
    """
    rows = residuals(np.vstack([z, z + step * np.eye(len(z))]))
    return np.asarray((rows[1:] - rows[0]).T / step)


def least_squares(
    residuals: Residuals,
    start: Floats,
    bounds: tuple[Floats | float, Floats | float],
    step: float,
    *,
    tolerance: float,
    gradient_tolerance: float = 1e-8,
    scale: Floats | float = 1.0,
    max_evaluations: int | None = None,
) -> tuple[Floats, float]:
    """Minimise half the sum of squared residuals within bounds.

    Parameters
    ----------
    residuals, step
        As for `forward_differences`.
    start, bounds, scale
        First parameters, (n_parameters,), inside their bounds, and their typical size.
    tolerance, gradient_tolerance
        Relative change of cost and parameters, and size of the gradient, at which the search ends.
    max_evaluations
        Bound on the evaluations; that of scipy if not given.

    Returns
    -------
    tuple
        Parameters (n_parameters,), and half the sum of squares there.
    """

    def jacobian(z: Floats) -> Floats:
        return forward_differences(residuals, z, step)

    found = optimize.least_squares(
        residuals,
        start,
        jac=jacobian,
        bounds=bounds,
        x_scale=scale,
        ftol=tolerance,
        xtol=tolerance,
        gtol=gradient_tolerance,
        max_nfev=max_evaluations,
    )
    return np.asarray(found.x), float(found.cost)
