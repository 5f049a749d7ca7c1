"""Style of all figures: sizes, styles, legends, saving, and marks with one meaning in all figures."""

import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from importlib import resources
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import matplotlib as mpl
import matplotlib.style
import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.path import Path as MarkerPath
from matplotlib.ticker import FuncFormatter
from matplotlib.transforms import Bbox

from makespan.errors import InputError, TraceError
from makespan.files import atomic_path, write_text
from makespan.tables import source_label, write_csv

# --- Looks and figures ------------------------------------------------------------------------------

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
class Style:
    """Style of a policy or a plan family in every figure.

    Parameters
    ----------
    title, colour, marker, line
        Name in legends; colour, marker of points, and dash pattern of lines.
    strength
        Strength of the colour in bars, from 0 (white) to 1.
    """

    title: str
    colour: str
    marker: str
    line: LineStyle = "-"
    strength: float = 1.0


FAMILIES = {
    style.title: style
    for style in (
        Style("DP", PALETTE["blue"], "o"),
        Style("GC", PALETTE["sky"], "s"),
        Style("ZeRO-DP+GA", PALETTE["green"], "^"),
        Style("ZeRO-Offload", PALETTE["orange"], "p"),
        Style("ZeRO-Offload+GC", PALETTE["vermilion"], ">"),
        Style("TP+GA", PALETTE["brown"], "P"),
        Style("TP+PP", PALETTE["purple"], "v"),
        Style("DP+TP+PP", PALETTE["black"], "h"),
    )
}
"""Families of execution plans, in the order of the figures."""
POLICIES = {
    "sia": Style("Sia", PALETTE["vermilion"], "p"),
    "synergy": Style("Synergy", PALETTE["green"], "^"),
    "antman": Style("AntMan", PALETTE["purple"], "v"),
    "gavel": Style("Gavel", PALETTE["brown"], "P"),
    "tiresias": Style("Tiresias", PALETTE["orange"], "8"),
    "srtf": Style("SRTF", PALETTE["black"], "<", (0, (4, 2))),
    "sjf": Style("SJF", PALETTE["black"], ">", (0, (5, 1, 1, 1))),
    "fifo": Style("FIFO", PALETTE["grey"], "h", (0, (1, 1))),
}
"""Policies that papers compare with their own, in the order of the figures."""
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
_R = TypeVar("_R")


def style_of(styles: Mapping[str, Style], name: str) -> Style:
    """Return a style by name; unknown names are grey crosses under their own name."""
    return styles.get(name, Style(name, PALETTE["grey"], "X"))


def in_order(names: Iterable[Any], known: Iterable[str]) -> list[str]:
    """Return distinct names in the order of the known ones, followed by the others in sorted order."""
    distinct = set(names)
    first = [name for name in known if name in distinct]
    return first + sorted(distinct - set(first))


@contextmanager
def style_sheet() -> Iterator[None]:
    """Apply the style sheet inside a block, and restore the caller's settings afterwards."""
    sheet = resources.files("makespan.plots").joinpath("makespan.mplstyle")
    with mpl.rc_context(), resources.as_file(sheet) as path:
        mpl.rcdefaults()
        matplotlib.style.use(path)
        yield


def figure_style(draw: Callable[_P, _R]) -> Callable[_P, _R]:
    """Make a drawing function use the style sheet."""

    @wraps(draw)
    def inner(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with style_sheet():
            return draw(*args, **kwargs)

    return inner


def new_figure(width_in: float, height_in: float) -> Figure:
    """Create an empty figure of a size [inches], without a window system."""
    return Figure(figsize=(width_in, height_in))


def model_panels(
    models: Sequence[str], height_in: float, draw: Callable[[Axes, str], None]
) -> tuple[Figure, Axes]:
    """Draw one panel per model, at most four in a row [inches]; the returned panel is free for the legend."""
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


def pale(style: Style) -> tuple[float, float, float]:
    """Return the colour of a style, mixed with white by its strength."""
    red, green, blue = to_rgb(style.colour)
    keep = style.strength
    return 1.0 - keep * (1.0 - red), 1.0 - keep * (1.0 - green), 1.0 - keep * (1.0 - blue)


def patches(names: Iterable[str], styles: Mapping[str, Style]) -> list[Patch | Line2D]:
    """Return legend entries with a filled box for each name."""
    return [Patch(color=style_of(styles, name).colour, label=name) for name in names]


def add_legend(
    figure: Figure, source: str, handles: Sequence[Artist] = (), strip: bool = True, **legend: Any
) -> Figure:
    """Add the legend to a figure, and the source of its numbers in the lower right corner.

    Parameters
    ----------
    handles, legend
        Legend entries, none for a figure that has its legend elsewhere, and further options of the legend;
        ``ncols`` is the largest number of columns; there are fewer where they are wider than the figure.
    strip
        Whether a strip at the lower edge is kept free; not needed if there is an x label.
    """
    if handles:
        n_rows = math.ceil(len(handles) / legend.get("ncols", 1))
        while True:
            columns = {"ncols": math.ceil(len(handles) / n_rows)}  # rows of equal length
            added = figure.legend(handles=handles, **({"loc": "outside upper center"} | legend | columns))
            if n_rows == len(handles) or added.get_window_extent().width <= figure.bbox.width:
                break
            added.remove()
            n_rows += 1
    engine = figure.get_layout_engine()
    if isinstance(engine, ConstrainedLayoutEngine) and strip:
        share = 0.15 / figure.get_figheight()
        engine.set(rect=(0.0, share, 1.0, 1.0 - share))
    note = f"source: {source_label(source)}"
    place: dict[str, Any] = {"ha": "right", "va": "bottom"}
    figure.text(0.995, 0.02 / figure.get_figheight(), note, color="#707070", **place)
    return figure


def name_coincident(figure: Figure) -> None:
    """Name above each panel the labelled lines that coincide, that is, are never further apart than wide."""
    figure.draw_without_rendering()  # distances on paper are known only after the layout
    for axes in figure.axes:
        lines = [line for line in axes.lines if not str(line.get_label()).startswith("_")]
        groups: list[list[Line2D]] = []
        for line in lines:
            home = next((group for group in groups if _coincide(group[0], line, figure.dpi / 72)), None)
            groups.append([line]) if home is None else home.append(line)
        notes = []
        for names in ([str(line.get_label()) for line in group] for group in groups):
            others = [str(line.get_label()) for line in lines if line.get_label() not in names]
            if len(names) > 3 and len(others) <= 2:
                notes.append(f"all but {' and '.join(others)} coincide" if others else "all lines coincide")
            elif len(names) > 1:
                notes.append(f"{', '.join(names[:-1])} and {names[-1]} coincide")
        n_letters = int(axes.get_window_extent().width * 72 / figure.dpi / _LETTER_PT)
        wrapped = [part for note in notes for part in textwrap.wrap(note, n_letters)]
        axes.set_title("\n".join([*filter(None, [axes.get_title()]), *wrapped]))


def _coincide(line: Line2D, other: Line2D, px_per_pt: float) -> bool:
    first, second = (each.get_transform().transform(each.get_xydata()) for each in (line, other))
    if len(first) == 0 or first.shape != second.shape or (np.isnan(first) != np.isnan(second)).any():
        return False
    apart_px = np.hypot(*(first - second).T)
    width_px = px_per_pt * min(line.get_linewidth(), other.get_linewidth())
    return bool(np.isfinite(apart_px).any() and np.nanmax(apart_px) <= width_px)


def save_figure(
    figure: Figure, table: pd.DataFrame, stem: str | Path, caption: str | None = None
) -> tuple[Path, ...]:
    """Write a figure as PDF, PNG and SVG, its table as CSV and a caption as text; return their paths.

    All files appear together or not at all, and equal tables give equal bytes. The stem is a path without
    suffix. Without a caption there is no text. Paragraphs of the caption are wrapped.
    """
    base = Path(stem)
    paths = tuple(base.with_name(f"{base.name}.{kind}") for kind in ("pdf", "png", "svg", "csv"))
    with ExitStack() as stack, style_sheet():
        new_pdf, new_png, new_svg, new_csv = (stack.enter_context(atomic_path(path)) for path in paths)
        _save(figure, {"pdf": new_pdf, "png": new_png, "svg": new_svg})
        write_csv(table, new_csv)
        if caption is None:
            return paths
        txt = base.with_name(f"{base.name}.txt")
        paragraphs = [textwrap.fill(paragraph, _CAPTION_WIDTH) for paragraph in caption.split("\n\n")]
        write_text("\n\n".join(paragraphs) + "\n", stack.enter_context(atomic_path(txt)))
    return *paths, txt


def write_figure(figure: Figure, path: str | Path) -> None:
    """Write a figure to one file, PDF, PNG or SVG by its suffix; equal figures give equal bytes.

    Raises `InputError` for another suffix.
    """
    kind = figure_kind(path)
    with atomic_path(path) as new, style_sheet():
        _save(figure, {kind: new})


def figure_kind(path: str | Path) -> str:
    """Return the format that the suffix of a file names; raises `InputError` for another one."""
    kind = Path(path).suffix.lower().removeprefix(".")
    if kind not in _UNDATED:
        found = f"suffix {Path(path).suffix!r}" if kind else "no suffix"
        raise InputError(f"{path}: {found}; expected a file that ends in .pdf, .png or .svg")
    return kind


_UNDATED = {
    "pdf": dict.fromkeys(("CreationDate", "Creator", "Producer")),
    "png": {"Software": None},
    # Ids of its parts follow from `svg.hashsalt` of the style sheet, so equal figures have equal bytes.
    "svg": dict.fromkeys(("Date", "Creator")),
}


def _save(figure: Figure, paths: Mapping[str, Path]) -> None:
    """Lay a figure out once, round the positions and write a file of each format.

    The last digits of the solver's positions differ between runs.
    """
    figure.draw_without_rendering()
    # With a layout engine, even one that does nothing, each file would be drawn twice.
    with mpl.rc_context({"figure.constrained_layout.use": False}):
        figure.set_layout_engine(None)
        for axes in figure.axes:
            edges = [round(edge, 9) for edge in axes.get_position(original=True).bounds]
            axes.set_position(Bbox.from_bounds(*edges))
        for kind, path in paths.items():
            figure.savefig(path, format=kind, metadata=_UNDATED[kind])


def require_columns(table: pd.DataFrame, *names: str, figure: str) -> None:
    """Check that a table has rows and these columns; a `TraceError` names missing columns."""
    missing = [name for name in names if name not in table.columns]
    if missing:
        columns = ", ".join(str(name) for name in table.columns) or "none"
        raise TraceError(f"figure {figure!r}: table lacks column(s) {', '.join(missing)}; found: {columns}")
    if table.empty:
        raise TraceError(f"figure {figure!r}: the table has no rows")


# --- Marks ------------------------------------------------------------------------------------------
#
# Each has one meaning in all figures, and an entry that explains it in a legend.
#
# - A hollow diamond is a published value, of the paper or of the artifact, never one of ours.
# - A thin line with caps is a spread or an interval around a value of ours.
# - A cross marks something that cannot run or does not exist.
# - A dashed line is a limit, and a dotted one a reference, such as equality.
# - A black dot is another value of ours beside the one that a bar shows.
# - An arrow at the edge of a panel points to a value beyond it, which is written beside the arrow.

Numbers = npt.ArrayLike
_PUBLISHED: dict[str, Any] = {"ls": "none", "marker": "D", "ms": 3.6, "mfc": "white", "mew": 0.9}
_CANNOT_RUN: dict[str, Any] = {"ls": "none", "marker": "x", "ms": 4.5, "mew": 1.3}
_COMPARED: dict[str, Any] = {"ls": "none", "marker": "o", "ms": 2.8, "mew": 0.0}
_LIMIT: dict[str, Any] = {"color": "#404040", "lw": 0.8, "ls": (0, (4, 2))}
_REFERENCE: dict[str, Any] = {"color": "#404040", "lw": 0.8, "ls": (0, (1, 1.5))}
_SPREAD: dict[str, Any] = {"fmt": "none", "elinewidth": 0.8, "capsize": 1.5, "capthick": 0.8, "zorder": 4}
_CAPPED = MarkerPath([(0.0, -1.0), (0.0, 1.0), (-0.35, -1.0), (0.35, -1.0), (-0.35, 1.0), (0.35, 1.0)],
               [MarkerPath.MOVETO, MarkerPath.LINETO] * 3)  # fmt: skip
_ARROWS = {(True, True): ">", (True, False): "<", (False, True): "^", (False, False): "v"}
_OVER = 6  # drawn over bars and lines
_NUMBER_PT = 26.0  # length of a number beside an arrow


def published(
    axes: Axes, x: Numbers, y: Numbers, colour: str = "black", *, is_joined: bool = False, **more: Any
) -> None:
    """Mark published values; missing ones have no mark, and each of several series may have a colour."""
    line = {"ls": "-", "lw": 0.7, "color": colour} if is_joined else {}
    axes.plot(x, y, **_PUBLISHED | {"mec": colour, "zorder": _OVER} | line | more)


def published_handle(label: str = "published", joined_by: str | None = None) -> Line2D:
    """Return the legend entry of published values; ``joined_by`` is the colour of the line through them."""
    line = {} if joined_by is None else {"ls": "-", "lw": 0.7, "color": joined_by}
    return Line2D([], [], label=label, mec="black", **_PUBLISHED | line)


def spread(
    axes: Axes, place: Numbers, low: Numbers, high: Numbers, colour: str = "black", *, is_across: bool = False
) -> None:
    """Draw lines with caps from ``low`` to ``high`` at places on the other axis; missing ends draw none.

    Times, rates and ratios are never negative, so a symmetric interval is cut at zero.
    """
    at, ends = (
        np.atleast_1d(np.asarray(place, dtype=float)),
        np.array([low, high], dtype=float).reshape(2, -1),
    )
    known = np.isfinite(ends).all(axis=0)
    at, ends = at[known], np.maximum(ends[:, known], 0.0)
    middle, half = ends.mean(axis=0), np.ptp(ends, axis=0) / 2.0
    drawn: dict[str, Any] = _SPREAD | {"ecolor": colour}
    if is_across:
        axes.errorbar(middle, at, xerr=half, **drawn)
    else:
        axes.errorbar(at, middle, yerr=half, **drawn)


def spread_handle(label: str, colour: str = "black") -> Line2D:
    """Return the legend entry of spreads and intervals."""
    return Line2D([], [], ls="none", marker=_CAPPED, ms=5, mew=0.8, color=colour, label=label)


def cannot_run(axes: Axes, x: Numbers, y: Numbers, colour: str = "black", **more: Any) -> None:
    """Mark something that cannot run or does not exist, at the place of its value."""
    axes.plot(x, y, **_CANNOT_RUN | {"color": colour, "zorder": _OVER} | more)


def cannot_run_handle(label: str = "cannot run") -> Line2D:
    """Return the legend entry of things that cannot run."""
    return Line2D([], [], label=label, color="black", **_CANNOT_RUN)


def compared(axes: Axes, x: Numbers, y: Numbers, **more: Any) -> None:
    """Mark another value of ours beside the one that a bar shows."""
    axes.plot(x, y, **_COMPARED | {"color": "black", "zorder": 5} | more)


def compared_handle(label: str) -> Line2D:
    """Return the legend entry of values beside those of bars."""
    return Line2D([], [], label=label, color="black", **_COMPARED)


def limit(axes: Axes, value: float, is_across: bool = True, **more: Any) -> None:
    """Draw a limit as a horizontal line, or as a vertical one."""
    (axes.axhline if is_across else axes.axvline)(value, **_LIMIT | {"zorder": 1} | more)


def limit_handle(label: str) -> Line2D:
    """Return the legend entry of a limit."""
    return Line2D([], [], label=label, **_LIMIT)


def reference(axes: Axes, x: Numbers, y: Numbers, **more: Any) -> None:
    """Draw a line to compare with, through the given points."""
    axes.plot(x, y, **_REFERENCE | {"zorder": 1, "label": "_reference"} | more)


def reference_handle(label: str) -> Line2D:
    """Return the legend entry of a line to compare with."""
    return Line2D([], [], label=label, **_REFERENCE)


def beyond(axes: Axes, place: float, value: float, limits: tuple[float, float], colour: str, *,
           is_across: bool = True, row: float | None = None, n_before: int = 0) -> bool:  # fmt: skip
    """Mark a value outside the limits of an axis by an arrow at the edge with its number.

    Parameters
    ----------
    place
        Position on the other axis.
    is_across
        Whether the value lies on the horizontal axis.
    row, n_before
        Position of the number, that of the arrow by default, and how many numbers are there already.

    Returns
    -------
    bool
        Whether the value is beyond, and has its mark.
    """
    if not np.isfinite(value) or limits[0] <= value <= limits[1]:
        return False
    is_high = value > limits[1]
    edge = 1.0 if is_high else 0.0
    transform = axes.get_yaxis_transform() if is_across else axes.get_xaxis_transform()
    at = (edge, place) if is_across else (place, edge)
    axes.plot(
        [at[0]], [at[1]], ls="none", marker=_ARROWS[is_across, is_high], ms=4, mew=0.0, color=colour,
        transform=transform, clip_on=False, zorder=_OVER,
    )  # fmt: skip
    inwards = -1 if is_high else 1
    stand = (edge, place if row is None else row) if is_across else (place if row is None else row, edge)
    aligned: dict[str, Any] = (
        {
            "xytext": ((5 + _NUMBER_PT * n_before) * inwards, 0),
            "ha": "right" if is_high else "left",
            "va": "center",
        }
        if is_across
        else {
            "xytext": (0, (4 + _NUMBER_PT * n_before) * inwards),
            "ha": "center",
            "va": "top" if is_high else "bottom",
            "rotation": 90,
        }
    )
    axes.annotate(
        f"{float(f'{value:.3g}'):g}", stand, xycoords=transform, textcoords="offset points", zorder=_OVER,
        color=colour, bbox={"fc": "white", "lw": 0, "pad": 0.6}, annotation_clip=False, **aligned,
    )  # fmt: skip
    return True


def beyond_handle(label: str = "beyond the axis, with its value") -> Line2D:
    """Return the legend entry of values beyond an axis."""
    return Line2D([], [], ls="none", marker=">", ms=4, mew=0.0, color="#404040", label=label)
