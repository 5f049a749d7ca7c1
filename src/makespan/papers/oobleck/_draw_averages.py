"""Figures of average throughput: each function goes from paths of tables to a figure and its table."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from makespan.confidence import half_widths
from makespan.papers.oobleck._tables_simulation import ABLATION, FIG9, FIG10, FIG13
from makespan.plots import PALETTE, TWO_COLUMNS_IN, Look, finished, new_figure, ordered, styled
from makespan.tables import read_csv

__all__ = ["LOOKS", "MODES", "SOURCES", "ablation", "averaged", "fig9", "fig10", "fig13"]

Drawn = tuple[Figure, pd.DataFrame]

LOOKS = {
    "bamboo": Look("Bamboo", PALETTE["green"], "^"),
    "varuna": Look("Varuna", PALETTE["orange"], "s"),
    "varuna-no-checkpoint": Look("Varuna, checkpoints for free", PALETTE["vermilion"], "D"),
    "oobleck": Look("Oobleck", PALETTE["blue"], "o"),
}
SOURCES = {
    "emulated": "generated traces, printed throughput",
    "published": "the authors' traces, printed throughput",
}
MODES = {"compat": "as released", "fixed": "repaired"}
_WIDTH = 0.27
_RATIOS = (0.4, 2.2)  # larger ones are in the table
_MODEL_LOOKS = (
    *((PALETTE["black"], "o"), (PALETTE["purple"], "s"), (PALETTE["sky"], "^")),
    *((PALETTE["vermilion"], "D"), (PALETTE["green"], "v")),
)


def averaged(rows: pd.DataFrame) -> pd.DataFrame:
    """Return means over seeds with half the width of their 95 % intervals, in the order of the rows."""
    keys = ["mode", "trace", "model", "system"]
    groups = rows["throughput_samples_per_s"].groupby([rows[key] for key in keys], sort=False)
    table = groups.mean().reset_index()
    table["half_width_samples_per_s"] = half_widths(groups)
    first = rows.drop_duplicates(keys)[[*keys, "published_samples_per_s", "feasible"]]
    return table.merge(first, on=keys)


def _bars(axes: Axes, rows: pd.DataFrame, traces: Sequence[str]) -> None:
    shown = [(name, look) for name, look in LOOKS.items() if name in set(rows["system"])]
    for offset, (system, look) in enumerate(shown):
        own = rows[rows["system"] == system].set_index("trace").reindex(pd.Index(traces))
        x = np.arange(len(traces)) + (offset - 1) * _WIDTH
        if not own["feasible"].fillna(False).astype(bool).any():
            axes.text(x[0] - _WIDTH / 2, 0, " OOM", rotation=90, va="bottom", color=look.colour, size=7)
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


@styled
def bars(table: pd.DataFrame, source: str, label: str) -> Figure:
    """Draw bars a trace and system, as released and repaired: two rows, or two panels for one model."""
    models, traces = list(dict.fromkeys(table["model"])), list(dict.fromkeys(table["trace"]))
    modes = ordered(table["mode"], MODES)
    is_single = len(models) == 1
    n_rows, n_columns = (1, len(modes)) if is_single else (len(modes), len(models))
    figure = new_figure(TWO_COLUMNS_IN * (0.75 if is_single else 1.0), 1.55 * n_rows + 0.6)
    panels = figure.subplots(
        n_rows, n_columns, sharex=True, sharey=True if is_single else "col", squeeze=False
    )
    flat = list(panels.flat)
    for axes, (mode, model) in zip(flat, [(mode, model) for mode in modes for model in models], strict=True):
        _bars(axes, table[(table["mode"] == mode) & (table["model"] == model)], traces)
        if is_single:
            axes.set_title(f"{model}, {MODES[mode]}")
    for axes in flat:
        axes.set_ylim(0, None)
    if is_single:
        flat[0].set_ylabel("samples/s")
    else:
        for axes, model in zip(panels[0], models, strict=True):
            axes.set_title(model)
        for row, mode in zip(panels, modes, strict=True):
            row[0].set_ylabel(f"{MODES[mode]}\n[samples/s]")
    for axes in panels[-1]:
        axes.set_xlabel(label)
    shown = ordered(table["system"], LOOKS)
    handles = [
        *(Patch(color=LOOKS[name].colour, label=LOOKS[name].title) for name in shown),
        Line2D([], [], color="black", lw=0.9, label="published"),
    ]
    return finished(figure, SOURCES.get(source, source), handles, ncols=len(handles))


def fig9(paths: Mapping[str, str], source: str) -> Drawn:
    """Average throughput against the distance between failures."""
    table = averaged(read_csv(paths["fig9"], FIG9))
    return bars(table, source, "failure every"), table


def fig10(paths: Mapping[str, str], source: str) -> Drawn:
    """Average throughput on spot traces."""
    table = averaged(read_csv(paths["fig10"], FIG10))
    return bars(table, source, ""), table


def fig13(paths: Mapping[str, str], source: str) -> Drawn:
    """Average throughput of one model, with and without the cost of checkpoints."""
    table = averaged(read_csv(paths["fig13"], FIG13))
    return bars(table, source, "failure every"), table


@styled
def _repairs(table: pd.DataFrame, source: str) -> Figure:
    """Draw how many times as fast each system is with a defect repaired, a panel a trace and system."""
    traces, models = (list(dict.fromkeys(table[name])) for name in ("trace", "model"))
    systems = ordered(table["system"], LOOKS)
    defects = list(dict.fromkeys(table["defects"]))
    figure = new_figure(TWO_COLUMNS_IN, 1.5 * len(traces) + 0.6)
    panels = figure.subplots(len(traces), len(systems), sharex=True, sharey=True, squeeze=False)
    for row, trace in zip(panels, traces, strict=True):
        for axes, system in zip(row, systems, strict=True):
            axes.axhline(1.0, color=PALETTE["grey"], lw=0.6)
            for model, (colour, marker) in zip(models, _MODEL_LOOKS, strict=False):
                own = table[
                    (table["trace"] == trace) & (table["system"] == system) & (table["model"] == model)
                ]
                ratios = own.set_index("defects")["ratio"].reindex(pd.Index(defects)).to_numpy(float)
                axes.plot(
                    range(len(defects)), ratios, ls="none", marker=marker, ms=3, color=colour, label=model
                )
            axes.set_ylim(*_RATIOS)
            axes.set_xticks(range(len(defects)), [one.replace(" ", "+") for one in defects], rotation=90)
            axes.set_title(f"{LOOKS[system].title}, {trace}")
        row[0].set_ylabel("over as released")
    handles = panels[0][-1].get_legend_handles_labels()[0]
    return finished(figure, SOURCES.get(source, source), handles, ncols=len(handles))


def ablation(paths: Mapping[str, str], source: str) -> Drawn:
    """Average throughput with one defect repaired, over that as released; means over seeds."""
    rows = read_csv(paths["ablation"], ABLATION)
    keys, value = ["trace", "model", "system"], "throughput_samples_per_s"
    rows = rows[rows["feasible"]][[*keys, "seed", "defects", value]]
    base = rows[rows["defects"] == ""].drop(columns="defects")
    pairs = rows[rows["defects"] != ""].merge(base, on=[*keys, "seed"], suffixes=("", "_as_released"))
    means = pairs.groupby([*keys, "defects"], sort=False)[[value, f"{value}_as_released"]].mean()
    table = means.reset_index()
    released = table[f"{value}_as_released"]
    table["ratio"] = table["throughput_samples_per_s"] / released.where(released > 0)
    return _repairs(table, source), table
