"""From measured rows to a calibration set of any level."""

import hashlib

import numpy as np

from makespan.emulator._calibrate import calibrate
from makespan.emulator._calibration import CalibrationSet
from makespan.emulator._constants import theta_array, theta_mapping
from makespan.emulator._observations import Observations
from makespan.emulator._protocols import anchor_rows, anchor_scale, few_rows, refine
from makespan.errors import unknown_name
from makespan.workloads import workload

__all__ = ["calibration_set", "data_digest", "refined_set"]

_DIGEST_BYTES = 16
_REFINED_LEVELS = ("L1a", "L2", "L3")


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


def refined_set(
    name: str, observations: Observations, source: str, level: str, base: CalibrationSet
) -> CalibrationSet:
    """Refine a calibration by measured rows of the models it is to be used for.

    Parameters
    ----------
    name
        Key of the set.
    observations
        Measured rows; flagged ones are not used.
    source
        What the rows are, for the provenance.
    level
        ``L1a``: one row a workload sets a factor on its compute. ``L2``: up to three rows a plan
        class. ``L3``: all rows.
    base
        Constants to start from; of each model those that have not seen it.

    Raises
    ------
    UnknownNameError
        ``level`` is none of these.
    """
    if level not in _REFINED_LEVELS:
        raise unknown_name("refined calibration level", level, _REFINED_LEVELS)
    clean = observations.subset(observations.clean)
    everything = np.ones(len(clean), dtype=bool)
    anchors: dict[str, float] = {}
    refined: dict[str, dict[str, float]] = {}
    used = everything
    if level == "L1a":
        rows = anchor_rows(clean)
        used = np.isin(np.arange(len(clean)), list(rows.values()))
        for key, row in rows.items():
            anchors[key] = anchor_scale(base.for_workload(workload(key)).vector, clean, row)
    else:
        used = few_rows(clean, everything) if level == "L2" else everything
        for model in np.unique(clean.model):
            prior = theta_array(base.without.get(str(model), base.constants))
            rows_of_model = clean.subset(used & (clean.model == model))
            refined[str(model)] = theta_mapping(refine(rows_of_model, prior, many=level == "L3"))
    return CalibrationSet(
        name=name,
        level=level,
        source=source,
        data_digest=data_digest(clean.subset(used)),
        n_rows=int(used.sum()),
        constants=base.constants,
        without=base.without if level == "L1a" else {},
        refined=refined,
        anchors=anchors,
    )
