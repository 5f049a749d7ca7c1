"""Which node has the state of which layer, and who sends what to whom when that changes."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from makespan.errors import InputError
from makespan.oobleck.planning import Pipeline, PipelineTemplate

__all__ = [
    "Copy",
    "Gpu",
    "Holdings",
    "copy_plan",
    "held_parts",
    "held_by_layers",
    "node_layers",
    "slots_of",
]

Part = tuple[int, int]
"""A layer and one of the equal slots into which its state is divided."""


class Gpu(NamedTuple):
    """A GPU of a node, by its number there."""

    node: int
    number: int


Holdings = Mapping[Gpu, frozenset[Part]]
"""Parts whose state each GPU has."""


@dataclass(frozen=True, slots=True)
class Copy:
    """State of one slot of a layer that one GPU sends to another."""

    layer: int
    slot: int
    src: Gpu
    dst: Gpu
    n_bytes: int


def node_layers(template: PipelineTemplate) -> tuple[range, ...]:
    """Return the layers of each node of a pipeline, in order."""
    ends: list[range] = []
    filled = 0
    for stage in template.stages:
        if filled % template.gpus_per_node == 0:
            ends.append(stage.layers)
        else:
            ends[-1] = range(ends[-1].start, stage.end_layer)
        filled += stage.n_gpus
    return tuple(ends)


def slots_of(templates: Iterable[PipelineTemplate]) -> int:
    """Return into how many slots a layer is divided: the most GPUs of any stage."""
    return max(stage.n_gpus for template in templates for stage in template.stages)


@lru_cache(maxsize=256)
def _owned(template: PipelineTemplate, n_slots: int) -> tuple[tuple[int, int, frozenset[Part]], ...]:
    """Return place of the node, number, parts of each GPU; of q GPUs of a stage s q / n_slots has slot s."""
    owned = []
    filled = 0
    for stage in template.stages:
        place, first = divmod(filled, template.gpus_per_node)
        for index in range(stage.n_gpus):
            slots = [slot for slot in range(n_slots) if slot * stage.n_gpus // n_slots == index]
            parts = frozenset((layer, slot) for layer in stage.layers for slot in slots)
            owned.append((place, first + index, parts))
        filled += stage.n_gpus
    return tuple(owned)


def held_parts(pipelines: Iterable[Pipeline], n_slots: int) -> dict[Gpu, frozenset[Part]]:
    """Return what the GPUs of all pipelines own."""
    return {
        Gpu(one.nodes[place], number): parts
        for one in pipelines
        for place, number, parts in _owned(one.template, n_slots)
    }


def held_by_layers(held: Mapping[int, Collection[int]], n_slots: int) -> dict[Gpu, frozenset[Part]]:
    """Return the same from the layers of each node, which has one GPU."""
    if n_slots != 1:
        raise InputError(f"layers held by node, where a layer has {n_slots} slots; accepted: one GPU a node")
    return {Gpu(node, 0): frozenset((layer, 0) for layer in layers) for node, layers in held.items()}


def copy_plan(
    held: Holdings,
    needed: Holdings,
    layer_bytes: Sequence[int],
    n_slots: int,
    hosts: Mapping[int, object] | None = None,
) -> tuple[Copy, ...]:
    """Choose a sender for every part that a GPU will own and does not have.

    Oobleck, section 5.2; senders need not own the layer afterwards. Large layers are dealt out first, each
    to a sender on the same node, else of the same host, else to the one that has least to send.

    Parameters
    ----------
    held, needed
        Parts before and after. Every part needed must be held.
    layer_bytes
        State of each layer, all slots together.
    n_slots
        Slots of a layer.
    hosts
        Machine of each node, where several may share one.

    Returns
    -------
    tuple of Copy
        By layer, slot and receiver.
    """
    holders: dict[Part, list[Gpu]] = {}
    needers: dict[Part, list[Gpu]] = {}
    nothing: frozenset[Part] = frozenset()
    for gpu in sorted(held):
        for part in held[gpu]:
            holders.setdefault(part, []).append(gpu)
    for gpu in sorted(needed):
        for part in needed[gpu] - held.get(gpu, nothing):
            needers.setdefault(part, []).append(gpu)
    host_of = hosts or {}
    load = dict.fromkeys(sorted(held), 0)
    copies = []
    for part in sorted(needers, key=lambda one: (-layer_bytes[one[0]], one)):
        n_bytes = layer_bytes[part[0]] // n_slots + (part[1] < layer_bytes[part[0]] % n_slots)
        for dst in needers[part]:
            host = host_of.get(dst.node, dst.node)
            src = min(
                holders[part],
                key=lambda gpu: (
                    gpu.node != dst.node,
                    host_of.get(gpu.node, gpu.node) != host,
                    load[gpu],
                    gpu,
                ),
            )
            load[src] += n_bytes
            copies.append(Copy(*part, src, dst, n_bytes))
    return tuple(sorted(copies, key=lambda one: (one.layer, one.slot, one.dst)))
