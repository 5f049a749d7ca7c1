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
from makespan.plots import (
    PALETTE,
    TWO_COLUMNS_IN,
    cannot_run,
    cannot_run_handle,
    finished,
    limit,
    limit_handle,
    new_figure,
    published,
    published_handle,
    reference,
    reference_handle,
    spread,
    spread_handle,
    styled,
)
from makespan.tables import read_csv
from makespan.training.zoo import STAND_IN_TITLES

__all__ = ["fig10", "fig11", "fig12", "fig13"]

Paths = Mapping[str, str]
Drawn = tuple[Figure, pd.DataFrame]

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
    return finished(figure, source, handles, ncols=4)


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


def fig10(paths: Paths, source: str) -> Drawn:
    """Throughput and memory of packed processes and of logical workers that share a device."""
    rows = read_csv(paths["fig10"], FIG10)
    return _sharing(rows, source), rows


# --- Figs 11 to 13 --------------------------------------------------------------------------------------


@styled
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
    return finished(figure, source, [*handles, reference_handle("contexts not kept apart")], ncols=4)


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
    return finished(figure, source, _legend(bars, rows, "published, GPU in brackets"), ncols=5)


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
    return finished(figure, source, _legend(bars, rows, "published, 8 on V100"), ncols=5)


def fig13(paths: Paths, source: str) -> Drawn:
    """Time of logical workers without and with sum and update over a step of stock processes."""
    rows = read_csv(paths["fig13"], FIG13)
    return _copying(rows, source), rows
