"""Two jobs that share a node: stacked speed-ups under each scheduler."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from makespan.plots._style import (
    MODEL_TITLES,
    ONE_COLUMN_IN,
    PALETTE,
    model_order,
    new_figure,
    require_columns,
    source_label,
    styled,
)

__all__ = ["plot_sharing"]

_COLOURS = ("sky", "orange", "green", "purple")
_WIDTH = 0.66


@styled
def plot_sharing(table: pd.DataFrame, source: str) -> Figure:
    """Draw the speed-ups of jobs that run side by side, stacked for each scheduler.

    Parameters
    ----------
    table
        Schema `makespan.tables.FIG8`; speed-ups are relative to the job alone on all GPUs.
    source
        Name of the throughput source.

    Returns
    -------
    matplotlib.figure.Figure
        One panel; thick marks are the published values, stacked in the same way.
    """
    require_columns(table, "scheduler", "job", "gpus", "plan", "speedup", "published_speedup", figure="fig8")
    figure = new_figure(ONE_COLUMN_IN, 2.6)
    axes = figure.subplots()
    schedulers = list(dict.fromkeys(table["scheduler"]))
    jobs = model_order(table["job"])
    colours = {job: PALETTE[_COLOURS[number % len(_COLOURS)]] for number, job in enumerate(jobs)}
    for x, scheduler in enumerate(schedulers):
        rows = table[table["scheduler"] == scheduler].set_index("job").loc[jobs]
        _stack(axes, x, rows, colours)
    axes.set_xticks(range(len(schedulers)), schedulers)
    axes.set_xlim(-0.6, len(schedulers) - 0.4)
    largest = table.groupby("scheduler")[["speedup", "published_speedup"]].sum().to_numpy().max()
    axes.set_ylim(0, 1.15 * float(largest))
    axes.tick_params(axis="x", length=0)
    axes.grid(visible=False, axis="x")
    axes.set_ylabel("speed-up over the job alone on all GPUs")
    handles: list[Patch | Line2D] = [
        Patch(color=colours[job], label=MODEL_TITLES.get(job, job)) for job in jobs
    ]
    handles.append(Line2D([], [], color="black", lw=1.6, label="published"))
    figure.legend(handles=handles, loc="outside upper center", ncols=3)
    source_label(figure, source)
    return figure


def _stack(axes: Axes, x: int, rows: pd.DataFrame, colours: dict[str, str]) -> None:
    total, published_total = 0.0, 0.0
    for job, row in rows.iterrows():
        value = float(row["speedup"])
        axes.bar(x, value, _WIDTH, bottom=total, color=colours[str(job)], lw=0, zorder=2)
        unit = "GPU" if row["gpus"] == 1 else "GPUs"
        axes.text(
            x, total + value / 2, f"{row['gpus']} {unit}, {row['plan']}\n{value:.2f}", ha="center",
            va="center", fontsize=6, zorder=4,
        )  # fmt: skip
        total += value
        published_total += float(row["published_speedup"])
        edge = x + _WIDTH / 2
        axes.plot(
            [edge - 0.05, edge + 0.07], [published_total, published_total], color="black", lw=1.6,
            solid_capstyle="butt", zorder=5,
        )  # fmt: skip
        axes.text(edge + 0.09, published_total, f"{published_total:.2f}", va="center", fontsize=6)
    axes.text(x, total + 0.02, f"{total:.2f}", ha="center", va="bottom", fontweight="bold", zorder=6)
