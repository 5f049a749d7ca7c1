"""Lines of policies: means with confidence bands, costs on logarithmic axes, distributions."""

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator
from scipy import special

from makespan.plots._style import (
    ONE_COLUMN_IN,
    POLICIES,
    TWO_COLUMNS_IN,
    Look,
    finished,
    look_of,
    new_figure,
    ordered,
    plain_numbers,
    require_columns,
    styled,
)
from makespan.units import HOUR

__all__ = ["plot_bands", "plot_cdf", "plot_costs"]

_CONFIDENCE = 0.95
_MARGIN = 1.25
_COARSE_RANGE = 12.0
_LEGEND_COLUMNS = 6
_TIMES = (("avg_jct_s", "average JCT [h]"), ("makespan_s", "makespan [h]"))

Floats = npt.NDArray[np.float64]


@styled
def plot_bands(
    table: pd.DataFrame, source: str, parameter: str, label: str, looks: Mapping[str, Look] = POLICIES
) -> Figure:
    """Draw average JCT and makespan against a parameter: geometric means over seeds with 95 % confidence.

    Parameters
    ----------
    table
        One row a simulation: ``policy, seed, avg_jct_s, makespan_s`` and the parameter.
    parameter, label
        Column of the parameter, and what it is.
    """
    require_columns(table, "policy", parameter, "seed", "avg_jct_s", "makespan_s", figure="bands")
    figure = new_figure(TWO_COLUMNS_IN, 3.0)
    points = np.unique(table[parameter].to_numpy(float))
    for axes, (column, title) in zip(figure.subplots(1, 2), _TIMES, strict=True):
        for policy in ordered(table["policy"], looks):
            rows = table[table["policy"] == policy]
            _band(axes, np.log(rows[column] / HOUR).groupby(rows[parameter]), look_of(looks, policy))
        axes.set_xticks(points, [f"{point:g}" for point in points])
        axes.set_xlabel(label)
        axes.set_ylabel(title)
        _log_hours(axes)
    n_seeds = int(table.groupby(["policy", parameter])["seed"].nunique().max())
    heading = f"geometric mean and 95 % confidence band over {n_seeds} seeds" if n_seeds > 1 else None
    handles = _handles(table["policy"], looks)
    return finished(figure, source, handles, ncols=_LEGEND_COLUMNS, title=heading, title_fontsize=6.5)


def _handles(policies: Iterable[str], looks: Mapping[str, Look], with_marker: bool = True) -> list[Line2D]:
    def line(look: Look) -> Line2D:
        marker = look.marker if with_marker else ""
        return Line2D([], [], color=look.colour, ls=look.line, marker=marker, label=look.title)

    return [line(look_of(looks, name)) for name in ordered(policies, looks)]


def _band(axes: Axes, groups: "pd.api.typing.SeriesGroupBy[float, float]", look: Look) -> None:
    """Draw means and band of one policy; in logarithms, because times are positive and skewed."""
    x, mean = groups.mean().index.to_numpy(float), groups.mean().to_numpy(float)
    half = _half_widths(groups)
    axes.plot(x, np.exp(mean), color=look.colour, ls=look.line, marker=look.marker, ms=3, zorder=3)
    if half.any():
        axes.fill_between(x, np.exp(mean - half), np.exp(mean + half), color=look.colour, alpha=0.13, lw=0)


def _half_widths(groups: "pd.api.typing.SeriesGroupBy[float, float]") -> Floats:
    """Half the width of the confidence interval of each mean, 0 for a single seed."""
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
    axes.yaxis.set_major_formatter(plain_numbers())
    axes.set_ylim(low, high)


@styled
def plot_costs(
    table: pd.DataFrame,
    source: str,
    metrics: Sequence[tuple[str, float, str]],
    looks: Mapping[str, Look] = POLICIES,
) -> Figure:
    """Draw what scheduling costs against the number of jobs, with the GPUs below it, on logarithmic axes.

    Parameters
    ----------
    table
        One row a simulation: ``policy, jobs, gpus`` and the columns of the metrics.
    metrics
        One panel each: column, factor to the unit that is shown, label.
    """
    require_columns(table, "policy", "jobs", "gpus", *(column for column, _, _ in metrics), figure="costs")
    figure = new_figure(TWO_COLUMNS_IN, 2.7)
    for axes, (column, unit, label) in zip(figure.subplots(1, len(metrics)), metrics, strict=True):
        for policy in ordered(table["policy"], looks):
            rows = table[table["policy"] == policy].groupby("jobs")[column].mean()
            look = look_of(looks, policy)
            x, y = rows.index.to_numpy(float), unit * rows.to_numpy(float)
            axes.plot(x, y, color=look.colour, ls=look.line, marker=look.marker, ms=3)
        axes.set(xscale="log", yscale="log", xlabel="jobs in the trace, GPUs of the cluster", ylabel=label)
        _size_ticks(axes, table)
    return finished(figure, source, _handles(table["policy"], looks), ncols=_LEGEND_COLUMNS)


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
    figure = new_figure(ONE_COLUMN_IN * 1.35 if single else TWO_COLUMNS_IN, 2.6)
    panels = figure.subplots(1, len(traces), sharey=True, sharex=True, squeeze=False)[0]
    for axes, trace in zip(panels, traces, strict=True):
        rows = table[table["trace"] == trace] if trace else table
        for name in ordered(rows["policy"], looks):
            look = look_of(looks, name)
            times = np.sort(rows.loc[rows["policy"] == name, "jct_s"].to_numpy(float))
            share = np.arange(1, len(times) + 1) / len(times)
            axes.step(times, share, where="post", color=look.colour, ls=look.line, lw=1.0)
        axes.set_xscale("log")
        axes.set_title((titles or {}).get(str(trace), str(trace)))
        axes.set_xlabel("job completion time [s]")
    panels[0].set_ylabel("share of jobs completed")
    panels[0].set_ylim(0, 1.01)
    handles = _handles(table["policy"], looks, with_marker=False)
    if single:
        return finished(figure, source, handles, strip=False, loc="outside right center")
    return finished(figure, source, handles, ncols=_LEGEND_COLUMNS)
