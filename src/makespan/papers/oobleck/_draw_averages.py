"""Figures of average throughput: each function goes from paths of tables to a figure and its table."""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, NullLocator

from makespan.confidence import half_widths
from makespan.papers.oobleck._tables_simulation import ABLATION, FIG9, FIG10, FIG13
from makespan.plots import (
    PALETTE,
    TWO_COLUMNS_IN,
    Look,
    beyond,
    beyond_handle,
    cannot_run,
    cannot_run_handle,
    finished,
    new_figure,
    ordered,
    plain_numbers,
    published,
    published_handle,
    reference,
    reference_handle,
    spread,
    spread_handle,
    styled,
)
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
_RATIOS, _RATIO_TICKS = (0.4, 2.5), (0.5, 0.7, 1.0, 1.4, 2.0)  # what the axis holds: most ratios are near 1
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
            cannot_run(
                axes, x, np.full(len(x), 0.05), look.colour, ms=3, transform=axes.get_xaxis_transform()
            )
            continue
        heights = own["throughput_samples_per_s"].to_numpy(float)
        half = own["half_width_samples_per_s"].to_numpy(float)
        axes.bar(x, heights, _WIDTH, color=look.colour, lw=0, zorder=2)
        spread(axes, x, heights - half, heights + half)
        published(axes, x, own["published_samples_per_s"].to_numpy(float), ms=2.6, mew=0.7)
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
    handles: list[Patch | Line2D] = [
        Patch(color=LOOKS[name].colour, label=LOOKS[name].title) for name in shown
    ]
    if table["half_width_samples_per_s"].notna().any():
        handles.append(spread_handle("95 % interval over seeds"))
    if table["published_samples_per_s"].notna().any():
        handles.append(published_handle())
    if not table["feasible"].all():
        handles.append(cannot_run_handle("out of memory"))
    return finished(figure, SOURCES.get(source, source), handles, ncols=4 if is_single else len(handles))


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
    figure = new_figure(TWO_COLUMNS_IN, 2.0 * len(traces) + 0.6)
    panels = figure.subplots(len(traces), len(systems), sharex=True, sharey=True, squeeze=False)
    is_beyond = False
    for row, trace in zip(panels, traces, strict=True):
        for axes, system in zip(row, systems, strict=True):
            reference(axes, [-0.5, len(defects) - 0.5], [1.0, 1.0])
            taken = Counter[tuple[int, bool]]()
            for model, (colour, marker) in zip(models, _MODEL_LOOKS, strict=False):
                own = table[
                    (table["trace"] == trace) & (table["system"] == system) & (table["model"] == model)
                ]
                own = own.set_index("defects").reindex(pd.Index(defects))
                x = np.arange(len(defects)) + 0.12 * (models.index(model) - (len(models) - 1) / 2)
                ratios = own["ratio"].to_numpy(float)
                axes.plot(x, ratios, ls="none", marker=marker, ms=3, color=colour, label=model)
                for number, (place, ratio) in enumerate(zip(x, ratios, strict=True)):
                    here = number, ratio > 1.0
                    if beyond(
                        axes, place, ratio, _RATIOS, colour, is_across=False, row=number, n_before=taken[here]
                    ):
                        taken[here] += 1
                        is_beyond = True
                stopped = (own["throughput_samples_per_s_as_released"] == 0).to_numpy()
                bottom = np.full(int(stopped.sum()), 0.05)
                cannot_run(axes, x[stopped], bottom, colour, ms=3, transform=axes.get_xaxis_transform())
            axes.set_yscale("log")
            axes.set_ylim(*_RATIOS)
            axes.yaxis.set_major_locator(FixedLocator(_RATIO_TICKS))
            axes.yaxis.set_minor_locator(NullLocator())
            axes.yaxis.set_major_formatter(plain_numbers())
            axes.set_xticks(range(len(defects)), [one.replace(" ", "+") for one in defects], rotation=90)
            axes.set_title(f"{LOOKS[system].title}, {trace}")
        row[0].set_ylabel("over as released")
    handles = [*panels[0][-1].get_legend_handles_labels()[0], reference_handle("as released")]
    if (table["throughput_samples_per_s_as_released"] == 0).any():
        handles.append(cannot_run_handle("no throughput as released"))
    if is_beyond:
        handles.append(beyond_handle())
    return finished(figure, SOURCES.get(source, source), handles, ncols=4)


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
