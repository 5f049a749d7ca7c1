"""Figures of the cluster experiments: each function goes from paths of tables to a figure and its table."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import NullLocator

from makespan.papers.easyscale._tables import FIG14, FIG15, SENSITIVITY, SERVING_ROUNDS
from makespan.plots import (
    ONE_COLUMN_IN,
    PALETTE,
    TWO_COLUMNS_IN,
    Look,
    finished,
    look_of,
    new_figure,
    ordered,
    plain_numbers,
    published,
    published_handle,
    styled,
)
from makespan.tables import read_csv
from makespan.units import HOUR

__all__ = ["fig14", "fig15", "sensitivity", "serving"]

Paths = Mapping[str, str]
Drawn = tuple[Figure, pd.DataFrame]

LOOKS = {
    "fifo-serial": Look("YARN-CS, one job at a time", PALETTE["grey"], "X", (0, (1, 1))),
    "fifo": Look("YARN-CS", PALETTE["black"], "h", (0, (4, 2))),
    "easyscale-homo": Look("EasyScale-homo", PALETTE["orange"], "s"),
    "easyscale-heter-growth": Look("EasyScale-heter, no swaps", PALETTE["sky"], "^", (0, (5, 1, 1, 1))),
    "easyscale-heter": Look("EasyScale-heter", PALETTE["blue"], "o"),
}
_MINUTE_S = 60.0
_PUBLISHED_LINE, _EVERY = (
    "#909090",
    10,
)  # published steps, and of how many one has the mark of published values
_TICKS = [digit * 10.0**decade for decade in range(6) for digit in (1, 2, 5)]
_WIDE = 300.0
_SOURCES = {
    "emulated": "generated jobs, times from printed cells",
    "published": "the authors' jobs, times from printed cells",
}
_TIMES = (
    ("makespan_from_zero_s", "published_makespan_s", "makespan [s]"),
    ("avg_jct_s", "published_avg_jct_s", "average JCT [s]"),
)
_PARAMETERS = {"interval_s": "length of a round [s]", "restart_delay_s": "restart delay [s]"}


@styled
def _points(rows: pd.DataFrame, source: str) -> Figure:
    policies = ordered(rows["policy"], LOOKS)
    table = rows.set_index("policy").loc[policies]
    figure = new_figure(TWO_COLUMNS_IN, 2.0)
    for axes, (column, printed, label) in zip(figure.subplots(1, 2, sharey=True), _TIMES, strict=True):
        values, marks = table[column].to_numpy(float), table[printed].to_numpy(float)
        for y, (name, value, mark) in enumerate(zip(policies, values, marks, strict=True)):
            axes.plot(
                value, y, ls="none", marker="o", ms=5, mew=0, color=look_of(LOOKS, name).colour, zorder=5
            )
            # On the side away from the published mark, beside which it would be read as the value of that.
            side = -1 if mark > value else 1
            place: dict[str, Any] = {"textcoords": "offset points", "va": "center"}
            place["ha"] = "right" if side < 0 else "left"
            axes.annotate(f"{value:.0f}", (value, y), (5 * side, 0), **place)
        published(axes, marks, range(len(policies)))
        _logarithmic(axes, "x", [*values, *marks], 1.7)
        axes.set_yticks(range(len(policies)), [look_of(LOOKS, name).title for name in policies])
        axes.set_ylim(len(policies) - 0.4, -0.6)
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(label)
    ours: dict[str, Any] = {"ls": "none", "marker": "o", "ms": 5, "mew": 0, "color": PALETTE["grey"]}
    handles = [Line2D([], [], label="here, with its value", **ours), published_handle()]
    return finished(figure, _SOURCES.get(source, source), handles, ncols=2)


def fig14(paths: Paths, source: str) -> Drawn:
    """Makespan and mean completion time under every policy, with the published values."""
    rows = read_csv(paths["fig14"], FIG14)
    return _points(rows, source), rows


def _logarithmic(axes: Axes, which: Literal["x", "y"], values: Sequence[float], room: float) -> None:
    """Make an axis logarithmic, with plain numbers and room beside its first and last value."""
    low, high = float(np.nanmin(values)) / room, float(np.nanmax(values)) * room
    limits: dict[str, Any] = {f"{which}scale": "log", f"{which}lim": (low, high)}
    axes.set(**limits)
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_formatter(plain_numbers())
    axis.set_minor_locator(NullLocator())
    every = 1 if high < _WIDE * low else 3  # of a wide range the powers of ten
    axis.set_ticks([tick for tick in _TICKS[::every] if low < tick < high])


@styled
def _allocation(rows: pd.DataFrame, source: str, policies: Sequence[str]) -> Figure:
    figure = new_figure(TWO_COLUMNS_IN, 2.6)
    panels = figure.subplots(1, len(policies), sharey=True, sharex=True, squeeze=False)[0]
    for axes, name in zip(panels, policies, strict=True):
        own = rows[rows["policy"] == name]
        minutes, look = own["time_s"] / _MINUTE_S, look_of(LOOKS, name)
        axes.step(minutes, own["published_gpus"], where="post", color=_PUBLISHED_LINE, lw=0.9, zorder=2)
        shown = own[own["published_gpus"].notna()].iloc[::_EVERY]
        published(axes, shown["time_s"] / _MINUTE_S, shown["published_gpus"], ms=2.8, zorder=4)
        axes.step(minutes, own["gpus"], where="post", color=look.colour, lw=1.2, zorder=3)
        axes.set_title(look.title)
        axes.set_xlabel("time [min]")
    panels[0].set_ylim(0, 1.05 * float(np.nanmax(rows[["gpus", "published_gpus"]])))
    panels[0].set_ylabel("GPUs held")
    looks = [look_of(LOOKS, name) for name in policies]
    handles = [Line2D([], [], color=look.colour, label=look.title) for look in looks]
    if rows["published_gpus"].notna().any():
        handles.append(published_handle(joined_by=_PUBLISHED_LINE))
    return finished(figure, _SOURCES.get(source, source), handles, ncols=3)


def fig15(paths: Paths, source: str, policies: Sequence[str]) -> Drawn:
    """GPUs that jobs hold after every round, with the published values."""
    table = read_csv(paths["fig15"], FIG15)
    rows = table[table["policy"].isin(policies)]
    return _allocation(rows, source, list(policies)), rows


@styled
def _against(rows: pd.DataFrame, source: str) -> Figure:
    figure = new_figure(ONE_COLUMN_IN * 1.7, 3.9)
    panels = figure.subplots(2, len(_PARAMETERS), sharey="row", sharex="col", squeeze=False)
    policies = ordered(rows["policy"], LOOKS)
    for row, (name, _, title) in enumerate(reversed(_TIMES)):
        _logarithmic(panels[row, 0], "y", rows[name].tolist(), 1.15)
        panels[row, 0].set_ylabel(title)
    for column, (parameter, label) in enumerate(_PARAMETERS.items()):
        own = rows[rows["parameter"] == parameter]
        for axes, (name, _, _) in zip(panels[:, column], reversed(_TIMES), strict=True):
            for policy in policies:
                _line(axes, own[own["policy"] == policy], name, look_of(LOOKS, policy))
        panels[1, column].set_xlabel(label)
    handles = [
        Line2D([], [], color=look.colour, ls=look.line, marker=look.marker, ms=3, label=look.title)
        for look in (look_of(LOOKS, name) for name in policies)
    ]
    return finished(figure, _SOURCES.get(source, source), handles, ncols=2)


def _line(axes: Axes, rows: pd.DataFrame, column: str, look: Look) -> None:
    x = rows["value"].astype(float)
    axes.plot(x, rows[column], color=look.colour, ls=look.line, marker=look.marker, ms=3, zorder=3)
    if len(x):
        axes.set_xticks(sorted(set(x)))


def sensitivity(paths: Paths, source: str) -> Drawn:
    """Mean completion time and makespan against the length of a round and the restart delay."""
    rows = read_csv(paths["sensitivity"], SENSITIVITY)
    return _against(rows, source), rows


@styled
def _beside(rows: pd.DataFrame, source: str) -> Figure:
    policies = ordered(rows["policy"], LOOKS)
    figure = new_figure(TWO_COLUMNS_IN, 2.6)
    panels = figure.subplots(1, len(policies), sharey=True, sharex=True, squeeze=False)[0]
    for axes, name in zip(panels, policies, strict=True):
        own = rows[rows["policy"] == name]
        hours = own["time_s"] / HOUR
        total = own["training_gpus"] + own["serving_gpus"]
        axes.fill_between(hours, 0, own["serving_gpus"], fc=PALETTE["grey"], lw=0, zorder=2)
        axes.fill_between(hours, own["serving_gpus"], total, fc=look_of(LOOKS, name).colour, lw=0, zorder=2)
        axes.set_title(look_of(LOOKS, name).title)
        axes.set_xlabel("time [h]")
    panels[0].set_ylabel("GPUs in use")
    panels[0].set_ylim(0, None)
    looks = [look_of(LOOKS, name) for name in policies]
    colours = [Patch(color=look.colour, label=f"training, {look.title}") for look in looks]
    handles = [Patch(color=PALETTE["grey"], label="serving"), *colours]
    return finished(figure, _SOURCES.get(source, source), handles, ncols=3)


def serving(paths: Paths, source: str) -> Drawn:
    """GPUs in use by serving and, on top, by training."""
    rows = read_csv(paths["serving_rounds"], SERVING_ROUNDS)
    return _beside(rows, source), rows
