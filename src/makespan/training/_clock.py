"""Wall times of the phases of a step: host clock on CPU, device events on GPU."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from makespan.training._job import PhaseTimes

__all__ = ["Clock"]

Mark = float | torch.cuda.Event


class Clock:
    """Marks of one optimiser step.

    Parameters
    ----------
    device
        Device of the process; marks on a GPU are taken when the work before them is done.
    """

    def __init__(self, device: torch.device) -> None:
        """Start the step."""
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
