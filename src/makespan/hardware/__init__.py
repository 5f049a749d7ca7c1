"""Devices, nodes, links and clusters, and the catalogue of presets.

Presets are data (``presets/*.toml``); each entry names its source. Bandwidths are per
direction unless a name says otherwise.
"""

from makespan.hardware.devices import (
    ClusterSpec as ClusterSpec,
    Gpu as Gpu,
    Network as Network,
    NodeSpec as NodeSpec,
    cluster as cluster,
    cluster_from as cluster_from,
    cluster_names as cluster_names,
    gpu as gpu,
    homogeneous as homogeneous,
    node as node,
)
