"""Throughput tables that the authors of a paper measured and published."""

import logging
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from makespan.errors import MissingDataError, UnknownNameError
from makespan.throughput._artifact import read_artifact_trace
from makespan.throughput._clean import flag_anomalies
from makespan.throughput._register import Dataset, check_content
from makespan.workloads import resolve_workload_key, workload, workload_keys

__all__ = ["PublishedSource"]

_LOG = logging.getLogger(__name__)

_LAYOUTS = ("morphling/throughput", "throughput", "simulator/traces")
_FILE = "placements.csv"


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
