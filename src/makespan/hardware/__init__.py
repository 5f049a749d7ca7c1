"""Devices, nodes, links and clusters: the catalogue, and clusters from texts and files.

A device has one entry of the catalogue (``presets/devices.toml``), which the emulator, the simulator and
predictions of steps read. Presets are data (``presets/*.toml``); each entry names its source. Bandwidths are
per direction unless a name says otherwise.
"""

from makespan.hardware.devices import (
    GENERATIONS as GENERATIONS,
    MOST_GPUS as MOST_GPUS,
    ClusterSpec as ClusterSpec,
    Gpu as Gpu,
    Network as Network,
    NodeSpec as NodeSpec,
    Sustained as Sustained,
    cluster as cluster,
    cluster_from as cluster_from,
    cluster_names as cluster_names,
    equal_parts as equal_parts,
    gpu as gpu,
    gpu_names as gpu_names,
    homogeneous as homogeneous,
    joined as joined,
    node as node,
    pools as pools,
)
from makespan.hardware.machines import (
    cluster_of as cluster_of,
    read_machines as read_machines,
    read_pools as read_pools,
)
