"""The figure of predicted and measured iterations: from paths of tables to a figure and its table."""

from collections.abc import Mapping

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from makespan.papers.oobleck._tables_execution import PREDICTIONS
from makespan.plots import (
    ONE_COLUMN_IN,
    PALETTE,
    Look,
    finished,
    new_figure,
    reference,
    reference_handle,
    styled,
)
from makespan.tables import read_csv

__all__ = ["predictions"]

_NODES = (
    Look("1 node", PALETTE["blue"], "o"),
    Look("2", PALETTE["orange"], "s"),
    Look("3", PALETTE["green"], "^"),
    Look("more", PALETTE["grey"], "D"),
)


@styled
def panel(table: pd.DataFrame, source: str) -> Figure:
    """Draw a point for each plan, above the line where it took longer than predicted."""
    figure = new_figure(ONE_COLUMN_IN, 2.6)
    axes = figure.subplots()
    looks = [_NODES[min(n_nodes, len(_NODES)) - 1] for n_nodes in table["n_nodes"]]
    predicted, measured = (1e3 * table[name] for name in ("predicted_cores_iter_time_s", "iter_wall_s"))
    for look in dict.fromkeys(looks):
        own = [one is look for one in looks]
        axes.scatter(
            predicted[own], measured[own], s=12, color=look.colour, marker=look.marker, lw=0, zorder=3
        )
    ends = [0.8 * min(predicted.min(), measured.min()), 1.25 * max(predicted.max(), measured.max())]
    reference(axes, ends, ends)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    axes.set_xlabel("predicted iteration [ms]")
    axes.set_ylabel("measured iteration [ms]")
    handles = [
        Line2D([], [], ls="", marker=look.marker, ms=4, color=look.colour, label=look.title)
        for look in _NODES
        if look in looks
    ]
    handles.append(reference_handle("as predicted"))
    return finished(figure, f"{source}, small models", handles, ncols=5)


def predictions(paths: Mapping[str, str], source: str) -> tuple[Figure, pd.DataFrame]:
    """Draw the experiment; its table has both predictions of each plan."""
    table = read_csv(paths["predictions"], PREDICTIONS)
    return panel(table, source), table
