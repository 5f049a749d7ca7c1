"""Devices, nodes and clusters: their types and presets."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from itertools import groupby
from typing import Any, Literal, get_args

from makespan.arguments import check_fields, typed
from makespan.errors import InputError, unknown_name
from makespan.files import preset_entry, read_preset
from makespan.units import GB, GIB

# --- Types ---

IntraKind = Literal["switch", "mesh", "pcie", "pair"]
MOST_GPUS = 131_072
_LARGEST_NODE = 16  # devices; what has more is a rack
"""Devices that a cluster from a text or a file may have; larger numbers are mistakes."""
GENERATIONS = ("first", "second", "third")
"""Generations of fused attention kernels: FlashAttention, FlashAttention-2, FlashAttention-3 with cuDNN."""

_MOST_USD = 1e6


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class Sustained:
    """What training software reaches on a device, from which steps and memory of any model are predicted.

    Parameters
    ----------
    peak_flop_per_s
        Dense peaks [FLOP/s] of which the shares are, by precision; one that the device lacks has the peak of
        that which programs use in its place.
    memory_bytes
        Memory that programs can use [B].
    products
        By precision: share of the peak of large matrix products [1], and the inner size that halves the rest.
    attention
        By generation of the kernel, see `GENERATIONS`: share of the 16-bit peak [1], and the length that
        halves it [tokens].
    evidence
        What stands behind the shares.
    used_instead
        Precisions that the device lacks, and those that programs use in their place.
    """

    peak_flop_per_s: Mapping[str, float]
    memory_bytes: float
    products: Mapping[str, tuple[float, float]]
    attention: Mapping[str, tuple[float, float]]
    evidence: str
    used_instead: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, what in (("products", "an inner size"), ("attention", "a length")):
            pairs = getattr(self, name)
            for key, pair in pairs.items() if isinstance(pairs, Mapping) else ():
                if isinstance(pair, tuple) and not (
                    len(pair) == 2 and all(map(_is_number, pair)) and 0 < pair[0] <= 1 and 0 <= pair[1] < 1e9
                ):
                    raise InputError(
                        f"{name} of {key} are {', '.join(map(str, pair))}; expected a share of the peak, "
                        f"above 0 and up to 1, and {what}"
                    )
        check_fields(self, not_negative=("memory_bytes",))
        if missing := set(GENERATIONS) - set(self.attention):
            raise InputError(f"attention lacks {', '.join(sorted(missing))}")


@dataclass(frozen=True, slots=True, eq=True)
class Gpu:
    """One device.

    Parameters
    ----------
    name, source
        What tables call it, its name in the catalogue or one of your own, and where the numbers come from.
    peak_flop_per_s
        Dense peaks [FLOP/s] by precision (``bf16``, ``fp16``, ``tf32``, ``fp32``), as sorted
        pairs; a precision that is absent is not supported. Never the figure for sparse matrices.
    memory_bytes, memory_bandwidth_bytes_per_s, memory_efficiency
        Device memory: capacity [B], bandwidth [B/s], and the share of it that streaming kernels reach [1].
    reserved_bytes
        Memory taken by context, libraries and collective buffers [B].
    launch_gap_s
        Gap between kernels as an eager framework sees it [s].
    kind
        Key of the catalogue under which measured rows and factors of predictions stand; by default the name.
    shares
        What it sustains; None where nobody knows, and steps of models of one's own cannot be predicted.
    """

    name: str
    peak_flop_per_s: tuple[tuple[str, float], ...]
    memory_bytes: float
    memory_bandwidth_bytes_per_s: float
    reserved_bytes: float
    launch_gap_s: float
    memory_efficiency: float
    source: str
    kind: str = ""
    # Not hashed or written out, as devices are keys of caches of the emulator, which knows nothing of shares.
    shares: Sustained | None = field(default=None, hash=False, repr=False)

    def __post_init__(self) -> None:
        check_fields(
            self,
            "Gpu {0.name!r:.80}",
            positive=("memory_bytes", "memory_bandwidth_bytes_per_s", "launch_gap_s"),
            not_negative=("reserved_bytes",),
        )
        if not 0 < self.memory_efficiency <= 1:
            raise InputError(
                f"Gpu {self.name!r}: memory_efficiency is {self.memory_efficiency}; expected 0 < share <= 1"
            )
        if not self.kind:
            object.__setattr__(self, "kind", self.name)

    @property
    def usable_bytes(self) -> float:
        """Device memory for states, activations and workspaces [B]."""
        return self.memory_bytes - self.reserved_bytes

    @property
    def sustained(self) -> Sustained:
        """What the device sustains; raises `InputError` where nobody knows."""
        if self.shares is None:
            raise InputError(
                f"steps of models of your own cannot be predicted on {self.name}; expected one of the "
                f"devices {', '.join(gpu_names(sustained=True))}"
            )
        return self.shares

    def peak(self, precision: str) -> float:
        """Return the dense peak [FLOP/s] of a precision; raises `UnknownNameError` where there is none."""
        peaks = dict(self.peak_flop_per_s)
        if precision not in peaks:
            raise unknown_name(f"precision of device {self.name!r}", precision, peaks)
        return peaks[precision]

    def sustained_peak(self, precision: str) -> float:
        """Return the dense peak [FLOP/s] of which what the device sustains is a share.

        Raises `UnknownNameError` where there is none for a precision, `InputError` where nothing is known.
        """
        known = self.sustained
        if precision not in known.peak_flop_per_s or precision not in known.products:
            raise unknown_name(f"precision of device {self.name!r}", precision, known.peak_flop_per_s)
        return known.peak_flop_per_s[precision]


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
        names.remove("intra_latency_s")
        where = "NodeSpec {0.name!r:.80}"
        check_fields(self, where, positive=names, not_negative=("intra_latency_s",))
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

    @typed
    def with_gpus(self, n_gpus: int) -> "NodeSpec":
        """Return the node with another number of devices; CPU threads, memory and cards scale with them."""
        if n_gpus == self.n_gpus:
            return self
        return replace(
            self,
            n_gpus=n_gpus,
            n_nics=math.ceil(n_gpus / self.gpus_per_nic),
            cpu_threads=self.cpu_threads_per_gpu * n_gpus,
            host_memory_bytes=self.host_memory_bytes * n_gpus / self.n_gpus,
        )


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
        check_fields(self, not_negative=("latency_s", "oversubscription"))
        if self.oversubscription < 1 or not 0 < self.tcp_factor <= 1:
            raise InputError(
                "Network: needs latency_s >= 0, oversubscription >= 1 and tcp_factor in (0, 1]; "
                f"found {self.latency_s}, {self.oversubscription}, {self.tcp_factor}"
            )

    @classmethod
    def slowest(cls, networks: Iterable["Network"]) -> "Network":
        """Return a network that is as slow as the slowest of several in each respect."""
        found = list(networks)
        return cls(
            latency_s=max(one.latency_s for one in found),
            oversubscription=max(one.oversubscription for one in found),
            rdma=all(one.rdma for one in found),
            tcp_factor=min(one.tcp_factor for one in found),
        )

    @property
    def bandwidth_factor(self) -> float:
        """Share of the card bandwidth that survives protocol and core network [1]."""
        return (1.0 if self.rdma else self.tcp_factor) / self.oversubscription


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """A cluster: its nodes, one entry each, equal or not, and the network between them.

    Parameters
    ----------
    name, nodes, network
        Name in tables, and what it consists of.
    usd_per_gpu_hour
        Price, for costs; 0 for none.
    part_of
        Devices of a full node, where there is but a part of one; 0 elsewhere.

    Attributes
    ----------
    runs
        The nodes as runs of equal neighbours with their numbers. By these clusters are compared and hashed,
        so that thousands of equal nodes take no longer than one.
    n_gpus, gpus_per_node
        Number of devices, and those of the largest node.
    """

    name: str
    nodes: tuple[NodeSpec, ...] = field(compare=False, repr=False)
    network: Network
    usd_per_gpu_hour: float = 0.0
    part_of: int = 0
    runs: tuple[tuple[NodeSpec, int], ...] = field(init=False)
    n_gpus: int = field(init=False, compare=False, repr=False)
    gpus_per_node: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_fields(self, not_negative=("part_of",))
        if not self.nodes:
            raise InputError(f"ClusterSpec {self.name!r}: has no node; expected one or more")
        if not 0 <= self.usd_per_gpu_hour <= _MOST_USD:
            raise InputError(
                f"cluster {self.name!r}: usd_per_gpu_hour is {self.usd_per_gpu_hour!r}; expected a number "
                f"from 0 to {_MOST_USD:g}, in the unit of its name"
            )
        runs = tuple((node, len(list(group))) for node, group in groupby(self.nodes))
        object.__setattr__(self, "runs", runs)
        object.__setattr__(self, "n_gpus", sum(node.n_gpus * count for node, count in runs))
        object.__setattr__(self, "gpus_per_node", max(node.n_gpus for node, _ in runs))

    @property
    def n_nodes(self) -> int:
        """Number of nodes."""
        return len(self.nodes)

    @property
    def kinds(self) -> tuple[NodeSpec, ...]:
        """Kinds of node in the cluster, in the order of the nodes."""
        return tuple(dict.fromkeys(node for node, _ in self.runs))

    @property
    def gpu_types(self) -> tuple[str, ...]:
        """Kinds of device in the cluster, in the order of the nodes."""
        return tuple(dict.fromkeys(node.gpu_type for node, _ in self.runs))

    @property
    def is_homogeneous(self) -> bool:
        """True if all nodes are equal."""
        return len(self.runs) == 1

    @property
    def node(self) -> NodeSpec:
        """Kind of all nodes; raises `InputError` if there are several kinds."""
        if not self.is_homogeneous:
            kinds = ", ".join(dict.fromkeys(node.name for node in self.kinds))
            raise InputError(f"cluster {self.name!r} has several kinds of node: {kinds}; expected one kind")
        return self.nodes[0]

    @property
    def gpu(self) -> Gpu:
        """Kind of all devices; raises `InputError` if there are several kinds."""
        found = self.nodes[0].gpu
        if len(self.runs) > 1 and any(node.gpu != found for node, _ in self.runs):
            raise InputError(
                f"cluster {self.name!r} has several kinds of device: {', '.join(self.gpu_types)}; expected "
                "one kind"
            )
        return found

    def max_cpu_threads(self, n_gpus: int) -> int:
        """Return the most CPU threads that a job can have: those of the ``n_gpus`` largest nodes."""
        return sum(sorted((node.cpu_threads for node in self.nodes), reverse=True)[:n_gpus])

    @typed
    def with_gpus(self, n_gpus: int, gpus_per_node: int | None = None) -> "ClusterSpec":
        """Return equal nodes with another number of devices in all, and perhaps with fewer in each.

        They are as a full node, and the last one has the rest. Raises `InputError` for numbers that are
        not from 1 to `MOST_GPUS`.
        """
        name = f"{n_gpus}x{self.gpu.name}"
        largest = max((node for node, _ in self.runs), key=lambda node: node.n_gpus)
        per_node = gpus_per_node
        if per_node is None:
            per_node = equal_parts(n_gpus, max(self.gpus_per_node, self.part_of))
        sizes = node_sizes(n_gpus, per_node, name)
        nodes = tuple(node for size, count in sizes for node in (largest.with_gpus(size),) * count)
        return ClusterSpec(name, nodes, self.network, self.usd_per_gpu_hour)


def equal_parts(n_gpus: int, gpus_per_node: int) -> int:
    """Return the devices of a node if racks of many devices give equal parts, where that is possible.

    Jobs have numbers of devices that seldom fill racks of 72. Nodes of up to 16 are filled, and the last one
    has the rest.
    """
    n_nodes = -(-n_gpus // gpus_per_node)
    is_spread = gpus_per_node > _LARGEST_NODE and n_nodes > 1 and n_gpus % n_nodes == 0
    return n_gpus // n_nodes if is_spread else gpus_per_node


def node_sizes(n_gpus: int, gpus_per_node: int, cluster_name: str) -> list[tuple[int, int]]:
    """Return how many devices nodes have, and how many nodes: all full, but a last one with the rest.

    Raises
    ------
    InputError
        A number is not from 1 to `MOST_GPUS`; the message has the name of the cluster.
    """
    for name, value in (("n_gpus", n_gpus), ("gpus_per_node", gpus_per_node)):
        if type(value) is not int or value < 1:
            raise InputError(f"cluster {cluster_name!r}: {name} is {value!r}; expected a whole number >= 1")
        if value > MOST_GPUS:
            raise InputError(f"cluster {cluster_name!r}: {name} is {value:,}; expected at most {MOST_GPUS:,}")
    count, rest = divmod(n_gpus, gpus_per_node)
    return [(size, times) for size, times in ((gpus_per_node, count), (rest, 1)) if size and times]


@typed
def homogeneous(node: NodeSpec, n_nodes: int, network: Network, name: str | None = None) -> ClusterSpec:
    """Build a cluster of equal nodes, one or more."""
    label = name or f"{node.name}-{node.n_gpus * n_nodes}"
    if node.n_gpus * n_nodes > MOST_GPUS:
        raise InputError(f"cluster {label!r}: has {n_nodes:,} nodes; expected at most {MOST_GPUS:,} devices")
    return ClusterSpec(name=label, nodes=(node,) * n_nodes, network=network)


@typed
def joined(name: str, parts: Iterable[ClusterSpec]) -> ClusterSpec:
    """Join clusters to one with the nodes of all in order, the slowest network and the mean price."""
    found = list(parts)
    if not found:
        raise InputError(f"cluster {name!r}: has no part; expected one or more")
    n_gpus = sum(part.n_gpus for part in found)
    return ClusterSpec(
        name,
        tuple(node for part in found for node in part.nodes),
        Network.slowest(part.network for part in found),
        sum(part.usd_per_gpu_hour * part.n_gpus for part in found) / n_gpus,
    )


@typed
def pools(where: ClusterSpec) -> dict[str, ClusterSpec]:
    """Return the nodes of each type of device as a cluster of equal nodes, the largest of the type.

    Raises `InputError` if nodes with the same type of device have different links.
    """
    by_type: dict[str, list[tuple[NodeSpec, int]]] = {}
    for node, count in where.runs:
        by_type.setdefault(node.gpu_type, []).append((node, count))
    pooled = {}
    for gpu_type, runs in sorted(by_type.items()):
        nodes = list(dict.fromkeys(node for node, _ in runs))
        # Nodes of a type may differ in name, source and sizes alone.
        bare = {
            replace(node, name="", source="", n_gpus=1, n_nics=1, cpu_threads=1, host_memory_bytes=1.0)
            for node in nodes
        }
        if len(bare) > 1:
            raise InputError(
                f"cluster {where.name!r}: nodes with device {gpu_type!r} differ in their links or rates; "
                "expected another name for the device of each"
            )
        largest = max(
            nodes, key=lambda node: (node.n_gpus, node.cpu_threads, node.host_memory_bytes, node.name)
        )
        n_nodes = sum(count for _, count in runs)
        pooled[gpu_type] = replace(where, nodes=(largest,) * n_nodes)
    return pooled


# --- Presets, read from the packaged TOML files ---

_PACKAGE = "makespan.hardware"


def cluster_names() -> tuple[str, ...]:
    """Return the names of all clusters in the catalogue."""
    return tuple(read_preset(_PACKAGE, "clusters"))


def gpu_names(*, sustained: bool = False) -> tuple[str, ...]:
    """Return the names of all devices in the catalogue, or the keys of those with sustained shares."""
    if sustained:
        return tuple(key for key, entry in read_preset(_PACKAGE, "devices").items() if "products" in entry)
    return tuple(_keys())


@cache
def _keys() -> dict[str, str]:
    """Return the key of every name of a device."""
    entries = read_preset(_PACKAGE, "devices")
    return {name: key for key, entry in entries.items() for name in (key, *entry.get("also", ()))}


@typed
@cache
def gpu(name: str) -> Gpu:
    """Return a device of the catalogue; raises `UnknownNameError` for another name."""
    return gpu_from(name, device_entry(name))


def device_entry(name: str) -> dict[str, Any]:
    """Return a copy of the entry of a device with its key as ``kind``; raises `UnknownNameError`."""
    key = _keys().get(name, name)
    entry = preset_entry(_PACKAGE, "devices", "device", key)
    entry.pop("also", None)
    return {**entry, "kind": key}


_MOST = {
    "memory_gib": 10_000,
    "memory_gb_per_s": 100_000,
    "link_gb_per_s": 10_000,
    "network_gb_per_s": 10_000,
}
_MOST_TFLOP_PER_S = 100_000


def gpu_from(name: str, entry: Mapping[str, Any]) -> Gpu:
    """Build a device from an entry of the catalogue, with its fields in the units of their names.

    Its capacity and its peaks are those of ``data_sheet``. Where that states none, the capacity is what
    programs can use and what is reserved, and peaks are those of predictions.

    Raises
    ------
    InputError
        A field is missing or out of range.
    """
    for key in ("products", "attention", "peak_tflop_per_s"):
        if not isinstance(entry.get(key, {}), dict):
            raise InputError(f"{key} is {entry[key]!r}; expected a table with one entry per key, in braces")
    for key in ("evidence", "source"):
        if not isinstance(entry.get(key, ""), str):
            raise InputError(f"{key} is {entry[key]!r}; expected text")
    try:
        return _gpu_from(name, dict(entry))
    except InputError as error:
        raise InputError(f"device {name!r}: {error}") from None


def _gpu_from(name: str, rest: dict[str, Any]) -> Gpu:
    for key, most in _MOST.items():
        value = rest.get(key, most)
        if not 0 < value <= most:
            raise InputError(
                f"{key} is {value!r}; expected a positive number up to {most:,}, in the unit of its name"
            )
    needed = ("peak_tflop_per_s", "memory_gb_per_s", "emulated", "source")
    if missing := [key for key in needed if key not in rest]:
        raise InputError(f"{missing[0]} is missing; expected {', '.join(needed)}")
    printed, emulated = rest.pop("data_sheet", {}), rest.pop("emulated")
    sustained_peaks = _peaks(rest["peak_tflop_per_s"])
    usable_bytes = rest.get("memory_gib", 0.0) * GIB
    shares = None
    if "products" in rest or "attention" in rest:
        named = ("memory_gib", "products", "attention", "evidence")
        if missing := [key for key in named if key not in rest]:
            raise InputError(f"{missing[0]} is missing; expected {', '.join(named)} together")
        products, attention = (
            {
                key: tuple(pair) if isinstance(pair, list | tuple) else (pair,)
                for key, pair in rest[name].items()
            }
            for name in ("products", "attention")
        )
        shares = Sustained(
            sustained_peaks, usable_bytes, products, attention, rest["evidence"], rest.get("used_instead", {})
        )
    if "memory_gb" in printed:
        memory_bytes = printed["memory_gb"] * GB
    elif usable_bytes:
        memory_bytes = usable_bytes + emulated["reserved_bytes"]
    else:
        raise InputError("memory_gib is missing; expected the memory that programs can use")
    return Gpu(
        name=name,
        peak_flop_per_s=tuple(
            sorted(_peaks(printed.get("peak_tflop_per_s", rest["peak_tflop_per_s"])).items())
        ),
        memory_bytes=memory_bytes,
        memory_bandwidth_bytes_per_s=rest["memory_gb_per_s"] * GB,
        source=rest["source"],
        kind=rest.get("kind", ""),
        shares=shares,
        **emulated,
    )


def _peaks(table: Mapping[str, Any]) -> dict[str, float]:
    """Return peaks [FLOP/s] from peaks [TFLOP/s]."""
    for precision, peak in table.items():
        if not (_is_number(peak) and 0 < peak <= _MOST_TFLOP_PER_S):
            raise InputError(
                f"peak_tflop_per_s of {precision} is {peak!r}; expected a positive number up to "
                f"{_MOST_TFLOP_PER_S:,}"
            )
    return {precision: peak * 1e12 for precision, peak in table.items()}


@typed
@cache
def node(name: str) -> NodeSpec:
    """Return a node of the catalogue; raises `UnknownNameError` for another name."""
    entry = preset_entry(_PACKAGE, "nodes", "node", name)
    return NodeSpec(name=name, gpu=gpu(entry.pop("gpu")), **entry)


@typed
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
    and ``network`` with the fields of `Gpu` but shares, `NodeSpec` and `Network`. Raises `InputError` for
    missing, unknown and wrong fields.
    """
    try:
        facts = dict(entry["gpu"])
        peaks = sorted((key, float(value)) for key, value in facts.pop("peak_flop_per_s").items())
        device = Gpu(name=name, peak_flop_per_s=tuple(peaks), **facts)
        spec = NodeSpec(name=name, gpu=device, **entry["node"])
        return homogeneous(spec, int(entry["n_nodes"]), Network(**entry["network"]), name=name)
    except (KeyError, TypeError) as error:
        raise InputError(
            f"cluster {name!r}: {error}; expected n_nodes, and the tables gpu, node and network with the "
            "fields of Gpu, NodeSpec and Network"
        ) from None
