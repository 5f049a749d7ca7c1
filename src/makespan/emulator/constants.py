"""Constants of the time model, their priors and bounds, and calibrated sets of them.

A single fitted constant is no physical measurement, because measured rows determine only combinations of some
constants: of `e_gemm`, `kappa`, `t_layer`, `k_bwd`, `s_*`; of `r_cpu`, `c_full`, `c_grad`, `e_pcie`; and of
`e_rs`, `e_ag`, `a_zero`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import NDArray

from makespan.arguments import typed
from makespan.errors import InputError, unknown_name
from makespan.files import read_preset, read_toml
from makespan.workloads import Workload, model_keys

_LEVELS = ("L0", "L1", "L1a", "L2", "L3")
_SUFFIX = ".toml"


@dataclass(frozen=True, slots=True)
class Constant:
    """One positive constant, fitted in log space."""

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
    """Return a vector from named constants, (n_constants,)."""
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
            raise InputError(f"constant {constant.name} is {value}; expected {accepted}")
    return np.array([float(values[name]) for name in CONSTANT_NAMES])


def theta_mapping(theta: NDArray[np.float64]) -> dict[str, float]:
    """Return named constants from a vector."""
    return {name: float(value) for name, value in zip(CONSTANT_NAMES, theta, strict=True)}


@dataclass(frozen=True, slots=True)
class Calibration:
    """Constants for one workload, from one fit of a set; ``compute_scale`` is its anchor [1]."""

    identifier: str
    level: str
    theta: Mapping[str, float]
    compute_scale: float = 1.0
    excluded_models: tuple[str, ...] = ()

    @property
    def vector(self) -> NDArray[np.float64]:
        """The constants as a vector, (n_constants,)."""
        return theta_array(self.theta)

    def for_workload(self, workload: Workload) -> "Calibration":
        """Return the calibration itself; a `CalibrationSet` chooses by workload."""
        return self


@dataclass(frozen=True, slots=True)
class CalibrationSet:
    """Constants for every workload, and their origin.

    Parameters
    ----------
    name, source
        Key, and a description of the fit and its data.
    level
        ``L0`` public constants; ``L1`` fitted on other models; ``L1a`` with one anchor row;
        ``L2`` with a few rows; ``L3`` with all rows of the model.
    data_digest, n_rows
        BLAKE2b digest and number of the measured rows behind the fit; empty and 0 at level L0.
    constants
        The fit to all models.
    without
        By model, the fit that did not see it. A workload uses the fit without its own model.
    refined
        By model, the fit that was refined with its own rows (levels L2 and L3); it takes precedence.
    anchors
        By workload, the factor on its compute time; 1 where absent.
    active_bounds
        Constants that ended at their bound of 1.
    """

    name: str
    level: str
    source: str
    data_digest: str
    n_rows: int
    constants: Mapping[str, float]
    without: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    refined: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    anchors: Mapping[str, float] = field(default_factory=dict)
    active_bounds: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.level not in _LEVELS:
            raise unknown_name("calibration level", self.level, _LEVELS)
        for key in (*self.without, *self.refined):
            if key not in model_keys():
                raise unknown_name("model", key, model_keys())
        for values in (self.constants, *self.without.values(), *self.refined.values()):
            theta_array(values)
        for key, scale in self.anchors.items():
            if not 0 < float(scale) < math.inf:
                raise InputError(f"anchor of {key} is {scale}; expected a positive number")

    def for_workload(self, workload: Workload) -> Calibration:
        """Return the constants for a workload.

        At level L1 they come from the fit without its model, so that no emulated trace has seen the
        measurements that it will be compared with.
        """
        key = workload.model.key
        if key in self.refined:
            return Calibration(f"{self.name}/refined-{key}", self.level, self.refined[key])
        held_out = key in self.without
        return Calibration(
            identifier=f"{self.name}/without-{key}" if held_out else f"{self.name}/all",
            level=self.level,
            theta=self.without[key] if held_out else self.constants,
            compute_scale=float(self.anchors.get(workload.key, 1.0)),
            excluded_models=(key,) if held_out else (),
        )


def calibration_names() -> tuple[str, ...]:
    """Return the names of the shipped calibrations."""
    folder = resources.files("makespan.emulator").joinpath("presets")
    names = [item.name.removesuffix(_SUFFIX) for item in folder.iterdir() if item.name.startswith("L")]
    return tuple(sorted(["L0", *names]))


@typed
@cache
def load_calibration(name: str = "L1") -> CalibrationSet:
    """Return a shipped calibration (``L0`` are the public constants), or read a ``.toml`` file.

    Raises
    ------
    UnknownNameError, MissingDataError, InputError
        No calibration has that name; there is no such file; the file is not a calibration.
    """
    if name == "L0":
        source = "public constants: the priors of the calibration, nothing fitted"
        return CalibrationSet("L0", "L0", source, "", 0, theta_mapping(prior_theta()))
    if name in calibration_names():
        return _calibration(name, read_preset("makespan.emulator", name), f"preset {name}")
    if not name.endswith(_SUFFIX):
        raise unknown_name("calibration", name, [*calibration_names(), f"a path ending in {_SUFFIX}"])
    return _calibration(name, read_toml(name, "a calibration"), name)


def _calibration(name: str, entry: Mapping[str, Any], where: str) -> CalibrationSet:
    try:
        bounds = tuple(entry.get("active_bounds", ()))
        return CalibrationSet(**{**entry, "name": name, "active_bounds": bounds})
    except (TypeError, ValueError, AttributeError, InputError) as error:
        raise InputError(
            f"{where}: not a calibration: {error}; expected a file written by `makespan calibrate`"
        ) from None


def calibration_text(calibration: CalibrationSet) -> str:
    """Return a calibration as TOML, byte-identical for equal calibrations."""
    source = calibration.source.replace("\\", "/").replace('"', "'").replace("\n", " ")
    lines = [
        "# Calibrated constants of the testbed emulator. Written by `makespan calibrate`.\n",
        f'level = "{calibration.level}"',
        f'source = "{source}"',
        f'data_digest = "{calibration.data_digest}"',
        f"n_rows = {calibration.n_rows}",
        f"active_bounds = [{', '.join(repr(name) for name in calibration.active_bounds)}]",
    ]
    tables = {"constants": calibration.constants}
    tables |= {f'without."{key}"': values for key, values in sorted(calibration.without.items())}
    tables |= {f'refined."{key}"': values for key, values in sorted(calibration.refined.items())}
    tables |= {"anchors": calibration.anchors} if calibration.anchors else {}
    for title, values in tables.items():
        numbers = (f"{name} = {float(f'{value:.6g}')!r}" for name, value in values.items())
        lines += ["", f"[{title}]", *numbers]
    return "\n".join(lines) + "\n"
