"""One process of a resilient job: its stage of a plan, the sums with others, and the layers that it holds."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from makespan.errors import InputError
from makespan.oobleck.planning import HybridPlan
from makespan.oobleck.runtime._chain import load_chain
from makespan.oobleck.runtime._job import ChainJob
from makespan.oobleck.runtime._layers import HeldLayers, State
from makespan.oobleck.runtime._links import Links, LostPeerError
from makespan.oobleck.runtime._passes import StagePasses, StagePlace, type_name
from makespan.oobleck.runtime._plans import check_plan
from makespan.oobleck.runtime._reduction import all_reduce, buckets, classes, ordered_sums, sum_groups

__all__ = ["IterationFacts", "StageExecutor", "stage_place"]

_FACTS, _STATE = 32, 33


@dataclass(frozen=True, slots=True)
class IterationFacts:
    """What is known of an iteration before its step, the same in every process but for the number of sums.

    Parameters
    ----------
    loss
        Mean over all microbatches.
    gradient_norm
        Of all gradients together, before it was limited; None without a limit.
    n_sums
        Sums of gradients in which this process took part.
    """

    loss: float
    gradient_norm: float | None
    n_sums: int


def stage_place(plan: HybridPlan, node: int) -> tuple[int, StagePlace]:
    """Return the pipeline of a node by its number, and the place of its stage there."""
    start = 0
    for number, one in enumerate(plan.pipelines):
        if node in one.nodes:
            stage, count = one.nodes.index(node), len(one.nodes)
            return number, StagePlace(
                stage, count, one.template.stages[stage].layers, range(start, start + one.n_microbatches),
                one.nodes[stage - 1] if stage else None, one.nodes[stage + 1] if stage + 1 < count else None,
            )  # fmt: skip
        start += one.n_microbatches
    raise InputError(f"node {node}; accepted: one of the plan, {', '.join(map(str, plan.nodes))}")


class StageExecutor:
    """What a process computes, and with whom; which iteration and which plan it is told from outside.

    An iteration is `compute`, `reduce`, and, once all processes are known to have done both, `apply`. Until
    `apply` nothing that lasts has changed: whoever was interrupted calls `disconnect`, then `connect` with
    another plan, and repeats the iteration, with the same result bit by bit where the sums are ordered and
    the plan gives the pipelines the same microbatches. `apply` needs nobody else and fails for no reason that
    lies with others.

    `connect`, `compute`, `reduce`, `send_layer` and `receive_layer` raise `LostPeerError` when a process with
    which they were concerned is gone or has disconnected, within milliseconds of it, whatever they waited
    for. Then, or whenever the plan shall change, `disconnect`: it drops every group, work and activation, so
    that the sockets close and others who wait for this process are told in turn. It waits for nobody, may be
    called twice. The error may be kept; it refers to nothing that keeps a socket open. Any other exception is
    no loss of a peer but a mistake in the model or the plan.

    What is held stays over any number of plans. All calls come from one thread.

    Parameters
    ----------
    job
        What is trained.
    device
        ``cpu`` (gloo) or ``cuda`` (NCCL, which has not been tried).
    announce
        Called with ``forward`` and ``backward`` before each pass of a microbatch, with ``reduction`` before
        each sum of gradients.
    timeout_s
        Longest wait for another process [s], a last resort: losses are noticed by the end of connections.
    meet_s
        Longest time in which the processes of a plan build their groups [s]; None for ``timeout_s``.
    """

    def __init__(
        self,
        job: ChainJob,
        device: str = "cpu",
        announce: Callable[[str], object] = lambda phase: None,
        timeout_s: float = 300.0,
        meet_s: float | None = None,
    ) -> None:
        self.job, self.chain = job, load_chain(job)
        self._device, self._announce, self._timeout_s = torch.device(device), announce, timeout_s
        self._meet_s = meet_s
        self._held = HeldLayers(job, self.chain, self._device)
        self._links: Links | None = None
        self._passes: StagePasses | None = None
        self._losses: list[float] = []
        self._iteration, self._is_reduced = -1, False

    @property
    def n_layers(self) -> int:
        """Number of layers of the model."""
        return self.chain.n_layers

    @property
    def layers(self) -> tuple[int, ...]:
        """Return the layers that are held, ascending."""
        return tuple(sorted(self._held.modules))

    @property
    def stage_layers(self) -> range:
        """Return the layers of the stage under the plan to which this process is connected."""
        return range(0) if self._passes is None else self._place.layers

    def hold(self, layers: Iterable[int]) -> None:
        """Hold further layers, with the weights of the start; those that are held stay as they are."""
        self._held.hold(layers)

    def keep(self, layers: Iterable[int]) -> None:
        """Drop all layers but these."""
        self._held.keep(layers)

    def layer_state(self, layer: int) -> State:
        """Return weights, buffers and optimizer state of a layer by name; no copy, `apply` changes it."""
        return self._held.state(layer)

    def unsaved_buffers(self, layer: int) -> list[str]:
        """Return the names of the buffers of a layer that its ``state_dict`` leaves out."""
        return self._held.unsaved_buffers(layer)

    def load_layer_state(self, layer: int, state: Mapping[str, Tensor]) -> None:
        """Take over, as a copy, what `layer_state` returned anywhere; the layer must be held."""
        self._held.load(layer, state)

    def checksum(self, layer: int) -> str:
        """Return the SHA-256 of the state of a layer, equal in all processes that hold it."""
        return self._held.checksum(layer)

    def connect(self, plan: HybridPlan, node: int, store: Any, also: Sequence[int] = ()) -> None:
        """Meet the other processes of a plan, and prepare to run the stage of a node.

        Parameters
        ----------
        plan
            The pipelines; each node runs one stage on one device, or an `InputError` says what is else.
        node
            That of this process.
        store
            Of `torch.distributed`, one that no other generation uses; who closes it releases those who wait.
        also
            Nodes that are no part of the plan and take part in copies only; the same for all.
        """
        check_plan(plan, self.n_layers, self.job.n_microbatches)
        self.disconnect()
        ties = self.chain.tied
        self._buckets = buckets(plan, self.n_layers, ties, self.job.bucketed)
        groups = sum_groups(self._buckets) if self.job.reduction == "allreduce" else []
        members = [*plan.nodes, *also]
        self._links = Links(members, node, groups, store, self._device, self._timeout_s, self._meet_s)
        self._plan, self._has_computed = plan, False
        if node in plan.nodes:
            self._pipeline, self._place = stage_place(plan, node)
            self._passes = StagePasses(
                self.job, self.chain, self._held, self._place, self._links, self._announce
            )

    def disconnect(self) -> None:
        """Drop all that ties this process to others, and the gradients; what is held stays."""
        self._passes, self._is_reduced = None, False
        self._losses = []
        if self._links is not None:
            self._links.close()
        self._links = None
        self._held.clear_gradients()

    def send_layer(self, layer: int, node: int) -> None:
        """Send the state of a layer to a member, who calls `receive_layer`; returns when it is sent.

        Copies of a plan are done in one order by all, each process those of which it is a part.
        """
        links, state = self._connected(), self._held.state(layer)
        shapes = [(name, tuple(one.shape), type_name(one), one.device.type) for name, one in state.items()]
        sent = links.send_values(shapes, node, _STATE)
        sent += [links.send(one.contiguous().to(self._device), node, _STATE) for one in state.values()]
        for transfer in sent:
            transfer.finish()

    def receive_layer(self, layer: int, node: int) -> None:
        """Hold a layer and take over the state that a member sends with `send_layer`."""
        links, found = self._connected(), State()
        for name, shape, kind, place in links.receive_values(node, _STATE):
            empty = torch.empty(shape, dtype=getattr(torch, kind), device=self._device)
            found[name] = links.receive(empty, node, _STATE).to(place)
        self._held.hold([layer])
        self._held.load(layer, found)

    def compute(self, iteration: int) -> None:
        """Run all passes of an iteration in this stage, and leave the sums of its gradients."""
        if self._passes is None:
            raise InputError("this process is part of no plan; accepted: compute after connect")
        if missing := set(self._place.layers) - set(self.layers):
            raise InputError(f"layers {sorted(missing)} of the stage are not held; accepted: all of them")
        self._held.clear_gradients()
        self._is_reduced = False
        layers, is_first = self._place.layers, not self._has_computed
        before, names = self._held.buffers(layers) if is_first else {}, self._held.names(layers)
        self._losses, self._iteration = self._passes.run(iteration, checks=is_first), iteration
        self._held.check_names(names, layers)
        self._held.check_buffers(before)
        self._held.check_gradients(layers)
        self._has_computed = True

    def reduce(self) -> IterationFacts:
        """Add up the gradients over all pipelines, and limit their norm; also the loss."""
        links, job = self._connected(), self.job
        weights = {layer: self._held.parameters(layer) for layer in self._place.layers}
        add_up = ordered_sums if job.reduction == "ordered" else all_reduce
        n_sums = add_up(
            self._buckets, links, weights, self.chain.tied, job.n_microbatches,
            lambda: self._announce("reduction"),
        )  # fmt: skip
        losses, squares = self._shared(links)
        norm = None
        if job.clip_norm is not None:
            norm = math.sqrt(math.fsum(squares))
            self._held.scale_gradients(self._place.layers, min(1.0, job.clip_norm / (norm + 1e-6)))
        self._is_reduced = True
        return IterationFacts(math.fsum(losses) / job.n_microbatches, norm, n_sums)

    def apply(self) -> None:
        """Do the step of the iteration that was reduced, once."""
        if not self._is_reduced:
            raise InputError("gradients are not there; accepted: apply after reduce, once, before disconnect")
        self._is_reduced = False
        self._held.step(self._place.layers, self._iteration)

    def _connected(self) -> Links:
        if self._links is None:
            raise LostPeerError("this process is connected to nobody")
        return self._links

    def _shared(self, links: Links) -> tuple[list[float], list[float]]:
        """Return the loss of each pipeline and the squared norm of each layer's gradients.

        Each of these numbers has one process that knows it, so that no order of the sum changes a bit.
        """
        n_pipelines = len(self._plan.pipelines)
        own = torch.zeros(n_pipelines + self.n_layers, dtype=torch.float64)
        if self._place.following is None:
            own[self._pipeline] = math.fsum(self._losses)
        if self._pipeline == 0 and self.job.clip_norm is not None:
            again = {weight for one in classes(self.chain.tied) for weight in one[1:]}
            for layer in self._place.layers:
                own[n_pipelines + layer] = self._held.squared_norm(layer, again)
        first, *others = self._plan.nodes
        facts = own.to(self._device)
        if links.own == first:
            for node in others:
                facts += links.receive(torch.empty_like(facts), node, _FACTS)
            for transfer in [links.send(facts, node, _FACTS) for node in others]:
                transfer.finish()
        else:
            links.send(facts, first, _FACTS).finish()
            facts = links.receive(torch.empty_like(facts), first, _FACTS)
        known: list[float] = facts.tolist()
        return known[:n_pipelines], known[n_pipelines:]
