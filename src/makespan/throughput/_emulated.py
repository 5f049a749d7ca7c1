"""Throughput tables computed by the testbed emulator."""

from dataclasses import dataclass

import pandas as pd

from makespan.emulator import emulate, load_calibration, trace_points
from makespan.hardware import ClusterSpec
from makespan.tables import THROUGHPUT
from makespan.throughput._clean import FLAG_FAILED
from makespan.workloads import workload, workload_keys

__all__ = ["EmulatedSource"]


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
