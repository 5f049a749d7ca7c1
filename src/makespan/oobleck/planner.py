"""Decisions of a resilient run: which nodes train which layers after a loss, a join or a drain."""

from collections.abc import Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from makespan.errors import InfeasiblePlanError, InputError, LostWorkerError
from makespan.oobleck.instantiation import Instantiation, distribute, estimated_time_s
from makespan.oobleck.interleaving import interleaved_templates
from makespan.oobleck.plan import Hosts, HybridPlan, PipelineTemplate
from makespan.oobleck.profile import ModelProfile
from makespan.oobleck.reconfiguration import (
    Gpu,
    InsufficientNodes,
    Policy,
    Reconfiguration,
    StateLost,
    copy_plan,
    reconfigure,
    reroute,
    spread_nodes,
    tolerated,
)
from makespan.oobleck.requests import WORK, Work
from makespan.oobleck.shards import (
    Piece,
    Sizes,
    holders,
    needed_pieces,
    pieces_of,
    read_holdings,
    state_nodes,
    whole_layers,
)
from makespan.oobleck.templates import covering_templates
from makespan.runtime.protocol import Abort, ClusterState, Decision

Recovery = Literal["reconfigure", "reroute"]
STATES_PER_WEIGHT = 2
"""Bytes of optimizer state per byte of a weight by which copies are planned: those of two moments."""


def check_first_sizes(
    templates: Mapping[int, PipelineTemplate], n_nodes: int, n_microbatches: int, first_sizes: Sequence[int]
) -> None:
    """Check that a run can begin with pipelines of these sizes; an `InputError` says what is wrong."""
    sizes = f"first_sizes are {','.join(map(str, first_sizes))}"
    if sum(first_sizes) != n_nodes:
        raise InputError(f"{sizes}; expected {n_nodes} nodes in total")
    if not set(first_sizes) <= set(templates):
        raise InputError(f"{sizes}; expected {', '.join(map(str, sorted(templates)))} nodes of a pipeline")
    if len(first_sizes) > n_microbatches:
        raise InputError(f"{sizes}; expected at most {n_microbatches} pipelines, one for each microbatch")


def reroutable_sizes(
    templates: Mapping[int, PipelineTemplate],
    n_nodes: int,
    f: int,
    n_microbatches: int,
    first_sizes: Sequence[int] = (),
) -> tuple[int, ...]:
    """Return the nodes of equal pipelines among which microbatches can be re-routed, the fastest ones.

    Of equally fast ones, the most pipelines: a lost node then has the most peers.

    Parameters
    ----------
    templates, n_nodes, f, n_microbatches
        Templates by number of nodes, nodes to use, losses to survive, and microbatches of an iteration.
    first_sizes
        Sizes that are wanted; none for the best ones.

    Raises
    ------
    InputError
        The sizes cannot re-route a loss, or none can. That takes ``f + 2`` equal pipelines or more: ``f + 1``
        nodes of each stage must be left.
    """
    needed = f"expected f + 2 = {f + 2} or more equal pipelines, so that f + 1 nodes of a stage are left"
    wanted = tuple(first_sizes)
    if wanted:
        text = ",".join(map(str, wanted))
        if len(set(wanted)) > 1 or len(wanted) < f + 2:
            raise InputError(f"recovery is 'reroute' and first_sizes are {text}; {needed}")
        check_first_sizes(templates, n_nodes, n_microbatches, wanted)
        return wanted
    times: dict[tuple[int, ...], float] = {}
    for count in range(f + 2, min(n_nodes, n_microbatches) + 1):
        size = n_nodes // count
        if size * count == n_nodes and size in templates:
            each = (templates[size],) * count
            if (batches := distribute(each, n_microbatches)) is not None:
                times[(size,) * count] = estimated_time_s(each, batches, "1f1b")
    if not times:
        where = f"{n_nodes} nodes and {n_microbatches} microbatches"
        raise InputError(f"recovery is 'reroute' with {where}; {needed}")
    return min(times, key=lambda sizes: (times[sizes], -len(sizes)))


def piece_copies(
    plan: HybridPlan,
    held: Mapping[int, Collection[Piece]],
    sizes: Sizes,
    states: Mapping[tuple[int, int], Collection[int]],
    hosts: Hosts,
) -> tuple[tuple[tuple[str, int, int], ...], int]:
    """Return the pieces that must be sent before a plan can begin, and their bytes [B].

    Senders are chosen as for whole layers, by `copy_plan`.

    Parameters
    ----------
    plan, held, sizes
        The plan, and the pieces that each node has, which must together be all; sizes of the weights.
    states, hosts
        Nodes that are to hold the optimizer state of each weight, and the machine of each node.

    Returns
    -------
    tuple
        Copies, each with the text of the piece, the node that sends it, and the node that receives it; bytes.
    """
    pieces = sorted({piece for layer, each in sizes.items() for piece in pieces_of(layer, len(each))})
    numbers = {piece: number for number, piece in enumerate(pieces)}
    factors = {"frame": 0, "weight": 1, "state": STATES_PER_WEIGHT}
    n_bytes = [factors[kind] * sizes[layer][weight] if factors[kind] else 0 for layer, kind, weight in pieces]
    needed = needed_pieces(plan, sizes, states)
    before, after = (
        {Gpu(node, 0): frozenset((numbers[piece], 0) for piece in each) for node, each in of_nodes.items()}
        for of_nodes in (held, needed)
    )
    copies = copy_plan(before, after, n_bytes, 1, hosts)
    sent = tuple((pieces[copy.layer].text(), copy.src.node, copy.dst.node) for copy in copies)
    return sent, sum(copy.n_bytes for copy in copies)


@dataclass(slots=True)
class ReconfigurationPlanner:
    """Decides which nodes train and send which layers, by `reconfigure` from the layers that nodes hold.

    Parameters
    ----------
    profile, templates
        Times of the layers; templates by number of nodes, extended when the run grows beyond them.
    n_nodes, f, n0, n_microbatches
        Nodes for which there are templates, simultaneous losses to survive, fewest nodes of a pipeline, and
        microbatches of an iteration.
    layer_bytes
        State of each layer.
    policy
        Reaction to fewer than (f + 1) n0 nodes; ``relaunch`` ends the run at any loss.
    first_sizes
        Nodes of the pipelines at the start; none for the best plan.
    origin
        Directory of the checkpoint that has the layers at the start; None to initialise them.
    hosts
        Host of each node, from its `Hello`.
    recovery
        Whether losses are answered by `reconfigure` alone, or by `reroute` where it can.
    is_divided
        Whether the optimizer state of a layer is divided among its nodes, which then tell what they hold in
        pieces (`makespan.oobleck.shards`).
    interleave
        Stages of each node, as in the templates.
    """

    profile: ModelProfile
    templates: dict[int, PipelineTemplate]
    n_nodes: int
    f: int
    n0: int
    n_microbatches: int
    layer_bytes: Sequence[int]
    policy: Literal["stop", "degrade", "relaunch"] = "stop"
    first_sizes: Sequence[int] = ()
    origin: Path | None = None
    hosts: MutableMapping[int, str] = field(default_factory=dict)
    recovery: Recovery = "reconfigure"
    is_divided: bool = False
    interleave: int = 1
    latest: Reconfiguration | None = None

    def __call__(self, state: ClusterState[HybridPlan]) -> Decision[HybridPlan] | Abort:
        """Decide; a halt saves a checkpoint first if every layer is still held by some node."""
        pieces: dict[int, frozenset[Piece]] = {}
        sizes: Sizes = {}
        if self.is_divided:
            pieces, sizes = read_holdings(state.holdings)
            held = whole_layers(pieces, sizes)
        else:
            held = {node: frozenset(map(int, layers)) for node, layers in state.holdings.items()}
        whole = set().union(*held.values()) == set(range(len(self.layer_bytes))) if held else False
        if self.policy == "relaunch" and state.plan is not None:
            return Abort(LostWorkerError("a node was lost; resuming from the last checkpoint"), saves=False)
        try:
            outcome = self._reconfigured(state, held)
        except StateLost as error:
            return Abort(error, saves=False)
        except (InsufficientNodes, InfeasiblePlanError) as error:
            return Abort(error, saves=whole)
        self.latest = outcome
        copies, n_bytes = outcome.copies, outcome.copies_bytes
        of_pieces: tuple[tuple[str, int, int], ...] = ()
        states: dict[tuple[int, int], tuple[int, ...]] = {}
        hosts = {node: self.hosts[node] for node in outcome.plan.nodes if node in self.hosts}
        if self.is_divided and state.plan is not None:
            copies = ()
            states = holders(outcome.plan, sizes, outcome.f + 1, hosts, state_nodes(pieces))
            of_pieces, n_bytes = piece_copies(outcome.plan, pieces, sizes, states, hosts)
        work = Work(
            plan=outcome.plan.pipelines,
            copies=tuple((copy.layer, copy.src.node, copy.dst.node) for copy in copies),
            copies_bytes=n_bytes,
            origin=self.origin if state.plan is None else None,
            is_start=state.plan is None,
            kinds=tuple(outcome.kinds),
            f=outcome.f,
            lost=outcome.plan.lost,
            fallback=outcome.fallback,
            pieces=of_pieces,
            holders=tuple((*weight, on) for weight, on in sorted(states.items())),
            hosts=tuple(sorted(hosts.items())) if self.is_divided else (),
        )
        return Decision(outcome.plan, WORK.dump_python(work, mode="json"), outcome.waiting)

    def _reconfigured(
        self, state: ClusterState[HybridPlan], held: Mapping[int, frozenset[int]]
    ) -> Reconfiguration:
        pipelines = () if state.plan is None else state.plan.pipelines
        before, there = {node for pipeline in pipelines for node in pipeline.nodes}, set(state.members)
        leaving = set(state.leaving)
        n_staying = len(there - leaving)
        if n_staying > self.n_nodes:
            more = covering_templates(self.profile, n_staying, self.f, self.n0)
            self.templates |= interleaved_templates(more, self.profile, self.interleave)
            self.n_nodes = n_staying
        if state.plan is None and sum(self.first_sizes) == n_staying:
            return self._first(sorted(there - leaving))
        hosts = {node: self.hosts[node] for node in there if node in self.hosts}
        policy: Policy = "degrade" if self.policy == "degrade" else "stop"
        joined, fallback = sorted(there - before - leaving), ""
        if self.recovery == "reroute" and state.plan is not None:
            f_now = tolerated(n_staying, self.f, self.n0, policy)
            try:
                if joined:
                    raise InfeasiblePlanError(f"node(s) {', '.join(map(str, joined))} join")
                drained = sorted(before & leaving)
                return reroute(state.plan, before - there, f_now, held, drained=drained, hosts=self.hosts)
            except InfeasiblePlanError as error:
                fallback = str(error)
        outcome = reconfigure(
            pipelines,
            sorted(before - there),
            joined,
            self.templates,
            self.f,
            self.n0,
            self.n_microbatches,
            layer_bytes=self.layer_bytes,
            drained=sorted(before & leaving),
            held=None if state.plan is None else held,  # at the start no layer is held yet
            hosts=hosts,
            policy=policy,
            profile=self.profile if self.profile.layers[0].allreduce_across_nodes_s else None,
        )
        return replace(outcome, fallback=fallback)

    def _first(self, nodes: Sequence[int]) -> Reconfiguration:
        """Return a first plan whose pipelines have the sizes of the option."""
        if unknown := sorted(set(self.first_sizes) - set(self.templates)):
            known = ", ".join(map(str, sorted(self.templates)))
            raise InfeasiblePlanError(f"pipelines of {unknown} nodes; there are templates for {known}")
        templates = tuple(self.templates[size] for size in self.first_sizes)
        counts = distribute(templates, self.n_microbatches)
        if counts is None:
            raise InfeasiblePlanError(f"{self.n_microbatches} microbatches for {len(templates)} pipelines")
        plan = Instantiation(templates, counts, 0.0).on(nodes)
        hosts = {node: self.hosts[node] for node in nodes if node in self.hosts}
        groups = [pipeline.nodes for pipeline in plan.pipelines]
        spread = spread_nodes(templates, groups, hosts, {}, self.layer_bytes) if hosts else groups
        pipelines = [
            replace(pipeline, nodes=tuple(group))
            for pipeline, group in zip(plan.pipelines, spread, strict=True)
        ]
        return Reconfiguration(HybridPlan(tuple(pipelines)), ("join",), (), min(self.f, len(templates) - 1))
