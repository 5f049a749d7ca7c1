"""Bounded least squares, with finite differences that evaluate all columns of a Jacobian in one call.

Linear algebra sums in an order that depends on the processor, so the parameters of a search differ from the
eighth digit on between machines, and nearly equal predictions may then be ordered differently. With
``decimals`` the parameters are the same on every processor: Newton steps bring them a thousand times closer
to the optimum than the search does, and then they are rounded.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Residuals = Callable[[Floats], Floats]
_NEWTON_STEP = 1e-4  # of central differences, whose noise and bias are both about 1e-12 of a residual
_MAX_NEWTON_STEPS = 6
_FURTHEST = 1e-2  # a longer Newton step means a kink of the cost; the result of the search then stays
_AT_BOUND = 1e-5  # the search stops this close to an active bound; such parameters are put on it


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
    decimals: int | None = None,
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
    decimals
        Decimals to which the parameters are refined and rounded, so that they are the same on every
        processor; if not given, the parameters are those of the search.

    Returns
    -------
    tuple
        Parameters (n_parameters,), and half the sum of squares there.
    """

    def jacobian(z: Floats) -> Floats:
        return forward_differences(residuals, z, step)

    from scipy import optimize  # imported here: it takes longer than the rest of the package

    search = optimize.least_squares(
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
    if decimals is None:
        return np.asarray(search.x), float(search.cost)
    lower, upper = (np.broadcast_to(np.asarray(bound, dtype=np.float64), start.shape) for bound in bounds)
    z = np.clip(np.round(_settled(residuals, search.x, lower, upper), decimals), lower, upper)
    return z, 0.5 * float(np.sum(residuals(z) ** 2))


def _settled(residuals: Residuals, start: Floats, lower: Floats, upper: Floats) -> Floats:
    """Move parameters that are near the optimum onto it, by Newton steps with the Hessian of the first."""
    z = np.where(start - lower < _AT_BOUND, lower, np.where(upper - start < _AT_BOUND, upper, start))
    shifts = _NEWTON_STEP * np.eye(len(z))
    slopes = _gradients(residuals, np.vstack([z + shifts, z - shifts]))
    hessian = (slopes[: len(z)] - slopes[len(z) :]) / (2 * _NEWTON_STEP)
    for _ in range(_MAX_NEWTON_STEPS):
        gradient = _gradients(residuals, z[None])[0]
        # A parameter stays at its bound while the cost would fall only outside.
        free = ~((z <= lower) & (gradient > 0) | (z >= upper) & (gradient < 0))
        if not free.any():
            break
        step = np.zeros_like(z)
        step[free] = np.linalg.lstsq(hessian[np.ix_(free, free)], -gradient[free], rcond=None)[0]
        if np.max(np.abs(step)) > _FURTHEST:
            return start
        z = np.clip(z + step, lower, upper)
    return z


def _gradients(residuals: Residuals, points: Floats) -> Floats:
    """Return the gradient of half the sum of squares at each of some points, (n_points, n_parameters)."""
    n = points.shape[1]
    shifts = np.vstack([np.zeros((1, n)), _NEWTON_STEP * np.eye(n), -_NEWTON_STEP * np.eye(n)])
    rows = residuals((points[:, None, :] + shifts).reshape(-1, n)).reshape(len(points), 2 * n + 1, -1)
    jacobians = (rows[:, 1 : n + 1] - rows[:, n + 1 :]) / (2 * _NEWTON_STEP)
    return np.asarray(np.sum(jacobians * rows[:, :1], axis=2))
