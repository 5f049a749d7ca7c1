"""The constants of the time model that may be calibrated, their priors and bounds.

They are identifiable only in combination (`e_gemm`, `kappa`, `t_layer`, `k_bwd`, `s_*`; `r_cpu`,
`c_full`, `c_grad`, `e_pcie`; `e_rs`, `e_ag`, `a_zero`) and are no physical measurements.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from makespan.errors import InputError, unknown_name

__all__ = ["CONSTANTS", "CONSTANT_NAMES", "Constant", "prior_theta", "theta_array", "theta_mapping"]


@dataclass(frozen=True, slots=True)
class Constant:
    """One constant: positive, fitted in log space.

    Parameters
    ----------
    name
        Symbol.
    prior
        Value before any measurement.
    sd_log
        Standard deviation of its logarithm before any measurement.
    is_share
        Whether it is a share of something, hence at most 1.
    unit
        Unit.
    meaning
        What it stands for.
    """

    name: str
    prior: float
    sd_log: float
    is_share: bool
    unit: str
    meaning: str

    @property
    def upper_log(self) -> float:
        """Upper bound of the logarithm."""
        return 0.0 if self.is_share else math.inf


CONSTANTS = (
    Constant("e_gemm", 0.60, 0.35, True, "1", "share of the peak reached by matrix products"),
    Constant("s_async", 1.0, 0.12, False, "1", "compute time of asynchronous data-parallel stacks"),
    Constant("s_3d", 1.0, 0.12, False, "1", "compute time of model-parallel stacks"),
    Constant("kappa", 2.5, 0.5, False, "1", "bytes moved by element-wise kernels per kept byte"),
    Constant("t_layer", 3e-4, 0.7, False, "s", "fixed time of a layer and micro-batch in forward"),
    Constant("k_bwd", 2.0, 0.12, False, "1", "backward time over forward time"),
    Constant("e_nv", 0.70, 0.1, True, "1", "share of the link inside a node"),
    Constant("e_net", 0.85, 0.25, True, "1", "share of the network cards under a ring"),
    Constant("e_p2p", 0.80, 0.6, True, "1", "share of the network card between stages"),
    Constant("t_stage", 5e-3, 0.7, False, "s", "handing over at a stage boundary, both ways"),
    Constant("e_rs", 0.80, 0.5, True, "1", "share of the link under a partitioned reduce-scatter"),
    Constant("e_ag", 0.80, 0.8, True, "1", "share of the link under a partitioned all-gather"),
    Constant("a_coll", 2e-5, 0.5, False, "s", "fixed time of one tensor-parallel all-reduce"),
    Constant("a_net", 9.6e-6, 0.7, False, "s", "one ring step between nodes"),
    Constant("a_zero", 9.6e-6, 0.7, False, "s", "the same under a partitioned optimiser"),
    Constant("t_node", 2e-3, 0.7, False, "s", "waiting for one more node in an optimiser step"),
    Constant("phi", 0.90, 0.4, True, "1", "share of the last backward pass that hides the exchange"),
    Constant("bpp_fused", 36.0, 0.4, False, "B", "bytes moved per parameter by a fused optimiser"),
    Constant("bpp_unfused", 60.0, 0.5, False, "B", "bytes moved per parameter by an unfused one"),
    Constant("t_const", 1e-2, 0.7, False, "s", "fixed time of an optimiser step"),
    Constant("r_cpu", 2e9, 0.6, False, "1/s", "parameters updated per second by a host process"),
    Constant("r_slow", 1e8, 0.5, False, "1/s", "the same per thread of a slow host optimiser"),
    Constant("c_full", 1e-10, 0.8, False, "s", "offload time per parameter, however many replicas"),
    Constant("c_grad", 5e-11, 0.8, False, "s", "the same in the backward pass"),
    Constant("e_pcie", 0.60, 0.6, True, "1", "share of the host link"),
)
"""All constants, in the order of their vector."""

CONSTANT_NAMES = tuple(constant.name for constant in CONSTANTS)


def prior_theta() -> NDArray[np.float64]:
    """Return the priors as a vector, (n_constants,)."""
    return np.array([constant.prior for constant in CONSTANTS])


def theta_array(values: Mapping[str, float]) -> NDArray[np.float64]:
    """Return a vector from named constants, (n_constants,).

    Raises
    ------
    UnknownNameError
        A name is not a constant.
    InputError
        A constant is missing, not positive, or a share above 1.
    """
    for name in values:
        if name not in CONSTANT_NAMES:
            raise unknown_name("constant", name, CONSTANT_NAMES)
    missing = [name for name in CONSTANT_NAMES if name not in values]
    if missing:
        raise InputError(f"constants missing: {', '.join(missing)}; required: {', '.join(CONSTANT_NAMES)}")
    for constant in CONSTANTS:
        value = float(values[constant.name])
        if not (0 < value < math.inf) or (constant.is_share and value > 1 + 1e-9):
            accepted = "in (0, 1]" if constant.is_share else "a positive number"
            raise InputError(f"constant {constant.name} is {value}; accepted: {accepted}")
    return np.array([float(values[name]) for name in CONSTANT_NAMES])


def theta_mapping(theta: NDArray[np.float64]) -> dict[str, float]:
    """Return named constants from a vector."""
    return {name: float(value) for name, value in zip(CONSTANT_NAMES, theta, strict=True)}
