"""Figs 1, 9, 12 and 13: nodes that are lost one after the other at a fixed distance."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from makespan.oobleck.simulators import MODES, Category
from makespan.papers.oobleck._runs import NO_CHECKPOINT, Cells, Runs, Setting, Traces, all_systems, beside
from makespan.papers.oobleck._tables_simulation import BREAKDOWN, FIG9, FIG13

__all__ = ["failure_experiments"]


def failure_experiments(
    traces: Traces,
    cells: Cells,
    *,
    systems: Mapping[str, Any],
    breakdown_models: Sequence[str],
    checkpoint_model: str,
) -> dict[str, pd.DataFrame]:
    """Simulate every system on every model and distance between failures, as released and repaired.

    Parameters
    ----------
    traces
        By name and seed; see `generated_traces` and `published_traces`.
    cells
        Printed cells by artifact: ``throughput``, ``fig9`` and ``fig13``.
    systems
        Options of `makespan.oobleck.simulators.Systems`.
    breakdown_models, checkpoint_model
        Models whose time is broken down, and the one that also runs without the cost of checkpoints.

    Returns
    -------
    dict
        ``fig9`` and ``fig13``, one row a run; ``fig1`` and ``fig12``, one row a category, means over seeds.
        Oobleck and Varuna do not ask which node is lost: their runs are the same under all seeds of a
        generated trace.
    """
    runs = Runs(cells, systems, is_spot=False)
    every = [setting for mode in MODES for setting in all_systems(mode)]
    averages = runs.rows(traces, runs.models, every)
    without = [Setting(name, mode) for mode in MODES for name in ("varuna", NO_CHECKPOINT, "oobleck")]
    times = _times(runs, traces, breakdown_models, every)
    return {
        "fig1": BREAKDOWN["fig1"].validate(times[times["trace"] == "10m"], where="fig1"),
        "fig9": beside(averages, cells["fig9"], FIG9),
        "fig12": BREAKDOWN["fig12"].validate(times, where="fig12"),
        "fig13": beside(runs.rows(traces, [checkpoint_model], without), cells["fig13"], FIG13),
    }


def _times(runs: Runs, traces: Traces, models: Sequence[str], settings: Sequence[Setting]) -> pd.DataFrame:
    """Return where time goes, means over seeds, and its share; idle GPUs are apart from the rest."""
    rows = []
    for name, by_seed in traces.items():
        for model in models:
            for setting in settings:
                found = [runs.outcome(trace, seed, model, setting) for seed, trace in by_seed.items()]
                if not found[0].is_feasible:
                    continue
                times_s = {one: sum(run.times_s[one] for run in found) / len(found) for one in Category}
                total_s = sum(time_s for one, time_s in times_s.items() if one is not Category.IDLE)
                rows += [
                    {
                        "trace": name,
                        "model": model,
                        "system": setting.system,
                        "mode": setting.mode,
                        "category": one.value,
                        "time_s": time_s,
                        "share": time_s / total_s if total_s else 0.0,
                    }
                    for one, time_s in times_s.items()
                ]
    return pd.DataFrame(rows)
