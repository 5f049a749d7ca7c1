"""The state of a cluster and its jobs, and the transitions that change it."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from makespan.hardware import ClusterSpec
from makespan.sim._catalogue import Allocation, Catalogue, Configuration
from makespan.sim._costs import RestartCost
from makespan.sim._events import NodeEvent
from makespan.sim._sharing import Sharing
from makespan.sim._view import ClusterView, JobView, unlocked, write

__all__ = ["ClusterState", "Nodes"]

_NAN = float("nan")


class Nodes:
    """Free devices, CPU threads and host memory of every node; changed by `ClusterState` alone."""

    __slots__ = (
        "_capacity", "free_cpus", "free_gpus", "free_host_bytes", "gpu_types", "guests", "levels",
        "n_free_gpus", "n_gpus", "of_type", "up", "withdrawn",
    )  # fmt: skip

    def __init__(self, cluster: ClusterSpec) -> None:
        self._capacity = [(node.n_gpus, node.cpu_threads, node.host_memory_bytes) for node in cluster.nodes]
        self.gpu_types = tuple(node.gpu.name for node in cluster.nodes)
        self.free_gpus = [gpus for gpus, _, _ in self._capacity]
        self.free_cpus = [cpus for _, cpus, _ in self._capacity]
        self.free_host_bytes = [float(memory) for _, _, memory in self._capacity]
        self.guests = [0] * cluster.n_nodes  # devices that guests use, their own or not
        self.up = [True] * cluster.n_nodes
        self.withdrawn = [0] * cluster.n_nodes
        self.n_gpus = self.n_free_gpus = sum(self.free_gpus)
        # Sets of nodes are the bits of a number: by free devices, and by the type of their devices.
        self.levels = [0] * (max(self.free_gpus) + 1)
        self.of_type = dict.fromkeys(self.gpu_types, 0)
        for node, (free, gpu_type) in enumerate(zip(self.free_gpus, self.gpu_types, strict=True)):
            self.levels[free] |= 1 << node
            self.of_type[gpu_type] |= 1 << node

    def gpus_per_node(self) -> list[int]:
        """Return the devices of every node that are there now."""
        rows = zip(self._capacity, self.withdrawn, self.up, strict=True)
        return [gpus - gone if up else 0 for (gpus, _, _), gone, up in rows]

    def unshared(self, node: int) -> int:
        """Return the devices of a node without a guest, held or not."""
        return self._capacity[node][0] - self.withdrawn[node] - self.guests[node] if self.up[node] else 0

    def move(self, allocation: Allocation, sign: int) -> None:
        """Take (``sign`` -1) or give back (+1) the devices of an allocation, unchecked."""
        configuration = allocation.configuration
        threads, host = configuration.cpu_threads, configuration.host_memory_bytes_per_gpu
        if allocation.is_guest:
            for node, count in zip(allocation.nodes, configuration.placement.gpus_per_node, strict=True):
                self.guests[node] -= count * sign
                self.free_host_bytes[node] += count * host * sign
            return
        free_gpus, free_cpus, levels = self.free_gpus, self.free_cpus, self.levels
        for node, count in zip(allocation.nodes, configuration.placement.gpus_per_node, strict=True):
            change = count * sign
            free, bit = free_gpus[node], 1 << node
            levels[free] ^= bit
            free_gpus[node] = free = free + change
            levels[free] ^= bit
            free_cpus[node] += change * threads
            if host:
                self.free_host_bytes[node] += change * host
        self.n_free_gpus += sign * configuration.n_gpus

    def shortage(self, allocation: Allocation) -> str:
        """Return what an allocation lacks, empty if it fits."""
        configuration, is_guest = allocation.configuration, allocation.is_guest
        for node, wanted in zip(allocation.nodes, configuration.gpu_types, strict=False):
            if 0 <= node < len(self.up) and self.gpu_types[node] != wanted:
                return f"node {node} has devices of type {self.gpu_types[node]!r}, {wanted!r} are needed"
        for node, count in zip(allocation.nodes, configuration.placement.gpus_per_node, strict=True):
            if not 0 <= node < len(self.up):
                return f"there is no node {node}; accepted: 0 to {len(self.up) - 1}"
            if not self.up[node]:
                return f"node {node} is down"
            n_free = self.unshared(node) if is_guest else self.free_gpus[node]
            if n_free < count:
                what = "unshared" if is_guest else "free"
                return f"node {node} has {n_free} {what} GPU(s), {count} are needed"
            cpus = count * configuration.cpu_threads
            if self.free_cpus[node] < cpus and not is_guest:
                return f"node {node} has {self.free_cpus[node]} free CPU thread(s), {cpus} are needed"
            host = count * configuration.host_memory_bytes_per_gpu
            if host and self.free_host_bytes[node] < host * (1 - 1e-9):
                free = self.free_host_bytes[node]
                return f"node {node} has {free} B of host memory free, {host} are needed"
        return ""

    def fail(self, node: int) -> None:
        """Take a node away; its devices must be free."""
        self.n_gpus -= self._capacity[node][0] - self.withdrawn[node]
        self.up[node] = False
        self._set_free(node, 0, 0, 0.0)

    def join(self, node: int) -> None:
        """Bring a node back, free."""
        gpus, cpus, memory = self._capacity[node]
        gpus -= self.withdrawn[node]
        self.up[node] = True
        self._set_free(node, gpus, cpus, float(memory))
        self.n_gpus += gpus

    def withdraw(self, node: int, n_gpus: int) -> None:
        """Take free devices of a node away, or return them where the number is negative."""
        self.withdrawn[node] += n_gpus
        if self.up[node]:
            self.n_gpus -= n_gpus
            free_gpus = self.free_gpus[node] - n_gpus
            self._set_free(node, free_gpus, self.free_cpus[node], self.free_host_bytes[node])

    def _set_free(self, node: int, gpus: int, cpus: int, host_bytes: float) -> None:
        self.levels[self.free_gpus[node]] ^= 1 << node
        self.levels[gpus] ^= 1 << node
        self.n_free_gpus += gpus - self.free_gpus[node]
        self.free_gpus[node], self.free_cpus[node] = gpus, cpus
        self.free_host_bytes[node] = host_bytes


class _Shared:
    """Who shares devices with whom, and the copies of it that views hand out.

    It knows neither view nor state, which would keep each other alive after the end of a run.
    """

    __slots__ = ("_cluster", "_nodes", "_running", "now")

    def __init__(self, cluster: ClusterSpec, nodes: Nodes, running: Mapping[str, JobView]) -> None:
        self._cluster, self._nodes, self._running = cluster, nodes, running
        self.now: Sharing | None = None  # from the first guest on

    def __call__(self) -> Sharing:
        """Return who holds devices and who is a guest on them, a copy."""
        if self.now is not None:
            self.now.everywhere()  # what follows from who is where now is of use later, too
            return self.now.copy()
        found = Sharing(self._cluster)
        for node, n_gpus in enumerate(self._nodes.gpus_per_node()):
            found.resize(node, n_gpus)
        for job in self._running.values():
            if job.allocation is not None:
                found.add(job.index, job.allocation)
        return found


class ClusterState:
    """Jobs and nodes with the transitions between their states; the only code that writes to views."""

    def __init__(
        self,
        cluster: ClusterSpec,
        catalogue: Catalogue,
        restart_cost: RestartCost,
        interval_s: float | None = None,
        *,
        shows_remaining_work: bool = False,
        shares_devices: bool = False,
    ) -> None:
        self.nodes = Nodes(cluster)
        self._touched: set[int] = set()  # nodes on which something has changed since guests were rated
        self._pending: OrderedDict[str, JobView] = OrderedDict()
        self._running: dict[str, JobView] = {}
        self._shared = _Shared(cluster, self.nodes, self._running)
        self.view = ClusterView()
        values = {
            "time_s": 0.0,
            "cluster": cluster,
            "catalogue": catalogue,
            "restart_cost": restart_cost,
            "restart_delay_s": restart_cost.expected_s,
            "interval_s": interval_s,
            "shows_remaining_work": shows_remaining_work,
            "shares_devices": shares_devices,
            "announced": (),
            "pending": self._pending.values(),
            "running": self._running.values(),
            "_nodes": self.nodes,
            "_sharing": self._shared,
            "_pending": self._pending,
            "_running": self._running,
        }
        for name, value in values.items():
            write(self.view, name, value)

    @property
    def is_empty(self) -> bool:
        """Whether no job waits or runs."""
        return not self._pending and not self._running

    def find(self, job_id: str) -> JobView | None:
        """Return a waiting or running job, or None."""
        return self._running.get(job_id) or self._pending.get(job_id)

    def advance(self, time_s: float) -> None:
        """Let time go on [s]."""
        write(self.view, "time_s", time_s)

    # --- jobs -------------------------------------------------------------------------------

    def submit(self, job: JobView) -> None:
        """Put a job at the end of the queue."""
        self._pending[job.spec.job_id] = job

    def reveal(self, job: JobView, configuration: Configuration) -> None:
        """Let everybody know how long a job takes for a step in a configuration."""
        write(job, "_observed", job._observed | {configuration})

    def hold(self, job: JobView, allocation: Allocation, going_on_from_s: float | None = None) -> float:
        """Give devices to a job that has none; return when its restart delay will be over [s].

        One that only shares them from now on, or no longer, goes on, ready from a time [s] that is not past.
        """
        now_s = self.view.time_s
        ready_s = going_on_from_s
        if ready_s is None:
            ready_s = now_s + self.view.restart_cost(job.spec, job._last, allocation)
        step_s = allocation.configuration.iter_time_s
        if allocation.is_guest or self._shared.now is not None:
            self.expect([(job, allocation)])
        if allocation.is_guest and self._shared.now is not None:
            step_s /= self._shared.now.pace(job.index, allocation)
        self.nodes.move(allocation, -1)
        kind = unlocked(job)
        if job.spec.job_id in self._pending:
            self._running[job.spec.job_id] = self._pending.pop(job.spec.job_id)
            job._waiting_s += now_s - job.waiting_since_s
            job.waiting_since_s = _NAN
        job.allocation = job._last = allocation
        job._held_text, job._step_s = allocation.text, step_s
        job.held_since_s = now_s
        job.ready_time_s = job._since_s = ready_s
        job._marks = ((ready_s, job._steps_left),)
        if job.first_start_s is None:
            job.first_start_s = now_s
        elif going_on_from_s is None:
            job.restart_count += 1
        job.__class__ = kind
        return ready_s

    def release(self, job: JobView) -> None:
        """Take the devices of a job, and settle its progress and times."""
        held = job.allocation
        if held is None:
            return
        steps_left, running_s, restart_s = job._steps_left_now(), job.running_time_s, job.restart_time_s
        held_gpu_s, observed = job.attained_service_gpu_s, job.observed
        self.nodes.move(held, 1)
        if self._shared.now is not None:
            self._shared.now.remove(job.index, held)
            self._touched.update(held.nodes)
        kind = unlocked(job)
        job._steps_left, job._running_s, job._restart_s = steps_left, running_s, restart_s
        job._held_gpu_s, job._observed = held_gpu_s, observed
        job.allocation = None
        job.held_since_s = job.ready_time_s = job._since_s = _NAN
        job.generation += 1
        job.__class__ = kind

    def queue_again(self, jobs: Iterable[JobView]) -> None:
        """Put jobs that lost their devices back to their places in the queue."""
        for job in jobs:
            self._pending[job.spec.job_id] = self._running.pop(job.spec.job_id)
            write(job, "waiting_since_s", self.view.time_s)
        for job in sorted(self._pending.values(), key=lambda job: job.index):
            self._pending.move_to_end(job.spec.job_id)

    def finish(self, job: JobView) -> None:
        """Let a job end, wherever it is."""
        self.release(job)
        if self._running.pop(job.spec.job_id, None) is None:
            del self._pending[job.spec.job_id]
            write(job, "_waiting_s", job.waiting_time_s)
        kind = unlocked(job)
        job._steps_left, job.waiting_since_s = 0.0, _NAN
        job.__class__ = kind

    def set_steps_left(self, job: JobView, steps: float) -> None:
        """Settle what a job has still to do, where it is counted or lost and not foreseen."""
        write(job, "_steps_left", steps)

    def restore(
        self,
        job: JobView,
        *,
        generation: int,
        first_start_s: float | None,
        restart_count: int,
        times_s: tuple[float, float, float],
        held_gpu_s: float,
        observed: Iterable[Configuration],
    ) -> None:
        """Bring a job that holds nothing to where it was.

        These are waiting, running and restart time, device time, and the configurations whose time it knows.
        """
        kind = unlocked(job)
        job.generation, job.restart_count = generation, restart_count
        job.first_start_s, job.waiting_since_s = first_start_s, self.view.time_s
        job._waiting_s, job._running_s, job._restart_s = times_s
        job._held_gpu_s, job._observed = held_gpu_s, frozenset(observed)
        job.__class__ = kind

    def set_ready(self, job: JobView, time_s: float) -> None:
        """Correct when the restart delay of a job is over [s]."""
        write(job, "ready_time_s", time_s)
        write(job, "_since_s", time_s)

    # --- guests -----------------------------------------------------------------------------

    def expect(self, changes: Sequence[tuple[JobView, Allocation | None]]) -> None:
        """Take in what jobs will have, so that it is known how fast guests among them go."""
        if self._shared.now is None:
            if not any(new is not None and new.is_guest for _, new in changes):
                return
            self._shared.now = self._shared()
        for job, new in changes:
            if new is not None:
                self._shared.now.add(job.index, new)
                self._touched.update(new.nodes)

    def guests_to_rate(self) -> list[JobView]:
        """Return the guests on nodes on which something has changed, in the order of submission."""
        if self._shared.now is None:
            return []
        found = {index for node in self._touched for index in self._shared.now.guests(node)}
        self._touched.clear()
        if not found:
            return []
        return sorted(
            (job for job in self._running.values() if job.index in found), key=lambda job: job.index
        )

    def pace(self, job: JobView) -> bool:
        """Let a guest go as fast as who is beside it lets it, and return whether that is a change."""
        held = job.allocation
        if held is None or self._shared.now is None:
            return False
        step_s = held.configuration.iter_time_s / self._shared.now.pace(job.index, held)
        if step_s == job._step_s:
            return False
        since_s, steps_left = max(self.view.time_s, job._since_s), job._steps_left_now()
        kind = unlocked(job)
        job._since_s, job._steps_left, job._step_s = since_s, steps_left, step_s
        job._marks += ((since_s, steps_left),)
        job.generation += 1
        job.__class__ = kind
        return True

    def devices_changed(self, node: int) -> None:
        """Note that a node has more or fewer devices now."""
        if self._shared.now is not None:
            self._shared.now.resize(node, self.nodes.gpus_per_node()[node])
            self._touched.add(node)

    # --- nodes ------------------------------------------------------------------------------

    def holders(self, node: int) -> list[JobView]:
        """Return the jobs with devices on a node, in the order in which they last started."""
        running = self._running.values()
        return [job for job in running if job.allocation is not None and node in job.allocation.nodes]

    def announce(self, event: NodeEvent) -> None:
        """Let it be known that capacity will change."""
        write(self.view, "announced", (*self.view.announced, event))

    def change_capacity(self, event: NodeEvent, n_gpus: int) -> None:
        """Withdraw free devices of a node, or return them where the number is negative."""
        self.nodes.withdraw(event.node_id, n_gpus)
        write(self.view, "announced", tuple(item for item in self.view.announced if item is not event))
