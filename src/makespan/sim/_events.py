"""What will happen, in order, and what happened, as observers and tables see it."""

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

import pandas as pd

from makespan.errors import InputError, TraceError
from makespan.hardware import ClusterSpec
from makespan.tables import FAILURES

if TYPE_CHECKING:
    from makespan.sim._view import ClusterView

__all__ = [
    "Event",
    "EventKind",
    "EventQueue",
    "NodeEvent",
    "NodeEventKind",
    "Observer",
    "absent_nodes",
    "ordered_node_events",
    "read_failures",
]

T = TypeVar("T")


class EventQueue(Generic[T]):
    """What will happen, by time, then by priority at one instant, then by the order of entry."""

    __slots__ = ("_heap", "_seq")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, T]] = []
        self._seq = 0

    def __len__(self) -> int:
        """Return how many events are still to come."""
        return len(self._heap)

    def push(self, time_s: float, priority: int, event: T) -> None:
        """Enter an event; low priorities come first at one instant."""
        self._seq += 1
        heapq.heappush(self._heap, (time_s, priority, self._seq, event))

    def pop(self) -> tuple[float, T]:
        """Take the next event out, with its time [s]; there must be one."""
        time_s, _, _, event = heapq.heappop(self._heap)
        return time_s, event

    def next_time_s(self) -> float:
        """Return when the next event happens [s]; infinite if there is none."""
        return self._heap[0][0] if self._heap else math.inf

    def clear(self) -> None:
        """Forget everything that is still to come."""
        self._heap.clear()


class EventKind(StrEnum):
    """Kinds of rows in the events table."""

    SUBMITTED = "submitted"  # a job entered the queue
    STARTED = "started"  # a waiting job was given devices; its restart delay begins
    RECONFIGURED = "reconfigured"  # a running job changed plan, placement or nodes; its restart delay begins
    SHARING = "sharing"  # a running job became a guest where it is, or has the devices to itself; no restart
    RATED = "rated"  # a guest goes faster or slower from now on, as other jobs use its devices
    READY = "ready"  # the restart delay is over, progress begins
    SUSPENDED = "suspended"  # the policy took all devices of a job
    INTERRUPTED = (
        "interrupted"  # a job lost all its devices because one of its nodes failed or gave up devices
    )
    FINISHED = "finished"  # a job ran its last step
    NODE_FAILED = "node_failed"  # a node went away
    NODE_JOINED = "node_joined"  # a node came or came back
    CAPACITY_ANNOUNCED = (
        "capacity_announced"  # it became known that devices of a node will be withdrawn or returned
    )
    CAPACITY_WITHDRAWN = "capacity_withdrawn"  # devices of a node went away
    CAPACITY_RETURNED = "capacity_returned"  # devices of a node came back


class Event(NamedTuple):
    """One row of the events table.

    Attributes
    ----------
    time_s
        When [s].
    seq
        Running number, makes the order total.
    kind
        A value of `EventKind`.
    job_id
        Job concerned, empty for node events.
    nodes
        What is held after the event, ``node:devices`` joined by spaces; of a node event the node.
    n_gpus
        Devices held after the event; of a node event those that it concerns.
    plan, family, cpu_threads, iter_time_s
        Configuration after the event; empty, 0 and NaN if nothing is held.
    reason
        Why it happened.
    steps_left
        Steps still to run; NaN for node events.
    shared_nodes
        What a guest uses of others' devices after the event, see `Allocation`, like ``nodes``.
    """

    time_s: float
    seq: int
    kind: str
    job_id: str
    nodes: str
    n_gpus: int
    plan: str
    reason: str
    family: str
    cpu_threads: int
    iter_time_s: float
    steps_left: float
    shared_nodes: str = ""


class Observer(Protocol):
    """Whoever watches a simulation; an observer cannot influence it."""

    def observe(self, event: Event, view: "ClusterView") -> None:
        """Take note of an event; ``view`` is the cluster after it, valid during the call only."""


class NodeEventKind(StrEnum):
    """What can happen to a node."""

    FAILED = "failed"  # it goes away with all devices
    JOINED = "joined"  # it comes, or comes back, with all devices free
    WITHDRAWN = "withdrawn"  # some or all of its devices go away, perhaps with notice
    RETURNED = "returned"  # devices that were withdrawn come back, perhaps with notice


_OF_CAPACITY = (NodeEventKind.WITHDRAWN, NodeEventKind.RETURNED)


@dataclass(frozen=True, slots=True)
class NodeEvent:
    """A node leaves or comes, or some of its devices do.

    A node whose first event is ``joined`` is absent until then. Withdrawn devices stay usable until
    the notice is over; whoever still needs them then is interrupted, the job that started last first.

    Parameters
    ----------
    time_s, notice_s
        When it happens or is announced, and time from there to a change of capacity [s].
    n_gpus
        Devices withdrawn or returned; None for all that the node has or lacks.

    Raises
    ------
    InputError
        A value is out of range, or a node that fails or joins is to do so in part or with notice.
    """

    time_s: float
    node_id: int
    kind: NodeEventKind
    n_gpus: int | None = None
    notice_s: float = 0.0

    def __post_init__(self) -> None:
        """Check times, node, kind and devices."""
        if not (math.isfinite(self.time_s) and self.time_s >= 0 and self.node_id >= 0):
            raise InputError(
                f"node event: time_s {self.time_s!r}, node_id {self.node_id!r}; accepted: both >= 0"
            )
        try:
            object.__setattr__(self, "kind", NodeEventKind(self.kind))
        except ValueError:
            accepted = ", ".join(kind.value for kind in NodeEventKind)
            raise InputError(f"node event: kind {self.kind!r}; accepted: {accepted}") from None
        has_devices = self.n_gpus is None or self.n_gpus >= 1
        if not (has_devices and math.isfinite(self.notice_s) and self.notice_s >= 0):
            raise InputError(
                f"node event: n_gpus {self.n_gpus!r}, notice_s {self.notice_s!r}; accepted: devices >= 1, or "
                "None for all, and a finite time in s, not negative"
            )
        if self.kind not in _OF_CAPACITY and (self.n_gpus is not None or self.notice_s):
            raise InputError(
                f"node event: node {self.node_id} {self.kind.value} in part or with notice; accepted: "
                f"n_gpus and notice_s for {' and '.join(kind.value for kind in _OF_CAPACITY)} only"
            )

    @property
    def in_force_s(self) -> float:
        """When it happens [s]."""
        return self.time_s + self.notice_s


def read_failures(frame: pd.DataFrame, where: str) -> tuple[NodeEvent, ...]:
    """Return the node events of a table of schema `FAILURES`; a TraceError names row and column."""
    checked = FAILURES.validate(frame, where=where)
    accepted = [kind.value for kind in NodeEventKind]
    events = []
    columns = (checked[name].tolist() for name in FAILURES.names)
    for row, (time_s, node_id, kind) in enumerate(zip(*columns, strict=True)):
        if kind not in accepted:
            raise TraceError(
                f"{where}: row {row + 1}, column 'kind': found {kind!r}; accepted: {', '.join(accepted)}"
            )
        events.append(NodeEvent(time_s, node_id, NodeEventKind(kind)))
    return tuple(events)


def ordered_node_events(events: Iterable[NodeEvent], cluster: ClusterSpec) -> list[NodeEvent]:
    """Return node events by the time at which they happen, with numbers of devices, and check them."""
    ordered = sorted(events, key=lambda event: (event.in_force_s, event.node_id))
    is_up: dict[int, bool] = {}
    withdrawn = [0] * cluster.n_nodes
    for rank, event in enumerate(ordered):
        where = f"node event at {event.in_force_s} s: node {event.node_id}"
        if event.node_id >= cluster.n_nodes:
            raise InputError(f"{where}; accepted: 0 to {cluster.n_nodes - 1}")
        if event.kind in _OF_CAPACITY:
            lacks = withdrawn[event.node_id]
            goes = event.kind is NodeEventKind.WITHDRAWN
            most = cluster.nodes[event.node_id].n_gpus - lacks if goes else lacks
            count = most if event.n_gpus is None else event.n_gpus
            if not 0 < count <= most:
                raise InputError(f"{where}: {count} device(s) {event.kind.value}; accepted: 1 to {most}")
            withdrawn[event.node_id] += count if goes else -count
            ordered[rank] = replace(event, n_gpus=count)
            continue
        joins = event.kind is NodeEventKind.JOINED
        if is_up.get(event.node_id, not joins) == joins:
            raise InputError(
                f"{where} {event.kind.value} while it is {'up' if joins else 'down'}; accepted: the two "
                "kinds in turn"
            )
        is_up[event.node_id] = joins
    return ordered


def absent_nodes(ordered: Iterable[NodeEvent]) -> list[int]:
    """Return the nodes of which the first is heard that they join."""
    first: dict[int, NodeEventKind] = {}
    for event in ordered:
        if event.kind not in _OF_CAPACITY:
            first.setdefault(event.node_id, event.kind)
    return sorted(node for node, kind in first.items() if kind is NodeEventKind.JOINED)
