"""Style sheet, sizes, colours and the one way in which a figure is saved."""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from importlib import resources
from pathlib import Path
from typing import ParamSpec

import matplotlib as mpl
import matplotlib.style
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.transforms import Bbox

from makespan.errors import TraceError
from makespan.tables import atomic_path

__all__ = [
    "FAMILY_COLOURS",
    "FAMILY_MARKERS",
    "MODEL_TITLES",
    "ONE_COLUMN_IN",
    "PALETTE",
    "TWO_COLUMNS_IN",
    "family_order",
    "model_order",
    "new_figure",
    "panel_grid",
    "require_columns",
    "save_figure",
    "source_label",
    "style",
    "styled",
]

ONE_COLUMN_IN = 3.3
TWO_COLUMNS_IN = 6.9

_PANELS_PER_ROW = 4

PALETTE = {
    "blue": "#0072B2",
    "vermilion": "#D55E00",
    "green": "#009E73",
    "purple": "#CC79A7",
    "orange": "#E69F00",
    "sky": "#56B4E9",
    "black": "#000000",
    "olive": "#8A7F00",
    "grey": "#8C8C8C",
}

FAMILY_COLOURS = {
    "DP": PALETTE["blue"],
    "GC": PALETTE["sky"],
    "ZeRO-DP+GA": PALETTE["green"],
    "ZeRO-Offload": PALETTE["orange"],
    "ZeRO-Offload+GC": PALETTE["vermilion"],
    "TP+GA": PALETTE["olive"],
    "TP+PP": PALETTE["purple"],
    "DP+TP+PP": PALETTE["black"],
}
FAMILY_MARKERS = {
    "DP": "o",
    "GC": "s",
    "ZeRO-DP+GA": "^",
    "ZeRO-Offload": "D",
    "ZeRO-Offload+GC": "d",
    "TP+GA": "P",
    "TP+PP": "v",
    "DP+TP+PP": "h",
}

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

_SOURCE_LABELS = {
    "emulated": "emulated testbed",
    "published": "published measurements",
    "measured": "own measurements",
}

_P = ParamSpec("_P")


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


def panel_grid(n_panels: int, height_in: float) -> tuple[Figure, list[Axes]]:
    """Create panels side by side, four at most in a row, and one more for the legend.

    Parameters
    ----------
    n_panels
        Panels that will be drawn; the others are hidden.
    height_in
        Height of a row [inches].

    Returns
    -------
    tuple
        The figure and its panels in reading order; the last one is free for the legend.
    """
    n_columns = min(n_panels + 1, _PANELS_PER_ROW)
    n_rows = math.ceil((n_panels + 1) / n_columns)
    figure = new_figure(TWO_COLUMNS_IN * max(n_columns, 2) / _PANELS_PER_ROW, height_in * n_rows + 0.2)
    panels = list(figure.subplots(n_rows, n_columns, squeeze=False).flat)
    for axes in panels[n_panels:]:
        axes.set_axis_off()
    return figure, panels


def source_label(figure: Figure, source: str, strip: bool = True) -> None:
    """Say in the lower right corner where the numbers of a figure come from.

    Parameters
    ----------
    figure
        The finished figure.
    source
        Name of the throughput source.
    strip
        Whether a strip at the lower edge is kept free; not needed beside an x label.
    """
    engine = figure.get_layout_engine()
    if isinstance(engine, ConstrainedLayoutEngine) and strip:
        share = 0.13 / figure.get_figheight()
        engine.set(rect=(0.0, share, 1.0, 1.0 - share))
    label = _SOURCE_LABELS.get(source, source)
    figure.text(
        0.995, 0.02 / figure.get_figheight(), f"source: {label}",
        ha="right", va="bottom", fontsize=5.5, color="#707070",
    )  # fmt: skip


def save_figure(figure: Figure, table: pd.DataFrame, stem: str | Path) -> tuple[Path, Path, Path]:
    """Write a figure as PDF and PNG and the table behind it as CSV.

    All three files appear together or not at all, and equal tables give equal bytes.

    Parameters
    ----------
    figure
        What to save.
    table
        The numbers that it shows.
    stem
        Path without suffix.

    Returns
    -------
    tuple of pathlib.Path
        The PDF, PNG and CSV files.
    """
    base = Path(stem)
    pdf, png, csv = (base.with_name(f"{base.name}.{kind}") for kind in ("pdf", "png", "csv"))
    with ExitStack() as stack, style():
        new_pdf, new_png, new_csv = (stack.enter_context(atomic_path(path)) for path in (pdf, png, csv))
        _settle(figure)
        figure.savefig(
            new_pdf, format="pdf", metadata={"CreationDate": None, "Creator": None, "Producer": None}
        )
        figure.savefig(new_png, format="png", metadata={"Software": None})
        new_csv.write_text(table.to_csv(index=False, lineterminator="\n"), encoding="utf-8", newline="\n")
    return pdf, png, csv


def _settle(figure: Figure) -> None:
    """Lay a figure out once, free of the last digits in which two solutions of one layout may differ."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for axes in figure.axes:
        edges = [round(edge, 9) for edge in axes.get_position(original=True).bounds]
        axes.set_position(Bbox.from_bounds(*edges))


def require_columns(table: pd.DataFrame, *names: str, figure: str) -> None:
    """Check that a table can be drawn.

    Raises
    ------
    TraceError
        The table is empty or lacks a column.
    """
    missing = [name for name in names if name not in table.columns]
    if missing:
        found = ", ".join(str(name) for name in table.columns) or "none"
        raise TraceError(f"figure {figure!r}: table lacks column(s) {', '.join(missing)}; found: {found}")
    if table.empty:
        raise TraceError(f"figure {figure!r}: the table has no rows")


def _ordered(found: "pd.Series[str]", known: list[str]) -> list[str]:
    names = set(found)
    return [name for name in known if name in names] + sorted(names - set(known))


def model_order(models: "pd.Series[str]") -> list[str]:
    """Return the models of a column in the order of the papers, unknown ones last."""
    return _ordered(models, list(MODEL_TITLES))


def family_order(families: "pd.Series[str]") -> list[str]:
    """Return the plan families of a column in the order of the papers, unknown ones last."""
    return _ordered(families, list(FAMILY_COLOURS))
