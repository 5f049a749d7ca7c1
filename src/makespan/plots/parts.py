"""Parts that charts are put together from: groups of bars, stacks, heat maps, and entries of lines."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from makespan.plots.style import Style, cannot_run, published, spread

_GROUP_WIDTH = 0.8
_CROSS_HEIGHT = 0.05  # of the panel, where a bar would begin


@dataclass(frozen=True, slots=True)
class Bars:
    """One series of bars, with one bar in every group.

    Parameters
    ----------
    heights
        Values; NaN for no bar.
    colour, title
        Colour, and name in the legend.
    half
        Half the length of the spread around each value; NaN for none.
    published
        Published values; NaN for none.
    is_infeasible
        Groups in which the series cannot run: they get a cross in place of the bar.
    """

    heights: npt.ArrayLike
    colour: str
    title: str = ""
    half: npt.ArrayLike | None = None
    published: npt.ArrayLike | None = None
    is_infeasible: npt.ArrayLike | None = None


def draw_bars(
    axes: Axes, series: Sequence[Bars], width: float = _GROUP_WIDTH, mark: Mapping[str, Any] | None = None
) -> list[np.ndarray]:
    """Draw groups of bars with their spreads, published values and crosses; return the places of the bars.

    Group ``k`` stands around ``k``.

    Parameters
    ----------
    width
        Width of a group.
    mark
        Further options of published values and crosses, such as ``ms``.
    """
    places = []
    for number, bars in enumerate(series):
        heights = np.asarray(bars.heights, dtype=float)
        x = np.arange(len(heights)) + (number - (len(series) - 1) / 2) * width / len(series)
        axes.bar(x, heights, 0.9 * width / len(series), color=bars.colour, lw=0, zorder=2)
        if bars.half is not None:
            half = np.asarray(bars.half, dtype=float)
            spread(axes, x, heights - half, heights + half)
        if bars.published is not None:
            published(axes, x, np.asarray(bars.published, dtype=float), **dict(mark or {}))
        if bars.is_infeasible is not None:
            crosses = x[np.asarray(bars.is_infeasible, dtype=bool)]
            bottom = np.full(len(crosses), _CROSS_HEIGHT)
            cannot_run(axes, crosses, bottom, transform=axes.get_xaxis_transform(), **dict(mark or {}))
        places.append(x)
    return places


def bar_handles(series: Iterable[Bars]) -> list[Patch | Line2D]:
    """Return the legend entries of series of bars."""
    return [Patch(color=bars.colour, label=bars.title) for bars in series]


def draw_stack(
    axes: Axes, x: npt.ArrayLike, parts: Iterable[tuple[str, npt.ArrayLike]], width: float
) -> None:
    """Draw bars stacked on each other, each part a colour and its heights."""
    base = np.zeros(np.shape(x))
    for colour, heights in parts:
        axes.bar(x, heights, width, base, color=colour, lw=0, zorder=2)
        base = base + np.asarray(heights, dtype=float)


def name_groups(axes: Axes, names: Sequence[str], rotation: float = 0.0) -> None:
    """Name the groups of bars at 0, 1, ... on the horizontal axis, without ticks and vertical grid lines."""
    axes.set_xticks(range(len(names)), names, rotation=rotation)
    axes.tick_params(axis="x", length=0)
    axes.grid(visible=False, axis="x")


def draw_heat_map(axes: Axes, grid: pd.DataFrame, across: str, upwards: str) -> None:
    """Draw whole numbers as cells, darker where they are larger, each with its number.

    Rows and columns are named by index and columns of ``grid``. A cell without a value has a cross, as
    the mark of what cannot run.
    """
    values = grid.to_numpy(float)
    axes.imshow(values, cmap="Blues", origin="lower", aspect="auto")
    for (row, column), value in np.ndenumerate(values):
        if np.isnan(value):
            cannot_run(axes, column, row)
            continue
        ink = "white" if value > 0.6 * np.nanmax(values) else "black"
        axes.text(column, row, f"{value:g}", ha="center", va="center", color=ink)
    axes.set_xticks(range(len(grid.columns)), [str(name) for name in grid.columns])
    axes.set_yticks(range(len(grid.index)), [str(name) for name in grid.index])
    axes.set(xlabel=across, ylabel=upwards)
    axes.tick_params(length=0)
    axes.grid(visible=False)


def line_handle(style: Style, **more: Any) -> Line2D:
    """Return the legend entry of a style's line with its marks; ``more`` are options such as ``marker``."""
    drawn: dict[str, Any] = {"color": style.colour, "ls": style.line, "marker": style.marker, "ms": 3}
    return Line2D([], [], label=style.title, **drawn | more)


def point_handle(style: Style, **more: Any) -> Line2D:
    """Return the legend entry of a style's marks without a line."""
    return line_handle(style, **{"ls": "none", "ms": 4} | more)
