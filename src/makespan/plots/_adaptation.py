"""Throughput over time while the resource limit of a job changes."""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter

from makespan.plots._style import (
    PALETTE,
    TWO_COLUMNS_IN,
    new_figure,
    require_columns,
    source_label,
    styled,
)

__all__ = ["plot_adaptation"]

_COLOURS = ("blue", "vermilion", "green", "purple", "orange")
_MARKERS = ("o", "s", "^", "v", "D")


@styled
def plot_adaptation(table: pd.DataFrame, source: str, stage_minutes: float, global_batch_size: int) -> Figure:
    """Draw throughput against time for each strategy, with the limit of each stage written above.

    Parameters
    ----------
    table
        Schema `makespan.tables.FIG7`, stages in order; a throughput of 0 means that nothing runs.
    source
        Name of the throughput source.
    stage_minutes
        Length of a stage [min].
    global_batch_size
        Samples an iteration, to turn published iteration times into throughput.

    Returns
    -------
    matplotlib.figure.Figure
        One logarithmic panel; hollow marks are the published values, and crosses along the lower
        edge mark stages in which a strategy cannot run. The plan of the first strategy stands
        below the limit, in its colour.
    """
    require_columns(
        table,
        "strategy",
        "stage",
        "gpus",
        "plan",
        "throughput_samples_per_s",
        "published_iter_time_s",
        figure="fig7",
    )
    figure = new_figure(TWO_COLUMNS_IN, 2.7)
    axes = figure.subplots()
    stages = list(dict.fromkeys(table["stage"]))
    strategies = list(dict.fromkeys(table["strategy"]))
    floor = _floor(table)
    for number, strategy in enumerate(strategies):
        rows = table[table["strategy"] == strategy].set_index("stage").loc[stages]
        _draw_strategy(axes, rows, number, (len(strategies), stage_minutes, floor, global_batch_size))
    unit = "device" if source == "measured" else "GPU"
    _annotate_stages(axes, table[table["strategy"] == strategies[0]], stage_minutes, unit)
    axes.set(yscale="log", xlabel="time [min]", ylabel="throughput [samples/s]")
    axes.set_xlim(0, stage_minutes * len(stages))
    axes.set_ylim(floor / 1.6, float(table["throughput_samples_per_s"].max()) * 3.6)
    axes.xaxis.set_major_locator(FixedLocator([stage_minutes * k for k in range(len(stages) + 1)]))
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(visible=False, axis="x")
    has_published = bool((table["published_iter_time_s"] > 0).any())
    figure.legend(handles=_handles(strategies, has_published), loc="outside right center", labelspacing=0.6)
    source_label(figure, source, strip=False)
    return figure


def _floor(table: pd.DataFrame) -> float:
    running = table.loc[table["throughput_samples_per_s"] > 0, "throughput_samples_per_s"]
    return float(running.min()) / 2.0 if len(running) else 0.1


def _line_style(number: int) -> dict[str, Any]:
    """Colour and width of a strategy: each is narrower than those before, which stay visible behind it."""
    colour = PALETTE[_COLOURS[number % len(_COLOURS)]]
    broad = {"lw": 3.6, "alpha": 0.4, "zorder": 2}
    return {"color": colour, **(broad if number == 0 else {"lw": max(2.6 - 0.5 * number, 0.8), "zorder": 3})}


def _draw_strategy(axes: Axes, rows: pd.DataFrame, number: int, frame: tuple[int, float, float, int]) -> None:
    n_strategies, minutes, floor, batch = frame
    values = rows["throughput_samples_per_s"].to_numpy(dtype=float)
    published_s = rows["published_iter_time_s"].to_numpy(dtype=float)
    edges = minutes * np.arange(len(values) + 1)
    axes.plot(
        np.repeat(edges, 2)[1:-1],
        np.repeat(np.where(values > 0, values, np.nan), 2),
        solid_capstyle="butt",
        **_line_style(number),
    )
    offset = 0.12 + 0.76 * (number + 1) / (n_strategies + 1)
    marks: dict[str, Any] = {"ls": "none", "color": PALETTE[_COLOURS[number % len(_COLOURS)]], "zorder": 5}
    x = edges[:-1] + offset * minutes
    has_failed = ~(values > 0)
    axes.plot(x[has_failed], np.full(has_failed.sum(), floor), marker="x", ms=4, mew=1.2, **marks)
    ran = published_s > 0
    marker = _MARKERS[number % len(_MARKERS)]
    axes.plot(x[ran], batch / published_s[ran], marker=marker, ms=4.2, mfc="white", mew=0.9, **marks)


def _annotate_stages(axes: Axes, first: pd.DataFrame, minutes: float, unit: str) -> None:
    for number, row in enumerate(first.to_dict("records")):
        if number:
            axes.axvline(number * minutes, color="#9a9a9a", lw=0.6, ls=(0, (3, 3)), zorder=1)
        middle = (number + 0.5) * minutes
        place: dict[str, Any] = {
            "transform": axes.get_xaxis_transform(),
            "ha": "center",
            "va": "top",
            "fontsize": 6,
        }
        axes.text(middle, 0.985, f"{row['stage']} ({row['gpus']} {unit}{'s' * (row['gpus'] != 1)})", **place)
        axes.text(middle, 0.925, row["plan"] or "none", color=PALETTE[_COLOURS[0]], **place)


def _handles(strategies: list[str], has_published: bool) -> list[Line2D]:
    handles = [Line2D([], [], label=name, **_line_style(number)) for number, name in enumerate(strategies)]
    if has_published:
        handles.append(
            Line2D([], [], ls="none", marker="o", ms=4.2, mfc="white", mec="#555555", label="published value")
        )
    handles.append(Line2D([], [], ls="none", marker="x", ms=4, mew=1.2, color="#555555", label="cannot run"))
    return handles
