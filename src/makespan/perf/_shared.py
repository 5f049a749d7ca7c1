"""The constants that all models of a cluster share, fitted to the rows of several models at once.

They show what a model meets whose own rows nobody has seen: the constants of the presets were chosen with
measured rows of every model in view.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from makespan.least_squares import least_squares
from makespan.perf._environment import Environment, Prior
from makespan.perf._forms import EXTENDED, Profile, Terms
from makespan.perf._learning import TableFit
from makespan.perf._points import Points, measured_from_table, points_from_table

__all__ = ["fit_shared"]

Floats = npt.NDArray[np.float64]
_STEP, _TOLERANCE = 1e-6, 1e-6


def fit_shared(fits: Iterable[TableFit], environment: Environment) -> dict[str, float]:
    """Fit what an environment leaves open, constants and centres of priors, to the rows of some models.

    All clean rows of the models are used, and parameters of each model are fitted beside what they share.
    Squared log errors of the iteration times, with which each table counts the same, are minimised together
    with the priors of ``environment.neutral``, which no measured row has entered; their medians come back
    where there is no fit.

    Parameters
    ----------
    fits
        One of each workload, of any form; those of unclear configuration
        (``Workload.used_for_calibration``) are left out.
    environment
        What it leaves open has a prior in ``neutral``.

    Returns
    -------
    dict
        Value of each name in ``neutral``, in its unit, for ``environment.with_shared``.
    """
    models = [_model(one, environment) for one in fits if one.fit.points.workload.used_for_calibration]
    problem = _Joint(environment, tuple(models))
    priors = [*environment.neutral.values(), *(problem.own * len(models))]
    bounds = np.log([[prior.low for prior in priors], [prior.high for prior in priors]])
    start = np.log([prior.median for prior in priors])
    found, _ = least_squares(
        problem.residuals,
        np.clip(start, bounds[0] + _STEP, bounds[1] - _STEP),
        (bounds[0], bounds[1]),
        _STEP,
        tolerance=_TOLERANCE,
        scale=np.array([prior.log_sd for prior in priors]),
    )
    return problem.values_of(found[: len(environment.neutral)])


@dataclass(frozen=True, slots=True)
class _Model:
    """The clean rows of one table; ``weight`` makes all tables count the same."""

    points: Points
    profile: Profile
    log_time: Floats
    weight: float


def _model(found: TableFit, environment: Environment) -> _Model:
    rows = found.frame[found.frame["clean"].to_numpy(dtype=bool)]
    points = points_from_table(rows, found.fit.points.workload, environment)
    log_time = np.log(measured_from_table(rows).iter_time_s)
    weight = 1.0 / (environment.constants.time_log_sd * np.sqrt(len(rows)))
    return _Model(points, found.fit.profile, log_time, float(weight))


@dataclass(frozen=True, slots=True)
class _Joint:
    """The least-squares problem in logarithms: what is shared, then the parameters of each model."""

    environment: Environment
    models: Sequence[_Model]

    @property
    def own(self) -> list[Prior]:
        """Priors of the parameters of one model."""
        return [self.environment.priors[EXTENDED.name][name] for name in EXTENDED.parameters]

    def values_of(self, log_shared: Floats) -> dict[str, float]:
        """Return what is shared by name."""
        return dict(zip(self.environment.neutral, np.exp(log_shared).tolist(), strict=True))

    def residuals(self, z: Floats) -> Floats:
        """Weighted residuals of one vector or of a matrix of vectors, one row each."""
        rows, n_shared, n_own = np.atleast_2d(z), len(self.environment.neutral), len(EXTENDED.parameters)
        shared, which = np.unique(rows[:, :n_shared], axis=0, return_inverse=True)
        environments = [self.environment.with_shared(self.values_of(values)) for values in shared]
        neutral = self.environment.neutral.values()
        parts = [_standardised(rows[:, :n_shared], neutral)]
        mean_rows = np.mean([len(model.log_time) for model in self.models]) if self.models else 1.0
        for number, model in enumerate(self.models):
            own = rows[:, n_shared + number * n_own :][:, :n_own]
            misfit, from_prior = np.empty((len(rows), len(model.log_time))), np.empty_like(own)
            for index, environment in enumerate(environments):
                members = which == index
                terms = Terms(model.points, model.profile, environment.constants)
                predicted = EXTENDED.phases(np.exp(own[members]), terms).iter_time_s
                misfit[members] = np.log(predicted) - model.log_time
                centred = [environment.priors[EXTENDED.name][name] for name in EXTENDED.parameters]
                from_prior[members] = _standardised(own[members], centred)
            parts += [np.sqrt(mean_rows) * model.weight * misfit, from_prior]
        joined = np.concatenate(parts, axis=1)
        return joined if z.ndim > 1 else joined[0]


def _standardised(values: Floats, priors: Iterable[Prior]) -> Floats:
    medians, spreads = np.array([(np.log(prior.median), prior.log_sd) for prior in priors]).T
    return np.asarray((values - medians) / spreads)
