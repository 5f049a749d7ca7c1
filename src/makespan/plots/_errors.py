"""Prediction errors: bars a model and plan family, and predicted against measured panels."""

import math

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from makespan.plots._style import (
    FAMILY_COLOURS,
    FAMILY_MARKERS,
    MODEL_TITLES,
    PALETTE,
    TWO_COLUMNS_IN,
    family_order,
    model_order,
    new_figure,
    panel_grid,
    require_columns,
    source_label,
    styled,
)

__all__ = ["plot_error_bars", "plot_prediction"]

Numbers = npt.NDArray[np.float64]

_PUBLISHED = ("published_avg_error_pct", "published_max_error_pct")
_LOW_IN = 2.5  # a figure too low for a label in one line
_BAR_WIDTH = 0.8
_GROUP_GAP = 1.3
_CLAIM_PCT = 10.0
_TICKS_PCT = (1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 70.0, 100.0, 150.0, 200.0)
_TICK_GAP = 0.12  # of the height of a panel
_OTHER = "#555555"


@styled
def plot_error_bars(table: pd.DataFrame, source: str, form: str, other_form: str) -> Figure:
    """Draw average and largest prediction error of each model and plan family.

    Parameters
    ----------
    table
        Columns of `makespan.tables.TABLE2` and ``published_avg_error_pct``,
        ``published_max_error_pct`` [%]; a row without held-out rows shows the published mark only.
    source
        Name of the throughput source.
    form
        Form of the performance model shown as filled bars.
    other_form
        Form shown as outlines.

    Returns
    -------
    matplotlib.figure.Figure
        Two panels above each other with the models side by side, on a square-root scale.
    """
    require_columns(
        table, "model", "plan_family", "form", "avg_error_pct", "max_error_pct",
        "published_avg_error_pct", "published_max_error_pct", figure="table2",
    )  # fmt: skip
    table = table.assign(**{name: pd.to_numeric(table[name]) for name in _PUBLISHED})
    figure = new_figure(TWO_COLUMNS_IN, 3.7)
    top, bottom = figure.subplots(2, 1, sharex=True)
    positions = _bar_positions(table)
    _error_panel(top, table, positions, form, other_form, "avg")
    _error_panel(bottom, table, positions, form, other_form, "max")
    top.set_ylabel("average error [%],\nsquare-root axis")
    bottom.set_ylabel("largest error [%],\nsquare-root axis")
    models = model_order(table["model"])
    centres = [np.mean([x for (model, _), x in positions.items() if model == name]) for name in models]
    bottom.set_xticks(centres, [MODEL_TITLES.get(name, name) for name in models])
    bottom.set_xlim(min(positions.values()) - 1.0, max(positions.values()) + 1.0)
    for axes in (top, bottom):
        axes.tick_params(axis="x", length=0)
    families = family_order(table["plan_family"])
    handles: list[Patch | Line2D] = [Patch(color=_colour(name), label=name) for name in families]
    handles += [
        Patch(facecolor="none", edgecolor=_OTHER, label=f"'{other_form}' form of the model"),
        *([_published_handle()] if table[list(_PUBLISHED)].notna().any(axis=None) else []),
        Line2D([], [], color=_OTHER, ls=(0, (4, 3)), lw=0.7, label="claimed bound of the average"),
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=min(len(handles), 5))
    source_label(figure, source)
    return figure


def _colour(family: str) -> str:
    return FAMILY_COLOURS.get(family, PALETTE["grey"])


def _published_handle() -> Line2D:
    return Line2D(
        [], [], ls="none", marker="_", mew=1.6, ms=6, color=PALETTE["black"], label="printed in the paper"
    )


def _signed_sqrt(value: Numbers) -> Numbers:
    return np.asarray(np.sign(value) * np.sqrt(np.abs(value)))


def _signed_square(value: Numbers) -> Numbers:
    return np.asarray(np.sign(value) * np.square(value))


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
    for model in model_order(table["model"]):
        for family in family_order(table.loc[table["model"] == model, "plan_family"]):
            positions[model, family] = x
            x += 1.0
        x += _GROUP_GAP
    return positions


def _error_panel(
    axes: Axes,
    table: pd.DataFrame,
    positions: dict[tuple[str, str], float],
    form: str,
    other_form: str,
    kind: str,
) -> None:
    for row in table.to_dict("records"):
        x = positions[row["model"], row["plan_family"]]
        value = row[f"{kind}_error_pct"]
        if row["form"] == form:
            axes.bar(x, value, _BAR_WIDTH, color=_colour(row["plan_family"]), lw=0, zorder=2)
            axes.plot(
                x, row[f"published_{kind}_error_pct"], ls="none", marker="_", ms=8, mew=2.6,
                color="white", zorder=4,
            )  # fmt: skip
            axes.plot(
                x, row[f"published_{kind}_error_pct"], ls="none", marker="_", ms=7, mew=1.4,
                color="black", zorder=5,
            )  # fmt: skip
        elif row["form"] == other_form:
            axes.bar(x, value, _BAR_WIDTH, fill=False, edgecolor=_OTHER, lw=0.6, zorder=3)
    if kind == "avg":
        axes.axhline(_CLAIM_PCT, color=_OTHER, ls=(0, (4, 3)), lw=0.7, zorder=1)
    axes.grid(visible=False, axis="x")
    axes.set_yscale("function", functions=(_signed_sqrt, _signed_square))
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_yticks(_ticks_pct(axes.get_ylim()[1]))


@styled
def plot_prediction(table: pd.DataFrame, source: str, form: str) -> Figure:
    """Draw predicted against measured (or emulated) iteration time, one panel a model.

    Parameters
    ----------
    table
        Columns of `makespan.tables.TABLE2_ROWS` and ``plan_family``; times in seconds.
    source
        Name of the throughput source.
    form
        Form of the performance model to show.

    Returns
    -------
    matplotlib.figure.Figure
        Logarithmic panels with the line of equal times; held-out rows are filled, flagged rows
        hollow, and rows used in the fit are crossed.
    """
    require_columns(
        table, "model", "plan_family", "form", "fitted", "clean", "measured_s", "predicted_s",
        figure="prediction",
    )  # fmt: skip
    shown = table[table["form"] == form]
    require_columns(shown, figure="prediction")
    models = model_order(shown["model"])
    figure, panels = panel_grid(len(models), 1.75)
    for axes, model in zip(panels, models, strict=False):
        _prediction_panel(axes, shown[shown["model"] == model])
        axes.set_title(MODEL_TITLES.get(model, model))
    panels[len(models)].legend(handles=_prediction_handles(shown), loc="center", labelspacing=0.35)
    made = "emulated" if source == "emulated" else "measured"
    figure.supxlabel(f"{made} iteration time [s]", fontsize=7)
    break_or_space = "\n" if figure.get_figheight() < _LOW_IN else " "
    figure.supylabel(f"predicted iteration time [s],{break_or_space}{form} form", fontsize=7)
    source_label(figure, source, strip=False)
    return figure


def _prediction_panel(axes: Axes, rows: pd.DataFrame) -> None:
    times = rows[["measured_s", "predicted_s"]].to_numpy(dtype=float)
    low, high = float(times.min()) / 1.25, float(times.max()) * 1.25
    axes.plot([low, high], [low, high], color=_OTHER, lw=0.7, zorder=1)
    for family in family_order(rows["plan_family"]):
        _draw_family(axes, rows[rows["plan_family"] == family], family)
    _log_axes(axes, low, high)
    axes.text(0.04, 0.96, _error_note(rows), transform=axes.transAxes, va="top", fontsize=6)


def _draw_family(axes: Axes, part: pd.DataFrame, family: str) -> None:
    colour, marker = _colour(family), FAMILY_MARKERS.get(family, "o")
    flagged = part[~part["fitted"] & ~part["clean"]]
    axes.plot(
        flagged["measured_s"], flagged["predicted_s"], ls="none", marker=marker, ms=3.2, mfc="white",
        mec=colour, mew=0.7, zorder=2,
    )  # fmt: skip
    clean = part[~part["fitted"] & part["clean"]]
    axes.plot(
        clean["measured_s"], clean["predicted_s"], ls="none", marker=marker, ms=3.4, mfc=colour,
        mec="white", mew=0.25, zorder=3,
    )  # fmt: skip
    fitted = part[part["fitted"]]
    axes.plot(
        fitted["measured_s"], fitted["predicted_s"], ls="none", marker="x", ms=3.4, mew=0.9,
        color=colour, zorder=4,
    )  # fmt: skip


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
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if few else (1.0,)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())


def _prediction_handles(rows: pd.DataFrame) -> list[Line2D]:
    handles = [
        Line2D([], [], ls="none", marker=FAMILY_MARKERS.get(name, "o"), color=_colour(name), label=name)
        for name in family_order(rows["plan_family"])
    ]
    handles.append(Line2D([], [], ls="none", marker="x", color=_OTHER, label="used in the fit"))
    if not rows["clean"].all():
        handles.append(
            Line2D([], [], ls="none", marker="o", mfc="white", mec=_OTHER, label="flagged anomaly")
        )
    handles.append(Line2D([], [], color=_OTHER, lw=0.7, label="prediction without error"))
    return handles
