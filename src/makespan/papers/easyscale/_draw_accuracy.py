"""Figures of what training keeps: Fig. 9, accuracy by the number of devices, and curves by gamma."""

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from makespan.papers.easyscale._tables_accuracy import FIG9, FIG9_SUMMARY, GAP, GAP_CURVES, GAP_SPREAD
from makespan.plots import (
    PALETTE,
    TWO_COLUMNS_IN,
    Look,
    compared,
    compared_handle,
    finished,
    look_of,
    new_figure,
    ordered,
    reference,
    reference_handle,
    require_columns,
    spread,
    spread_handle,
    styled,
)
from makespan.tables import read_csv
from makespan.training.zoo import STAND_IN_TITLES

__all__ = ["fig9", "gap", "gap_curves"]

Paths = Mapping[str, str]
Drawn = tuple[Figure, pd.DataFrame]

_LEVELS = {
    "D1": Look("D1", PALETTE["blue"], "o"),
    "D0": Look("D0", PALETTE["orange"], "s"),
    "D1+D2": Look("D1+D2", PALETTE["green"], "D"),
    "D0+D2": Look("D0+D2", PALETTE["vermilion"], "^"),
}
_SCHEMES = {
    "linear": Look("linear scaling", PALETTE["orange"], "s", (0, (4, 2))),
    "adaptive": Look("square-root scaling", PALETTE["purple"], "^", (0, (5, 1, 1, 1))),
    "easyscale": Look("EasyScale", PALETTE["blue"], "o"),
}
_GAMMA_COLOURS = ("blue", "orange", "green", "purple", "vermilion")
_DEVICE_LINES = ("-", (0, (4, 2)), (0, (1, 1)), (0, (5, 1, 1, 1)))
_REFERENCE = "stock training"
_BORDER = "#b0b0b0"


def fig9(paths: Paths, source: str) -> Drawn:
    """Losses minus those of stock training, and the steps whose bits differ."""
    steps, stages = read_csv(paths["fig9"], FIG9), read_csv(paths["fig9_summary"], FIG9_SUMMARY)
    return plot_bits(steps, stages, source), steps


@styled
def plot_bits(steps: pd.DataFrame, stages: pd.DataFrame, source: str) -> Figure:
    """Draw a panel for each model and reference; ticks above it mark steps with other bits."""
    require_columns(steps, *FIG9.names, figure="fig9")
    models, references = (list(dict.fromkeys(steps[name])) for name in ("model", "reference"))
    figure = new_figure(TWO_COLUMNS_IN, 0.5 + 1.75 * len(models))
    panels = figure.subplots(len(models), len(references), sharex=True, squeeze=False)
    for (row, model), (column, base) in product(enumerate(models), enumerate(references)):
        own = steps[(steps["model"] == model) & (steps["reference"] == base)]
        axes = panels[row, column]
        _differences(axes, own)
        _stage_names(axes, stages[(stages["model"] == model) & (stages["reference"] == base)], own)
        axes.set_title(f"{STAND_IN_TITLES.get(model, model)} against {base}", pad=13)
        if row == len(models) - 1:
            axes.set_xlabel("mini-batch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    names = ordered(steps["setting"], _LEVELS)
    handles = [Line2D([], [], color=look_of(_LEVELS, name).colour, label=name) for name in names]
    handles.append(reference_handle(_REFERENCE))
    handles.append(Line2D([], [], ls="none", marker="|", ms=6, color=PALETTE["grey"], label="other bits"))
    handles.append(Line2D([], [], color=_BORDER, lw=0.7, label="new stage"))
    return finished(figure, source, handles, ncols=7)


def _differences(axes: Axes, rows: pd.DataFrame) -> None:
    """Draw the differences of one panel in the unit of its largest."""
    largest = float(rows["diff"].abs().max())
    exponent = math.floor(math.log10(largest)) if largest > 0 else 0
    names = ordered(rows["setting"], _LEVELS)
    for number, name in enumerate(names):
        own, look = rows[rows["setting"] == name].sort_values("step"), look_of(_LEVELS, name)
        wide = 1.3 + 1.2 * (len(names) - 1 - number)
        axes.plot(
            own["step"],
            own["diff"] / 10.0**exponent,
            color=look.colour,
            lw=wide,
            zorder=2 + number,
            label=name,
        )
        other = own["step"][~own["equal"]]
        height = np.full(len(other), 1.0 - 0.06 * (number + 0.5))
        axes.plot(
            other,
            height,
            ls="none",
            marker="|",
            ms=4,
            color=look.colour,
            transform=axes.get_xaxis_transform(),
        )
    reference(axes, [rows["step"].min(), rows["step"].max()], [0.0, 0.0], zorder=9)
    bound = 1.5 * largest / 10.0**exponent if largest > 0 else 1.0
    axes.set_ylim(-bound, bound)
    axes.set_ylabel(f"loss $-$ reference [$10^{{{exponent}}}$]")


def _stage_names(axes: Axes, stages: pd.DataFrame, steps: pd.DataFrame) -> None:
    """Say above each stage which kernel set each process runs, and draw the borders."""
    ends = steps.groupby("stage")["step"].agg(["min", "max"])
    for number, (first, last) in zip(ends.index, ends.to_numpy(), strict=True):
        devices = str(stages.loc[stages["stage"] == number, "devices"].iloc[0]).split()
        told = (
            " ".join(devices)
            if len(set(map(len, devices))) == len(devices[0])
            else f"{len(devices)} processes"
        )
        place: dict[str, Any] = {"ha": "center", "va": "bottom", "transform": axes.get_xaxis_transform()}
        axes.text((first + last) / 2, 1.01, told, color="#505050", **place)
        if first > ends["min"].min():
            axes.axvline(first - 0.5, color=_BORDER, lw=0.7, zorder=1)


def gap(paths: Paths, source: str) -> Drawn:
    """Accuracy by the number of devices, and how far it spreads over them in every class."""
    runs, spreads = read_csv(paths["gap"], GAP), read_csv(paths["gap_spread"], GAP_SPREAD)
    return plot_gap(runs, spreads, source), spreads


@styled
def plot_gap(runs: pd.DataFrame, spreads: pd.DataFrame, source: str) -> Figure:
    """Draw means and ranges over seeds at the left, spreads at the right; marks are spreads over seeds."""
    require_columns(runs, *GAP.names, figure="gap")
    figure = new_figure(TWO_COLUMNS_IN, 2.5)
    left, right = figure.subplots(1, 2, width_ratios=[0.8, 1.4])
    schemes = ordered(runs["scheme"], _SCHEMES)
    whole, numbers = runs[runs["class"] == "all"], sorted(set(runs["devices"]))
    for place, name in enumerate(schemes):
        found = whole[whole["scheme"] == name].groupby("devices")["accuracy_pct"].agg(["mean", "min", "max"])
        look, shift = look_of(_SCHEMES, name), 0.1 * (place - (len(schemes) - 1) / 2)
        x = [numbers.index(number) + shift for number in found.index]
        drawn: dict[str, Any] = {"color": look.colour, "ls": look.line, "marker": look.marker, "ms": 3.5}
        left.plot(x, found["mean"], lw=1.2, **drawn)
        spread(left, x, found["min"], found["max"], look.colour)
    left.set_xticks(range(len(numbers)), [str(number) for number in numbers])
    left.set_xlabel("devices")
    left.set_ylabel("accuracy [%]")
    _spreads(right, spreads, schemes)
    looks = [look_of(_SCHEMES, name) for name in schemes]
    handles = [
        Line2D([], [], color=one.colour, ls=one.line, marker=one.marker, ms=3.5, label=one.title)
        for one in looks
    ]
    handles += [
        spread_handle("range over seeds", PALETTE["grey"]),
        compared_handle("spread over seeds at one number of devices"),
        Line2D([], [], ls="none", marker="s", ms=2.8, color=PALETTE["grey"], label="spread of exactly 0"),
    ]
    return finished(figure, source, handles, strip=False, ncols=4)


def _spreads(axes: Axes, spreads: pd.DataFrame, schemes: Sequence[str]) -> None:
    classes = [name for name in dict.fromkeys(spreads["class"]) if name != "worst"]
    width = 0.8 / len(schemes)
    for place, name in enumerate(schemes):
        own = spreads[spreads["scheme"] == name].set_index("class").reindex(classes)
        x = np.arange(len(classes)) + width * (place - (len(schemes) - 1) / 2)
        axes.bar(x, own["spread_pct"], width * 0.9, color=look_of(_SCHEMES, name).colour, lw=0, zorder=2)
        exact = own["spread_pct"].to_numpy() == 0
        axes.plot(x[exact], 0 * x[exact], ls="none", marker="s", ms=2.8, color=look_of(_SCHEMES, name).colour)
        compared(axes, x, own["seed_spread_pct"])
    axes.set_xticks(range(len(classes)), classes)
    axes.tick_params(axis="x", length=0)
    axes.grid(visible=False, axis="x")
    axes.set_xlabel("class")
    axes.set_ylabel("spread [%]")


def gap_curves(paths: Paths, source: str) -> Drawn:
    """Losses by epoch, by gamma and number of devices."""
    curves = read_csv(paths["gap_curves"], GAP_CURVES)
    return plot_gap_curves(curves, source), curves


@styled
def plot_gap_curves(curves: pd.DataFrame, source: str) -> Figure:
    """Draw a panel a scheme: colours are gammas, dashes are numbers of devices."""
    require_columns(curves, *GAP_CURVES.names, figure="gap_curves")
    schemes = ordered(curves["scheme"], _SCHEMES)
    gammas, numbers = (sorted(set(curves[name])) for name in ("gamma", "devices"))
    figure = new_figure(TWO_COLUMNS_IN, 2.5)
    panels = figure.subplots(1, len(schemes), sharex=True, sharey=True, squeeze=False)[0]
    for axes, scheme in zip(panels, schemes, strict=True):
        for (place, gamma), (dash, devices) in product(enumerate(gammas), enumerate(numbers)):
            rows = curves[
                curves["scheme"].eq(scheme) & curves["gamma"].eq(gamma) & curves["devices"].eq(devices)
            ]
            line = _DEVICE_LINES[dash % len(_DEVICE_LINES)]
            colour = PALETTE[_GAMMA_COLOURS[place % len(_GAMMA_COLOURS)]]
            axes.plot(rows["epoch"], rows["loss"], color=colour, ls=line, marker=".", ms=3)
        own = curves[curves["scheme"].eq(scheme)]
        before = own["learning_rate"] == own.groupby("devices")["learning_rate"].transform("max")
        axes.axvline(own.loc[before, "epoch"].max() + 0.5, color=_BORDER, lw=0.7, zorder=1)
        is_one = (own.groupby(["gamma", "epoch"])["param_sha"].nunique() == 1).all()
        what = ": the same for all numbers of devices" if is_one and len(numbers) > 1 else ""
        axes.set_title(look_of(_SCHEMES, scheme).title + what)
        axes.set_xlabel("epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    panels[0].set_ylabel("mean loss [nat]")
    handles = [
        Line2D([], [], color=PALETTE[_GAMMA_COLOURS[place % len(_GAMMA_COLOURS)]], label=f"gamma {gamma:g}")
        for place, gamma in enumerate(gammas)
    ]
    handles += [
        Line2D(
            [],
            [],
            color="black",
            ls=_DEVICE_LINES[dash % len(_DEVICE_LINES)],
            label=f"{number} device{'s' * (number > 1)}",
        )
        for dash, number in enumerate(numbers)
    ]
    handles.append(Line2D([], [], color=_BORDER, lw=0.7, label="decay"))
    return finished(figure, source, handles, strip=False, ncols=7)
