"""Where throughput tables come from: one protocol for all sources.

Everything downstream asks a source for the canonical table of a workload and never how it was
made. Each result path begins with the name of its source.
"""

from typing import Protocol

import pandas as pd

__all__ = ["SOURCE_NAMES", "ThroughputSource"]

SOURCE_NAMES = ("emulated", "published", "measured")


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
