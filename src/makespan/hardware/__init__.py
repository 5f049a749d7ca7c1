"""Devices, nodes, links and clusters, and the catalogue of presets.

Presets are data (``presets/*.toml``); each entry names its source. Bandwidths are per
direction unless a name says otherwise.
"""

from makespan.hardware._catalogue import cluster, cluster_from, cluster_names, gpu, node
from makespan.hardware._spec import ClusterSpec, Gpu, Network, NodeSpec, homogeneous

__all__ = [
    "ClusterSpec",
    "Gpu",
    "Network",
    "NodeSpec",
    "cluster",
    "cluster_from",
    "cluster_names",
    "gpu",
    "homogeneous",
    "node",
]
