"""Configurations of jobs, allocations of them to nodes, the protocol of a catalogue, and restart costs."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Protocol

from makespan.arguments import check_fields
from makespan.errors import InputError, shown
from makespan.hardware import ClusterSpec
from makespan.lazy import renamed_attributes
from makespan.plans import Placement
from makespan.workloads import JobSpec

Devices = tuple[tuple[str, int], ...]
"""Pairs of type and number of devices, 1 or more, by type; the type is empty where any device will do."""
_LONGEST_S = 1e12  # thirty thousand years; events are counted in seconds
TOLERANCE = 1e-9  # relative, for rounding in comparisons of times and of memory


@dataclass(frozen=True, slots=True, eq=False)
class Configuration:
    """One way to run a job: the devices that it holds, other resources, and its rate of progress.

    A catalogue makes each configuration once, so two of them are equal only if they are the same
    object; comparing and hashing is therefore cheap.

    Parameters
    ----------
    plan, family
        Labels in tables and figures; the engine does not read them.
    cpu_threads, host_memory_bytes_per_gpu
        CPU threads and host memory [B] per GPU that the job takes on a node.
    iter_time_s, provenance
        True time of an optimiser step [s], by which the engine runs, and its source; not for policies.
    predicted_iter_time_s, is_known
        Predicted time of a step [s], by which policies decide, and whether guarantees may rely on it.
    device_memory_bytes_per_gpu
        Memory that the job needs on each device [B]; 0 where nobody shares devices.
    busy
        Shares of a step in which the devices compute and in which data move, or None where no model says;
        they determine the progress of a guest beside the job, see `colocated_speed`.
    gpu_types
        Names of devices, one for each entry of ``placement.gpus_per_node``, equally many devices in
        alphabetical order; empty if any device will do.
    key
        Identity within its catalogue; by default labels, devices and threads.

    Attributes
    ----------
    counts
        Devices per node, largest first.
    types_by_count
        Names of each count's devices, empty where any will do.
    devices
        Number of devices of each type on all nodes together.

    Raises
    ------
    InputError
        The names of devices are not one per node, or out of order.
    """

    workload: str
    plan: str
    family: str
    placement: Placement
    cpu_threads: int
    host_memory_bytes_per_gpu: float
    iter_time_s: float
    predicted_iter_time_s: float
    provenance: str
    is_known: bool = True
    device_memory_bytes_per_gpu: float = 0.0
    busy: tuple[float, float] | None = None
    gpu_types: tuple[str, ...] = ()
    key: Hashable = None
    counts: tuple[int, ...] = field(init=False)
    types_by_count: tuple[str, ...] = field(init=False)
    devices: Devices = field(init=False)
    n_gpus: int = field(init=False)
    n_nodes: int = field(init=False)

    def __post_init__(self) -> None:
        """Derive the counts that policies read in their inner loops."""
        shares = self.placement.gpus_per_node
        types = self.gpu_types or ("",) * len(shares)
        pairs = list(zip(shares, types, strict=False))
        if len(types) != len(shares) or sorted(pairs) != pairs:
            raise InputError(
                f"configuration on {self.placement.text}: gpu_types are {self.gpu_types}; expected one name "
                "per node, in alphabetical order where nodes give equally many devices"
            )
        totals: dict[str, int] = {}
        for count, name in pairs:
            totals[name] = totals.get(name, 0) + count
        derived = {
            "counts": shares[::-1],
            "types_by_count": types[::-1],
            "devices": tuple(sorted(totals.items())),
            "n_gpus": self.placement.n_gpus,
            "n_nodes": self.placement.n_nodes,
        }
        if self.key is None:
            labels = (self.workload, self.plan, self.placement.text, self.cpu_threads)
            derived["key"] = (*labels, self.gpu_types)
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    @property
    def rate(self) -> float:
        """Steps per second by the true time; policies must not read it."""
        return 1.0 / self.iter_time_s

    def on(self, nodes: Sequence[int]) -> "Allocation":
        """Return the allocation on nodes given in the order of `counts`, largest share first."""
        return Allocation(self, tuple(nodes)[::-1])


@dataclass(frozen=True, slots=True)
class Allocation:
    """A configuration on certain nodes, aligned with ``placement.gpus_per_node`` (smallest share first).

    Equal shares are brought into the order of their nodes, so that two allocations are equal if and only if
    nothing would change between them.

    A guest has no devices of its own: it computes on those of others, or free ones, while these are idle, at
    most one guest per device; its slowest device determines its speed (`colocated_speed`). It must fit into
    memory beside the holder; jobs are not bound to particular devices of a node, so guests and holders are
    paired to fit. It takes host memory like any job, but no CPU threads: those of idle moments suffice.

    Raises InputError if the number of nodes is not that of the placement, or if a node occurs twice.
    """

    configuration: Configuration
    nodes: tuple[int, ...]
    is_guest: bool = False

    def __post_init__(self) -> None:
        """Check that every share has its own node, and bring equal shares into order."""
        if len(self.nodes) != self.configuration.n_nodes or len(set(self.nodes)) != len(self.nodes):
            raise InputError(
                f"allocation of placement {self.configuration.placement.text}: nodes are {self.nodes}; "
                f"expected {self.configuration.n_nodes} different node(s)"
            )
        if len(self.nodes) > 1:
            counts = self.configuration.placement.gpus_per_node
            types = self.configuration.gpu_types or counts
            ordered = sorted(zip(counts, types, self.nodes, strict=True))
            object.__setattr__(self, "nodes", tuple([node for _, _, node in ordered]))

    @property
    def shares(self) -> tuple[tuple[int, int], ...]:
        """Pairs of node number and devices there, by node number."""
        return tuple(sorted(zip(self.nodes, self.configuration.placement.gpus_per_node, strict=True)))

    @property
    def n_gpus(self) -> int:
        """Devices that are the job's own."""
        return 0 if self.is_guest else self.configuration.n_gpus

    __getattr__ = renamed_attributes({"beside": "colocated"})

    def colocated(self, is_guest: bool) -> "Allocation":
        """Return the same allocation as a guest, or with devices of its own."""
        return Allocation(self.configuration, self.nodes, is_guest)

    @property
    def text(self) -> str:
        """The shares as ``node:devices``, joined by spaces; the form of the events table."""
        return " ".join(f"{node}:{count}" for node, count in self.shares)


class Catalogue(Protocol):
    """Configurations that jobs may run as; known in advance, or planned on demand.

    It returns the same object for the same configuration, and equal answers to equal questions, every time.
    """

    @property
    def workloads(self) -> tuple[str, ...]:
        """Keys of all workloads, sorted."""

    def all(self, workload_key: str) -> tuple[Configuration, ...]:
        """Return all configurations of a workload by devices, nodes and counts, or raise UnknownNameError."""

    def holding(self, workload_key: str, devices: Devices) -> tuple[Configuration, ...]:
        """Return the configurations of a workload on just these devices, on the fewest nodes first."""

    def requested(self, job: JobSpec) -> Configuration:
        """Return the reference of a job: what it asked for, or the configuration that stands in for that.

        Guarantees and slowdowns are relative to it. Raises InputError if nothing can stand in for a request.
        """

    def as_requested(self, job: JobSpec) -> tuple[Configuration, ...]:
        """Return the configurations that keep plan and number of devices of `requested`, it first."""

    def accepts(self, configuration: Configuration) -> bool:
        """Return whether a configuration is one of this catalogue, and so may run."""

    def find(
        self, workload_key: str, plan: str, placement: str, cpu_threads: int, gpu_types: tuple[str, ...] = ()
    ) -> Configuration | None:
        """Return the configuration that a row of the events table describes, or None.

        The types are those of the devices held, in the order of `Configuration.gpu_types`; a configuration
        that runs on any device matches all of them.
        """

    def on(self, cluster: ClusterSpec) -> "Catalogue":
        """Return the catalogue of what an empty cluster can hold; itself if that is everything."""


# --- Restart costs ---


class RestartCost(Protocol):
    """Time without progress at the start of each allocation; engine and validator use the same value."""

    @property
    def expected_s(self) -> float:
        """Delay that policies assume for any change [s]."""

    def __call__(self, job: JobSpec, old: Allocation | None, new: Allocation) -> float:
        """Return the time between getting an allocation and making progress on it [s].

        ``old`` is the job's last allocation, even if it has waited since; None at its first start.
        """


@dataclass(frozen=True, slots=True)
class RestartDelays:
    """Fixed delays by the kind of change; InputError unless they are finite and not negative.

    Parameters
    ----------
    first_start_s, replan_s, move_s
        Delay of the first start, of a changed configuration, and of a restart in the same one [s].
    """

    first_start_s: float
    replan_s: float
    move_s: float

    def __post_init__(self) -> None:
        """Check the delays."""
        check_fields(self)
        for name in ("first_start_s", "replan_s", "move_s"):
            _check_delay(name, getattr(self, name))

    @classmethod
    def constant(cls, delay_s: float) -> "RestartDelays":
        """Return one delay [s] for every start and every change."""
        return cls(delay_s, delay_s, delay_s)

    @classmethod
    def first_start_only(cls, delay_s: float) -> "RestartDelays":
        """Return a delay [s] at the first start and none at changes."""
        return cls(delay_s, 0.0, 0.0)

    @classmethod
    def changes_only(cls, delay_s: float) -> "RestartDelays":
        """Return a delay [s] at every change and every start but the first."""
        return cls(0.0, delay_s, delay_s)

    @property
    def expected_s(self) -> float:
        """Longest of the delays [s]."""
        return max(self.first_start_s, self.replan_s, self.move_s)

    def __call__(self, job: JobSpec, old: Allocation | None, new: Allocation) -> float:
        """Return the delay of a start or change [s]."""
        if old is None:
            return self.first_start_s
        return self.move_s if old.configuration is new.configuration else self.replan_s


def restart_cost(restart_delay_s: float | RestartCost) -> RestartCost:
    """Return a cost given as such or as one delay [s]; InputError unless that is finite and not negative."""
    if callable(restart_delay_s):
        expected_s = getattr(restart_delay_s, "expected_s", None)
        if not _is_delay(expected_s):
            raise InputError(
                f"restart_delay_s is {shown(restart_delay_s)}, whose expected_s is {shown(expected_s)}; "
                "expected a RestartCost with a finite time in s, not negative"
            )
        return restart_delay_s
    delay: Any = restart_delay_s
    if isinstance(delay, bool) or not isinstance(delay, Real):
        raise InputError(f"restart_delay_s is {shown(delay)}; expected a finite time in s, or a RestartCost")
    _check_delay("restart_delay_s", delay)
    return RestartDelays.constant(float(delay))


def delay_of(cost: RestartCost, job: JobSpec, old: Allocation | None, new: Allocation) -> float:
    """Return the delay of a start or change by a cost [s]; InputError unless finite and not negative."""
    delay_s = cost(job, old, new)
    if not _is_delay(delay_s):
        raise InputError(
            f"restart_delay_s of job {job.job_id!r} on {new.text} is {shown(delay_s)}; expected a finite "
            "time in s, not negative"
        )
    return float(delay_s)


def _is_delay(value: object) -> bool:
    number: Any = value
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    return bool(0 <= number <= _LONGEST_S)


def _check_delay(name: str, delay_s: Any) -> None:
    if not 0 <= delay_s <= _LONGEST_S:
        raise InputError(f"{name} is {shown(delay_s)}; expected a finite time in s, not negative")
