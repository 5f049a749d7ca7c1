"""Pipelines chosen anew for the nodes that there are: fast, little to copy, copies on several hosts."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from makespan.errors import InfeasiblePlanError
from makespan.oobleck.planning import (
    Instantiation,
    ModelProfile,
    PipelineTemplate,
    choose_plan,
    enumerate_plans,
)
from makespan.oobleck.reconfiguration._placing import Hosts, assign_nodes, cut, exposed_layers, spread_nodes
from makespan.oobleck.reconfiguration._state import node_layers

__all__ = ["Arrangement", "Job", "arranged_anew", "is_exposed", "split_group", "spread"]

SLOWER = 0.01
"""By how much a plan may be slower than the best if less has to be copied for it."""
MOST_COMPARED = 64
"""Plans that are looked at, the fastest ones."""


@dataclass(frozen=True, slots=True)
class Job:
    """What stays the same while nodes are regrouped, and which layers each node has."""

    templates: Mapping[int, PipelineTemplate]
    n0: int
    n_microbatches: int
    layer_bytes: Sequence[int]
    hosts: Hosts
    layers_of: Mapping[int, Collection[int]]
    profile: ModelProfile | None = None


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
    for plan in _ranked(job, len(nodes), f):
        if plan.iter_time_s > fastest_s * (1 + SLOWER):
            break
        groups = assign_nodes(plan.templates, nodes, job.layers_of, job.layer_bytes)
        found = spread(job, Arrangement(plan.templates, groups))
        if not is_exposed(job, found):
            fastest_s = min(fastest_s, plan.iter_time_s)
        placed.append((plan.iter_time_s, found))
    safe = [one for one in placed if not is_exposed(job, one[1])] or placed
    near = [found for time_s, found in safe if time_s <= safe[0][0] * (1 + SLOWER)]
    return min(near, key=lambda one: _missing_bytes(job, one), default=None)


def _ranked(job: Job, n_nodes: int, f: int) -> list[Instantiation]:
    """Return the fastest plans for so many nodes, the fastest first; none if there is none."""
    try:
        choice = choose_plan(
            job.templates, n_nodes, f, job.n_microbatches, profile=job.profile, n_runners_up=MOST_COMPARED - 1
        )
    except InfeasiblePlanError:
        return []
    return [choice.best, *choice.runners_up]


def is_exposed(job: Job, found: Arrangement) -> bool:
    """Return whether one host alone has a layer although there are several."""
    return bool(job.hosts and exposed_layers(found.templates, found.groups, job.hosts))


def _missing_bytes(job: Job, found: Arrangement) -> int:
    """Return what the nodes would have to get, 0 where nobody has anything yet."""
    if not job.layers_of:
        return 0
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
