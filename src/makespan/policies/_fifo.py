"""First in, first out: the plainest policy."""

from dataclasses import dataclass

from makespan.hardware import ClusterSpec
from makespan.sim import Allocation, Catalogue, ClusterView, Configuration, Decision

__all__ = ["POLICIES", "Fifo"]


@dataclass(frozen=True, slots=True)
class Fifo:
    """Jobs start in the order of submission, as requested, and run to the end.

    The first job that does not fit stops all behind it. Among the placements on which the requested
    plan may run, the one on the fewest nodes is taken, on the nodes that it fills best.
    """

    name: str = "fifo"
    title: str = "FIFO"
    interval_s: float | None = None
    is_clairvoyant: bool = False
    honours_guarantees: bool = False
    references: tuple[str, ...] = ()

    def initial_state(self, cluster: ClusterSpec, catalogue: Catalogue) -> None:
        """Return nothing: the queue is all there is."""

    def decide(self, view: ClusterView, state: None) -> tuple[Decision, None]:
        """Start jobs from the head of the queue until one does not fit."""
        changes: dict[str, Allocation | None] = {}
        histogram = view.free_histogram
        room: _Room | None = None
        for job in view.pending:
            options = view.catalogue.as_requested(job.spec)
            chosen = next((item for item in options if _takes(histogram, item)), None)
            if chosen is None:
                break
            if room is None:
                room = _Room(view.free_gpus, view.free_cpus, view.free_host_memory_bytes)
            nodes = room.best_fit(chosen)
            if nodes is None:
                break
            room.take(chosen, nodes, histogram)
            changes[job.spec.job_id] = chosen.on(nodes)
        return Decision(changes), None


def _takes(histogram: list[int], chosen: Configuration) -> bool:
    """Whether enough nodes have enough free devices; the cost does not grow with the nodes."""
    usable, level = 0, len(histogram) - 1
    for rank, count in enumerate(chosen.counts):
        while level >= count:
            usable += histogram[level]
            level -= 1
        if usable <= rank:
            return False
    return True


@dataclass(frozen=True, slots=True)
class _Room:
    """What is free on every node."""

    gpus: list[int]
    cpus: list[int]
    host_bytes: list[float]

    def best_fit(self, chosen: Configuration) -> list[int] | None:
        """Return for each count the node with the fewest free devices that has room, or None."""
        nodes: list[int] = []
        for count in chosen.counts:
            threads, host_bytes = count * chosen.cpu_threads, count * chosen.host_memory_bytes_per_gpu
            best = -1
            for node, free in enumerate(self.gpus):
                if free < count or (best >= 0 and free >= self.gpus[best]):
                    continue
                if self.cpus[node] < threads or self.host_bytes[node] < host_bytes or node in nodes:
                    continue
                best = node
                if free == count:
                    break
            if best < 0:
                return None
            nodes.append(best)
        return nodes

    def take(self, chosen: Configuration, nodes: list[int], histogram: list[int]) -> None:
        """Note what a job takes."""
        for node, count in zip(nodes, chosen.counts, strict=True):
            histogram[self.gpus[node]] -= 1
            self.gpus[node] -= count
            histogram[self.gpus[node]] += 1
            self.cpus[node] -= count * chosen.cpu_threads
            self.host_bytes[node] -= count * chosen.host_memory_bytes_per_gpu


POLICIES = (Fifo(),)
