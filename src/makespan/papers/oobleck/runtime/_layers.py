"""The layers that a process holds: weights, buffers and optimizer state of each, by name."""

import hashlib
from collections.abc import Container, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from makespan.errors import InputError
from makespan.papers.oobleck.runtime._chain import Chain, build_layer, build_optimizer, seed_layer
from makespan.papers.oobleck.runtime._job import ChainJob
from makespan.training import refuse_plain_clipping

__all__ = ["HeldLayers", "State"]

State = dict[str, Tensor]


class _Boundary(torch.autograd.Function):
    """What passes from layer to layer, laid out in both directions as after a transfer.

    Kernels depend on how their operands lie in memory, so that a cut would change bits without it.
    """

    @staticmethod
    def forward(context: Any, state: Tensor) -> Tensor:
        return state.contiguous() if not state.is_contiguous() else state.view_as(state)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].contiguous()


class HeldLayers:
    """Layers by their index, each with an optimizer of its own."""

    def __init__(self, job: ChainJob, chain: Chain, device: torch.device) -> None:
        self._job, self._chain, self._device = job, chain, device
        self.modules: dict[int, nn.Module] = {}
        self._optimizers: dict[int, torch.optim.Optimizer | None] = {}

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
        if isinstance(found, tuple):
            return tuple(_Boundary.apply(one) for one in found)  # type: ignore[no-untyped-call]
        return _Boundary.apply(found)  # type: ignore[no-untyped-call]

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

    def check_buffers(self, before: Mapping[tuple[int, str], Tensor]) -> None:
        """Refuse buffers that passes change: pipelines see other samples, so that theirs would differ."""
        for (layer, name), now in self.buffers({layer for layer, _ in before}).items():
            if not torch.equal(now, before[layer, name]):
                what = f"layer {layer}: a pass changes its buffer {name!r}"
                raise InputError(
                    f"{what}, and each pipeline sees other samples; accepted: buffers that stay as they are"
                )

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
