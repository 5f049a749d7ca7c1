"""What is free on the nodes, in a form that makes best fit cheap on large clusters."""

from collections.abc import Sequence

from makespan.hardware import ClusterSpec
from makespan.sim import Catalogue, ClusterView, Configuration

__all__ = ["Room", "can_starve"]


def can_starve(cluster: ClusterSpec, catalogue: Catalogue) -> bool:
    """Whether a node could run out of CPU threads or host memory before it runs out of devices.

    Where it cannot, placing need not look at them. The answer errs towards True.
    """
    items = [item for key in catalogue.workloads for item in catalogue.all(key)]
    threads = max((item.cpu_threads for item in items), default=0)
    host_bytes = max((item.host_memory_bytes_per_gpu for item in items), default=0.0)
    return any(
        node.n_gpus * threads > node.cpu_threads or node.n_gpus * host_bytes > node.host_memory_bytes
        for node in cluster.nodes
    )


class Room:
    """Free devices of every node, private to one decision; placing is best fit.

    Each share of a configuration, largest first, goes to the node with the fewest free devices
    that can take it, and to the first such node. Nodes with equally many free devices are the bits
    of one number, so the cost of a placement does not grow with the cluster.

    Parameters
    ----------
    gpus
        Free devices of every node; the list becomes the room's own.
    cpus, host_bytes
        Free CPU threads and host memory [B] of every node, or None where they never run out.
    """

    __slots__ = ("_levels", "_refused", "_supplies", "gpus", "n_gpus")

    def __init__(
        self, gpus: list[int], cpus: list[int] | None = None, host_bytes: list[float] | None = None
    ) -> None:
        self.gpus = gpus
        self.n_gpus = sum(gpus)
        self._supplies = None if cpus is None or host_bytes is None else (cpus, host_bytes)
        # What did not fit, single or several, until something is given back.
        self._refused: set[Configuration | tuple[Configuration, ...]] = set()
        self._levels = [0] * (max(gpus, default=0) + 1)
        for node, free in enumerate(gpus):
            self._levels[free] |= 1 << node

    @classmethod
    def of(cls, view: ClusterView, *, is_tight: bool) -> "Room":
        """Return what is free now.

        Parameters
        ----------
        view
            The cluster.
        is_tight
            Whether CPU threads and host memory must be watched, see `can_starve`.
        """
        gpus = view.free_gpus
        room = cls(gpus, view.free_cpus, view.free_host_memory_bytes) if is_tight else cls(gpus)
        room._widen(max(view.gpus_per_node, default=0))
        return room

    def copy(self) -> "Room":
        """Return an independent copy."""
        other = Room.__new__(Room)
        other.gpus = self.gpus.copy()
        other.n_gpus = self.n_gpus
        supplies = self._supplies
        other._supplies = None if supplies is None else (supplies[0].copy(), supplies[1].copy())
        other._levels = self._levels.copy()
        other._refused = self._refused.copy()
        return other

    def fit(self, item: Configuration) -> tuple[int, ...] | None:
        """Return nodes for a configuration in the order of its `counts`, or None; takes nothing."""
        if item.n_gpus > self.n_gpus or item in self._refused:
            return None
        levels = self._levels
        n_levels = len(levels)
        nodes: list[int] = []
        taken = 0
        for count in item.counts:
            for level in range(count, n_levels):
                candidates = levels[level] & ~taken
                if candidates and self._supplies is not None:
                    candidates = _supplied(candidates, item, count, *self._supplies)
                if candidates:
                    bit = candidates & -candidates
                    taken |= bit
                    nodes.append(bit.bit_length() - 1)
                    break
            else:
                self._refused.add(item)
                return None
        return tuple(nodes)

    def first_fit(self, items: tuple[Configuration, ...]) -> tuple[Configuration, tuple[int, ...]] | None:
        """Return the first configuration that fits, with its nodes, or None; takes nothing."""
        if items in self._refused:
            return None
        for item in items:
            nodes = self.fit(item)
            if nodes is not None:
                return item, nodes
        self._refused.add(items)
        return None

    def take(self, item: Configuration, nodes: Sequence[int]) -> None:
        """Hold the devices of a configuration on nodes in the order of its `counts`; unchecked."""
        self._move(item, nodes, -1)

    def give(self, item: Configuration, nodes: Sequence[int]) -> None:
        """Free the devices of a configuration on nodes in the order of its `counts`; unchecked."""
        self._move(item, nodes, 1)
        if self._refused:
            self._refused.clear()

    def has_shortage(self) -> bool:
        """Whether more was taken than there was of CPU threads or host memory."""
        if self._supplies is None:
            return False
        cpus, host_bytes = self._supplies
        return min(cpus, default=0) < 0 or min(host_bytes, default=0.0) < 0

    def _move(self, item: Configuration, nodes: Sequence[int], sign: int) -> None:
        gpus, levels = self.gpus, self._levels
        for node, count in zip(nodes, item.counts, strict=True):
            bit = 1 << node
            levels[gpus[node]] ^= bit
            gpus[node] += sign * count
            if gpus[node] >= len(levels):
                self._widen(gpus[node])
            levels[gpus[node]] ^= bit
            if self._supplies is not None:
                cpus, host_bytes = self._supplies
                cpus[node] += sign * count * item.cpu_threads
                host_bytes[node] += sign * count * item.host_memory_bytes_per_gpu
        self.n_gpus += sign * item.n_gpus

    def _widen(self, most: int) -> None:
        self._levels += [0] * (most + 1 - len(self._levels))


def _supplied(
    candidates: int, item: Configuration, count: int, cpus: Sequence[int], host_bytes: Sequence[float]
) -> int:
    """Return those of some nodes, as bits, that have the threads and the memory for a share."""
    threads, needed_bytes = count * item.cpu_threads, count * item.host_memory_bytes_per_gpu
    found, rest = 0, candidates
    while rest:
        bit = rest & -rest
        rest ^= bit
        node = bit.bit_length() - 1
        if cpus[node] >= threads and host_bytes[node] >= needed_bytes:
            found |= bit
    return found
