"""Traces, and simulations of them: as rows of a table, each run once."""

import itertools
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from pydantic import Field, model_validator

from makespan.files import read_preset
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
from makespan.papers.experiment import Experiment, Explore, Figure, Given
from makespan.settings import Block, Count, one_of, option, shared
from makespan.throughput import Dataset, find_dataset, read_register, verify
from makespan.units import MS

_LOG = logging.getLogger(__name__)


# --- Options --------------------------------------------------------------------------------------

_CHANGED = "fig1, fig9, fig10, fig12, fig13, fig14, fig15, ablation"
_of_all = partial(option, source="Oobleck SOSP'23 artifact", changes=_CHANGED)
_of_spot = partial(option, source="Oobleck SOSP'23 artifact", changes="fig10, fig14, fig15")
_of_studies = partial(option, source="a choice", changes="studies")
_simulation_option = partial(option, source="a choice", changes=_CHANGED)
_SYSTEM = "makespan.oobleck"
FailureTrace = Annotated[str, one_of(lambda: read_preset(_SYSTEM, "failures"))]
SpotTrace = Annotated[str, one_of(lambda: read_preset(_SYSTEM, "spot"))]
Seeds = Annotated[int, Field(ge=2)]


class Model(Block):
    """Costs of a model besides its throughput, which is printed."""

    name: str = _of_all("name of the model in the printed cells", min_length=1)
    samples_per_step: Count = _of_all("global batch", unit="samples")
    regroup_s: float = _of_all("Oobleck: regrouping, copying state and building groups", unit="s", ge=0)
    checkpoint_s: float = _of_all("Varuna: writing a checkpoint", unit="s", ge=0)
    restart_s: float = _of_all(
        "Varuna: restart with its checkpoint, until a printed time by nodes takes its place", unit="s", ge=0
    )
    local_rebalance_s: float = _of_all("Bamboo: taking spare nodes in", unit="s", ge=0)
    falls_back_on_spot: bool = _of_all(
        "Varuna on spot traces: whether a restart loses the steps since the last checkpoint"
    )

    @model_validator(mode="after")
    def _restart_has_its_checkpoint(self) -> "Model":
        if self.restart_s < self.checkpoint_s:
            raise ValueError(
                f"restart_s of checkpoint_s ({self.checkpoint_s:g}) or more, which is part of it"
            )
        return self


class Assumptions(Block):
    """Actions of the systems, and their durations."""

    node_creation_s: float = _of_all("from a node's arrival to its being ready", 45.0, unit="s", ge=0)
    n_stages: Count = _of_all("stages of a pipeline", 12)
    checkpoint_every: Count = _of_all("Varuna: steps between checkpoints", 10, unit="steps")
    bamboo_restart_s: float = _of_all("Bamboo: restart", 30.0, unit="s", ge=0)
    slow_down: float = _of_all("Bamboo: factor of a step while a node does the work of two", 1.5, ge=1)
    overload_limit: float = _of_all("Bamboo: share of such nodes above which it plans anew", 0.05, ge=0, le=1)
    useful_share: float = _of_all(
        "Bamboo: share of a step that counts as useful in compat", 0.1971, ge=0, le=1
    )
    horizon_s: float = _simulation_option(
        "over how much time joined nodes must pay for a new plan where defect D2 is repaired",
        3600.0,
        unit="s",
        gt=0,
    )


def systems_of(models: Sequence[Model], assumptions: Assumptions) -> dict[str, Any]:
    """Return the arguments of `makespan.oobleck.simulator.Systems`."""
    return {
        "models": [model.model_dump() for model in models],
        "assumptions": assumptions.model_dump(),
    }


class Intervals(Block):
    """Steady losses, each with a new node, at a throughput that does not depend on nodes."""

    models: tuple[str, ...] = _of_studies(
        "models whose checkpoints are varied", ("BERT-Large", "GPT-3 2.7B", "GPT-3 6.7B"), min_length=1
    )
    every: tuple[Count, ...] = _of_studies(
        "steps between checkpoints, besides those of Young and Daly",
        (1, 2, 3, 5, 7, 10, 15, 20, 30, 50),
        unit="steps",
        min_length=1,
    )
    n_nodes: Count = _of_studies("nodes, a number with printed throughput", 30)
    mtbf_s: float = _of_studies(
        "mean time between losses where checkpoints are varied", 3600.0, unit="s", gt=0
    )
    n_losses: Count = _of_studies("losses of a trace", 40)
    seeds: Count = _of_studies("traces of each kind", 3)


class Simulation(Block):
    """Simulations of systems that lose nodes."""

    failure_traces: dict[FailureTrace, Seeds] = _of_all(
        "distances between failures, and how many traces are generated of each",
        {"6h": 20, "3h": 20, "1h": 20, "30m": 20, "10m": 20, "5m": 20},
        min_length=1,
    )
    spot_traces: dict[SpotTrace, Seeds] = _of_spot(
        "spot traces, those of EC2 P3 and GCP as scaled to 30 nodes among them, and how many are generated",
        {"gcp_scaled": 20, "p3_scaled": 20, "p3": 5, "g4dn": 5},
    )
    breakdown_models: tuple[str, ...] = option(
        "models whose time is broken down",
        ("BERT-Large", "GPT-3 6.7B"),
        source="Oobleck, Figs 1 and 12",
        changes="fig1, fig12",
        min_length=1,
    )
    checkpoint_model: str = option(
        "model that Varuna also trains without the cost of checkpoints",
        "GPT-3 6.7B",
        source="Oobleck, Fig. 13",
        changes="fig13",
    )
    ablation_traces: tuple[SpotTrace, ...] = option(
        "spot traces on which defects are repaired one by one",
        ("gcp_scaled", "p3_scaled"),
        source="a choice",
        changes="ablation",
    )
    ablation_seeds: Count = option("generated ones of each of them", 2, source="a choice", changes="ablation")
    ablation_judged_seeds: Count = option(
        "generated ones where a statement is about the repair", 10, source="a choice", changes="ablation"
    )
    models: tuple[Model, ...] = option(
        "models and their costs",
        (
            Model(
                name="BERT-Large",
                samples_per_step=8192,
                regroup_s=2.0,
                checkpoint_s=15.8,
                restart_s=76.0,
                local_rebalance_s=76.0,
                falls_back_on_spot=False,
            ),
            Model(
                name="GPT-2",
                samples_per_step=1024,
                regroup_s=2.0,
                checkpoint_s=11.5,
                restart_s=83.0,
                local_rebalance_s=80.0,
                falls_back_on_spot=False,
            ),
            Model(
                name="GPT-3 Medium",
                samples_per_step=819,
                regroup_s=3.0,
                checkpoint_s=11.2,
                restart_s=78.7,
                local_rebalance_s=100.0,
                falls_back_on_spot=False,
            ),
            Model(
                name="GPT-3 2.7B",
                samples_per_step=512,
                regroup_s=6.0,
                checkpoint_s=50.0,
                restart_s=515.0,
                local_rebalance_s=230.0,
                falls_back_on_spot=True,
            ),
            Model(
                name="GPT-3 6.7B",
                samples_per_step=1024,
                regroup_s=10.0,
                checkpoint_s=120.0,
                restart_s=701.0,
                local_rebalance_s=450.0,
                falls_back_on_spot=True,
            ),
        ),
        min_length=1,
    )
    assumptions: Assumptions = option("what systems do, and how long it takes", Assumptions())
    intervals: Intervals = option("steady losses", Intervals())

    @model_validator(mode="after")
    def _names_are_known(self) -> "Simulation":
        names = [model.name for model in self.models]
        unknown = sorted({*self.breakdown_models, self.checkpoint_model, *self.intervals.models} - set(names))
        if unknown or len(set(names)) < len(names):
            raise ValueError(f"each of models once, and none other ({', '.join(unknown or names)})")
        if missing := {"p3_scaled", "gcp_scaled"} - set(self.spot_traces):
            raise ValueError(
                f"spot_traces with those of Figs 14 and 15 (not there: {', '.join(sorted(missing))})"
            )
        return self

    def systems(self) -> dict[str, Any]:
        """Return the arguments of `makespan.oobleck.simulator.Systems`."""
        return systems_of(self.models, self.assumptions)


def trace_dataset(name: str) -> str:
    """Return the name of a trace in the register."""
    scaled = {"p3_scaled": "scale-p3", "gcp_scaled": "scale-gcp"}
    return f"oobleck-trace-{scaled.get(name, name)}"


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
    """Setting of a simulation: system, mode, and the defects that are switched against the mode."""

    system: str
    mode: str
    switched: tuple[Defect, ...] = ()

    @property
    def columns(self) -> dict[str, str]:
        """Return the columns of the setting in result tables."""
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
        """Return one row per trace, seed, model and setting."""
        for name, by_seed in traces.items():
            costs = self._costs("oobleck", models[0])
            beyond = max(unused_nodes(trace, costs) for trace in by_seed.values())
            if beyond:
                _LOG.warning("%s: up to %d nodes idle, throughput is known for no more", name, beyond)
        rows = []
        for name, model, setting in itertools.product(traces, models, settings):
            for seed, trace in traces[name].items():
                outcome = self.outcome(trace, seed, model, setting)
                rows.append(
                    {"trace": name, "seed": seed, "model": model}
                    | setting.columns
                    | {
                        "throughput_samples_per_s": outcome.throughput_samples_per_s,
                        "n_steps": outcome.n_steps,
                        "n_failures": outcome.n_failures,
                        "feasible": outcome.is_feasible,
                    }
                )
        return rows


def all_systems(mode: str, switched: tuple[Defect, ...] = ()) -> list[Setting]:
    """Return every system in one mode."""
    return [Setting(system, mode, switched) for system in SYSTEMS]


def beside(rows: Sequence[Mapping[str, Any]], printed: pd.DataFrame) -> pd.DataFrame:
    """Return rows with the printed values of the authors' traces beside them."""
    keys = ["trace", "model", "system"]
    return pd.DataFrame(rows).merge(printed[[*keys, "published_samples_per_s"]], how="left", on=keys)


def _traces(seeds: Mapping[str, int], given: Given) -> Traces:
    """Generate traces, or read those of the authors."""
    if given.published is None:
        return generated_traces(seeds)
    directory, register = given.published
    return published_traces(list(seeds), directory, read_register(register))


# ------------------------------------------------------------------------------------------------
# Figs 1, 9, 12 and 13: nodes that are lost one after the other at a fixed distance.


def failure_tables(
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
        ``fig9`` and ``fig13``, one row per run; ``fig1`` and ``fig12``, one row per category, means over
        seeds.
        Oobleck and Varuna do not ask which node is lost: their runs are the same under all seeds of a
        generated trace.
    """
    runs = Runs(cells, systems, is_spot=False)
    every = [setting for mode in MODES for setting in all_systems(mode)]
    averages = runs.rows(traces, runs.models, every)
    without = [Setting(name, mode) for mode in MODES for name in ("varuna", NO_CHECKPOINT, "oobleck")]
    times = _times(runs, traces, breakdown_models, every)
    return {
        "fig1": times[times["trace"] == "10m"],
        "fig9": beside(averages, cells["fig9"]),
        "fig12": times,
        "fig13": beside(runs.rows(traces, [checkpoint_model], without), cells["fig13"]),
    }


def _times(runs: Runs, traces: Traces, models: Sequence[str], settings: Sequence[Setting]) -> pd.DataFrame:
    """Return time by category, means over seeds, and its share; idle GPUs do not count in shares."""
    rows = []
    for name, by_seed in traces.items():
        for model in models:
            for setting in settings:
                outcomes = [runs.outcome(trace, seed, model, setting) for seed, trace in by_seed.items()]
                if not outcomes[0].is_feasible:
                    continue
                times_s = {
                    category: sum(outcome.times_s[category] for outcome in outcomes) / len(outcomes)
                    for category in Category
                }
                total_s = sum(time_s for category, time_s in times_s.items() if category is not Category.IDLE)
                rows += [
                    {
                        "trace": name,
                        "model": model,
                        "system": setting.system,
                        "mode": setting.mode,
                        "category": category.value,
                        "time_s": time_s,
                        "share": time_s / total_s if total_s else 0.0,
                    }
                    for category, time_s in times_s.items()
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


def spot_tables(
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
        ``fig10``, one row per run; ``fig14`` and ``fig15``, throughput and nodes over time on the first trace
        of EC2 P3 and of GCP; ``ablation``, runs as released with one defect repaired, and with three.
    """
    runs = Runs(cells, systems, is_spot=True)
    every = [setting for mode in MODES for setting in all_systems(mode)]
    ablated = {name: traces[name] for name in ablation_traces if name in traces}
    repaired: list[dict[str, Any]] = []
    for defects in ((), *((defect,) for defect in DEFECTS), _TOGETHER):
        # Repairs that statements are about are simulated on more seeds.
        n_seeds = ablation_judged_seeds if defects in _JUDGED else ablation_seeds
        used = {name: dict(list(by_seed.items())[:n_seeds]) for name, by_seed in ablated.items()}
        repaired += runs.rows(used, runs.models, all_systems("compat", defects))
    tables = {
        "fig10": beside(runs.rows(traces, runs.models, every), cells["fig10"]),
        "ablation": beside(repaired, cells["fig10"]),
    }
    for name, trace in _SERIES.items():
        first = next(iter(traces[trace].items()))
        rows = [
            row for setting in every for model in runs.models for row in _series(runs, first, model, setting)
        ]
        tables[name] = pd.DataFrame(rows)
    return tables


def _series(runs: Runs, first: tuple[int, NodeTrace], model: str, setting: Setting) -> list[dict[str, Any]]:
    """Return rows of throughput and nodes in bins of a few steps, at least six minutes."""
    seed, trace = first
    outcome = runs.outcome(trace, seed, model, setting)
    if not outcome.is_feasible:
        return []
    fastest = max(runs.systems.costs("oobleck", model).throughput.values())
    steps_s = _STEPS_A_BIN * runs.systems.models[model].samples_per_step / fastest
    width_s = _BIN_S * max(1, math.ceil(steps_s / _BIN_S))
    edges = np.arange(0.0, trace.end_ms * MS + width_s, width_s)
    # Samples per second in each bin; the samples of a step are spread evenly over its time.
    steps = outcome.steps()
    steps = steps[steps[:, 2] > 0]
    start, end = np.minimum(steps[:, 0], steps[:, 1]), steps[:, 1]
    covered = np.minimum(end[:, None], edges[None, 1:]) - np.maximum(start[:, None], edges[None, :-1])
    shares = np.clip(covered, 0.0, None) / np.maximum(end - start, MS)[:, None]
    rates = np.asarray(steps[:, 2] @ shares / np.diff(edges), dtype=np.float64)
    if setting.mode == "compat" and (setting.system, model) == _ZEROED and Defect.D9 not in setting.switched:
        rates = np.zeros_like(rates)
    nodes = _nodes(trace, edges)
    run = {"model": model, "system": setting.system, "mode": setting.mode}
    return [
        run | {"time_s": start_s, "n_nodes": n_nodes, "throughput_samples_per_s": rate}
        for start_s, n_nodes, rate in zip(edges[:-1].tolist(), nodes.tolist(), rates.tolist(), strict=True)
    ]


def _nodes(trace: NodeTrace, edges: Floats) -> Floats:
    """Return the mean number of nodes in each bin."""
    times = np.array([0.0, *(event.time_ms * MS for event in trace.events)])
    areas = np.concatenate([[0.0], np.cumsum(np.diff(times) * np.array([0, *trace.counts()])[:-1])])
    last = trace.counts()[-1]
    beyond = np.clip(edges - times[-1], 0.0, None) * last
    return np.asarray(np.diff(np.interp(edges, times, areas) + beyond) / np.diff(edges), dtype=np.float64)


# --- The experiments --------------------------------------------------------------------------------


class Failures(Experiment):
    """Simulate every system on every model and distance between failures, as released and repaired."""

    name = "failure"
    cells = ("throughput", "fig9", "fig13")
    unjudged = frozenset({"fig1"})
    reads_files = True
    tables = {
        "fig1": "where time goes with a failure every ten minutes",
        "fig9": "average throughput against the frequency of failures, with the paper's values",
        "fig12": "where time goes at every frequency of failures",
        "fig13": "average throughput of a large model, with and without the cost of checkpoints",
    }
    figures = (
        Figure(
            "fig1",
            "Fig. 1",
            "Share of time by category with a failure every ten minutes, by the "
            "simulators as released, whose categories overlap, and repaired. "
            "Source {source}: mean of {traces: values fig9.seed}; those of the "
            "emulated source are generated. Crosses mark models that do not fit "
            "into memory.",
            tables=("fig1", "fig9"),
            draw="breakdown",
        ),
        Figure(
            "fig9",
            "Fig. 9",
            "Average throughput on 30 nodes that lose one node after the other, "
            "at the distances below the bars, by the simulators as released and "
            "with their defects repaired, on printed throughput. Source {source}: "
            "mean of {traces: values fig9.seed}, with the 95 % interval of "
            "several, cut at 0, as a line with caps; those of the emulated source "
            "are generated. Hollow diamonds are the published values, and crosses "
            "mark models that do not fit into memory.",
            tables=("fig9",),
        ),
        Figure(
            "fig12",
            "Fig. 12",
            "Share of time by category at every distance between failures, bars "
            "of Bamboo, Varuna and Oobleck (B, V, O), by the simulators as "
            "released, whose categories overlap, and repaired. Source {source}: "
            "mean of {traces: values fig9.seed}; those of the emulated source are "
            "generated. Crosses mark models that do not fit into memory.",
            tables=("fig12", "fig9"),
            draw="breakdown",
        ),
        Figure(
            "fig13",
            "Fig. 13",
            "Average throughput of a large model, also for Varuna with "
            "checkpoints that cost nothing, by the simulators as released and "
            "with their defects repaired. Source {source}: mean of {traces: "
            "values fig13.seed}, with the 95 % interval of several, cut at 0, as "
            "a line with caps; those of the emulated source are generated. Hollow "
            "diamonds are the published values. Bars of zero are invisible: there "
            "the system makes no progress.",
            tables=("fig13",),
        ),
    )

    failure_traces: dict[FailureTrace, Seeds] = shared("oobleck.simulation.failure_traces")
    models: tuple[Model, ...] = shared("oobleck.simulation.models")
    assumptions: Assumptions = shared("oobleck.simulation.assumptions")
    breakdown_models: tuple[str, ...] = shared("oobleck.simulation.breakdown_models")
    checkpoint_model: str = shared("oobleck.simulation.checkpoint_model")

    def compute(self, given: Given) -> dict[str, pd.DataFrame]:
        """Return a row per run, and per category of time."""
        return failure_tables(
            _traces(self.failure_traces, given),
            given.cells,
            systems=systems_of(self.models, self.assumptions),
            breakdown_models=self.breakdown_models,
            checkpoint_model=self.checkpoint_model,
        )


_OVER_TIME = tuple(
    Figure(
        name + ending,
        f"Fig. {name.removeprefix('fig')}{title}",
        f"Nodes and throughput over time on spot instances of {cloud}, {simulators}, with averages as dotted "
        "lines. One trace of source {source}; that of the emulated source is generated with the statistics "
        "of the authors'. Where a line falls to zero, no sample is finished.",
        tables=(name,),
        draw="over_time",
        values={"mode": mode},
        explore=Explore(
            "steps",
            ("time_s",),
            ("throughput_samples_per_s",),
            ("system",),
            ("model",),
            unit_x="time [s]",
            unit_y="throughput [samples/s]",
        ),
    )
    for name, cloud in (("fig14", "EC2"), ("fig15", "GCP"))
    for mode, ending, title, simulators in (
        ("compat", "", "", "simulators as released"),
        ("fixed", "_repaired", ", repaired", "defects of the simulators repaired"),
    )
)


class SpotInstances(Experiment):
    """Simulate every system on every model and spot trace."""

    name = "spot"
    cells = ("throughput", "fig10")
    unjudged = frozenset({"fig14", "fig15"})
    reads_files = True
    tables = {
        "fig10": "average throughput on spot traces, with the paper's values",
        "fig14": "throughput and nodes over time on spot instances of EC2",
        "fig15": "throughput and nodes over time on spot instances of GCP",
        "ablation": "average throughput as released, with one defect repaired at a time",
    }
    figures = (
        Figure(
            "fig10",
            "Fig. 10",
            "Average throughput on spot instances, by the simulators as released "
            "and with their defects repaired, on printed throughput. Source "
            "{source}: mean of {traces: values fig10.seed by trace}, with the 95 "
            "% interval of several, cut at 0, as a line with caps; those of the "
            "emulated source are generated with the statistics of the authors'. "
            "Hollow diamonds are the published values, which are of the authors' "
            "traces, and crosses mark models that do not fit into memory.",
            tables=("fig10",),
        ),
        *_OVER_TIME,
        Figure(
            "ablation",
            "Ablation",
            "Average throughput of the released simulators with one defect "
            "repaired, and with three, over that as released. Spot traces of "
            "source {source}: mean of {traces: values ablation.seed by defects}; "
            "those of the emulated source are generated. The page of the paper "
            "lists the defects. Above 1 a repair raises throughput. The axis is "
            "logarithmic; arrows at its ends hold ratios beyond it, and crosses "
            "mark models without any throughput as released.",
            tables=("ablation",),
        ),
    )

    spot_traces: dict[SpotTrace, Seeds] = shared("oobleck.simulation.spot_traces")
    models: tuple[Model, ...] = shared("oobleck.simulation.models")
    assumptions: Assumptions = shared("oobleck.simulation.assumptions")
    ablation_traces: tuple[SpotTrace, ...] = shared("oobleck.simulation.ablation_traces")
    ablation_seeds: int = shared("oobleck.simulation.ablation_seeds")
    ablation_judged_seeds: int = shared("oobleck.simulation.ablation_judged_seeds")

    def compute(self, given: Given) -> dict[str, pd.DataFrame]:
        """Return a row per run, and per bin of time."""
        return spot_tables(
            _traces(self.spot_traces, given),
            given.cells,
            systems=systems_of(self.models, self.assumptions),
            ablation_traces=self.ablation_traces,
            ablation_seeds=self.ablation_seeds,
            ablation_judged_seeds=self.ablation_judged_seeds,
        )
