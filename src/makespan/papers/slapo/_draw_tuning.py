"""Figures of searches: each function goes from paths of tables to a figure and its table."""

from collections.abc import Mapping, Sequence
from math import ceil, floor
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from makespan.papers.slapo._tables_tuning import FIG10
from makespan.plots import ONE_COLUMN_IN, PALETTE, TWO_COLUMNS_IN, finished, new_figure, styled
from makespan.tables import read_csv

__all__ = ["fig10"]

_STEP = 5.0  # samples/s between two colours, as in the paper
_ORACLES = {
    "published": "printed cells",
    "model": "hardware model",
    "emulator": "emulator, untuned",
    "measured": "measured",
}
_SOURCES = {
    "published": "printed cells, and a hardware model fitted to them",
    "emulated": "emulator, untuned",
}


def _panel(axes: Axes, rows: pd.DataFrame, levels: Sequence[float]) -> None:
    grid = rows[rows["strategy"] == "exhaustive"]
    wide = grid.pivot_table("throughput_samples_per_s", "global_batch_size", "ckpt_ratio", dropna=False)
    x, y, z = wide.columns.to_numpy(float), wide.index.to_numpy(float), wide.to_numpy(float)
    axes.set_facecolor("#d9d9d9")
    filled = axes.contourf(x, y, z, levels=levels, cmap="viridis", zorder=1)
    axes.figure.colorbar(filled, ax=axes, label="samples/s", ticks=levels[::2])
    tried = rows[rows["strategy"] == "frontier"]
    tried_look: dict[str, Any] = {
        "marker": "*",
        "ms": 5,
        "mew": 0.4,
        "mfc": PALETTE["vermilion"],
        "mec": "white",
    }
    axes.plot(tried["ckpt_ratio"], tried["global_batch_size"], ls="none", clip_on=False, **tried_look)
    best = grid.nlargest(1, "throughput_samples_per_s")
    best_look: dict[str, Any] = {"marker": "o", "ms": 8, "mew": 1.4, "mfc": "none", "mec": PALETTE["black"]}
    axes.plot(best["ckpt_ratio"], best["global_batch_size"], ls="none", clip_on=False, **best_look)
    axes.set_xticks(x, [f"{ratio:g}" for ratio in x])
    axes.set_yticks(y[::2])
    axes.tick_params(axis="x", labelrotation=90)
    axes.grid(visible=False)
    axes.set_xlabel("share of recomputed layers")
    axes.set_title(_ORACLES[str(rows["oracle"].iloc[0])])


@styled
def _contours(table: pd.DataFrame, source: str) -> Figure:
    oracles = [name for name in _ORACLES if name in set(table["oracle"])]
    rates = table["throughput_samples_per_s"].dropna()
    levels = [_STEP * step for step in range(floor(rates.min() / _STEP), ceil(rates.max() / _STEP) + 1)]
    figure = new_figure(TWO_COLUMNS_IN if len(oracles) > 1 else ONE_COLUMN_IN * 1.3, 2.9)
    panels = figure.subplots(1, len(oracles), sharey=True, squeeze=False)[0]
    for axes, oracle in zip(panels, oracles, strict=True):
        _panel(axes, table[table["oracle"] == oracle], levels)
    panels[0].set_ylabel("global batch size")
    handles = [
        Line2D([], [], ls="none", marker="*", color=PALETTE["vermilion"], label="tried by the frontier"),
        Line2D([], [], ls="none", marker="o", mfc="none", mec=PALETTE["black"], label="best of all"),
        Patch(color="#d9d9d9", label="out of memory"),
    ]
    return finished(figure, _SOURCES.get(source, source), handles, ncols=3)


def fig10(paths: Mapping[str, str], source: str) -> tuple[Figure, pd.DataFrame]:
    """Throughput over batch size and share of recomputed layers, with the points that a search tries."""
    table = read_csv(paths["fig10"], FIG10)
    rows = table[table["strategy"].isin(["exhaustive", "frontier"])]
    return _contours(rows, source), rows
