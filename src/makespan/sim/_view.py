"""What policies and observers see: the cluster and its jobs, read-only."""

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, ValuesView
from dataclasses import dataclass
from itertools import takewhile
from types import MappingProxyType
from typing import TYPE_CHECKING, NoReturn

from makespan.errors import MakespanError
from makespan.hardware import ClusterSpec
from makespan.sim._catalogue import TOLERANCE, Allocation, Catalogue, Configuration
from makespan.sim._costs import RestartCost
from makespan.sim._events import NodeEvent
from makespan.sim._sharing import Sharing
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
        "_marks",
        "_observed",
        "_restart_s",
        "_running_s",
        "_since_s",
        "_step_s",
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


class JobView(_JobSlots):
    """A job at this moment, read-only.

    Attributes
    ----------
    spec, index
        The job as submitted, and its position in the order of submission.
    allocation, generation
        What it holds, or None while it waits; how often that, or how fast a guest goes, has changed.
    ready_time_s, held_since_s, waiting_since_s
        When its present restart delay is or was over, since when it holds its present allocation, since
        when it waits [s]; NaN where it does not.
    restart_count, first_start_s
        Restart delays begun after the first start, and when that was [s], or None.
    """

    __slots__ = ()
    __setattr__ = __delattr__ = _refuse

    def __init__(self, spec: JobSpec, index: int, steps: float, view: "ClusterView") -> None:
        kind = unlocked(self)
        self.spec, self.index, self._view = spec, index, view
        self.allocation: Allocation | None = None
        self._last: Allocation | None = None
        self._observed: frozenset[Configuration] = frozenset()
        self.first_start_s: float | None = None
        self.waiting_since_s = spec.submit_time_s
        self.ready_time_s = self.held_since_s = _NAN
        # Since when each step takes _step_s, with _steps_left then; as a guest, all such moments.
        self._since_s = _NAN
        self._marks: tuple[tuple[float, float], ...] = ()
        self.restart_count = self.generation = 0
        self._held_text = ""
        self._step_s = _NAN
        self._steps_left = steps
        self._held_gpu_s = self._restart_s = self._running_s = self._waiting_s = 0.0
        self.__class__ = kind

    def __repr__(self) -> str:
        """Return name and allocation."""
        held = "waiting" if self.allocation is None else self.allocation.text
        return f"JobView({self.spec.job_id!r}, {held})"

    @property
    def observed(self) -> frozenset[Configuration]:
        """Every configuration whose time the job knows by `has_run`."""
        held = self.allocation
        if held is None or not self.has_run(held.configuration):
            return self._observed
        return self._observed | {held.configuration}

    def has_run(self, configuration: Configuration) -> bool:
        """Whether the job has done a step in a configuration, or its user has stated the time of one."""
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
        if self.has_run(configuration):
            return configuration.iter_time_s
        return configuration.predicted_iter_time_s

    @property
    def pace(self) -> float:
        """How much of the progress that it would make with devices of its own it makes; 0 if it waits."""
        held = self.allocation
        return 0.0 if held is None else held.configuration.iter_time_s / self._step_s

    def knows(self, configuration: Configuration) -> bool:
        """Whether `step_s` is certain: sampled before, or observed by this very job."""
        return configuration.is_known or self.has_run(configuration)

    def assures(self, configuration: Configuration) -> bool:
        """Whether a configuration is sure to keep the guarantee of the job, as far as anybody can know.

        The request itself does. Anything else must be known, like the request, and not slower.
        """
        reference = self._view.catalogue.requested(self.spec)
        if configuration is reference:
            return True
        limit_s = self.step_s(reference) * (1 + TOLERANCE)
        return self.knows(configuration) and self.knows(reference) and self.step_s(configuration) <= limit_s

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
        elapsed_s = self._view.time_s - self._since_s
        if elapsed_s <= 0:
            return self._steps_left
        return max(self._steps_left - elapsed_s / self._step_s, 0.0)

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


def unlocked(job: JobView) -> type[JobView]:
    """Let a job be written to, much faster than by `write`, and return the class that locks it again."""
    kind = type(job)
    write(job, "__class__", _JobSlots)
    return kind


@dataclass(init=False, repr=False, eq=False, slots=True)
class ClusterView:
    """The cluster at this moment, read-only.

    Attributes
    ----------
    cluster, catalogue
        All nodes that there may be, down ones too; what jobs may run as there.
    restart_cost, restart_delay_s
        What a start or change costs, exactly, and the one number [s] to reckon with.
    interval_s
        Length of a round [s], or None where the policy is asked after each event.
    shows_remaining_work, announced
        Whether `JobView.steps_left` may be read; changes of capacity that are still to come.
    shares_devices
        Whether a job may be a guest on devices, see `Allocation`; in simulations.
    pending, running
        Jobs without devices in the order of submission, and with, as they last started; live collections.
    """

    __setattr__ = __delattr__ = _refuse

    time_s: float
    cluster: ClusterSpec
    catalogue: Catalogue
    restart_cost: RestartCost
    restart_delay_s: float
    interval_s: float | None
    shows_remaining_work: bool
    shares_devices: bool
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
    def unshared_gpus(self) -> list[int]:
        """Devices of every node without a guest, held or not; a new list."""
        return [self._nodes.unshared(node) for node in range(self.n_nodes)]

    def sharing(self) -> Sharing:
        """Return who holds devices and who is a guest on them: a copy, to try what would be."""
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
        """Return the waiting jobs behind a position in the order of submission, the last one first."""
        return list(takewhile(lambda job: job.index > index, reversed(self._pending.values())))

    def is_up(self, node: int) -> bool:
        """Whether a node is there."""
        return self._nodes.up[node]

    def job(self, job_id: str) -> JobView:
        """Return a waiting or running job; a MakespanError if there is no such job now."""
        found = self._running.get(job_id) or self._pending.get(job_id)
        if found is None:
            raise MakespanError(f"job {job_id!r} neither waits nor runs at {self.time_s} s")
        return found
