"""Figures of Morphling: each function takes tables and returns a figure and the table behind it."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, LogLocator, NullFormatter

from makespan.errors import TraceError
from makespan.hardware import cluster
from makespan.papers.morphling.comparisons import RECONFIGURING, paired, threads_worth
from makespan.plans import PlanFamily
from makespan.plots import (
    ENVELOPE,
    MODEL_TITLES,
    ONE_COLUMN_IN,
    PALETTE,
    POLICIES,
    TWO_COLUMNS_IN,
    Style,
    add_legend,
    cannot_run,
    cannot_run_handle,
    draw_stack,
    figure_style,
    in_order,
    job_spans,
    limit as limit_line,
    limit_handle,
    name_coincident,
    name_groups,
    new_figure,
    plain_numbers,
    plot_allocation,
    plot_bands,
    plot_cdf,
    plot_costs,
    plot_cpu_sensitivity,
    plot_error_bars,
    plot_gantt,
    plot_grouped_bars,
    plot_intervals,
    plot_prediction,
    plot_ratio_bars,
    plot_sensitivity,
    plot_variants,
    published,
    published_handle,
    reference,
    reference_handle,
    require_columns,
    spread,
    spread_handle,
)
from makespan.units import HOUR, MINUTE
from makespan.workloads import workload

# ------------------------------------------------------------------------------------------------
# Cluster experiments

Tables = Mapping[str, pd.DataFrame]
Drawn = tuple[Figure, pd.DataFrame]
_TRACES = {"base": "Base", "bp": "best plan (BP)", "mt": "multi-tenant (MT)"}
_METRICS = [
    ("avg_jct_s", "jct_ratio_to_lookahead", "average JCT [h]"),
    ("makespan_s", "makespan_ratio_to_lookahead", "makespan [h]"),
]
_SHORT = {"base": "Base", "bp": "BP", "mt": "MT"}
_FIXED = "fixed"
_PARTS = {
    "": Style("plans and resources", PALETTE["black"], "o"),
    "-s": Style("both, no sharing", PALETTE["black"], "d", (0, (6, 1)), 0.8),
    "-e": Style("plans only", PALETTE["black"], "^", (0, (4, 2)), 0.65),
    "-r": Style("resources only", PALETTE["black"], "v", (0, (5, 1, 1, 1)), 0.4),
    "-n": Style("neither", PALETTE["black"], "x", (0, (1, 1)), 0.2),
    _FIXED: Style("the best policy that reconfigures nothing", PALETTE["vermilion"], "D"),
}
"""What a policy whose name ends like this may still change, and the best of others that changes nothing."""
_WHOLE = {
    "morphling-work": Style("Morphling-work", PALETTE["blue"], "o"),
    "morphling-lookahead": Style("Morphling-lookahead", PALETTE["sky"], "s"),
    "morphling": Style("Morphling", PALETTE["black"], "P"),
}
_ABLATED = {
    f"{name}{ending}": replace(
        style, title=f"{style.title}{ending.upper()}", marker=part.marker, line=part.line, strength=0.55
    )
    for name, style in _WHOLE.items()
    for ending, part in _PARTS.items()
    if ending.startswith("-")
}
_MODES = {
    "sampled": Style("sampled rows", PALETTE["blue"], "o", strength=0.25),
    "requests": Style("requests too", PALETTE["blue"], "s", strength=0.55),
    "exact": Style("all times", PALETTE["blue"], "^", strength=1.0),
}
"""What policies know beforehand."""
STYLES = _WHOLE | _ABLATED | POLICIES
_OBJECTIVES = {
    "gavel-ftf": replace(POLICIES["gavel"], title="Gavel, finish-time fairness"),
    "gavel-makespan": replace(POLICIES["gavel"], title="Gavel, makespan"),
}
_TITLES = {name: style.title for name, style in STYLES.items()} | _TRACES


def at_delay(table: pd.DataFrame, delay_s: float) -> pd.DataFrame:
    """Select the rows of one restart delay [s]."""
    rows = table[table["restart_delay_s"] == delay_s]
    if rows.empty:
        raise TraceError(f"table4 has no rows with a restart delay of {delay_s:g} s")
    return rows


def table4(tables: Tables, source: str, delay_s: float) -> Drawn:
    """Average completion time and makespan of every policy, with what the released simulator prints."""
    rows = tables["table4"]
    cells = tables["published_table4"]
    marks = cells.rename(columns=lambda name: name.removeprefix("published_"))
    note = f"restart delay {delay_s:g} s; number at the left: ratio to Morphling-lookahead"
    label = "printed by the released simulator"
    figure = plot_ratio_bars(at_delay(rows, delay_s), source, _METRICS, note, STYLES, _TRACES, marks, label)
    return figure, rows


def lists(tables: Tables, source: str) -> Drawn:
    """Means and intervals of completion time and makespan over many job lists, at the first restart delay."""
    rows = tables["lists_summary"]
    shown = rows[rows["restart_delay_s"] == rows["restart_delay_s"].iloc[0]]
    shown = shown[~shown["policy"].isin(_ABLATED)]
    parts = [
        pd.DataFrame(
            {
                "panel": f"{_SHORT[str(trace)]}, {n_gpus} GPUs\n{what}",
                "policy": own["policy"],
                **{end: own[f"{name}_{end}_s"] for end in ("mean", "low", "high")},
                "is_hollow": own["sla_attainment"] < 1,
            }
        )
        for (n_gpus, trace), own in shown.groupby(["gpus", "trace"])
        for name, what in (("jct", "average JCT"), ("makespan", "makespan"))
    ]
    n_lists = f"{shown['lists'].min()} lists"
    heading = f"geometric mean, {n_lists}, restart delay {shown['restart_delay_s'].iloc[0]:g} s"
    hollow, spread_label = "breaks guarantees", "95 % interval"
    figure = plot_intervals(pd.concat(parts), source, heading, hollow, spread_label, STYLES | _OBJECTIVES)
    return figure, rows


def today(tables: Tables, source: str) -> Drawn:
    """Means and intervals of completion time and makespan on a cluster of today, beside the testbed."""
    own, testbed = tables["today_summary"], tables["lists_summary"]
    first = testbed[["gpus", "restart_delay_s"]].iloc[0]
    beside = testbed[
        (testbed[["gpus", "restart_delay_s"]] == first).all(axis=1) & (testbed["trace"] == "base")
    ]
    beside = beside[beside["policy"].isin(own["policy"])]
    parts = [
        pd.DataFrame(
            {
                "panel": f"{where}\n{what}",
                "policy": rows["policy"],
                **{end: rows[f"{name}_{end}_s"] for end in ("mean", "low", "high")},
                "is_hollow": False,
            }
        )
        for name, what in (("jct", "average JCT"), ("makespan", "makespan"))
        for where, rows in (("models of today", own), ("testbed", beside))
    ]
    heading = f"geometric mean, {own['lists'].min()} and {beside['lists'].min()} lists"
    return plot_intervals(pd.concat(parts), source, heading, "", "95 % interval", STYLES), pd.concat(
        [own.assign(where="today"), beside[own.columns].assign(where="testbed")], ignore_index=True
    )


_RECOVERIES = {
    "restart": Style("restart", PALETTE["vermilion"], "o"),
    "elastic": Style("elastic", PALETTE["blue"], "s", (0, (4, 2))),
    "resilient": Style("resilient", PALETTE["green"], "^", (0, (5, 1, 1, 1))),
}
"""Kinds of recovery from failures."""


@figure_style
def failures_goodput(tables: Tables, source: str) -> Drawn:
    """Goodput against the rate of failures by size, policy and recovery, beside the analytic model."""
    table = tables["failures_summary"]
    figure, panels = _failure_panels(table, "goodput", 1.0, "goodput")
    for axes, rows in panels:
        modelled = rows.dropna(subset=["expected_goodput"])
        reference(axes, modelled["per_day"], modelled["expected_goodput"])
        least = float(np.nanmin(table[["goodput_mean", "goodput_low"]].to_numpy(float)))
        axes.set_ylim(np.floor(10.0 * least) / 10.0, 1.0)
    return _with_recoveries(figure, table, source, [reference_handle("analytic model of restarts")]), table


@figure_style
def failures_jct(tables: Tables, source: str) -> Drawn:
    """Average completion time against the rate of failures by size, policy and recovery."""
    table = tables["failures_summary"]
    figure, panels = _failure_panels(table, "jct", HOUR, "average JCT [h]")
    for axes, _ in panels:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0, 7.0)))
        axes.yaxis.set_major_formatter(plain_numbers())
        axes.yaxis.set_minor_locator(FixedLocator([]))
    return _with_recoveries(figure, table, source, []), table


def _failure_panels(
    table: pd.DataFrame, name: str, unit: float, title: str
) -> tuple[Figure, list[tuple[Any, pd.DataFrame]]]:
    """Draw means with intervals, a row of panels for each size and a column for each policy."""
    sizes, policies = sorted(table["gpus"].unique()), in_order(table["policy"], STYLES)
    ending = "_s" if name == "jct" else ""
    figure = new_figure(TWO_COLUMNS_IN, 0.7 + 1.7 * len(sizes))
    grid = figure.subplots(len(sizes), len(policies), sharex=True, sharey="row", squeeze=False)
    panels = []
    for (row, size), (column, policy) in itertools.product(enumerate(sizes), enumerate(policies)):
        axes, rows = grid[row, column], table[(table["gpus"] == size) & (table["policy"] == policy)]
        kinds = in_order(rows["recovery"], _RECOVERIES)
        for number, kind in enumerate(kinds):
            style, own = _RECOVERIES[kind], rows[rows["recovery"] == kind].sort_values("per_day")
            # A little apart, so that marks and intervals of one rate can be told.
            x = own["per_day"].to_numpy(float) * 1.06 ** (number - (len(kinds) - 1) / 2)
            mean, low, high = (
                own[f"{name}_{end}{ending}"].to_numpy(float) / unit for end in ("mean", "low", "high")
            )
            axes.plot(x, mean, style.marker, ls=style.line, color=style.colour, ms=4)
            spread(axes, x, low, high, style.colour)
        axes.set_xscale("log")
        points = sorted(table["per_day"].unique())
        axes.set_xticks(points, [f"{point:g}" for point in points])
        axes.xaxis.set_minor_locator(FixedLocator([]))
        if row == 0:
            axes.set_title(STYLES[policy].title if policy in STYLES else policy)
        if column == 0:
            axes.set_ylabel(f"{size} GPUs\n{title}")
        panels.append((axes, rows))
    figure.supxlabel("failures a day of the whole cluster")
    return figure, panels


def _with_recoveries(figure: Figure, table: pd.DataFrame, source: str, more: Sequence[Line2D]) -> Figure:
    handles = [
        Line2D([], [], label=style.title, marker=style.marker, ls=style.line, color=style.colour, ms=4)
        for style in (_RECOVERIES[kind] for kind in in_order(table["recovery"], _RECOVERIES))
    ]
    interval = [spread_handle("95 % interval")] if table["seeds"].min() > 1 else []
    return add_legend(figure, source, [*handles, *interval, *more], strip=False, ncols=5)


def rivals(tables: Tables, source: str) -> Drawn:
    """Every other value of one parameter of each rival, beside what is shipped."""
    rows = tables["rivals"]
    varied = rows[rows["parameter"].fillna("") != ""]
    values = varied["parameter"].str.removesuffix("_gpu_s") + " " + varied["value"].str.replace(" ", ", ")
    shown = pd.DataFrame(
        {"policy": varied["policy"], "variant": values}
        | {end: varied[f"ratio_{end}"] for end in ("mean", "low", "high")}
    )
    n_runs = rows["runs"].min()
    many = "one run each" if n_runs == 1 else f"{n_runs} runs each"
    heading = f"average JCT, or makespan where that is the aim, over that of shipped values; {many}"
    return plot_variants(shown, source, heading, "as shipped", STYLES | _OBJECTIVES), rows


def threads(tables: Tables, source: str) -> Drawn:
    """Worth of choosing CPU threads to each policy at each share of jobs that offload."""
    rows = tables["threads"]
    worth = threads_worth(rows)
    variants = [f"{100 * share:g} % offload" for share in worth["offload_share"]]
    shown = pd.DataFrame(
        {"policy": worth["policy"], "variant": variants}
        | {end: worth[f"ratio_{end}"] for end in ("mean", "low", "high")}
    )
    heading = f"average JCT with requested over that with chosen CPU threads, {worth['n'].min()} lists"
    return plot_variants(shown, source, heading, "no difference", STYLES), rows


def ablation(tables: Tables, source: str) -> Drawn:
    """Average completion time of Morphling without some of its parts, over that of the whole policy."""
    rows = tables["lists"]
    label = "average JCT\n[× that of the whole policy]"
    worth = parts_worth(rows)
    return plot_grouped_bars(worth, source, _PARTS, label, _TITLES, STYLES), worth


def parts_worth(rows: pd.DataFrame) -> pd.DataFrame:
    """Return what every ablation takes of the time of the whole policy, and the best that changes nothing.

    Geometric means over the lists on which the ablations ran.
    """
    setting, lists = ["trace", "gpus", "restart_delay_s"], ["draw", "seed"]
    ablated = rows[rows["policy"].isin(_ABLATED)][setting].drop_duplicates()
    pairs = paired(rows.merge(ablated), setting, lists)
    parts = []
    for name in (one for one in _WHOLE if f"{one}-n" in set(rows["policy"])):
        own = pairs[pairs["policy"] == name].set_index("rival")["jct_ratio_mean"]
        fixed = own[[rival for rival in own.index if rival in POLICIES and rival not in RECONFIGURING]]
        trace = str(ablated["trace"].iloc[0])
        parts.append((name, trace, "", 1.0))
        parts += [(name, trace, end, float(own[f"{name}{end}"])) for end in _PARTS if f"{name}{end}" in own]
        if len(fixed):
            parts.append((name, trace, _FIXED, float(fixed.min())))
    return pd.DataFrame(parts, columns=["panel", "group", "series", "value"])


def jct_cdf(tables: Tables, source: str, policies: Sequence[str]) -> Drawn:
    """Distribution of completion times under all policies but the ablations."""
    jobs = tables["jct"]
    shown = jobs[jobs["policy"].isin(set(policies) - set(_ABLATED))]
    return plot_cdf(shown, source, STYLES, _TRACES), shown


def allocation(tables: Tables, source: str, cluster_name: str) -> Drawn:
    """GPUs by plan family over time."""
    wide = allocation_by_family(tables["allocation"])
    return plot_allocation(wide, source, cluster(cluster_name).n_gpus, _TITLES), wide


def allocation_by_family(table: pd.DataFrame) -> pd.DataFrame:
    """Give every plan family a column, 0 where a policy never uses it; policies keep their order."""
    parts = []
    for policy, rows in table.groupby("policy", sort=False):
        wide = rows.pivot_table(index="time_s", columns="plan_family", values="gpus", aggfunc="last")
        parts.append(wide.reset_index().assign(policy=policy))
    joined = pd.concat(parts, ignore_index=True)
    families = sorted(str(name) for name in joined.columns if name not in ("policy", "time_s"))
    return joined[["policy", "time_s", *families]].fillna(0)


def gantt(tables: Tables, source: str) -> Drawn:
    """Who held which GPU when."""
    events = tables["schedule"]
    spans = job_spans(events.assign(time_s=events["time_s"] - events["time_s"].min()))
    return plot_gantt(spans, source), spans


def knowledge(tables: Tables, source: str) -> Drawn:
    """Completion time by what policies know, with the share of starts whose time was known."""
    rows = tables["knowledge"]
    shown = rows[["trace", "policy", "mode"]].set_axis(["panel", "group", "series"], axis=1)
    for column, end in (("value", "mean"), ("low", "low"), ("high", "high")):
        shown[column] = rows[f"jct_{end}_s"] / MINUTE
    shown["text"] = [f"{100 * share:.0f}" for share in rows["known_starts"]]
    label = "average JCT [min];\nnumbers: known starts [%]"
    titles = {name: title.replace("-", "-\n") for name, title in _TITLES.items()} | _TRACES
    return plot_grouped_bars(shown, source, _MODES, label, titles, spread_label="95 % interval"), rows


def load(tables: Tables, source: str) -> Drawn:
    """Completion time against the arrival rate."""
    rows = tables["load"]
    return plot_bands(rows, source, "load_factor", "arrival rate [× that of the trace]", STYLES), rows


def large_models(tables: Tables, source: str) -> Drawn:
    """Completion time against the share of large models."""
    rows = tables["large_models"]
    percent = rows.assign(large_share=100.0 * rows["large_share"])
    return plot_bands(percent, source, "large_share", "jobs with large models [%]", STYLES), rows


def rounds(tables: Tables, source: str) -> Drawn:
    """Completion time against the length of a round."""
    rows = tables["rounds"]
    filled = rows.assign(interval_s=rows["interval_s"].fillna(0.0))
    return plot_bands(filled, source, "interval_s", "length of a round [s], 0: at every event", STYLES), rows


def scale(tables: Tables, source: str) -> Drawn:
    """Cost of scheduling against size."""
    rows = tables["scale"]
    metrics = [
        ("wall_s", "fastest_wall_s", "slowest_wall_s", 1.0, "wall time of a trace [s]"),
        (
            "decision_wall_s",
            "fastest_decision_wall_s",
            "slowest_decision_wall_s",
            1e3,
            "wall time of a decision [ms]",
        ),
    ]
    heading, spread_label = "median of repeated simulations", "fastest to slowest"
    return plot_costs(rows, source, metrics, heading, spread_label, STYLES), rows


# ------------------------------------------------------------------------------------------------
# Single jobs

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
_DESIGNS = {
    "sequential": Style("sequential", PALETTE["blue"], "o"),
    "fixed": Style("fixed", PALETTE["black"], "s"),
    "random": Style("random", PALETTE["orange"], "^"),
}
_CHOICE_METRICS = {
    "avg_error_pct": "average error",
    "p95_error_pct": "95th percentile",
    "max_error_pct": "largest error",
    "regret_mean_pct": "mean loss",
    "regret_max_pct": "largest loss",
}
"""Metrics of the figure on the choice of runs."""


def table2(tables: Tables, source: str, forms: Sequence[str], shown: str) -> Drawn:
    """Prediction error by model and plan family; the other form is outlined."""
    errors = tables["table2"]
    other = next((form for form in forms if form != shown), shown)
    return plot_error_bars(errors, source, shown, other), errors


def prediction(tables: Tables, source: str, form: str) -> Drawn:
    """Predicted against measured iteration times."""
    rows = tables["table2_rows"]
    return plot_prediction(rows, source, form), rows[rows["form"] == form]


@figure_style
def sampling(tables: Tables, source: str) -> Drawn:
    """Error and regret by how runs are chosen: median and spread over the starts, one panel per metric."""
    table, starts = tables["sampling"], tables["sampling_starts"]
    figure = new_figure(TWO_COLUMNS_IN, 1.9)
    panels = figure.subplots(1, len(_CHOICE_METRICS))
    for axes, (metric, title) in zip(panels, _CHOICE_METRICS.items(), strict=True):
        rows = table[table["metric"] == metric].set_index("design")
        for place, (design, style) in enumerate(_DESIGNS.items()):
            values = starts.loc[starts["design"] == design, metric]
            axes.plot(values, np.full(len(values), place), "|", color=style.colour, alpha=0.4, ms=6, mew=0.6)
            axes.plot(rows["median"][design], place, style.marker, color=style.colour, ms=4)
            spread(axes, place, rows["p10"][design], rows["p90"][design], style.colour, is_across=True)
        axes.set_yticks(range(len(_DESIGNS)), [style.title for style in _DESIGNS.values()])
        axes.set_ylim(len(_DESIGNS) - 0.5, -0.5)
        axes.set_xlim(left=0)
        axes.set_title(title)
        axes.label_outer()
    figure.supxlabel("error, or throughput lost [%]")
    mark: dict[str, Any] = {"ls": "none", "color": PALETTE["grey"]}
    handles = [
        Line2D([], [], label="median over the starts", marker="o", ms=4, **mark),
        spread_handle("10th to 90th percentile", PALETTE["grey"]),
        Line2D([], [], label="each start", marker="|", ms=6, **mark),
    ]
    return add_legend(figure, source, handles, strip=False, ncols=3), table


def sensitivity(tables: Tables, source: str) -> Drawn:
    """Throughput against GPUs, family by family, and the envelope."""
    curves = tables["sensitivity"]
    table = family_curves(curves, tables["sensitivity_families"])
    return plot_sensitivity(table, source), table


def family_curves(curves: pd.DataFrame, families: pd.DataFrame) -> pd.DataFrame:
    """Join family curves and envelope; offload plans have the CPU threads that all plans share."""
    columns = ["model", "plan_family", "gpus", "plan", "throughput_samples_per_s"]
    # Plans that do not offload are computed with the even share of the node's threads only.
    plain = families[~families["plan_family"].isin(_OFFLOAD)]
    n_threads = int((plain if len(plain) else families)["cpu_threads"].mode().iloc[0])
    shown = families[families["cpu_threads"] == n_threads]
    best = curves.rename(columns={"best_plan": "plan"}).assign(plan_family=ENVELOPE)
    return pd.concat([shown[columns], best[columns]], ignore_index=True)


def sensitivity_cpu(tables: Tables, source: str) -> Drawn:
    """Throughput of offload plans against CPU threads."""
    table = offload_curves(tables["sensitivity_families"])
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


def fig7(tables: Tables, source: str, workload_key: str, stage_duration_s: float) -> Drawn:
    """Adaptation of one job to changing limits."""
    stages = tables["fig7"]
    batch = workload(workload_key).global_batch_size
    return plot_adaptation(stages, source, stage_duration_s / MINUTE, batch), stages


@figure_style
def plot_adaptation(table: pd.DataFrame, source: str, stage_minutes: float, global_batch_size: int) -> Figure:
    """Draw throughput over time by strategy, with published values and stages that cannot run."""
    needed = ("strategy", "stage", "gpus", "plan", "throughput_samples_per_s", "published_iter_time_s")
    require_columns(table, *needed, figure="fig7")
    figure = new_figure(TWO_COLUMNS_IN, 2.7)
    axes = figure.subplots()
    stages, strategies = (list(dict.fromkeys(table[name])) for name in ("stage", "strategy"))
    running = table.loc[table["throughput_samples_per_s"] > 0, "throughput_samples_per_s"]
    floor = float(running.min()) / 2.0 if len(running) else 0.1
    handles = []
    for number, strategy in enumerate(strategies):
        rows = table[table["strategy"] == strategy].set_index("stage").loc[stages]
        values = rows["throughput_samples_per_s"].to_numpy(dtype=float)
        published_s = rows["published_iter_time_s"].to_numpy(dtype=float)
        edges = stage_minutes * np.arange(len(values) + 1)
        steps = np.repeat(np.where(values > 0, values, np.nan), 2)
        line = _strategy_line(number)
        axes.plot(np.repeat(edges, 2)[1:-1], steps, solid_capstyle="butt", label=strategy, **line)
        handles.append(Line2D([], [], label=strategy, **line))
        # Marks of strategies stand side by side within a stage.
        x = edges[:-1] + (0.12 + 0.76 * (number + 1) / (len(strategies) + 1)) * stage_minutes
        has_failed, ran = ~(values > 0), published_s > 0
        cannot_run(axes, x[has_failed], np.full(has_failed.sum(), floor), line["color"])
        published(axes, x[ran], global_batch_size / published_s[ran], line["color"])
    unit = "device" if source == "measured" else "GPU"
    top: dict[str, Any] = {"ha": "center", "va": "top", "transform": axes.get_xaxis_transform()}
    for number, stage in enumerate(table[table["strategy"] == strategies[0]].to_dict("records")):
        if number:
            axes.axvline(number * stage_minutes, color="#c4c4c4", lw=0.6, zorder=1)
        middle, limit = (number + 0.5) * stage_minutes, f"{stage['gpus']} {unit}{'s' * (stage['gpus'] != 1)}"
        axes.text(middle, 0.985, f"{stage['stage']} ({limit})", **top)
        axes.text(middle, 0.915, stage["plan"] or "none", color=PALETTE[_STRATEGY_COLOURS[0]], **top)
    axes.set(yscale="log", xlabel="time [min]", ylabel="throughput [samples/s]")
    axes.set_xlim(0, stage_minutes * len(stages))
    axes.set_ylim(floor / 1.6, float(table["throughput_samples_per_s"].max()) * 3.6)
    axes.xaxis.set_major_locator(FixedLocator([stage_minutes * k for k in range(len(stages) + 1)]))
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(plain_numbers())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(visible=False, axis="x")
    if (table["published_iter_time_s"] > 0).any():
        handles.append(published_handle("published value"))
    if not (table["throughput_samples_per_s"] > 0).all():
        handles.append(cannot_run_handle())
    add_legend(figure, source, handles, strip=False, loc="outside right center", labelspacing=0.6)
    name_coincident(figure)
    return figure


def _strategy_line(number: int) -> dict[str, Any]:
    """Colour and width of a strategy: each is narrower than those before, which stay visible behind it."""
    colour = PALETTE[_STRATEGY_COLOURS[number % len(_STRATEGY_COLOURS)]]
    broad = {"lw": 3.6, "alpha": 0.4, "zorder": 2}
    return {"color": colour, **(broad if number == 0 else {"lw": max(2.6 - 0.5 * number, 0.8), "zorder": 3})}


def fig8(tables: Tables, source: str) -> Drawn:
    """Throughput of two jobs that share GPUs."""
    shares = tables["fig8"]
    return plot_sharing(shares, source), shares


@figure_style
def plot_sharing(table: pd.DataFrame, source: str) -> Figure:
    """Draw speed-ups stacked for each scheduler, with labels beside the bars.

    Marks on the left are the published values, stacked alike, each with its number.
    """
    require_columns(table, "scheduler", "job", "gpus", "plan", "speedup", "published_speedup", figure="fig8")
    figure = new_figure(1.2 * ONE_COLUMN_IN, 2.6)
    axes = figure.subplots()
    schedulers = list(dict.fromkeys(table["scheduler"]))
    jobs = in_order(table["job"], MODEL_TITLES)
    largest = float(table.groupby("scheduler")[["speedup", "published_speedup"]].sum().to_numpy().max())
    room = _LABEL_SHARE * largest
    colours = {job: PALETTE[_JOB_COLOURS[number % len(_JOB_COLOURS)]] for number, job in enumerate(jobs)}
    for x, scheduler in enumerate(schedulers):
        rows = table[table["scheduler"] == scheduler].set_index("job").loc[jobs]
        values, printed = (rows[name].to_numpy(float) for name in ("speedup", "published_speedup"))
        tops, marks = np.cumsum(values), np.cumsum(printed)
        left, right = x - _BAR_WIDTH / 2, x + _BAR_WIDTH / 2
        parts = [(colours[job], [value]) for job, value in zip(jobs, values, strict=True)]
        draw_stack(axes, [x], parts, _BAR_WIDTH)
        places = _apart(tops - values / 2, room)
        for place, value, gpus, plan in zip(places, values, rows["gpus"], rows["plan"], strict=True):
            text = f"{value:.2f}: {gpus} GPU{'s' * (gpus != 1)},\n{plan}"
            axes.text(right + 0.03, place, text, va="center", linespacing=1.0)
        for place, mark in zip(_apart(marks, room / 2), marks, strict=True):
            published(axes, left - 0.03, mark)
            axes.text(left - 0.08, place, f"{mark:.2f}", ha="right", va="center")
        total: dict[str, Any] = {"ha": "center", "va": "bottom", "fontweight": "bold", "zorder": 6}
        axes.text(x, tops[-1] + room / 10, f"{tops[-1]:.2f}", **total)
    name_groups(axes, schedulers)
    axes.set_xlim(-0.4, len(schedulers) - 0.35)
    axes.set_ylim(0, 1.15 * largest)
    axes.set_ylabel("speed-up\n[× the job alone on all GPUs]")
    boxes = [Patch(color=colours[job], label=MODEL_TITLES.get(job, job)) for job in jobs]
    return add_legend(figure, source, [*boxes, published_handle("published, with its value")], ncols=3)


def _apart(places: np.ndarray, room: float) -> np.ndarray:
    """Move rising places upwards where they are closer than labels need."""
    moved = places.astype(float)
    for number in range(1, len(moved)):
        moved[number] = max(moved[number], moved[number - 1] + room)
    return moved


def fig9(tables: Tables, source: str, limit: float) -> Drawn:
    """Accuracy under reconfiguration."""
    losses = tables["fig9"]
    return plot_accuracy(losses, tables["fig9_summary"], limit, source), losses


@figure_style
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
        if run in _SPECIAL_RUNS:
            colour, line, width = _SPECIAL_RUNS[run], "-", 1.3
        else:
            number = plain.index(run)
            colour = PALETTE[_RUN_COLOURS[number % len(_RUN_COLOURS)]]
            line, width = _RUN_LINES[number // len(_RUN_COLOURS) % len(_RUN_LINES)], 0.8
        left.plot(rows["step"], rows["loss"], line, color=colour, lw=width, label=run)
        seen = rows[rows["abs_difference"] > _SMALLEST_DIFFERENCE]
        right.plot(seen["step"], seen["abs_difference"], line, color=colour, lw=width, marker=".", ms=1.5)
        if seen.empty and run != runs[0]:
            same.append(run)
    other = summary[summary["kind"] == "other seed"]["mean_abs_difference"]
    if len(other):
        limit_line(right, limit * float(other.iloc[0]))
    # Means and largest values that the paper prints stand behind the right edge.
    outside: dict[str, Any] = {"clip_on": False, "transform": right.get_yaxis_transform()}
    of_paper = summary[summary["kind"].str.startswith("published")]
    for number, row in enumerate(of_paper.to_dict("records")):
        colour = PALETTE["black" if str(row["kind"]).endswith("other seed") else "grey"]
        spot, span = 1.03 + 0.03 * number, [row["mean_abs_difference"], row["max_abs_difference"]]
        published(right, [spot, spot], span, colour, is_joined=True, **outside)
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
    add_legend(figure, source, handles, strip=False, ncols=5)
    name_coincident(figure)
    if same:
        right.set_title(f"no difference: {', '.join(same)}")
    return figure
