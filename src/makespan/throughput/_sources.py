"""Where throughput tables come from: one protocol for all sources, and the emulated one.

Everything downstream asks a source for the canonical table of a workload and never how it was
made. Each result path begins with the name of its source.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import ClassVar, Protocol

import pandas as pd

from makespan.emulator import (
    CalibrationSet,
    Explanation,
    Point,
    emulate,
    explain,
    load_calibration,
    trace_points,
)
from makespan.hardware import ClusterSpec
from makespan.tables import ON_DEMAND, THROUGHPUT
from makespan.throughput._tables import FLAG_FAILED
from makespan.workloads import Workload, workload, workload_keys

__all__ = ["SOURCE_NAMES", "EmulatedSource", "ThroughputSource"]

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
        Numbers of CPU threads a GPU with which every plan runs; empty for those of the published traces.
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
        """Emulate the trace points of one workload."""
        spec, calibration = workload(workload_key), load_calibration(self.calibration)
        points: Iterable[Point] = trace_points(spec, self.cluster)
        if self.cpu_threads:
            varied = product(points, self.cpu_threads)
            points = dict.fromkeys(Point(at.plan.with_cpu_threads(n), at.placement) for at, n in varied)
        return self._rows(spec, list(points), calibration)

    def on_demand(self, workload_key: str, points: Iterable[Point]) -> pd.DataFrame:
        """Emulate further points of a workload; a row is the one that `load` would have had."""
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
