"""Figures of EasyScale: each function goes from tables to a figure and the table behind it."""

import math
from collections.abc import Mapping, Sequence
from itertools import product
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
    Bars,
    Style,
    add_legend,
    bar_handles,
    cannot_run_handle,
    compared,
    compared_handle,
    draw_bars,
    figure_style,
    in_order,
    limit,
    limit_handle,
    line_handle,
    log_ticks,
    name_groups,
    new_figure,
    plain_numbers,
    point_handle,
    published,
    published_handle,
    reference,
    reference_handle,
    spread,
    spread_handle,
    style_of,
)
from makespan.training.zoo import STAND_IN_TITLES
from makespan.units import HOUR, MINUTE

# ------------------------------------------------------------------------------------------------
# Cluster experiments.

Tables = Mapping[str, pd.DataFrame]
Drawn = tuple[Figure, pd.DataFrame]
STYLES = {
    "fifo-serial": Style("YARN-CS, one job at a time", PALETTE["grey"], "X", (0, (1, 1))),
    "fifo": Style("YARN-CS", PALETTE["black"], "h", (0, (4, 2))),
    "easyscale-homo": Style("EasyScale-homo", PALETTE["orange"], "s"),
    "easyscale-heter-growth": Style("EasyScale-heter, no swaps", PALETTE["sky"], "^", (0, (5, 1, 1, 1))),
    "easyscale-heter": Style("EasyScale-heter", PALETTE["blue"], "o"),
}
_PUBLISHED_LINE = "#909090"
_MARK_EVERY = 10  # one published step of so many has the mark of published values
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
def fig14(tables: Tables, source: str) -> Drawn:
    """Makespan and mean completion time under every policy, with the published values."""
    rows = tables["fig14"]
    policies = in_order(rows["policy"], STYLES)
    table = rows.set_index("policy").loc[policies]
    figure = new_figure(TWO_COLUMNS_IN, 2.0)
    for axes, (column, printed, label) in zip(figure.subplots(1, 2, sharey=True), _TIMES, strict=True):
        values, marks = table[column].to_numpy(float), table[printed].to_numpy(float)
        for y, (name, value, mark) in enumerate(zip(policies, values, marks, strict=True)):
            axes.plot(value, y, "o", ms=5, mew=0, color=style_of(STYLES, name).colour, zorder=5)
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
    ours = point_handle(Style("here, with its value", PALETTE["grey"], "o"), ms=5, mew=0)
    return add_legend(figure, _SOURCES.get(source, source), [ours, published_handle()], ncols=2), rows


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
def fig15(tables: Tables, source: str, policies: Sequence[str]) -> Drawn:
    """GPUs that jobs hold after every round, with the published values."""
    rows = tables["fig15"]
    rows = rows[rows["policy"].isin(policies)]
    figure = new_figure(TWO_COLUMNS_IN, 2.6)
    panels = figure.subplots(1, len(policies), sharey=True, sharex=True, squeeze=False)[0]
    for axes, name in zip(panels, policies, strict=True):
        held = rows[rows["policy"] == name]
        minutes, style = held["time_s"] / MINUTE, style_of(STYLES, name)
        axes.step(minutes, held["published_gpus"], where="post", color=_PUBLISHED_LINE, lw=0.9, zorder=2)
        shown = held[held["published_gpus"].notna()].iloc[::_MARK_EVERY]
        published(axes, shown["time_s"] / MINUTE, shown["published_gpus"], ms=2.8, zorder=4)
        axes.step(minutes, held["gpus"], where="post", color=style.colour, lw=1.2, zorder=3)
        axes.set_title(style.title)
        axes.set_xlabel("time [min]")
    panels[0].set_ylim(0, 1.05 * float(np.nanmax(rows[["gpus", "published_gpus"]])))
    panels[0].set_ylabel("GPUs held")
    styles = [style_of(STYLES, name) for name in policies]
    handles = [Line2D([], [], color=style.colour, label=style.title) for style in styles]
    if rows["published_gpus"].notna().any():
        handles.append(published_handle(joined_by=_PUBLISHED_LINE))
    return add_legend(figure, _SOURCES.get(source, source), handles, ncols=3), rows


@figure_style
def sensitivity(tables: Tables, source: str) -> Drawn:
    """Mean completion time and makespan against the length of a round and the restart delay."""
    rows = tables["sensitivity"]
    figure = new_figure(ONE_COLUMN_IN * 1.7, 3.9)
    panels = figure.subplots(2, len(_PARAMETERS), sharey="row", sharex="col", squeeze=False)
    policies = in_order(rows["policy"], STYLES)
    for row, (name, _, title) in enumerate(reversed(_TIMES)):
        _logarithmic(panels[row, 0], "y", rows[name].tolist(), 1.15)
        low, high = panels[row, 0].get_ylim()
        log_ticks(panels[row, 0].yaxis, low, high, coarse_range=8.0)
        panels[row, 0].set_ylabel(title)
    for column, (parameter, label) in enumerate(_PARAMETERS.items()):
        varied = rows[rows["parameter"] == parameter]
        for axes, (name, _, _) in zip(panels[:, column], reversed(_TIMES), strict=True):
            for policy in policies:
                line, style = varied[varied["policy"] == policy], style_of(STYLES, policy)
                looks: dict[str, Any] = {"color": style.colour, "ls": style.line, "marker": style.marker}
                axes.plot(line["value"].astype(float), line[name], ms=3, zorder=3, **looks)
            axes.set_xticks(sorted(set(varied["value"].astype(float))))
        panels[1, column].set_xlabel(label)
    handles = [line_handle(style_of(STYLES, name)) for name in policies]
    return add_legend(figure, _SOURCES.get(source, source), handles, ncols=2), rows


@figure_style
def serving(tables: Tables, source: str) -> Drawn:
    """GPUs in use by serving and, on top, by training."""
    rows = tables["serving_rounds"]
    policies = in_order(rows["policy"], STYLES)
    figure = new_figure(TWO_COLUMNS_IN, 2.6)
    panels = figure.subplots(1, len(policies), sharey=True, sharex=True, squeeze=False)[0]
    for axes, name in zip(panels, policies, strict=True):
        used = rows[rows["policy"] == name]
        hours, serving_gpus = used["time_s"] / HOUR, used["serving_gpus"]
        total, colour = used["training_gpus"] + serving_gpus, style_of(STYLES, name).colour
        axes.fill_between(hours, 0, serving_gpus, fc=PALETTE["grey"], lw=0, zorder=2)
        axes.fill_between(hours, serving_gpus, total, fc=colour, lw=0, zorder=2)
        axes.set_title(style_of(STYLES, name).title)
        axes.set_xlabel("time [h]")
    panels[0].set_ylabel("GPUs in use")
    panels[0].set_ylim(0, None)
    styles = [style_of(STYLES, name) for name in policies]
    colours = [Patch(color=style.colour, label=f"training, {style.title}") for style in styles]
    handles = [Patch(color=PALETTE["grey"], label="serving"), *colours]
    return add_legend(figure, _SOURCES.get(source, source), handles, ncols=3), rows


# ------------------------------------------------------------------------------------------------
# What training keeps: the bits of the losses, accuracy by the number of devices, and losses by gamma.

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
_BORDER = "#b0b0b0"


@figure_style
def fig9(tables: Tables, source: str) -> Drawn:
    """Losses minus those of stock training, a panel per model and reference.

    Ticks at the top of a panel mark the steps whose bits differ.
    """
    steps, stages = tables["fig9"], tables["fig9_summary"]
    models, references = (list(dict.fromkeys(steps[name])) for name in ("model", "reference"))
    figure = new_figure(TWO_COLUMNS_IN, 0.5 + 1.75 * len(models))
    panels = figure.subplots(len(models), len(references), sharex=True, squeeze=False)
    for (row, model), (column, base) in product(enumerate(models), enumerate(references)):
        axes = panels[row, column]
        shown, named = (
            table[(table["model"] == model) & (table["reference"] == base)] for table in (steps, stages)
        )
        _draw_differences(axes, shown)
        _name_stages(axes, named, shown)
        axes.set_title(f"{STAND_IN_TITLES.get(model, model)} against {base}", pad=13)
        if row == len(models) - 1:
            axes.set_xlabel("mini-batch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    names = in_order(steps["setting"], _LEVELS)
    handles = [line_handle(style_of(_LEVELS, name), marker="") for name in names]
    handles.append(reference_handle("stock training"))
    handles.append(Line2D([], [], ls="none", marker="|", ms=6, color=PALETTE["grey"], label="other bits"))
    handles.append(Line2D([], [], color=_BORDER, lw=0.7, label="new stage"))
    return add_legend(figure, source, handles, ncols=7), steps


def _draw_differences(axes: Axes, rows: pd.DataFrame) -> None:
    """Draw the differences of one panel in the unit of its largest."""
    largest = float(rows["diff"].abs().max())
    exponent = math.floor(math.log10(largest)) if largest > 0 else 0
    names = in_order(rows["setting"], _LEVELS)
    for number, name in enumerate(names):
        losses, colour = rows[rows["setting"] == name].sort_values("step"), style_of(_LEVELS, name).colour
        # Later lines are thinner, so that equal ones stay visible behind them.
        width = 1.3 + 1.2 * (len(names) - 1 - number)
        difference = losses["diff"] / 10.0**exponent
        axes.plot(losses["step"], difference, color=colour, lw=width, zorder=2 + number, label=name)
        changed = losses["step"][~losses["equal"]]
        height = np.full(len(changed), 1.0 - 0.06 * (number + 0.5))
        axes.plot(changed, height, "|", ms=4, color=colour, transform=axes.get_xaxis_transform())
    reference(axes, [rows["step"].min(), rows["step"].max()], [0.0, 0.0], zorder=9)
    bound = 1.5 * largest / 10.0**exponent if largest > 0 else 1.0
    axes.set_ylim(-bound, bound)
    axes.set_ylabel(f"loss $-$ reference [$10^{{{exponent}}}$]")


def _name_stages(axes: Axes, stages: pd.DataFrame, steps: pd.DataFrame) -> None:
    """Label each stage with the kernel set of each process, and draw the borders."""
    ends = steps.groupby("stage")["step"].agg(["min", "max"])
    for number, (first, last) in zip(ends.index, ends.to_numpy(), strict=True):
        devices = str(stages.loc[stages["stage"] == number, "devices"].iloc[0]).split()
        is_short = len(set(map(len, devices))) == len(devices[0])
        label = " ".join(devices) if is_short else f"{len(devices)} processes"
        place: dict[str, Any] = {"ha": "center", "va": "bottom", "transform": axes.get_xaxis_transform()}
        axes.text((first + last) / 2, 1.01, label, color="#505050", **place)
        if first > ends["min"].min():
            axes.axvline(first - 0.5, color=_BORDER, lw=0.7, zorder=1)


@figure_style
def gap(tables: Tables, source: str) -> Drawn:
    """Accuracy by the number of devices, and how far it spreads over them in every class.

    Black dots are the spreads over seeds.
    """
    runs, spreads = tables["gap"], tables["gap_spread"]
    figure = new_figure(TWO_COLUMNS_IN, 2.5)
    left, right = figure.subplots(1, 2, width_ratios=[0.8, 1.4])
    schemes = in_order(runs["scheme"], _SCHEMES)
    whole, numbers = runs[runs["class"] == "all"], sorted(set(runs["devices"]))
    for place, name in enumerate(schemes):
        accuracy = whole[whole["scheme"] == name].groupby("devices")["accuracy_pct"]
        ends = accuracy.agg(["mean", "min", "max"])
        style, shift = style_of(_SCHEMES, name), 0.1 * (place - (len(schemes) - 1) / 2)
        x = [numbers.index(number) + shift for number in ends.index]
        looks: dict[str, Any] = {"color": style.colour, "ls": style.line, "marker": style.marker, "ms": 3.5}
        left.plot(x, ends["mean"], lw=1.2, **looks)
        spread(left, x, ends["min"], ends["max"], style.colour)
    left.set_xticks(range(len(numbers)), [str(number) for number in numbers])
    left.set_xlabel("devices")
    left.set_ylabel("accuracy [%]")
    classes = [name for name in dict.fromkeys(spreads["class"]) if name != "worst"]
    rows_of = {
        name: spreads[spreads["scheme"] == name].set_index("class").reindex(classes) for name in schemes
    }
    bars = [Bars(rows["spread_pct"], style_of(_SCHEMES, name).colour) for name, rows in rows_of.items()]
    for places, (name, rows) in zip(draw_bars(right, bars), rows_of.items(), strict=True):
        # A bar of no height would look like a missing one.
        is_zero, flat = rows["spread_pct"].to_numpy() == 0, style_of(_SCHEMES, name).colour
        right.plot(places[is_zero], 0 * places[is_zero], "_", ms=6, mew=3, color=flat, zorder=6)
        compared(right, places, rows["seed_spread_pct"])
    name_groups(right, classes)
    right.set_xlabel("class")
    right.set_ylabel("spread [%]")
    handles = [line_handle(style_of(_SCHEMES, name), ms=3.5) for name in schemes]
    handles += [
        spread_handle("range over seeds", PALETTE["grey"]),
        compared_handle("spread over seeds at one number of devices"),
        point_handle(Style("spread of exactly 0", PALETTE["grey"], "_"), ms=6, mew=2),
    ]
    return add_legend(figure, source, handles, ncols=4), spreads


@figure_style
def gap_curves(tables: Tables, source: str) -> Drawn:
    """Losses by epoch, a panel per scheme: colours are gammas, dashes are numbers of devices."""
    curves = tables["gap_curves"]
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
        epochs = curves[curves["scheme"].eq(scheme)]
        highest = epochs.groupby("devices")["learning_rate"].transform("max")
        last_before_decay = epochs.loc[epochs["learning_rate"] == highest, "epoch"].max()
        axes.axvline(last_before_decay + 0.5, color=_BORDER, lw=0.7, zorder=1)
        is_same = (epochs.groupby(["gamma", "epoch"])["param_sha"].nunique() == 1).all()
        note = ": the same for all numbers of devices" if is_same and len(numbers) > 1 else ""
        axes.set_title(style_of(_SCHEMES, scheme).title + note)
        axes.set_xlabel("epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    panels[0].set_ylabel("mean loss [nat]")
    handles = [
        Line2D([], [], color=PALETTE[_GAMMA_COLOURS[place % len(_GAMMA_COLOURS)]], label=f"gamma {gamma:g}")
        for place, gamma in enumerate(gammas)
    ]
    for dash, number in enumerate(numbers):
        label, line = f"{number} device{'s' * (number > 1)}", _DEVICE_LINES[dash % len(_DEVICE_LINES)]
        handles.append(Line2D([], [], color="black", ls=line, label=label))
    handles.append(Line2D([], [], color=_BORDER, lw=0.7, label="decay"))
    return add_legend(figure, source, handles, ncols=7), curves


# ------------------------------------------------------------------------------------------------
# Overheads of logical workers.

_V100_MIB = 32768.0
_SPREAD = "± half the inter-quartile range"
_PANELS_IN_A_ROW = 4
_METHODS = {"packing": ("packed processes", PALETTE["grey"]), "easyscale": ("EasyScale", PALETTE["blue"])}


def _titles(models: pd.Series) -> list[str]:
    return [STAND_IN_TITLES.get(model, model) for model in models]


@figure_style
def fig10(tables: Tables, source: str) -> Drawn:
    """Throughput and memory of packed processes and of logical workers that share a device."""
    rows = tables["fig10"]
    models = list(dict.fromkeys(rows["model"]))
    figure = new_figure(TWO_COLUMNS_IN, 3.9)
    panels = figure.subplots(2, len(models), sharey="row", sharex="col", squeeze=False)
    for (rates, memory), model in zip(panels.T, models, strict=True):
        counts = sorted(set(rows.loc[rows["model"] == model, "k"]))
        throughputs, peaks = list[Bars](), list[Bars]()
        gradient_sets = []
        for method, (title, colour) in _METHODS.items():
            of_method = (
                rows[(rows["model"] == model) & (rows["method"] == method)].set_index("k").reindex(counts)
            )
            share = 100.0 / of_method["memory_mib"].to_numpy(float)
            throughputs.append(
                Bars(
                    of_method["norm_throughput"], colour, title,
                    half=of_method["norm_throughput_iqr"].to_numpy(float) / 2,
                    published=of_method["published_norm_throughput"], is_infeasible=of_method["oom"],
                )
            )  # fmt: skip
            printed = 100.0 * of_method["published_peak_mem_mib"].to_numpy(float) / _V100_MIB
            peaks.append(Bars(of_method["peak_mem_mib"].to_numpy(float) * share, colour, published=printed))
            gradient_sets.append(of_method["gradient_sets_mib"].to_numpy(float) * share)
        draw_bars(rates, throughputs)
        for x, peak, sets in zip(draw_bars(memory, peaks), peaks, gradient_sets, strict=True):
            hatched: dict[str, Any] = {"fc": "white", "ec": peak.colour, "hatch": "////", "lw": 0.6}
            memory.bar(x, sets, 0.36, peak.heights, zorder=2, **hatched)
        rates.set_title(STAND_IN_TITLES.get(model, model))
        limit(memory, 100.0)
        name_groups(memory, [str(count) for count in counts])
        rates.grid(visible=False, axis="x")
        memory.set_xlabel("processes or logical workers")
    panels[1, 0].set_ylim(0.0, 1.05 * max(100.0, (100.0 * rows["total_mem_mib"] / rows["memory_mib"]).max()))
    panels[0, 0].set_ylabel("throughput over\none process")
    panels[1, 0].set_ylabel("memory of the\ndevice [%]")
    handles = bar_handles(throughputs)
    handles.append(Patch(fc="white", ec=PALETTE["blue"], hatch="////", lw=0.6, label="its gradient sets"))
    handles.append(spread_handle(_SPREAD))
    handles += [published_handle("published, V100"), cannot_run_handle("out of memory")]
    handles.append(limit_handle("memory of the device"))
    return add_legend(figure, source, handles, ncols=4), rows


@figure_style
def fig11(tables: Tables, source: str) -> Drawn:
    """Time of micro-batches with context switches over that without."""
    rows = tables["fig11"]
    figure = new_figure(TWO_COLUMNS_IN, 2.4)
    axes = figure.subplots()
    x, ratios = np.arange(len(rows)), rows["ratio"].to_numpy(float)
    low, high = (ratios + sign * rows["ratio_iqr"].to_numpy(float) / 2 for sign in (-1, 1))
    # Points, as the axis does not start at 0, beside the published marks, which would hide equal values.
    axes.plot(x - 0.06, ratios, "o", ms=5, mew=0, color=PALETTE["blue"], zorder=5)
    spread(axes, x - 0.06, low, high)
    published(axes, x + 0.06, rows["published_ratio"].to_numpy(float))
    reference(axes, [-0.5, len(rows) - 0.5], [1.0, 1.0])
    name_groups(axes, _titles(rows["model"]))
    axes.set_ylim(min(0.95, low.min() - 0.01), max(1.06, high.max() + 0.01))
    axes.set_ylabel("time of a micro-batch\nover that without switches")
    handles = [
        point_handle(Style("context switches", PALETTE["blue"], "o"), ms=5, mew=0),
        *(spread_handle(_SPREAD), published_handle("published, V100")),
        reference_handle("contexts not kept apart"),
    ]
    return add_legend(figure, source, handles, ncols=4), rows


@figure_style
def fig12(tables: Tables, source: str) -> Drawn:
    """Time of micro-batches under D1 and D1+D2 over that of stock training, by kernel set."""
    rows = tables["fig12"]
    models = list(dict.fromkeys(rows["model"]))
    n_rows = math.ceil(len(models) / _PANELS_IN_A_ROW)
    figure = new_figure(TWO_COLUMNS_IN, 0.6 + 1.9 * n_rows)
    grid = figure.subplots(n_rows, min(len(models), _PANELS_IN_A_ROW), sharey=True, squeeze=False)
    for axes in grid.flat[len(models) :]:
        axes.set_axis_off()
    for axes, model in zip(grid.flat, models, strict=False):
        of_model = rows[rows["model"] == model]
        bars = [
            Bars(np.ones(len(of_model)), PALETTE["grey"], "stock, not deterministic"),
            _relative_time(of_model, "d1_norm", PALETTE["sky"], "D1"),
            _relative_time(of_model, "d1d2_norm", PALETTE["vermilion"], "D1+D2"),
        ]
        draw_bars(axes, bars)
        devices = zip(of_model["device"], of_model["gpu"], strict=True)
        name_groups(axes, [f"{device}\n({gpu.upper()})" for device, gpu in devices])
        axes.set_title(STAND_IN_TITLES.get(model, model))
    for axes in grid[:, 0]:
        axes.set_ylabel("time of a micro-batch\nover stock training")
    handles = [*bar_handles(bars), spread_handle(_SPREAD), published_handle("published, GPU in brackets")]
    return add_legend(figure, source, handles, ncols=5), rows


def _relative_time(rows: pd.DataFrame, column: str, colour: str, title: str) -> Bars:
    """Return the bars of a column with those of its spread and its printed values."""
    half = rows[f"{column}_iqr"].to_numpy(float) / 2
    return Bars(rows[column], colour, title, half=half, published=rows[f"published_{column}"])


@figure_style
def fig13(tables: Tables, source: str) -> Drawn:
    """Time of logical workers without and with sum and update over a step of stock processes."""
    rows = tables["fig13"]
    figure = new_figure(TWO_COLUMNS_IN, 2.4)
    axes = figure.subplots()
    n_workers = int(rows["logical_workers"].max())
    first = "logical worker 0" if n_workers == 2 else f"logical workers 0 to {n_workers - 2}"
    bars = [
        Bars(np.ones(len(rows)), PALETTE["grey"], f"{n_workers} stock processes"),
        _relative_time(rows, "first_norm", PALETTE["sky"], first),
        _relative_time(rows, "last_norm", PALETTE["blue"], f"logical worker {n_workers - 1}"),
    ]
    draw_bars(axes, bars)
    name_groups(axes, _titles(rows["model"]))
    axes.set_ylabel("time over a stock step")
    handles = [*bar_handles(bars), spread_handle(_SPREAD), published_handle("published, 8 on V100")]
    return add_legend(figure, source, handles, ncols=5), rows
