"""Execution of a pipeline stage: instructions, layers, peer groups, passes, and the sum over pipelines."""

import hashlib
import importlib
import json
import math
import threading
import time
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from makespan.errors import InputError, TrainingError
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
from makespan.oobleck.job import ChainJob
from makespan.oobleck.plan import HybridPlan, check_plan, owners
from makespan.plans import one_f_one_b_order
from makespan.training import refuse_plain_clipping

# ------------------------------------------------------------------------------------------------
# What a stage of a pipeline does in an iteration, one instruction after the other.
#
# Whoever carries them out may block in every transfer until the other side does the same one: where a stage
# sends an activation and receives a gradient between two passes, it does first what its neighbour does
# first.

Kind = Literal["load", "recv_act", "fwd", "send_act", "recv_grad", "bwd", "send_grad"]


@dataclass(frozen=True, slots=True)
class Instruction:
    """One thing to do for a microbatch, whose activations lie in a buffer."""

    kind: Kind
    microbatch: int
    buffer: int


def n_buffers(stage: int, n_stages: int, n_microbatches: int) -> int:
    """Return how many microbatches a stage has room for, between their passes."""
    return max(2, min(n_stages - stage, n_microbatches))


def instructions(stage: int, n_stages: int, n_microbatches: int) -> Iterator[Instruction]:
    """Yield the instructions of a stage in order; neither sums over pipelines nor steps are among them."""
    room = n_buffers(stage, n_stages, n_microbatches)
    first, last = stage == 0, stage == n_stages - 1
    passes = one_f_one_b_order(stage, n_stages, n_microbatches)
    beyond = [] if last else one_f_one_b_order(stage + 1, n_stages, n_microbatches)
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
            around.append(("fwd" if after[0] == "F" else "bwd", after[1]))
        for kind, microbatch in around:
            yield Instruction(kind, microbatch, microbatch % room)


# ------------------------------------------------------------------------------------------------
# The layers that a process holds: weights, buffers and optimizer state of each, by name.

State = dict[str, Tensor]


class _Boundary(torch.autograd.Function):
    """What passes from layer to layer, laid out in both directions as after a transfer.

    Kernels depend on how their operands lie in memory, so that a cut would change bits without it. ``begin``
    is called where the backward pass of the layer begins.
    """

    @staticmethod
    def forward(context: Any, state: Tensor, begin: Callable[[], object]) -> Tensor:
        context.begin = begin
        return state.contiguous() if not state.is_contiguous() else state.view_as(state)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        context.begin()
        return gradients[0].contiguous(), None


def _has_equal_bits(one: Tensor, other: Tensor) -> bool:
    """Compare as bytes, so that NaN equals itself."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    views = [part.detach().contiguous().reshape(-1).view(torch.uint8) for part in (one, other)]
    return torch.equal(*views)


class HeldLayers:
    """Layers by their index, each with an optimizer of its own."""

    def __init__(self, job: ChainJob, chain: Chain, device: torch.device) -> None:
        self._job, self._chain, self._device = job, chain, device
        self.modules: dict[int, nn.Module] = {}
        self._optimizers: dict[int, torch.optim.Optimizer | None] = {}
        self._checked = set[str]()

    def hold(self, layers: Iterable[int]) -> None:
        """Build those that are not held yet, with their initial weights."""
        for index in sorted(set(layers) - set(self.modules)):
            module = build_layer(self._chain, self._job, index).to(self._device)
            trained = [one for one in module.parameters() if one.requires_grad]
            refuse_plain_clipping(trained, "clip_norm of the job")
            self._optimizers[index] = build_optimizer(self._chain, self._job, trained) if trained else None
            self.modules[index] = module

    def keep(self, layers: Iterable[int]) -> None:
        """Drop all others."""
        kept = set(layers)
        self.modules = {index: one for index, one in self.modules.items() if index in kept}
        self._optimizers = {index: one for index, one in self._optimizers.items() if index in kept}

    def apply_layer(self, index: int, state: tuple[Any, ...], iteration: int, microbatch: int) -> Any:
        """Run a layer forward; what it draws follows from the position, and what it returns lies as sent."""
        seed_layer(self._job, self._device, iteration, microbatch, index)
        found = self.modules[index](*state)
        self._check_output(index, found)
        begin = partial(seed_layer, self._job, self._device, iteration, microbatch, index, "backward")
        if isinstance(found, tuple):
            return tuple(_Boundary.apply(one, begin) for one in found)  # type: ignore[no-untyped-call]
        return _Boundary.apply(found, begin)  # type: ignore[no-untyped-call]

    def _check_output(self, index: int, found: Any) -> None:
        """Reject what cannot be sent to another stage."""
        parts = found if isinstance(found, tuple) else (found,)
        wrong = [place for place, one in enumerate(parts) if not isinstance(one, Tensor)]
        if not wrong and parts:
            return
        what = type(found).__name__ if not isinstance(found, tuple) else "an empty tuple"
        if wrong and isinstance(found, tuple):
            what = f"a tuple with {type(found[wrong[0]]).__name__} at place {wrong[0]}"
        raise InputError(f"{self._named(index)} returns {what}; accepted: a tensor or a tuple of tensors")

    def _named(self, index: int) -> str:
        return f"layer {index} ({type(self.modules[index]).__name__})"

    def check_repeats(self, index: int, state: tuple[Any, ...], iteration: int, microbatch: int) -> None:
        """Reject a layer whose pass depends on more than its input and position.

        Such a layer draws from a generator of its own, or keeps a count in Python: its result would depend on
        which node runs it, and on how many passes that node has run.
        """
        if not self.is_first_check(f"layer {index}"):
            return
        names, buffers = self.names([index]), self.buffers([index])
        # Copies, because a layer may work in place.
        copies = [tuple(one.clone() if isinstance(one, Tensor) else one for one in state) for _ in range(2)]
        first, second = (self.apply_layer(index, one, iteration, microbatch) for one in copies)
        self.check_names(names, [index])
        self.check_buffers(buffers)
        parts = [one if isinstance(one, tuple) else (one,) for one in (first, second)]
        pairs = zip(*parts, strict=False)
        if len(parts[0]) != len(parts[1]) or not all(_has_equal_bits(one, other) for one, other in pairs):
            what = (
                f"{self._named(index)} returns something else for the same input, position and random state"
            )
            raise InputError(
                f"{what}; accepted: layers that draw from torch, NumPy's or Python's global generator, and "
                "keep no state from pass to pass"
            )

    def is_first_check(self, what: str) -> bool:
        """Return True the first time that something is checked in this process."""
        is_first = what not in self._checked
        self._checked.add(what)
        return is_first

    def parameters(self, index: int) -> dict[str, nn.Parameter]:
        """Return the trained weights of a layer by name."""
        return {name: one for name, one in self.modules[index].named_parameters() if one.requires_grad}

    def buffers(self, layers: Iterable[int]) -> dict[tuple[int, str], Tensor]:
        """Return copies of all buffers."""
        return {
            (layer, name): one.clone()
            for layer in layers
            for name, one in self.modules[layer].named_buffers()
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
            for found in (self.modules[layer].named_parameters(), self.modules[layer].named_buffers())
            for name, _ in found
        }

    def check_names(self, before: Collection[tuple[int, str]], layers: Iterable[int]) -> None:
        """Reject parameters and buffers that a pass adds or removes: copies and checkpoints lack them."""
        for layer, name in sorted(self.names(layers) ^ set(before)):
            what = f"{self._named(layer)}: a pass adds or removes {name!r}"
            raise InputError(f"{what}; accepted: those that the layer has when it is built")

    def check_buffers(self, before: Mapping[tuple[int, str], Tensor]) -> None:
        """Refuse buffers that passes change: pipelines see other samples, so that theirs would differ."""
        for (layer, name), now in self.buffers({layer for layer, _ in before}).items():
            if not torch.equal(now, before[layer, name]):
                what = f"layer {layer}: a pass changes its buffer {name!r}"
                raise InputError(
                    f"{what}, and each pipeline sees other samples; accepted: buffers that stay as they are"
                )

    def check_gradients(self, layers: Iterable[int]) -> None:
        """Reject gradients that cannot be added up with those of other pipelines."""
        for layer in layers:
            for name, one in self.parameters(layer).items():
                if one.grad is not None and one.grad.layout is not torch.strided:
                    kind = str(one.grad.layout).removeprefix("torch.")
                    what = f"{self._named(layer)}: the gradient of {name!r} has the layout {kind}"
                    raise InputError(f"{what}; accepted: dense gradients, such as those of sparse=False")

    def clear_gradients(self) -> None:
        """Forget the gradients of all layers."""
        for module in self.modules.values():
            module.zero_grad(set_to_none=True)

    def scale_gradients(self, layers: Iterable[int], factor: float) -> None:
        """Multiply the gradients of layers."""
        for layer in layers:
            for one in self.parameters(layer).values():
                # Not in place: tied weights share theirs.
                one.grad = None if one.grad is None else one.grad * factor

    def squared_norm(self, index: int, left_out: Container[tuple[int, str]]) -> float:
        """Return the sum of the squared gradients of a layer, without some weights; exact to double."""
        squares = [
            one.grad.double().square().sum()
            for name, one in self.parameters(index).items()
            if one.grad is not None and (index, name) not in left_out
        ]
        return float(torch.stack(squares).sum()) if squares else 0.0

    def step(self, layers: Iterable[int], iteration: int) -> None:
        """Update layers with their gradients, at the rate of an iteration."""
        rate = (self._chain.rate or self._job.rate)(iteration)
        for index in layers:
            if (optimizer := self._optimizers[index]) is not None:
                for group in optimizer.param_groups:
                    group["lr"] = rate
                optimizer.step()

    def state(self, index: int) -> State:
        """Return all that a layer is: weights, buffers and optimizer state, not copied."""
        module, optimizer = self.modules[index], self._optimizers[index]
        found = {f"parameter/{name}": one.detach() for name, one in module.named_parameters()}
        found |= {f"buffer/{name}": one.detach() for name, one in module.named_buffers()}
        for name, weight in self.parameters(index).items():
            for key, value in (optimizer.state.get(weight, {}) if optimizer is not None else {}).items():
                if value is None:
                    continue
                if not isinstance(value, Tensor):
                    kind = type(optimizer).__name__
                    raise InputError(f"optimizer {kind} keeps {key} = {value!r}; accepted: tensors only")
                found[f"optimizer/{name}/{key}"] = value.detach()
        return found

    @torch.no_grad()
    def load(self, index: int, state: Mapping[str, Tensor]) -> None:
        """Take over the state of a layer that is held; an `InputError` says that it is of another one."""
        module, optimizer = self.modules[index], self._optimizers[index]
        own: State = {f"parameter/{name}": one for name, one in module.named_parameters()}
        own |= {f"buffer/{name}": one for name, one in module.named_buffers()}
        given = {name: one for name, one in state.items() if not name.startswith("optimizer/")}
        if {name: one.shape for name, one in given.items()} != {name: one.shape for name, one in own.items()}:
            raise InputError(
                f"state of layer {index} with {', '.join(sorted(given))}; accepted: {', '.join(sorted(own))} "
                "with the same shapes"
            )
        for name, one in own.items():
            one.copy_(given[name])
        if optimizer is None:
            return
        optimizer.state.clear()
        for name, weight in self.parameters(index).items():
            start = f"optimizer/{name}/"
            moments = {key.removeprefix(start): one for key, one in state.items() if key.startswith(start)}
            if moments:
                optimizer.state[weight] = {key: one.clone() for key, one in moments.items()}

    def checksum(self, index: int) -> str:
        """Return the SHA-256 of the state of a layer."""
        found = hashlib.sha256()
        for name, one in sorted(self.state(index).items()):
            found.update(f"{name}\0{one.dtype}\0{tuple(one.shape)}\0".encode())
            found.update(one.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return found.hexdigest()


# ------------------------------------------------------------------------------------------------
# Transfers between the processes of a plan, over groups that can be dropped and built anew.
#
# Groups are objects of their own beside those that `torch.distributed` knows of. What closes their sockets,
# and so releases whoever waits for this process, is that nobody refers to them or to a work any more. Both
# are attributes of objects of this module only, which `Links.close` empties: whatever else still refers to
# these, the frames of an exception for example, keeps no socket open.


_LOOK_S = 0.02


class LostPeerError(TrainingError):
    """A transfer failed because a process at its other end is gone, or has dropped its groups."""


class Transfer:
    """One that was started; it keeps its tensor."""

    def __init__(self, work: Any, tensor: Tensor, pending: set["Transfer"]) -> None:
        self._work, self._tensor, self._pending = work, tensor, pending
        pending.add(self)

    def finish(self) -> None:
        """Wait for its end; a `LostPeerError` says that the other side is gone."""
        Links.n_waiting += 1
        try:
            if self._work is not None:
                _guarded(lambda: self._work.wait())
        finally:
            Links.n_waiting -= 1
            self.drop()

    def drop(self) -> None:
        """Forget it."""
        self._work = None
        self._pending.discard(self)


class Links:
    """Point-to-point transfers between all members, and sums over groups of them.

    Parameters
    ----------
    members, own
        Nodes in the order of their ranks, and the node of this process.
    groups
        Nodes that add up together, in an order that all members share.
    store
        Where the members meet, of this generation alone; closed, it releases those who still wait there.
    meet_s
        Longest time until all groups are built [s]; None for ``timeout_s``.
    """

    n_waiting = 0
    """Waits of this process for others that have not ended."""

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
            # Nobody begins before all are there: who gave up in the middle keeps connections for a while,
            # and whoever waited at the other end of one would not be told.
            _guarded(lambda: store.set(f"met/{own}", "1"))
            left = timedelta(seconds=max(self._meet_until_s - time.monotonic(), _LOOK_S))
            _guarded(lambda: store.wait([f"met/{node}" for node in members], left))
        except LostPeerError as error:
            problem = str(error)
        if problem is not None:  # raised here, so that it refers to no frame that still knows a group
            self.close()
            raise LostPeerError(f"node {own} could not meet nodes {list(members)}: {problem}")

    def _meet(self, name: str, among: list[int], store: Any) -> Any:
        """Build a group, unless the store is closed meanwhile: gloo would wait long for who died just now."""
        found, problems, done = list[Any](), list[str](), threading.Event()

        def build() -> None:
            try:
                found.append(self._build(name, among, store))
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
        return found.pop()

    def _build(self, name: str, among: list[int], store: Any) -> Any:
        # The stubs of torch hide its public stores and backends.
        dist: Any = importlib.import_module("torch.distributed")
        backend = dist.ProcessGroupGloo if self.device.type == "cpu" else dist.ProcessGroupNCCL
        return backend(dist.PrefixStore(name, store), among.index(self.own), len(among), self._timeout)

    def send(self, tensor: Tensor, node: int, tag: int) -> Transfer:
        """Start to send a tensor, which must not change until the transfer is finished."""
        return self._started(tensor, lambda: self._built[None].send([tensor], self._ranks[node], tag))

    def receive(self, tensor: Tensor, node: int, tag: int) -> Tensor:
        """Fill a tensor with what a node sends under the same tag; those of one tag come in their order."""
        self._started(tensor, lambda: self._built[None].recv([tensor], self._ranks[node], tag)).finish()
        return tensor

    def all_reduce(self, tensor: Tensor, group: tuple[int, ...]) -> Transfer:
        """Start to replace a tensor by its sum over a group; all of its members start theirs in one order."""
        return self._started(tensor, lambda: self._built[group].allreduce([tensor]))

    def send_values(self, values: Any, node: int, tag: int) -> list[Transfer]:
        """Start to send what JSON can write."""
        text = torch.frombuffer(bytearray(json.dumps(values).encode()), dtype=torch.uint8).to(self.device)
        size = torch.tensor([text.numel()], device=self.device)
        return [self.send(size, node, tag), self.send(text, node, tag)]

    def receive_values(self, node: int, tag: int) -> Any:
        """Receive what a node sends with `send_values`."""
        size = self.receive(torch.empty(1, dtype=torch.int64, device=self.device), node, tag)
        text = torch.empty(int(size.item()), dtype=torch.uint8, device=self.device)
        return json.loads(bytes(self.receive(text, node, tag).tolist()))

    def close(self) -> None:
        """Drop all groups and works; never waits for anybody."""
        for transfer in list(self._pending):
            transfer.drop()
        groups = list(self._built.values())
        self._built.clear()
        # The end of a group waits for sums that are under way in it, which may wait for a process that waits
        # for another of these groups: so each ends by itself.
        while groups:
            threading.Thread(target=_drop, args=([groups.pop()], self.device)).start()

    def _started(self, tensor: Tensor, start: Callable[[], Any]) -> Transfer:
        if not self._built:
            raise LostPeerError(f"node {self.own} is connected to nobody")
        return Transfer(_guarded(start), tensor, self._pending)


def _guarded(call: Callable[[], Any]) -> Any:
    """Call what torch raises errors of the network from; no frame of theirs is left in the one raised."""
    problem = ""
    try:
        return call()
    except RuntimeError as error:
        problem = str(error).partition("\n")[0]
    raise LostPeerError(problem)


def _drop(groups: list[Any], device: torch.device) -> None:
    if device.type == "cuda":
        groups[0].abort()
    groups.clear()


# ------------------------------------------------------------------------------------------------
# Forward and backward passes of one stage of a pipeline, in the order of its instructions.

_ACTIVATION_TAG, _GRADIENT_TAG = 1, 2


def as_tuple(state: Any) -> tuple[Any, ...]:
    """Return what passes between layers as arguments of the next one."""
    return tuple(state) if isinstance(state, tuple | list) else (state,)


@dataclass(frozen=True, slots=True)
class StagePlace:
    """Where a stage stands in its pipeline, and which microbatches of an iteration the pipeline has.

    ``previous`` and ``following`` are the nodes of the stages beside it, None where there is none.
    """

    index: int
    n_stages: int
    layers: range
    microbatches: range
    previous: int | None
    following: int | None


@dataclass(slots=True)
class _Slot:
    """What a stage keeps of a microbatch between its passes."""

    microbatch: int
    inputs: tuple[Any, ...] = ()
    targets: Any = None
    outputs: tuple[Any, ...] = ()
    loss: Tensor | None = None
    gradients: list[Tensor] = field(default_factory=list)


Shape = tuple[tuple[int, ...], str, bool]
"""Shape, type, and whether a gradient comes back."""


class StagePasses:
    """The part of an iteration that one stage has; as many microbatches as it needs are kept at a time."""

    def __init__(
        self,
        job: ChainJob,
        chain: Chain,
        held: HeldLayers,
        place: StagePlace,
        links: Links,
        announce: Callable[[str], object],
    ) -> None:
        self._job, self._chain, self._held = job, chain, held
        self._place, self._links, self._announce = place, links, announce
        count = len(place.microbatches)
        self._order = list(instructions(place.index, place.n_stages, count))
        self._n_buffers = n_buffers(place.index, place.n_stages, count)
        self._sent: list[list[Transfer]] = []
        self._checks = False
        self._outgoing: list[Shape] | None = None
        self._incoming: list[Shape] | None = None
        self._do: dict[str, Callable[[_Slot], None]] = {
            "load": self._load, "recv_act": self._receive_activation, "fwd": self._forward,
            "send_act": self._send_activation, "recv_grad": self._receive_gradient, "bwd": self._backward,
            "send_grad": self._send_gradient,
        }  # fmt: skip

    def run(self, iteration: int, *, checks: bool = False) -> list[float]:
        """Leave the sums of gradients in the weights and return the losses, empty but for the last stage.

        With ``checks`` every layer runs the first microbatch three times, and is rejected if its pass depends
        on more than its input and position.
        """
        self._iteration, losses, self._checks = iteration, list[Tensor](), checks
        slots: list[_Slot | None] = [None] * self._n_buffers
        self._sent = [[] for _ in slots]
        for one in self._order:
            slot = slots[one.buffer]
            if slot is None or slot.microbatch != one.microbatch:
                self._finish(one)
                slot = slots[one.buffer] = _Slot(one.microbatch)
            self._current = one.buffer
            self._do[one.kind](slot)
            if one.kind == "fwd" and slot.loss is not None:
                losses.append(slot.loss.detach())
        for sent in self._sent:
            for transfer in sent:
                transfer.finish()
        self._sent = []
        return [float(one) for one in losses]

    def _finish(self, one: Instruction) -> None:
        """Wait until what a buffer held was sent."""
        for transfer in self._sent[one.buffer]:
            transfer.finish()
        self._sent[one.buffer] = []

    def _load(self, slot: _Slot) -> None:
        number, device = self._place.microbatches[slot.microbatch], self._links.device
        load = partial(load_microbatch, self._chain, self._job, self._iteration, number, device)
        inputs, targets = load()
        if self._checks and self._chain.samples is not None and self._held.is_first_check("samples"):
            what = f"samples of the data set {type(self._chain.samples).__name__}"
            check_repeated(what, (inputs, targets), load())
        if self._place.previous is None:
            slot.inputs = as_tuple(inputs)
        slot.targets = targets

    def _receive_activation(self, slot: _Slot) -> None:
        node = _present(self._place.previous)
        if self._incoming is None:
            self._incoming = self._links.receive_values(node, _ACTIVATION_TAG)
        slot.inputs = tuple(
            self._links.receive(self._empty(shape, kind), node, _ACTIVATION_TAG).requires_grad_(returns)
            for shape, kind, returns in self._incoming
        )

    def _empty(self, shape: Sequence[int], kind: str) -> Tensor:
        return torch.empty(tuple(shape), dtype=getattr(torch, kind), device=self._links.device)

    def _forward(self, slot: _Slot) -> None:
        self._announce("forward")
        state, number = slot.inputs, self._place.microbatches[slot.microbatch]
        checks, self._checks = self._checks, False
        for layer in self._place.layers:
            if checks:
                self._held.check_repeats(layer, state, self._iteration, number)
            state = as_tuple(self._held.apply_layer(layer, state, self._iteration, number))
        if self._place.following is None:
            if checks and self._held.is_first_check("loss"):
                self._check_loss(state, slot.targets)
            slot.loss = checked_loss(self._chain.loss(state if len(state) > 1 else state[0], slot.targets))
        else:
            slot.outputs = state

    def _check_loss(self, state: tuple[Any, ...], targets: Any) -> None:
        """Reject a loss that depends on more than outputs, targets and the global random states."""
        found = []
        for _ in range(2):
            # Copies, because a loss may work in place.
            copies = tree_map_only(Tensor, torch.clone, (state, targets))
            with draws_kept(self._links.device):
                one, wanted = copies
                found.append(checked_loss(self._chain.loss(one if len(one) > 1 else one[0], wanted)))
        check_repeated("losses of the same outputs and targets", *found)

    def _send_activation(self, slot: _Slot) -> None:
        node, sent = _present(self._place.following), self._sent[self._current]
        found = [(tuple(one.shape), type_name(one), one.requires_grad) for one in slot.outputs]
        if self._outgoing is None:
            self._outgoing = found
            sent += self._links.send_values(found, node, _ACTIVATION_TAG)
        elif found != self._outgoing:
            what = f"layer {self._place.layers[-1]} returned {found} after {self._outgoing}"
            raise InputError(f"{what}; accepted: the same for all microbatches")
        sent += [self._links.send(one.detach(), node, _ACTIVATION_TAG) for one in slot.outputs]

    def _receive_gradient(self, slot: _Slot) -> None:
        node = _present(self._place.following)
        slot.gradients = [
            self._links.receive(torch.empty_like(one), node, _GRADIENT_TAG)
            for one in slot.outputs
            if one.requires_grad
        ]

    def _backward(self, slot: _Slot) -> None:
        self._announce("backward")
        if slot.loss is not None:
            if slot.loss.requires_grad:
                slot.loss.backward()  # type: ignore[no-untyped-call]
        elif slot.gradients:
            torch.autograd.backward([one for one in slot.outputs if one.requires_grad], slot.gradients)
        slot.loss, slot.outputs, slot.gradients, slot.targets = None, (), [], None

    def _send_gradient(self, slot: _Slot) -> None:
        node = _present(self._place.previous)
        for one in slot.inputs:
            if one.requires_grad:
                gradient = torch.zeros_like(one) if one.grad is None else one.grad.contiguous()
                self._sent[self._current].append(self._links.send(gradient, node, _GRADIENT_TAG))
        slot.inputs = ()


def checked_loss(found: Any) -> Tensor:
    """Return the loss of a microbatch; an `InputError` says that it is none."""
    if isinstance(found, Tensor) and found.numel() == 1:
        return found
    what = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
    raise InputError(f"the loss of the chain returned {what}; accepted: a tensor with one value")


def type_name(tensor: Tensor) -> str:
    """Return the name of the type of a tensor in torch."""
    return str(tensor.dtype).removeprefix("torch.")


def _present(node: int | None) -> int:
    if node is None:
        raise RuntimeError("an end of the pipeline has no stage beyond it")
    return node


# ------------------------------------------------------------------------------------------------
# The sum of gradients over pipelines whose stages begin and end at different layers.
#
# Every process goes through the same buckets in the same order, by descending layer, and takes part in
# those of layers that it holds. Layers in a row with the same owners make one bucket; weights that are tied
# make one of their own, to which each of their layers contributes.

_BUCKET_TAG, _SUM_TAG = 16, 17
Ties = Sequence[tuple[tuple[int, str], tuple[int, str]]]
Weight = tuple[int, str]
Held = Mapping[int, Mapping[str, nn.Parameter]]
"""Weights by layer and name."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that are added up together.

    Parameters
    ----------
    layers
        Their layers, descending; of tied weights, ascending.
    tied
        The weights that are tied, None for all of the layers that are not.
    contributions
        Node and layers of each summand, in the order of the sum.
    """

    layers: tuple[int, ...]
    tied: tuple[Weight, ...] | None
    contributions: tuple[tuple[int, tuple[int, ...]], ...]

    @property
    def nodes(self) -> tuple[int, ...]:
        """Return all who take part, the one that adds up first."""
        return tuple(dict.fromkeys(node for node, _ in self.contributions))

    def weights(self, layers: tuple[int, ...], held: Held, tied: frozenset[Weight]) -> list[nn.Parameter]:
        """Return the weights that a contribution is made of."""
        if self.tied is not None:
            return [held[layer][name] for layer, name in self.tied if layer in layers]
        return [
            one for layer in layers for name, one in held[layer].items() if (layer, name) not in tied
        ]  # fmt: skip


def classes(ties: Ties) -> list[tuple[Weight, ...]]:
    """Return the sets of weights that are tied to each other, each ascending."""
    found: list[set[Weight]] = []
    for pair in ties:
        joined = set(pair).union(*(one for one in found if one & set(pair)))
        found = [one for one in found if not one & joined] + [joined]
    return sorted(tuple(sorted(one)) for one in found)


def buckets(plan: HybridPlan, n_layers: int, ties: Ties, bucketed: bool) -> list[Bucket]:
    """Return all buckets in the order in which every process goes through them."""
    runs: list[tuple[tuple[int, ...], list[int]]] = []
    for layer in reversed(range(n_layers)):
        nodes = owners(plan, layer)
        if bucketed and runs and runs[-1][0] == nodes:
            runs[-1][1].append(layer)
        else:
            runs.append((nodes, [layer]))
    plain = [
        Bucket(tuple(layers), None, tuple((node, tuple(layers)) for node in nodes)) for nodes, layers in runs
    ]
    return plain + [_tied(plan, weights) for weights in reversed(classes(ties))]


def _tied(plan: HybridPlan, weights: tuple[Weight, ...]) -> Bucket:
    places = [owners(plan, layer) for layer, _ in weights]
    summands = [
        (node, (layer,)) for nodes in zip(*places, strict=True)
        for node, (layer, _) in zip(nodes, weights, strict=True)
    ]  # fmt: skip
    return Bucket(tuple(layer for layer, _ in weights), weights, tuple(summands))


def sum_groups(found: Sequence[Bucket]) -> list[tuple[int, ...]]:
    """Return the sets of nodes that add up together, each once, in an order that all share."""
    return list(dict.fromkeys(one.nodes for one in found if len(one.nodes) > 1))


def _flat(weights: Sequence[nn.Parameter]) -> Tensor:
    parts = [torch.zeros_like(one) if one.grad is None else one.grad for one in weights]
    return torch.cat([one.reshape(-1) for one in parts])


def _scatter(total: Tensor, weights: Sequence[nn.Parameter]) -> None:
    start = 0
    for one in weights:
        one.grad = total[start : start + one.numel()].view_as(one)
        start += one.numel()


@dataclass(frozen=True, slots=True)
class _Own:
    """The part of this process in a bucket: its summands by their number, and where the sum goes."""

    bucket: Bucket
    summands: dict[int, Tensor]
    weights: list[list[nn.Parameter]]


def _parts(found: Sequence[Bucket], node: int, held: Held, ties: Ties) -> Iterator[_Own]:
    tied = frozenset(weight for one in classes(ties) for weight in one)
    for bucket in found:
        numbers = [number for number, (one, _) in enumerate(bucket.contributions) if one == node]
        weights = [bucket.weights(bucket.contributions[one][1], held, tied) for one in numbers]
        if weights and weights[0]:
            summands = {number: _flat(one) for number, one in zip(numbers, weights, strict=True)}
            yield _Own(bucket, summands, weights)


def all_reduce(
    found: Sequence[Bucket], links: Links, held: Held, ties: Ties, divisor: int, begin: Callable[[], object]
) -> int:
    """Add up with the sum of the backend.

    Gradients become their sum over all pipelines, divided by ``divisor``; ``begin`` is called before each
    sum. Returns in how many sums with others this process took part.
    """
    running: list[tuple[_Own, Tensor, Transfer | None]] = []
    for own in _parts(found, links.own, held, ties):
        begin()
        total, nodes = _added(list(own.summands.values())), own.bucket.nodes
        running.append((own, total, links.all_reduce(total, nodes) if len(nodes) > 1 else None))
    for own, total, transfer in running:
        if transfer is not None:
            transfer.finish()
        total /= divisor
        for weights in own.weights:
            _scatter(total, weights)
    return sum(transfer is not None for _, _, transfer in running)


def ordered_sums(
    found: Sequence[Bucket], links: Links, held: Held, ties: Ties, divisor: int, begin: Callable[[], object]
) -> int:
    """Add up in the order of the pipelines, at the first owner; otherwise as `all_reduce`."""
    parts = list(_parts(found, links.own, held, ties))
    sent = [
        links.send(one, own.bucket.nodes[0], _BUCKET_TAG)
        for own in parts if own.bucket.nodes[0] != links.own
        for one in own.summands.values()
    ]  # fmt: skip
    for own in parts:
        begin()
        root, *others = own.bucket.nodes
        empty = torch.empty_like(next(iter(own.summands.values())))
        if root != links.own:
            total = links.receive(empty, root, _SUM_TAG)
        else:
            total = _added(
                [
                    own.summands[number] if node == root
                    else links.receive(torch.empty_like(empty), node, _BUCKET_TAG)
                    for number, (node, _) in enumerate(own.bucket.contributions)
                ]
            )  # fmt: skip
            total /= divisor
            sent += [links.send(total, node, _SUM_TAG) for node in others]
        for weights in own.weights:
            _scatter(total, weights)
    for transfer in sent:
        transfer.finish()
    return sum(len(own.bucket.nodes) > 1 for own in parts)


def _added(summands: Sequence[Tensor]) -> Tensor:
    total = summands[0].clone()
    for one in summands[1:]:
        total += one
    return total


# ------------------------------------------------------------------------------------------------
# One process of a resilient job: its stage of a plan, the sums with others, and the layers that it holds.

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
