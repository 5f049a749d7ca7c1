"""Constants of a cluster that all fitted models share, from the packaged preset or a file."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from makespan.errors import InputError
from makespan.files import read_toml
from makespan.hardware import ClusterSpec, NodeSpec, cluster, cluster_from
from makespan.presets import preset_entry, read_preset

__all__ = ["Constants", "Environment", "Prior", "environment_names", "load_cluster", "load_environment"]
_PACKAGE = "makespan.perf"
_OPEN_FORM = "extended"  # whose priors may have been centred with measured rows in view


@dataclass(frozen=True, slots=True)
class Prior:
    """Weak log-normal prior and bounds of one fitted parameter."""

    unit: str
    median: float
    log_sd: float
    low: float
    high: float
    meaning: str

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.median <= self.high or self.log_sd <= 0:
            raise InputError(f"prior {self.meaning!r}: needs 0 < low <= median <= high and log_sd > 0")


@dataclass(frozen=True, slots=True)
class Constants:
    """Physical constants shared by all models of a cluster, and the weights of the loss.

    Values, units and sources are in ``presets/environments.toml``, reasons on the model's background page.
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


_CONSTANT_NAMES = frozenset(field.name for field in fields(Constants))


@dataclass(frozen=True, slots=True)
class Environment:
    """Everything that the models fitted on one cluster have in common.

    Parameters
    ----------
    name, cluster
        Key in the presets, or path of the file; and the cluster, whose nodes are equal.
    constants, priors
        Shared constants, and the prior of every fitted parameter, by form and name.
    neutral
        What is known without measured rows of constants, and of centres of the priors of the form
        ``extended``, that were chosen with the rows of all models in view; by name. Empty where
        nothing was chosen in that way.
    without
        By model, values of the same names that were fitted to the rows of the other models alone.
    """

    name: str
    cluster: ClusterSpec
    constants: Constants
    priors: Mapping[str, Mapping[str, Prior]]
    neutral: Mapping[str, Prior]
    without: Mapping[str, Mapping[str, float]]

    @property
    def node(self) -> NodeSpec:
        """Kind of node: decides memory feasibility and which GPUs share a network card."""
        return self.cluster.node

    def with_shared(self, values: Mapping[str, float]) -> "Environment":
        """Return the environment with other constants and centres of priors, by name."""
        constants = {name: value for name, value in values.items() if name in _CONSTANT_NAMES}
        centred = {
            name: replace(prior, median=values[name]) if name in values else prior
            for name, prior in self.priors[_OPEN_FORM].items()
        }
        return replace(
            self,
            constants=replace(self.constants, **constants),
            priors=MappingProxyType({**self.priors, _OPEN_FORM: MappingProxyType(centred)}),
        )

    def unseen_by(self, model: str) -> "Environment":
        """Return the environment as it is without the rows of a model; itself if none of it saw them."""
        return self.with_shared(self.without[model]) if model in self.without else self


def environment_names() -> tuple[str, ...]:
    """Return the names of all environments in the presets."""
    return tuple(read_preset(_PACKAGE, "environments"))


def load_environment(name: str) -> Environment:
    """Load the shared constants and priors of a cluster.

    Parameters
    ----------
    name
        Name of the environment, which is that of its cluster; or path of a ``.toml`` file with one, whose
        cluster is a table (see `makespan.hardware.cluster_from`) in place of a name.

    Raises
    ------
    UnknownNameError, MissingDataError, InputError
        No environment has that name; there is no such file; it cannot be read, or constants are
        missing or not known.
    """
    return _from_file(name) if name.endswith(".toml") else _from_presets(name)


def load_cluster(name: str) -> ClusterSpec:
    """Return a cluster of the catalogue, or the one that an environment file describes."""
    return load_environment(name).cluster if name.endswith(".toml") else cluster(name)


@cache
def _from_presets(name: str) -> Environment:
    entry = preset_entry(_PACKAGE, "environments", "environment", name)
    without = read_preset(_PACKAGE, "unseen").get(name, {})
    return _environment(name, cluster(entry["cluster"]), {**entry, "without": without})


def _from_file(path: str) -> Environment:
    entry = read_toml(path, "an environment")
    try:
        return _environment(path, cluster_from(Path(path).stem, entry["cluster"]), entry)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise InputError(
            f"{path}: cannot be read as an environment: {error}; accepted: tables cluster, constants, priors"
        ) from None


def _environment(name: str, spec: ClusterSpec, entry: Mapping[str, Any]) -> Environment:
    values = {key: float(item["value"]) for key, item in entry["constants"].items()}
    if values.keys() != _CONSTANT_NAMES:
        raise InputError(
            f"environment {name!r}: constants {sorted(values.keys() ^ _CONSTANT_NAMES)} are missing or "
            "not known"
        )
    if wrong := [key for key, value in values.items() if not 0 <= value < math.inf]:
        raise InputError(f"environment {name!r}: {', '.join(wrong)}: accepted: numbers, 0 or more")
    priors = {
        form: MappingProxyType({key: Prior(**item) for key, item in table.items()})
        for form, table in entry["priors"].items()
    }
    neutral = {key: Prior(**item) for key, item in entry.get("neutral", {}).items()}
    without = entry.get("without", {})
    open_names = _CONSTANT_NAMES | priors.get(_OPEN_FORM, {}).keys()
    for where, table in {"neutral": neutral, **without}.items():
        if unknown := sorted(set(table) - open_names):
            raise InputError(f"environment {name!r}: {where}: {', '.join(unknown)} are not known")
    return Environment(
        name=name,
        cluster=spec,
        constants=Constants(**values),
        priors=MappingProxyType(priors),
        neutral=MappingProxyType(neutral),
        without=MappingProxyType(without),
    )
