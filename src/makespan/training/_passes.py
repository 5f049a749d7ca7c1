"""Forward and backward passes of one optimiser step."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from makespan.training._clock import Clock

__all__ = ["Accumulation", "Loss", "Passes"]

Loss = Callable[[Tensor, Tensor], Tensor]
"""From logits and targets of a micro-batch to its share of the loss."""


class Passes(Protocol):
    """What computes the gradients of a replica's share of the batch."""

    def run(self, inputs: Tensor, targets: Tensor, clock: Clock) -> Tensor:
        """Leave gradients in the parameters and return the summed loss, 0 where it is not computed."""


class Accumulation:
    """One model after another over the micro-batches; gradients are exchanged in the last pass.

    Models under ``fully_shard`` exchange theirs in every pass, so that they never hold a whole one.
    """

    def __init__(self, model: nn.Module, n_microbatches: int, loss: Loss) -> None:
        """Take the model as wrapped for data parallelism."""
        self._model, self._count, self._loss = model, n_microbatches, loss

    def run(self, inputs: Tensor, targets: Tensor, clock: Clock) -> Tensor:
        """Run all micro-batches."""
        total = torch.zeros((), device=inputs.device)
        parts = zip(inputs.chunk(self._count), targets.chunk(self._count), strict=True)
        for number, (samples, wanted) in enumerate(parts):
            with self._exchange(last=number == self._count - 1):
                with clock.forward():
                    loss = self._loss(self._model(samples), wanted)
                loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total

    def _exchange(self, last: bool) -> AbstractContextManager[None]:
        if isinstance(self._model, DistributedDataParallel) and not last:
            return self._model.no_sync()
        return nullcontext()
