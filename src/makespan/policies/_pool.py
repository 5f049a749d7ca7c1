"""A scratch copy of what is free, on which a policy tries things out."""

from collections.abc import Iterable, Sequence

from makespan.errors import MakespanError
from makespan.policies._placing import Room
from makespan.sim import Allocation, ClusterView, Configuration, JobView

__all__ = ["Pool", "make_room"]


class Pool:
    """What is free on every node, private to one decision, in terms of allocations.

    Placing is best fit, see `Room`; CPU threads and host memory are watched as well as devices.

    Parameters
    ----------
    room
        What is free; becomes the pool's own.
    """

    __slots__ = ("room",)

    def __init__(self, room: Room) -> None:
        self.room = room

    @classmethod
    def of(cls, view: ClusterView) -> "Pool":
        """Return what is free now."""
        return cls(Room.of(view, is_tight=True))

    @property
    def n_gpus(self) -> int:
        """Free devices of all nodes."""
        return self.room.n_gpus

    def copy(self) -> "Pool":
        """Return an independent copy."""
        return Pool(self.room.copy())

    def fit(self, configuration: Configuration) -> Allocation | None:
        """Return where a configuration fits, or None; takes nothing."""
        nodes = self.room.fit(configuration)
        return None if nodes is None else configuration.on(nodes)

    def fit_first(self, configurations: Iterable[Configuration]) -> Allocation | None:
        """Return the allocation of the first configuration that fits, or None."""
        for configuration in configurations:
            allocation = self.fit(configuration)
            if allocation is not None:
                return allocation
        return None

    def take(self, allocation: Allocation) -> None:
        """Hold the devices of an allocation; unchecked."""
        self.room.take(allocation.configuration, allocation.nodes[::-1])

    def give(self, allocation: Allocation) -> None:
        """Free the devices of an allocation; unchecked."""
        self.room.give(allocation.configuration, allocation.nodes[::-1])

    def take_if_free(self, allocation: Allocation) -> bool:
        """Hold exactly this allocation and return True, or return False if it is not free."""
        gpus = self.room.gpus
        if any(gpus[node] < count for node, count in allocation.shares):
            return False
        self.take(allocation)
        if self.room.has_shortage():
            self.give(allocation)
            return False
        return True


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
    pool.room = trial.room
    return allocation, gone


def _held(job: JobView) -> Allocation:
    if job.allocation is None:
        raise MakespanError(f"{job!r} holds nothing that could be freed")
    return job.allocation
