"""Figures of what is counted and measured of schedules: each function goes from paths to a figure."""

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from makespan.papers.slapo._tables_measured import TABLE4, TUNER
from makespan.papers.slapo._tables_modelled import FIG9
from makespan.plots import (
    ONE_COLUMN_IN,
    PALETTE,
    TWO_COLUMNS_IN,
    finished,
    new_figure,
    published,
    published_handle,
    spread,
    spread_handle,
    styled,
)
from makespan.tables import read_csv

__all__ = ["fig9_steps", "table4", "tuner"]

Drawn = tuple[Figure, pd.DataFrame]
_COUNTS = {"helpers": "blue", "listing": "sky"}
_MIB = float(1 << 20)
_PROCESSES = ("blue", "orange", "green", "purple")


def table4(paths: Mapping[str, str], source: str) -> Drawn:
    """Lines of every schedule, and those of the authors as marks."""
    table = read_csv(paths["table4"], TABLE4)
    return _lines(table, source), table


@styled
def _lines(table: pd.DataFrame, source: str) -> Figure:
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
    return finished(figure, source, handles, ncols=3)


def fig9_steps(paths: Mapping[str, str], source: str) -> Drawn:
    """Throughput after each step of a schedule, and what a process keeps in memory."""
    table = read_csv(paths["fig9"], FIG9)
    rows = table[table["oracle"] == "measured"].reset_index(drop=True)
    return _steps(rows, source), rows


@styled
def _steps(rows: pd.DataFrame, source: str) -> Figure:
    figure = new_figure(TWO_COLUMNS_IN, 2.4)
    left, right = figure.subplots(1, 2, sharey=True)
    steps, numbers = list(dict.fromkeys(rows["step"])), sorted(set(rows["n_gpus"]))
    colours = dict(zip(numbers, (PALETTE[name] for name in _PROCESSES), strict=False))
    places = _places(rows, steps)
    colour = [colours.get(number, PALETTE["grey"]) for number in rows["n_gpus"]]
    rate = rows["throughput_samples_per_s"].to_numpy(float)
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
    return finished(figure, source, handles, ncols=len(handles))


def _places(rows: pd.DataFrame, steps: list[str]) -> list[float]:
    """Return the height of each bar: those of a step around its number."""
    found = []
    for name, number in zip(rows["step"], rows["n_gpus"], strict=True):
        own = sorted(rows[rows["step"] == name]["n_gpus"])
        found.append(steps.index(name) + 0.26 * (own.index(number) - (len(own) - 1) / 2))
    return found


def tuner(paths: Mapping[str, str], source: str) -> Drawn:
    """Measured throughput over batch size and share of recomputed layers, with what searches tried."""
    table = read_csv(paths["tuner"], TUNER)
    return _search(table, source), table


@styled
def _search(table: pd.DataFrame, source: str) -> Figure:
    figure = new_figure(ONE_COLUMN_IN * 1.3, 2.8)
    axes = figure.subplots()
    points = table[table["strategy"] == "exhaustive"]
    wide = points.pivot_table(
        "throughput_samples_per_s", "global_batch_size", "ckpt_ratio", dropna=False, observed=False
    )
    ratios, batches = (list(labels) for labels in (wide.columns, wide.index))
    axes.set_facecolor("#d9d9d9")
    image = axes.imshow(wide.to_numpy(float), origin="lower", aspect="auto", cmap="viridis", zorder=1)
    figure.colorbar(image, ax=axes, label="samples/s")
    for strategy, marker in (("frontier", "*"), ("coordinate_descent", "o")):
        tried = table[table["strategy"] == strategy]
        axes.plot(
            [ratios.index(one) for one in tried["ckpt_ratio"]],
            [batches.index(one) for one in tried["global_batch_size"]],
            ls="none", marker=marker, ms=7 if marker == "*" else 10, mew=0.9, zorder=4,
            mfc=PALETTE["vermilion"] if marker == "*" else "none", mec="white",
        )  # fmt: skip
    axes.set_xticks(range(len(ratios)), [f"{one:g}" for one in ratios])
    axes.set_yticks(range(len(batches)), [f"{one}" for one in batches])
    axes.grid(visible=False)
    axes.set_xlabel("share of recomputed layers")
    axes.set_ylabel("batch size")
    handles = [
        Line2D([], [], ls="none", marker="*", color=PALETTE["vermilion"], label="frontier"),
        Line2D([], [], ls="none", marker="o", mfc="none", mec="black", label="coordinate descent"),
        Patch(color="#d9d9d9", label="beyond the budget"),
    ]
    return finished(figure, source, handles, ncols=3)
