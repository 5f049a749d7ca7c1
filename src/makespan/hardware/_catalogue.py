"""Presets of devices, nodes and clusters, read from the packaged TOML files."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from makespan.errors import InputError
from makespan.hardware._spec import ClusterSpec, Gpu, Network, NodeSpec, homogeneous
from makespan.presets import preset_entry, read_preset

__all__ = ["cluster", "cluster_from", "cluster_names", "gpu", "node"]


_PACKAGE = "makespan.hardware"


def cluster_names() -> tuple[str, ...]:
    """Return the names of all clusters in the catalogue."""
    return tuple(read_preset(_PACKAGE, "clusters"))


@cache
def gpu(name: str) -> Gpu:
    """Return a device of the catalogue; raises `UnknownNameError` for another name."""
    return _gpu(name, preset_entry(_PACKAGE, "gpus", "device", name))


def _gpu(name: str, entry: Mapping[str, Any]) -> Gpu:
    rest = dict(entry)
    peaks = tuple(sorted((key, float(value)) for key, value in rest.pop("peak_flop_per_s").items()))
    return Gpu(name=name, peak_flop_per_s=peaks, **rest)


@cache
def node(name: str) -> NodeSpec:
    """Return a node of the catalogue; raises `UnknownNameError` for another name."""
    entry = preset_entry(_PACKAGE, "nodes", "node", name)
    return NodeSpec(name=name, gpu=gpu(entry.pop("gpu")), **entry)


@cache
def cluster(name: str) -> ClusterSpec:
    """Return a cluster of the catalogue; raises `UnknownNameError` for another name."""
    entry = preset_entry(_PACKAGE, "clusters", "cluster", name)
    kinds = entry.get("nodes", [entry])
    nodes = tuple(node(kind["node"]) for kind in kinds for _ in range(int(kind["n_nodes"])))
    return ClusterSpec(name, nodes, Network(**entry["network"]))


def cluster_from(name: str, entry: Mapping[str, Any]) -> ClusterSpec:
    """Build a cluster of equal nodes that the catalogue does not have.

    Cluster, node and device are called ``name``; ``entry`` has ``n_nodes``, and the tables ``gpu``, ``node``
    and ``network`` with the fields of the presets. Raises `InputError` for missing, unknown and wrong fields.
    """
    try:
        device = _gpu(name, entry["gpu"])
        spec = NodeSpec(name=name, gpu=device, **entry["node"])
        return homogeneous(spec, int(entry["n_nodes"]), Network(**entry["network"]), name=name)
    except (KeyError, TypeError) as error:
        raise InputError(
            f"cluster {name!r}: {error}; accepted: n_nodes, and the tables gpu, node and network with the "
            "fields of Gpu, NodeSpec and Network"
        ) from None
