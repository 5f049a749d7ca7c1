"""One simulation as a picture: GPUs by plan family over time, and who held which GPU when."""

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from makespan.plots._marks import limit, limit_handle
from makespan.plots._style import (
    FAMILIES,
    TWO_COLUMNS_IN,
    finished,
    look_of,
    new_figure,
    ordered,
    patches,
    require_columns,
    styled,
)
from makespan.units import HOUR

__all__ = ["job_spans", "plot_allocation", "plot_gantt"]

_BINS = 600
_RESTART_COLOUR = "#C4C4C4"
_HELD = {"started", "reconfigured", "sharing"}
_LOST = {"suspended", "interrupted", "finished"}
_SPAN_COLUMNS = ["job_id", "plan_family", "node", "gpu", "start_s", "ready_s", "end_s"]
_TRACKED = [*sorted(_HELD), *sorted(_LOST), "ready"]
_TIME_LABEL = "time since the first submission [h]"


@styled
def plot_allocation(table: pd.DataFrame, source: str, n_gpus: int, titles: dict[str, str]) -> Figure:
    """Draw the GPUs that jobs hold over time, stacked by plan family, one panel a policy.

    Parameters
    ----------
    table
        ``time_s`` and one column a plan family with the GPUs that its plans hold from then on; for
        several panels also ``policy``. The mean of each of many equal spans of time is drawn.
    n_gpus
        GPUs of the cluster, drawn as a line.
    """
    families = ordered((str(name) for name in table.columns if name not in ("time_s", "policy")), FAMILIES)
    require_columns(table, "time_s", *(families or ["plan families"]), figure="allocation")
    panels = list(dict.fromkeys(table["policy"])) if "policy" in table.columns else [""]
    figure = new_figure(TWO_COLUMNS_IN, 0.55 + 1.35 * len(panels))
    axes_list = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, panel in zip(axes_list, panels, strict=True):
        _stack_families(axes, table[table["policy"] == panel] if panel else table, families, n_gpus)
        axes.set_ylabel("GPUs held")
        axes.set_title(titles.get(panel, panel), loc="left")
    axes_list[-1].set_xlabel(_TIME_LABEL)
    axes_list[-1].set_xlim(0, float(table["time_s"].max()) / HOUR)
    handles = [*patches(families, FAMILIES), limit_handle("all GPUs")]
    return finished(figure, source, handles, strip=False, ncols=min(len(handles), 5))


def _stack_families(axes: Axes, rows: pd.DataFrame, families: list[str], n_gpus: int) -> None:
    end_s = float(rows["time_s"].max())
    edges = np.linspace(0.0, end_s, _BINS + 1) if end_s > 0 else np.array([0.0, 1.0])
    base = np.zeros(len(edges) - 1)
    for family in families:
        held = rows[family].fillna(0.0).to_numpy(float)
        mean = _bin_means(rows["time_s"].to_numpy(float), held, edges)
        colour = look_of(FAMILIES, family).colour
        axes.stairs(base + mean, edges / HOUR, baseline=base, fill=True, color=colour, lw=0)
        base = base + mean
    limit(axes, n_gpus, zorder=3)
    axes.set_ylim(0, 1.08 * max(n_gpus, float(base.max(initial=0.0))))


def _bin_means(times: np.ndarray, values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Average a step function, zero before its first time, over the spans between edges."""
    if not len(times):
        return np.zeros(len(edges) - 1)
    area = np.concatenate([[0.0], np.cumsum(values[:-1] * np.diff(times))])
    at = np.searchsorted(times, edges, side="right") - 1
    integral = np.where(at >= 0, area[at] + values[at] * (edges - times[at]), 0.0)
    return np.asarray(np.diff(integral) / np.diff(edges))


@styled
def plot_gantt(table: pd.DataFrame, source: str) -> Figure:
    """Draw who held which GPU when, as `job_spans` returns it: one line a GPU, one colour a plan family.

    Restart delays are light grey, and lines separate the nodes.
    """
    require_columns(table, "plan_family", "node", "gpu", "start_s", "ready_s", "end_s", figure="gantt")
    nodes, width = range(int(table["node"].max()) + 1), int(table["gpu"].max()) + 1
    figure = new_figure(TWO_COLUMNS_IN, min(1.0 + 0.045 * width * len(nodes), 6.5))
    axes = figure.subplots()
    rows = table["node"].to_numpy() * width + table["gpu"].to_numpy()
    start, ready, end = (table[name].to_numpy(float) / HOUR for name in ("start_s", "ready_s", "end_s"))
    families = ordered(table["plan_family"], FAMILIES)
    _bars(axes, rows, start, ready, _RESTART_COLOUR)
    for family in families:
        mine = (table["plan_family"] == family).to_numpy()
        _bars(axes, rows[mine], ready[mine], end[mine], look_of(FAMILIES, family).colour)
    axes.set_yticks([(node + 0.5) * width for node in nodes], [f"node {node}" for node in nodes])
    axes.hlines([node * width for node in nodes[1:]], 0, float(end.max()), color="white", lw=1.2, zorder=3)
    axes.hlines([node * width for node in nodes[1:]], 0, float(end.max()), color="black", lw=0.4, zorder=4)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.set_ylim(width * len(nodes), 0)
    axes.set_xlim(0, float(end.max()))
    axes.set_xlabel(_TIME_LABEL)
    handles = [*patches(families, FAMILIES), Patch(color=_RESTART_COLOUR, label="restarting")]
    if len(nodes) > 1:
        handles.append(Line2D([], [], color="black", lw=0.4, label="border of nodes"))
    return finished(figure, source, handles, strip=False, ncols=min(len(handles), 5))


def _bars(axes: Axes, rows: np.ndarray, start: np.ndarray, end: np.ndarray, colour: str) -> None:
    """Draw horizontal bars one line high; many at once."""
    shown = end > start
    low, left, right = rows[shown].astype(float), start[shown], end[shown]
    edges = ((left, low), (right, low), (right, low + 0.92), (left, low + 0.92))
    corners = np.stack([np.stack(corner, axis=-1) for corner in edges], axis=1)
    bars = PolyCollection(list(corners), facecolors=colour, edgecolors="white", linewidths=0.1, zorder=2)
    axes.add_collection(bars)


def job_spans(events: pd.DataFrame) -> pd.DataFrame:
    """Return who held which GPU of which node, from when until when.

    The simulation allocates numbers of GPUs on nodes; which ones they are is chosen here, the
    lowest free ones first.

    Takes the events of a simulation. Returns ``job_id, plan_family, node, gpu, start_s, ready_s, end_s``:
    restarting until ``ready_s``, running afterwards. Guests, which hold no GPUs, are left out.
    """
    require_columns(events, "time_s", "seq", "kind", "job_id", "nodes", "family", figure="gantt")
    rows = events[events["kind"].isin(_TRACKED)].sort_values(["time_s", "seq"])
    spans: dict[str, _Span] = {}
    ready: set[str] = set()
    busy: dict[int, set[int]] = {}
    closed: list[tuple[object, ...]] = []
    for time, group in rows.groupby("time_s", sort=False):
        columns = (group[name].astype(str) for name in ("kind", "job_id", "nodes", "family"))
        records = list(zip(*columns, strict=True))
        for kind, job, _, _ in records:
            if kind == "ready":
                ready.add(job)
            elif kind != "sharing":
                ready.discard(job)
            if job in spans and kind == "ready":
                spans[job].ready_s = float(str(time))
            elif job in spans:
                closed += _close(spans.pop(job), float(str(time)), busy)
        for kind, job, nodes, family in records:
            if kind in _HELD:
                now_s = float(str(time))
                spans[job] = _Span(
                    job, family, now_s, _take(nodes, busy), now_s if job in ready else math.inf
                )
    for span in spans.values():
        closed += _close(span, float(rows["time_s"].max()), busy)
    table = pd.DataFrame(closed, columns=_SPAN_COLUMNS)
    return table.sort_values(["start_s", "node", "gpu"], ignore_index=True)


@dataclass(slots=True)
class _Span:
    """GPUs held by a job since its last change."""

    job_id: str
    family: str
    start_s: float
    gpus: list[tuple[int, int]]
    ready_s: float = math.inf


def _take(nodes: str, busy: dict[int, set[int]]) -> list[tuple[int, int]]:
    """Choose the lowest free GPUs of each node."""
    taken: list[tuple[int, int]] = []
    for part in nodes.split():
        node, count = (int(value) for value in part.split(":"))
        used = busy.setdefault(node, set())
        free = [gpu for gpu in range(len(used) + count) if gpu not in used][:count]
        used.update(free)
        taken += [(node, gpu) for gpu in free]
    return taken


def _close(span: _Span, end_s: float, busy: dict[int, set[int]]) -> list[tuple[object, ...]]:
    ready_s = min(span.ready_s, end_s)
    for node, gpu in span.gpus:
        busy[node].discard(gpu)
    return [(span.job_id, span.family, node, gpu, span.start_s, ready_s, end_s) for node, gpu in span.gpus]
