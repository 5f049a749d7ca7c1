"""Fig. 9 and the accuracy of elastic schemes: tables, statements that can fail, figures, settings."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from legible_figures import assert_is_legible

from makespan.claims import judge
from makespan.config import load_settings
from makespan.easyscale.job import ElasticJob
from makespan.errors import ConfigError, TraceError
from makespan.papers.easyscale import PAPER, accuracy as fig9_module
from makespan.papers.easyscale.accuracy import STAGES, fig9, fig9_summary, spreads
from makespan.papers.easyscale.figures import fig9 as draw_fig9, gap, gap_curves

ROOT = Path(__file__).parents[2]
LEDGER = PAPER.ledger()
CELLS = {
    name: PAPER.read_published(name, ROOT / f"config/published/easyscale_{name}.csv")
    for name in ("fig9", "gap")
}
TRUTH = {"D0": "=!!", "D1": "==!", "D0+D2": "=!!", "D1+D2": "==="}
PAIR, STEPS, N = ("A", "B"), 2, 4


def run(changed_from=None, column="parameter_sha"):
    """What logical workers have after each mini-batch; from some stage on one column differs."""
    rows = [
        {
            "step": step, "rank": rank, "loss": 2.0 / step + rank,
            "parameter_sha": f"p{step}", "optimizer_sha": f"o{step}", "context_sha": f"c{step}{rank}",
        }
        for step in range(1, STEPS * len(STAGES) + 1)
        for rank in range(N)
    ]  # fmt: skip
    for row in rows:
        if changed_from is not None and row["step"] > changed_from * STEPS:
            row[column] = row[column] + 1e-7 if column == "loss" else "other"
    return pd.DataFrame(rows).sample(frac=1, random_state=1)


def bits(truth=TRUTH, **changes):
    """Tables of runs that follow a truth table, with some columns of a setting changed."""
    found = {
        ("resnet50", level): run(signs.find("!") if "!" in signs else None) for level, signs in truth.items()
    }
    found |= {("resnet50", level): changed for level, changed in changes.items()}
    names = {key: "ddp-heter" if "D2" in key[1] else "ddp-homo" for key in found}
    return fig9(found, {key: (name, run()) for key, name in names.items()}, STEPS)


def verdicts(tables, artifact):
    found = judge(LEDGER, tables, "measured", {})
    return found[found["artifact"] == artifact].reset_index(drop=True)


# --- Fig. 9 -----------------------------------------------------------------------------------------


def test_a_step_is_equal_if_its_loss_and_all_hashes_are():
    table = bits(D1=run(1, "context_sha"), D0=run(2, "loss"))
    equal = table.groupby(["setting", "stage"])["equal"].agg("all")
    assert equal["D1"].tolist() == [True, False, False]
    assert equal["D0"].tolist() == [True, True, False]
    own = table[table["setting"] == "D0"]
    assert own["diff"].iloc[-1] == pytest.approx(1e-7) and (own["diff"].iloc[:4] == 0).all()
    assert own["loss"].iloc[0] == 2.0 + N - 1
    assert [float.fromhex(text) for text in own["loss_hex"]] == own["loss"].tolist()


def test_a_run_and_its_reference_have_the_same_steps():
    short = run()
    with pytest.raises(TraceError, match="has 6 mini-batches, ddp-homo has 5"):
        fig9({("vgg19", "D1"): run()}, {("vgg19", "D1"): ("ddp-homo", short[short["step"] < 6])}, STEPS)


def test_the_summary_has_devices_and_the_paper_beside():
    summary = fig9_summary(bits(), PAIR, CELLS["fig9"]).set_index(["setting", "stage"])
    assert summary.loc[("D1", 2), "devices"] == "A B B"
    assert summary.loc[("D1+D2", 1), "devices"] == "canonical canonical"
    assert summary.loc[("D0", 1), ["steps", "different_steps"]].tolist() == [STEPS, STEPS]
    assert summary.loc[("D1", 2), "published_max_abs_diff"] == 0.03
    assert set(summary["mapping"]) == {"0/1/2/3", "0,1/2,3", "0,1/2/3"}


def test_the_truth_table_is_what_the_statements_ask_for():
    assert verdicts({"fig9": bits()}, "Fig. 9")["verdict"].tolist() == ["holds"] * 4


def test_a_level_that_loses_a_bit_fails():
    for column in ("parameter_sha", "optimizer_sha", "context_sha"):
        found = verdicts({"fig9": bits(**{"D1+D2": run(2, column)})}, "Fig. 9")
        assert found["verdict"].tolist() == ["holds", "holds", "holds", "fails"]
        assert "stage 2: 2 of 2 steps differ" in found["note"].iloc[-1]


def test_a_difference_that_is_expected_and_does_not_come_is_never_passed_over():
    found = verdicts({"fig9": bits(D1=run())}, "Fig. 9")
    assert found["verdict"].tolist() == ["holds", "undecided", "holds", "holds"]
    assert "inconclusive (profiles coincide)" in found["note"].iloc[1]


def test_stock_training_adds_up_as_the_elastic_runs_do(monkeypatch):
    asked = []
    monkeypatch.setattr(fig9_module, "train_stock", lambda jobs, *given, **options: asked.extend(jobs))
    for fold in ("ring", "rank"):
        folder = SimpleNamespace(checkpoint=lambda fold=fold: SimpleNamespace(values={"fold": fold}))
        trainer = SimpleNamespace(job=ElasticJob("resnet50"), folder=folder)
        fig9_module._stock([trainer], 6, "A", launcher=None)
    assert [job.fold for job in asked] == ["ring", "rank"]


def test_a_hooked_reference_is_named():
    table = bits().assign(reference="ddp-homo, hooked")
    assert "reference ddp-homo, hooked" in verdicts({"fig9": table}, "Fig. 9")["note"].iloc[0]


def test_levels_that_did_not_run_are_not_judged():
    table = bits()
    found = verdicts({"fig9": table[table["setting"] == "D1"]}, "Fig. 9")
    assert found["verdict"].tolist() == ["not run", "holds", "not run", "not run"]


def test_the_figure_shows_every_level_and_marks_steps_that_differ():
    table = bits()
    summary = fig9_summary(table, PAIR, CELLS["fig9"])
    figure, _ = draw_fig9({"fig9": table, "fig9_summary": summary}, "measured")
    assert len(figure.axes) == 2
    for axes, levels in zip(figure.axes, (("D1", "D0"), ("D1+D2", "D0+D2")), strict=True):
        drawn = {line.get_label(): line for line in axes.lines}
        for level in levels:
            own = table[table["setting"] == level]
            scaled = drawn[level].get_ydata()
            assert np.array_equal(scaled == 0, (own["diff"] == 0).to_numpy())
        marks = [line for line in axes.lines if line.get_marker() == "|"]
        differing = [int((~table["equal"][table["setting"] == level]).sum()) for level in levels]
        assert [len(line.get_xdata()) for line in marks] == differing
        low, high = axes.get_ylim()
        assert low == -high
    assert_is_legible(figure)


# --- accuracy ---------------------------------------------------------------------------------------


def accuracies(linear=(2.0, 1.0, 0.0), easyscale=(0.0, 0.0, 0.0), seeds=(0.0, 0.5)):
    """Accuracy of schemes with so much added on 1, 2 and 4 devices and for each seed."""
    shifts = {"linear": linear, "adaptive": (0.0, 0.0, 0.0), "easyscale": easyscale}
    rows = [
        {
            "scheme": scheme, "devices": devices, "seed": seed, "batch_size": 16, "learning_rate": 0.1,
            "class": name, "samples": 100, "accuracy_pct": 85.0 + factor * shift + seeds[seed],
            "param_sha": f"{seed} {shift if scheme == 'easyscale' else devices}",
        }
        for scheme, by_devices in shifts.items()
        for devices, shift in zip((1, 2, 4), by_devices, strict=True)
        for seed in range(len(seeds))
        for name, factor in (("all", 1.0), ("0", 3.0), ("1", 0.0))
    ]  # fmt: skip
    return PAPER.schema_of("gap").validate(pd.DataFrame(rows), where="test")


def curves(easyscale=(0.0, 0.0), linear=(0.0, 0.3), order=1.0, bits=True):
    """Loss curves over two epochs; the learning rate decays before the second."""
    rows = [
        {
            "scheme": scheme, "devices": devices, "gamma": gamma, "epoch": epoch,
            "learning_rate": 0.1 * (gamma if epoch == 2 else 1.0),
            "loss": 1.0 / epoch + by_devices[place] + (order * gamma if epoch == 2 else 0.0),
            "param_sha": f"{epoch}" + (f" {gamma}" if epoch == 2 or not bits else ""),
        }
        for scheme, by_devices in (("easyscale", easyscale), ("linear", linear))
        for place, devices in enumerate((1, 2))
        for gamma in (0.1, 0.3, 0.5)
        for epoch in (1, 2)
    ]  # fmt: skip
    return PAPER.schema_of("gap_curves").validate(pd.DataFrame(rows), where="test")


def accuracy_verdicts(gap, losses):
    tables = {"gap": gap, "gap_spread": spreads(gap, CELLS["gap"]), "gap_curves": losses}
    return verdicts(tables, "Accuracy")["verdict"].tolist()


def test_spreads_are_those_over_devices_and_over_seeds():
    table = spreads(accuracies(), CELLS["gap"]).set_index(["scheme", "class"])
    assert table.loc[("linear", "all"), ["spread_pct", "seed_spread_pct"]].tolist() == [2.0, 0.5]
    assert table.loc[("linear", "worst"), "spread_pct"] == table.loc[("linear", "0"), "spread_pct"] == 6.0
    assert table.loc[("easyscale", "worst"), "spread_pct"] == 0
    assert table["published_spread_pct"].dropna().tolist() == [0.6, 2.8, 7.4, 17.3]


def test_statements_about_accuracy_hold_where_the_tables_say_so():
    assert accuracy_verdicts(accuracies(), curves()) == ["holds"] * 5


@pytest.mark.parametrize(
    ("gap", "losses", "expected"),
    [
        ({"easyscale": (0.0, 0.1, 0.0)}, {}, ["fails", "holds", "holds", "holds", "holds"]),
        ({"linear": (0.2, 0.1, 0.0)}, {}, ["holds", "undecided", "holds", "holds", "holds"]),
        ({"linear": (0.0, 0.0, 0.0)}, {}, ["holds", "fails", "fails", "holds", "holds"]),
        ({}, {"bits": False}, ["holds", "holds", "holds", "fails", "holds"]),
        ({}, {"order": -1.0}, ["holds", "holds", "holds", "fails", "holds"]),
        ({}, {"linear": (0.0, 0.1)}, ["holds", "holds", "holds", "holds", "fails"]),
    ],
)
def test_statements_about_accuracy_fail_where_the_tables_say_so(gap, losses, expected):
    assert accuracy_verdicts(accuracies(**gap), curves(**losses)) == expected


def test_equal_accuracies_with_other_bits_are_not_the_same():
    table = accuracies()
    table.loc[(table["scheme"] == "easyscale") & (table["devices"] == 2), "param_sha"] = "other"
    assert accuracy_verdicts(table, curves())[0] == "fails"


def test_schemes_that_did_not_run_are_not_judged():
    table, losses = accuracies(), curves()
    table, losses = table[table["scheme"] == "adaptive"], losses[losses["gamma"] == 0.1]
    found = accuracy_verdicts(table, losses)
    assert found == ["not run"] * 5


def test_the_figures_of_accuracy_show_every_scheme():
    table = accuracies()
    figure, _ = gap({"gap": table, "gap_spread": spreads(table, CELLS["gap"])}, "measured")
    left, right = figure.axes
    means = [
        line.get_ydata() for line in left.lines if len(line.get_xdata()) == 3 and line.get_ls() != "None"
    ]
    expected = (
        table[table["class"] == "all"].groupby(["scheme", "devices"], sort=False)["accuracy_pct"].mean()
    )
    assert [list(values) for values in means] == [
        expected[name].tolist() for name in ("linear", "adaptive", "easyscale")
    ]
    assert len(right.patches) == 3 * 3
    assert_is_legible(figure)
    figure, _ = gap_curves({"gap_curves": curves()}, "measured")
    assert [len([line for line in axes.lines if line.get_marker() == "."]) for axes in figure.axes] == [6, 6]
    assert "the same for all" in figure.axes[1].get_title() + figure.axes[0].get_title()
    assert_is_legible(figure)


def test_right_answers_are_counted_by_class_and_in_evaluation_mode():
    torch = pytest.importorskip("torch")
    from makespan.easyscale.scoring_worker import count_right

    scores = torch.eye(3)[[0, 0, 1, 2, 2]]
    batches = [(scores[:3], torch.tensor([0, 1, 1])), (scores[3:], torch.tensor([2, 2]))]
    hides_all_but_in_evaluation = torch.nn.Dropout(1.0)
    assert count_right(hides_all_but_in_evaluation, batches, 4) == [1, 1, 2, 0]


# --- settings ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("fig9: {samples: 320}", "stages that end amid epochs"),
        ("fig9: {models: [alexnet]}", "one of shufflenetv2"),
        ("gap: {samples: 500}", "whole mini-batches of 64"),
        ("gap: {devices: [1, 3]}", "divide logical_workers, 4"),
        ("gap: {epochs: 9}", "decays once"),
        ("gap: {width: 7}", "a multiple of 8"),
        ("gap: {model: bert}", "one of shufflenetv2, resnet50"),
    ],
)
def test_settings_that_cannot_work_are_refused(tmp_path, change, message):
    path = tmp_path / "mine.yaml"
    path.write_text(f"easyscale:\n  {change}\n")
    with pytest.raises(ConfigError, match=message):
        load_settings([path], ROOT)


def test_the_protocol_is_that_of_the_paper_where_it_says_so():
    settings = load_settings([], ROOT).easyscale
    assert settings.fig9.models == ("resnet50", "vgg19")
    assert settings.gap.devices == (1, 2, 4) and len(settings.gap.seeds) == 3
    assert settings.gap.held_out_samples >= 2000
    full = load_settings([ROOT / "config/easyscale-full.yaml"], ROOT).easyscale
    assert (full.fig9.steps_per_stage, full.fig9.micro_batch_size, full.fig9.loaders) == (100, 64, 4)
    assert full.gap.decay_epoch == 20
