"""The tables behind the sensitivity figures, made from the sensitivity tables."""

import pandas as pd

from makespan.plans import PlanFamily
from makespan.plots import ENVELOPE

__all__ = ["cpu_sensitivity_figure_table", "sensitivity_figure_table"]

_OFFLOAD = (PlanFamily.ZERO_OFFLOAD.title, PlanFamily.ZERO_OFFLOAD_GC.title)
_CPU_FIGURE_GPUS = (1, 2, 4, 8)


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
