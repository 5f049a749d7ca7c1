"""Figs 10, 14 and 15: spot instances that come and go, and what each defect of the simulators does."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from makespan.oobleck.simulators import DEFECTS, MODES, Defect, NodeTrace, Outcome
from makespan.papers.oobleck._runs import Cells, Runs, Setting, Traces, all_systems, beside
from makespan.papers.oobleck._tables_simulation import ABLATION, FIG10, SERIES
from makespan.units import MS

__all__ = ["spot_experiments"]

Floats = npt.NDArray[np.float64]

_SERIES = {"fig14": "p3_scaled", "fig15": "gcp_scaled"}
_TOGETHER = (Defect.D1, Defect.D6, Defect.D11)
_JUDGED = ((), (Defect.D1,), (Defect.D11,), _TOGETHER)
_BIN_S = 360.0
_STEPS_A_BIN = 5
_ZEROED = ("varuna", "GPT-3 6.7B")  # what the released figure shows as zeros (defect D9)


def spot_experiments(
    traces: Traces,
    cells: Cells,
    *,
    systems: Mapping[str, Any],
    ablation_traces: Sequence[str],
    ablation_seeds: int,
    ablation_judged_seeds: int,
) -> dict[str, pd.DataFrame]:
    """Simulate every system on every model and spot trace.

    Parameters
    ----------
    traces
        By name and seed; see `generated_traces` and `published_traces`.
    cells
        Printed cells by artifact: ``throughput`` and ``fig10``.
    systems
        Options of `makespan.oobleck.simulators.Systems`.
    ablation_traces, ablation_seeds, ablation_judged_seeds
        Traces on which each defect is repaired alone, how many of their seeds, and how many where statements
        are about the repair.

    Returns
    -------
    dict
        ``fig10``, one row a run; ``fig14`` and ``fig15``, throughput and nodes over time on the first trace
        of EC2 P3 and of GCP; ``ablation``, runs as released with one defect repaired, and with three.
    """
    runs = Runs(cells, systems, is_spot=True)
    every = [setting for mode in MODES for setting in all_systems(mode)]
    ablated = {name: traces[name] for name in ablation_traces if name in traces}
    repaired = [
        row
        for one in ((), *((defect,) for defect in DEFECTS), _TOGETHER)
        for row in runs.rows(
            _first(ablated, ablation_judged_seeds if one in _JUDGED else ablation_seeds),
            runs.models,
            all_systems("compat", one),
        )
    ]
    tables = {
        "fig10": beside(runs.rows(traces, runs.models, every), cells["fig10"], FIG10),
        "ablation": beside(repaired, cells["fig10"], ABLATION),
    }
    for name, trace in _SERIES.items():
        first = next(iter(traces[trace].items()))
        rows = [
            row for setting in every for model in runs.models for row in _series(runs, first, model, setting)
        ]
        tables[name] = SERIES[name].validate(pd.DataFrame(rows), where=name)
    return tables


def _first(traces: Traces, n_seeds: int) -> Traces:
    return {name: dict(list(by_seed.items())[:n_seeds]) for name, by_seed in traces.items()}


def _series(runs: Runs, first: tuple[int, NodeTrace], model: str, setting: Setting) -> list[dict[str, Any]]:
    """Return rows of throughput and nodes in bins of a few steps, at least six minutes."""
    seed, trace = first
    found = runs.outcome(trace, seed, model, setting)
    if not found.is_feasible:
        return []
    fastest = max(runs.systems.costs("oobleck", model).throughput.values())
    steps_s = _STEPS_A_BIN * runs.systems.models[model].samples_per_step / fastest
    width_s = _BIN_S * max(1, math.ceil(steps_s / _BIN_S))
    edges = np.arange(0.0, trace.end_ms * MS + width_s, width_s)
    rates = _rates(found, edges)
    if setting.mode == "compat" and (setting.system, model) == _ZEROED and Defect.D9 not in setting.switched:
        rates = np.zeros_like(rates)
    nodes = _nodes(trace, edges)
    how = {"model": model, "system": setting.system, "mode": setting.mode}
    return [
        how | {"time_s": start, "n_nodes": n_nodes, "throughput_samples_per_s": rate}
        for start, n_nodes, rate in zip(edges[:-1].tolist(), nodes.tolist(), rates.tolist(), strict=True)
    ]


def _rates(found: Outcome, edges: Floats) -> Floats:
    """Return samples per second in each bin; the samples of a step are spread evenly over its time."""
    steps = found.steps()
    steps = steps[steps[:, 2] > 0]
    start, end = np.minimum(steps[:, 0], steps[:, 1]), steps[:, 1]
    covered = np.minimum(end[:, None], edges[None, 1:]) - np.maximum(start[:, None], edges[None, :-1])
    shares = np.clip(covered, 0.0, None) / np.maximum(end - start, MS)[:, None]
    return np.asarray(steps[:, 2] @ shares / np.diff(edges), dtype=np.float64)


def _nodes(trace: NodeTrace, edges: Floats) -> Floats:
    """Return the mean number of nodes in each bin."""
    times = np.array([0.0, *(event.time_ms * MS for event in trace.events)])
    areas = np.concatenate([[0.0], np.cumsum(np.diff(times) * np.array([0, *trace.counts()])[:-1])])
    last = trace.counts()[-1]
    beyond = np.clip(edges - times[-1], 0.0, None) * last
    return np.asarray(np.diff(np.interp(edges, times, areas) + beyond) / np.diff(edges), dtype=np.float64)
