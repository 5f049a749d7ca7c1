"""Clusters from a few words: from short texts such as ``64xh100-80``, and from TOML files."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from makespan.arguments import typed
from makespan.errors import InputError, unknown_name
from makespan.files import read_toml
from makespan.hardware.devices import (
    ClusterSpec,
    Network,
    NodeSpec,
    cluster,
    cluster_names,
    device_entry,
    equal_parts,
    gpu_from,
    gpu_names,
    node as node_named,
    node_sizes,
)
from makespan.units import GB

_HOST = "h200"  # node whose CPU threads, memory and host links stand in: texts and files say nothing of hosts
_MOST_LATENCY_S = 0.1
_SHORT = re.compile(r"(\d{1,15})\s*x\s*([A-Za-z][\w.-]*)")
_LINKS = ("link_gb_per_s", "network_gb_per_s")
_TEXTS = ("device", "source", "evidence", "products", "attention", "peak_tflop_per_s")
_OF_DEVICE = frozenset((*_TEXTS[1:], *_LINKS, "memory_gib", "memory_gb_per_s"))
_OF_CLUSTER = frozenset(
    ("n_gpus", "gpus_per_node", "link_latency_s", "network_latency_s", "usd_per_gpu_hour")
)


@typed
def read_machines(source: str | Path) -> ClusterSpec:
    """Return a cluster of one type of device: of a short text such as ``64xh100-80``, or of a TOML file.

    A name of the catalogue is read, too, see `cluster`. A file has ``device``, a name of the catalogue,
    ``n_gpus``, and what differs from the catalogue, in the units of the names. Of the device these are
    ``peak_tflop_per_s``, ``memory_gib`` (what programs can use), ``memory_gb_per_s``, ``link_gb_per_s`` and
    ``network_gb_per_s`` (per device and direction), ``products``, ``attention``, ``evidence`` and ``source``;
    of the cluster ``gpus_per_node``, ``link_latency_s``, ``network_latency_s`` and ``usd_per_gpu_hour``. For
    example::

        device = "h100-80"
        n_gpus = 512
        network_gb_per_s = 25
        usd_per_gpu_hour = 2.2

    Nodes are full, but the last one. Their hosts are those of the node ``h200`` of the catalogue, scaled to
    their devices.

    Raises
    ------
    InputError
        A field is missing, unknown or out of range.
    """
    if short := _SHORT.fullmatch(str(source).strip()):
        return cluster_of(short[2], int(short[1]), str(source))
    if str(source) in cluster_names():
        return cluster(str(source))
    path = Path(source)
    return _from_table(_read_file(path, source), path.stem, str(path))


@typed
def read_pools(source: str | Path) -> tuple[ClusterSpec, ...]:
    """Return the parts of a cluster with one type of device each, from a short text or a TOML file.

    Each is named after its device. A text such as ``32xh100-80+32xa100-80`` joins parts by ``+``. A file of
    several parts has a table ``[[machines]]`` for each, with the fields of `read_machines` and, where two
    parts have the same device on different links, a ``name`` for the type.

    Raises
    ------
    InputError
        As of `read_machines`, or two parts have the same name.
    """
    text = str(source).strip()
    shorts = [_SHORT.fullmatch(part.strip()) for part in text.split("+")]
    if all(shorts):
        parts = tuple(cluster_of(one[2], int(one[1]), one[2]) for one in shorts if one)
    else:
        path = Path(source)
        entry = _read_file(path, source)
        listed = entry.get("machines", [entry])
        if not (isinstance(listed, list) and listed and all(isinstance(one, dict) for one in listed)):
            raise InputError(f"{path}: expected the fields of a cluster, or tables [[machines]] with them")
        if "machines" in entry and len(entry) > 1:
            other = next(key for key in entry if key != "machines")
            raise InputError(
                f"{path}: {other} stands beside [[machines]]; expected it in each of these tables"
            )
        parts = tuple(
            _from_table(
                {key: value for key, value in one.items() if key != "name"},
                name := str(one.get("name", one.get("device"))),
                f"{path}: machines {number}" if len(listed) > 1 else str(path),
                name,
            )
            for number, one in enumerate(listed, start=1)
        )
    names = [one.name for one in parts]
    if again := next((name for name in names if names.count(name) > 1), ""):
        raise InputError(f"{source}: two parts are called {again!r}; expected a name for each (name = ...)")
    return parts


def _read_file(path: Path, source: str | Path) -> dict[str, Any]:
    if not path.exists() or path.is_dir():
        raise InputError(
            f"{source}: no such file; expected a TOML file of a cluster, or a text such as 64xh100-80, with "
            f"one of the devices {', '.join(gpu_names(sustained=True))}"
        )
    return read_toml(path, "a cluster")


def _from_table(entry: dict[str, Any], name: str, where: str, gpu_name: str | None = None) -> ClusterSpec:
    """Return the cluster of a table with the fields of a file; ``where`` names it in messages."""
    if "machines" in entry:
        raise InputError(
            f"{where}: has [[machines]] of several types; expected device and n_gpus of one type"
        )
    if unknown := set(entry) - _OF_DEVICE - _OF_CLUSTER - {"device"}:
        raise InputError(f"{where}: {unknown_name('field', sorted(unknown)[0], _OF_DEVICE | _OF_CLUSTER)}")
    if missing := {"device", "n_gpus"} - set(entry):
        raise InputError(f"{where}: {sorted(missing)[0]} is missing; expected device and n_gpus")
    for key, value in entry.items():
        if key not in _TEXTS and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise InputError(f"{where}: {key} is {value!r}; expected a number")
    own = {key: value for key, value in entry.items() if key in _OF_DEVICE}
    facts = {**_facts(str(entry["device"])), **own}
    try:
        sizes = {key: value for key, value in entry.items() if key in _OF_CLUSTER}
        n_gpus, usual = entry["n_gpus"], facts["gpus_per_node"]
        is_count = type(n_gpus) is int and n_gpus > 0
        sizes.setdefault("gpus_per_node", equal_parts(n_gpus, usual) if is_count else usual)
        return _equal_nodes(name, gpu_name or str(entry["device"]), facts, **sizes)
    except (TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{where}: {error}") from None
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


@typed
def cluster_of(
    device: str, n_gpus: int, name: str | None = None, gpus_per_node: int | None = None
) -> ClusterSpec:
    """Return a cluster of devices of the catalogue, on the links with which they are usually sold.

    Parameters
    ----------
    device, n_gpus
        Name of the device, and how many.
    name
        Name of the cluster; by default such as ``64xh100-80``.
    gpus_per_node
        Devices of a full node; by default as they are usually sold, see also `equal_parts`.

    Raises
    ------
    UnknownNameError, InputError
        The catalogue lacks the device or its links, or a number is out of range.
    """
    facts = _facts(device)
    if gpus_per_node is None:
        gpus_per_node = equal_parts(max(n_gpus, 1), min(facts["gpus_per_node"], max(n_gpus, 1)))
    return _equal_nodes(name or f"{n_gpus}x{device}", device, facts, n_gpus, gpus_per_node)


def _facts(device: str) -> dict[str, Any]:
    """Return the entry of a device of the catalogue; raises `UnknownNameError`."""
    if device not in gpu_names():
        raise unknown_name("device", device, gpu_names(sustained=True))
    return {"gpus_per_node": 8, **device_entry(device)}


def _equal_nodes(
    name: str,
    gpu_name: str,
    facts: dict[str, Any],
    n_gpus: int,
    gpus_per_node: int,
    link_latency_s: float = 4e-6,
    network_latency_s: float = 10e-6,
    usd_per_gpu_hour: float = 0.0,
) -> ClusterSpec:
    """Return a cluster of equal nodes with a device; hosts, of which nothing is said, are as of `_HOST`."""
    if "memory_gib" in facts:  # capacity and peaks of predictions count, not those that a data sheet prints
        facts = {key: value for key, value in facts.items() if key != "data_sheet"}
    gpu, host = gpu_from(gpu_name, facts), node_named(_HOST)
    if missing := [link for link in _LINKS if link not in facts]:
        raise InputError(
            f"device {gpu_name!r}: the catalogue has no {missing[0]}; expected it in a file, or one of the "
            f"devices {', '.join(gpu_names(sustained=True))}"
        )
    sizes = node_sizes(n_gpus, gpus_per_node, name)
    for key, value in (("link_latency_s", link_latency_s), ("network_latency_s", network_latency_s)):
        if not 0 <= value <= _MOST_LATENCY_S:
            raise InputError(
                f"cluster {name!r}: {key} is {value!r}; expected a number from 0 to {_MOST_LATENCY_S:g}, in "
                "the unit of its name"
            )
    nodes: list[NodeSpec] = []
    for size, count in sizes:
        node = replace(
            host.with_gpus(size),
            name=f"{size} x {gpu_name}",
            gpu=gpu,
            intra_bandwidth_bytes_per_s=facts["link_gb_per_s"] * GB,
            intra_latency_s=link_latency_s,
            nic_bandwidth_bytes_per_s=facts["network_gb_per_s"] * GB,
            source=f"{gpu.source}; host: {host.source}",
        )
        nodes += [node] * count
    part_of = gpus_per_node if n_gpus < gpus_per_node else 0
    return ClusterSpec(name, tuple(nodes), Network(network_latency_s), usd_per_gpu_hour, part_of)
