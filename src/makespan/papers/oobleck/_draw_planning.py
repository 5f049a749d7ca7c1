"""Figures of planning: each function goes from paths of tables to a figure and its table."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from makespan.papers.oobleck._tables_planning import INSTANTIATION, LAYER_THROUGHPUT, STUDIES, TEMPLATES
from makespan.plots import PALETTE, TWO_COLUMNS_IN, finished, new_figure, published, published_handle, styled
from makespan.tables import read_csv
from makespan.units import MS

__all__ = ["guarantee", "instantiation", "layer_throughput", "templates"]

_SOURCE = "made-up layers"
_COLOURS = (PALETTE["blue"], PALETTE["orange"], PALETTE["green"], PALETTE["vermilion"])
_OURS, _PUBLISHED = PALETTE["blue"], PALETTE["orange"]


# --- templates --------------------------------------------------------------------------------------


def templates(paths: Mapping[str, str], source: str) -> tuple[Figure, pd.DataFrame]:
    """Imbalance of templates against their nodes, and how long their search takes."""
    table = read_csv(paths["templates"], TEMPLATES)
    shown = table.drop_duplicates(["profile", "mode", "n_nodes"]).drop(columns=["f", "n0", "is_needed"])
    return _draw_templates(shown), shown


@styled
def _draw_templates(table: pd.DataFrame) -> Figure:
    figure = new_figure(TWO_COLUMNS_IN, 2.5)
    balance, search = figure.subplots(1, 2)
    exact = table[table["mode"] == "exact"]
    random = exact[exact["profile"].str.startswith("random")]
    groups = random.groupby("n_nodes")["imbalance"]
    nodes = groups.mean().index.to_numpy(float)
    balance.plot(nodes, groups.mean(), "o-", ms=2.5, color=_COLOURS[0], label="random32, mean of seeds")
    balance.fill_between(nodes, groups.min(), groups.max(), color=_COLOURS[0], alpha=0.2, lw=0, label="range")
    uniform = exact[exact["profile"] == "uniform24"]
    balance.plot(
        uniform["n_nodes"], uniform["imbalance"], "s--", ms=2.5, color=_COLOURS[1], label="uniform24"
    )
    balance.set(xlabel="nodes", ylabel="slowest stage over mean", ylim=(0.98, None))
    balance.legend()
    _search_times(search, table)
    return finished(figure, _SOURCE)


def _search_times(axes: Axes, table: pd.DataFrame) -> None:
    skewed = table[table["profile"].str.startswith("skewed")]
    for (name, rows), colour in zip(skewed.groupby("profile", sort=False), _COLOURS, strict=False):
        layers = str(name).removeprefix("skewed")
        axes.plot(
            rows["n_nodes"], rows["wall_s"] / MS, "o-", color=colour, ms=2.5, label=f"exact, {layers} layers"
        )
    divided = table[(table["mode"] == "dc") & table["profile"].str.startswith("random")]
    means = divided.groupby("n_nodes")["wall_s"].mean() / MS
    axes.plot(means.index, means, "v:", ms=3, color=PALETTE["grey"], label="published search, 32 layers")
    axes.set(xlabel="nodes", ylabel="time of the search [ms]", yscale="log")
    axes.legend()


# --- instantiation ----------------------------------------------------------------------------------


def instantiation(paths: Mapping[str, str], source: str) -> tuple[Figure, pd.DataFrame]:
    """Return times of the pipelines of both choices: of printed templates, and of random layers."""
    table = read_csv(paths["instantiation"], INSTANTIATION)
    is_printed = table["profile"] == "printed"
    most = table["n_nodes"].max(), table["global_microbatches"].max()
    is_shown = (table["profile"] == "random32-0") & (table["n_nodes"] == most[0])
    is_shown &= table["global_microbatches"] == most[1]
    ways = table["batch_mode"] + " " + table["estimator"]
    is_shown &= ways.isin(["per_pipeline 1f1b", "per_template compat"])
    shown = table[is_printed | is_shown]
    return _draw_instantiation(shown), shown


@styled
def _draw_instantiation(table: pd.DataFrame) -> Figure:
    figure = new_figure(TWO_COLUMNS_IN, 2.4)
    titles = {"printed": "printed templates, shown times", "random32-0": "random32, simulated schedule"}
    panels = figure.subplots(1, len(titles), squeeze=False)[0]
    for axes, (profile, title) in zip(panels, titles.items(), strict=True):
        rows = table[table["profile"] == profile]
        ticks: dict[int, str] = {}
        for row in rows.sort_values("batch_mode", ascending=False).to_dict("records"):
            times = np.array(str(row["pipeline_time_s"]).split(), dtype=float)
            x = np.arange(len(times)) + max(ticks, default=-2) + 2
            colour = _PUBLISHED if row["batch_mode"] == "per_template" else _OURS
            axes.plot(x, times, "o", ms=3.5, color=colour, zorder=3)
            axes.hlines(times.max(), x[0] - 0.5, x[-1] + 0.5, color=colour, lw=0.8, zorder=2)
            label = f"{times.max():.4g} s"
            axes.annotate(label, (x.mean(), times.max()), (0, 4), textcoords="offset points", ha="center")
            ticks |= dict(zip(x.tolist(), map(str, _sizes(row)), strict=True))
        axes.set(title=title, xlabel="nodes of each pipeline", ylabel="time of a pipeline [s]")
        axes.set_xticks(list(ticks), list(ticks.values()))
        axes.margins(y=0.15)
        axes.grid(visible=False, axis="x")
    handles = [
        Patch(color=_PUBLISHED, label="published choice: one batch a template"),
        Patch(color=_OURS, label="ours: a batch for each pipeline"),
        Line2D([], [], ls="none", marker="o", ms=3.5, color=PALETTE["grey"], label="a pipeline"),
        Line2D([], [], lw=0.8, color=PALETTE["grey"], label="an iteration, with its time"),
    ]
    return finished(figure, _SOURCE, handles, ncols=4)


def _sizes(row: Mapping[Any, Any]) -> list[int]:
    parts = (part.split("x") for part in str(row["counts"]).split())
    return [int(size) for count, size in parts for _ in range(int(count))]


# --- throughput and coverage ------------------------------------------------------------------------


def layer_throughput(paths: Mapping[str, str], source: str) -> tuple[Figure, pd.DataFrame]:
    """Throughput from emulated times of layers, beside the printed one."""
    table = read_csv(paths["layer_throughput"], LAYER_THROUGHPUT)
    return _draw_layer_throughput(table), table


@styled
def _draw_layer_throughput(table: pd.DataFrame) -> Figure:
    models = list(dict.fromkeys(table["model"]))
    figure = new_figure(TWO_COLUMNS_IN, 2.0)
    panels = figure.subplots(1, len(models), squeeze=False)[0]
    for axes, model in zip(panels, models, strict=True):
        rows = table[table["model"] == model]
        axes.plot(
            rows["n_nodes"], rows["throughput_samples_per_s"], "o-", ms=2.5, color=_OURS, label="emulated"
        )
        published(axes, rows["n_nodes"], rows["published_samples_per_s"], ms=2.8, is_joined=True)
        axes.set(title=model, ylim=(0, None), xlabel="nodes")
    panels[0].set_ylabel("samples/s")
    handles = [*panels[0].get_legend_handles_labels()[0], published_handle(joined_by="black")]
    return finished(figure, "emulated times of layers", handles, ncols=2)


def guarantee(paths: Mapping[str, str], source: str) -> tuple[Figure, pd.DataFrame]:
    """Fewest templates that use every number of nodes."""
    table = read_csv(paths["studies"], STUDIES)
    shown = table[(table["study"] == "guarantee") & (table["quantity"] == "least_templates")]
    cases = shown["case"].str.extract(r"n0=(?P<n0>\d+) f=(?P<f>\d+)").astype(int)
    return _draw_guarantee(pd.concat([cases, shown[["value"]]], axis=1)), shown


@styled
def _draw_guarantee(table: pd.DataFrame) -> Figure:
    figure = new_figure(TWO_COLUMNS_IN / 2, 2.2)
    axes = figure.subplots()
    grid = table.pivot(index="f", columns="n0", values="value")
    image = axes.imshow(grid, cmap="Blues", origin="lower", aspect="auto")
    for (row, column), value in np.ndenumerate(grid.to_numpy(float)):
        is_dark = value > 0.6 * grid.to_numpy(float).max()
        axes.text(
            column, row, f"{value:.0f}", ha="center", va="center", color="white" if is_dark else "black"
        )
    axes.set_xticks(range(len(grid.columns)), [str(value) for value in grid.columns])
    axes.set_yticks(range(len(grid.index)), [str(value) for value in grid.index])
    axes.set(xlabel="least nodes of a pipeline, n0", ylabel="nodes lost at once, f")
    axes.grid(visible=False)
    figure.colorbar(image, ax=axes, label="fewest templates")
    return finished(figure, "counted")
