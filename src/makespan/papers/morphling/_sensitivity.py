"""Sensitivity curves: throughput of every plan family against resources, and their envelope."""

from collections.abc import Iterable, Sequence

import pandas as pd

from makespan.hardware import cluster
from makespan.perf import envelope, fit_table, load_environment, sensitivity_families
from makespan.plans import PlanFamily
from makespan.plots import ENVELOPE
from makespan.tables import SENSITIVITY, SENSITIVITY_FAMILIES

__all__ = ["cpu_sensitivity_figure_table", "sensitivity", "sensitivity_figure_table"]

_OFFLOAD = (PlanFamily.ZERO_OFFLOAD.title, PlanFamily.ZERO_OFFLOAD_GC.title)
_CPU_FIGURE_GPUS = (1, 2, 4, 8)


def sensitivity(
    tables: Iterable[pd.DataFrame],
    cluster_name: str,
    form: str,
    max_gpus: int,
    cpu_threads: Sequence[int] = (),
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Compute the sensitivity curves of several workloads.

    Parameters
    ----------
    tables
        One throughput table a workload, schema `makespan.tables.THROUGHPUT`.
    cluster_name
        Cluster on which plans run; its constants enter the performance model.
    form
        Form of the performance model.
    max_gpus
        Curves go from 1 to this many GPUs.
    cpu_threads
        CPU threads a GPU at which offload plans are computed besides the even share of a node.

    Returns
    -------
    tuple of pandas.DataFrame
        Best plan with at most g GPUs (schema `makespan.tables.SENSITIVITY`), and best plan of each
        family at each GPU count (schema `makespan.tables.SENSITIVITY_FAMILIES`).
    """
    hardware = cluster(cluster_name)
    constants = load_environment(cluster_name)
    counts = range(1, max_gpus + 1)
    curves, families = [], []
    for table in tables:
        fit = fit_table(table, str(table["workload"].iloc[0]), form, constants).fit
        of_workload = sensitivity_families(fit, hardware, counts, cpu_threads)
        families.append(of_workload)
        curves.append(envelope(of_workload, counts))
    return (
        SENSITIVITY.validate(pd.concat(curves, ignore_index=True), where="sensitivity"),
        SENSITIVITY_FAMILIES.validate(pd.concat(families, ignore_index=True), where="sensitivity_families"),
    )


def sensitivity_figure_table(curves: pd.DataFrame, families: pd.DataFrame) -> pd.DataFrame:
    """Join family curves and envelope into the table behind the sensitivity figure.

    Parameters
    ----------
    curves, families
        Results of `sensitivity`.

    Returns
    -------
    pandas.DataFrame
        Columns ``model, plan_family, gpus, plan, throughput_samples_per_s``; the envelope is the
        family `makespan.plots.ENVELOPE`. Offload plans have the CPU threads that all plans share.
    """
    columns = ["model", "plan_family", "gpus", "plan", "throughput_samples_per_s"]
    default = _default_threads(families)
    shown = families[families["cpu_threads"] == default]
    best = curves.rename(columns={"best_plan": "plan"}).assign(plan_family=ENVELOPE)
    return pd.concat([shown[columns], best[columns]], ignore_index=True)


def _default_threads(families: pd.DataFrame) -> int:
    """Threads of the rows that do not offload; they are computed at the even share only."""
    plain = families[~families["plan_family"].isin(_OFFLOAD)]
    return int((plain if len(plain) else families)["cpu_threads"].mode().iloc[0])


def cpu_sensitivity_figure_table(families: pd.DataFrame) -> pd.DataFrame:
    """Select offload throughput against CPU threads from the family curves.

    Parameters
    ----------
    families
        Second result of `sensitivity`.

    Returns
    -------
    pandas.DataFrame
        Columns ``model, gpus, cpu_threads, plan, throughput_samples_per_s``: the best offload plan
        at 1, 2, 4 and 8 GPUs.
    """
    offload = families[families["plan_family"].isin(_OFFLOAD) & families["gpus"].isin(_CPU_FIGURE_GPUS)]
    key = ["model", "gpus", "cpu_threads"]
    ordered = offload.sort_values("throughput_samples_per_s", ascending=False, kind="stable")
    best = ordered.drop_duplicates(key)
    positions = {model: number for number, model in enumerate(dict.fromkeys(families["model"]))}
    ranked = best.assign(_model=best["model"].map(positions)).sort_values(["_model", "gpus", "cpu_threads"])
    return ranked[[*key, "plan", "throughput_samples_per_s"]].reset_index(drop=True)
