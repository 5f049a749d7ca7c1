"""Adapt a plan to nodes that are lost, leave or join: regroup pipelines, place layers, plan the copies.

`reconfigure` first regroups the pipelines with few moves. Only if nodes join, or if regrouping leaves too few
pipelines or a layer on a single host, does it choose a plan anew for all nodes. Either way the copies follow
from comparing the layers that nodes hold with those that they will own.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations
from typing import Literal, NamedTuple

import numpy as np

from makespan.arguments import check_range, typed
from makespan.errors import InfeasiblePlanError, InputError, TrainingError
from makespan.oobleck.instantiation import MOST_MICROBATCHES, choose_plan, distribute, enumerate_plans
from makespan.oobleck.plan import (
    Hosts,
    HybridPlan,
    Pipeline,
    PipelineTemplate,
    cut,
    host_of,
    live_workers,
)
from makespan.oobleck.profile import ModelProfile

# --- Errors -----------------------------------------------------------------------------------------


class StateLost(TrainingError):
    """No remaining node has the state of some layer; training can resume only from a checkpoint.

    Parameters
    ----------
    layers
        Layers that no node holds.
    """

    def __init__(self, layers: Iterable[int]) -> None:
        self.layers = tuple(sorted(layers))
        named = ", ".join(map(str, self.layers))
        super().__init__(f"no node is left that holds layer(s) {named}; resume from the last checkpoint")


class InsufficientNodes(TrainingError):
    """Too few nodes are left to survive the required losses; the state is still complete.

    Parameters
    ----------
    n_nodes, n_needed
        Nodes that are left, and the fewest on which training continues.
    """

    def __init__(self, n_nodes: int, n_needed: int) -> None:
        self.n_nodes, self.n_needed = n_nodes, n_needed
        super().__init__(f"{n_nodes} node(s) are left; expected {n_needed} or more; write a checkpoint")


# --- Holdings and copies ----------------------------------------------------------------------------

Part = tuple[int, int]
"""Layer, and one of the equal slots into which its state is divided."""


class Gpu(NamedTuple):
    """GPU of a node, by its number there."""

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


def node_layers(template: PipelineTemplate) -> tuple[Collection[int], ...]:
    """Return the layers of each node of a pipeline, in order."""
    if template.interleave > 1:
        return tuple(
            tuple(layer for stage in template.stages_of(place) for layer in stage.layers)
            for place in range(template.n_nodes)
        )
    layers: list[range] = []
    n_filled = 0  # GPUs; a stage lies within one node
    for stage in template.stages:
        if n_filled % template.gpus_per_node == 0:
            layers.append(stage.layers)
        else:
            layers[-1] = range(layers[-1].start, stage.end_layer)
        n_filled += stage.n_gpus
    return tuple(layers)


def slots_of(templates: Iterable[PipelineTemplate]) -> int:
    """Return the number of slots into which a layer is divided: the most GPUs of any stage."""
    return max(stage.n_gpus for template in templates for stage in template.stages)


@lru_cache(maxsize=256)
def _owned(template: PipelineTemplate, n_slots: int) -> tuple[tuple[int, int, frozenset[Part]], ...]:
    """Return for each GPU the place of its node, its number there, and its parts.

    Slot s of a stage on q GPUs belongs to GPU s q // n_slots of the stage.
    """
    if template.interleave > 1:
        return tuple(
            (place, 0, frozenset((layer, slot) for layer in layers for slot in range(n_slots)))
            for place, layers in enumerate(node_layers(template))
        )
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
    """Return the parts that the GPUs of all pipelines own."""
    return {
        Gpu(pipeline.nodes[place], number): parts
        for pipeline in pipelines
        for place, number, parts in _owned(pipeline.template, n_slots)
    }


def held_by_layers(held: Mapping[int, Collection[int]], n_slots: int) -> dict[Gpu, frozenset[Part]]:
    """Return the parts held, from the layers of each node with one GPU."""
    if n_slots != 1:
        raise InputError(f"layers held by node, where a layer has {n_slots} slots; expected one GPU per node")
    return {Gpu(node, 0): frozenset((layer, 0) for layer in layers) for node, layers in held.items()}


def copy_plan(
    held: Holdings,
    needed: Holdings,
    layer_bytes: Sequence[int],
    n_slots: int,
    hosts: Hosts | None = None,
) -> tuple[Copy, ...]:
    """Choose a sender for every part that a GPU will own and does not hold.

    Oobleck, section 5.2; senders need not own the layer afterwards. Large layers are assigned first, each to
    a sender on the same node, else on the same host, else to the one with the least to send.

    Parameters
    ----------
    held, needed
        Parts before and after. Every part needed must be held.
    layer_bytes
        State of each layer, all slots together [B].
    n_slots
        Slots of a layer.
    hosts
        Machine of each node, if several nodes share one.

    Returns
    -------
    tuple of Copy
        Copies by layer, slot and receiver.
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
    machines = hosts or {}
    load = dict.fromkeys(sorted(held), 0)
    copies = []
    for part in sorted(needers, key=lambda part: (-layer_bytes[part[0]], part)):
        n_bytes = layer_bytes[part[0]] // n_slots + (part[1] < layer_bytes[part[0]] % n_slots)
        for dst in needers[part]:
            host = host_of(machines, dst.node)
            src = min(
                holders[part],
                key=lambda gpu: (gpu.node != dst.node, host_of(machines, gpu.node) != host, load[gpu], gpu),
            )
            load[src] += n_bytes
            copies.append(Copy(*part, src, dst, n_bytes))
    return tuple(sorted(copies, key=lambda copy: (copy.layer, copy.slot, copy.dst)))


# --- Regrouping: pipelines shrink, borrow single nodes, or merge ------------------------------------

Groups = list[list[int]]


@dataclass(frozen=True, slots=True)
class Regrouping:
    """Nodes of each pipeline by ascending size, and the kinds of moves, each once."""

    groups: tuple[tuple[int, ...], ...]
    kinds: tuple[str, ...]


def regroup(groups: Sequence[Sequence[int]], lost: Collection[int], n0: int) -> Regrouping:
    """Give every remaining pipeline ``n0`` nodes or more, with as few moves as possible.

    Oobleck, section 5.1. A pipeline that still has enough nodes takes a smaller template. One that has too
    few borrows the last nodes of the largest; if no pipeline can spare a node, whole pipelines merge.

    Parameters
    ----------
    groups
        Nodes of each pipeline, in order.
    lost
        Nodes that are lost.
    n0
        Fewest nodes of a pipeline.

    Returns
    -------
    Regrouping
        ``min(len(groups), nodes // n0)`` pipelines, empty ones not counted.

    Raises
    ------
    InsufficientNodes
        Fewer than ``n0`` nodes are left.
    """
    gone = frozenset(lost)
    left = [rest for group in groups if (rest := [node for node in group if node not in gone])]
    n_nodes = sum(map(len, left))
    if n_nodes < n0:
        raise InsufficientNodes(n_nodes, n0)
    regrouped, done = _grouped(left, n0, lend_again=False)
    if len(regrouped) < min(len(left), n_nodes // n0):
        regrouped, done = _grouped(left, n0, lend_again=True)
    n_left = [len(group) - len(gone.intersection(group)) for group in groups]
    kinds = {
        "drop": len(left) < len(groups),
        "re-instantiate": any(n0 <= n < len(group) for n, group in zip(n_left, groups, strict=True)),
        "borrow": "borrow" in done,
        "merge": "merge" in done,
    }
    return Regrouping(
        tuple(map(tuple, sorted(regrouped, key=len))),
        tuple(kind for kind, is_done in kinds.items() if is_done),
    )


def _grouped(left: Groups, n0: int, lend_again: bool) -> tuple[Groups, set[str]]:
    """Borrow, then merge; with ``lend_again`` a merged pipeline lends its spare nodes before the next merge.

    Deviation: the published order never lends from merged pipelines, and may then end with fewer pipelines
    than the nodes allow; `regroup` falls back to lending there.
    """
    groups, kinds = [list(group) for group in left], set[str]()
    _borrow(groups, n0, kinds)
    short = [group for group in groups if len(group) < n0]
    good = [group for group in groups if len(group) >= n0]
    while short:
        merged = short.pop(0)
        kinds.add("merge")
        while len(merged) < n0:
            merged = merged + (short or good).pop(0)
        good.append(merged)
        if lend_again:
            _borrow(whole := short + good, n0, kinds)
            short = [group for group in whole if len(group) < n0]
            good = [group for group in whole if len(group) >= n0]
    return good, kinds


def _borrow(groups: Groups, n0: int, kinds: set[str]) -> None:
    """Fill short pipelines, in order, with the last nodes of the largest, the last of equals."""
    for short in groups:
        while len(short) < n0:
            donor = max(reversed(groups), key=len)
            if len(donor) <= n0:
                return
            kinds.add("borrow")
            while len(short) < n0 < len(donor):
                short.append(donor.pop())


# --- Placement: little to copy, and copies of a layer on several hosts ------------------------------


def assign_nodes(
    templates: Sequence[PipelineTemplate],
    nodes: Sequence[int],
    layers_of: Mapping[int, Collection[int]],
    layer_bytes: Sequence[int],
) -> tuple[tuple[int, ...], ...]:
    """Assign nodes to places in the pipelines so that as few bytes as possible must be copied.

    Parameters
    ----------
    templates
        Template of each pipeline, together for as many nodes as given.
    nodes
        Nodes that take part; they keep this order if no node holds anything.
    layers_of
        Layers whose state a node has; nothing for a node that is not named.
    layer_bytes
        State of each layer [B].

    Returns
    -------
    tuple of tuple of int
        Nodes of each pipeline.
    """
    chosen = list(nodes)
    if any(layers_of.get(node) for node in nodes):
        weights = np.array(layer_bytes, dtype=float)
        places = _rows((layers for template in templates for layers in node_layers(template)), len(weights))
        lacking = ~_rows((layers_of.get(node, ()) for node in nodes), len(weights))
        from scipy.optimize import linear_sum_assignment  # slow to import, and most plans have no state yet

        # Cost of a node at a place: bytes of the layers of the place that the node lacks.
        _, columns = linear_sum_assignment((places * weights) @ lacking.T)
        chosen = [nodes[int(column)] for column in columns]
    return cut(chosen, [template.n_nodes for template in templates])


def _rows(
    sets: Iterable[Collection[int]], n_layers: int
) -> "np.ndarray[tuple[int, int], np.dtype[np.bool_]]":
    """Return a row for each set of layers, true where a layer is in it."""
    return np.array(
        [[layer in members for layer in range(n_layers)] for members in map(frozenset, sets)], dtype=bool
    )


def exposed_layers(
    templates: Sequence[PipelineTemplate], groups: Sequence[Sequence[int]], hosts: Hosts
) -> tuple[int, ...]:
    """Return the layers that the loss of a single host would take, if there are several hosts."""
    masks = [_mask(layers) for template in templates for layers in node_layers(template)]
    exposed = _exposed(masks, [host_of(hosts, node) for group in groups for node in group])
    return tuple(layer for layer in range(templates[0].n_layers) if exposed >> layer & 1)


def spread_nodes(
    templates: Sequence[PipelineTemplate],
    groups: Sequence[Sequence[int]],
    hosts: Hosts,
    layers_of: Mapping[int, Collection[int]],
    layer_bytes: Sequence[int],
) -> tuple[tuple[int, ...], ...]:
    """Swap nodes until no host has all copies of a layer, or no swap helps.

    The loss of a machine takes all its nodes at once, so copies must lie on different hosts. Each swap is the
    one after which the fewest layers are exposed, and among those the one that copies the fewest bytes.
    """
    masks = [_mask(layers) for template in templates for layers in node_layers(template)]
    nodes = [node for group in groups for node in group]
    held = {node: _mask(layers_of.get(node, ())) for node in nodes}
    exposed = _exposed(masks, [host_of(hosts, node) for node in nodes])
    while exposed:
        best: tuple[int, int, list[int]] | None = None
        for left, right in combinations(range(len(nodes)), 2):
            if host_of(hosts, nodes[left]) == host_of(hosts, nodes[right]):
                continue
            tried = list(nodes)
            tried[left], tried[right] = nodes[right], nodes[left]
            n_exposed = _exposed(masks, [host_of(hosts, node) for node in tried]).bit_count()
            # The first swap must improve on now; a later one may tie with the best and copy less.
            if n_exposed >= (exposed.bit_count() if best is None else best[0] + 1):
                continue
            missing = [mask & ~held[node] for mask, node in zip(masks, tried, strict=True)]
            n_bytes = sum(
                size for mask in missing for layer, size in enumerate(layer_bytes) if mask >> layer & 1
            )
            if best is None or (n_exposed, n_bytes) < best[:2]:
                best = n_exposed, n_bytes, tried
        if best is None:
            break
        nodes = best[2]
        exposed = _exposed(masks, [host_of(hosts, node) for node in nodes])
    return cut(nodes, map(len, groups))


def _mask(layers: Iterable[int]) -> int:
    """Return a bit for each layer."""
    return sum(1 << layer for layer in layers)


def _exposed(masks: Sequence[int], hosts: Sequence[object]) -> int:
    """Return the layers that one host alone has, as bits; none if there is only one host."""
    by_host: dict[object, int] = {}
    for mask, host in zip(masks, hosts, strict=True):
        by_host[host] = by_host.get(host, 0) | mask
    once = twice = 0
    for mask in by_host.values():
        twice |= once & mask
        once |= mask
    return once & ~twice if len(by_host) > 1 else 0


# --- Choosing anew: fast, little to copy, copies of a layer on several hosts ------------------------

SLOWER = 0.01
"""Share by which a plan may be slower than the fastest if it copies less."""
MOST_COMPARED = 64
"""Number of fastest plans that are compared."""


@dataclass(frozen=True, slots=True)
class Job:
    """Facts that stay the same while nodes are regrouped, and the layers that each node has."""

    templates: Mapping[int, PipelineTemplate]
    n0: int
    n_microbatches: int
    layer_bytes: Sequence[int]
    hosts: Hosts
    layers_of: Mapping[int, Collection[int]]
    profile: ModelProfile | None = None


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Template and nodes of each pipeline, kinds of moves, and joiners without a place."""

    templates: tuple[PipelineTemplate, ...]
    groups: tuple[tuple[int, ...], ...]
    kinds: tuple[str, ...] = ()
    waiting: tuple[int, ...] = ()


def split_group(
    nodes: Sequence[int], templates: Mapping[int, PipelineTemplate]
) -> tuple[tuple[int, ...], ...] | None:
    """Split a group without a template of its size into the most pipelines, as equal as possible."""
    if len(nodes) in templates:
        return (tuple(nodes),)
    sizes = sorted(templates)
    splits = [
        [size for size, count in zip(sizes, counts, strict=True) for _ in range(count)]
        for counts in enumerate_plans(sizes, len(nodes), 0)
    ]
    if not splits:
        return None
    best = min(splits, key=lambda split: (-len(split), split[-1] - split[0], split))
    return cut(nodes, best)


def arranged_anew(job: Job, nodes: Sequence[int], f: int) -> Arrangement | None:
    """Choose ``f + 1`` or more pipelines for all nodes; None if the templates do not cover this number.

    Plans that leave no layer to a single host come first, if there are any. Of the plans within 1 % of the
    fastest, the one that copies the fewest bytes wins.
    """
    try:
        choice = choose_plan(
            job.templates, len(nodes), f, job.n_microbatches, profile=job.profile,
            n_runners_up=MOST_COMPARED - 1,
        )  # fmt: skip
    except InfeasiblePlanError:
        return None
    placed: list[tuple[float, Arrangement]] = []
    fastest_s = math.inf  # of the plans that are not exposed
    for plan in (choice.best, *choice.runners_up):
        if plan.iter_time_s > fastest_s * (1 + SLOWER):
            break
        groups = assign_nodes(plan.templates, nodes, job.layers_of, job.layer_bytes)
        arrangement = spread(job, Arrangement(plan.templates, groups))
        if not is_exposed(job, arrangement):
            fastest_s = min(fastest_s, plan.iter_time_s)
        placed.append((plan.iter_time_s, arrangement))
    safe = [pair for pair in placed if not is_exposed(job, pair[1])] or placed
    near = [arrangement for time_s, arrangement in safe if time_s <= safe[0][0] * (1 + SLOWER)]

    def missing_bytes(arrangement: Arrangement) -> int:
        """Return the bytes that the nodes lack, 0 if no node has anything yet."""
        if not job.layers_of:
            return 0
        places = [layers for template in arrangement.templates for layers in node_layers(template)]
        nodes = [node for group in arrangement.groups for node in group]
        return sum(
            job.layer_bytes[layer]
            for layers, node in zip(places, nodes, strict=True)
            for layer in layers
            if layer not in job.layers_of.get(node, ())
        )

    return min(near, key=missing_bytes, default=None)


def is_exposed(job: Job, arrangement: Arrangement) -> bool:
    """Tell whether one host alone has a layer although there are several hosts."""
    return bool(job.hosts and exposed_layers(arrangement.templates, arrangement.groups, job.hosts))


def spread(job: Job, arrangement: Arrangement) -> Arrangement:
    """Swap nodes of an arrangement in which a single host has all copies of a layer."""
    if not is_exposed(job, arrangement):
        return arrangement
    templates, before = arrangement.templates, arrangement.groups
    groups = spread_nodes(templates, before, job.hosts, job.layers_of, job.layer_bytes)
    kinds = arrangement.kinds if groups == before else (*arrangement.kinds, "spread")
    return Arrangement(templates, groups, kinds, arrangement.waiting)


# --- Reconfiguration --------------------------------------------------------------------------------

Policy = Literal["stop", "degrade"]


@dataclass(frozen=True, slots=True)
class Reconfiguration:
    """Outcome for a job after a loss, a drain, or when nodes join.

    Parameters
    ----------
    plan
        Pipelines with nodes and microbatches.
    kinds
        Kinds of moves, each once: drop (a whole pipeline is lost), re-instantiate, borrow, merge, split (a
        group larger than any template), re-plan, join, drain, spread (over hosts); reroute (nothing moves).
    copies
        State that nodes must receive before they resume.
    f
        Simultaneous losses that can be survived now; fewer than required if the job continues degraded.
    waiting
        Nodes that have no place in any plan of the templates, joiners first; they may join later.
    exposed
        Layers that one host alone holds although there are several hosts.
    fallback
        Why microbatches were not rerouted although ``recovery`` is ``reroute``; empty otherwise.
    """

    plan: HybridPlan
    kinds: tuple[str, ...]
    copies: tuple[Copy, ...]
    f: int
    waiting: tuple[int, ...] = ()
    exposed: tuple[int, ...] = ()
    fallback: str = ""

    @property
    def action(self) -> str:
        """Return the heaviest of the kinds, ``none`` if nothing was done."""
        return next((kind for kind in _BY_WEIGHT if kind in self.kinds), "none")

    @property
    def copies_bytes(self) -> int:
        """Return the total size of the copies."""
        return sum(copy.n_bytes for copy in self.copies)


_BY_WEIGHT = (
    "re-plan", "join", "merge", "split", "borrow", "re-instantiate", "drop", "reroute", "drain", "spread",
)  # fmt: skip


@typed
def reconfigure(
    pipelines: Sequence[Pipeline],
    lost: Collection[int],
    joined: Collection[int],
    templates: Mapping[int, PipelineTemplate],
    f: int,
    n0: int,
    n_microbatches: int,
    *,
    layer_bytes: Sequence[int] | None,
    drained: Collection[int] = (),
    held: Mapping[int, Collection[int]] | None = None,
    hosts: Hosts | None = None,
    policy: Policy = "stop",
    profile: ModelProfile | None = None,
) -> Reconfiguration:
    """Plan the pipelines that continue when nodes are lost, leave or join.

    Oobleck, section 5. Pipelines are regrouped with few moves. If fewer than ``f + 1`` would be left although
    there are enough nodes, or nodes join, the plan within 1 % of the fastest that copies the least is chosen.

    Parameters
    ----------
    pipelines
        Pipelines as they train now; none at the start.
    lost, drained, joined
        Nodes lost with their state, nodes that leave but can still send, and new nodes.
    templates
        Templates by number of nodes.
    f, n0, n_microbatches
        Simultaneous losses to survive, fewest nodes of a pipeline, microbatches per iteration.
    layer_bytes, held
        State of each layer [B], None to ignore holdings; layers that each node with one GPU holds, None
        for those that the pipelines own.
    hosts
        Machine of each node; None if every node is a machine of its own.
    policy
        Below ``(f + 1) n0`` nodes: stop, or degrade and survive fewer losses.
    profile
        Times of the layers, to count the wait for gradients; None to ignore it.

    Raises
    ------
    StateLost, InsufficientNodes
        No node has some layer; fewer nodes are left than the policy accepts.
    InfeasiblePlanError, InputError
        No plan has so many nodes and microbatches; a node is named twice, or is lost but in no pipeline.
    """
    check_range("f", f)
    check_range("n0", n0, 1)
    check_range("n_microbatches", n_microbatches, 1, MOST_MICROBATCHES)
    _check(pipelines, lost, joined, drained, templates, layer_bytes)
    gone, away = frozenset(lost), frozenset(lost) | frozenset(drained)
    state = _State.left(pipelines, gone, templates, layer_bytes, held)
    n_nodes = sum(len(pipeline.nodes) for pipeline in pipelines) - len(away) + len(joined)
    f_now = tolerated(n_nodes, f, n0, policy)
    job = Job(templates, n0, n_microbatches, layer_bytes or (), hosts or {}, state.layers_of(), profile)
    outcome = _rearranged(job, pipelines, away, tuple(joined), f_now)
    counts = distribute(outcome.templates, n_microbatches) or ()
    plan = HybridPlan(tuple(map(Pipeline, outcome.groups, outcome.templates, counts)))
    kinds = (*outcome.kinds, *(("drain",) if drained else ()))
    exposed = exposed_layers(outcome.templates, outcome.groups, hosts) if hosts else ()
    return Reconfiguration(plan, kinds, state.copies(plan, job), f_now, outcome.waiting, exposed)


def tolerated(n_nodes: int, f: int, n0: int, policy: Policy) -> int:
    """Return the simultaneous losses that can be survived on so many nodes, ``f`` or fewer.

    Raises `InsufficientNodes` if that is fewer than the policy accepts.
    """
    if n_nodes >= (f + 1) * n0:
        return f
    if policy == "stop" or n_nodes < n0:
        raise InsufficientNodes(n_nodes, (f + 1) * n0 if policy == "stop" else n0)
    return n_nodes // n0 - 1


def reroute(
    plan: HybridPlan,
    lost: Collection[int],
    f: int,
    held: Mapping[int, Collection[int]],
    *,
    drained: Collection[int] = (),
    hosts: Hosts | None = None,
) -> Reconfiguration:
    """Let other nodes of its stage run the microbatches of a node that is lost or leaves, as in ReCycle.

    No node changes its place and no layer is copied.

    Parameters
    ----------
    plan
        Pipelines as they train now.
    lost, drained
        Nodes that are lost, and nodes that leave.
    f
        Simultaneous losses to survive.
    held
        Layers that each node holds.
    hosts
        Machine of each node, also of lost ones; None if every node is a machine of its own.

    Raises
    ------
    InfeasiblePlanError
        Pipelines have different stages; fewer than ``f + 1`` nodes are left of a stage, or all of them are on
        one of several hosts; a node lacks a layer of its stage. The text has the reason.
    """
    after = HybridPlan(plan.pipelines, tuple(sorted({*plan.lost, *lost, *drained})))
    try:
        live = live_workers(after)
    except InputError as error:
        raise InfeasiblePlanError(str(error).partition(";")[0]) from None
    if min(live) <= f:
        stage = live.index(min(live))
        raise InfeasiblePlanError(f"{live[stage]} node(s) are left of stage {stage}; f = {f} needs {f + 1}")
    for stage, layers in enumerate(each.layers for each in plan.pipelines[0].template.stages):
        before = [node for node in (each.nodes[stage] for each in plan.pipelines) if node not in plan.lost]
        left = [node for node in before if node not in after.lost]
        for node in left:
            if set(layers) - set(held.get(node, ())):
                raise InfeasiblePlanError(f"node {node} lacks layers of its stage")
        n_before, n_left = (len({host_of(hosts or {}, node) for node in nodes}) for nodes in (before, left))
        if n_left == 1 < min(n_before, len(left)):
            raise InfeasiblePlanError(f"the nodes that are left of stage {stage} are all on one host")
    kinds = (("reroute",) if after.lost != plan.lost else ()) + (("drain",) if drained else ())
    return Reconfiguration(after, kinds, (), f)


@dataclass(frozen=True, slots=True)
class _State:
    """Parts that the remaining GPUs hold; nothing at the start, or if holdings are ignored."""

    held: Holdings
    n_slots: int

    @classmethod
    def left(
        cls,
        pipelines: Sequence[Pipeline],
        gone: frozenset[int],
        templates: Mapping[int, PipelineTemplate],
        layer_bytes: Sequence[int] | None,
        held: Mapping[int, Collection[int]] | None,
    ) -> "_State":
        """Return the parts that survive the loss; raise `StateLost` if no node has some layer."""
        n_slots = slots_of([*templates.values(), *(pipeline.template for pipeline in pipelines)])
        if layer_bytes is None or not (pipelines or held):
            return cls({}, n_slots)
        before = held_parts(pipelines, n_slots) if held is None else held_by_layers(held, n_slots)
        after = {gpu: parts for gpu, parts in before.items() if gpu.node not in gone}
        missing = set(range(len(layer_bytes))) - {layer for layer, _ in frozenset().union(*after.values())}
        if missing:
            raise StateLost(missing)
        return cls(after, n_slots)

    def layers_of(self) -> dict[int, frozenset[int]]:
        """Return the layers whose state each node has."""
        layers: dict[int, set[int]] = {}
        for gpu, parts in self.held.items():
            layers.setdefault(gpu.node, set()).update(layer for layer, _ in parts)
        return {node: frozenset(held) for node, held in layers.items()}

    def copies(self, plan: HybridPlan, job: Job) -> tuple[Copy, ...]:
        """Return the copies that a plan needs."""
        if not self.held:
            return ()
        needed = held_parts(plan.pipelines, self.n_slots)
        return copy_plan(self.held, needed, job.layer_bytes, self.n_slots, job.hosts)


def _rearranged(
    job: Job, pipelines: Sequence[Pipeline], away: frozenset[int], joined: tuple[int, ...], f: int
) -> Arrangement:
    """Regroup; choose anew if nodes join, or if regrouping leaves too few pipelines or exposed layers."""
    staying = tuple(node for pipeline in pipelines for node in pipeline.nodes if node not in away)
    regrouped = None if joined else _regrouped(job, pipelines, away, f)
    if regrouped is not None and not is_exposed(job, regrouped):
        return regrouped
    nodes = (*staying, *joined)
    # If no plan uses all nodes, nodes wait from the end on, so joiners before members.
    for n_used in range(len(nodes), 0, -1):
        anew = arranged_anew(job, nodes[:n_used], f)
        if regrouped is not None and (anew is None or is_exposed(job, anew)):
            return regrouped
        if anew is not None:
            kinds = ("join",) if n_used > len(staying) else ("re-plan",)
            return replace(anew, kinds=kinds, waiting=nodes[n_used:])
    sizes = ", ".join(map(str, sorted(job.templates)))
    raise InfeasiblePlanError(
        f"no plan of {f + 1} or more pipelines has {len(nodes)} nodes and {job.n_microbatches} microbatches; "
        f"there are templates for {sizes} nodes"
    )


def _regrouped(job: Job, pipelines: Sequence[Pipeline], away: frozenset[int], f: int) -> Arrangement | None:
    """Regroup with few moves; None if that leaves too few pipelines, or one without a template."""
    outcome = regroup([pipeline.nodes for pipeline in pipelines], away, job.n0)
    groups: list[tuple[int, ...]] = []
    for group in outcome.groups:
        parts = split_group(group, job.templates)
        if parts is None:
            return None
        groups += parts
    if not f < len(groups) <= job.n_microbatches:
        return None
    kinds = outcome.kinds + (("split",) if len(groups) > len(outcome.groups) else ())
    templates = tuple(job.templates[len(group)] for group in groups)
    return spread(job, Arrangement(templates, tuple(groups), kinds))


def _check(
    pipelines: Sequence[Pipeline],
    lost: Collection[int],
    joined: Collection[int],
    drained: Collection[int],
    templates: Mapping[int, PipelineTemplate],
    layer_bytes: Sequence[int] | None,
) -> None:
    """Reject nodes in two places or in none, and templates of another model."""
    nodes = [node for pipeline in pipelines for node in pipeline.nodes]
    twice = sorted(node for node, times in Counter([*nodes, *joined]).items() if times > 1)
    if twice:
        raise InputError(f"node(s) {twice} twice in pipelines and joiners; expected each node once")
    for name, changed in (("lost", lost), ("drained", drained)):
        unknown = sorted(set(changed) - set(nodes))
        if unknown:
            raise InputError(f"{name} node(s) {unknown}; expected nodes of a pipeline, {sorted(nodes)}")
    both = sorted(set(lost) & set(drained))
    if both:
        raise InputError(f"node(s) {both} both lost and drained; expected one of them")
    all_templates = [*templates.values(), *(pipeline.template for pipeline in pipelines)]
    layers = {template.n_layers for template in all_templates}
    if layer_bytes is not None and layers != {len(layer_bytes)}:
        raise InputError(
            f"state of {len(layer_bytes)} layer(s), templates of {sorted(layers)}; expected equal numbers"
        )
