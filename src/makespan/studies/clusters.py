"""Clusters of scenarios: of the catalogue, of another size, or from a list of nodes.

If nodes have several types of GPU, each type has iteration times of its own, and a job holds GPUs of one type
at a time.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pandas as pd

from makespan.errors import (
    InfeasiblePlanError,
    InputError,
    MakespanError,
    MissingDataError,
    UnknownNameError,
)
from makespan.hardware import (
    ClusterSpec,
    Gpu,
    Network,
    NodeSpec,
    cluster,
    cluster_names,
    homogeneous,
    node as node_named,
)
from makespan.perf import Environment, environment_names, environment_of, load_environment
from makespan.planning import Machines, device, device_names, read_pools
from makespan.studies.catalogue import TableCatalogue, joined_catalogue, measured_catalogue
from makespan.throughput import PlannedSource, ThroughputSource, is_planned
from makespan.traces import Finding, ReadReport, read_nodes
from makespan.units import GB

_MAX_NODES, _MAX_GPUS = 10_000, 1_024
_KNOWN_GPUS = {"v100m32": "v100-32", "p100": "p100-16", "t4": "t4-16"}
"""Types of GPU as openb and PAI spell them, if only one device of the catalogue can be meant."""


_HOST = "h200"  # node whose CPU threads, memory and host links stand for those of clusters from a file
_AS_PLANNED = {"h200-141": "h200"}  # devices that the planning catalogue calls otherwise


@dataclass(frozen=True, slots=True)
class Site:
    """A cluster, the environment whose constants hold there, if any, and the report of its list.

    ``machines`` says what the devices of a cluster from a file sustain, by type.
    """

    cluster: ClusterSpec
    environment: str | Environment | None
    report: str = ""
    machines: Mapping[str, Machines] = field(default_factory=dict)


def site(
    given: str | Path | ClusterSpec,
    n_nodes: int | None = None,
    gpus_per_node: int | None = None,
    gpus: Mapping[str, str] | None = None,
) -> Site:
    """Return the site for the name of a cluster, a file of nodes or machines, or a cluster itself.

    Arguments are as for `makespan.scenario`.
    """
    if not isinstance(given, ClusterSpec) and _is_of_machines(str(given)):
        if gpus:
            raise InputError(
                f"cluster {given!s} names its devices; gpus (--gpu-as) is for lists of nodes only"
            )
        return _planned_site(given, n_nodes, gpus_per_node)
    if isinstance(given, str) and given in cluster_names():
        if gpus:
            raise InputError(
                f"cluster {given!r} is one of the catalogue; gpus (--gpu-as) is for lists of nodes only"
            )
        environment = given if given in environment_names() else None
        return Site(resized(given, n_nodes, gpus_per_node), environment)
    report = ""
    if not isinstance(given, ClusterSpec):
        if isinstance(given, str) and not (Path(given).suffix or "/" in given or Path(given).exists()):
            cluster(given)  # raises with the known names
        given, read = read_cluster(given, gpus)
        report = read.text
    alike = (name for name in environment_names() if load_environment(name).node == given.nodes[0])
    environment = next(alike, None) if given.is_homogeneous else None
    return Site(resized(given, n_nodes, gpus_per_node), environment, report)


def _is_of_machines(text: str) -> bool:
    """Return True for a file or a text that `makespan.planning.read_pools` reads."""
    return Path(text).suffix == ".toml" or (text[:1].isdigit() and "x" in text and not Path(text).suffix)


def _planned_site(given: str | Path, n_nodes: int | None, gpus_per_node: int | None) -> Site:
    """Return the site of machines from a file or a text; what it lacks of hosts is that of another node."""
    parts, host = read_pools(given), node_named(_HOST)
    nodes: list[NodeSpec] = []
    for part in parts:
        kind = part.device
        gpu = Gpu(
            name=part.name,
            peak_flop_per_s=tuple(sorted((key, peak * 1e12) for key, peak in kind.peak_tflop_per_s.items())),
            memory_bytes=kind.memory_bytes + host.gpu.reserved_bytes,
            memory_bandwidth_bytes_per_s=kind.memory_gb_per_s * GB,
            reserved_bytes=host.gpu.reserved_bytes,
            launch_gap_s=host.gpu.launch_gap_s,
            memory_efficiency=host.gpu.memory_efficiency,
            source=kind.source,
        )
        count, rest = divmod(part.n_gpus, part.gpus_per_node)
        for n_gpus, times in ((part.gpus_per_node, count), (rest, 1)):
            if n_gpus and times:
                like = _with_gpus(host, n_gpus)
                node = replace(
                    like,
                    name=f"{n_gpus} x {part.name}",
                    gpu=gpu,
                    intra_bandwidth_bytes_per_s=kind.link_gb_per_s * GB,
                    intra_latency_s=part.link_latency_s,
                    nic_bandwidth_bytes_per_s=kind.network_gb_per_s * GB,
                )
                nodes += [node] * times
    network = Network(latency_s=max(part.network_latency_s for part in parts))
    text = str(given)
    name = Path(text).stem if Path(text).suffix == ".toml" else text
    where = resized(ClusterSpec(name, tuple(nodes), network), n_nodes, gpus_per_node)
    environment = environment_of(where) if where.is_homogeneous else None
    return Site(where, environment, machines={part.name: part for part in parts})


def with_models(source: ThroughputSource, place: Site, keys: Iterable[str]) -> ThroughputSource:
    """Return a source that has the models of the user among some workloads, too; itself if there are none.

    Raises
    ------
    InputError
        The planning catalogue lacks a type of GPU of the cluster.
    """
    asked = list(keys)
    if not any(map(is_planned, asked)):
        return source
    is_alone = all(map(is_planned, asked))
    parts = pools(place.cluster)
    made = {
        gpu_type: PlannedSource(
            source.parts[gpu_type] if isinstance(source, TypedSource) else source,
            place.machines.get(gpu_type) or _machines_of(pool),
            pool,
            is_alone,
        )
        for gpu_type, pool in parts.items()
    }
    return TypedSource(made) if len(made) > 1 else next(iter(made.values()))


def _machines_of(pool: ClusterSpec) -> Machines:
    """Return the machines of equal nodes: the device of that name on the links of the node."""
    node = pool.node
    name = _AS_PLANNED.get(node.gpu_type, node.gpu_type)
    if name not in device_names():
        raise InputError(
            f"cluster {pool.name!r}: steps of models of your own cannot be predicted on {node.gpu_type}; "
            f"expected one of the devices {', '.join(device_names())}"
        )
    card_rate = node.nic_bandwidth_bytes_per_s / node.gpus_per_nic * pool.network.bandwidth_factor
    kind = replace(
        device(name),
        link_gb_per_s=node.intra_bandwidth_bytes_per_s / GB,
        network_gb_per_s=card_rate / GB,
    )
    return Machines(
        node.gpu_type,
        kind,
        pool.n_gpus,
        gpus_per_node=node.n_gpus,
        link_latency_s=node.intra_latency_s,
        network_latency_s=pool.network.latency_s,
    )


def resized(
    given: str | ClusterSpec, n_nodes: int | None = None, gpus_per_node: int | None = None
) -> ClusterSpec:
    """Return a cluster, or that of a name, with another number of nodes or of devices in each.

    CPU threads, memory and network cards of a node scale with its devices.
    """
    base = cluster(given) if isinstance(given, str) else given
    if n_nodes is None and gpus_per_node is None:
        return base
    for what, count, most in (("nodes", n_nodes, _MAX_NODES), ("GPUs per node", gpus_per_node, _MAX_GPUS)):
        if count is not None and not 1 <= count <= most:
            raise InputError(
                f"{count} {what}; expected 1 to {most}, as policies look at every node in each decision"
            )
    if not base.is_homogeneous:
        kinds = ", ".join(dict.fromkeys(node.name for node in base.nodes))
        raise InputError(
            f"cluster {base.name!r} has several kinds of node ({kinds}), which a number of nodes or of GPUs "
            "in each does not change; expected a list of nodes as the cluster"
        )
    node, count = base.node, n_nodes or base.n_nodes
    if gpus_per_node is not None and gpus_per_node != node.n_gpus:
        node = _with_gpus(node, gpus_per_node)
    return homogeneous(node, count, base.network, name=f"{base.name} as {count} x {node.n_gpus}")


def _with_gpus(node: NodeSpec, n_gpus: int) -> NodeSpec:
    return replace(
        node,
        n_gpus=n_gpus,
        n_nics=math.ceil(n_gpus / node.gpus_per_nic),
        cpu_threads=node.cpu_threads_per_gpu * n_gpus,
        host_memory_bytes=node.host_memory_bytes * n_gpus / node.n_gpus,
    )


# --- Lists of nodes ---


def read_cluster(path: str | Path, gpus: Mapping[str, str] | None = None) -> tuple[ClusterSpec, ReadReport]:
    """Read a list of nodes, of any form of `makespan.traces.read_nodes`, as a cluster; and the report.

    Links and rates of a node are those of the catalogue's node with its type of GPU; so are CPU threads and
    memory per GPU if the list states none. The network is the slowest of the types.

    Parameters
    ----------
    gpus
        Devices of the catalogue that stand in for types of GPU in the list, by type.

    Raises
    ------
    InputError
        The catalogue has no node with a type of GPU, or the list more than 10,000 nodes.
    """
    table, read = read_nodes(path)
    without = tuple(row for row, count in enumerate(table["n_gpus"], 1) if count == 0)
    findings = list(read.findings)
    if without:
        findings.append(Finding("dropped", "node without GPU (rows of the cleaned list)", without))
    kept = table[table["n_gpus"] > 0]
    if not 0 < len(kept) <= _MAX_NODES or (kept["n_gpus"] > _MAX_GPUS).any():
        raise InputError(
            f"{path}: {len(kept)} nodes with up to {table['n_gpus'].max()} GPUs; expected from 1 to "
            f"{_MAX_NODES} nodes with at most {_MAX_GPUS} GPUs"
        )
    templates = _templates(kept["gpu"], gpus or {}, str(path))
    rows = zip(*(kept[name].tolist() for name in ("gpu", "n_gpus", "n_cpus", "memory_bytes")), strict=True)
    nodes: list[NodeSpec] = []
    for gpu, n_gpus, n_cpus, memory_bytes in rows:
        template = templates[gpu]
        usual = template if n_gpus == template.n_gpus else _with_gpus(template, n_gpus)
        threads, host_bytes = n_cpus or usual.cpu_threads, memory_bytes or usual.host_memory_bytes
        node = replace(usual, cpu_threads=threads, host_memory_bytes=host_bytes)
        # A node like that of the catalogue keeps its name.
        name = f"{template.name} with {n_gpus} GPUs, {threads} threads, {host_bytes / 1e9:.0f} GB"
        nodes.append(template if node == template else replace(node, name=name))
    # The network of a type is that of the first cluster of the catalogue whose nodes all have it.
    clusters = [cluster(name) for name in cluster_names()]
    networks = [
        next(spec.network for spec in clusters if spec.gpu_types == (node.gpu_type,))
        for node in dict.fromkeys(templates.values())
    ]
    network = Network(
        latency_s=max(net.latency_s for net in networks),
        oversubscription=max(net.oversubscription for net in networks),
        rdma=all(net.rdma for net in networks),
        tcp_factor=min(net.tcp_factor for net in networks),
    )
    report = replace(read, n_kept=len(kept), findings=tuple(findings))
    return ClusterSpec(Path(path).stem, tuple(nodes), network), report


def _templates(types: Iterable[str], gpus: Mapping[str, str], where: str) -> dict[str, NodeSpec]:
    """Return the node of the catalogue for each type of GPU of a list."""
    clusters = (cluster(name) for name in cluster_names())
    known = {spec.gpu_types[0]: spec.nodes[0] for spec in clusters if len(spec.gpu_types) == 1}
    wanted = list(dict.fromkeys(types))
    if unused := sorted(set(gpus) - set(wanted)):
        names = ", ".join(map(repr, wanted))
        raise InputError(
            f"{where}: has no GPU of type {unused[0]!r}, named in gpus (--gpu-as); expected one of {names}"
        )
    named = {text: gpus.get(text, _KNOWN_GPUS.get(text.lower(), text.lower())) for text in wanted}
    unknown = [text for text, name in named.items() if name not in known]
    if unknown:
        raise InputError(
            f"{where}: types of GPU: found {', '.join(map(repr, unknown))}; expected {', '.join(known)}, or "
            f"one of these to stand for it (--gpu-as '{unknown[0]}={next(iter(known))}', gpus)"
        )
    return {text: known[name] for text, name in named.items()}


# --- Types of GPU ---


def pools(where: ClusterSpec) -> dict[str, ClusterSpec]:
    """Return the nodes of each type of GPU as a cluster of equal nodes, the largest of the type.

    Raises `InputError` if nodes with the same type of GPU have different links.
    """
    by_type: dict[str, list[NodeSpec]] = {}
    for node in where.nodes:
        by_type.setdefault(node.gpu_type, []).append(node)
    pooled = {}
    for gpu_type, nodes in sorted(by_type.items()):
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
        pooled[gpu_type] = homogeneous(largest, len(nodes), where.network, name=where.name)
    return pooled


def largest_pool(where: ClusterSpec) -> int:
    """Return the most GPUs of one type, the limit of a job."""
    counts: dict[str, int] = {}
    for node in where.nodes:
        counts[node.gpu_type] = counts.get(node.gpu_type, 0) + node.n_gpus
    return max(counts.values())


def emulated_cluster(pool: ClusterSpec) -> ClusterSpec:
    """Return the cluster to emulate for equal nodes: no fewer of them than in the catalogue.

    Jobs are drawn by its times, which must not depend on the size of the cluster. Noise depends on the name
    of a cluster, so nodes with the same device and as many of it keep that of the catalogue.
    """
    node, names = pool.nodes[0], (name for name in cluster_names())
    alike = [spec for spec in map(cluster, names) if spec.gpu_types == (node.gpu_type,)]
    if not alike:
        return pool
    base = next((spec for spec in alike if spec.name == pool.name.partition(" as ")[0]), alike[0])
    n_nodes = max(pool.n_nodes, base.n_nodes)
    name = base.name
    if node.n_gpus != base.nodes[0].n_gpus:
        name = f"{base.name} as {base.n_nodes} x {node.n_gpus}"
    return homogeneous(node, n_nodes, pool.network, name=name)


@dataclass(frozen=True, slots=True)
class TypedSource:
    """Iteration times of each type of GPU of a mixed cluster, ``parts`` by type.

    `load` has the rows of all types, of which the fastest stands for a request on as few nodes.
    """

    parts: Mapping[str, ThroughputSource]

    @property
    def name(self) -> str:
        """Name of the source of all types."""
        return next(iter(self.parts.values())).name

    def workload_keys(self) -> tuple[str, ...]:
        """Return the workloads that at least one type can run."""
        return tuple(dict.fromkeys(key for part in self.parts.values() for key in part.workload_keys()))

    def tables(self, workload_key: str) -> dict[str, pd.DataFrame]:
        """Return the table of a workload for each type of GPU that has one."""
        tables, missing = {}, list[MakespanError]()
        for gpu_type, part in self.parts.items():
            try:
                tables[gpu_type] = part.load(workload_key)
            except (MissingDataError, UnknownNameError, InfeasiblePlanError) as error:
                missing.append(error)  # a type that cannot train this
        if not tables:
            raise missing[0]
        return tables

    def load(self, workload_key: str) -> pd.DataFrame:
        """Return the tables of a workload for all types in one."""
        return pd.concat(self.tables(workload_key).values(), ignore_index=True)

    def batch_of(self, name: str) -> int | None:
        """Return the global batch of a measured workload, see `MeasuredSource.batch_of`."""
        asked: list[Callable[[str], int | None]] = [
            part.batch_of for part in self.parts.values() if hasattr(part, "batch_of")
        ]
        return next((batch for batch in (ask(name) for ask in asked) if batch is not None), None)


def exact_catalogue(
    tables: Mapping[str, pd.DataFrame], throughput: ThroughputSource, where: ClusterSpec
) -> TableCatalogue:
    """Return the catalogue of tables with their times as known, with a part for each type of GPU."""
    parts = pools(where)
    if not isinstance(throughput, TypedSource):
        return measured_catalogue(tables.values(), next(iter(parts.values())).nodes[0])
    return joined_catalogue(
        tuple(
            measured_catalogue([table], parts[gpu_type].nodes[0], gpu_type)
            for key in tables
            for gpu_type, table in throughput.tables(key).items()
        )
    )
