"""Fig. 9: average throughput of every system against the frequency of failures."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from makespan.papers.oobleck._tables_simulation import FIG9
from makespan.papers.oobleck.simulators import (
    MODES,
    SYSTEMS,
    NodeTrace,
    Outcome,
    Systems,
    generate_failures,
    read_trace,
    repairs,
    simulate,
)
from makespan.tables import TableSchema
from makespan.throughput import Dataset, find_dataset, verify

__all__ = ["fig9_experiment", "generated_failures", "published_traces"]

Traces = Mapping[str, Mapping[int, NodeTrace]]
Cells = Mapping[str, pd.DataFrame]


def generated_failures(names: Sequence[str], n_seeds: int) -> dict[str, dict[int, NodeTrace]]:
    """Generate failures: one trace a name and seed, seeds from 1."""
    return {name: {seed: generate_failures(name, seed) for seed in range(1, n_seeds + 1)} for name in names}


def published_traces(
    names: Sequence[str], directory: str | Path, register: Iterable[Dataset]
) -> dict[str, dict[int, NodeTrace]]:
    """Read the authors' traces, under seed 0.

    Parameters
    ----------
    names
        Names of traces; the register has them as ``oobleck-trace-<name>``.
    directory, register
        A directory with the published files, and their checksums.

    Raises
    ------
    MissingDataError, ChecksumError
        A file is not there or not the registered one.
    """
    entries = list(register)
    return {
        name: {0: read_trace(verify(find_dataset(entries, f"oobleck-trace-{name}"), directory), name)}
        for name in names
    }


def fig9_experiment(traces: Traces, cells: Cells, options: Mapping[str, Any]) -> dict[str, pd.DataFrame]:
    """Simulate every system on every model and trace, as released and repaired.

    Parameters
    ----------
    traces
        By name and seed; see `generated_failures` and `published_traces`.
    cells
        Printed cells by artifact: ``throughput`` and ``fig9``.
    options
        ``models`` and ``assumptions``, see `Systems`.

    Returns
    -------
    dict
        ``fig9``, one row a run. Oobleck and Varuna do not ask which node is lost: their runs are the same
        under all seeds of a generated trace.
    """
    systems = Systems(cells["throughput"], **options)
    runs: dict[object, Outcome] = {}
    rows = [
        _row(name, seed, model, system, mode, _run(runs, trace, systems, model, system, mode))
        for name, by_seed in traces.items()
        for model in systems.models
        for system in SYSTEMS
        for mode in MODES
        for seed, trace in by_seed.items()
    ]
    return {"fig9": _beside(rows, cells["fig9"], FIG9)}


def _run(
    runs: dict[object, Outcome], trace: NodeTrace, systems: Systems, model: str, system: str, mode: str
) -> Outcome:
    """Simulate, once for all traces that the system cannot tell apart."""
    key: object = (trace, model, system, mode)
    if system != "bamboo":
        key = (tuple((event.time_ms, event.is_added) for event in trace.events), model, system, mode)
    if key not in runs:
        runs[key] = simulate(system, trace, systems.costs(system, model), repairs(mode))
    return runs[key]


def _row(trace: str, seed: int, model: str, system: str, mode: str, found: Outcome) -> dict[str, Any]:
    return {
        "trace": trace,
        "seed": seed,
        "model": model,
        "system": system,
        "mode": mode,
        "defects": "",
        "throughput_samples_per_s": found.throughput_samples_per_s,
        "n_steps": found.n_steps,
        "n_failures": found.n_failures,
        "feasible": found.is_feasible,
    }


def _beside(rows: Sequence[Mapping[str, Any]], printed: pd.DataFrame, schema: TableSchema) -> pd.DataFrame:
    """Return rows with the printed values of the authors' traces beside them."""
    keys = ["trace", "model", "system"]
    table = pd.DataFrame(rows).merge(printed[[*keys, "published_samples_per_s"]], how="left", on=keys)
    return schema.validate(table, where=schema.name)
