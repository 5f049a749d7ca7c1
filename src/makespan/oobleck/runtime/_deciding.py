"""What the coordinator asks of planning: who trains what from now on, and who sends which layer."""

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from makespan.errors import InfeasiblePlanError, LostWorkerError
from makespan.oobleck.planning import (
    HybridPlan,
    Instantiation,
    ModelProfile,
    PipelineTemplate,
    covering_templates,
    distribute,
)
from makespan.oobleck.reconfiguration import InsufficientNodes, Reconfiguration, StateLost, reconfigure
from makespan.oobleck.runtime._plans import plan_values
from makespan.oobleck.runtime._protocol import Decision, Halt, Situation

__all__ = ["Decider"]


@dataclass(slots=True)
class Decider:
    """Decides by `reconfigure`, from what each node has.

    Parameters
    ----------
    profile, templates
        Times of the layers; templates by number of nodes, to which those of more nodes are added.
    n_nodes, f, n0, n_microbatches
        Nodes for which there are templates, losses at once to be survived, least nodes of a pipeline, and
        microbatches of an iteration.
    layer_bytes
        State of each layer.
    policy
        What is done below (f + 1) n0 nodes; ``relaunch`` ends the run at any loss.
    first_sizes
        Nodes of the pipelines at the start; none for the best plan.
    origin
        Directory of the checkpoint from which layers come that nobody has at the start; None for new ones.
    hosts
        Host of each node, as they say hello.
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
    origin: str | None = None
    hosts: MutableMapping[int, str] = field(default_factory=dict)
    latest: Reconfiguration | None = None

    def __call__(self, situation: Situation[HybridPlan]) -> Decision[HybridPlan] | Halt:
        """Decide; a halt says whether all layers are still there."""
        held = {node: frozenset(map(int, layers)) for node, layers in situation.holdings.items()}
        whole = set().union(*held.values()) == set(range(len(self.layer_bytes))) if held else False
        if self.policy == "relaunch" and situation.plan is not None:
            return Halt(LostWorkerError("a node was lost; going on from the last checkpoint"), saves=False)
        try:
            found = self._found(situation, held)
        except StateLost as error:
            return Halt(error, saves=False)
        except (InsufficientNodes, InfeasiblePlanError) as error:
            return Halt(error, saves=whole)
        self.latest = found
        work = {
            "plan": plan_values(found.plan),
            "copies": [[one.layer, one.src.node, one.dst.node] for one in found.copies],
            "copies_bytes": found.copies_bytes,
            "origin": self.origin if situation.plan is None else None,
            "is_start": situation.plan is None,
            "kinds": list(found.kinds),
            "f": found.f,
        }
        return Decision(found.plan, work, found.waiting)

    def _found(self, situation: Situation[HybridPlan], held: Mapping[int, frozenset[int]]) -> Reconfiguration:
        pipelines = () if situation.plan is None else situation.plan.pipelines
        before, there = {node for one in pipelines for node in one.nodes}, set(situation.members)
        leaving = set(situation.leaving)
        n_staying = len(there - leaving)
        if n_staying > self.n_nodes:
            self.templates |= covering_templates(self.profile, n_staying, self.f, self.n0)
            self.n_nodes = n_staying
        if situation.plan is None and sum(self.first_sizes) == n_staying:
            return self._first(sorted(there - leaving))
        hosts = {node: self.hosts[node] for node in there if node in self.hosts}
        return reconfigure(
            pipelines,
            sorted(before - there),
            sorted(there - before - leaving),
            self.templates,
            self.f,
            self.n0,
            self.n_microbatches,
            layer_bytes=self.layer_bytes,
            drained=sorted(before & leaving),
            held=None if situation.plan is None else held,
            hosts=hosts,
            policy="degrade" if self.policy == "degrade" else "stop",
            profile=self.profile if self.profile.layers[0].allreduce_across_nodes_s else None,
        )

    def _first(self, nodes: Sequence[int]) -> Reconfiguration:
        """Begin with pipelines of given sizes."""
        if unknown := sorted(set(self.first_sizes) - set(self.templates)):
            known = ", ".join(map(str, sorted(self.templates)))
            raise InfeasiblePlanError(f"pipelines of {unknown} nodes; there are templates for {known}")
        templates = tuple(self.templates[size] for size in self.first_sizes)
        counts = distribute(templates, self.n_microbatches)
        if counts is None:
            raise InfeasiblePlanError(f"{self.n_microbatches} microbatches for {len(templates)} pipelines")
        return Reconfiguration(
            Instantiation(templates, counts, 0.0).on(nodes), ("join",), (), min(self.f, len(templates) - 1)
        )
