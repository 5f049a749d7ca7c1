"""Where one more guest fits, and where it would be fastest."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from makespan.policies._placing import Places
from makespan.sim import Allocation, ClusterView, Company, Configuration

__all__ = ["GuestRoom"]

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
