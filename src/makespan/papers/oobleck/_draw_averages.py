"""Figures of average throughput: each function goes from paths of tables to a figure and its table."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from makespan.confidence import half_widths
from makespan.papers.oobleck._tables_simulation import FIG9
from makespan.plots import PALETTE, TWO_COLUMNS_IN, Look, finished, new_figure, ordered, styled
from makespan.tables import read_csv

__all__ = ["LOOKS", "fig9"]

LOOKS = {
    "bamboo": Look("Bamboo", PALETTE["green"], "^"),
    "varuna": Look("Varuna", PALETTE["orange"], "s"),
    "oobleck": Look("Oobleck", PALETTE["blue"], "o"),
}
_SOURCES = {
    "emulated": "generated failures, printed throughput",
    "published": "the authors' traces, printed throughput",
}
_MODES = {"compat": "as released", "fixed": "repaired"}
_WIDTH = 0.27


def averaged(rows: pd.DataFrame) -> pd.DataFrame:
    """Return means over seeds with half the width of their 95 % intervals, in the order of the rows."""
    keys = ["mode", "trace", "model", "system"]
    groups = rows["throughput_samples_per_s"].groupby([rows[key] for key in keys], sort=False)
    table = groups.mean().reset_index()
    table["half_width_samples_per_s"] = half_widths(groups)
    first = rows.drop_duplicates(keys)[[*keys, "published_samples_per_s", "feasible"]]
    return table.merge(first, on=keys)


def _bars(axes: Axes, rows: pd.DataFrame, traces: Sequence[str]) -> None:
    for offset, (system, look) in enumerate(LOOKS.items()):
        own = rows[rows["system"] == system].set_index("trace").reindex(pd.Index(traces))
        x = np.arange(len(traces)) + (offset - 1) * _WIDTH
        if not own["feasible"].fillna(False).astype(bool).any():
            axes.text(x[0] - _WIDTH / 2, 0, " OOM", rotation=90, va="bottom", color=look.colour, size=5.5)
            continue
        heights = own["throughput_samples_per_s"].to_numpy(float)
        errors = np.nan_to_num(own["half_width_samples_per_s"].to_numpy(float))
        axes.bar(x, heights, _WIDTH, color=look.colour, lw=0, zorder=2)
        axes.errorbar(x, heights, errors, ls="none", color="black", elinewidth=0.7, zorder=3)
        marks = own["published_samples_per_s"].to_numpy(float)
        axes.hlines(marks, x - 0.6 * _WIDTH, x + 0.6 * _WIDTH, color="black", lw=0.9, zorder=4)
    axes.set_xticks(range(len(traces)), traces, rotation=90)
    axes.tick_params(axis="x", length=0)
    axes.grid(visible=False, axis="x")
    axes.set_ylim(0, None)


@styled
def bars(table: pd.DataFrame, source: str, label: str) -> Figure:
    """Draw bars a trace and system, a panel a model in each of two rows, as released and repaired."""
    models, traces = list(dict.fromkeys(table["model"])), list(dict.fromkeys(table["trace"]))
    modes = ordered(table["mode"], _MODES)
    figure = new_figure(TWO_COLUMNS_IN, 1.55 * len(modes) + 0.45)
    panels = figure.subplots(len(modes), len(models), sharex=True, sharey="col", squeeze=False)
    for row, mode in zip(panels, modes, strict=True):
        for axes, model in zip(row, models, strict=True):
            _bars(axes, table[(table["mode"] == mode) & (table["model"] == model)], traces)
        row[0].set_ylabel(f"{_MODES[mode]}\n[samples/s]")
    for axes, model in zip(panels[0], models, strict=True):
        axes.set_title(model)
    for axes in panels[-1]:
        axes.set_xlabel(label)
    handles = [
        *(Patch(color=look.colour, label=look.title) for look in LOOKS.values()),
        Line2D([], [], color="black", lw=0.9, label="published"),
    ]
    return finished(figure, _SOURCES.get(source, source), handles, ncols=4)


def fig9(paths: Mapping[str, str], source: str) -> tuple[Figure, pd.DataFrame]:
    """Average throughput against the distance between failures."""
    table = averaged(read_csv(paths["fig9"], FIG9))
    return bars(table, source, "failure every"), table
