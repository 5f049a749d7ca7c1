"""Studies over one parameter: load, share of large models, round length, and size."""

import math

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from scipy import special

from makespan.plots._policy_style import policy_handles, policy_order, policy_style
from makespan.plots._style import (
    TWO_COLUMNS_IN,
    new_figure,
    require_columns,
    source_label,
    styled,
)
from makespan.units import HOUR

__all__ = ["plot_large_models", "plot_load", "plot_rounds", "plot_scale"]

_CONFIDENCE = 0.95
_MARGIN = 1.25
_COARSE_RANGE = 12.0
_LEGEND_COLUMNS = 6

Floats = npt.NDArray[np.float64]


@styled
def plot_load(table: pd.DataFrame, source: str) -> Figure:
    """Draw average JCT and makespan against the arrival rate, with confidence bands over seeds.

    Parameters
    ----------
    table
        One row a simulation: ``policy, load_factor, seed, avg_jct_s, makespan_s``.
    source
        Name of the throughput source.

    Returns
    -------
    matplotlib.figure.Figure
        Two panels; bands hold the geometric mean over seeds with 95 %
        confidence.
    """
    return _study(table, source, "load_factor", "arrival rate over that of the trace", "load")


@styled
def plot_large_models(table: pd.DataFrame, source: str) -> Figure:
    """Draw average JCT and makespan against the share of large models, with bands over seeds.

    Parameters
    ----------
    table
        One row a simulation: ``policy, large_share`` (from 0 to 1), ``seed, avg_jct_s, makespan_s``.
    source
        Name of the throughput source.

    Returns
    -------
    matplotlib.figure.Figure
        Two panels; bands hold the geometric mean over seeds with 95 %
        confidence.
    """
    require_columns(table, "large_share", figure="large_models")
    percent = table.assign(large_share=100.0 * table["large_share"])
    return _study(percent, source, "large_share", "jobs with large models [%]", "large_models")


@styled
def plot_rounds(table: pd.DataFrame, source: str) -> Figure:
    """Draw average JCT and makespan against the length of a scheduling round.

    Parameters
    ----------
    table
        One row a simulation: ``policy, interval_s, seed, avg_jct_s, makespan_s``; a length that is 0
        or missing means that the policy is asked at every event.
    source
        Name of the throughput source.

    Returns
    -------
    matplotlib.figure.Figure
        Two panels; bands hold the geometric mean over seeds with 95 %
        confidence.
    """
    require_columns(table, "interval_s", figure="rounds")
    filled = table.assign(interval_s=pd.to_numeric(table["interval_s"]).fillna(0.0))
    return _study(filled, source, "interval_s", "length of a round [s], 0: at every event", "rounds")


def _study(table: pd.DataFrame, source: str, parameter: str, label: str, name: str) -> Figure:
    require_columns(table, "policy", parameter, "seed", "avg_jct_s", "makespan_s", figure=name)
    figure = new_figure(TWO_COLUMNS_IN, 3.0)
    left, right = figure.subplots(1, 2)
    points = np.unique(table[parameter].to_numpy(float))
    for axes, column, title in (
        (left, "avg_jct_s", "average JCT [h]"),
        (right, "makespan_s", "makespan [h]"),
    ):
        for policy in policy_order(table["policy"]):
            _band(axes, table[table["policy"] == policy], policy, parameter, column)
        axes.set_xticks(points, [f"{point:g}" for point in points])
        axes.set_xlabel(label)
        axes.set_ylabel(title)
        _log_hours(axes)
    n_seeds = int(table.groupby(["policy", parameter])["seed"].nunique().max())
    heading = f"geometric mean and 95 % confidence band over {n_seeds} seeds" if n_seeds > 1 else None
    figure.legend(
        handles=policy_handles(table["policy"]),
        loc="outside upper center",
        ncols=_LEGEND_COLUMNS,
        title=heading,
        title_fontsize=6.5,
    )
    source_label(figure, source)
    return figure


def _band(axes: Axes, rows: pd.DataFrame, policy: str, parameter: str, column: str) -> None:
    """Draw means and band of one policy; in logarithms, because times are positive and skewed."""
    groups = np.log(rows[column] / HOUR).groupby(rows[parameter])
    x, mean = groups.mean().index.to_numpy(float), groups.mean().to_numpy(float)
    half = _half_widths(groups)
    style = policy_style(policy)
    axes.plot(x, np.exp(mean), color=style.colour, ls=style.line, marker=style.marker, ms=3, zorder=3)
    if half.any():
        axes.fill_between(x, np.exp(mean - half), np.exp(mean + half), color=style.colour, alpha=0.13, lw=0)


def _half_widths(groups: "pd.api.typing.SeriesGroupBy[float, float]") -> Floats:
    """Return half the width of the confidence interval of each mean, 0 for a single seed."""
    n = groups.count().to_numpy(float)
    spread = groups.std(ddof=1).fillna(0.0).to_numpy(float)
    quantile = special.stdtrit(np.maximum(n - 1.0, 1.0), 0.5 + _CONFIDENCE / 2.0)
    return np.asarray(np.where(n > 1, quantile * spread / np.sqrt(n), 0.0), dtype=np.float64)


def _log_hours(axes: Axes) -> None:
    """Use a logarithmic axis that holds all lines, if not all of wide bands, with plain numbers."""
    values = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in axes.lines])
    low, high = float(values.min()) / _MARGIN, float(values.max()) * _MARGIN
    axes.set_yscale("log")
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if high / low > _COARSE_RANGE else (1, 1.5, 2, 3, 4, 5, 6, 8)
    axes.yaxis.set_major_locator(FixedLocator([step * 10.0**decade for decade in decades for step in steps]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_ylim(low, high)


@styled
def plot_scale(table: pd.DataFrame, source: str) -> Figure:
    """Draw what scheduling costs against the size of the problem.

    Parameters
    ----------
    table
        One row a simulation: ``policy, jobs, gpus, wall_s, decision_wall_s`` (wall clock time of the
        whole trace, and of the policy per decision).
    source
        Name of the throughput source.

    Returns
    -------
    matplotlib.figure.Figure
        Two logarithmic panels against the number of jobs, with the GPUs below it.
    """
    require_columns(table, "policy", "jobs", "gpus", "wall_s", "decision_wall_s", figure="scale")
    figure = new_figure(TWO_COLUMNS_IN, 2.7)
    left, right = figure.subplots(1, 2)
    for axes, column, unit in ((left, "wall_s", 1.0), (right, "decision_wall_s", 1e3)):
        for policy in policy_order(table["policy"]):
            rows = table[table["policy"] == policy].groupby("jobs")[column].mean()
            style = policy_style(policy)
            axes.plot(
                rows.index.to_numpy(float), unit * rows.to_numpy(float), color=style.colour, ls=style.line,
                marker=style.marker, ms=3,
            )  # fmt: skip
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("jobs in the trace, GPUs of the cluster")
        _size_ticks(axes, table)
    left.set_ylabel("wall time of a trace [s]")
    right.set_ylabel("wall time of a decision [ms]")
    figure.legend(handles=policy_handles(table["policy"]), loc="outside upper center", ncols=_LEGEND_COLUMNS)
    source_label(figure, source)
    return figure


def _size_ticks(axes: Axes, table: pd.DataFrame) -> None:
    """Put a tick at each number of jobs, with the GPUs of the cluster below it."""
    gpus = table.groupby("jobs")["gpus"].agg(lambda counts: ", ".join(f"{n:g}" for n in sorted(set(counts))))
    axes.xaxis.set_minor_locator(NullLocator())
    jobs = [float(str(count)) for count in gpus.index]
    axes.set_xticks(jobs, [f"{count:,.0f}\n{text}" for count, text in zip(jobs, gpus, strict=True)])
    axes.margins(x=0.08)
