"""Calibrated constants with their provenance, as shipped or as fitted by the user."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources

import numpy as np
from numpy.typing import NDArray

from makespan.emulator._constants import prior_theta, theta_array, theta_mapping
from makespan.errors import InputError, MissingDataError, unknown_name
from makespan.workloads import Workload, model_keys

__all__ = ["Calibration", "CalibrationSet", "calibration_names", "calibration_text", "load_calibration"]

_LEVELS = ("L0", "L1", "L1a", "L2", "L3")
_SUFFIX = ".toml"
_HEADER = "# Calibrated constants of the testbed emulator. Written by `makespan calibrate`.\n"


@dataclass(frozen=True, slots=True)
class Calibration:
    """Constants for one workload.

    Parameters
    ----------
    identifier
        Name of the set and, after a slash, which fit of it.
    level
        ``L0`` public constants; ``L1`` fitted on other models; ``L1a`` with one anchor row;
        ``L2`` with a few rows; ``L3`` with all rows of the model.
    theta
        The constants by name.
    compute_scale
        Anchor of the workload, a factor on its compute time [1].
    excluded_models
        Models that the fit did not see.
    """

    identifier: str
    level: str
    theta: Mapping[str, float]
    compute_scale: float = 1.0
    excluded_models: tuple[str, ...] = ()

    @property
    def vector(self) -> NDArray[np.float64]:
        """The constants as a vector, (n_constants,)."""
        return theta_array(self.theta)


@dataclass(frozen=True, slots=True)
class CalibrationSet:
    """Constants for every workload, and where they come from.

    Parameters
    ----------
    name, level
        Key, and calibration level (see `Calibration`).
    source
        What was fitted to what.
    data_digest
        BLAKE2b digest of the measured rows behind the fit; empty at level L0.
    n_rows
        Number of those rows.
    constants
        The fit to all models.
    without
        By model, the fit that did not see it. A workload uses that of its own model.
    refined
        By model, the fit that was refined with its own rows (levels L2 and L3); goes first.
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
        """Check the level and all constants."""
        if self.level not in _LEVELS:
            raise unknown_name("calibration level", self.level, _LEVELS)
        for key in (*self.without, *self.refined):
            if key not in model_keys():
                raise unknown_name("model", key, model_keys())
        for values in (self.constants, *self.without.values(), *self.refined.values()):
            theta_array(values)

    def for_workload(self, workload: Workload) -> Calibration:
        """Return the constants that a workload is emulated with.

        At level L1 that is the fit which excluded the workload's model, so that no emulated
        trace has seen the measurements it will be compared with.
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


@cache
def load_calibration(name: str = "L1") -> CalibrationSet:
    """Return a shipped calibration, or read one from a file.

    Parameters
    ----------
    name
        ``L0`` (public constants), a shipped name, or the path of a ``.toml`` file.

    Raises
    ------
    UnknownNameError
        No calibration has that name.
    MissingDataError
        There is no such file.
    InputError
        The file is not a calibration.
    """
    if name == "L0":
        return CalibrationSet(
            name="L0",
            level="L0",
            source="public constants: the priors of the calibration, nothing fitted",
            data_digest="",
            n_rows=0,
            constants=theta_mapping(prior_theta()),
        )
    if name in calibration_names():
        resource = resources.files("makespan.emulator").joinpath(f"presets/{name}{_SUFFIX}")
        return _parse(name, resource.read_text("utf-8"), f"preset {name}")
    if not name.endswith(_SUFFIX):
        raise unknown_name("calibration", name, [*calibration_names(), f"a path ending in {_SUFFIX}"])
    try:
        with open(name, encoding="utf-8") as handle:  # noqa: PTH123 - the name may be any path text
            text = handle.read()
    except OSError as error:
        raise MissingDataError(f"{name}: calibration cannot be read: {error.strerror}") from None
    return _parse(name, text, name)


def _parse(name: str, text: str, where: str) -> CalibrationSet:
    try:
        entry = tomllib.loads(text)
        return CalibrationSet(
            name=name,
            level=entry["level"],
            source=entry["source"],
            data_digest=entry["data_digest"],
            n_rows=entry["n_rows"],
            constants=entry["constants"],
            without=entry.get("without", {}),
            refined=entry.get("refined", {}),
            anchors=entry.get("anchors", {}),
            active_bounds=tuple(entry.get("active_bounds", ())),
        )
    except (tomllib.TOMLDecodeError, KeyError, TypeError) as error:
        raise InputError(f"{where}: not a calibration: {error!r}; see `makespan calibrate`") from None


def calibration_text(calibration: CalibrationSet) -> str:
    """Return a calibration as TOML, byte-identical for equal calibrations."""
    source = calibration.source.replace("\\", "/").replace('"', "'").replace("\n", " ")
    lines = [
        _HEADER,
        f'level = "{calibration.level}"',
        f'source = "{source}"',
        f'data_digest = "{calibration.data_digest}"',
        f"n_rows = {calibration.n_rows}",
        f"active_bounds = [{', '.join(repr(name) for name in calibration.active_bounds)}]",
    ]
    lines += _section("constants", calibration.constants)
    for key in sorted(calibration.without):
        lines += _section(f'without."{key}"', calibration.without[key])
    for key in sorted(calibration.refined):
        lines += _section(f'refined."{key}"', calibration.refined[key])
    if calibration.anchors:
        lines += _section("anchors", calibration.anchors)
    return "\n".join(lines) + "\n"


def _section(title: str, values: Mapping[str, float]) -> list[str]:
    return ["", f"[{title}]", *(f"{name} = {float(f'{value:.6g}')!r}" for name, value in values.items())]
