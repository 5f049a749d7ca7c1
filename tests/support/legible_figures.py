"""Whether a figure can be read: size, place and distance of its texts."""

from matplotlib.text import Text

_MARGIN_PX = 3  # of 100 an inch: letters are a little wider at that resolution than in the files


def assert_is_legible(figure):
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
            places = zip(major, axis.get_majorticklocs(), strict=True)
            shown += [tick.label1 for tick, place in places if axes.axison and low <= place <= high]
    shown += [text for text in figure.findobj(Text) if id(text) not in of_ticks]
    return [text for text in shown if text.get_visible() and text.get_text().strip()]
