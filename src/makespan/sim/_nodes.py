"""What is free on each node."""

from makespan.hardware import ClusterSpec
from makespan.sim._catalogue import Allocation

__all__ = ["Nodes"]


class Nodes:
    """Free devices, CPU threads and host memory of every node; belongs to the engine.

    Parameters
    ----------
    cluster
        The nodes, all up and free.
    """

    __slots__ = (
        "_capacity",
        "free_cpus",
        "free_gpus",
        "free_host_bytes",
        "histogram",
        "n_free_gpus",
        "n_gpus",
        "up",
    )

    def __init__(self, cluster: ClusterSpec) -> None:
        self._capacity = [(node.n_gpus, node.cpu_threads, node.host_memory_bytes) for node in cluster.nodes]
        self.free_gpus = [gpus for gpus, _, _ in self._capacity]
        self.free_cpus = [cpus for _, cpus, _ in self._capacity]
        self.free_host_bytes = [float(memory) for _, _, memory in self._capacity]
        self.up = [True] * cluster.n_nodes
        self.n_gpus = self.n_free_gpus = sum(self.free_gpus)
        self.histogram = [0] * (max(self.free_gpus) + 1)
        for free in self.free_gpus:
            self.histogram[free] += 1

    def gpus_per_node(self) -> list[int]:
        """Return the devices of every node, 0 where it is down."""
        return [gpus if up else 0 for (gpus, _, _), up in zip(self._capacity, self.up, strict=True)]

    def move(self, allocation: Allocation, sign: int) -> None:
        """Take (``sign`` -1) or give back (+1) the devices of an allocation, unchecked."""
        configuration = allocation.configuration
        threads, host = configuration.cpu_threads, configuration.host_memory_bytes_per_gpu
        free_gpus, free_cpus, histogram = self.free_gpus, self.free_cpus, self.histogram
        for node, count in zip(allocation.nodes, configuration.placement.gpus_per_node, strict=True):
            change = count * sign
            free = free_gpus[node]
            histogram[free] -= 1
            free_gpus[node] = free = free + change
            histogram[free] += 1
            free_cpus[node] += change * threads
            if host:
                self.free_host_bytes[node] += change * host
        self.n_free_gpus += sign * configuration.n_gpus

    def shortage(self, allocation: Allocation) -> str:
        """Return what an allocation lacks, empty if it fits."""
        configuration = allocation.configuration
        for node, count in zip(allocation.nodes, configuration.placement.gpus_per_node, strict=True):
            if not 0 <= node < len(self.up):
                return f"there is no node {node}; accepted: 0 to {len(self.up) - 1}"
            if not self.up[node]:
                return f"node {node} is down"
            if self.free_gpus[node] < count:
                return f"node {node} has {self.free_gpus[node]} free GPU(s), {count} are needed"
            cpus = count * configuration.cpu_threads
            if self.free_cpus[node] < cpus:
                return f"node {node} has {self.free_cpus[node]} free CPU thread(s), {cpus} are needed"
            host = count * configuration.host_memory_bytes_per_gpu
            if host and self.free_host_bytes[node] < host * (1 - 1e-9):
                return (
                    f"node {node} has {self.free_host_bytes[node]} B of host memory free, {host} are needed"
                )
        return ""

    def fail(self, node: int) -> None:
        """Take a node away; its devices must be free."""
        gpus, _, _ = self._capacity[node]
        self.up[node] = False
        self._set_free(node, 0, 0, 0.0)
        self.n_gpus -= gpus

    def join(self, node: int) -> None:
        """Bring a node back, free."""
        gpus, cpus, memory = self._capacity[node]
        self.up[node] = True
        self._set_free(node, gpus, cpus, float(memory))
        self.n_gpus += gpus

    def _set_free(self, node: int, gpus: int, cpus: int, host_bytes: float) -> None:
        self.histogram[self.free_gpus[node]] -= 1
        self.histogram[gpus] += 1
        self.n_free_gpus += gpus - self.free_gpus[node]
        self.free_gpus[node], self.free_cpus[node] = gpus, cpus
        self.free_host_bytes[node] = host_bytes
