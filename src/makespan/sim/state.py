"""State of a simulated cluster: events, the read-only views of policies, and the transitions between states.

`ClusterState` is the only code that changes nodes and jobs. `JobView` and `ClusterView` reject assignment,
so policies and observers may receive the live objects instead of copies. Between its submission and its end a
job is either pending or running; pending jobs are in the order of submission, running ones in the order of
their last start.
"""

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence, ValuesView
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import takewhile
from types import MappingProxyType
from typing import Generic, NamedTuple, NoReturn, Protocol, TypeVar

import pandas as pd

from makespan.arguments import check_fields
from makespan.errors import InputError, MakespanError, TraceError, shown
from makespan.hardware import ClusterSpec
from makespan.lazy import renamed_attributes
from makespan.sim.catalogue import (
    TOLERANCE,
    Allocation,
    Catalogue,
    Configuration,
    RestartCost,
    delay_of,
)
from makespan.sim.recovery import Recovery
from makespan.sim.sharing import Sharing
from makespan.tables import FAILURES
from makespan.workloads import JobSpec

# --- Events ---

T = TypeVar("T")


class EventQueue(Generic[T]):
    """Future events by time, then priority, then order of insertion, so that no tie is left to chance."""

    __slots__ = ("_heap", "_seq")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, T]] = []
        self._seq = 0

    def __len__(self) -> int:
        """Return the number of events still to come."""
        return len(self._heap)

    def push(self, time_s: float, priority: int, event: T) -> None:
        """Add an event; at one instant, low priorities come first."""
        self._seq += 1
        heapq.heappush(self._heap, (time_s, priority, self._seq, event))

    def pop(self) -> tuple[float, T]:
        """Remove and return the next event with its time [s]; the queue must not be empty."""
        time_s, _, _, event = heapq.heappop(self._heap)
        return time_s, event

    def next_time_s(self) -> float:
        """Return when the next event happens [s]; infinite if there is none."""
        return self._heap[0][0] if self._heap else math.inf

    def clear(self) -> None:
        """Remove all events."""
        self._heap.clear()


class EventKind(StrEnum):
    """Kinds of rows in the events table."""

    SUBMITTED = "submitted"  # a job entered the queue
    STARTED = "started"  # a waiting job was given devices; its restart delay begins
    RECONFIGURED = "reconfigured"  # a running job changed plan, placement or nodes; its restart delay begins
    SHARING = "sharing"  # a running job became a guest, or the holder, of the devices it uses; no restart
    SPEED_CHANGED = "rated"  # the speed of a guest changed, or how many of its devices nobody holds
    READY = "ready"  # the restart delay is over, progress begins
    SUSPENDED = "suspended"  # the policy took all devices of a job
    INTERRUPTED = "interrupted"  # a job was evicted because one of its nodes failed or lost devices
    REGROUPED = "regrouped"  # a resilient job resumes on the devices that are left; its pause begins
    ROLLED_BACK = "rolled_back"  # an interrupted job got no devices in time and returned to its checkpoint
    FINISHED = "finished"  # a job ran its last step
    NODE_FAILED = "node_failed"  # a node failed
    NODE_JOINED = "node_joined"  # a node joined, or joined again
    CAPACITY_ANNOUNCED = "capacity_announced"  # notice that devices of a node will be withdrawn or returned
    CAPACITY_WITHDRAWN = "capacity_withdrawn"  # devices of a node were withdrawn
    CAPACITY_RETURNED = "capacity_returned"  # devices of a node were returned


class Event(NamedTuple):
    """One row of the events table.

    Attributes
    ----------
    time_s
        Time of the event [s].
    seq
        Running number, makes the order total.
    kind
        A value of `EventKind`.
    job_id
        Job concerned, empty for node events.
    nodes
        Devices held after the event, ``node:devices`` joined by spaces; the node, for a node event.
    n_gpus
        Number of devices held after the event, of a guest those that it uses and nobody holds; for a node
        event the number that it concerns.
    plan, family, cpu_threads, iter_time_s
        Configuration after the event; empty, 0 and NaN if nothing is held.
    reason
        Cause of the event.
    steps_left
        Steps still to run; NaN for node events.
    shared_nodes
        Devices that a guest uses after the event, see `Allocation`, like ``nodes``.
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
    """Receiver of the events of a simulation; it cannot influence them."""

    def observe(self, event: Event, view: "ClusterView") -> None:
        """Take note of an event; ``view`` is the cluster after it, valid during the call only."""


class NodeEventKind(StrEnum):
    """Kinds of node events."""

    FAILED = "failed"  # it fails with all its devices
    JOINED = "joined"  # it joins, or joins again, with all devices free
    WITHDRAWN = "withdrawn"  # some or all of its devices are withdrawn, perhaps with notice
    RETURNED = "returned"  # devices that were withdrawn are returned, perhaps with notice


_OF_CAPACITY = (NodeEventKind.WITHDRAWN, NodeEventKind.RETURNED)


@dataclass(frozen=True, slots=True)
class NodeEvent:
    """Failure or arrival of a node, or of some of its devices.

    A node whose first event is ``joined`` is absent until then. Withdrawn devices stay usable until
    the notice is over; jobs that still need them then are interrupted, the job that started last first.

    Parameters
    ----------
    time_s, notice_s
        Time at which it happens or is announced, and time from there to a change of capacity [s].
    n_gpus
        Devices withdrawn or returned; None for all that the node has or lacks.

    Raises
    ------
    InputError
        A value is out of range, or a failure or join has a number of devices or a notice.
    """

    time_s: float
    node_id: int
    kind: NodeEventKind
    n_gpus: int | None = None
    notice_s: float = 0.0

    def __post_init__(self) -> None:
        """Check times, node, kind and devices."""
        try:
            object.__setattr__(self, "kind", NodeEventKind(self.kind))
        except (TypeError, ValueError):
            accepted = ", ".join(kind.value for kind in NodeEventKind)
            raise InputError(f"node event: kind {shown(self.kind)}; expected {accepted}") from None
        check_fields(self, "node event", not_negative=("time_s", "node_id"))
        has_devices = self.n_gpus is None or self.n_gpus >= 1
        if not (has_devices and math.isfinite(self.notice_s) and self.notice_s >= 0):
            raise InputError(
                f"node event: n_gpus {self.n_gpus!r}, notice_s {self.notice_s!r}; expected devices >= 1, or "
                "None for all, and a finite time in s, not negative"
            )
        if self.kind not in _OF_CAPACITY and (self.n_gpus is not None or self.notice_s):
            raise InputError(
                f"node event: node {self.node_id} {self.kind.value} in part or with notice; expected "
                f"n_gpus and notice_s for {' and '.join(kind.value for kind in _OF_CAPACITY)} only"
            )

    @property
    def in_force_s(self) -> float:
        """Time at which it takes effect [s]."""
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
                f"{where}: row {row + 1}, column 'kind': found {kind!r}; expected {', '.join(accepted)}"
            )
        events.append(NodeEvent(time_s, node_id, NodeEventKind(kind)))
    return tuple(events)


def ordered_node_events(events: Iterable[NodeEvent], cluster: ClusterSpec) -> list[NodeEvent]:
    """Return node events by the time at which they happen, with numbers of devices, and check them."""
    # By when they take effect, not when they are announced: each change is checked against earlier ones.
    ordered = sorted(events, key=lambda event: (event.in_force_s, event.node_id))
    is_up: dict[int, bool] = {}
    withdrawn = [0] * cluster.n_nodes
    for rank, event in enumerate(ordered):
        where = f"node event at {event.in_force_s} s: node {event.node_id}"
        if event.node_id >= cluster.n_nodes:
            raise InputError(f"{where}; expected 0 to {cluster.n_nodes - 1}")
        if event.kind in _OF_CAPACITY:
            lacks = withdrawn[event.node_id]
            goes = event.kind is NodeEventKind.WITHDRAWN
            most = cluster.nodes[event.node_id].n_gpus - lacks if goes else lacks
            count = most if event.n_gpus is None else event.n_gpus
            if not 0 < count <= most:
                raise InputError(f"{where}: {count} device(s) {event.kind.value}; expected 1 to {most}")
            withdrawn[event.node_id] += count if goes else -count
            ordered[rank] = replace(event, n_gpus=count)
            continue
        joins = event.kind is NodeEventKind.JOINED
        if is_up.get(event.node_id, not joins) == joins:
            raise InputError(
                f"{where} {event.kind.value} while it is {'up' if joins else 'down'}; expected the two "
                "kinds in turn"
            )
        is_up[event.node_id] = joins
    return ordered


def absent_nodes(ordered: Iterable[NodeEvent]) -> list[int]:
    """Return the nodes whose first event, other than of capacity, is that they join."""
    first: dict[int, NodeEventKind] = {}
    for event in ordered:
        if event.kind not in _OF_CAPACITY:
            first.setdefault(event.node_id, event.kind)
    return sorted(node for node, kind in first.items() if kind is NodeEventKind.JOINED)


# --- Read-only views ---

_NAN = float("nan")
# Views reject assignment; `ClusterState` fills and changes them through this.
write = object.__setattr__


def _reject_assignment(self: object, name: str, value: object = None) -> NoReturn:
    raise MakespanError(f"{type(self).__name__}.{name} is read-only; return a Decision instead")


class _JobSlots:
    """Plain attributes of a job, not properties: policies read them in their innermost loops."""

    __slots__ = (
        "_held_gpu_s",
        "_held_text",
        "_last",
        "_marks",
        "_observed",
        "_recovery",
        "_restart_s",
        "_running_s",
        "_since_s",
        "_step_s",
        "_steps_left",
        "_unheld",
        "_view",
        "_waiting_s",
        "allocation",
        "first_start_s",
        "generation",
        "held_since_s",
        "index",
        "ready_time_s",
        "restart_count",
        "spec",
        "waiting_since_s",
    )


class JobView(_JobSlots):
    """A job at the present time, read-only.

    Attributes
    ----------
    spec, index
        The job as submitted, and its position in the order of submission.
    allocation, generation
        Its present allocation, or None while it waits; how often that, or the speed of a guest, has changed.
    ready_time_s, held_since_s, waiting_since_s
        End of its present restart delay, start of its present allocation, start of its present wait [s];
        NaN where there is none.
    restart_count, first_start_s
        Restart delays begun after the first start, and time of that [s], or None.
    """

    __slots__ = ()
    __setattr__ = __delattr__ = _reject_assignment
    __getattr__ = renamed_attributes(
        {"knows": "is_time_known", "assures": "guarantees", "has_run": "has_observed", "pace": "speed"}
    )

    def __init__(
        self,
        spec: JobSpec,
        index: int,
        steps: float,
        view: "ClusterView",
        recovery: Recovery | None = None,
    ) -> None:
        kind = unlocked(self)
        self.spec, self.index, self._view = spec, index, view
        self._recovery = recovery
        self.allocation: Allocation | None = None
        self._last: Allocation | None = None
        self._observed: frozenset[Configuration] = frozenset()
        self.first_start_s: float | None = None
        self.waiting_since_s = spec.submit_time_s
        self.ready_time_s = self.held_since_s = _NAN
        # From `_since_s` on, with `_steps_left` steps left then, a step takes `_step_s`. `_marks` has all
        # such moments of the present allocation; a guest has several, as its speed changes.
        self._since_s = _NAN
        self._marks: tuple[tuple[float, float], ...] = ()
        # Of a guest: from a moment of the present allocation on [s], devices that it uses and nobody holds.
        self._unheld: tuple[tuple[float, int], ...] = ()
        self.restart_count = self.generation = 0
        self._held_text = ""
        self._step_s = _NAN
        self._steps_left = steps
        self._held_gpu_s = self._restart_s = self._running_s = self._waiting_s = 0.0
        self.__class__ = kind

    def __repr__(self) -> str:
        """Show name and allocation."""
        held = "waiting" if self.allocation is None else self.allocation.text
        return f"JobView({self.spec.job_id!r}, {held})"

    @property
    def observed(self) -> frozenset[Configuration]:
        """Every configuration whose time the job knows by `has_observed`."""
        held = self.allocation
        if held is None or not self.has_observed(held.configuration):
            return self._observed
        return self._observed | {held.configuration}

    def has_observed(self, configuration: Configuration) -> bool:
        """Return whether the job has done a step in a configuration, or its user stated the time of one."""
        if configuration in self._observed:
            return True
        held = self.allocation
        if held is None or held.configuration is not configuration:
            return False
        if held.is_guest:
            return self._marks[0][1] - self._steps_left_now() >= 1 - TOLERANCE
        return self._view.time_s - self._since_s >= self._step_s

    def step_s(self, configuration: Configuration) -> float:
        """Time of a step in a configuration [s]: as observed where the job has run it, else as predicted."""
        if self.has_observed(configuration):
            return configuration.iter_time_s
        return configuration.predicted_iter_time_s

    @property
    def speed(self) -> float:
        """Speed relative to that with devices of its own; 0 if it waits."""
        held = self.allocation
        return 0.0 if held is None else held.configuration.iter_time_s / self._step_s

    def is_time_known(self, configuration: Configuration) -> bool:
        """Return whether `step_s` is certain: sampled before, or observed by this very job."""
        return configuration.is_known or self.has_observed(configuration)

    def guarantees(self, configuration: Configuration) -> bool:
        """Return whether a configuration keeps the guarantee of the job for certain.

        The request itself does. Any other must be known, like the request, and not slower.
        """
        reference = self._view.catalogue.requested(self.spec)
        if configuration is reference:
            return True
        limit_s = self.step_s(reference) * (1 + TOLERANCE)
        return (
            self.is_time_known(configuration)
            and self.is_time_known(reference)
            and self.step_s(configuration) <= limit_s
        )

    @property
    def steps_left(self) -> float:
        """Work still to do now, fractions included; only for policies that declare ``is_clairvoyant``."""
        if not self._view.shows_remaining_work:
            raise MakespanError(
                f"job {self.spec.job_id!r}: steps_left is hidden from this policy; expected a policy "
                "that declares is_clairvoyant"
            )
        return self._steps_left_now()

    def _steps_left_now(self) -> float:
        # From the last change on, not from the last event: rounding does not depend on how often one looks.
        allocation = self.allocation
        if allocation is None:
            return self._steps_left
        elapsed_s = self._view.time_s - self._since_s
        if elapsed_s <= 0:
            return self._steps_left
        return max(self._steps_left - elapsed_s / self._step_s, 0.0)

    def _finish_s(self) -> float:
        """Time of the last step if nothing changes [s]; the job must hold devices."""
        return self._since_s + self._steps_left * self._step_s

    @property
    def _n_gpus(self) -> int:
        """Devices that the job has to itself: its own, of a guest those that nobody holds."""
        held = self.allocation
        if held is None:
            return 0
        return self._unheld[-1][1] if held.is_guest else held.n_gpus

    def _unheld_gpu_s(self, clock: Callable[[float], float], since: float) -> float:
        """Return the device time of a guest, on devices that nobody holds, from a reading of a clock on."""
        ends_s = [*(time_s for time_s, _ in self._unheld[1:]), self._view.time_s]
        return sum(
            count * (max(clock(end_s), since) - max(clock(start_s), since))
            for (start_s, count), end_s in zip(self._unheld, ends_s, strict=True)
        )

    @property
    def running_time_s(self) -> float:
        """Time with devices and progress so far [s]."""
        if self.allocation is None:
            return self._running_s
        return self._running_s + max(self._view.time_s - self.ready_time_s, 0.0)

    @property
    def restart_time_s(self) -> float:
        """Time with devices but without progress so far [s]."""
        if self.allocation is None:
            return self._restart_s
        return self._restart_s + min(self._view.time_s, self.ready_time_s) - self.held_since_s

    @property
    def waiting_time_s(self) -> float:
        """Time without devices so far [s]."""
        if self.allocation is not None or math.isnan(self.waiting_since_s):
            return self._waiting_s
        return self._waiting_s + self._view.time_s - self.waiting_since_s

    @property
    def attained_service_gpu_s(self) -> float:
        """Time of devices of its own so far, restarts included [GPU s]."""
        if self.allocation is None:
            return self._held_gpu_s
        held_s = self._view.time_s - self.held_since_s
        return self._held_gpu_s + held_s * self.allocation.n_gpus


class CheckpointingJobView(JobView):
    """A job that makes no progress while it writes a checkpoint, see `Recovery`.

    Checkpoints are due at multiples of an interval of training since `ready_time_s`.
    """

    __slots__ = ()

    def _steps_left_now(self) -> float:
        recovery = self._recovery
        if self.allocation is None or recovery is None:
            return self._steps_left
        ready_s, now_s = self.ready_time_s, self._view.time_s
        if now_s <= self._since_s:
            return self._steps_left
        trained_s = recovery.trained_s(now_s - ready_s) - recovery.trained_s(self._since_s - ready_s)
        return max(self._steps_left - trained_s / self._step_s, 0.0)

    def _finish_s(self) -> float:
        recovery = self._recovery
        if recovery is None:
            return super()._finish_s()
        trained_s = recovery.trained_s(self._since_s - self.ready_time_s) + self._steps_left * self._step_s
        return self.ready_time_s + recovery.elapsed_s(trained_s)


def unlocked(job: JobView) -> type[JobView]:
    """Make a job writable, which is much faster than `write`, and return the class that locks it again."""
    kind = type(job)
    write(job, "__class__", _JobSlots)
    return kind


@dataclass(init=False, repr=False, eq=False, slots=True)
class ClusterView:
    """The cluster at the present time, read-only.

    Attributes
    ----------
    cluster, catalogue
        All nodes that may exist, down ones too; the configurations that fit there.
    restart_cost, restart_delay_s
        Cost of each start and change, and one number [s] that stands for it in estimates.
    interval_s
        Length of a round [s], or None where the policy is asked after each event.
    shows_remaining_work, announced
        Whether `JobView.steps_left` may be read; announced changes of capacity still to come.
    shares_devices
        Whether a job may be a guest on devices, see `Allocation`; in simulations.
    placement
        Nodes to prefer, one of `makespan.sim.PLACEMENT_RULES`.
    pending, running
        Jobs without devices in the order of submission, and jobs with, in the order of their last start; live
        collections.
    """

    __setattr__ = __delattr__ = _reject_assignment

    time_s: float
    cluster: ClusterSpec
    catalogue: Catalogue
    restart_cost: RestartCost
    restart_delay_s: float
    interval_s: float | None
    shows_remaining_work: bool
    shares_devices: bool
    placement: str
    announced: tuple[NodeEvent, ...]
    pending: ValuesView[JobView]
    running: ValuesView[JobView]
    _nodes: "Nodes"
    _sharing: Callable[[], Sharing]
    _pending: OrderedDict[str, JobView]
    _running: dict[str, JobView]

    @property
    def n_nodes(self) -> int:
        """Number of nodes, down ones too."""
        return self.cluster.n_nodes

    @property
    def n_gpus(self) -> int:
        """Devices present now."""
        return self._nodes.n_gpus

    @property
    def n_free_gpus(self) -> int:
        """Devices that no job holds."""
        return self._nodes.n_free_gpus

    @property
    def gpus_per_node(self) -> list[int]:
        """Devices of every node present now; a new list."""
        return self._nodes.gpus_per_node()

    @property
    def gpu_types(self) -> tuple[str, ...]:
        """Name of the devices of every node."""
        return self._nodes.gpu_types

    @property
    def gpus_by_type(self) -> dict[str, int]:
        """Devices present now of each type; a new dictionary."""
        present = dict.fromkeys(self.gpu_types, 0)
        for gpu_type, n_gpus in zip(self.gpu_types, self.gpus_per_node, strict=True):
            present[gpu_type] += n_gpus
        return present

    @property
    def free_gpus(self) -> list[int]:
        """Free devices of every node; a new list."""
        return self._nodes.free_gpus.copy()

    @property
    def unshared_gpus(self) -> list[int]:
        """Devices of every node without a guest, held or not; a new list."""
        return [self._nodes.unshared(node) for node in range(self.n_nodes)]

    def sharing(self) -> Sharing:
        """Return the holders and guests of all devices: a copy, on which a policy may try changes."""
        return self._sharing()

    @property
    def free_cpus(self) -> list[int]:
        """Free CPU threads of every node; a new list."""
        return self._nodes.free_cpus.copy()

    @property
    def free_host_memory_bytes(self) -> list[float]:
        """Free host memory of every node [B]; a new list."""
        return self._nodes.free_host_bytes.copy()

    @property
    def free_histogram(self) -> list[int]:
        """Number of nodes by free devices, ``(max devices of a node + 1,)``; a new list."""
        return [level.bit_count() for level in self._nodes.levels]

    @property
    def nodes_by_free_gpus(self) -> list[int]:
        """Nodes by free devices, ``(max devices of a node + 1,)``, the bits of a number each; a new list."""
        return self._nodes.levels.copy()

    @property
    def nodes_by_type(self) -> Mapping[str, int]:
        """Nodes with each type of device, the bits of a number each."""
        return MappingProxyType(self._nodes.of_type)

    def waiting_after(self, index: int) -> list[JobView]:
        """Return the pending jobs submitted after a position in the order of submission, the last first."""
        # From the back: policies ask for new arrivals alone, however many jobs wait.
        return list(takewhile(lambda job: job.index > index, reversed(self._pending.values())))

    def is_up(self, node: int) -> bool:
        """Return whether a node is up."""
        return self._nodes.up[node]

    def job(self, job_id: str) -> JobView:
        """Return a pending or running job; raises MakespanError if there is none of that name."""
        job = self._running.get(job_id) or self._pending.get(job_id)
        if job is None:
            raise MakespanError(f"job {job_id!r} is neither pending nor running at {self.time_s} s")
        return job


# --- Transitions ---


class Nodes:
    """Free devices, CPU threads and host memory of every node; changed by `ClusterState` alone."""

    __slots__ = (
        "_capacity", "free_cpus", "free_gpus", "free_host_bytes", "gpu_types", "guests", "levels",
        "n_free_gpus", "n_gpus", "of_type", "up", "withdrawn",
    )  # fmt: skip

    def __init__(self, cluster: ClusterSpec) -> None:
        self._capacity = [(node.n_gpus, node.cpu_threads, node.host_memory_bytes) for node in cluster.nodes]
        self.gpu_types = tuple(node.gpu.name for node in cluster.nodes)
        self.free_gpus = [gpus for gpus, _, _ in self._capacity]
        self.free_cpus = [cpus for _, cpus, _ in self._capacity]
        self.free_host_bytes = [float(memory) for _, _, memory in self._capacity]
        self.guests = [0] * cluster.n_nodes  # devices that guests use, their own or not
        self.up = [True] * cluster.n_nodes
        self.withdrawn = [0] * cluster.n_nodes
        self.n_gpus = self.n_free_gpus = sum(self.free_gpus)
        # Sets of nodes are the bits of a number: by free devices, and by the type of their devices.
        self.levels = [0] * (max(self.free_gpus) + 1)
        self.of_type = dict.fromkeys(self.gpu_types, 0)
        for node, (free, gpu_type) in enumerate(zip(self.free_gpus, self.gpu_types, strict=True)):
            self.levels[free] |= 1 << node
            self.of_type[gpu_type] |= 1 << node

    def gpus_per_node(self) -> list[int]:
        """Return the devices of every node present now."""
        rows = zip(self._capacity, self.withdrawn, self.up, strict=True)
        return [gpus - gone if up else 0 for (gpus, _, _), gone, up in rows]

    def unshared(self, node: int) -> int:
        """Return the devices of a node without a guest, held or not."""
        return self._capacity[node][0] - self.withdrawn[node] - self.guests[node] if self.up[node] else 0

    def move(self, allocation: Allocation, sign: int) -> None:
        """Allocate (``sign`` -1) or release (+1) the devices of an allocation, unchecked."""
        configuration = allocation.configuration
        threads, host = configuration.cpu_threads, configuration.host_memory_bytes_per_gpu
        if allocation.is_guest:
            for node, count in zip(allocation.nodes, configuration.placement.gpus_per_node, strict=True):
                self.guests[node] -= count * sign
                self.free_host_bytes[node] += count * host * sign
            return
        free_gpus, free_cpus, levels = self.free_gpus, self.free_cpus, self.levels
        # The innermost loop of a simulation: local names, and flipped bits instead of sets of nodes.
        for node, count in zip(allocation.nodes, configuration.placement.gpus_per_node, strict=True):
            change = count * sign
            free, bit = free_gpus[node], 1 << node
            levels[free] ^= bit
            free_gpus[node] = free = free + change
            levels[free] ^= bit
            free_cpus[node] += change * threads
            if host:
                self.free_host_bytes[node] += change * host
        self.n_free_gpus += sign * configuration.n_gpus

    def shortage(self, allocation: Allocation) -> str:
        """Describe the first resource that an allocation lacks; empty if it fits."""
        configuration, is_guest = allocation.configuration, allocation.is_guest
        for node, wanted in zip(allocation.nodes, configuration.gpu_types, strict=False):
            if 0 <= node < len(self.up) and self.gpu_types[node] != wanted:
                return f"node {node} has devices of type {self.gpu_types[node]!r}, {wanted!r} are needed"
        for node, count in zip(allocation.nodes, configuration.placement.gpus_per_node, strict=True):
            if not 0 <= node < len(self.up):
                return f"there is no node {node}; expected 0 to {len(self.up) - 1}"
            if not self.up[node]:
                return f"node {node} is down"
            n_free = self.unshared(node) if is_guest else self.free_gpus[node]
            if n_free < count:
                kind = "unshared" if is_guest else "free"
                return f"node {node} has {n_free} {kind} GPU(s), {count} are needed"
            cpus = count * configuration.cpu_threads
            if self.free_cpus[node] < cpus and not is_guest:
                return f"node {node} has {self.free_cpus[node]} free CPU thread(s), {cpus} are needed"
            host = count * configuration.host_memory_bytes_per_gpu
            if host and self.free_host_bytes[node] < host * (1 - 1e-9):
                free = self.free_host_bytes[node]
                return f"node {node} has {free} B of host memory free, {host} are needed"
        return ""

    def fail(self, node: int) -> None:
        """Take a node down; its devices must be free."""
        self.n_gpus -= self._capacity[node][0] - self.withdrawn[node]
        self.up[node] = False
        self._set_free(node, 0, 0, 0.0)

    def join(self, node: int) -> None:
        """Bring a node up, all devices free."""
        gpus, cpus, memory = self._capacity[node]
        gpus -= self.withdrawn[node]
        self.up[node] = True
        self._set_free(node, gpus, cpus, float(memory))
        self.n_gpus += gpus

    def withdraw(self, node: int, n_gpus: int) -> None:
        """Withdraw free devices of a node, or return them where the number is negative."""
        self.withdrawn[node] += n_gpus
        if self.up[node]:
            self.n_gpus -= n_gpus
            free_gpus = self.free_gpus[node] - n_gpus
            self._set_free(node, free_gpus, self.free_cpus[node], self.free_host_bytes[node])

    def _set_free(self, node: int, gpus: int, cpus: int, host_bytes: float) -> None:
        self.levels[self.free_gpus[node]] ^= 1 << node
        self.levels[gpus] ^= 1 << node
        self.n_free_gpus += gpus - self.free_gpus[node]
        self.free_gpus[node], self.free_cpus[node] = gpus, cpus
        self.free_host_bytes[node] = host_bytes


class _Shared:
    """Sharing of devices, and the copies of it that views hand out.

    Refers neither to view nor to state: in a reference cycle they would outlive the run.
    """

    __slots__ = ("_cluster", "_nodes", "_running", "now")

    def __init__(self, cluster: ClusterSpec, nodes: Nodes, running: Mapping[str, JobView]) -> None:
        self._cluster, self._nodes, self._running = cluster, nodes, running
        self.now: Sharing | None = None  # from the first guest on

    def __call__(self) -> Sharing:
        """Return a copy of the holders and guests of all devices."""
        if self.now is not None:
            self.now.everywhere()  # fills the cache before copying, so that later copies have it too
            return self.now.copy()
        sharing = Sharing(self._cluster)
        for node, n_gpus in enumerate(self._nodes.gpus_per_node()):
            sharing.resize(node, n_gpus)
        for job in self._running.values():
            if job.allocation is not None:
                sharing.add(job.index, job.allocation)
        return sharing


class ClusterState:
    """Jobs and nodes with the transitions between their states; the only code that writes to the views."""

    def __init__(
        self,
        cluster: ClusterSpec,
        catalogue: Catalogue,
        restart_cost: RestartCost,
        interval_s: float | None = None,
        *,
        shows_remaining_work: bool = False,
        shares_devices: bool = False,
        placement: str = "best-fit",
    ) -> None:
        self.nodes = Nodes(cluster)
        self._touched: set[int] = set()  # nodes on which something has changed since guests were rated
        self._pending: OrderedDict[str, JobView] = OrderedDict()
        self._running: dict[str, JobView] = {}
        self._shared = _Shared(cluster, self.nodes, self._running)
        self.view = ClusterView()
        values = {
            "time_s": 0.0,
            "cluster": cluster,
            "catalogue": catalogue,
            "restart_cost": restart_cost,
            "restart_delay_s": restart_cost.expected_s,
            "interval_s": interval_s,
            "shows_remaining_work": shows_remaining_work,
            "shares_devices": shares_devices,
            "placement": placement,
            "announced": (),
            "pending": self._pending.values(),
            "running": self._running.values(),
            "_nodes": self.nodes,
            "_sharing": self._shared,
            "_pending": self._pending,
            "_running": self._running,
        }
        for name, value in values.items():
            write(self.view, name, value)

    @property
    def is_empty(self) -> bool:
        """Return whether no job is pending or running."""
        return not self._pending and not self._running

    def find(self, job_id: str) -> JobView | None:
        """Return a pending or running job, or None."""
        return self._running.get(job_id) or self._pending.get(job_id)

    def advance(self, time_s: float) -> None:
        """Advance the time [s]."""
        write(self.view, "time_s", time_s)

    # --- jobs -------------------------------------------------------------------------------

    def submit(self, job: JobView) -> None:
        """Put a job at the end of the queue."""
        self._pending[job.spec.job_id] = job

    def reveal(self, job: JobView, configuration: Configuration) -> None:
        """Reveal the time of a job's step in a configuration."""
        write(job, "_observed", job._observed | {configuration})

    def hold(
        self,
        job: JobView,
        allocation: Allocation,
        continues_at_s: float | None = None,
        delay_s: float | None = None,
    ) -> float:
        """Allocate devices to a job that has none; return the end of its restart delay [s].

        A job that only begins or ceases to share its devices has no restart: ``continues_at_s``, not in the
        past, is when it is ready [s]. ``delay_s`` takes the place of the cluster's restart delay [s].
        """
        now_s = self.view.time_s
        ready_s = continues_at_s
        if ready_s is None:
            if delay_s is None:
                delay_s = delay_of(self.view.restart_cost, job.spec, job._last, allocation)
            ready_s = now_s + delay_s
        step_s = allocation.configuration.iter_time_s
        # The speed of a guest follows from the pairing on its nodes, which must include this job first.
        if allocation.is_guest or self._shared.now is not None:
            self.expect([(job, allocation)])
        unheld: tuple[tuple[float, int], ...] = ()
        if allocation.is_guest and self._shared.now is not None:
            step_s /= self._shared.now.speed(job.index, allocation)
            unheld = ((now_s, self._shared.now.unheld(job.index, allocation)),)
        self.nodes.move(allocation, -1)
        kind = unlocked(job)
        if job.spec.job_id in self._pending:
            self._running[job.spec.job_id] = self._pending.pop(job.spec.job_id)
            job._waiting_s += now_s - job.waiting_since_s
            job.waiting_since_s = _NAN
        job.allocation = job._last = allocation
        job._held_text, job._step_s = allocation.text, step_s
        job.held_since_s = now_s
        job.ready_time_s = job._since_s = ready_s
        job._marks, job._unheld = ((ready_s, job._steps_left),), unheld
        if job.first_start_s is None:
            job.first_start_s = now_s
        elif continues_at_s is None:
            job.restart_count += 1
        job.__class__ = kind
        return ready_s

    def release(self, job: JobView) -> None:
        """Release the devices of a job, and add its progress and times to its totals."""
        held = job.allocation
        if held is None:
            return
        # Read before anything changes: these depend on the present allocation.
        steps_left, running_s, restart_s = job._steps_left_now(), job.running_time_s, job.restart_time_s
        held_gpu_s, observed = job.attained_service_gpu_s, job.observed
        self.nodes.move(held, 1)
        if self._shared.now is not None:
            self._shared.now.remove(job.index, held)
            self._touched.update(held.nodes)
        kind = unlocked(job)
        job._steps_left, job._running_s, job._restart_s = steps_left, running_s, restart_s
        job._held_gpu_s, job._observed = held_gpu_s, observed
        job.allocation = None
        job.held_since_s = job.ready_time_s = job._since_s = _NAN
        job.generation += 1
        job.__class__ = kind

    def queue_again(self, jobs: Iterable[JobView]) -> None:
        """Return jobs that lost their devices to their places in the queue."""
        for job in jobs:
            self._pending[job.spec.job_id] = self._running.pop(job.spec.job_id)
            write(job, "waiting_since_s", self.view.time_s)
        # Moving every job to the end, in the order of submission, sorts the queue.
        for job in sorted(self._pending.values(), key=lambda job: job.index):
            self._pending.move_to_end(job.spec.job_id)

    def finish(self, job: JobView) -> None:
        """Finish a running or pending job."""
        self.release(job)
        if self._running.pop(job.spec.job_id, None) is None:
            del self._pending[job.spec.job_id]
            write(job, "_waiting_s", job.waiting_time_s)
        kind = unlocked(job)
        job._steps_left, job.waiting_since_s = 0.0, _NAN
        job.__class__ = kind

    def set_steps_left(self, job: JobView, steps: float) -> None:
        """Set the steps that a job has left, where processes report them or a rollback changes them."""
        write(job, "_steps_left", steps)

    def restore(
        self,
        job: JobView,
        *,
        generation: int,
        first_start_s: float | None,
        restart_count: int,
        times_s: tuple[float, float, float],
        held_gpu_s: float,
        observed: Iterable[Configuration],
    ) -> None:
        """Restore the recorded state of a job that holds nothing.

        ``times_s`` are waiting, running and restart time; ``observed`` are the configurations whose time it
        knows.
        """
        kind = unlocked(job)
        job.generation, job.restart_count = generation, restart_count
        job.first_start_s, job.waiting_since_s = first_start_s, self.view.time_s
        job._waiting_s, job._running_s, job._restart_s = times_s
        job._held_gpu_s, job._observed = held_gpu_s, frozenset(observed)
        job.__class__ = kind

    def set_ready(self, job: JobView, time_s: float) -> None:
        """Correct the end of a job's restart delay [s]."""
        write(job, "ready_time_s", time_s)
        write(job, "_since_s", time_s)

    # --- guests -----------------------------------------------------------------------------

    def expect(self, changes: Sequence[tuple[JobView, Allocation | None]]) -> None:
        """Register the allocations of a decision before the first is held: speeds of guests depend on all."""
        # Simulations without guests never pay for this: it begins with the first guest.
        if self._shared.now is None:
            if not any(new is not None and new.is_guest for _, new in changes):
                return
            self._shared.now = self._shared()
        for job, new in changes:
            if new is not None:
                self._shared.now.add(job.index, new)
                self._touched.update(new.nodes)

    def guests_on_changed_nodes(self) -> list[JobView]:
        """Return the guests on nodes that changed since the last call, in the order of submission."""
        if self._shared.now is None:
            return []
        guests = {index for node in self._touched for index in self._shared.now.guests(node)}
        self._touched.clear()
        if not guests:
            return []
        return sorted(
            (job for job in self._running.values() if job.index in guests), key=lambda job: job.index
        )

    def update_speed(self, job: JobView) -> bool:
        """Update the speed of a guest from the holders of its devices; return whether it changed."""
        held = job.allocation
        if held is None or self._shared.now is None:
            return False
        step_s = held.configuration.iter_time_s / self._shared.now.speed(job.index, held)
        if step_s == job._step_s:
            return False
        # Progress so far counts at the old speed; a job that is still restarting begins at the new one.
        since_s, steps_left = max(self.view.time_s, job._since_s), job._steps_left_now()
        kind = unlocked(job)
        job._since_s, job._steps_left, job._step_s = since_s, steps_left, step_s
        job._marks += ((since_s, steps_left),)
        job.generation += 1
        job.__class__ = kind
        return True

    def update_unheld(self, job: JobView) -> bool:
        """Update the devices that a guest uses and nobody holds; return whether their number changed."""
        held = job.allocation
        if held is None or self._shared.now is None:
            return False
        count = self._shared.now.unheld(job.index, held)
        if count == job._n_gpus:
            return False
        write(job, "_unheld", (*job._unheld, (self.view.time_s, count)))
        return True

    def devices_changed(self, node: int) -> None:
        """Register that the number of devices of a node changed."""
        if self._shared.now is not None:
            self._shared.now.resize(node, self.nodes.gpus_per_node()[node])
            self._touched.add(node)

    # --- nodes ------------------------------------------------------------------------------

    def holders(self, node: int) -> list[JobView]:
        """Return the jobs with devices on a node, in the order in which they last started."""
        running = self._running.values()
        return [job for job in running if job.allocation is not None and node in job.allocation.nodes]

    def announce(self, event: NodeEvent) -> None:
        """Announce a change of capacity."""
        write(self.view, "announced", (*self.view.announced, event))

    def change_capacity(self, event: NodeEvent, n_gpus: int) -> None:
        """Withdraw free devices of a node, or return them where the number is negative."""
        self.nodes.withdraw(event.node_id, n_gpus)
        write(self.view, "announced", tuple(item for item in self.view.announced if item is not event))
