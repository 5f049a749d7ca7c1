"""Sources of throughput tables: measured by the user, published by the Morphling authors, or emulated.

All sources return tables of schema `makespan.tables.THROUGHPUT`, with plans and placements in canonical
notation. `ReferenceTimes` looks up the configuration of a request in such tables.
"""

import logging
import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import product
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import pandas as pd

from makespan.emulator import (
    CalibrationSet,
    Explanation,
    Point,
    calibration_names,
    emulate,
    explain,
    load_calibration,
    trace_points,
)
from makespan.errors import (
    ChecksumError,
    InputError,
    MissingDataError,
    TraceError,
    UnknownNameError,
    cell_error,
    unknown_name,
)
from makespan.files import read_bytes
from makespan.hardware import ClusterSpec
from makespan.plans import PLAN_TEXTS, Placement, PlanFamily, read_plan, write_plan
from makespan.tables import ON_DEMAND, PROVENANCES, THROUGHPUT, cached_table, parse_csv, read_csv
from makespan.throughput.register import Dataset, check_content
from makespan.units import MS
from makespan.workloads import Workload, is_in_zoo, resolve_workload_key, workload, workload_keys

_LOG = logging.getLogger(__name__)

# --- Tables in the canonical schema, and the source of the user's own measurements ---

FLAG_FAILED = "failed run"
"""Flag of rows in which nothing ran."""


@dataclass(frozen=True, slots=True)
class MeasuredSource:
    """Tables measured on the user's own devices: one file ``<workload>.csv`` each, in the canonical schema.

    Workloads need not be in the zoo; the global batch is that of the table.
    """

    directory: Path
    name: ClassVar[str] = "measured"

    def workload_keys(self) -> tuple[str, ...]:
        """Return the workloads of the zoo that have a file."""
        keys = tuple(key for key in workload_keys() if self._path(key).is_file())
        if not keys:
            raise MissingDataError(
                f"{self.directory}: no measured traces; expected a directory with <workload>.csv in the "
                f"throughput schema ({', '.join(THROUGHPUT.names)}) for one or more of "
                f"{', '.join(workload_keys())}; measure them first or choose another source"
            )
        return keys

    def load(self, workload_key: str) -> pd.DataFrame:
        """Read and check the trace of one workload, of the zoo or not."""
        key = self._key(workload_key)
        if key is None:
            names = sorted(path.stem for path in self.directory.glob("*.csv"))
            if not names:
                self.workload_keys()  # raises an error with the accepted files
            raise MissingDataError(
                f"{self.directory}: no measured trace {workload_key}.csv; it has: {', '.join(names)}"
            )
        return read_throughput(self._path(key), key)

    def batch_of(self, name: str) -> int | None:
        """Return the global batch of the trace of a workload, None if there is no such trace."""
        key = self._key(name)
        return None if key is None else int(self.load(key)["global_batch_size"].iloc[0])

    def _path(self, key: str) -> Path:
        return self.directory / f"{key}.csv"

    def _key(self, name: str) -> str | None:
        """Return the stem of a workload's file: its name itself, or the key of which it is an alias."""
        is_known = is_in_zoo(name)
        keys = [name, workload(name).key] if is_known else [name]
        return next((key for key in keys if Path(key).name == key and self._path(key).is_file()), None)


def read_throughput(path: str | Path, key: str | None = None) -> pd.DataFrame:
    """Read a throughput table of one workload, ``key`` if given, and check its rows.

    All rows must have the same global batch.
    """
    frame, where = read_csv(path, THROUGHPUT), str(path)
    keys = sorted(set(frame["workload"]))
    if len(keys) != 1:
        stated = ", ".join(keys) or "no rows"
        raise TraceError(f"{where}: column 'workload': found {stated}; expected one workload per file")
    wanted = key or (workload(keys[0]).key if is_in_zoo(keys[0]) else keys[0])
    batch = int(frame["global_batch_size"].iloc[0])
    if batch < 1:
        raise cell_error(where, 1, "global_batch_size", batch, "a whole number, at least 1")
    accepted: dict[str, str | int] = {"workload": wanted, "global_batch_size": batch}
    for column, value in accepted.items():
        for row, cell in enumerate(frame[column], 1):
            if cell != value:
                raise cell_error(where, row, column, cell, str(value))
    cells = zip(frame["cpu_threads"], frame["feasible"], frame["iter_time_s"], strict=True)
    for row, (threads, feasible, time) in enumerate(cells, 1):
        if threads < 1:
            raise cell_error(where, row, "cpu_threads", threads, "a whole number, at least 1")
        if not feasible and not math.isnan(time):
            raise cell_error(where, row, "iter_time_s", time, "no value where feasible is false")
    for row, cell in enumerate(frame["provenance"], 1):
        if cell not in PROVENANCES:
            raise cell_error(where, row, "provenance", cell, ", ".join(PROVENANCES))
    for phase in ("forward_s", "overlap_sync_s", "optimize_s"):
        check_times(frame[phase].fillna(0.0), phase, where, "a time, not negative")
    return canonical_rows(frame, batch, where)


def check_times(values: Iterable[float], column: str, where: str, accepted: str) -> None:
    """Check that times are finite and not negative."""
    for row, value in enumerate(values, 1):
        if not (math.isfinite(value) and value >= 0):
            raise cell_error(where, row, column, value, accepted)


def canonical_rows(frame: pd.DataFrame, global_batch_size: int, where: str) -> pd.DataFrame:
    """Check plans and placements and write them in canonical notation, in which equal ones have equal text.

    Raises `TraceError` for texts that cannot be read, plans whose degrees do not multiply to the GPUs of the
    placement, and (plan, placement, threads) that occur twice.
    """
    cells = zip(frame["exec_plan"], frame["placement"], frame["cpu_threads"], frame["feasible"], strict=True)
    texts = [_canonical(row, cell, global_batch_size, where) for row, cell in enumerate(cells, 1)]
    plans, placements = zip(*texts, strict=True)
    result = frame.assign(exec_plan=plans, placement=placements)
    # The same run can be written in several ways, so duplicates are found only in canonical notation.
    first: dict[tuple[str, str, int], int] = {}
    triples = zip(result["exec_plan"], result["placement"], result["cpu_threads"], strict=True)
    for row, (plan, placement, threads) in enumerate(triples, 1):
        known = first.setdefault((str(plan), str(placement), int(threads)), row)
        if known != row:
            accepted = (
                "one row for each plan, placement (in any order) and CPU threads; row "
                f"{known} is the same run ({plan} on {placement} with {threads} threads)"
            )
            raise cell_error(where, row, "exec_plan", plan, accepted)
    return result


def _canonical(
    row: int, cell: tuple[str, str, int, bool], global_batch_size: int, where: str
) -> tuple[str, str]:
    plan_text, placement_text, cpu_threads, feasible = *cell[:2], int(cell[2]), cell[3]
    try:
        placement = Placement.parse(placement_text)
    except InputError as error:
        accepted = f"one digit per node such as 44 or 1124 ({error})"
        raise cell_error(where, row, "placement", placement_text, accepted) from error
    # The plan of a failed run may have more replicas than the batch has samples.
    batch = global_batch_size if feasible else placement.n_gpus
    try:
        plan = read_plan(plan_text, n_gpus=placement.n_gpus, global_batch_size=batch, cpu_threads=cpu_threads)
    except InputError as error:
        accepted = f"{PLAN_TEXTS}, for the {placement.n_gpus} GPU(s) of placement {placement.text} ({error})"
        raise cell_error(where, row, "exec_plan", plan_text, accepted) from error
    return write_plan(plan, cpu_threads=cpu_threads), placement.text


# --- Published traces of the Morphling authors: source, reader, and rules for anomalies ---
#
# One CSV file per model, columns ``exec_plan, placement, iter_time`` [s] and, in most files, ``forward,
# overlap_sync, optimize``, and in one file ``cpu_threads``. An iteration time of zero marks a run that
# failed. The phase columns are in milliseconds in most files and in seconds in some rows; the numbers of a
# row decide, see `phase_unit`. Measurement anomalies are found by rule from measured columns alone, before
# any model is fitted.

_GPU = "a800-80"  # device of all published runs
_LAYOUTS = ("morphling/throughput", "throughput", "simulator/traces")
_FILE = "placements.csv"
_REQUIRED = ("exec_plan", "placement", "iter_time")
_PHASES = {"forward": "forward_s", "overlap_sync": "overlap_sync_s", "optimize": "optimize_s"}
_THREADS = "cpu_threads"
# Phases are parts of the iteration: in seconds their sum is about the iteration time or less, and in
# milliseconds a thousand times that. Ratios between the two ranges are rejected.
_SECONDS_RATIO_MAX = 2.0
_MILLISECONDS_RATIO = (20.0, 2000.0)
FLAG_SLOW_FORWARD = "slow forward on odd placements"
FLAG_HALF_BATCH = "half batch on one GPU"
# A plan family of a workload has slow odd placements if the median over its multi-node rows with an odd
# count on some node, of the forward phase over that of the other rows with as many GPUs, exceeds this
# ratio [1]. Healthy families stay below 1.15.
_SLOW_FORWARD_RATIO = 1.25
# One GPU processes twice as many samples as each of two, so its forward and backward phases take about twice
# as long. A row below this ratio [1] cannot have run the whole batch.
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
        CPU threads per GPU where neither the file nor the workload states them.
    register
        If given, every file must be in it and have its checksum.
    """

    directory: Path
    default_cpu_threads: int
    register: tuple[Dataset, ...] = field(default=(), repr=False)
    name: ClassVar[str] = "published"

    def workload_keys(self) -> tuple[str, ...]:
        """Return the workloads whose trace file is in the directory."""
        files = self._files()
        return tuple(key for key in workload_keys() if key in files)

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
            files: dict[str, Path] = {}
            for path in sorted((self.directory / layout).glob(f"*/{_FILE}")):
                try:
                    files[resolve_workload_key(path.parent.name)] = path
                except UnknownNameError:
                    _LOG.warning("%s: not a trace of a known model, left out", path)
            if files:
                return files
        raise MissingDataError(
            f"{self.directory}: no published traces; expected a directory with "
            + " or ".join(f"{layout}/<model>/{_FILE}" for layout in _LAYOUTS)
            + " (the last is a clone of the authors' repository); set MAKESPAN_PUBLISHED_DIR "
            "or the configuration to it, or fetch the registered files"
        )


def check_published_gpus(where: ClusterSpec) -> None:
    """Raise `InputError` for a cluster with other devices than that of the published traces."""
    if where.gpu_types != (_GPU,):
        raise InputError(
            f"source published: its times are of {_GPU}, cluster {where.name!r} has "
            f"{', '.join(where.gpu_types)}; choose source emulated or measured"
        )


def _registered(register: Iterable[Dataset], path: Path, key: str) -> Dataset:
    """Return the registered trace of a workload; its folder is named by the key or an alias."""
    for entry in register:
        parts = Path(entry.path).parts
        if len(parts) > 2 and parts[-3] == "throughput" and parts[-1] == _FILE:
            with suppress(UnknownNameError):
                if resolve_workload_key(parts[-2]) == key:
                    return entry
    raise ChecksumError(f"{path}: no trace of {key!r} is registered; expected the published files")


def phase_unit(phases_total: float, iter_time_s: float) -> float:
    """Return the unit of the phases of a row [s]: 1 or 1e-3, whichever fits its time [s], NaN if neither."""
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
    where = str(path)
    raw: pd.DataFrame = parse_csv(
        read_bytes(path, "a trace", TraceError), where, "a trace", dtype=str, keep_default_na=False
    )
    raw.columns = pd.Index([str(name).strip() for name in raw.columns])
    missing = [name for name in _REQUIRED if name not in raw.columns]
    phases = [name for name in _PHASES if name in raw.columns]
    if phases and len(phases) < len(_PHASES):
        missing += [name for name in _PHASES if name not in phases]
    if missing:
        raise TraceError(
            f"{path}: column(s) {', '.join(missing)} missing; found: {', '.join(raw.columns)}; "
            f"expected {', '.join(_REQUIRED)}, optionally {_THREADS}, optionally all of "
            f"{', '.join(_PHASES)}"
        )
    if raw.empty:
        raise TraceError(f"{path}: no rows; expected at least one measured run")
    ignored = [name for name in raw.columns if name not in (*_REQUIRED, *_PHASES, _THREADS)]
    if ignored:
        _LOG.warning("%s: column(s) %s are not used", path, ", ".join(ignored))
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


def _numbers(raw: pd.DataFrame, default_cpu_threads: int, where: str) -> pd.DataFrame:
    """Convert the numeric columns; raises for cells that are not numbers in range."""
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


def flag_anomalies(frame: pd.DataFrame, spec: Workload) -> pd.DataFrame:
    """Fill the columns ``clean`` and ``flag`` of the measured rows of one workload.

    Three rules, none of which looks at a prediction: a run that failed; a data-parallel family
    whose forward phase is slow on multi-node placements with an odd number of GPUs on some node
    (all such rows of the family are flagged, because one host cause affects them alike); a row on
    one GPU whose forward and backward phases are too short for the whole batch.
    """
    ran = np.flatnonzero(frame["feasible"].to_numpy(dtype=bool))
    rows = frame.iloc[ran]
    placements = [Placement.parse(text) for text in rows["placement"]]
    plans = [
        read_plan(text, n_gpus=place.n_gpus, global_batch_size=spec.global_batch_size)
        for text, place in zip(rows["exec_plan"], placements, strict=True)
    ]
    families = np.empty(len(rows), dtype=object)
    families[:] = [plan.plan_family for plan in plans]
    n_gpus = np.array([place.n_gpus for place in placements], dtype=np.int64)
    single = np.array([place.n_nodes == 1 for place in placements], dtype=bool)
    odd = np.array([any(count % 2 for count in place.gpus_per_node) for place in placements], dtype=bool)
    odd = odd & ~single
    forward_s = rows["forward_s"].to_numpy(dtype=np.float64)
    compute_s = forward_s + rows["overlap_sync_s"].to_numpy(dtype=np.float64)
    slow, half = np.zeros(len(rows), dtype=bool), np.zeros(len(rows), dtype=bool)
    for family in _DATA_PARALLEL:
        members = families == family
        # Ratio of each odd row to the other rows of its family with as many GPUs.
        suspects, ratios = np.flatnonzero(members & odd), []
        for row in suspects:
            peers = forward_s[members & ~odd & (n_gpus == n_gpus[row]) & (forward_s > 0)]
            if peers.size:
                ratios.append(float(forward_s[row] / np.median(peers)))
        known = np.array([ratio for ratio in ratios if np.isfinite(ratio)])
        if known.size and float(np.median(known)) > _SLOW_FORWARD_RATIO:
            slow[suspects] = True
        timed = members & single & (compute_s > 0)
        on_1, on_2 = timed & (n_gpus == 1), timed & (n_gpus == 2)
        if on_1.any() and on_2.any():
            half[on_1] = compute_s[on_1] < _HALF_BATCH_RATIO * float(np.median(compute_s[on_2]))
    flag = np.full(len(frame), FLAG_FAILED, dtype=object)
    flag[ran] = ""
    flag[ran[slow]] = FLAG_SLOW_FORWARD
    flag[ran[half]] = FLAG_HALF_BATCH
    return frame.assign(clean=flag == "", flag=flag.astype(str))


# --- Reference configuration and iteration time of a request, looked up in throughput tables ---


def placement_order(counts: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """Return the sort key of placements, given devices per node, largest first: fewest nodes first."""
    return len(counts), counts


def reference_plan(plan: str, measured: Iterable[tuple[str, tuple[int, ...], float]]) -> str:
    """Return the reference of a requested plan: the plan itself if it was measured, else the fastest one.

    ``measured`` has the runs on as many devices: plan, devices per node (largest first), iteration time [s].
    """
    rows = list(measured)
    if any(name == plan for name, _, _ in rows):
        return plan
    return min(rows, key=lambda row: (row[2], *placement_order(row[1]), row[0]))[0]


@dataclass(frozen=True, slots=True)
class Reference:
    """Reference configuration of a request: plan in trace notation, placement, iteration time [s]."""

    plan: str
    placement: str
    iter_time_s: float


_Measured = tuple[Reference, tuple[int, ...]]
"""A configuration that ran, and its devices per node, largest first."""


@dataclass(frozen=True)
class ReferenceTimes:
    """Reference configuration of every request, from the throughput tables of a source.

    The requested plan counts on its measured placement with the fewest nodes. Where that plan was
    not measured with as many GPUs, the fastest plan measured with them counts instead, see
    Morphling, section 7.3. ``tables`` are throughput tables (schema `THROUGHPUT`) by workload key.
    """

    tables: Mapping[str, pd.DataFrame]
    _requested: dict[tuple[str, int, str], Reference] = field(default_factory=dict, init=False, compare=False)

    @cached_property
    def _measured(self) -> dict[str, dict[int, list[_Measured]]]:
        """Configurations that ran, by workload and number of GPUs."""
        measured: dict[str, dict[int, list[_Measured]]] = {}
        for key, table in self.tables.items():
            by_gpus = measured.setdefault(key, {})
            ran = table[table["feasible"].astype(bool)]
            for plan, text, time in zip(ran["exec_plan"], ran["placement"], ran["iter_time_s"], strict=True):
                placement = Placement.parse(str(text))
                row = Reference(str(plan), str(text), float(time))
                by_gpus.setdefault(placement.n_gpus, []).append((row, placement.gpus_per_node[::-1]))
        return measured

    def workload_keys(self) -> tuple[str, ...]:
        """Return the workloads that have a table, sorted."""
        return tuple(sorted(self.tables))

    def gpu_counts(self, workload_key: str) -> tuple[int, ...]:
        """Return the GPU counts with which a workload can run, ascending."""
        return tuple(sorted(self._of(workload_key)))

    def requested(self, workload_key: str, n_gpus: int, plan: str) -> Reference:
        """Return the reference configuration of a request.

        Raises `UnknownNameError` for workloads without table, `TraceError` if nothing was measured with that
        many GPUs.
        """
        # Thousands of jobs make the same few requests.
        request = (workload_key, n_gpus, plan)
        if request in self._requested:
            return self._requested[request]
        rows = self._with(workload_key, n_gpus)
        text = write_plan(read_plan(plan, n_gpus=n_gpus, global_batch_size=self._batch(workload_key)))
        chosen = reference_plan(text, ((row.plan, counts, row.iter_time_s) for row, counts in rows))
        same = [pair for pair in rows if pair[0].plan == chosen]
        best, _ = min(same, key=lambda pair: (*placement_order(pair[1]), pair[0].iter_time_s))
        self._requested[request] = best
        return best

    def best(self, workload_key: str, n_gpus: int) -> Reference:
        """Return the fastest configuration with that many GPUs, on any placement; raises as `requested`."""
        return min((row for row, _ in self._with(workload_key, n_gpus)), key=lambda row: row.iter_time_s)

    def steps(self, workload_key: str, n_gpus: int, plan: str, duration_s: float) -> int:
        """Return how many optimiser steps fill a duration, at least one."""
        return max(1, round(duration_s / self.requested(workload_key, n_gpus, plan).iter_time_s))

    def _batch(self, workload_key: str) -> int:
        """Return the global batch of the measured runs, which may differ from that of the zoo."""
        table = self.tables[workload_key]
        if "global_batch_size" in table:
            return int(table["global_batch_size"].iloc[0])
        return workload(workload_key).global_batch_size

    def _with(self, workload_key: str, n_gpus: int) -> list[_Measured]:
        rows = self._of(workload_key).get(n_gpus)
        if not rows:
            counts = ", ".join(str(count) for count in self.gpu_counts(workload_key))
            raise TraceError(
                f"workload {workload_key!r}: no throughput on {n_gpus} GPUs; expected {counts or 'none'}"
            )
        return rows

    def _of(self, workload_key: str) -> dict[int, list[_Measured]]:
        if workload_key not in self._measured:
            raise unknown_name("workload with throughput", workload_key, self.tables)
        return self._measured[workload_key]


# --- Protocol of all sources, and the emulated source ---
#
# Code that uses a source asks for the canonical table of a workload and does not depend on how it was made.
# Each result path begins with the name of its source.

SOURCE_NAMES = ("emulated", "published", "measured")
_EMULATED_BY = (
    "makespan.emulator", "makespan.plans", "makespan.workloads", "makespan.hardware", "makespan.numerics",
    __name__,
)  # fmt: skip


class ThroughputSource(Protocol):
    """Interface of all sources of throughput tables.

    ``load`` returns a table of schema `makespan.tables.THROUGHPUT`, clean and flagged rows
    alike, whose plans and placements are in canonical notation and unique; it raises
    `makespan.errors.MissingDataError` if the source has no data of that workload and
    `makespan.errors.TraceError` if the data are malformed.
    """

    @property
    def name(self) -> str:
        """First part of every result path: one of `SOURCE_NAMES`."""
        ...

    def workload_keys(self) -> tuple[str, ...]:
        """Keys of the workloads that can be loaded, in catalogue order."""
        ...

    def load(self, workload_key: str) -> pd.DataFrame:
        """Return the throughput table of one workload."""
        ...


@dataclass(frozen=True, slots=True)
class EmulatedSource:
    """Tables computed by the testbed emulator; needs no data and no device.

    Parameters
    ----------
    calibration
        Name of the calibrated constants.
    seed, noise
        Seed of the measurement noise and its scale; 0 gives the exact value of the model.
    cpu_threads
        Numbers of CPU threads per GPU with which every plan runs; empty for those of the published traces.
    """

    cluster: ClusterSpec
    calibration: str
    seed: int
    noise: float
    cpu_threads: tuple[int, ...] = ()
    name: ClassVar[str] = "emulated"

    def workload_keys(self) -> tuple[str, ...]:
        """Return every workload of the zoo."""
        return workload_keys()

    def load(self, workload_key: str) -> pd.DataFrame:
        """Emulate the trace points of one workload; tables of shipped constants come from the cache."""
        spec = workload(workload_key)
        if self.calibration not in calibration_names():
            return self._emulated(spec)
        return _shipped(self, spec).copy(deep=False)

    def _emulated(self, spec: Workload) -> pd.DataFrame:
        calibration = load_calibration(self.calibration)
        points: Iterable[Point] = trace_points(spec, self.cluster)
        if self.cpu_threads:
            varied = product(points, self.cpu_threads)
            points = dict.fromkeys(Point(at.plan.with_cpu_threads(n), at.placement) for at, n in varied)
        return self._rows(spec, list(points), calibration)

    def on_demand(self, workload_key: str, points: Iterable[Point]) -> pd.DataFrame:
        """Emulate further points of a workload; each row equals the row that `load` would return."""
        rows = self._rows(workload(workload_key), list(points), load_calibration(self.calibration))
        return rows.assign(provenance=ON_DEMAND)

    def explain(self, workload_key: str, point: Point) -> Explanation:
        """Emulate one point without noise, with its memory verdict."""
        return explain(workload(workload_key), point, self.cluster, load_calibration(self.calibration))

    def _rows(self, spec: Workload, points: list[Point], calibration: CalibrationSet) -> pd.DataFrame:
        frame = emulate(spec, points, self.cluster, calibration, seed=self.seed, noise=self.noise)
        failed = ~frame["feasible"].astype(bool)
        frame = frame.assign(clean=~failed, flag=failed.map({True: FLAG_FAILED, False: ""}))
        return THROUGHPUT.validate(frame, where=f"emulated trace of {spec.key}")


@lru_cache(maxsize=128)  # reading the file takes long, and many scenarios use the same tables
def _shipped(source: EmulatedSource, spec: Workload) -> pd.DataFrame:
    """Return the table of a source with shipped constants, from the cache."""
    return cached_table(THROUGHPUT, (spec, source), _EMULATED_BY, lambda: source._emulated(spec))
