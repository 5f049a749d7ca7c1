"""Figures of the cluster experiments: each function goes from paths of tables to a figure and its table."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pandas as pd
from matplotlib.figure import Figure

from makespan.errors import TraceError
from makespan.hardware import cluster
from makespan.papers.morphling._pairs import RECONFIGURING, paired, threads_worth
from makespan.papers.morphling._tables import (
    ALLOCATION,
    JCT,
    KNOWLEDGE,
    LARGE_MODELS,
    LISTS,
    LISTS_SUMMARY,
    LOAD,
    RIVALS,
    ROUNDS,
    SCALE,
    TABLE4,
    THREADS,
    read_published,
)
from makespan.plots import (
    PALETTE,
    POLICIES,
    Look,
    job_spans,
    plot_allocation,
    plot_bands,
    plot_cdf,
    plot_costs,
    plot_gantt,
    plot_grouped_bars,
    plot_intervals,
    plot_ratio_bars,
    plot_variants,
)
from makespan.tables import EVENTS, read_csv
from makespan.units import MINUTE

__all__ = [
    "ablation",
    "allocation",
    "gantt",
    "jct_cdf",
    "knowledge",
    "large_models",
    "lists",
    "load",
    "rivals",
    "rounds",
    "scale",
    "table4",
    "threads",
]

Paths = Mapping[str, str]
Drawn = tuple[Figure, pd.DataFrame]

_TRACES = {"base": "Base", "bp": "best plan (BP)", "mt": "multi-tenant (MT)"}
_METRICS = [
    ("avg_jct_s", "jct_ratio_to_lookahead", "average JCT [h]"),
    ("makespan_s", "makespan_ratio_to_lookahead", "makespan [h]"),
]
_SHORT = {"base": "Base", "bp": "BP", "mt": "MT"}
_FIXED = "fixed"
_PARTS = {
    "": Look("plans and resources", PALETTE["black"], "o"),
    "-s": Look("both, no sharing", PALETTE["black"], "d", (0, (6, 1)), 0.8),
    "-e": Look("plans only", PALETTE["black"], "^", (0, (4, 2)), 0.65),
    "-r": Look("resources only", PALETTE["black"], "v", (0, (5, 1, 1, 1)), 0.4),
    "-n": Look("neither", PALETTE["black"], "x", (0, (1, 1)), 0.2),
    _FIXED: Look("the best policy that reconfigures nothing", PALETTE["vermilion"], "D"),
}
"""What a policy whose name ends like this may still change, and the best of others that changes nothing."""

_WHOLE = {
    "morphling-work": Look("Morphling-work", PALETTE["blue"], "o"),
    "morphling-lookahead": Look("Morphling-lookahead", PALETTE["sky"], "s"),
    "morphling": Look("Morphling", PALETTE["black"], "P"),
}
_ABLATED = {
    f"{name}{ending}": replace(
        look, title=f"{look.title}{ending.upper()}", marker=part.marker, line=part.line, strength=0.55
    )
    for name, look in _WHOLE.items()
    for ending, part in _PARTS.items()
    if ending.startswith("-")
}
_MODES = {
    "sampled": Look("sampled rows", PALETTE["blue"], "o", strength=0.25),
    "requests": Look("requests too", PALETTE["blue"], "s", strength=0.55),
    "exact": Look("all times", PALETTE["blue"], "^", strength=1.0),
}
"""What policies know beforehand."""

LOOKS = _WHOLE | _ABLATED | POLICIES
_OBJECTIVES = {
    "gavel-ftf": replace(POLICIES["gavel"], title="Gavel, finish-time fairness"),
    "gavel-makespan": replace(POLICIES["gavel"], title="Gavel, makespan"),
}
_TITLES = {name: look.title for name, look in LOOKS.items()} | _TRACES


def at_delay(table: pd.DataFrame, delay_s: float) -> pd.DataFrame:
    """Select the rows of one restart delay [s]."""
    rows = table[table["restart_delay_s"] == delay_s]
    if rows.empty:
        raise TraceError(f"table4 has no rows with a restart delay of {delay_s:g} s")
    return rows


def table4(paths: Paths, source: str, delay_s: float) -> Drawn:
    """Average completion time and makespan of every policy, with what the released simulator prints."""
    rows = read_csv(paths["table4"], TABLE4)
    cells = read_published("table4", paths["published_table4"])
    marks = cells.rename(columns=lambda name: name.removeprefix("published_"))
    note = f"restart delay {delay_s:g} s; number before a bar: ratio to Morphling-lookahead"
    label = "printed by the released simulator"
    figure = plot_ratio_bars(at_delay(rows, delay_s), source, _METRICS, note, LOOKS, _TRACES, marks, label)
    return figure, rows


def lists(paths: Paths, source: str) -> Drawn:
    """Means and intervals of completion time and makespan over many job lists, at the first restart delay."""
    rows = read_csv(paths["lists_summary"], LISTS_SUMMARY)
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
    figure = plot_intervals(pd.concat(parts), source, heading, hollow, spread_label, LOOKS | _OBJECTIVES)
    return figure, rows


def rivals(paths: Paths, source: str) -> Drawn:
    """Every other value of one parameter of each rival, beside what is shipped."""
    rows = read_csv(paths["rivals"], RIVALS)
    varied = rows[rows["parameter"].fillna("") != ""]
    values = varied["parameter"].str.removesuffix("_gpu_s") + " " + varied["value"].str.replace(" ", ", ")
    shown = pd.DataFrame(
        {"policy": varied["policy"], "variant": values}
        | {end: varied[f"ratio_{end}"] for end in ("mean", "low", "high")}
    )
    n_runs = rows["runs"].min()
    many = "one run each" if n_runs == 1 else f"{n_runs} runs each"
    heading = f"average JCT, or makespan where that is the aim, over that of shipped values; {many}"
    return plot_variants(shown, source, heading, "as shipped", LOOKS | _OBJECTIVES), rows


def threads(paths: Paths, source: str) -> Drawn:
    """Worth of choosing CPU threads to each policy at each share of jobs that offload."""
    rows = read_csv(paths["threads"], THREADS)
    worth = threads_worth(rows)
    variants = [f"{100 * share:g} % offload" for share in worth["offload_share"]]
    shown = pd.DataFrame(
        {"policy": worth["policy"], "variant": variants}
        | {end: worth[f"ratio_{end}"] for end in ("mean", "low", "high")}
    )
    heading = f"average JCT with requested over that with chosen CPU threads, {worth['n'].min()} lists"
    return plot_variants(shown, source, heading, "no difference", LOOKS), rows


def ablation(paths: Paths, source: str) -> Drawn:
    """Average completion time of Morphling without some of its parts, over that of the whole policy."""
    rows = read_csv(paths["lists"], LISTS)
    label = "average JCT\n[× that of the whole policy]"
    worth = parts_worth(rows)
    return plot_grouped_bars(worth, source, _PARTS, label, _TITLES, LOOKS), worth


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


def jct_cdf(paths: Paths, source: str, policies: Sequence[str]) -> Drawn:
    """Distribution of completion times under all policies but the ablations."""
    jobs = read_csv(paths["jct"], JCT)
    shown = jobs[jobs["policy"].isin(set(policies) - set(_ABLATED))]
    return plot_cdf(shown, source, LOOKS, _TRACES), shown


def allocation(paths: Paths, source: str, cluster_name: str) -> Drawn:
    """GPUs by plan family over time."""
    wide = allocation_by_family(read_csv(paths["allocation"], ALLOCATION))
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


def gantt(paths: Paths, source: str) -> Drawn:
    """Who held which GPU when."""
    events = read_csv(paths["schedule"], EVENTS)
    spans = job_spans(events.assign(time_s=events["time_s"] - events["time_s"].min()))
    return plot_gantt(spans, source), spans


def knowledge(paths: Paths, source: str) -> Drawn:
    """Completion time by what policies know, with the share of starts whose time was known."""
    rows = read_csv(paths["knowledge"], KNOWLEDGE)
    shown = rows[["trace", "policy", "mode"]].set_axis(["panel", "group", "series"], axis=1)
    for column, end in (("value", "mean"), ("low", "low"), ("high", "high")):
        shown[column] = rows[f"jct_{end}_s"] / MINUTE
    shown["text"] = [f"{100 * share:.0f}" for share in rows["known_starts"]]
    label = "average JCT [min];\nnumbers: known starts [%]"
    titles = {name: title.replace("-", "-\n") for name, title in _TITLES.items()} | _TRACES
    return plot_grouped_bars(shown, source, _MODES, label, titles, spread_label="95 % interval"), rows


def load(paths: Paths, source: str) -> Drawn:
    """Completion time against the arrival rate."""
    rows = read_csv(paths["load"], LOAD)
    return plot_bands(rows, source, "load_factor", "arrival rate [× that of the trace]", LOOKS), rows


def large_models(paths: Paths, source: str) -> Drawn:
    """Completion time against the share of large models."""
    rows = read_csv(paths["large_models"], LARGE_MODELS)
    percent = rows.assign(large_share=100.0 * rows["large_share"])
    return plot_bands(percent, source, "large_share", "jobs with large models [%]", LOOKS), rows


def rounds(paths: Paths, source: str) -> Drawn:
    """Completion time against the length of a round."""
    rows = read_csv(paths["rounds"], ROUNDS)
    filled = rows.assign(interval_s=rows["interval_s"].fillna(0.0))
    return plot_bands(filled, source, "interval_s", "length of a round [s], 0: at every event", LOOKS), rows


def scale(paths: Paths, source: str) -> Drawn:
    """Cost of scheduling against size."""
    rows = read_csv(paths["scale"], SCALE)
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
    return plot_costs(rows, source, metrics, heading, spread_label, LOOKS), rows
