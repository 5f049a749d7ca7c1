"""Style sheet, sizes, looks and the one way in which a figure is saved."""

import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from importlib import resources
from pathlib import Path
from typing import Any, ParamSpec

import matplotlib as mpl
import matplotlib.style
import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter
from matplotlib.transforms import Bbox

from makespan.errors import TraceError
from makespan.tables import atomic_path, source_label, write_csv, write_text

__all__ = [
    "FAMILIES",
    "MODEL_TITLES",
    "ONE_COLUMN_IN",
    "PALETTE",
    "POLICIES",
    "TWO_COLUMNS_IN",
    "Look",
    "finished",
    "look_of",
    "model_panels",
    "name_coincident",
    "new_figure",
    "pale",
    "ordered",
    "patches",
    "plain_numbers",
    "require_columns",
    "save_figure",
    "style",
    "styled",
]

ONE_COLUMN_IN = 3.3
TWO_COLUMNS_IN = 6.9

_PANELS_PER_ROW = 4
_LETTER_PT = 4.1  # mean width of a letter of a title
_CAPTION_WIDTH = 100

PALETTE = {
    "blue": "#0072B2",
    "vermilion": "#D55E00",
    "green": "#009E73",
    "purple": "#CC79A7",
    "orange": "#E69F00",
    "sky": "#56B4E9",
    "black": "#000000",
    "brown": "#661100",
    "grey": "#666666",
}

LineStyle = str | tuple[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Look:
    """How a policy or a plan family looks in every figure.

    Parameters
    ----------
    title, colour, marker, line
        Name in legends; of bars, points and lines, with the dash pattern of these.
    strength
        From 0 (white) to 1: how much of the colour bars have.
    """

    title: str
    colour: str
    marker: str
    line: LineStyle = "-"
    strength: float = 1.0


FAMILIES = {
    look.title: look
    for look in (
        Look("DP", PALETTE["blue"], "o"),
        Look("GC", PALETTE["sky"], "s"),
        Look("ZeRO-DP+GA", PALETTE["green"], "^"),
        Look("ZeRO-Offload", PALETTE["orange"], "p"),
        Look("ZeRO-Offload+GC", PALETTE["vermilion"], ">"),
        Look("TP+GA", PALETTE["brown"], "P"),
        Look("TP+PP", PALETTE["purple"], "v"),
        Look("DP+TP+PP", PALETTE["black"], "h"),
    )
}
"""Families of execution plans, in the order of the figures."""

POLICIES = {
    "sia": Look("Sia", PALETTE["vermilion"], "p"),
    "synergy": Look("Synergy", PALETTE["green"], "^"),
    "antman": Look("AntMan", PALETTE["purple"], "v"),
    "gavel": Look("Gavel", PALETTE["brown"], "P"),
    "tiresias": Look("Tiresias", PALETTE["orange"], "8"),
    "srtf": Look("SRTF", PALETTE["black"], "<", (0, (4, 2))),
    "sjf": Look("SJF", PALETTE["black"], ">", (0, (5, 1, 1, 1))),
    "fifo": Look("FIFO", PALETTE["grey"], "h", (0, (1, 1))),
}
"""Policies with which papers compare theirs, in the order of the figures."""

MODEL_TITLES = {
    "vit": "ViT-Base",
    "roberta": "RoBERTa-large",
    "bert": "BERT-large",
    "t5": "T5 1.2B",
    "gpt2": "GPT-2 1.5B",
    "llama7": "LLaMA-2-7B",
    "llama7_b16": "LLaMA-2-7B, batch 16",
    "llama30": "LLaMA-30B",
    "t5_3B": "T5 3B",
}

_P = ParamSpec("_P")


def look_of(looks: Mapping[str, Look], name: str) -> Look:
    """Return a look by name; unknown names are grey crosses under their own name."""
    return looks.get(name, Look(name, PALETTE["grey"], "X"))


def ordered(names: Iterable[Any], known: Iterable[str]) -> list[str]:
    """Return distinct names in the order of the known ones, the others sorted behind them."""
    found = set(names)
    first = [name for name in known if name in found]
    return first + sorted(found - set(first))


@contextmanager
def style() -> Iterator[None]:
    """Switch the style sheet on inside a block; the caller's settings come back afterwards."""
    sheet = resources.files("makespan.plots").joinpath("makespan.mplstyle")
    with mpl.rc_context(), resources.as_file(sheet) as path:
        mpl.rcdefaults()
        matplotlib.style.use(path)
        yield


def styled(draw: Callable[_P, Figure]) -> Callable[_P, Figure]:
    """Make a drawing function use the style sheet."""

    @wraps(draw)
    def inner(*args: _P.args, **kwargs: _P.kwargs) -> Figure:
        with style():
            return draw(*args, **kwargs)

    return inner


def new_figure(width_in: float, height_in: float) -> Figure:
    """Create an empty figure [inches] that belongs to no window system."""
    return Figure(figsize=(width_in, height_in))


def model_panels(
    models: Sequence[str], height_in: float, draw: Callable[[Axes, str], None]
) -> tuple[Figure, Axes]:
    """Draw a panel a model, four at most in a row [inches]; the panel returned is free for the legend."""
    n_columns = min(len(models) + 1, _PANELS_PER_ROW)
    n_rows = math.ceil((len(models) + 1) / n_columns)
    figure = new_figure(TWO_COLUMNS_IN * max(n_columns, 3) / _PANELS_PER_ROW, height_in * n_rows + 0.2)
    panels = list(figure.subplots(n_rows, n_columns, squeeze=False).flat)
    for axes in panels[len(models) :]:
        axes.set_axis_off()
    for axes, model in zip(panels, models, strict=False):
        draw(axes, model)
        axes.set_title(MODEL_TITLES.get(model, model))
    return figure, panels[len(models)]


def plain_numbers() -> FuncFormatter:
    """Return a formatter that writes ticks without exponents."""
    return FuncFormatter(lambda value, _: f"{value:g}")


def pale(look: Look) -> tuple[float, float, float]:
    """Return the colour of a look, mixed with white by its strength."""
    red, green, blue = to_rgb(look.colour)
    keep = look.strength
    return 1.0 - keep * (1.0 - red), 1.0 - keep * (1.0 - green), 1.0 - keep * (1.0 - blue)


def patches(names: Iterable[str], looks: Mapping[str, Look]) -> list[Patch | Line2D]:
    """Return legend entries with a filled box for each name."""
    return [Patch(color=look_of(looks, name).colour, label=name) for name in names]


def finished(
    figure: Figure, source: str, handles: Sequence[Artist] = (), strip: bool = True, **legend: Any
) -> Figure:
    """Give a figure its legend, and say in the lower right corner where its numbers come from.

    Parameters
    ----------
    handles, legend
        Legend entries, none for a figure that has its legend elsewhere, and further options of the legend;
        ``ncols`` is the largest number of columns.
    strip
        Whether a strip at the lower edge is kept free; not needed beside an x label.
    """
    if handles:
        n_rows = math.ceil(len(handles) / legend.get("ncols", 1))
        columns = {"ncols": math.ceil(len(handles) / n_rows)}  # rows of equal length
        figure.legend(handles=handles, **({"loc": "outside upper center"} | legend | columns))
    engine = figure.get_layout_engine()
    if isinstance(engine, ConstrainedLayoutEngine) and strip:
        share = 0.15 / figure.get_figheight()
        engine.set(rect=(0.0, share, 1.0, 1.0 - share))
    note = f"source: {source_label(source)}"
    place: dict[str, Any] = {"ha": "right", "va": "bottom"}
    figure.text(0.995, 0.02 / figure.get_figheight(), note, color="#707070", **place)
    return figure


def name_coincident(figure: Figure) -> None:
    """Say above each panel which of its labelled lines are nowhere further apart than they are wide."""
    figure.draw_without_rendering()  # distances on paper are known once the panels have their places
    for axes in figure.axes:
        lines = [line for line in axes.lines if not str(line.get_label()).startswith("_")]
        groups: list[list[Line2D]] = []
        for line in lines:
            home = next((group for group in groups if _coincide(group[0], line, figure.dpi / 72)), None)
            groups.append([line]) if home is None else home.append(line)
        notes = [_coincidence([str(line.get_label()) for line in group], lines) for group in groups]
        n_letters = int(axes.get_window_extent().width * 72 / figure.dpi / _LETTER_PT)
        told = [part for note in notes if note for part in textwrap.wrap(note, n_letters)]
        axes.set_title("\n".join([*filter(None, [axes.get_title()]), *told]))


def _coincide(one: Line2D, other: Line2D, px_per_pt: float) -> bool:
    first, second = (line.get_transform().transform(line.get_xydata()) for line in (one, other))
    if len(first) == 0 or first.shape != second.shape or (np.isnan(first) != np.isnan(second)).any():
        return False
    apart_px = np.hypot(*(first - second).T)
    width_px = px_per_pt * min(one.get_linewidth(), other.get_linewidth())
    return bool(np.isfinite(apart_px).any() and np.nanmax(apart_px) <= width_px)


def _coincidence(names: list[str], lines: Sequence[Line2D]) -> str:
    """Put a group of coincident lines into words; of many, those that are not in it."""
    others = [str(line.get_label()) for line in lines if line.get_label() not in names]
    if len(names) > 3 and len(others) <= 2:
        return f"all but {' and '.join(others)} coincide" if others else "all lines coincide"
    return f"{', '.join(names[:-1])} and {names[-1]} coincide" if len(names) > 1 else ""


def save_figure(
    figure: Figure, table: pd.DataFrame, stem: str | Path, caption: str | None = None
) -> tuple[Path, ...]:
    """Write a figure as PDF and PNG, the table behind it as CSV and a caption as text; return their paths.

    All files appear together or not at all, and equal tables give equal bytes. The stem is a path without
    suffix. Without a caption there is no text. Paragraphs of the caption are wrapped.
    """
    base = Path(stem)
    pdf, png, csv, txt = (base.with_name(f"{base.name}.{kind}") for kind in ("pdf", "png", "csv", "txt"))
    with ExitStack() as stack, style():
        new_pdf, new_png, new_csv = (stack.enter_context(atomic_path(path)) for path in (pdf, png, csv))
        _settle(figure)
        undated = dict.fromkeys(("CreationDate", "Creator", "Producer"))
        figure.savefig(new_pdf, format="pdf", metadata=undated)
        figure.savefig(new_png, format="png", metadata={"Software": None})
        write_csv(table, new_csv)
        if caption is None:
            return pdf, png, csv
        paragraphs = [textwrap.fill(one, _CAPTION_WIDTH) for one in caption.split("\n\n")]
        write_text("\n\n".join(paragraphs) + "\n", stack.enter_context(atomic_path(txt)))
    return pdf, png, csv, txt


def _settle(figure: Figure) -> None:
    """Lay a figure out once, free of the last digits in which two solutions of one layout may differ."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for axes in figure.axes:
        edges = [round(edge, 9) for edge in axes.get_position(original=True).bounds]
        axes.set_position(Bbox.from_bounds(*edges))


def require_columns(table: pd.DataFrame, *names: str, figure: str) -> None:
    """Check that a table can be drawn: it has rows and these columns, or `TraceError` says what it lacks."""
    missing = [name for name in names if name not in table.columns]
    if missing:
        found = ", ".join(str(name) for name in table.columns) or "none"
        raise TraceError(f"figure {figure!r}: table lacks column(s) {', '.join(missing)}; found: {found}")
    if table.empty:
        raise TraceError(f"figure {figure!r}: the table has no rows")
