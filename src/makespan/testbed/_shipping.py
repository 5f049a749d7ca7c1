"""From measured rows to a calibration set: level L1, one fit for each model left out."""

import hashlib

import numpy as np

from makespan.testbed._calibrate import calibrate
from makespan.testbed._calibration import CalibrationSet
from makespan.testbed._constants import theta_mapping
from makespan.testbed._observations import Observations

__all__ = ["calibration_set", "data_digest"]

_DIGEST_BYTES = 16


def data_digest(observations: Observations) -> str:
    """Return a BLAKE2b digest of the measured rows, whatever their order."""
    lines = sorted(
        f"{workload}|{plan}|{placement}|{float(time)!r}"
        for workload, plan, placement, time in zip(
            observations.workload,
            observations.exec_plan,
            observations.placement,
            observations.iter_time_s,
            strict=True,
        )
    )
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=_DIGEST_BYTES).hexdigest()


def calibration_set(name: str, observations: Observations, source: str) -> CalibrationSet:
    """Fit the constants to all models, and once more for each model without it.

    Parameters
    ----------
    name
        Key of the set.
    observations
        Measured rows; flagged ones are left out of the fits.
    source
        What the rows are, for the provenance.

    Returns
    -------
    CalibrationSet
        Level L1: a workload is emulated with the fit that has not seen its model.
    """
    clean = observations.subset(observations.clean)
    overall = calibrate(clean)
    without = {
        str(model): theta_mapping(calibrate(clean.subset(clean.model != model)).theta)
        for model in np.unique(clean.model)
    }
    return CalibrationSet(
        name=name,
        level="L1",
        source=source,
        data_digest=data_digest(clean),
        n_rows=len(clean),
        constants=theta_mapping(overall.theta),
        without=without if len(without) > 1 else {},
        active_bounds=overall.active_bounds,
    )
