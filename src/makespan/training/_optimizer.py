"""AdamW on the local part of each parameter: whole, partitioned over replicas, or on the host."""

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim.adamw import adamw

from makespan.training._job import TrainingJob

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["Optimizer", "average_gradients", "complete_gradients", "gradient_of", "is_distributed"]

_BETAS = (0.9, 0.95)
_EPS = 1e-8
_MOMENTS = ("exp_avg", "exp_avg_sq")

Parameters = Mapping[str, torch.nn.Parameter]


def is_distributed(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Whether a tensor is spread over processes, found without loading what only such tensors need."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """Return what this process holds of a tensor, sharing its memory."""
    return tensor.to_local().detach() if is_distributed(tensor) else tensor.detach()


def gradient_of(name: str, parameter: torch.nn.Parameter) -> Tensor:
    """Return the gradient of a parameter, which a backward pass has left."""
    if parameter.grad is None:
        raise RuntimeError(f"the backward pass left no gradient for {name}")
    return parameter.grad


def complete_gradients(parameters: Parameters) -> None:
    """Sum those gradients that tensor parallelism left as one summand a process."""
    for parameter in parameters.values():
        gradient = parameter.grad
        if gradient is not None and is_distributed(gradient) and is_distributed(parameter):
            parameter.grad = gradient.redistribute(placements=parameter.placements)


def average_gradients(parameters: Parameters, group: ProcessGroup) -> None:
    """Replace each gradient by its mean over the replicas, in one exchange."""
    gradients = [local_part(gradient_of(name, parameter)) for name, parameter in parameters.items()]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat, group=group)
    flat /= group.size()
    _scatter(flat, gradients)


def _scatter(flat: Tensor, parts: Sequence[Tensor]) -> None:
    """Copy consecutive stretches of a flat tensor into tensors of any shape."""
    start = 0
    for part in parts:
        part.copy_(flat[start : start + part.numel()].view_as(part))
        start += part.numel()


class Optimizer:
    """AdamW whose state may be partitioned over replicas and kept on the host.

    Under a partition by whole parameters (ZeRO stage 1) each is updated by its owner, who then sends it
    to the other replicas. AdamW is called as a function, because its class loads the compiler of torch,
    which takes a third of the start of a process.
    """

    def __init__(
        self, parameters: Parameters, job: TrainingJob, replicas: ProcessGroup | None, offload: bool
    ) -> None:
        self._parameters, self._job = parameters, job
        self._replicas, self._offload = replicas, offload
        self._owners = _owners(parameters, replicas.size() if replicas is not None else 1)
        here = dist.get_rank(replicas) if replicas is not None else 0
        owned = [name for name in parameters if self._owners[name] == here]
        self._leaves = {name: local_part(parameters[name]) for name in owned}
        if offload:
            self._leaves = {name: leaf.to("cpu", copy=True) for name, leaf in self._leaves.items()}
        self._moments = {
            f"{name}/{moment}": torch.zeros_like(leaf)
            for name, leaf in self._leaves.items()
            for moment in _MOMENTS
        }
        self.set_steps_done(0)

    def set_steps_done(self, steps: int) -> None:
        """Set the step count of AdamW."""
        self._done = {
            name: torch.tensor(float(steps), device=leaf.device) for name, leaf in self._leaves.items()
        }

    @torch.no_grad()
    def step(self, step: int) -> None:
        """Update all parameters of this process; the number of the step decides the learning rate."""
        rate = min(1.0, (step + 1) / max(1, self._job.warmup_steps)) * self._job.learning_rate
        matrices = [name for name, leaf in self._leaves.items() if leaf.dim() >= 2]
        self._update(matrices, rate, self._job.weight_decay)
        self._update([name for name in self._leaves if name not in matrices], rate, 0.0)
        if self._offload:  # the host's parameters go back to the device
            for name, leaf in self._leaves.items():
                local_part(self._parameters[name]).copy_(leaf)
        if self._replicas is not None:
            self._exchange(self._replicas)

    def _update(self, names: Sequence[str], rate: float, decay: float) -> None:
        leaves = [self._leaves[name] for name in names]
        first, second = ([self._moments[f"{name}/{moment}"] for name in names] for moment in _MOMENTS)
        gradients = [
            local_part(gradient_of(name, self._parameters[name])).to(leaf.device)
            for name, leaf in zip(names, leaves, strict=True)
        ]
        adamw(
            leaves, gradients, first, second, [], [self._done[name] for name in names], fused=True,
            amsgrad=False, beta1=_BETAS[0], beta2=_BETAS[1], lr=rate, weight_decay=decay, eps=_EPS,
            maximize=False,
        )  # fmt: skip

    def adopt(self) -> None:
        """Copy the device's parameters to the host, after they were loaded."""
        if self._offload:
            for name, leaf in self._leaves.items():
                leaf.copy_(local_part(self._parameters[name]))

    def _exchange(self, replicas: ProcessGroup) -> None:
        """Send every parameter from its owner to all replicas, one message an owner."""
        for owner in range(replicas.size()):
            parts = [local_part(self._parameters[name]) for name, own in self._owners.items() if own == owner]
            if not parts:
                continue
            flat = torch.cat([part.reshape(-1) for part in parts])
            dist.broadcast(flat, group_src=owner, group=replicas)
            _scatter(flat, parts)

    def moments(self) -> dict[str, Tensor]:
        """Return the moments owned here by name, distributed like their parameters and on their device."""
        return {
            key: _like(self._parameters[key.rpartition("/")[0]], one) for key, one in self._moments.items()
        }

    def set_moments(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over moments that were read into what `moments` returned."""
        for key, moment in self._moments.items():
            moment.copy_(local_part(tensors[key]))


def _like(parameter: torch.nn.Parameter, local: Tensor) -> Tensor:
    """Present a local tensor as distributed in the way of its parameter."""
    on_device = local.to(local_part(parameter).device)
    if not is_distributed(parameter):
        return on_device
    from torch.distributed.tensor import DTensor

    mesh, shape, stride = parameter.device_mesh, parameter.shape, parameter.stride()
    return DTensor.from_local(
        on_device, mesh, parameter.placements, run_check=False, shape=shape, stride=stride
    )


def _owners(parameters: Parameters, count: int) -> dict[str, int]:
    """Give each parameter to the owner who has least so far, largest first."""
    loads, owners = [0] * count, dict.fromkeys(parameters, 0)
    sizes = {name: local_part(parameter).numel() for name, parameter in parameters.items()}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += sizes[name]
    return owners
