"""Figures of what was measured of logical workers: each function goes from paths of tables to a figure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from makespan.papers.easyscale._tables_overheads import FIG10, FIG11, FIG12, FIG13
from makespan.plots import PALETTE, TWO_COLUMNS_IN, finished, new_figure, styled
from makespan.tables import read_csv
from makespan.training.zoo import STAND_IN_TITLES

__all__ = ["fig10", "fig11", "fig12", "fig13"]

Paths = Mapping[str, str]
Drawn = tuple[Figure, pd.DataFrame]

_V100_MIB = 32768.0
_MARK: Mapping[str, Any] = {
    "ls": "none",
    "marker": "D",
    "ms": 3.6,
    "mfc": "white",
    "mec": "black",
    "mew": 0.9,
}
_CROSS: Mapping[str, Any] = {"ls": "none", "marker": "x", "ms": 4.5, "mew": 1.3, "color": "black"}
_PANELS_IN_A_ROW = 4


@dataclass(frozen=True, slots=True)
class _Bar:
    """One bar of every group: its column, colour and title; a column of printed cells, or none."""

    column: str
    colour: str
    title: str
    printed: str | None = None


def _draw_bars(axes: Axes, rows: pd.DataFrame, bars: Sequence[_Bar]) -> None:
    """Draw a group of bars a row with spreads, and printed cells as marks beside them."""
    width = 0.8 / len(bars)
    for number, bar in enumerate(bars):
        x = np.arange(len(rows)) + (number - (len(bars) - 1) / 2) * width
        values = rows[bar.column].to_numpy(float)
        axes.bar(x, values, 0.9 * width, color=bar.colour, lw=0, zorder=2)
        if f"{bar.column}_iqr" in rows:
            half = rows[f"{bar.column}_iqr"].to_numpy(float) / 2
            axes.errorbar(x, values, half, fmt="none", ecolor="black", elinewidth=0.8, capsize=1.5, zorder=4)
        if bar.printed is not None:
            axes.plot(x, rows[bar.printed].to_numpy(float), **_MARK, zorder=5)


def _legend(bars: Sequence[_Bar], published: str) -> list[Patch | Line2D]:
    handles: list[Patch | Line2D] = [Patch(color=bar.colour, label=bar.title) for bar in bars]
    return [*handles, Line2D([], [], label=published, **_MARK)]


# --- Fig. 10 --------------------------------------------------------------------------------------------

_METHODS = {"packing": ("packed processes", PALETTE["grey"]), "easyscale": ("EasyScale", PALETTE["blue"])}


@styled
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
        panels[1, column].axhline(100.0, color="black", lw=0.9, ls=(0, (4, 2)), zorder=1)
        panels[1, column].set_xticks(np.arange(len(counts)), [str(k) for k in counts])
        panels[1, column].set_xlabel("processes or logical workers")
    panels[1, 0].set_ylim(0.0, 1.05 * max(100.0, (100.0 * rows["total_mem_mib"] / rows["memory_mib"]).max()))
    panels[0, 0].set_ylabel("throughput over\none process")
    panels[1, 0].set_ylabel("memory of the\ndevice [%]")
    handles: list[Patch | Line2D] = [Patch(color=colour, label=title) for title, colour in _METHODS.values()]
    handles.append(Patch(fc="white", ec=PALETTE["blue"], hatch="////", lw=0.6, label="its gradient sets"))
    handles.append(Line2D([], [], label="published, V100", **_MARK))
    handles.append(Line2D([], [], label="out of memory", **_CROSS))
    return finished(figure, source, handles, ncols=5)


def _draw_throughput(axes: Axes, x: np.ndarray, part: pd.DataFrame, colour: str) -> None:
    values, half = part["norm_throughput"].to_numpy(float), part["norm_throughput_iqr"].to_numpy(float) / 2
    axes.bar(x, values, 0.36, color=colour, lw=0, zorder=2)
    axes.errorbar(x, values, half, fmt="none", ecolor="black", elinewidth=0.8, capsize=1.5, zorder=4)
    axes.plot(x, part["published_norm_throughput"].to_numpy(float), **_MARK, zorder=5)
    over = part["oom"].astype(bool).to_numpy()
    axes.plot(x[over], np.full(over.sum(), 0.05), **_CROSS, transform=axes.get_xaxis_transform(), zorder=5)


def _draw_memory(axes: Axes, x: np.ndarray, part: pd.DataFrame, colour: str) -> None:
    share = 100.0 / part["memory_mib"].to_numpy(float)
    memory, sets = (part[name].to_numpy(float) * share for name in ("peak_mem_mib", "gradient_sets_mib"))
    axes.bar(x, memory, 0.36, color=colour, lw=0, zorder=2)
    axes.bar(x, sets, 0.36, memory, fc="white", ec=colour, hatch="////", lw=0.6, zorder=2)
    axes.plot(x, 100.0 * part["published_peak_mem_mib"].to_numpy(float) / _V100_MIB, **_MARK, zorder=5)


def fig10(paths: Paths, source: str) -> Drawn:
    """Throughput and memory of packed processes and of logical workers that share a device."""
    rows = read_csv(paths["fig10"], FIG10)
    return _sharing(rows, source), rows


# --- Figs 11 to 13 --------------------------------------------------------------------------------------


@styled
def _switching(rows: pd.DataFrame, source: str) -> Figure:
    figure = new_figure(TWO_COLUMNS_IN, 2.4)
    axes = figure.subplots()
    bars = (
        _Bar("one", PALETTE["grey"], "contexts not kept apart"),
        _Bar("ratio", PALETTE["blue"], "context switches", "published_ratio"),
    )
    _draw_bars(axes, rows.assign(one=1.0), bars)
    axes.set_xticks(range(len(rows)), [STAND_IN_TITLES.get(model, model) for model in rows["model"]])
    spread = rows["ratio"] + rows["ratio_iqr"] / 2, rows["ratio"] - rows["ratio_iqr"] / 2
    axes.set_ylim(min(0.95, spread[1].min() - 0.01), max(1.06, spread[0].max() + 0.01))
    axes.set_ylabel("time of a micro-batch\nover that without switches")
    return finished(figure, source, _legend(bars, "published, V100"), ncols=3)


def fig11(paths: Paths, source: str) -> Drawn:
    """Time of micro-batches with context switches over that without."""
    rows = read_csv(paths["fig11"], FIG11)
    return _switching(rows, source), rows


@styled
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
    return finished(figure, source, _legend(bars, "published, GPU in brackets"), ncols=4)


def fig12(paths: Paths, source: str) -> Drawn:
    """Time of micro-batches under D1 and D1+D2 over that of stock training, by kernel set."""
    rows = read_csv(paths["fig12"], FIG12)
    return _determinism(rows, source), rows


@styled
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
    return finished(figure, source, _legend(bars, "published, 8 on V100"), ncols=4)


def fig13(paths: Paths, source: str) -> Drawn:
    """Time of logical workers without and with sum and update over a step of stock processes."""
    rows = read_csv(paths["fig13"], FIG13)
    return _copying(rows, source), rows
