"""Figures of single jobs: each function goes from paths of tables to a figure and its table."""

from collections.abc import Mapping, Sequence

import pandas as pd
from matplotlib.figure import Figure

from makespan.plans import PlanFamily
from makespan.plots import (
    ENVELOPE,
    plot_accuracy,
    plot_adaptation,
    plot_cpu_sensitivity,
    plot_error_bars,
    plot_prediction,
    plot_sensitivity,
    plot_sharing,
)
from makespan.tables import (
    FIG7,
    FIG8,
    FIG9,
    FIG9_SUMMARY,
    SENSITIVITY,
    SENSITIVITY_FAMILIES,
    TABLE2,
    TABLE2_ROWS,
    read_csv,
)
from makespan.units import MINUTE
from makespan.workloads import workload

__all__ = ["fig7", "fig8", "fig9", "prediction", "sensitivity", "sensitivity_cpu", "table2"]

Paths = Mapping[str, str]
Drawn = tuple[Figure, pd.DataFrame]

_OFFLOAD = (PlanFamily.ZERO_OFFLOAD.title, PlanFamily.ZERO_OFFLOAD_GC.title)
_CPU_FIGURE_GPUS = (1, 2, 4, 8)


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


def fig8(paths: Paths, source: str) -> Drawn:
    """Throughput of two jobs that share GPUs."""
    shares = read_csv(paths["fig8"], FIG8)
    return plot_sharing(shares, source), shares


def fig9(paths: Paths, source: str, limit: float) -> Drawn:
    """Accuracy under reconfiguration."""
    losses = read_csv(paths["fig9"], FIG9)
    return plot_accuracy(losses, read_csv(paths["fig9_summary"], FIG9_SUMMARY), limit, source), losses
