"""A tentative schedule: what every known job would hold after a decision."""

from collections.abc import Iterable

from makespan.policies._placing import Room
from makespan.sim import Allocation, ClusterView, Configuration, Decision, JobView

__all__ = ["Draft", "Slot", "Task"]


class Slot:
    """A configuration on certain nodes, and when the job would finish there.

    Attributes
    ----------
    item
        The configuration.
    nodes
        Its nodes, in the order of its `counts`.
    finish_s
        Predicted finish time, restart delay included [s].
    """

    __slots__ = ("finish_s", "item", "nodes")

    def __init__(self, item: Configuration, nodes: tuple[int, ...], finish_s: float) -> None:
        self.item = item
        self.nodes = nodes
        self.finish_s = finish_s


class Task:
    """A job as a decision sees it.

    Attributes
    ----------
    job
        The job.
    index
        Position in the order of submission.
    steps
        Steps left; 0 for a policy that does not know them, which then reads no finish times either.
    options
        What it may run as.
    is_guaranteed
        Whether it must never stop or run slower than requested.
    held
        What it holds now, or None.
    area_gpu_s
        Least device time in which it can finish [GPU s].
    choices
        Options that it would start with, the preferred one first.
    least_gpus
        Devices of the smallest of its choices.
    rank
        Sort key of the queue.
    """

    __slots__ = (
        "area_gpu_s",
        "choices",
        "held",
        "index",
        "is_guaranteed",
        "job",
        "least_gpus",
        "options",
        "rank",
        "steps",
    )

    def __init__(self, job: JobView, options: tuple[Configuration, ...], steps: float, now_s: float) -> None:
        self.job = job
        self.index = job.index
        self.steps = steps
        self.options = options
        self.is_guaranteed = job.spec.is_guaranteed
        self.area_gpu_s = 0.0
        self.choices = options
        self.least_gpus = 0
        self.rank: tuple[float, ...] = ()
        self.held: Slot | None = None
        allocation = job.allocation
        if allocation is not None:
            item = allocation.configuration
            finish_s = max(now_s, job.ready_time_s) + self.steps * item.predicted_iter_time_s
            self.held = Slot(item, allocation.nodes[::-1], finish_s)


class Draft:
    """What every job would hold; changed in place, copied for trials.

    Parameters
    ----------
    room
        What would be free; becomes the draft's own.
    slots
        What jobs would hold; becomes the draft's own.
    start_s
        When a job that starts or changes now would make progress: now plus the restart delay [s].
    """

    __slots__ = ("room", "slots", "start_s")

    def __init__(self, room: Room, slots: dict[Task, Slot], start_s: float) -> None:
        self.room = room
        self.slots = slots
        self.start_s = start_s

    @classmethod
    def of(cls, view: ClusterView, running: Iterable[Task], *, is_tight: bool) -> "Draft":
        """Return the draft in which nothing changes.

        Parameters
        ----------
        view
            The cluster.
        running
            The jobs that hold something.
        is_tight
            Whether CPU threads and host memory must be watched, see `makespan.policies._placing`.
        """
        slots = {task: task.held for task in running if task.held is not None}
        return cls(Room.of(view, is_tight=is_tight), slots, view.time_s + view.restart_delay_s)

    def copy(self) -> "Draft":
        """Return an independent copy."""
        return Draft(self.room.copy(), self.slots.copy(), self.start_s)

    def finish_s(self, task: Task, item: Configuration) -> float:
        """Predict when a job finishes that starts or changes to a configuration now [s]."""
        return self.start_s + task.steps * item.predicted_iter_time_s

    def place(self, task: Task, item: Configuration, nodes: tuple[int, ...]) -> None:
        """Let a job that has nothing hold a configuration."""
        self.room.take(item, nodes)
        self.slots[task] = Slot(item, nodes, self.finish_s(task, item))

    def remove(self, task: Task) -> Slot:
        """Take everything away from a job and return what it was."""
        slot = self.slots.pop(task)
        self.room.give(slot.item, slot.nodes)
        return slot

    def start(self, queue: Iterable[Task]) -> list[Task]:
        """Place each job of a queue on the first of its choices that fits; return the rest."""
        blocked = []
        room = self.room
        for task in queue:
            chosen = room.first_fit(task.choices) if task.least_gpus <= room.n_gpus else None
            if chosen is None:
                blocked.append(task)
            else:
                self.place(task, *chosen)
        return blocked

    def decision(self, tasks: Iterable[Task]) -> Decision:
        """Return what must change for the jobs to hold what the draft says."""
        changes: dict[str, Allocation | None] = {}
        for task in tasks:
            slot = self.slots.get(task)
            if slot is not task.held:
                changes[task.job.spec.job_id] = None if slot is None else slot.item.on(slot.nodes)
        return Decision(changes)
