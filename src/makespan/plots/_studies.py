"""Studies over one parameter: load, share of large models, round length, and size."""

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
        Two panels; bands hold the mean over seeds with 95 % confidence.
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
        Two panels; bands hold the mean over seeds with 95 % confidence.
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
        Two panels; bands hold the mean over seeds with 95 % confidence.
    """
    require_columns(table, "interval_s", figure="rounds")
    filled = table.assign(interval_s=pd.to_numeric(table["interval_s"]).fillna(0.0))
    return _study(filled, source, "interval_s", "length of a round [s], 0: at every event", "rounds")


def _study(table: pd.DataFrame, source: str, parameter: str, label: str, name: str) -> Figure:
    require_columns(table, "policy", parameter, "seed", "avg_jct_s", "makespan_s", figure=name)
    figure = new_figure(TWO_COLUMNS_IN, 2.9)
    left, right = figure.subplots(1, 2)
    for axes, column in ((left, "avg_jct_s"), (right, "makespan_s")):
        for policy in policy_order(table["policy"]):
            _band(axes, table[table["policy"] == policy], policy, parameter, column)
        axes.set_xlabel(label)
        points = np.unique(table[parameter].to_numpy(float))
        axes.set_xticks(points, [f"{point:g}" for point in points])
    left.set_yscale("log")
    _plain_log_ticks(left)
    left.set_ylabel("average JCT [h]")
    right.set_ylabel("makespan [h]")
    n_seeds = table.groupby(["policy", parameter])["seed"].nunique().max()
    handles = policy_handles(table["policy"])
    title = f"mean and 95 % confidence band over {n_seeds} seeds" if n_seeds > 1 else None
    figure.legend(handles=handles, loc="outside upper center", ncols=_LEGEND_COLUMNS, title=title)
    source_label(figure, source, strip=False)
    return figure


def _band(axes: Axes, rows: pd.DataFrame, policy: str, parameter: str, column: str) -> None:
    groups = (rows[column] / HOUR).groupby(rows[parameter])
    x = groups.mean().index.to_numpy(float)
    mean, half = groups.mean().to_numpy(float), _half_widths(groups)
    style = policy_style(policy)
    axes.plot(x, mean, color=style.colour, ls=style.line, marker=style.marker, ms=3)
    if half.any():
        axes.fill_between(x, np.maximum(mean - half, 1e-9), mean + half, color=style.colour, alpha=0.15, lw=0)


def _half_widths(groups: "pd.api.typing.SeriesGroupBy[float, float]") -> Floats:
    """Return half the width of the confidence interval of each mean, 0 for a single seed."""
    n = groups.count().to_numpy(float)
    spread = groups.std(ddof=1).fillna(0.0).to_numpy(float)
    quantile = special.stdtrit(np.maximum(n - 1.0, 1.0), 0.5 + _CONFIDENCE / 2.0)
    return np.asarray(np.where(n > 1, quantile * spread / np.sqrt(n), 0.0), dtype=np.float64)


def _plain_log_ticks(axes: Axes) -> None:
    """Label a logarithmic hours axis with plain numbers at 1, 2 and 5."""
    low, high = axes.get_ylim()
    decades = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    axes.yaxis.set_major_locator(FixedLocator([m * 10.0**e for e in decades for m in (1, 2, 5)]))
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
        Two logarithmic panels against the number of jobs; GPUs are written at the points of one policy.
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
        axes.set_xlabel("jobs in the trace")
    _sizes(left, table)
    left.set_ylabel("wall time of a trace [s]")
    right.set_ylabel("wall time of a decision [ms]")
    figure.legend(handles=policy_handles(table["policy"]), loc="outside upper center", ncols=_LEGEND_COLUMNS)
    source_label(figure, source, strip=False)
    return figure


def _sizes(axes: Axes, table: pd.DataFrame) -> None:
    """Write the GPUs above the slowest point of each size."""
    for jobs, rows in table.groupby("jobs"):
        gpus = ", ".join(f"{count:g}" for count in sorted(set(rows["gpus"])))
        axes.annotate(
            f"{gpus} GPUs", (float(str(jobs)), float(rows["wall_s"].max())), xytext=(0, 4),
            textcoords="offset points", ha="center", va="bottom", fontsize=5.5, color="#555555",
        )  # fmt: skip
    low, high = axes.get_ylim()
    axes.set_ylim(low, 3.0 * high)
    axes.margins(x=0.12)
