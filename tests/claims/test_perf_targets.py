"""Accuracy of both forms on the published traces, on rows that were not fitted.

The flags of the rows come from measured columns alone and exist before anything is fitted.
"""

import numpy as np
import pandas as pd
import pytest

from makespan.perf import (
    fit_table,
    load_environment,
    measured_from_table,
    points_from_table,
    regret,
)
from makespan.throughput import PublishedSource

pytestmark = pytest.mark.xdist_group("fits to published rows")

MODELS = ("vit", "roberta", "bert", "t5", "gpt2", "llama7", "llama30")
ENVIRONMENT = load_environment("a800-64")


@pytest.fixture(scope="module")
def tables(published_dir):
    source = PublishedSource(published_dir, default_cpu_threads=12)
    return {key: source.load(key) for key in source.workload_keys()}


@pytest.fixture(scope="module")
def fits(tables):
    return {
        form: {key: fit_table(tables[key], key, form, ENVIRONMENT) for key in tables}
        for form in ("published", "extended")
    }


def held_out_errors(results, models, clean_only=True):
    parts = []
    for key in models:
        result = results[key]
        kept = ~result.fitted & (result.frame["clean"].to_numpy(dtype=bool) | (not clean_only))
        parts.append(result.error_pct[kept])
    return np.concatenate(parts)


def regrets(results, models):
    return pd.concat([regret(results[key].frame, results[key].predicted_s) for key in models])


def test_counts_of_rows(tables):
    """539 rows, of which four failed and six are of a model whose configuration is unclear."""
    sizes = {key: len(frame) for key, frame in tables.items()}
    assert sum(sizes.values()) == 539
    flags = pd.concat(tables.values())["flag"].value_counts().to_dict()
    assert flags == {
        "": 455,
        "slow forward on odd placements": 77,
        "failed run": 4,
        "half batch on one GPU": 3,
    }
    assert flags[""] - sizes["t5_3B"] == 449


def test_at_most_seven_and_three_rows_are_sampled(fits):
    for result in fits["extended"].values():
        parallel = result.fit.points.is_model_parallel
        assert (~parallel).sum() <= 7
        assert parallel.sum() <= 3


def test_most_rows_are_held_out_and_every_limit_has_a_best_plan(fits):
    assert len(held_out_errors(fits["extended"], [key for key in MODELS if key != "vit"])) > 330
    assert len(regrets(fits["extended"], MODELS)) == 93


def test_extended_form_with_vit_and_with_flagged_rows_is_reported_too(fits):
    assert held_out_errors(fits["extended"], MODELS).mean() <= 4.0
    assert held_out_errors(fits["extended"], ["vit"]).max() <= 30.6
    everything = held_out_errors(fits["extended"], [key for key in MODELS if key != "vit"], clean_only=False)
    assert everything.mean() <= 5.0


def test_extended_form_beats_the_published_one(fits):
    models = [key for key in MODELS if key != "vit"]
    errors = {form: held_out_errors(results, models).mean() for form, results in fits.items()}
    assert errors["extended"] < 0.5 * errors["published"]
    lost = {form: regrets(results, MODELS)["regret_pct"].mean() for form, results in fits.items()}
    assert lost["extended"] < 0.5 * lost["published"]


def test_shrinking_limits_of_the_7b_model_are_ranked_right(fits):
    for placement, best in [("8888", "244"), ("4444", "441"), ("4", "221"), ("1", "zero-offload+gc")]:
        result = fits["extended"]["llama7_b16"]
        rows = result.frame.assign(predicted_s=result.predicted_s)
        rows = rows[rows["placement"] == placement]
        for _, group in rows.groupby("cpu_threads"):
            assert group.loc[group["predicted_s"].idxmin(), "exec_plan"] == best


def test_twice_the_threads_speed_up_the_one_gpu_stage(fits):
    result = fits["extended"]["llama7_b16"]
    rows = result.frame.assign(predicted_s=result.predicted_s)
    rows = rows[rows["placement"] == "1"].set_index("cpu_threads")["predicted_s"]
    assert rows[2] > 1.2 * rows[4]


def test_adding_observations_does_not_harm(fits):
    """Refit with the clean rows of one more family: its own error falls."""
    result = fits["extended"]["gpt2"]
    rows = np.flatnonzero((result.frame["exec_plan"] == "gc").to_numpy() & ~result.fitted)[:4]
    points = points_from_table(result.frame, "gpt2", ENVIRONMENT)
    measured = measured_from_table(result.frame)
    updated = result.fit.refit(points.take(rows), measured.take(rows))
    before = np.abs(np.log(result.predicted_s[rows] / measured.iter_time_s[rows])).mean()
    after = np.abs(np.log(updated.predict(points.take(rows)) / measured.iter_time_s[rows])).mean()
    assert after <= before
