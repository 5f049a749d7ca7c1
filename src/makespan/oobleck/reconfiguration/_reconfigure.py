"""From pipelines, losses and joiners to the pipelines that go on, and the state that must move for that."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NoReturn

from makespan.errors import InfeasiblePlanError, InputError
from makespan.oobleck.planning import HybridPlan, ModelProfile, Pipeline, PipelineTemplate, distribute
from makespan.oobleck.reconfiguration._choosing import (
    Arrangement,
    Job,
    arranged_anew,
    is_exposed,
    split_group,
    spread,
)
from makespan.oobleck.reconfiguration._errors import InsufficientNodes, StateLost
from makespan.oobleck.reconfiguration._placing import Hosts, exposed_layers
from makespan.oobleck.reconfiguration._regroup import regroup
from makespan.oobleck.reconfiguration._state import (
    Copy,
    Holdings,
    copy_plan,
    held_by_layers,
    held_parts,
    slots_of,
)

__all__ = ["Reconfiguration", "reconfigure"]

Policy = Literal["stop", "degrade"]


@dataclass(frozen=True, slots=True)
class Reconfiguration:
    """What becomes of a job after a loss, a drain, or when nodes join.

    Parameters
    ----------
    plan
        Pipelines with nodes and microbatches.
    kinds
        What was done, each thing once: drop (a whole pipeline is gone), re-instantiate, borrow, merge, split
        (of more nodes than a template has), re-plan, join, drain, spread (over hosts).
    copies
        State that nodes must get before they go on.
    f
        Losses at once that can be survived now; less than asked for where the job goes on degraded.
    waiting
        Nodes for which no plan of the templates has a place, joiners first; they may join another time.
    exposed
        Layers that one host alone holds although there are several.
    """

    plan: HybridPlan
    kinds: tuple[str, ...]
    copies: tuple[Copy, ...]
    f: int
    waiting: tuple[int, ...] = ()
    exposed: tuple[int, ...] = ()

    @property
    def action(self) -> str:
        """Return the heaviest of the kinds, none if nothing was done."""
        return next((kind for kind in _BY_WEIGHT if kind in self.kinds), "none")

    @property
    def copies_bytes(self) -> int:
        """Return what is copied in all."""
        return sum(copy.n_bytes for copy in self.copies)


_BY_WEIGHT = ("re-plan", "join", "merge", "split", "borrow", "re-instantiate", "drop", "drain", "spread")


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
    """Find the pipelines that go on when nodes are lost, leave or join.

    Oobleck, section 5. Pipelines are regrouped with few moves. If fewer than ``f + 1`` would be left although
    the nodes are enough, or nodes join, the plan is the one within 1 % of the fastest that copies the least.

    Parameters
    ----------
    pipelines
        As they train now; none before the start.
    lost, drained, joined
        Nodes that are gone with their state, that leave but can still send, and that are new.
    templates
        By number of nodes.
    f, n0, n_microbatches
        Losses at once to survive, least nodes of a pipeline, microbatches of an iteration.
    layer_bytes, held
        State of each layer [B], None to leave out of account who holds what; layers that each node of one
        GPU holds, None for what the pipelines own.
    hosts
        Machine of each node; None if every node is one of its own.
    policy
        Below ``(f + 1) n0`` nodes: stop, or degrade and survive fewer losses.
    profile
        Times of the layers, where the wait for gradients of so many pipelines is to count.

    Raises
    ------
    StateLost, InsufficientNodes
        Nobody has some layer; fewer nodes are left than the policy accepts.
    InfeasiblePlanError, InputError
        No plan has so many nodes and microbatches; nodes are twice there, or lost and were never there.
    """
    _check(pipelines, lost, joined, drained, templates, layer_bytes)
    gone, away = frozenset(lost), frozenset(lost) | frozenset(drained)
    state = _State.left(pipelines, gone, templates, layer_bytes, held)
    n_nodes = sum(len(one.nodes) for one in pipelines) - len(away) + len(joined)
    f_now = _losses_to_survive(n_nodes, f, n0, policy)
    job = Job(templates, n0, n_microbatches, layer_bytes or (), hosts or {}, state.layers_of(), profile)
    outcome = _rearranged(job, pipelines, away, tuple(joined), f_now)
    counts = distribute(outcome.templates, n_microbatches) or ()
    plan = HybridPlan(tuple(map(Pipeline, outcome.groups, outcome.templates, counts)))
    kinds = (*outcome.kinds, *(("drain",) if drained else ()))
    exposed = exposed_layers(outcome.templates, outcome.groups, hosts) if hosts else ()
    return Reconfiguration(plan, kinds, state.copies(plan, job), f_now, outcome.waiting, exposed)


@dataclass(frozen=True, slots=True)
class _State:
    """What the GPUs that are left hold; nothing before the start, or where it is left out of account."""

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
        """Return what is left of what was held; refuse to go on where nobody has some layer."""
        n_slots = slots_of([*templates.values(), *(one.template for one in pipelines)])
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
        found: dict[int, set[int]] = {}
        for gpu, parts in self.held.items():
            found.setdefault(gpu.node, set()).update(layer for layer, _ in parts)
        return {node: frozenset(layers) for node, layers in found.items()}

    def copies(self, plan: HybridPlan, job: Job) -> tuple[Copy, ...]:
        """Return what must be sent for a plan."""
        if not self.held:
            return ()
        needed = held_parts(plan.pipelines, self.n_slots)
        return copy_plan(self.held, needed, job.layer_bytes, self.n_slots, job.hosts)


def _losses_to_survive(n_nodes: int, f: int, n0: int, policy: Policy) -> int:
    """Return how many losses so many nodes survive, at most ``f``; refuse too few of them."""
    if n_nodes >= (f + 1) * n0:
        return f
    if policy == "stop" or n_nodes < n0:
        raise InsufficientNodes(n_nodes, (f + 1) * n0 if policy == "stop" else n0)
    return n_nodes // n0 - 1


def _rearranged(
    job: Job, pipelines: Sequence[Pipeline], away: frozenset[int], joined: tuple[int, ...], f: int
) -> Arrangement:
    """Regroup, or choose anew where nodes join or regrouping does not keep what was promised."""
    staying = tuple(node for one in pipelines for node in one.nodes if node not in away)
    found = None if joined else _regrouped(job, pipelines, away, f)
    if found is not None and not is_exposed(job, found):
        return found
    nodes = (*staying, *joined)
    for n_used in range(len(nodes), 0, -1):
        anew = arranged_anew(job, nodes[:n_used], f)
        if found is not None and (anew is None or is_exposed(job, anew)):
            return found
        if anew is not None:
            kinds = ("join",) if n_used > len(staying) else ("re-plan",)
            return replace(anew, kinds=kinds, waiting=nodes[n_used:])
    return _uncovered(job, len(nodes), f)


def _uncovered(job: Job, n_nodes: int, f: int) -> NoReturn:
    """Refuse templates and batches with which no plan is possible."""
    sizes = ", ".join(map(str, sorted(job.templates)))
    raise InfeasiblePlanError(
        f"no plan of {f + 1} or more pipelines has {n_nodes} nodes and {job.n_microbatches} microbatches; "
        f"there are templates for {sizes} nodes"
    )


def _regrouped(job: Job, pipelines: Sequence[Pipeline], away: frozenset[int], f: int) -> Arrangement | None:
    """Regroup with few moves; None where that leaves too few pipelines, or some without a template."""
    found = regroup([one.nodes for one in pipelines], away, job.n0)
    groups: list[tuple[int, ...]] = []
    for group in found.groups:
        parts = split_group(group, job.templates)
        if parts is None:
            return None
        groups += parts
    if not f < len(groups) <= job.n_microbatches:
        return None
    kinds = found.kinds + (("split",) if len(groups) > len(found.groups) else ())
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
    """Refuse nodes in two places or in none, and templates of another model."""
    nodes = [node for one in pipelines for node in one.nodes]
    twice = sorted(node for node, times in Counter([*nodes, *joined]).items() if times > 1)
    if twice:
        raise InputError(f"node(s) {twice} twice in pipelines and joiners; accepted: each node once")
    for name, given in (("lost", lost), ("drained", drained)):
        unknown = sorted(set(given) - set(nodes))
        if unknown:
            raise InputError(f"{name} node(s) {unknown}; accepted: nodes of a pipeline, {sorted(nodes)}")
    both = sorted(set(lost) & set(drained))
    if both:
        raise InputError(f"node(s) {both} both lost and drained; accepted: one of them")
    layers = {one.n_layers for one in [*templates.values(), *(one.template for one in pipelines)]}
    if layer_bytes is not None and layers != {len(layer_bytes)}:
        raise InputError(
            f"state of {len(layer_bytes)} layer(s) beside templates of {sorted(layers)}; accepted: as many"
        )
