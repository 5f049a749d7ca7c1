"""Fig. 9: from losses to distances, the statement about them, the paper's curves and the figure."""

import numpy as np
import pandas as pd
import pytest

from makespan.claims import judge
from makespan.config import load_settings
from makespan.errors import ConfigError, TraceError
from makespan.papers.morphling import PAPER
from makespan.papers.morphling.accuracy import OTHER_SEED, SWITCHING, losses_compared, losses_summary
from makespan.papers.morphling.figures import plot_accuracy

LEDGER = PAPER.ledger()
LOSSES = {
    "one": [2.0, 1.0, 0.5],
    "TP": [2.0, 1.00001, 0.5],
    OTHER_SEED: [2.2, 1.1, 0.5],
    SWITCHING: [2.0, 1.0, 0.50002],
}


@pytest.fixture
def published(root):
    return PAPER.read_published("fig9", root / "config/published/morphling_fig9.csv")


def costs():
    return pd.DataFrame({"run": list(LOSSES), "restarts": [0, 0, 0, 2], "restart_s": np.nan, "step_s": 0.1})


def verdict(losses):
    claims = judge(LEDGER, {"fig9": losses_compared(losses)}, "measured", {"form": "extended"})
    row = claims[claims["artifact"] == "Fig. 9"].iloc[0]
    return row["verdict"], row["reproduced"], row["note"]


def test_distances_are_those_to_the_first_run():
    table = losses_compared(LOSSES)
    assert list(table["run"].unique()) == list(LOSSES)
    assert table.groupby("run")["abs_difference"].max()["one"] == 0
    worst = table.set_index(["run", "step"])["abs_difference"]
    assert worst["TP", 1] == pytest.approx(1e-5)
    assert worst[OTHER_SEED, 0] == pytest.approx(0.2)


def test_runs_of_different_length_are_refused():
    with pytest.raises(TraceError, match="run 'TP' has 2 steps, run 'one' has 3"):
        losses_compared({"one": [1, 2, 3], "TP": [1, 2]})


def test_the_statement_holds_below_a_tenth_of_the_other_seed():
    state, reproduced, note = verdict(LOSSES)
    assert (state, reproduced) == ("holds", "2e-05, other seed 0.1")
    assert "2 plans" in note
    assert "largest in run 'switching'" in note
    assert verdict({**LOSSES, "TP": [2.0, 1.0, 0.511]})[0] == "fails"
    assert verdict({**LOSSES, SWITCHING: [2.0, 1.0, 0.511]})[0] == "fails"


def test_the_statement_needs_both_runs():
    assert verdict({name: LOSSES[name] for name in ("one", "TP", OTHER_SEED)})[0] == "not run"


def test_the_summary_has_the_paper_below(published):
    summary = losses_summary(losses_compared(LOSSES), costs(), published)
    assert list(summary["kind"])[:4] == ["reference", "plan", OTHER_SEED, SWITCHING]
    own, paper = summary.iloc[2], summary.iloc[-1]
    assert own["mean_abs_difference"] == pytest.approx(0.1)
    assert (paper["run"], paper["kind"]) == ("Morphling other seed", "published other seed")


def test_the_printed_cells_are_those_of_the_published_curves(published, published_dir):
    curves = pd.read_csv(published_dir / "morphling" / "loss" / "llama2-7b.csv")
    windows = curves.groupby(np.arange(len(curves)) // 25).mean()  # as the paper plots them
    columns = {"PP2/TP4": "pp2_tp4", "PP8/TP1": "pp8_tp1", "PP4/TP2": "pp4_tp2"}
    cells = published.set_index("run")
    for run, column in (columns | {OTHER_SEED: "dp1_tp8_pp1_other_seed"}).items():
        distance = (windows[column] - windows["dp1_tp8_pp1"]).abs()
        assert round(distance.mean(), 3) == cells.loc[run, "mean_abs_difference"]
        assert round(distance.max(), 3) == cells.loc[run, "max_abs_difference"]


def test_the_figure_shows_every_run_and_the_limit(published):
    table = losses_compared(LOSSES)
    figure = plot_accuracy(table, losses_summary(table, costs(), published), 0.1, "measured")
    left, right = figure.axes
    assert [line.get_label() for line in left.lines] == list(LOSSES)
    level = [line for line in right.lines if line.get_linestyle() == "--" and len(set(line.get_ydata())) == 1]
    assert level[-1].get_ydata()[0] == pytest.approx(0.01)
    assert right.get_yscale() == "log"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("switches: [{step: 100, name: GA}]", "growing steps below 100"),
        ("switches: [{step: 5, name: nobody}]", "not there: nobody"),
        ("other_seed: 0", "differs from seed"),
        ("global_batch_size: 6", "batch identity broken"),
        ("model: {kv_heads: 1}", "tp=2 does not divide kv_heads=1"),
    ],
)
def test_settings_that_cannot_work_are_refused(root, tmp_path, change, message):
    path = tmp_path / "mine.yaml"
    path.write_text(f"morphling:\n  fig9:\n    {change}\n")
    with pytest.raises(ConfigError, match=message):
        load_settings([path], root)


def test_the_default_has_what_the_experiment_is_about(root):
    chosen = load_settings(root=root).morphling.fig9
    plans = [plan.plan(chosen.global_batch_size) for plan in chosen.plans]
    assert len(plans) >= 7
    assert any(plan.tp > 1 and plan.pp > 1 for plan in plans)
    assert any(plan.zero_stage == 3 for plan in plans)
    assert any(plan.grad_accum_steps > 1 and plan.n_gpus == 1 for plan in plans)
    assert any(plan.activation_checkpointing for plan in plans)
    assert len(chosen.switches) >= 3
    assert max(plan.n_gpus for plan in plans) <= 4
