"""Coarse workloads for clusters that mix device types: three constants and a device.

Models that are not transformers, or whose layers do not matter for the question asked, are
described by a fixed time, a FLOP count and a memory traffic. With three constants and three
devices this is a description of measured steps; a device that is not in the fit needs one
measured workload before its times are trusted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog

from makespan.errors import FitError, unknown_name
from makespan.hardware import Gpu
from makespan.presets import preset_entry, read_preset

__all__ = [
    "CoarseWorkload",
    "coarse_names",
    "coarse_step_time_s",
    "coarse_workload",
    "colocated_memory_bytes",
    "colocated_step_time_s",
    "fit_coarse",
]

_PACKAGE = "makespan.emulator"
_BASELINE = "baseline"
_PRECISION = "fp32"
_SWITCH_OVERHEAD = 0.02  # middle of the 1-3 % seen in EasyScale (SC'23), Fig. 11


@dataclass(frozen=True, slots=True)
class CoarseWorkload:
    """One training step as three non-negative constants.

    Parameters
    ----------
    name
        Key in the presets, or any name.
    batch_size
        Samples of the step.
    fixed_s
        Time that does not depend on the device [s].
    flop
        Effective floating-point operations [FLOP], relative to the fp32 peak.
    memory_traffic_bytes
        Effective memory traffic [B].
    worst_error
        Largest relative error over the steps in the fit [1].
    mode_factor
        By determinism mode and device name, the factor on the step time.
    source
        Where the constants come from.
    """

    name: str
    batch_size: int
    fixed_s: float
    flop: float
    memory_traffic_bytes: float
    worst_error: float
    mode_factor: Mapping[str, Mapping[str, float]] = field(default_factory=lambda: MappingProxyType({}))
    source: str = ""

    @property
    def modes(self) -> tuple[str, ...]:
        """Determinism modes with a known factor; ``baseline`` is always one of them."""
        return (_BASELINE, *self.mode_factor)


def coarse_names() -> tuple[str, ...]:
    """Return the names of all coarse workloads."""
    return tuple(read_preset(_PACKAGE, "coarse"))


@cache
def coarse_workload(name: str) -> CoarseWorkload:
    """Return a coarse workload of the presets.

    Raises
    ------
    UnknownNameError
        No coarse workload has that name.
    """
    entry = preset_entry(_PACKAGE, "coarse", "coarse workload", name)
    return CoarseWorkload(name=name, **entry)


def coarse_step_time_s(workload: CoarseWorkload, gpu: Gpu, mode: str = _BASELINE) -> float:
    """Return the time of one step on one device [s].

    Parameters
    ----------
    workload
        The three constants.
    gpu
        The device; its fp32 peak and memory bandwidth are used.
    mode
        ``baseline`` or a determinism mode of the workload.

    Raises
    ------
    UnknownNameError
        The mode is unknown, or was not measured on this device.
    """
    step_s = (
        workload.fixed_s
        + workload.flop / gpu.peak(_PRECISION)
        + workload.memory_traffic_bytes / gpu.memory_bandwidth_bytes_per_s
    )
    if mode == _BASELINE:
        return step_s
    if mode not in workload.mode_factor:
        raise unknown_name(f"determinism mode of {workload.name!r}", mode, workload.modes)
    factors = workload.mode_factor[mode]
    if gpu.name not in factors:
        raise unknown_name(f"device with a {mode!r} factor for {workload.name!r}", gpu.name, factors)
    return step_s * factors[gpu.name]


def fit_coarse(
    gpus: Sequence[Gpu], step_time_s: npt.ArrayLike, name: str = "", batch_size: int = 1
) -> CoarseWorkload:
    """Fit the three constants so that the largest relative error is smallest.

    Parameters
    ----------
    gpus
        Devices, n of them.
    step_time_s
        Measured steps, (n,), s.
    name, batch_size
        Passed on to the result.

    Returns
    -------
    CoarseWorkload
        All three constants non-negative; the optimum of a linear programme, so the same
        input gives the same constants.

    Raises
    ------
    FitError
        A time is not positive, or the lengths differ.
    """
    times = np.asarray(step_time_s, dtype=np.float64)
    if times.shape != (len(gpus),) or not len(gpus) or not np.all(times > 0):
        raise FitError(
            f"coarse fit of {name!r}: needs one positive time for each of {len(gpus)} device(s); "
            f"found {times.tolist()}"
        )
    inverse = np.array(
        [[1.0, 1 / gpu.peak(_PRECISION), 1 / gpu.memory_bandwidth_bytes_per_s] for gpu in gpus]
    )
    scale = 1 / inverse.max(axis=0)
    relative = inverse * scale / times[:, None]
    slack = np.full((len(gpus), 1), -1.0)
    solution = linprog(
        [0.0, 0.0, 0.0, 1.0],
        A_ub=np.block([[relative, slack], [-relative, slack]]),
        b_ub=np.concatenate([np.ones(len(gpus)), -np.ones(len(gpus))]),
    )
    if solution.x is None:
        raise FitError(f"coarse fit of {name!r} failed: {solution.message}")
    fixed_s, flop, traffic = solution.x[:3] * scale
    return CoarseWorkload(
        name=name,
        batch_size=batch_size,
        fixed_s=float(fixed_s),
        flop=float(flop),
        memory_traffic_bytes=float(traffic),
        worst_error=float(solution.x[3]),
    )


def colocated_step_time_s(step_time_s: float, n_workers: int) -> float:
    """Return the time in which time-sliced workers on one device make one step each [s].

    One worker pays no switch. Source: EasyScale (SC'23), Fig. 11.
    """
    return step_time_s * n_workers * (1.0 + (_SWITCH_OVERHEAD if n_workers > 1 else 0.0))


def colocated_memory_bytes(memory_bytes: float, n_workers: int, *, is_time_sliced: bool) -> float:
    """Return the memory of workers that share one device [B].

    Constant for workers that take turns inside one process, linear for packed processes.
    Source: EasyScale (SC'23), Fig. 10.
    """
    return memory_bytes if is_time_sliced else memory_bytes * n_workers
