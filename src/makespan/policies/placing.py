"""Placement: best or worst fit with a cache per cluster, the free resources of a decision, places for guests.

Best fit, plainly: for each share of a configuration, largest first, take the unused node with the fewest free
devices among those of the right type with enough free devices (and CPU threads and host memory, where these
can run out); ties go to the first node. Worst fit takes the node with the most free devices instead; of
configurations that differ only in the shares of equally many nodes, the most uneven one that fits counts,
so that a job fills the emptiest node, then the next one. `PlacementCache` computes exactly this, on all nodes
at once.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, lru_cache
from itertools import groupby
from typing import Any, TypeVar

from makespan.hardware import ClusterSpec
from makespan.plans import read_plan
from makespan.sim import Allocation, Catalogue, ClusterView, Colocation, Configuration

K = TypeVar("K")
V = TypeVar("V")
Fit = tuple[Configuration, tuple[int, ...]]  # a configuration, and its nodes in the order of its counts


def can_starve(cluster: ClusterSpec, catalogue: Catalogue) -> bool:
    """Return True if a node may run out of CPU threads or host memory before devices; errs towards True."""
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
    """Return True if two plans are equal, or split the model equally and differ in the number of replicas."""
    if item.plan == reference.plan:
        return True
    split = _split(reference.plan, reference.n_gpus)
    return split is not None and split == _split(item.plan, item.n_gpus)


@cache
def _split(plan: str, n_gpus: int) -> tuple[int, int] | None:
    """Return tensor and pipeline degree of a plan that splits the model, None for any other."""
    execution_plan = read_plan(plan, n_gpus=n_gpus, global_batch_size=None)
    return (execution_plan.tp, execution_plan.pp) if execution_plan.is_model_parallel else None


_UNKNOWN: Any = object()  # marks what is not in the cache, as None is an answer
_MAX_REMEMBERED = 1 << 17  # size of the cache; it is cleared when full


class PlacementCache:
    """Best or worst fit with a cache: the nodes of a configuration depend on the free devices alone.

    The free devices of all nodes are packed into one integer with a field of 8 (or 32) bits per node, so one
    operation compares all nodes and the cost hardly grows with the cluster. The integer is also the key of
    the cache. Policies keep the object between decisions.

    Invariant: a field holds at most the devices of its node, so its highest bit is 0 and stays free as the
    carry of comparisons; a carry never reaches the next field.

    Parameters
    ----------
    n_nodes, most
        Number of nodes, and the most devices of one of them.
    of_type
        Nodes by type of device, as an integer with one bit per node.
    is_tight
        True if a node may run out of CPU threads or host memory before devices, see `can_starve`.
    rule
        Nodes to prefer, one of `makespan.sim.PLACEMENT_RULES`.
    """

    __slots__ = (
        "_bits", "_equal", "_first", "_fits", "_high", "_lacking", "_low", "_most", "_n_nodes",
        "_n_remembered", "_of_type", "_other", "_shares", "is_tight", "rule",
    )  # fmt: skip

    def __init__(
        self,
        n_nodes: int,
        most: int,
        of_type: Mapping[str, int] | None = None,
        *,
        is_tight: bool = True,
        rule: str = "best-fit",
    ) -> None:
        self.is_tight, self.rule, self._most = is_tight, rule, most
        self._other: PlacementCache | None = None
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
        """Return the free resources of a cluster, see `FreeResources`; the view says which rule holds."""
        if view.placement != self.rule and self._other is None:
            self._other = PlacementCache(
                self._n_nodes, self._most, self._of_type, is_tight=self.is_tight, rule=view.placement
            )
        cache = self if view.placement == self.rule or self._other is None else self._other
        return FreeResources.of(view, is_tight=self.is_tight, placements=cache, kept_threads=kept_threads)

    def packed(self, gpus: Sequence[int]) -> int:
        """Pack the devices of every node into one integer."""
        if self._bits == 8:
            return int.from_bytes(bytes(gpus), "little")
        return sum(count << self._bits * node for node, count in enumerate(gpus))

    def unpacked(self, free: int) -> list[int]:
        """Return the devices of every node from a packed integer."""
        if self._bits == 8:
            return list(free.to_bytes(self._n_nodes, "little"))
        return [free >> self._bits * node & (1 << self._bits) - 1 for node in range(self._n_nodes)]

    def share(self, item: Configuration, nodes: tuple[int, ...]) -> int:
        """Return the devices that a configuration takes on nodes, as a packed integer."""
        known = self._shares[item]
        packed: int = known.get(nodes, _UNKNOWN)
        if packed is _UNKNOWN:
            # Nodes of a policy may be numbers of NumPy, whose shifts overflow.
            shares = zip(map(int, nodes), item.counts, strict=True)
            packed = sum([count << self._bits * node for node, count in shares])
            self._remember(known, nodes, packed)
        return packed

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
        first: Fit | None = known.get(free, _UNKNOWN)
        if first is _UNKNOWN:
            first = None
            for item in items if self.rule == "best-fit" else uneven_first(items):
                nodes = self.fit(free, item) if item.n_gpus <= n_gpus else None
                if nodes is not None:
                    first = item, nodes
                    break
            self._remember(known, free, first)
        return first

    def search(
        self, free: int, item: Configuration, suits: Callable[[int, int, int], bool] | None = None
    ) -> tuple[int, ...] | None:
        """Return nodes in the order of `counts`, or None.

        ``suits`` takes a node, its free devices and the size of a share, and rejects nodes that lack CPU
        threads or host memory.
        """
        if item.counts[0] >= len(self._equal):
            return None
        if suits is None and not item.gpu_types:
            nodes = self._search(free, item.counts)
        else:
            nodes = self._search_suited(free, item, suits)
        if nodes is None or len(nodes) == 1:
            return nodes
        # In the order of `Allocation.nodes`, so that a policy sees if a job would stay where it is.
        shares = sorted(zip(item.counts, item.types_by_count, nodes, strict=True), reverse=True)
        return tuple([node for _, _, node in shares])

    def _search_suited(
        self, free: int, item: Configuration, suits: Callable[[int, int, int], bool] | None
    ) -> tuple[int, ...] | None:
        # As `_search`, for nodes of one type, and asking about each candidate.
        bits, low, taken, nodes = self._bits, self._low, 0, list[int]()
        for count, gpu_type in zip(item.counts, item.types_by_count, strict=True):
            able = free + self._lacking[count] & self._marks(gpu_type) & ~taken
            bit = 0
            for level in self._levels(count):
                if not able or bit:
                    break
                equal = able & ~((free ^ self._equal[level]) + low)
                while equal and not bit:
                    bit = equal & -equal
                    if suits is not None and not suits(bit.bit_length() // bits - 1, level, count):
                        equal, able, bit = equal ^ bit, able ^ bit, 0
            if not bit:
                return None
            taken |= bit
            nodes.append(bit.bit_length() // bits - 1)
        return tuple(nodes)

    def _search(self, free: int, counts: tuple[int, ...]) -> tuple[int, ...] | None:
        # Adding `_lacking[count]` sets the highest bit in the fields of nodes with at least ``count``
        # devices. XOR with a level in all fields gives 0 for nodes with exactly that many; adding `_low` then
        # leaves the highest bit clear in those fields alone. The lowest set bit is the first such node.
        bits, low, usable, nodes = self._bits, self._low, self._high, list[int]()
        for count in counts:
            able = free + self._lacking[count] & usable
            if not able:
                return None
            for level in self._levels(count):
                equal = able & ~((free ^ self._equal[level]) + low)
                if equal:
                    break
            bit = equal & -equal
            usable ^= bit
            nodes.append(bit.bit_length() // bits - 1)
        return tuple(nodes)

    def _levels(self, count: int) -> range:
        """Return the numbers of free devices that suffice for a share, in the order of preference."""
        levels = range(count, len(self._equal))
        return levels if self.rule == "best-fit" else levels[::-1]

    def nodes_of_type(self, gpu_type: str) -> Sequence[int]:
        """Return the nodes with a type of device; all nodes for an empty type."""
        nodes = range(self._n_nodes)
        return [node for node in nodes if self._of_type[gpu_type] >> node & 1] if gpu_type else nodes

    def _marks(self, gpu_type: str) -> int:
        """Return the highest bits of the fields of nodes with a type of device; of all for an empty type."""
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


def uneven_first(items: Iterable[Configuration]) -> list[Configuration]:
    """Order configurations for worst fit: of those in a row that differ only in shares, uneven ones first."""
    ordered: list[Configuration] = []
    for _, alike in groupby(items, key=lambda item: (item.n_gpus, item.n_nodes, item.plan, item.devices)):
        ordered += sorted(alike, key=lambda item: item.counts, reverse=True)
    return ordered


@lru_cache(maxsize=64)
def _fields(n_nodes: int, bits: int, most: int) -> tuple[int, int, list[int], list[int]]:
    """Return integers with equal fields: all bits but the highest, the highest bit, and two lists by count.

    Entries of the first list have the count in each field. An entry of the second, added to free devices,
    sets the highest bit of the fields with at least that count.
    """
    ones, half = sum(1 << bits * node for node in range(n_nodes)), 1 << bits - 1
    counts = range(most + 1)
    return ones * (half - 1), ones * half, [ones * it for it in counts], [ones * (half - it) for it in counts]


class FreeResources:
    """Free devices of every node, private to one decision; for the rule of placement see `PlacementCache`.

    Start with `FreeResources.of`, find nodes with `fit` or `first_fit`, then hold them with `take`.

    Parameters
    ----------
    gpus
        Free devices of every node, ``(n_nodes,)``.
    cpus, host_bytes
        Free CPU threads and host memory [B] of every node; None where they never run out.
    placements
        Placement cache of the same cluster.
    kept_threads
        CPU threads reserved for each device that stays free, so that a later job finds its share. Where no
        option of `first_fit` is content with so few threads per device, none are reserved.

    Attributes
    ----------
    n_gpus, placements
        Free devices on all nodes together; the placement cache.
    """

    __slots__ = ("_blocked", "_free", "_kept", "_supplies", "kept_threads", "n_gpus", "placements")

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
        # Configurations, and tuples of them, that did not fit since something was last freed. Used only where
        # supplies matter; otherwise the placement cache is as fast.
        self._blocked: set[Configuration | tuple[Configuration, ...]] = set()

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
            most = len(view.nodes_by_free_gpus) - 1
            placements = PlacementCache(view.n_nodes, most, view.nodes_by_type, rule=view.placement)
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
        other._blocked = self._blocked.copy()
        return other

    def fit(self, item: Configuration) -> tuple[int, ...] | None:
        """Return nodes for a configuration in the order of its `counts`, or None; takes nothing."""
        if item.n_gpus > self.n_gpus:
            return None
        if self._supplies is None:
            return self.placements.fit(self._free, item)
        return None if item in self._blocked else self._search(item, *self._supplies)

    def first_fit(self, items: tuple[Configuration, ...]) -> Fit | None:
        """Return the first configuration that fits, with its nodes, or None; takes nothing."""
        if self._supplies is None:
            return self.placements.first_fit(self._free, self.n_gpus, items)
        if items in self._blocked:
            return None
        first = None
        kept = self.kept_threads
        self._kept = kept if any(item.cpu_threads <= kept for item in items) else 0
        for item in items if self.placements.rule == "best-fit" else uneven_first(items):
            nodes = self.fit(item)
            if nodes is not None:
                first = item, nodes
                break
        if first is None and not self._kept:
            self._blocked.add(items)
        self._kept = 0
        return first

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
            self._blocked.clear()

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
        """Return True if more CPU threads or host memory were taken than there were."""
        if self._supplies is None:
            return False
        cpus, host_bytes = self._supplies
        return min(cpus, default=0) < 0 or min(host_bytes, default=0.0) < 0

    def _search(
        self, item: Configuration, cpus: Sequence[int], host_bytes: Sequence[float]
    ) -> tuple[int, ...] | None:
        threads, bytes_per_gpu, kept = item.cpu_threads, item.host_memory_bytes_per_gpu, self._kept

        def suits(node: int, free: int, count: int) -> bool:
            has_threads = cpus[node] >= count * threads + kept * (free - count)
            return has_threads and host_bytes[node] >= count * bytes_per_gpu

        nodes = self.placements.search(self._free, item, suits)
        if nodes is None and not kept:  # with reserved threads it may fit once fewer devices are free
            self._blocked.add(item)
        return nodes

    def _supply(self, item: Configuration, nodes: Sequence[int], sign: int) -> None:
        if self._supplies is not None:
            cpus, host_bytes = self._supplies
            for node, count in zip(nodes, item.counts, strict=True):
                cpus[node] += sign * count * item.cpu_threads
                host_bytes[node] += sign * count * item.host_memory_bytes_per_gpu


# --- Guests ---

_ALMOST = 1 - 1e-9  # factor on the memory of a guest, so that rounding rejects none that just fits
Place = tuple[float, tuple[int, ...]]  # pace of a guest, and its nodes in the order of the counts


class GuestPlacement:
    """Holders and guests of every node during a decision, to find a place for one more guest.

    Parameters
    ----------
    placements
        Placement cache of the cluster.
    """

    __slots__ = ("_colocations", "_placements", "_sharing", "_spare")

    def __init__(self, view: ClusterView, placements: PlacementCache) -> None:
        self._sharing = view.sharing()
        self._placements = placements
        # Cached until something changes: the jobs on each node, and the memory left on devices without a
        # guest, in ascending order.
        self._colocations: list[Colocation] = []
        self._spare: list[float] = []

    def add(self, index: int, held: Allocation) -> None:
        """Add the allocation of a job, as holder or guest; ``index`` is its position by submission."""
        self._sharing.add(index, held)
        self._colocations = []

    def remove(self, index: int, held: Allocation) -> None:
        """Remove the allocation of a job."""
        self._sharing.remove(index, held)
        self._colocations = []

    def is_crowded(self, node: int) -> bool:
        """Return True if some guest of a node finds no device with enough memory."""
        return self._sharing.on(node).oversubscribed_bytes is not None

    def has_devices(self, held: Allocation) -> bool:
        """Return True if a job can be a guest on its nodes, as far as the number of devices decides.

        Each node needs as many devices without a guest as the job has there. Guests need no host memory.
        """
        needs_no_host = not held.configuration.host_memory_bytes_per_gpu
        return needs_no_host and all(
            self._sharing.on(node).n_unshared >= count for node, count in held.shares
        )

    def has_place(self, item: Configuration, nodes: Sequence[int]) -> bool:
        """Return True if one more guest fits on exactly these nodes, in the order of its `counts`."""
        if item.host_memory_bytes_per_gpu:
            return False
        needed_bytes, shares = item.device_memory_bytes_per_gpu, zip(nodes, item.counts, strict=True)
        return all(self._sharing.on(node).has_memory(count, needed_bytes) for node, count in shares)

    def fastest_of(self, options: Iterable[tuple[float, Configuration]]) -> Allocation | None:
        """Return the allocation in which one more guest makes most progress, or None if it fits nowhere.

        ``options`` are configurations, each behind the time of a step without other jobs [s], fastest first.
        """
        best, most = None, 0.0  # most progress so far [steps/s]
        spare = self._spare_bytes()
        for step_s, item in options:
            if most * step_s >= 1.0:
                break  # this and all later options would be slower even without other jobs
            needed_bytes = item.device_memory_bytes_per_gpu * _ALMOST
            if len(spare) - bisect_left(spare, needed_bytes) < item.n_gpus:
                continue  # too few devices of the whole cluster have enough memory
            place = self.fastest(item, most * step_s)
            if place is not None and place[0] / step_s > most:
                best, most = item.on(place[1]).colocated(is_guest=True), place[0] / step_s
        return best

    def fastest(self, item: Configuration, least_pace: float = 0.0) -> Place | None:
        """Return the pace and the nodes of one more guest where it is fastest, or None if it fits nowhere.

        The slowest device sets the pace. Guests that need host memory fit nowhere.
        """
        needed_bytes = item.device_memory_bytes_per_gpu * _ALMOST
        spare = self._spare_bytes()
        if item.host_memory_bytes_per_gpu or len(spare) - bisect_left(spare, needed_bytes) < item.n_gpus:
            return None
        by_node = [it.speeds_for(item) if it.most_bytes >= needed_bytes else () for it in self._colocations]
        paces = sorted([pace for there in by_node for pace in there if pace >= least_pace], reverse=True)
        if len(paces) < item.n_gpus:
            return None
        # The pace of the slowest device is one of these levels. The lower it is, the more devices are fast
        # enough, so bisection finds the highest level at which the guest fits.
        levels = sorted(set(paces[item.n_gpus - 1 :]))
        best, low, high = None, 0, len(levels)
        while low < high:
            rank = (low + high) // 2
            least = levels[rank]
            counts = [sum([pace >= least for pace in there]) if there else 0 for there in by_node]
            is_enough = sum(counts) >= item.n_gpus
            nodes = self._placements.search(self._placements.packed(counts), item) if is_enough else None
            if nodes is None:
                high = rank
            else:
                best, low = (least, nodes), rank + 1
        return best

    def _spare_bytes(self) -> list[float]:
        """Return the memory left on each device without a guest [B], in ascending order."""
        if not self._colocations:
            self._colocations = self._sharing.everywhere()
            self._spare = sorted([spare for it in self._colocations for spare in it.spare_bytes])
        return self._spare
