"""Placing: configurations worth a look, what is free on the nodes, and best fit that scales."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, TypeVar

from makespan.hardware import ClusterSpec
from makespan.plans import read_plan
from makespan.sim import Allocation, Catalogue, ClusterView, Company, Configuration

# ------------------------------------------------------------------------------------------------
# Placing: configurations worth a look, what is free on the nodes, and best fit that scales.


K = TypeVar("K")
V = TypeVar("V")
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
    found = read_plan(plan, n_gpus=n_gpus, global_batch_size=None)
    return (found.tp, found.pp) if found.is_model_parallel else None


_UNKNOWN: Any = object()  # in place of an answer that nobody has asked for yet
_MAX_REMEMBERED = 1 << 17  # answers, beyond which all are forgotten


class Places:
    """Best fit that is remembered, as where a configuration goes depends on what is free alone.

    Each share, largest first, goes to the first node with the fewest free devices that can take it. What is
    free is one number with a field for each node, whose highest bit is 0: all nodes are compared at once, so
    the cost hardly grows with the cluster. Whoever decides often keeps places between decisions.

    Parameters
    ----------
    n_nodes, most
        Number of nodes, and the most devices of one of them.
    of_type
        Nodes by type of device, the bits of a number each.
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
    def on(cls, cluster: ClusterSpec, catalogue: Catalogue) -> "Places":
        """Return the places of a cluster for what a catalogue holds."""
        of_type: dict[str, int] = {}
        for number, node in enumerate(cluster.nodes):
            of_type[node.gpu.name] = of_type.get(node.gpu.name, 0) | 1 << number
        most, is_tight = max(node.n_gpus for node in cluster.nodes), can_starve(cluster, catalogue)
        return cls(cluster.n_nodes, most, of_type, is_tight=is_tight)

    def room(self, view: ClusterView, kept_threads: int = 0) -> "Room":
        """Return what is free now, see `Room`."""
        return Room.of(view, is_tight=self.is_tight, places=self, kept_threads=kept_threads)

    def packed(self, gpus: Sequence[int]) -> int:
        """Return so many devices of every node as one number."""
        if self._bits == 8:
            return int.from_bytes(bytes(gpus), "little")
        return sum(count << self._bits * node for node, count in enumerate(gpus))

    def unpacked(self, free: int) -> list[int]:
        """Return the devices of every node that a number stands for."""
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
        """Return the first configuration that fits on so many devices, with its nodes, or None."""
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
        """Look for nodes, in the order of `counts`, which must suit: node, free devices there, share."""
        if item.counts[0] >= len(self._equal):
            return None
        if suits is None and not item.gpu_types:
            nodes = self._search(free, item.counts)
        else:
            nodes = self._search_suited(free, item, suits)
        if nodes is None or len(nodes) == 1:
            return nodes
        # In the order of `Allocation.nodes`, so that a policy sees where a job would stay as it is.
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
        # The highest bits of fields stand for nodes: those with enough, then those with just so many.
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
    """Return numbers for all fields: all bits but the highest, the highest, and two for each count.

    The first has the count in each field; the second, added to what is free, sets the highest bit where that
    is the count or more.
    """
    ones, half = sum(1 << bits * node for node in range(n_nodes)), 1 << bits - 1
    counts = range(most + 1)
    return ones * (half - 1), ones * half, [ones * it for it in counts], [ones * (half - it) for it in counts]


class Room:
    """Free devices of every node, private to one decision; placing is best fit, see `Places`.

    Begin with `Room.of`; ask with `fit` or `first_fit`, then `take`.

    Parameters
    ----------
    gpus
        Free devices of every node, ``(n_nodes,)``.
    cpus, host_bytes
        Free CPU threads and host memory [B] of every node; None where they never run out.
    places
        Where what fits, of the same cluster.
    kept_threads
        CPU threads that stay with each device that is still free, where `first_fit` has an option that needs
        no more than these for each of its own.

    Attributes
    ----------
    n_gpus, places
        Free devices on all nodes together; where what fits.
    """

    __slots__ = ("_free", "_kept", "_refused", "_supplies", "kept_threads", "n_gpus", "places")

    def __init__(
        self,
        gpus: Sequence[int],
        cpus: list[int] | None = None,
        host_bytes: list[float] | None = None,
        places: Places | None = None,
        kept_threads: int = 0,
    ) -> None:
        self.n_gpus = sum(gpus)
        self.places = Places(len(gpus), max(127, *gpus)) if places is None else places
        self._free = self.places.packed(gpus)
        self._supplies = None if cpus is None or host_bytes is None else (cpus, host_bytes)
        self.kept_threads, self._kept = kept_threads, 0
        # Where supplies matter: what did not fit, single or several, until something is given back.
        self._refused: set[Configuration | tuple[Configuration, ...]] = set()

    @classmethod
    def of(
        cls, view: ClusterView, *, is_tight: bool, places: Places | None = None, kept_threads: int = 0
    ) -> "Room":
        """Return what is free now; watch CPU threads and host memory if it is tight, see `can_starve`."""
        cpus, host_bytes = (view.free_cpus, view.free_host_memory_bytes) if is_tight else (None, None)
        if places is None:
            places = Places(view.n_nodes, len(view.nodes_by_free_gpus) - 1, view.nodes_by_type)
        return cls(view.free_gpus, cpus, host_bytes, places, kept_threads)

    @property
    def gpus(self) -> list[int]:
        """Free devices of every node, ``(n_nodes,)``; a new list."""
        return self.places.unpacked(self._free)

    def copy(self) -> "Room":
        """Return an independent copy."""
        other = Room.__new__(Room)
        other._free, other.n_gpus, other.places = self._free, self.n_gpus, self.places
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
            return self.places.fit(self._free, item)
        return None if item in self._refused else self._search(item, *self._supplies)

    def first_fit(self, items: tuple[Configuration, ...]) -> Fit | None:
        """Return the first configuration that fits, with its nodes, or None; takes nothing."""
        if self._supplies is None:
            return self.places.first_fit(self._free, self.n_gpus, items)
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
        self._free -= self.places.share(item, tuple(nodes))
        self.n_gpus -= item.n_gpus
        if self._supplies is not None:
            self._supply(item, nodes, -1)

    def give(self, item: Configuration, nodes: Sequence[int]) -> None:
        """Free the devices of a configuration on nodes in the order of its `counts`; unchecked."""
        self._free += self.places.share(item, tuple(nodes))
        self.n_gpus += item.n_gpus
        if self._supplies is not None:
            self._supply(item, nodes, 1)
            self._refused.clear()

    def take_if_free(self, item: Configuration, nodes: Sequence[int]) -> bool:
        """Hold a configuration on just these nodes and return True, or return False if they lack room."""
        free = self.gpus
        if any(free[node] < count for node, count in zip(nodes, item.counts, strict=True)):
            return False
        self.take(item, nodes)
        if self.has_shortage():
            self.give(item, nodes)
            return False
        return True

    def has_shortage(self) -> bool:
        """Whether more was taken than there was of CPU threads or host memory."""
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

        nodes = self.places.search(self._free, item, suits)
        if nodes is None and not kept:  # else it may fit once fewer devices have threads to keep
            self._refused.add(item)
        return nodes

    def _supply(self, item: Configuration, nodes: Sequence[int], sign: int) -> None:
        if self._supplies is not None:
            cpus, host_bytes = self._supplies
            for node, count in zip(nodes, item.counts, strict=True):
                cpus[node] += sign * count * item.cpu_threads
                host_bytes[node] += sign * count * item.host_memory_bytes_per_gpu


# ------------------------------------------------------------------------------------------------
# Where one more guest fits, and where it would be fastest.

_ALMOST = 1 - 1e-9  # of what a guest needs, so that nobody who just fits is turned away
Place = tuple[float, tuple[int, ...]]  # pace, and nodes in the order of the counts


class GuestRoom:
    """Holders and guests of every node, as they are now and then as a decision changes them.

    Parameters
    ----------
    places
        Where what fits on the cluster.
    """

    __slots__ = ("_company", "_places", "_sharing", "_spare")

    def __init__(self, view: ClusterView, places: Places) -> None:
        self._sharing = view.sharing()
        self._places = places
        # Who is on each node, and the memory for guests on devices without one, the least first, until
        # something changes.
        self._company: list[Company] = []
        self._spare: list[float] = []

    def add(self, index: int, held: Allocation) -> None:
        """Take in what a job, by its position in the order of submission, is to hold or use."""
        self._sharing.add(index, held)
        self._company = []

    def remove(self, index: int, held: Allocation) -> None:
        """Forget what a job holds or uses."""
        self._sharing.remove(index, held)
        self._company = []

    def is_crowded(self, node: int) -> bool:
        """Whether some guest of a node finds no device with memory for it."""
        return self._sharing.on(node).crowded_bytes is not None

    def has_devices(self, held: Allocation) -> bool:
        """Whether where a job holds devices as many have no guest, whatever memory there is."""
        is_lean = not held.configuration.host_memory_bytes_per_gpu
        return is_lean and all(self._sharing.on(node).n_unshared >= count for node, count in held.shares)

    def has_place(self, item: Configuration, nodes: Sequence[int]) -> bool:
        """Whether one more guest fits on just these nodes, in the order of its `counts`."""
        if item.host_memory_bytes_per_gpu:
            return False
        own_bytes, shares = item.device_memory_bytes_per_gpu, zip(nodes, item.counts, strict=True)
        return all(self._sharing.on(node).has_memory(count, own_bytes) for node, count in shares)

    def fastest_of(self, options: Iterable[tuple[float, Configuration]]) -> Allocation | None:
        """Return as what and where one more guest would make most progress, or None if it fits nowhere.

        ``options`` are what it may run as with the time of a step alone [s], the fastest first.
        """
        found, most = None, 0.0
        spare = self._spare_bytes()
        for step_s, item in options:
            if most * step_s >= 1.0:
                break  # even alone it would make less
            own_bytes = item.device_memory_bytes_per_gpu * _ALMOST
            if len(spare) - bisect_left(spare, own_bytes) < item.n_gpus:
                continue  # too few devices have memory, wherever they are
            place = self.fastest(item, most * step_s)
            if place is not None and place[0] / step_s > most:
                found, most = item.on(place[1]).beside(is_guest=True), place[0] / step_s
        return found

    def fastest(self, item: Configuration, least_pace: float = 0.0) -> Place | None:
        """Return where one more guest is fastest, and how fast, or None if it fits nowhere.

        The slowest device that it uses counts. Guests that need host memory fit nowhere.
        """
        own_bytes = item.device_memory_bytes_per_gpu * _ALMOST
        spare = self._spare_bytes()
        if item.host_memory_bytes_per_gpu or len(spare) - bisect_left(spare, own_bytes) < item.n_gpus:
            return None
        by_node = [it.paces_for(item) if it.most_bytes >= own_bytes else () for it in self._company]
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
            nodes = self._places.search(self._places.packed(counts), item) if is_enough else None
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
