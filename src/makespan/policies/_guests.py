"""Where one more guest fits, and where it would be fastest."""

from bisect import bisect_left
from collections.abc import Sequence

from makespan.policies._placing import Room
from makespan.sim import Allocation, ClusterView, Configuration

__all__ = ["GuestRoom"]

_ALMOST = 1 - 1e-9  # of what a guest needs, so that nobody who just fits is turned away

Place = tuple[float, tuple[int, ...]]  # pace, and nodes in the order of the counts


class GuestRoom:
    """Holders and guests of every node, as they are now and then as a decision changes them."""

    __slots__ = ("_most", "_n_nodes", "_of_type", "_sharing", "_spare")

    def __init__(self, view: ClusterView) -> None:
        self._sharing = view.sharing()
        self._of_type, self._n_nodes = view.nodes_by_type, view.n_nodes
        # Memory for guests on devices without one, the least first, until something changes; most by node.
        self._spare: list[float] | None = None
        self._most: list[float] = []

    def add(self, index: int, held: Allocation) -> None:
        """Take in what a job, by its position in the order of submission, is to hold or use."""
        self._sharing.add(index, held)
        self._spare = None

    def remove(self, index: int, held: Allocation) -> None:
        """Forget what a job holds or uses."""
        self._sharing.remove(index, held)
        self._spare = None

    def is_crowded(self, node: int) -> bool:
        """Whether some guest of a node finds no device with memory for it."""
        return not self._sharing.has_memory(node)

    def has_devices(self, held: Allocation) -> bool:
        """Whether where a job holds devices as many have no guest, whatever memory there is."""
        is_lean = not held.configuration.host_memory_bytes_per_gpu
        return is_lean and all(self._sharing.n_unshared(node) >= count for node, count in held.shares)

    def has_place(self, item: Configuration, nodes: Sequence[int]) -> bool:
        """Whether one more guest fits on just these nodes, in the order of its `counts`."""
        if item.host_memory_bytes_per_gpu:
            return False
        own_bytes, has_memory = item.device_memory_bytes_per_gpu, self._sharing.has_memory
        return all(has_memory(node, count, own_bytes) for node, count in zip(nodes, item.counts, strict=True))

    def fastest(self, item: Configuration, least_pace: float = 0.0) -> Place | None:
        """Return where one more guest is fastest, and how fast, or None if it fits nowhere.

        The slowest device that it uses counts. Guests that need host memory fit nowhere.
        """
        if item.host_memory_bytes_per_gpu or not self._may_fit(item):
            return None
        of_node, own_bytes = self._sharing.places, item.device_memory_bytes_per_gpu * _ALMOST
        places = [of_node(node, item) if most >= own_bytes else () for node, most in enumerate(self._most)]
        paces = sorted([pace for there in places for pace in there if pace >= least_pace], reverse=True)
        if len(paces) < item.n_gpus:
            return None
        levels = sorted(set(paces[item.n_gpus - 1 :]))
        found, low, high = None, 0, len(levels)  # the last level at which it fits, by bisection
        while low < high:
            rank = (low + high) // 2
            least = levels[rank]
            counts = [sum([pace >= least for pace in there]) if there else 0 for there in places]
            nodes = Room(counts, of_type=self._of_type).fit(item) if sum(counts) >= item.n_gpus else None
            if nodes is None:
                high = rank
            else:
                found, low = (least, nodes), rank + 1
        return found

    def _may_fit(self, item: Configuration) -> bool:
        """Whether enough devices without a guest have memory for one more, wherever they are."""
        if self._spare is None:
            by_node = [self._sharing.spare_bytes(node) for node in range(self._n_nodes)]
            self._most = [max(there, default=-1.0) for there in by_node]
            self._spare = sorted([spare for there in by_node for spare in there])
        own_bytes = item.device_memory_bytes_per_gpu * _ALMOST
        return len(self._spare) - bisect_left(self._spare, own_bytes) >= item.n_gpus
