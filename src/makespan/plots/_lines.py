"""Lines of policies: means with confidence bands, costs on logarithmic axes, distributions."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator

from makespan.confidence import half_widths
from makespan.plots._marks import beyond, beyond_handle, reference, reference_handle, spread, spread_handle
from makespan.plots._style import (
    ONE_COLUMN_IN,
    PALETTE,
    POLICIES,
    TWO_COLUMNS_IN,
    Look,
    finished,
    look_of,
    name_coincident,
    new_figure,
    ordered,
    plain_numbers,
    require_columns,
    styled,
)
from makespan.units import HOUR

__all__ = ["plot_bands", "plot_cdf", "plot_costs", "plot_intervals", "plot_variants"]

_MARGIN = 1.25
_PANELS_IN_ROW, _LINE_IN = 4, 0.15
_VARIANTS_IN_ROW, _MOST_RATIO, _WIDE_RATIO = 3, 4.0, 2.0
_COARSE_RANGE, _COARSE_IN_ROW = (
    12.0,
    6.0,
)  # from where on few ticks have room, and in one panel of a row of four
_LEGEND_COLUMNS = 6
_TOGETHER = 3  # policies whose bands can be told apart in one panel
_CONTEXT = "#C4C4C4"
_LETTER_PT = 4.5  # of a number at a tick
_TIMES = (("avg_jct_s", "average JCT [h]"), ("makespan_s", "makespan [h]"))

Floats = npt.NDArray[np.float64]


@styled
def plot_bands(
    table: pd.DataFrame, source: str, parameter: str, label: str, looks: Mapping[str, Look] = POLICIES
) -> Figure:
    """Draw average JCT and makespan against a parameter: geometric means over seeds with 95 % confidence.

    Three policies at most share a panel, where the means of the others are light grey.

    Parameters
    ----------
    table
        One row a simulation: ``policy, seed, avg_jct_s, makespan_s`` and the parameter.
    parameter, label
        Column of the parameter, and what it is.
    """
    require_columns(table, "policy", parameter, "seed", "avg_jct_s", "makespan_s", figure="bands")
    policies = ordered(table["policy"], looks)
    groups = np.array_split(policies, math.ceil(len(policies) / _TOGETHER))
    single = len(groups) == 1
    figure = new_figure(TWO_COLUMNS_IN, 2.8 if single else 4.3)
    panels = figure.subplots(*((1, 2) if single else (2, len(groups))), squeeze=False)
    panels = panels.T if single else panels
    for number, group in enumerate(groups):
        for axes, (column, title) in zip(panels[:, number], _TIMES, strict=True):
            _draw_bands(axes, table.assign(x=table[parameter], hours=table[column] / HOUR), set(group), looks)
            _parameter_ticks(axes, np.unique(table[parameter].to_numpy(float)), panels.size // 2)
            axes.set_ylabel("" if number else title)
            axes.tick_params(axis="y", labelleft=not number)
    n_seeds = int(table.groupby(["policy", parameter])["seed"].nunique().max())
    heading = [f"geometric mean and 95 % confidence band over {n_seeds} seeds"] if n_seeds > 1 else []
    heading += [] if single else ["light grey: the means of the other policies"]
    heading += ["bands end where the panel does"] if any(map(_is_cut, panels.flat)) else []
    figure.suptitle("; ".join(heading))
    figure.supxlabel(label)
    finished(figure, source, strip=False)
    name_coincident(figure)
    for axes, group in zip(panels[0], groups, strict=True):
        _legend_above(axes, _handles(group, looks))
    return figure


def _draw_bands(axes: Axes, table: pd.DataFrame, shown: set[str], looks: Mapping[str, Look]) -> None:
    for policy in ordered(table["policy"], looks):
        rows = table[table["policy"] == policy]
        groups = np.log(rows["hours"]).groupby(rows["x"])
        if policy in shown:
            _band(axes, groups, look_of(looks, policy))
        else:
            axes.plot(groups.mean().index, np.exp(groups.mean()), color=_CONTEXT, lw=0.7, zorder=1)
    _log_hours(axes)


def _parameter_ticks(axes: Axes, points: Floats, n_columns: int) -> None:
    """Put a tick at every point, with its number where there is room."""
    scale = 0.75 * 72 * TWO_COLUMNS_IN / n_columns / max(float(np.ptp(points)), 1e-9)
    end, labels = -math.inf, []
    for point in points:
        half = _LETTER_PT * len(f"{point:g}") / 2
        fits = scale * point - half > end
        labels.append(f"{point:g}" if fits else "")
        end = scale * point + half if fits else end
    axes.set_xticks(points, labels)


def _legend_above(axes: Axes, handles: list[Line2D]) -> None:
    """Put a legend above a panel and what is written there."""
    title = axes.title.get_window_extent()
    above = axes.transAxes.inverted().transform((0.0, title.y1))[1] if axes.get_title() else 1.0
    axes.legend(handles=handles, loc="lower center", bbox_to_anchor=(0.5, above), labelspacing=0.3)


def _handles(policies: Iterable[str], looks: Mapping[str, Look], with_marker: bool = True) -> list[Line2D]:
    def line(look: Look) -> Line2D:
        marker = look.marker if with_marker else ""
        return Line2D([], [], color=look.colour, ls=look.line, marker=marker, label=look.title)

    return [line(look_of(looks, name)) for name in ordered(policies, looks)]


def _band(axes: Axes, groups: "pd.api.typing.SeriesGroupBy[float, float]", look: Look) -> None:
    """Draw means and band of one policy; in logarithms, because times are positive and skewed."""
    x, mean = groups.mean().index.to_numpy(float), groups.mean().to_numpy(float)
    half = np.nan_to_num(half_widths(groups))
    mark: dict[str, Any] = {"marker": look.marker, "ms": 3, "label": look.title}
    axes.plot(x, np.exp(mean), color=look.colour, ls=look.line, zorder=3, **mark)
    if half.any():
        low, high = np.exp(mean - half), np.exp(mean + half)
        axes.fill_between(x, low, high, fc=(look.colour, 0.16), ec=(look.colour, 0.6), lw=0.5, zorder=2)


def _is_cut(axes: Axes) -> bool:
    """Tell whether a band goes on beyond its panel, which holds all lines but not all of wide bands."""
    low, high = axes.get_ylim()
    ends = [np.asarray(path.vertices)[:, 1] for band in axes.collections for path in band.get_paths()]
    return any(bool((end < low).any() or (end > high).any()) for end in ends)


def _log_hours(axes: Axes) -> None:
    """Use a logarithmic axis that holds all lines, if not all of wide bands, with plain numbers."""
    values = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in axes.lines])
    low, high = float(values.min()) / _MARGIN, float(values.max()) * _MARGIN
    axes.set_yscale("log")
    _log_ticks(axes.yaxis, low, high)
    axes.set_ylim(low, high)


def _log_ticks(
    axis: Axis,
    low: float,
    high: float,
    fine: Sequence[float] = (1, 1.5, 2, 3, 4, 5, 6, 8),
    coarse_range: float = _COARSE_RANGE,
) -> None:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if high / low > coarse_range else fine
    axis.set_major_locator(FixedLocator([step * 10.0**decade for decade in decades for step in steps]))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(plain_numbers())


@styled
def plot_intervals(
    table: pd.DataFrame,
    source: str,
    heading: str,
    hollow: str,
    spread_label: str,
    looks: Mapping[str, Look] = POLICIES,
) -> Figure:
    """Draw a mean with its interval for every policy, one panel a ``panel``, four in a row.

    Panels hold all means; an interval that goes on beyond a panel ends in an arrow with the value of its end.

    Parameters
    ----------
    table
        Columns ``panel, policy, mean, low, high`` [s] and ``is_hollow``; missing ends have no interval.
    heading, hollow, spread_label
        What the means are, what a hollow mark says, and what the intervals are, for the legend.
    """
    columns = ("panel", "policy", "mean", "low", "high", "is_hollow")
    require_columns(table, *columns, figure="intervals")
    names, policies = list(dict.fromkeys(table["panel"])), ordered(table["policy"], looks)
    n_columns = min(len(names), _PANELS_IN_ROW)
    n_rows = math.ceil(len(names) / n_columns)
    figure = new_figure(TWO_COLUMNS_IN, 0.6 + n_rows * (0.6 + _LINE_IN * len(policies)))
    panels = figure.subplots(n_rows, n_columns, squeeze=False, sharey=True)
    is_beyond = []
    for axes, name in zip(panels.flat, names, strict=False):
        is_beyond.append(_intervals(axes, table[table["panel"] == name], policies, looks))
        axes.set_yticks(range(len(policies)), [look_of(looks, one).title for one in policies])
        axes.set_title(name)
    for axes in panels.flat[len(names) :]:
        axes.remove()
    figure.supxlabel("time [h]")
    mark: dict[str, Any] = {"ls": "none", "marker": "o", "ms": 4, "color": PALETTE["grey"]}
    handles = [Line2D([], [], label=heading, **mark)]
    if table["is_hollow"].any():
        handles.append(Line2D([], [], label=hollow, mfc="white", **mark))
    if table[["low", "high"]].notna().all(axis=1).any():
        handles.append(spread_handle(spread_label, PALETTE["grey"]))
    if any(is_beyond):
        handles.append(beyond_handle())
    return finished(figure, source, handles, strip=False, ncols=2)


def _intervals(axes: Axes, rows: pd.DataFrame, policies: list[str], looks: Mapping[str, Look]) -> bool:
    """Draw one panel, and return whether something lies beyond it."""
    hours = rows[["mean", "low", "high"]].to_numpy(float) / HOUR
    for name, (mean, low, high), is_hollow in zip(rows["policy"], hours, rows["is_hollow"], strict=True):
        look, y = look_of(looks, str(name)), policies.index(str(name))
        spread(axes, y, low, high, look.colour, is_across=True)
        face = "white" if is_hollow else look.colour
        axes.plot([mean], [y], look.marker, color=look.colour, mfc=face, ms=5, mew=0.7, zorder=5)
    means, ends = hours[:, 0], np.where(np.isfinite(hours[:, 1:]), hours[:, 1:], hours[:, :1])
    least = float(max(min(means.min(), ends.min()), means.min() / 2)) / _MARGIN
    most = float(min(max(means.max(), ends.max()), means.max() * 2)) * _MARGIN
    axes.set_xscale("log")
    _log_ticks(axes.xaxis, least, most, (1, 1.5, 2, 3, 4, 6), _COARSE_IN_ROW)
    axes.set_xlim(least, most)
    axes.set_ylim(len(policies) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    spans = zip(rows["policy"], hours, strict=True)
    return _mark_beyond(
        axes,
        ((policies.index(str(name)), span, look_of(looks, str(name))) for name, span in spans),
        (least, most),
    )


def _mark_beyond(axes: Axes, spans: Iterable[tuple[int, Floats, Look]], limits: tuple[float, float]) -> bool:
    """Mark means, or else ends of intervals, beyond the limits of a panel; return whether there are any."""
    found = False
    for y, (mean, low, high), look in spans:
        is_inside = limits[0] <= mean <= limits[1]
        for value in (low, high) if is_inside else (mean,):
            found |= beyond(axes, y, value, limits, look.colour)
    return found


@styled
def plot_variants(
    table: pd.DataFrame, source: str, heading: str, reference_label: str, looks: Mapping[str, Look] = POLICIES
) -> Figure:
    """Draw how far every variant of a policy is from what it varies, one panel a policy, three in a row.

    Ratios of less than a quarter or more than four lie beyond the axis, and are written at its ends.

    Parameters
    ----------
    table
        Columns ``policy, variant, mean, low, high``, ratios to the policy; missing ends have no interval.
    heading, reference_label
        What the ratios are, and what a ratio of 1 is, for the legend.
    """
    require_columns(table, "policy", "variant", "mean", "low", "high", figure="variants")
    names = ordered(table["policy"], looks)
    n_columns = min(len(names), _VARIANTS_IN_ROW)
    rows = [names[k : k + n_columns] for k in range(0, len(names), n_columns)]
    heights = [
        table["policy"].isin(row).pipe(lambda own: table[own].groupby("policy").size().max()) for row in rows
    ]
    figure = new_figure(TWO_COLUMNS_IN, 0.5 + sum(0.4 + _LINE_IN * height for height in heights))
    grid = figure.add_gridspec(len(rows), n_columns, height_ratios=[height + 2 for height in heights])
    ends = table[["mean", "low", "high"]].clip(1 / _MOST_RATIO, _MOST_RATIO)
    limits = 0.97 * float(np.nanmin(ends.to_numpy(float))), 1.03 * float(np.nanmax(ends.to_numpy(float)))
    is_beyond = False
    for number, name in enumerate(names):
        axes = figure.add_subplot(grid[number // n_columns, number % n_columns])
        own, look = table[table["policy"] == name], look_of(looks, name)
        spans = own[["mean", "low", "high"]].to_numpy(float)
        for y, (mean, low, high) in enumerate(spans):
            spread(axes, y, low, high, look.colour, is_across=True)
            axes.plot([mean], [y], look.marker, color=look.colour, ms=3.5, zorder=5)
        axes.set_yticks(range(len(own)), own["variant"].tolist())
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(len(own) - 0.5, -0.5)
        reference(axes, [1.0, 1.0], [len(own) - 0.5, -0.5])
        if limits[1] > _WIDE_RATIO * limits[0]:
            axes.set_xscale("log")
            _log_ticks(axes.xaxis, *limits)
        axes.set_xlim(*limits)
        is_beyond |= _mark_beyond(axes, ((y, span, look) for y, span in enumerate(spans)), limits)
        axes.set_title(look.title)
    mark: dict[str, Any] = {"ls": "none", "marker": "o", "ms": 3.5, "color": PALETTE["grey"]}
    handles = [Line2D([], [], label="mean", **mark), reference_handle(reference_label)]
    if table[["low", "high"]].notna().all(axis=1).any():
        handles.insert(1, spread_handle("95 % interval", PALETTE["grey"]))
    if is_beyond:
        handles.append(beyond_handle())
    figure.supxlabel("ratio")
    return finished(figure, source, handles, strip=False, ncols=len(handles), title=heading)


@styled
def plot_costs(
    table: pd.DataFrame,
    source: str,
    metrics: Sequence[tuple[str, str, str, float, str]],
    heading: str,
    spread_label: str,
    looks: Mapping[str, Look] = POLICIES,
) -> Figure:
    """Draw what scheduling costs against the number of jobs, with the GPUs below it, on logarithmic axes.

    Lines with caps go from the smallest to the largest value that was measured.

    Parameters
    ----------
    table
        One row a simulation: ``policy, jobs, gpus`` and the columns of the metrics.
    metrics
        One panel each: columns of the median, smallest and largest value, factor to the unit shown, label.
    heading, spread_label
        What was repeated and how the values are shown; what the lines with caps are, for the legend.
    """
    require_columns(
        table, "policy", "jobs", "gpus", *(name for one in metrics for name in one[:3]), figure="costs"
    )
    figure = new_figure(TWO_COLUMNS_IN, 2.7)
    for axes, (*columns, unit, label) in zip(figure.subplots(1, len(metrics)), metrics, strict=True):
        for policy in ordered(table["policy"], looks):
            rows = table[table["policy"] == policy].sort_values("jobs")
            look = look_of(looks, policy)
            y, low, high = (unit * rows[column].to_numpy(float) for column in columns)
            style: dict[str, Any] = {"color": look.colour, "ls": look.line, "marker": look.marker, "ms": 3}
            axes.plot(rows["jobs"], y, label=look.title, **style)
            spread(axes, rows["jobs"], low, high, look.colour)
        axes.set(xscale="log", yscale="log", xlabel="jobs in the trace, GPUs of the cluster", ylabel=label)
        axes.yaxis.set_major_formatter(plain_numbers())
        _size_ticks(axes, table)
    handles = [*_handles(table["policy"], looks), spread_handle(spread_label, PALETTE["grey"])]
    finished(figure, source, handles, ncols=_LEGEND_COLUMNS, title=heading)
    name_coincident(figure)
    return figure


def _size_ticks(axes: Axes, table: pd.DataFrame) -> None:
    gpus = table.groupby("jobs")["gpus"].agg(lambda counts: ", ".join(f"{n:g}" for n in sorted(set(counts))))
    axes.xaxis.set_minor_locator(NullLocator())
    jobs = [float(str(count)) for count in gpus.index]
    axes.set_xticks(jobs, [f"{count:,.0f}\n{text}" for count, text in zip(jobs, gpus, strict=True)])
    axes.margins(x=0.08)


@styled
def plot_cdf(
    table: pd.DataFrame,
    source: str,
    looks: Mapping[str, Look] = POLICIES,
    titles: Mapping[str, str] | None = None,
) -> Figure:
    """Draw the share of jobs that completed within a time, one line a policy, one panel a trace.

    Parameters
    ----------
    table
        One row a job: columns ``policy, jct_s`` and, for several panels, ``trace``.
    """
    require_columns(table, "policy", "jct_s", figure="cdf")
    traces = list(dict.fromkeys(table["trace"])) if "trace" in table.columns else [""]
    single = len(traces) == 1
    figure = new_figure(ONE_COLUMN_IN * 1.35 if single else TWO_COLUMNS_IN, 2.9)
    panels = figure.subplots(1, len(traces), sharey=True, sharex=True, squeeze=False)[0]
    for axes, trace in zip(panels, traces, strict=True):
        rows = table[table["trace"] == trace] if trace else table
        for name in ordered(rows["policy"], looks):
            look = look_of(looks, name)
            times = np.sort(rows.loc[rows["policy"] == name, "jct_s"].to_numpy(float))
            share = np.arange(1, len(times) + 1) / len(times)
            style: dict[str, Any] = {"color": look.colour, "ls": look.line, "label": look.title}
            axes.step(times, share, where="post", lw=1.0, **style)
        axes.set_xscale("log")
        axes.set_title((titles or {}).get(str(trace), str(trace)))
        axes.set_xlabel("job completion time [s]")
    panels[0].set_ylabel("share of jobs completed [%]")
    panels[0].yaxis.set_major_formatter(lambda share, _: f"{100 * share:g}")
    panels[0].set_ylim(0, 1.01)
    handles = _handles(table["policy"], looks, with_marker=False)
    if single:
        finished(figure, source, handles, strip=False, loc="outside right center")
    else:
        finished(figure, source, handles, ncols=_LEGEND_COLUMNS)
    name_coincident(figure)
    return figure
