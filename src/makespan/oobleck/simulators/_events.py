"""Kinds of events, and the two queues that hold them: the shared one, and the released simulators' own."""

import heapq
from enum import IntEnum
from typing import Any, Protocol

from makespan.sim import EventQueue
from makespan.units import MS

__all__ = ["HeapList", "Kind", "Queue", "SharedQueue"]

_BITS = 4  # of a key, for the kind


class Kind(IntEnum):
    """What happens, in the order in which it does at one instant."""

    ADD = 1
    REMOVE = 2
    READY = 4
    DEADLINE = 5
    LOCAL_DEADLINE = 6
    STEP_DONE = 7
    CHECKPOINT_DONE = 8


class Queue(Protocol):
    """Events to come, with what they concern."""

    def __len__(self) -> int:
        """Return how many there are."""

    def push(self, time_ms: int, kind: Kind, what: Any) -> None:
        """Enter an event."""

    def pop(self) -> tuple[int, Kind, Any]:
        """Take the next one out."""

    def next_ms(self) -> int:
        """Return when the next one happens [ms]; there must be one."""


class _Entry(int):
    """A key that compares as a number, time before kind, and what the event concerns."""

    what: Any


class HeapList:
    """A plain binary heap, whose storage order is seen from outside and decides between equal keys."""

    def __init__(self) -> None:
        self._heap: list[_Entry] = []

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, time_ms: int, kind: Kind, what: Any) -> None:
        """Enter an event."""
        entry = _Entry((time_ms << _BITS) | kind)
        entry.what = what
        heapq.heappush(self._heap, entry)

    def pop(self) -> tuple[int, Kind, Any]:
        """Take the next one out."""
        entry = heapq.heappop(self._heap)
        return entry >> _BITS, _KINDS[entry & _MASK], entry.what

    def next_ms(self) -> int:
        """Return when the next one happens [ms]."""
        return self._heap[0] >> _BITS

    def comes_first(self, kind: Kind, other: Kind) -> bool:
        """Tell whether one kind stands before the first of another in storage, which is no order in time."""
        for entry in self._heap:
            if entry & _MASK == other:
                return False
            if entry & _MASK == kind:
                return True
        return False


_MASK = (1 << _BITS) - 1
_KINDS = {int(kind): kind for kind in Kind}


class SharedQueue:
    """The queue of the cluster simulator: equal times and kinds come in the order of entry."""

    def __init__(self) -> None:
        self._queue: EventQueue[tuple[int, Kind, Any]] = EventQueue()

    def __len__(self) -> int:
        return len(self._queue)

    def push(self, time_ms: int, kind: Kind, what: Any) -> None:
        """Enter an event."""
        self._queue.push(time_ms * MS, kind, (time_ms, kind, what))

    def pop(self) -> tuple[int, Kind, Any]:
        """Take the next one out."""
        return self._queue.pop()[1]

    def next_ms(self) -> int:
        """Return when the next one happens [ms]."""
        return round(self._queue.next_time_s() / MS)
