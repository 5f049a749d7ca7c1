"""Interactive charts: from the table behind a figure to the traces of a plotly chart."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from makespan.errors import TraceError
from makespan.papers.experiment import Explore
from makespan.plots import FAMILIES, PALETTE, POLICIES

_COLOURS = [
    PALETTE[name] for name in ("blue", "vermilion", "green", "purple", "orange", "sky", "brown", "grey")
]
_DIGITS = 5


def interactive(explore: Explore, table: pd.DataFrame, where: str) -> list[dict[str, Any]]:
    """Return the charts of a figure, one per panel: its name and plotly's ``data`` and ``layout``.

    Numbers are rounded to five significant digits.

    Raises
    ------
    TraceError
        The table, called ``where`` in the message, lacks a column that the chart needs.
    """
    named = {*explore.x, *explore.y, *explore.by, *explore.panels}
    if missing := sorted(named - set(table.columns)):
        raise TraceError(f"{where}: an interactive chart needs column(s) {', '.join(missing)}")
    charts = []
    for panel, rows in _groups(table, explore.panels):
        traces = _spans(explore, rows) if explore.kind == "spans" else _series(explore, rows)
        layout: dict[str, Any] = {
            "xaxis": {"title": {"text": explore.unit_x}, "rangemode": "tozero"},
            "yaxis": {"title": {"text": explore.unit_y}},
        }
        if explore.kind == "spans":
            layout |= {"barmode": "overlay", "bargap": 0.05}
            # One row per GPU would leave no room for its name: name the first of each node.
            names = list(dict.fromkeys(name for trace in traces for name in trace["y"]))
            names.sort(key=lambda name: [int(part) for part in name.split(".")])
            first = {name.split(".")[0]: name for name in reversed(names)}
            layout["yaxis"] |= {
                "type": "category",
                "categoryorder": "array",
                "categoryarray": names[::-1],
                "tickvals": list(first.values()),
                "ticktext": [f"{explore.y[0]} {name}" for name in first],
            }
        else:
            layout["yaxis"]["rangemode"] = "tozero" if explore.kind != "lines" else "normal"
        charts.append({"name": panel, "data": traces, "layout": layout})
    return charts


def _groups(table: pd.DataFrame, columns: Sequence[str]) -> Iterator[tuple[str, pd.DataFrame]]:
    """Split a table by the values of columns, in the order in which they appear."""
    if not columns:
        yield "", table
        return
    for key, rows in table.groupby(list(columns), sort=False):
        yield ", ".join(map(str, key)), rows


def _series(explore: Explore, rows: pd.DataFrame) -> list[dict[str, Any]]:
    x = explore.x[0]
    values = explore.y or [
        str(name) for name in rows.columns if name not in {x, *explore.by, *explore.panels}
    ]
    traces: list[dict[str, Any]] = []
    for name, own in _groups(rows, explore.by):
        if explore.kind == "shares":
            ordered = np.sort(pd.to_numeric(own[x]).dropna().to_numpy(float))
            shares = np.arange(1, len(ordered) + 1) / len(ordered)
            traces.append({"name": name, "x": _rounded(ordered), "y": _rounded(shares)})
            continue
        for column in values:
            shown = own[own[column].notna()]
            labels = [part for part in (name, column if len(values) > 1 or not name else "") if part]
            traces.append(
                {
                    "name": ", ".join(labels),
                    "x": _rounded(pd.to_numeric(shown[x])),
                    "y": _rounded(pd.to_numeric(shown[column])),
                }
            )
    for number, trace in enumerate(traces):
        colour = _colour(trace["name"], number)
        line: dict[str, Any] = {"color": colour, "width": 1.8}
        if explore.kind != "lines":
            line["shape"] = "hv"
        trace |= {"type": "scatter", "mode": "lines", "line": line}
        if explore.kind == "areas":
            trace |= {"stackgroup": "all", "fillcolor": colour, "line": line | {"width": 0}}
    return traces


def _spans(explore: Explore, rows: pd.DataFrame) -> list[dict[str, Any]]:
    start, *middle, end = explore.x
    others = [str(name) for name in rows.columns if name not in {*explore.x, *explore.y, *explore.by}]
    traces: list[dict[str, Any]] = []
    places = rows[list(explore.y)].astype(str).agg(".".join, axis=1)
    texts = rows[others].astype(str).agg(", ".join, axis=1) if others else pd.Series("", rows.index)
    common = {"type": "bar", "orientation": "h", "marker": {"line": {"width": 0}}}
    for number, (name, own) in enumerate(_groups(rows, explore.by)):
        begins = pd.to_numeric(own[middle[-1]] if middle else own[start]).clip(upper=pd.to_numeric(own[end]))
        traces.append(
            common
            | {
                "name": name,
                "marker": {"color": _colour(name, number), "line": {"width": 0}},
                "y": places[own.index].tolist(),
                "base": _rounded(begins),
                "x": _rounded(pd.to_numeric(own[end]) - begins),
                "text": texts[own.index].tolist(),
                "textposition": "none",
            }
        )
    if middle:
        starts = pd.to_numeric(rows[start])
        ready = pd.to_numeric(rows[middle[-1]]).clip(upper=pd.to_numeric(rows[end]))
        traces.append(
            common
            | {
                "name": f"until {middle[-1]}",
                "marker": {"color": "#c8c8c8", "line": {"width": 0}},
                "y": places.tolist(),
                "base": _rounded(starts),
                "x": _rounded(ready - starts),
                "text": texts.tolist(),
                "textposition": "none",
            }
        )
    return traces


def _colour(name: str, number: int) -> str:
    styles: Mapping[str, Any] = FAMILIES | POLICIES
    return str(styles[name].colour) if name in styles else _COLOURS[number % len(_COLOURS)]


def _rounded(values: Any) -> list[float]:
    return [float(f"{value:.{_DIGITS}g}") for value in np.asarray(values, dtype=float)]
