"""The fit: what it recovers, what it reports, what it refuses."""

import numpy as np
import pytest

from makespan.errors import FitError, UnknownNameError
from makespan.perf import FORMS, Measured, fit, load_environment, points_from_plans
from makespan.perf.forms import Profile, Terms
from makespan.plans import Placement, read_plan, resolve_micro_batch
from makespan.tables import FIT
from makespan.workloads import workload

ENVIRONMENT = load_environment("a800-64")
ROWS = (
    ("ga", "2"),
    ("ga", "8"),
    ("ga", "2222"),
    ("ga", "44"),
    ("gc", "4"),
    ("zero-dp", "44"),
    ("zero-dp", "2222"),
    ("zero-offload", "2"),
    ("zero-offload", "8"),
    ("zero-offload", "2222"),
)
TRUTH = {
    "extended": {"k_bwd": 1.7, "k_opt": 0.05, "k_cpu": 0.9, "k_off": 0.2, "k_const": 0.02},
    "published": {"k_bwd": 1.7, "k_sync": 1.6, "k_opt": 0.05, "k_opt_off": 12.0, "k_const": 0.02},
}


def make_points(key="bert", rows=ROWS):
    spec = workload(key)
    pairs = []
    for text, place in rows:
        placement = Placement.parse(place)
        plan = read_plan(text, n_gpus=placement.n_gpus, global_batch_size=spec.global_batch_size)
        pairs.append((resolve_micro_batch(plan, spec, ENVIRONMENT.node), placement))
    return points_from_plans(pairs, spec, ENVIRONMENT)


def synthetic(form, points, noise=0.0, seed=3):
    """Return times of a model with known coefficients, with log-normal noise."""
    priors = ENVIRONMENT.priors[form]
    theta = np.array([TRUTH[form].get(name, priors[name].median) for name in FORMS[form].parameters])
    profile = Profile(0.11, 16.0, 1.0, "known")
    phases = FORMS[form].phases(theta, Terms(points, profile, ENVIRONMENT.constants))
    factor = np.exp(noise * np.random.default_rng(seed).standard_normal(len(points)))
    forward = np.where(points.is_data_parallel & (points.n_gpus == 2), 0.11, np.nan)
    overlap = phases.compute_s - np.nan_to_num(forward)
    return Measured(phases.iter_time_s * factor, forward, overlap, phases.optimize_s)


@pytest.mark.parametrize("form", sorted(FORMS))
def test_known_coefficients_come_back_from_exact_times(form):
    points = make_points()
    result = fit(form, points, synthetic(form, points), ENVIRONMENT)
    for name, value in TRUTH[form].items():
        if result.identified[result.parameters.index(name)]:
            assert result.values[result.parameters.index(name)] == pytest.approx(value, rel=0.15), name
    assert result.identified.sum() >= 4
    assert np.abs(result.residual).max() < 0.01


@pytest.mark.parametrize("form", sorted(FORMS))
def test_noise_widens_the_prediction_error_no_more_than_itself(form):
    points = make_points()
    exact = synthetic(form, points)
    result = fit(form, points, synthetic(form, points, noise=0.02), ENVIRONMENT)
    error = np.abs(result.predict(points) / exact.iter_time_s - 1.0)
    assert error.max() < 0.06


def test_std_err_covers_the_truth():
    points = make_points()
    result = fit("extended", points, synthetic("extended", points, noise=0.02), ENVIRONMENT)
    for name in ("k_bwd", "k_cpu"):
        index = result.parameters.index(name)
        assert abs(result.values[index] - TRUTH["extended"][name]) < 4.0 * result.std_err[index]


def test_parameters_without_data_stay_at_their_prior_and_say_so():
    points = make_points(rows=ROWS[:5])
    result = fit("extended", points, synthetic("extended", points), ENVIRONMENT)
    for name in ("k_cpu", "k_off", "k_zero", "k_fwd", "k_pp", "k_const3", "k_opt3"):
        index = result.parameters.index(name)
        assert not result.identified[index]
        assert result.values[index] == pytest.approx(ENVIRONMENT.priors["extended"][name].median, rel=1e-3)
        assert result.information[index] < 0.01
    assert result.identified[result.parameters.index("k_bwd")]


def test_fit_is_deterministic_and_ignores_the_order_of_rows():
    points = make_points()
    measured = synthetic("extended", points, noise=0.02)
    first = fit("extended", points, measured, ENVIRONMENT)
    again = fit("extended", points, measured, ENVIRONMENT)
    assert first.values.tobytes() == again.values.tobytes()
    order = np.arange(len(points))[::-1]
    turned = fit("extended", points.take(order), measured.take(order), ENVIRONMENT)
    assert turned.profile == first.profile
    assert turned.values == pytest.approx(first.values, rel=1e-3)


def test_refit_equals_a_fit_on_the_union():
    points = make_points()
    measured = synthetic("extended", points, noise=0.02)
    head, tail = np.arange(6), np.arange(6, len(points))
    partial = fit("extended", points.take(head), measured.take(head), ENVIRONMENT)
    union = fit("extended", points, measured, ENVIRONMENT)
    updated = partial.refit(points.take(tail), measured.take(tail))
    assert updated.values.tobytes() == union.values.tobytes()
    assert len(updated.points) == len(points)


def test_refit_with_more_data_reduces_the_error():
    points = make_points()
    measured = synthetic("extended", points)
    head, tail = np.arange(4), np.arange(4, len(points))
    partial = fit("extended", points.take(head), measured.take(head), ENVIRONMENT)
    updated = partial.refit(points.take(tail), measured.take(tail))

    def worst(result):
        return np.abs(result.predict(points) / measured.iter_time_s - 1.0).max()

    assert worst(updated) < 0.5 * worst(partial)


def test_table_follows_its_schema_and_names_every_parameter():
    points = make_points()
    result = fit("published", points, synthetic("published", points), ENVIRONMENT)
    table = result.table()
    assert list(table.columns[: len(FIT.names)]) == FIT.names
    assert tuple(table["parameter"]) == FORMS["published"].parameters
    assert (table["unit"] != "").all()
    assert ((table["value"] > 0) & (table["std_err"] > 0)).all()


def test_unknown_form_lists_the_accepted_ones():
    points = make_points()
    with pytest.raises(UnknownNameError, match="extended, published"):
        fit("extendet", points, synthetic("extended", points), ENVIRONMENT)


@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan])
def test_a_time_that_is_not_positive_is_refused(bad):
    points = make_points()
    measured = synthetic("extended", points)
    times = measured.iter_time_s.copy()
    times[2] = bad
    with pytest.raises(FitError, match="observation 3 of 'bert'"):
        fit("extended", points, Measured(times, *[np.full(len(times), np.nan)] * 3), ENVIRONMENT)


def test_no_observation_is_refused():
    points = make_points().take(np.arange(0))
    empty = Measured(*[np.zeros(0)] * 4)
    with pytest.raises(FitError, match="no observation of 'bert'"):
        fit("extended", points, empty, ENVIRONMENT)


def test_lengths_must_agree():
    points = make_points()
    with pytest.raises(FitError, match="10 points but 3"):
        fit("extended", points, Measured(*[np.ones(3)] * 4), ENVIRONMENT)


def test_points_of_another_workload_cannot_be_added():
    points = make_points()
    other = make_points("roberta")
    result = fit("extended", points, synthetic("extended", points), ENVIRONMENT)
    with pytest.raises(FitError, match="'roberta' cannot be added to points of 'bert'"):
        result.refit(other, synthetic("extended", other))
