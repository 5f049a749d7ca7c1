"""Figures of average throughput: each function goes from tables to a figure and the table behind it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, NullLocator

from makespan.numerics import half_widths
from makespan.papers.oobleck.studies import INTERVALS, burst_table
from makespan.plots import (
    ONE_COLUMN_IN,
    PALETTE,
    TWO_COLUMNS_IN,
    Style,
    add_legend,
    beyond,
    beyond_handle,
    cannot_run,
    cannot_run_handle,
    compared,
    compared_handle,
    figure_style,
    in_order,
    log_ticks,
    new_figure,
    plain_numbers,
    published,
    published_handle,
    reference,
    reference_handle,
    spread,
    spread_handle,
)
from makespan.units import HOUR, MS

# ------------------------------------------------------------------------------------------------
# Figures of average throughput: each function goes from tables to a figure and the table behind it.

Drawn = tuple[Figure, pd.DataFrame]
Tables = Mapping[str, pd.DataFrame]
STYLES = {
    "bamboo": Style("Bamboo", PALETTE["green"], "^"),
    "varuna": Style("Varuna", PALETTE["orange"], "s"),
    "varuna-no-checkpoint": Style("Varuna, checkpoints for free", PALETTE["vermilion"], "D"),
    "oobleck": Style("Oobleck", PALETTE["blue"], "o"),
}
SOURCES = {
    "emulated": "generated traces, printed throughput",
    "published": "the authors' traces, printed throughput",
}
MODES = {"compat": "as released", "fixed": "repaired"}
_BAR_WIDTH = 0.27
_RATIOS, _RATIO_TICKS = (0.4, 2.5), (0.5, 0.7, 1.0, 1.4, 2.0)  # what the axis holds: most ratios are near 1
_MODEL_STYLES = (
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


def _average_bars(axes: Axes, rows: pd.DataFrame, traces: Sequence[str]) -> None:
    shown = [(name, style) for name, style in STYLES.items() if name in set(rows["system"])]
    for offset, (system, style) in enumerate(shown):
        own = rows[rows["system"] == system].set_index("trace").reindex(pd.Index(traces))
        x = np.arange(len(traces)) + (offset - 1) * _BAR_WIDTH
        if not own["feasible"].fillna(False).astype(bool).any():
            cannot_run(
                axes, x, np.full(len(x), 0.05), style.colour, ms=3, transform=axes.get_xaxis_transform()
            )
            continue
        heights = own["throughput_samples_per_s"].to_numpy(float)
        half = own["half_width_samples_per_s"].to_numpy(float)
        axes.bar(x, heights, _BAR_WIDTH, color=style.colour, lw=0, zorder=2)
        spread(axes, x, heights - half, heights + half)
        published(axes, x, own["published_samples_per_s"].to_numpy(float), ms=2.6, mew=0.7)
    axes.set_xticks(range(len(traces)), traces, rotation=90)
    axes.tick_params(axis="x", length=0)
    axes.grid(visible=False, axis="x")


@figure_style
def bars(table: pd.DataFrame, source: str, label: str) -> Figure:
    """Draw bars a trace and system, as released and repaired: two rows, or two panels for one model."""
    models, traces = list(dict.fromkeys(table["model"])), list(dict.fromkeys(table["trace"]))
    modes = in_order(table["mode"], MODES)
    is_single = len(models) == 1
    n_rows, n_columns = (1, len(modes)) if is_single else (len(modes), len(models))
    figure = new_figure(TWO_COLUMNS_IN * (0.75 if is_single else 1.0), 1.55 * n_rows + 0.6)
    panels = figure.subplots(
        n_rows, n_columns, sharex=True, sharey=True if is_single else "col", squeeze=False
    )
    flat = list(panels.flat)
    for axes, (mode, model) in zip(flat, [(mode, model) for mode in modes for model in models], strict=True):
        _average_bars(axes, table[(table["mode"] == mode) & (table["model"] == model)], traces)
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
    shown = in_order(table["system"], STYLES)
    handles: list[Patch | Line2D] = [
        Patch(color=STYLES[name].colour, label=STYLES[name].title) for name in shown
    ]
    if table["half_width_samples_per_s"].notna().any():
        handles.append(spread_handle("95 % interval over seeds"))
    if table["published_samples_per_s"].notna().any():
        handles.append(published_handle())
    if not table["feasible"].all():
        handles.append(cannot_run_handle("out of memory"))
    return add_legend(figure, SOURCES.get(source, source), handles, ncols=4 if is_single else len(handles))


def fig9(tables: Tables, source: str) -> Drawn:
    """Average throughput against the distance between failures."""
    table = averaged(tables["fig9"])
    return bars(table, source, "failure every"), table


def fig10(tables: Tables, source: str) -> Drawn:
    """Average throughput on spot traces."""
    table = averaged(tables["fig10"])
    return bars(table, source, ""), table


def fig13(tables: Tables, source: str) -> Drawn:
    """Average throughput of one model, with and without the cost of checkpoints."""
    table = averaged(tables["fig13"])
    return bars(table, source, "failure every"), table


@figure_style
def _repairs(table: pd.DataFrame, source: str) -> Figure:
    """Draw how many times as fast each system is with a defect repaired, a panel a trace and system."""
    traces, models = (list(dict.fromkeys(table[name])) for name in ("trace", "model"))
    systems = in_order(table["system"], STYLES)
    defects = list(dict.fromkeys(table["defects"]))
    figure = new_figure(TWO_COLUMNS_IN, 2.0 * len(traces) + 0.6)
    panels = figure.subplots(len(traces), len(systems), sharex=True, sharey=True, squeeze=False)
    is_beyond = False
    for row, trace in zip(panels, traces, strict=True):
        for axes, system in zip(row, systems, strict=True):
            reference(axes, [-0.5, len(defects) - 0.5], [1.0, 1.0])
            taken = Counter[tuple[int, bool]]()
            for model, (colour, marker) in zip(models, _MODEL_STYLES, strict=False):
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
            axes.set_title(f"{STYLES[system].title}, {trace}")
        row[0].set_ylabel("over as released")
    handles = [*panels[0][-1].get_legend_handles_labels()[0], reference_handle("as released")]
    if (table["throughput_samples_per_s_as_released"] == 0).any():
        handles.append(cannot_run_handle("no throughput as released"))
    if is_beyond:
        handles.append(beyond_handle())
    return add_legend(figure, SOURCES.get(source, source), handles, ncols=4)


def ablation(tables: Tables, source: str) -> Drawn:
    """Average throughput with one defect repaired, over that as released; means over seeds."""
    rows = tables["ablation"]
    keys, value = ["trace", "model", "system"], "throughput_samples_per_s"
    rows = rows[rows["feasible"]][[*keys, "seed", "defects", value]]
    base = rows[rows["defects"] == ""].drop(columns="defects")
    pairs = rows[rows["defects"] != ""].merge(base, on=[*keys, "seed"], suffixes=("", "_as_released"))
    means = pairs.groupby([*keys, "defects"], sort=False)[[value, f"{value}_as_released"]].mean()
    table = means.reset_index()
    released = table[f"{value}_as_released"]
    table["ratio"] = table["throughput_samples_per_s"] / released.where(released > 0)
    return _repairs(table, source), table


# ------------------------------------------------------------------------------------------------
# The figure of predicted and measured iterations: from tables to a figure and the table behind it.

_NODES = (
    Style("1 node", PALETTE["blue"], "o"),
    Style("2", PALETTE["orange"], "s"),
    Style("3", PALETTE["green"], "^"),
    Style("more", PALETTE["grey"], "D"),
)


@figure_style
def panel(table: pd.DataFrame, source: str) -> Figure:
    """Draw a point for each plan, above the line where it took longer than predicted."""
    figure = new_figure(ONE_COLUMN_IN, 2.6)
    axes = figure.subplots()
    styles = [_NODES[min(n_nodes, len(_NODES)) - 1] for n_nodes in table["n_nodes"]]
    predicted, measured = (1e3 * table[name] for name in ("predicted_cores_iter_time_s", "iter_wall_s"))
    for style in dict.fromkeys(styles):
        own = [one is style for one in styles]
        axes.scatter(
            predicted[own], measured[own], s=12, color=style.colour, marker=style.marker, lw=0, zorder=3
        )
    ends = [0.8 * min(predicted.min(), measured.min()), 1.25 * max(predicted.max(), measured.max())]
    reference(axes, ends, ends)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    for axis in (axes.xaxis, axes.yaxis):
        log_ticks(axis, *ends)
    axes.set_xlabel("predicted iteration [ms]")
    axes.set_ylabel("measured iteration [ms]")
    handles = [
        Line2D([], [], ls="", marker=style.marker, ms=4, color=style.colour, label=style.title)
        for style in _NODES
        if style in styles
    ]
    handles.append(reference_handle("as predicted"))
    return add_legend(figure, f"{source}, small models", handles, ncols=5)


def predictions(tables: Tables, source: str) -> tuple[Figure, pd.DataFrame]:
    """Draw the experiment; its table has both predictions of each plan."""
    table = tables["predictions"]
    return panel(table, source), table


# ------------------------------------------------------------------------------------------------
# The figure of training through kills: from tables to a figure and the table behind it.

_SYSTEMS = {
    "oobleck": Style("Oobleck", PALETTE["blue"], "o"),
    "relaunch": Style("checkpoint and relaunch", PALETTE["orange"], "s"),
}
_KINDS = {
    "compute": Style("in a pass", PALETTE["vermilion"], "v"),
    "reduction": Style("in a reduction", PALETTE["purple"], "^"),
    "commit": Style("before a commit", PALETTE["green"], "D"),
    "recovery": Style("in a recovery", PALETTE["grey"], "X"),
}


def _named(table: pd.DataFrame) -> pd.DataFrame:
    """Split the name of a run into its job and its system."""
    parts = table["run"].str.partition(", ")
    return table.assign(job=parts[0], system=parts[2])


def _losses(axes: Axes, steps: pd.DataFrame, kills: pd.DataFrame) -> None:
    for shade, (_, rows) in zip(np.linspace(1.0, 0.45, 8), steps.groupby("job", sort=False), strict=False):
        axes.plot(rows["step"], rows["loss"], color=PALETTE["blue"], alpha=shade, lw=0.9, zorder=2)
    for kind, style in _KINDS.items():
        struck = kills[kills["kind"] == kind].merge(steps[["run", "step", "loss"]], on=["run", "step"])
        axes.scatter(struck["step"], struck["loss"], s=11, color=style.colour, marker=style.marker, zorder=3)
    axes.set_xlabel("iteration")
    axes.set_ylabel("loss")


def _pauses(axes: Axes, kills: pd.DataFrame) -> None:
    for offset, (system, style) in enumerate(_SYSTEMS.items()):
        rows = kills[kills["system"] == system]
        for place, kind in enumerate(_KINDS):
            own = rows.loc[rows["kind"] == kind, "first_wall_s"].to_numpy(float)
            spread = np.linspace(-0.07, 0.07, len(own)) if len(own) > 1 else np.zeros(len(own))
            x = place + (offset - 0.5) * 0.36 + spread
            axes.scatter(x, own, s=9, color=style.colour, marker=style.marker, lw=0, zorder=3)
    axes.set_xticks(range(len(_KINDS)), ["pass", "sum", "commit", "recovery"])
    axes.tick_params(axis="x", length=0)
    axes.set_ylim(0, None)
    axes.set_ylabel("pause [s]")
    axes.set_xlabel("phase of the kill")


def _pause_bars(axes: Axes, summary: pd.DataFrame, column: str, label: str) -> None:
    jobs = list(dict.fromkeys(summary["job"]))
    for offset, (system, style) in enumerate(_SYSTEMS.items()):
        own = summary[summary["system"] == system].set_index("job").reindex(pd.Index(jobs))
        x = np.arange(len(jobs)) + (offset - 0.5) * 0.36
        axes.bar(x, own[column].to_numpy(float), 0.34, color=style.colour, lw=0, zorder=2)
    axes.set_xticks(range(len(jobs)), [job.removeprefix("job ") for job in jobs])
    axes.tick_params(axis="x", length=0)
    axes.grid(visible=False, axis="x")
    axes.set_xlabel("job")
    axes.set_ylabel(label)


@figure_style
def panels(steps: pd.DataFrame, kills: pd.DataFrame, summary: pd.DataFrame, source: str) -> Figure:
    """Draw losses with marks of kills, pauses, goodput and repeated iterations."""
    figure = new_figure(TWO_COLUMNS_IN, 2.2)
    axes = figure.subplots(1, 4, width_ratios=[1.8, 2.2, 1.0, 1.0])
    ours = steps[steps["system"] == "oobleck"]
    _losses(axes[0], ours, kills[kills["system"] == "oobleck"])
    _pauses(axes[1], kills)
    _pause_bars(axes[2], summary, "goodput_samples_per_s", "goodput [samples/s]")
    _pause_bars(axes[3], summary, "repeated", "iterations done again")
    handles = [
        *(Line2D([], [], ls="", marker=style.marker, ms=4, color=style.colour, label=style.title)
          for style in _KINDS.values()),
        *(Patch(color=style.colour, label=style.title) for style in _SYSTEMS.values()),
        Line2D([], [], color=PALETTE["blue"], lw=0.9, label="loss of a job under Oobleck"),
    ]  # fmt: skip
    return add_legend(figure, f"{source}, small models", handles, ncols=4)


def hybrid(tables: Tables, source: str) -> tuple[Figure, pd.DataFrame]:
    """Draw the experiment; its table has the kills."""
    steps, kills, summary = (_named(tables[name]) for name in ("hybrid", "hybrid_kills", "hybrid_summary"))
    return panels(steps, kills, summary, source), kills.drop(columns=["job", "system"])


# ------------------------------------------------------------------------------------------------
# Figures of planning: each function goes from tables to a figure and the table behind it.

_SOURCE = "made-up layers"
_COLOURS = (PALETTE["blue"], PALETTE["orange"], PALETTE["green"], PALETTE["vermilion"])
_OURS, _PUBLISHED = PALETTE["blue"], PALETTE["orange"]


# --- templates --------------------------------------------------------------------------------------


def templates(tables: Tables, source: str) -> tuple[Figure, pd.DataFrame]:
    """Imbalance of templates against their nodes, and how long their search takes."""
    table = tables["templates"]
    shown = table.drop_duplicates(["profile", "mode", "n_nodes"]).drop(columns=["f", "n0", "is_needed"])
    return _draw_templates(shown), shown


@figure_style
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
    return add_legend(figure, _SOURCE)


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


def instantiation(tables: Tables, source: str) -> tuple[Figure, pd.DataFrame]:
    """Return times of the pipelines of both choices: of printed templates, and of random layers."""
    table = tables["instantiation"]
    is_printed = table["profile"] == "printed"
    most = table["n_nodes"].max(), table["global_microbatches"].max()
    is_shown = (table["profile"] == "random32-0") & (table["n_nodes"] == most[0])
    is_shown &= table["global_microbatches"] == most[1]
    ways = table["batch_mode"] + " " + table["estimator"]
    is_shown &= ways.isin(["per_pipeline 1f1b", "per_template compat"])
    shown = table[is_printed | is_shown]
    return _draw_instantiation(shown), shown


@figure_style
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
    return add_legend(figure, _SOURCE, handles, ncols=4)


def _sizes(row: Mapping[Any, Any]) -> list[int]:
    parts = (part.split("x") for part in str(row["counts"]).split())
    return [int(size) for count, size in parts for _ in range(int(count))]


# --- throughput and coverage ------------------------------------------------------------------------


def layer_throughput(tables: Tables, source: str) -> tuple[Figure, pd.DataFrame]:
    """Throughput from emulated times of layers, beside the printed one."""
    table = tables["layer_throughput"]
    return _draw_layer_throughput(table), table


@figure_style
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
    return add_legend(figure, "emulated times of layers", handles, ncols=2)


def guarantee(tables: Tables, source: str) -> tuple[Figure, pd.DataFrame]:
    """Fewest templates that use every number of nodes."""
    table = tables["studies"]
    shown = table[(table["study"] == "guarantee") & (table["quantity"] == "least_templates")]
    cases = shown["case"].str.extract(r"n0=(?P<n0>\d+) f=(?P<f>\d+)").astype(int)
    return _draw_guarantee(pd.concat([cases, shown[["value"]]], axis=1)), shown


@figure_style
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
    return add_legend(figure, "counted")


# ------------------------------------------------------------------------------------------------
# Figures of what becomes of plans after losses, and of several nodes lost at once.

_ACTIONS = {
    "drop": ("whole pipelines gone", PALETTE["grey"]),
    "re-instantiate": ("smaller templates", PALETTE["sky"]),
    "borrow": ("borrow", PALETTE["blue"]),
    "merge": ("merge", PALETTE["green"]),
    "re-plan": ("plan anew", PALETTE["purple"]),
    "insufficient-nodes": ("too few nodes", PALETTE["orange"]),
    "state-lost": ("state lost", PALETTE["vermilion"]),
}
_PANELS = {False: "up to f nodes", True: "more than f nodes"}
_KB = 1e3


def _shares(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the share of each action, and the mean of what is sent, by the number of nodes lost."""
    rows = rows[~rows["case"].str.startswith("worked")]
    rows = rows.assign(
        is_beyond=rows["case"].str.endswith("beyond"), n_lost=rows["lost_nodes"].str.count(" ") + 1
    )
    named = ["is_beyond", "n_lost"]
    table = rows.groupby([*named, "action"]).size().unstack(fill_value=0)
    table = table.reindex(columns=[*_ACTIONS], fill_value=0)
    table = table.div(table.sum(axis=1), axis=0)
    table["n_losses"] = rows.groupby(named).size()
    sent = ["copies_bytes", "most_sent_bytes"]
    table[sent] = rows.groupby(named)[sent].mean()
    return table.reset_index()


@figure_style
def _stacked(table: pd.DataFrame, source: str) -> Figure:
    figure = new_figure(TWO_COLUMNS_IN, 3.4)
    widths = [max(2, int((table["is_beyond"] == is_beyond).sum())) for is_beyond in _PANELS]
    panels = figure.subplots(
        2, 2, sharey="row", sharex="col", height_ratios=[2, 1], width_ratios=widths, squeeze=False
    )
    for column, (is_beyond, title) in enumerate(_PANELS.items()):
        rows = table[table["is_beyond"] == is_beyond]
        _reconfiguration_bars(panels[0, column], panels[1, column], rows)
        panels[0, column].set_title(title)
        panels[1, column].set_xlabel("nodes lost at once")
    panels[0, 0].set_ylabel("share of losses")
    panels[1, 0].set_ylabel("state sent [kB]")
    handles: list[Patch | Line2D] = [Patch(color=colour, label=label) for label, colour in _ACTIONS.values()]
    handles.append(compared_handle("sent by the node that sends most"))
    return add_legend(figure, "24 equal layers" if source == "emulated" else source, handles, ncols=4)


def _reconfiguration_bars(shares: Axes, sent: Axes, rows: pd.DataFrame) -> None:
    x, base = np.arange(len(rows)), np.zeros(len(rows))
    for action, (_, colour) in _ACTIONS.items():
        heights = rows[action].to_numpy(float)
        shares.bar(x, heights, 0.8, base, color=colour, lw=0, zorder=2)
        base += heights
    sent.bar(x, rows["copies_bytes"].fillna(0) / _KB, 0.8, color=PALETTE["blue"], lw=0, zorder=2)
    marks = rows["most_sent_bytes"].fillna(0) / _KB
    compared(sent, x, marks)
    sent.set_xticks(x, rows["n_lost"].astype(str).tolist())
    shares.set_ylim(0, 1)
    for axes in (shares, sent):
        axes.set_xlim(-0.6, len(rows) - 0.4)
        axes.tick_params(axis="x", length=0)
        axes.grid(visible=False, axis="x")


def reconfiguration(tables: Tables, source: str) -> tuple[Figure, pd.DataFrame]:
    """Show what is done after losses of so many nodes, and how much state is sent."""
    table = _shares(tables["reconfiguration"])
    return _stacked(table, source), table


_QUANTITIES = {
    "state_lost_share": "bursts that take\nall copies of a layer",
    "below_share": "share of time below\n(f + 1) n0 nodes",
    "safe_work_share": "share of work done\non (f + 1) n0 or more",
}
_SHAPES = {"anywhere": "o-", "rack": "s--", "rack, spread": "^:"}
_STRATEGY_COLOURS = (PALETTE["sky"], PALETTE["blue"], PALETTE["vermilion"], PALETTE["black"])


@figure_style
def _against_f(table: pd.DataFrame) -> Figure:
    figure = new_figure(TWO_COLUMNS_IN, 2.2)
    sizes = sorted(set(table["nodes"]))
    panels = figure.subplots(1, len(_QUANTITIES), squeeze=False)[0]
    for axes, (quantity, label) in zip(panels, _QUANTITIES.items(), strict=True):
        for (nodes, shape), rows in table.groupby(["nodes", "shape"]):
            colour = _STRATEGY_COLOURS[sizes.index(nodes) % len(_STRATEGY_COLOURS)]
            axes.plot(rows["f"], rows[quantity], _SHAPES[str(shape)], ms=3, color=colour)
        highest = 1.05 * max(float(table[quantity].max()), 0.01)
        axes.set(xlabel="f", ylabel=label, ylim=(0, highest), xticks=sorted(set(table["f"])))
    handles = [
        Patch(color=_STRATEGY_COLOURS[i % len(_STRATEGY_COLOURS)], label=f"{nodes} at once")
        for i, nodes in enumerate(sizes)
    ]
    lines = [Line2D([], [], color="black", ls=style[1:], marker=style[0], ms=3) for style in _SHAPES.values()]
    for line, name in zip(lines, ("anywhere", "in a rack", "in a rack, copies spread"), strict=True):
        line.set_label(name)
    return add_legend(figure, "24 equal layers, random bursts", [*handles, *lines], ncols=6)


def bursts(tables: Tables, source: str) -> tuple[Figure, pd.DataFrame]:
    """Show what each f keeps when several nodes are lost at once."""
    table = burst_table(tables["studies"])
    return _against_f(table), table


# ------------------------------------------------------------------------------------------------
# Figures of where time goes and of throughput over time.

_CATEGORY_COLOURS = {
    "useful": PALETTE["blue"],
    "redundant": PALETTE["sky"],
    "checkpoint": PALETTE["green"],
    "restart": PALETTE["orange"],
    "rebalance": PALETTE["purple"],
    "lost": PALETTE["vermilion"],
    "stalled": PALETTE["grey"],
}
_TIME_BAR_WIDTH = 0.28
_CASE = ["mode", "model", "trace"]
_ANALYTIC = (0, (5, 1, 1, 1))


def _stacks(axes: Axes, rows: pd.DataFrame, traces: Sequence[str], systems: Sequence[str]) -> None:
    shares = rows.set_index(["trace", "system", "category"])["share"].to_dict()
    ticks, names = [], []
    for place, trace in enumerate(traces):
        for offset, system in enumerate(systems):
            x = place + (offset - (len(systems) - 1) / 2) * _TIME_BAR_WIDTH
            below = 0.0
            for category, colour in _CATEGORY_COLOURS.items():
                height = 100 * shares.get((trace, system, category), 0.0)
                axes.bar(x, height, 0.9 * _TIME_BAR_WIDTH, bottom=below, color=colour, lw=0, zorder=2)
                below += height
            ticks.append(x)
            names.append(STYLES[system].title[0] if len(traces) > 1 else STYLES[system].title)
            if not below:
                cannot_run(axes, x, 0.05, transform=axes.get_xaxis_transform())
    axes.set_xticks(ticks, names)
    if len(traces) > 1:
        for place, trace in enumerate(traces):
            axes.text(place, -0.13, trace, ha="center", va="top", transform=axes.get_xaxis_transform())
    axes.tick_params(axis="x", length=0)
    axes.grid(visible=False, axis="x")
    axes.set_ylim(0, 100)


@figure_style
def _breakdown(table: pd.DataFrame, source: str) -> Figure:
    modes, models = in_order(table["mode"], MODES), list(dict.fromkeys(table["model"]))
    traces, systems = list(dict.fromkeys(table["trace"])), in_order(table["system"], STYLES)
    figure = new_figure(TWO_COLUMNS_IN, 1.7 * len(modes) + 0.5)
    panels = figure.subplots(len(modes), len(models), sharey=True, squeeze=False)
    for row, mode in zip(panels, modes, strict=True):
        for axes, model in zip(row, models, strict=True):
            own = table[(table["mode"] == mode) & (table["model"] == model)]
            _stacks(axes, own, traces, systems)
            axes.set_title(f"{model}, {MODES[mode]}")
        row[0].set_ylabel("share of time [%]")
    handles: list[Patch | Line2D] = [
        Patch(color=colour, label=name) for name, colour in _CATEGORY_COLOURS.items()
    ]
    if (table.groupby([*_CASE, "system"])["share"].sum() == 0).any() or len(
        table[_CASE].drop_duplicates()
    ) * len(systems) > len(table[[*_CASE, "system"]].drop_duplicates()):
        handles.append(cannot_run_handle("out of memory"))
    return add_legend(figure, SOURCES.get(source, source), handles, ncols=len(handles))


def breakdown(tables: Tables, source: str) -> Drawn:
    """Breakdown of time by model, mode, distance between failures and system."""
    (table,) = tables.values()
    return _breakdown(table, source), table


@figure_style
def _over_time(table: pd.DataFrame, source: str) -> Figure:
    models, systems = list(dict.fromkeys(table["model"])), in_order(table["system"], STYLES)
    figure = new_figure(TWO_COLUMNS_IN, 3.6)
    panels = list(figure.subplots(2, 3, sharex=True).flat)
    one = table[(table["model"] == models[0]) & (table["system"] == systems[-1])]
    panels[0].step(one["time_s"] / HOUR, one["n_nodes"], where="post", color="black", lw=0.8)
    panels[0].set_title("nodes")
    panels[0].set_ylim(0, None)
    for axes, model in zip(panels[1:], models, strict=False):
        for system in systems:
            own = table[(table["model"] == model) & (table["system"] == system)]
            rates, style = own["throughput_samples_per_s"], STYLES[system]
            axes.step(own["time_s"] / HOUR, rates, where="post", color=style.colour, lw=0.8)
            if len(rates):
                reference(
                    axes, [0.0, float(own["time_s"].max()) / HOUR], [rates.mean()] * 2, color=style.colour
                )
        axes.set_title(model)
        axes.set_ylim(0, None)
    for axes in panels[3:]:
        axes.set_xlabel("time [h]")
    for axes in (panels[1], panels[3]):
        axes.set_ylabel("samples/s")
    for axes in panels[len(models) + 1 :]:
        axes.set_axis_off()
    handles = [Line2D([], [], color=STYLES[name].colour, label=STYLES[name].title) for name in systems]
    handles += [reference_handle("mean"), Line2D([], [], color="black", lw=0.8, label="nodes")]
    return add_legend(figure, SOURCES.get(source, source), handles, ncols=len(handles))


def over_time(tables: Tables, source: str, mode: str) -> Drawn:
    """Nodes, and throughput of every model and system, over time."""
    (rows,) = tables.values()
    table = rows[rows["mode"] == mode].reset_index(drop=True)
    return _over_time(table, source), table


@figure_style
def _intervals(table: pd.DataFrame, best: Mapping[tuple[str, str], float]) -> Figure:
    models = list(dict.fromkeys(table["model"]))
    figure = new_figure(TWO_COLUMNS_IN, 2.3)
    panels = figure.subplots(1, len(models), sharey=True, squeeze=False)[0]
    for axes, model in zip(panels, models, strict=True):
        own = table[table["model"] == model].sort_values("steps")
        style = STYLES["varuna"]
        axes.plot(own["steps"], own["simulated_share"], color=style.colour, marker=style.marker, ms=3)
        axes.plot(own["steps"], own["expected_share"], color=style.colour, lw=0.8, ls=_ANALYTIC)
        axes.axhline(best[model, "oobleck_share"], color=STYLES["oobleck"].colour, lw=1.0)
        reference(axes, [best[model, "young_daly_steps"]] * 2, [0.0, 1.02])
        axes.set(xscale="log", xlabel="steps between checkpoints", title=model, ylim=(0, 1.02))
        axes.xaxis.set_major_formatter(plain_numbers())
    panels[0].set_ylabel("share of full throughput")
    handles = [
        Line2D([], [], color=STYLES["varuna"].colour, marker="s", ms=3, label="Varuna"),
        Line2D([], [], color=STYLES["varuna"].colour, lw=0.8, ls=_ANALYTIC, label="Varuna, analytic"),
        reference_handle("interval of Young and Daly"),
        Line2D([], [], color=STYLES["oobleck"].colour, label="Oobleck"),
    ]
    return add_legend(figure, "generated losses, printed throughput", handles, ncols=4)


def intervals(tables: Tables, source: str) -> Drawn:
    """Share of full throughput against the steps between Varuna's checkpoints."""
    rows = tables["studies"]
    rows = rows[rows["study"] == INTERVALS]
    wide = rows.pivot(index="case", columns="quantity", values="value")
    best = {(case, name): wide.loc[case, name] for case in wide.index for name in wide.columns}
    table = wide[wide["simulated_share"].notna()].reset_index()
    parts = table["case"].str.extract(r"^(?P<model>.*), every (?P<steps>\d+) steps$")
    table = parts.assign(steps=parts["steps"].astype(int)).join(table[["simulated_share", "expected_share"]])
    return _intervals(table, best), table
