"""Where throughput tables come from: one protocol, three sources.

Everything downstream asks a source for the canonical table of a workload and never how it was
made. Each result path begins with the name of its source.
"""

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import pandas as pd

from makespan.errors import MissingDataError, UnknownNameError
from makespan.hardware import ClusterSpec
from makespan.tables import THROUGHPUT
from makespan.testbed import emulate, load_calibration, trace_points
from makespan.traces._artifact import read_artifact_trace
from makespan.traces._clean import FLAG_FAILED, flag_anomalies
from makespan.traces._datasets import Dataset, check_content
from makespan.traces._table import read_throughput
from makespan.workloads import resolve_workload_key, workload, workload_keys

__all__ = [
    "SOURCE_NAMES",
    "EmulatedSource",
    "MeasuredSource",
    "PublishedSource",
    "ThroughputSource",
]

_LOG = logging.getLogger(__name__)

SOURCE_NAMES = ("emulated", "published", "measured")

_LAYOUTS = ("morphling/throughput", "throughput", "simulator/traces")
_FILE = "placements.csv"


class ThroughputSource(Protocol):
    """What every source of throughput tables offers.

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
    cluster
        Hardware that is emulated.
    calibration
        Name of the calibrated constants.
    seed
        Seed of the measurement noise.
    noise
        Scale of the measurement noise; 0 gives the exact value of the model.
    """

    cluster: ClusterSpec
    calibration: str
    seed: int
    noise: float

    @property
    def name(self) -> str:
        """First part of every result path."""
        return "emulated"

    def workload_keys(self) -> tuple[str, ...]:
        """Return every workload of the zoo."""
        return workload_keys()

    def load(self, workload_key: str) -> pd.DataFrame:
        """Emulate the trace points of one workload."""
        spec = workload(workload_key)
        frame = emulate(
            spec,
            trace_points(spec, self.cluster),
            self.cluster,
            load_calibration(self.calibration),
            seed=self.seed,
            noise=self.noise,
        )
        failed = ~frame["feasible"].astype(bool)
        frame = frame.assign(clean=~failed, flag=failed.map({True: FLAG_FAILED, False: ""}))
        return THROUGHPUT.validate(frame, where=f"emulated trace of {spec.key}")


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
        If given, every file must have the registered checksum.
    """

    directory: Path
    default_cpu_threads: int
    register: tuple[Dataset, ...] = field(default=(), repr=False)

    @property
    def name(self) -> str:
        """First part of every result path."""
        return "published"

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
        for entry in self.register:
            if entry.path.endswith(f"throughput/{path.parent.name}/{_FILE}"):
                check_content(entry, path)
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


def _trace_files(base: Path) -> dict[str, Path]:
    files: dict[str, Path] = {}
    for path in sorted(base.glob(f"*/{_FILE}")):
        try:
            files[resolve_workload_key(path.parent.name)] = path
        except UnknownNameError:
            _LOG.warning("%s: not a trace of a known model, left out", path)
    return files


@dataclass(frozen=True, slots=True)
class MeasuredSource:
    """Tables measured on the user's own devices.

    Parameters
    ----------
    directory
        One file ``<workload>.csv`` a workload, in the canonical schema.
    """

    directory: Path

    @property
    def name(self) -> str:
        """First part of every result path."""
        return "measured"

    def workload_keys(self) -> tuple[str, ...]:
        """Return the workloads that have a file."""
        keys = tuple(key for key in workload_keys() if (self.directory / f"{key}.csv").is_file())
        if not keys:
            raise MissingDataError(
                f"{self.directory}: no measured traces; accepted: a directory with <workload>.csv in the "
                f"throughput schema ({', '.join(THROUGHPUT.names)}) for one or more of "
                f"{', '.join(workload_keys())}; measure them first or choose another source"
            )
        return keys

    def load(self, workload_key: str) -> pd.DataFrame:
        """Read and check the trace of one workload."""
        spec = workload(workload_key)
        if spec.key not in self.workload_keys():
            raise MissingDataError(
                f"{self.directory}: no measured trace {spec.key}.csv; it has: "
                f"{', '.join(self.workload_keys())}"
            )
        return read_throughput(self.directory / f"{spec.key}.csv")
