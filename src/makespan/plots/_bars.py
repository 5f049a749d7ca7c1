"""Bars: values of many policies with their ratios and published marks, and groups of bars side by side."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from makespan.plots._marks import published as published_marks
from makespan.plots._marks import published_handle, spread, spread_handle
from makespan.plots._style import (
    ONE_COLUMN_IN,
    PALETTE,
    POLICIES,
    TWO_COLUMNS_IN,
    Look,
    finished,
    look_of,
    new_figure,
    ordered,
    pale,
    require_columns,
    styled,
)
from makespan.units import HOUR

__all__ = ["plot_grouped_bars", "plot_ratio_bars"]

_ROW_HEIGHT_IN = 0.145
_BROKEN = 1.12  # where a broken bar ends, over the longest of the others
_ROOM = 1.05
_NUMBER_PT = 22.0  # between bars and names: room for the ratios
_MOST_BARS = 15  # of a panel that stands beside another one
_LONGEST = 3.0  # times the median: bars that are longer are broken, to leave the others room


@styled
def plot_ratio_bars(
    table: pd.DataFrame,
    source: str,
    metrics: Sequence[tuple[str, str, str]],
    note: str,
    looks: Mapping[str, Look] = POLICIES,
    titles: Mapping[str, str] | None = None,
    published: pd.DataFrame | None = None,
    published_label: str = "published",
) -> Figure:
    """Draw times of every policy on every trace as bars behind their ratios, one column of panels a trace.

    Ratios stand before the bars, where no published mark comes between a number and its bar. A bar of more
    than three times the median is broken and holds its length.

    Parameters
    ----------
    table
        One row a trace and policy: columns ``trace, policy`` and those that the metrics name.
    metrics
        One row of panels each: column of the time [s], column of the ratio, label.
    note, published_label
        What the numbers and the marks are, for the legend.
    published
        Reference marks: ``trace, policy`` and the columns of times; missing values are left out.
    """
    require_columns(table, "trace", "policy", *(name for one in metrics for name in one[:2]), figure="bars")
    traces, policies = list(dict.fromkeys(table["trace"])), ordered(table["policy"], looks)
    shown = None if published is None else published[published["policy"].isin(policies)]
    figure = new_figure(TWO_COLUMNS_IN, 0.75 + len(metrics) * (0.35 + _ROW_HEIGHT_IN * len(policies)))
    panels = figure.subplots(len(metrics), len(traces), squeeze=False, sharey=True)
    for column, trace in enumerate(traces):
        rows = table[table["trace"] == trace].set_index("policy")
        marks = None if shown is None else shown[shown["trace"] == trace]
        for axes, (value, ratio, label) in zip(panels[:, column], metrics, strict=True):
            _ratio_bars(axes, rows, policies, looks, value, ratio, marks)
            names = [look_of(looks, name).title for name in policies]
            axes.set_yticks(range(len(policies)), names)
            axes.tick_params(axis="y", length=0, pad=_NUMBER_PT)
            axes.set_xlabel(label)
        panels[0, column].set_title((titles or {}).get(str(trace), str(trace)))
    handles: list[Patch | Line2D] = [Patch(color=PALETTE["grey"], label=note)]
    if any(text.get_bbox_patch() for axes in panels.flat for text in axes.texts):
        handles.append(Patch(fc="white", ec=PALETTE["grey"], label="bar cut short, with its length"))
    if published is not None:
        handles.append(published_handle(published_label))
    return finished(figure, source, handles, ncols=3)


def _ratio_bars(
    axes: Axes,
    rows: pd.DataFrame,
    policies: list[str],
    looks: Mapping[str, Look],
    value: str,
    ratio: str,
    marks: pd.DataFrame | None,
) -> None:
    positions = [policies.index(str(name)) for name in rows.index]
    hours = rows[value].to_numpy(float) / HOUR
    colours = [pale(look_of(looks, str(name))) for name in rows.index]
    limit = float(hours[hours <= _LONGEST * np.median(hours)].max())
    ends = np.where(hours > limit, _BROKEN * limit, hours)
    axes.barh(positions, ends, 0.74, color=colours, lw=0, zorder=2)
    for y, length in zip(positions, hours, strict=True):
        if length > limit:
            gap: dict[str, Any] = {"bbox": {"fc": "white", "lw": 0, "pad": 1.4}, "ha": "center", "zorder": 3}
            axes.text(0.75 * limit, y, f"{length:.1f} h", va="center_baseline", **gap)
    for y, factor in zip(positions, rows[ratio].to_numpy(float), strict=True):
        if np.isfinite(factor):
            left: dict[str, Any] = {"ha": "right", "va": "center", "annotation_clip": False}
            place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
            axes.annotate(f"{factor:.2f}", (0.0, y), (-2.5, 0.0), **place, **left)
    furthest = [float(ends.max())]
    if marks is not None:
        at, shown = [policies.index(name) for name in marks["policy"]], marks[value].to_numpy(float) / HOUR
        published_marks(axes, shown, at)
        furthest += shown[np.isfinite(shown)].tolist()
    axes.set_ylim(len(policies) - 0.4, -0.6)
    axes.set_xlim(0, _ROOM * max(furthest))
    axes.grid(visible=False, axis="y")


@styled
def plot_grouped_bars(
    table: pd.DataFrame,
    source: str,
    series: Mapping[str, Look],
    label: str,
    titles: Mapping[str, str] | None = None,
    looks: Mapping[str, Look] = POLICIES,
    spread_label: str = "",
) -> Figure:
    """Draw groups of bars side by side, one bar a series, with values above them, one panel a ``panel``.

    Panels stand side by side, or one above the other where they have many bars.

    Parameters
    ----------
    table
        Columns ``panel, group, series, value``; combinations without a row have no bar. With ``text`` that
        stands above the bars instead of the values, with ``low, high`` bars have whiskers, NaN for none.
    series
        Looks of the series, in the order of the bars; in a panel that has a look, bars of black series have
        its colour in the strength of the series.
    label, spread_label
        What the values are, and what the whiskers are, for the legend.
    """
    require_columns(table, "panel", "group", "series", "value", figure="groups")
    names, groups = (list(dict.fromkeys(table[column])) for column in ("panel", "group"))
    shown = dict(titles or {})
    n_rows = len(names) if len(groups) * len(series) > _MOST_BARS else 1
    figure = new_figure(TWO_COLUMNS_IN if len(names) > 1 else ONE_COLUMN_IN, 2.3 * n_rows)
    panels = figure.subplots(n_rows, len(names) // n_rows, sharey=True, squeeze=False)
    for axes, name in zip(panels.flat, names, strict=True):
        panel = looks.get(name)
        own = {
            key: replace(panel, strength=look.strength) if panel and look.colour == PALETTE["black"] else look
            for key, look in series.items()
        }
        _bar_groups(axes, table[table["panel"] == name], groups, own)
        axes.set_xticks(range(len(groups)), [shown.get(group, group) for group in groups])
        axes.tick_params(axis="x", length=0)
        axes.grid(visible=False, axis="x")
        axes.margins(x=0.02, y=0.12)
        axes.set_title(shown.get(name, name))
    for axes in panels[:, 0]:
        axes.set_ylabel(label)
    handles: list[Patch | Line2D] = [
        Patch(fc=pale(look), ec=look.colour, lw=0.5, label=look.title) for look in series.values()
    ]
    if {"low", "high"} <= set(table.columns) and table[["low", "high"]].notna().all(axis=1).any():
        handles.append(spread_handle(spread_label))
    return finished(figure, source, handles, ncols=2 if len(names) == 1 else 4)


def _bar_groups(axes: Axes, rows: pd.DataFrame, groups: list[str], series: Mapping[str, Look]) -> None:
    width, keys = 0.88 / len(series), list(series)
    for row in rows.to_dict("records"):
        value, look = float(row["value"]), series[row["series"]]
        offset = (keys.index(row["series"]) - (len(keys) - 1) / 2) * width
        x = groups.index(row["group"]) + offset
        axes.bar(x, value, 0.92 * width, fc=pale(look), ec=look.colour, lw=0.5, zorder=2)
        low, high = (float(row.get(end, np.nan)) for end in ("low", "high"))
        spread(axes, x, low, high)
        end = np.nanmax([value, high])
        axes.text(x, end, str(row.get("text", f"{value:.2f}")), ha="center", va="bottom")
