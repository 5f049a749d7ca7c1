"""What the Morphling authors measured and published: reader, rule for anomalies, source.

One CSV file a model, columns ``exec_plan, placement, iter_time`` [s] and, in most files,
``forward, overlap_sync, optimize``, and in one file ``cpu_threads``. An iteration time of zero
marks a run that failed. The phase columns are in milliseconds in most files and in seconds in
some rows; the numbers of a row decide, see `phase_unit`. Measurement anomalies are found by rule
from measured columns alone, before any model is fitted.
"""

import logging
import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import pandas as pd

from makespan.errors import (
    ChecksumError,
    InputError,
    MissingDataError,
    TraceError,
    UnknownNameError,
    cell_error,
)
from makespan.files import read_bytes
from makespan.hardware import ClusterSpec
from makespan.plans import Placement, PlanFamily, read_plan
from makespan.tables import THROUGHPUT, parse_csv
from makespan.throughput._register import Dataset, check_content
from makespan.throughput._tables import FLAG_FAILED, canonical_rows, check_times
from makespan.units import MS
from makespan.workloads import Workload, resolve_workload_key, workload, workload_keys

__all__ = [
    "FLAG_HALF_BATCH",
    "FLAG_SLOW_FORWARD",
    "PublishedSource",
    "check_published_gpus",
    "flag_anomalies",
    "phase_unit",
    "read_artifact_trace",
]

_LOG = logging.getLogger(__name__)

_GPU = "a800-80"  # on which the authors ran everything

_LAYOUTS = ("morphling/throughput", "throughput", "simulator/traces")
_FILE = "placements.csv"

_REQUIRED = ("exec_plan", "placement", "iter_time")
_PHASES = {"forward": "forward_s", "overlap_sync": "overlap_sync_s", "optimize": "optimize_s"}
_THREADS = "cpu_threads"

# Phases are parts of the iteration, so in seconds their sum is near the iteration time or below
# it, and in milliseconds a thousand times that. The gap between the two ranges is rejected.
_SECONDS_RATIO_MAX = 2.0
_MILLISECONDS_RATIO = (20.0, 2000.0)

FLAG_SLOW_FORWARD = "slow forward on odd placements"
FLAG_HALF_BATCH = "half batch on one GPU"

# A plan family of a workload has slow odd placements if the median over its multi-node rows with an odd
# count on some node, of the forward phase over that of the other rows with as many GPUs, exceeds this
# ratio [1]. Healthy families stay below 1.15.
_SLOW_FORWARD_RATIO = 1.25
# One GPU has twice the samples of two GPUs, so its forward and backward phases take about twice as long.
# Below this ratio [1] the row cannot have run the whole batch.
_HALF_BATCH_RATIO = 1.3

_DATA_PARALLEL = tuple(family for family in PlanFamily if not family.is_model_parallel)

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class PublishedSource:
    """Tables that the authors measured and published.

    Parameters
    ----------
    directory
        A directory with the published files, or the root of a clone of the authors' repository.
    default_cpu_threads
        CPU threads a GPU where neither a file nor the workload says.
    register
        If given, every file must be in it and have its checksum.
    """

    directory: Path
    default_cpu_threads: int
    register: tuple[Dataset, ...] = field(default=(), repr=False)
    name: ClassVar[str] = "published"

    def workload_keys(self) -> tuple[str, ...]:
        """Return the workloads whose trace file is in the directory."""
        found = self._files()
        return tuple(key for key in workload_keys() if key in found)

    def load(self, workload_key: str) -> pd.DataFrame:
        """Read, convert and flag the trace of one workload."""
        spec = workload(workload_key)
        files = self._files()
        if spec.key not in files:
            raise MissingDataError(
                f"{self.directory}: no published trace of {spec.key!r}; it has: "
                f"{', '.join(key for key in workload_keys() if key in files)}"
            )
        path = files[spec.key]
        if self.register:
            check_content(_registered(self.register, path, spec.key), path)
        threads = (*spec.trace_cpu_threads, self.default_cpu_threads)[0]
        return flag_anomalies(read_artifact_trace(path, spec, self.name, threads), spec)

    def _files(self) -> dict[str, Path]:
        for layout in _LAYOUTS:
            files = _trace_files(self.directory / layout)
            if files:
                return files
        raise MissingDataError(
            f"{self.directory}: no published traces; accepted: a directory with "
            + " or ".join(f"{layout}/<model>/{_FILE}" for layout in _LAYOUTS)
            + " (the last is a clone of the authors' repository); set MAKESPAN_PUBLISHED_DIR "
            "or the configuration to it, or fetch the registered files"
        )


def check_published_gpus(where: ClusterSpec) -> None:
    """Raise `InputError` for a cluster with other devices than the one that the authors timed."""
    if where.gpu_types != (_GPU,):
        raise InputError(
            f"source published: its times are of {_GPU}, cluster {where.name!r} has "
            f"{', '.join(where.gpu_types)}; accepted: source emulated, or measured"
        )


def _registered(register: Iterable[Dataset], path: Path, key: str) -> Dataset:
    """Entry of the trace of a workload, whatever its folder is called."""
    for entry in register:
        parts = Path(entry.path).parts
        if len(parts) > 2 and parts[-3] == "throughput" and parts[-1] == _FILE:
            with suppress(UnknownNameError):
                if resolve_workload_key(parts[-2]) == key:
                    return entry
    raise ChecksumError(f"{path}: no trace of {key!r} is registered; accepted: the published files")


def _trace_files(base: Path) -> dict[str, Path]:
    files: dict[str, Path] = {}
    for path in sorted(base.glob(f"*/{_FILE}")):
        try:
            files[resolve_workload_key(path.parent.name)] = path
        except UnknownNameError:
            _LOG.warning("%s: not a trace of a known model, left out", path)
    return files


# --- reader -----------------------------------------------------------------------------------------


def phase_unit(phases_total: float, iter_time_s: float) -> float:
    """Seconds per unit of the phases of a row: 1 or 1e-3, whichever fits its time [s], NaN if neither."""
    ratio = phases_total / iter_time_s
    if ratio <= _SECONDS_RATIO_MAX:
        return 1.0
    low, high = _MILLISECONDS_RATIO
    return MS if low <= ratio <= high else math.nan


def read_artifact_trace(
    path: str | Path, workload: Workload, provenance: str, default_cpu_threads: int
) -> pd.DataFrame:
    """Read one trace file of the authors into the canonical throughput table; every row is ``clean``.

    A byte order mark, Windows line ends and a missing final newline are accepted.
    """
    where, raw = str(path), _read_text(Path(path))
    numbers = _numbers(raw, default_cpu_threads, where)
    table = pd.DataFrame(
        {
            "workload": workload.key,
            "exec_plan": raw["exec_plan"].str.strip(),
            "placement": raw["placement"].str.strip(),
            "cpu_threads": numbers[_THREADS].astype("int64"),
            "global_batch_size": workload.global_batch_size,
            **_times(numbers, where),
            "feasible": numbers["iter_time"] > 0,
            "clean": True,
            "flag": "",
            "provenance": provenance,
        }
    )
    return THROUGHPUT.validate(canonical_rows(table, workload.global_batch_size, where), where)


def _read_text(path: Path) -> pd.DataFrame:
    content = read_bytes(path, "a trace", TraceError)
    raw: pd.DataFrame = parse_csv(content, str(path), "a trace", dtype=str, keep_default_na=False)
    raw.columns = pd.Index([str(name).strip() for name in raw.columns])
    missing = [name for name in _REQUIRED if name not in raw.columns]
    phases = [name for name in _PHASES if name in raw.columns]
    if phases and len(phases) < len(_PHASES):
        missing += [name for name in _PHASES if name not in phases]
    if missing:
        raise TraceError(
            f"{path}: column(s) {', '.join(missing)} missing; found: {', '.join(raw.columns)}; "
            f"accepted: {', '.join(_REQUIRED)}, optionally {_THREADS}, optionally all of "
            f"{', '.join(_PHASES)}"
        )
    if raw.empty:
        raise TraceError(f"{path}: no rows; accepted: at least one measured run")
    ignored = [name for name in raw.columns if name not in (*_REQUIRED, *_PHASES, _THREADS)]
    if ignored:
        _LOG.warning("%s: column(s) %s are not used", path, ", ".join(ignored))
    return raw


def _numbers(raw: pd.DataFrame, default_cpu_threads: int, where: str) -> pd.DataFrame:
    """Convert the numeric columns; cells that cannot be read become NaN and are refused."""
    numbers = pd.DataFrame(index=raw.index)
    for name in ("iter_time", *_PHASES):
        if name in raw.columns:
            numbers[name] = pd.to_numeric(raw[name], errors="coerce").astype("float64")
            for row in np.flatnonzero(numbers[name].isna().to_numpy()):
                raise cell_error(where, int(row) + 1, name, raw[name].iloc[row], "a number")
            failed = "; 0 marks a run that failed" if name == "iter_time" else ""
            check_times(numbers[name], name, where, f"a time, not negative{failed}")
    if _THREADS not in raw.columns:
        return numbers.assign(**{_THREADS: default_cpu_threads})
    threads = pd.to_numeric(raw[_THREADS], errors="coerce")
    wrong = ~((threads >= 1) & (threads % 1 == 0))
    for row in np.flatnonzero(wrong.to_numpy()):
        raise cell_error(where, int(row) + 1, _THREADS, raw[_THREADS].iloc[row], "a whole number, at least 1")
    return numbers.assign(**{_THREADS: threads})


def _times(numbers: pd.DataFrame, where: str) -> dict[str, "pd.Series[float] | float"]:
    """Convert the times to seconds; NaN where the run failed or the file has no phases."""
    feasible = numbers["iter_time"] > 0
    times: dict[str, pd.Series[float] | float] = {"iter_time_s": numbers["iter_time"].where(feasible)}
    if not set(_PHASES) <= set(numbers.columns):
        return times | dict.fromkeys(_PHASES.values(), math.nan)
    total, units = numbers[list(_PHASES)].sum(axis=1), []
    for row, (phases, time) in enumerate(zip(total, numbers["iter_time"], strict=True), 1):
        units.append(phase_unit(phases, time) if time > 0 else math.nan)
        if time > 0 and math.isnan(units[-1]):
            accepted = f"phases in s or ms that fit the iteration time of {time} s"
            raise cell_error(where, row, "forward + overlap_sync + optimize", float(phases), accepted)
    scale = pd.Series(units, index=numbers.index)
    return times | {column: numbers[name] * scale for name, column in _PHASES.items()}


# --- anomalies --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Rows:
    family: npt.NDArray[np.object_]
    n_gpus: npt.NDArray[np.int64]
    is_single_node: Bools
    is_odd: Bools
    forward_s: npt.NDArray[np.float64]
    compute_s: npt.NDArray[np.float64]


def flag_anomalies(frame: pd.DataFrame, spec: Workload) -> pd.DataFrame:
    """Fill the columns ``clean`` and ``flag`` of the measured rows of one workload.

    Three rules, none of which looks at a prediction: a run that failed; a data-parallel family
    whose forward phase is slow on multi-node placements with an odd number of GPUs on some node
    (all such rows of the family are flagged, because one host cause affects them alike); a row on
    one GPU whose forward and backward phases are too short for the whole batch.
    """
    ran = np.flatnonzero(frame["feasible"].to_numpy(dtype=bool))
    rows = _rows(frame.iloc[ran], spec)
    flag = np.full(len(frame), FLAG_FAILED, dtype=object)
    flag[ran] = ""
    flag[ran[_slow_forward(rows)]] = FLAG_SLOW_FORWARD
    flag[ran[_half_batch(rows)]] = FLAG_HALF_BATCH
    return frame.assign(clean=flag == "", flag=flag.astype(str))


def _rows(frame: pd.DataFrame, spec: Workload) -> _Rows:
    placements = [Placement.parse(text) for text in frame["placement"]]
    plans = [
        read_plan(text, n_gpus=place.n_gpus, global_batch_size=spec.global_batch_size)
        for text, place in zip(frame["exec_plan"], placements, strict=True)
    ]
    family = np.empty(len(frame), dtype=object)
    family[:] = [plan.plan_family for plan in plans]
    single = np.array([place.n_nodes == 1 for place in placements], dtype=bool)
    odd = np.array([any(count % 2 for count in place.gpus_per_node) for place in placements], dtype=bool)
    forward = frame["forward_s"].to_numpy(dtype=np.float64)
    return _Rows(
        family=family,
        n_gpus=np.array([place.n_gpus for place in placements], dtype=np.int64),
        is_single_node=single,
        is_odd=odd & ~single,
        forward_s=forward,
        compute_s=forward + frame["overlap_sync_s"].to_numpy(dtype=np.float64),
    )


def _slow_forward(rows: _Rows) -> Bools:
    slow = np.zeros(len(rows.family), dtype=bool)
    for family in _DATA_PARALLEL:
        members = rows.family == family
        odd = np.flatnonzero(members & rows.is_odd)
        ratios = [_forward_ratio(rows, members & ~rows.is_odd, int(row)) for row in odd]
        known = np.array([ratio for ratio in ratios if np.isfinite(ratio)])
        if known.size and float(np.median(known)) > _SLOW_FORWARD_RATIO:
            slow[odd] = True
    return slow


def _forward_ratio(rows: _Rows, peers: Bools, row: int) -> float:
    reference = rows.forward_s[peers & (rows.n_gpus == rows.n_gpus[row]) & (rows.forward_s > 0)]
    return float(rows.forward_s[row] / np.median(reference)) if reference.size else float("nan")


def _half_batch(rows: _Rows) -> Bools:
    short = np.zeros(len(rows.family), dtype=bool)
    for family in _DATA_PARALLEL:
        members = (rows.family == family) & rows.is_single_node & (rows.compute_s > 0)
        one, two = members & (rows.n_gpus == 1), members & (rows.n_gpus == 2)
        if one.any() and two.any():
            short[one] = rows.compute_s[one] < _HALF_BATCH_RATIO * float(np.median(rows.compute_s[two]))
    return short
