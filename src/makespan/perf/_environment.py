"""Constants of a cluster that all fitted models share, read from the packaged preset."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from types import MappingProxyType

from makespan.errors import InputError
from makespan.hardware import NodeSpec, cluster
from makespan.presets import preset_entry, read_preset

__all__ = ["Constants", "Environment", "Prior", "environment_names", "load_environment", "preset_sources"]


@dataclass(frozen=True, slots=True)
class Prior:
    """Weak log-normal prior and bounds of one fitted parameter.

    Parameters
    ----------
    unit
        Unit of the parameter, ``"1"`` for a pure number.
    median
        Median of the prior, or its multiple of the profiled value for a forward time.
    log_sd
        Standard deviation of the logarithm.
    low, high
        Bounds of the fit.
    meaning
        What the parameter stands for.
    """

    unit: str
    median: float
    log_sd: float
    low: float
    high: float
    meaning: str

    def __post_init__(self) -> None:
        """Check that the median is inside the bounds."""
        if not 0 < self.low <= self.median <= self.high or self.log_sd <= 0:
            raise InputError(f"prior {self.meaning!r}: needs 0 < low <= median <= high and log_sd > 0")


@dataclass(frozen=True, slots=True)
class Constants:
    """Physical constants shared by all models of a cluster, and the weights of the loss.

    Each has value, unit and source in ``presets/environments.toml``; the background page of the
    performance model says how they were chosen.
    """

    flat_bandwidth_bytes_per_s: float
    intra_bandwidth_bytes_per_s: float
    nic_bandwidth_bytes_per_s: float
    pcie_bandwidth_bytes_per_s: float
    tp_bandwidth_bytes_per_s: float
    tp_inter_bandwidth_bytes_per_s: float
    p2p_bandwidth_bytes_per_s: float
    gather_efficiency: float
    straggler_s: float
    straggler_s_per_byte: float
    zero_straggler_s: float
    zero_straggler_s_per_byte: float
    forward_launch_s: float
    backward_launch_s: float
    async_launch_s: float
    recompute_share: float
    host_update_s: float
    host_contention_s: float
    reference_cpu_threads: float
    assumed_backward_ratio: float
    time_log_sd: float
    phase_weight: float


@dataclass(frozen=True, slots=True)
class Environment:
    """Everything that the models fitted on one cluster have in common.

    Parameters
    ----------
    name
        Key in the presets.
    node
        Kind of node: decides memory feasibility and which GPUs share a network card.
    constants
        Shared constants.
    priors
        Prior of every fitted parameter, by form and name.
    """

    name: str
    node: NodeSpec
    constants: Constants
    priors: Mapping[str, Mapping[str, Prior]]


_PACKAGE = "makespan.perf"


def environment_names() -> tuple[str, ...]:
    """Return the names of all environments in the presets."""
    return tuple(read_preset(_PACKAGE, "environments"))


def preset_sources() -> dict[str, str]:
    """Return the source of every constant, keyed ``environment/constant``; empty where missing."""
    return {
        f"{name}/{key}": str(item.get("source", ""))
        for name, entry in read_preset(_PACKAGE, "environments").items()
        for key, item in entry["constants"].items()
    }


@cache
def load_environment(name: str) -> Environment:
    """Load the shared constants of a cluster.

    Parameters
    ----------
    name
        Name of the environment, which is that of its cluster.

    Returns
    -------
    Environment
        Constants in SI units, priors, and the kind of node.

    Raises
    ------
    UnknownNameError
        No environment has that name.
    """
    entry = preset_entry(_PACKAGE, "environments", "environment", name)
    values = {key: float(item["value"]) for key, item in entry["constants"].items()}
    names = {field.name for field in fields(Constants)}
    if values.keys() != names:
        raise InputError(
            f"environment {name!r}: constants {sorted(values.keys() ^ names)} are missing or not known"
        )
    priors = {
        form: MappingProxyType({key: Prior(**item) for key, item in table.items()})
        for form, table in entry["priors"].items()
    }
    return Environment(
        name=name,
        node=cluster(entry["cluster"]).nodes[0],
        constants=Constants(**values),
        priors=MappingProxyType(priors),
    )
