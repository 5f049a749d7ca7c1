"""Placing: configurations worth a look, what is free on the nodes, and best fit that scales."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache

from makespan.hardware import ClusterSpec
from makespan.plans import read_plan
from makespan.sim import Catalogue, ClusterView, Configuration

__all__ = ["Room", "can_starve", "fastest_by_placement", "keeps_plan"]


Fit = tuple[Configuration, tuple[int, ...]]  # what runs, and its nodes in the order of its counts


def can_starve(cluster: ClusterSpec, catalogue: Catalogue) -> bool:
    """Whether a node could run out of CPU threads or host memory before devices; errs towards True."""
    items = [item for key in catalogue.workloads for item in catalogue.all(key)]
    threads = max((item.cpu_threads for item in items), default=0)
    host_bytes = max((item.host_memory_bytes_per_gpu for item in items), default=0.0)
    return any(
        node.n_gpus * threads > node.cpu_threads or node.n_gpus * host_bytes > node.host_memory_bytes
        for node in cluster.nodes
    )


def fastest_by_placement(items: Iterable[Configuration]) -> list[Configuration]:
    """Return the configuration predicted fastest on each placement, in the order of placements."""
    best: dict[tuple[tuple[int, ...], tuple[str, ...]], Configuration] = {}
    for item in items:
        key = (item.counts, item.types_by_count)
        known = best.get(key)
        if known is None or item.predicted_iter_time_s < known.predicted_iter_time_s:
            best[key] = item
    return list(best.values())


def keeps_plan(reference: Configuration, item: Configuration) -> bool:
    """Whether a plan is the reference's, or splits the model in the same way into more or fewer replicas."""
    if item.plan == reference.plan:
        return True
    split = _split(reference.plan, reference.n_gpus)
    return split is not None and split == _split(item.plan, item.n_gpus)


@cache
def _split(plan: str, n_gpus: int) -> tuple[int, int] | None:
    """Tensor and pipeline degree of a plan that splits the model, None for any other."""
    # Only the degrees are of interest, so one sample a device is batch enough for any of them.
    found = read_plan(plan, n_gpus=n_gpus, global_batch_size=n_gpus)
    return (found.tp, found.pp) if found.is_model_parallel else None


class Room:
    """Free devices of every node, private to one decision; placing is best fit.

    Each share, largest first, goes to the first node with the fewest free devices that can take it. Nodes
    with equally many free devices are the bits of one number, so the cost does not grow with the cluster.
    Begin with `Room.of`; ask with `fit` or `first_fit`, then `take`.

    Parameters
    ----------
    gpus
        Free devices of every node, ``(n_nodes,)``; changed in place.
    cpus, host_bytes
        Free CPU threads and host memory [B] of every node; None where they never run out.
    levels, of_type
        Nodes by free devices and by type of device, the bits of a number each; of a view, if known.
    kept_threads
        CPU threads that stay with each device that is still free, where `first_fit` has an option that needs
        no more than these for each of its own.
    """

    __slots__ = ("_kept", "_levels", "_of_type", "_refused", "_supplies", "gpus", "kept_threads", "n_gpus")

    def __init__(
        self,
        gpus: list[int],
        cpus: list[int] | None = None,
        host_bytes: list[float] | None = None,
        levels: list[int] | None = None,
        of_type: Mapping[str, int] | None = None,
        kept_threads: int = 0,
    ) -> None:
        self.gpus = gpus
        self.kept_threads, self._kept = kept_threads, 0
        self.n_gpus = sum(gpus)
        self._supplies = None if cpus is None or host_bytes is None else (cpus, host_bytes)
        self._of_type = {} if of_type is None else of_type
        # What did not fit, single or several, until something is given back.
        self._refused: set[Configuration | tuple[Configuration, ...]] = set()
        if levels is None:
            levels = [0] * (max(gpus, default=0) + 1)
            for node, free in enumerate(gpus):
                levels[free] |= 1 << node
        self._levels = levels

    @classmethod
    def of(cls, view: ClusterView, *, is_tight: bool, kept_threads: int = 0) -> "Room":
        """Return what is free now; watch CPU threads and host memory if it is tight, see `can_starve`."""
        cpus, host_bytes = (view.free_cpus, view.free_host_memory_bytes) if is_tight else (None, None)
        room = cls(view.free_gpus, cpus, host_bytes, view.nodes_by_free_gpus, view.nodes_by_type)
        room.kept_threads = kept_threads
        room.n_gpus = view.n_free_gpus
        return room

    def copy(self) -> "Room":
        """Return an independent copy."""
        other = Room.__new__(Room)
        other.gpus = self.gpus.copy()
        other.n_gpus = self.n_gpus
        other.kept_threads, other._kept = self.kept_threads, self._kept
        supplies = self._supplies
        other._supplies = None if supplies is None else (supplies[0].copy(), supplies[1].copy())
        other._of_type = self._of_type
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
        masks = [self.nodes_of_type(name) for name in item.types_by_count] if item.gpu_types else None
        for rank, count in enumerate(item.counts):
            allowed = ~taken if masks is None else masks[rank] & ~taken
            for level in range(count, n_levels):
                candidates = levels[level] & allowed
                bit = candidates & -candidates
                if bit and self._supplies is not None:
                    kept = self._kept * (level - count)
                    bit = _first_supplied(candidates, item, count, kept, *self._supplies)
                if bit:
                    taken |= bit
                    nodes.append(bit.bit_length() - 1)
                    break
            else:
                if not self._kept:  # else it may fit once fewer devices have threads to keep
                    self._refused.add(item)
                return None
        return tuple(nodes)

    def first_fit(self, items: tuple[Configuration, ...]) -> Fit | None:
        """Return the first configuration that fits, with its nodes, or None; takes nothing."""
        if items in self._refused:
            return None
        found = None
        kept = self.kept_threads
        self._kept = kept if any(item.cpu_threads <= kept for item in items) else 0
        for item in items:
            nodes = self.fit(item)
            if nodes is not None:
                found = item, nodes
                break
        if found is None and not self._kept:
            self._refused.add(items)
        self._kept = 0
        return found

    def take(self, item: Configuration, nodes: Sequence[int]) -> None:
        """Hold the devices of a configuration on nodes in the order of its `counts`; unchecked."""
        self._move(item, nodes, -1)

    def give(self, item: Configuration, nodes: Sequence[int]) -> None:
        """Free the devices of a configuration on nodes in the order of its `counts`; unchecked."""
        self._move(item, nodes, 1)
        if self._refused:
            self._refused.clear()

    def take_if_free(self, item: Configuration, nodes: Sequence[int]) -> bool:
        """Hold a configuration on just these nodes and return True, or return False if they lack room."""
        if any(self.gpus[node] < count for node, count in zip(nodes, item.counts, strict=True)):
            return False
        self.take(item, nodes)
        if self.has_shortage():
            self.give(item, nodes)
            return False
        return True

    def nodes_of_type(self, gpu_type: str) -> int:
        """Return the nodes with a type of device, as bits; all of them where no type is named."""
        return self._of_type[gpu_type] if gpu_type else -1

    def has_shortage(self) -> bool:
        """Whether more was taken than there was of CPU threads or host memory."""
        if self._supplies is None:
            return False
        cpus, host_bytes = self._supplies
        return min(cpus, default=0) < 0 or min(host_bytes, default=0.0) < 0

    def _move(self, item: Configuration, nodes: Sequence[int], sign: int) -> None:
        gpus, levels, supplies = self.gpus, self._levels, self._supplies
        for node, count in zip(nodes, item.counts, strict=True):
            bit, free = 1 << node, gpus[node]
            levels[free] ^= bit
            gpus[node] = free = free + sign * count
            if free >= len(levels):
                levels += [0] * (free + 1 - len(levels))
            levels[free] ^= bit
            if supplies is not None:
                cpus, host_bytes = supplies
                cpus[node] += sign * count * item.cpu_threads
                host_bytes[node] += sign * count * item.host_memory_bytes_per_gpu
        self.n_gpus += sign * item.n_gpus


def _first_supplied(
    candidates: int,
    item: Configuration,
    count: int,
    kept_threads: int,
    cpus: Sequence[int],
    host_bytes: Sequence[float],
) -> int:
    """Bit of the first of some nodes that has the threads, and more to keep, and the memory, or 0."""
    threads, needed_bytes = count * item.cpu_threads, count * item.host_memory_bytes_per_gpu
    threads += kept_threads
    while candidates:
        bit = candidates & -candidates
        node = bit.bit_length() - 1
        if cpus[node] >= threads and host_bytes[node] >= needed_bytes:
            return bit
        candidates ^= bit
    return 0
