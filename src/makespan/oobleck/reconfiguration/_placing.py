"""Which node takes which place in the pipelines: little to copy, and copies of a layer on several hosts."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import combinations, islice

import numpy as np
from scipy.optimize import linear_sum_assignment

from makespan.oobleck.planning import PipelineTemplate
from makespan.oobleck.reconfiguration._state import node_layers

__all__ = ["Hosts", "assign_nodes", "cut", "exposed_layers", "spread_nodes"]

Hosts = Mapping[int, object]
"""Machine of each node; one that is not named is a machine of its own."""


def assign_nodes(
    templates: Sequence[PipelineTemplate],
    nodes: Sequence[int],
    layers_of: Mapping[int, Collection[int]],
    layer_bytes: Sequence[int],
) -> tuple[tuple[int, ...], ...]:
    """Give every place to a node so that as few bytes as possible are missing there.

    Parameters
    ----------
    templates
        One a pipeline, together for as many nodes as given.
    nodes
        Who takes part; the order decides where nobody holds anything.
    layers_of
        Layers whose state a node has; nothing where it is not named.
    layer_bytes
        State of each layer.

    Returns
    -------
    tuple of tuple of int
        Nodes of each pipeline.
    """
    chosen = list(nodes)
    if any(layers_of.get(node) for node in nodes):
        weights = np.array(layer_bytes, dtype=float)
        places = _rows((layers for one in templates for layers in node_layers(one)), len(weights))
        lacking = ~_rows((layers_of.get(node, ()) for node in nodes), len(weights))
        _, columns = linear_sum_assignment((places * weights) @ lacking.T)
        chosen = [nodes[int(column)] for column in columns]
    return cut(chosen, [one.n_nodes for one in templates])


def cut(nodes: Iterable[int], sizes: Iterable[int]) -> tuple[tuple[int, ...], ...]:
    """Return the nodes in pieces of so many each."""
    left = iter(nodes)
    return tuple(tuple(islice(left, size)) for size in sizes)


def _rows(
    sets: Iterable[Collection[int]], n_layers: int
) -> "np.ndarray[tuple[int, int], np.dtype[np.bool_]]":
    """Return a row for each set of layers, true where a layer is in it."""
    return np.array([[layer in one for layer in range(n_layers)] for one in map(frozenset, sets)], dtype=bool)


def exposed_layers(
    templates: Sequence[PipelineTemplate], groups: Sequence[Sequence[int]], hosts: Hosts
) -> tuple[int, ...]:
    """Return the layers that the loss of a single host would take, where there are several hosts."""
    masks = [_mask(layers) for one in templates for layers in node_layers(one)]
    found = _exposed(masks, [_host(hosts, node) for group in groups for node in group])
    return tuple(layer for layer in range(templates[0].n_layers) if found >> layer & 1)


def spread_nodes(
    templates: Sequence[PipelineTemplate],
    groups: Sequence[Sequence[int]],
    hosts: Hosts,
    layers_of: Mapping[int, Collection[int]],
    layer_bytes: Sequence[int],
) -> tuple[tuple[int, ...], ...]:
    """Let nodes change places, two at a time, until no host has all copies of a layer or nothing helps.

    The loss of a machine takes all its nodes at once, so copies must lie on different hosts. Each change is
    the one after which the fewest layers are exposed, of those the one that copies the fewest bytes.
    """
    masks = [_mask(layers) for one in templates for layers in node_layers(one)]
    nodes = [node for group in groups for node in group]
    held = {node: _mask(layers_of.get(node, ())) for node in nodes}
    exposed = _exposed(masks, [_host(hosts, node) for node in nodes])
    while exposed:
        best: tuple[int, int, list[int]] | None = None
        for one, other in combinations(range(len(nodes)), 2):
            if _host(hosts, nodes[one]) == _host(hosts, nodes[other]):
                continue
            tried = list(nodes)
            tried[one], tried[other] = nodes[other], nodes[one]
            n_exposed = _exposed(masks, [_host(hosts, node) for node in tried]).bit_count()
            if n_exposed >= (exposed.bit_count() if best is None else best[0] + 1):
                continue
            n_bytes = sum(
                _bytes(mask & ~held[node], layer_bytes) for mask, node in zip(masks, tried, strict=True)
            )
            if best is None or (n_exposed, n_bytes) < best[:2]:
                best = n_exposed, n_bytes, tried
        if best is None:
            break
        nodes = best[2]
        exposed = _exposed(masks, [_host(hosts, node) for node in nodes])
    return cut(nodes, map(len, groups))


def _host(hosts: Hosts, node: int) -> object:
    return hosts.get(node, ("node", node))


def _mask(layers: Iterable[int]) -> int:
    """Return a bit for each layer."""
    return sum(1 << layer for layer in layers)


def _bytes(mask: int, layer_bytes: Sequence[int]) -> int:
    return sum(size for layer, size in enumerate(layer_bytes) if mask >> layer & 1)


def _exposed(masks: Sequence[int], hosts: Sequence[object]) -> int:
    """Return the layers that one host alone has, as bits; none where there is one host only."""
    by_host: dict[object, int] = {}
    for mask, host in zip(masks, hosts, strict=True):
        by_host[host] = by_host.get(host, 0) | mask
    once = twice = 0
    for mask in by_host.values():
        twice |= once & mask
        once |= mask
    return once & ~twice if len(by_host) > 1 else 0
