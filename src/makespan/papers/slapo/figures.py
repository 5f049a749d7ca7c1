"""Figures of the Slapo paper.

Each drawing function gets the one table that its `makespan.papers.experiment.Figure` names, and returns the
figure with the rows that it shows.
"""

from collections.abc import Mapping, Sequence
from math import ceil, floor

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

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
    new_figure,
    published,
    published_handle,
    reference,
    reference_handle,
    spread,
    spread_handle,
    style_of,
)

Tables = Mapping[str, pd.DataFrame]
Drawn = tuple[Figure, pd.DataFrame]

_RATE = "throughput_samples_per_s"
_MIB = float(1 << 20)
_OUT_OF_MEMORY = "#d9d9d9"
STYLES = {
    "megatron": Style("Megatron-LM", PALETTE["grey"], "s"),
    "slapo-tp": Style("Slapo-TP", PALETTE["blue"], "o"),
    "deepspeed": Style("DeepSpeed", PALETTE["orange"], "^"),
    "slapo-zero3": Style("Slapo-ZeRO3", PALETTE["green"], "D"),
}
SOURCES = {"published": "hardware model fitted to Fig. 10", "emulated": "emulator, untuned"}


def _only(tables: Tables) -> pd.DataFrame:
    (table,) = tables.values()
    return table


# ------------------------------------------------------------------------------------------------
# Measurements of schedules on this machine.

_COUNTS = {"helpers": "blue", "listing": "sky"}
_PROCESS_COLOURS = ("blue", "orange", "green", "purple")


@figure_style
def schedule_lines(tables: Tables, source: str) -> Drawn:
    """Draw the lines of every schedule as bars, and those of the authors' schedules as marks."""
    table = _only(tables)
    figure = new_figure(TWO_COLUMNS_IN, 2.2)
    axes = figure.subplots()
    for number, (column, colour) in enumerate(_COUNTS.items()):
        x = np.arange(len(table)) + 0.4 * (number - 0.5)
        axes.bar(x, table[column].to_numpy(float), 0.36, color=PALETTE[colour], lw=0, zorder=2)
    published(axes, np.arange(len(table)), table["published_lines"].to_numpy(float))
    axes.set_xticks(np.arange(len(table)), table["family"].tolist())
    axes.set_ylabel("lines of a schedule")
    handles = [
        Patch(color=PALETTE["blue"], label="statements, a helper is one"),
        Patch(color=PALETTE["sky"], label='lines without "for"'),
        published_handle("published, of the authors' schedule"),
    ]
    return add_legend(figure, source, handles, ncols=3), table


@figure_style
def measured_steps(tables: Tables, source: str) -> Drawn:
    """Draw throughput after each step of a schedule, and the memory that a process holds."""
    table = _only(tables)
    rows = table[table["oracle"] == "measured"].reset_index(drop=True)
    figure = new_figure(TWO_COLUMNS_IN, 2.4)
    left, right = figure.subplots(1, 2, sharey=True)
    steps, numbers = list(dict.fromkeys(rows["step"])), sorted(set(rows["n_gpus"]))
    colours = dict(zip(numbers, (PALETTE[name] for name in _PROCESS_COLOURS), strict=False))
    places = []
    for step, number in zip(rows["step"], rows["n_gpus"], strict=True):
        # The bars of a step, one per number of processes, are centred on the height of the step.
        measured = sorted(rows[rows["step"] == step]["n_gpus"])
        places.append(steps.index(step) + 0.26 * (measured.index(number) - (len(measured) - 1) / 2))
    colour = [colours.get(number, PALETTE["grey"]) for number in rows["n_gpus"]]
    rate = rows[_RATE].to_numpy(float)
    half = rows["throughput_iqr_samples_per_s"].to_numpy(float) / 2
    left.barh(places, rate, 0.22, color=colour, lw=0, zorder=2)
    spread(left, places, rate - half, rate + half, is_across=True)
    parameters, kept = (rows[f"{name}_bytes"].to_numpy(float) / _MIB for name in ("parameter", "saved"))
    right.barh(places, parameters, 0.22, color=colour, lw=0, alpha=0.45, zorder=2)
    right.barh(places, kept, 0.22, left=parameters, color=colour, lw=0, zorder=2)
    left.set_yticks(range(len(steps)), steps)
    left.invert_yaxis()
    left.set_xlabel("samples/s on CPU cores")
    right.set_xlabel("parameters (pale) and kept tensors of a process [MiB]")
    handles: list[Patch | Line2D] = [
        Patch(color=colours[number], label=f"{number} process{'es' if number > 1 else ''}")
        for number in numbers
        if number in colours
    ]
    handles.append(spread_handle("± half the inter-quartile range"))
    return add_legend(figure, source, handles, ncols=len(handles)), rows


@figure_style
def measured_search(tables: Tables, source: str) -> Drawn:
    """Draw measured throughput over batch size and recomputed share, and the points that searches tried."""
    table = _only(tables)
    figure = new_figure(ONE_COLUMN_IN * 1.3, 2.8)
    axes = figure.subplots()
    points = table[table["strategy"] == "exhaustive"]
    wide = points.pivot_table(_RATE, "global_batch_size", "ckpt_ratio", dropna=False, observed=False)
    ratios, batches = (list(labels) for labels in (wide.columns, wide.index))
    axes.set_facecolor(_OUT_OF_MEMORY)
    image = axes.imshow(wide.to_numpy(float), origin="lower", aspect="auto", cmap="viridis", zorder=1)
    figure.colorbar(image, ax=axes, label="samples/s")
    for strategy, marker in (("frontier", "*"), ("coordinate_descent", "o")):
        tried = table[table["strategy"] == strategy]
        axes.plot(
            [ratios.index(ratio) for ratio in tried["ckpt_ratio"]],
            [batches.index(batch) for batch in tried["global_batch_size"]],
            ls="none", marker=marker, ms=7 if marker == "*" else 10, mew=0.9, zorder=4,
            mfc=PALETTE["vermilion"] if marker == "*" else "none", mec="white",
        )  # fmt: skip
    axes.set_xticks(range(len(ratios)), [f"{ratio:g}" for ratio in ratios])
    axes.set_yticks(range(len(batches)), [f"{batch}" for batch in batches])
    axes.grid(visible=False)
    axes.set_xlabel("share of recomputed layers")
    axes.set_ylabel("batch size")
    handles = [
        Line2D([], [], ls="none", marker="*", color=PALETTE["vermilion"], label="frontier"),
        Line2D([], [], ls="none", marker="o", mfc="none", mec="black", label="coordinate descent"),
        Patch(color=_OUT_OF_MEMORY, label="beyond the budget"),
    ]
    return add_legend(figure, source, handles, ncols=3), table


# ------------------------------------------------------------------------------------------------
# Throughput from the hardware model or the emulator, inside a node, on clusters, and step by step.

_STEPS = {
    "vanilla": "vanilla, 1 GPU",
    "kernels": "+ kernels, 1 GPU",
    "layers-tp": "+ tensor parallelism, 8 GPUs",
    "embedding-tp": "+ sharded embedding, 8 GPUs",
}
_WIDTH = 0.2


def _grouped(axes: Axes, rows: pd.DataFrame, names: Sequence[str], groups: Sequence[int]) -> None:
    """Draw a group of bars for each number of GPUs, and a cross where an implementation has no setting."""
    rates = rows.set_index(["implementation", "n_gpus"])[_RATE].to_dict()
    for index, name in enumerate(names):
        x = np.arange(len(groups)) + (index - (len(names) - 1) / 2) * _WIDTH
        for position, group in zip(x, groups, strict=True):
            if (name, group) in rates:
                height = rates[name, group]
                axes.bar(position, height, _WIDTH * 0.92, color=style_of(STYLES, name).colour, lw=0, zorder=2)
            else:
                cannot_run(axes, position, 0.05, ms=3.5, transform=axes.get_xaxis_transform())
    axes.set_xticks(range(len(groups)), [str(group) for group in groups])
    axes.set_xlim(-0.55, len(groups) - 0.45)
    axes.set_title(str(rows["model"].iloc[0]))
    axes.grid(visible=False, axis="x")


def _has_gaps(rows: pd.DataFrame, n_bars: int) -> bool:
    """Tell whether a model lacks some of its bars."""
    return bool((rows.groupby("model").size() < n_bars).any())


@figure_style
def inside_a_node(tables: Tables, source: str) -> Drawn:
    """Draw throughput inside one node at the printed settings, and at those that the tuner finds."""
    table = _only(tables)
    rows = table[table["kind"].isin(["published", "tuned"])]
    models = list(dict.fromkeys(rows["model"]))
    figure = new_figure(TWO_COLUMNS_IN, 3.9)
    panels = figure.subplots(2, 3).ravel()
    names, groups = in_order(rows["implementation"], STYLES), sorted(set(rows["n_gpus"]))
    for axes, model in zip(panels, models, strict=False):
        of_model = rows[rows["model"] == model]
        _grouped(axes, of_model[of_model["kind"] == "published"], names, groups)
        tuned = of_model[of_model["kind"] == "tuned"]
        for index, name in enumerate(names):
            best = tuned[tuned["implementation"] == name].sort_values("n_gpus")
            x = [groups.index(group) + (index - (len(names) - 1) / 2) * _WIDTH for group in best["n_gpus"]]
            compared(axes, x, best[_RATE])
        axes.set_ylim(0, 1.05 * float(of_model[_RATE].max()))
    for axes in panels[len(models) :]:
        axes.set_visible(False)
    for axes in panels[3 : len(models)]:
        axes.set_xlabel("GPUs")
    for axes in panels[::3]:
        axes.set_ylabel("samples/s")
    handles: list[Patch | Line2D] = [
        Patch(color=style_of(STYLES, name).colour, label=style_of(STYLES, name).title) for name in names
    ]
    if "tuned" in set(rows["kind"]):
        handles.append(compared_handle("tuned"))
    if _has_gaps(rows[rows["kind"] == "published"], len(names) * len(groups)):
        handles.append(cannot_run_handle("no printed setting"))
    return add_legend(figure, SOURCES.get(source, source), handles, ncols=len(handles)), rows


@figure_style
def on_clusters(tables: Tables, source: str) -> Drawn:
    """Draw throughput on two to eight nodes, with the printed values of an earlier version of the figure."""
    table = _only(tables)
    computed = table[table["oracle"] != "published"]
    models, groups = list(dict.fromkeys(computed["model"])), sorted(set(computed["n_gpus"]))
    names = in_order(computed["implementation"], STYLES)
    figure = new_figure(TWO_COLUMNS_IN, 2.5)
    panels = figure.subplots(1, len(models), squeeze=False)[0]
    printed = table[table["oracle"] == "published"]
    for axes, model in zip(panels, models, strict=True):
        _grouped(axes, computed[computed["model"] == model], names, groups)
        axes.set_ylim(0, None)
        marks = printed[printed["model"] == model]
        for row in marks.itertuples():
            # A printed bar of Slapo is that of its better schedule: both get the mark, joined by a line.
            either = row.implementation == "slapo"
            schedules = ["slapo-tp", "slapo-zero3"] if either else [str(row.implementation)]
            shifts = [names.index(name) - (len(names) - 1) / 2 for name in schedules if name in names]
            x = [groups.index(row.n_gpus) + shift * _WIDTH for shift in shifts]
            published(axes, x, [row.throughput_samples_per_s] * len(x), is_joined=True)
        axes.set_xlabel("GPUs")
    panels[0].set_ylabel("samples/s")
    handles: list[Patch | Line2D] = [
        Patch(color=style_of(STYLES, name).colour, label=style_of(STYLES, name).title) for name in names
    ]
    if len(printed):
        handles.append(published_handle("published, joined where of either schedule", "black"))
    if _has_gaps(computed, len(names) * len(groups)):
        handles.append(cannot_run_handle("no setting"))
    return add_legend(figure, SOURCES.get(source, source), handles, ncols=3), table


@figure_style
def steps_of_an_ablation(tables: Tables, source: str) -> Drawn:
    """Draw the throughput of BERT-1B as it is optimised step by step."""
    rows = _only(tables)
    figure = new_figure(ONE_COLUMN_IN * 1.5, 1.9)
    axes = figure.subplots()
    rates = rows[_RATE].to_numpy(float)
    axes.barh(range(len(rows)), rates, 0.7, color=PALETTE["blue"], lw=0, zorder=2)
    for y, (rate, ratio) in enumerate(zip(rates, rows["speedup"], strict=True)):
        axes.text(rate * 1.02, y, f"{rate:.1f} ({ratio:.2f}x)", va="center")
    axes.set_yticks(range(len(rows)), [_STEPS.get(step, step) for step in rows["step"]])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, 1.3 * float(rates.max()))
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("samples/s")
    return add_legend(figure, SOURCES.get(source, source), []), rows


# ------------------------------------------------------------------------------------------------
# The tuning grid: as predicted, and as searched.

_LEVEL = 5.0  # samples/s between two colours, as in the paper
_ORACLE_TITLES = {
    "published": "printed cells",
    "model": "hardware model",
    "emulator": "emulator, untuned",
    "measured": "measured",
}
_GRID_SOURCES = {
    "published": "printed cells, and a hardware model fitted to them",
    "emulated": "emulator, untuned",
}


@figure_style
def predicted_grid(tables: Tables, source: str) -> Drawn:
    """Draw predicted against printed throughput of the tuning grid."""
    rows = _only(tables)
    protocols = list(dict.fromkeys(rows["protocol"]))
    figure = new_figure(TWO_COLUMNS_IN if len(protocols) > 1 else ONE_COLUMN_IN, 2.9)
    panels = figure.subplots(1, len(protocols), sharex=True, sharey=True, squeeze=False)[0]
    fits = rows.dropna(subset=["published_samples_per_s"])
    values = fits[["published_samples_per_s", "predicted_samples_per_s"]].to_numpy(float)
    low, high = values.min() - 3, values.max() + 3
    for axes, protocol in zip(panels, protocols, strict=True):
        shown = fits[fits["protocol"] == protocol]
        reference(axes, [low, high], [low, high])
        points = axes.scatter(
            shown["published_samples_per_s"], shown["predicted_samples_per_s"], s=9, c=shown["ckpt_ratio"],
            cmap="viridis", zorder=3, vmin=0.25, vmax=1.0,
        )  # fmt: skip
        axes.set(xlim=(low, high), ylim=(low, high), xlabel="printed [samples/s]", title=protocol)
    panels[0].set_ylabel("predicted [samples/s]")
    figure.colorbar(points, ax=list(panels), label="share of recomputed layers")
    return add_legend(figure, SOURCES.get(source, source), [reference_handle("as printed")]), rows


@figure_style
def searched_grid(tables: Tables, source: str) -> Drawn:
    """Draw throughput over batch size and recomputed share, with the points that the frontier tries."""
    table = _only(tables)
    rows = table[table["strategy"].isin(["exhaustive", "frontier"])]
    oracles = [name for name in _ORACLE_TITLES if name in set(rows["oracle"])]
    rates = rows[_RATE].dropna()
    levels = [_LEVEL * step for step in range(floor(rates.min() / _LEVEL), ceil(rates.max() / _LEVEL) + 1)]
    figure = new_figure(TWO_COLUMNS_IN if len(oracles) > 1 else ONE_COLUMN_IN * 1.3, 2.9)
    panels = figure.subplots(1, len(oracles), sharey=True, squeeze=False)[0]
    for axes, oracle in zip(panels, oracles, strict=True):
        points = rows[rows["oracle"] == oracle]
        grid = points[points["strategy"] == "exhaustive"]
        wide = grid.pivot_table(_RATE, "global_batch_size", "ckpt_ratio", dropna=False)
        x, y, z = wide.columns.to_numpy(float), wide.index.to_numpy(float), wide.to_numpy(float)
        axes.set_facecolor(_OUT_OF_MEMORY)
        filled = axes.contourf(x, y, z, levels=levels, cmap="viridis", zorder=1)
        figure.colorbar(filled, ax=axes, label="samples/s", ticks=levels[::2])
        tried = points[points["strategy"] == "frontier"]
        axes.plot(
            tried["ckpt_ratio"], tried["global_batch_size"],
            ls="none", clip_on=False, marker="*", ms=5, mew=0.4, mfc=PALETTE["vermilion"], mec="white",
        )  # fmt: skip
        best = grid.nlargest(1, _RATE)
        axes.plot(
            best["ckpt_ratio"], best["global_batch_size"],
            ls="none", clip_on=False, marker="o", ms=8, mew=1.4, mfc="none", mec=PALETTE["black"],
        )  # fmt: skip
        axes.set_xticks(x, [f"{ratio:g}" for ratio in x])
        axes.set_yticks(y[::2])
        axes.tick_params(axis="x", labelrotation=90)
        axes.grid(visible=False)
        axes.set_xlabel("share of recomputed layers")
        axes.set_title(_ORACLE_TITLES[oracle])
    panels[0].set_ylabel("global batch size")
    handles = [
        Line2D([], [], ls="none", marker="*", color=PALETTE["vermilion"], label="tried by the frontier"),
        Line2D([], [], ls="none", marker="o", mfc="none", mec=PALETTE["black"], label="best of all"),
        Patch(color=_OUT_OF_MEMORY, label="out of memory"),
    ]
    return add_legend(figure, _GRID_SOURCES.get(source, source), handles, ncols=3), rows
