"""A scratch copy of what is free, on which a policy tries things out."""

from collections.abc import Iterable, Sequence

from makespan.errors import MakespanError
from makespan.sim import Allocation, ClusterView, Configuration, JobView

__all__ = ["Pool", "make_room"]


class Pool:
    """Free devices, CPU threads and host memory of every node, private to one decision.

    Placing is best fit: each share of a configuration, largest first, goes to the node with the
    fewest free devices that can take it, and to the first such node.

    Parameters
    ----------
    gpus, cpus, host_bytes
        What is free on each node; the lists become the pool's own.
    """

    __slots__ = ("cpus", "gpus", "host_bytes", "n_gpus")

    def __init__(self, gpus: list[int], cpus: list[int], host_bytes: list[float]) -> None:
        self.gpus = gpus
        self.cpus = cpus
        self.host_bytes = host_bytes
        self.n_gpus = sum(gpus)

    @classmethod
    def of(cls, view: ClusterView) -> "Pool":
        """Return what is free now."""
        return cls(view.free_gpus, view.free_cpus, view.free_host_memory_bytes)

    def copy(self) -> "Pool":
        """Return an independent copy."""
        return Pool(self.gpus.copy(), self.cpus.copy(), self.host_bytes.copy())

    def become(self, other: "Pool") -> None:
        """Take over the content of another pool, which must not be used afterwards."""
        self.gpus, self.cpus, self.host_bytes = other.gpus, other.cpus, other.host_bytes
        self.n_gpus = other.n_gpus

    def fit(self, configuration: Configuration) -> Allocation | None:
        """Return where a configuration fits, or None; takes nothing."""
        if configuration.n_gpus > self.n_gpus:
            return None
        threads, host = configuration.cpu_threads, configuration.host_memory_bytes_per_gpu
        gpus, cpus, host_bytes = self.gpus, self.cpus, self.host_bytes
        chosen: list[int] = []
        for count in configuration.counts:
            best, fewest = -1, 1 << 30
            for node, free in enumerate(gpus):
                if (
                    count <= free < fewest
                    and node not in chosen
                    and count * threads <= cpus[node]
                    and (not host or count * host <= host_bytes[node])
                ):
                    best, fewest = node, free
            if best < 0:
                return None
            chosen.append(best)
        return configuration.on(chosen)

    def fit_first(self, configurations: Iterable[Configuration]) -> Allocation | None:
        """Return the allocation of the first configuration that fits, or None."""
        for configuration in configurations:
            allocation = self.fit(configuration)
            if allocation is not None:
                return allocation
        return None

    def take(self, allocation: Allocation) -> None:
        """Hold the devices of an allocation; unchecked."""
        self._move(allocation, -1)

    def give(self, allocation: Allocation) -> None:
        """Free the devices of an allocation; unchecked."""
        self._move(allocation, 1)

    def holds(self, allocation: Allocation) -> bool:
        """Whether exactly this allocation could be taken."""
        configuration = allocation.configuration
        threads, host = configuration.cpu_threads, configuration.host_memory_bytes_per_gpu
        return all(
            count <= self.gpus[node]
            and count * threads <= self.cpus[node]
            and count * host <= self.host_bytes[node]
            for node, count in zip(allocation.nodes, configuration.placement.gpus_per_node, strict=True)
        )

    def _move(self, allocation: Allocation, sign: int) -> None:
        configuration = allocation.configuration
        threads, host = configuration.cpu_threads, configuration.host_memory_bytes_per_gpu
        for node, count in zip(allocation.nodes, configuration.placement.gpus_per_node, strict=True):
            self.gpus[node] += sign * count
            self.cpus[node] += sign * count * threads
            self.host_bytes[node] += sign * count * host
        self.n_gpus += sign * configuration.n_gpus


def make_room(
    pool: Pool, configurations: Sequence[Configuration], victims: Iterable[JobView]
) -> tuple[Allocation, list[JobView]] | None:
    """Free devices of victims until one of the configurations fits, and take it.

    Victims are given up in the order given until the job fits; then each is spared again whose
    devices turn out not to be needed, the last given up first.

    Parameters
    ----------
    pool
        Changed only if the job fits.
    configurations
        What the job may run as, the preferred one first.
    victims
        Running jobs that may lose their devices, the first to go first.

    Returns
    -------
    tuple[Allocation, list[JobView]] or None
        Where the job goes and who loses its devices; None if even all victims are not enough.
    """
    candidates = list(victims)
    trial = pool.copy()
    for victim in candidates:
        trial.give(_held(victim))
    if trial.fit_first(configurations) is None:
        return None
    trial = pool.copy()
    gone: list[JobView] = []
    allocation = trial.fit_first(configurations)
    while allocation is None:
        victim = candidates[len(gone)]
        trial.give(_held(victim))
        gone.append(victim)
        allocation = trial.fit_first(configurations)
    for victim in gone[::-1]:
        trial.take(_held(victim))
        spared = trial.fit(allocation.configuration)
        if spared is None:
            trial.give(_held(victim))
        else:
            allocation = spared
            gone.remove(victim)
    trial.take(allocation)
    pool.become(trial)
    return allocation, gone


def _held(job: JobView) -> Allocation:
    if job.allocation is None:
        raise MakespanError(f"{job!r} holds nothing that could be freed")
    return job.allocation
