"""Accuracy of both forms on the published traces, on rows that were not fitted.

The flags of the rows come from measured columns alone and exist before anything is fitted.
"""

import importlib.util
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from pages import ROOT, table_rows

from makespan.files import read_preset
from makespan.perf import (
    fit_table,
    load_environment,
    measured_from_table,
    points_from_table,
    regret,
)
from makespan.throughput import PublishedSource
from makespan.workloads import workload

pytestmark = pytest.mark.xdist_group("fits to published rows")

MODELS = ("vit", "roberta", "bert", "t5", "gpt2", "llama7", "llama30")
ENVIRONMENT = load_environment("a800-64")
PAGE = ROOT / "docs" / "background" / "performance-model.md"


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


@pytest.fixture(scope="module")
def unseen(tables):
    """The extended form with constants that have not seen the model."""
    environments = {key: ENVIRONMENT.unseen_by(workload(key).model.key) for key in tables}
    return {key: fit_table(frame, key, "extended", environments[key]) for key, frame in tables.items()}


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


def test_extended_form_reaches_its_goals_with_the_constants_as_shipped(fits):
    models = [key for key in MODELS if key != "vit"]
    errors, lost = held_out_errors(fits["extended"], models), regrets(fits["extended"], MODELS)["regret_pct"]
    assert errors.mean() <= 3.5 and np.quantile(errors, 0.95) <= 10.0 and errors.max() <= 16.0
    assert lost.mean() <= 0.4 and lost.max() <= 5.5


def test_extended_form_with_constants_that_have_not_seen_the_model(unseen):
    """The largest error and both regrets miss the goals of the constants as shipped by a little."""
    models = [key for key in MODELS if key != "vit"]
    errors, lost = held_out_errors(unseen, models), regrets(unseen, MODELS)["regret_pct"]
    assert errors.mean() <= 3.5 and np.quantile(errors, 0.95) <= 10.0
    assert 16.0 < errors.max() <= 17.0
    assert 0.4 < lost.mean() <= 0.45 and 5.5 < lost.max() <= 6.5


def test_constants_that_were_chosen_with_rows_in_view_say_so_and_are_fitted_without_each_model():
    entry = read_preset("makespan.perf", "environments")["a800-64"]
    in_view = {name for name, one in entry["constants"].items() if "in view" in one["source"]}
    centres = {"k_bwd", "k_sync", "k_zero", "k_off", "k_const"}
    assert set(ENVIRONMENT.neutral) == in_view | centres
    assert set(ENVIRONMENT.without) == {workload(key).model.key for key in MODELS}
    assert all(set(values) == set(ENVIRONMENT.neutral) for values in ENVIRONMENT.without.values())


def test_the_shipped_fits_without_a_model_are_those_to_the_rows_of_the_others(published_dir):
    script = ROOT / "scripts" / "unseen_constants.py"
    spec = importlib.util.spec_from_file_location("unseen_constants", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    fits, without = module.fits_of(published_dir, ENVIRONMENT), module.without
    again = without("llama-30b", fits, ENVIRONMENT)
    assert again == pytest.approx(dict(ENVIRONMENT.without["llama-30b"]), rel=2e-2)
    own = fits.pop("llama30")
    slower = own.frame.assign(iter_time_s=3.0 * own.frame["iter_time_s"])
    changed = fits | {"llama30": replace(own, frame=slower)}
    assert without("llama-30b", changed, ENVIRONMENT) == again


def test_the_jump_of_t5_3b_on_the_page_is_in_the_published_file(tables):
    """3.8 times as fast on three GPUs as on two under tensor parallelism, where offload is 8 % faster."""
    times = tables["t5_3B"].set_index(["exec_plan", "placement"])["iter_time_s"]
    assert times["tp+ga", "2"] / times["tp+ga", "3"] == pytest.approx(3.8, abs=0.05)
    assert 100.0 * (1.0 - times["zero-offload", "2"] / times["tp+ga", "2"]) == pytest.approx(8.0, abs=0.5)


def row_of(values):
    return [f"{value:.1f}" for value in values]


def test_the_page_has_these_errors_by_model(fits, unseen):
    rows = []
    for key in [*MODELS, "llama7_b16"]:
        own, shipped = (held_out_errors(results, [key]) for results in (unseen, fits["extended"]))
        numbers = (own.mean(), np.quantile(own, 0.95), own.max(), shipped.mean(), shipped.max())
        flagged = held_out_errors(unseen, [key], clean_only=False).mean()
        rows.append([key, str(unseen[key].fitted.sum()), str(len(own)), *row_of((*numbers, flagged))])
    assert table_rows(PAGE, "errors") == rows


def test_the_page_has_these_errors_by_constants(tables, fits, unseen):
    nothing = ENVIRONMENT.with_shared({name: prior.median for name, prior in ENVIRONMENT.neutral.items()})
    bare = {key: fit_table(tables[key], key, "extended", nothing) for key in MODELS}
    cases = {
        "`extended`, fitted without the model": unseen,
        "`extended`, as shipped": fits["extended"],
        "`extended`, known without any row": bare,
        "`published`, as shipped": fits["published"],
    }
    rows = []
    for name, results in cases.items():
        errors = held_out_errors(results, [key for key in MODELS if key != "vit"])
        lost = regrets(results, MODELS)
        found = 100.0 * (lost["best_plan"] == lost["chosen_plan"]).mean()
        numbers = row_of((errors.mean(), np.quantile(errors, 0.95), errors.max()))
        losses = [f"{lost['regret_pct'].mean():.3f}", f"{lost['regret_pct'].max():.1f}"]
        rows.append([name, *numbers, f"{found:.0f}", *losses])
    assert table_rows(PAGE, "constants") == rows


def test_the_page_has_the_constants_that_were_chosen():
    priors = ENVIRONMENT.priors["extended"]
    rows = []
    for name, neutral in ENVIRONMENT.neutral.items():
        centre = priors[name].median if name in priors else getattr(ENVIRONMENT.constants, name)
        fitted = [values[name] for values in ENVIRONMENT.without.values()]
        numbers = (neutral.median, centre, min(fitted), max(fitted))
        rows.append([f"`{name}`", neutral.unit, *(f"{value:.3g}" for value in numbers)])
    assert table_rows(PAGE, "chosen") == rows
