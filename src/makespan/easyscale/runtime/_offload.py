"""Gradients on their way from a device to the host, while the device goes on."""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["HostCopies", "settle"]


class HostCopies:
    """Copies vectors of a device to pinned memory on a stream of its own; on a CPU they stay where they are.

    The next logical worker computes meanwhile. What is copied keeps its memory until then: the allocator is
    told of the other stream, so that whoever gets the memory next waits for the copy.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copied: list[torch.cuda.Event] = []

    def start(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """Return copies on the host, which may be read after `finish`."""
        if self._stream is None:
            return list(vectors)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        copies = [torch.empty(one.shape, dtype=one.dtype, pin_memory=True) for one in vectors]
        with torch.cuda.stream(self._stream):
            for vector, copy in zip(vectors, copies, strict=True):
                copy.copy_(vector, non_blocking=True)
                vector.record_stream(self._stream)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        self._copied.append(event)
        return copies

    def finish(self) -> None:
        """Wait until all copies are made."""
        for event in self._copied:
            event.synchronize()
        self._copied.clear()


def settle(device: torch.device) -> None:
    """Wait for what a device was given to compute, so that a clock says how long it took; not for copies."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
