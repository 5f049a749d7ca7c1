"""Figures of Oobleck: each function goes from tables to a figure and the table behind it."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
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
    Bars,
    Style,
    add_legend,
    bar_handles,
    beyond,
    beyond_handle,
    cannot_run,
    cannot_run_handle,
    compared,
    compared_handle,
    draw_bars,
    draw_heat_map,
    draw_stack,
    figure_style,
    in_order,
    line_handle,
    log_ticks,
    name_groups,
    new_figure,
    plain_numbers,
    point_handle,
    published,
    published_handle,
    reference,
    reference_handle,
    spread,
    spread_handle,
)
from makespan.units import HOUR, MS

# ------------------------------------------------------------------------------------------------
# Average throughput.

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
_SMALL_MARK = {"ms": 2.8, "mew": 0.8}
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


@figure_style
def _average_bars(table: pd.DataFrame, source: str, label: str) -> Figure:
    """Draw bars by trace and system, as released and repaired: two rows, or two panels for one model."""
    models, traces = list(dict.fromkeys(table["model"])), list(dict.fromkeys(table["trace"]))
    modes, systems = in_order(table["mode"], MODES), in_order(table["system"], STYLES)
    is_single = len(models) == 1
    n_rows, n_columns = (1, len(modes)) if is_single else (len(modes), len(models))
    figure = new_figure(TWO_COLUMNS_IN * (0.75 if is_single else 1.0), 1.55 * n_rows + 0.6)
    panels = figure.subplots(
        n_rows, n_columns, sharex=True, sharey=True if is_single else "col", squeeze=False
    )
    flat = list(panels.flat)
    for axes, (mode, model) in zip(flat, [(mode, model) for mode in modes for model in models], strict=True):
        shown = table[(table["mode"] == mode) & (table["model"] == model)]
        bars = []
        for system in systems:
            rows = shown[shown["system"] == system].set_index("trace").reindex(pd.Index(traces))
            can_run = rows["feasible"].fillna(False).astype(bool).to_numpy()
            columns = ("throughput_samples_per_s", "half_width_samples_per_s", "published_samples_per_s")
            heights, half, printed = (
                np.where(can_run, rows[name].to_numpy(float), np.nan) for name in columns
            )
            is_infeasible = ~can_run & (system in set(shown["system"]))
            style = STYLES[system]
            bars.append(Bars(heights, style.colour, style.title, half, printed, is_infeasible))
        draw_bars(axes, bars, 0.82, _SMALL_MARK)
        name_groups(axes, traces, rotation=90)
        if is_single:
            axes.set_title(f"{model}, {MODES[mode]}")
    for axes in flat:  # only now: panels of a column share an axis, and a limit ends its growth
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
    handles = bar_handles(bars)
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
    return _average_bars(table, source, "failure every"), table


def fig10(tables: Tables, source: str) -> Drawn:
    """Average throughput on spot traces."""
    table = averaged(tables["fig10"])
    return _average_bars(table, source, ""), table


def fig13(tables: Tables, source: str) -> Drawn:
    """Average throughput of one model, with and without the cost of checkpoints."""
    table = averaged(tables["fig13"])
    return _average_bars(table, source, "failure every"), table


@figure_style
def ablation(tables: Tables, source: str) -> Drawn:
    """Average throughput with one defect repaired over that as released, a panel per trace and system.

    Means over seeds.
    """
    rows = tables["ablation"]
    keys, value = ["trace", "model", "system"], "throughput_samples_per_s"
    rows = rows[rows["feasible"]][[*keys, "seed", "defects", value]]
    base = rows[rows["defects"] == ""].drop(columns="defects")
    pairs = rows[rows["defects"] != ""].merge(base, on=[*keys, "seed"], suffixes=("", "_as_released"))
    means = pairs.groupby([*keys, "defects"], sort=False)[[value, f"{value}_as_released"]].mean()
    table = means.reset_index()
    released = table[f"{value}_as_released"]
    table["ratio"] = table["throughput_samples_per_s"] / released.where(released > 0)
    traces, models = (list(dict.fromkeys(table[name])) for name in ("trace", "model"))
    systems = in_order(table["system"], STYLES)
    defects = list(dict.fromkeys(table["defects"]))
    figure = new_figure(TWO_COLUMNS_IN, 2.0 * len(traces) + 0.6)
    panels = figure.subplots(len(traces), len(systems), sharex=True, sharey=True, squeeze=False)
    is_beyond = False
    for row, trace in zip(panels, traces, strict=True):
        for axes, system in zip(row, systems, strict=True):
            reference(axes, [-0.5, len(defects) - 0.5], [1.0, 1.0])
            n_written = Counter[tuple[int, bool]]()  # numbers at the upper and lower end, by defect
            for model, (colour, marker) in zip(models, _MODEL_STYLES, strict=False):
                shown = table[
                    (table["trace"] == trace) & (table["system"] == system) & (table["model"] == model)
                ]
                shown = shown.set_index("defects").reindex(pd.Index(defects))
                x = np.arange(len(defects)) + 0.12 * (models.index(model) - (len(models) - 1) / 2)
                ratios = shown["ratio"].to_numpy(float)
                axes.plot(x, ratios, ls="none", marker=marker, ms=3, color=colour, label=model)
                for number, (place, ratio) in enumerate(zip(x, ratios, strict=True)):
                    end = number, ratio > 1.0
                    number_at: dict[str, Any] = {"row": number, "n_before": n_written[end]}
                    if beyond(axes, place, ratio, _RATIOS, colour, is_across=False, **number_at):
                        n_written[end] += 1
                        is_beyond = True
                stopped = (shown["throughput_samples_per_s_as_released"] == 0).to_numpy()
                bottom = np.full(int(stopped.sum()), 0.05)
                cannot_run(axes, x[stopped], bottom, colour, ms=3, transform=axes.get_xaxis_transform())
            axes.set_yscale("log")
            axes.set_ylim(*_RATIOS)
            axes.yaxis.set_major_locator(FixedLocator(_RATIO_TICKS))
            axes.yaxis.set_minor_locator(NullLocator())
            axes.yaxis.set_major_formatter(plain_numbers())
            axes.set_xticks(range(len(defects)), [names.replace(" ", "+") for names in defects], rotation=90)
            axes.set_title(f"{STYLES[system].title}, {trace}")
        row[0].set_ylabel("over as released")
    handles = [*panels[0][-1].get_legend_handles_labels()[0], reference_handle("as released")]
    if (table["throughput_samples_per_s_as_released"] == 0).any():
        handles.append(cannot_run_handle("no throughput as released"))
    if is_beyond:
        handles.append(beyond_handle())
    return add_legend(figure, SOURCES.get(source, source), handles, ncols=4), table


# ------------------------------------------------------------------------------------------------
# Predicted and measured iterations.

_NODES = (
    Style("1 node", PALETTE["blue"], "o"),
    Style("2 nodes", PALETTE["orange"], "s"),
    Style("3 nodes", PALETTE["green"], "^"),
    Style("more nodes", PALETTE["grey"], "D"),
)


@figure_style
def predictions(tables: Tables, source: str) -> Drawn:
    """Measured iterations against predicted ones, a point per plan."""
    table = tables["predictions"]
    figure = new_figure(ONE_COLUMN_IN, 2.6)
    axes = figure.subplots()
    styles = [_NODES[min(n_nodes, len(_NODES)) - 1] for n_nodes in table["n_nodes"]]
    predicted, measured = (1e3 * table[name] for name in ("predicted_cores_iter_time_s", "iter_wall_s"))
    for style in dict.fromkeys(styles):
        has_style = [of_row is style for of_row in styles]
        x, y = predicted[has_style], measured[has_style]
        axes.scatter(x, y, s=12, color=style.colour, marker=style.marker, lw=0, zorder=3)
    ends = [0.8 * min(predicted.min(), measured.min()), 1.25 * max(predicted.max(), measured.max())]
    reference(axes, ends, ends)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    for axis in (axes.xaxis, axes.yaxis):
        log_ticks(axis, *ends)
    axes.set_xlabel("predicted iteration [ms]")
    axes.set_ylabel("measured iteration [ms]")
    handles = [point_handle(style) for style in _NODES if style in styles]
    handles.append(reference_handle("as predicted"))
    return add_legend(figure, f"{source}, small models", handles, ncols=5), table


# ------------------------------------------------------------------------------------------------
# Training through kills.

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


_RUN_TABLES = ("hybrid", "hybrid_kills", "hybrid_summary")


@figure_style
def hybrid(tables: Tables, source: str) -> Drawn:
    """Losses with marks of kills, pauses, goodput and repeated iterations; the table has the kills."""
    parts = {name: tables[name]["run"].str.partition(", ") for name in _RUN_TABLES}  # name of a job, system
    steps, kills, summary = (tables[name].assign(job=part[0], system=part[2]) for name, part in parts.items())
    figure = new_figure(TWO_COLUMNS_IN, 2.2)
    losses, pauses, *bars = figure.subplots(1, 4, width_ratios=[1.8, 2.2, 1.0, 1.0])
    resilient, struck = (table[table["system"] == "oobleck"] for table in (steps, kills))
    jobs = resilient.groupby("job", sort=False)
    for shade, (_, rows) in zip(np.linspace(1.0, 0.45, 8), jobs, strict=False):
        losses.plot(rows["step"], rows["loss"], color=PALETTE["blue"], alpha=shade, lw=0.9, zorder=2)
    for kind, style in _KINDS.items():
        at = struck[struck["kind"] == kind].merge(resilient[["run", "step", "loss"]], on=["run", "step"])
        losses.scatter(at["step"], at["loss"], s=11, color=style.colour, marker=style.marker, zorder=3)
    losses.set(xlabel="iteration", ylabel="loss")
    for offset, (system, style) in enumerate(_SYSTEMS.items()):
        for place, kind in enumerate(_KINDS):
            is_shown = (kills["system"] == system) & (kills["kind"] == kind)
            pause_s = kills.loc[is_shown, "first_wall_s"].to_numpy(float)
            apart = np.linspace(-0.07, 0.07, len(pause_s)) if len(pause_s) > 1 else np.zeros(len(pause_s))
            x = place + (offset - 0.5) * 0.36 + apart
            pauses.scatter(x, pause_s, s=9, color=style.colour, marker=style.marker, lw=0, zorder=3)
    name_groups(pauses, ["pass", "sum", "commit", "recovery"])
    pauses.set(ylim=(0, None), ylabel="pause [s]", xlabel="phase of the kill")
    columns = {"goodput_samples_per_s": "goodput [samples/s]", "repeated": "iterations done again"}
    for axes, (column, label) in zip(bars, columns.items(), strict=True):
        by_job = summary.pivot(index="job", columns="system", values=column)
        by_job = by_job.reindex(index=list(dict.fromkeys(summary["job"])), columns=list(_SYSTEMS))
        draw_bars(axes, [Bars(by_job[system], style.colour) for system, style in _SYSTEMS.items()], 0.76)
        name_groups(axes, [str(job).removeprefix("job ") for job in by_job.index])
        axes.set(xlabel="job", ylabel=label)
    handles = [
        *(point_handle(style) for style in _KINDS.values()),
        *(Patch(color=style.colour, label=style.title) for style in _SYSTEMS.values()),
        Line2D([], [], color=PALETTE["blue"], lw=0.9, label="loss of a job under Oobleck"),
    ]
    add_legend(figure, f"{source}, small models", handles, ncols=4)
    return figure, kills.drop(columns=["job", "system"])


# ------------------------------------------------------------------------------------------------
# Planning.

_SOURCE = "made-up layers"
_COLOURS = (PALETTE["blue"], PALETTE["orange"], PALETTE["green"], PALETTE["vermilion"])
_OURS, _PUBLISHED = PALETTE["blue"], PALETTE["orange"]


@figure_style
def templates(tables: Tables, source: str) -> Drawn:
    """Imbalance of templates against their nodes, and how long their search takes."""
    table = tables["templates"].drop_duplicates(["profile", "mode", "n_nodes"])
    table = table.drop(columns=["f", "n0", "is_needed"])
    figure = new_figure(TWO_COLUMNS_IN, 2.5)
    balance, search = figure.subplots(1, 2)
    exact = table[table["mode"] == "exact"]
    random = exact[exact["profile"].str.startswith("random")]
    groups = random.groupby("n_nodes")["imbalance"]
    nodes = groups.mean().index.to_numpy(float)
    balance.plot(nodes, groups.mean(), "o-", ms=2.5, color=_COLOURS[0], label="random32, mean of seeds")
    balance.fill_between(nodes, groups.min(), groups.max(), color=_COLOURS[0], alpha=0.2, lw=0, label="range")
    uniform = exact[exact["profile"] == "uniform24"]
    at, imbalance = uniform["n_nodes"], uniform["imbalance"]
    balance.plot(at, imbalance, "s--", ms=2.5, color=_COLOURS[1], label="uniform24")
    balance.set(xlabel="nodes", ylabel="slowest stage over mean", ylim=(0.98, None))
    balance.legend()
    skewed = table[table["profile"].str.startswith("skewed")]
    for (name, rows), colour in zip(skewed.groupby("profile", sort=False), _COLOURS, strict=False):
        layers = str(name).removeprefix("skewed")
        search_ms = rows["wall_s"] / MS
        search.plot(rows["n_nodes"], search_ms, "o-", ms=2.5, color=colour, label=f"exact, {layers} layers")
    divided = table[(table["mode"] == "dc") & table["profile"].str.startswith("random")]
    means = divided.groupby("n_nodes")["wall_s"].mean() / MS
    search.plot(means.index, means, "v:", ms=3, color=PALETTE["grey"], label="published search, 32 layers")
    search.set(xlabel="nodes", ylabel="time of the search [ms]", yscale="log")
    log_ticks(search.yaxis, *search.get_ylim())
    search.legend()
    return add_legend(figure, _SOURCE), table


@figure_style
def instantiation(tables: Tables, source: str) -> Drawn:
    """Return times of the pipelines of both choices: of printed templates, and of random layers."""
    table = tables["instantiation"]
    is_printed = table["profile"] == "printed"
    most = table["n_nodes"].max(), table["global_microbatches"].max()
    is_shown = (table["profile"] == "random32-0") & (table["n_nodes"] == most[0])
    is_shown &= table["global_microbatches"] == most[1]
    ways = table["batch_mode"] + " " + table["estimator"]
    is_shown &= ways.isin(["per_pipeline 1f1b", "per_template compat"])
    shown = table[is_printed | is_shown]
    figure = new_figure(TWO_COLUMNS_IN, 2.4)
    titles = {"printed": "printed templates, shown times", "random32-0": "random32, simulated schedule"}
    panels = figure.subplots(1, len(titles), squeeze=False)[0]
    for axes, (profile, title) in zip(panels, titles.items(), strict=True):
        rows = shown[shown["profile"] == profile]
        ticks: dict[int, str] = {}
        for row in rows.sort_values("batch_mode", ascending=False).to_dict("records"):
            times = np.array(str(row["pipeline_time_s"]).split(), dtype=float)
            x = np.arange(len(times)) + max(ticks, default=-2) + 2
            colour = _PUBLISHED if row["batch_mode"] == "per_template" else _OURS
            axes.plot(x, times, "o", ms=3.5, color=colour, zorder=3)
            axes.hlines(times.max(), x[0] - 0.5, x[-1] + 0.5, color=colour, lw=0.8, zorder=2)
            label = f"{times.max():.4g} s"
            axes.annotate(label, (x.mean(), times.max()), (0, 4), textcoords="offset points", ha="center")
            # Counts of pipelines by their nodes, such as "4x3 1x5".
            counts = (part.split("x") for part in str(row["counts"]).split())
            sizes = [size for count, size in counts for _ in range(int(count))]
            ticks |= dict(zip(x.tolist(), sizes, strict=True))
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
    return add_legend(figure, _SOURCE, handles, ncols=4), shown


@figure_style
def layer_throughput(tables: Tables, source: str) -> Drawn:
    """Throughput from emulated times of layers, beside the printed one."""
    table = tables["layer_throughput"]
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
    return add_legend(figure, "emulated times of layers", handles, ncols=2), table


@figure_style
def guarantee(tables: Tables, source: str) -> Drawn:
    """Fewest templates that use every number of nodes."""
    table = tables["studies"]
    shown = table[(table["study"] == "guarantee") & (table["quantity"] == "least_templates")]
    cases = shown["case"].str.extract(r"n0=(?P<n0>\d+) f=(?P<f>\d+)").astype(int)
    grid = cases.assign(value=shown["value"]).pivot(index="f", columns="n0", values="value")
    figure = new_figure(TWO_COLUMNS_IN / 2, 2.2)
    axes = figure.subplots()
    draw_heat_map(axes, grid, "least nodes of a pipeline, n0", "nodes lost at once, f")
    axes.set_title("fewest templates")
    return add_legend(figure, "counted"), shown


# ------------------------------------------------------------------------------------------------
# Plans after losses, and several nodes lost at once.

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


@figure_style
def reconfiguration(tables: Tables, source: str) -> Drawn:
    """Share of each action after losses, and the mean of the state that is sent, by the nodes lost."""
    rows = tables["reconfiguration"]
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
    table = table.reset_index()
    figure = new_figure(TWO_COLUMNS_IN, 3.4)
    widths = [max(2, int((table["is_beyond"] == is_beyond).sum())) for is_beyond in _PANELS]
    panels = figure.subplots(
        2, 2, sharey="row", sharex="col", height_ratios=[2, 1], width_ratios=widths, squeeze=False
    )
    for column, (is_beyond, title) in enumerate(_PANELS.items()):
        rows = table[table["is_beyond"] == is_beyond]
        x = np.arange(len(rows))
        shares = ((colour, rows[action].to_numpy(float)) for action, (_, colour) in _ACTIONS.items())
        draw_stack(panels[0, column], x, shares, 0.8)
        draw_bars(panels[1, column], [Bars(rows["copies_bytes"].fillna(0) / _KB, PALETTE["blue"])], 0.88)
        compared(panels[1, column], x, rows["most_sent_bytes"].fillna(0) / _KB)
        for axes in panels[:, column]:
            name_groups(axes, rows["n_lost"].astype(str).tolist())
            axes.set_xlim(-0.6, len(rows) - 0.4)
        panels[0, column].set_title(title)
        panels[1, column].set_xlabel("nodes lost at once")
    panels[0, 0].set(ylim=(0, 1), ylabel="share of losses")
    panels[1, 0].set_ylabel("state sent [kB]")
    handles: list[Patch | Line2D] = [Patch(color=colour, label=label) for label, colour in _ACTIONS.values()]
    handles.append(compared_handle("sent by the node that sends most"))
    return add_legend(figure, "24 equal layers" if source == "emulated" else source, handles, ncols=4), table


_QUANTITIES = {
    "state_lost_share": "bursts that take\nall copies of a layer",
    "below_share": "share of time below\n(f + 1) n0 nodes",
    "safe_work_share": "share of work done\non (f + 1) n0 or more",
}
_SHAPES = {"anywhere": "o-", "rack": "s--", "rack, spread": "^:"}
_STRATEGY_COLOURS = (PALETTE["sky"], PALETTE["blue"], PALETTE["vermilion"], PALETTE["black"])


@figure_style
def bursts(tables: Tables, source: str) -> Drawn:
    """Draw the losses that each f survives, and the work that it keeps, if several nodes are lost at once."""
    table = burst_table(tables["studies"])
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
    names = ("anywhere", "in a rack", "in a rack, copies spread")
    lines = [
        line_handle(Style(name, "black", shape[0], shape[1:]))
        for name, shape in zip(names, _SHAPES.values(), strict=True)
    ]
    return add_legend(figure, "24 equal layers, random bursts", [*handles, *lines], ncols=6), table


# ------------------------------------------------------------------------------------------------
# Where time goes, and throughput over time.

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


@figure_style
def breakdown(tables: Tables, source: str) -> Drawn:
    """Breakdown of time by model, mode, distance between failures and system.

    The first table has it; the second one counts runs for the caption.
    """
    table = next(iter(tables.values()))
    modes, models = in_order(table["mode"], MODES), list(dict.fromkeys(table["model"]))
    traces, systems = list(dict.fromkeys(table["trace"])), in_order(table["system"], STYLES)
    figure = new_figure(TWO_COLUMNS_IN, 1.7 * len(modes) + 0.5)
    panels = figure.subplots(len(modes), len(models), sharey=True, squeeze=False)
    for row, mode in zip(panels, modes, strict=True):
        for axes, model in zip(row, models, strict=True):
            rows = table[(table["mode"] == mode) & (table["model"] == model)]
            shares = rows.pivot(index=["trace", "system"], columns="category", values="share")
            cases = pd.MultiIndex.from_product([traces, systems])
            shares = 100 * shares.reindex(index=cases, columns=list(_CATEGORY_COLOURS)).fillna(0.0)
            apart = (np.arange(len(systems)) - (len(systems) - 1) / 2) * _TIME_BAR_WIDTH
            x = np.add.outer(np.arange(len(traces)), apart).ravel()
            parts = ((colour, shares[name]) for name, colour in _CATEGORY_COLOURS.items())
            draw_stack(axes, x, parts, 0.9 * _TIME_BAR_WIDTH)
            crosses = x[(shares.sum(axis=1) == 0).to_numpy()]
            cannot_run(axes, crosses, np.full(len(crosses), 0.05), transform=axes.get_xaxis_transform())
            # One trace leaves room for whole names; of several the names of systems are first letters.
            titles = [STYLES[system].title for system in systems]
            axes.set_xticks(x, titles if len(traces) == 1 else [title[0] for title in titles] * len(traces))
            for place, trace in enumerate(traces if len(traces) > 1 else ()):
                axes.text(place, -0.13, trace, ha="center", va="top", transform=axes.get_xaxis_transform())
            axes.tick_params(axis="x", length=0)
            axes.grid(visible=False, axis="x")
            axes.set_ylim(0, 100)
            axes.set_title(f"{model}, {MODES[mode]}")
        row[0].set_ylabel("share of time [%]")
    handles: list[Patch | Line2D] = [
        Patch(color=colour, label=name) for name, colour in _CATEGORY_COLOURS.items()
    ]
    shown = table[table["share"] > 0][["mode", "model", "trace", "system"]].drop_duplicates()
    if len(shown) < len(modes) * len(models) * len(traces) * len(systems):
        handles.append(cannot_run_handle("out of memory"))
    return add_legend(figure, SOURCES.get(source, source), handles, ncols=len(handles)), table


@figure_style
def over_time(tables: Tables, source: str, mode: str) -> Drawn:
    """Nodes, and throughput of every model and system, over time."""
    (rows,) = tables.values()
    table = rows[rows["mode"] == mode].reset_index(drop=True)
    models, systems = list(dict.fromkeys(table["model"])), in_order(table["system"], STYLES)
    figure = new_figure(TWO_COLUMNS_IN, 3.6)
    panels = list(figure.subplots(2, 3, sharex=True).flat)
    node_changes = table[(table["model"] == models[0]) & (table["system"] == systems[-1])]
    hours = node_changes["time_s"] / HOUR
    panels[0].step(hours, node_changes["n_nodes"], where="post", color="black", lw=0.8)
    panels[0].set_title("nodes")
    panels[0].set_ylim(0, None)
    for axes, model in zip(panels[1:], models, strict=False):
        for system in systems:
            progress = table[(table["model"] == model) & (table["system"] == system)]
            hours, rates = progress["time_s"] / HOUR, progress["throughput_samples_per_s"]
            colour = STYLES[system].colour
            axes.step(hours, rates, where="post", color=colour, lw=0.8)
            if len(rates):
                reference(axes, [0.0, float(hours.max())], [rates.mean()] * 2, color=colour)
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
    return add_legend(figure, SOURCES.get(source, source), handles, ncols=len(handles)), table


@figure_style
def intervals(tables: Tables, source: str) -> Drawn:
    """Share of full throughput against the steps between Varuna's checkpoints."""
    rows = tables["studies"]
    rows = rows[rows["study"] == INTERVALS]
    wide = rows.pivot(index="case", columns="quantity", values="value")
    table = wide[wide["simulated_share"].notna()].reset_index()
    parts = table["case"].str.extract(r"^(?P<model>.*), every (?P<steps>\d+) steps$")
    table = parts.assign(steps=parts["steps"].astype(int)).join(table[["simulated_share", "expected_share"]])
    models = list(dict.fromkeys(table["model"]))
    figure = new_figure(TWO_COLUMNS_IN, 2.3)
    panels = figure.subplots(1, len(models), sharey=True, squeeze=False)[0]
    for axes, model in zip(panels, models, strict=True):
        varied = table[table["model"] == model].sort_values("steps")
        style = STYLES["varuna"]
        axes.plot(varied["steps"], varied["simulated_share"], color=style.colour, marker=style.marker, ms=3)
        axes.plot(varied["steps"], varied["expected_share"], color=style.colour, lw=0.8, ls=_ANALYTIC)
        axes.axhline(wide.loc[model, "oobleck_share"], color=STYLES["oobleck"].colour, lw=1.0)
        reference(axes, [wide.loc[model, "young_daly_steps"]] * 2, [0.0, 1.02])
        axes.set(xscale="log", xlabel="steps between checkpoints", title=model, ylim=(0, 1.02))
        log_ticks(axes.xaxis, *axes.get_xlim())
    panels[0].set_ylabel("share of full throughput")
    handles = [
        Line2D([], [], color=STYLES["varuna"].colour, marker="s", ms=3, label="Varuna"),
        Line2D([], [], color=STYLES["varuna"].colour, lw=0.8, ls=_ANALYTIC, label="Varuna, analytic"),
        reference_handle("interval of Young and Daly"),
        Line2D([], [], color=STYLES["oobleck"].colour, label="Oobleck"),
    ]
    return add_legend(figure, "generated losses, printed throughput", handles, ncols=4), table


# ------------------------------------------------------------------------------------------------
# ReCycle beside the other systems, and its schedules.

_OVER = {
    "oobleck": STYLES["oobleck"],
    "replica-drop": Style("dropped replicas", PALETTE["purple"], "D"),
    "varuna": STYLES["varuna"],
    "bamboo": STYLES["bamboo"],
}
_RATIOS_OF_RECYCLE, _TICKS_OF_RECYCLE = (0.45, 10.0), (0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 8.0)
_TECHNIQUES = {
    "rerouted": Style("re-routing alone", PALETTE["vermilion"], "v"),
    "rerouted_split": Style("with split backward passes", PALETTE["sky"], "s"),
    "every": Style("with all techniques", PALETTE["black"], "o"),
}
_BOUND: tuple[int, tuple[int, ...]] = (0, (1, 2))


@figure_style
def recycle(tables: Tables, source: str) -> Drawn:
    """Throughput of ReCycle over that of other systems; below, iterations with a lost worker over 1F1B."""
    ratios, schedules = tables["recycle_ratios"], tables["recycle_schedules"]
    models = list(dict.fromkeys(ratios["model"]))
    stages = list(dict.fromkeys(schedules["n_stages"]))
    figure = new_figure(TWO_COLUMNS_IN, 4.2)
    grid = figure.add_gridspec(2, 1)
    above = grid[0].subgridspec(1, len(models)).subplots(sharey=True, squeeze=False)[0]
    below = grid[1].subgridspec(1, len(stages)).subplots(sharey=True, squeeze=False)[0]
    cases = list(dict.fromkeys(zip(ratios["losses"], ratios["trace"], strict=True)))
    n_fixed = sum(kind == "fixed" for kind, _ in cases)
    is_beyond = False
    for axes, model in zip(above, models, strict=True):
        rows = ratios[ratios["model"] == model]
        reference(axes, [-0.5, len(cases) - 0.5], [1.0, 1.0])
        axes.axvline(n_fixed - 0.5, color=PALETTE["grey"], lw=0.6)
        for number, (other, style) in enumerate(_OVER.items()):
            of_other = rows[rows["other"] == other].set_index(["losses", "trace"])
            shown = of_other.reindex(pd.MultiIndex.from_tuples(cases))
            x = np.arange(len(cases)) + 0.16 * (number - 1.5)
            ratio, half = (shown[name].to_numpy(float) for name in ("ratio", "half_width"))
            axes.plot(x, ratio, ls="none", marker=style.marker, ms=2.8, color=style.colour)
            spread(axes, x, ratio - half, ratio + half, style.colour)
            for place, value in zip(x, ratio, strict=True):
                is_beyond |= beyond(axes, place, value, _RATIOS_OF_RECYCLE, style.colour, is_across=False)
        axes.set(yscale="log", ylim=_RATIOS_OF_RECYCLE, title=model)
        axes.yaxis.set_major_locator(FixedLocator(_TICKS_OF_RECYCLE))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(plain_numbers())
        name_groups(axes, [trace for _, trace in cases], rotation=90)
    above[0].set_ylabel("ReCycle over the other")
    lost = schedules[schedules["n_lost"] == 1]
    for axes, n_stages in zip(below, stages, strict=True):
        rows = lost[lost["n_stages"] == n_stages]
        for technique, style in _TECHNIQUES.items():
            for room, line in (("once", "--"), ("twice", "-")):
                shown = rows[(rows["technique"] == technique) & (rows["room"] == room)]
                x = shown["n_microbatches"] / n_stages
                axes.plot(
                    x, shown["time_ratio"], color=style.colour, marker=style.marker, ms=2.8, ls=line, lw=0.9
                )
        bound = rows[(rows["technique"] == "every") & (rows["room"] == "twice")]
        axes.plot(bound["n_microbatches"] / n_stages, bound["bound_ratio"], color=PALETTE["grey"], ls=_BOUND)
        reference(axes, [1.0, float(max(x))], [1.0, 1.0])
        axes.set(xscale="log", xlabel="microbatches over stages")
        axes.set_title(f"{n_stages} stages, {int(rows['n_pipelines'].iloc[0])} pipelines")
        log_ticks(axes.xaxis, *axes.get_xlim())
    below[0].set_ylabel("iteration over 1F1B")
    handles = [
        *(point_handle(style) for style in _OVER.values()),
        spread_handle("95 % interval over seeds"),
        reference_handle("as fast"),
        *(line_handle(style, ls="none", ms=4) for style in _TECHNIQUES.values()),
        Line2D([], [], color="black", lw=0.9, label="room for twice the activations"),
        Line2D([], [], color="black", lw=0.9, ls="--", label="for those of 1F1B"),
        Line2D([], [], color=PALETTE["grey"], ls=_BOUND, label="lower bound"),
    ]
    if is_beyond:
        handles.append(beyond_handle())
    return add_legend(figure, "generated losses, printed throughput; equal stages", handles, ncols=4), ratios
