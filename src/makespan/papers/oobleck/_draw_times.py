"""Figures of where time goes and of throughput over time."""

from collections.abc import Mapping, Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from makespan.papers.oobleck._draw_averages import LOOKS, MODES, SOURCES
from makespan.papers.oobleck._interval_studies import INTERVALS
from makespan.papers.oobleck._tables_planning import STUDIES
from makespan.papers.oobleck._tables_simulation import BREAKDOWN, SERIES
from makespan.plots import (
    PALETTE,
    TWO_COLUMNS_IN,
    cannot_run,
    cannot_run_handle,
    finished,
    new_figure,
    ordered,
    plain_numbers,
    reference,
    reference_handle,
    styled,
)
from makespan.tables import read_csv
from makespan.units import HOUR

__all__ = ["breakdown", "intervals", "over_time"]

Paths = Mapping[str, str]
Drawn = tuple[Figure, pd.DataFrame]

_COLOURS = {
    "useful": PALETTE["blue"],
    "redundant": PALETTE["sky"],
    "checkpoint": PALETTE["green"],
    "restart": PALETTE["orange"],
    "rebalance": PALETTE["purple"],
    "lost": PALETTE["vermilion"],
    "stalled": PALETTE["grey"],
}
_WIDTH = 0.28
_CASE = ["mode", "model", "trace"]
_ANALYTIC = (0, (5, 1, 1, 1))


def _stacks(axes: Axes, rows: pd.DataFrame, traces: Sequence[str], systems: Sequence[str]) -> None:
    shares = rows.set_index(["trace", "system", "category"])["share"].to_dict()
    ticks, names = [], []
    for place, trace in enumerate(traces):
        for offset, system in enumerate(systems):
            x = place + (offset - (len(systems) - 1) / 2) * _WIDTH
            below = 0.0
            for category, colour in _COLOURS.items():
                height = 100 * shares.get((trace, system, category), 0.0)
                axes.bar(x, height, 0.9 * _WIDTH, bottom=below, color=colour, lw=0, zorder=2)
                below += height
            ticks.append(x)
            names.append(LOOKS[system].title[0] if len(traces) > 1 else LOOKS[system].title)
            if not below:
                cannot_run(axes, x, 0.05, transform=axes.get_xaxis_transform())
    axes.set_xticks(ticks, names)
    if len(traces) > 1:
        for place, trace in enumerate(traces):
            axes.text(place, -0.13, trace, ha="center", va="top", transform=axes.get_xaxis_transform())
    axes.tick_params(axis="x", length=0)
    axes.grid(visible=False, axis="x")
    axes.set_ylim(0, 100)


@styled
def _breakdown(table: pd.DataFrame, source: str) -> Figure:
    modes, models = ordered(table["mode"], MODES), list(dict.fromkeys(table["model"]))
    traces, systems = list(dict.fromkeys(table["trace"])), ordered(table["system"], LOOKS)
    figure = new_figure(TWO_COLUMNS_IN, 1.7 * len(modes) + 0.5)
    panels = figure.subplots(len(modes), len(models), sharey=True, squeeze=False)
    for row, mode in zip(panels, modes, strict=True):
        for axes, model in zip(row, models, strict=True):
            own = table[(table["mode"] == mode) & (table["model"] == model)]
            _stacks(axes, own, traces, systems)
            axes.set_title(f"{model}, {MODES[mode]}")
        row[0].set_ylabel("share of time [%]")
    handles: list[Patch | Line2D] = [Patch(color=colour, label=name) for name, colour in _COLOURS.items()]
    if (table.groupby([*_CASE, "system"])["share"].sum() == 0).any() or len(
        table[_CASE].drop_duplicates()
    ) * len(systems) > len(table[[*_CASE, "system"]].drop_duplicates()):
        handles.append(cannot_run_handle("out of memory"))
    return finished(figure, SOURCES.get(source, source), handles, ncols=len(handles))


def breakdown(paths: Paths, source: str) -> Drawn:
    """Where time goes, by model, mode, distance between failures and system."""
    ((name, path),) = paths.items()
    table = read_csv(path, BREAKDOWN[name])
    return _breakdown(table, source), table


@styled
def _over_time(table: pd.DataFrame, source: str) -> Figure:
    models, systems = list(dict.fromkeys(table["model"])), ordered(table["system"], LOOKS)
    figure = new_figure(TWO_COLUMNS_IN, 3.6)
    panels = list(figure.subplots(2, 3, sharex=True).flat)
    one = table[(table["model"] == models[0]) & (table["system"] == systems[-1])]
    panels[0].step(one["time_s"] / HOUR, one["n_nodes"], where="post", color="black", lw=0.8)
    panels[0].set_title("nodes")
    panels[0].set_ylim(0, None)
    for axes, model in zip(panels[1:], models, strict=False):
        for system in systems:
            own = table[(table["model"] == model) & (table["system"] == system)]
            rates, look = own["throughput_samples_per_s"], LOOKS[system]
            axes.step(own["time_s"] / HOUR, rates, where="post", color=look.colour, lw=0.8)
            if len(rates):
                reference(
                    axes, [0.0, float(own["time_s"].max()) / HOUR], [rates.mean()] * 2, color=look.colour
                )
        axes.set_title(model)
        axes.set_ylim(0, None)
    for axes in panels[3:]:
        axes.set_xlabel("time [h]")
    for axes in (panels[1], panels[3]):
        axes.set_ylabel("samples/s")
    for axes in panels[len(models) + 1 :]:
        axes.set_axis_off()
    handles = [Line2D([], [], color=LOOKS[name].colour, label=LOOKS[name].title) for name in systems]
    handles += [reference_handle("mean"), Line2D([], [], color="black", lw=0.8, label="nodes")]
    return finished(figure, SOURCES.get(source, source), handles, ncols=len(handles))


def over_time(paths: Paths, source: str, mode: str) -> Drawn:
    """Nodes, and throughput of every model and system, over time."""
    ((name, path),) = paths.items()
    rows = read_csv(path, SERIES[name])
    table = rows[rows["mode"] == mode].reset_index(drop=True)
    return _over_time(table, source), table


@styled
def _intervals(table: pd.DataFrame, best: Mapping[tuple[str, str], float]) -> Figure:
    models = list(dict.fromkeys(table["model"]))
    figure = new_figure(TWO_COLUMNS_IN, 2.3)
    panels = figure.subplots(1, len(models), sharey=True, squeeze=False)[0]
    for axes, model in zip(panels, models, strict=True):
        own = table[table["model"] == model].sort_values("steps")
        look = LOOKS["varuna"]
        axes.plot(own["steps"], own["simulated_share"], color=look.colour, marker=look.marker, ms=3)
        axes.plot(own["steps"], own["expected_share"], color=look.colour, lw=0.8, ls=_ANALYTIC)
        axes.axhline(best[model, "oobleck_share"], color=LOOKS["oobleck"].colour, lw=1.0)
        reference(axes, [best[model, "young_daly_steps"]] * 2, [0.0, 1.02])
        axes.set(xscale="log", xlabel="steps between checkpoints", title=model, ylim=(0, 1.02))
        axes.xaxis.set_major_formatter(plain_numbers())
    panels[0].set_ylabel("share of full throughput")
    handles = [
        Line2D([], [], color=LOOKS["varuna"].colour, marker="s", ms=3, label="Varuna"),
        Line2D([], [], color=LOOKS["varuna"].colour, lw=0.8, ls=_ANALYTIC, label="Varuna, analytic"),
        reference_handle("interval of Young and Daly"),
        Line2D([], [], color=LOOKS["oobleck"].colour, label="Oobleck"),
    ]
    return finished(figure, "generated losses, printed throughput", handles, ncols=4)


def intervals(paths: Paths, source: str) -> Drawn:
    """Share of full throughput against the steps between Varuna's checkpoints."""
    rows = read_csv(paths["studies"], STUDIES)
    rows = rows[rows["study"] == INTERVALS]
    wide = rows.pivot(index="case", columns="quantity", values="value")
    best = {(case, name): wide.loc[case, name] for case in wide.index for name in wide.columns}
    table = wide[wide["simulated_share"].notna()].reset_index()
    parts = table["case"].str.extract(r"^(?P<model>.*), every (?P<steps>\d+) steps$")
    table = parts.assign(steps=parts["steps"].astype(int)).join(table[["simulated_share", "expected_share"]])
    return _intervals(table, best), table
