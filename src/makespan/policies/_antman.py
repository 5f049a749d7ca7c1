"""AntMan: guaranteed jobs get what they asked for, best-effort jobs use what is left over."""

from dataclasses import dataclass

from makespan.hardware import ClusterSpec
from makespan.policies._placing import Room
from makespan.policies._queue import acceptable, preempt
from makespan.sim import Allocation, Catalogue, ClusterView, Configuration, Decision, JobView

__all__ = ["POLICIES", "AntMan"]

Options = tuple[Configuration, ...]


@dataclass(frozen=True, slots=True)
class AntMan:
    """Run guaranteed jobs as requested and best-effort jobs on left-overs, first come first served.

    A best-effort job in the way, latest start first, becomes a guest on its devices: it computes while these
    are idle, and has them to itself again once nobody else holds them. One that finds no devices begins
    as a guest. Best-effort jobs accept more nodes up to ``max_slowdown`` times the predicted step.

    Reading: a guest moves to free devices elsewhere once it has been where it is for as long as a restart
    takes. Deviation: a guest must fit into what memory others leave, where the original moves some of it to
    the host. One that does not, or needs host memory, is suspended, as all are where devices are not shared.
    """

    max_slowdown: float = 1.5  # ratio of predicted steps up to which best-effort jobs accept more nodes
    shares: bool = True  # devices, where the engine lets jobs be guests
    name: str = "antman"
    title: str = "AntMan"
    interval_s: float | None = None
    is_clairvoyant: bool = False
    honours_guarantees: bool = True
    references: tuple[str, ...] = (
        "W. Xiao et al. AntMan: dynamic scaling on GPU clusters for deep learning. OSDI 2020.",
    )

    def initial_state(self, cluster: ClusterSpec, catalogue: Catalogue) -> None:
        """Return nothing to remember."""

    def decide(self, view: ClusterView, state: None) -> tuple[Decision, None]:
        """Serve guaranteed jobs, then the others, each by submission."""
        draft = _Draft(view, shares=self.shares and view.shares_devices)
        requested, since_s = view.catalogue.as_requested, view.time_s - view.restart_delay_s
        draft.end_sharing()
        refused: set[Options] = set()  # by jobs that may displace others, then by those that may not
        for job in view.pending:
            options = requested(job.spec)[:1]
            if job.spec.is_guaranteed and options not in refused and not draft.start_guaranteed(job, options):
                refused.add(options)
        draft.make_memory()
        refused.clear()
        others = [job for job in view.pending if not job.spec.is_guaranteed] + draft.displaced
        others += [job for job, _ in draft.guests() if job.held_since_s <= since_s]
        for job in sorted(others, key=lambda job: job.index):
            options = acceptable(job, requested(job.spec), 1.0, 0.0, self.max_slowdown)
            if options not in refused and not draft.start(job, options):
                refused.add(options)
        return Decision(draft.changes), None


class _Draft:
    """Who will have what, and be guest where."""

    def __init__(self, view: ClusterView, *, shares: bool) -> None:
        self.changes: dict[str, Allocation | None] = {}
        self.displaced: list[JobView] = []
        self._view = view
        self._free = Room.of(view, is_tight=True)
        self._unshared = view.unshared_gpus if shares else [0] * view.n_nodes
        running = [(job, job.allocation) for job in view.running]
        self._held = {job.index: (job, held) for job, held in running if held is not None}

    def guests(self) -> list[tuple[JobView, Allocation]]:
        """Return the guests, by submission."""
        return [entry for _, entry in sorted(self._held.items()) if entry[1].is_guest]

    def end_sharing(self) -> None:
        """Let guests have the devices where they are to themselves, if nobody holds them."""
        for job, held in self.guests():
            if self._free.take_if_free(held.configuration, held.nodes[::-1]):
                self._count_guest(held, -1)
                self._give(job, held.beside(is_guest=False))

    def start_guaranteed(self, job: JobView, options: Options) -> bool:
        """Start a job on free devices, or on those of best-effort jobs, which become guests there."""
        found = self._free.first_fit(options)
        if found is None:
            yielding = [
                (other, held)
                for other, held in self._held.values()
                if not (held.is_guest or other.spec.is_guaranteed)
            ]
            yielding.sort(key=lambda entry: (-entry[0].held_since_s, entry[0].index))
            preempted = preempt(self._free, options, [other for other, _ in yielding])
            if preempted is None:
                return False
            self._free, found, gone = preempted
            for other in gone:
                self._yield(other)
        self._free.take(*found)
        self._give(job, found[0].on(found[1]))
        return True

    def make_memory(self) -> None:
        """Displace guests that do not fit beside others."""
        needed = self._needed_bytes()
        for job, held in self.guests():
            if not all(self._has_memory(held.configuration, node, needed) for node in held.nodes):
                self._count_guest(held, -1)
                self._displace(job)

    def start(self, job: JobView, options: Options) -> bool:
        """Start a best-effort job on free devices, else as a guest; one that is a guest moves or stays."""
        found, (_, held) = self._free.first_fit(options), self._held.get(job.index, (job, None))
        if found is not None:
            self._free.take(*found)
            if held is not None:
                self._count_guest(held, -1)
            self._give(job, found[0].on(found[1]))
            self.make_memory()
            return True
        return held is not None or self._start_as_guest(job, options)

    def _start_as_guest(self, job: JobView, options: Options) -> bool:
        needed = self._needed_bytes()
        for item in options:
            if item.host_memory_bytes_per_gpu:
                continue
            places = (
                count if self._has_memory(item, node, needed) else 0
                for node, count in enumerate(self._unshared)
            )
            nodes = Room(list(places), of_type=self._view.nodes_by_type).fit(item)
            if nodes is not None:
                guest = item.on(nodes).beside(is_guest=True)
                self._count_guest(guest, 1)
                self._give(job, guest)
                return True
        return False

    def _yield(self, job: JobView) -> None:
        """Let a job be a guest where it has devices, or displace it."""
        _, held = self._held[job.index]
        guest = held.beside(is_guest=True)
        has_room = all(self._unshared[node] >= count for node, count in guest.shares)
        if has_room and not held.configuration.host_memory_bytes_per_gpu:
            self._count_guest(guest, 1)
            self._give(job, guest)
        else:
            self._displace(job)

    def _give(self, job: JobView, allocation: Allocation) -> None:
        self._held[job.index] = job, allocation
        self.changes[job.spec.job_id] = allocation

    def _displace(self, job: JobView) -> None:
        del self._held[job.index]
        self.changes[job.spec.job_id] = None
        self.displaced.append(job)

    def _count_guest(self, guest: Allocation, sign: int) -> None:
        for node, count in guest.shares:
            self._unshared[node] -= sign * count

    def _needed_bytes(self) -> list[float]:
        """Return the memory on a device of the largest job with devices on each node [B]."""
        needed = [0.0] * self._view.n_nodes
        for _, held in self._held.values():
            if not held.is_guest:
                for node in held.nodes:
                    needed[node] = max(needed[node], held.configuration.device_memory_bytes_per_gpu)
        return needed

    def _has_memory(self, item: Configuration, node: int, needed: list[float]) -> bool:
        there = self._view.cluster.nodes[node].gpu.usable_bytes
        return item.device_memory_bytes_per_gpu + needed[node] <= there


POLICIES = (AntMan(),)
