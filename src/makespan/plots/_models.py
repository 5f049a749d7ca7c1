"""Figures of the performance model: errors, predictions, and throughput against resources."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, LogLocator, NullFormatter, NullLocator

from makespan.plots._marks import (
    limit,
    limit_handle,
    published,
    published_handle,
    reference,
    reference_handle,
)
from makespan.plots._style import (
    FAMILIES,
    MODEL_TITLES,
    PALETTE,
    TWO_COLUMNS_IN,
    finished,
    look_of,
    model_panels,
    name_coincident,
    new_figure,
    ordered,
    patches,
    plain_numbers,
    require_columns,
    styled,
)

__all__ = ["ENVELOPE", "plot_cpu_sensitivity", "plot_error_bars", "plot_prediction", "plot_sensitivity"]

ENVELOPE = "best plan"
"""Name of the envelope in the column ``plan_family``."""

Numbers = npt.NDArray[Any]

_PUBLISHED = ("published_avg_error_pct", "published_max_error_pct")
_LOW_IN = 2.5  # a figure too low for a label in one line
_GROUP_GAP = 1.7
_CLAIM_PCT = 10.0
_TICKS_PCT = (1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 70.0, 100.0, 150.0, 200.0)
_TICK_GAP = 0.12  # of the height of a panel
_OTHER = "#555555"
_ENVELOPE_COLOUR = "#C9C9C9"


@styled
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
    needed = ("model", "plan_family", "form", "avg_error_pct", "max_error_pct", *_PUBLISHED)
    require_columns(table, *needed, figure="table2")
    table = table.assign(**{name: pd.to_numeric(table[name]) for name in _PUBLISHED})
    seen = table[["avg_error_pct", *_PUBLISHED]].notna().any(axis=1)
    table = table[seen.groupby([table["model"], table["plan_family"]]).transform("any")]
    require_columns(table, figure="table2")
    figure = new_figure(TWO_COLUMNS_IN, 3.7)
    top, bottom = figure.subplots(2, 1, sharex=True)
    positions = _bar_positions(table)
    for axes, kind in ((top, "avg"), (bottom, "max")):
        _error_panel(axes, table, positions, (form, other_form), kind)
        axes.tick_params(axis="x", length=0)
    top.set_ylabel("average error [%],\nsquare-root axis")
    bottom.set_ylabel("largest error [%],\nsquare-root axis")
    models = ordered(table["model"], MODEL_TITLES)
    centres = [np.mean([x for (model, _), x in positions.items() if model == name]) for name in models]
    bottom.set_xticks(centres, [MODEL_TITLES.get(name, name) for name in models])
    bottom.set_xlim(min(positions.values()) - 1.0, max(positions.values()) + 1.0)
    handles = patches(ordered(table["plan_family"], FAMILIES), FAMILIES)
    if other_form != form and other_form in set(table["form"]):
        handles.append(Patch(facecolor="none", edgecolor=_OTHER, label=f"'{other_form}' form of the model"))
    if table[list(_PUBLISHED)].notna().any(axis=None):
        handles.append(published_handle("printed in the paper"))
    handles.append(limit_handle("claimed bound of the average"))
    return finished(figure, source, handles, ncols=min(len(handles), 5))


def _ticks_pct(largest: float) -> list[float]:
    """Choose ticks that are far enough apart on the square-root scale."""
    ticks = [0.0]
    for tick in _TICKS_PCT:
        if tick <= largest and math.sqrt(tick) - math.sqrt(ticks[-1]) >= _TICK_GAP * math.sqrt(largest):
            ticks.append(tick)
    return ticks


def _bar_positions(table: pd.DataFrame) -> dict[tuple[str, str], float]:
    """Position of each bar, (model, family) to x."""
    positions: dict[tuple[str, str], float] = {}
    x = 0.0
    for model in ordered(table["model"], MODEL_TITLES):
        for family in ordered(table.loc[table["model"] == model, "plan_family"], FAMILIES):
            positions[model, family] = x
            x += 1.0
        x += _GROUP_GAP
    return positions


def _error_panel(
    axes: Axes,
    table: pd.DataFrame,
    positions: dict[tuple[str, str], float],
    forms: tuple[str, str],
    kind: str,
) -> None:
    for row in table.to_dict("records"):
        x, value = positions[row["model"], row["plan_family"]], row[f"{kind}_error_pct"]
        if row["form"] == forms[0]:
            axes.bar(x, value, 0.8, color=look_of(FAMILIES, row["plan_family"]).colour, lw=0, zorder=2)
            published(axes, x, row[f"published_{kind}_error_pct"], ms=3.0)
        elif row["form"] == forms[1]:
            axes.bar(x, value, 0.8, fill=False, edgecolor=_OTHER, lw=0.6, zorder=3)
    if kind == "avg":
        limit(axes, _CLAIM_PCT)
    axes.grid(visible=False, axis="x")
    signed_sqrt = (lambda y: np.sign(y) * np.sqrt(np.abs(y)), lambda y: np.sign(y) * np.square(y))
    axes.set_yscale("function", functions=signed_sqrt)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(plain_numbers())
    axes.set_yticks(_ticks_pct(axes.get_ylim()[1]))


@styled
def plot_prediction(table: pd.DataFrame, source: str, form: str) -> Figure:
    """Draw predicted against measured (or emulated) iteration time, one panel a model.

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
        ordered(shown["model"], MODEL_TITLES),
        1.75,
        lambda axes, model: _prediction_panel(axes, shown[shown["model"] == model]),
    )
    free.legend(handles=_prediction_handles(shown), loc="center", labelspacing=0.35)
    made = {"emulated": "emulated", "published": "measured", "measured": "measured"}.get(source, "given")
    gap = "\n" if figure.get_figheight() < _LOW_IN else " "
    label = f"predicted iteration time [s],{gap}{form} form"
    return _labelled(figure, source, f"{made} iteration time [s]", label)


def _prediction_panel(axes: Axes, rows: pd.DataFrame) -> None:
    times = rows[["measured_s", "predicted_s"]].to_numpy(dtype=float)
    middle = math.sqrt(times.min() * times.max())
    reach = max(1.25 * math.sqrt(times.max() / times.min()), 2.0)  # wide enough for two ticks
    low, high = middle / reach, middle * reach
    reference(axes, [low, high], [low, high])
    for family in ordered(rows["plan_family"], FAMILIES):
        part, look = rows[rows["plan_family"] == family], look_of(FAMILIES, family)
        hollow = {"marker": look.marker, "ms": 3.2, "mfc": "white", "mec": look.colour, "mew": 0.7}
        filled = {"marker": look.marker, "ms": 3.4, "mfc": look.colour, "mec": "white", "mew": 0.25}
        cross = {"marker": "+", "ms": 4.2, "mew": 0.9, "color": look.colour}
        kinds = [~part["fitted"] & ~part["clean"], ~part["fitted"] & part["clean"], part["fitted"]]
        marks: list[dict[str, Any]] = [hollow, filled, cross]
        for number, (kept, mark) in enumerate(zip(kinds, marks, strict=True)):
            points = part[kept]
            axes.plot(points["measured_s"], points["predicted_s"], ls="none", zorder=2 + number, **mark)
    _log_axes(axes, low, high)
    axes.text(0.04, 0.96, _error_note(rows), transform=axes.transAxes, va="top")


def _error_note(rows: pd.DataFrame) -> str:
    validated = rows[~rows["fitted"] & rows["clean"]]
    if validated.empty:
        return "no held-out rows"
    error = 100.0 * (validated["predicted_s"] / validated["measured_s"] - 1.0).abs()
    return f"mean {error.mean():.1f} %\nn = {len(error)}"


def _log_axes(axes: Axes, low: float, high: float) -> None:
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high), aspect="equal")
    few = math.log10(high / low) < 1.7
    for axis in (axes.xaxis, axes.yaxis):
        _log_ticks(axis, few)


def _log_ticks(axis: Axis, few: bool) -> None:
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if few else (1.0,)))
    axis.set_major_formatter(plain_numbers())
    axis.set_minor_formatter(NullFormatter())


def _prediction_handles(rows: pd.DataFrame) -> list[Line2D]:
    point: dict[str, Any] = {"ls": "none"}
    looks = [look_of(FAMILIES, name) for name in ordered(rows["plan_family"], FAMILIES)]
    handles = [Line2D([], [], marker=one.marker, color=one.colour, label=one.title, **point) for one in looks]
    if rows["fitted"].any():
        handles.append(Line2D([], [], marker="+", color=_OTHER, label="used in the fit", **point))
    if not rows["clean"].all():
        hollow: dict[str, Any] = {"marker": "o", "mfc": "white", "mec": _OTHER}
        handles.append(Line2D([], [], label="flagged anomaly", **hollow, **point))
    handles.append(reference_handle("prediction without error"))
    return handles


@styled
def plot_sensitivity(table: pd.DataFrame, source: str) -> Figure:
    """Draw throughput against GPUs, one panel a model, one line a plan family.

    The envelope is the broad line behind the others. Lines join the counts at which a family is faster than
    with fewer GPUs; the other counts are left out.

    Parameters
    ----------
    table
        Columns ``model, plan_family, gpus, throughput_samples_per_s``; the rows of family `ENVELOPE` are the
        best plan with at most that many GPUs. Rows of no throughput are left out.
    """
    require_columns(table, "model", "plan_family", "gpus", "throughput_samples_per_s", figure="sensitivity")
    shown = table[table["throughput_samples_per_s"] > 0]
    figure, free = model_panels(
        ordered(table["model"], MODEL_TITLES),
        1.55,
        lambda axes, model: _curve_panel(axes, shown[shown["model"] == model]),
    )
    handles = [_family_line(name) for name in ordered(shown["plan_family"], FAMILIES) if name != ENVELOPE]
    handles.append(Line2D([], [], color=_ENVELOPE_COLOUR, lw=3.2, label=ENVELOPE + " (envelope)"))
    free.legend(handles=handles, loc="center", labelspacing=0.4)
    _labelled(figure, source, "GPUs", "throughput [samples/s]")
    name_coincident(figure)
    return figure


def _labelled(figure: Figure, source: str, across: str, upwards: str) -> Figure:
    figure.supxlabel(across)
    figure.supylabel(upwards)
    return finished(figure, source, strip=False)


def _family_line(family: str) -> Line2D:
    look = look_of(FAMILIES, family)
    return Line2D([], [], color=look.colour, marker=look.marker, ms=3, lw=1, label=family)


def _curve_panel(axes: Axes, rows: pd.DataFrame) -> None:
    for family in reversed(ordered(rows["plan_family"], FAMILIES)):
        part = rows[rows["plan_family"] == family].sort_values("gpus")
        x, y = part["gpus"].to_numpy(), part["throughput_samples_per_s"].to_numpy()
        if family == ENVELOPE:
            axes.plot(x, y, color=_ENVELOPE_COLOUR, lw=3.2, drawstyle="steps-post", zorder=1)
        else:
            _draw_family(axes, x, y, family)
    _log2_axes(axes, int(rows["gpus"].max()) if len(rows) else 1)


def _draw_family(axes: Axes, gpus: Numbers, throughput: Numbers, family: str) -> None:
    """Join the counts at which more GPUs are faster than all fewer."""
    look = look_of(FAMILIES, family)
    gains = throughput > np.maximum.accumulate(np.concatenate([[0.0], throughput[:-1]]))
    axes.plot(
        gpus[gains], throughput[gains], color=look.colour, marker=look.marker, ms=2.8, lw=0.9,
        mec="white", mew=0.2, zorder=3, label=look.title,
    )  # fmt: skip


def _log2_axes(axes: Axes, largest: int) -> None:
    """Use powers of two up to a largest one across, and a logarithmic axis upwards."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator([2**k for k in range(int(math.log2(max(largest, 2))) + 1)]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(plain_numbers())
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    _log_ticks(axes.yaxis, math.log10(high / low) < 2.0)


@styled
def plot_cpu_sensitivity(table: pd.DataFrame, source: str) -> Figure:
    """Draw throughput of offload plans against CPU threads, one panel a model, one line a number of GPUs.

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

    figure, free = model_panels(ordered(table["model"], MODEL_TITLES), 1.55, draw)
    line: dict[str, Any] = {"marker": "o", "ms": 3, "lw": 1}
    titles = {gpus: f"{gpus} GPU{'s' * (gpus != 1)}" for gpus in counts}
    handles = [Line2D([], [], color=colours.get(n, "grey"), label=titles[n], **line) for n in counts]
    free.legend(handles=handles, loc="center", labelspacing=0.4)
    return _labelled(figure, source, "CPU threads a GPU", "offload throughput [samples/s]")
