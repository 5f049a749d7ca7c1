"""Execution of a pipeline stage: instructions, layers, peer groups, passes, and the sum over pipelines.

With ordered sums the bits of an iteration depend only on the division of microbatches among pipelines, not on
the cut into stages: every layer is seeded by its position, tensors have the same layout at every boundary,
and gradients are added in the order of the pipelines.
"""

import hashlib
import importlib
import json
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from itertools import accumulate, groupby, pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from makespan.errors import InputError
from makespan.oobleck.chain import (
    Chain,
    build_layer,
    build_optimizer,
    check_repeated,
    draws_kept,
    load_chain,
    load_microbatch,
    seed_layer,
)
from makespan.oobleck.interleaving import interleaved_passes
from makespan.oobleck.job import ChainJob, PassOrder
from makespan.oobleck.peers import peer_schedule
from makespan.oobleck.plan import Hosts, HybridPlan, Pipeline, check_plan, owners
from makespan.oobleck.rerouting import ScheduledPass
from makespan.oobleck.shards import Piece, holders, needed_pieces, pieces_of, senders
from makespan.plans import one_f_one_b_order, zero_bubble_order
from makespan.runtime.links import LostPeerError
from makespan.training import refuse_plain_clipping
from makespan.training.bits import has_equal_bits, raw_bytes
from makespan.training.split import SplitBackward

# --- Instructions of a stage ------------------------------------------------------------------------

Kind = Literal["load", "recv_act", "fwd", "send_act", "recv_grad", "bwd", "send_grad", "bwd_weights"]
"""Under ``zero-bubble``, ``bwd`` is the first part of a backward pass, and ``bwd_weights`` the second."""
_KIND_OF_PASS: dict[str, Kind] = {"F": "fwd", "B": "bwd", "W": "bwd_weights"}
_UNSENT = 2
"""Free buffers that are not used yet, because their last tensor may not be sent: reuse waits for that."""
_ORDERS = {"1f1b": one_f_one_b_order, "zero-bubble": zero_bubble_order}


@dataclass(frozen=True, slots=True)
class Instruction:
    """Operation on a microbatch, whose activations are in a buffer, in one of the stages of the node."""

    kind: Kind
    microbatch: int
    buffer: int
    chunk: int = 0


def n_buffers(stage: int, n_stages: int, n_microbatches: int, pass_order: PassOrder = "1f1b") -> int:
    """Return the number of microbatches that a stage keeps between their passes."""
    return max(2, min(n_stages - stage if pass_order == "1f1b" else n_stages, n_microbatches))


def instructions(
    stage: int, n_stages: int, n_microbatches: int, pass_order: PassOrder = "1f1b"
) -> Iterator[Instruction]:
    """Yield the instructions of a stage in order, without sums over pipelines and steps.

    Every transfer may block until the other side takes part in it. So if a stage sends an activation and
    receives a gradient between two passes, it begins with the transfer that its neighbour begins with.
    """
    room = n_buffers(stage, n_stages, n_microbatches, pass_order)
    first, last = stage == 0, stage == n_stages - 1
    passes_of = _ORDERS[pass_order]
    passes = passes_of(stage, n_stages, n_microbatches)
    beyond = [] if last else passes_of(stage + 1, n_stages, n_microbatches)
    for before, after in pairwise([("", -1), *passes, ("", -1)]):
        around: list[tuple[Kind, int]] = []
        if before[0] == "B" and not first:
            around.append(("send_grad", before[1]))
        with_next: list[tuple[Kind, int]] = []
        if after[0] == "B" and not last:
            with_next.append(("recv_grad", after[1]))
        if before[0] == "F" and not last:
            with_next.append(("send_act", before[1]))
        if len(with_next) == 2 and beyond.index(before) < beyond.index(after):
            with_next.reverse()
        around += with_next
        if after[0] == "F" and (first or last):
            around.append(("load", after[1]))
        if after[0] == "F" and not first:
            around.append(("recv_act", after[1]))
        if after[0]:
            around.append((_KIND_OF_PASS[after[0]], after[1]))
        for kind, microbatch in around:
            yield Instruction(kind, microbatch, microbatch % room)


def rerouted_instructions(plan: HybridPlan, node: int, pass_order: PassOrder) -> list[Instruction]:
    """Return the instructions of a node of a plan with lost nodes, with microbatches of all pipelines.

    See `scheduled_instructions`.
    """
    schedule, starts = peer_schedule(plan, pass_order == "zero-bubble"), _starts(plan)
    return scheduled_instructions(
        schedule.steps,
        node,
        len(plan.pipelines[0].nodes),
        lambda step: starts[step.pipeline] + step.microbatch,
        lambda step: schedule.paths[step.pipeline, step.microbatch],
    )


def interleaved_instructions(pipeline: Pipeline, node: int, pass_order: PassOrder) -> list[Instruction]:
    """Return the instructions of a node that runs several stages of a pipeline, with those of all of them.

    See `scheduled_instructions`.
    """
    template = pipeline.template
    steps = interleaved_passes(template, pipeline.n_microbatches, pass_order == "zero-bubble")
    path = pipeline.nodes * template.interleave
    return scheduled_instructions(
        steps, node, template.n_nodes, lambda step: step.microbatch, lambda step: path
    )


def scheduled_instructions(
    steps: Iterable[ScheduledPass],
    node: int,
    n_nodes: int,
    number_of: Callable[[ScheduledPass], int],
    path_of: Callable[[ScheduledPass], Sequence[int]],
) -> list[Instruction]:
    """Return the instructions of a node in a schedule of all nodes.

    The passes and transfers of all nodes have one order, and every node carries out its own in this order.
    The order is that of their times in the schedule: a transfer comes where the pass ends that makes its
    tensor, and so before the pass that needs it. Nothing can wait for ever, even if every transfer blocks
    until the other side takes part in it: of all that is not done, those who carry out the first have done
    everything before it.

    Parameters
    ----------
    steps
        All passes.
    node, n_nodes
        The node, and nodes of a pipeline; stage k is the stage k div ``n_nodes`` of its node.
    number_of, path_of
        Number of the microbatch of a pass, and the nodes that run it, stage by stage.
    """
    timed: list[tuple[tuple[float, int, str, int, int], Kind, int, int]] = []
    for step in steps:
        path, number, chunk = path_of(step), number_of(step), step.stage // n_nodes
        last = len(path) - 1
        tie = (step.kind, step.stage, number)  # equal times have the same order on all nodes
        begins, ends = (step.start_s, 1, *tie), (step.end_s, 0, *tie)
        further = step.stage + {"F": 1, "B": -1, "W": 0}[step.kind]
        is_passed_on = further != step.stage and 0 <= further <= last
        if path[step.stage] == node:
            if step.kind == "F" and step.stage in (0, last):
                timed.append((begins, "load", number, chunk))
            timed.append((begins, _KIND_OF_PASS[step.kind], number, chunk))
            if is_passed_on:
                timed.append((ends, "send_act" if step.kind == "F" else "send_grad", number, chunk))
        elif is_passed_on and path[further] == node:
            kind: Kind = "recv_act" if step.kind == "F" else "recv_grad"
            timed.append((ends, kind, number, further // n_nodes))
    timed.sort(key=lambda each: each[0])
    # A microbatch keeps its buffer from its first instruction in a stage to its last one there.
    last_at = {(number, chunk): place for place, (_, _, number, chunk) in enumerate(timed)}
    buffers: dict[tuple[int, int], int] = {}
    free, n_used, order = deque[int](), 0, list[Instruction]()
    for place, (_, kind, number, chunk) in enumerate(timed):
        key = number, chunk
        if key not in buffers:
            buffers[key] = free.popleft() if len(free) > _UNSENT else n_used
            n_used = max(n_used, buffers[key] + 1)
        order.append(Instruction(kind, number, buffers[key], chunk))
        if last_at[key] == place:
            free.append(buffers[key])
    return order


def _starts(plan: HybridPlan) -> list[int]:
    """Return the number of the first microbatch of each pipeline among all of them, and the number of all."""
    return list(accumulate((pipeline.n_microbatches for pipeline in plan.pipelines), initial=0))


# --- Layers of a process: weights, buffers and optimizer state by name ------------------------------

State = dict[str, Tensor]


class _Boundary(torch.autograd.Function):
    """Boundary between layers: tensors get the memory layout of a transfer, in both directions.

    Kernels depend on the layout of their operands, so without it a cut would change bits. ``begin`` is called
    when the backward pass of the layer begins.
    """

    @staticmethod
    def forward(context: Any, state: Tensor, begin: Callable[[], object]) -> Tensor:
        context.begin = begin
        return state.contiguous() if not state.is_contiguous() else state.view_as(state)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        context.begin()
        return gradients[0].contiguous(), None


class HeldLayers:
    """Layers by index, each with its own optimizer, so that its state can move to another node.

    ``pieces`` are those of the layers that are here, as of the last step; with ``is_divided`` not all of a
    layer may be (`makespan.oobleck.shards`).
    """

    def __init__(self, job: ChainJob, chain: Chain, device: torch.device, is_divided: bool = False) -> None:
        self._job, self._chain, self._device, self._is_divided = job, chain, device, is_divided
        self.modules: dict[int, nn.Module] = {}
        self.pieces: set[Piece] = set()
        self._optimizers: dict[int, torch.optim.Optimizer | None] = {}
        self._checked = set[str]()

    def hold(self, layers: Iterable[int], *, is_empty: bool = False) -> None:
        """Build the layers that are not held yet, with their initial weights.

        With ``is_empty`` these do not count: pieces of the layers are loaded next.
        """
        for index in sorted(set(layers) - set(self.modules)):
            module = build_layer(self._chain, self._job, index).to(self._device)
            trained = [weight for weight in module.parameters() if weight.requires_grad]
            refuse_plain_clipping(trained, "clip_norm of the job")
            self._optimizers[index] = (
                build_optimizer(self._chain, self._job, trained, is_divided=self._is_divided)
                if trained
                else None
            )
            self.modules[index] = module
            if not is_empty:
                self.pieces |= pieces_of(index, len(trained))

    def keep(self, layers: Iterable[int], pieces: Container[Piece] | None = None) -> None:
        """Keep these layers only, and of their optimizer state only that in ``pieces``, if given."""
        kept = set(layers)
        self.modules = {index: module for index, module in self.modules.items() if index in kept}
        self._optimizers = {
            index: optimizer for index, optimizer in self._optimizers.items() if index in kept
        }
        self.pieces = {piece for piece in self.pieces if piece.layer in kept}
        if pieces is None:
            return
        for piece in [each for each in self.pieces if each.kind == "state" and each not in pieces]:
            self.pieces.remove(piece)
            if (optimizer := self._optimizers[piece.layer]) is not None:
                optimizer.state.pop(self._trained(piece.layer)[piece.weight][1], None)

    def apply_layer(self, index: int, state: tuple[Any, ...], iteration: int, microbatch: int) -> Any:
        """Run a layer forward, seeded by its position; outputs have the layout of a transfer."""
        seed_layer(self._job, self._device, iteration, microbatch, index)
        output = self.modules[index](*state)
        self._check_output(index, output)
        begin = partial(seed_layer, self._job, self._device, iteration, microbatch, index, "backward")
        if isinstance(output, tuple):
            return tuple(_Boundary.apply(part, begin) for part in output)  # type: ignore[no-untyped-call]
        return _Boundary.apply(output, begin)  # type: ignore[no-untyped-call]

    def _check_output(self, index: int, output: Any) -> None:
        """Reject an output that cannot be sent to another stage."""
        parts = output if isinstance(output, tuple) else (output,)
        wrong = [place for place, part in enumerate(parts) if not isinstance(part, Tensor)]
        if not wrong and parts:
            return
        kind = type(output).__name__ if not isinstance(output, tuple) else "an empty tuple"
        if wrong and isinstance(output, tuple):
            kind = f"a tuple with {type(output[wrong[0]]).__name__} at place {wrong[0]}"
        raise InputError(f"{self._named(index)} returns {kind}; expected a tensor or a tuple of tensors")

    def _named(self, index: int) -> str:
        return f"layer {index} ({type(self.modules[index]).__name__})"

    def check_repeats(self, index: int, state: tuple[Any, ...], iteration: int, microbatch: int) -> None:
        """Reject a layer whose pass depends on more than its input and position.

        Such a layer draws from its own generator, or keeps a count in Python: its result would depend on the
        node that runs it, and on the number of passes that the node has run.
        """
        if not self.is_first_check(f"layer {index}"):
            return
        names, buffers = self.names([index]), self.buffers([index])
        # Copies, because a layer may work in place.
        copies = [
            tuple(part.clone() if isinstance(part, Tensor) else part for part in state) for _ in range(2)
        ]
        outputs = [self.apply_layer(index, inputs, iteration, microbatch) for inputs in copies]
        self.check_names(names, [index])
        self.check_buffers(buffers)
        first, second = (output if isinstance(output, tuple) else (output,) for output in outputs)
        if len(first) != len(second) or not all(map(has_equal_bits, first, second)):
            problem = (
                f"{self._named(index)} returns another output for the same input, position and random state"
            )
            raise InputError(
                f"{problem}; expected layers that draw from torch, NumPy's or Python's global generator, and "
                "keep no state from pass to pass"
            )

    def is_first_check(self, name: str) -> bool:
        """Return True the first time that a name is checked in this process."""
        is_first = name not in self._checked
        self._checked.add(name)
        return is_first

    def parameters(self, index: int) -> dict[str, nn.Parameter]:
        """Return the trained weights of a layer by name."""
        return {
            name: weight for name, weight in self.modules[index].named_parameters() if weight.requires_grad
        }

    def buffers(self, layers: Iterable[int]) -> dict[tuple[int, str], Tensor]:
        """Return copies of all buffers."""
        return {
            (layer, name): buffer.clone()
            for layer in layers
            for name, buffer in self.modules[layer].named_buffers()
        }

    def unsaved_buffers(self, index: int) -> list[str]:
        """Return the names of the buffers that the ``state_dict`` of a layer leaves out."""
        module = self.modules[index]
        kept = module.state_dict().keys()
        return [name for name, _ in module.named_buffers() if name not in kept]

    def names(self, layers: Iterable[int]) -> set[tuple[int, str]]:
        """Return the names of all parameters and buffers."""
        return {
            (layer, name)
            for layer in layers
            for named in (self.modules[layer].named_parameters(), self.modules[layer].named_buffers())
            for name, _ in named
        }

    def check_names(self, before: Collection[tuple[int, str]], layers: Iterable[int]) -> None:
        """Reject parameters and buffers that a pass adds or removes: copies and checkpoints lack them."""
        for layer, name in sorted(self.names(layers) ^ set(before)):
            problem = f"{self._named(layer)}: a pass adds or removes {name!r}"
            raise InputError(f"{problem}; expected those that the layer has when it is built")

    def check_buffers(self, before: Mapping[tuple[int, str], Tensor]) -> None:
        """Reject buffers that a pass changes: pipelines see different samples, so the copies would differ."""
        for (layer, name), now in self.buffers({layer for layer, _ in before}).items():
            if not torch.equal(now, before[layer, name]):
                problem = f"layer {layer}: a pass changes its buffer {name!r}"
                raise InputError(
                    f"{problem}, and each pipeline sees other samples; expected buffers that stay as they are"
                )

    def check_gradients(self, layers: Iterable[int]) -> None:
        """Reject gradients that cannot be added up with those of other pipelines."""
        for layer in layers:
            for name, weight in self.parameters(layer).items():
                if weight.grad is not None and weight.grad.layout is not torch.strided:
                    kind = str(weight.grad.layout).removeprefix("torch.")
                    problem = f"{self._named(layer)}: the gradient of {name!r} has the layout {kind}"
                    raise InputError(f"{problem}; expected dense gradients, such as those of sparse=False")

    def clear_gradients(self) -> None:
        """Forget the gradients of all layers."""
        for module in self.modules.values():
            module.zero_grad(set_to_none=True)

    def scale_gradients(self, layers: Iterable[int], factor: float) -> None:
        """Multiply the gradients of layers."""
        for layer in layers:
            for weight in self.parameters(layer).values():
                # Not in place: tied weights share theirs.
                weight.grad = None if weight.grad is None else weight.grad * factor

    def squared_norm(self, index: int, left_out: Container[tuple[int, str]]) -> float:
        """Return the sum of the squared gradients of a layer, in double precision, without some weights."""
        squares = [
            weight.grad.double().square().sum()
            for name, weight in self.parameters(index).items()
            if weight.grad is not None and (index, name) not in left_out
        ]
        return float(torch.stack(squares).sum()) if squares else 0.0

    def step(self, layers: Iterable[int], iteration: int) -> None:
        """Update layers with their gradients, at the rate of an iteration.

        Weights whose optimizer state is not here are behind after that.
        """
        rate = (self._chain.rate or self._job.rate)(iteration)
        for index in layers:
            if (optimizer := self._optimizers[index]) is None:
                continue
            for group in optimizer.param_groups:
                group["lr"] = rate
            elsewhere = [
                (number, weight)
                for number, (_, weight) in enumerate(self._trained(index))
                if Piece(index, "state", number) not in self.pieces
            ]
            for number, weight in elsewhere:
                weight.grad = None  # optimizers leave out what has no gradient
                self.pieces.discard(Piece(index, "weight", number))
            if len(elsewhere) < len(self._trained(index)):
                optimizer.step()

    def _trained(self, index: int) -> list[tuple[str, nn.Parameter]]:
        """Return the trained weights of a layer in their order, with their names."""
        return list(self.parameters(index).items())

    def sizes(self, index: int) -> tuple[int, ...]:
        """Return the bytes of the trained weights of a layer, in their order."""
        return tuple(weight.nbytes for _, weight in self._trained(index))

    def weight(self, index: int, number: int) -> Tensor:
        """Return a trained weight of a layer by its number, not copied."""
        return self._trained(index)[number][1].detach()

    def state(self, index: int) -> State:
        """Return weights, buffers and optimizer state of a layer by name, not copied."""
        module, optimizer = self.modules[index], self._optimizers[index]
        state = {f"parameter/{name}": weight.detach() for name, weight in module.named_parameters()}
        state |= {f"buffer/{name}": buffer.detach() for name, buffer in module.named_buffers()}
        for name, weight in self.parameters(index).items():
            for key, value in (optimizer.state.get(weight, {}) if optimizer is not None else {}).items():
                if value is None:
                    continue
                if not isinstance(value, Tensor):
                    kind = type(optimizer).__name__
                    raise InputError(f"optimizer {kind} keeps {key} = {value!r}; expected tensors only")
                state[f"optimizer/{name}/{key}"] = value.detach()
        return state

    def piece_state(self, piece: Piece) -> State:
        """Return the part of the state of a layer that is a piece, by name, not copied."""
        trained = [name for name, _ in self._trained(piece.layer)]
        state = self.state(piece.layer)
        if piece.kind == "frame":
            left_out = {f"parameter/{name}" for name in trained}
            return {
                name: tensor
                for name, tensor in state.items()
                if name not in left_out and not name.startswith("optimizer/")
            }
        name = trained[piece.weight]
        if piece.kind == "weight":
            return {f"parameter/{name}": state[f"parameter/{name}"]}
        keys = [key for key in state if key.startswith(f"optimizer/{name}/")]
        return {key: state[key] for key in keys}

    @torch.no_grad()
    def load_piece(self, piece: Piece, state: Mapping[str, Tensor]) -> None:
        """Load a piece of a held layer, the result of `piece_state` of a process that has it."""
        if piece.kind == "state":
            name, weight = self._trained(piece.layer)[piece.weight]
            if (optimizer := self._optimizers[piece.layer]) is not None:
                _load_moments(optimizer, name, weight, state)
        else:
            for name, tensor in self.piece_state(piece).items():
                tensor.copy_(state[name])
        self.pieces.add(piece)

    @torch.no_grad()
    def load(self, index: int, state: Mapping[str, Tensor]) -> None:
        """Load the state of a held layer; raise `InputError` if it is that of another layer."""
        module, optimizer = self.modules[index], self._optimizers[index]
        held: State = {f"parameter/{name}": weight for name, weight in module.named_parameters()}
        held |= {f"buffer/{name}": buffer for name, buffer in module.named_buffers()}
        loaded = {name: tensor for name, tensor in state.items() if not name.startswith("optimizer/")}
        shapes = [{name: tensor.shape for name, tensor in tensors.items()} for tensors in (loaded, held)]
        if shapes[0] != shapes[1]:
            raise InputError(
                f"state of layer {index} with {', '.join(sorted(loaded))}; expected "
                f"{', '.join(sorted(held))} with the same shapes"
            )
        for name, tensor in held.items():
            tensor.copy_(loaded[name])
        self.pieces |= pieces_of(index, len(self.parameters(index)))
        if optimizer is None:
            return
        optimizer.state.clear()
        for name, weight in self.parameters(index).items():
            _load_moments(optimizer, name, weight, state)

    def checksum(self, index: int) -> str:
        """Return the SHA-256 of the state of a layer."""
        return _checksum(self.state(index))

    def piece_checksum(self, piece: Piece) -> str:
        """Return the SHA-256 of a piece of a layer."""
        return _checksum(self.piece_state(piece))


def _load_moments(
    optimizer: torch.optim.Optimizer, name: str, weight: nn.Parameter, state: Mapping[str, Tensor]
) -> None:
    """Give an optimizer copies of its state of one weight."""
    start = f"optimizer/{name}/"
    moments = {key.removeprefix(start): value for key, value in state.items() if key.startswith(start)}
    optimizer.state.pop(weight, None)
    if moments:
        optimizer.state[weight] = {key: value.clone() for key, value in moments.items()}


def _checksum(state: State) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(raw_bytes(tensor).numpy().data)
    return digest.hexdigest()


# --- Transfers, over groups that can be dropped and built anew --------------------------------------
#
# The groups are objects that `torch.distributed` does not register. Their sockets close, which releases the
# processes that wait for this one, when nothing refers to a group or to a work any more. Both are therefore
# attributes of objects of this module only, and `PeerGroups.close` clears these: another reference to such an
# object, for example from the frames of an exception, keeps no socket open.


_LOOK_S = 0.02


class Transfer:
    """Transfer that was started; it keeps its tensor alive."""

    def __init__(self, work: Any, tensor: Tensor, pending: set["Transfer"]) -> None:
        self._work, self._tensor, self._pending = work, tensor, pending
        pending.add(self)

    def finish(self) -> None:
        """Wait for the end of the transfer; raise `LostPeerError` if the other side is lost."""
        PeerGroups.n_waiting += 1
        try:
            if self._work is not None:
                _guarded(lambda: self._work.wait())
        finally:
            PeerGroups.n_waiting -= 1
            self.drop()

    def drop(self) -> None:
        """Forget the transfer."""
        self._work = None
        self._pending.discard(self)


class PeerGroups:
    """Point-to-point transfers between all members, and sums over groups of them.

    Parameters
    ----------
    members, own
        Nodes in the order of their ranks, and the node of this process.
    groups
        Nodes that add up together, in an order that all members share.
    store
        Rendezvous store of this generation alone; closing it releases the members that still wait there.
    meet_s
        Longest time until all groups are built [s]; None for ``timeout_s``.
    """

    n_waiting = 0
    """Number of running waits of this process for others."""

    def __init__(
        self,
        members: Sequence[int],
        own: int,
        groups: Sequence[tuple[int, ...]],
        store: Any,
        device: torch.device,
        timeout_s: float,
        meet_s: float | None = None,
    ) -> None:
        self.own, self.device, self._timeout = own, device, timedelta(seconds=timeout_s)
        self._meet_s = timeout_s if meet_s is None else meet_s
        self._meet_until_s = time.monotonic() + self._meet_s
        self._ranks = {node: rank for rank, node in enumerate(members)}
        self._pending: set[Transfer] = set()

        self._built: dict[tuple[int, ...] | None, Any] = {}
        problem = None
        try:
            for number, group in enumerate([None, *groups]):
                among = list(members) if group is None else list(group)
                if own in among and len(among) > 1:
                    self._built[group] = self._meet(str(number), among, store)
            # No member begins before all have built their groups: a member that fails halfway keeps its
            # connections open for a while, and its peers would wait on them in vain.
            _guarded(lambda: store.set(f"met/{own}", "1"))
            left = timedelta(seconds=max(self._meet_until_s - time.monotonic(), _LOOK_S))
            _guarded(lambda: store.wait([f"met/{node}" for node in members], left))
        except LostPeerError as error:
            problem = str(error)
        if problem is not None:  # raised here, so that it refers to no frame that still knows a group
            self.close()
            raise LostPeerError(f"node {own} could not build groups with nodes {list(members)}: {problem}")

    def _meet(self, name: str, among: list[int], store: Any) -> Any:
        """Build a group in a thread, until the store is closed: gloo waits long for a lost peer."""
        built, problems, done = list[Any](), list[str](), threading.Event()

        def build() -> None:
            try:
                built.append(self._build(name, among, store))
            except RuntimeError as error:
                problems.append(str(error).partition("\n")[0])
            finally:
                done.set()

        threading.Thread(target=build, daemon=True).start()
        while not done.wait(_LOOK_S):
            _guarded(lambda: store.check([name]))
            if time.monotonic() > self._meet_until_s:
                raise LostPeerError(f"timed out after {self._meet_s:g} s building the group of nodes {among}")
        if problems:
            raise LostPeerError(problems[0])
        return built.pop()  # so that the closure of the thread keeps no reference

    def _build(self, name: str, among: list[int], store: Any) -> Any:
        # The stubs of torch hide its public stores and backends.
        dist: Any = importlib.import_module("torch.distributed")
        backend = dist.ProcessGroupGloo if self.device.type == "cpu" else dist.ProcessGroupNCCL
        return backend(dist.PrefixStore(name, store), among.index(self.own), len(among), self._timeout)

    def send(self, tensor: Tensor, node: int, tag: int) -> Transfer:
        """Start to send a tensor, which must not change until the transfer is finished."""
        return self._started(tensor, lambda: self._built[None].send([tensor], self._ranks[node], tag))

    def expect(self, tensor: Tensor, node: int, tag: int) -> Transfer:
        """Start to receive a tensor that a node sends under the same tag, of which they arrive in order."""
        return self._started(tensor, lambda: self._built[None].recv([tensor], self._ranks[node], tag))

    def receive(self, tensor: Tensor, node: int, tag: int) -> Tensor:
        """Receive a tensor as `expect` does, and wait for it."""
        self.expect(tensor, node, tag).finish()
        return tensor

    def all_reduce(self, tensor: Tensor, group: tuple[int, ...]) -> Transfer:
        """Start to replace a tensor by its sum over a group; all members start sums in the same order."""
        return self._started(tensor, lambda: self._built[group].allreduce([tensor]))

    def send_values(self, values: Any, node: int, tag: int) -> list[Transfer]:
        """Start to send values as JSON."""
        text = torch.frombuffer(bytearray(json.dumps(values).encode()), dtype=torch.uint8).to(self.device)
        size = torch.tensor([text.numel()], device=self.device)
        return [self.send(size, node, tag), self.send(text, node, tag)]

    def receive_values(self, node: int, tag: int) -> Any:
        """Receive the values that a node sends with `send_values`."""
        size = self.receive(torch.empty(1, dtype=torch.int64, device=self.device), node, tag)
        text = torch.empty(int(size.item()), dtype=torch.uint8, device=self.device)
        return json.loads(bytes(self.receive(text, node, tag).tolist()))

    def close(self) -> None:
        """Drop all groups and works, without waiting for any process."""
        for transfer in list(self._pending):
            transfer.drop()
        groups = list(self._built.values())
        self._built.clear()
        # The destructor of a group waits for its running sums, which may wait for a process that waits for
        # another of these groups: so each group is dropped in its own thread.
        while groups:
            threading.Thread(target=_drop, args=([groups.pop()], self.device)).start()

    def _started(self, tensor: Tensor, start: Callable[[], Any]) -> Transfer:
        if not self._built:
            raise LostPeerError(f"node {self.own} has no connections; call connect first")
        return Transfer(_guarded(start), tensor, self._pending)


def _guarded(call: Callable[[], Any]) -> Any:
    """Call a function of torch that raises network errors; the error raised keeps no frame of theirs."""
    problem = ""
    try:
        return call()
    except RuntimeError as error:
        if type(error).__name__ == "AcceleratorError":  # of this GPU, and not of another node
            raise
        problem = str(error).partition("\n")[0]
    raise LostPeerError(problem)


def _drop(groups: list[Any], device: torch.device) -> None:
    if device.type == "cuda":
        groups[0].abort()
    groups.clear()


# --- Passes of a stage ------------------------------------------------------------------------------

_ACTIVATION_TAG, _GRADIENT_TAG = 1, 2


def as_tuple(state: Any) -> tuple[Any, ...]:
    """Return the output of a layer as the arguments of the next one."""
    return tuple(state) if isinstance(state, tuple | list) else (state,)


SumKey = tuple[int, int | None]
"""Pipeline whose gradients are added up, and the microbatch if they are kept apart."""


@dataclass(frozen=True, slots=True)
class StagePlace:
    """Position of a stage in its pipeline, and the microbatches of the pipeline in an iteration.

    Parameters
    ----------
    index, n_stages, layers
        Number of the stage, number of stages, and layers of the stage.
    microbatches
        Numbers of the microbatches, among all of the iteration.
    previous, following
        Nodes of the neighbouring stages, None at an end of the pipeline.
    routes
        In a plan with lost nodes, these nodes by microbatch.
    sums
        In a plan with lost nodes, the sum that the gradients of a microbatch belong to; empty if all belong
        to one.
    """

    index: int
    n_stages: int
    layers: range
    microbatches: range
    previous: int | None
    following: int | None
    routes: Mapping[int, tuple[int | None, int | None]] = field(default_factory=dict)
    sums: Mapping[int, SumKey] = field(default_factory=dict)

    @property
    def is_first(self) -> bool:
        """True for the first stage."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """True for the last stage."""
        return self.index == self.n_stages - 1

    def neighbours(self, microbatch: int) -> tuple[int | None, int | None]:
        """Return the nodes that run a microbatch before and after this stage."""
        return self.routes.get(microbatch, (self.previous, self.following))


@dataclass(slots=True)
class _Slot:
    """Data that a stage keeps of a microbatch between its passes."""

    microbatch: int
    place: StagePlace
    inputs: tuple[Any, ...] = ()
    targets: Any = None
    outputs: tuple[Any, ...] = ()
    loss: Tensor | None = None
    gradients: list[Tensor] = field(default_factory=list)
    arriving: list[Transfer] = field(default_factory=list)
    left: SplitBackward | None = None


Shape = tuple[tuple[int, ...], str, bool]
"""Shape, type, and True if a gradient comes back."""


class StagePasses:
    """Forward and backward passes of the stages of a node, in the order of its instructions."""

    def __init__(
        self,
        job: ChainJob,
        chain: Chain,
        held: HeldLayers,
        places: Sequence[StagePlace],
        order: Sequence[Instruction],
        links: PeerGroups,
        announce: Callable[[str], object],
        *,
        is_split: bool,
        reroutes: bool,
    ) -> None:
        self._job, self._chain, self._held = job, chain, held
        self._places, self._links, self._announce = places, links, announce
        self._order = order
        self._n_buffers = 1 + max(step.buffer for step in order)
        self._is_split, self._reroutes = is_split, reroutes
        self._sent: list[list[Transfer]] = []
        self._unchecked = set[int]()  # stages whose next forward pass is checked
        # Shapes of activations by stage, and the node to which they are sent, and from which they come.
        self._outgoing: dict[tuple[int, int], list[Shape]] = {}
        self._incoming: dict[tuple[int, int], list[Shape]] = {}
        self.sums: dict[SumKey, dict[Weight, Tensor | None]] = {}
        self._do: dict[str, Callable[[_Slot], None]] = {
            "load": self._load, "recv_act": self._receive_activation, "fwd": self._forward,
            "send_act": self._send_activation, "recv_grad": self._receive_gradient, "bwd": self._backward,
            "send_grad": self._send_gradient, "bwd_weights": self._finish_backward,
        }  # fmt: skip

    def run(self, iteration: int, *, checks: bool = False) -> dict[int, float]:
        """Accumulate gradients, and return the losses by microbatch, which only the last stage has.

        Gradients are in the weights, or in ``sums`` if microbatches belong to several sums.
        With ``checks`` every layer runs the first microbatch three times, and is rejected if its pass depends
        on more than its input and position.
        """
        self._iteration, losses = iteration, dict[int, Tensor]()
        self._unchecked = {place.index for place in self._places} if checks else set()
        self.sums = {}
        slots: list[_Slot | None] = [None] * self._n_buffers
        self._sent = [[] for _ in slots]
        for step in self._order:
            slot, place = slots[step.buffer], self._places[step.chunk]
            if slot is None or slot.microbatch != step.microbatch or slot.place is not place:
                # The buffer is reused, once everything that it held has been sent.
                for transfer in self._sent[step.buffer]:
                    transfer.finish()
                self._sent[step.buffer] = []
                slot = slots[step.buffer] = _Slot(step.microbatch, place)
            self._current = step.buffer
            self._do[step.kind](slot)
            if step.kind == "fwd" and slot.loss is not None:
                losses[place.microbatches[step.microbatch]] = slot.loss.detach()
        for sent in self._sent:
            for transfer in sent:
                transfer.finish()
        self._sent = []
        return {number: float(loss) for number, loss in losses.items()}

    def _load(self, slot: _Slot) -> None:
        number, device = slot.place.microbatches[slot.microbatch], self._links.device
        load = partial(load_microbatch, self._chain, self._job, self._iteration, number, device)
        inputs, targets = load()
        is_checked = slot.place.index in self._unchecked and self._chain.samples is not None
        if is_checked and self._held.is_first_check("samples"):
            subject = f"samples of the data set {type(self._chain.samples).__name__}"
            check_repeated(subject, (inputs, targets), load())
        if slot.place.is_first:
            slot.inputs = as_tuple(inputs)
        slot.targets = targets

    def _receive_activation(self, slot: _Slot) -> None:
        node = _present(slot.place.neighbours(slot.microbatch)[0])
        origin = slot.place.index, node
        if origin not in self._incoming:  # shapes are sent once, before the first activation
            self._incoming[origin] = self._links.receive_values(node, _ACTIVATION_TAG)
        slot.inputs = tuple(
            torch.empty(tuple(shape), dtype=getattr(torch, kind), device=self._links.device)
            for shape, kind, _ in self._incoming[origin]
        )
        slot.arriving = [self._links.expect(empty, node, _ACTIVATION_TAG) for empty in slot.inputs]

    def _await(self, slot: _Slot) -> None:
        """Wait for what a pass needs; other instructions may have come since it was asked for."""
        for transfer in slot.arriving:
            transfer.finish()
        slot.arriving = []

    def _forward(self, slot: _Slot) -> None:
        self._await(slot)
        place = slot.place
        if (node := place.neighbours(slot.microbatch)[0]) is not None:
            shapes = self._incoming[place.index, node]
            for empty, (_, _, returns) in zip(slot.inputs, shapes, strict=True):
                empty.requires_grad_(returns)
        self._announce("forward")
        state, number = slot.inputs, place.microbatches[slot.microbatch]
        checks = place.index in self._unchecked
        self._unchecked.discard(place.index)
        for layer in place.layers:
            if checks:
                self._held.check_repeats(layer, state, self._iteration, number)
            state = as_tuple(self._held.apply_layer(layer, state, self._iteration, number))
        if place.is_last:
            if checks and self._held.is_first_check("loss"):
                self._check_loss(state, slot.targets)
            slot.loss = checked_loss(self._chain.loss(state if len(state) > 1 else state[0], slot.targets))
        else:
            slot.outputs = state

    def _check_loss(self, state: tuple[Any, ...], targets: Any) -> None:
        """Reject a loss that depends on more than outputs, targets and the global random states."""
        losses = []
        for _ in range(2):
            # Copies, because a loss may work in place.
            outputs, wanted = tree_map_only(Tensor, torch.clone, (state, targets))
            with draws_kept(self._links.device):
                loss = self._chain.loss(outputs if len(outputs) > 1 else outputs[0], wanted)
                losses.append(checked_loss(loss))
        check_repeated("losses of the same outputs and targets", *losses)

    def _send_activation(self, slot: _Slot) -> None:
        node, sent = _present(slot.place.neighbours(slot.microbatch)[1]), self._sent[self._current]
        target = slot.place.index, node
        shapes = [(tuple(output.shape), type_name(output), output.requires_grad) for output in slot.outputs]
        if target not in self._outgoing:
            self._outgoing[target] = shapes
            sent += self._links.send_values(shapes, node, _ACTIVATION_TAG)
        elif shapes != self._outgoing[target]:
            problem = f"layer {slot.place.layers[-1]} returned {shapes} after {self._outgoing[target]}"
            raise InputError(f"{problem}; expected the same for all microbatches")
        sent += [self._links.send(output.detach(), node, _ACTIVATION_TAG) for output in slot.outputs]

    def _receive_gradient(self, slot: _Slot) -> None:
        node = _present(slot.place.neighbours(slot.microbatch)[1])
        slot.gradients = [torch.empty_like(output) for output in slot.outputs if output.requires_grad]
        slot.arriving = [self._links.expect(empty, node, _GRADIENT_TAG) for empty in slot.gradients]

    def _backward(self, slot: _Slot) -> None:
        self._await(slot)
        self._announce("backward")
        with self._summed(slot):
            # Passes in two parts run operators one by one, so their weights have one gradient each.
            is_whole = not self._is_split or not any(
                isinstance(each, Tensor) and each.requires_grad for each in slot.inputs
            )
            is_checked = self._reroutes and is_whole
            if is_checked and self._held.is_first_check(f"sums of {slot.place.layers}"):
                with self._adding_once(slot.place):
                    self._pass_back(slot)
            else:
                self._pass_back(slot)

    @contextmanager
    def _adding_once(self, place: StagePlace) -> Iterator[None]:
        """Reject layers whose backward pass adds to a gradient several times, between other computations.

        The gradients of a microbatch are then no single summand, so that they would have other bits where
        they are kept apart.
        """
        counts, names = dict[tuple[int, str], int](), self._weights(place)

        def count(which: tuple[int, str], weight: Tensor) -> None:
            counts[which] = counts.get(which, 0) + 1

        handles = [
            weight.register_post_accumulate_grad_hook(partial(count, which))  # type: ignore[no-untyped-call]
            for which, weight in names.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        for (layer, name), n_times in counts.items():
            if n_times > 1:
                raise InputError(
                    f"layer {layer}: a backward pass adds to the gradient of {name!r} {n_times} times; "
                    "expected once, as without reentrant checkpoints, or recovery 'reconfigure'"
                )

    def _pass_back(self, slot: _Slot) -> None:
        outputs = [output for output in slot.outputs if output.requires_grad]
        gradients = slot.gradients
        if slot.loss is not None and slot.loss.requires_grad:
            outputs, gradients = [slot.loss], [torch.ones_like(slot.loss)]
        if gradients and self._is_split:
            inputs = [each for each in slot.inputs if isinstance(each, Tensor) and each.requires_grad]
            if inputs and self._held.is_first_check(f"parts of the backward pass of {slot.place.layers}"):
                self._check_split(slot.place, outputs, gradients, inputs)
            slot.left = SplitBackward(outputs, gradients, inputs, self._weights(slot.place).values())
        elif gradients:
            torch.autograd.backward(outputs, gradients)
        slot.loss, slot.outputs, slot.gradients, slot.targets = None, (), [], None

    def _finish_backward(self, slot: _Slot) -> None:
        self._announce("backward")
        if slot.left is not None:
            with self._summed(slot):
                slot.left.finish()
        slot.left = None

    @contextmanager
    def _summed(self, slot: _Slot) -> Iterator[None]:
        """Let a backward pass add to the sum of gradients to which its microbatch belongs."""
        key = slot.place.sums.get(slot.microbatch)
        if key is None:
            yield
            return
        kept, weights = self.sums.setdefault(key, {}), self._weights(slot.place)
        for name, weight in weights.items():
            weight.grad = kept.get(name)
        yield
        kept.update((name, weight.grad) for name, weight in weights.items())

    def _weights(self, place: StagePlace) -> dict[tuple[int, str], nn.Parameter]:
        """Return the trained weights of a stage by layer and name."""
        return {
            (layer, name): weight
            for layer in place.layers
            for name, weight in self._held.parameters(layer).items()
        }

    def _check_split(
        self,
        place: StagePlace,
        outputs: Sequence[Tensor],
        gradients: Sequence[Tensor],
        inputs: Sequence[Tensor],
    ) -> None:
        """Reject layers whose gradients are others where a backward pass runs in two parts."""
        leaves = {f"input {number} of the stage": each for number, each in enumerate(inputs)} | {
            f"{name!r} of layer {layer}": weight for (layer, name), weight in self._weights(place).items()
        }
        gradients_of: list[dict[str, Tensor | None]] = []  # in two parts, then whole
        with draws_kept(self._links.device):
            for is_split in (True, False):
                for leaf in leaves.values():
                    leaf.grad = None
                try:
                    if is_split:
                        SplitBackward(outputs, gradients, inputs, self._weights(place).values()).finish()
                    else:
                        torch.autograd.backward(outputs, gradients, retain_graph=True)
                except RuntimeError as error:
                    reason = str(error).partition("\n")[0]
                    raise InputError(f"backward passes in two parts: {reason}; {_WHOLE}") from None
                gradients_of.append({name: leaf.grad for name, leaf in leaves.items()})
        for leaf in leaves.values():
            leaf.grad = None
        for name in leaves:
            split, whole = (of_leaves[name] for of_leaves in gradients_of)
            is_equal = split is whole if split is None or whole is None else has_equal_bits(split, whole)
            if not is_equal:
                raise InputError(
                    f"backward passes in two parts give another gradient of {name} than whole ones; {_WHOLE}"
                )

    def _send_gradient(self, slot: _Slot) -> None:
        node = _present(slot.place.neighbours(slot.microbatch)[0])
        for tensor in slot.inputs:
            if tensor.requires_grad:
                gradient = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad.contiguous()
                self._sent[self._current].append(self._links.send(gradient, node, _GRADIENT_TAG))
        slot.inputs = ()


_WHOLE = "expected the order of passes 1f1b, or other layers"


def checked_loss(loss: Any) -> Tensor:
    """Return the loss of a microbatch; raise `InputError` unless it is one value with a gradient."""
    if isinstance(loss, Tensor) and loss.numel() == 1:
        if not loss.requires_grad:
            problem = "the loss of the chain requires no gradient, so that nothing would be trained"
            raise InputError(f"{problem}; expected layers with weights that require one, and a loss of them")
        return loss
    kind = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
    raise InputError(f"the loss of the chain returned {kind}; expected a tensor with one value")


def type_name(tensor: Tensor) -> str:
    """Return the name of the type of a tensor, such as ``float32``."""
    return str(tensor.dtype).removeprefix("torch.")


def _present(node: int | None) -> int:
    if node is None:
        raise RuntimeError("an end of the pipeline has no stage beyond it")
    return node


# --- Sum of gradients over pipelines ----------------------------------------------------------------
#
# Stages of different pipelines begin and end at different layers. Every process goes through the same buckets
# in the same order, by descending layer, and takes part in those of layers that it holds. Consecutive layers
# with the same owners form one bucket. Tied weights form their own; each of their layers contributes to it.

_BUCKET_TAG, _SUM_TAG = 16, 17
Weight = tuple[int, str]
Ties = Sequence[tuple[Weight, Weight]]
Held = Mapping[int, Mapping[str, nn.Parameter]]
"""Weights by layer and name."""


@dataclass(frozen=True, slots=True)
class Summand:
    """Gradients of one pipeline for some layers, or of one of its microbatches if ``key`` names it."""

    key: SumKey
    node: int
    layers: tuple[int, ...]


Sums = Mapping[SumKey, Mapping[Weight, Tensor | None]]
"""Gradients that a process keeps apart from those in its weights."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that are added up together.

    Parameters
    ----------
    layers
        Layers of the bucket, descending; ascending for tied weights.
    tied
        Tied weights of the bucket; None for all weights of the layers that are not tied.
    summands
        Summands in the order of the sum; those of one pipeline and layers follow each other, and are added to
        each other first.
    """

    layers: tuple[int, ...]
    tied: tuple[Weight, ...] | None
    summands: tuple[Summand, ...]

    @property
    def nodes(self) -> tuple[int, ...]:
        """Return the nodes that take part; the first one adds up."""
        return tuple(dict.fromkeys(summand.node for summand in self.summands))

    def weights(self, layers: tuple[int, ...], held: Held, tied: frozenset[Weight]) -> list[Weight]:
        """Return the weights of a summand."""
        if self.tied is not None:
            return [(layer, name) for layer, name in self.tied if layer in layers]
        return [(layer, name) for layer in layers for name in held[layer] if (layer, name) not in tied]


def classes(ties: Ties) -> list[tuple[Weight, ...]]:
    """Return the sets of weights that are tied to each other, each ascending."""
    groups: list[set[Weight]] = []
    for pair in ties:
        joined = set(pair).union(*(group for group in groups if group & set(pair)))
        groups = [group for group in groups if not group & joined] + [joined]
    return sorted(tuple(sorted(group)) for group in groups)


def buckets(
    plan: HybridPlan, n_layers: int, ties: Ties, bucketed: bool, pass_order: PassOrder = "1f1b"
) -> list[Bucket]:
    """Return all buckets in the order in which every process goes through them."""
    runs: list[tuple[list[tuple[SumKey, int]], list[int]]] = []
    for layer in reversed(range(n_layers)):
        keys = [each for of_pipeline in _sum_keys(plan, layer, pass_order) for each in of_pipeline]
        if bucketed and runs and runs[-1][0] == keys:
            runs[-1][1].append(layer)
        else:
            runs.append((keys, [layer]))
    plain = [
        Bucket(tuple(layers), None, tuple(Summand(key, node, tuple(layers)) for key, node in keys))
        for keys, layers in runs
    ]
    tied = []
    for weights in reversed(classes(ties)):
        layers = [layer for layer, _ in weights]
        # Pipeline by pipeline, and within a pipeline in the order of the layers.
        keys_of = zip(*(_sum_keys(plan, layer, pass_order) for layer in layers), strict=True)
        summands = [
            Summand(key, node, (layer,))
            for of_pipeline in keys_of
            for layer, of_layer in zip(layers, of_pipeline, strict=True)
            for key, node in of_layer
        ]
        tied.append(Bucket(tuple(layers), weights, tuple(summands)))
    return plain + tied


def _sum_keys(plan: HybridPlan, layer: int, pass_order: PassOrder) -> list[list[tuple[SumKey, int]]]:
    """Return the summands of a layer and their nodes, pipeline by pipeline."""
    if not plan.lost:
        return [[((number, None), node)] for number, node in enumerate(owners(plan, layer))]
    schedule, starts = peer_schedule(plan, pass_order == "zero-bubble"), _starts(plan)
    stage = next(
        place for place, each in enumerate(plan.pipelines[0].template.stages) if layer in each.layers
    )
    return [
        [
            ((number, starts[number] + each), schedule.paths[number, each][stage])
            for each in range(pipeline.n_microbatches)
        ]
        if (number, stage) in schedule.apart
        else [((number, None), schedule.paths[number, 0][stage])]
        for number, pipeline in enumerate(plan.pipelines)
    ]


def sum_groups(buckets: Sequence[Bucket]) -> list[tuple[int, ...]]:
    """Return the sets of nodes that add up together, each once, in an order that all members share."""
    return list(dict.fromkeys(bucket.nodes for bucket in buckets if len(bucket.nodes) > 1))


def _scatter(total: Tensor, weights: Iterable[nn.Parameter]) -> None:
    """Make the gradients of weights views of a flat sum."""
    start = 0
    for weight in weights:
        weight.grad = total[start : start + weight.numel()].view_as(weight)
        start += weight.numel()


@dataclass(frozen=True, slots=True)
class _BucketPart:
    """Part of a process in a bucket: its summands by number, and the weights that receive the sum."""

    bucket: Bucket
    summands: dict[int, Tensor]
    weights: list[dict[Weight, nn.Parameter]]


def _parts(buckets: Sequence[Bucket], node: int, held: Held, ties: Ties, sums: Sums) -> Iterator[_BucketPart]:
    """Yield the parts of a node in the buckets; gradients are flattened when a part is reached."""
    tied = frozenset(weight for weights in classes(ties) for weight in weights)
    for bucket in buckets:
        own = {number: each for number, each in enumerate(bucket.summands) if each.node == node}
        names_of = {each.layers: bucket.weights(each.layers, held, tied) for each in own.values()}
        if any(names_of.values()):
            summands = {}
            for number, each in own.items():
                # Without an entry, all gradients of this process belong to one sum, which is in the weights.
                kept = sums.get(each.key)
                gradients = [
                    torch.zeros_like(held[layer][name]) if gradient is None else gradient
                    for layer, name in names_of[each.layers]
                    for gradient in [held[layer][name].grad if kept is None else kept.get((layer, name))]
                ]
                summands[number] = torch.cat([gradient.reshape(-1) for gradient in gradients])
            weights = [
                {(layer, name): held[layer][name] for layer, name in names} for names in names_of.values()
            ]
            yield _BucketPart(bucket, summands, weights)


def all_reduce(
    buckets: Sequence[Bucket],
    links: PeerGroups,
    held: Held,
    ties: Ties,
    sums: Sums,
    divisor: int,
    begin: Callable[[], object],
) -> int:
    """Add up with the all-reduce of the backend.

    Gradients become their sum over all pipelines, divided by ``divisor``; ``begin`` is called before each
    sum. Returns the number of sums with others in which this process took part.
    """
    running: list[tuple[_BucketPart, Tensor, Transfer | None]] = []
    for part in _parts(buckets, links.own, held, ties, sums):
        begin()
        total, nodes = _added(list(part.summands.values())), part.bucket.nodes
        running.append((part, total, links.all_reduce(total, nodes) if len(nodes) > 1 else None))
    for part, total, transfer in running:
        if transfer is not None:
            transfer.finish()
        total /= divisor
        for weights in part.weights:
            _scatter(total, weights.values())
    return sum(transfer is not None for _, _, transfer in running)


def ordered_sums(
    buckets: Sequence[Bucket],
    links: PeerGroups,
    held: Held,
    ties: Ties,
    sums: Sums,
    divisor: int,
    begin: Callable[[], object],
    stepped: Mapping[int, Container[Weight]] | None = None,
) -> int:
    """Add up in the order of the pipelines, at the first owner; otherwise as `all_reduce`.

    ``stepped`` are the weights that each node steps: it gets no gradient of any other, unless it is tied.
    None if every node steps all its weights.
    """
    parts = list(_parts(buckets, links.own, held, ties, sums))
    # All summands are sent before any wait: two processes may each add up a bucket of the other.
    sent = [
        links.send(summand, part.bucket.nodes[0], _BUCKET_TAG)
        for part in parts if part.bucket.nodes[0] != links.own
        for summand in part.summands.values()
    ]  # fmt: skip
    for part in parts:
        begin()
        root, *others = part.bucket.nodes
        empty = torch.empty_like(next(iter(part.summands.values())))
        if root != links.own:
            wanted = [_wanted(part, weights, links.own, stepped) for weights in part.weights]
            for weights in part.weights:
                for weight in weights.values():
                    weight.grad = None
            if not wanted[0]:
                continue
            count = sum(weight.numel() for weight in wanted[0].values())
            total = links.receive(empty[:count], root, _SUM_TAG)
        else:
            # Microbatch by microbatch within a pipeline, as one process adds up in its weights; then pipeline
            # by pipeline.
            of_pipelines: list[Tensor] = []
            each_of = enumerate(part.bucket.summands)
            for _, group in groupby(each_of, key=lambda each: (each[1].key[0], each[1].layers)):
                summands = [
                    part.summands[number] if each.node == root
                    else links.receive(torch.empty_like(empty), each.node, _BUCKET_TAG)
                    for number, each in group
                ]  # fmt: skip
                of_pipelines.append(_added(summands) if len(summands) > 1 else summands[0])
            total = _added(of_pipelines)
            total /= divisor
            wanted, names = part.weights, part.weights[0]
            of_weights = torch.split(total, [weight.numel() for weight in names.values()])
            for node in others:
                stepped_there = _wanted(part, names, node, stepped)
                chosen = [
                    of_weight
                    for name, of_weight in zip(names, of_weights, strict=True)
                    if name in stepped_there
                ]
                if chosen:
                    of_node = total if len(chosen) == len(of_weights) else torch.cat(chosen)
                    sent.append(links.send(of_node, node, _SUM_TAG))
        for weights in wanted:
            _scatter(total, weights.values())
    for transfer in sent:
        transfer.finish()
    return sum(len(part.bucket.nodes) > 1 for part in parts)


def _wanted(
    part: _BucketPart,
    weights: dict[Weight, nn.Parameter],
    node: int,
    stepped: Mapping[int, Container[Weight]] | None,
) -> dict[Weight, nn.Parameter]:
    """Return those weights of a part whose sum a node needs."""
    if stepped is None or part.bucket.tied is not None:
        return weights
    return {name: weight for name, weight in weights.items() if name in stepped[node]}


def _added(summands: Sequence[Tensor]) -> Tensor:
    total = summands[0].clone()
    for summand in summands[1:]:
        total += summand
    return total


# --- Process of a stage -----------------------------------------------------------------------------

_FACTS, _STATE, _WEIGHTS = 32, 33, 34


@dataclass(frozen=True, slots=True)
class IterationFacts:
    """Results of an iteration before its step, equal in all processes except for the number of sums.

    Parameters
    ----------
    loss
        Mean over all microbatches.
    gradient_norm
        Norm of all gradients together, before clipping; None without a limit.
    n_sums
        Sums of gradients in which this process took part.
    """

    loss: float
    gradient_norm: float | None
    n_sums: int


def stage_place(plan: HybridPlan, node: int, pass_order: PassOrder = "1f1b", chunk: int = 0) -> StagePlace:
    """Return the position of a stage of a node in its pipeline; ``chunk`` is its number on the node."""
    starts = _starts(plan)
    number = next((place for place, each in enumerate(plan.pipelines) if node in each.nodes), None)
    if number is None or node in plan.lost:
        raise InputError(f"node {node}; expected one of the plan, {', '.join(map(str, plan.nodes))}")
    pipeline = plan.pipelines[number]
    stage = chunk * len(pipeline.nodes) + pipeline.nodes.index(node)
    count, path = pipeline.template.n_stages, pipeline.nodes * pipeline.template.interleave
    place = StagePlace(
        stage, count, pipeline.template.stages[stage].layers, range(*starts[number : number + 2]),
        path[stage - 1] if stage else None,
        path[stage + 1] if stage + 1 < count else None,
    )  # fmt: skip
    if not plan.lost:
        return place
    schedule = peer_schedule(plan, pass_order == "zero-bubble")
    routes: dict[int, tuple[int | None, int | None]] = {}
    sums: dict[int, SumKey] = {}
    for (of_pipeline, each), path in schedule.paths.items():
        if path[stage] == node:
            microbatch = starts[of_pipeline] + each
            routes[microbatch] = (
                path[stage - 1] if stage else None,
                path[stage + 1] if stage + 1 < count else None,
            )
            sums[microbatch] = of_pipeline, microbatch if (of_pipeline, stage) in schedule.apart else None
    return replace(
        place, microbatches=range(starts[-1]), routes=routes,
        sums=sums if len(set(sums.values())) > 1 else {},
    )  # fmt: skip


class StageExecutor:
    """One process of a resilient job: its stages of a plan, the sums with others, and the layers it holds.

    An iteration is `compute`, `reduce`, and, once all processes are known to have done both, `apply`. Until
    `apply` no lasting state has changed: an interrupted process calls `disconnect`, then `connect` with a new
    plan, and repeats the iteration. The result is the same bit by bit if the sums are ordered and the plan
    gives the pipelines the same microbatches. `apply` needs no other process, so no other can make it fail.

    After `divide` the optimizer state of a layer is divided among the processes that have it: `apply` steps
    the weights whose state is here, and the next `compute` receives the others, which `pieces` lacks till
    then.

    `connect`, `compute`, `reduce`, `send_layer` and `receive_layer` raise `LostPeerError` within milliseconds
    when a process that they depend on is lost or has disconnected. Call `disconnect` then, and whenever the
    plan changes: it drops every group, work and activation, so that the sockets close and processes that wait
    for this one fail in turn. It waits for no process and may be called twice. The error may be kept, because
    it refers to nothing that keeps a socket open. Any other exception is an error in the model or the plan.

    Layers stay held over any number of plans. All calls must come from one thread.

    Parameters
    ----------
    job
        Job to train.
    device
        ``cpu`` (gloo) or ``cuda`` (NCCL, which has not been tried with several GPUs).
    announce
        Called with ``forward`` and ``backward`` before each pass of a microbatch, with ``reduction`` before
        each sum of gradients.
    timeout_s
        Longest wait for another process [s]; a last resort, because losses close connections.
    meet_s
        Longest time in which the processes of a plan build their groups [s]; None for ``timeout_s``.
    pass_order
        Order of the passes; all processes of a plan need the same.
    reroutes
        Whether plans with lost nodes may follow, so that layers for which they change bits are rejected.
    is_divided
        Whether `divide` may be called, so that optimizers for which it changes bits are rejected.
    """

    def __init__(
        self,
        job: ChainJob,
        device: str = "cpu",
        announce: Callable[[str], object] = lambda phase: None,
        timeout_s: float = 300.0,
        meet_s: float | None = None,
        pass_order: PassOrder = "1f1b",
        reroutes: bool = False,
        is_divided: bool = False,
    ) -> None:
        self.job, self.chain = job, load_chain(job)
        self._device, self._announce, self._timeout_s = torch.device(device), announce, timeout_s
        self._meet_s, self._pass_order, self._reroutes = meet_s, pass_order, reroutes
        self._held = HeldLayers(job, self.chain, self._device, is_divided)
        self._needed: frozenset[Piece] | None = None
        # Layers and numbers of new weights, by the node that receives or sends them.
        self._outgoing: dict[int, list[tuple[int, int]]] = {}
        self._incoming: dict[int, list[tuple[int, int]]] = {}
        self._stepped: dict[int, set[Weight]] | None = None
        self._has_stepped = False
        self._links: PeerGroups | None = None
        self._passes: StagePasses | None = None
        self._places: tuple[StagePlace, ...] = ()
        self._losses: dict[int, float] = {}
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
    def stage_layers(self) -> tuple[int, ...]:
        """Return the layers of its stages under the plan to which this process is connected, ascending."""
        return tuple(layer for place in self._places for layer in place.layers)

    def hold(self, layers: Iterable[int]) -> None:
        """Hold further layers, with their initial weights; layers that are held stay unchanged."""
        self._held.hold(layers)

    def keep(self, layers: Iterable[int]) -> None:
        """Drop all layers but these, and after `divide` optimizer state that other processes hold."""
        self._held.keep(layers, self._needed)

    def pieces(self) -> list[str]:
        """Return the pieces that are here, as of the last step."""
        sizes = {layer: self._held.sizes(layer) for layer in self.layers}
        return [piece.text(sizes[piece.layer]) for piece in sorted(self._held.pieces)]

    def divide(
        self, n_copies: int, hosts: Hosts, states: Mapping[tuple[int, int], Sequence[int]] | None = None
    ) -> dict[str, str]:
        """Divide the optimizer state of the layers of the plan, which must be here, among their processes.

        Nothing is dropped before `keep`. All processes of the plan call this.

        Parameters
        ----------
        n_copies, hosts
            Processes that hold the optimizer state of a weight, and the machine of each node.
        states
            Nodes that hold the state of each weight, by layer and number of the weight; None or empty to
            choose them here.

        Returns
        -------
        dict
            SHA-256 of each piece that this process has to have.
        """
        own, plan = self._connected().own, self._plan
        sizes = {layer: self._held.sizes(layer) for layer in self.stage_layers}
        states = states or holders(plan, sizes, n_copies, hosts)
        self._needed = needed_pieces(plan, sizes, states).get(own, frozenset())
        if missing := sorted(self._needed - self._held.pieces):
            named = ", ".join(piece.text() for piece in missing)
            raise InputError(f"node {own} lacks pieces of its layers: {named}; expected all of them")
        self._outgoing, self._incoming = {}, {}
        self._stepped = {node: set() for node in plan.nodes}
        for (layer, number), of_weight in sorted(states.items()):
            if layer not in sizes:
                continue
            name = list(self._held.parameters(layer))[number]
            for node in of_weight:
                self._stepped[node].add((layer, name))
            for target, source in senders(owners(plan, layer), of_weight, number).items():
                if own == source:
                    self._outgoing.setdefault(target, []).append((layer, number))
                elif own == target:
                    self._incoming.setdefault(source, []).append((layer, number))
        return {
            piece.text(sizes[piece.layer]): self._held.piece_checksum(piece) for piece in sorted(self._needed)
        }

    def layer_state(self, layer: int) -> State:
        """Return weights, buffers and optimizer state of a layer by name; no copy, `apply` changes it."""
        return self._held.state(layer)

    def piece_state(self, piece: Piece) -> State:
        """Return the state of a piece by name; no copy, `apply` changes it."""
        return self._held.piece_state(piece)

    def n_trained(self, layer: int) -> int:
        """Return the number of trained weights of a layer."""
        return len(self._held.parameters(layer))

    def unsaved_buffers(self, layer: int) -> list[str]:
        """Return the names of the buffers of a layer that its ``state_dict`` leaves out."""
        return self._held.unsaved_buffers(layer)

    def load_layer_state(self, layer: int, state: Mapping[str, Tensor]) -> None:
        """Load a copy of the result of `layer_state` of any process; the layer must be held."""
        self._held.load(layer, state)

    def checksum(self, layer: int) -> str:
        """Return the SHA-256 of the state of a layer, equal in all processes that hold it."""
        return self._held.checksum(layer)

    def connect(self, plan: HybridPlan, node: int, store: Any, also: Sequence[int] = ()) -> None:
        """Build groups with the other processes of a plan, and prepare to run the stages of a node.

        Parameters
        ----------
        plan
            Pipelines in which each node has one device, and runs one stage or interleaved ones; others raise
            `InputError`. Microbatches of lost nodes run on other nodes of their stage, and change no bit of
            the result.
        node
            Node of this process.
        store
            Store of `torch.distributed` that no other generation uses; closing it releases waiting members.
        also
            Nodes outside the plan that take part in copies only; the same for all members.
        """
        check_plan(plan, self.n_layers, self.job.n_microbatches)
        self.disconnect()
        self._needed, self._stepped, self._has_stepped = None, None, False
        self._outgoing, self._incoming = {}, {}
        ties = self.chain.tied
        self._buckets = buckets(plan, self.n_layers, ties, self.job.bucketed, self._pass_order)
        groups = sum_groups(self._buckets) if self.job.reduction == "allreduce" else []
        members = [*plan.nodes, *also]
        self._links = PeerGroups(members, node, groups, store, self._device, self._timeout_s, self._meet_s)
        self._plan, self._has_computed = plan, False
        if node in plan.nodes:
            pipeline = next(each for each in plan.pipelines if node in each.nodes)
            self._places = tuple(
                stage_place(plan, node, self._pass_order, chunk)
                for chunk in range(pipeline.template.interleave)
            )
            place = self._places[0]
            if plan.lost:
                order = rerouted_instructions(plan, node, self._pass_order)
            elif pipeline.template.interleave > 1:
                order = interleaved_instructions(pipeline, node, self._pass_order)
            else:
                count = len(place.microbatches)
                order = list(instructions(place.index, place.n_stages, count, self._pass_order))
            self._passes = StagePasses(
                self.job, self.chain, self._held, self._places, order, self._links, self._announce,
                is_split=self._pass_order == "zero-bubble", reroutes=self._reroutes,
            )  # fmt: skip

    def disconnect(self) -> None:
        """Drop all connections to other processes, and the gradients; layers stay held."""
        self._passes, self._places, self._is_reduced = None, (), False
        self._losses = {}
        if self._links is not None:
            self._links.close()
        self._links = None
        self._held.clear_gradients()

    def send_layer(self, layer: int, node: int) -> None:
        """Send the state of a layer to a member that calls `receive_layer`; return when it is sent.

        All members must carry out the copies of a plan in the same order, each those that it takes part in.
        """
        self._send_state(self._connected(), self._held.state(layer), node)

    def send_piece(self, piece: Piece, node: int) -> None:
        """Send a piece to a member that calls `receive_piece`; otherwise as `send_layer`."""
        self._send_state(self._connected(), self._held.piece_state(piece), node)

    def _send_state(self, links: PeerGroups, state: State, node: int) -> None:
        shapes = [
            (name, tuple(tensor.shape), type_name(tensor), tensor.device.type)
            for name, tensor in state.items()
        ]
        sent = links.send_values(shapes, node, _STATE)
        sent += [links.send(tensor.contiguous().to(self._device), node, _STATE) for tensor in state.values()]
        for transfer in sent:
            transfer.finish()

    def receive_layer(self, layer: int, node: int) -> None:
        """Hold a layer and load the state that a member sends with `send_layer`."""
        state = self._received_state(node)
        self._held.hold([layer])
        self._held.load(layer, state)

    def receive_piece(self, piece: Piece, node: int) -> None:
        """Load the piece that a member sends with `send_piece`; its layer is built if it is not held."""
        state = self._received_state(node)
        self._held.hold([piece.layer], is_empty=True)
        self._held.load_piece(piece, state)

    def _received_state(self, node: int) -> State:
        links, state = self._connected(), State()
        for name, shape, kind, place in links.receive_values(node, _STATE):
            empty = torch.empty(shape, dtype=getattr(torch, kind), device=self._device)
            state[name] = links.receive(empty, node, _STATE).to(place)
        return state

    def compute(self, iteration: int) -> None:
        """Run all passes of an iteration in this stage, and accumulate its gradients."""
        if self._passes is None:
            raise InputError("this process has no stage in a plan; call connect before compute")
        if missing := set(self.stage_layers) - set(self.layers):
            raise InputError(f"layers {sorted(missing)} of the stage are not held; expected all of them")
        self._held.clear_gradients()
        self._is_reduced = False
        self._exchange_weights()
        layers, is_first = self.stage_layers, not self._has_computed
        before, names = self._held.buffers(layers) if is_first else {}, self._held.names(layers)
        self._losses, self._iteration = self._passes.run(iteration, checks=is_first), iteration
        self._held.check_names(names, layers)
        self._held.check_buffers(before)
        self._held.check_gradients(layers)
        self._has_computed = True

    def reduce(self) -> IterationFacts:
        """Add up the gradients over all pipelines, clip their norm, and return the loss."""
        links, job = self._connected(), self.job
        sums: Sums = {} if self._passes is None else self._passes.sums
        weights = {layer: self._held.parameters(layer) for layer in self.stage_layers}
        # The norm of gradients is computed from all of them.
        stepped = self._stepped if job.clip_norm is None else None
        add_up = partial(ordered_sums, stepped=stepped) if job.reduction == "ordered" else all_reduce
        n_sums = add_up(
            self._buckets, links, weights, self.chain.tied, sums, job.n_microbatches,
            lambda: self._announce("reduction"),
        )  # fmt: skip
        if self._passes is not None:
            self._passes.sums = {}  # what was kept apart is in the sums now
        losses, squares = self._shared(links)
        norm = None
        if job.clip_norm is not None:
            norm = math.sqrt(math.fsum(squares))
            self._held.scale_gradients(self.stage_layers, min(1.0, job.clip_norm / (norm + 1e-6)))
        self._is_reduced = True
        return IterationFacts(math.fsum(losses) / job.n_microbatches, norm, n_sums)

    def apply(self) -> None:
        """Take the optimizer step of the reduced iteration, once."""
        if not self._is_reduced:
            raise InputError(
                "there are no reduced gradients; call reduce before apply, and apply once, before disconnect"
            )
        self._is_reduced = False
        self._held.step(self.stage_layers, self._iteration)
        self._has_stepped = True

    @torch.no_grad()
    def _exchange_weights(self) -> None:
        """Send weights of the last step to processes without their optimizer state, and receive others."""
        if not (self._has_stepped and (self._outgoing or self._incoming)):
            return
        self._announce("weights")
        links, held, kind = self._connected(), self._held, getattr(torch, self.job.dtype)
        arriving = {}
        for node, weights in self._incoming.items():
            count = sum(held.weight(*each).numel() for each in weights)
            empty = torch.empty(count, dtype=kind, device=self._device)
            arriving[node] = empty, links.expect(empty, node, _WEIGHTS)
        sent = [
            links.send(torch.cat([held.weight(*each).reshape(-1) for each in weights]), node, _WEIGHTS)
            for node, weights in self._outgoing.items()
        ]
        for node, (flat, transfer) in arriving.items():
            transfer.finish()
            start = 0
            for layer, number in self._incoming[node]:
                weight = held.weight(layer, number)
                weight.copy_(flat[start : start + weight.numel()].view_as(weight))
                held.pieces.add(Piece(layer, "weight", number))
                start += weight.numel()
        for each in sent:
            each.finish()
        self._has_stepped = False

    def _connected(self) -> PeerGroups:
        if self._links is None:
            raise LostPeerError("this process has no connections; call connect first")
        return self._links

    def _shared(self, links: PeerGroups) -> tuple[list[float], list[float]]:
        """Return the loss of each pipeline and the squared norm of each layer's gradients.

        Only one process contributes each number, so the order of the sum cannot change a bit.
        """
        n_losses = self.job.n_microbatches
        contribution = torch.zeros(n_losses + self.n_layers, dtype=torch.float64)
        for number, loss in self._losses.items():
            contribution[number] = loss
        if self.job.clip_norm is not None:
            # Tied weights share one gradient, which counts once.
            again = {weight for tied in classes(self.chain.tied) for weight in tied[1:]}
            for layer in self.stage_layers:
                if owners(self._plan, layer)[0] == links.own:
                    contribution[n_losses + layer] = self._held.squared_norm(layer, again)
        first, *others = self._plan.nodes
        facts = contribution.to(self._device)
        if links.own == first:
            for node in others:
                facts += links.receive(torch.empty_like(facts), node, _FACTS)
            for transfer in [links.send(facts, node, _FACTS) for node in others]:
                transfer.finish()
        else:
            links.send(facts, first, _FACTS).finish()
            facts = links.receive(torch.empty_like(facts), first, _FACTS)
        values: list[float] = facts.tolist()
        losses = [math.fsum(values[start:stop]) for start, stop in pairwise(_starts(self._plan))]
        return losses, values[n_losses:]
