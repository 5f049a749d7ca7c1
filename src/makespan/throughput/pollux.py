"""Profiles of the simulators of Pollux (OSDI 2021) and Sia (SOSP 2023) as a source of iteration times.

A directory of profiles has one folder per application. ``placements.csv`` (Sia: ``placements-<type>.csv``,
per type of GPU) has the time of an optimiser step and the part of it that synchronises gradients [s], by
placement and samples per GPU; ``scalability.csv`` has the same by numbers of nodes and GPUs; and
``validation-<batch>.csv`` has the progress of training by epoch, with two statistics of its gradients.

A workload is an application with a global batch, ``cifar10-2048``. Its plans are data parallel and differ in
the steps of gradient accumulation, ``ga+a4``; all but the last step of an iteration skip the synchronisation.
Times between two profiled batch sizes are interpolated, as in those simulators. A placement that was not
profiled cannot be used.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np
import pandas as pd

from makespan.errors import MissingDataError, TraceError, cell_error
from makespan.files import read_bytes
from makespan.plans import Placement
from makespan.tables import THROUGHPUT, parse_csv
from makespan.units import whole

# Facts of the released simulators that their files do not state (applications.py of Pollux): epochs after
# which a job is finished, where the files have more, and the most samples per GPU.
_EPOCHS = {"bert": 2, "cifar10": 100, "ncf": 10, "imagenet": 90, "deepspeech2": 80, "yolov3": 50}
_MOST_SAMPLES = {"yolov3": 8}
# Names that Sia gives to types of GPU, by those of the catalogue.
_TYPES = {"t4-16": "aws", "v100-32": "azure"}
_CEILING = 1e-8  # of the released simulators, so that a quotient just above a whole number is not rounded up
_BY_PLACEMENT = ("placement", "local_bsz", "step_time", "sync_time")
_MOST_GPUS = 100_000
_BY_SIZE = ("num_nodes", "num_replicas", "local_bsz", "step_time", "sync_time")
_PROGRESS = ("progress", "grad_sqr", "grad_var")
_CPU_THREADS = 1  # profiles state none
Counts = tuple[int, ...]  # GPUs per node, largest first


@dataclass(frozen=True, slots=True)
class Split:
    """A global batch on some GPUs: samples per GPU and pass, and passes per optimiser step."""

    n_gpus: int
    micro_batch_size: int
    grad_accum_steps: int

    @property
    def global_batch_size(self) -> int:
        """Samples per optimiser step."""
        return self.n_gpus * self.micro_batch_size * self.grad_accum_steps

    @property
    def plan(self) -> str:
        """The plan in the notation of throughput tables."""
        return "ga" if self.grad_accum_steps == 1 else f"ga+a{self.grad_accum_steps}"


@dataclass(frozen=True)
class Profile:
    """Profile of one application on one type of GPU.

    Parameters
    ----------
    name
        The application.
    step_s
        By GPUs per node: samples per GPU, ascending, and for each the times of a step and of its
        synchronisation [s].
    progress
        By global batch, ascending: progress at the end of each epoch, square and variance of the gradient.
    """

    name: str
    step_s: dict[Counts, tuple[list[float], list[float], list[float]]] = field(repr=False)
    progress: dict[int, pd.DataFrame] = field(repr=False)

    @cached_property
    def samples(self) -> tuple[int, int]:
        """Fewest and most samples per GPU and pass."""
        sizes = [size for known, _, _ in self.step_s.values() for size in known]
        return int(min(sizes)), min(_MOST_SAMPLES.get(self.name, 2**53), int(max(sizes)))

    def split(self, global_batch_size: int, n_gpus: int) -> Split:
        """Split a batch as the released simulators do: few passes, and parts that are rounded up.

        On one GPU a batch beyond the smallest one takes at least two passes, by which they estimate the
        variance of gradients.
        """
        smallest, largest = min(self.progress), max(self.progress)
        per_gpu = math.ceil(global_batch_size / n_gpus - _CEILING)
        passes = math.ceil(per_gpu / self.samples[1] - _CEILING)
        if n_gpus == 1 and global_batch_size > smallest:
            passes = max(passes, 2)
        micro = math.ceil(per_gpu / passes - _CEILING)
        return Split(n_gpus, min(micro, largest // (n_gpus * passes)), passes)

    def steps(self, global_batch_size: int) -> int:
        """Return the optimiser steps of a whole job with a fixed batch.

        An epoch ends at the least progress that any batch makes in it, in steps of the smallest batch. A step
        of a larger batch makes as much progress as its gradient is less noisy.
        """
        sizes = np.array(list(self.progress), dtype=float)
        tables = list(self.progress.values())
        n_epochs = min(_EPOCHS.get(self.name, 2**31), *(len(table) for table in tables))
        ends = np.min([table["progress"].to_numpy()[:n_epochs] for table in tables], axis=0)
        square, variance = (
            np.array(
                [
                    np.interp(global_batch_size, sizes, [float(table[name].iloc[epoch]) for table in tables])
                    for epoch in range(n_epochs)
                ]
            )
            for name in ("grad_sqr", "grad_var")
        )
        gain = (variance + square) / (variance * sizes[0] / global_batch_size + square)
        return max(1, round(float(np.sum(np.diff(ends, prepend=0.0) / gain))))

    def rows(self, global_batch_size: int) -> Iterator[tuple[str, str, float, bool]]:
        """Yield plan, placement, time of a step [s], and whether that was measured and not interpolated."""
        fewest, most = self.samples
        for counts, (sizes, step_s, sync_s) in self.step_s.items():
            n_gpus = sum(counts)
            per_gpu = global_batch_size // n_gpus
            if global_batch_size % n_gpus:
                continue
            for passes in range(1, per_gpu // fewest + 1):
                micro = per_gpu // passes
                if per_gpu % passes or micro > most or not sizes[0] <= micro <= sizes[-1]:
                    continue
                step, sync = (float(np.interp(micro, sizes, times)) for times in (step_s, sync_s))
                plan = Split(n_gpus, micro, passes).plan
                text = Placement(counts[::-1]).text
                yield plan, text, step + (passes - 1) * (step - sync), micro in sizes


@dataclass(frozen=True)
class ProfiledSource:
    """Tables of iteration times from the profiles of Pollux or Sia.

    Parameters
    ----------
    directory
        Directory with a folder per application.
    gpu_type
        Device whose profiles count where there is one file per type; ``placements-<device>.csv`` is found by
        its name, too.
    """

    directory: Path
    gpu_type: str
    name: ClassVar[str] = "measured"
    _read: dict[str, Profile] = field(default_factory=dict, init=False, repr=False, compare=False)

    @staticmethod
    def is_there(directory: Path) -> bool:
        """Return True if a directory has profiles."""
        return any(_BY_SIZE[2] in _header(path) for path in sorted(directory.glob("*/placements*.csv"))[:1])

    @cached_property
    def applications(self) -> dict[str, str]:
        """Applications with a profile for this type of GPU, and the end of its file names.

        Raises
        ------
        MissingDataError
            There is no profile for the type of GPU.
        """
        found: dict[str, str] = {}
        for ending in ("", f"-{self.gpu_type}", f"-{_TYPES.get(self.gpu_type, self.gpu_type)}"):
            for path in sorted(self.directory.glob(f"*/placements{ending}.csv")):
                found.setdefault(path.parent.name, ending)
        if not found:
            files = sorted({path.name for path in self.directory.glob("*/placements*.csv")})
            raise MissingDataError(
                f"{self.directory}: no profiles for {self.gpu_type}; expected <application>/placements.csv "
                f"or <application>/placements-{self.gpu_type}.csv, found {', '.join(files) or 'none'}"
            )
        return dict(sorted(found.items()))

    def profile(self, application: str) -> Profile:
        """Return the profile of an application, read once.

        Raises
        ------
        MakespanError
            There is none, or its files are broken.
        """
        if application not in self._read:
            if application not in self.applications:
                raise MissingDataError(
                    f"{self.directory}: no profile of {application!r} on {self.gpu_type}; it has: "
                    f"{', '.join(self.applications)}"
                )
            ending = self.applications[application]
            self._read[application] = _profile(self.directory / application, ending)
        return self._read[application]

    def workload_keys(self) -> tuple[str, ...]:
        """Return the applications with the batches whose progress was profiled."""
        return tuple(f"{name}-{size}" for name in self.applications for size in self.profile(name).progress)

    def batch_of(self, name: str) -> int | None:
        """Return the global batch of a workload, None if it has no profile."""
        match = re.fullmatch(r"(?P<application>.+)-(?P<batch>[1-9]\d{0,8})", name)
        return int(match["batch"]) if match and match["application"] in self.applications else None

    def load(self, workload_key: str) -> pd.DataFrame:
        """Return the table of an application with a global batch."""
        batch = self.batch_of(workload_key)
        if batch is None:
            raise MissingDataError(
                f"{self.directory}: no profile of {workload_key!r} on {self.gpu_type}; it has: "
                f"{', '.join(self.applications)}, each followed by a dash and its global batch"
            )
        rows = list(self.profile(workload_key.rpartition("-")[0]).rows(batch))
        if not rows:
            raise MissingDataError(
                f"{self.directory}: no profiled placement splits the batch of {workload_key!r}"
            )
        plans, placements, times_s, measured = zip(*rows, strict=True)
        table = pd.DataFrame(
            {
                "workload": workload_key,
                "exec_plan": plans,
                "placement": placements,
                "cpu_threads": _CPU_THREADS,
                "global_batch_size": batch,
                "iter_time_s": times_s,
                "forward_s": math.nan,
                "overlap_sync_s": math.nan,
                "optimize_s": math.nan,
                "feasible": True,
                "clean": True,
                "flag": "",
                "provenance": ["measured" if it else "interpolated" for it in measured],
            }
        )
        return THROUGHPUT.validate(table, where=f"profile of {workload_key}")


def _profile(folder: Path, ending: str) -> Profile:
    rows: dict[Counts, list[tuple[float, float, float]]] = {}
    path = folder / f"placements{ending}.csv"
    table = _cells(path, _BY_PLACEMENT)
    seen: dict[Counts, tuple[bool, str]] = {}
    for row, (text, *values) in enumerate(zip(*(table[name] for name in _BY_PLACEMENT), strict=True), 1):
        if not (text.isascii() and text.isdigit() and "0" not in text):
            raise cell_error(str(path), row, "placement", text, "a digit, 1 to 9, for each node, such as 44")
        counts = tuple(sorted(map(int, text), reverse=True))
        # A placement is profiled in several orders of its nodes, and all turns of an order are one. Policies
        # here know no order; that of falling counts stands for all, as a job that fills nodes gets them so.
        falling = "".join(map(str, counts))
        is_falling = text in (falling[it:] + falling[:it] for it in range(len(falling)))
        known = seen.get(counts)
        if known is None or (is_falling and not known[0]):
            seen[counts], rows[counts] = (is_falling, text), []
        if seen[counts][1] == text:
            rows[counts].append(_times(values, row, path))
    path = folder / f"scalability{ending}.csv"
    if path.is_file():
        table = _cells(path, _BY_SIZE)
        spread: dict[Counts, list[tuple[float, float, float]]] = {}
        for row, (nodes, gpus, *values) in enumerate(
            zip(*(table[name] for name in _BY_SIZE), strict=True), 1
        ):
            n_nodes, n_gpus = whole(nodes), whole(gpus)
            if not n_nodes or n_gpus is None or not n_nodes <= n_gpus <= _MOST_GPUS:
                accepted = f"at least one GPU per node, and at most {_MOST_GPUS}"
                raise cell_error(str(path), row, "num_replicas", gpus, accepted)
            each, more = divmod(n_gpus, n_nodes)
            counts = (each + 1,) * more + (each,) * (n_nodes - more)
            spread.setdefault(counts, []).append(_times(values, row, path))
        rows = spread | rows  # a profiled placement counts before one whose shares are not stated
    step_s = {}
    for counts, known_rows in rows.items():
        sizes, steps, syncs = map(list, zip(*sorted(known_rows), strict=True))
        step_s[counts] = sizes, steps, syncs
    progress = {}
    for path in folder.glob("validation-*.csv"):
        size = whole(path.stem.removeprefix("validation-"))
        if not size:
            raise TraceError(f"{path}: expected a name such as validation-128.csv, with the global batch")
        progress[size] = _numbers(_cells(path, _PROGRESS), _PROGRESS, path)
    if not progress:
        raise MissingDataError(f"{folder}: no validation-<batch>.csv, which states the work of a job")
    return Profile(folder.name, step_s, dict(sorted(progress.items())))


def _header(path: Path) -> str:
    with path.open("rb") as stream:
        return stream.readline(1 << 12).decode(errors="replace")


def _cells(path: Path, columns: tuple[str, ...]) -> pd.DataFrame:
    table: pd.DataFrame = parse_csv(
        read_bytes(path, "a profile", TraceError), str(path), "a profile", dtype=str, keep_default_na=False
    )
    missing = [name for name in columns if name not in table]
    if missing or table.empty:
        found = ", ".join(map(str, table.columns))
        problem = f"column(s) {', '.join(missing)} missing; found: {found}" if missing else "no rows"
        raise TraceError(f"{path}: {problem}; expected {', '.join(columns)}")
    return table


def _numbers(table: pd.DataFrame, columns: tuple[str, ...], path: Path) -> pd.DataFrame:
    result = pd.DataFrame({name: pd.to_numeric(table[name], errors="coerce") for name in columns})
    for name in columns:
        for row in np.flatnonzero(~np.isfinite(result[name].to_numpy(dtype=float)))[:1]:
            raise cell_error(str(path), int(row) + 1, name, table[name].iloc[int(row)], "a finite number")
    return result


def _times(values: list[str], row: int, path: Path) -> tuple[float, float, float]:
    try:
        size, step_s, sync_s = map(float, values)
    except ValueError:
        raise cell_error(str(path), row, "step_time", ", ".join(values), "numbers") from None
    if not (size >= 1 and 0 <= sync_s < step_s < math.inf):
        accepted = "a step that is longer than its synchronisation, as under data parallelism"
        raise cell_error(str(path), row, "step_time", f"{step_s} beside sync_time {sync_s}", accepted)
    return size, step_s, sync_s
