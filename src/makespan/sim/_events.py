"""What happens in a simulation, as observers see it."""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from makespan.errors import InputError

if TYPE_CHECKING:
    from makespan.sim._view import ClusterView

__all__ = ["Event", "EventKind", "NodeEvent", "NodeEventKind", "Observer"]


class EventKind(StrEnum):
    """Kinds of rows in the events table."""

    SUBMITTED = "submitted"
    """A job entered the queue."""
    STARTED = "started"
    """A waiting job was given devices; its restart delay begins."""
    RECONFIGURED = "reconfigured"
    """A running job changed plan, placement or nodes; its restart delay begins."""
    READY = "ready"
    """The restart delay is over, progress begins."""
    SUSPENDED = "suspended"
    """The policy took all devices of a job."""
    INTERRUPTED = "interrupted"
    """A job lost all its devices because one of its nodes failed."""
    FINISHED = "finished"
    """A job ran its last step."""
    NODE_FAILED = "node_failed"
    """A node went away."""
    NODE_JOINED = "node_joined"
    """A node came or came back."""


class Event(NamedTuple):
    """One row of the events table.

    Parameters
    ----------
    time_s, seq
        When [s], and a running number that makes the order total.
    kind
        A value of `EventKind`.
    job_id
        Job concerned, empty for node events.
    nodes
        Devices held after the event as ``node:devices`` joined by spaces; of a node event the node.
    n_gpus, plan, family, cpu_threads, iter_time_s
        The configuration held after the event; 0, empty and NaN if there is none.
    steps_left
        Steps still to run; NaN for node events.
    reason
        Why it happened.
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


class Observer(Protocol):
    """Whoever watches a simulation; an observer cannot influence it."""

    def observe(self, event: Event, view: "ClusterView") -> None:
        """Take note of an event; ``view`` is the cluster after it, valid during the call only."""
        ...


class NodeEventKind(StrEnum):
    """What can happen to a node."""

    FAILED = "failed"
    """It goes away with all devices."""
    JOINED = "joined"
    """It comes, or comes back, with all devices free."""


@dataclass(frozen=True, slots=True)
class NodeEvent:
    """A node leaves or comes.

    A node whose first event is ``joined`` is absent until then.

    Parameters
    ----------
    time_s
        When [s].
    node_id
        Number of the node in the cluster.
    kind
        Failed or joined.

    Raises
    ------
    InputError
        The time or the node is negative, or the kind unknown.
    """

    time_s: float
    node_id: int
    kind: NodeEventKind

    def __post_init__(self) -> None:
        """Check time, node and kind."""
        if not (math.isfinite(self.time_s) and self.time_s >= 0 and self.node_id >= 0):
            raise InputError(
                f"node event: time_s {self.time_s!r}, node_id {self.node_id!r}; accepted: both >= 0"
            )
        try:
            object.__setattr__(self, "kind", NodeEventKind(self.kind))
        except ValueError:
            accepted = ", ".join(kind.value for kind in NodeEventKind)
            raise InputError(f"node event: kind {self.kind!r}; accepted: {accepted}") from None
