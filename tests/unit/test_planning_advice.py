"""Ties, regret, and what measured rows of one's own teach: in Python, on the command line and as a figure."""

import dataclasses
import io
import json
import math
import os
import re
import threading

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner

from makespan.cli import main
from makespan.cli.options import json_text
from makespan.errors import InputError
from makespan.planning import (
    Architecture,
    Attention,
    FeedForward,
    Joint,
    Layers,
    Layout,
    Pricer,
    Training,
    advise,
    calibrated_by,
    contradicting_rows,
    feasible_table,
    frontier,
    parse_layout,
    plan,
    read_machines,
    read_measured,
    read_model,
    software,
    validate_rows,
)
from makespan.planning.factors import alike, noise_of, slopes_of
from makespan.planning.steptime import Grid
from makespan.plots import plot_frontier, write_figure
from makespan.units import GIB

RUN = ("--seq", "8192", "--batch", "256")
TEXTS = ("tp4 pp2 mb1", "tp8 mb1", "tp2 pp4 mb1 recompute=full", "fsdp mb1", "tp2 pp2 mb1")


def dense(n_layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256):
    attention = Attention(heads, kv_heads, 128, 128)
    return Architecture(
        "dense", "llama", hidden, (Layers(n_layers, attention, FeedForward(ffn, True)),), vocab,
        extra_parameters=hidden,
    )  # fmt: skip


@pytest.fixture(scope="module")
def pricer():
    return Pricer(Training(dense(), 8192, 256), read_machines("64xh100-80"), software("megatron-bridge"))


def rows_of(pricer, factors):
    """Return measured rows: the predicted step of each layout, times a factor."""
    found = []
    for text, factor in factors.items():
        layout = parse_layout(text, 64)
        found.append((pricer.training, layout, pricer.cluster, factor * pricer.price(layout).step_s))
    return found


def random_joint(n=6, seed=1):
    rng = np.random.default_rng(seed)
    root = rng.normal(size=(n, n)) * 0.05
    return Joint(rng.normal(size=n) * 0.03, root @ root.T)


# --- The joint posterior ---


def test_the_covariance_is_that_of_the_factors_and_of_what_no_factor_explains(pricer):
    found = [parse_layout(text, 64) for text in TEXTS]
    joint, parts_s = pricer.joint(found), pricer.parts_s(Grid.of(found))
    assert np.exp(joint.mean) == pytest.approx(parts_s.sum(axis=1))
    assert np.sqrt(np.diag(joint.covariance)) == pytest.approx(pricer.calibrated.spread(parts_s))
    slopes = slopes_of(parts_s)
    shared = joint.covariance - slopes @ pricer.calibrated.covariance @ slopes.T
    apart = np.linalg.norm(slopes[:, None] - slopes[None], axis=2)
    nearer = np.argsort(apart[0])
    assert (np.diff(shared[0][nearer]) < 0).all()  # the more alike two layouts are, the more they share


def test_a_measured_layout_has_the_step_that_was_measured_and_its_neighbours_follow(pricer):
    measured, near, far = (parse_layout(text, 64) for text in ("tp2 pp2 mb1", "tp2 pp2 vp2 mb1", "fsdp mb1"))
    rows = [(pricer.training, measured, pricer.cluster, 1.15 * pricer.price(measured).step_s)]
    plain = calibrated_by(pricer, rows)
    joint = plain.joint([measured, near, far])
    assert math.exp(joint.mean[0]) == pytest.approx(rows[0][3], rel=0.01)
    spreads = np.sqrt(np.diag(joint.covariance))
    assert spreads[0] < 0.011
    assert spreads[0] < spreads[1] < spreads[2]
    before_s, after_s = (
        np.array([one.price(layout).step_s for layout in (measured, near, far)]) for one in (pricer, plain)
    )
    assert np.exp(joint.mean[1:]) == pytest.approx(after_s[1:])
    moved = joint.mean - np.log(before_s)
    assert moved[0] > moved[1] > moved[2] > 0
    # One that spends its time otherwise gets little more than the scale.
    assert after_s[0] / before_s[0] > after_s[1] / before_s[1] > after_s[2] / before_s[2]
    assert plain.measured_s(measured) == pytest.approx(rows[0][3])
    assert plain.measured_s(near) is None
    sharded = [(pricer.training, far, pricer.cluster, 9.0)]
    assert calibrated_by(pricer, sharded).measured_s(
        dataclasses.replace(far, sequence_parallel=False)
    ) == pytest.approx(9.0)


def test_what_rows_teach_is_the_posterior_of_a_gaussian_process(pricer):
    """Where no row is odd and the factors are known, what is left is the textbook's formula."""
    texts = ("tp2 pp2 mb1", "tp2 pp2 vp2 mb1", "fsdp mb1", "tp4 mb1")
    rows = rows_of(pricer, dict(zip(texts[:3], (1.02, 1.01, 0.99), strict=True)))
    grid = Grid.of([parse_layout(text, 64) for text in texts])
    refined = calibrated_by(pricer, rows).calibrated
    before_s = pricer.parts_s(grid)
    slopes, noise = slopes_of(before_s), noise_of(before_s)
    prior = pricer.calibrated.covariance
    own = np.diag(noise**2) - np.diag(np.diag(alike(before_s, before_s)))
    among = slopes @ prior @ slopes.T + alike(before_s, before_s) + own
    gain = among[3, :3] @ np.linalg.inv(among[:3, :3])
    ahead = np.log([1.02, 1.01, 0.99])
    found_s = refined.parts_s(np.zeros_like(before_s), before_s)
    assert np.log(found_s.sum(axis=1) / before_s.sum(axis=1))[3] == pytest.approx(gain @ ahead, abs=2e-3)
    spread = math.sqrt(among[3, 3] - gain @ among[:3, 3])
    assert refined.spread(found_s)[3] == pytest.approx(spread, rel=0.05)


def test_the_regret_of_two_layouts_is_the_closed_form():
    joint = Joint(np.log([1.0, 1.05]), np.array([[0.01, 0.004], [0.004, 0.02]]))
    found = joint.regrets()
    variance = 0.01 + 0.02 - 2 * 0.004
    for own, other, value in ((0, 1, found[0]), (1, 0, found[1])):
        ahead, spread = joint.mean[own] - joint.mean[other], math.sqrt(variance)

        def below(x):
            return 0.5 * math.erfc(-x / math.sqrt(2))

        exact = math.exp(ahead + variance / 2) * below((ahead + variance) / spread) - below(ahead / spread)
        assert value == pytest.approx(exact, rel=0.05)


def test_without_doubt_the_regret_is_the_slowdown():
    steps = np.array([2.0, 2.2, 3.0])
    joint = Joint(np.log(steps), np.zeros((3, 3)))
    assert joint.regrets() == pytest.approx(steps / 2.0 - 1, abs=1e-6)
    assert joint.among(np.array([False, True, True])).regrets() == pytest.approx([0, 3 / 2.2 - 1], abs=1e-6)


def test_the_expected_fall_is_that_of_the_covariance_after_the_measurement():
    joint = random_joint()
    pairs = [(i, j) for i in range(6) for j in range(i)]

    def variance_of(one):
        matrix = one.covariance
        return np.mean([matrix[i, i] + matrix[j, j] - 2 * matrix[i, j] for i, j in pairs])

    assert joint.comparison_variance == pytest.approx(variance_of(joint))
    for at, fall in enumerate(joint.expected_falls()):
        assert fall == pytest.approx(variance_of(joint) - variance_of(joint.given(at)))
        assert fall >= 0
        assert joint.given(at).covariance[at, at] <= 1e-4


def test_what_is_said_is_the_same_each_time(pricer):
    first, again = plan(pricer, 5), plan(pricer, 3)
    assert first.regrets[:3] == again.regrets
    assert [one.layout for one in first.best[:3]] == [one.layout for one in again.best]
    assert first.ties == again.ties
    rows = rows_of(pricer, dict.fromkeys(TEXTS, 1.1))
    pd.testing.assert_frame_equal(advise(pricer, rows).to_measure, advise(pricer, rows).to_measure)


def test_a_layout_that_was_measured_to_be_fast_is_chosen(pricer):
    best = plan(pricer, 1).best[0]
    slow = parse_layout("tp4 pp2 mb1", 64)
    rows = [
        (pricer.training, best.layout, pricer.cluster, best.step_s),
        (pricer.training, slow, pricer.cluster, 0.8 * best.step_s),
    ]
    found = plan(calibrated_by(pricer, rows), 3)
    assert found.best[0].layout == slow
    assert best.layout not in found.ties


def test_a_measured_layout_is_among_the_ties_once(pricer):
    rows = [(pricer.training, parse_layout(text, 64), pricer.cluster, 4.0) for text in ("fsdp mb1", "mb1")]
    texts = [one.text for one in plan(calibrated_by(pricer, rows), 3).ties]
    assert len(set(texts)) == len(texts)
    assert {"fsdp mb1", "zero1 mb1"} <= set(texts)


# --- Lessons ---


def test_rows_that_agree_narrow_the_interval_and_none_contradicts(pricer):
    rows = rows_of(pricer, dict.fromkeys(TEXTS, 1.2))
    found = advise(pricer, rows)
    assert found.contradicting == ()
    assert found.half_width < 0.6 * found.half_width_before
    assert len(found.lessons) == len(rows)
    assert (found.lessons["narrowed"] > 0).all()
    assert (found.lessons["spreads"].abs() < 1).all()
    # The first of all rows teaches most.
    alone = advise(pricer, rows[:1]).lessons.iloc[0]
    assert alone["moved"] == pytest.approx(0.2, abs=0.06)
    assert alone["narrowed"] > found.lessons["narrowed"].max()


@pytest.mark.parametrize("wrong", range(len(TEXTS)))
def test_the_row_that_contradicts_the_others_is_named(pricer, wrong):
    factors = {text: 1.2 * (1.5 if at == wrong else 1.0) for at, text in enumerate(TEXTS)}
    assert contradicting_rows(pricer, rows_of(pricer, factors)) == (wrong + 1,)


def test_two_wrong_rows_are_both_found_and_two_rows_alone_accuse_each_other(pricer):
    texts = (*TEXTS, "tp4 pp4 mb1", "tp2 mb1 recompute=full")
    factors = dict.fromkeys(texts, 1.0) | {texts[1]: 2.0, texts[4]: 0.5}
    assert set(contradicting_rows(pricer, rows_of(pricer, factors))) == {2, 5}
    pair = rows_of(pricer, {texts[0]: 1.0, texts[1]: 1.7})
    assert contradicting_rows(pricer, pair) == (1, 2)


def test_what_to_measure_is_a_tie_that_was_not_measured_and_teaches_most(pricer):
    rows = rows_of(pricer, dict.fromkeys(TEXTS, 1.2))
    refined = calibrated_by(pricer, rows)
    found = advise(pricer, rows)
    texts = [one.text for one in found.ties]
    assert set(found.to_measure["layout"]) <= set(texts) - {one.text for _, one, *_ in rows}
    assert found.to_measure["layout"].is_unique
    joint = refined.joint(found.ties)
    every = [math.sqrt(joint.given(at).comparison_variance) for at in range(len(texts))]
    assert found.to_measure["spread"][0] == pytest.approx(min(every))
    assert found.spread > found.to_measure["spread"][0]
    assert found.to_measure["spread"].is_monotonic_decreasing


def test_following_the_advice_finds_a_better_layout_than_the_first_guess(pricer):
    # A truth that the prior allows: the factors of the terms differ, and so does each layout a little.
    rng = np.random.default_rng(3)
    off = rng.normal(size=len(pricer.calibrated.offsets)) * np.sqrt(np.diag(pricer.calibrated.covariance))
    truth = dataclasses.replace(
        pricer, calibrated=dataclasses.replace(pricer.calibrated, offsets=off)
    )  # fmt: skip
    every = {one: truth.price(one).step_s for one in plan(pricer, 1).ties}
    rows, chosen = [], []
    for _ in range(5):
        refined = calibrated_by(pricer, rows)
        chosen.append(truth.price(plan(refined, 1).best[0].layout).step_s)
        text = advise(pricer, rows, 1).to_measure["layout"][0]
        layout = parse_layout(text, 64)
        rows.append((pricer.training, layout, pricer.cluster, truth.price(layout).step_s))
    assert chosen[-1] <= chosen[0]
    assert chosen[-1] <= 1.03 * min(every.values())


def test_errors_are_those_of_predictions_that_did_not_see_the_layout(pricer):
    rows = rows_of(pricer, dict.fromkeys(TEXTS, 1.3))
    table = validate_rows(pricer, [*rows, rows[0]])
    assert table["before_error"].tolist() == pytest.approx([1 / 1.3 - 1] * 6)
    assert (table["after_error"].abs() < table["left_out_error"].abs()).all()
    assert (table["left_out_error"].abs() < 0.15).all()
    assert table["is_inside"].all()
    others = calibrated_by(pricer, rows[1:])
    expected_s = others.price(rows[0][1]).step_s
    assert table["left_out_s"].iloc[[0, 5]].tolist() == pytest.approx([expected_s] * 2)


# --- Tables and the figure ---


def test_the_table_of_layouts_has_what_pricing_each_gives(pricer):
    table = feasible_table(pricer)
    assert table["step_s"].is_monotonic_increasing
    for row in table.iloc[::90].to_dict("records"):
        layout = parse_layout(row["layout"], row["n_gpus"])
        own = Layout(**{name: row[name] for name in dataclasses.asdict(layout)})
        assert (own.text, own.dp) == (row["layout"], layout.dp)
        one = pricer.price(layout)
        assert (row["step_s"], row["low_s"], row["high_s"]) == pytest.approx(
            (one.step_s, one.low_s, one.high_s)
        )
        assert (row["mfu"], row["memory_gib"]) == pytest.approx((one.mfu, one.total_memory_bytes / 2**30))
        assert one.is_feasible


def test_the_frontier_has_the_layouts_that_none_beats_in_both(pricer):
    sizes, table = frontier(dataclasses.replace(pricer, cluster=read_machines("24xh100-80"),
                                                training=Training(dense(), 8192, 48)))  # fmt: skip
    assert sizes["n_gpus"].tolist()[-3:] == [8, 16, 24]
    assert sizes["tokens_per_s"].is_monotonic_increasing
    assert ((sizes["low"] < sizes["tokens_per_s"]) & (sizes["tokens_per_s"] < sizes["high"])).all()
    for row in table.to_dict("records"):
        beaten = (table["step_s"] < row["step_s"]) & (table["memory_gib"] <= row["memory_gib"])
        assert row["is_pareto"] != beaten.any() or (table["step_s"] == row["step_s"]).sum() > 1


@pytest.mark.xdist_group("figures")
def test_the_figure_shows_both_tables_and_is_the_same_each_time(pricer, tmp_path):
    sizes, table = frontier(pricer)
    figure = plot_frontier(sizes, table, 80.0, "predicted")
    left, right = figure.axes
    drawn = next(line for line in left.lines if line.get_marker() == "o")
    assert drawn.get_xydata().tolist() == sizes[["n_gpus", "tokens_per_s"]].to_numpy(float).tolist()
    front = next(line for line in right.lines if line.get_marker() == "s")
    near = table[table["is_pareto"] & (table["step_s"] <= 2 * table["step_s"].min())]
    assert front.get_xydata().tolist() == near[["step_s", "memory_gib"]].to_numpy(float).tolist()
    for kind in ("png", "svg", "pdf"):
        write_figure(plot_frontier(sizes, table, 80.0, "predicted"), tmp_path / f"a.{kind}")
        write_figure(plot_frontier(sizes, table, 80.0, "predicted"), tmp_path / f"b.{kind}")
        first = (tmp_path / f"a.{kind}").read_bytes()
        assert len(first) > 2000 and first == (tmp_path / f"b.{kind}").read_bytes()
    with pytest.raises(InputError, match=r"c\.jpg: suffix '\.jpg'; expected a file that ends in"):
        write_figure(figure, tmp_path / "c.jpg")


# --- The command line ---


def ran(*words):
    done = CliRunner().invoke(main, list(words))
    return done.exit_code, done.output


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Make a folder with a model, a cluster, and four rows: one after a blank line, the last wrong."""
    monkeypatch.chdir(tmp_path)
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 5120,
        "vocab_size": 128256, "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8,
        "intermediate_size": 17408, "tie_word_embeddings": False,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "ours.toml").write_text('device = "h100-80"\nn_gpus = 64\nnetwork_gb_per_s = 25\n')
    (tmp_path / "measured.csv").write_text(
        "n_gpus,layout,step_s\n64,tp4 pp2 mb1,9.1\n64,tp8 mb1,10.4\n\n64,tp2 pp4 mb1 recompute=full,11.3\n"
        "64,tp2 pp4 mb1,14\n"
    )
    return tmp_path


OWN = ("config.json", "ours.toml", *RUN)


def test_calibrate_names_the_wrong_line_and_the_next_layout(files):
    code, text = ran("calibrate", *OWN, "--measured", "measured.csv")
    assert code == 0, text
    assert "refined by 4 rows of your own" in text
    assert "Line 6 contradicts the others: 14 s, where they lead to expect" in text
    assert "Measure next; two of the" in text
    code, text = ran("calibrate", *OWN, "--measured", "measured.csv", "--json")
    found = json.loads(text)
    assert code == 0
    assert [row["line"] for row in found["rows"]] == [2, 3, 5, 6]
    assert found["contradicting_lines"] == [6]
    assert len(found["to_measure"]) == 3
    assert found["to_measure"][0]["spread"] < found["spread_of_comparisons"]


def test_calibrate_says_how_far_rows_scatter(files):
    # Steps as predicted, times and over 1.35 in turn; the usual scatter is not worth a line.
    texts = ("tp4 pp2 mb1", "tp8 mb1", "tp2 pp4 mb1", "tp8 pp2 mb1", "tp4 mb1", "tp2 pp2 mb1")
    predicted = [json.loads(ran("explain", *OWN[:2], text, *RUN, "--json")[1]) for text in texts]
    for factor, said in ((1.0, False), (1.35, True)):
        rows = [
            f"64,{text},{one['step_s'] * factor ** (-1) ** at}"
            for at, (text, one) in enumerate(zip(texts, predicted, strict=True))
        ]
        (files / "rows.csv").write_text("n_gpus,layout,step_s\n" + "\n".join(rows) + "\n")
        text = ran("calibrate", *OWN, "--measured", "rows.csv")[1]
        assert ("times as far as published rows do" in text) == said
        scatter = json.loads(ran("calibrate", *OWN, "--measured", "rows.csv", "--json")[1])["scatter"]
        assert (f"They scatter {scatter:.1f} times" in text) == said


def test_calibrate_without_rows_says_what_to_measure_first(files):
    code, text = ran("calibrate", *OWN)
    assert code == 0
    assert "Measure next" in text
    assert "What each row taught" not in text


def test_a_single_row_and_two_rows_are_judged_with_care(files):
    lines = ["n_gpus,layout,step_s", "64,tp4 pp2 mb1,40", "64,tp8 mb1,10.4"]
    (files / "one.csv").write_text("\n".join(lines[:2]) + "\n")
    assert (
        "Line 2 contradicts what published rows lead to expect: check its unit"
        in ran("calibrate", *OWN, "--measured", "one.csv")[1]
    )
    (files / "two.csv").write_text("\n".join(lines) + "\n")
    assert "Lines 2 and 3 contradict each other" in ran("calibrate", *OWN, "--measured", "two.csv")[1]


def test_validate_compares_predictions_with_rows(files):
    code, text = ran("validate", *OWN, "--measured", "measured.csv", "--output", "errors.csv")
    assert code == 0, text
    table = pd.read_csv("errors.csv")
    assert table["line"].tolist() == [2, 3, 5, 6]
    assert (table["before_error"] < 0).all()
    assert "mean of sizes" in text
    done = CliRunner().invoke(main, ["validate", *OWN, "--measured", "measured.csv", "--output", "-"])
    assert done.exit_code == 0
    pd.testing.assert_frame_equal(pd.read_csv(io.StringIO(done.stdout)), table)
    assert "mean of sizes" in done.stderr
    code, text = ran("validate", *OWN, "--measured", "measured.csv", "--json")
    assert len(json.loads(text)) == 4


def test_validate_compares_memory_with_what_was_allocated(files):
    rows = ["n_gpus,layout,step_s,memory_gib", "64,tp4 pp2 mb1,9.1,40", "64,tp8 mb1,10.4,"]
    (files / "measured.csv").write_text("\n".join(rows) + "\n")
    code, text = ran("validate", *OWN, "--measured", "measured.csv", "--output", "errors.csv")
    assert code == 0, text
    table = pd.read_csv("errors.csv")
    assert table["memory_gib"].tolist()[:1] == [40]
    assert np.isnan(table["memory_gib"][1])
    counted = json.loads(ran("explain", *OWN[:2], "tp4 pp2 mb1", *RUN, "--json")[1])["memory_bytes"]
    in_programs = sum(counted.values()) - counted["reserve"]
    assert table["counted_gib"][0] == pytest.approx(in_programs / GIB, rel=1e-6)
    assert re.search(r"fullest GPU:\n.*\n +2 +40\.0 GiB +[\d.]+ GiB +[+-][\d.]+%\n$", text)
    assert "memory_gib" not in pd.DataFrame(validated_without_memory(files))
    (files / "measured.csv").write_text("n_gpus,layout,step_s,memory_gib\n64,tp8 mb1,10.4,much\n")
    code, text = ran("validate", *OWN, "--measured", "measured.csv")
    assert (code, len(text.splitlines())) == (2, 1)
    assert "row 1, column 'memory_gib': found 'much'" in text


def test_measured_steps_may_come_through_a_pipe(files):
    text = (files / "measured.csv").read_text()
    os.mkfifo("pipe")
    writer = threading.Thread(target=lambda: (files / "pipe").write_text(text))
    writer.start()
    code, piped = ran("validate", *OWN, "--measured", "pipe", "--json")
    writer.join()
    assert code == 0, piped
    assert json.loads(piped) == json.loads(ran("validate", *OWN, "--measured", "measured.csv", "--json")[1])


def validated_without_memory(files):
    """Return what is said of rows without memory."""
    (files / "measured.csv").write_text("n_gpus,layout,step_s\n64,tp8 mb1,10.4\n")
    return json.loads(ran("validate", *OWN, "--measured", "measured.csv", "--json")[1])


def test_explain_prints_what_plan_does_of_one_layout(files):
    words = ("tp4 pp2 mb1", "--measured", "measured.csv")
    explained = ran("explain", "config.json", "ours.toml", *words, *RUN)
    assert explained == ran("plan", *OWN, "--layout", *words)
    assert explained[0] == 0 and "Where the time goes:" in explained[1]
    # A name that both know: the cluster tells them apart.
    assert "4 x a100-80" in ran("explain", "llama2-7b", "4xa100-80", "tp2 mb1")[1]
    assert "emulated, not measured" in ran("explain", "llama2-7b", "244", "8888")[1]


def test_emulate_writes_the_steps_of_all_layouts(files):
    code, text = ran("emulate", *OWN, "--output", "steps", "--json")
    assert code == 0, text
    (made,) = json.loads(text)
    table = pd.read_csv(made["path"])
    assert len(table) == made["n_rows"] > 450
    assert {"n_gpus", "layout", "step_s", "low_s", "high_s", "memory_gib"} <= set(table)
    # The first three columns are a file of measured rows.
    table[["n_gpus", "layout", "step_s"]].to_csv("rows.csv", index=False)
    training = Training(read_model("config.json"), 8192, 256)
    assert len(read_measured("rows.csv", training, read_machines("ours.toml"))) == len(table)


@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
def test_plan_draws_the_frontier(files, kind):
    code, text = ran("plan", *OWN, "--plot", f"frontier.{kind}", "--csv")
    assert code == 0, text
    assert pd.read_csv(io.StringIO(text))["expected_regret"].is_monotonic_increasing
    start = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[kind]
    assert (files / f"frontier.{kind}").read_bytes().startswith(start)


def test_plan_shows_what_was_measured(files):
    (files / "fast.csv").write_text("n_gpus,layout,step_s\n64,tp4 pp2 mb1,5.5\n64,tp8 mb1,9\n")
    code, text = ran("plan", *OWN, "--measured", "fast.csv", "--top", "2")
    assert code == 0
    assert "measured at 5.5 s" in text


TIGHT = ("llama3-8b", "8xa100-40", "--batch", "64")


def test_tables_of_one_layout_have_the_columns_of_several(files):
    one = ran("plan", *TIGHT, "--layout", "tp4 mb8", "--csv")[1]
    several = pd.read_csv(io.StringIO(ran("plan", *TIGHT, "--csv", "--top", "2")[1]))
    (row,) = pd.read_csv(io.StringIO(one)).to_dict("records")

    assert one == ran("explain", "llama3-8b", "8xa100-40", "tp4 mb8", "--batch", "64", "--csv")[1]
    assert set(several) - set(row) == {"expected_regret", "chance_to_be_faster", "slower_by"}
    assert not set(row) - set(several)
    assert 0 < row["low_s"] < row["step_s"] < row["high_s"]
    assert row["is_feasible"] is False
    assert re.fullmatch(r"counted with \d+\.\d GiB on a device of 39\.4 GiB", row["reason"])
    assert several["is_feasible"].tolist() == [True, True] and several["reason"].isna().all()


def test_json_of_plans_has_what_their_table_has(files):
    table = pd.read_csv(io.StringIO(ran("plan", *TIGHT, "--csv", "--top", "3")[1]))
    listed = json.loads(ran("plan", *TIGHT, "--json", "--top", "3")[1])

    for row, one in zip(table.to_dict("records"), listed, strict=True):
        assert set(row) <= set(one)
        assert one["expected_regret"] == pytest.approx(row["expected_regret"])
        assert one["chance_to_be_faster"] == pytest.approx(row["chance_to_be_faster"])
        assert one["is_feasible"] is row["is_feasible"] is True


def test_a_layout_that_ran_although_it_is_counted_too_large_is_said_to_have_run(files):
    (files / "ran.csv").write_text("n_gpus,layout,step_s\n8,tp4 mb8,7\n8,tp4 mb4,7.2\n")
    measured, counted = ("--measured", "ran.csv"), r"counted with (\d+\.\d) GiB on a device of 39\.4 GiB"

    assert "does not fit into 39 GiB\nCounted with" in ran("plan", *TIGHT, "--layout", "tp4 mb8")[1]
    said = ran("plan", *TIGHT, "--layout", "tp4 mb8", *measured)[1]
    assert re.search(f"ran on 39 GiB\nMeasured at 7 s; {counted}, but it ran", said)
    plans = ran("plan", *TIGHT, *measured)[1]
    assert re.search(r"\d+ of \d+ layouts fit, 2 more ran; the best to choose", plans)
    assert re.search(f"tp4 zero1 mb8\n +measured at 7 s; {counted}, but it ran", plans)
    rows = json.loads(ran("plan", *TIGHT, *measured, "--json")[1])
    (own,) = [row for row in rows if row["layout"] == "tp4 zero1 mb8"]
    assert own["is_feasible"] is True
    assert own["measured_s"] == pytest.approx(7)
    (made,) = json.loads(ran("emulate", *TIGHT, *measured, "--output", "steps", "--json")[1])
    table = pd.read_csv(made["path"]).set_index("layout")
    assert re.fullmatch(f"{counted}, but it ran", table["reason"]["tp4 zero1 mb8"])
    assert table["reason"].notna().sum() == 2
    assert table["step_s"].is_monotonic_increasing
    others = table["reason"].isna()
    assert (table["memory_gib"][others] < 39.4).all() and (table["memory_gib"][~others] > 39.4).all()


def test_a_measured_layout_is_enough_where_none_fits_by_its_count(files):
    words = ("llama3-8b", "1xa100-40", "--batch", "8")
    assert "layouts fits: the smallest" in ran("plan", *words)[1]
    (files / "one.csv").write_text("n_gpus,layout,step_s\n1,mb1,20\n")

    code, text = ran("plan", *words, "--measured", "one.csv")

    assert code == 0, text
    assert "0 of" in text and "layouts fit, 1 more ran" in text and "but it ran" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("calibrate", *OWN, "--holdout", "bert"), "--holdout is an option for the emulator; it does not go"),
        (("calibrate", *OWN, "--output", "a.toml"), "--output is an option for the emulator"),
        (("calibrate", ".", "--seq", "8"), "--seq is an option for a MODEL and a CLUSTER of your own"),
        (("calibrate", *OWN, "--measured", "no.csv"), "no.csv"),
        (("calibrate", "config.json", "8xh1"), "unknown device 'h1'"),
        (("validate", *OWN), "expected --measured, a CSV of measured steps"),
        (("explain", "llama7", "244", "8888", "--batch", "8"), "--batch is an option for a MODEL and"),
        (("explain", "config.json", "ours.toml", "tp3"), "64 GPUs are not a multiple"),
        (("explain", "config.json", "ours.toml", "tp2", "--exact"), "--exact is an option for the emulator"),
        (("explain", "config.json", "nowhere.toml", "tp2"), "nowhere.toml: no such file"),
        (("emulate", "config.json", "--output", "out"), "MODEL 'config.json' has no CLUSTER"),
        (("emulate", *OWN, "--noise", "0.1", "--output", "out"), "--noise is an option for the emulator"),
        (("plan", *OWN, "--plot", "a.gif"), "a.gif: suffix '.gif'; expected a file that ends in"),
        (("plan", *OWN, "--plot", "a"), "a: no suffix; expected"),
        (("plan", *OWN, "--plot", "a.png", "--layout", "tp2"), "expected it without --layout"),
        (
            ("plan", *OWN, "--top", "3", "--layout", "tp2"),
            "--top is about several layouts; expected it without",
        ),
    ],
)
def test_a_mistake_is_one_line_and_leaves_no_file(files, words, said):
    before = set(files.iterdir())
    code, text = ran(*words)
    assert code == 2
    assert said in text
    assert len(text.strip().splitlines()) == 1
    assert set(files.iterdir()) == before


def test_measured_ties_leave_nothing_to_measure():
    alone = Pricer(Training(dense(2), 512, 1), read_machines("1xh100-80"), software("fsdp"))
    found = plan(alone, 1000)
    rows = [(alone.training, one.layout, alone.cluster, one.step_s) for one in found.best]
    assert len(rows) == found.n_feasible < 10
    advice = advise(alone, rows)
    assert advice.to_measure.empty
    assert advice.contradicting == ()
    assert len(advise(alone, []).to_measure) > 0


# --- Measuring a model of one's own ---

OWN_STEPS = """
import time
import torch

def make(layout, seq, batch):
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)
    model = torch.nn.Sequential(torch.nn.Embedding(512, 64), layer, torch.nn.Linear(64, 512))
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(512, (batch, seq))

    def step():
        for part in tokens.split(layout.micro_batch):
            logits = model(part)
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), part.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step

def broken(layout, seq, batch):
    return lambda: 1 / 0

none = lambda layout, seq, batch: None

def tiring(layout, seq, batch):
    if layout.micro_batch < 8:
        raise ValueError("too small")
    return make(layout, seq, batch)


alive = []


def alone(layout, seq, batch):
    import weakref

    class Weights:
        pass

    if alive and alive[-1]() is not None:
        raise RuntimeError("two models at a time")
    weights = Weights()
    alive.append(weakref.ref(weights))
    return lambda: time.sleep(0.001) if weights else None
"""
TINY = """
name = "tiny"
family = "gpt2"
hidden = 64
vocab = 512

[[layers]]
n_layers = 1
attention = { heads = 4, kv_heads = 4, head_dim = 16, value_dim = 16 }
ffn = { size = 256, is_gated = false }
"""
OUR_CPU = """
device = "l4"
n_gpus = 1
memory_gib = 4
memory_gb_per_s = 10
peak_tflop_per_s = { fp32 = 1 }
products = { fp32 = [0.5, 64] }
"""
SMALL = ("--seq", "64", "--batch", "8")


@pytest.fixture
def steps(tmp_path, monkeypatch):
    """Make a folder with training steps, their model, and a description of this machine."""
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    for name, text in (("steps.py", OWN_STEPS), ("tiny.toml", TINY), ("cpu.toml", OUR_CPU)):
        (tmp_path / name).write_text(text)
    return tmp_path


QUICKLY = ("--warmup", "1", "--steps", "2", "--repetitions", "3")


@pytest.mark.xdist_group("training")
def test_steps_of_ones_own_model_are_timed_and_refine_the_plan(steps):
    words = ("profile", "steps.py:make", "--layout", "mb8", "--layout", "mb1", *SMALL, *QUICKLY)
    code, text = ran(*words)
    assert code == 0, text
    table = pd.read_csv(steps / "profile/measured.csv")
    assert table["layout"].tolist() == ["zero1 mb8", "zero1 mb1"]
    assert (table[["n_gpus", "seq", "batch"]] == [1, 64, 8]).all(axis=None)
    assert ((table["step_s"] > 1e-4) & (table["step_s"] < 10)).all()
    run = (*SMALL, "--precision", "fp32", "--stack", "ddp", "--measured", "profile/measured.csv")
    code, text = ran("plan", "tiny.toml", "cpu.toml", *run)
    assert code == 0, text
    assert "refined by 2 rows of your own" in text
    assert "measured at" in text
    assert ran("calibrate", "tiny.toml", "cpu.toml", *run)[0] == 0


@pytest.mark.xdist_group("training")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("steps.py",), "'steps.py'; expected FILE.py:FUNCTION"),
        (("no.py:make",), "no.py: no such file"),
        (("steps.py:mak",), "steps.py: no function 'mak'"),
        (("steps.py:torch",), "steps.py: module 'torch'; expected a function"),
        (("steps.py:broken",), "ZeroDivisionError: division by zero"),
        (("steps.py:none",), "returned NoneType; expected a function that runs one step"),
        (("steps.py:make", "--layout", "mb3"), "a batch of 8 samples is not a multiple of 3"),
        (("steps.py:make", "--workload", "tiny-gpt"), "--workload is an option for workloads"),
    ],
)
def test_steps_that_cannot_be_timed_are_reported_in_one_line(steps, words, said):
    code, text = ran("profile", *words, *SMALL, *QUICKLY)
    assert code == 2
    assert said in text
    assert len(text.strip().splitlines()) == 1
    assert not (steps / "profile").exists()


def test_options_of_ones_own_model_do_not_go_with_workloads(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, text = ran("profile", "--seq", "64")
    assert code == 2
    assert "--seq is an option for a model of your own; it does not go with workloads" in text


@pytest.mark.xdist_group("training")
def test_timed_steps_are_kept_when_a_later_layout_fails(steps):
    code, text = ran("profile", "steps.py:tiring", "--layout", "mb8", "--layout", "mb1", *SMALL, *QUICKLY)
    assert code == 2
    assert "ValueError: too small" in text
    assert pd.read_csv(steps / "profile/measured.csv")["layout"].tolist() == ["zero1 mb8"]


@pytest.mark.xdist_group("training")
def test_a_further_call_keeps_the_steps_of_earlier_ones_and_measures_again_what_it_is_asked_for(steps):
    path = steps / "profile/measured.csv"
    path.parent.mkdir()
    path.write_text("n_gpus,layout,step_s,seq,batch\n1,zero1 mb8,7.5,64,8\n1,zero1 mb4,3.25,64,8\n")
    code, text = ran("profile", "steps.py:make", "--layout", "mb1", "--layout", "mb8", *SMALL, *QUICKLY)
    assert code == 0, text
    assert "rows of earlier calls are kept, 2 so far" in text
    table = pd.read_csv(path)
    assert table["layout"].tolist() == ["zero1 mb4", "zero1 mb1", "zero1 mb8"]
    assert table["step_s"][0] == 3.25 and table["step_s"][2] < 7.5
    path.write_text("layout,step_s\nmb1,1.0\n")
    code, text = ran("profile", "steps.py:make", "--layout", "mb1", *SMALL, *QUICKLY)
    assert code == 2 and "measured.csv: lacks n_gpus, seq, batch; expected another directory" in text
    assert path.read_text() == "layout,step_s\nmb1,1.0\n"


@pytest.mark.xdist_group("training")
def test_a_model_is_gone_before_the_next_one_is_made(steps):
    code, text = ran("profile", "steps.py:alone", "--layout", "mb8", "--layout", "mb1", *SMALL, *QUICKLY)
    assert code == 0, text
    table = pd.read_csv(steps / "profile/measured.csv")
    assert table["layout"].tolist() == ["zero1 mb8", "zero1 mb1"]
    assert "memory_gib" not in table  # nothing was allocated on a GPU


@pytest.mark.parametrize("name", ["no.json", "no.toml"])
def test_a_missing_file_of_a_model_is_named_as_one(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ours.toml").write_text('device = "h100-80"\nn_gpus = 8\n')
    code, text = ran("explain", name, "ours.toml", "tp4 mb1")
    assert code == 2
    assert f"{name}: no such file" in text


def test_json_has_null_for_what_it_has_no_number_for():
    values = {
        "a": float("nan"),
        "rows": [{"b": float("inf"), "c": np.float64(1.5)}],
        "d": (np.int64(2), None),
    }
    assert json.loads(json_text(values)) == {"a": None, "rows": [{"b": None, "c": 1.5}], "d": [2, None]}
