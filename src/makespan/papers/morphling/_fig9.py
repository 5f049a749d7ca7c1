"""Fig. 9: losses of real training runs under several plans, under one that changes, and of another seed."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from makespan.errors import TraceError
from makespan.papers.morphling._tables import FIG9, FIG9_SUMMARY

__all__ = ["OTHER_SEED", "SWITCHING", "fig9", "fig9_summary"]

SWITCHING = "switching"
"""The run that changes its plan through checkpoint and restart."""

OTHER_SEED = "other seed"
"""The run that differs from the reference by its seed alone."""


def fig9(losses: Mapping[str, Sequence[float]]) -> pd.DataFrame:
    """Compare the losses of runs, step by step, with those of the first one; schema `FIG9`.

    Parameters
    ----------
    losses
        Losses of each run from the first step on, by the name of the run; the reference comes first.

    Raises
    ------
    TraceError
        The runs have different numbers of steps.
    """
    arrays = {name: np.asarray(values, dtype=float) for name, values in losses.items()}
    first, reference = next(iter(arrays.items()))
    records: list[pd.DataFrame] = []
    for name, values in arrays.items():
        if len(values) != len(reference):
            raise TraceError(
                f"fig9: run {name!r} has {len(values)} steps, run {first!r} has {len(reference)}"
            )
        distance = np.abs(values - reference)
        columns = {"run": name, "step": range(len(values)), "loss": values, "abs_difference": distance}
        records.append(pd.DataFrame(columns))
    return FIG9.validate(pd.concat(records, ignore_index=True), where="fig9")


def fig9_summary(table: pd.DataFrame, costs: pd.DataFrame, published: pd.DataFrame) -> pd.DataFrame:
    """Sum up every run of `fig9`, with the paper's runs below; schema `FIG9_SUMMARY`.

    Costs have one row a run: ``run, restarts, restart_s, step_s``.
    """
    grouped = table.groupby("run", sort=False)["abs_difference"]
    own = grouped.agg(mean_abs_difference="mean", max_abs_difference="max").reset_index()
    own["kind"] = [_kind(name, number == 0) for number, name in enumerate(own["run"])]
    own = own.merge(costs, on="run", how="left", validate="one_to_one")
    paper = published.drop(columns="source", errors="ignore").assign(restarts=0)
    paper["kind"] = [f"published {_kind(name, False)}" for name in paper["run"]]
    paper["run"] = "Morphling " + paper["run"]
    return FIG9_SUMMARY.validate(pd.concat([own, paper], ignore_index=True), where="fig9_summary")


def _kind(run: str, is_reference: bool) -> str:
    if is_reference:
        return "reference"
    return run if run in (SWITCHING, OTHER_SEED) else "plan"
