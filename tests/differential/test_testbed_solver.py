"""The bounded least-squares solver against scipy's."""

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.optimize import least_squares

from makespan.testbed._solver import bounded_least_squares

_Array = NDArray[np.float64]


def _random_problem(seed: int, n: int = 6, m: int = 40):  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(seed)
    matrix, centre = rng.normal(size=(m, n)), rng.normal(size=n)
    target = np.exp(0.3 * matrix @ centre) + 0.1 * rng.normal(size=m)

    def residuals(x: _Array) -> _Array:
        return np.asarray(np.exp(0.3 * matrix @ x) - target)

    def jacobian(x: _Array) -> _Array:
        return np.asarray(0.3 * np.exp(0.3 * matrix @ x)[:, None] * matrix)

    upper = np.where(rng.random(n) < 0.5, centre - 0.3, np.inf)
    return residuals, jacobian, upper


@pytest.mark.parametrize("seed", range(10))
def test_both_find_the_same_bounded_minimum(seed: int) -> None:
    residuals, jacobian, upper = _random_problem(seed)
    start = np.minimum(np.zeros(6), upper - 1e-3)
    ours = bounded_least_squares(residuals, jacobian, start, upper, 300)
    theirs = least_squares(residuals, start, jac=jacobian, bounds=(np.full(6, -np.inf), upper))
    assert ours.cost == pytest.approx(theirs.cost, rel=1e-4)
    np.testing.assert_allclose(ours.x, theirs.x, atol=2e-3)
    assert np.all(ours.x <= upper)


def test_it_stops_at_the_bound_on_evaluations() -> None:
    residuals, jacobian, upper = _random_problem(1)
    found = bounded_least_squares(residuals, jacobian, np.minimum(np.zeros(6), upper), upper, 3)
    assert found.n_evaluations <= 3


def test_a_start_at_the_minimum_stays() -> None:
    found = bounded_least_squares(lambda x: x - 1.0, lambda x: np.eye(2), np.ones(2), np.full(2, np.inf), 50)
    np.testing.assert_array_equal(found.x, np.ones(2))
    assert found.cost == 0.0
