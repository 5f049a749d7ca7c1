"""Throughput tables measured on the user's own devices."""

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from makespan.errors import MissingDataError
from makespan.tables import THROUGHPUT
from makespan.throughput._table import read_throughput
from makespan.workloads import workload, workload_keys

__all__ = ["MeasuredSource"]


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
