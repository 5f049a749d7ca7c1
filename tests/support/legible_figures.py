"""Whether a figure can be read: size, place and distance of its texts, and what explains its marks."""

import numpy as np
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgb
from matplotlib.container import BarContainer, ErrorbarContainer
from matplotlib.lines import Line2D
from matplotlib.path import Path
from matplotlib.text import Text

SPECIAL = {("D", True), ("arrow", False), *((marker, False) for marker in ("x", "+", "*", "|", "_"))}
_MARGIN_PX = 3  # of 100 an inch: letters are a little wider at that resolution than in the files


def assert_is_legible(figure):
    """Check sizes and places of texts, that marks have one meaning, and that a legend explains it."""
    assert_texts_have_room(figure)
    assert_bars_have_a_base(figure)
    assert_is_explained(figure)
    assert_labels_keep_off_published_marks(figure)


def assert_texts_have_room(figure):
    """Check that no text is smaller than 7 pt, touches another one, or leaves the figure."""
    figure.draw_without_rendering()
    boxes = [(text.get_text(), text.get_window_extent()) for text in shown_texts(figure)]
    assert min(text.get_fontsize() for text in shown_texts(figure)) >= 7
    for number, (name, box) in enumerate(boxes):
        assert min(box.x0, box.y0) >= -_MARGIN_PX, name
        assert box.x1 <= figure.bbox.x1 + _MARGIN_PX and box.y1 <= figure.bbox.y1 + _MARGIN_PX, name
        touching = [other for other, place in boxes[number + 1 :] if overlap(box, place)]
        assert not touching, (name, touching)


def overlap(box, other):
    """Say whether two boxes share more than the margin that fonts leave around letters."""
    across = min(box.x1, other.x1) - max(box.x0, other.x0)
    upwards = min(box.y1, other.y1) - max(box.y0, other.y0)
    return across > 1 and upwards > 2


def shown_texts(figure):
    """Return the texts that are drawn: of ticks those inside the view of axes that are switched on."""
    of_ticks, shown = set(), []
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            major = axis.get_major_ticks()
            of_ticks.update(
                id(label)
                for tick in (*major, *axis.get_minor_ticks())
                for label in (tick.label1, tick.label2)
            )
            low, high = sorted(axis.get_view_interval())
            minor = zip(axis.get_minor_ticks(), axis.get_minorticklocs(), strict=False)
            places = [*zip(major, axis.get_majorticklocs(), strict=True), *minor]
            shown += [tick.label1 for tick, place in places if axes.axison and low <= place <= high]
    shown += [text for text in figure.findobj(Text) if id(text) not in of_ticks]
    return [text for text in shown if text.get_visible() and text.get_text().strip()]


def assert_bars_have_a_base(figure):
    """Check that bars start at 0, on an axis that has it: their length is read, not their end."""
    for axes in figure.axes:
        for bars in (part for part in axes.containers if isinstance(part, BarContainer)):
            is_upright = bars.orientation == "vertical"
            scale, limits = (
                (axes.get_yscale(), axes.get_ylim()) if is_upright else (axes.get_xscale(), axes.get_xlim())
            )
            assert scale != "log" and min(limits) <= 0 <= max(limits), (axes.get_title(), scale, limits)


def assert_is_explained(figure):
    """Check that a legend has an entry for every kind of mark, of dashes, of intervals and of strokes.

    Lines with a colour of the legend, and solid lines in light grey, which separate, need none. A dot in a
    legend stands for the marks of all policies.
    """
    handles = legend_handles(figure)
    lines = [handle for handle in handles if isinstance(handle, Line2D)]
    colours = {to_rgb(colour) for handle in handles if (colour := colour_of(handle)) is not None}
    for axes in figure.axes:
        spreads = [part for part in axes.containers if isinstance(part, ErrorbarContainer)]
        capped = [line for part in spreads for line in part.lines[1]]
        bars = [bar for part in spreads for bar in part.lines[2]]
        if any(bar.get_segments() for bar in bars):
            assert any(isinstance(line.get_marker(), Path) for line in lines), "intervals"
        for line in (line for line in axes.lines if line not in capped and is_shown(line)):
            if line.get_linestyle() == "None":
                found = {mark_of(one) for one in lines}
                names = [mark_of(line)] + [("o", mark_of(line)[1])] * (mark_of(line) not in SPECIAL)
                assert found & set(names), mark_of(line)
            elif is_dashed(line):
                assert any(is_dashed(one) for one in lines), line
            elif sum(to_rgb(line.get_color())) < 1.9:
                assert to_rgb(line.get_color()) in colours, line
        for strokes in (one for one in axes.collections if type(one) is LineCollection and one not in bars):
            assert any(is_stroke(one) for one in lines) or not strokes.get_segments(), "strokes"


def assert_labels_keep_off_published_marks(figure):
    """Check that no number stands beside a published mark, unless the legend says that it is its value."""
    told = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    if any(text.startswith("published") and "value" in text.split("with its")[-1] for text in told):
        return
    marks = [(panel, line) for panel in figure.axes for line in panel.lines if is_published(line)]
    for axes, line in marks:
        places = line.get_transform().transform(np.column_stack(line.get_data()))
        texts = [text for text in axes.texts if any(letter.isdigit() for letter in text.get_text())]
        for (x, y), box in ((at, text.get_window_extent()) for at in places for text in texts):
            beside = box.y0 <= y <= box.y1 and box.x0 - 10 < x < box.x1 + 10
            assert not beside, (axes.get_title(), x, y, box)


def legend_handles(figure):
    """Return the entries of all legends."""
    legends = [*figure.legends, *(axes.get_legend() for axes in figure.axes)]
    return [handle for legend in legends if legend is not None for handle in legend.legend_handles]


def colour_of(handle):
    """Return the colour of an entry, of a patch that of its face."""
    if isinstance(handle, Line2D):
        return handle.get_color()
    return handle.get_facecolor() if hasattr(handle, "get_facecolor") else None


def is_shown(line):
    """Tell whether a line has points."""
    places = np.asarray(line.get_xydata(), dtype=float)
    return line.get_visible() and np.isfinite(places).all(axis=1).any()


def is_published(line):
    """Tell whether a line is of marks for published values: hollow diamonds."""
    return is_shown(line) and mark_of(line) == ("D", True)


def is_dashed(line):
    """Tell whether a line is dashed or dotted."""
    return line.get_linestyle() not in ("-", "None")


def is_stroke(line):
    """Tell whether an entry is a solid line without marks."""
    return line.get_linestyle() == "-" and line.get_marker() in ("None", "", None)


def mark_of(line):
    """Return the marker of a line and whether it is hollow; arrows to all sides are one mark."""
    marker, face = line.get_marker(), line.get_markerfacecolor()
    if marker in ("<", ">", "^", "v") and (not line.get_clip_on() or line.get_label().startswith("beyond")):
        return "arrow", False
    return marker, isinstance(face, str) and face in ("white", "none")
