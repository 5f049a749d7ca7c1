"""Devices, nodes and clusters: their types and presets."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Literal, get_args

from makespan.errors import InputError, unknown_name
from makespan.files import preset_entry, read_preset

# --- Types ---

IntraKind = Literal["switch", "mesh", "pcie", "pair"]


def _require_positive(record: object, *names: str) -> None:
    for name in names:
        value = getattr(record, name)
        if not value > 0:
            label = f"{type(record).__name__} {getattr(record, 'name', '')!r}"
            raise InputError(f"{label}: {name} is {value!r}; expected a positive number")


@dataclass(frozen=True, slots=True, eq=True)
class Gpu:
    """One device.

    Parameters
    ----------
    name, source
        Key in the catalogue, and where the numbers come from.
    peak_flop_per_s
        Dense peaks [FLOP/s] by precision (``bf16``, ``fp16``, ``tf32``, ``fp32``), as sorted
        pairs; a precision that is absent is not supported. Never the figure for sparse matrices.
    memory_bytes, memory_bandwidth_bytes_per_s, memory_efficiency
        Device memory: capacity [B], bandwidth [B/s], and the share of it that streaming kernels reach [1].
    reserved_bytes
        Memory taken by context, libraries and collective buffers [B].
    launch_gap_s
        Gap between kernels as an eager framework sees it [s].
    """

    name: str
    peak_flop_per_s: tuple[tuple[str, float], ...]
    memory_bytes: float
    memory_bandwidth_bytes_per_s: float
    reserved_bytes: float
    launch_gap_s: float
    memory_efficiency: float
    source: str

    def __post_init__(self) -> None:
        _require_positive(self, "memory_bytes", "memory_bandwidth_bytes_per_s", "launch_gap_s")
        if not 0 < self.memory_efficiency <= 1:
            raise InputError(
                f"Gpu {self.name!r}: memory_efficiency is {self.memory_efficiency}; expected 0 < share <= 1"
            )

    @property
    def usable_bytes(self) -> float:
        """Device memory for states, activations and workspaces [B]."""
        return self.memory_bytes - self.reserved_bytes

    def peak(self, precision: str) -> float:
        """Return the dense peak [FLOP/s] of a precision; raises `UnknownNameError` where there is none."""
        peaks = dict(self.peak_flop_per_s)
        if precision not in peaks:
            raise unknown_name(f"precision of device {self.name!r}", precision, peaks)
        return peaks[precision]


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """A server with equal devices.

    Parameters
    ----------
    name, source
        Key in the catalogue, and where the numbers come from.
    gpu, n_gpus
        Device, and number of devices.
    intra_bandwidth_bytes_per_s, intra_latency_s, intra_kind
        Link between devices: per device and direction [B/s], hop latency [s], and ``switch``,
        ``mesh``, ``pcie`` or ``pair`` (bridged pairs).
    pcie_bandwidth_bytes_per_s
        Host link of one device, per direction [B/s].
    n_nics, nic_bandwidth_bytes_per_s, gpus_per_nic
        Network cards, bandwidth of each [B/s], and how many adjacent devices share one.
    cpu_threads, host_memory_bytes, host_bandwidth_bytes_per_s
        Host: hardware threads, memory [B] and its bandwidth [B/s].
    adam_rate_per_thread, adam_rate_cap
        Fused Adam on the host: parameters per second of one thread and at most per process.
    loader_rate_per_thread
        Image decoding [samples/s] of one thread.
    """

    name: str
    gpu: Gpu
    n_gpus: int
    intra_bandwidth_bytes_per_s: float
    intra_latency_s: float
    intra_kind: IntraKind
    pcie_bandwidth_bytes_per_s: float
    n_nics: int
    nic_bandwidth_bytes_per_s: float
    gpus_per_nic: int
    cpu_threads: int
    host_memory_bytes: float
    host_bandwidth_bytes_per_s: float
    adam_rate_per_thread: float
    adam_rate_cap: float
    loader_rate_per_thread: float
    source: str

    def __post_init__(self) -> None:
        names = [f.name for f in fields(self) if f.type in ("int", "float", int, float)]
        _require_positive(self, *names)
        if self.intra_kind not in get_args(IntraKind):
            raise unknown_name("intra_kind", self.intra_kind, get_args(IntraKind))
        if self.n_nics * self.gpus_per_nic < self.n_gpus:
            raise InputError(
                f"NodeSpec {self.name!r}: {self.n_nics} network cards for {self.gpus_per_nic} "
                f"device(s) each do not serve {self.n_gpus} devices; expected n_nics x gpus_per_nic >= n_gpus"
            )

    @property
    def gpu_type(self) -> str:
        """Name of the node's kind of device."""
        return self.gpu.name

    @property
    def cpu_threads_per_gpu(self) -> int:
        """Hardware threads of the host divided by its devices."""
        return self.cpu_threads // self.n_gpus


@dataclass(frozen=True, slots=True)
class Network:
    """Network between the nodes.

    Parameters
    ----------
    latency_s, oversubscription
        Latency one way, card to card [s]; oversubscription of the core network, at least 1.
    rdma, tcp_factor
        True if cards use RDMA, and the share of their bandwidth reached without it [1].
    """

    latency_s: float
    oversubscription: float = 1.0
    rdma: bool = True
    tcp_factor: float = 0.35

    def __post_init__(self) -> None:
        if self.latency_s < 0 or self.oversubscription < 1 or not 0 < self.tcp_factor <= 1:
            raise InputError(
                "Network: needs latency_s >= 0, oversubscription >= 1 and tcp_factor in (0, 1]; "
                f"found {self.latency_s}, {self.oversubscription}, {self.tcp_factor}"
            )

    @property
    def bandwidth_factor(self) -> float:
        """Share of the card bandwidth that survives protocol and core network [1]."""
        return (1.0 if self.rdma else self.tcp_factor) / self.oversubscription


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """A cluster: its nodes, one entry each, equal or not, and the network between them."""

    name: str
    nodes: tuple[NodeSpec, ...]
    network: Network

    def __post_init__(self) -> None:
        if not self.nodes:
            raise InputError(f"ClusterSpec {self.name!r}: has no node; expected one or more")

    @property
    def n_nodes(self) -> int:
        """Number of nodes."""
        return len(self.nodes)

    @property
    def n_gpus(self) -> int:
        """Number of devices."""
        return sum(node.n_gpus for node in self.nodes)

    @property
    def gpu_types(self) -> tuple[str, ...]:
        """Kinds of device in the cluster, in the order of the nodes."""
        return tuple(dict.fromkeys(node.gpu_type for node in self.nodes))

    @property
    def is_homogeneous(self) -> bool:
        """True if all nodes are equal."""
        return len(set(self.nodes)) == 1

    @property
    def node(self) -> NodeSpec:
        """Kind of all nodes; raises `InputError` if there are several kinds."""
        if not self.is_homogeneous:
            kinds = ", ".join(dict.fromkeys(node.name for node in self.nodes))
            raise InputError(f"cluster {self.name!r} has several kinds of node: {kinds}; expected one kind")
        return self.nodes[0]

    @property
    def gpus_per_node(self) -> int:
        """Devices of the largest node."""
        return max(node.n_gpus for node in self.nodes)

    def max_cpu_threads(self, n_gpus: int) -> int:
        """Return the most CPU threads that a job can have: those of the ``n_gpus`` largest nodes."""
        return sum(sorted((node.cpu_threads for node in self.nodes), reverse=True)[:n_gpus])


def homogeneous(node: NodeSpec, n_nodes: int, network: Network, name: str | None = None) -> ClusterSpec:
    """Build a cluster of equal nodes, one or more."""
    label = name or f"{node.name}-{node.n_gpus * n_nodes}"
    return ClusterSpec(name=label, nodes=(node,) * n_nodes, network=network)


# --- Presets, read from the packaged TOML files ---

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
    """Build a cluster of equal nodes that is not in the catalogue.

    Cluster, node and device are called ``name``; ``entry`` has ``n_nodes``, and the tables ``gpu``, ``node``
    and ``network`` with the fields of the presets. Raises `InputError` for missing, unknown and wrong fields.
    """
    try:
        device = _gpu(name, entry["gpu"])
        spec = NodeSpec(name=name, gpu=device, **entry["node"])
        return homogeneous(spec, int(entry["n_nodes"]), Network(**entry["network"]), name=name)
    except (KeyError, TypeError) as error:
        raise InputError(
            f"cluster {name!r}: {error}; expected n_nodes, and the tables gpu, node and network with the "
            "fields of Gpu, NodeSpec and Network"
        ) from None
