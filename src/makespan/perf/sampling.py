"""Sequential sampling: the run to measure next, intervals of predictions, and warnings of a fit.

A fit says how its prediction of each point would change with its parameters, with the constants that all
models share, and with the forward time. With their priors, and an error of the form itself that similar
points have in common, this gives a joint normal distribution of the log times of all points. Measured times
narrow it. `next_runs` picks the runs that would narrow it most, `sequential_design` does so with a fit after
every run, and `intervals` shows the widths that are left.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from statistics import NormalDist

import numpy as np
import numpy.typing as npt
import pandas as pd

from makespan.errors import InputError
from makespan.least_squares import forward_differences
from makespan.numerics import named_rng, significant
from makespan.perf.fitting import (
    Fit,
    Floats,
    TableFit,
    feasible_rows,
    fit,
    problem_of,
    sampling_design,
)
from makespan.perf.forms import Constants, Environment, Points, Terms, measured_from_table, points_from_table
from makespan.plans import Placement

_STEP = 1e-4  # of finite differences in logarithms
_DIGITS = 6  # of scores, so that all processors make the same choice
# Standard deviations of logarithms, chosen on starts that no reported number uses.
_NOISE = 0.04  # of a single run, with what no similar run shares
_FORM = 0.1  # of the error of the form, which similar points share
_SHARED = 0.2  # of each constant of the cluster
_PROFILE = {"forward phase": 0.03, "growth with the batch": 0.1}  # of the forward time, by its origin
_BOUND = 0.3  # of a forward time of which only a bound is known
_REACH = 2.0  # doublings of GPUs, nodes, degrees or threads over which points are similar
_WIDTH = 0.65  # of intervals, so that those of 90 % held 90 % of the held-out rows of the same starts
_FURTHEST = 4.0  # GPUs over the most, or the fewest, of the runs of the same kind
_BAD_RMS = 0.1  # of residuals in logarithms: five times the spread of equal runs
_MATTERS = 0.01  # change of a log time with a log parameter below which the parameter is not missed
_KINDS = ("data-parallel", "recomputing", "ZeRO", "offload", "model-parallel")
_CERTAIN = {
    "recompute_share",
    "reference_cpu_threads",
    "assumed_backward_ratio",
    "time_log_sd",
    "phase_weight",
}
_UNCERTAIN = tuple(field.name for field in fields(Constants) if field.name not in _CERTAIN)


def covariance(fitted: Fit, points: Points) -> Floats:
    """Return the covariance of the log times of points, given the runs of a fit, (n, n).

    The errors of parameters, shared constants, forward time and form are joined linearly, at the fitted
    parameters. Runs count by their iteration times, and by their reported phases where these are fitted.
    """
    n, runs = len(points), len(fitted.points)
    every = points.join(fitted.points)
    form, constants, profile = fitted.form, fitted.environment.constants, fitted.profile
    z = np.log(fitted.values)

    def log_time(z: Floats, terms: Terms) -> Floats:
        return np.log(form.phases(np.exp(z), terms).iter_time_s)

    terms = Terms(every, profile, constants)
    centre = log_time(z, terms)
    by_parameter = (log_time(z + _STEP * np.eye(len(z)), terms) - centre).T / _STEP
    factor = float(np.exp(_STEP))
    changed = [Terms(every, replace(profile, time_s=profile.time_s * factor), constants)]
    for name in _UNCERTAIN:
        shifted = {name: getattr(constants, name) * factor}
        changed.append(Terms(every, profile, replace(constants, **shifted)))
    by_shared = np.array([(log_time(z, other) - centre) / _STEP for other in changed]).T
    shared_sd = np.array([_PROFILE.get(profile.origin, _BOUND), *([_SHARED] * len(_UNCERTAIN))])
    # Reported phases teach parameters before the iteration times do.
    problem = problem_of(form, fitted.points, fitted.measured, fitted.environment)
    by_phase = forward_differences(problem.residuals, z, _STEP)[runs : 3 * runs]
    parameters = np.linalg.inv(np.diag(problem.spread**-2.0) + by_phase.T @ by_phase)
    # Points of one kind and of similar size share the error of the form.
    size = np.log2(np.column_stack((every.n_gpus, every.n_nodes, every.tp, every.pp, every.cpu_threads)))
    distance = np.sum((size[:, None] - size[None]) ** 2, axis=-1) / _REACH**2
    kind = _kinds(every)
    similar = np.exp(-0.5 * distance) * (kind[:, None] == kind[None])
    prior = by_parameter @ parameters @ by_parameter.T
    prior += (by_shared * shared_sd**2) @ by_shared.T + _FORM**2 * similar
    measured = prior[n:, n:] + _NOISE**2 * np.eye(runs)
    across = prior[:n, n:]
    return np.asarray(prior[:n, :n] - across @ np.linalg.solve(measured, across.T))


def next_runs(
    fitted: Fit,
    points: Points,
    n_runs: int = 1,
    *,
    worth: Floats | float = 1.0,
) -> list[int]:
    """Choose the points to measure next, given the runs of a fit.

    A run is worth as much as it reduces the variances of the log times of all points, in their sum.
    Each further one is chosen as if the runs before it had confirmed their predictions.

    Parameters
    ----------
    points
        Points that matter, in the order in which ties are decided. Any of them may be measured.
    worth
        Factor of the worth of each point, for example the chance that its run succeeds; 0 rules a point out.

    Returns
    -------
    list of int
        Indices of points, the most valuable first.

    Raises
    ------
    InputError
        Fewer points than ``n_runs`` may be measured.
    """
    factor = np.broadcast_to(worth, len(points)).copy()
    if not 1 <= n_runs <= np.count_nonzero(factor):
        most = np.count_nonzero(factor)
        raise InputError(f"{n_runs} further runs; expected from 1 to the {most} points that can be measured")
    spread, chosen = covariance(fitted, points), []
    for _ in range(n_runs):
        gain = factor * np.sum(spread**2, axis=0) / (np.diag(spread) + _NOISE**2)
        row = int(np.argmax(significant(gain / gain.max(), _DIGITS)))
        chosen.append(row)
        factor[row] = 0.0
        spread = spread - np.outer(spread[row], spread[row]) / (spread[row, row] + _NOISE**2)
    return chosen


def sequential_design(
    frame: pd.DataFrame,
    workload: str,
    form: str,
    environment: Environment,
    *,
    n_runs: int | None = None,
    first: Sequence[int] = (),
    seed: int = 0,
    parameters: float | None = None,
) -> list[int]:
    """Choose the rows to fit one after the other, each from what the rows before it showed.

    The choice knows plans and placements of all rows, but times, phases and flags only of those that ran. A
    row that turns out to be flagged counts as a run, but is not fitted. It lowers the worth of rows of its
    kind: model-parallel plans or others, on several nodes of which one uses a network card in part or not.

    Parameters
    ----------
    frame, workload, form, environment, parameters
        As for `fit_table`; infeasible rows never run.
    n_runs
        Rows to choose (default: as many as `sampling_design` does).
    first
        Rows that ran before, in the order of the table; if there are none, the first row is drawn at random.
    seed
        Seed of that draw, and of further ones until a row can be fitted.

    Returns
    -------
    list of int
        Rows of the table in the order in which they run, ``first`` included.

    Raises
    ------
    FitError, InputError
        The table has no feasible row of the workload; fewer rows than ``n_runs``, or more in ``first``; or
        ``first`` names a row that cannot run.
    """
    kept, specs, usable = feasible_rows(frame, workload, parameters)
    n_runs = int(np.count_nonzero(sampling_design(kept, specs[0]))) if n_runs is None else n_runs
    if not max(1, len(first)) <= n_runs <= len(kept):
        raise InputError(
            f"{n_runs} runs of {specs[0].key!r}; expected from {max(1, len(first))} to the {len(kept)} "
            "feasible rows of the table"
        )
    rows = np.flatnonzero(usable)
    if wrong := sorted(set(first) - set(rows.tolist())):
        raise InputError(f"first run {wrong[0]} is no feasible row of {specs[0].key!r}")
    chosen = np.searchsorted(rows, list(dict.fromkeys(first))).tolist()
    points = [points_from_table(kept, spec, environment) for spec in specs]
    measured, clean = measured_from_table(kept), kept["clean"].to_numpy(dtype=bool)
    per_card = environment.node.gpus_per_nic
    nodes = [Placement.parse(str(text)).gpus_per_node for text in kept["placement"]]
    splits_cards = np.array([len(counts) > 1 and any(n % per_card for n in counts) for counts in nodes])
    group = 2 * points[0].is_model_parallel + splits_cards
    rng = named_rng(seed, "sampling", specs[0].key)
    fits: list[Fit] = []
    while len(chosen) < n_runs:
        ran = np.isin(np.arange(len(kept)), chosen)
        taught = np.flatnonzero(ran & clean)
        if not len(taught):
            chosen.append(int(rng.choice(np.flatnonzero(~ran))))
            continue
        # Each description of the workload starts from its last parameters.
        before: list[Floats | tuple[()]] = [fitted.values for fitted in fits] or [()] * len(specs)
        fits = [
            fit(form, of_spec.take(taught), measured.take(taught), environment, near=near)
            for of_spec, near in zip(points, before, strict=True)
        ]
        best = min(range(len(fits)), key=lambda number: fits[number].cost)
        # With one more success assumed, or a first failure would rule out everything like it.
        n_ran, n_failed = (np.bincount(group[mask], minlength=4) for mask in (ran, ran & ~clean))
        worth = np.where(ran, 0.0, (1.0 - n_failed / (1.0 + n_ran))[group])
        chosen += next_runs(fits[best], points[best], worth=worth)
    return [int(row) for row in rows[chosen]]


def intervals(fitted: Fit, points: Points, level: float = 0.9) -> pd.DataFrame:
    """Return predictions with intervals, and which of them are far outside of what ran.

    Parameters
    ----------
    level
        Share of the times that the intervals should hold, between 0 and 1.

    Returns
    -------
    pandas.DataFrame
        ``predicted_s``, ``low_s``, ``high_s`` [s], and ``is_outside``: no run of the same kind (data
        parallel, ZeRO, offload, model parallel), or over four times as many GPUs as any of them, or less than
        a quarter.
    """
    if not 0 < level < 1:
        raise InputError(f"level {level:g}; expected a share between 0 and 1")
    variance = np.diag(covariance(fitted, points)) + _NOISE**2
    factor = np.exp(NormalDist().inv_cdf(0.5 + level / 2) * _WIDTH * np.sqrt(variance))
    predicted = fitted.predict(points)
    # What recomputing adds to plain data parallelism is known, so either stands for the other here.
    kind, ran = (np.where(one == 1, 0, one) for one in (_kinds(points), _kinds(fitted.points)))
    is_outside = np.ones(len(points), dtype=bool)
    for value in np.unique(ran):
        gpus = fitted.points.n_gpus[ran == value]
        reached = (points.n_gpus <= _FURTHEST * gpus.max()) & (points.n_gpus >= gpus.min() / _FURTHEST)
        is_outside[(kind == value) & reached] = False
    columns = {"predicted_s": predicted, "low_s": predicted / factor, "high_s": predicted * factor}
    return pd.DataFrame(columns | {"is_outside": is_outside})


def warnings_of(result: TableFit) -> list[str]:
    """Return what a fit leaves open, one sentence each; none where nothing is.

    Three things are looked for: parameters that the runs do not determine although predictions depend on
    them; runs that the form does not describe (residuals above 10 %, root mean square); and predictions far
    outside of what ran, see `intervals`.
    """
    fitted, found = result.fit, []
    points = points_from_table(result.frame, fitted.points.workload, fitted.environment)
    terms = Terms(points, fitted.profile, fitted.environment.constants)
    z = np.log(fitted.values)
    shifted = np.exp(np.vstack([z, z + _STEP * np.eye(len(z))]))
    log_time = np.log(fitted.form.phases(shifted, terms).iter_time_s)
    matters = np.max(np.abs(log_time[1:] - log_time[0]), axis=1) > _MATTERS * _STEP
    names = [
        name for name, open_ in zip(fitted.parameters, matters & ~fitted.identified, strict=True) if open_
    ]
    if names:
        found.append(f"not determined by the runs, so the values are assumptions: {', '.join(names)}")
    rms = float(np.sqrt(np.mean(fitted.residual**2)))
    if rms > _BAD_RMS:
        worst = int(np.argmax(np.abs(fitted.residual)))
        row = result.frame[result.fitted].iloc[worst]
        found.append(
            f"the form {fitted.form.name!r} does not describe the runs: residuals of {100 * rms:.0f} % (root "
            f"mean square), expected at most {100 * _BAD_RMS:.0f} %; the largest is that of "
            f"{row['exec_plan']} on {row['placement']}"
        )
    outside = np.flatnonzero(intervals(fitted, points)["is_outside"].to_numpy())
    if len(outside):
        row = result.frame.iloc[outside[0]]
        kind = _KINDS[_kinds(points)[outside[0]]]
        found.append(
            f"{len(outside)} of {len(points)} predictions are far outside of what ran, the first is "
            f"{row['exec_plan']} on {row['placement']} ({kind}); measure such a plan before you rely on them"
        )
    return found


def _kinds(points: Points) -> npt.NDArray[np.intp]:
    """Return the kind of each plan, an index of `_KINDS`, (n,)."""
    masks = [points.is_model_parallel, points.is_offload, points.is_zero, points.checkpoint_fraction > 0]
    return np.select(masks, [4, 3, 2, 1], 0).astype(np.intp)
