"""Policies compared: Table 4 as bars, the distribution of JCT, and the ablation."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from makespan.plots._policy_style import is_ablation, policy_handles, policy_order, policy_style
from makespan.plots._style import (
    ONE_COLUMN_IN,
    PALETTE,
    TWO_COLUMNS_IN,
    new_figure,
    require_columns,
    source_label,
    styled,
)
from makespan.units import HOUR

__all__ = ["plot_ablation", "plot_jct_cdf", "plot_table4"]

_TRACE_TITLES = {"base": "Base", "bp": "best plan (BP)", "mt": "multi-tenant (MT)"}
_ROW_HEIGHT_IN = 0.145
_ABLATION_STRENGTH = 0.55
_METRICS = (
    ("avg_jct_s", "jct_ratio_to_morphling", "average JCT [h]"),
    ("makespan_s", "makespan_ratio_to_morphling", "makespan [h]"),
)


@styled
def plot_table4(
    table: pd.DataFrame,
    source: str,
    restart_delay_s: float,
    published: pd.DataFrame | None = None,
    published_label: str = "published",
) -> Figure:
    """Draw average JCT and makespan of every policy on every trace, with the ratios to Morphling.

    Parameters
    ----------
    table
        Columns ``trace, policy, restart_delay_s, avg_jct_s, makespan_s, jct_ratio_to_morphling,
        makespan_ratio_to_morphling``.
    source
        Name of the throughput source.
    restart_delay_s
        Which restart delay is shown [s].
    published
        Reference marks: ``trace, policy, avg_jct_s, makespan_s``; missing values are left out.
    published_label
        What the marks are, for the legend.

    Returns
    -------
    matplotlib.figure.Figure
        One column of panels a trace; bars end in the ratio to Morphling.
    """
    names = [column for metric in _METRICS for column in metric[:2]]
    require_columns(table, "trace", "policy", "restart_delay_s", *names, figure="table4")
    shown = table[table["restart_delay_s"] == restart_delay_s]
    require_columns(shown, figure=f"table4 at {restart_delay_s:g} s")
    traces, policies = list(dict.fromkeys(shown["trace"])), policy_order(shown["policy"])
    height = 0.75 + 2 * (0.35 + _ROW_HEIGHT_IN * len(policies))
    figure = new_figure(TWO_COLUMNS_IN, height)
    panels = figure.subplots(2, len(traces), squeeze=False, sharey=True)
    for column, trace in enumerate(traces):
        rows = shown[shown["trace"] == trace].set_index("policy")
        marks = None if published is None else published[published["trace"] == trace]
        for axes, (value, ratio, label) in zip(panels[:, column], _METRICS, strict=True):
            _ratio_bars(axes, rows, policies, value, ratio, marks)
            _published_marks(axes, marks, policies, value)
            axes.set_xlabel(label)
        panels[0, column].set_title(_TRACE_TITLES.get(str(trace), str(trace)))
    handles: list[Patch | Line2D] = [
        Patch(color=PALETTE["grey"], label=f"restart delay {restart_delay_s:g} s; number: ratio to Morphling")
    ]
    if published is not None:
        handles.append(
            Line2D(
                [], [], ls="none", marker="|", ms=7, mew=1.6, color=PALETTE["black"], label=published_label
            )
        )
    figure.legend(handles=handles, loc="outside upper center", ncols=2)
    source_label(figure, source)
    return figure


def _ratio_bars(
    axes: Axes, rows: pd.DataFrame, policies: list[str], value: str, ratio: str, marks: pd.DataFrame | None
) -> None:
    present = rows[rows.index.isin(policies)]
    positions = [policies.index(str(name)) for name in present.index]
    hours = present[value].to_numpy(float) / HOUR
    colours = [_bar_colour(str(name)) for name in present.index]
    axes.barh(positions, hours, 0.74, color=colours, lw=0, zorder=2)
    beyond = {} if marks is None else (marks.groupby("policy")[value].max() / HOUR).to_dict()
    for y, x, factor in zip(positions, hours, present[ratio].to_numpy(float), strict=True):
        text = f" {factor:.2f}" if np.isfinite(factor) else ""
        end = max(x, beyond.get(policies[y], x))  # so that a mark does not cross the number
        axes.text(end, y, text, va="center", ha="left", fontsize=5.5, zorder=5)
    axes.set_yticks(range(len(policies)), [policy_style(name).title for name in policies])
    axes.set_ylim(len(policies) - 0.4, -0.6)
    axes.set_xlim(0, 1.18 * float(hours.max()))
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")


def _bar_colour(policy: str) -> tuple[float, float, float]:
    """Return the colour of a policy, paler if it is an ablation."""
    red, green, blue = to_rgb(policy_style(policy).colour)
    keep = _ABLATION_STRENGTH if is_ablation(policy) else 1.0
    return 1.0 - keep * (1.0 - red), 1.0 - keep * (1.0 - green), 1.0 - keep * (1.0 - blue)


def _published_marks(axes: Axes, marks: pd.DataFrame | None, policies: list[str], value: str) -> None:
    if marks is None:
        return
    for name, number in zip(marks["policy"], marks[value], strict=True):
        if name in policies and np.isfinite(number):
            y = policies.index(name)
            axes.vlines(number / HOUR, y - 0.45, y + 0.45, color="white", lw=2.6, zorder=3)
            axes.vlines(number / HOUR, y - 0.45, y + 0.45, color="black", lw=1.4, zorder=4)


@styled
def plot_jct_cdf(table: pd.DataFrame, source: str) -> Figure:
    """Draw the share of jobs that completed within a time, one line a policy, one panel a trace.

    Parameters
    ----------
    table
        One row a job: columns ``policy, jct_s`` and, for several panels, ``trace``.
    source
        Name of the throughput source.

    Returns
    -------
    matplotlib.figure.Figure
        Logarithmic time axis.
    """
    require_columns(table, "policy", "jct_s", figure="jct_cdf")
    traces = list(dict.fromkeys(table["trace"])) if "trace" in table.columns else [""]
    n = len(traces)
    figure = new_figure(ONE_COLUMN_IN * 1.35 if n == 1 else TWO_COLUMNS_IN, 2.6)
    panels = figure.subplots(1, n, sharey=True, sharex=True, squeeze=False)[0]
    for axes, trace in zip(panels, traces, strict=True):
        rows = table[table["trace"] == trace] if trace else table
        for name in policy_order(rows["policy"]):
            style = policy_style(name)
            times = np.sort(rows.loc[rows["policy"] == name, "jct_s"].to_numpy(float))
            share = np.arange(1, len(times) + 1) / len(times)
            axes.step(times, share, where="post", color=style.colour, ls=style.line, lw=1.0)
        axes.set_xscale("log")
        axes.set_title(_TRACE_TITLES.get(str(trace), str(trace)))
        axes.set_xlabel("job completion time [s]")
    panels[0].set_ylabel("share of jobs completed")
    panels[0].set_ylim(0, 1.01)
    handles = policy_handles(table["policy"], with_marker=False)
    if n == 1:
        figure.legend(handles=handles, loc="outside right center")
    else:
        figure.legend(handles=handles, loc="outside upper center", ncols=6)
    source_label(figure, source, strip=n > 1)
    return figure


@styled
def plot_ablation(table: pd.DataFrame, source: str, restart_delay_s: float) -> Figure:
    """Draw what each part of Morphling is worth: average JCT over that of the whole policy.

    Parameters
    ----------
    table
        Columns ``trace, policy, restart_delay_s, avg_jct_s``; a policy ``x`` is compared with ``x-e``
        (plans only), ``x-r`` (resources only) and ``x-n`` (neither).
    source
        Name of the throughput source.
    restart_delay_s
        Which restart delay is shown [s].

    Returns
    -------
    matplotlib.figure.Figure
        One panel a policy with ablations; groups of bars by trace.
    """
    require_columns(table, "trace", "policy", "restart_delay_s", "avg_jct_s", figure="ablation")
    shown = table[table["restart_delay_s"] == restart_delay_s]
    wholes = [name for name in policy_order(shown["policy"]) if f"{name}-n" in set(shown["policy"])]
    require_columns(shown[shown["policy"].isin(wholes)], figure=f"ablation at {restart_delay_s:g} s")
    figure = new_figure(ONE_COLUMN_IN * max(1.0, len(wholes)), 2.3)
    panels = figure.subplots(1, len(wholes), sharey=True, squeeze=False)[0]
    for axes, whole in zip(panels, wholes, strict=True):
        _ablation_panel(axes, shown, whole)
        axes.set_title(policy_style(whole).title)
    panels[0].set_ylabel("average JCT over that of the whole policy")
    handles = [Patch(color=colour, label=label) for _, label, colour in _ABLATIONS]
    figure.legend(handles=handles, loc="outside upper center", ncols=2 if len(wholes) == 1 else 4)
    source_label(figure, source)
    return figure


_ABLATIONS = (
    ("", "plans and resources", PALETTE["blue"]),
    ("-e", "plans only", PALETTE["green"]),
    ("-r", "resources only", PALETTE["orange"]),
    ("-n", "neither", PALETTE["grey"]),
)


def _ablation_panel(axes: Axes, table: pd.DataFrame, whole: str) -> None:
    traces = list(dict.fromkeys(table["trace"]))
    values = table.set_index(["trace", "policy"])["avg_jct_s"]
    width = 0.8 / len(_ABLATIONS)
    for group, trace in enumerate(traces):
        for number, (suffix, _, colour) in enumerate(_ABLATIONS):
            key = (trace, f"{whole}{suffix}")
            if key not in values.index or (trace, whole) not in values.index:
                continue
            ratio = float(values[key]) / float(values[trace, whole])
            x = group + (number - 1.5) * width
            axes.bar(x, ratio, 0.92 * width, color=colour, lw=0, zorder=2)
            axes.text(x, ratio, f"{ratio:.2f}", ha="center", va="bottom", fontsize=5.5)
    axes.set_xticks(range(len(traces)), [_TRACE_TITLES.get(str(name), str(name)) for name in traces])
    axes.tick_params(axis="x", length=0)
    axes.grid(visible=False, axis="x")
    axes.margins(y=0.12)
