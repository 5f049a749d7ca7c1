"""Fitting a form to observations: bounded least squares on log times from several starts."""

from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import pandas as pd

from makespan.errors import FitError, unknown_name
from makespan.least_squares import forward_differences, least_squares
from makespan.perf._environment import Environment, Prior
from makespan.perf._forms import EXTENDED, PUBLISHED, Form, Phases, Profile, Terms
from makespan.perf._points import Measured, Points
from makespan.rounding import significant
from makespan.tables import FIT

__all__ = ["FORMS", "Fit", "fit", "forward_profile"]

Index = npt.NDArray[np.intp]
_PREFERRED_GPUS = 2.0  # one GPU often needs several passes, many GPUs leave few samples each
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
FORMS: dict[str, Form] = {form.name: form for form in (PUBLISHED, EXTENDED)}
"""The forms of the model by name; every experiment can use either."""
_N_STARTS = 12
_START_SPREAD = 0.5  # of the prior's own standard deviation
_SEARCH_TOLERANCE, _FINAL_TOLERANCE = 1e-6, 1e-10  # relative change of cost and parameters
_STEP = 1e-6  # of the finite differences in log parameters
_DECIMALS = 5  # of log parameters, so five significant digits of a parameter
_SPREAD_DIGITS = 5  # of the standard error of a log parameter
_DETERMINED = 0.5  # share of the prior's standard deviation that may be left


def forward_profile(points: Points, measured: Measured, backward_ratio: float) -> Profile:
    """Find the forward time that all predictions of a model are scaled from.

    In order of preference: the forward phase of a data-parallel row on one node; where the stack
    reports launch times instead (it runs asynchronously), the growth of the iteration time with
    the samples of a replica; the least that the pipeline phase or iteration time of any row
    leaves for a sample. All but the first contain the backward pass and are divided by
    ``1 + backward_ratio``. The choice does not depend on the order of the rows.
    """
    if len(points) == 0:
        raise FitError(f"no observation of {points.workload.key!r}; at least one row is needed for a fit")
    replicated = _ordered(points, measured, ~points.is_model_parallel & (points.n_nodes == 1))
    if points.workload.data_parallel_stack.phase_style == "ddp":
        found = _from_growth(points, measured, replicated, backward_ratio)
    else:
        found = _from_phase(points, measured, replicated)
    return found or _from_whole(points, measured, backward_ratio)


def _ordered(points: Points, measured: Measured, mask: npt.NDArray[np.bool_]) -> Index:
    """Rows of a mask, plain data parallel first, then nearest to the preferred number of GPUs."""
    rows = np.flatnonzero(mask)
    keys = (
        measured.iter_time_s[rows],
        points.n_gpus[rows],
        np.abs(np.log2(points.n_gpus[rows] / _PREFERRED_GPUS)),
        points.checkpoint_fraction[rows],
        points.is_offload[rows],
        ~points.is_data_parallel[rows],
    )
    return rows[np.lexsort(keys)]


def _from_phase(points: Points, measured: Measured, rows: Index) -> Profile | None:
    for row in rows:
        if measured.forward_s[row] > 0:
            samples, passes = points.replica_batch_size[row], points.n_micro[row]
            return Profile(float(measured.forward_s[row]), float(samples), float(passes), "forward phase")
    return None


def _from_growth(points: Points, measured: Measured, rows: Index, backward_ratio: float) -> Profile | None:
    rows = rows[points.is_data_parallel[rows] & (points.checkpoint_fraction[rows] == 0)]
    if len(rows) < 2:
        return None
    batch, time = points.replica_batch_size[rows], measured.iter_time_s[rows]
    most, least = int(np.argmax(batch)), int(np.argmin(batch))
    samples, growth = batch[most] - batch[least], time[most] - time[least]
    if samples <= 0 or growth <= 0:
        return None
    return Profile(float(growth / (1.0 + backward_ratio)), float(samples), 0.0, "growth with the batch")


def _from_whole(points: Points, measured: Measured, backward_ratio: float) -> Profile:
    """Take the least forward time of a sample that any row implies: each bounds it from above."""
    bubble = (points.n_micro + points.pp - 1.0) / (points.n_micro * points.pp)
    reported = points.is_model_parallel & (measured.overlap_sync_s > 0)
    time = np.where(reported, measured.overlap_sync_s, measured.iter_time_s)
    time = time * points.tp / np.where(points.is_model_parallel, bubble, 1.0)
    passes = 1.0 + backward_ratio + points.checkpoint_fraction
    per_sample = time / passes / (points.replica_batch_size * points.tokens_share)
    return Profile(float(per_sample.min()), 1.0, 0.0, "least share of an iteration")


@dataclass(frozen=True, slots=True)
class Fit:
    """A fitted form of the performance model.

    Parameters
    ----------
    profile
        Forward time that predictions are scaled from.
    points, measured
        The observations.
    values, std_err, identified, information, at_bound
        Fitted parameters; their standard errors; whether the observations determine them (off the bounds,
        and a standard error of at most half of the prior's); share of the prior variance that the
        observations removed; whether they stopped at a bound; each (n_parameters,).
    residual
        Log of predicted over measured iteration time of the observations, (n,).
    cost
        Half of the sum of squares that was minimised.
    """

    form: Form
    environment: Environment
    profile: Profile
    points: Points
    measured: Measured
    values: Floats
    std_err: Floats
    identified: Bools
    information: Floats
    at_bound: Bools
    residual: Floats
    cost: float

    @property
    def workload(self) -> str:
        """Key of the workload."""
        return self.points.workload.key

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters, in the order of ``values``."""
        return self.form.parameters

    def phases(self, points: Points) -> Phases:
        """Predict iteration time and its phases [s], each (n,)."""
        return self.form.phases(self.values, Terms(points, self.profile, self.environment.constants))

    def predict(self, points: Points) -> Floats:
        """Predict the iteration time [s] of each point, (n,)."""
        return self.phases(points).iter_time_s

    def busy_shares(self, points: Points) -> tuple[Floats, Floats]:
        """Predicted shares of a step in which devices compute, and in which data move, ``(n,)``, 0 to 1."""
        work_s = self.form.work(self.values, Terms(points, self.profile, self.environment.constants))
        computing, moving = (np.minimum(part_s / self.predict(points), 1.0) for part_s in work_s)
        return computing, moving

    def refit(self, points: Points, measured: Measured) -> "Fit":
        """Fit again with further observations of the same workload beside those already used.

        Raises
        ------
        FitError
            The observations belong to another workload or have unusable times.
        """
        return fit(self.form.name, self.points.join(points), self.measured.join(measured), self.environment)

    def table(self) -> pd.DataFrame:
        """Return the parameters as a table of schema `makespan.tables.FIT`.

        Further columns: ``unit``, ``information`` [1], ``at_bound``, ``meaning``.
        """
        priors = _priors(self.form, self.environment)
        frame = pd.DataFrame(
            {
                "workload": self.workload,
                "form": self.form.name,
                "parameter": self.parameters,
                "value": self.values,
                "std_err": self.std_err,
                "identified": self.identified,
                "unit": [prior.unit for prior in priors],
                "information": self.information,
                "at_bound": self.at_bound,
                "meaning": [prior.meaning for prior in priors],
            }
        )
        return FIT.validate(frame, where=f"fit of {self.workload}")


@dataclass(frozen=True, slots=True)
class _Problem:
    """The least-squares problem in log parameters, batched over parameter vectors."""

    form: Form
    terms: Terms
    log_time: Floats
    log_compute: Floats
    log_optimize: Floats
    weights: tuple[float, float]
    centre: Floats
    spread: Floats
    bounds: tuple[Floats, Floats]

    def residuals(self, z: Floats) -> Floats:
        """Weighted residuals of shape (..., 3 n + n_parameters)."""
        time, compute, optimize = self.form.phases(np.exp(z), self.terms)
        whole, part = self.weights
        blocks = (
            (np.log(time) - self.log_time) * whole,
            _known(compute, self.log_compute) * part,
            _known(optimize, self.log_optimize) * part,
            (z - self.centre) / self.spread,
        )
        return np.concatenate(blocks, axis=-1)


def _known(predicted: Floats, log_measured: Floats) -> Floats:
    floor = np.finfo(np.float64).tiny
    return np.nan_to_num(np.log(np.maximum(predicted, floor)) - log_measured, nan=0.0)


def fit(form: str, points: Points, measured: Measured, environment: Environment, *, seed: int = 0) -> Fit:
    """Fit a form of the performance model to observations of one workload.

    Squared log errors of the iteration times, and with less weight of the reported phases, are
    minimised together with weak log-normal priors, within bounds and from several starts. The
    result depends on the observations and the seed of the starts alone.

    Parameters
    ----------
    form
        A key of `FORMS`.
    points, measured
        Observations; flagged rows do not belong here.
    seed
        Of the start points.

    Raises
    ------
    UnknownNameError, FitError
        There is no such form; there is no observation, or a time is not positive.
    """
    if form not in FORMS:
        raise unknown_name("form of the performance model", form, FORMS)
    _check_times(points, measured)
    problem = _problem(FORMS[form], points, measured, environment)
    return _result(problem, _solve(problem, seed), environment, measured)


def _check_times(points: Points, measured: Measured) -> None:
    if len(points) != len(measured):
        raise FitError(f"{len(points)} points but {len(measured)} measured times")
    bad = np.flatnonzero(~(np.isfinite(measured.iter_time_s) & (measured.iter_time_s > 0)))
    if bad.size:
        raise FitError(
            f"observation {bad[0] + 1} of {points.workload.key!r}: iteration time "
            f"{measured.iter_time_s[bad[0]]} s; accepted: a positive time"
        )


def _priors(form: Form, environment: Environment) -> list[Prior]:
    table = environment.priors[form.name]
    return [table[name] for name in form.parameters]


def _problem(form: Form, points: Points, measured: Measured, environment: Environment) -> _Problem:
    constants = environment.constants
    profile = forward_profile(points, measured, constants.assumed_backward_ratio)
    priors = _priors(form, environment)
    has_compute, has_optimize = form.comparable(points)
    with np.errstate(invalid="ignore", divide="ignore"):
        log_compute = np.log(np.nan_to_num(measured.forward_s) + measured.overlap_sync_s)
        log_optimize = np.log(measured.optimize_s)
    return _Problem(
        form=form,
        terms=Terms(points, profile, constants),
        log_time=np.log(measured.iter_time_s),
        log_compute=np.where(has_compute, log_compute, np.nan),
        log_optimize=np.where(has_optimize, log_optimize, np.nan),
        weights=(1.0 / constants.time_log_sd, constants.phase_weight / constants.time_log_sd),
        centre=np.log([prior.median for prior in priors]),
        spread=np.array([prior.log_sd for prior in priors]),
        bounds=(np.log([prior.low for prior in priors]), np.log([prior.high for prior in priors])),
    )


def _solve(problem: _Problem, seed: int) -> Floats:
    rng, bounds = np.random.default_rng(seed), problem.bounds
    offsets = rng.standard_normal((_N_STARTS, len(problem.centre))) * _START_SPREAD * problem.spread
    offsets[0] = 0.0
    starts = np.clip(problem.centre + offsets, bounds[0] + _STEP, bounds[1] - _STEP)
    descend = partial(least_squares, problem.residuals, bounds=bounds, step=_STEP, scale=problem.spread)
    found = [descend(start, tolerance=_SEARCH_TOLERANCE) for start in starts]
    best = min(found, key=lambda pair: pair[1])[0]
    return descend(best, tolerance=_FINAL_TOLERANCE, decimals=_DECIMALS)[0]


def _result(problem: _Problem, z: Floats, environment: Environment, measured: Measured) -> Fit:
    values, jacobian, rows = np.exp(z), forward_differences(problem.residuals, z, _STEP), problem.residuals(z)
    lower, upper = problem.bounds
    log_sd = significant(np.sqrt(np.diag(np.linalg.inv(jacobian.T @ jacobian))), _SPREAD_DIGITS)
    information = np.clip(1.0 - (log_sd / problem.spread) ** 2, 0.0, 1.0)
    at_bound = (z - lower < 10 * _STEP) | (upper - z < 10 * _STEP)
    return Fit(
        form=problem.form,
        environment=environment,
        profile=problem.terms.profile,
        points=problem.terms.points,
        measured=measured,
        values=values,
        std_err=values * log_sd,
        identified=(log_sd <= _DETERMINED * problem.spread) & ~at_bound,
        information=information,
        at_bound=at_bound,
        residual=rows[: len(measured)] / problem.weights[0],
        cost=0.5 * float(np.sum(rows**2)),
    )
