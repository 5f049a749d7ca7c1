"""Charts: lines of policies, bars, figures of the performance model, and pictures of one simulation."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from makespan.numerics import half_widths
from makespan.plots.parts import line_handle, name_groups
from makespan.plots.style import (
    FAMILIES,
    MODEL_TITLES,
    ONE_COLUMN_IN,
    PALETTE,
    POLICIES,
    TWO_COLUMNS_IN,
    Style,
    add_legend,
    beyond,
    beyond_handle,
    figure_style,
    in_order,
    limit,
    limit_handle,
    model_panels,
    name_coincident,
    new_figure,
    pale,
    patches,
    plain_numbers,
    published as published_marks,
    published_handle,
    reference,
    reference_handle,
    require_columns,
    spread,
    spread_handle,
    style_of,
)
from makespan.units import HOUR

# --- Lines of policies ------------------------------------------------------------------------------

_MARGIN = 1.25
_PANELS_IN_ROW, _LINE_IN = 4, 0.15
_VARIANTS_IN_ROW, _MOST_RATIO, _WIDE_RATIO = 3, 4.0, 2.0
_LEAST_VARIANTS = 3  # that a panel has room for: in a lower one the line of the reference is not seen
_COARSE_RANGE = 12.0  # from which on there is room for few ticks only
_COARSE_IN_ROW = 6.0  # the same in one panel of a row of four
_LEGEND_COLUMNS = 6
_TOGETHER = 3  # policies whose bands can be distinguished in one panel
_CONTEXT = "#C4C4C4"
_LETTER_PT = 4.5  # width of a digit at a tick
_TIMES = (("avg_jct_s", "average JCT [h]"), ("makespan_s", "makespan [h]"))
Floats = npt.NDArray[np.float64]


@figure_style
def plot_bands(
    table: pd.DataFrame, source: str, parameter: str, label: str, styles: Mapping[str, Style] = POLICIES
) -> Figure:
    """Draw average JCT and makespan against a parameter: geometric means over seeds with 95 % confidence.

    At most three policies share a panel, in which the means of the others are light grey.

    Parameters
    ----------
    table
        One row per simulation: ``policy, seed, avg_jct_s, makespan_s`` and the parameter.
    parameter, label
        Column of the parameter, and its description.
    """
    require_columns(table, "policy", parameter, "seed", "avg_jct_s", "makespan_s", figure="bands")
    policies = in_order(table["policy"], styles)
    groups = np.array_split(policies, math.ceil(len(policies) / _TOGETHER))
    single = len(groups) == 1
    figure = new_figure(TWO_COLUMNS_IN, 2.8 if single else 4.3)
    panels = figure.subplots(*((1, 2) if single else (2, len(groups))), squeeze=False)
    panels = panels.T if single else panels
    for number, group in enumerate(groups):
        for axes, (column, title) in zip(panels[:, number], _TIMES, strict=True):
            _draw_bands(
                axes, table.assign(x=table[parameter], hours=table[column] / HOUR), set(group), styles
            )
            # A tick at every point, with its number if there is room.
            points = np.unique(table[parameter].to_numpy(float))
            scale = 0.75 * 72 * TWO_COLUMNS_IN / (panels.size // 2) / max(float(np.ptp(points)), 1e-9)
            end, labels = -math.inf, []
            for point in points:
                half = _LETTER_PT * len(f"{point:g}") / 2
                fits = scale * point - half > end
                labels.append(f"{point:g}" if fits else "")
                end = scale * point + half if fits else end
            axes.set_xticks(points, labels)
            axes.set_ylabel("" if number else title)
            axes.tick_params(axis="y", labelleft=not number)
    n_seeds = int(table.groupby(["policy", parameter])["seed"].nunique().max())
    heading = [f"geometric mean and 95 % confidence band over {n_seeds} seeds"] if n_seeds > 1 else []
    heading += [] if single else ["light grey: the means of the other policies"]
    heading += ["bands end where the panel does"] if any(map(_is_cut, panels.flat)) else []
    figure.suptitle("; ".join(heading))
    figure.supxlabel(label)
    add_legend(figure, source, strip=False)
    name_coincident(figure)
    for axes, group in zip(panels[0], groups, strict=True):
        # Above the panel and its title, whose height is known only now.
        top = axes.title.get_window_extent().y1
        above = axes.transAxes.inverted().transform((0.0, top))[1] if axes.get_title() else 1.0
        handles, corner = _handles(group, styles), (0.5, above)
        axes.legend(handles=handles, loc="lower center", bbox_to_anchor=corner, labelspacing=0.3)
    return figure


def _draw_bands(axes: Axes, table: pd.DataFrame, shown: set[str], styles: Mapping[str, Style]) -> None:
    """Draw the ``shown`` policies over ``x``, means with bands, and the means of the others in grey."""
    for policy in in_order(table["policy"], styles):
        rows, style = table[table["policy"] == policy], style_of(styles, policy)
        groups = np.log(rows["hours"]).groupby(rows["x"])  # in logarithms: times are positive and skewed
        if policy not in shown:
            axes.plot(groups.mean().index, np.exp(groups.mean()), color=_CONTEXT, lw=0.7, zorder=1)
            continue
        x, mean = groups.mean().index.to_numpy(float), groups.mean().to_numpy(float)
        half = np.nan_to_num(half_widths(groups))
        mark: dict[str, Any] = {"marker": style.marker, "ms": 3, "label": style.title}
        axes.plot(x, np.exp(mean), color=style.colour, ls=style.line, zorder=3, **mark)
        if half.any():
            low, high = np.exp(mean - half), np.exp(mean + half)
            axes.fill_between(x, low, high, fc=(style.colour, 0.16), ec=(style.colour, 0.6), lw=0.5, zorder=2)
    # The axis holds all lines, but not all of wide bands.
    values = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in axes.lines])
    least, most = float(values.min()) / _MARGIN, float(values.max()) * _MARGIN
    axes.set_yscale("log")
    log_ticks(axes.yaxis, least, most)
    axes.set_ylim(least, most)


def _handles(policies: Iterable[str], styles: Mapping[str, Style], **more: Any) -> list[Line2D]:
    """Return the legend entries of policies in order; ``more`` are options of `line_handle`."""
    return [line_handle(style_of(styles, name), **more) for name in in_order(policies, styles)]


def _is_cut(axes: Axes) -> bool:
    """Return True if a band extends beyond its panel, which holds all lines but not all of wide bands."""
    low, high = axes.get_ylim()
    ends = [np.asarray(path.vertices)[:, 1] for band in axes.collections for path in band.get_paths()]
    return any(bool((end < low).any() or (end > high).any()) for end in ends)


def log_ticks(
    axis: Axis,
    low: float,
    high: float,
    fine: Sequence[float] = (1, 1.5, 2, 3, 4, 5, 6, 8),
    coarse_range: float = _COARSE_RANGE,
) -> None:
    """Put ticks with plain numbers on a logarithmic axis between two positive values.

    They are ``fine`` multiples of powers of ten, or 1, 2 and 5 times these where the values are further apart
    than ``coarse_range``.
    """
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if high / low > coarse_range else fine
    axis.set_major_locator(FixedLocator([step * 10.0**decade for decade in decades for step in steps]))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(plain_numbers())


@figure_style
def plot_intervals(
    table: pd.DataFrame,
    source: str,
    heading: str,
    hollow: str,
    spread_label: str,
    styles: Mapping[str, Style] = POLICIES,
) -> Figure:
    """Draw a mean with its interval for every policy, one panel per ``panel``, four in a row.

    Panels hold all means; an interval that extends beyond a panel ends in an arrow with the value of its end.

    Parameters
    ----------
    table
        Columns ``panel, policy, mean, low, high`` [s] and ``is_hollow``; missing ends have no interval.
    heading, hollow, spread_label
        Legend texts of the means, of hollow marks and of the intervals.
    """
    columns = ("panel", "policy", "mean", "low", "high", "is_hollow")
    require_columns(table, *columns, figure="intervals")
    names, policies = list(dict.fromkeys(table["panel"])), in_order(table["policy"], styles)
    n_columns = min(len(names), _PANELS_IN_ROW)
    n_rows = math.ceil(len(names) / n_columns)
    figure = new_figure(TWO_COLUMNS_IN, 0.6 + n_rows * (0.6 + _LINE_IN * len(policies)))
    panels = figure.subplots(n_rows, n_columns, squeeze=False, sharey=True)
    is_beyond = []
    for axes, name in zip(panels.flat, names, strict=False):
        is_beyond.append(_intervals(axes, table[table["panel"] == name], policies, styles))
        axes.set_yticks(range(len(policies)), [style_of(styles, policy).title for policy in policies])
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
    return add_legend(figure, source, handles, strip=False, ncols=2)


def _intervals(axes: Axes, rows: pd.DataFrame, policies: list[str], styles: Mapping[str, Style]) -> bool:
    """Draw one panel, and return True if a value lies beyond it."""
    hours = rows[["mean", "low", "high"]].to_numpy(float) / HOUR
    for name, (mean, low, high), is_hollow in zip(rows["policy"], hours, rows["is_hollow"], strict=True):
        style, y = style_of(styles, str(name)), policies.index(str(name))
        spread(axes, y, low, high, style.colour, is_across=True)
        face = "white" if is_hollow else style.colour
        axes.plot([mean], [y], style.marker, color=style.colour, mfc=face, ms=5, mew=0.7, zorder=5)
    # All intervals, but no more than a factor of two beyond the means.
    means, ends = hours[:, 0], np.where(np.isfinite(hours[:, 1:]), hours[:, 1:], hours[:, :1])
    least = float(max(min(means.min(), ends.min()), means.min() / 2)) / _MARGIN
    most = float(min(max(means.max(), ends.max()), means.max() * 2)) * _MARGIN
    axes.set_xscale("log")
    log_ticks(axes.xaxis, least, most, (1, 1.5, 2, 3, 4, 6), _COARSE_IN_ROW)
    axes.set_xlim(least, most)
    axes.set_ylim(len(policies) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    spans = zip(rows["policy"], hours, strict=True)
    return _mark_beyond(
        axes,
        ((policies.index(str(name)), span, style_of(styles, str(name))) for name, span in spans),
        (least, most),
    )


def _mark_beyond(axes: Axes, spans: Iterable[tuple[int, Floats, Style]], limits: tuple[float, float]) -> bool:
    """Mark means, or else ends of intervals, beyond the limits of a panel; return True if there are any."""
    is_any = False
    for y, (mean, low, high), style in spans:
        is_inside = limits[0] <= mean <= limits[1]
        for value in (low, high) if is_inside else (mean,):
            is_any |= beyond(axes, y, value, limits, style.colour)
    return is_any


@figure_style
def plot_variants(
    table: pd.DataFrame,
    source: str,
    heading: str,
    reference_label: str,
    styles: Mapping[str, Style] = POLICIES,
) -> Figure:
    """Draw the ratio of every variant of a policy to the policy, one panel per policy, three in a row.

    Ratios of less than a quarter or more than four lie beyond the axis, and are written at its ends.

    Parameters
    ----------
    table
        Columns ``policy, variant, mean, low, high``, ratios to the policy; missing ends have no interval.
    heading, reference_label
        Title of the ratios, and legend text of a ratio of 1.
    """
    require_columns(table, "policy", "variant", "mean", "low", "high", figure="variants")
    names = in_order(table["policy"], styles)
    n_columns = min(len(names), _VARIANTS_IN_ROW)
    rows = [names[k : k + n_columns] for k in range(0, len(names), n_columns)]
    n_variants = table.groupby("policy").size()
    heights = [max(n_variants[row].max(), _LEAST_VARIANTS) for row in rows]
    figure = new_figure(TWO_COLUMNS_IN, 0.5 + sum(0.4 + _LINE_IN * height for height in heights))
    grid = figure.add_gridspec(len(rows), n_columns, height_ratios=[height + 2 for height in heights])
    ends = table[["mean", "low", "high"]].clip(1 / _MOST_RATIO, _MOST_RATIO)
    limits = 0.97 * float(np.nanmin(ends.to_numpy(float))), 1.03 * float(np.nanmax(ends.to_numpy(float)))
    is_beyond = False
    for number, name in enumerate(names):
        axes = figure.add_subplot(grid[number // n_columns, number % n_columns])
        variants, style = table[table["policy"] == name], style_of(styles, name)
        spans = variants[["mean", "low", "high"]].to_numpy(float)
        for y, (mean, low, high) in enumerate(spans):
            spread(axes, y, low, high, style.colour, is_across=True)
            axes.plot([mean], [y], style.marker, color=style.colour, ms=3.5, zorder=5)
        axes.set_yticks(range(len(variants)), variants["variant"].tolist())
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(len(variants) - 0.5, -0.5)
        reference(axes, [1.0, 1.0], [len(variants) - 0.5, -0.5])
        if limits[1] > _WIDE_RATIO * limits[0]:
            axes.set_xscale("log")
            log_ticks(axes.xaxis, *limits)
        axes.set_xlim(*limits)
        is_beyond |= _mark_beyond(axes, ((y, span, style) for y, span in enumerate(spans)), limits)
        axes.set_title(style.title)
    mark: dict[str, Any] = {"ls": "none", "marker": "o", "ms": 3.5, "color": PALETTE["grey"]}
    handles = [Line2D([], [], label="mean", **mark), reference_handle(reference_label)]
    if table[["low", "high"]].notna().all(axis=1).any():
        handles.insert(1, spread_handle("95 % interval", PALETTE["grey"]))
    if is_beyond:
        handles.append(beyond_handle())
    figure.supxlabel("ratio")
    return add_legend(figure, source, handles, strip=False, ncols=len(handles), title=heading)


@figure_style
def plot_costs(
    table: pd.DataFrame,
    source: str,
    metrics: Sequence[tuple[str, str, str, float, str]],
    heading: str,
    spread_label: str,
    styles: Mapping[str, Style] = POLICIES,
) -> Figure:
    """Draw the cost of scheduling against the number of jobs, with the GPUs below it, on logarithmic axes.

    Lines with caps extend from the smallest to the largest measured value.

    Parameters
    ----------
    table
        One row per simulation: ``policy, jobs, gpus`` and the columns of the metrics.
    metrics
        One panel each: columns of the median, smallest and largest value, factor to the unit shown, label.
    heading, spread_label
        Title that describes repetitions and values; legend text of the lines with caps.
    """
    needed = [name for metric in metrics for name in metric[:3]]
    require_columns(table, "policy", "jobs", "gpus", *needed, figure="costs")
    gpus = table.groupby("jobs")["gpus"].agg(lambda counts: ", ".join(f"{n:g}" for n in sorted(set(counts))))
    jobs = [float(str(count)) for count in gpus.index]
    figure = new_figure(TWO_COLUMNS_IN, 2.7)
    for axes, (*columns, unit, label) in zip(figure.subplots(1, len(metrics)), metrics, strict=True):
        for policy in in_order(table["policy"], styles):
            rows = table[table["policy"] == policy].sort_values("jobs")
            style = style_of(styles, policy)
            y, low, high = (unit * rows[column].to_numpy(float) for column in columns)
            line: dict[str, Any] = {"color": style.colour, "ls": style.line, "marker": style.marker, "ms": 3}
            axes.plot(rows["jobs"], y, label=style.title, **line)
            spread(axes, rows["jobs"], low, high, style.colour)
        axes.set(xscale="log", yscale="log", xlabel="jobs in the trace, GPUs of the cluster", ylabel=label)
        axes.yaxis.set_major_formatter(plain_numbers())
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xticks(jobs, [f"{count:,.0f}\n{text}" for count, text in zip(jobs, gpus, strict=True)])
        axes.margins(x=0.08)
    handles = [*_handles(table["policy"], styles), spread_handle(spread_label, PALETTE["grey"])]
    add_legend(figure, source, handles, ncols=_LEGEND_COLUMNS, title=heading)
    name_coincident(figure)
    return figure


@figure_style
def plot_cdf(
    table: pd.DataFrame,
    source: str,
    styles: Mapping[str, Style] = POLICIES,
    titles: Mapping[str, str] | None = None,
) -> Figure:
    """Draw the share of jobs that completed within a time, one line per policy, one panel per trace.

    Parameters
    ----------
    table
        One row per job: columns ``policy, jct_s`` and, for several panels, ``trace``.
    """
    require_columns(table, "policy", "jct_s", figure="cdf")
    traces = list(dict.fromkeys(table["trace"])) if "trace" in table.columns else [""]
    single = len(traces) == 1
    figure = new_figure(ONE_COLUMN_IN * 1.35 if single else TWO_COLUMNS_IN, 2.9)
    panels = figure.subplots(1, len(traces), sharey=True, sharex=True, squeeze=False)[0]
    for axes, trace in zip(panels, traces, strict=True):
        rows = table[table["trace"] == trace] if trace else table
        for name in in_order(rows["policy"], styles):
            style = style_of(styles, name)
            times = np.sort(rows.loc[rows["policy"] == name, "jct_s"].to_numpy(float))
            share = np.arange(1, len(times) + 1) / len(times)
            line: dict[str, Any] = {"color": style.colour, "ls": style.line, "label": style.title}
            axes.step(times, share, where="post", lw=1.0, **line)
        axes.set_xscale("log")
        axes.set_title((titles or {}).get(str(trace), str(trace)))
        axes.set_xlabel("job completion time [s]")
    panels[0].set_ylabel("share of jobs completed [%]")
    panels[0].yaxis.set_major_formatter(lambda share, _: f"{100 * share:g}")
    panels[0].set_ylim(0, 1.01)
    handles = _handles(table["policy"], styles, marker="")
    if single:
        add_legend(figure, source, handles, strip=False, loc="outside right center")
    else:
        add_legend(figure, source, handles, ncols=_LEGEND_COLUMNS)
    name_coincident(figure)
    return figure


# --- Bars -------------------------------------------------------------------------------------------

_ROW_HEIGHT_IN = 0.145
_ROOM, _LOG_ROOM = 1.05, 1.3  # end of an axis over the furthest time on it
_NUMBER_PT = 27.0  # between bars and names: room for the ratios
_MOST_BARS = 15  # of a panel with another one at its side
_LONGEST = 3.0  # times the median: a longer bar would leave the others no room


@figure_style
def plot_ratio_bars(
    table: pd.DataFrame,
    source: str,
    metrics: Sequence[tuple[str, str, str]],
    note: str,
    styles: Mapping[str, Style] = POLICIES,
    titles: Mapping[str, str] | None = None,
    published: pd.DataFrame | None = None,
    published_label: str = "published",
) -> Figure:
    """Draw times of every policy on every trace as bars with their ratios, one column of panels per trace.

    Ratios are written before the bars, so that no published mark comes between a number and its bar. Where a
    time is more than three times the median of its panel, all panels of the metric have points on a
    logarithmic axis instead.

    Parameters
    ----------
    table
        One row per trace and policy: columns ``trace, policy`` and those that the metrics name.
    metrics
        One row of panels each: column of the time [s], column of the ratio, label.
    note, published_label
        Legend texts of the numbers and of the marks.
    published
        Reference marks: ``trace, policy`` and the columns of times; missing values are left out.
    """
    needed = [name for metric in metrics for name in metric[:2]]
    require_columns(table, "trace", "policy", *needed, figure="bars")
    traces, policies = list(dict.fromkeys(table["trace"])), in_order(table["policy"], styles)
    shown = None if published is None else published[published["policy"].isin(policies)]
    figure = new_figure(TWO_COLUMNS_IN, 0.75 + len(metrics) * (0.35 + _ROW_HEIGHT_IN * len(policies)))
    panels = figure.subplots(len(metrics), len(traces), squeeze=False, sharey=True)
    by_trace = table.groupby("trace")
    for line, (value, ratio, label) in zip(panels, metrics, strict=True):
        is_log = bool((by_trace[value].max() > _LONGEST * by_trace[value].median()).any())
        for axes, trace in zip(line, traces, strict=True):
            rows = table[table["trace"] == trace].set_index("policy")
            marks = None if shown is None else shown[shown["trace"] == trace]
            _times_and_ratios(axes, rows, policies, styles, value, ratio, marks, is_log)
            names = [style_of(styles, name).title for name in policies]
            axes.set_yticks(range(len(policies)), names)
            axes.tick_params(axis="y", length=0, pad=_NUMBER_PT)
            axes.set_xlabel(f"{label}, log scale" if is_log else label)
    for axes, trace in zip(panels[0], traces, strict=True):
        axes.set_title((titles or {}).get(str(trace), str(trace)))
    handles: list[Patch | Line2D] = [Patch(color=PALETTE["grey"], label=note)]
    if published is not None:
        handles.append(published_handle(published_label))
    return add_legend(figure, source, handles, ncols=3)


def _times_and_ratios(
    axes: Axes,
    rows: pd.DataFrame,
    policies: list[str],
    styles: Mapping[str, Style],
    value: str,
    ratio: str,
    marks: pd.DataFrame | None,
    is_log: bool,
) -> None:
    positions = [policies.index(str(name)) for name in rows.index]
    hours = rows[value].to_numpy(float) / HOUR
    colours = [pale(style_of(styles, str(name))) for name in rows.index]
    if is_log:
        axes.scatter(hours, positions, 24, colours, lw=0, zorder=2)
    else:
        axes.barh(positions, hours, 0.74, color=colours, lw=0, zorder=2)
    for y, factor in zip(positions, rows[ratio].to_numpy(float), strict=True):
        if np.isfinite(factor):
            left: dict[str, Any] = {"ha": "right", "va": "center", "annotation_clip": False}
            place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
            axes.annotate(f"{factor:.2f}", (0.0, y), (-2.5, 0.0), **place, **left)
    reached = hours
    if marks is not None:
        at, shown = [policies.index(name) for name in marks["policy"]], marks[value].to_numpy(float) / HOUR
        published_marks(axes, shown, at)
        reached = np.concatenate([hours, shown[np.isfinite(shown)]])
    axes.set_ylim(len(policies) - 0.4, -0.6)
    if is_log:
        axes.set_xscale("log")
        axes.set_xlim(reached.min() / _LOG_ROOM, reached.max() * _LOG_ROOM)
        _decades(axes.xaxis, few=reached.max() < _MANY_DECADES * reached.min())
    else:
        axes.set_xlim(0, _ROOM * reached.max())
        axes.grid(visible=False, axis="y")


@figure_style
def plot_grouped_bars(
    table: pd.DataFrame,
    source: str,
    series: Mapping[str, Style],
    label: str,
    titles: Mapping[str, str] | None = None,
    styles: Mapping[str, Style] = POLICIES,
    spread_label: str = "",
) -> Figure:
    """Draw groups of bars side by side, one bar per series, with values above them, one panel per ``panel``.

    Panels are side by side, or one above the other if they have many bars.

    Parameters
    ----------
    table
        Columns ``panel, group, series, value``; combinations without a row have no bar. A column ``text``
        replaces the values above the bars; columns ``low, high`` give whiskers, NaN for none.
    series
        Looks of the series, in the order of the bars; in a panel that has a style, bars of black series have
        its colour in the strength of the series.
    label, spread_label
        Label of the values, and legend text of the whiskers.
    """
    require_columns(table, "panel", "group", "series", "value", figure="groups")
    names, groups = (list(dict.fromkeys(table[column])) for column in ("panel", "group"))
    shown = dict(titles or {})
    n_rows = len(names) if len(groups) * len(series) > _MOST_BARS else 1
    figure = new_figure(TWO_COLUMNS_IN if len(names) > 1 else ONE_COLUMN_IN, 2.3 * n_rows)
    panels = figure.subplots(n_rows, len(names) // n_rows, sharey=True, squeeze=False)
    for axes, name in zip(panels.flat, names, strict=True):
        panel = styles.get(name)
        panel_series = {
            key: replace(panel, strength=style.strength)
            if panel and style.colour == PALETTE["black"]
            else style
            for key, style in series.items()
        }
        width, keys = 0.88 / len(series), list(series)
        for row in table[table["panel"] == name].to_dict("records"):
            value, style = float(row["value"]), panel_series[row["series"]]
            offset = (keys.index(row["series"]) - (len(keys) - 1) / 2) * width
            x = groups.index(row["group"]) + offset
            axes.bar(x, value, 0.92 * width, fc=pale(style), ec=style.colour, lw=0.5, zorder=2)
            low, high = (float(row.get(end, np.nan)) for end in ("low", "high"))
            spread(axes, x, low, high)
            text = str(row.get("text", f"{value:.2f}"))
            axes.text(x, np.nanmax([value, high]), text, ha="center", va="bottom")
        name_groups(axes, [shown.get(group, group) for group in groups])
        axes.margins(x=0.02, y=0.12)
        axes.set_title(shown.get(name, name))
    for axes in panels[:, 0]:
        axes.set_ylabel(label)
    handles: list[Patch | Line2D] = [
        Patch(fc=pale(style), ec=style.colour, lw=0.5, label=style.title) for style in series.values()
    ]
    if {"low", "high"} <= set(table.columns) and table[["low", "high"]].notna().all(axis=1).any():
        handles.append(spread_handle(spread_label))
    return add_legend(figure, source, handles, ncols=2 if len(names) == 1 else 4)


# --- Performance model ------------------------------------------------------------------------------

ENVELOPE = "best plan"
"""Name of the envelope in the column ``plan_family``."""
_PUBLISHED_COLUMNS = ("published_avg_error_pct", "published_max_error_pct")
_LOW_IN = 2.5  # a figure too low for a label in one line
_GROUP_GAP = 1.7
_CLAIM_PCT = 10.0
_TICKS_PCT = (1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 70.0, 100.0, 150.0, 200.0)
_TICK_GAP = 0.12  # of the height of a panel
_OTHER = "#555555"
_ENVELOPE_COLOUR = "#C9C9C9"


@figure_style
def plot_error_bars(table: pd.DataFrame, source: str, form: str, other_form: str) -> Figure:
    """Draw average and largest prediction error of each model and plan family, on a square-root scale.

    Parameters
    ----------
    table
        Columns ``model, plan_family, form, avg_error_pct, max_error_pct, published_avg_error_pct,
        published_max_error_pct`` [%]; a row without held-out rows shows the published mark only.
    form, other_form
        Forms of the performance model shown as filled bars and as outlines.
    """
    needed = ("model", "plan_family", "form", "avg_error_pct", "max_error_pct", *_PUBLISHED_COLUMNS)
    require_columns(table, *needed, figure="prediction errors")
    table = table.assign(**{name: pd.to_numeric(table[name]) for name in _PUBLISHED_COLUMNS})
    seen = table[["avg_error_pct", *_PUBLISHED_COLUMNS]].notna().any(axis=1)
    table = table[seen.groupby([table["model"], table["plan_family"]]).transform("any")]
    require_columns(table, figure="prediction errors")
    figure = new_figure(TWO_COLUMNS_IN, 3.7)
    top, bottom = figure.subplots(2, 1, sharex=True)
    positions: dict[tuple[str, str], float] = {}
    x, models = 0.0, in_order(table["model"], MODEL_TITLES)
    for model in models:
        for family in in_order(table.loc[table["model"] == model, "plan_family"], FAMILIES):
            positions[model, family] = x
            x += 1.0
        x += _GROUP_GAP
    signed_sqrt = (lambda y: np.sign(y) * np.sqrt(np.abs(y)), lambda y: np.sign(y) * np.square(y))
    for axes, kind in ((top, "avg"), (bottom, "max")):
        for row in table.to_dict("records"):
            x, value = positions[row["model"], row["plan_family"]], row[f"{kind}_error_pct"]
            if row["form"] == form:
                axes.bar(x, value, 0.8, color=style_of(FAMILIES, row["plan_family"]).colour, lw=0, zorder=2)
                published_marks(axes, x, row[f"published_{kind}_error_pct"], ms=3.0)
            elif row["form"] == other_form:
                axes.bar(x, value, 0.8, fill=False, edgecolor=_OTHER, lw=0.6, zorder=3)
        if kind == "avg":
            limit(axes, _CLAIM_PCT)
        axes.grid(visible=False, axis="x")
        axes.set_yscale("function", functions=signed_sqrt)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(plain_numbers())
        # Only ticks that are far enough apart on the square-root scale.
        largest, ticks = axes.get_ylim()[1], [0.0]
        for tick in _TICKS_PCT:
            if tick <= largest and math.sqrt(tick) - math.sqrt(ticks[-1]) >= _TICK_GAP * math.sqrt(largest):
                ticks.append(tick)
        axes.set_yticks(ticks)
        axes.tick_params(axis="x", length=0)
    top.set_ylabel("average error [%],\nsquare-root axis")
    bottom.set_ylabel("largest error [%],\nsquare-root axis")
    centres = [np.mean([x for (model, _), x in positions.items() if model == name]) for name in models]
    bottom.set_xticks(centres, [MODEL_TITLES.get(name, name) for name in models])
    bottom.set_xlim(min(positions.values()) - 1.0, max(positions.values()) + 1.0)
    handles = patches(in_order(table["plan_family"], FAMILIES), FAMILIES)
    if other_form != form and other_form in set(table["form"]):
        handles.append(Patch(facecolor="none", edgecolor=_OTHER, label=f"'{other_form}' form of the model"))
    if table[list(_PUBLISHED_COLUMNS)].notna().any(axis=None):
        handles.append(published_handle("printed in the paper"))
    handles.append(limit_handle("claimed bound of the average"))
    return add_legend(figure, source, handles, ncols=min(len(handles), 5))


@figure_style
def plot_prediction(table: pd.DataFrame, source: str, form: str) -> Figure:
    """Draw predicted against measured (or emulated) iteration time, one panel per model.

    Held-out rows are filled, flagged rows hollow, and rows used in the fit plus signs.

    Parameters
    ----------
    table
        Columns ``model, plan_family, form, fitted, clean, measured_s, predicted_s``.
    form
        Form of the performance model to show.
    """
    needed = ("model", "plan_family", "form", "fitted", "clean", "measured_s", "predicted_s")
    require_columns(table, *needed, figure="prediction")
    shown = table[table["form"] == form]
    require_columns(shown, figure="prediction")
    figure, free = model_panels(
        in_order(shown["model"], MODEL_TITLES),
        1.75,
        lambda axes, model: _prediction_panel(axes, shown[shown["model"] == model]),
    )
    point: dict[str, Any] = {"ls": "none"}
    styles = [style_of(FAMILIES, name) for name in in_order(shown["plan_family"], FAMILIES)]
    handles = [
        Line2D([], [], marker=style.marker, color=style.colour, label=style.title, **point)
        for style in styles
    ]
    if shown["fitted"].any():
        handles.append(Line2D([], [], marker="+", color=_OTHER, label="used in the fit", **point))
    if not shown["clean"].all():
        hollow: dict[str, Any] = {"marker": "o", "mfc": "white", "mec": _OTHER}
        handles.append(Line2D([], [], label="flagged anomaly", **hollow, **point))
    handles.append(reference_handle("prediction without error"))
    free.legend(handles=handles, loc="center", labelspacing=0.35)
    made = {"emulated": "emulated", "published": "measured", "measured": "measured"}.get(source, "given")
    gap = "\n" if figure.get_figheight() < _LOW_IN else " "
    label = f"predicted iteration time [s],{gap}{form} form"
    return _labelled(figure, source, f"{made} iteration time [s]", label)


def _prediction_panel(axes: Axes, rows: pd.DataFrame) -> None:
    """Draw the rows of a model, with the mean error of those that are held out."""
    times = rows[["measured_s", "predicted_s"]].to_numpy(dtype=float)
    middle = math.sqrt(times.min() * times.max())
    reach = max(1.25 * math.sqrt(times.max() / times.min()), 2.0)  # wide enough for two ticks
    low, high = middle / reach, middle * reach
    reference(axes, [low, high], [low, high])
    for family in in_order(rows["plan_family"], FAMILIES):
        part, style = rows[rows["plan_family"] == family], style_of(FAMILIES, family)
        hollow = {"marker": style.marker, "ms": 3.2, "mfc": "white", "mec": style.colour, "mew": 0.7}
        filled = {"marker": style.marker, "ms": 3.4, "mfc": style.colour, "mec": "white", "mew": 0.25}
        cross = {"marker": "+", "ms": 4.2, "mew": 0.9, "color": style.colour}
        kinds = [~part["fitted"] & ~part["clean"], ~part["fitted"] & part["clean"], part["fitted"]]
        marks: list[dict[str, Any]] = [hollow, filled, cross]
        for number, (kept, mark) in enumerate(zip(kinds, marks, strict=True)):
            points = part[kept]
            axes.plot(points["measured_s"], points["predicted_s"], ls="none", zorder=2 + number, **mark)
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high), aspect="equal")
    few = high < _MANY_DECADES * low
    for axis in (axes.xaxis, axes.yaxis):
        _decades(axis, few)
    validated = rows[~rows["fitted"] & rows["clean"]]
    if validated.empty:
        note = "no held-out rows"
    else:
        error = 100.0 * (validated["predicted_s"] / validated["measured_s"] - 1.0).abs()
        note = f"mean {error.mean():.1f} %\nn = {len(error)}"
    axes.text(0.04, 0.96, note, transform=axes.transAxes, va="top")


_MANY_DECADES = 50.0  # largest over smallest value of an axis with ticks at decades alone


def _decades(axis: Axis, few: bool) -> None:
    """Put ticks at decades, and at two and five times them if there are few."""
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if few else (1.0,)))
    axis.set_major_formatter(plain_numbers())
    axis.set_minor_formatter(NullFormatter())


@figure_style
def plot_sensitivity(table: pd.DataFrame, source: str) -> Figure:
    """Draw throughput against GPUs, one panel per model, one line per plan family.

    The envelope is the broad line behind the others. Lines join the counts at which a family is faster than
    with fewer GPUs; the other counts are left out.

    Parameters
    ----------
    table
        Columns ``model, plan_family, gpus, throughput_samples_per_s``; the rows of family `ENVELOPE` are the
        best plan with at most that many GPUs. Rows without throughput are left out.
    """
    require_columns(table, "model", "plan_family", "gpus", "throughput_samples_per_s", figure="sensitivity")
    shown = table[table["throughput_samples_per_s"] > 0]

    def draw(axes: Axes, model: str) -> None:
        rows = shown[shown["model"] == model]
        for family in reversed(in_order(rows["plan_family"], FAMILIES)):
            part = rows[rows["plan_family"] == family].sort_values("gpus")
            x, y = part["gpus"].to_numpy(), part["throughput_samples_per_s"].to_numpy()
            if family == ENVELOPE:
                axes.plot(x, y, color=_ENVELOPE_COLOUR, lw=3.2, drawstyle="steps-post", zorder=1)
                continue
            style, gains = (
                style_of(FAMILIES, family),
                y > np.maximum.accumulate(np.concatenate([[0.0], y[:-1]])),
            )
            axes.plot(
                x[gains], y[gains], color=style.colour, marker=style.marker, ms=2.8, lw=0.9,
                mec="white", mew=0.2, zorder=3, label=style.title,
            )  # fmt: skip
        _log2_axes(axes, int(rows["gpus"].max()) if len(rows) else 1)

    figure, free = model_panels(in_order(table["model"], MODEL_TITLES), 1.55, draw)
    handles = [
        Line2D([], [], color=style.colour, marker=style.marker, ms=3, lw=1, label=name)
        for name in in_order(shown["plan_family"], FAMILIES)
        if name != ENVELOPE
        for style in [style_of(FAMILIES, name)]
    ]
    handles.append(Line2D([], [], color=_ENVELOPE_COLOUR, lw=3.2, label=ENVELOPE + " (envelope)"))
    free.legend(handles=handles, loc="center", labelspacing=0.4)
    _labelled(figure, source, "GPUs", "throughput [samples/s]")
    name_coincident(figure)
    return figure


def _labelled(figure: Figure, source: str, across: str, upwards: str) -> Figure:
    figure.supxlabel(across)
    figure.supylabel(upwards)
    return add_legend(figure, source, strip=False)


def _log2_axes(axes: Axes, largest: int) -> None:
    """Use powers of two up to ``largest`` on the horizontal axis, and a logarithmic vertical axis."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator([2**k for k in range(int(math.log2(max(largest, 2))) + 1)]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(plain_numbers())
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    _decades(axes.yaxis, math.log10(high / low) < 2.0)


@figure_style
def plot_cpu_sensitivity(table: pd.DataFrame, source: str) -> Figure:
    """Draw throughput of offload plans against CPU threads, one panel per model, one line per GPU count.

    Parameters
    ----------
    table
        Columns ``model, gpus, cpu_threads, throughput_samples_per_s``, of the best plan.
    """
    needed = ("model", "gpus", "cpu_threads", "throughput_samples_per_s")
    require_columns(table, *needed, figure="sensitivity_cpu")
    counts = sorted(set(table["gpus"]))
    colours = dict(zip(counts, PALETTE.values(), strict=False))

    def draw(axes: Axes, model: str) -> None:
        for gpus in counts:
            part = table[(table["model"] == model) & (table["gpus"] == gpus)].sort_values("cpu_threads")
            x, y, colour = part["cpu_threads"], part["throughput_samples_per_s"], colours.get(gpus, "grey")
            axes.plot(x, y, color=colour, marker="o", ms=2.6, mec="white", mew=0.2, lw=0.9)
        _log2_axes(axes, int(table["cpu_threads"].max()))

    figure, free = model_panels(in_order(table["model"], MODEL_TITLES), 1.55, draw)
    line: dict[str, Any] = {"marker": "o", "ms": 3, "lw": 1}
    titles = {gpus: f"{gpus} GPU{'s' * (gpus != 1)}" for gpus in counts}
    handles = [Line2D([], [], color=colours.get(n, "grey"), label=titles[n], **line) for n in counts]
    free.legend(handles=handles, loc="center", labelspacing=0.4)
    return _labelled(figure, source, "CPU threads per GPU", "offload throughput [samples/s]")


# --- One simulation ---------------------------------------------------------------------------------

_BINS = 600
_RESTART_COLOUR = "#C4C4C4"
_HELD = {"started", "reconfigured", "sharing"}
_LOST = {"suspended", "interrupted", "finished"}
_SPAN_COLUMNS = ["job_id", "plan_family", "node", "gpu", "start_s", "ready_s", "end_s"]
_TRACKED = [*sorted(_HELD), *sorted(_LOST), "ready"]
_TIME_LABEL = "time since the first submission [h]"


@figure_style
def plot_allocation(table: pd.DataFrame, source: str, n_gpus: int, titles: dict[str, str]) -> Figure:
    """Draw the GPUs that jobs hold over time, stacked by plan family, one panel per policy.

    Parameters
    ----------
    table
        ``time_s`` and one column per plan family with the GPUs that its plans hold from then on; for
        several panels also ``policy``. The chart shows means over many equal spans of time.
    n_gpus
        GPUs of the cluster, drawn as a line.
    """
    families = in_order((str(name) for name in table.columns if name not in ("time_s", "policy")), FAMILIES)
    require_columns(table, "time_s", *(families or ["plan families"]), figure="allocation")
    panels = list(dict.fromkeys(table["policy"])) if "policy" in table.columns else [""]
    figure = new_figure(TWO_COLUMNS_IN, 0.55 + 1.35 * len(panels))
    axes_list = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, panel in zip(axes_list, panels, strict=True):
        rows = table[table["policy"] == panel] if panel else table
        end_s = float(rows["time_s"].max())
        edges = np.linspace(0.0, end_s, _BINS + 1) if end_s > 0 else np.array([0.0, 1.0])
        base = np.zeros(len(edges) - 1)
        for family in families:
            held = rows[family].fillna(0.0).to_numpy(float)
            mean = _bin_means(rows["time_s"].to_numpy(float), held, edges)
            colour = style_of(FAMILIES, family).colour
            axes.stairs(base + mean, edges / HOUR, baseline=base, fill=True, color=colour, lw=0)
            base = base + mean
        limit(axes, n_gpus, zorder=3)
        axes.set_ylim(0, 1.08 * max(n_gpus, float(base.max(initial=0.0))))
        axes.set_ylabel("GPUs held")
        axes.set_title(titles.get(panel, panel), loc="left")
    axes_list[-1].set_xlabel(_TIME_LABEL)
    axes_list[-1].set_xlim(0, float(table["time_s"].max()) / HOUR)
    handles = [*patches(families, FAMILIES), limit_handle("all GPUs")]
    return add_legend(figure, source, handles, strip=False, ncols=min(len(handles), 5))


def _bin_means(times: np.ndarray, values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Average a step function, zero before its first time, over the spans between edges."""
    if not len(times):
        return np.zeros(len(edges) - 1)
    # The integral up to each edge; its differences are exact, however many steps fall into a span.
    area = np.concatenate([[0.0], np.cumsum(values[:-1] * np.diff(times))])
    at = np.searchsorted(times, edges, side="right") - 1
    integral = np.where(at >= 0, area[at] + values[at] * (edges - times[at]), 0.0)
    return np.asarray(np.diff(integral) / np.diff(edges))


@figure_style
def plot_gantt(table: pd.DataFrame, source: str) -> Figure:
    """Draw the spans of `job_spans` as a Gantt chart: one line per GPU, one colour per plan family.

    Restart delays are light grey, and lines separate the nodes.
    """
    require_columns(table, "plan_family", "node", "gpu", "start_s", "ready_s", "end_s", figure="gantt")
    nodes, width = range(int(table["node"].max()) + 1), int(table["gpu"].max()) + 1
    figure = new_figure(TWO_COLUMNS_IN, min(1.0 + 0.045 * width * len(nodes), 6.5))
    axes = figure.subplots()
    rows = table["node"].to_numpy() * width + table["gpu"].to_numpy()
    start, ready, end = (table[name].to_numpy(float) / HOUR for name in ("start_s", "ready_s", "end_s"))
    families = in_order(table["plan_family"], FAMILIES)
    _bars(axes, rows, start, ready, _RESTART_COLOUR)
    for family in families:
        of_family = (table["plan_family"] == family).to_numpy()
        colour = style_of(FAMILIES, family).colour
        _bars(axes, rows[of_family], ready[of_family], end[of_family], colour)
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
    return add_legend(figure, source, handles, strip=False, ncols=min(len(handles), 5))


def _bars(axes: Axes, rows: np.ndarray, start: np.ndarray, end: np.ndarray, colour: str) -> None:
    """Draw many horizontal bars at once, each one line high."""
    shown = end > start
    low, left, right = rows[shown].astype(float), start[shown], end[shown]
    edges = ((left, low), (right, low), (right, low + 0.92), (left, low + 0.92))
    corners = np.stack([np.stack(corner, axis=-1) for corner in edges], axis=1)
    bars = PolyCollection(list(corners), facecolors=colour, edgecolors="white", linewidths=0.1, zorder=2)
    axes.add_collection(bars)


def job_spans(events: pd.DataFrame) -> pd.DataFrame:
    """Return the spans in which jobs held each GPU of each node, from the events of a simulation.

    The simulation allocates numbers of GPUs on nodes; this function chooses the GPUs, the lowest free ones
    first. Returns ``job_id, plan_family, node, gpu, start_s, ready_s, end_s``: restarting until ``ready_s``,
    running afterwards. Opportunistic jobs, which hold no GPUs, are left out.
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
        # First all that ends at this time, then all that starts: a GPU may change hands at one instant.
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
                gpus: list[tuple[int, int]] = []
                for part in nodes.split():
                    # The lowest free GPUs of each node.
                    node, count = (int(value) for value in part.split(":"))
                    used = busy.setdefault(node, set())
                    free = [gpu for gpu in range(len(used) + count) if gpu not in used][:count]
                    used.update(free)
                    gpus += [(node, gpu) for gpu in free]
                spans[job] = _Span(job, family, now_s, gpus, now_s if job in ready else math.inf)
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


def _close(span: _Span, end_s: float, busy: dict[int, set[int]]) -> list[tuple[object, ...]]:
    ready_s = min(span.ready_s, end_s)
    for node, gpu in span.gpus:
        busy[node].discard(gpu)
    return [(span.job_id, span.family, node, gpu, span.start_s, ready_s, end_s) for node, gpu in span.gpus]


# --- Planned runs -----------------------------------------------------------------------------------

_BAND = 0.2  # opacity of an interval
_SLOWEST = 2.0  # times the fastest step, up to which layouts are shown


@figure_style
def plot_frontier(sizes: pd.DataFrame, layouts: pd.DataFrame, memory_gib: float, source: str) -> Figure:
    """Draw throughput against the number of GPUs, and memory against the step of layouts.

    Intervals of 90 % are bands. Layouts that are twice as slow as the fastest one or slower are
    left out.

    Parameters
    ----------
    sizes
        Columns ``n_gpus, tokens_per_s, low, high``, one row per number of GPUs.
    layouts
        Columns ``step_s, low_s, high_s`` [s], ``memory_gib`` and ``is_pareto``, true where no layout is both
        faster and smaller.
    memory_gib
        Memory of a device [GiB].
    """
    require_columns(sizes, "n_gpus", "tokens_per_s", "low", "high", figure="frontier")
    require_columns(layouts, "step_s", "low_s", "high_s", "memory_gib", "is_pareto", figure="frontier")
    figure = new_figure(TWO_COLUMNS_IN, 2.9)
    left, right = figure.subplots(1, 2)
    line = Style("best layout", PALETTE["blue"], "o")
    n_gpus, rate = sizes["n_gpus"].to_numpy(float), sizes["tokens_per_s"].to_numpy(float)
    reference(left, n_gpus, rate[0] * n_gpus / n_gpus[0])
    left.fill_between(n_gpus, sizes["low"], sizes["high"], color=line.colour, alpha=_BAND, lw=0)
    left.plot(n_gpus, rate, color=line.colour, marker=line.marker, ls=line.line, zorder=3)
    left.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="tokens/s")
    left.set_xticks(n_gpus, [f"{count:g}" for count in n_gpus])
    left.xaxis.set_minor_locator(NullLocator())
    log_ticks(left.yaxis, float(sizes["low"].min()), float(sizes["high"].max()))
    left.yaxis.set_major_formatter(FuncFormatter(_thousands))
    front = Style("no layout is faster and smaller", PALETTE["vermilion"], "s")
    shown = layouts[layouts["step_s"] <= _SLOWEST * layouts["step_s"].min()]
    best = shown[shown["is_pareto"]]
    right.plot(shown["step_s"], shown["memory_gib"], ls="none", marker="o", ms=1.8, color=_CONTEXT, zorder=1)
    memory, low, high = (best[name].to_numpy(float) for name in ("memory_gib", "low_s", "high_s"))
    right.fill_betweenx(memory, low, high, color=front.colour, alpha=_BAND, lw=0)
    right.step(best["step_s"], best["memory_gib"], where="post", color=front.colour, lw=0.8, zorder=3)
    right.plot(best["step_s"], best["memory_gib"], ls="none", marker="s", ms=3, color=front.colour, zorder=4)
    limit(right, memory_gib)
    right.set(xlabel="step [s]", ylabel="memory of the fullest device [GiB]")
    right.set_ylim(0.0, 1.08 * memory_gib)
    handles = [
        line_handle(line),
        reference_handle("in proportion"),
        Line2D([], [], label="layout that fits", ls="none", marker="o", ms=2.5, color=_CONTEXT),
        Line2D([], [], label=front.title, marker="s", ms=3, lw=0.8, color=front.colour),
        Patch(label="90 % interval", color=PALETTE["grey"], alpha=_BAND, lw=0),
        limit_handle("memory of a device"),
    ]
    return add_legend(figure, source, handles, ncols=3)


def _thousands(value: float, _: int) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"
