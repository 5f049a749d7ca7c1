"""Traces, and simulations of them: as rows of a table, each run once."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from makespan.oobleck.simulators import (
    SPOT_TRACES,
    SYSTEMS,
    Costs,
    Defect,
    NodeTrace,
    Outcome,
    Systems,
    generate_failures,
    generate_spot,
    read_trace,
    repairs,
    simulate,
    unused_nodes,
)
from makespan.papers.oobleck._settings_simulation import trace_dataset
from makespan.tables import TableSchema
from makespan.throughput import Dataset, find_dataset, verify

__all__ = [
    "NO_CHECKPOINT", "Cells", "Runs", "Setting", "Traces", "all_systems", "beside", "generated_traces",
    "published_traces",
]  # fmt: skip

_LOG = logging.getLogger(__name__)

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
