"""Forward and backward passes of one stage of a pipeline, in the order of its instructions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from makespan.errors import InputError
from makespan.oobleck.runtime._chain import Chain, check_repeated, draws_kept, load_microbatch
from makespan.oobleck.runtime._instructions import Instruction, instructions, n_buffers
from makespan.oobleck.runtime._job import ChainJob
from makespan.oobleck.runtime._layers import HeldLayers
from makespan.oobleck.runtime._links import Links, Transfer

__all__ = ["StagePasses", "StagePlace", "as_tuple", "checked_loss", "type_name"]

_ACTIVATION, _GRADIENT = 1, 2


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
            self._incoming = self._links.receive_values(node, _ACTIVATION)
        slot.inputs = tuple(
            self._links.receive(self._empty(shape, kind), node, _ACTIVATION).requires_grad_(returns)
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
            sent += self._links.send_values(found, node, _ACTIVATION)
        elif found != self._outgoing:
            what = f"layer {self._place.layers[-1]} returned {found} after {self._outgoing}"
            raise InputError(f"{what}; accepted: the same for all microbatches")
        sent += [self._links.send(one.detach(), node, _ACTIVATION) for one in slot.outputs]

    def _receive_gradient(self, slot: _Slot) -> None:
        node = _present(self._place.following)
        slot.gradients = [
            self._links.receive(torch.empty_like(one), node, _GRADIENT)
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
                self._sent[self._current].append(self._links.send(gradient, node, _GRADIENT))
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
