"""What a job may run as, where it runs, and the protocol of a catalogue of such configurations."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from makespan.errors import InputError
from makespan.hardware import ClusterSpec
from makespan.plans import Placement
from makespan.workloads import JobSpec

__all__ = [
    "IDLE_SHARE",
    "LEAST_PACE",
    "Allocation",
    "Catalogue",
    "Configuration",
    "Devices",
    "crowded_guest",
    "pace_beside",
    "paces",
    "paces_on",
]

Devices = tuple[tuple[str, int], ...]
"""Pairs of type and number of devices, 1 or more, by type; the type is empty where any device will do."""

TOLERANCE = 1e-9  # of rounding, in comparisons with a guarantee

IDLE_SHARE = 0.34
"""How much of the progress that it would make alone a guest makes where no model says what it is.

Source: AntMan (W. Xiao et al., OSDI 2020, abstract) reports 34 % more use of the computing units of a cluster
with sharing than without, and holders as fast as alone. All of that is taken for what the guests do.
"""

LEAST_PACE = 0.01  # so that a guest beside somebody who leaves nothing ends at some time


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
        What the job takes on a node for each of its GPUs there; memory in B.
    iter_time_s, provenance
        Time of an optimiser step [s], by which the engine runs, and its source; not for policies.
    predicted_iter_time_s, is_known
        The same as predicted [s], by which policies decide, and whether guarantees may rely on it.
    device_memory_bytes_per_gpu
        Memory that the job needs on each device [B]; 0 where that does not matter, as nobody shares.
    busy
        Shares of a step in which the devices compute and in which data move, or None where no model says;
        by them a guest beside the job makes progress, see `pace_beside`.
    gpu_types
        Names of devices, one for each entry of ``placement.gpus_per_node``, equally many devices in
        alphabetical order; empty if any device will do.
    key
        What tells it from all others of its catalogue; by default labels, devices and threads.

    Attributes
    ----------
    counts
        Devices a node, largest first.
    types_by_count
        Names of each count's devices, empty where any will do.
    devices
        How many of each type on all nodes together.

    Raises
    ------
    InputError
        The names of devices are not one a node, or out of order.
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
                f"configuration on {self.placement.text}: gpu_types are {self.gpu_types}; accepted: one name "
                "a node, in alphabetical order where nodes give equally many devices"
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
        """Units of work a second; policies must not read it."""
        return 1.0 / self.iter_time_s

    def on(self, nodes: Sequence[int]) -> "Allocation":
        """Return the allocation on nodes given in the order of `counts`, largest share first."""
        return Allocation(self, tuple(nodes)[::-1])


@dataclass(frozen=True, slots=True)
class Allocation:
    """A configuration on certain nodes, aligned with ``placement.gpus_per_node`` (smallest share first).

    A guest has no devices of its own: it computes on those of others, or free ones, in moments when these are
    idle, at most one guest a device, and the slowest of them holds it up (`pace_beside`). It must fit into
    memory beside the holder; on which devices of a node jobs are is nobody's business, so that they are
    paired as fits. It takes host memory like any job, but no CPU threads: those of idle moments do.

    An InputError says that the number of nodes is not that of the placement, or that a node occurs twice.
    """

    configuration: Configuration
    nodes: tuple[int, ...]
    is_guest: bool = False

    def __post_init__(self) -> None:
        """Check that every share has its own node."""
        if len(self.nodes) != self.configuration.n_nodes or len(set(self.nodes)) != len(self.nodes):
            raise InputError(
                f"allocation of placement {self.configuration.placement.text}: nodes are {self.nodes}; "
                f"accepted: {self.configuration.n_nodes} different node(s)"
            )

    @property
    def shares(self) -> tuple[tuple[int, int], ...]:
        """Pairs of node number and devices there, by node number."""
        return tuple(sorted(zip(self.nodes, self.configuration.placement.gpus_per_node, strict=True)))

    @property
    def n_gpus(self) -> int:
        """Devices that are the job's own."""
        return 0 if self.is_guest else self.configuration.n_gpus

    def beside(self, is_guest: bool) -> "Allocation":
        """Return the same with devices shared, or with devices of its own."""
        return Allocation(self.configuration, self.nodes, is_guest)

    @property
    def text(self) -> str:
        """The shares as ``node:devices``, joined by spaces; the form of the events table."""
        return " ".join(f"{node}:{count}" for node, count in self.shares)


def memory_by_device(
    allocations: Iterable["Allocation | None"], n_nodes: int
) -> tuple[list[list[float]], list[list[float]]]:
    """Return for each node the memory that holders, and guests, need on each device that they use [B]."""
    needed: tuple[list[list[float]], ...] = tuple([[] for _ in range(n_nodes)] for _ in range(2))
    for held in allocations:
        if held is not None:
            of_kind, own_bytes = needed[held.is_guest], held.configuration.device_memory_bytes_per_gpu
            for node, count in zip(held.nodes, held.configuration.placement.gpus_per_node, strict=True):
                of_kind[node] += [own_bytes] * count
    return needed[0], needed[1]


def crowded_guest(
    holders: Iterable[float], guests: Iterable[float], n_devices: int, there_bytes: float
) -> float | None:
    """Return the memory of the largest guest that finds no device on a node, or None if all do.

    Largest guests go where the least is taken, which leaves no guest without a device where any pairing does.

    Parameters
    ----------
    holders, guests
        Memory on a device of each device held, and of each that a guest uses [B].
    n_devices, there_bytes
        Devices of the node, and the memory of each that jobs may use [B].
    """
    taken = sorted(holders)
    devices = [0.0] * (n_devices - len(taken)) + taken
    for own_bytes, beside_bytes in zip(sorted(guests, reverse=True), devices, strict=False):
        if own_bytes + beside_bytes > there_bytes * (1 + TOLERANCE):
            return own_bytes
    return None


Use = tuple[int, int, Configuration]  # position of a job by submission, devices that it uses, what it runs as


def pace_beside(guest: Configuration, holder: Configuration | None) -> float:
    """Return how much of the progress that it would make alone a guest makes beside a holder, or nobody.

    Each phase of the guest takes as much longer as the holder leaves less of what the phase needs: with
    shares of a step in which devices compute, a, and in which data move, c, a step of the guest takes
    ``a / (1 - a') + c / (1 - c')`` and the rest of it as long as alone. The holder goes as fast as alone.
    Where nothing is known of the two it is `IDLE_SHARE`; never less than `LEAST_PACE`.
    """
    if holder is None:
        return 1.0
    if guest.busy is None or holder.busy is None:
        return IDLE_SHARE
    longer = 1.0
    for own, taken in zip(guest.busy, holder.busy, strict=True):
        if own * taken > 0:
            if taken >= 1.0:
                return LEAST_PACE
            longer += own / (1.0 - taken) - own
    return max(1.0 / longer, LEAST_PACE)


def paces_on(
    holders: Iterable[Use], guests: Iterable[Use], n_devices: int, there_bytes: float
) -> tuple[dict[int, float], list[Configuration | None]]:
    """Return how fast each guest on a node goes, by position, and the holders of devices without a guest.

    Guests that need most memory come first, then those submitted first. Each takes the devices on which it is
    fastest of those where it fits, of equal ones those whose holder was submitted first, free ones last. The
    slowest of them holds it up; if there are too few, it is at `LEAST_PACE`.

    Parameters
    ----------
    holders, guests
        Uses of this node alone.
    n_devices, there_bytes
        Devices of the node, and the memory of each that jobs may use [B].
    """
    left: list[Configuration | None] = []
    for _, count, item in sorted(holders, key=lambda use: use[0]):
        left += [item] * count
    left += [None] * (n_devices - len(left))
    found: dict[int, float] = {}
    for index, count, item in sorted(guests, key=lambda use: (-use[2].device_memory_bytes_per_gpu, use[0])):
        most_bytes = there_bytes * (1 + TOLERANCE) - item.device_memory_bytes_per_gpu
        fitting = [
            (-pace_beside(item, other), rank)
            for rank, other in enumerate(left)
            if other is None or other.device_memory_bytes_per_gpu <= most_bytes
        ]
        taken = sorted(fitting)[:count]
        found[index] = -taken[-1][0] if len(taken) == count else LEAST_PACE
        gone = {rank for _, rank in taken}
        left = [other for rank, other in enumerate(left) if rank not in gone]
    return found, left


def paces(
    after: Mapping[int, Allocation], gpus_per_node: Sequence[int], there_bytes: Sequence[float]
) -> dict[int, float]:
    """Return how much of the progress that it would make alone each guest of a cluster makes.

    That is its pace on the node where it is slowest (`paces_on`). Jobs are named by their positions in the
    order of submission; devices and memory [B] are those of every node.
    """
    found = {index: 1.0 for index, held in after.items() if held.is_guest}
    shared = {node for index in found for node in after[index].nodes}
    uses: dict[int, tuple[list[Use], list[Use]]] = {node: ([], []) for node in shared}
    for index, held in after.items():
        item = held.configuration
        for node, count in zip(held.nodes, item.placement.gpus_per_node, strict=True):
            if node in shared:
                uses[node][held.is_guest].append((index, count, item))
    for node, (holders, guests) in uses.items():
        there, _ = paces_on(holders, guests, gpus_per_node[node], there_bytes[node])
        for index, pace in there.items():
            found[index] = min(found[index], pace)
    return found


class Catalogue(Protocol):
    """What jobs may run as; known in advance, or planned when somebody asks.

    It gives the same object for the same configuration, and equal answers to equal questions, every time.
    """

    @property
    def workloads(self) -> tuple[str, ...]:
        """Keys of all workloads, sorted."""

    def all(self, workload_key: str) -> tuple[Configuration, ...]:
        """Return all configurations of a workload by devices, nodes and counts, or raise UnknownNameError."""

    def holding(self, workload_key: str, devices: Devices) -> tuple[Configuration, ...]:
        """Return the configurations of a workload on just these devices, on the fewest nodes first."""

    def requested(self, job: JobSpec) -> Configuration:
        """Return the reference of a job: what it asked for, or what stands for that.

        Guarantees and slowdowns are relative to it. An InputError says why nothing can stand for a request.
        """

    def as_requested(self, job: JobSpec) -> tuple[Configuration, ...]:
        """Return the configurations that keep plan and number of devices of `requested`, it first."""

    def accepts(self, configuration: Configuration) -> bool:
        """Whether a configuration is one of this catalogue, so that it may run."""

    def find(
        self, workload_key: str, plan: str, placement: str, cpu_threads: int, gpu_types: tuple[str, ...] = ()
    ) -> Configuration | None:
        """Return the configuration that a row of the events table describes, or None.

        The types are those of the devices held, in the order of `Configuration.gpu_types`; a configuration
        that runs on any device matches all of them.
        """

    def on(self, cluster: ClusterSpec) -> "Catalogue":
        """Return the catalogue of what an empty cluster can hold; itself if that is everything."""
