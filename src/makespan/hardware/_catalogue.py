"""Presets of devices, nodes and clusters, read from the packaged TOML files."""

from functools import cache

from makespan.hardware._spec import ClusterSpec, Gpu, Network, NodeSpec, homogeneous
from makespan.presets import preset_entry, read_preset, sources_of

__all__ = [
    "cluster",
    "cluster_names",
    "gpu",
    "gpu_names",
    "node",
    "node_names",
    "preset_sources",
]


_PACKAGE = "makespan.hardware"


def gpu_names() -> tuple[str, ...]:
    """Return the names of all devices in the catalogue."""
    return tuple(read_preset(_PACKAGE, "gpus"))


def node_names() -> tuple[str, ...]:
    """Return the names of all nodes in the catalogue."""
    return tuple(read_preset(_PACKAGE, "nodes"))


def cluster_names() -> tuple[str, ...]:
    """Return the names of all clusters in the catalogue."""
    return tuple(read_preset(_PACKAGE, "clusters"))


def preset_sources() -> dict[str, str]:
    """Return the source of every preset, keyed ``kind/name``; empty text where it is missing."""
    return sources_of(_PACKAGE, "gpus", "nodes", "clusters")


@cache
def gpu(name: str) -> Gpu:
    """Return a device of the catalogue.

    Raises
    ------
    UnknownNameError
        No device has that name.
    """
    entry = preset_entry(_PACKAGE, "gpus", "device", name)
    peaks = tuple(sorted((key, float(value)) for key, value in entry.pop("peak_flop_per_s").items()))
    return Gpu(name=name, peak_flop_per_s=peaks, **entry)


@cache
def node(name: str) -> NodeSpec:
    """Return a node of the catalogue.

    Raises
    ------
    UnknownNameError
        No node has that name.
    """
    entry = preset_entry(_PACKAGE, "nodes", "node", name)
    return NodeSpec(name=name, gpu=gpu(entry.pop("gpu")), **entry)


@cache
def cluster(name: str) -> ClusterSpec:
    """Return a cluster of the catalogue.

    Raises
    ------
    UnknownNameError
        No cluster has that name.
    """
    entry = preset_entry(_PACKAGE, "clusters", "cluster", name)
    network = Network(**entry["network"])
    return homogeneous(node(entry["node"]), int(entry["n_nodes"]), network, name=name)
