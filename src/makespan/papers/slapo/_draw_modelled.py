"""Figures 7 to 9 and of the fit: each function goes from paths of tables to a figure and its table."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from makespan.papers.slapo._tables_modelled import FIG7, FIG8, FIG9, FIG10_FIT
from makespan.plots import (
    ONE_COLUMN_IN,
    PALETTE,
    TWO_COLUMNS_IN,
    Look,
    cannot_run,
    cannot_run_handle,
    compared,
    compared_handle,
    finished,
    look_of,
    new_figure,
    ordered,
    published,
    published_handle,
    reference,
    reference_handle,
    styled,
)
from makespan.tables import read_csv

__all__ = ["fig7", "fig8", "fig9", "fig10_fit"]

Paths = Mapping[str, str]
Drawn = tuple[Figure, pd.DataFrame]

LOOKS = {
    "megatron": Look("Megatron-LM", PALETTE["grey"], "s"),
    "slapo-tp": Look("Slapo-TP", PALETTE["blue"], "o"),
    "deepspeed": Look("DeepSpeed", PALETTE["orange"], "^"),
    "slapo-zero3": Look("Slapo-ZeRO3", PALETTE["green"], "D"),
}
SOURCES = {"published": "hardware model fitted to Fig. 10", "emulated": "emulator, untuned"}
_STEPS = {
    "vanilla": "vanilla, 1 GPU",
    "kernels": "+ kernels, 1 GPU",
    "layers-tp": "+ tensor parallelism, 8 GPUs",
    "embedding-tp": "+ sharded embedding, 8 GPUs",
}
_EITHER = ["slapo-tp", "slapo-zero3"]
_WIDTH, _RATE = 0.2, "throughput_samples_per_s"


def _grouped(axes: Axes, rows: pd.DataFrame, names: Sequence[str], groups: Sequence[int]) -> None:
    """Draw a group of bars for each number of GPUs, a cross where an implementation has no setting."""
    rates = rows.set_index(["implementation", "n_gpus"])[_RATE].to_dict()
    for index, name in enumerate(names):
        x = np.arange(len(groups)) + (index - (len(names) - 1) / 2) * _WIDTH
        for position, group in zip(x, groups, strict=True):
            if (name, group) in rates:
                height = rates[name, group]
                axes.bar(position, height, _WIDTH * 0.92, color=look_of(LOOKS, name).colour, lw=0, zorder=2)
            else:
                cannot_run(axes, position, 0.05, ms=3.5, transform=axes.get_xaxis_transform())
    axes.set_xticks(range(len(groups)), [str(group) for group in groups])
    axes.set_xlim(-0.55, len(groups) - 0.45)
    axes.set_title(str(rows["model"].iloc[0]))
    axes.grid(visible=False, axis="x")


def _has_gaps(rows: pd.DataFrame, n_bars: int) -> bool:
    """Tell whether a model lacks some of its bars."""
    return bool((rows.groupby("model").size() < n_bars).any())


@styled
def _nodes(rows: pd.DataFrame, source: str) -> Figure:
    models = list(dict.fromkeys(rows["model"]))
    figure = new_figure(TWO_COLUMNS_IN, 3.9)
    panels = figure.subplots(2, 3).ravel()
    names, groups = ordered(rows["implementation"], LOOKS), sorted(set(rows["n_gpus"]))
    for axes, model in zip(panels, models, strict=False):
        own = rows[rows["model"] == model]
        _grouped(axes, own[own["kind"] == "published"], names, groups)
        tuned = own[own["kind"] == "tuned"]
        for index, name in enumerate(names):
            best = tuned[tuned["implementation"] == name].sort_values("n_gpus")
            x = [groups.index(group) + (index - (len(names) - 1) / 2) * _WIDTH for group in best["n_gpus"]]
            compared(axes, x, best["throughput_samples_per_s"])
        axes.set_ylim(0, 1.05 * float(own.loc[own["kind"].isin(["published", "tuned"]), _RATE].max()))
    for axes in panels[len(models) :]:
        axes.set_visible(False)
    for axes in panels[3 : len(models)]:
        axes.set_xlabel("GPUs")
    for axes in panels[::3]:
        axes.set_ylabel("samples/s")
    handles: list[Patch | Line2D] = [
        Patch(color=look_of(LOOKS, name).colour, label=look_of(LOOKS, name).title) for name in names
    ]
    if "tuned" in set(rows["kind"]):
        handles.append(compared_handle("tuned"))
    if _has_gaps(rows[rows["kind"] == "published"], len(names) * len(groups)):
        handles.append(cannot_run_handle("no printed setting"))
    return finished(figure, SOURCES.get(source, source), handles, ncols=len(handles))


def fig7(paths: Paths, source: str) -> Drawn:
    """Throughput inside one node at the printed settings, and at those that the tuner finds."""
    table = read_csv(paths["fig7"], FIG7)
    rows = table[table["kind"].isin(["published", "tuned"])]
    return _nodes(rows, source), rows


@styled
def _clusters(table: pd.DataFrame, source: str) -> Figure:
    own = table[table["oracle"] != "published"]
    models, groups = list(dict.fromkeys(own["model"])), sorted(set(own["n_gpus"]))
    names = ordered(own["implementation"], LOOKS)
    figure = new_figure(TWO_COLUMNS_IN, 2.5)
    panels = figure.subplots(1, len(models), squeeze=False)[0]
    printed = table[table["oracle"] == "published"]
    for axes, model in zip(panels, models, strict=True):
        _grouped(axes, own[own["model"] == model], names, groups)
        axes.set_ylim(0, None)
        marks = printed[printed["model"] == model]
        for row in marks.itertuples():
            # The printed bar of Slapo is of either schedule, so both have its mark, and a line joins them.
            schedules = _EITHER if row.implementation == "slapo" else [str(row.implementation)]
            shifts = [names.index(name) - (len(names) - 1) / 2 for name in schedules if name in names]
            x = [groups.index(row.n_gpus) + shift * _WIDTH for shift in shifts]
            published(axes, x, [row.throughput_samples_per_s] * len(x), is_joined=True)
        axes.set_xlabel("GPUs")
    panels[0].set_ylabel("samples/s")
    handles: list[Patch | Line2D] = [
        Patch(color=look_of(LOOKS, name).colour, label=look_of(LOOKS, name).title) for name in names
    ]
    if len(printed):
        handles.append(published_handle("published, joined where of either schedule", "black"))
    if _has_gaps(own, len(names) * len(groups)):
        handles.append(cannot_run_handle("no setting"))
    return finished(figure, SOURCES.get(source, source), handles, ncols=3)


def fig8(paths: Paths, source: str) -> Drawn:
    """Throughput on two to eight nodes, with the printed values of an earlier version of the figure."""
    table = read_csv(paths["fig8"], FIG8)
    return _clusters(table, source), table


@styled
def _ablation(rows: pd.DataFrame, source: str) -> Figure:
    figure = new_figure(ONE_COLUMN_IN * 1.5, 1.9)
    axes = figure.subplots()
    rates = rows["throughput_samples_per_s"].to_numpy(float)
    axes.barh(range(len(rows)), rates, 0.7, color=PALETTE["blue"], lw=0, zorder=2)
    for y, (rate, ratio) in enumerate(zip(rates, rows["speedup"], strict=True)):
        axes.text(rate * 1.02, y, f"{rate:.1f} ({ratio:.2f}x)", va="center")
    axes.set_yticks(range(len(rows)), [_STEPS.get(step, step) for step in rows["step"]])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, 1.3 * float(rates.max()))
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("samples/s")
    return finished(figure, SOURCES.get(source, source), [])


def fig9(paths: Paths, source: str) -> Drawn:
    """Throughput as BERT-1B is optimised step by step."""
    rows = read_csv(paths["fig9"], FIG9)
    return _ablation(rows, source), rows


@styled
def _predictions(rows: pd.DataFrame, source: str) -> Figure:
    protocols = list(dict.fromkeys(rows["protocol"]))
    figure = new_figure(TWO_COLUMNS_IN if len(protocols) > 1 else ONE_COLUMN_IN, 2.9)
    panels = figure.subplots(1, len(protocols), sharex=True, sharey=True, squeeze=False)[0]
    fits = rows.dropna(subset=["published_samples_per_s"])
    values = fits[["published_samples_per_s", "predicted_samples_per_s"]].to_numpy(float)
    low, high = values.min() - 3, values.max() + 3
    for axes, protocol in zip(panels, protocols, strict=True):
        own = fits[fits["protocol"] == protocol]
        reference(axes, [low, high], [low, high])
        points = axes.scatter(
            own["published_samples_per_s"], own["predicted_samples_per_s"], s=9, c=own["ckpt_ratio"],
            cmap="viridis", zorder=3, vmin=0.25, vmax=1.0,
        )  # fmt: skip
        axes.set(xlim=(low, high), ylim=(low, high), xlabel="printed [samples/s]", title=protocol)
    panels[0].set_ylabel("predicted [samples/s]")
    figure.colorbar(points, ax=list(panels), label="share of recomputed layers")
    return finished(figure, SOURCES.get(source, source), [reference_handle("as printed")])


def fig10_fit(paths: Paths, source: str) -> Drawn:
    """Predicted against printed throughput of the tuning grid."""
    rows = read_csv(paths["fig10_fit"], FIG10_FIT)
    return _predictions(rows, source), rows
