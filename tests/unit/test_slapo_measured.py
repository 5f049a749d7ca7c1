"""What is counted and measured of schedules: tables of small runs, checks and figures of them."""

import pandas as pd
import pytest
from forked import forking_servers
from ledgers import finding
from legible_figures import assert_is_legible

from makespan.claims import Claim
from makespan.papers.experiment import Given
from makespan.papers.slapo import PAPER, figures as draw
from makespan.papers.slapo.measured import Fig9Steps, TunerRun
from makespan.papers.slapo.table4 import Table4

STEPS = ("vanilla", "kernels", "layers", "embedding")
MIB = 1 << 20
SAME_RESULTS = "every step of a schedule computes what"


@pytest.fixture(scope="module")
def table4(root):
    cells = PAPER.read_published("table4", root / "config" / "published" / "slapo_table4.csv")
    return Table4().run(Given("measured", cells={"table4": cells}))["table4"]


@pytest.fixture
def fig9():
    rows = [
        {
            "oracle": "measured", "step": step, "n_gpus": number, "global_batch_size": 8,
            "throughput_samples_per_s": 50.0 - number, "speedup": (50.0 - number) / 49.0,
            "gpu_memory_ratio": None, "largest_global_batch_size": None,
            "throughput_iqr_samples_per_s": 4.0,
            "compiler": "" if step == "vanilla" else "dynamo", "saved_bytes": (30 - place - number) * MIB,
            "parameter_bytes": 8 * MIB // number, "output_error": 0.0, "gradient_error": 1e-6 * place,
        }
        for place, step in enumerate(STEPS)
        for number in ((1,) if place < 2 else (1, 2, 4))
    ]  # fmt: skip
    return PAPER.schema_of("fig9").validate(pd.DataFrame(rows), where="test")


@pytest.fixture
def tuner():
    def row(strategy, order, batch, ratio):
        is_full = batch * (1 - ratio) > 8
        return {
            "oracle": "measured", "strategy": strategy, "explored_order": order, "global_batch_size": batch,
            "ckpt_ratio": ratio, "status": "oom" if is_full else "ok", "budget_bytes": 8.0 * MIB,
            "throughput_samples_per_s": None if is_full else batch * (2 - ratio),
            "saved_bytes": None if is_full else batch * (1 - ratio) * MIB,
        }  # fmt: skip

    every = [(batch, ratio) for batch in (4, 8, 16) for ratio in (1.0, 0.5, 0.0)]
    tried = [("exhaustive", every), ("frontier", [(16, 1.0), (16, 0.5), (16, 0.0)])]
    tried += [("coordinate_descent", [(4, 1.0), (16, 1.0)])]
    rows = [row(name, order, *one) for name, some in tried for order, one in enumerate(some, start=1)]
    return PAPER.schema_of("tuner").validate(pd.DataFrame(rows), where="test")


def stated(part, tables):
    """Return verdict, value and note of the statement that has this part."""
    return finding(PAPER.ledger(), tables, "measured", part)


def verdict(check, tables, subject="", limit=0.0):
    """Return the finding of a check in the only table."""
    (name,) = tables
    return PAPER.ledger().checks[check](tables, Claim(subject, limit, {}, name))


def test_table_4_counts_our_own_schedules_and_shows_the_printed_lines(table4):
    counts = table4.set_index("family")
    assert set(counts.index) == {"bert", "roberta", "albert", "gpt", "opt", "t5", "llama", "wideresnet"}
    assert counts["published_lines"].dropna().to_dict() == {
        "wideresnet": 12, "t5": 11, "roberta": 21, "llama": 11, "opt": 10, "bert": 21, "gpt": 10,
    }  # fmt: skip
    assert (counts["helpers"] <= 25).all() and (counts["helpers"] >= 5).all()
    assert (counts["expanded"] <= 40).all() and (counts["expanded"] >= counts["helpers"] - 5).all()
    assert (counts["model_lines"] > 3 * counts["helpers"]).all()
    assert PAPER.schema_of("table4").validate(table4, where="test").equals(table4)


def test_lines_are_judged_by_the_longest_schedule(table4):
    judged, text, _ = stated("a schedule of a model family is short", {"table4": table4})
    assert judged == "holds" and "the most for" in text
    longer = table4.assign(helpers=table4["helpers"] + 15)
    assert stated("a schedule of a model family is short", {"table4": longer})[0] == "fails"
    assert stated("a schedule of a model family is short", {"table4": table4.iloc[:0]})[0] == "not run"


def test_steps_are_judged_by_errors_and_memory_and_never_by_times(fig9):
    tables, steps = {"fig9": fig9}, " ".join(STEPS)
    assert stated(SAME_RESULTS, tables)[0] == "holds"
    assert stated(SAME_RESULTS, {"fig9": fig9.assign(gradient_error=2e-4)})[0] == "fails"
    falls = verdict("memory_falls", tables, steps)
    assert falls.holds and falls.reproduced == "vanilla 37.0, kernels 36.0, layers 26.0, embedding 25.0 MiB"
    assert not verdict("memory_falls", tables, " ".join(reversed(STEPS))).holds
    assert verdict("memory_falls", {"fig9": fig9[fig9["step"] != "layers"]}, steps) is None
    faster = verdict("faster_kernels", tables, "vanilla kernels")
    assert faster.holds is None and faster.reproduced == "1.00x on CPU cores"


def test_a_search_is_judged_by_what_it_tries(tuner):
    tables = {"tuner": tuner}
    share = verdict("explored_share", tables, "frontier", 0.334)
    assert share.holds and share.reproduced == "3 of 9 points, 1 beyond the budget"
    assert not verdict("explored_share", tables, "frontier", 0.3).holds
    found = verdict("found_share", tables, "coordinate_descent")
    assert found.holds is None and found.reproduced == "66.7 % of the best point"
    assert verdict("budget_is_monotone", tables).holds
    turned = tuner.assign(ckpt_ratio=1 - tuner["ckpt_ratio"])
    assert not verdict("budget_is_monotone", {"tuner": turned}).holds
    assert verdict("explored_share", tables, "random", 1.0) is None


def test_the_figures_can_be_read(table4, fig9, tuner):
    for table, name, function in (
        (table4, "table4", draw.schedule_lines),
        (fig9, "fig9", draw.measured_steps),
        (tuner, "tuner", draw.measured_search),
    ):
        figure, shown = function({name: table}, "measured")
        assert_is_legible(figure)
        assert len(shown) == len(table)


@pytest.mark.xdist_group("schedules")
def test_small_runs_are_measured():
    pytest.importorskip("torch")
    passes = {"warmup_passes": 1, "passes": 1, "seed": 0, "size": "tiny"}
    with forking_servers():
        measured = Fig9Steps(processes=(1, 2), compiler="dynamo", batch=2, **passes)
        steps = measured.run(Given("measured"))["fig9"]
        search = TunerRun(batches=(2, 4), ratios=(1.0, 0.0), budget_bytes=400_000, **passes)
        found = search.run(Given("measured"))["tuner"]
    assert list(zip(steps["step"], steps["n_gpus"], strict=True)) == [
        ("vanilla", 1), ("kernels", 1), ("layers", 1), ("layers", 2), ("embedding", 1), ("embedding", 2)
    ]  # fmt: skip
    assert stated(SAME_RESULTS, {"fig9": steps})[0] == "holds"
    assert steps["compiler"].tolist() == ["", *["dynamo"] * 5]
    held = steps[steps["n_gpus"] == 2].set_index("step")["parameter_bytes"]
    assert held["embedding"] < held["layers"] < steps["parameter_bytes"].iloc[0]
    assert [*found["strategy"].unique()] == ["frontier", "coordinate_descent", "exhaustive"]
    once = found.groupby(["global_batch_size", "ckpt_ratio"])["throughput_samples_per_s"]
    assert (once.nunique() <= 1).all()  # a point is measured once, whoever asks
    assert (found["saved_bytes"].dropna() <= 400_000).all()
    exhaustive = found[found["strategy"] == "exhaustive"].set_index(["global_batch_size", "ckpt_ratio"])
    assert exhaustive["status"].to_dict() == {(2, 1.0): "ok", (2, 0.0): "ok", (4, 1.0): "ok", (4, 0.0): "oom"}
