"""Sensitivity curves: throughput of every plan family against devices and CPU threads."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from makespan.plots._style import (
    FAMILY_COLOURS,
    FAMILY_MARKERS,
    MODEL_TITLES,
    PALETTE,
    family_order,
    model_order,
    panel_grid,
    require_columns,
    source_label,
    styled,
)

__all__ = ["ENVELOPE", "plot_cpu_sensitivity", "plot_sensitivity"]

ENVELOPE = "best plan"
"""Name of the envelope in the column ``plan_family``."""

Numbers = npt.NDArray[Any]

_ENVELOPE_COLOUR = "#C9C9C9"


@styled
def plot_sensitivity(table: pd.DataFrame, source: str) -> Figure:
    """Draw throughput against GPUs, one panel a model, one line a plan family.

    Parameters
    ----------
    table
        Columns ``model, plan_family, gpus, throughput_samples_per_s``; the rows of family
        `ENVELOPE` are the best plan with at most that many GPUs. Rows of no throughput are left
        out.
    source
        Name of the throughput source.

    Returns
    -------
    matplotlib.figure.Figure
        Logarithmic panels; the envelope is the broad line behind the others. Lines join the counts
        at which more GPUs help, and faint dots are those at which fewer are faster.
    """
    require_columns(table, "model", "plan_family", "gpus", "throughput_samples_per_s", figure="sensitivity")
    shown = table[table["throughput_samples_per_s"] > 0]
    models = model_order(table["model"])
    figure, panels = panel_grid(len(models), 1.55)
    for axes, model in zip(panels, models, strict=False):
        _curve_panel(axes, shown[shown["model"] == model])
        axes.set_title(MODEL_TITLES.get(model, model))
    families = [name for name in family_order(shown["plan_family"]) if name != ENVELOPE]
    handles = [_family_line(name) for name in families]
    if _has_losses(shown):
        faint: dict[str, Any] = {
            "ls": "none",
            "marker": ".",
            "ms": 3,
            "mew": 0,
            "alpha": 0.55,
            "color": "#555555",
        }
        handles.append(Line2D([], [], label="fewer GPUs are faster", **faint))
    handles.append(Line2D([], [], color=_ENVELOPE_COLOUR, lw=3.2, label=ENVELOPE + " (envelope)"))
    panels[len(models)].legend(handles=handles, loc="center", labelspacing=0.4)
    figure.supxlabel("GPUs", fontsize=7)
    figure.supylabel("throughput [samples/s]", fontsize=7)
    source_label(figure, source, strip=False)
    return figure


def _has_losses(rows: pd.DataFrame) -> bool:
    ordered = rows[rows["plan_family"] != ENVELOPE].sort_values("gpus")
    best = ordered.groupby(["model", "plan_family"])["throughput_samples_per_s"].cummax()
    return bool((ordered["throughput_samples_per_s"] < best).any())


def _count(gpus: int) -> str:
    return f"{gpus} GPU" if gpus == 1 else f"{gpus} GPUs"


def _family_line(family: str) -> Line2D:
    colour = FAMILY_COLOURS.get(family, PALETTE["grey"])
    return Line2D([], [], color=colour, marker=FAMILY_MARKERS.get(family, "o"), ms=3, lw=1, label=family)


def _curve_panel(axes: Axes, rows: pd.DataFrame) -> None:
    for family in reversed(family_order(rows["plan_family"])):
        part = rows[rows["plan_family"] == family].sort_values("gpus")
        x, y = part["gpus"], part["throughput_samples_per_s"]
        if family == ENVELOPE:
            axes.plot(x, y, color=_ENVELOPE_COLOUR, lw=3.2, drawstyle="steps-post", zorder=1)
        else:
            _draw_family(axes, x.to_numpy(), y.to_numpy(), _family_line(family))
    _log2_x(axes, int(rows["gpus"].max()) if len(rows) else 1)
    _log_y(axes)


def _draw_family(axes: Axes, gpus: Numbers, throughput: Numbers, line: Line2D) -> None:
    """Join the counts at which more GPUs are faster than all fewer; the others are faint dots."""
    gains = throughput > np.maximum.accumulate(np.concatenate([[0.0], throughput[:-1]]))
    axes.plot(
        gpus[~gains], throughput[~gains], ls="none", marker=".", ms=2.4, mew=0, alpha=0.55,
        color=line.get_color(), zorder=2,
    )  # fmt: skip
    axes.plot(
        gpus[gains], throughput[gains], color=line.get_color(), marker=line.get_marker(), ms=2.8, lw=0.9,
        mec="white", mew=0.2, zorder=3,
    )  # fmt: skip


def _log2_x(axes: Axes, largest: int) -> None:
    axes.set_xscale("log", base=2)
    ticks = [2**power for power in range(int(math.log2(max(largest, 2))) + 1)]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _log_y(axes: Axes) -> None:
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    subs = (1.0, 2.0, 5.0) if math.log10(high / low) < 2.0 else (1.0,)
    axes.yaxis.set_major_locator(LogLocator(subs=subs))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


@styled
def plot_cpu_sensitivity(table: pd.DataFrame, source: str) -> Figure:
    """Draw throughput of offload plans against CPU threads, one panel a model.

    Parameters
    ----------
    table
        Columns ``model, gpus, cpu_threads, throughput_samples_per_s``, of one plan family or the
        best of several.
    source
        Name of the throughput source.

    Returns
    -------
    matplotlib.figure.Figure
        Logarithmic panels with one line for each number of GPUs.
    """
    require_columns(
        table, "model", "gpus", "cpu_threads", "throughput_samples_per_s", figure="sensitivity_cpu"
    )
    models = model_order(table["model"])
    counts = sorted(set(table["gpus"]))
    colours = dict(zip(counts, PALETTE.values(), strict=False))
    figure, panels = panel_grid(len(models), 1.55)
    for axes, model in zip(panels, models, strict=False):
        for gpus in counts:
            part = table[(table["model"] == model) & (table["gpus"] == gpus)].sort_values("cpu_threads")
            axes.plot(
                part["cpu_threads"], part["throughput_samples_per_s"], color=colours.get(gpus, "grey"),
                marker="o", ms=2.6, mec="white", mew=0.2, lw=0.9,
            )  # fmt: skip
        _log2_x(axes, int(table["cpu_threads"].max()))
        _log_y(axes)
        axes.set_title(MODEL_TITLES.get(model, model))
    handles = [
        Line2D([], [], color=colours.get(gpus, "grey"), marker="o", ms=3, lw=1, label=_count(gpus))
        for gpus in counts
    ]
    panels[len(models)].legend(handles=handles, loc="center", labelspacing=0.4)
    figure.supxlabel("CPU threads a GPU", fontsize=7)
    figure.supylabel("offload throughput [samples/s]", fontsize=7)
    source_label(figure, source, strip=False)
    return figure
