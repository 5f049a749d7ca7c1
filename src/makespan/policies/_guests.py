"""Where one more guest fits, and where it would be fastest."""

from collections.abc import Sequence

from makespan.policies._placing import Room
from makespan.sim import Allocation, ClusterView, Configuration

__all__ = ["GuestRoom"]

Place = tuple[float, tuple[int, ...]]  # pace, and nodes in the order of the counts


class GuestRoom:
    """Holders and guests of every node, as they are now and then as a decision changes them."""

    __slots__ = ("_n_nodes", "_of_type", "_sharing", "add", "remove")

    def __init__(self, view: ClusterView) -> None:
        self._sharing = view.sharing()
        self._of_type, self._n_nodes = view.nodes_by_type, view.n_nodes
        self.add, self.remove = self._sharing.add, self._sharing.remove

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
        if item.host_memory_bytes_per_gpu:
            return None
        of_node = self._sharing.places
        places = [of_node(node, item) for node in range(self._n_nodes)]
        levels = sorted({pace for there in places for pace in there if pace >= least_pace})
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
