"""Forward and backward passes of one optimiser step, and the clock that times its phases."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from makespan.training._job import PhaseTimes

__all__ = ["Accumulation", "Clock", "Loss", "Passes"]

Loss = Callable[[Tensor, Tensor], Tensor]
"""From logits and targets of a micro-batch to its share of the loss."""
Mark = float | torch.cuda.Event


class Clock:
    """Marks of one optimiser step."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._passes: list[tuple[Mark, Mark]] = []
        self._open: Mark = 0.0
        self._marks = [self._mark()]

    def _mark(self) -> Mark:
        if not self._on_gpu:
            return time.perf_counter()
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def start_forward(self) -> None:
        """Begin a forward pass."""
        self._open = self._mark()

    def end_forward(self) -> None:
        """End the forward pass that was begun last."""
        self._passes.append((self._open, self._mark()))

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Count a block as forward pass."""
        self.start_forward()
        yield
        self.end_forward()

    def next_phase(self) -> None:
        """End a phase: gradients first, then the optimiser, then the exchange of the loss."""
        self._marks.append(self._mark())

    def times(self) -> PhaseTimes:
        """Return the times of the finished step; waits for the device."""
        if self._on_gpu:
            torch.cuda.synchronize()
        start, gradients, optimizer, end = self._marks
        forward = sum(_elapsed(first, last) for first, last in self._passes)
        return PhaseTimes(
            _elapsed(start, end),
            forward,
            _elapsed(start, gradients) - forward,
            _elapsed(gradients, optimizer),
        )


def _elapsed(first: Mark, last: Mark) -> float:
    """Seconds between two marks of one kind."""
    if isinstance(first, torch.cuda.Event) and isinstance(last, torch.cuda.Event):
        return float(first.elapsed_time(last)) / 1e3
    if isinstance(first, float) and isinstance(last, float):
        return last - first
    raise TypeError("marks of different kinds")


class Passes(Protocol):
    """What computes the gradients of a replica's share of the batch."""

    def run(self, inputs: Tensor, targets: Tensor, clock: Clock) -> Tensor:
        """Leave gradients in the parameters and return the summed loss, 0 where it is not computed."""


class Accumulation:
    """One model after another over the micro-batches; gradients are exchanged in the last pass.

    Models under ``fully_shard`` exchange theirs in every pass, so that they never hold a whole one.
    """

    def __init__(self, model: nn.Module, n_microbatches: int, loss: Loss) -> None:
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
