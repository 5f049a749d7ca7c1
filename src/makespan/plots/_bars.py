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
_ROOM = 1.25  # for the numbers behind the bars
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
    """Draw times of every policy on every trace as bars that end in a ratio, one column of panels a trace.

    A bar of more than three times the median is broken and holds its length.

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
            axes.set_yticks(range(len(policies)), [look_of(looks, name).title for name in policies])
            _published_marks(axes, marks, policies, value)
            axes.set_xlabel(label)
        panels[0, column].set_title((titles or {}).get(str(trace), str(trace)))
    handles: list[Patch | Line2D] = [Patch(color=PALETTE["grey"], label=note)]
    if any(text.get_bbox_patch() for axes in panels.flat for text in axes.texts):
        handles.append(Patch(fc="white", ec=PALETTE["grey"], label="bar cut short, with its length"))
    if published is not None:
        mark: dict[str, Any] = {"ls": "none", "marker": "|", "ms": 7, "mew": 1.6, "color": PALETTE["black"]}
        handles.append(Line2D([], [], label=published_label, **mark))
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
    beyond = {} if marks is None else (marks.groupby("policy")[value].max() / HOUR).to_dict()
    for y, x, factor in zip(positions, ends, rows[ratio].to_numpy(float), strict=True):
        text = f" {factor:.2f}" if np.isfinite(factor) else ""
        end = max(x, beyond.get(policies[y], x))  # so that a mark does not cross the number
        axes.text(end, y, text, va="center", ha="left", zorder=5)
    axes.set_ylim(len(policies) - 0.4, -0.6)
    axes.set_xlim(0, _ROOM * max([float(ends.max()), *beyond.values()]))
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")


def _published_marks(axes: Axes, marks: pd.DataFrame | None, policies: list[str], value: str) -> None:
    if marks is None:
        return
    for name, number in zip(marks["policy"], marks[value], strict=True):
        if np.isfinite(number):
            x, y = number / HOUR, policies.index(name)
            axes.vlines(x, y - 0.45, y + 0.45, color="white", lw=2.6, zorder=3)
            axes.vlines(x, y - 0.45, y + 0.45, color="black", lw=1.4, zorder=4)


@styled
def plot_grouped_bars(
    table: pd.DataFrame,
    source: str,
    series: Mapping[str, Look],
    label: str,
    titles: Mapping[str, str] | None = None,
    looks: Mapping[str, Look] = POLICIES,
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
    label
        What the values are.
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
    handles = [Patch(fc=pale(look), ec=look.colour, lw=0.5, label=look.title) for look in series.values()]
    return finished(figure, source, handles, ncols=2 if len(names) == 1 else 4)


def _bar_groups(axes: Axes, rows: pd.DataFrame, groups: list[str], series: Mapping[str, Look]) -> None:
    width, keys = 0.88 / len(series), list(series)
    for row in rows.to_dict("records"):
        value, look = float(row["value"]), series[row["series"]]
        offset = (keys.index(row["series"]) - (len(keys) - 1) / 2) * width
        x = groups.index(row["group"]) + offset
        axes.bar(x, value, 0.92 * width, fc=pale(look), ec=look.colour, lw=0.5, zorder=2)
        low, high = (float(row.get(end, np.nan)) for end in ("low", "high"))
        if np.isfinite(low + high):
            axes.vlines(x, low, high, color=PALETTE["black"], lw=0.8, zorder=3)
        end = np.nanmax([value, high])
        axes.text(x, end, str(row.get("text", f"{value:.2f}")), ha="center", va="bottom")
