"""Presets of devices, nodes and clusters, read from the packaged TOML files."""

import tomllib
from functools import cache
from importlib import resources
from typing import Any

from makespan.errors import unknown_name
from makespan.hardware._spec import ClusterSpec, Gpu, Network, NodeSpec, homogeneous

__all__ = [
    "cluster",
    "cluster_names",
    "gpu",
    "gpu_names",
    "node",
    "node_names",
    "preset_sources",
]


@cache
def _preset(kind: str) -> dict[str, dict[str, Any]]:
    text = resources.files("makespan.hardware").joinpath(f"presets/{kind}.toml").read_text("utf-8")
    return tomllib.loads(text)


def gpu_names() -> tuple[str, ...]:
    """Return the names of all devices in the catalogue."""
    return tuple(_preset("gpus"))


def node_names() -> tuple[str, ...]:
    """Return the names of all nodes in the catalogue."""
    return tuple(_preset("nodes"))


def cluster_names() -> tuple[str, ...]:
    """Return the names of all clusters in the catalogue."""
    return tuple(_preset("clusters"))


def preset_sources() -> dict[str, str]:
    """Return the source of every preset, keyed ``kind/name``; empty text where it is missing."""
    return {
        f"{kind}/{name}": str(entry.get("source", ""))
        for kind in ("gpus", "nodes", "clusters")
        for name, entry in _preset(kind).items()
    }


@cache
def gpu(name: str) -> Gpu:
    """Return a device of the catalogue.

    Raises
    ------
    UnknownNameError
        No device has that name.
    """
    try:
        entry = dict(_preset("gpus")[name])
    except KeyError:
        raise unknown_name("device", name, gpu_names()) from None
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
    try:
        entry = dict(_preset("nodes")[name])
    except KeyError:
        raise unknown_name("node", name, node_names()) from None
    return NodeSpec(name=name, gpu=gpu(entry.pop("gpu")), **entry)


@cache
def cluster(name: str) -> ClusterSpec:
    """Return a cluster of the catalogue.

    Raises
    ------
    UnknownNameError
        No cluster has that name.
    """
    try:
        entry = _preset("clusters")[name]
    except KeyError:
        raise unknown_name("cluster", name, cluster_names()) from None
    network = Network(**entry["network"])
    return homogeneous(node(entry["node"]), int(entry["n_nodes"]), network, name=name)
