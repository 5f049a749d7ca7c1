"""Trace files in the layout of the published ones, with an explanation of every row.

``placements.csv`` has the published columns, ``placements.explain.jsonl`` every term of every
row, and ``placements.meta.json`` what made them. The files are emulated, not measured.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import pandas as pd

from makespan import __version__
from makespan.emulator._calibration import CalibrationSet
from makespan.emulator._emulate import Explanation, emulate, explain
from makespan.emulator._points import Point
from makespan.errors import unknown_name
from makespan.hardware import ClusterSpec
from makespan.plans import write_exec_plan
from makespan.tables import write_csv, write_text
from makespan.units import MS
from makespan.workloads import Workload

__all__ = [
    "EMULATED_NOTE",
    "LEGACY_UNITS",
    "explanation_record",
    "legacy_frame",
    "preset_digests",
    "write_trace",
]

_PACKAGES = ("makespan.hardware", "makespan.workloads", "makespan.emulator")
_DIGEST_BYTES = 16
EMULATED_NOTE = "emulated, not measured"
LEGACY_UNITS = ("milliseconds", "seconds")
_PHASES = {"forward_s": "forward", "overlap_sync_s": "overlap_sync", "optimize_s": "optimize"}


@cache
def preset_digests() -> dict[str, str]:
    """Return the BLAKE2b digest of every preset file, keyed ``package/file``."""
    digests = {}
    for package in _PACKAGES:
        folder = resources.files(package).joinpath("presets")
        for item in sorted(folder.iterdir(), key=lambda entry: entry.name):
            if item.name.endswith(".toml"):
                digest = hashlib.blake2b(item.read_bytes(), digest_size=_DIGEST_BYTES).hexdigest()
                digests[f"{package.rpartition('.')[2]}/{item.name}"] = digest
    return digests


def legacy_frame(frame: pd.DataFrame, units: str = "milliseconds") -> pd.DataFrame:
    """Convert a throughput table to the published columns."""
    if units not in LEGACY_UNITS:
        raise unknown_name("unit of the phase columns", units, LEGACY_UNITS)
    scale = 1.0 if units == "seconds" else 1.0 / MS
    legacy = frame[["exec_plan", "placement", "cpu_threads"]].copy()
    legacy["iter_time"] = frame["iter_time_s"].fillna(0.0)
    for column, name in _PHASES.items():
        legacy[name] = frame[column].fillna(0.0) * scale
    return legacy


def explanation_record(found: Explanation) -> dict[str, Any]:
    """Return an explanation as a record of plain values, ready for JSON."""
    plan = found.point.plan
    terms = {name: value for name, value in found.terms_s.items() if math.isfinite(value)}
    return {
        "exec_plan": write_exec_plan(plan),
        "placement": found.point.placement.text,
        "cpu_threads": plan.cpu_threads,
        "micro_batch_size": plan.micro_batch_size,
        "n_microbatches": plan.n_microbatches,
        "feasible": found.feasible,
        "reason": found.reason,
        "warnings": list(found.warnings),
        "iter_time_s": found.iter_time_s if found.feasible else None,
        "terms_s": terms if found.feasible else {},
        "memory_bytes": found.memory_bytes,
        "host_memory_bytes": found.host_memory_bytes,
        "calibration": found.calibration.identifier,
        "calibration_level": found.calibration.level,
        "note": EMULATED_NOTE,
    }


def _sources(workload: Workload, cluster: ClusterSpec) -> dict[str, str]:
    """Return where the numbers come from, by what they describe."""
    stacks = (workload.data_parallel_stack, workload.model_parallel_stack)
    described = {
        f"workload {workload.key}": workload.source,
        f"model {workload.model.key}": workload.model.source,
    }
    described |= {f"stack {software.label}": software.source for software in stacks}
    described |= {f"node {node.name}": node.source for node in cluster.nodes}
    return described | {f"device {node.gpu.name}": node.gpu.source for node in cluster.nodes}


def write_trace(
    directory: str | Path,
    workload: Workload,
    points: Sequence[Point],
    cluster: ClusterSpec,
    calibration: CalibrationSet,
    *,
    seed: int = 0,
    noise: float = 0.0,
    units: str = "milliseconds",
) -> tuple[Path, Path, Path]:
    """Emulate points and write the three files of a trace into a folder, each atomically.

    Further arguments are as for `emulate`; ``units`` are those of the phase columns, one of `LEGACY_UNITS`.

    Returns
    -------
    tuple of pathlib.Path
        The table, the explanations and the meta data.
    """
    frame = emulate(workload, points, cluster, calibration, seed=seed, noise=noise)
    table = legacy_frame(frame, units)
    records = [explanation_record(explain(workload, point, cluster, calibration)) for point in points]
    used = calibration.for_workload(workload)
    meta = {
        "note": EMULATED_NOTE,
        "emulator_version": __version__,
        "cluster": cluster.name,
        "workload": workload.key,
        "stacks": [workload.data_parallel_stack.label, workload.model_parallel_stack.label],
        "sources": _sources(workload, cluster),
        "seed": seed,
        "noise": noise,
        "phase_units": units,
        "preset_digests": preset_digests(),
        "calibration": {
            "identifier": used.identifier,
            "level": used.level,
            "source": calibration.source,
            "data_digest": calibration.data_digest,
            "excluded_models": list(used.excluded_models),
            "compute_scale": used.compute_scale,
            "theta": dict(used.theta),
        },
    }
    base = Path(directory)
    paths = (base / "placements.csv", base / "placements.explain.jsonl", base / "placements.meta.json")
    write_csv(table, paths[0])
    write_text("".join(json.dumps(record, sort_keys=True) + "\n" for record in records), paths[1])
    write_text(json.dumps(meta, indent=2, sort_keys=True) + "\n", paths[2])
    return paths
