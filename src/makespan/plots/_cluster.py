"""One simulation as a picture: GPUs by plan family over time, and who held which GPU when."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from makespan.plots._policy_style import policy_style
from makespan.plots._style import (
    FAMILY_COLOURS,
    PALETTE,
    TWO_COLUMNS_IN,
    family_order,
    new_figure,
    require_columns,
    source_label,
    styled,
)
from makespan.units import HOUR

__all__ = ["plot_allocation", "plot_gantt"]

_BINS = 600
_RESTART_COLOUR = "#C4C4C4"


@styled
def plot_allocation(table: pd.DataFrame, source: str, n_gpus: int) -> Figure:
    """Draw the GPUs that jobs hold over time, stacked by plan family, one panel a policy.

    Parameters
    ----------
    table
        ``time_s`` and one column a plan family with the GPUs that its plans hold from then on; for
        several panels also ``policy``. The mean of each of many equal spans of time is drawn.
    source
        Name of the throughput source.
    n_gpus
        GPUs of the cluster, drawn as a line.

    Returns
    -------
    matplotlib.figure.Figure
        Panels above each other with a common time axis.
    """
    require_columns(table, "time_s", figure="allocation")
    found = pd.Series([str(name) for name in table.columns if name not in ("time_s", "policy")], dtype=object)
    families = family_order(found)
    require_columns(table, "time_s", *(families or ["plan families"]), figure="allocation")
    panels = list(dict.fromkeys(table["policy"])) if "policy" in table.columns else [""]
    figure = new_figure(TWO_COLUMNS_IN, 0.55 + 1.35 * len(panels))
    axes_list = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, panel in zip(axes_list, panels, strict=True):
        rows = table[table["policy"] == panel] if panel else table
        _stack_families(axes, rows, families, n_gpus)
        axes.set_ylabel("GPUs held")
        axes.set_title(policy_style(panel).title, loc="left")
    axes_list[-1].set_xlabel("time since the first submission [h]")
    axes_list[-1].set_xlim(0, float(table["time_s"].max()) / HOUR)
    handles: list[Patch | Line2D] = [Patch(color=_colour(name), label=name) for name in families]
    handles.append(Line2D([], [], color=PALETTE["black"], lw=0.8, ls=(0, (4, 2)), label="all GPUs"))
    figure.legend(handles=handles, loc="outside upper center", ncols=min(len(handles), 5))
    source_label(figure, source, strip=False)
    return figure


def _colour(family: str) -> str:
    return FAMILY_COLOURS.get(family, PALETTE["grey"])


def _stack_families(axes: Axes, rows: pd.DataFrame, families: list[str], n_gpus: int) -> None:
    end_s = float(rows["time_s"].max())
    edges = np.linspace(0.0, end_s, _BINS + 1) if end_s > 0 else np.array([0.0, 1.0])
    base = np.zeros(len(edges) - 1)
    for family in families:
        held = rows[family].fillna(0.0).to_numpy(float)
        mean = _bin_means(rows["time_s"].to_numpy(float), held, edges)
        axes.stairs(base + mean, edges / HOUR, baseline=base, fill=True, color=_colour(family), lw=0)
        base = base + mean
    axes.axhline(n_gpus, color=PALETTE["black"], lw=0.8, ls=(0, (4, 2)))
    axes.set_ylim(0, 1.08 * max(n_gpus, float(base.max(initial=0.0))))


def _bin_means(times: np.ndarray, values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Average a step function, zero before its first time, over the spans between edges."""
    if not len(times):
        return np.zeros(len(edges) - 1)
    area = np.concatenate([[0.0], np.cumsum(values[:-1] * np.diff(times))])
    at = np.searchsorted(times, edges, side="right") - 1
    known = at >= 0
    integral = np.where(known, area[at] + values[at] * (edges - times[at]), 0.0)
    return np.asarray(np.diff(integral) / np.diff(edges))


@styled
def plot_gantt(table: pd.DataFrame, source: str) -> Figure:
    """Draw who held which GPU when: one line a GPU, one colour a plan family.

    Parameters
    ----------
    table
        Columns ``job_id, plan_family, node, gpu, start_s, ready_s, end_s`` as `job_spans` returns them.
    source
        Name of the throughput source.

    Returns
    -------
    matplotlib.figure.Figure
        One panel; restart delays are light grey, and lines separate the nodes.
    """
    require_columns(table, "plan_family", "node", "gpu", "start_s", "ready_s", "end_s", figure="gantt")
    nodes, width = range(int(table["node"].max()) + 1), int(table["gpu"].max()) + 1
    figure = new_figure(TWO_COLUMNS_IN, min(1.0 + 0.045 * width * len(nodes), 6.5))
    axes = figure.subplots()
    rows = table["node"].to_numpy() * width + table["gpu"].to_numpy()
    start, ready, end = (table[name].to_numpy(float) / HOUR for name in ("start_s", "ready_s", "end_s"))
    colours = np.array([_colour(family) for family in table["plan_family"]])
    _bars(axes, rows, start, ready, _RESTART_COLOUR)
    for family in family_order(table["plan_family"]):
        mine = (table["plan_family"] == family).to_numpy()
        _bars(axes, rows[mine], ready[mine], end[mine], str(colours[mine][0]))
    axes.set_yticks([(node + 0.5) * width for node in nodes], [f"node {node}" for node in nodes])
    axes.hlines([node * width for node in nodes[1:]], 0, float(end.max()), color="white", lw=1.2, zorder=3)
    axes.hlines([node * width for node in nodes[1:]], 0, float(end.max()), color="black", lw=0.4, zorder=4)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.set_ylim(width * len(nodes), 0)
    axes.set_xlim(0, float(end.max()))
    axes.set_xlabel("time since the first submission [h]")
    families = family_order(table["plan_family"])
    handles = [Patch(color=_colour(name), label=name) for name in families]
    handles.append(Patch(color=_RESTART_COLOUR, label="restarting"))
    figure.legend(handles=handles, loc="outside upper center", ncols=min(len(handles), 5))
    source_label(figure, source, strip=False)
    return figure


def _bars(axes: Axes, rows: np.ndarray, start: np.ndarray, end: np.ndarray, colour: str) -> None:
    """Draw horizontal bars one line high; many at once."""
    shown = end > start
    low, left, right = rows[shown].astype(float), start[shown], end[shown]
    corners = np.stack(
        [
            np.stack([left, low], axis=-1),
            np.stack([right, low], axis=-1),
            np.stack([right, low + 0.92], axis=-1),
            np.stack([left, low + 0.92], axis=-1),
        ],
        axis=1,
    )
    bars = PolyCollection(list(corners), facecolors=colour, edgecolors="white", linewidths=0.1, zorder=2)
    axes.add_collection(bars)
