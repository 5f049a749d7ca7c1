"""Which rows are sampled, and what a table fit makes of them."""

import numpy as np
import pandas as pd
import pytest

from makespan.errors import FitError, TraceError
from makespan.perf import (
    FORMS,
    Learner,
    fit_table,
    load_environment,
    measured_from_table,
    points_from_table,
    regret,
    sampling_design,
)
from makespan.perf.fitting import forward_profile
from makespan.perf.forms import Profile, Terms
from makespan.tables import THROUGHPUT
from makespan.workloads import workload

ENVIRONMENT = load_environment("a800-64")
PLACEMENTS = ("1", "2", "4", "8", "11", "22", "44", "2222", "35", "11111111")


def table(key, rows, threads=12):
    """Return a throughput table whose times are those of the extended form at its prior."""
    spec = workload(key)
    frame = pd.DataFrame(
        {
            "workload": key,
            "exec_plan": [text for text, _ in rows],
            "placement": [place for _, place in rows],
            "cpu_threads": threads,
            "global_batch_size": spec.global_batch_size,
            "iter_time_s": 1.0,
            "forward_s": np.nan,
            "overlap_sync_s": np.nan,
            "optimize_s": np.nan,
            "feasible": True,
            "clean": True,
            "flag": "",
            "provenance": "made up",
        }
    )
    points = points_from_table(frame, key, ENVIRONMENT)
    priors = ENVIRONMENT.priors["extended"]
    theta = np.array([priors[name].median for name in FORMS["extended"].parameters])
    phases = FORMS["extended"].phases(
        theta, Terms(points, Profile(0.2, 16.0, 1.0, "given"), ENVIRONMENT.constants)
    )
    frame["iter_time_s"] = phases.iter_time_s
    frame["forward_s"] = np.where(points.is_model_parallel, 0.0, 0.2 * points.replica_batch_size / 16.0)
    frame["overlap_sync_s"] = np.maximum(phases.compute_s - frame["forward_s"], 1e-4)
    frame["optimize_s"] = phases.optimize_s
    return THROUGHPUT.validate(frame, where="made up")


def chosen(frame, key):
    kept = frame[sampling_design(frame, key)]
    return set(zip(kept["exec_plan"], kept["placement"], strict=True))


@pytest.fixture(scope="module")
def bert():
    families = ("ga", "gc", "zero-dp", "zero-offload")
    return table("bert", [(text, place) for text in families for place in PLACEMENTS])


def test_seven_rows_of_a_full_table(bert):
    assert chosen(bert, "bert") == {
        ("ga", "2"),
        ("ga", "8"),
        ("ga", "2222"),
        ("zero-dp", "44"),
        ("zero-offload", "2"),
        ("zero-offload", "8"),
        ("zero-offload", "2222"),
    }


def test_design_looks_at_neither_times_nor_order(bert):
    shuffled = bert.sample(frac=1.0, random_state=1).assign(iter_time_s=1.0)
    assert chosen(shuffled, "bert") == chosen(bert, "bert")


def test_flagged_and_infeasible_rows_are_not_sampled(bert):
    frame = bert.copy()
    frame.loc[(frame["exec_plan"] == "ga") & (frame["placement"] == "2"), "clean"] = False
    frame.loc[(frame["exec_plan"] == "zero-offload") & (frame["placement"] == "8"), "feasible"] = False
    picked = chosen(frame, "bert")
    assert ("ga", "2") not in picked
    assert ("zero-offload", "8") not in picked
    assert len(picked) == 5


def test_model_parallel_rows_span_depth_and_width():
    rows = [
        ("188", "8" * 8),
        ("182", "88"),
        ("818", "8" * 8),
        ("812", "2" * 8),
        ("441", "4444"),
        ("444", "8" * 8),
    ]
    assert chosen(table("llama7", rows), "llama7") == {
        ("188", "88888888"),
        ("812", "22222222"),
        ("441", "4444"),
    }


def test_a_family_without_its_usual_rows_is_spread_over_what_there_is():
    frame = pd.concat(
        [
            table("llama7_b16", [("zero-offload+gc", place) for place in ("1", "4", "4444")], threads=2),
            table("llama7_b16", [("zero-offload+gc", "1")], threads=4),
        ]
    ).reset_index(drop=True)
    kept = frame[sampling_design(frame, "llama7_b16")]
    assert sorted(zip(kept["placement"], kept["cpu_threads"], strict=True)) == [
        ("1", 2),
        ("1", 4),
        ("4444", 2),
    ]


def test_small_tables_are_sampled_whole():
    frame = table(
        "t5_3B",
        [("tp+ga", "2"), ("tp+ga", "3"), ("tp+ga", "4"), ("zero-offload", "1"), ("zero-offload", "2")],
    )
    assert len(chosen(frame, "t5_3B")) == 5


def test_table_fit_predicts_all_feasible_rows(bert):
    frame = bert.copy()
    frame.loc[4, ["feasible", "iter_time_s"]] = [False, np.nan]
    result = fit_table(frame, "bert", "extended", ENVIRONMENT)
    assert len(result.predicted_s) == len(frame) - 1
    assert result.fitted.sum() == 7
    assert result.error_pct[~result.fitted].max() < 2.0


def test_errors_leave_fitted_rows_out_and_flagged_rows_count_beside(bert):
    frame = bert.copy()
    odd = (frame["exec_plan"] == "gc") & (frame["placement"] == "35")
    frame.loc[odd, ["clean", "flag"]] = [False, "made slow"]
    frame.loc[odd, "iter_time_s"] *= 4.0
    errors = fit_table(frame, "bert", "extended", ENVIRONMENT).errors().set_index("plan_family")
    assert errors.loc["all", "n_fit"] == 7 and errors.loc["GC", "n_fit"] == 0
    assert errors.loc["all", "n_validate"] == len(bert) - 7 - odd.sum()
    assert errors.drop("all")["n_validate"].sum() == errors.loc["all", "n_validate"]
    assert errors.loc["GC", "max_error_pct"] < 5.0
    assert errors.loc["GC", "avg_error_all_rows_pct"] > errors.loc["GC", "avg_error_pct"] + 5.0


def test_a_learner_fits_what_ran_and_stops_when_its_choice_is_known(bert):
    frame = bert.copy()
    frame.loc[4, ["feasible", "iter_time_s"]] = [False, np.nan]
    odd = frame.index[(frame["exec_plan"] == "gc") & (frame["placement"] == "35")][0]
    frame.loc[odd, ["clean", "iter_time_s"]] = [False, 4.0 * frame["iter_time_s"][odd]]
    learner = Learner.from_table(frame, "extended", ENVIRONMENT)
    sampled = [row for row, reason in enumerate(learner.reasons) if reason == "sampled"]
    assert len(sampled) == 7 and learner.fit() is learner.first
    asked = iter([[4, odd], [sampled[0]]])
    assert learner.learn_until_known(lambda fit: next(asked), "tried") == ([sampled[0]], 2)
    # A failed run and a flagged one are known, but they are not fitted.
    assert learner.fit() is learner.first and learner.times_s[4] == 0
    further = next(row for row, reason in enumerate(learner.reasons) if not reason and frame["clean"][row])
    learner.learn([further, sampled[0]], "requested")
    assert (learner.reasons[further], learner.reasons[sampled[0]]) == ("requested", "sampled")
    assert len(learner.fit().measured) == 8


def test_one_sample_a_micro_batch_is_found_where_the_trace_used_it():
    texts = [
        ("188", "8" * 8),
        ("144", "4444"),
        ("441", "4444"),
        ("242", "4444"),
        ("481", "8888"),
        ("244", "8888"),
    ]
    capped = table("llama7_b16", texts, threads=2)
    variants = fit_table(capped, "llama7_b16", "extended", ENVIRONMENT)
    assert variants.fit.points.workload.max_microbatches == workload("llama7_b16").max_microbatches


def test_table_without_usable_rows_is_refused(bert):
    with pytest.raises(FitError, match="no observation"):
        fit_table(bert.assign(clean=False), "bert", "extended", ENVIRONMENT)


def test_infeasible_rows_make_no_points(bert):
    frame = bert.assign(feasible=False)
    with pytest.raises(TraceError, match="expected feasible rows of 'bert'"):
        points_from_table(frame, "bert", ENVIRONMENT)


def test_phases_of_zero_count_as_not_reported(bert):
    measured = measured_from_table(bert.assign(forward_s=0.0))
    assert np.isnan(measured.forward_s).all()


def test_profile_prefers_the_forward_phase_of_plain_data_parallelism(bert):
    points, measured = points_from_table(bert, "bert", ENVIRONMENT), measured_from_table(bert)
    profile = forward_profile(points, measured, 2.0)
    assert (profile.origin, profile.samples) == ("forward phase", 16.0)
    assert profile.time_s == pytest.approx(0.2)


def test_asynchronous_stack_is_profiled_by_growth_with_the_batch():
    frame = table("roberta", [("ga", "2"), ("ga", "8"), ("zero-dp", "44")])
    points, measured = points_from_table(frame, "roberta", ENVIRONMENT), measured_from_table(frame)
    profile = forward_profile(points, measured, 2.0)
    growth = frame["iter_time_s"][0] - frame["iter_time_s"][1]
    assert profile.origin == "growth with the batch"
    assert profile.per_sample_s == pytest.approx(growth / 3.0 / 24.0)


def test_model_parallel_rows_alone_give_a_share_of_an_iteration():
    frame = table("llama30", [("344", "888888"), ("624", "888888")])
    profile = forward_profile(
        points_from_table(frame, "llama30", ENVIRONMENT), measured_from_table(frame), 2.0
    )
    assert profile.origin == "least share of an iteration"
    assert profile.time_s > 0


def test_regret_is_zero_where_the_order_is_right_and_the_loss_where_it_is_wrong(bert):
    right = regret(bert, bert["iter_time_s"].to_numpy())
    assert (right["regret_pct"] == 0).all()
    wrong = regret(bert, -bert["iter_time_s"].to_numpy() + 10.0)
    row = wrong[wrong["placement"] == "8"].iloc[0]
    group = bert[bert["placement"] == "8"]["iter_time_s"]
    assert row["regret_pct"] == pytest.approx(100 * (1 - group.min() / group.max()))


def test_equal_predictions_fall_to_the_plan_that_partitions():
    frame = table("bert", [("ga", "1"), ("zero-dp", "1")])
    picked = regret(frame, np.array([1.0, 1.0]))
    assert picked["chosen_plan"].tolist() == ["zero-dp"]


def test_placements_with_one_clean_plan_have_no_regret(bert):
    frame = bert[bert["exec_plan"] == "ga"]
    assert regret(frame, frame["iter_time_s"].to_numpy()).empty
