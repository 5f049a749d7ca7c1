"""Traces, and simulations of them: as rows of a table, each run once."""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from makespan.oobleck.simulator import (
    DEFECTS,
    MODES,
    SYSTEMS,
    Category,
    Costs,
    Defect,
    Outcome,
    Systems,
    repairs,
    simulate,
    unused_nodes,
)
from makespan.oobleck.traces import SPOT_TRACES, NodeTrace, generate_failures, generate_spot, read_trace
from makespan.papers.oobleck.settings import trace_dataset
from makespan.papers.oobleck.tables import ABLATION, BREAKDOWN, FIG9, FIG10, FIG13, SERIES
from makespan.tables import TableSchema
from makespan.throughput import Dataset, find_dataset, verify
from makespan.units import MS

_LOG = logging.getLogger(__name__)


# ------------------------------------------------------------------------------------------------
# Traces, and simulations of them: as rows of a table, each run once.

Traces = Mapping[str, Mapping[int, NodeTrace]]
Cells = Mapping[str, pd.DataFrame]
NO_CHECKPOINT = "varuna-no-checkpoint"
"""Varuna where checkpoints take no time and are written after every other step."""


def generated_traces(seeds: Mapping[str, int]) -> dict[str, dict[int, NodeTrace]]:
    """Generate traces, see `generate_failures` and `generate_spot`; so many of each name, seeds from 1."""
    return {
        name: {
            seed: generate_spot(name, seed) if name in SPOT_TRACES else generate_failures(name, seed)
            for seed in range(1, n_seeds + 1)
        }
        for name, n_seeds in seeds.items()
    }


def published_traces(
    names: Sequence[str], directory: str | Path, register: Iterable[Dataset]
) -> dict[str, dict[int, NodeTrace]]:
    """Read the authors' traces, under seed 0.

    Parameters
    ----------
    names
        Names of traces; of failures or of spot instances.
    directory, register
        A directory with the published files, and their checksums.

    Raises
    ------
    MissingDataError, ChecksumError
        A file is not there or not the registered one.
    """
    entries = list(register)
    return {
        name: {0: read_trace(verify(find_dataset(entries, trace_dataset(name)), directory), name)}
        for name in names
    }


@dataclass(frozen=True, slots=True)
class Setting:
    """How a system is simulated: its name, the mode, and the defects that are switched against it."""

    system: str
    mode: str
    switched: tuple[Defect, ...] = ()

    @property
    def columns(self) -> dict[str, str]:
        """Return the columns that say so."""
        switched = " ".join(defect.value for defect in self.switched)
        return {"system": self.system, "mode": self.mode, "defects": switched}


class Runs:
    """Simulations on failures or on spot traces; what a system cannot tell apart runs once."""

    def __init__(self, cells: Cells, options: Mapping[str, Any], *, is_spot: bool) -> None:
        self.systems = Systems(cells["throughput"], **options)
        self._is_spot = is_spot
        self._found: dict[object, Outcome] = {}
        self._known: dict[tuple[str, str], Costs] = {}

    @property
    def models(self) -> list[str]:
        """Return the names of the models."""
        return list(self.systems.models)

    def outcome(self, trace: NodeTrace, seed: int, model: str, setting: Setting) -> Outcome:
        """Simulate one setting."""
        # Only Bamboo asks which node it is that is lost; the others cannot tell failures of two seeds apart.
        asks_who = setting.system == "bamboo" or self._is_spot
        key = trace.name, trace.end_ms, seed if asks_who else None, model, setting
        if key not in self._found:
            repaired = repairs(setting.mode, setting.switched)
            costs = self._costs(setting.system, model)
            self._found[key] = simulate(setting.system.partition("-")[0], trace, costs, repaired)
        return self._found[key]

    def _costs(self, system: str, model: str) -> Costs:
        key = system, model
        if key not in self._known:
            falls_back = not self._is_spot or self.systems.models[model].falls_back_on_spot
            is_free = system == NO_CHECKPOINT
            self._known[key] = self.systems.costs(
                system.partition("-")[0],
                model,
                falls_back=falls_back,
                checkpoint_every=2 if is_free else None,
                charges_checkpoints=not is_free,
            )
        return self._known[key]

    def rows(
        self, traces: Traces, models: Sequence[str], settings: Sequence[Setting]
    ) -> list[dict[str, Any]]:
        """Return a row a trace, seed, model and setting."""
        for name, by_seed in traces.items():
            costs = self._costs("oobleck", models[0])
            beyond = max(unused_nodes(trace, costs) for trace in by_seed.values())
            if beyond:
                _LOG.warning("%s: up to %d nodes idle, throughput is known for no more", name, beyond)
        return [
            {"trace": name, "seed": seed, "model": model}
            | setting.columns
            | _averages(self.outcome(trace, seed, model, setting))
            for name, by_seed in traces.items()
            for model in models
            for setting in settings
            for seed, trace in by_seed.items()
        ]


def _averages(found: Outcome) -> dict[str, Any]:
    return {
        "throughput_samples_per_s": found.throughput_samples_per_s,
        "n_steps": found.n_steps,
        "n_failures": found.n_failures,
        "feasible": found.is_feasible,
    }


def all_systems(mode: str, switched: tuple[Defect, ...] = ()) -> list[Setting]:
    """Return every system in one mode."""
    return [Setting(system, mode, switched) for system in SYSTEMS]


def beside(rows: Sequence[Mapping[str, Any]], printed: pd.DataFrame, schema: TableSchema) -> pd.DataFrame:
    """Return rows with the printed values of the authors' traces beside them."""
    keys = ["trace", "model", "system"]
    table = pd.DataFrame(rows).merge(printed[[*keys, "published_samples_per_s"]], how="left", on=keys)
    return schema.validate(table, where=schema.name)


# ------------------------------------------------------------------------------------------------
# Figs 1, 9, 12 and 13: nodes that are lost one after the other at a fixed distance.


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
        Options of `makespan.oobleck.simulator.Systems`.
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


# ------------------------------------------------------------------------------------------------
# Figs 10, 14 and 15: spot instances that come and go, and what each defect of the simulators does.

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
        Options of `makespan.oobleck.simulator.Systems`.
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
