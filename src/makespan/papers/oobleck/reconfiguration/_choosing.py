"""Pipelines chosen anew for the nodes that there are: fast, little to copy, copies on several hosts."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from makespan.papers.oobleck.planning import PipelineTemplate
from makespan.papers.oobleck.reconfiguration._placing import (
    Hosts,
    assign_nodes,
    cut,
    exposed_layers,
    spread_nodes,
)
from makespan.papers.oobleck.reconfiguration._standin import distribute, enumerate_plans, iteration_time_s
from makespan.papers.oobleck.reconfiguration._state import node_layers

__all__ = ["Arrangement", "Job", "arranged_anew", "is_exposed", "split_group", "spread"]

SLOWER = 0.01
"""By how much a plan may be slower than the best if less has to be copied for it."""
MOST_SPREAD = 64
"""Plans, the fastest first, of which one without a layer on a single host is looked for."""


@dataclass(frozen=True, slots=True)
class Job:
    """What stays the same while nodes are regrouped, and which layers each node has."""

    templates: Mapping[int, PipelineTemplate]
    n0: int
    n_microbatches: int
    layer_bytes: Sequence[int]
    hosts: Hosts
    layers_of: Mapping[int, Collection[int]]


@dataclass(frozen=True, slots=True)
class Arrangement:
    """A template and its nodes for each pipeline, what was done for it, and joiners without a place."""

    templates: tuple[PipelineTemplate, ...]
    groups: tuple[tuple[int, ...], ...]
    kinds: tuple[str, ...] = ()
    waiting: tuple[int, ...] = ()


def split_group(
    nodes: Sequence[int], templates: Mapping[int, PipelineTemplate]
) -> tuple[tuple[int, ...], ...] | None:
    """Cut nodes without a template for so many into the most pipelines, of sizes as equal as can be."""
    if len(nodes) in templates:
        return (tuple(nodes),)
    sizes = sorted(templates)
    vectors = [_spelled_out(sizes, counts) for counts in enumerate_plans(sizes, len(nodes), 0)]
    if not vectors:
        return None
    best = min(vectors, key=lambda one: (-len(one), one[-1] - one[0], one))
    return cut(nodes, best)


def _spelled_out(sizes: Sequence[int], counts: Sequence[int]) -> list[int]:
    """Return the size of each pipeline of a plan, ascending."""
    return [size for size, count in zip(sizes, counts, strict=True) for _ in range(count)]


def arranged_anew(job: Job, nodes: Sequence[int], f: int) -> Arrangement | None:
    """Choose pipelines for all nodes, ``f + 1`` or more; None where the templates do not cover so many.

    Of the plans that leave no layer to a single host, if there are any, those within 1 % of the fastest
    count, and of them the one that copies the fewest bytes.
    """
    placed: list[tuple[float, Arrangement]] = []
    fastest_s = math.inf
    for time_s, templates in islice(_ranked(job, len(nodes), f), MOST_SPREAD if job.hosts else None):
        if time_s > fastest_s * (1 + SLOWER):
            break
        groups = assign_nodes(templates, nodes, job.layers_of, job.layer_bytes)
        found = spread(job, Arrangement(templates, groups))
        if not is_exposed(job, found):
            fastest_s = min(fastest_s, time_s)
        placed.append((time_s, found))
    safe = [one for one in placed if not is_exposed(job, one[1])] or placed
    near = [found for time_s, found in safe if time_s <= safe[0][0] * (1 + SLOWER)]
    return min(near, key=lambda one: _missing_bytes(job, one), default=None)


def _ranked(job: Job, n_nodes: int, f: int) -> list[tuple[float, tuple[PipelineTemplate, ...]]]:
    """Return the pipelines of every plan that gives each one micro-batch or more, the fastest first."""
    sizes = sorted(job.templates)
    found = []
    for counts in enumerate_plans(sizes, n_nodes, f):
        templates = tuple(job.templates[size] for size in _spelled_out(sizes, counts))
        if len(templates) <= job.n_microbatches:
            shares = distribute(templates, job.n_microbatches)
            found.append((iteration_time_s(templates, shares), templates))
    return sorted(found, key=lambda one: one[0])


def is_exposed(job: Job, found: Arrangement) -> bool:
    """Return whether one host alone has a layer although there are several."""
    return bool(job.hosts and exposed_layers(found.templates, found.groups, job.hosts))


def _missing_bytes(job: Job, found: Arrangement) -> int:
    """Return what the nodes would have to get."""
    places = [layers for one in found.templates for layers in node_layers(one)]
    nodes = [node for group in found.groups for node in group]
    return sum(
        job.layer_bytes[layer]
        for layers, node in zip(places, nodes, strict=True)
        for layer in layers
        if layer not in job.layers_of.get(node, ())
    )


def spread(job: Job, found: Arrangement) -> Arrangement:
    """Let nodes change places where a single host has all copies of a layer."""
    if not is_exposed(job, found):
        return found
    groups = spread_nodes(found.templates, found.groups, job.hosts, job.layers_of, job.layer_bytes)
    kinds = found.kinds if groups == found.groups else (*found.kinds, "spread")
    return Arrangement(found.templates, groups, kinds, found.waiting)
