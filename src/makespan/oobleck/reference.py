"""Plain training in one process: the reference of every plan.

It shares the definition of a job with the rest, but no code of stages, sums or steps.
"""

from typing import Any

import torch
from torch import Tensor, nn

from makespan.lazy import renamed_names
from makespan.oobleck.chain import build_layer, build_optimizer, load_chain, load_microbatch, seed_layer
from makespan.oobleck.job import ChainJob

_CPU = torch.device("cpu")


class SingleProcessReference:
    """Model as one module with one optimizer; gradients accumulate, microbatch after microbatch."""

    def __init__(self, job: ChainJob) -> None:
        self._job, self._chain = job, load_chain(job)
        self._layers = nn.ModuleList(
            build_layer(self._chain, job, index) for index in range(self._chain.n_layers)
        )
        for (earlier, source), (later, name) in self._chain.tied:
            place, _, last = name.rpartition(".")
            weight = self._layers[earlier].get_parameter(source)
            setattr(self._layers[later].get_submodule(place), last, weight)
        trained = [one for one in self._layers.parameters() if one.requires_grad]
        self._optimizer = build_optimizer(self._chain, job, trained)

    def iterate(self, iteration: int) -> float:
        """Train one iteration and return its mean loss, before the step."""
        job, total = self._job, 0.0
        for group in self._optimizer.param_groups:
            group["lr"] = (self._chain.rate or job.rate)(iteration)
        self._optimizer.zero_grad()
        for number in range(job.n_microbatches):
            inputs, targets = load_microbatch(self._chain, job, iteration, number, _CPU)
            state: Any = inputs
            for index, layer in enumerate(self._layers):
                seed_layer(job, _CPU, iteration, number, index)
                state = layer(*state) if isinstance(state, tuple | list) else layer(state)
            loss = self._chain.loss(state, targets)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        # The sum is divided, not each summand: the first step of Adam divides gradients by their own size, so
        # one more rounding would show in the weights with the smallest gradients.
        for weight in self._layers.parameters():
            if weight.grad is not None:
                weight.grad /= job.n_microbatches
        if job.clip_norm is not None:
            nn.utils.clip_grad_norm_(self._layers.parameters(), job.clip_norm)
        self._optimizer.step()
        return total / job.n_microbatches

    def parameters(self, layer: int) -> dict[str, Tensor]:
        """Return the weights of a layer by name."""
        return {name: one.detach() for name, one in self._layers[layer].named_parameters()}


__getattr__ = renamed_names(__name__, {"PlainTraining": "SingleProcessReference"})
