"""Figures of the cluster experiments: each function goes from paths of tables to a figure and its table."""

from collections.abc import Mapping, Sequence

import pandas as pd
from matplotlib.figure import Figure

from makespan.hardware import cluster
from makespan.papers.morphling._published import read_published
from makespan.plots import (
    job_spans,
    plot_ablation,
    plot_allocation,
    plot_gantt,
    plot_jct_cdf,
    plot_large_models,
    plot_load,
    plot_rounds,
    plot_scale,
    plot_table4,
)
from makespan.tables import (
    ALLOCATION,
    EVENTS,
    JCT,
    LARGE_MODELS,
    LOAD,
    ROUNDS,
    SCALE,
    TABLE4,
    read_csv,
)

__all__ = ["ablation", "allocation", "gantt", "jct_cdf", "large_models", "load", "rounds", "scale", "table4"]

Paths = Mapping[str, str]
Drawn = tuple[Figure, pd.DataFrame]

_ABLATIONS = ("-e", "-r", "-n")


def table4(paths: Paths, source: str, delay_s: float) -> Drawn:
    """Average completion time and makespan of every policy, with what the released simulator prints."""
    rows = read_csv(paths["table4"], TABLE4)
    cells = read_published("table4", paths["published_table4"])
    marks = cells[cells["reading"] == "printed"].rename(columns=lambda name: name.removeprefix("published_"))
    return plot_table4(rows, source, delay_s, marks, "released simulator, impossible schedules"), rows


def ablation(paths: Paths, source: str, delay_s: float) -> Drawn:
    """Average completion time of Morphling without some of its parts."""
    rows = read_csv(paths["table4"], TABLE4)
    kept = rows[rows["policy"].str.startswith("morphling")]
    return plot_ablation(kept, source, delay_s), kept


def jct_cdf(paths: Paths, source: str, policies: Sequence[str]) -> Drawn:
    """Distribution of completion times under all policies but the ablations."""
    jobs = read_csv(paths["jct"], JCT)
    shown = jobs[jobs["policy"].isin([name for name in policies if not name.endswith(_ABLATIONS)])]
    return plot_jct_cdf(shown, source), shown


def allocation(paths: Paths, source: str, cluster_name: str) -> Drawn:
    """GPUs by plan family over time."""
    wide = allocation_by_family(read_csv(paths["allocation"], ALLOCATION))
    return plot_allocation(wide, source, cluster(cluster_name).n_gpus), wide


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


def load(paths: Paths, source: str) -> Drawn:
    """Completion time against the arrival rate."""
    rows = read_csv(paths["load"], LOAD)
    return plot_load(rows, source), rows


def large_models(paths: Paths, source: str) -> Drawn:
    """Completion time against the share of large models."""
    rows = read_csv(paths["large_models"], LARGE_MODELS)
    return plot_large_models(rows, source), rows


def rounds(paths: Paths, source: str) -> Drawn:
    """Completion time against the length of a round."""
    rows = read_csv(paths["rounds"], ROUNDS)
    return plot_rounds(rows, source), rows


def scale(paths: Paths, source: str) -> Drawn:
    """Cost of scheduling against size."""
    rows = read_csv(paths["scale"], SCALE)
    return plot_scale(rows, source), rows
