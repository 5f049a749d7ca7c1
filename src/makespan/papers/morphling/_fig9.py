"""Fig. 9: losses of real training runs under several plans, under one that changes, and of another seed."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from makespan.errors import MissingDataError, TraceError
from makespan.papers.morphling._tables import FIG9, FIG9_SUMMARY

__all__ = ["OTHER_SEED", "SWITCHING", "fig9", "fig9_summary", "published_loss_statistics"]

SWITCHING = "switching"
"""The run that changes its plan through checkpoint and restart."""

OTHER_SEED = "other seed"
"""The run that differs from the reference by its seed alone."""

_PUBLISHED_WINDOW = 25
_PUBLISHED_REFERENCE = "dp1_tp8_pp1"
_PUBLISHED_RUNS = {
    "PP2/TP4": "pp2_tp4",
    "PP8/TP1": "pp8_tp1",
    "PP4/TP2": "pp4_tp2",
    OTHER_SEED: "dp1_tp8_pp1_other_seed",
}


def fig9(losses: Mapping[str, Sequence[float]]) -> pd.DataFrame:
    """Compare the losses of runs, step by step, with those of the first one.

    Parameters
    ----------
    losses
        Losses of each run from the first step on, by the name of the run; the reference comes first.

    Returns
    -------
    pandas.DataFrame
        Schema `FIG9`.

    Raises
    ------
    TraceError
        The runs have different numbers of steps.
    """
    names = list(losses)
    reference = np.asarray(losses[names[0]], dtype=float)
    records: list[pd.DataFrame] = []
    for name in names:
        values = np.asarray(losses[name], dtype=float)
        if len(values) != len(reference):
            raise TraceError(
                f"fig9: run {name!r} has {len(values)} steps, run {names[0]!r} has {len(reference)}"
            )
        distance = np.abs(values - reference)
        columns = {"run": name, "step": range(len(values)), "loss": values, "abs_difference": distance}
        records.append(pd.DataFrame(columns))
    return FIG9.validate(pd.concat(records, ignore_index=True), where="fig9")


def fig9_summary(table: pd.DataFrame, costs: pd.DataFrame, published: pd.DataFrame) -> pd.DataFrame:
    """Sum up every run, with the paper's runs below.

    Parameters
    ----------
    table
        Schema `FIG9`.
    costs
        Columns ``run, restarts, restart_s, step_s``, one row a run.
    published
        The paper's cells: ``run, mean_abs_difference, max_abs_difference``.

    Returns
    -------
    pandas.DataFrame
        Schema `FIG9_SUMMARY`.
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


def published_loss_statistics(path: str | Path) -> pd.DataFrame:
    """Compute mean and largest difference of the published loss curves, as the paper plots them.

    Parameters
    ----------
    path
        The authors' CSV with one column a run and one row a mini-batch.

    Returns
    -------
    pandas.DataFrame
        ``run, mean_abs_difference, max_abs_difference``; losses are averaged over windows of 25
        mini-batches before they are compared with those of eight-way tensor parallelism.

    Raises
    ------
    MissingDataError
        There is no such file.
    TraceError
        A column is missing.
    """
    try:
        curves: pd.DataFrame = pd.read_csv(path)
    except FileNotFoundError:
        raise MissingDataError(f"{path}: no such file; expected the published loss curves") from None
    missing = {_PUBLISHED_REFERENCE, *_PUBLISHED_RUNS.values()} - set(curves.columns)
    if missing:
        raise TraceError(f"{path}: lacks column(s) {', '.join(sorted(missing))}")
    windows = curves.groupby(np.arange(len(curves)) // _PUBLISHED_WINDOW).mean()
    rows = []
    for run, column in _PUBLISHED_RUNS.items():
        distance = (windows[column] - windows[_PUBLISHED_REFERENCE]).abs()
        rows.append((run, float(distance.mean()), float(distance.max())))
    return pd.DataFrame(rows, columns=["run", "mean_abs_difference", "max_abs_difference"])
