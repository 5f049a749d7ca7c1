"""Figures of the cluster experiments: each function goes from tables to a figure and the one behind it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import ceil
from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, NullLocator

from makespan.plots import (
    ONE_COLUMN_IN,
    PALETTE,
    TWO_COLUMNS_IN,
    Style,
    add_legend,
    cannot_run,
    cannot_run_handle,
    compared,
    compared_handle,
    figure_style,
    in_order,
    limit,
    limit_handle,
    new_figure,
    plain_numbers,
    published,
    published_handle,
    reference,
    reference_handle,
    spread,
    spread_handle,
    style_of,
)
from makespan.training.zoo import STAND_IN_TITLES
from makespan.units import HOUR

# ------------------------------------------------------------------------------------------------
# Figures of the cluster experiments: each function goes from tables to a figure and the one behind it.

Tables = Mapping[str, pd.DataFrame]
Drawn = tuple[Figure, pd.DataFrame]
STYLES = {
    "fifo-serial": Style("YARN-CS, one job at a time", PALETTE["grey"], "X", (0, (1, 1))),
    "fifo": Style("YARN-CS", PALETTE["black"], "h", (0, (4, 2))),
    "easyscale-homo": Style("EasyScale-homo", PALETTE["orange"], "s"),
    "easyscale-heter-growth": Style("EasyScale-heter, no swaps", PALETTE["sky"], "^", (0, (5, 1, 1, 1))),
    "easyscale-heter": Style("EasyScale-heter", PALETTE["blue"], "o"),
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


@figure_style
def _points(rows: pd.DataFrame, source: str) -> Figure:
    policies = in_order(rows["policy"], STYLES)
    table = rows.set_index("policy").loc[policies]
    figure = new_figure(TWO_COLUMNS_IN, 2.0)
    for axes, (column, printed, label) in zip(figure.subplots(1, 2, sharey=True), _TIMES, strict=True):
        values, marks = table[column].to_numpy(float), table[printed].to_numpy(float)
        for y, (name, value, mark) in enumerate(zip(policies, values, marks, strict=True)):
            axes.plot(
                value, y, ls="none", marker="o", ms=5, mew=0, color=style_of(STYLES, name).colour, zorder=5
            )
            # On the side away from the published mark, beside which it would be read as the value of that.
            side = -1 if mark > value else 1
            place: dict[str, Any] = {"textcoords": "offset points", "va": "center"}
            place["ha"] = "right" if side < 0 else "left"
            axes.annotate(f"{value:.0f}", (value, y), (5 * side, 0), **place)
        published(axes, marks, range(len(policies)))
        _logarithmic(axes, "x", [*values, *marks], 1.7)
        axes.set_yticks(range(len(policies)), [style_of(STYLES, name).title for name in policies])
        axes.set_ylim(len(policies) - 0.4, -0.6)
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(label)
    ours: dict[str, Any] = {"ls": "none", "marker": "o", "ms": 5, "mew": 0, "color": PALETTE["grey"]}
    handles = [Line2D([], [], label="here, with its value", **ours), published_handle()]
    return add_legend(figure, _SOURCES.get(source, source), handles, ncols=2)


def fig14(tables: Tables, source: str) -> Drawn:
    """Makespan and mean completion time under every policy, with the published values."""
    rows = tables["fig14"]
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


@figure_style
def _allocation(rows: pd.DataFrame, source: str, policies: Sequence[str]) -> Figure:
    figure = new_figure(TWO_COLUMNS_IN, 2.6)
    panels = figure.subplots(1, len(policies), sharey=True, sharex=True, squeeze=False)[0]
    for axes, name in zip(panels, policies, strict=True):
        own = rows[rows["policy"] == name]
        minutes, style = own["time_s"] / _MINUTE_S, style_of(STYLES, name)
        axes.step(minutes, own["published_gpus"], where="post", color=_PUBLISHED_LINE, lw=0.9, zorder=2)
        shown = own[own["published_gpus"].notna()].iloc[::_EVERY]
        published(axes, shown["time_s"] / _MINUTE_S, shown["published_gpus"], ms=2.8, zorder=4)
        axes.step(minutes, own["gpus"], where="post", color=style.colour, lw=1.2, zorder=3)
        axes.set_title(style.title)
        axes.set_xlabel("time [min]")
    panels[0].set_ylim(0, 1.05 * float(np.nanmax(rows[["gpus", "published_gpus"]])))
    panels[0].set_ylabel("GPUs held")
    styles = [style_of(STYLES, name) for name in policies]
    handles = [Line2D([], [], color=style.colour, label=style.title) for style in styles]
    if rows["published_gpus"].notna().any():
        handles.append(published_handle(joined_by=_PUBLISHED_LINE))
    return add_legend(figure, _SOURCES.get(source, source), handles, ncols=3)


def fig15(tables: Tables, source: str, policies: Sequence[str]) -> Drawn:
    """GPUs that jobs hold after every round, with the published values."""
    table = tables["fig15"]
    rows = table[table["policy"].isin(policies)]
    return _allocation(rows, source, list(policies)), rows


@figure_style
def _against(rows: pd.DataFrame, source: str) -> Figure:
    figure = new_figure(ONE_COLUMN_IN * 1.7, 3.9)
    panels = figure.subplots(2, len(_PARAMETERS), sharey="row", sharex="col", squeeze=False)
    policies = in_order(rows["policy"], STYLES)
    for row, (name, _, title) in enumerate(reversed(_TIMES)):
        _logarithmic(panels[row, 0], "y", rows[name].tolist(), 1.15)
        panels[row, 0].set_ylabel(title)
    for column, (parameter, label) in enumerate(_PARAMETERS.items()):
        own = rows[rows["parameter"] == parameter]
        for axes, (name, _, _) in zip(panels[:, column], reversed(_TIMES), strict=True):
            for policy in policies:
                _line(axes, own[own["policy"] == policy], name, style_of(STYLES, policy))
        panels[1, column].set_xlabel(label)
    handles = [
        Line2D([], [], color=style.colour, ls=style.line, marker=style.marker, ms=3, label=style.title)
        for style in (style_of(STYLES, name) for name in policies)
    ]
    return add_legend(figure, _SOURCES.get(source, source), handles, ncols=2)


def _line(axes: Axes, rows: pd.DataFrame, column: str, style: Style) -> None:
    x = rows["value"].astype(float)
    axes.plot(x, rows[column], color=style.colour, ls=style.line, marker=style.marker, ms=3, zorder=3)
    if len(x):
        axes.set_xticks(sorted(set(x)))


def sensitivity(tables: Tables, source: str) -> Drawn:
    """Mean completion time and makespan against the length of a round and the restart delay."""
    rows = tables["sensitivity"]
    return _against(rows, source), rows


@figure_style
def _beside(rows: pd.DataFrame, source: str) -> Figure:
    policies = in_order(rows["policy"], STYLES)
    figure = new_figure(TWO_COLUMNS_IN, 2.6)
    panels = figure.subplots(1, len(policies), sharey=True, sharex=True, squeeze=False)[0]
    for axes, name in zip(panels, policies, strict=True):
        own = rows[rows["policy"] == name]
        hours = own["time_s"] / HOUR
        total = own["training_gpus"] + own["serving_gpus"]
        axes.fill_between(hours, 0, own["serving_gpus"], fc=PALETTE["grey"], lw=0, zorder=2)
        axes.fill_between(hours, own["serving_gpus"], total, fc=style_of(STYLES, name).colour, lw=0, zorder=2)
        axes.set_title(style_of(STYLES, name).title)
        axes.set_xlabel("time [h]")
    panels[0].set_ylabel("GPUs in use")
    panels[0].set_ylim(0, None)
    styles = [style_of(STYLES, name) for name in policies]
    colours = [Patch(color=style.colour, label=f"training, {style.title}") for style in styles]
    handles = [Patch(color=PALETTE["grey"], label="serving"), *colours]
    return add_legend(figure, _SOURCES.get(source, source), handles, ncols=3)


def serving(tables: Tables, source: str) -> Drawn:
    """GPUs in use by serving and, on top, by training."""
    rows = tables["serving_rounds"]
    return _beside(rows, source), rows


# ------------------------------------------------------------------------------------------------
# Figures of what training keeps: Fig. 9, accuracy by the number of devices, and curves by gamma.

_LEVELS = {
    "D1": Style("D1", PALETTE["blue"], "o"),
    "D0": Style("D0", PALETTE["orange"], "s"),
    "D1+D2": Style("D1+D2", PALETTE["green"], "D"),
    "D0+D2": Style("D0+D2", PALETTE["vermilion"], "^"),
}
_SCHEMES = {
    "linear": Style("linear scaling", PALETTE["orange"], "s", (0, (4, 2))),
    "adaptive": Style("square-root scaling", PALETTE["purple"], "^", (0, (5, 1, 1, 1))),
    "easyscale": Style("EasyScale", PALETTE["blue"], "o"),
}
_GAMMA_COLOURS = ("blue", "orange", "green", "purple", "vermilion")
_DEVICE_LINES = ("-", (0, (4, 2)), (0, (1, 1)), (0, (5, 1, 1, 1)))
_REFERENCE = "stock training"
_BORDER = "#b0b0b0"


def fig9(tables: Tables, source: str) -> Drawn:
    """Losses minus those of stock training, and the steps whose bits differ."""
    steps, stages = tables["fig9"], tables["fig9_summary"]
    return plot_bits(steps, stages, source), steps


@figure_style
def plot_bits(steps: pd.DataFrame, stages: pd.DataFrame, source: str) -> Figure:
    """Draw a panel for each model and reference; ticks above it mark steps with other bits."""
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
    names = in_order(steps["setting"], _LEVELS)
    handles = [Line2D([], [], color=style_of(_LEVELS, name).colour, label=name) for name in names]
    handles.append(reference_handle(_REFERENCE))
    handles.append(Line2D([], [], ls="none", marker="|", ms=6, color=PALETTE["grey"], label="other bits"))
    handles.append(Line2D([], [], color=_BORDER, lw=0.7, label="new stage"))
    return add_legend(figure, source, handles, ncols=7)


def _differences(axes: Axes, rows: pd.DataFrame) -> None:
    """Draw the differences of one panel in the unit of its largest."""
    largest = float(rows["diff"].abs().max())
    exponent = math.floor(math.log10(largest)) if largest > 0 else 0
    names = in_order(rows["setting"], _LEVELS)
    for number, name in enumerate(names):
        own, style = rows[rows["setting"] == name].sort_values("step"), style_of(_LEVELS, name)
        wide = 1.3 + 1.2 * (len(names) - 1 - number)
        axes.plot(
            own["step"],
            own["diff"] / 10.0**exponent,
            color=style.colour,
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
            color=style.colour,
            transform=axes.get_xaxis_transform(),
        )
    reference(axes, [rows["step"].min(), rows["step"].max()], [0.0, 0.0], zorder=9)
    bound = 1.5 * largest / 10.0**exponent if largest > 0 else 1.0
    axes.set_ylim(-bound, bound)
    axes.set_ylabel(f"loss $-$ reference [$10^{{{exponent}}}$]")


def _stage_names(axes: Axes, stages: pd.DataFrame, steps: pd.DataFrame) -> None:
    """Label each stage with the kernel set of each process, and draw the borders."""
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


def gap(tables: Tables, source: str) -> Drawn:
    """Accuracy by the number of devices, and how far it spreads over them in every class."""
    runs, spreads = tables["gap"], tables["gap_spread"]
    return plot_gap(runs, spreads, source), spreads


@figure_style
def plot_gap(runs: pd.DataFrame, spreads: pd.DataFrame, source: str) -> Figure:
    """Draw means and ranges over seeds at the left, spreads at the right; marks are spreads over seeds."""
    figure = new_figure(TWO_COLUMNS_IN, 2.5)
    left, right = figure.subplots(1, 2, width_ratios=[0.8, 1.4])
    schemes = in_order(runs["scheme"], _SCHEMES)
    whole, numbers = runs[runs["class"] == "all"], sorted(set(runs["devices"]))
    for place, name in enumerate(schemes):
        found = whole[whole["scheme"] == name].groupby("devices")["accuracy_pct"].agg(["mean", "min", "max"])
        style, shift = style_of(_SCHEMES, name), 0.1 * (place - (len(schemes) - 1) / 2)
        x = [numbers.index(number) + shift for number in found.index]
        drawn: dict[str, Any] = {"color": style.colour, "ls": style.line, "marker": style.marker, "ms": 3.5}
        left.plot(x, found["mean"], lw=1.2, **drawn)
        spread(left, x, found["min"], found["max"], style.colour)
    left.set_xticks(range(len(numbers)), [str(number) for number in numbers])
    left.set_xlabel("devices")
    left.set_ylabel("accuracy [%]")
    _spreads(right, spreads, schemes)
    styles = [style_of(_SCHEMES, name) for name in schemes]
    handles = [
        Line2D([], [], color=one.colour, ls=one.line, marker=one.marker, ms=3.5, label=one.title)
        for one in styles
    ]
    handles += [
        spread_handle("range over seeds", PALETTE["grey"]),
        compared_handle("spread over seeds at one number of devices"),
        Line2D([], [], ls="none", marker="s", ms=2.8, color=PALETTE["grey"], label="spread of exactly 0"),
    ]
    return add_legend(figure, source, handles, strip=False, ncols=4)


def _spreads(axes: Axes, spreads: pd.DataFrame, schemes: Sequence[str]) -> None:
    classes = [name for name in dict.fromkeys(spreads["class"]) if name != "worst"]
    width = 0.8 / len(schemes)
    for place, name in enumerate(schemes):
        own = spreads[spreads["scheme"] == name].set_index("class").reindex(classes)
        x = np.arange(len(classes)) + width * (place - (len(schemes) - 1) / 2)
        axes.bar(x, own["spread_pct"], width * 0.9, color=style_of(_SCHEMES, name).colour, lw=0, zorder=2)
        exact = own["spread_pct"].to_numpy() == 0
        axes.plot(
            x[exact], 0 * x[exact], ls="none", marker="s", ms=2.8, color=style_of(_SCHEMES, name).colour
        )
        compared(axes, x, own["seed_spread_pct"])
    axes.set_xticks(range(len(classes)), classes)
    axes.tick_params(axis="x", length=0)
    axes.grid(visible=False, axis="x")
    axes.set_xlabel("class")
    axes.set_ylabel("spread [%]")


def gap_curves(tables: Tables, source: str) -> Drawn:
    """Losses by epoch, by gamma and number of devices."""
    curves = tables["gap_curves"]
    return plot_gap_curves(curves, source), curves


@figure_style
def plot_gap_curves(curves: pd.DataFrame, source: str) -> Figure:
    """Draw a panel a scheme: colours are gammas, dashes are numbers of devices."""
    schemes = in_order(curves["scheme"], _SCHEMES)
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
        axes.set_title(style_of(_SCHEMES, scheme).title + what)
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
    return add_legend(figure, source, handles, strip=False, ncols=7)


# ------------------------------------------------------------------------------------------------
# Figures of what was measured of logical workers: each function goes from tables to a figure.

_V100_MIB = 32768.0
_SPREAD = "± half the inter-quartile range"
_PANELS_IN_A_ROW = 4


@dataclass(frozen=True, slots=True)
class _Bar:
    """One bar of every group: its column, colour and title; a column of printed cells, or none."""

    column: str
    colour: str
    title: str
    printed: str | None = None


def _draw_bars(axes: Axes, rows: pd.DataFrame, bars: Sequence[_Bar], *, is_from_zero: bool = True) -> None:
    """Draw a group of bars a row with spreads and printed cells; points where the axis starts above 0."""
    width = 0.8 / len(bars)
    for number, bar in enumerate(bars):
        x = np.arange(len(rows)) + (number - (len(bars) - 1) / 2) * width
        values = rows[bar.column].to_numpy(float)
        if is_from_zero:
            axes.bar(x, values, 0.9 * width, color=bar.colour, lw=0, zorder=2)
        else:
            x = x - 0.06  # beside the published mark, which would hide an equal value
            axes.plot(x, values, ls="none", marker="o", ms=5, mew=0, color=bar.colour, zorder=5)
        if f"{bar.column}_iqr" in rows:
            half = rows[f"{bar.column}_iqr"].to_numpy(float) / 2
            spread(axes, x, values - half, values + half)
        if bar.printed is not None:
            published(axes, x if is_from_zero else x + 0.12, rows[bar.printed].to_numpy(float))


def _legend(
    bars: Sequence[_Bar], rows: pd.DataFrame, label: str, *, is_from_zero: bool = True
) -> list[Patch | Line2D]:
    """Return the entries of bars or points, of their spread where they have one, and of printed cells."""
    point: dict[str, Any] = {"ls": "none", "marker": "o", "ms": 5, "mew": 0}
    handles: list[Patch | Line2D] = [
        Patch(color=bar.colour, label=bar.title)
        if is_from_zero
        else Line2D([], [], color=bar.colour, label=bar.title, **point)
        for bar in bars
    ]
    if any(f"{bar.column}_iqr" in rows for bar in bars):
        handles.append(spread_handle(_SPREAD))
    return [*handles, published_handle(label)]


# --- Fig. 10 --------------------------------------------------------------------------------------------

_METHODS = {"packing": ("packed processes", PALETTE["grey"]), "easyscale": ("EasyScale", PALETTE["blue"])}


@figure_style
def _sharing(rows: pd.DataFrame, source: str) -> Figure:
    models = list(dict.fromkeys(rows["model"]))
    figure = new_figure(TWO_COLUMNS_IN, 3.9)
    panels = figure.subplots(2, len(models), sharey="row", sharex="col", squeeze=False)
    for column, model in enumerate(models):
        own = rows[rows["model"] == model]
        counts = sorted(set(own["k"]))
        for number, (method, (_, colour)) in enumerate(_METHODS.items()):
            part = own[own["method"] == method].set_index("k").reindex(counts)
            x = np.arange(len(counts)) + 0.4 * (number - 0.5)
            _draw_throughput(panels[0, column], x, part, colour)
            _draw_memory(panels[1, column], x, part, colour)
        panels[0, column].set_title(STAND_IN_TITLES.get(model, model))
        limit(panels[1, column], 100.0)
        panels[1, column].set_xticks(np.arange(len(counts)), [str(k) for k in counts])
        panels[1, column].set_xlabel("processes or logical workers")
    panels[1, 0].set_ylim(0.0, 1.05 * max(100.0, (100.0 * rows["total_mem_mib"] / rows["memory_mib"]).max()))
    panels[0, 0].set_ylabel("throughput over\none process")
    panels[1, 0].set_ylabel("memory of the\ndevice [%]")
    handles: list[Patch | Line2D] = [Patch(color=colour, label=title) for title, colour in _METHODS.values()]
    handles.append(Patch(fc="white", ec=PALETTE["blue"], hatch="////", lw=0.6, label="its gradient sets"))
    handles.append(spread_handle(_SPREAD))
    handles += [published_handle("published, V100"), cannot_run_handle("out of memory")]
    handles.append(limit_handle("memory of the device"))
    return add_legend(figure, source, handles, ncols=4)


def _draw_throughput(axes: Axes, x: np.ndarray, part: pd.DataFrame, colour: str) -> None:
    values, half = part["norm_throughput"].to_numpy(float), part["norm_throughput_iqr"].to_numpy(float) / 2
    axes.bar(x, values, 0.36, color=colour, lw=0, zorder=2)
    spread(axes, x, values - half, values + half)
    published(axes, x, part["published_norm_throughput"].to_numpy(float))
    over = part["oom"].astype(bool).to_numpy()
    cannot_run(axes, x[over], np.full(over.sum(), 0.05), transform=axes.get_xaxis_transform())


def _draw_memory(axes: Axes, x: np.ndarray, part: pd.DataFrame, colour: str) -> None:
    share = 100.0 / part["memory_mib"].to_numpy(float)
    memory, sets = (part[name].to_numpy(float) * share for name in ("peak_mem_mib", "gradient_sets_mib"))
    axes.bar(x, memory, 0.36, color=colour, lw=0, zorder=2)
    axes.bar(x, sets, 0.36, memory, fc="white", ec=colour, hatch="////", lw=0.6, zorder=2)
    published(axes, x, 100.0 * part["published_peak_mem_mib"].to_numpy(float) / _V100_MIB)


def fig10(tables: Tables, source: str) -> Drawn:
    """Throughput and memory of packed processes and of logical workers that share a device."""
    rows = tables["fig10"]
    return _sharing(rows, source), rows


# --- Figs 11 to 13 --------------------------------------------------------------------------------------


@figure_style
def _switching(rows: pd.DataFrame, source: str) -> Figure:
    figure = new_figure(TWO_COLUMNS_IN, 2.4)
    axes = figure.subplots()
    bars = (_Bar("ratio", PALETTE["blue"], "context switches", "published_ratio"),)
    _draw_bars(axes, rows, bars, is_from_zero=False)
    reference(axes, [-0.5, len(rows) - 0.5], [1.0, 1.0])
    axes.set_xticks(range(len(rows)), [STAND_IN_TITLES.get(model, model) for model in rows["model"]])
    spread = rows["ratio"] + rows["ratio_iqr"] / 2, rows["ratio"] - rows["ratio_iqr"] / 2
    axes.set_ylim(min(0.95, spread[1].min() - 0.01), max(1.06, spread[0].max() + 0.01))
    axes.set_ylabel("time of a micro-batch\nover that without switches")
    handles = _legend(bars, rows, "published, V100", is_from_zero=False)
    return add_legend(figure, source, [*handles, reference_handle("contexts not kept apart")], ncols=4)


def fig11(tables: Tables, source: str) -> Drawn:
    """Time of micro-batches with context switches over that without."""
    rows = tables["fig11"]
    return _switching(rows, source), rows


@figure_style
def _determinism(rows: pd.DataFrame, source: str) -> Figure:
    models = list(dict.fromkeys(rows["model"]))
    n_rows = ceil(len(models) / _PANELS_IN_A_ROW)
    figure = new_figure(TWO_COLUMNS_IN, 0.6 + 1.9 * n_rows)
    grid = figure.subplots(n_rows, min(len(models), _PANELS_IN_A_ROW), sharey=True, squeeze=False)
    panels = list(grid.flat)
    for axes in panels[len(models) :]:
        axes.set_axis_off()
    bars = (
        _Bar("one", PALETTE["grey"], "stock, not deterministic"),
        _Bar("d1_norm", PALETTE["sky"], "D1", "published_d1_norm"),
        _Bar("d1d2_norm", PALETTE["vermilion"], "D1+D2", "published_d1d2_norm"),
    )
    for axes, model in zip(panels, models, strict=False):
        own = rows[rows["model"] == model]
        _draw_bars(axes, own.assign(one=1.0), bars)
        names = [f"{device}\n({gpu.upper()})" for device, gpu in zip(own["device"], own["gpu"], strict=True)]
        axes.set_xticks(range(len(own)), names)
        axes.set_title(STAND_IN_TITLES.get(model, model))
    for axes in grid[:, 0]:
        axes.set_ylabel("time of a micro-batch\nover stock training")
    return add_legend(figure, source, _legend(bars, rows, "published, GPU in brackets"), ncols=5)


def fig12(tables: Tables, source: str) -> Drawn:
    """Time of micro-batches under D1 and D1+D2 over that of stock training, by kernel set."""
    rows = tables["fig12"]
    return _determinism(rows, source), rows


@figure_style
def _copying(rows: pd.DataFrame, source: str) -> Figure:
    figure = new_figure(TWO_COLUMNS_IN, 2.4)
    axes = figure.subplots()
    n = int(rows["logical_workers"].max())
    first = "logical worker 0" if n == 2 else f"logical workers 0 to {n - 2}"
    bars = (
        _Bar("one", PALETTE["grey"], f"{n} stock processes"),
        _Bar("first_norm", PALETTE["sky"], first, "published_first_norm"),
        _Bar("last_norm", PALETTE["blue"], f"logical worker {n - 1}", "published_last_norm"),
    )
    _draw_bars(axes, rows.assign(one=1.0), bars)
    axes.set_xticks(range(len(rows)), [STAND_IN_TITLES.get(model, model) for model in rows["model"]])
    axes.set_ylabel("time over a stock step")
    return add_legend(figure, source, _legend(bars, rows, "published, 8 on V100"), ncols=5)


def fig13(tables: Tables, source: str) -> Drawn:
    """Time of logical workers without and with sum and update over a step of stock processes."""
    rows = tables["fig13"]
    return _copying(rows, source), rows
