"""Fits of the performance model: one form to one workload, throughput tables, and shared constants.

A fit is bounded least squares in the logarithms of times and parameters, from several starts: relative errors
count the same for short and long times, and parameters stay positive. Weak priors decide the parameters that
the few sampled rows leave open. `fit_table` samples the rows to fit and predicts all others, a `Learner` fits
again after further runs, and `fit_shared` fits the constants that all models of a cluster share.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt
import pandas as pd

from makespan.errors import FitError, InputError, unknown_name
from makespan.least_squares import forward_differences, least_squares
from makespan.notebook import Display, Displayed
from makespan.numerics import significant
from makespan.perf.forms import (
    EXTENDED,
    PUBLISHED,
    Environment,
    Form,
    Measured,
    Phases,
    Points,
    Prior,
    Profile,
    Terms,
    measured_from_table,
    plans_from_table,
    points_from_table,
)
from makespan.plans import ExecutionPlan, Placement, PlanFamily
from makespan.tables import FIT
from makespan.workloads import Workload, is_in_zoo, workload as load_workload, workload_of

_LOG = logging.getLogger(__name__)

# --- One form, one workload ---

Index = npt.NDArray[np.intp]
_PREFERRED_GPUS = 2.0  # one GPU often needs several passes, and with many GPUs each has few samples
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
FORMS: dict[str, Form] = {form.name: form for form in (PUBLISHED, EXTENDED)}
"""The forms of the model by name; every experiment can use either."""
_N_STARTS = 12
_START_SPREAD = 0.5  # spread of the starts, in standard deviations of the prior
_SEARCH_TOLERANCE, _FINAL_TOLERANCE = 1e-6, 1e-10  # relative change of cost and parameters
_NEAR_TOLERANCES = 1e-4, 1e-6  # the same for fits that only choose the next run
_STEP = 1e-6  # step of the finite differences in log parameters
_DECIMALS = 5  # decimals of log parameters, about five significant digits of a parameter
_SPREAD_DIGITS = 5  # significant digits of the standard error of a log parameter
_DETERMINED = 0.5  # largest standard error of an identified parameter, in standard deviations of the prior


def forward_profile(points: Points, measured: Measured, backward_ratio: float) -> Profile:
    """Find the forward time from which all predictions of a model are scaled.

    In order of preference, it comes from the forward phase of a data-parallel row on one node; if the stack
    runs asynchronously and reports launch times instead, from the growth of the iteration time with the
    samples of a replica; or from the least time per sample that the pipeline phase or iteration time of any
    row implies. The latter two contain the backward pass and are divided by ``1 + backward_ratio``. The
    choice does not depend on the order of the rows.
    """
    if len(points) == 0:
        raise FitError(f"no observation of {points.workload.key!r}; at least one row is needed for a fit")
    # Data-parallel rows on one node: plain ones first, then those nearest to the preferred number of GPUs.
    rows = np.flatnonzero(~points.is_model_parallel & (points.n_nodes == 1))
    keys = (
        measured.iter_time_s[rows],
        points.n_gpus[rows],
        np.abs(np.log2(points.n_gpus[rows] / _PREFERRED_GPUS)),
        points.checkpoint_fraction[rows],
        points.is_offload[rows],
        ~points.is_data_parallel[rows],
    )
    rows = rows[np.lexsort(keys)]  # the last key is the most significant
    if points.workload.data_parallel_stack.phase_style == "ddp":
        rows = rows[points.is_data_parallel[rows] & (points.checkpoint_fraction[rows] == 0)]
        if len(rows) >= 2:
            batch, iter_time_s = points.replica_batch_size[rows], measured.iter_time_s[rows]
            most, least = int(np.argmax(batch)), int(np.argmin(batch))
            samples, growth = batch[most] - batch[least], iter_time_s[most] - iter_time_s[least]
            if samples > 0 and growth > 0:
                forward_s = float(growth / (1.0 + backward_ratio))
                return Profile(forward_s, float(samples), 0.0, "growth with the batch")
    else:
        for row in rows:
            if measured.forward_s[row] > 0:
                n_samples, passes = float(points.replica_batch_size[row]), float(points.n_micro[row])
                return Profile(float(measured.forward_s[row]), n_samples, passes, "forward phase")
    # Every row is an upper bound of the forward time of a sample, so the least one is the tightest.
    bubble = (points.n_micro + points.pp - 1.0) / (points.n_micro * points.pp)
    reported = points.is_model_parallel & (measured.overlap_sync_s > 0)
    time = np.where(reported, measured.overlap_sync_s, measured.iter_time_s)
    time = time * points.tp / np.where(points.is_model_parallel, bubble, 1.0)
    work = 1.0 + backward_ratio + points.checkpoint_fraction
    per_sample = time / work / (points.replica_batch_size * points.tokens_share)
    return Profile(float(per_sample.min()), 1.0, 0.0, "least share of an iteration")


@dataclass(frozen=True, slots=True)
class Fit:
    """A fitted form of the performance model.

    Parameters
    ----------
    profile
        Forward time from which predictions are scaled.
    points, measured
        The observations.
    values, std_err, identified, information, at_bound
        Fitted parameters; their standard errors; a mask of those that the observations determine (off the
        bounds, and with a standard error of at most half of the prior's); share of the prior variance that
        the observations removed; a mask of those that stopped at a bound; each (n_parameters,).
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
        """Predict the shares of a step in which devices compute, and in which data move, ``(n,)``, 0 to 1."""
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
class Problem:
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
    """Return the log ratio of predicted over measured phases, 0 where a phase was not reported."""
    floor = np.finfo(np.float64).tiny
    return np.nan_to_num(np.log(np.maximum(predicted, floor)) - log_measured, nan=0.0)


def fit(
    form: str,
    points: Points,
    measured: Measured,
    environment: Environment,
    *,
    seed: int = 0,
    near: Sequence[float] | Floats | None = None,
) -> Fit:
    """Fit a form of the performance model to observations of one workload.

    The fit minimises the squared log errors of the iteration times and, with less weight, of the reported
    phases, together with weak log-normal priors, within bounds and from several starts. The result depends
    only on the observations and the seed of the starts.

    Parameters
    ----------
    form
        A key of `FORMS`.
    points, measured
        Observations; flagged rows do not belong here.
    seed
        Seed of the start points.
    near
        Parameters of a fit to fewer of these observations, or none. The search then starts from these and
        from the centre of the priors only, and ends earlier; it takes a tenth of the time, for fits that are
        made only to choose the next run.

    Raises
    ------
    UnknownNameError, FitError
        There is no such form; there is no observation, or a time is not positive.
    """
    if form not in FORMS:
        raise unknown_name("form of the performance model", form, FORMS)
    if len(points) != len(measured):
        raise FitError(f"{len(points)} points but {len(measured)} measured times")
    bad = np.flatnonzero(~(np.isfinite(measured.iter_time_s) & (measured.iter_time_s > 0)))
    if bad.size:
        raise FitError(
            f"observation {bad[0] + 1} of {points.workload.key!r}: iteration time "
            f"{measured.iter_time_s[bad[0]]} s; expected a positive time"
        )
    problem = problem_of(FORMS[form], points, measured, environment)
    # The cost is not convex, so the search starts from the centre of the priors and from random points
    # around it.
    rng, bounds = np.random.default_rng(seed), problem.bounds
    offsets = rng.standard_normal((_N_STARTS, len(problem.centre))) * _START_SPREAD * problem.spread
    offsets[0] = 0.0  # the first start is the centre of the priors
    tolerances = _SEARCH_TOLERANCE, _FINAL_TOLERANCE
    if near is not None:
        known = [np.log(near) - problem.centre] if len(near) else []
        offsets, tolerances = np.array([offsets[0], *known]), _NEAR_TOLERANCES
    starts = np.clip(problem.centre + offsets, bounds[0] + _STEP, bounds[1] - _STEP)
    descend = partial(least_squares, problem.residuals, bounds=bounds, step=_STEP, scale=problem.spread)
    searches = [descend(start, tolerance=tolerances[0]) for start in starts]
    best = min(searches, key=lambda pair: pair[1])[0]
    # Only the best search is refined, and rounded so that all processors agree on the parameters.
    z = descend(best, tolerance=tolerances[1], decimals=_DECIMALS)[0]
    # Standard errors follow from the curvature of the cost, priors included, so they are at most those of the
    # priors; the difference is the information in the observations.
    values, jacobian, rows = np.exp(z), forward_differences(problem.residuals, z, _STEP), problem.residuals(z)
    lower, upper = bounds
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


def _priors(form: Form, environment: Environment) -> list[Prior]:
    table = environment.priors[form.name]
    return [table[name] for name in form.parameters]


def problem_of(form: Form, points: Points, measured: Measured, environment: Environment) -> Problem:
    """Return the least-squares problem of a fit."""
    constants = environment.constants
    profile = forward_profile(points, measured, constants.assumed_backward_ratio)
    priors = _priors(form, environment)
    has_compute, has_optimize = form.comparable(points)
    with np.errstate(invalid="ignore", divide="ignore"):
        log_compute = np.log(np.nan_to_num(measured.forward_s) + measured.overlap_sync_s)
        log_optimize = np.log(measured.optimize_s)
    return Problem(
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


# --- Throughput tables: sampled rows, predictions, regret, and learning from further runs ---

_SIZES = tuple(10 ** (half / 2) for half in range(16, 23))  # of models not in the zoo [parameters]
Pair = tuple[ExecutionPlan, Placement]
_OFFLOAD = (PlanFamily.ZERO_OFFLOAD, PlanFamily.ZERO_OFFLOAD_GC)
_WANTED: tuple[tuple[tuple[PlanFamily, ...], tuple[str, ...]], ...] = (
    ((PlanFamily.DP,), ("2", "8", "2222")),
    ((PlanFamily.ZERO_DP,), ("44",)),
    (_OFFLOAD, ("2", "8", "2222")),
)
_MIXED_DEGREE = 4  # both degrees of the third model-parallel row, if it exists
_TIE = 1e-9  # relative difference below which two predictions count as equal
SAMPLED = "sampled"
"""Reason for which rows of the sampling design are known."""


def sampling_design(frame: pd.DataFrame, workload: str | Workload) -> Bools:
    """Choose the rows to fit: at most seven data-parallel ones and three model-parallel ones.

    The rule uses plans and placements, never times. It samples plain data parallelism on two and eight GPUs
    of one node and on eight GPUs of four nodes, the partitioned optimiser on eight GPUs of two nodes, and
    offload on the same three placements as data parallelism. If a family has fewer than two of these rows
    (fewer than one, if only one is wanted), the rows with the fewest, the most and the middle number of GPUs
    and CPU threads are sampled instead. Of model-parallel plans the rule samples the shallowest with the
    widest tensor parallelism on the most GPUs, the deepest with the narrowest on the fewest GPUs, and the one
    nearest to tensor and pipeline degree four.

    Parameters
    ----------
    frame
        Schema `makespan.tables.THROUGHPUT`, rows of one workload. Infeasible and flagged rows are
        not sampled.
    workload
        The workload, or its key in the zoo.

    Returns
    -------
    numpy.ndarray
        Mask, (n_rows,).
    """
    spec = load_workload(workload) if isinstance(workload, str) else workload
    usable = np.flatnonzero((frame["feasible"] & frame["clean"]).to_numpy(dtype=bool))
    pairs = dict(zip(usable.tolist(), plans_from_table(frame.iloc[usable], spec), strict=True))
    chosen: list[int] = []
    for families, placements in _WANTED:
        members = {row: pair for row, pair in pairs.items() if pair[0].plan_family in families}
        chosen += _data_parallel_rows(members, placements)
    chosen += _model_parallel_rows({row: pair for row, pair in pairs.items() if pair[0].is_model_parallel})
    mask = np.zeros(len(frame), dtype=bool)
    mask[chosen] = True
    return mask


def _data_parallel_rows(members: dict[int, Pair], placements: tuple[str, ...]) -> list[int]:
    wanted = [Placement.parse(text) for text in placements]
    exact = [row for place in wanted for row, pair in members.items() if pair[1] == place]

    def size(plan: ExecutionPlan, placement: Placement) -> tuple[int, int, int]:
        return placement.n_gpus, placement.n_nodes, plan.cpu_threads

    if len(exact) >= min(2, len(placements)) or not members:
        return exact[: len(placements)]
    ordered = sorted(members, key=lambda row: (*size(*members[row]), row))
    return list(dict.fromkeys((ordered[-1], ordered[0], ordered[(len(ordered) - 1) // 2])))[: len(placements)]


def _model_parallel_rows(members: dict[int, Pair]) -> list[int]:
    if not members:
        return []

    def shallow(row: int) -> tuple[int, ...]:
        plan, place = members[row]
        return plan.pp, -plan.tp, -plan.n_gpus, -place.n_nodes, row

    def deep(row: int) -> tuple[int, ...]:
        plan, place = members[row]
        return -plan.pp, plan.tp, plan.n_gpus, place.n_nodes, row

    def mixed(row: int) -> tuple[float, ...]:
        plan, place = members[row]
        distance = abs(np.log2(plan.pp / _MIXED_DEGREE)) + abs(np.log2(plan.tp / _MIXED_DEGREE))
        return float(distance), plan.n_gpus, place.n_nodes, row

    chosen: list[int] = [min(members, key=shallow)]
    for order in (deep, mixed):
        left = [row for row in members if row not in chosen]
        chosen += [min(left, key=order)] if left else []
    return chosen


@dataclass(frozen=True, slots=True, repr=False)
class TableFit(Displayed):
    """A fit to the sampled rows of a throughput table, and its predictions of all rows.

    Parameters
    ----------
    frame
        The feasible rows of the table, with a new index.
    fitted, predicted_s
        Mask of the sampled rows, and predicted iteration times [s], (n,).
    """

    fit: Fit
    frame: pd.DataFrame
    fitted: Bools
    predicted_s: Floats

    @property
    def error_pct(self) -> Floats:
        """Relative error of each prediction [%], not negative, (n,)."""
        measured = self.frame["iter_time_s"].to_numpy(dtype=np.float64)
        return np.asarray(100.0 * np.abs(self.predicted_s - measured) / measured)

    def errors(self) -> pd.DataFrame:
        """Return errors [%] on rows that were not sampled, one row per plan family and one for ``all``.

        Columns: ``model, plan_family, form, n_fit, n_validate, avg_error_pct, p95_error_pct, max_error_pct``
        over clean rows, and ``avg_error_all_rows_pct`` with flagged ones.
        """
        pairs = plans_from_table(self.frame, self.fit.points.workload)
        families = np.array([plan.plan_family.title for plan, _ in pairs])
        present = [family.title for family in PlanFamily if (families == family.title).any()]
        masks = {title: families == title for title in present} | {"all": families != ""}
        return pd.DataFrame([self._error_row(name, mask) for name, mask in masks.items()])

    def display(self) -> Display:
        """Return the errors of the predictions per plan family."""
        title = f"{self.fit.workload}, form {self.fit.form.name}: errors on rows that were not sampled"
        return Display(title, self.errors().to_dict("records"))

    def _error_row(self, family: str, mask: Bools) -> dict[str, object]:
        every = pd.Series(self.error_pct[mask & ~self.fitted], dtype=float)
        clean = every[self.frame["clean"].to_numpy(dtype=bool)[mask & ~self.fitted]]
        return {
            "model": self.fit.workload,
            "plan_family": family,
            "form": self.fit.form.name,
            "n_fit": int((mask & self.fitted).sum()),
            "n_validate": len(clean),
            "avg_error_pct": clean.mean(),
            "p95_error_pct": clean.quantile(0.95),
            "max_error_pct": clean.max(),
            "avg_error_all_rows_pct": every.mean(),
        }


def feasible_rows(
    frame: pd.DataFrame, workload: str, parameters: float | None = None, spec: Workload | None = None
) -> tuple[pd.DataFrame, list[Workload], Bools]:
    """Return the feasible rows of a workload, its possible descriptions, and a mask of these rows.

    The rows have a new index. A trace does not record the limit on micro-batches, so one sample per
    micro-batch is possible as well, unless the limit of the preset is at one of the extremes. Arguments and
    errors are those of `fit_table`.
    """
    is_known = is_in_zoo(workload)
    key = load_workload(workload).key if is_known else workload
    if is_known and parameters is not None:
        there = load_workload(workload).model.parameters
        if parameters != there:
            raise InputError(
                f"{key!r} has {there} parameters, got {parameters:g}; leave the number out, or choose "
                "another name for the model"
            )
    usable = ((frame["workload"] == key) & frame["feasible"].astype(bool)).to_numpy()
    kept = frame[usable].reset_index(drop=True)
    if not len(kept):
        raise FitError(f"no observation of {key!r}; at least one row is needed for a fit")
    batch = int(kept["global_batch_size"].iloc[0])
    sizes = [1.0] if is_known else _SIZES if parameters is None else [parameters]
    specs = []
    for one in [workload_of(key, batch, size) for size in sizes] if spec is None else [spec]:
        specs.append(one)
        if one.max_microbatches not in (1, one.global_batch_size):
            specs.append(replace(one, max_microbatches=one.global_batch_size))
    return kept, specs, usable


def fit_table(
    frame: pd.DataFrame,
    workload: str,
    form: str,
    environment: Environment,
    *,
    sampled: Bools | None = None,
    parameters: float | None = None,
    spec: Workload | None = None,
) -> TableFit:
    """Sample, fit and predict the rows of one workload in a throughput table.

    For a workload that is not in the zoo, a decoder of usual proportions stands for the model. Without
    ``parameters``, every size of a grid is tried, and the size with the best fit is used and logged.

    Parameters
    ----------
    frame
        Schema `makespan.tables.THROUGHPUT`; other workloads and infeasible rows are left out.
    workload, form
        Key of the workload, and a key of `FORMS`.
    sampled
        Rows to fit, (n_rows,); those of `sampling_design` if not given.
    parameters
        Number of parameters of a model that is not in the zoo.
    spec
        The workload itself, where it is known without being in the zoo.

    Raises
    ------
    FitError
        No clean feasible row can be sampled.
    """
    kept, specs, usable = feasible_rows(frame, workload, parameters, spec)
    measured = measured_from_table(kept)
    fitted = sampling_design(kept, specs[0]) if sampled is None else sampled[usable]
    candidates = []
    for variant in specs:
        points = points_from_table(kept, variant, environment)
        result = fit(form, points.take(fitted), measured.take(fitted), environment)
        candidates.append(TableFit(result, kept, fitted, result.predict(points)))
    best = min(candidates, key=lambda candidate: candidate.fit.cost)
    if len({spec.model.parameters for spec in specs}) > 1:
        size = best.fit.points.workload.model.parameters
        _LOG.warning(
            "%s is not in the zoo; its times fit %.3g parameters best; pass the number if it is another",
            specs[0].key,
            size,
        )
    return best


def regret(frame: pd.DataFrame, predicted_s: Floats) -> pd.DataFrame:
    """Return the regret of the model's choice of plan: the throughput lost against the best measured plan.

    The chosen plan is the one predicted as fastest. Ties go to the plan that partitions more, because it
    needs no more memory.

    Parameters
    ----------
    frame
        Columns ``workload, exec_plan, placement, clean, feasible, iter_time_s`` [s], and
        ``cpu_threads`` where the table has them; one workload.
    predicted_s
        Predicted iteration time of each row [s], (n_rows,).

    Returns
    -------
    pandas.DataFrame
        ``workload, placement, best_plan, chosen_plan, regret_pct``, one row per placement (and number
        of CPU threads) on which at least two clean plans were measured; regret is the share [%]
        of the best throughput that is lost.
    """
    usable = (frame["clean"] & frame["feasible"]).to_numpy(dtype=bool)
    kept = frame[usable].assign(predicted_s=np.asarray(predicted_s)[usable])
    keys = ["workload", "placement"] + (["cpu_threads"] if "cpu_threads" in kept else [])
    records = []
    for key, group in kept.groupby(keys, sort=True):
        if len(group) < 2:
            continue
        measured = group["iter_time_s"].to_numpy(dtype=np.float64)
        predicted = group["predicted_s"].to_numpy(dtype=np.float64)
        plans = [str(text) for text in group["exec_plan"]]
        tied = np.flatnonzero(predicted <= predicted.min() * (1.0 + _TIE))
        chosen = min(tied.tolist(), key=lambda row: (not plans[row].startswith("zero"), plans[row]))
        best = int(np.argmin(measured))
        lost = 100.0 * (1.0 - measured[best] / measured[chosen])
        records.append((key[0], key[1], plans[best], plans[chosen], float(lost)))
    names = ["workload", "placement", "best_plan", "chosen_plan", "regret_pct"]
    return pd.DataFrame(records, columns=names)


@dataclass(slots=True)
class Learner:
    """A model that is fitted again whenever further rows of its table have run.

    Parameters
    ----------
    rows
        Schema `makespan.tables.THROUGHPUT`, one workload, with a new index. Infeasible rows are runs that
        fail. Flagged rows are known once they have run, but never fitted.
    first, reasons
        Fit to the sampled rows, and the reason for which each row is known, (n_rows,); empty where it has
        not run.
    runs_by_preset
        True if runs after the sampled ones split their batch by the preset of the workload, False if as in
        the fit to the sampled rows.
    """

    rows: pd.DataFrame
    first: Fit
    reasons: list[str]
    runs_by_preset: bool = False

    @classmethod
    def from_table(
        cls, table: pd.DataFrame, form: str, environment: Environment, *, runs_by_preset: bool = False
    ) -> "Learner":
        """Start with the rows of the sampling design.

        Raises
        ------
        FitError
            No clean feasible row can be sampled.
        """
        rows = table.reset_index(drop=True)
        sampled = fit_table(rows, str(rows["workload"].iloc[0]), form, environment)
        reasons = [""] * len(rows)
        for row in np.flatnonzero(rows["feasible"].to_numpy(dtype=bool))[sampled.fitted]:
            reasons[row] = SAMPLED
        return cls(rows, sampled.fit, reasons, runs_by_preset)

    @property
    def times_s(self) -> Floats:
        """Time that each row takes when it runs [s], 0 where it fails, (n_rows,)."""
        return np.asarray(np.nan_to_num(self.rows["iter_time_s"].to_numpy(dtype=np.float64)))

    def learn(self, which: Iterable[int], reason: str) -> None:
        """Record that rows have run, and the reason; a row keeps its first reason."""
        for row in which:
            self.reasons[row] = self.reasons[row] or reason

    def fit(self) -> Fit:
        """Return the model fitted to all rows that ran, in the order of the table."""
        ran = np.array([reason not in ("", SAMPLED) for reason in self.reasons])
        usable = (self.rows["feasible"] & self.rows["clean"]).to_numpy(dtype=bool)
        further = self.rows[ran & usable]
        if further.empty:
            return self.first
        spec = self.first.workload if self.runs_by_preset else self.first.points.workload
        points = points_from_table(further, spec, self.first.environment)
        return self.first.refit(points, measured_from_table(further))

    def learn_until_known(self, choose: Callable[[Fit], list[int]], reason: str) -> tuple[list[int], int]:
        """Run the chosen rows, fit again, and repeat until all rows of a choice have run.

        ``choose`` maps the present fit to the rows that should run; ``reason`` is recorded for them.

        Returns
        -------
        tuple
            The rows of the last choice, and how many rows ran for it.
        """
        before = sum(map(bool, self.reasons))
        while True:
            chosen = choose(self.fit())
            unknown = [row for row in chosen if not self.reasons[row]]
            if not unknown:
                return chosen, sum(map(bool, self.reasons)) - before
            self.learn(unknown, reason)


# --- Shared constants of a cluster, fitted to the rows of several models at once ---
#
# The constants of the presets were chosen with measured rows of every model in view. Constants fitted without
# one model show how well a model is predicted that had no influence on them.

_TOLERANCE = 1e-6


def fit_shared(fits: Iterable[TableFit], environment: Environment) -> dict[str, float]:
    """Fit the open values of an environment, constants and centres of priors, to the rows of some models.

    All clean rows of the models are used, and the parameters of each model are fitted together with the
    shared values. The objective adds the squared log errors of the iteration times, weighted so that each
    table counts the same, and the priors of ``environment.neutral``, which no measured row has entered.
    Without any model the medians of these priors come back.

    Parameters
    ----------
    fits
        One fit per workload, of any form; workloads of unclear configuration (see
        ``Workload.used_for_calibration``) are left out.
    environment
        Its open values have a prior in ``neutral``.

    Returns
    -------
    dict
        Value of each name in ``neutral``, in its unit, for ``environment.with_shared``.
    """
    models = []
    for table_fit in fits:
        workload = table_fit.fit.points.workload
        if not workload.used_for_calibration:
            continue
        rows = table_fit.frame[table_fit.frame["clean"].to_numpy(dtype=bool)]
        points = points_from_table(rows, workload, environment)
        log_time = np.log(measured_from_table(rows).iter_time_s)
        weight = 1.0 / (environment.constants.time_log_sd * np.sqrt(len(rows)))
        models.append(_Model(points, table_fit.fit.profile, log_time, float(weight)))
    problem = _Joint(environment, tuple(models))
    of_model = [environment.priors[EXTENDED.name][name] for name in EXTENDED.parameters]
    priors = [*environment.neutral.values(), *(of_model * len(models))]
    bounds = np.log([[prior.low for prior in priors], [prior.high for prior in priors]])
    start = np.log([prior.median for prior in priors])
    z, _ = least_squares(
        problem.residuals,
        np.clip(start, bounds[0] + _STEP, bounds[1] - _STEP),
        (bounds[0], bounds[1]),
        _STEP,
        tolerance=_TOLERANCE,
        scale=np.array([prior.log_sd for prior in priors]),
    )
    return problem.values_of(z[: len(environment.neutral)])


@dataclass(frozen=True, slots=True)
class _Model:
    """The clean rows of one table; ``weight`` makes all tables count the same."""

    points: Points
    profile: Profile
    log_time: Floats
    weight: float


@dataclass(frozen=True, slots=True)
class _Joint:
    """The least-squares problem in logarithms: shared values, then the parameters of each model."""

    environment: Environment
    models: Sequence[_Model]

    def values_of(self, log_shared: Floats) -> dict[str, float]:
        """Return the shared values by name."""
        return dict(zip(self.environment.neutral, np.exp(log_shared).tolist(), strict=True))

    def residuals(self, z: Floats) -> Floats:
        """Weighted residuals of one vector or of a matrix of vectors, one row each."""
        rows, n_shared, n_of_model = np.atleast_2d(z), len(self.environment.neutral), len(EXTENDED.parameters)
        # Environment and terms are built once per distinct vector of shared values. In a Jacobian, all
        # vectors that step in a parameter of one model have the same shared values.
        shared, which = np.unique(rows[:, :n_shared], axis=0, return_inverse=True)
        environments = [self.environment.with_shared(self.values_of(values)) for values in shared]
        neutral = self.environment.neutral.values()
        parts = [_standardised(rows[:, :n_shared], neutral)]
        mean_rows = np.mean([len(model.log_time) for model in self.models]) if self.models else 1.0
        for number, model in enumerate(self.models):
            of_model = rows[:, n_shared + number * n_of_model :][:, :n_of_model]
            misfit, from_prior = np.empty((len(rows), len(model.log_time))), np.empty_like(of_model)
            for index, environment in enumerate(environments):
                members = which == index
                terms = Terms(model.points, model.profile, environment.constants)
                predicted = EXTENDED.phases(np.exp(of_model[members]), terms).iter_time_s
                misfit[members] = np.log(predicted) - model.log_time
                centred = [environment.priors[EXTENDED.name][name] for name in EXTENDED.parameters]
                from_prior[members] = _standardised(of_model[members], centred)
            parts += [np.sqrt(mean_rows) * model.weight * misfit, from_prior]
        joined = np.concatenate(parts, axis=1)
        return joined if z.ndim > 1 else joined[0]


def _standardised(values: Floats, priors: Iterable[Prior]) -> Floats:
    medians, spreads = np.array([(np.log(prior.median), prior.log_sd) for prior in priors]).T
    return np.asarray((values - medians) / spreads)
