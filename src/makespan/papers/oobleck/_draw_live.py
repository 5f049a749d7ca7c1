"""The figure of training through kills: from paths of tables to a figure and its table."""

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from makespan.papers.oobleck._tables_live import HYBRID, HYBRID_KILLS, HYBRID_SUMMARY
from makespan.plots import PALETTE, TWO_COLUMNS_IN, Look, finished, new_figure, styled
from makespan.tables import read_csv

__all__ = ["hybrid"]

_SYSTEMS = {
    "oobleck": Look("Oobleck", PALETTE["blue"], "o"),
    "relaunch": Look("checkpoint and relaunch", PALETTE["orange"], "s"),
}
_KINDS = {
    "compute": Look("in a pass", PALETTE["vermilion"], "v"),
    "reduction": Look("in a reduction", PALETTE["purple"], "^"),
    "commit": Look("before a commit", PALETTE["green"], "D"),
    "recovery": Look("in a recovery", PALETTE["grey"], "X"),
}


def _named(table: pd.DataFrame) -> pd.DataFrame:
    """Split the name of a run into its job and its system."""
    parts = table["run"].str.partition(", ")
    return table.assign(job=parts[0], system=parts[2])


def _losses(axes: Axes, steps: pd.DataFrame, kills: pd.DataFrame) -> None:
    for shade, (_, rows) in zip(np.linspace(1.0, 0.45, 8), steps.groupby("job", sort=False), strict=False):
        axes.plot(rows["step"], rows["loss"], color=PALETTE["blue"], alpha=shade, lw=0.9, zorder=2)
    for kind, look in _KINDS.items():
        struck = kills[kills["kind"] == kind].merge(steps[["run", "step", "loss"]], on=["run", "step"])
        axes.scatter(struck["step"], struck["loss"], s=11, color=look.colour, marker=look.marker, zorder=3)
    axes.set_xlabel("iteration")
    axes.set_ylabel("loss")


def _pauses(axes: Axes, kills: pd.DataFrame) -> None:
    for offset, (system, look) in enumerate(_SYSTEMS.items()):
        rows = kills[kills["system"] == system]
        for place, kind in enumerate(_KINDS):
            own = rows.loc[rows["kind"] == kind, "first_wall_s"].to_numpy(float)
            spread = np.linspace(-0.07, 0.07, len(own)) if len(own) > 1 else np.zeros(len(own))
            x = place + (offset - 0.5) * 0.36 + spread
            axes.scatter(x, own, s=9, color=look.colour, marker=look.marker, lw=0, zorder=3)
    axes.set_xticks(range(len(_KINDS)), ["pass", "sum", "commit", "recovery"])
    axes.tick_params(axis="x", length=0)
    axes.set_ylim(0, None)
    axes.set_ylabel("pause [s]")
    axes.set_xlabel("phase of the kill")


def _bars(axes: Axes, summary: pd.DataFrame, column: str, label: str) -> None:
    jobs = list(dict.fromkeys(summary["job"]))
    for offset, (system, look) in enumerate(_SYSTEMS.items()):
        own = summary[summary["system"] == system].set_index("job").reindex(pd.Index(jobs))
        x = np.arange(len(jobs)) + (offset - 0.5) * 0.36
        axes.bar(x, own[column].to_numpy(float), 0.34, color=look.colour, lw=0, zorder=2)
    axes.set_xticks(range(len(jobs)), [job.removeprefix("job ") for job in jobs])
    axes.tick_params(axis="x", length=0)
    axes.grid(visible=False, axis="x")
    axes.set_xlabel("job")
    axes.set_ylabel(label)


@styled
def panels(steps: pd.DataFrame, kills: pd.DataFrame, summary: pd.DataFrame, source: str) -> Figure:
    """Draw losses with marks of kills, pauses, goodput and repeated iterations."""
    figure = new_figure(TWO_COLUMNS_IN, 2.2)
    axes = figure.subplots(1, 4, width_ratios=[1.8, 2.2, 1.0, 1.0])
    ours = steps[steps["system"] == "oobleck"]
    _losses(axes[0], ours, kills[kills["system"] == "oobleck"])
    _pauses(axes[1], kills)
    _bars(axes[2], summary, "goodput_samples_per_s", "goodput [samples/s]")
    _bars(axes[3], summary, "repeated", "iterations done again")
    handles = [
        *(Line2D([], [], ls="", marker=look.marker, ms=4, color=look.colour, label=look.title)
          for look in _KINDS.values()),
        *(Patch(color=look.colour, label=look.title) for look in _SYSTEMS.values()),
        Line2D([], [], color=PALETTE["blue"], lw=0.9, label="loss of a job under Oobleck"),
    ]  # fmt: skip
    return finished(figure, f"{source}, small models", handles, ncols=4)


def hybrid(paths: Mapping[str, str], source: str) -> tuple[Figure, pd.DataFrame]:
    """Draw the experiment; its table has the kills."""
    steps, kills, summary = (
        _named(read_csv(paths[schema.name], schema)) for schema in (HYBRID, HYBRID_KILLS, HYBRID_SUMMARY)
    )
    return panels(steps, kills, summary, source), kills.drop(columns=["job", "system"])
