"""How results show themselves: tables, texts and schedules as HTML in a notebook, and as text elsewhere."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple
from zlib import crc32

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#7f7f7f")
_WAITING, _RESTARTING = "#b8b8b8", "#dddddd"
_WIDTH, _ROW, _BAR, _LABELS, _AXIS = 720, 16, 11, 110, 34  # pixels
_MOST_ROWS = 60
_MOST_CELLS = 10  # rows of a table that are shown
_STEPS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
_MOST_TICKS = 8


class Span(NamedTuple):
    """Time in which a job holds devices [s]; it makes progress from ``ready_s`` on."""

    job: str
    start_s: float
    ready_s: float
    end_s: float
    group: str
    text: str


class Display(NamedTuple):
    """What is to be seen of a result at a glance; the chart is HTML, and left out of text."""

    title: str
    rows: Sequence[Mapping[Any, object]]
    note: str = ""
    chart: str = ""


class Displayed:
    """Base of results that have more content than anybody reads: they show what `display` returns."""

    __slots__ = ()

    def display(self) -> Display:
        """Return what is shown."""
        raise NotImplementedError

    def __repr__(self) -> str:
        """Return title, table and note as text."""
        shown = self.display()
        return "\n".join([shown.title, *filter(None, (_table_text(shown.rows), shown.note))])

    def _repr_html_(self) -> str:
        """Return title, table, note and chart."""
        shown = self.display()
        note = f"<p>{escape(shown.note)}</p>" if shown.note else ""
        return object_html(shown.title, table_html(shown.rows), note, shown.chart)


def text_html(text: str) -> str:
    """Return a text as it is, in a fixed-width font."""
    return f"<pre>{escape(text)}</pre>"


def table_html(rows: Sequence[Mapping[Any, object]], *, most: int = _MOST_CELLS) -> str:
    """Return rows as a table with the columns of the first, and say how many rows are left out."""
    if not rows:
        return "<p>no rows</p>"
    head = "".join(f"<th>{escape(str(name))}</th>" for name in rows[0])
    body = "".join(
        "<tr>" + "".join(f"<td>{_cell(row.get(name))}</td>" for name in rows[0]) + "</tr>"
        for row in rows[:most]
    )
    more = f"<p>and {len(rows) - most} more rows</p>" if len(rows) > most else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"


def _table_text(rows: Sequence[Mapping[Any, object]], *, most: int = _MOST_CELLS) -> str:
    """Return rows as `table_html` shows them, in columns; a single one as a line per name."""
    if not rows:
        return ""
    if len(rows) == 1:
        width = max(len(str(name)) for name in rows[0])
        return "\n".join(f"  {name!s:<{width}}  {_text(value)}" for name, value in rows[0].items())
    cells = [[str(name) for name in rows[0]]]
    cells += [[_text(row.get(name)) for name in rows[0]] for row in rows[:most]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(map(str.rjust, line, widths)) for line in cells]
    more = [f"and {len(rows) - most} more rows"] if len(rows) > most else []
    return "\n".join(f"  {line}" for line in (*lines, *more))


def _cell(value: object) -> str:
    return escape(_text(value))


def _text(value: object) -> str:
    if isinstance(value, float):
        return "-" if value != value else f"{value:.6g}"
    return str(value)


def object_html(title: str, *parts: str) -> str:
    """Return parts below a title."""
    return f"<div><p><strong>{escape(title)}</strong></p>{''.join(parts)}</div>"


def _colours_of(groups: Iterable[str]) -> dict[str, str]:
    """Return a colour per group, in most cases the same one in every chart."""
    colours: dict[str, str] = {}
    for group in sorted(groups):
        first = crc32(group.encode()) % len(_COLOURS)
        ranked = (*_COLOURS[first:], *_COLOURS[:first])
        colours[group] = next((one for one in ranked if one not in colours.values()), ranked[0])
    return colours


def schedule_svg(submitted_s: Mapping[str, float], spans: Iterable[Span]) -> str:
    """Draw a schedule: one row per job, in order of submission, one colour per group of spans.

    A thin line is time without devices, a light bar a restart delay. Jobs beyond the first sixty are left
    out, and the chart says so.
    """
    by_job: dict[str, list[Span]] = {job: [] for job in list(submitted_s)[:_MOST_ROWS]}
    for span in spans:
        if span.job in by_job:
            by_job[span.job].append(span)
    shown = [span for listed in by_job.values() for span in listed]
    if not shown:
        return "<p>no job held devices</p>"
    begin_s = min(submitted_s[job] for job in by_job)
    length_s = max(span.end_s for span in shown) - begin_s or 1.0
    colours = _colours_of({span.group for span in shown})

    def at(time_s: float) -> float:
        return _LABELS + (time_s - begin_s) / length_s * (_WIDTH - _LABELS - 8)

    def bar(span: Span, start_s: float, end_s: float, top: float, colour: str) -> str:
        width = max(at(end_s) - at(start_s), 0.0)
        shape = (
            f'<rect x="{at(start_s):.1f}" y="{top:.1f}" width="{width:.1f}" height="{_BAR}" fill="{colour}">'
        )
        return f"{shape}<title>{escape(span.text)}</title></rect>"

    bottom = _ROW * len(by_job)
    parts = []
    step_s = next(
        (step for step in _STEPS_S if length_s / step <= _MOST_TICKS), 86400 * (length_s // 604800 + 1)
    )
    for number in range(int(length_s / step_s) + 1):
        x, time_s = at(begin_s + number * step_s), round(number * step_s)
        label = f"{time_s // 3600}:{time_s // 60 % 60:02d}" + (f":{time_s % 60:02d}" if step_s < 60 else "")
        parts.append(f'<path d="M{x:.1f} 0V{bottom}" stroke="currentColor" stroke-opacity=".15"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 12}" text-anchor="middle">{label}</text>')
    for row, (job, listed) in enumerate(by_job.items()):
        top = row * _ROW + (_ROW - _BAR) / 2
        middle = row * _ROW + _ROW / 2
        parts.append(
            f'<text x="{_LABELS - 6}" y="{middle + 3:.1f}" text-anchor="end">{escape(job[:18])}</text>'
        )
        if listed:
            line = f"M{at(submitted_s[job]):.1f} {middle:.1f}H{at(listed[-1].end_s):.1f}"
            parts.append(f'<path d="{line}" stroke="{_WAITING}"/>')
        for span in listed:
            parts.append(bar(span, span.start_s, span.ready_s, top, _RESTARTING))
            parts.append(bar(span, span.ready_s, span.end_s, top, colours[span.group]))
    x = float(_LABELS)
    for name, colour in {**colours, "restarting": _RESTARTING}.items():
        parts.append(f'<rect x="{x:.0f}" y="{bottom + 20}" width="9" height="9" fill="{colour}"/>')
        parts.append(f'<text x="{x + 13:.0f}" y="{bottom + 28}">{escape(name)}</text>')
        x += 26 + 6 * len(name)
    left_out = len(submitted_s) - len(by_job)
    more = f"<p>the first {len(by_job)} of {len(submitted_s)} jobs</p>" if left_out else ""
    label = f"Schedule of {len(by_job)} jobs over {length_s:.0f} s"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {bottom + _AXIS}" width="{_WIDTH}" '
        f'role="img" aria-label="{label}" font-family="sans-serif" font-size="10" fill="currentColor">'
        f"{''.join(parts)}</svg>{more}"
    )
