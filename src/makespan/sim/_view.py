"""What policies and observers see: the cluster and its jobs, read-only."""

import math
from collections import OrderedDict
from collections.abc import Mapping, ValuesView
from types import MappingProxyType
from typing import TYPE_CHECKING, NoReturn

from makespan.errors import MakespanError
from makespan.hardware import ClusterSpec
from makespan.sim._catalogue import Allocation, Catalogue
from makespan.sim._costs import RestartCost
from makespan.sim._events import NodeEvent
from makespan.workloads import JobSpec

if TYPE_CHECKING:
    from makespan.sim._state import Nodes

__all__ = ["ClusterView", "JobView", "unlocked", "write"]

_NAN = float("nan")

# Views refuse assignment; this is how they are filled, and how `ClusterState` writes to them.
write = object.__setattr__


def _refuse(self: object, name: str, value: object = None) -> NoReturn:
    raise MakespanError(f"{type(self).__name__}.{name} is read-only; accepted: a Decision")


class _JobSlots:
    """Plain attributes of a job: policies read them in their innermost loops."""

    __slots__ = (
        "_held_gpu_s",
        "_held_text",
        "_last",
        "_restart_s",
        "_running_s",
        "_steps_left",
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

    spec: JobSpec
    index: int
    allocation: Allocation | None
    ready_time_s: float
    restart_count: int
    first_start_s: float | None
    waiting_since_s: float
    held_since_s: float
    generation: int
    _held_gpu_s: float
    _held_text: str
    _last: Allocation | None
    _restart_s: float
    _running_s: float
    _steps_left: float
    _view: "ClusterView"
    _waiting_s: float


class JobView(_JobSlots):
    """A job at this moment, read-only.

    Attributes
    ----------
    spec
        The job as submitted.
    index
        Position in the order of submission.
    allocation
        What it holds, or None while it waits.
    ready_time_s
        When its present restart delay is or was over [s]; NaN while it waits.
    restart_count
        Restart delays begun after the first start: reconfigurations, and starts after a suspension.
    first_start_s
        When it first held devices [s], or None.
    waiting_since_s
        Since when it waits [s]; NaN while it runs.
    held_since_s
        Since when it holds its present allocation [s]; NaN while it waits.
    generation
        Number of allocations that it has given up.
    """

    __slots__ = ()
    __setattr__ = __delattr__ = _refuse

    def __init__(self, spec: JobSpec, index: int, steps: float, view: "ClusterView") -> None:
        kind = unlocked(self)
        self.spec = spec
        self.index = index
        self.allocation = None
        self.ready_time_s = _NAN
        self.restart_count = 0
        self.first_start_s = None
        self.waiting_since_s = spec.submit_time_s
        self.held_since_s = _NAN
        self.generation = 0
        self._held_gpu_s = 0.0
        self._held_text = ""
        self._last = None
        self._restart_s = 0.0
        self._running_s = 0.0
        self._steps_left = steps
        self._view = view
        self._waiting_s = 0.0
        self.__class__ = kind

    def __repr__(self) -> str:
        """Return name and allocation."""
        held = "waiting" if self.allocation is None else self.allocation.text
        return f"JobView({self.spec.job_id!r}, {held})"

    @property
    def steps_left(self) -> float:
        """Work still to do now, fractions included; only for policies that declare ``is_clairvoyant``."""
        if not self._view.shows_remaining_work:
            raise MakespanError(
                f"job {self.spec.job_id!r}: steps_left is hidden from this policy; accepted: a policy "
                "that declares is_clairvoyant"
            )
        return self._steps_left_now()

    def _steps_left_now(self) -> float:
        allocation = self.allocation
        if allocation is None:
            return self._steps_left
        elapsed_s = self._view.time_s - self.ready_time_s
        if elapsed_s <= 0:
            return self._steps_left
        return max(self._steps_left - elapsed_s / allocation.configuration.iter_time_s, 0.0)

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
        """Device time received so far, restarts included [GPU s]."""
        if self.allocation is None:
            return self._held_gpu_s
        held_s = self._view.time_s - self.held_since_s
        return self._held_gpu_s + held_s * self.allocation.configuration.n_gpus


def unlocked(job: JobView) -> type[JobView]:
    """Let a job be written to, and return the class that locks it again.

    For the transitions in `ClusterState`, which run for every event: several plain writes between two
    changes of class take a fraction of the time of as many calls of `write`.
    """
    kind = type(job)
    write(job, "__class__", _JobSlots)
    return kind


class ClusterView:
    """The cluster at this moment, read-only.

    Attributes
    ----------
    time_s
        The simulated time [s].
    cluster
        All nodes that there may be, down ones too.
    catalogue
        What jobs may run as; holds only what fits this cluster.
    restart_cost, restart_delay_s
        What a start or change costs, exactly, and the one number [s] to reckon with.
    interval_s
        Length of a round [s], or None where the policy is asked after each event.
    shows_remaining_work
        Whether `JobView.steps_left` may be read.
    announced
        Changes of capacity that were announced and are still to come.
    pending
        Jobs without devices, in the order of submission; a live collection, copy it to keep it.
    running
        Jobs with devices, in the order in which they last started; live as well.
    """

    __slots__ = (
        "_nodes",
        "_pending",
        "_running",
        "announced",
        "catalogue",
        "cluster",
        "interval_s",
        "pending",
        "restart_cost",
        "restart_delay_s",
        "running",
        "shows_remaining_work",
        "time_s",
    )
    __setattr__ = __delattr__ = _refuse

    time_s: float
    cluster: ClusterSpec
    catalogue: Catalogue
    restart_cost: RestartCost
    restart_delay_s: float
    interval_s: float | None
    shows_remaining_work: bool
    announced: tuple[NodeEvent, ...]
    pending: ValuesView[JobView]
    running: ValuesView[JobView]
    _nodes: "Nodes"
    _pending: OrderedDict[str, JobView]
    _running: dict[str, JobView]

    @property
    def n_nodes(self) -> int:
        """Number of nodes, down ones too."""
        return self.cluster.n_nodes

    @property
    def n_gpus(self) -> int:
        """Devices that are there now."""
        return self._nodes.n_gpus

    @property
    def n_free_gpus(self) -> int:
        """Devices that no job holds."""
        return self._nodes.n_free_gpus

    @property
    def gpus_per_node(self) -> list[int]:
        """Devices of every node that are there now; a new list."""
        return self._nodes.gpus_per_node()

    @property
    def gpu_types(self) -> tuple[str, ...]:
        """Name of the devices of every node."""
        return self._nodes.gpu_types

    @property
    def free_gpus(self) -> list[int]:
        """Free devices of every node; a new list."""
        return self._nodes.free_gpus.copy()

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
        """Nodes by free devices, ``(max devices of a node + 1,)``, the bits of a number each; a new list.

        Where a placement fits follows from it in time that hardly grows with the nodes.
        """
        return self._nodes.levels.copy()

    @property
    def nodes_by_type(self) -> Mapping[str, int]:
        """Nodes with each type of device, the bits of a number each."""
        return MappingProxyType(self._nodes.of_type)

    def is_up(self, node: int) -> bool:
        """Whether a node is there."""
        return self._nodes.up[node]

    def job(self, job_id: str) -> JobView:
        """Return a waiting or running job; a MakespanError if there is no such job now."""
        found = self._running.get(job_id) or self._pending.get(job_id)
        if found is None:
            raise MakespanError(f"job {job_id!r} neither waits nor runs at {self.time_s} s")
        return found
