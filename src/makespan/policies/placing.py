"""Placement: best fit with a cache per cluster, the free resources of a decision, and room for guests."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, TypeVar

from makespan.hardware import ClusterSpec
from makespan.plans import read_plan
from makespan.sim import Allocation, Catalogue, ClusterView, Colocation, Configuration

K = TypeVar("K")
V = TypeVar("V")
Fit = tuple[Configuration, tuple[int, ...]]  # what runs, and its nodes in the order of its counts


def can_starve(cluster: ClusterSpec, catalogue: Catalogue) -> bool:
    """Return whether a node may run out of CPU threads or host memory before devices; errs towards True."""
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
    """Return whether a plan is the reference's, or that with more or fewer replicas of the split model."""
    if item.plan == reference.plan:
        return True
    split = _split(reference.plan, reference.n_gpus)
    return split is not None and split == _split(item.plan, item.n_gpus)


@cache
def _split(plan: str, n_gpus: int) -> tuple[int, int] | None:
    """Return tensor and pipeline degree of a plan that splits the model, None for any other."""
    found = read_plan(plan, n_gpus=n_gpus, global_batch_size=None)
    return (found.tp, found.pp) if found.is_model_parallel else None


_UNKNOWN: Any = object()  # not in the cache; None is an answer
_MAX_REMEMBERED = 1 << 17  # answers in the cache, beyond which it is cleared


class PlacementCache:
    """Best fit with a cache, as the nodes of a configuration depend only on the free devices.

    Each share, largest first, goes to the first node with the fewest free devices that can take it. The free
    devices are one number with a field per node, whose highest bit is 0: all nodes are compared at once, so
    the cost hardly grows with the cluster. Policies keep the object between decisions.

    Parameters
    ----------
    n_nodes, most
        Number of nodes, and the most devices of one of them.
    of_type
        Nodes by type of device, as the bits of a number each.
    is_tight
        Whether a node may run out of CPU threads or host memory before devices, see `can_starve`.
    """

    __slots__ = (
        "_bits", "_equal", "_first", "_fits", "_high", "_lacking", "_low", "_n_nodes", "_n_remembered",
        "_of_type", "_shares", "is_tight",
    )  # fmt: skip

    def __init__(
        self, n_nodes: int, most: int, of_type: Mapping[str, int] | None = None, *, is_tight: bool = True
    ) -> None:
        self.is_tight = is_tight
        self._n_nodes, self._bits = n_nodes, 8 if most < 128 else 32
        self._low, self._high, self._equal, self._lacking = _fields(n_nodes, self._bits, most)
        self._of_type = {} if of_type is None else of_type
        self._fits: dict[Configuration, dict[int, tuple[int, ...] | None]] = defaultdict(dict)
        self._first: dict[tuple[Configuration, ...], dict[int, Fit | None]] = defaultdict(dict)
        self._shares: dict[Configuration, dict[tuple[int, ...], int]] = defaultdict(dict)
        self._n_remembered = 0

    @classmethod
    def on(cls, cluster: ClusterSpec, catalogue: Catalogue) -> "PlacementCache":
        """Return the cache of a cluster for the configurations of a catalogue."""
        of_type: dict[str, int] = {}
        for number, node in enumerate(cluster.nodes):
            of_type[node.gpu.name] = of_type.get(node.gpu.name, 0) | 1 << number
        most, is_tight = max(node.n_gpus for node in cluster.nodes), can_starve(cluster, catalogue)
        return cls(cluster.n_nodes, most, of_type, is_tight=is_tight)

    def free_resources(self, view: ClusterView, kept_threads: int = 0) -> "FreeResources":
        """Return the free resources, see `FreeResources`."""
        return FreeResources.of(view, is_tight=self.is_tight, placements=self, kept_threads=kept_threads)

    def packed(self, gpus: Sequence[int]) -> int:
        """Return the devices of every node as one number."""
        if self._bits == 8:
            return int.from_bytes(bytes(gpus), "little")
        return sum(count << self._bits * node for node, count in enumerate(gpus))

    def unpacked(self, free: int) -> list[int]:
        """Return the devices of every node from such a number."""
        if self._bits == 8:
            return list(free.to_bytes(self._n_nodes, "little"))
        return [free >> self._bits * node & (1 << self._bits) - 1 for node in range(self._n_nodes)]

    def share(self, item: Configuration, nodes: tuple[int, ...]) -> int:
        """Return the devices of a configuration on nodes as one number."""
        known = self._shares[item]
        found: int = known.get(nodes, _UNKNOWN)
        if found is _UNKNOWN:
            found = sum([count << self._bits * node for node, count in zip(nodes, item.counts, strict=True)])
            self._remember(known, nodes, found)
        return found

    def fit(self, free: int, item: Configuration) -> tuple[int, ...] | None:
        """Return nodes for a configuration in the order of its `counts`, or None."""
        known = self._fits[item]
        nodes: tuple[int, ...] | None = known.get(free, _UNKNOWN)
        if nodes is _UNKNOWN:
            nodes = self.search(free, item)
            self._remember(known, free, nodes)
        return nodes

    def first_fit(self, free: int, n_gpus: int, items: tuple[Configuration, ...]) -> Fit | None:
        """Return the first configuration that fits on at most ``n_gpus`` devices, and its nodes, or None."""
        known = self._first[items]
        found: Fit | None = known.get(free, _UNKNOWN)
        if found is _UNKNOWN:
            found = None
            for item in items:
                nodes = self.fit(free, item) if item.n_gpus <= n_gpus else None
                if nodes is not None:
                    found = item, nodes
                    break
            self._remember(known, free, found)
        return found

    def search(
        self, free: int, item: Configuration, suits: Callable[[int, int, int], bool] | None = None
    ) -> tuple[int, ...] | None:
        """Return nodes in the order of `counts`, or None; ``suits`` takes node, free devices, share."""
        if item.counts[0] >= len(self._equal):
            return None
        if suits is None and not item.gpu_types:
            nodes = self._search(free, item.counts)
        else:
            nodes = self._search_suited(free, item, suits)
        if nodes is None or len(nodes) == 1:
            return nodes
        # In the order of `Allocation.nodes`, so that a policy can tell whether a job would stay as it is.
        shares = sorted(zip(item.counts, item.types_by_count, nodes, strict=True), reverse=True)
        return tuple([node for _, _, node in shares])

    def _search_suited(
        self, free: int, item: Configuration, suits: Callable[[int, int, int], bool] | None
    ) -> tuple[int, ...] | None:
        bits, low, taken, nodes = self._bits, self._low, 0, list[int]()
        for count, gpu_type in zip(item.counts, item.types_by_count, strict=True):
            able = free + self._lacking[count] & self._marks(gpu_type) & ~taken
            level, bit = count, 0
            while able and not bit:
                equal = able & ~((free ^ self._equal[level]) + low)
                while equal and not bit:
                    bit = equal & -equal
                    if suits is not None and not suits(bit.bit_length() // bits - 1, level, count):
                        equal, able, bit = equal ^ bit, able ^ bit, 0
                level += 1
            if not bit:
                return None
            taken |= bit
            nodes.append(bit.bit_length() // bits - 1)
        return tuple(nodes)

    def _search(self, free: int, counts: tuple[int, ...]) -> tuple[int, ...] | None:
        # Adding `_lacking` to all fields sets the highest bit of nodes with enough devices. XOR with a count
        # gives 0 in the fields of nodes with exactly that, where adding `_low` leaves the highest bit clear.
        # Lowest bit first is lowest node first.
        bits, low, usable, nodes = self._bits, self._low, self._high, list[int]()
        for count in counts:
            able = free + self._lacking[count] & usable
            if not able:
                return None
            for level in self._equal[count:]:
                equal = able & ~((free ^ level) + low)
                if equal:
                    break
            bit = equal & -equal
            usable ^= bit
            nodes.append(bit.bit_length() // bits - 1)
        return tuple(nodes)

    def nodes_of_type(self, gpu_type: str) -> Sequence[int]:
        """Return the nodes with a type of device; all of them where no type is named."""
        found = range(self._n_nodes)
        return [node for node in found if self._of_type[gpu_type] >> node & 1] if gpu_type else found

    def _marks(self, gpu_type: str) -> int:
        """Return the highest bits of the fields of nodes with a type of device; of all if none is named."""
        if not gpu_type:
            return self._high
        return sum(1 << self._bits * (node + 1) - 1 for node in self.nodes_of_type(gpu_type))

    def _remember(self, known: dict[K, V], key: K, value: V) -> None:
        self._n_remembered += 1
        if self._n_remembered > _MAX_REMEMBERED:
            for answers in (self._fits, self._first, self._shares):
                answers.clear()
            self._n_remembered = 0
        known[key] = value


@lru_cache(maxsize=64)
def _fields(n_nodes: int, bits: int, most: int) -> tuple[int, int, list[int], list[int]]:
    """Return numbers for all fields: all bits but the highest, the highest bit, and two lists by count.

    The first list has the count in each field; an entry of the second, added to the free devices, sets the
    highest bit of the fields with the count or more.
    """
    ones, half = sum(1 << bits * node for node in range(n_nodes)), 1 << bits - 1
    counts = range(most + 1)
    return ones * (half - 1), ones * half, [ones * it for it in counts], [ones * (half - it) for it in counts]


class FreeResources:
    """Free devices of every node, private to one decision; placing is best fit, see `PlacementCache`.

    Begin with `FreeResources.of`; ask with `fit` or `first_fit`, then `take`.

    Parameters
    ----------
    gpus
        Free devices of every node, ``(n_nodes,)``.
    cpus, host_bytes
        Free CPU threads and host memory [B] of every node; None where they never run out.
    placements
        Placement cache of the same cluster.
    kept_threads
        CPU threads reserved for each device that stays free, if `first_fit` has an option that needs no more
        than these per device.

    Attributes
    ----------
    n_gpus, placements
        Free devices on all nodes together; the placement cache.
    """

    __slots__ = ("_free", "_kept", "_refused", "_supplies", "kept_threads", "n_gpus", "placements")

    def __init__(
        self,
        gpus: Sequence[int],
        cpus: list[int] | None = None,
        host_bytes: list[float] | None = None,
        placements: PlacementCache | None = None,
        kept_threads: int = 0,
    ) -> None:
        self.n_gpus = sum(gpus)
        self.placements = PlacementCache(len(gpus), max(127, *gpus)) if placements is None else placements
        self._free = self.placements.packed(gpus)
        self._supplies = None if cpus is None or host_bytes is None else (cpus, host_bytes)
        self.kept_threads, self._kept = kept_threads, 0
        # If supplies matter: configurations, and tuples of them, that did not fit, until something is freed.
        self._refused: set[Configuration | tuple[Configuration, ...]] = set()

    @classmethod
    def of(
        cls,
        view: ClusterView,
        *,
        is_tight: bool,
        placements: PlacementCache | None = None,
        kept_threads: int = 0,
    ) -> "FreeResources":
        """Return the free resources; CPU threads and host memory too if these are tight, see `can_starve`."""
        cpus, host_bytes = (view.free_cpus, view.free_host_memory_bytes) if is_tight else (None, None)
        if placements is None:
            placements = PlacementCache(view.n_nodes, len(view.nodes_by_free_gpus) - 1, view.nodes_by_type)
        return cls(view.free_gpus, cpus, host_bytes, placements, kept_threads)

    @property
    def gpus(self) -> list[int]:
        """Free devices of every node, ``(n_nodes,)``; a new list."""
        return self.placements.unpacked(self._free)

    def copy(self) -> "FreeResources":
        """Return an independent copy."""
        other = FreeResources.__new__(FreeResources)
        other._free, other.n_gpus, other.placements = self._free, self.n_gpus, self.placements
        other.kept_threads, other._kept = self.kept_threads, self._kept
        supplies = self._supplies
        other._supplies = None if supplies is None else (supplies[0].copy(), supplies[1].copy())
        other._refused = self._refused.copy()
        return other

    def fit(self, item: Configuration) -> tuple[int, ...] | None:
        """Return nodes for a configuration in the order of its `counts`, or None; takes nothing."""
        if item.n_gpus > self.n_gpus:
            return None
        if self._supplies is None:
            return self.placements.fit(self._free, item)
        return None if item in self._refused else self._search(item, *self._supplies)

    def first_fit(self, items: tuple[Configuration, ...]) -> Fit | None:
        """Return the first configuration that fits, with its nodes, or None; takes nothing."""
        if self._supplies is None:
            return self.placements.first_fit(self._free, self.n_gpus, items)
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
        self._free -= self.placements.share(item, tuple(nodes))
        self.n_gpus -= item.n_gpus
        if self._supplies is not None:
            self._supply(item, nodes, -1)

    def give(self, item: Configuration, nodes: Sequence[int]) -> None:
        """Free the devices of a configuration on nodes in the order of its `counts`; unchecked."""
        self._free += self.placements.share(item, tuple(nodes))
        self.n_gpus += item.n_gpus
        if self._supplies is not None:
            self._supply(item, nodes, 1)
            self._refused.clear()

    def take_if_free(self, item: Configuration, nodes: Sequence[int]) -> bool:
        """Hold a configuration on exactly these nodes and return True, or return False if it does not fit."""
        free = self.gpus
        if any(free[node] < count for node, count in zip(nodes, item.counts, strict=True)):
            return False
        self.take(item, nodes)
        if self.has_shortage():
            self.give(item, nodes)
            return False
        return True

    def has_shortage(self) -> bool:
        """Return whether more was taken than there was of CPU threads or host memory."""
        if self._supplies is None:
            return False
        cpus, host_bytes = self._supplies
        return min(cpus, default=0) < 0 or min(host_bytes, default=0.0) < 0

    def _search(
        self, item: Configuration, cpus: Sequence[int], host_bytes: Sequence[float]
    ) -> tuple[int, ...] | None:
        threads, own_bytes, kept = item.cpu_threads, item.host_memory_bytes_per_gpu, self._kept

        def suits(node: int, free: int, count: int) -> bool:
            has_threads = cpus[node] >= count * threads + kept * (free - count)
            return has_threads and host_bytes[node] >= count * own_bytes

        nodes = self.placements.search(self._free, item, suits)
        if nodes is None and not kept:  # else it may fit once fewer free devices have threads reserved
            self._refused.add(item)
        return nodes

    def _supply(self, item: Configuration, nodes: Sequence[int], sign: int) -> None:
        if self._supplies is not None:
            cpus, host_bytes = self._supplies
            for node, count in zip(nodes, item.counts, strict=True):
                cpus[node] += sign * count * item.cpu_threads
                host_bytes[node] += sign * count * item.host_memory_bytes_per_gpu


# --- Guests ---

_ALMOST = 1 - 1e-9  # of the memory of a guest, so that rounding rejects none that just fits
Place = tuple[float, tuple[int, ...]]  # pace, and nodes in the order of the counts


class GuestPlacement:
    """Holders and guests of every node during a decision, to find room for one more guest.

    Parameters
    ----------
    placements
        Placement cache of the cluster.
    """

    __slots__ = ("_company", "_placements", "_sharing", "_spare")

    def __init__(self, view: ClusterView, placements: PlacementCache) -> None:
        self._sharing = view.sharing()
        self._placements = placements
        # Cached until something changes: the jobs of each node, and the memory left on devices without a
        # guest, the least first.
        self._company: list[Colocation] = []
        self._spare: list[float] = []

    def add(self, index: int, held: Allocation) -> None:
        """Add what a job, by its position in the order of submission, will hold or use."""
        self._sharing.add(index, held)
        self._company = []

    def remove(self, index: int, held: Allocation) -> None:
        """Remove what a job holds or uses."""
        self._sharing.remove(index, held)
        self._company = []

    def is_crowded(self, node: int) -> bool:
        """Return whether some guest of a node finds no device with memory for it."""
        return self._sharing.on(node).oversubscribed_bytes is not None

    def has_devices(self, held: Allocation) -> bool:
        """Return whether each node of a job has as many devices without a guest, whatever their memory."""
        is_lean = not held.configuration.host_memory_bytes_per_gpu
        return is_lean and all(self._sharing.on(node).n_unshared >= count for node, count in held.shares)

    def has_place(self, item: Configuration, nodes: Sequence[int]) -> bool:
        """Return whether one more guest fits on exactly these nodes, in the order of its `counts`."""
        if item.host_memory_bytes_per_gpu:
            return False
        own_bytes, shares = item.device_memory_bytes_per_gpu, zip(nodes, item.counts, strict=True)
        return all(self._sharing.on(node).has_memory(count, own_bytes) for node, count in shares)

    def fastest_of(self, options: Iterable[tuple[float, Configuration]]) -> Allocation | None:
        """Return the allocation in which one more guest makes most progress, or None if it fits nowhere.

        ``options`` are times of a step alone [s] with their configurations, the fastest first.
        """
        found, most = None, 0.0
        spare = self._spare_bytes()
        for step_s, item in options:
            if most * step_s >= 1.0:
                break  # even alone it would be slower
            own_bytes = item.device_memory_bytes_per_gpu * _ALMOST
            if len(spare) - bisect_left(spare, own_bytes) < item.n_gpus:
                continue  # too few devices have memory, wherever they are
            place = self.fastest(item, most * step_s)
            if place is not None and place[0] / step_s > most:
                found, most = item.on(place[1]).colocated(is_guest=True), place[0] / step_s
        return found

    def fastest(self, item: Configuration, least_pace: float = 0.0) -> Place | None:
        """Return the speed and the nodes of one more guest where it is fastest, or None if it fits nowhere.

        Its slowest device counts. Guests that need host memory fit nowhere.
        """
        own_bytes = item.device_memory_bytes_per_gpu * _ALMOST
        spare = self._spare_bytes()
        if item.host_memory_bytes_per_gpu or len(spare) - bisect_left(spare, own_bytes) < item.n_gpus:
            return None
        by_node = [it.speeds_for(item) if it.most_bytes >= own_bytes else () for it in self._company]
        paces = sorted([pace for there in by_node for pace in there if pace >= least_pace], reverse=True)
        if len(paces) < item.n_gpus:
            return None
        levels = sorted(set(paces[item.n_gpus - 1 :]))
        found, low, high = None, 0, len(levels)  # the last level at which it fits, by bisection
        while low < high:
            rank = (low + high) // 2
            least = levels[rank]
            counts = [sum([pace >= least for pace in there]) if there else 0 for there in by_node]
            is_enough = sum(counts) >= item.n_gpus
            nodes = self._placements.search(self._placements.packed(counts), item) if is_enough else None
            if nodes is None:
                high = rank
            else:
                found, low = (least, nodes), rank + 1
        return found

    def _spare_bytes(self) -> list[float]:
        """Return the memory that each device without a guest has left for one [B], the least first."""
        if not self._company:
            self._company = self._sharing.everywhere()
            self._spare = sorted([spare for it in self._company for spare in it.spare_bytes])
        return self._spare
