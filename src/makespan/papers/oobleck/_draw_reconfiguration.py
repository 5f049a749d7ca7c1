"""Figures of what becomes of plans after losses, and of several nodes lost at once."""

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from makespan.papers.oobleck._bursts import burst_table
from makespan.papers.oobleck._tables_planning import STUDIES
from makespan.papers.oobleck._tables_reconfiguration import RECONFIGURATION
from makespan.plots import PALETTE, TWO_COLUMNS_IN, compared, compared_handle, finished, new_figure, styled
from makespan.tables import read_csv

__all__ = ["bursts", "reconfiguration"]

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


@styled
def _stacked(table: pd.DataFrame, source: str) -> Figure:
    figure = new_figure(TWO_COLUMNS_IN, 3.4)
    widths = [max(2, int((table["is_beyond"] == is_beyond).sum())) for is_beyond in _PANELS]
    panels = figure.subplots(
        2, 2, sharey="row", sharex="col", height_ratios=[2, 1], width_ratios=widths, squeeze=False
    )
    for column, (is_beyond, title) in enumerate(_PANELS.items()):
        rows = table[table["is_beyond"] == is_beyond]
        _bars(panels[0, column], panels[1, column], rows)
        panels[0, column].set_title(title)
        panels[1, column].set_xlabel("nodes lost at once")
    panels[0, 0].set_ylabel("share of losses")
    panels[1, 0].set_ylabel("state sent [kB]")
    handles: list[Patch | Line2D] = [Patch(color=colour, label=label) for label, colour in _ACTIONS.values()]
    handles.append(compared_handle("sent by the node that sends most"))
    return finished(figure, "24 equal layers" if source == "emulated" else source, handles, ncols=4)


def _bars(shares: Axes, sent: Axes, rows: pd.DataFrame) -> None:
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


def reconfiguration(paths: Mapping[str, str], source: str) -> tuple[Figure, pd.DataFrame]:
    """Show what is done after losses of so many nodes, and how much state is sent."""
    table = _shares(read_csv(paths["reconfiguration"], RECONFIGURATION))
    return _stacked(table, source), table


_QUANTITIES = {
    "state_lost_share": "bursts that take\nall copies of a layer",
    "below_share": "share of time below\n(f + 1) n0 nodes",
    "safe_work_share": "share of work done\non (f + 1) n0 or more",
}
_SHAPES = {"anywhere": "o-", "rack": "s--", "rack, spread": "^:"}
_COLOURS = (PALETTE["sky"], PALETTE["blue"], PALETTE["vermilion"], PALETTE["black"])


@styled
def _against_f(table: pd.DataFrame) -> Figure:
    figure = new_figure(TWO_COLUMNS_IN, 2.2)
    sizes = sorted(set(table["nodes"]))
    panels = figure.subplots(1, len(_QUANTITIES), squeeze=False)[0]
    for axes, (quantity, label) in zip(panels, _QUANTITIES.items(), strict=True):
        for (nodes, shape), rows in table.groupby(["nodes", "shape"]):
            colour = _COLOURS[sizes.index(nodes) % len(_COLOURS)]
            axes.plot(rows["f"], rows[quantity], _SHAPES[str(shape)], ms=3, color=colour)
        highest = 1.05 * max(float(table[quantity].max()), 0.01)
        axes.set(xlabel="f", ylabel=label, ylim=(0, highest), xticks=sorted(set(table["f"])))
    handles = [
        Patch(color=_COLOURS[i % len(_COLOURS)], label=f"{nodes} at once") for i, nodes in enumerate(sizes)
    ]
    lines = [Line2D([], [], color="black", ls=style[1:], marker=style[0], ms=3) for style in _SHAPES.values()]
    for line, name in zip(lines, ("anywhere", "in a rack", "in a rack, copies spread"), strict=True):
        line.set_label(name)
    return finished(figure, "24 equal layers, random bursts", [*handles, *lines], ncols=6)


def bursts(paths: Mapping[str, str], source: str) -> tuple[Figure, pd.DataFrame]:
    """Show what each f keeps when several nodes are lost at once."""
    table = burst_table(read_csv(paths["studies"], STUDIES))
    return _against_f(table), table
