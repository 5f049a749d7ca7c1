"""Figures of cluster experiments: what they show, and that they come from their tables alone."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
from legible_figures import assert_bars_have_a_base, assert_is_legible, is_published, shown_texts
from matplotlib.colors import to_rgb, to_rgba
from matplotlib.container import ErrorbarContainer
from scipy import stats

from makespan.errors import TraceError
from makespan.papers.morphling import figures as _draw_cluster
from makespan.papers.morphling.figures import STYLES, at_delay, parts_worth
from makespan.plots import (
    FAMILIES,
    PALETTE,
    in_order,
    job_spans,
    new_figure,
    plot_allocation,
    plot_bands,
    plot_cdf,
    plot_costs,
    plot_gantt,
    plot_grouped_bars,
    plot_intervals,
    plot_ratio_bars,
    plot_variants,
    published,
    published_handle,
    save_figure,
    spread,
    style_of,
)
from makespan.plots.charts import _bin_means

INTERVALS = pd.DataFrame(
    {
        "panel": ["Base"],
        "policy": ["sia"],
        "mean": [60.0],
        "low": [None],
        "high": [None],
        "is_hollow": [False],
    }
)
EVENTS = pd.DataFrame(
    [
        (0.0, 0, "submitted", "a", "", 0, ""),
        (0.0, 1, "started", "a", "0:2", 2, "DP"),
        (3600.0, 2, "ready", "a", "0:2", 2, "DP"),
        (3600.0, 3, "started", "b", "0:2 1:4", 6, "DP+TP+PP"),
        (7200.0, 4, "reconfigured", "a", "1:1", 1, "ZeRO-Offload"),
        (7200.0, 5, "ready", "b", "0:2 1:4", 6, "DP+TP+PP"),
        (7200.0, 6, "suspended", "b", "", 0, ""),
        (9000.0, 7, "started", "c", "0:4", 4, "DP"),
        (10800.0, 8, "finished", "a", "", 0, ""),
    ],
    columns=["time_s", "seq", "kind", "job_id", "nodes", "n_gpus", "family"],
)


ALLOCATION = pd.DataFrame(
    {
        "time_s": [0.0, 3600.0, 7200.0, 9000.0, 10800.0],
        "DP": [2, 2, 0, 4, 0],
        "DP+TP+PP": [0, 6, 0, 0, 0],
        "ZeRO-Offload": [0, 0, 1, 1, 0],
    }
)


def test_spans_do_not_depend_on_the_order_of_rows():
    shuffled = EVENTS.sample(frac=1.0, random_state=1)
    pd.testing.assert_frame_equal(job_spans(shuffled), job_spans(EVENTS))


def test_spans_say_who_restarted_and_ran_on_which_gpu():
    spans = job_spans(EVENTS)
    first = spans[(spans["job_id"] == "a") & (spans["start_s"] == 0.0)]
    assert first["gpu"].tolist() == [0, 1]
    assert set(first["ready_s"]) == {3600.0}
    assert set(first["end_s"]) == {7200.0}
    b = spans[spans["job_id"] == "b"]
    assert sorted(zip(b["node"], b["gpu"], strict=True)) == [(0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3)]
    moved = spans[(spans["job_id"] == "a") & (spans["start_s"] == 7200.0)].iloc[0]
    assert (moved["node"], moved["gpu"], moved["ready_s"], moved["end_s"]) == (1, 0, 10800.0, 10800.0)
    open_end = spans[spans["job_id"] == "c"]
    assert set(open_end["end_s"]) == {10800.0}
    assert sorted(open_end["gpu"]) == [0, 1, 2, 3]


def test_no_gpu_is_shown_under_two_jobs_at_once():
    spans = job_spans(EVENTS)
    for _, rows in spans.groupby(["node", "gpu"]):
        ordered = rows.sort_values("start_s")
        assert (ordered["end_s"].to_numpy()[:-1] <= ordered["start_s"].to_numpy()[1:]).all()


def test_bins_hold_the_mean_of_the_step_function():
    times, values = np.array([1.0, 2.0, 4.0]), np.array([4.0, 0.0, 2.0])
    assert _bin_means(times, values, np.array([0.0, 1.0, 1.5, 3.0, 6.0])) == pytest.approx(
        [0.0, 4.0, 2.0 / 1.5, 4.0 / 3.0]
    )
    assert _bin_means(np.array([]), np.array([]), np.array([0.0, 1.0])).tolist() == [0.0]


def test_allocation_stacks_to_the_gpus_held_and_marks_the_size_of_the_cluster():
    figure = plot_allocation(ALLOCATION, "emulated", 8, {})
    (axes,) = figure.axes
    tops = [patch.get_data().values.max() for patch in axes.patches]
    assert max(tops) == pytest.approx(8.0)
    assert axes.lines[0].get_ydata()[0] == 8
    assert "h" in axes.get_xlabel()
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["DP", "ZeRO-Offload", "DP+TP+PP", "all GPUs"]


def test_allocation_draws_a_panel_for_each_policy():
    both = pd.concat([ALLOCATION.assign(policy="Sia"), ALLOCATION.assign(policy="FIFO")])
    figure = plot_allocation(both, "emulated", 8, {"Sia": "the other"})
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["the other", "FIFO"]


def test_gantt_shows_every_span_in_the_colour_of_its_family():
    spans = job_spans(EVENTS)
    (axes,) = plot_gantt(spans, "emulated").axes
    bars = [item for item in axes.collections if len(item.get_facecolor()) and item.get_paths()]
    area = sum(
        path.get_extents().width * round(path.get_extents().height)
        for item in bars
        for path in item.get_paths()
    )
    expected = ((spans["end_s"] - spans["start_s"]) / 3600).sum()
    drawn = [path for item in bars for path in item.get_paths() if path.get_extents().height > 0.5]
    assert sum(path.get_extents().width for path in drawn) == pytest.approx(expected)
    assert area == pytest.approx(expected)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["node 0", "node 1"]


def table4(delays=(260.0, 78.0)):
    rows = []
    for delay in delays:
        for trace in ("base", "mt"):
            for policy, jct in (
                ("morphling-lookahead", 3600.0),
                ("morphling-lookahead-n", 7200.0),
                ("sia", 10800.0),
            ):
                rows.append((trace, policy, delay, jct + delay, 2 * jct, jct / 3600, jct / 3600))
    columns = (
        "trace policy restart_delay_s avg_jct_s makespan_s jct_ratio_to_lookahead makespan_ratio_to_lookahead"
    )
    return pd.DataFrame(rows, columns=columns.split())


METRICS = [
    ("avg_jct_s", "jct_ratio_to_lookahead", "average JCT [h]"),
    ("makespan_s", "makespan_ratio_to_lookahead", "makespan [h]"),
]


def test_ratio_bars_have_a_bar_a_policy_with_its_ratio_and_the_published_mark():
    printed = pd.DataFrame(
        {"trace": ["base"], "policy": ["morphling-lookahead"], "avg_jct_s": [5400.0], "makespan_s": [np.nan]}
    )
    shown = at_delay(table4(), 260.0)
    figure = plot_ratio_bars(shown, "published", METRICS, "ratios", STYLES, {}, printed)
    assert len(figure.axes) == 4
    base_jct = figure.axes[0]
    assert [bar.get_width() for bar in base_jct.patches] == pytest.approx(
        [3860 / 3600, 7460 / 3600, 11060 / 3600]
    )
    assert [text.get_text() for text in base_jct.texts] == ["1.00", "2.00", "3.00"]
    assert_is_legible(figure)
    assert [tick.get_text() for tick in base_jct.get_yticklabels()] == [
        "Morphling-lookahead",
        "Morphling-lookahead-N",
        "Sia",
    ]
    (mark,) = [line for line in base_jct.lines if is_published(line)]
    assert mark.get_xydata().tolist() == [[1.5, 0.0]]
    assert not any(is_published(line) for line in figure.axes[2].lines)
    pale, strong = base_jct.patches[1].get_facecolor(), base_jct.patches[0].get_facecolor()
    assert sum(pale[:3]) > sum(strong[:3])


def test_marks_far_beyond_the_bars_leave_the_panels_room_and_those_of_others_do_not_count(tmp_path):
    rows, far = at_delay(table4(), 260.0), [360_000.0, 36_000_000.0]
    marks = pd.DataFrame(
        {"trace": "base", "policy": ["morphling-lookahead", "fifo"], "avg_jct_s": far, "makespan_s": far}
    )
    figure = plot_ratio_bars(rows, "published", METRICS, "ratios", STYLES, {}, marks)
    save_figure(figure, rows, tmp_path / "bars")  # warns where panels have no room, which is an error here
    assert all(axes.get_position().height > 0.1 for axes in figure.axes)
    assert 100.0 < figure.axes[0].get_xlim()[1] < 200.0


def test_where_a_bar_would_squeeze_the_others_all_times_of_the_metric_are_points_on_a_logarithmic_axis():
    rows = at_delay(table4(), 260.0)
    far = rows.tail(1).assign(policy="fifo", avg_jct_s=360_000.0, jct_ratio_to_lookahead=99.0)
    figure = plot_ratio_bars(pd.concat([rows, far]), "published", METRICS, "ratios", STYLES)
    panels = np.reshape(figure.axes, (2, 2))
    for axes in panels[0]:  # also for the trace without such a bar
        assert axes.get_xscale() == "log" and not axes.patches
        assert axes.get_xlabel() == "average JCT [h], log scale"
    ((x, y), *_) = panels[0, 1].collections[0].get_offsets().tolist()[::-1]
    assert (x, y) == (100.0, 3.0) and panels[0, 1].get_xlim()[1] > 100.0
    assert [text.get_text() for text in panels[0, 1].texts] == ["1.00", "2.00", "3.00", "99.00"]
    for axes in panels[1]:
        assert axes.get_xscale() == "linear" and axes.get_xlim()[0] == 0.0
    assert max(bar.get_width() for bar in panels[1, 1].patches) == pytest.approx(6.0)
    assert_is_legible(figure)


def test_one_restart_delay_is_shown_and_one_that_was_not_run_is_refused():
    assert set(at_delay(table4(), 78.0)["avg_jct_s"]) == {3678.0, 7278.0, 10878.0}
    with pytest.raises(TraceError, match="delay of 5 s"):
        at_delay(table4(), 5.0)


def test_cdf_steps_from_first_to_last_completion():
    table = pd.DataFrame({"policy": ["sia"] * 4 + ["fifo"] * 2, "jct_s": [4.0, 1.0, 3.0, 2.0, 10.0, 20.0]})
    (axes,) = plot_cdf(table, "emulated").axes
    assert axes.get_xscale() == "log"
    line = axes.lines[0]
    assert line.get_xdata().tolist() == [1.0, 2.0, 3.0, 4.0]
    assert line.get_ydata().tolist() == [0.25, 0.5, 0.75, 1.0]
    assert line.get_color() == STYLES["sia"].colour
    late = table.assign(policy="srtf")[table["policy"] == "sia"]
    both = pd.concat([table.assign(trace="base"), table.assign(trace="mt"), late.assign(trace="mt")])
    panels = plot_cdf(both, "emulated", titles={"base": "Base"}).axes
    assert [panel.get_title() for panel in panels] == ["Base", "mt\nSia and SRTF coincide"]


def test_ablations_are_compared_with_the_whole_policy_and_the_best_that_changes_nothing():
    jct = {"morphling": [1.0, 4.0], "morphling-n": [4.0, 4.0], "sia": [1.0, 1.0], "fifo": [9.0, 9.0]}
    jct |= {"tiresias": [3.0, 12.0], "srtf": [1.0, 1.0], "morphling-work": [1.0, 1.0]}
    rows = pd.DataFrame(
        [
            ("base", "shifted", seed, 64, 260.0, policy, value, 1.0)
            for policy, values in jct.items()
            for seed, value in enumerate(values)
        ],
        columns=["trace", "draw", "seed", "gpus", "restart_delay_s", "policy", "avg_jct_s", "makespan_s"],
    )
    worth = parts_worth(pd.concat([rows, rows.assign(trace="mt")[rows["policy"] != "morphling-n"]]))
    assert worth.values.tolist() == [
        ["morphling", "base", "", 1.0],
        ["morphling", "base", "-n", pytest.approx(2.0)],
        ["morphling", "base", "fixed", pytest.approx(3.0)],
    ]
    series = {"": STYLES["fifo"], "-n": replace(STYLES["srtf"], strength=0.5), "fixed": STYLES["sia"]}
    (axes,) = plot_grouped_bars(worth, "emulated", series, "ratio", styles=STYLES).axes
    assert [bar.get_height() for bar in axes.patches] == pytest.approx([1.0, 2.0, 3.0])
    assert axes.patches[2].get_facecolor() == to_rgba(STYLES["sia"].colour)
    assert parts_worth(rows[rows["policy"] == "sia"]).empty


@pytest.mark.parametrize(("n_groups", "n_rows"), [(5, 1), (9, 2)])
def test_many_bars_take_the_whole_width(n_groups, n_rows):
    series = {"all": STYLES["fifo"], "most": STYLES["srtf"], "few": STYLES["sia"]}
    rows = [
        (panel, f"group {number}", key, 60.0 + number, "100")
        for panel in ("base", "mt")
        for number in range(n_groups)
        for key in series
    ]
    table = pd.DataFrame(rows, columns=["panel", "group", "series", "value", "text"])
    titles = {f"group {number}": f"Mor-\n{number}" for number in range(n_groups)}
    figure = plot_grouped_bars(table, "emulated", series, "ratio", titles)
    first, second = figure.axes
    assert first.get_subplotspec().get_gridspec().nrows == n_rows
    assert first.get_ylim() == second.get_ylim()
    if n_rows > 1:
        assert_is_legible(figure)


@pytest.mark.parametrize("longest_h", [0.5, 0.9, 1.2, 1.6, 2.3, 9.0])
def test_ticks_of_intervals_do_not_touch_in_narrow_panels(longest_h):
    rows = [
        (panel, policy, 3600.0 * hours, np.nan, np.nan, False)
        for panel in ("one", "two", "three", "four")
        for policy, hours in (("morphling", 0.225), ("gavel-ftf", longest_h))
    ]
    table = pd.DataFrame(rows, columns=["panel", "policy", "mean", "low", "high", "is_hollow"])
    figure = plot_intervals(table, "emulated", "means", "broken", "intervals")
    assert_is_legible(figure)
    shown = [text for text in shown_texts(figure) if text in figure.axes[0].get_xticklabels()]
    boxes = sorted((text.get_window_extent() for text in shown), key=lambda box: box.x0)
    assert len(boxes) >= 2
    assert all(right.x0 - left.x1 > 4 for left, right in pairwise(boxes))


def test_intervals_are_drawn_for_every_policy_and_hollow_where_something_is_broken():
    table = pd.DataFrame(
        [
            (panel, policy, 3600.0 * hours, 3000.0 * hours, 4200.0 * hours, policy == "sia")
            for panel in ("one", "two", "three", "four", "five")
            for policy, hours in (("morphling", 0.4), ("sia", 1.2))
        ],
        columns=["panel", "policy", "mean", "low", "high", "is_hollow"],
    )
    figure = plot_intervals(table, "emulated", "means", "broken", "intervals", STYLES)
    assert [axes.get_title() for axes in figure.axes] == ["one", "two", "three", "four", "five"]
    spans = [bar.get_segments()[0][:, 0] for part in figure.axes[0].containers for bar in part.lines[2]]
    assert spans[0] == pytest.approx([3000 * 0.4 / 3600, 4200 * 0.4 / 3600])
    mean, hollow = (line for line in figure.axes[0].lines if line.get_markersize() == 5)
    assert mean.get_xdata() == pytest.approx([0.4]) and mean.get_markerfacecolor() != "white"
    assert hollow.get_markerfacecolor() == "white"
    told = [text.get_text() for text in figure.legends[0].get_texts()]
    assert told == ["means", "broken", "intervals"]
    assert_is_legible(figure)
    low, high = figure.axes[0].get_xlim()
    assert low < 0.33 and 1.4 < high < 3


def spans_of(axes):
    """Return the ends of the lines with caps of a panel, lower and upper, in the order of the values."""
    bars = [bar for part in axes.containers if isinstance(part, ErrorbarContainer) for bar in part.lines[2]]
    return [segment.tolist() for bar in bars for segment in bar.get_segments()]


def test_values_beyond_an_axis_are_written_at_its_edge_with_an_arrow():
    rows = [("sia", "twice", 9.0, 8.0, 10.0), ("sia", "half", 0.5, 0.2, 1.0), ("sia", "same", 1.0, 0.9, 8.0)]
    table = pd.DataFrame(rows, columns=["policy", "variant", "mean", "low", "high"])
    figure = plot_variants(table, "emulated", "ratios", "as shipped")
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.texts] == ["9", "0.2", "8"]
    arrows = [
        (line.get_marker(), line.get_xydata()[0].tolist()) for line in axes.lines if not line.get_clip_on()
    ]
    assert arrows == [(">", [1.0, 0.0]), ("<", [0.0, 1.0]), (">", [1.0, 2.0])]
    told = [text.get_text() for text in figure.legends[0].get_texts()]
    assert told == ["mean", "95 % interval", "as shipped", "beyond the axis, with its value"]
    assert_is_legible(figure)
    inside = plot_variants(table.iloc[1:2].assign(low=0.4), "emulated", "ratios", "as shipped")
    assert [text.get_text() for text in inside.legends[0].get_texts()] == told[:3]
    inside.draw_without_rendering()
    assert inside.axes[0].get_window_extent().height > 0.3 * inside.dpi


def test_intervals_beyond_a_panel_end_in_an_arrow_with_their_end():
    table = INTERVALS.assign(mean=3600.0, low=60.0, high=360_000.0)
    figure = plot_intervals(table, "emulated", "means", "broken", "intervals")
    assert [text.get_text() for text in figure.axes[0].texts] == ["0.0167", "100"]
    assert_is_legible(figure)


def test_no_interval_reaches_below_zero():
    (axes,) = new_figure(3.0, 2.0).subplots(1, 1, squeeze=False).flat
    spread(axes, [0, 1, 2], [-2.0, 0.5, np.nan], [4.0, 1.5, 9.0])
    assert spans_of(axes) == [[[0.0, 0.0], [0.0, 4.0]], [[1.0, 0.5], [1.0, 1.5]]]


@pytest.mark.parametrize("draw", ["dashes", "mark", "interval", "stroke"])
def test_what_no_legend_explains_is_found(draw):
    figure = new_figure(3.0, 2.0)
    axes = figure.subplots()
    drawn = {
        "dashes": lambda: axes.axhline(0.5, ls=":"),
        "mark": lambda: axes.plot([0.5], [0.5], ls="none", marker="D", mfc="white", mec="black"),
        "interval": lambda: spread(axes, 0.5, 0.2, 0.7),
        "stroke": lambda: axes.hlines(0.5, 0, 1, color="black"),
    }
    drawn[draw]()
    with pytest.raises(AssertionError):
        assert_is_legible(figure)


@pytest.mark.parametrize("limits", [(0.1, 100.0), (0.9, 1.1)])
def test_bars_without_a_base_are_found(limits):
    figure = new_figure(3.0, 2.0)
    axes = figure.subplots()
    axes.bar([0, 1], [1.0, 1.05])
    assert_bars_have_a_base(figure)
    axes.set(ylim=limits, yscale="log" if limits[1] > 2 else "linear")
    with pytest.raises(AssertionError):
        assert_bars_have_a_base(figure)


def test_a_number_beside_a_published_mark_is_found():
    figure = new_figure(3.0, 2.0)
    axes = figure.subplots()
    axes.set(xlim=(0, 1), ylim=(0, 1))
    published(axes, 0.5, 0.5)
    figure.legend(handles=[published_handle()])
    assert_is_legible(figure)
    axes.text(0.53, 0.5, "1.55", va="center")
    with pytest.raises(AssertionError):
        assert_is_legible(figure)


def study(parameter, values=(0.5, 1.0, 2.0), seeds=3):
    rows = [
        (policy, value, seed, scale * 3600 * (value + 0.1 * seed), scale * 36000.0)
        for policy, scale in (("morphling-lookahead", 1), ("fifo", 5))
        for value in values
        for seed in range(seeds)
    ]
    return pd.DataFrame(rows, columns=["policy", parameter, "seed", "avg_jct_s", "makespan_s"])


def test_bands_show_means_with_confidence_over_seeds():
    left, right = plot_bands(study("load_factor"), "emulated", "load_factor", "load", STYLES).axes
    line = left.lines[0]
    assert line.get_xdata() == pytest.approx([0.5, 1.0, 2.0])
    logs = np.log([[value + 0.1 * seed for seed in range(3)] for value in (0.5, 1.0, 2.0)])
    assert line.get_ydata() == pytest.approx(np.exp(logs.mean(axis=1)))
    half = stats.t.ppf(0.975, 2) * logs.std(axis=1, ddof=1) / np.sqrt(3)
    band = left.collections[0].get_paths()[0].vertices[:, 1]
    assert band.max() == pytest.approx(np.exp(logs.mean(axis=1) + half).max())
    assert band.min() == pytest.approx(np.exp(logs.mean(axis=1) - half).min())
    assert not right.collections
    assert right.lines[1].get_ydata() == pytest.approx([50.0] * 3)


@pytest.mark.parametrize("spread", [1.0, 1e6])
def test_axes_hold_the_lines_and_are_not_stretched_by_wide_bands(spread):
    table = study("load_factor")
    table.loc[table["policy"] == "morphling-lookahead", "avg_jct_s"] *= np.where(
        table["seed"] == 0, spread, 1.0 / spread
    )[:9]
    axes = plot_bands(table, "emulated", "load_factor", "load").axes[0]
    lines = np.concatenate([line.get_ydata() for line in axes.lines])
    low, high = axes.get_ylim()
    assert 0.5 * lines.min() < low < lines.min()
    assert lines.max() < high < 2.0 * lines.max()
    assert 3 <= sum(low <= tick <= high for tick in axes.get_yticks()) <= 30


def test_large_shares_are_in_percent_and_rounds_without_length_at_zero():
    shares = study("large_share")
    lengths = study("interval_s", values=(0.0, 60.0)).assign(avg_jct_s=3600.0)
    lengths["interval_s"] = lengths["interval_s"].where(lengths["interval_s"] > 0)
    figure, table = _draw_cluster.large_models({"large_models": shares}, "emulated")
    assert figure.axes[0].lines[0].get_xdata() == pytest.approx([50.0, 100.0, 200.0])
    assert table is shares
    figure, _ = _draw_cluster.rounds({"rounds": lengths}, "emulated")
    assert figure.axes[0].lines[0].get_xdata().tolist() == [0.0, 60.0]


def test_a_single_seed_has_no_band_and_the_legend_does_not_promise_one():
    figure = plot_bands(study("load_factor", seeds=1), "emulated", "load_factor", "load")
    assert not figure.axes[0].collections
    assert figure.get_suptitle() == ""
    assert "3 seeds" in plot_bands(study("load_factor"), "emulated", "load_factor", "load").get_suptitle()


def test_bands_of_three_policies_share_a_panel_with_the_means_of_the_others():
    names = [name for name in STYLES if STYLES[name].strength == 1]
    one = study("load_factor")[lambda table: table["policy"] == "fifo"]
    parts = [
        one.assign(policy=name, avg_jct_s=one["avg_jct_s"] * (2 + number - (name == "antman")))
        for number, name in enumerate(names)
    ]
    figure = plot_bands(pd.concat(parts), "emulated", "load_factor", "load", STYLES)
    assert len(names) == 11 and len(figure.axes) == 8
    legends = [[text.get_text() for text in axes.get_legend().get_texts()] for axes in figure.axes[:4]]
    assert [name for legend in legends for name in legend] == [STYLES[name].title for name in names]
    assert all(len(axes.lines) == 11 and len(axes.collections) <= 3 for axes in figure.axes)
    assert all(axes.get_ylim() == figure.axes[0].get_ylim() for axes in figure.axes[:4])
    coincident = [STYLES[name].title for name in ("synergy", "antman")]
    notes = [axes.get_title().replace("\n", " ") for axes in figure.axes]
    assert (
        notes[1] == f"{coincident[0]} and {coincident[1]} coincide" and notes[0] == notes[2] == notes[3] == ""
    )
    assert_is_legible(figure)


def test_scale_shows_cost_against_jobs_and_names_the_gpus():
    table = pd.DataFrame(
        [("sia", 406, 64, 0.5, 0.001), ("sia", 4060, 512, 20.0, 0.004), ("fifo", 406, 64, 0.02, 1e-5)],
        columns=["policy", "jobs", "gpus", "wall_s", "decision_wall_s"],
    )
    table = table.assign(low=table["wall_s"] / 2, high=table["wall_s"] * 3)
    metrics = [
        ("wall_s", "low", "high", 1.0, "trace [s]"),
        ("decision_wall_s", "decision_wall_s", "decision_wall_s", 1e3, "decision [ms]"),
    ]
    figure = plot_costs(table, "emulated", metrics, "medians", "fastest to slowest")
    left, right = figure.axes
    spans = left.collections[0].get_segments()
    assert [segment[:, 1].tolist() for segment in spans] == [[0.25, 1.5], [10.0, 60.0]]
    assert figure.legends[0].get_title().get_text() == "medians"
    assert_is_legible(figure)
    assert (left.get_xscale(), left.get_yscale()) == ("log", "log")
    assert right.lines[0].get_ydata() == pytest.approx([1.0, 4.0])
    assert figure.legends[0].get_texts()[-1].get_text() == "fastest to slowest"
    assert [tick.get_text() for tick in left.get_xticklabels()] == ["406\n64", "4,060\n512"]


@pytest.mark.parametrize(
    ("draw", "table"),
    [
        (lambda t: plot_bands(t, "emulated", "load_factor", "load"), study("load_factor")),
        (lambda t: plot_ratio_bars(t, "emulated", METRICS, "ratios"), at_delay(table4(), 260.0)),
        (lambda t: plot_allocation(t, "emulated", 8, {}), ALLOCATION),
        (lambda t: plot_gantt(t, "emulated"), job_spans(EVENTS)),
        (lambda t: plot_intervals(t, "emulated", "means", "broken", "intervals"), INTERVALS),
        (lambda t: plot_cdf(t, "emulated"), pd.DataFrame({"policy": ["sia"], "jct_s": [3.0]})),
    ],
)
def test_figures_are_saved_whole_and_refuse_tables_without_their_columns(draw, table, tmp_path):
    one = save_figure(draw(table), table, tmp_path / "one")
    two = save_figure(draw(table), table, tmp_path / "two")
    for first, second in zip(one, two, strict=True):
        assert first.read_bytes() == second.read_bytes()
        assert first.stat().st_size > 0
    with pytest.raises(TraceError, match="no rows"):
        draw(table.iloc[:0])
    with pytest.raises(TraceError, match="lacks column"):
        draw(table[table.columns[:1]])


def test_colours_stay_apart_for_readers_with_red_green_blindness():
    """Colours as seen with deuteranopia and protanopia (Machado et al. 2009), distances in CIELAB."""
    seen_as = {
        "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
        "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    }
    rgb = np.array([to_rgb(colour) for colour in PALETTE.values()])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    to_xyz = np.array([[0.4339, 0.3762, 0.1899], [0.2126, 0.7152, 0.0722], [0.0177, 0.1095, 0.8728]])
    for matrix in (np.eye(3), *map(np.array, seen_as.values())):
        xyz = np.clip(linear @ matrix.T, 0, 1) @ to_xyz.T
        f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
        lab = np.stack([116 * f[:, 1], 500 * (f[:, 0] - f[:, 1]), 200 * (f[:, 1] - f[:, 2])], axis=1)
        apart = np.linalg.norm(lab[:, None] - lab[None], axis=2) + 100 * np.eye(len(lab))
        assert apart.min() > 12


def test_policies_have_an_order_and_distinct_looks():
    assert in_order(["fifo", "other", "sia", "morphling-lookahead", "sia"], STYLES) == [
        "morphling-lookahead",
        "sia",
        "fifo",
        "other",
    ]
    lines = {(style.title, style.colour, style.marker, style.line) for style in STYLES.values()}
    assert len(lines) == len(STYLES)
    assert len({(style.colour, style.marker) for style in STYLES.values()}) == len(STYLES)
    assert style_of(STYLES, "other").title == "other"
    assert {name for name, style in STYLES.items() if style.strength < 1} == {
        name for name in STYLES if name.endswith(("-s", "-e", "-r", "-n"))
    }
    assert set(FAMILIES) >= set(EVENTS["family"]) - {""}
