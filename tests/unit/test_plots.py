"""Figures: what they show, that they are saved whole, and byte for byte alike."""

from types import SimpleNamespace

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from legible_figures import assert_is_legible, is_published
from matplotlib.lines import Line2D

from makespan.errors import TraceError
from makespan.papers.morphling.figures import plot_adaptation, plot_sharing
from makespan.plots import (
    ENVELOPE,
    FAMILIES,
    ONE_COLUMN_IN,
    TWO_COLUMNS_IN,
    add_legend,
    new_figure,
    plot_cpu_sensitivity,
    plot_error_bars,
    plot_prediction,
    plot_sensitivity,
    save_figure,
)
from makespan.tables import shown_source

pytestmark = pytest.mark.xdist_group("figures")


def error_table():
    rows = [
        ("vit", "DP", "extended", 2.0, 5.0, 3.6, 6.8),
        ("vit", "DP", "published", 8.0, 20.0, 3.6, 6.8),
        ("t5", "ZeRO-Offload+GC", "extended", 3.0, 7.0, 4.4, 6.3),
        ("t5", "DP+TP+PP", "extended", np.nan, np.nan, 2.4, 9.5),
    ]
    columns = (
        "model plan_family form avg_error_pct max_error_pct published_avg_error_pct published_max_error_pct"
    )
    return pd.DataFrame(rows, columns=columns.split())


def row_table():
    rows = [
        ("vit", "DP", "extended", False, True, 0.1, 0.11),
        ("vit", "DP", "extended", True, True, 0.2, 0.2),
        ("vit", "GC", "extended", False, False, 0.4, 0.2),
        ("vit", "GC", "published", False, True, 0.4, 0.3),
        ("bert", "GC", "extended", True, True, 0.4, 0.4),
    ]
    return pd.DataFrame(
        rows, columns=["model", "plan_family", "form", "fitted", "clean", "measured_s", "predicted_s"]
    )


def curve_table():
    rows = [("vit", "DP", g, 10.0 * g) for g in (1, 2, 4, 8)]
    rows += [("vit", "GC", g, 8.0 * g) for g in (1, 2, 4)] + [("vit", "GC", 8, 0.0)]
    rows += [("vit", ENVELOPE, g, 10.0 * 2 ** int(np.log2(g))) for g in range(1, 9)]
    return pd.DataFrame(rows, columns=["model", "plan_family", "gpus", "throughput_samples_per_s"])


def cpu_table():
    rows = [("bert", g, c, 3.0 * g * c) for g in (1, 4) for c in (2, 4, 8)]
    return pd.DataFrame(rows, columns=["model", "gpus", "cpu_threads", "throughput_samples_per_s"])


def stage_table():
    rows = [
        ("Morphling", "4x8", 32, "244", 13.7, 1.165),
        ("Morphling", "1x1", 1, "zero-offload+gc", 0.24, 66.0),
        ("TP+DP", "4x8", 32, "184", 12.2, 1.306),
        ("TP+DP", "1x1", 1, "", 0.0, 0.0),
    ]
    columns = "strategy stage gpus plan throughput_samples_per_s published_iter_time_s"
    return pd.DataFrame(rows, columns=columns.split())


def share_table():
    rows = [
        ("Simple", "roberta", 2, "zero-dp", 0.5, 0.53),
        ("Simple", "t5_3B", 2, "zero-offload", 0.25, 0.25),
        ("Morphling", "roberta", 1, "ga", 0.3, 0.55),
        ("Morphling", "t5_3B", 3, "tp+ga", 0.9, 0.89),
    ]
    return pd.DataFrame(rows, columns=["scheduler", "job", "gpus", "plan", "speedup", "published_speedup"])


FIGURES = {
    "prediction errors": (error_table, lambda t: plot_error_bars(t, "emulated", "extended", "published")),
    "prediction": (row_table, lambda t: plot_prediction(t, "emulated", "extended")),
    "sensitivity": (curve_table, lambda t: plot_sensitivity(t, "emulated")),
    "sensitivity_cpu": (cpu_table, lambda t: plot_cpu_sensitivity(t, "emulated")),
    "fig7": (stage_table, lambda t: plot_adaptation(t, "emulated", 30.0, 16)),
    "fig8": (share_table, lambda t: plot_sharing(t, "emulated")),
}


def texts(figure):
    return [text.get_text() for text in figure.findobj(mpl.text.Text) if text.get_text()]


CAPTION = "Fig. 7\n\n" + "Hollow diamonds are published. " * 9


@pytest.fixture(scope="module", params=FIGURES)
def drawn(request, tmp_path_factory):
    """Return a figure, its table, its function, the settings around it, and the files of two runs.

    The second run has a caption.
    """
    table, draw = FIGURES[request.param]
    root, before = tmp_path_factory.mktemp("figures"), dict(mpl.rcParams)
    figures = [draw(table()) for _ in range(2)]
    after = dict(mpl.rcParams)
    files = [
        save_figure(figures[0], table(), root / "a" / "f"),
        save_figure(figures[1], table(), root / "b" / "f", CAPTION),
    ]
    return SimpleNamespace(
        name=request.param, table=table, draw=draw, figure=figures[0], files=files, settings=(before, after)
    )


def test_two_runs_give_the_same_bytes(drawn):
    first, second = drawn.files
    assert [path.suffix for path in first] == [".pdf", ".png", ".svg", ".csv"]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second[:4]]


def test_fonts_are_embedded_and_no_date_is_written(drawn):
    content = drawn.files[0][0].read_bytes()
    assert b"/CreationDate" not in content
    assert b"/FontFile2" in content
    assert b"/Type3" not in content
    drawing = drawn.files[0][2].read_text()
    assert drawing.rstrip().endswith("</svg>") and "<dc:date>" not in drawing


def test_the_table_lies_beside_the_figure(drawn):
    read = pd.read_csv(drawn.files[0][3], keep_default_na=False, na_values=[""])
    pd.testing.assert_frame_equal(read, drawn.table().replace("", np.nan), check_dtype=False)


def test_source_is_on_a_figure_that_fits_a_page_and_leaves_the_settings_of_the_caller_alone(drawn):
    assert "source: emulated testbed" in texts(drawn.figure)
    assert drawn.figure.get_figwidth() <= TWO_COLUMNS_IN
    assert drawn.settings[0] == drawn.settings[1]


def test_texts_are_large_enough_and_neither_overlap_nor_leave_the_figure(drawn):
    assert_is_legible(drawn.figure)


def test_missing_column_and_empty_table_are_named(drawn):
    first = drawn.table().columns[0]
    with pytest.raises(TraceError, match=rf"figure '{drawn.name}': table lacks column\(s\) {first}; found: "):
        drawn.draw(drawn.table().drop(columns=first))
    with pytest.raises(TraceError, match=f"figure '{drawn.name}': the table has no rows"):
        drawn.draw(drawn.table().iloc[:0])


def test_a_caption_lies_beside_the_figure_as_text(drawn):
    without, (figure, *_, text) = drawn.files
    assert text == figure.with_suffix(".txt") and text.read_text().endswith("published.\n")
    assert text.read_text().split() == CAPTION.split()
    assert max(map(len, text.read_text().splitlines())) <= 100
    assert len(without) == 4 and not without[0].with_suffix(".txt").exists()


def test_failed_save_leaves_nothing_behind(tmp_path):
    figure = FIGURES["fig8"][1](share_table())

    class Broken(pd.DataFrame):
        def to_csv(self, *args, **kwargs):
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        save_figure(figure, Broken(share_table()), tmp_path / "fig8", "Caption.")
    assert list(tmp_path.iterdir()) == []


def test_error_bars_have_the_height_of_the_table():
    figure = FIGURES["prediction errors"][1](error_table())
    top, bottom = figure.axes
    heights = sorted(patch.get_height() for patch in top.patches if np.isfinite(patch.get_height()))
    assert heights == [2.0, 3.0, 8.0]
    assert all("[%],\nsquare-root axis" in axes.get_ylabel() for axes in (top, bottom))
    assert "ViT-Base" in texts(figure)


def test_published_cells_may_be_text_as_they_come_from_a_file():
    table = error_table().astype({"published_avg_error_pct": str, "published_max_error_pct": str})
    figure = FIGURES["prediction errors"][1](table)
    marks = {float(y) for line in figure.axes[0].lines if is_published(line) for y in line.get_ydata()}
    assert marks == {3.6, 4.4, 2.4}


def test_prediction_shows_one_form_and_the_error_of_held_out_clean_rows():
    figure = FIGURES["prediction"][1](row_table())
    shown = texts(figure)
    assert "mean 10.0 %\nn = 1" in shown
    assert "no held-out rows" in shown
    assert "flagged anomaly" in shown
    points = sum(
        len(line.get_xdata()) for line in figure.axes[0].lines if line.get_marker() not in ("None", "")
    )
    assert points == 3
    low, high = figure.axes[0].get_xlim()
    assert figure.axes[0].get_ylim() == (low, high)
    with pytest.raises(TraceError, match="no rows"):
        plot_prediction(row_table(), "emulated", "third")


def test_curves_join_the_counts_at_which_more_gpus_help():
    table = curve_table()
    slower = pd.DataFrame([("vit", "DP", 6, 15.0)], columns=table.columns)
    figure = plot_sensitivity(pd.concat([table, slower], ignore_index=True), "emulated")
    lines = {(line.get_color(), line.get_marker()): list(line.get_xdata()) for line in figure.axes[0].lines}
    assert lines[FAMILIES["DP"].colour, "o"] == [1, 2, 4, 8]
    assert not any(marker == "." for _, marker in lines)
    assert ENVELOPE + " (envelope)" in texts(figure)


def test_curves_leave_out_what_cannot_run():
    figure = FIGURES["sensitivity"][1](curve_table())
    shown = [
        list(line.get_xdata()) for line in figure.axes[0].lines if line.get_color() == FAMILIES["GC"].colour
    ]
    assert [1, 2, 4] in shown and not any(8 in counts for counts in shown)


def test_stages_are_annotated_and_failures_marked():
    figure = FIGURES["fig7"][1](stage_table())
    shown = texts(figure)
    assert {"4x8 (32 GPUs)", "244", "1x1 (1 GPU)", "zero-offload+gc"} <= set(shown)
    assert "cannot run" in shown and "published value" in shown
    axes = figure.axes[0]
    crosses = [line for line in axes.lines if line.get_marker() == "x" and len(line.get_xdata())]
    assert len(crosses) == 1
    assert axes.get_xlim() == (0.0, 60.0)
    published = sorted(float(y) for line in axes.lines if is_published(line) for y in line.get_ydata())
    assert published == pytest.approx(sorted([16 / 1.165, 16 / 66.0, 16 / 1.306]))


def test_stacks_end_at_the_sum_of_speedups():
    figure = FIGURES["fig8"][1](share_table())
    tops = {round(patch.get_y() + patch.get_height(), 6) for patch in figure.axes[0].patches}
    assert {0.75, 1.2} <= tops
    assert {"0.75", "1.20", "0.78", "1.44"} <= set(texts(figure))
    assert "0.30: 1 GPU,\nga" in texts(figure)


def test_labels_of_thin_bars_lie_beside_them():
    table = share_table().assign(speedup=[0.5, 0.01, 0.02, 0.9])
    figure = plot_sharing(table, "emulated")
    assert_is_legible(figure)
    bars = [patch.get_window_extent() for patch in figure.axes[0].patches]
    labels = [text for text in figure.axes[0].texts if "GPU" in text.get_text()]
    assert len(labels) == 4
    assert not any(label.get_window_extent().overlaps(bar) for label in labels for bar in bars)


def test_coincident_lines_are_named_and_lines_apart_are_not():
    table = stage_table()
    again = table[table["strategy"] == "TP+DP"].assign(strategy="TP+PP")
    figure = plot_adaptation(pd.concat([table, again]), "emulated", 30.0, 16)
    assert figure.axes[0].get_title() == "TP+DP and TP+PP coincide"
    again["throughput_samples_per_s"] *= 1.5
    figure = plot_adaptation(pd.concat([table, again]), "emulated", 30.0, 16)
    assert figure.axes[0].get_title() == ""


def test_legends_name_what_is_drawn_and_nothing_else():
    table = pd.concat(
        [error_table(), error_table().iloc[:1].assign(plan_family="TP+PP", avg_error_pct=np.nan)]
    )
    published = ["published_avg_error_pct", "published_max_error_pct"]
    figure = plot_error_bars(table.assign(**dict.fromkeys(published)), "emulated", "extended", "extended")
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "DP",
        "ZeRO-Offload+GC",
        "claimed bound of the average",
    ]
    assert "cannot run" not in texts(plot_adaptation(stage_table().iloc[:2], "emulated", 30.0, 16))


def test_legends_have_rows_of_equal_length():
    figure = plot_error_bars(error_table(), "emulated", "extended", "published")
    columns = figure.legends[0]._ncols
    assert len(figure.legends[0].get_texts()) % columns in (0, columns - 1)


def test_rows_that_are_not_those_of_the_source_are_not_called_measured():
    figure = plot_prediction(row_table(), shown_source("measured", ["emulated"]), "extended")
    assert "source: emulated, given as measured" in texts(figure)
    assert "given iteration time [s]" in texts(figure)


def test_unknown_models_and_families_are_drawn_last():
    table = error_table()
    table = pd.concat([table.assign(model="new", plan_family="other"), table], ignore_index=True)
    figure = plot_error_bars(table, "measured", "extended", "published")
    names = [label.get_text() for label in figure.axes[1].get_xticklabels()]
    assert names == ["ViT-Base", "T5 1.2B", "new"]
    assert "source: own measurements" in texts(figure)


def test_a_legend_that_is_wider_than_the_figure_gets_more_rows():
    names = ["a very long explanation of a mark", "another one that is as long", "and a third one"]
    figure = new_figure(ONE_COLUMN_IN, 2.0)
    figure.subplots().plot([0, 1], [0, 1])
    handles = [Line2D([], [], marker="o", label=name) for name in names]
    add_legend(figure, "emulated", handles, ncols=3)
    figure.draw_without_rendering()
    (legend,) = figure.legends
    box = legend.get_window_extent()
    assert box.x0 >= 0 and box.x1 <= figure.bbox.x1
    assert [text.get_text() for text in legend.get_texts()] == names
