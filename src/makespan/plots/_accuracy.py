"""Losses of training runs under several plans: the curves, and how far they are apart."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from makespan.plots._style import (
    PALETTE,
    TWO_COLUMNS_IN,
    new_figure,
    require_columns,
    source_label,
    styled,
)

__all__ = ["plot_accuracy"]

_SPECIAL = {"switching": PALETTE["vermilion"], "other seed": PALETTE["black"]}
_COLOURS = ("blue", "sky", "green", "orange", "purple", "olive", "grey")
_STYLES = ("-", "--", ":")
_SMALLEST = 1e-8


@styled
def plot_accuracy(table: pd.DataFrame, summary: pd.DataFrame, limit: float, source: str) -> Figure:
    """Draw the losses of all runs, and their distance to the first one on a logarithmic scale.

    Parameters
    ----------
    table
        Schema `makespan.tables.FIG9`.
    summary
        Schema `makespan.tables.FIG9_SUMMARY`; the paper's rows are drawn as marks.
    limit
        Share of the other seed's mean distance that plans should stay below; drawn as a line.
    source
        Name of the throughput source.

    Returns
    -------
    matplotlib.figure.Figure
        Two panels. Steps at which a run equals the reference to the last bit have no point.
    """
    require_columns(table, "run", "step", "loss", "abs_difference", figure="fig9")
    require_columns(summary, "run", "kind", "mean_abs_difference", "max_abs_difference", figure="fig9")
    figure = new_figure(TWO_COLUMNS_IN, 3.0)
    left, right = figure.subplots(1, 2, width_ratios=[0.8, 1.2])
    runs = list(dict.fromkeys(table["run"]))
    plain = [run for run in runs if run not in _SPECIAL]
    for run in runs:
        rows = table[table["run"] == run]
        colour, line = _look(run, plain)
        width = 1.3 if run in _SPECIAL else 0.8
        left.plot(rows["step"], rows["loss"], line, color=colour, lw=width, label=run)
        seen = rows[rows["abs_difference"] > _SMALLEST]
        right.plot(seen["step"], seen["abs_difference"], line, color=colour, lw=width, marker=".", ms=1.5)
    _limits(right, summary, limit)
    right.set_yscale("log")
    left.set_ylabel("loss")
    right.set_ylabel(f"|loss $-$ loss of {runs[0]}|")
    for axes in (left, right):
        axes.set_xlabel("optimiser step")
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=5)
    source_label(figure, source, strip=False)
    return figure


def _look(run: str, plain: list[str]) -> tuple[str, str]:
    if run in _SPECIAL:
        return _SPECIAL[run], "-"
    number = plain.index(run)
    colour = PALETTE[_COLOURS[number % len(_COLOURS)]]
    return colour, _STYLES[number // len(_COLOURS) % len(_STYLES)]


def _limits(axes: Axes, summary: pd.DataFrame, limit: float) -> None:
    """Draw what the claim allows, and the paper's means and largest values at the right edge."""
    other = summary[summary["kind"] == "other seed"]["mean_abs_difference"]
    if len(other):
        level = limit * float(other.iloc[0])
        axes.axhline(level, color=PALETTE["grey"], lw=0.7, ls="--")
        axes.annotate(
            f"{limit:g} x mean of other seed", (0.02, level), xycoords=("axes fraction", "data"),
            xytext=(0, -2), textcoords="offset points", va="top", fontsize=6, color="#505050",
        )  # fmt: skip
    paper = summary[summary["kind"].str.startswith("published")]
    if paper.empty:
        return
    spots = [1.03 + 0.03 * number for number in range(len(paper))]
    for spot, (_, row) in zip(spots, paper.iterrows(), strict=True):
        is_seed = str(row["kind"]).endswith("other seed")
        colour = PALETTE["black"] if is_seed else PALETTE["grey"]
        axes.plot(
            [spot, spot], [row["mean_abs_difference"], row["max_abs_difference"]], color=colour, lw=1,
            marker="_", ms=4, clip_on=False, transform=axes.get_yaxis_transform(),
        )  # fmt: skip
    axes.annotate(
        "published:\nmean, max", (1.02, 0.012), xycoords=("axes fraction", "data"), fontsize=5.5,
        color="#505050", va="top", annotation_clip=False,
    )  # fmt: skip
