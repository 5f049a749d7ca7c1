"""Sequential sampling: which runs are chosen, intervals of predictions, and warnings."""

import logging

import numpy as np
import pytest

import makespan
from makespan.emulator import emulate, trace_points
from makespan.errors import InputError, UnknownNameError
from makespan.hardware import cluster
from makespan.perf import (
    fit_table,
    intervals,
    load_environment,
    next_runs,
    points_from_table,
    sampling_design,
    sequential_design,
    warnings_of,
)
from makespan.perf.sampling import covariance
from makespan.workloads import workload

WHERE = cluster("a800-64")
ENVIRONMENT = load_environment("a800-64")


@pytest.fixture(scope="module")
def table():
    """Return the emulated rows of BERT, every third one, so that designs have a choice and stay quick."""
    rows = emulate(workload("bert"), trace_points(workload("bert"), WHERE), WHERE)
    return rows.iloc[::3].reset_index(drop=True)


@pytest.fixture(scope="module")
def design(table):
    return sequential_design(table, "bert", "extended", ENVIRONMENT, n_runs=5, seed=3)


@pytest.fixture(scope="module")
def fitted(table, design):
    return fit_table(table, "bert", "extended", ENVIRONMENT, sampled=np.isin(np.arange(len(table)), design))


def points_of(result):
    return points_from_table(result.frame, result.fit.points.workload, ENVIRONMENT)


def test_rows_are_different_feasible_and_as_many_as_asked_for(table, design):
    assert len(set(design)) == 5
    assert table["feasible"].to_numpy()[design].all()


def test_the_default_number_of_runs_is_that_of_the_fixed_design(table):
    rows = sequential_design(table, "bert", "extended", ENVIRONMENT)
    assert len(rows) == sampling_design(table, "bert").sum()


def test_equal_seeds_choose_equal_rows_and_fewer_runs_are_their_beginning(table, design):
    shorter = sequential_design(table, "bert", "extended", ENVIRONMENT, n_runs=3, seed=3)
    assert shorter == design[:3]


def test_times_of_rows_that_did_not_run_have_no_influence(table, design):
    others = ~table.index.isin(design)
    times = ["iter_time_s", "forward_s", "overlap_sync_s", "optimize_s"]
    hidden = table.copy()
    hidden.loc[others, times] *= 7.0
    assert sequential_design(hidden, "bert", "extended", ENVIRONMENT, n_runs=5, seed=3) == design


def test_flags_of_rows_that_did_not_run_have_no_influence(table, design):
    hidden = table.assign(clean=table.index.isin(design))
    assert sequential_design(hidden, "bert", "extended", ENVIRONMENT, n_runs=5, seed=3) == design


def test_a_flagged_row_counts_as_a_run_and_is_followed_by_others(table, design):
    flagged = table.assign(clean=table.index != design[1])
    rows = sequential_design(flagged, "bert", "extended", ENVIRONMENT, n_runs=5, seed=3)
    assert rows[:2] == design[:2] and len(set(rows)) == 5


def test_runs_are_drawn_at_random_until_one_can_be_fitted(table):
    flagged = table.assign(clean=table.index == 7)
    rows = sequential_design(flagged, "bert", "extended", ENVIRONMENT, n_runs=4, seed=0)
    assert len(set(rows)) == 4


def test_a_design_goes_on_from_rows_that_ran(table):
    rows = sequential_design(table, "bert", "extended", ENVIRONMENT, n_runs=4, first=(5, 9))
    assert rows[:2] == [5, 9] and len(set(rows)) == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_runs": 0}, "0 runs of 'bert'; expected from 1 to the"),
        ({"n_runs": 1000}, "1000 runs of 'bert'; expected from 1 to the"),
        ({"n_runs": 1, "first": (1, 2)}, "1 runs of 'bert'; expected from 2 to the"),
        ({"n_runs": 3, "first": (-1,)}, "first run -1 is no feasible row of 'bert'"),
    ],
)
def test_impossible_numbers_of_runs_are_refused(table, changes, message):
    with pytest.raises(InputError, match=message):
        sequential_design(table, "bert", "extended", ENVIRONMENT, **changes)


def test_a_run_narrows_its_own_prediction_most_and_widens_none(table, fitted):
    points = points_of(fitted)
    before = np.diag(covariance(fitted.fit, points))
    (row,) = next_runs(fitted.fit, points)
    with_row = fitted.fitted.copy()
    with_row[row] = True
    after = fit_table(table, "bert", "extended", ENVIRONMENT, sampled=with_row)
    shrunk = np.diag(covariance(after.fit, points)) / before
    assert not fitted.fitted[row]
    assert shrunk[row] < 0.6
    assert np.median(shrunk) < 1.0


def test_variances_are_positive_and_least_where_runs_are(fitted):
    variance = np.diag(covariance(fitted.fit, points_of(fitted)))
    assert (variance > 0).all()
    assert variance[fitted.fitted].max() < np.median(variance[~fitted.fitted])


def test_points_without_worth_are_not_chosen_and_further_runs_differ(fitted):
    points = points_of(fitted)
    first = next_runs(fitted.fit, points, 3)
    assert len(set(first)) == 3
    worth = np.ones(len(points))
    worth[first[0]] = 0.0
    assert next_runs(fitted.fit, points, worth=worth) != first[:1]
    with pytest.raises(InputError, match="further runs; expected from 1 to the"):
        next_runs(fitted.fit, points, len(points) + 1)


def test_intervals_hold_their_prediction_and_grow_with_the_level(fitted):
    narrow, wide = (intervals(fitted.fit, points_of(fitted), level) for level in (0.5, 0.9))
    for table in (narrow, wide):
        assert (table["low_s"] < table["predicted_s"]).all()
        assert (table["predicted_s"] < table["high_s"]).all()
    assert (wide["high_s"] > narrow["high_s"]).all()
    assert wide["predicted_s"].to_numpy() == pytest.approx(fitted.predicted_s)


def test_most_held_out_times_are_within_their_interval(fitted):
    limits = intervals(fitted.fit, points_of(fitted), 0.9)
    within = fitted.frame["iter_time_s"].between(limits["low_s"], limits["high_s"])
    assert within[~fitted.fitted].mean() > 0.6


@pytest.mark.parametrize("level", [0.0, 1.0, 1.5])
def test_a_level_is_a_share(fitted, level):
    with pytest.raises(InputError, match="expected a share between 0 and 1"):
        intervals(fitted.fit, points_of(fitted), level)


def test_kinds_and_sizes_that_did_not_run_are_outside(table):
    plain = table["exec_plan"] == "ga"
    result = fit_table(table, "bert", "extended", ENVIRONMENT, sampled=plain.to_numpy())
    outside = intervals(result.fit, points_of(result))["is_outside"].to_numpy()
    is_plain = result.frame["exec_plan"].isin(["ga", "gc"]).to_numpy()
    assert outside[~is_plain].all() and not outside[is_plain].all()
    assert not outside[result.fitted].any()
    warning = next(text for text in warnings_of(result) if "far outside" in text)
    assert warning.startswith(f"{outside.sum()} of {len(outside)} predictions are far outside of what ran")


def test_parameters_that_nothing_determines_are_named(table):
    plain = (table["exec_plan"] == "ga").to_numpy()
    warnings = warnings_of(fit_table(table, "bert", "extended", ENVIRONMENT, sampled=plain))
    text = next(text for text in warnings if text.startswith("not determined by the runs"))
    assert "k_off" in text and "k_cpu" in text
    assert "k_fwd" not in text  # no row of BERT is model parallel, so nothing depends on it


def test_runs_that_the_form_does_not_describe_are_reported(table, design):
    jumping = table.copy()
    jumping.loc[design[::2], "iter_time_s"] *= 3.0
    sampled = np.isin(np.arange(len(table)), design)
    warnings = warnings_of(fit_table(jumping, "bert", "extended", ENVIRONMENT, sampled=sampled))
    assert any("does not describe the runs" in text for text in warnings)


def test_a_good_fit_is_not_called_bad(fitted):
    assert not any("does not describe" in text for text in warnings_of(fitted))


def test_the_public_function_samples_in_sequence_and_logs_warnings(table, design, fitted, caplog):
    with caplog.at_level(logging.WARNING, "makespan.api"):
        result = makespan.fit(table, design="sequential", runs=5, seed=3)
    assert np.flatnonzero(result.fitted).tolist() == sorted(design)
    assert result.fit.values.tolist() == fitted.fit.values.tolist()
    assert [f"bert: {text}" for text in warnings_of(result)] == caplog.messages


def test_the_public_function_refuses_what_a_design_does_not_have(table):
    with pytest.raises(UnknownNameError, match="design"):
        makespan.fit(table, design="best")
    with pytest.raises(InputError, match="the fixed design has its own number"):
        makespan.fit(table, runs=3)


def test_public_intervals_name_plans_and_next_runs_are_among_the_placements(fitted):
    limits = makespan.intervals(fitted)
    assert list(limits.columns) == [
        "exec_plan", "placement", "cpu_threads", "predicted_s", "low_s", "high_s", "is_outside",
    ]  # fmt: skip
    chosen = makespan.next_runs(fitted, ["8", 44], n_runs=2)
    assert set(chosen["placement"]) <= {"8", "44"} and len(chosen.drop_duplicates()) == 2
    assert (chosen["low_s"] < chosen["predicted_s"]).all()
