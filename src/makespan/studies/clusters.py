"""Clusters of scenarios: of the catalogue, of another size, or from a list of nodes.

If nodes have several types of GPU, each type has iteration times of its own, and a job holds GPUs of one type
at a time.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from makespan.arguments import typed
from makespan.errors import (
    InfeasiblePlanError,
    InputError,
    MakespanError,
    MissingDataError,
    UnknownNameError,
)
from makespan.hardware import (
    ClusterSpec,
    Network,
    NodeSpec,
    cluster,
    cluster_names,
    homogeneous,
    joined,
    pools,
    read_pools,
)
from makespan.perf import Environment, environment_names, environment_of, load_environment
from makespan.studies.catalogue import TableCatalogue, joined_catalogue, measured_catalogue
from makespan.throughput import PlannedSource, ThroughputSource, is_planned
from makespan.traces import Finding, ReadReport, read_nodes

_MAX_NODES, _MAX_GPUS = 10_000, 1_024
_KNOWN_GPUS = {"v100m32": "v100-32", "p100": "p100-16", "t4": "t4-16"}
"""Types of GPU as openb and PAI spell them, if only one device of the catalogue can be meant."""


@dataclass(frozen=True, slots=True)
class Site:
    """A cluster, the environment whose constants hold there, if any, and the report of its list."""

    cluster: ClusterSpec
    environment: str | Environment | None
    report: str = ""


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
    """Return True for a file or a text that `makespan.hardware.read_pools` reads."""
    return Path(text).suffix == ".toml" or (text[:1].isdigit() and "x" in text and not Path(text).suffix)


def _planned_site(given: str | Path, n_nodes: int | None, gpus_per_node: int | None) -> Site:
    """Return the site of machines from a file or a text, on which nothing has been measured."""
    text = str(given)
    name = Path(text).stem if Path(text).suffix == ".toml" else text
    where = resized(joined(name, read_pools(given)), n_nodes, gpus_per_node)
    return Site(where, environment_of(where) if where.is_homogeneous else None)


def with_models(source: ThroughputSource, place: Site, keys: Iterable[str]) -> ThroughputSource:
    """Return a source that has the models of the user among some workloads, too; itself if there are none.

    Raises
    ------
    InputError
        Nobody knows what a type of GPU of the cluster sustains.
    """
    asked = list(keys)
    if not any(map(is_planned, asked)):
        return source
    is_alone = all(map(is_planned, asked))
    made = {}
    for gpu_type, pool in pools(place.cluster).items():
        try:
            _ = pool.gpu.sustained
        except InputError as error:
            raise InputError(f"cluster {pool.name!r}: {error}") from None
        base = source.parts[gpu_type] if isinstance(source, TypedSource) else source
        made[gpu_type] = PlannedSource(base, pool, is_alone)
    return TypedSource(made) if len(made) > 1 else next(iter(made.values()))


@typed
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
        kinds = ", ".join(dict.fromkeys(node.name for node in base.kinds))
        raise InputError(
            f"cluster {base.name!r} has several kinds of node ({kinds}), which a number of nodes or of GPUs "
            "in each does not change; expected a list of nodes as the cluster"
        )
    node, count = base.node, n_nodes or base.n_nodes
    if gpus_per_node is not None and gpus_per_node != node.n_gpus:
        node = node.with_gpus(gpus_per_node)
    return homogeneous(node, count, base.network, name=f"{base.name} as {count} x {node.n_gpus}")


# --- Lists of nodes ---


@typed
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
        usual = template.with_gpus(n_gpus)
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
    report = replace(read, n_kept=len(kept), findings=tuple(findings))
    return ClusterSpec(Path(path).stem, tuple(nodes), Network.slowest(networks)), report


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


def largest_pool(where: ClusterSpec) -> int:
    """Return the most GPUs of one type, the limit of a job."""
    counts: dict[str, int] = {}
    for node, count in where.runs:
        counts[node.gpu_type] = counts.get(node.gpu_type, 0) + node.n_gpus * count
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
