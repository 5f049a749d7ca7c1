"""Colocation of two jobs on devices: which guests fit beside which holders, and the speeds of guests.

A holder has devices of its own and is never slowed down; a guest computes on them while they are idle.
Devices of a node are interchangeable, so pairs of holder and guest are computed from the jobs on the node and
not stored.
"""

from collections.abc import Iterable
from functools import lru_cache

from makespan.hardware import ClusterSpec
from makespan.sim.catalogue import TOLERANCE, Allocation, Configuration

Use = tuple[int, int, Configuration]  # position of a job by submission, devices that it uses, what it runs as
Part = tuple[int, Configuration]  # devices of a node that a job uses, and what it runs as
Parts = tuple[Part, ...]  # by submission of the jobs
IDLE_SHARE = 0.34
"""Speed of a guest relative to running alone, where no model predicts it.

Source: AntMan (W. Xiao et al., OSDI 2020, abstract) reports 34 % more use of the computing units of a cluster
with sharing than without, and holders as fast as alone. All of that is attributed to the guests.
"""
MIN_SPEED = 0.01  # so that a guest beside a holder without idle time finishes eventually


def memory_by_device(
    allocations: Iterable["Allocation | None"], n_nodes: int
) -> tuple[list[list[float]], list[list[float]]]:
    """Return the memory that holders, and that guests, need on each device that they use, per node [B]."""
    needed: tuple[list[list[float]], ...] = tuple([[] for _ in range(n_nodes)] for _ in range(2))
    for held in allocations:
        if held is not None:
            by_node, job_bytes = needed[held.is_guest], held.configuration.device_memory_bytes_per_gpu
            for node, count in zip(held.nodes, held.configuration.placement.gpus_per_node, strict=True):
                by_node[node] += [job_bytes] * count
    return needed[0], needed[1]


def oversubscribed_bytes(
    holders: Iterable[float], guests: Iterable[float], n_devices: int, usable_bytes: float
) -> float | None:
    """Return the memory of the largest guest that fits on no device of a node, or None if all fit [B].

    Parameters
    ----------
    holders, guests
        Memory needed on each device held, and on each device that a guest uses [B].
    n_devices, usable_bytes
        Devices of the node, and the memory of each that jobs may use [B].
    """
    taken = sorted(holders)
    devices = [0.0] * (n_devices - len(taken)) + taken
    # The largest guest goes where the least memory is taken: if any pairing fits all guests, this one does.
    for guest_bytes, holder_bytes in zip(sorted(guests, reverse=True), devices, strict=False):
        if guest_bytes + holder_bytes > usable_bytes * (1 + TOLERANCE):
            return guest_bytes
    return None


@lru_cache(maxsize=1 << 16)
def colocated_speed(guest: Configuration, holder: Configuration | None) -> float:
    """Return the speed of a guest beside a holder, or nobody, relative to running alone.

    Each phase of the guest is stretched by the share of the holder's step in which the holder needs the same
    resource: with shares of a step in which devices compute, a, and in which data move, c, a step of the
    guest takes ``a / (1 - a') + c / (1 - c')``, and the rest of it as long as alone. The holder is as fast as
    alone. The speed is `IDLE_SHARE` where the shares are unknown, and never less than `MIN_SPEED`.
    """
    if holder is None:
        return 1.0
    if guest.busy is None or holder.busy is None:
        return IDLE_SHARE
    slowdown = 1.0
    for share, taken in zip(guest.busy, holder.busy, strict=True):
        if share * taken > 0:
            if taken >= 1.0:
                return MIN_SPEED
            slowdown += share / (1.0 - taken) - share
    return max(1.0 / slowdown, MIN_SPEED)


def colocated_speeds(
    holders: Iterable[Use], guests: Iterable[Use], n_devices: int, usable_bytes: float
) -> tuple[dict[int, float], list[Configuration | None]]:
    """Return the speed of each guest on a node, by position, and the holders of devices without a guest.

    Guests that need most memory come first, then those submitted first. Each takes the devices on which it is
    fastest of those where it fits, of equal ones those whose holder was submitted first, free ones last. Its
    slowest device limits it; if there are too few, its speed is `MIN_SPEED`.

    Parameters
    ----------
    holders, guests
        Uses of this node alone.
    n_devices, usable_bytes
        Devices of the node, and the memory of each that jobs may use [B].
    """
    speeds, _, left = _paired(holders, guests, n_devices, usable_bytes)
    return speeds, left


def _paired(
    holders: Iterable[Use], guests: Iterable[Use], n_devices: int, usable_bytes: float
) -> tuple[dict[int, float], dict[int, int], list[Configuration | None]]:
    """Return what `colocated_speeds` does, and between the two the devices of each guest without a holder."""
    left: list[Configuration | None] = []
    for _, count, item in sorted(holders, key=lambda use: use[0]):
        left += [item] * count
    left += [None] * (n_devices - len(left))
    speeds: dict[int, float] = {}
    unheld: dict[int, int] = {}
    for index, count, item in sorted(guests, key=lambda use: (-use[2].device_memory_bytes_per_gpu, use[0])):
        most_bytes = usable_bytes * (1 + TOLERANCE) - item.device_memory_bytes_per_gpu
        fitting = [
            (-colocated_speed(item, other), rank)
            for rank, other in enumerate(left)
            if other is None or other.device_memory_bytes_per_gpu <= most_bytes
        ]
        taken = sorted(fitting)[:count]
        speeds[index] = -taken[-1][0] if len(taken) == count else MIN_SPEED
        gone = {rank for _, rank in taken}
        unheld[index] = sum(left[rank] is None for rank in gone)
        left = [other for rank, other in enumerate(left) if rank not in gone]
    return speeds, unheld, left


class Colocation:
    """Holders and guests of one node, with speeds and free memory; jobs count by configuration alone.

    Attributes
    ----------
    speeds, unheld
        Speed of each guest, and the devices that it uses and nobody holds, in the order of submission.
    oversubscribed_bytes
        Memory of the largest guest that fits on no device [B], or None if all fit.
    n_unshared, spare_bytes, most_bytes
        Devices without a guest, the memory that each of them has left for one, and the most of these [B].
    """

    __slots__ = (
        "_guests",
        "_holders",
        "_left",
        "_n_devices",
        "_speeds_for",
        "_usable_bytes",
        "most_bytes",
        "n_unshared",
        "oversubscribed_bytes",
        "spare_bytes",
        "speeds",
        "unheld",
    )  # fmt: skip

    def __init__(self, holders: Parts, guests: Parts, n_devices: int, usable_bytes: float) -> None:
        self._n_devices, self._usable_bytes = n_devices, usable_bytes
        first, second = ([(rank, *part) for rank, part in enumerate(parts)] for parts in (holders, guests))
        speeds, unheld, self._left = _paired(first, second, n_devices, usable_bytes)
        self.speeds = [speeds[rank] for rank in range(len(guests))]
        self.unheld = [unheld[rank] for rank in range(len(guests))]
        self._holders, self._guests = _bytes_of(holders), _bytes_of(guests)
        self.n_unshared = n_devices - len(self._guests)
        self.oversubscribed_bytes = self._crowded(self._guests)
        limit_bytes = usable_bytes * (1 + TOLERANCE)
        taken_bytes = [it.device_memory_bytes_per_gpu if it else 0.0 for it in self._left]
        self.spare_bytes = [limit_bytes - taken for taken in taken_bytes]
        self.most_bytes = max(self.spare_bytes, default=-1.0)
        self._speeds_for: dict[Configuration, list[float]] = {}

    def speeds_for(self, item: Configuration) -> list[float]:
        """Return the speed of one more guest on each device where it fits, if no other guest moves."""
        speeds = self._speeds_for.get(item)
        if speeds is None:
            most_bytes = self._usable_bytes * (1 + TOLERANCE) - item.device_memory_bytes_per_gpu
            speeds = self._speeds_for[item] = [
                colocated_speed(item, holder)
                for holder in self._left
                if holder is None or holder.device_memory_bytes_per_gpu <= most_bytes
            ]
        return speeds

    def has_memory(self, n_more: int, job_bytes: float) -> bool:
        """Return whether all guests fit if one more uses ``n_more`` devices, ``job_bytes`` of each [B]."""
        if n_more > self.n_unshared:
            return False
        return self._crowded(self._guests + [job_bytes] * n_more) is None

    def _crowded(self, guests: list[float]) -> float | None:
        return oversubscribed_bytes(self._holders, guests, self._n_devices, self._usable_bytes)


_colocation = lru_cache(maxsize=1 << 13)(Colocation)  # nodes have the same few combinations again and again


class Sharing:
    """Holders and guests of every node, kept up to date as jobs take and release devices.

    A `copy` may be changed to try a decision.
    """

    __slots__ = ("_colocation", "_here", "_n_devices", "_usable_bytes")

    def __init__(self, cluster: ClusterSpec) -> None:
        self._n_devices = [node.n_gpus for node in cluster.nodes]
        self._usable_bytes = [node.gpu.usable_bytes for node in cluster.nodes]
        # Per node the uses of holders and of guests, by position. Pairs are replaced, never changed, so that
        # copies share them; the colocation computed from a pair is kept until the pair is replaced.
        self._here: list[tuple[dict[int, Part], dict[int, Part]]] = [({}, {}) for _ in cluster.nodes]
        self._colocation: list[Colocation | None] = [None] * cluster.n_nodes

    def copy(self) -> "Sharing":
        """Return an independent copy."""
        other = Sharing.__new__(Sharing)
        other._n_devices, other._usable_bytes = self._n_devices.copy(), self._usable_bytes
        other._here, other._colocation = self._here.copy(), self._colocation.copy()
        return other

    def resize(self, node: int, n_devices: int) -> None:
        """Set the number of devices of a node."""
        self._n_devices[node], self._colocation[node] = n_devices, None

    def add(self, index: int, held: Allocation) -> None:
        """Add the allocation of a job, by its position in the order of submission; unchecked."""
        item, is_guest = held.configuration, held.is_guest
        for node, count in zip(held.nodes, item.placement.gpus_per_node, strict=True):
            uses, part = self._here[node], (count, item)
            if uses[is_guest].get(index) != part:
                changed = uses[0].copy(), uses[1].copy()
                changed[is_guest][index] = part
                self._here[node], self._colocation[node] = changed, None

    def remove(self, index: int, held: Allocation) -> None:
        """Remove the allocation of a job."""
        for node in held.nodes:
            holders, guests = self._here[node]
            changed = holders.copy(), guests.copy()
            changed[held.is_guest].pop(index, None)
            self._here[node], self._colocation[node] = changed, None

    def guests(self, node: int) -> Iterable[int]:
        """Return the guests of a node."""
        return self._here[node][True].keys()

    def on(self, node: int) -> Colocation:
        """Return the holders and guests of a node."""
        colocation = self._colocation[node]
        if colocation is None:
            holders, guests = (tuple([uses[index] for index in sorted(uses)]) for uses in self._here[node])
            colocation = _colocation(holders, guests, self._n_devices[node], self._usable_bytes[node])
            self._colocation[node] = colocation
        return colocation

    def everywhere(self) -> list[Colocation]:
        """Return the holders and guests of every node."""
        return [it or self.on(node) for node, it in enumerate(self._colocation)]

    def speed(self, index: int, held: Allocation) -> float:
        """Return the speed of a guest relative to running alone, on the node where it is slowest."""
        return min([self.on(node).speeds[rank] for node, rank in self._ranks(index, held)])

    def unheld(self, index: int, held: Allocation) -> int:
        """Return the number of devices that a guest uses and nobody holds."""
        return sum(self.on(node).unheld[rank] for node, rank in self._ranks(index, held))

    def _ranks(self, index: int, held: Allocation) -> list[tuple[int, int]]:
        """Return the position of a guest among those of each of its nodes, by submission."""
        return [(node, sorted(self._here[node][True]).index(index)) for node in held.nodes]


def _bytes_of(parts: Parts) -> list[float]:
    return [item.device_memory_bytes_per_gpu for count, item in parts for _ in range(count)]
