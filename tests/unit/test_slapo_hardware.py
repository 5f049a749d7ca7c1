"""The small model of the paper's machine: counts, laws, fit, frozen constants, and Figs 7 to 9."""

import itertools
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from makespan.claims import judge
from makespan.errors import FitError, InputError
from makespan.files import read_preset
from makespan.papers.experiment import Given
from makespan.papers.slapo import PAPER
from makespan.papers.slapo.figures import inside_a_node, on_clusters, predicted_grid, steps_of_an_ablation
from makespan.papers.slapo.performance import (
    FITTED,
    UNFITTED,
    Run,
    constants,
    fit_grid,
    grid_run,
    grid_spec,
    model_costs,
    on_grid_machine,
    predictions,
    simulate,
)
from makespan.papers.slapo.throughput import CONCLUSIONS, Inequalities, Modelled
from makespan.papers.slapo.tuning import Tuning
from makespan.training.zoo import family_spec, forward_flop, parameter_count

pytestmark = pytest.mark.xdist_group("machine of the paper")

ROOT = Path(__file__).parents[2]
C = constants()
SIZES = [
    ("bert", "1b"), ("roberta", "1.3b"), ("gpt", "2.9b"), ("opt", "2.7b"), ("opt", "350m"), ("t5", "2.9b"),
    ("llama", "7b"), ("gpt", "10b"), ("wideresnet", "2.4b"),
]  # fmt: skip
LEDGER = PAPER.ledger()
(GRID,) = Tuning.cells
ONE = Run("slapo-tp", 8, 32, 0.0, tp=8)


@pytest.fixture(scope="module")
def printed():
    return {
        name: PAPER.read_published(name, ROOT / f"config/published/slapo_{name}.csv")
        for name in (*Inequalities.cells, "limits")
    }


@pytest.fixture(scope="module")
def tables(printed):
    given = Given("published", cells=printed)
    return Modelled().run(given) | Inequalities().run(given)


def throughput(run, c=C, key=("bert", "1b")):
    return run.global_batch_size / simulate(family_spec(*key), run, c).iter_time_s


# --- counts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", SIZES, ids=" ".join)
def test_counts_are_those_of_the_zoo(key):
    spec = family_spec(*key)
    costs = model_costs(spec)
    assert costs.parameters == parameter_count(spec)
    assert costs.forward_flop == forward_flop(spec)


def test_kept_activations_follow_the_closed_form():
    """34 s h + 5 a s^2 bytes a layer and sample where the feed-forward part is four times as wide."""
    spec = family_spec("bert", "large")
    costs, s, h = model_costs(spec), spec.seq, spec.hidden
    kept = costs.kept_split_bytes + costs.kept_whole_bytes
    assert kept == spec.n_layers * 34 * s * h
    assert costs.scores * costs.kept_score_bytes == spec.n_layers * 5 * spec.heads * s**2
    narrow = model_costs(family_spec("bert", "1b"))
    assert narrow.kept_split_bytes / 8 + narrow.kept_whole_bytes == 24 * 12 * 512 * 2048


# --- laws -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["slapo-tp", "slapo-zero3", "megatron", "deepspeed"])
def test_memory_grows_with_the_batch_and_falls_with_recomputation(implementation):
    tp = 8 if implementation in ("slapo-tp", "megatron") else 1
    spec = family_spec("gpt", "2.9b")
    sizes = [
        [
            simulate(spec, Run(implementation, 8, batch, ratio, tp=tp), C).needed_bytes
            for ratio in (0, 0.25, 0.5, 1)
        ]
        for batch in (8, 16, 64)
    ]
    assert all(
        one < other for one, other in itertools.pairwise(sizes) for one, other in zip(one, other, strict=True)
    )
    assert all(row[3] < row[2] < row[1] for row in sizes)


def test_nothing_is_faster_than_its_matrix_products_at_the_peak():
    for key in SIZES:
        run = Run("slapo-zero3", 8, 64, 0.0)
        limit = 8 * C.peak_flop_per_s / (3 * forward_flop(family_spec(*key)))
        assert throughput(run, key=key) < limit


@pytest.mark.parametrize(
    ("name", "run"),
    [
        ("ring_bandwidth_bytes_per_s", ONE),
        ("memory_bandwidth_bytes_per_s", ONE),
        ("peak_flop_per_s", ONE),
        ("network_bandwidth_bytes_per_s", Run("deepspeed", 16, 64, 0.0)),
        ("zero_overlap", Run("deepspeed", 8, 64, 0.0)),
    ],
)
def test_more_of_a_resource_is_faster(name, run):
    assert throughput(run, replace(C, **{name: 1.5 * getattr(C, name)})) > throughput(run)


def test_fused_kernels_and_attention_are_faster_and_smaller():
    eager, fused = (Run(name, 1, 8, 0.0) for name in ("eager", "slapo-kernels"))
    assert throughput(fused) > throughput(eager)
    small, large = (simulate(family_spec("bert", "1b"), run, C).needed_bytes for run in (fused, eager))
    assert small < large


def test_a_pipeline_waits_for_its_first_and_last_micro_batch():
    def step(m):
        run = Run("megatron", 16, 16 * m, 0.0, tp=8, pp=2, n_microbatches=m)
        return simulate(family_spec("gpt", "10b"), run, C).times_s["compute"] / m

    assert step(1) / step(1000) == pytest.approx(2.0, rel=2e-3)


def test_runs_that_do_not_divide_are_refused():
    with pytest.raises(InputError, match="run of megatron on 8 GPUs: batch 9, tp 4"):
        Run("megatron", 8, 9, 0.0, tp=4)


# --- fit --------------------------------------------------------------------------------------------


def test_the_frozen_constants_are_those_of_the_fit(printed):
    found = fit_grid(printed[GRID], C)
    assert {name: getattr(found, name) for name in FITTED} == pytest.approx(
        {name: getattr(C, name) for name in FITTED}, rel=1e-9
    )


def test_every_unfitted_constant_has_a_source():
    preset = read_preset("makespan.papers.slapo", "hardware")
    assert set(preset["unfitted"]) == set(UNFITTED) and set(preset["fitted"]) == set(FITTED)
    assert all(one["source"] for one in preset["unfitted"].values())


def test_the_fit_recovers_constants_from_a_grid_that_they_made(printed):
    true = replace(C, zero_layer_s=0.02, best_efficiency=0.5, recomputed_share=1.3, usable_share=0.8)
    cells = printed[GRID].copy()
    steps = [
        simulate(grid_spec(), grid_run(int(batch), ratio), on_grid_machine(true))
        for batch, ratio in zip(cells["global_batch_size"], cells["ckpt_ratio"], strict=True)
    ]
    cells["published_samples_per_s"] = [step.throughput_samples_per_s for step in steps]
    found = fit_grid(cells, C)
    for name in ("zero_layer_s", "best_efficiency", "recomputed_share"):
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=1e-6), name
    again = [
        simulate(grid_spec(), grid_run(int(batch), ratio), on_grid_machine(found)).fits
        for batch, ratio in zip(cells["global_batch_size"], cells["ckpt_ratio"], strict=True)
    ]
    assert again == [step.fits for step in steps]


def test_the_acceptance_bounds_of_the_fit(printed):
    rows = pd.DataFrame(predictions(printed[GRID], C))
    for protocol, mean, largest in (("in sample", 0.015, 0.04), ("one batch size left out", 0.025, 0.07)):
        own = rows[rows["protocol"] == protocol]
        assert len(own) == 91
        assert (own["is_feasible"] == own["published_is_feasible"]).sum() >= 88
        assert own["relative_error"].mean() <= mean and own["relative_error"].max() <= largest


def test_a_grid_that_decides_nothing_is_refused(printed):
    cells = printed[GRID]
    full = cells[cells["published_samples_per_s"].notna()]
    with pytest.raises(FitError, match="found 63 of 63 points that fit"):
        fit_grid(full, C)
    with pytest.raises(FitError, match="expected cells that determine three positive times"):
        fit_grid(cells[(cells["global_batch_size"] == 112) | cells["published_samples_per_s"].isna()], C)


# --- figures ----------------------------------------------------------------------------------------


def test_statements_hold_or_fail_as_they_are_marked(printed, tables):
    judged_on = {
        "published": {**tables, "limits_published": printed["limits"]},
        "emulated": {
            **Modelled().run(Given("emulated", cells=printed)),
            "limits_published": printed["limits"],
        },
    }
    for source, found in judged_on.items():
        judged = judge(LEDGER, found, source, {})
        own = judged[
            judged["artifact"].isin(["Fig. 7", "Fig. 8", "Fig. 9"]) & (judged["verdict"] != "not run")
        ]
        marked = (
            LEDGER.statements()
            .loc[own.index, "fails_on"]
            .map(lambda names, source=source: source in names.split())
        )
        assert ((own["verdict"] == "fails") == marked).all(), own[(own["verdict"] == "fails") != marked]
        assert len(own) >= 12


@pytest.mark.parametrize("name", sorted(CONCLUSIONS))
def test_every_conclusion_can_fail(tables, name):
    table, judge_one = CONCLUSIONS[name]
    rows = tables[table].copy()
    if judge_one(rows) is None:
        pytest.skip("another source decides it")
    own = judge_one(rows)[1]
    assert any(judge_one(broken)[1] != own for broken in broken_tables(rows))


def broken_tables(rows):
    """Yield the table with a number of all rows, of one system, size or step, or of one bar far off."""
    keys = [key for key in ("implementation", "n_gpus", "step") if key in rows]
    parts = [rows[list(some)].drop_duplicates() for n in (1, 2) for some in itertools.combinations(keys, n)]
    chosen = [
        (rows[part.columns] == list(one)).all(axis=1)
        for part in parts
        for one in part.itertuples(index=False)
    ]
    for column in ("throughput_samples_per_s", "largest_global_batch_size", "gpu_memory_ratio", "speedup"):
        if column in rows:
            for factor, where in itertools.product((1e-3, 1e3), [pd.Series(True, rows.index), *chosen]):
                yield rows.assign(**{column: rows[column].where(~where, rows[column] * factor)})


def test_every_constant_is_halved_and_doubled(tables):
    rows = tables["inequalities"]
    assert set(rows["constant"]) == {"", *UNFITTED}
    assert set(rows["factor"]) == {0.5, 1.0, 2.0}
    per = rows.groupby(["constant", "factor"])["inequality"].nunique()
    assert per.nunique() == 1 and len(per) == 1 + 2 * len(UNFITTED)


def test_tuned_settings_fit_and_are_at_least_as_fast_as_printed_ones_that_do(tables):
    keys = ["model", "n_gpus", "implementation"]
    wide = tables["fig7"].set_index([*keys, "kind"])
    tuned, published = (wide.xs(kind, level="kind") for kind in ("tuned", "published"))
    assert tuned["is_feasible"].all()
    fair = published[published["is_feasible"]]
    ratios = tuned["throughput_samples_per_s"].reindex(fair.index) / fair["throughput_samples_per_s"]
    assert (ratios > 0.99).all()  # the candidates are not the printed batch sizes


def test_the_emulator_leaves_out_what_it_does_not_know(printed):
    found = Modelled().run(Given("emulated", cells=printed))
    assert set(found["fig7"]["oracle"]) == {"emulator"}
    assert "WideResNet-2.4B" not in set(found["fig7"]["model"])
    assert found["fig7"]["largest_global_batch_size"].isna().all()


def test_figures_show_the_rows_of_their_tables(tables):
    figure, shown = inside_a_node({"fig7": tables["fig7"]}, "published")
    assert set(shown["kind"]) == {"published", "tuned"}
    assert [axes.get_title() for axes in figure.axes] == list(dict.fromkeys(tables["fig7"]["model"]))
    assert [axes.get_title() for axes in on_clusters({"fig8": tables["fig8"]}, "published")[0].axes] == [
        "GPT-10B",
        "LLaMA-7B",
    ]
    (axes,) = steps_of_an_ablation({"fig9": tables["fig9"]}, "published")[0].axes
    assert len(axes.patches) == 4


def test_the_figure_of_the_fit_shows_both_protocols(printed):
    rows = pd.DataFrame(predictions(printed[GRID], C))
    figure, shown = predicted_grid({"cells": rows}, "published")
    titles = [axes.get_title() for axes in figure.axes[:2]]
    assert titles == ["in sample", "one batch size left out"] and len(shown) == 182
