"""The layers that a process holds: weights, buffers and optimizer state of each, by name."""

import hashlib
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from makespan.errors import InputError
from makespan.oobleck.runtime._chain import Chain, build_layer, build_optimizer, seed_layer
from makespan.oobleck.runtime._job import ChainJob
from makespan.training import refuse_plain_clipping

__all__ = ["HeldLayers", "State"]

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
