"""Tentative schedule: what every known job would hold after a decision, and in which order jobs enter it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import exp, inf

from makespan.policies._placing import Room
from makespan.policies.morphling._tuning import Tuning
from makespan.sim import Allocation, ClusterView, Configuration, Decision, JobView

__all__ = [
    "Arrivals",
    "Context",
    "Schedule",
    "Slot",
    "Task",
    "critical",
    "price_tasks",
    "rank_tasks",
]


class Slot:
    """A configuration on nodes in the order of its `counts`, and the predicted finish time there [s]."""

    __slots__ = ("finish_s", "item", "nodes")

    def __init__(self, item: Configuration, nodes: tuple[int, ...], finish_s: float) -> None:
        self.item = item
        self.nodes = nodes
        self.finish_s = finish_s


class Task:
    """A job as a decision sees it; ``choices`` are what it starts with, ``area_gpu_s`` least device time."""

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


class Schedule:
    """Tentative schedule, copied for trials; jobs that start or change progress from ``start_s`` [s]."""

    __slots__ = ("room", "slots", "start_s")

    def __init__(self, room: Room, slots: dict[Task, Slot], start_s: float) -> None:
        self.room = room
        self.slots = slots
        self.start_s = start_s

    @classmethod
    def of(cls, view: ClusterView, running: Iterable[Task], *, is_tight: bool) -> "Schedule":
        """Return the schedule in which nothing changes."""
        slots = {task: task.held for task in running if task.held is not None}
        return cls(Room.of(view, is_tight=is_tight), slots, view.time_s + view.restart_delay_s)

    def copy(self) -> "Schedule":
        """Return an independent copy."""
        return Schedule(self.room.copy(), self.slots.copy(), self.start_s)

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
        """Return what must change for the jobs to hold what the schedule says."""
        changes: dict[str, Allocation | None] = {}
        for task in tasks:
            slot = self.slots.get(task)
            if slot is not task.held:
                changes[task.job.spec.job_id] = None if slot is None else slot.item.on(slot.nodes)
        return Decision(changes)


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Arrival rate: jobs a second at a time [s], up to the job with the last index; a mean that forgets."""

    per_s: float = 0.0
    time_s: float = 0.0
    last_index: int = -1

    def updated(self, tasks: Iterable[Task], now_s: float, memory_s: float) -> "Arrivals":
        """Return the rate after what has arrived since; an arrival of age ``memory_s`` counts 1/e."""
        new = [task.index for task in tasks if task.index > self.last_index]
        per_s = self.per_s * exp((self.time_s - now_s) / memory_s) + len(new) / memory_s
        return Arrivals(per_s, now_s, max(new, default=self.last_index))


@dataclass(frozen=True, slots=True)
class Context:
    """What the parts of one decision share: time and delay [s], price of a device second, parameters."""

    now_s: float
    delay_s: float
    start_price: float
    tuning: Tuning

    def admit(self, tasks: Sequence[Task]) -> None:
        """Price and rank jobs that wait or are to wait."""
        price_tasks(tasks, self.delay_s, self.start_price, self.tuning.cost_tolerance)
        rank_tasks(tasks, self.now_s, self.tuning, frozenset())


def price_tasks(tasks: Iterable[Task], delay_s: float, price: float, tolerance: float) -> None:
    """Set the least area of waiting jobs, and the options that they would start with.

    ``g`` devices for ``T`` s cost ``T (1 + price g)``; up to ``tolerance`` times the least cost is
    acceptable.
    """
    for task in tasks:
        steps = task.steps
        costs = []
        least_area = float("inf")
        for order, item in enumerate(task.options):
            time_s = delay_s + steps * item.predicted_iter_time_s
            area = time_s * item.n_gpus
            if area < least_area:
                least_area = area
            costs.append((time_s + price * area, order, item))
        limit = min(costs)[0] * tolerance
        choices = sorted(entry for entry in costs if entry[0] <= limit)
        task.area_gpu_s = least_area
        task.choices = tuple([item for _, _, item in choices])
        task.least_gpus = min(item.n_gpus for item in task.choices)


def rank_tasks(tasks: Iterable[Task], now_s: float, tuning: Tuning, critical_tasks: frozenset[Task]) -> None:
    """Set the sort keys of waiting jobs: critical ones, then little work first, with ageing."""
    for task in tasks:
        waited_s = now_s - task.job.spec.submit_time_s
        area = task.area_gpu_s / (1.0 + waited_s / tuning.ageing_s)
        if task.is_guaranteed:
            area *= tuning.guarantee_factor
        task.rank = (task not in critical_tasks, area, task.index)


def critical(
    waiting: Sequence[Task], running: Iterable[Task], context: Context, n_gpus: int
) -> frozenset[Task]:
    """Return the waiting jobs, already priced, that alone take longer than all other known work."""
    tuning = context.tuning
    if tuning.critical_ratio == inf:
        return frozenset()
    held = [task.held for task in running if task.held is not None]
    work = sum(slot.item.n_gpus * (slot.finish_s - context.now_s) for slot in held)
    work += sum(task.area_gpu_s for task in waiting)
    least_s = tuning.critical_delays * context.delay_s
    found = []
    for task in waiting:
        alone_s = context.delay_s + task.steps * min(item.predicted_iter_time_s for item in task.options)
        others = work - task.area_gpu_s
        if alone_s > least_s and alone_s * n_gpus >= tuning.critical_ratio * others:
            found.append(task)
    return frozenset(found)
