"""Figures of single jobs: each function goes from paths of tables to a figure and its table."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, LogLocator, NullFormatter

from makespan.papers.morphling._tables import FIG7, FIG8, FIG9, FIG9_SUMMARY, TABLE2, TABLE2_ROWS
from makespan.plans import PlanFamily
from makespan.plots import (
    ENVELOPE,
    MODEL_TITLES,
    ONE_COLUMN_IN,
    PALETTE,
    TWO_COLUMNS_IN,
    cannot_run,
    cannot_run_handle,
    finished,
    limit_handle,
    name_coincident,
    new_figure,
    ordered,
    plain_numbers,
    plot_cpu_sensitivity,
    plot_error_bars,
    plot_prediction,
    plot_sensitivity,
    published,
    published_handle,
    require_columns,
    styled,
)
from makespan.plots import limit as limit_line
from makespan.tables import SENSITIVITY, SENSITIVITY_FAMILIES, read_csv
from makespan.units import MINUTE
from makespan.workloads import workload

__all__ = ["fig7", "fig8", "fig9", "prediction", "sensitivity", "sensitivity_cpu", "table2"]

Paths = Mapping[str, str]
Drawn = tuple[Figure, pd.DataFrame]

_OFFLOAD = (PlanFamily.ZERO_OFFLOAD.title, PlanFamily.ZERO_OFFLOAD_GC.title)
_CPU_FIGURE_GPUS = (1, 2, 4, 8)
_STRATEGY_COLOURS = ("blue", "vermilion", "green", "purple", "orange")
_JOB_COLOURS = ("sky", "orange", "green", "purple")
_BAR_WIDTH = 0.26
_LABEL_SHARE = 0.17  # of the largest stack: height of a label of two lines
_SPECIAL_RUNS = {"switching": PALETTE["vermilion"], "other seed": PALETTE["black"]}
_RUN_COLOURS = ("blue", "sky", "green", "orange", "purple", "brown", "grey")
_RUN_LINES = ("-", "--", ":")
_SMALLEST_DIFFERENCE = 1e-8


def table2(paths: Paths, source: str, forms: Sequence[str], shown: str) -> Drawn:
    """Prediction error by model and plan family; the other form is outlined."""
    errors = read_csv(paths["table2"], TABLE2)
    other = next((form for form in forms if form != shown), shown)
    return plot_error_bars(errors, source, shown, other), errors


def prediction(paths: Paths, source: str, form: str) -> Drawn:
    """Predicted against measured iteration times."""
    rows = read_csv(paths["table2_rows"], TABLE2_ROWS)
    return plot_prediction(rows, source, form), rows[rows["form"] == form]


def sensitivity(paths: Paths, source: str) -> Drawn:
    """Throughput against GPUs, family by family, and the envelope."""
    curves = read_csv(paths["sensitivity"], SENSITIVITY)
    table = family_curves(curves, read_csv(paths["sensitivity_families"], SENSITIVITY_FAMILIES))
    return plot_sensitivity(table, source), table


def family_curves(curves: pd.DataFrame, families: pd.DataFrame) -> pd.DataFrame:
    """Join family curves and envelope; offload plans have the CPU threads that all plans share."""
    columns = ["model", "plan_family", "gpus", "plan", "throughput_samples_per_s"]
    shown = families[families["cpu_threads"] == _default_threads(families)]
    best = curves.rename(columns={"best_plan": "plan"}).assign(plan_family=ENVELOPE)
    return pd.concat([shown[columns], best[columns]], ignore_index=True)


def _default_threads(families: pd.DataFrame) -> int:
    """Threads of the rows that do not offload; they are computed at the even share only."""
    plain = families[~families["plan_family"].isin(_OFFLOAD)]
    return int((plain if len(plain) else families)["cpu_threads"].mode().iloc[0])


def sensitivity_cpu(paths: Paths, source: str) -> Drawn:
    """Throughput of offload plans against CPU threads."""
    table = offload_curves(read_csv(paths["sensitivity_families"], SENSITIVITY_FAMILIES))
    return plot_cpu_sensitivity(table, source), table


def offload_curves(families: pd.DataFrame) -> pd.DataFrame:
    """Select the best offload plan for each number of CPU threads at 1, 2, 4 and 8 GPUs."""
    offload = families[families["plan_family"].isin(_OFFLOAD) & families["gpus"].isin(_CPU_FIGURE_GPUS)]
    key = ["model", "gpus", "cpu_threads"]
    ordered = offload.sort_values("throughput_samples_per_s", ascending=False, kind="stable")
    best = ordered.drop_duplicates(key)
    positions = {model: number for number, model in enumerate(dict.fromkeys(families["model"]))}
    ranked = best.assign(_model=best["model"].map(positions)).sort_values(["_model", "gpus", "cpu_threads"])
    return ranked[[*key, "plan", "throughput_samples_per_s"]].reset_index(drop=True)


def fig7(paths: Paths, source: str, workload_key: str, stage_duration_s: float) -> Drawn:
    """Adaptation of one job to changing limits."""
    stages = read_csv(paths["fig7"], FIG7)
    batch = workload(workload_key).global_batch_size
    return plot_adaptation(stages, source, stage_duration_s / MINUTE, batch), stages


@styled
def plot_adaptation(table: pd.DataFrame, source: str, stage_minutes: float, global_batch_size: int) -> Figure:
    """Draw throughput over time by strategy, with published values and stages that cannot run."""
    needed = ("strategy", "stage", "gpus", "plan", "throughput_samples_per_s", "published_iter_time_s")
    require_columns(table, *needed, figure="fig7")
    figure = new_figure(TWO_COLUMNS_IN, 2.7)
    axes = figure.subplots()
    stages, strategies = (list(dict.fromkeys(table[name])) for name in ("stage", "strategy"))
    running = table.loc[table["throughput_samples_per_s"] > 0, "throughput_samples_per_s"]
    floor = float(running.min()) / 2.0 if len(running) else 0.1
    for number, strategy in enumerate(strategies):
        rows = table[table["strategy"] == strategy].set_index("stage").loc[stages]
        offset = 0.12 + 0.76 * (number + 1) / (len(strategies) + 1)
        _draw_strategy(axes, rows, strategy, number, (offset, stage_minutes, floor, global_batch_size))
    unit = "device" if source == "measured" else "GPU"
    _annotate_stages(axes, table[table["strategy"] == strategies[0]], stage_minutes, unit)
    axes.set(yscale="log", xlabel="time [min]", ylabel="throughput [samples/s]")
    axes.set_xlim(0, stage_minutes * len(stages))
    axes.set_ylim(floor / 1.6, float(table["throughput_samples_per_s"].max()) * 3.6)
    axes.xaxis.set_major_locator(FixedLocator([stage_minutes * k for k in range(len(stages) + 1)]))
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(plain_numbers())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(visible=False, axis="x")
    kinds = {
        "published value": (table["published_iter_time_s"] > 0).any(),
        "cannot run": not (table["throughput_samples_per_s"] > 0).all(),
    }
    handles = _strategy_handles(strategies, {kind for kind, is_there in kinds.items() if is_there})
    finished(figure, source, handles, strip=False, loc="outside right center", labelspacing=0.6)
    name_coincident(figure)
    return figure


def _strategy_line(number: int) -> dict[str, Any]:
    """Colour and width of a strategy: each is narrower than those before, which stay visible behind it."""
    colour = PALETTE[_STRATEGY_COLOURS[number % len(_STRATEGY_COLOURS)]]
    broad = {"lw": 3.6, "alpha": 0.4, "zorder": 2}
    return {"color": colour, **(broad if number == 0 else {"lw": max(2.6 - 0.5 * number, 0.8), "zorder": 3})}


def _draw_strategy(
    axes: Axes, rows: pd.DataFrame, name: str, number: int, frame: tuple[float, float, float, int]
) -> None:
    offset, minutes, floor, batch = frame
    values = rows["throughput_samples_per_s"].to_numpy(dtype=float)
    published_s = rows["published_iter_time_s"].to_numpy(dtype=float)
    edges = minutes * np.arange(len(values) + 1)
    steps = np.repeat(np.where(values > 0, values, np.nan), 2)
    style = _strategy_line(number)
    axes.plot(np.repeat(edges, 2)[1:-1], steps, solid_capstyle="butt", label=name, **style)
    x = edges[:-1] + offset * minutes
    has_failed = ~(values > 0)
    cannot_run(axes, x[has_failed], np.full(has_failed.sum(), floor), style["color"])
    ran = published_s > 0
    published(axes, x[ran], batch / published_s[ran], style["color"])


def _annotate_stages(axes: Axes, first: pd.DataFrame, minutes: float, unit: str) -> None:
    place: dict[str, Any] = {"ha": "center", "va": "top"}
    place["transform"] = axes.get_xaxis_transform()
    for number, row in enumerate(first.to_dict("records")):
        if number:
            axes.axvline(number * minutes, color="#c4c4c4", lw=0.6, zorder=1)
        middle = (number + 0.5) * minutes
        axes.text(middle, 0.985, f"{row['stage']} ({row['gpus']} {unit}{'s' * (row['gpus'] != 1)})", **place)
        axes.text(middle, 0.915, row["plan"] or "none", color=PALETTE[_STRATEGY_COLOURS[0]], **place)


def _strategy_handles(strategies: list[str], kinds: set[str]) -> list[Line2D]:
    handles = [Line2D([], [], label=name, **_strategy_line(number)) for number, name in enumerate(strategies)]
    if "published value" in kinds:
        handles.append(published_handle("published value"))
    if "cannot run" in kinds:
        handles.append(cannot_run_handle())
    return handles


def fig8(paths: Paths, source: str) -> Drawn:
    """Throughput of two jobs that share GPUs."""
    shares = read_csv(paths["fig8"], FIG8)
    return plot_sharing(shares, source), shares


@styled
def plot_sharing(table: pd.DataFrame, source: str) -> Figure:
    """Draw speed-ups stacked for each scheduler, with labels beside the bars.

    Marks on the left are the published values, stacked alike, each with its number.
    """
    require_columns(table, "scheduler", "job", "gpus", "plan", "speedup", "published_speedup", figure="fig8")
    figure = new_figure(1.2 * ONE_COLUMN_IN, 2.6)
    axes = figure.subplots()
    schedulers = list(dict.fromkeys(table["scheduler"]))
    jobs = ordered(table["job"], MODEL_TITLES)
    largest = float(table.groupby("scheduler")[["speedup", "published_speedup"]].sum().to_numpy().max())
    colours = {job: PALETTE[_JOB_COLOURS[number % len(_JOB_COLOURS)]] for number, job in enumerate(jobs)}
    for x, scheduler in enumerate(schedulers):
        rows = table[table["scheduler"] == scheduler].set_index("job").loc[jobs]
        _stack(axes, x, rows, colours, _LABEL_SHARE * largest)
    axes.set_xticks(range(len(schedulers)), schedulers)
    axes.set_xlim(-0.4, len(schedulers) - 0.35)
    axes.set_ylim(0, 1.15 * largest)
    axes.tick_params(axis="x", length=0)
    axes.grid(visible=False, axis="x")
    axes.set_ylabel("speed-up\n[× the job alone on all GPUs]")
    boxes = [Patch(color=colours[job], label=MODEL_TITLES.get(job, job)) for job in jobs]
    return finished(figure, source, [*boxes, published_handle("published, with its value")], ncols=3)


def _stack(axes: Axes, x: int, rows: pd.DataFrame, colours: Mapping[str, str], room: float) -> None:
    values, printed = (rows[name].to_numpy(float) for name in ("speedup", "published_speedup"))
    tops, marks = np.cumsum(values), np.cumsum(printed)
    left, right = x - _BAR_WIDTH / 2, x + _BAR_WIDTH / 2
    axes.bar(
        x,
        values,
        _BAR_WIDTH,
        bottom=tops - values,
        color=[colours[job] for job in rows.index],
        lw=0,
        zorder=2,
    )
    places = _apart(tops - values / 2, room)
    for place, value, gpus, plan in zip(places, values, rows["gpus"], rows["plan"], strict=True):
        text = f"{value:.2f}: {gpus} GPU{'s' * (gpus != 1)},\n{plan}"
        axes.text(right + 0.03, place, text, va="center", linespacing=1.0)
    for place, mark in zip(_apart(marks, room / 2), marks, strict=True):
        published(axes, left - 0.03, mark)
        axes.text(left - 0.08, place, f"{mark:.2f}", ha="right", va="center")
    axes.text(
        x, tops[-1] + room / 10, f"{tops[-1]:.2f}", ha="center", va="bottom", fontweight="bold", zorder=6
    )


def _apart(places: np.ndarray, room: float) -> np.ndarray:
    """Move rising places upwards where they are closer than labels need."""
    moved = places.astype(float)
    for number in range(1, len(moved)):
        moved[number] = max(moved[number], moved[number - 1] + room)
    return moved


def fig9(paths: Paths, source: str, limit: float) -> Drawn:
    """Accuracy under reconfiguration."""
    losses = read_csv(paths["fig9"], FIG9)
    return plot_accuracy(losses, read_csv(paths["fig9_summary"], FIG9_SUMMARY), limit, source), losses


@styled
def plot_accuracy(table: pd.DataFrame, summary: pd.DataFrame, limit: float, source: str) -> Figure:
    """Draw the losses of all runs, and their distance to the first one where it is not zero."""
    require_columns(table, "run", "step", "loss", "abs_difference", figure="fig9")
    require_columns(summary, "run", "kind", "mean_abs_difference", "max_abs_difference", figure="fig9")
    figure = new_figure(TWO_COLUMNS_IN, 3.0)
    left, right = figure.subplots(1, 2, width_ratios=[0.8, 1.2])
    runs, same = list(dict.fromkeys(table["run"])), list[str]()
    plain = [run for run in runs if run not in _SPECIAL_RUNS]
    for run in runs:
        rows = table[table["run"] == run]
        colour, line = _run_look(run, plain)
        width = 1.3 if run in _SPECIAL_RUNS else 0.8
        left.plot(rows["step"], rows["loss"], line, color=colour, lw=width, label=run)
        seen = rows[rows["abs_difference"] > _SMALLEST_DIFFERENCE]
        right.plot(seen["step"], seen["abs_difference"], line, color=colour, lw=width, marker=".", ms=1.5)
        if seen.empty and run != runs[0]:
            same.append(run)
    _limits(right, summary, limit)
    right.set_yscale("log")
    left.set_ylabel("loss [nat]")
    right.set_ylabel(f"|loss $-$ loss of {runs[0]}| [nat]")
    for axes in (left, right):
        axes.set_xlabel("optimiser step")
    handles = left.get_legend_handles_labels()[0]
    if summary["kind"].str.startswith("published").any():
        handles.append(published_handle("published: mean and largest, black: other seed", PALETTE["grey"]))
    if (summary["kind"] == "other seed").any():
        handles.append(limit_handle(f"{limit:g} × mean of other seed"))
    finished(figure, source, handles, strip=False, ncols=5)
    name_coincident(figure)
    if same:
        right.set_title(f"no difference: {', '.join(same)}")
    return figure


def _run_look(run: str, plain: list[str]) -> tuple[str, str]:
    if run in _SPECIAL_RUNS:
        return _SPECIAL_RUNS[run], "-"
    number = plain.index(run)
    colour = PALETTE[_RUN_COLOURS[number % len(_RUN_COLOURS)]]
    return colour, _RUN_LINES[number // len(_RUN_COLOURS) % len(_RUN_LINES)]


def _limits(axes: Axes, summary: pd.DataFrame, limit: float) -> None:
    """Draw what the claim allows, and the paper's means and largest values at the right edge."""
    other = summary[summary["kind"] == "other seed"]["mean_abs_difference"]
    if len(other):
        limit_line(axes, limit * float(other.iloc[0]))
    paper = summary[summary["kind"].str.startswith("published")]
    for number, (_, row) in enumerate(paper.iterrows()):
        spot = 1.03 + 0.03 * number
        colour = PALETTE["black" if str(row["kind"]).endswith("other seed") else "grey"]
        span = [row["mean_abs_difference"], row["max_abs_difference"]]
        outside: dict[str, Any] = {"clip_on": False, "transform": axes.get_yaxis_transform()}
        published(axes, [spot, spot], span, colour, is_joined=True, **outside)
