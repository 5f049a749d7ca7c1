"""Tentative schedule: what every known job would hold after a decision, and in which order jobs enter it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, inf
from operator import attrgetter

from makespan.policies._placing import Places, Room
from makespan.policies.morphling._options import Options
from makespan.policies.morphling._tuning import Tuning
from makespan.sim import Allocation, ClusterView, Configuration, Decision, JobView

__all__ = ["Arrivals", "Context", "Schedule", "Slot", "Task"]


class Slot:
    """A configuration on nodes in the order of its `counts`, its step there and the finish time [s]."""

    __slots__ = ("finish_s", "item", "nodes", "step_s")

    def __init__(self, item: Configuration, nodes: tuple[int, ...], step_s: float, finish_s: float) -> None:
        self.item = item
        self.nodes = nodes
        self.step_s = step_s
        self.finish_s = finish_s


class Task:
    """A job as a decision sees it.

    ``choices`` are what it starts with, ``least_gpus`` and ``least_s`` the fewest devices and the shortest
    time [s] of these; ``rank`` is its place in the queue.
    """

    __slots__ = (
        "choices",
        "guest",
        "held",
        "index",
        "is_guaranteed",
        "job",
        "least_gpus",
        "least_s",
        "options",
        "rank",
        "steps",
    )

    def __init__(self, job: JobView, options: Options, steps: float, now_s: float) -> None:
        self.job = job
        self.index = job.index
        self.steps = steps
        self.options = options
        self.is_guaranteed = job.spec.is_guaranteed
        self.least_s = 0.0
        self.choices = options.items
        self.least_gpus = 0
        self.rank: tuple[float, int] = (0.0, 0)
        self.held: Slot | None = None
        self.guest: Slot | None = None
        allocation = job.allocation
        if allocation is not None:
            item = allocation.configuration
            step_s = options.step_s.get(item) or job.step_s(item)
            if allocation.is_guest:
                step_s /= job.pace
            finish_s = max(now_s, job.ready_time_s) + steps * step_s
            slot = Slot(item, allocation.nodes[::-1], step_s, finish_s)
            if allocation.is_guest:
                self.guest = slot
            else:
                self.held = slot

    def price_like(self, other: "Task") -> None:
        """Take over what was found for a job with the same options and steps."""
        self.choices, self.least_gpus, self.least_s = other.choices, other.least_gpus, other.least_s
        self.rank = (other.rank[0], self.index)


class Schedule:
    """Tentative schedule, copied for trials; jobs that start or change progress from ``start_s`` [s]."""

    __slots__ = ("delay_s", "room", "slots", "start_s")

    def __init__(self, room: Room, slots: dict[Task, Slot], start_s: float, delay_s: float) -> None:
        self.room = room
        self.slots = slots
        self.start_s = start_s
        self.delay_s = delay_s

    @classmethod
    def of(cls, view: ClusterView, running: Iterable[Task], places: Places) -> "Schedule":
        """Return the schedule in which nothing changes."""
        slots = {task: task.held for task in running if task.held is not None}
        delay_s = view.restart_delay_s
        return cls(places.room(view), slots, view.time_s + delay_s, delay_s)

    def copy(self) -> "Schedule":
        """Return an independent copy."""
        return Schedule(self.room.copy(), self.slots.copy(), self.start_s, self.delay_s)

    def place(self, task: Task, item: Configuration, nodes: tuple[int, ...]) -> None:
        """Let a job that has nothing hold a configuration."""
        self.room.take(item, nodes)
        step_s = task.options.step_s[item]
        self.slots[task] = Slot(item, nodes, step_s, self.start_s + task.steps * step_s)

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

    def decision(self, tasks: Iterable[Task], wake_up_s: float | None = None) -> Decision:
        """Return what must change for the jobs to hold what the schedule says."""
        changes: dict[str, Allocation | None] = {}
        for task in tasks:
            slot = self.slots.get(task)
            if slot is not task.held:
                changes[task.job.spec.job_id] = None if slot is None else slot.item.on(slot.nodes)
        return Decision(changes, wake_up_s=wake_up_s)


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Arrivals up to the job with the last index.

    ``per_s`` is their rate, which forgets, at a time [s]; ``sizes`` counts jobs by the devices they need.
    """

    per_s: float = 0.0
    time_s: float = 0.0
    last_index: int = -1
    sizes: Mapping[int, int] = field(default_factory=dict)

    def updated(self, tasks: Iterable[Task], now_s: float, memory_s: float) -> "Arrivals":
        """Return what is known after what has arrived since; in the rate age ``memory_s`` counts 1/e."""
        new = [task for task in tasks if task.index > self.last_index]
        per_s = self.per_s * exp((self.time_s - now_s) / memory_s) + len(new) / memory_s
        if not new:
            return Arrivals(per_s, now_s, self.last_index, self.sizes)
        sizes = dict(self.sizes)
        for task in new:
            n_gpus = task.options.items[0].n_gpus
            sizes[n_gpus] = sizes.get(n_gpus, 0) + 1
        return Arrivals(per_s, now_s, max(task.index for task in new), sizes)

    def share_between(self, n_gpus: int, limit: int) -> float:
        """Return the share of jobs that need more than so many devices, but not more than a limit."""
        found = sum([count for size, count in self.sizes.items() if n_gpus < size <= limit])
        return found / sum(self.sizes.values()) if found else 0.0


@dataclass(frozen=True, slots=True)
class Context:
    """What the parts of a decision share: time, delay [s], devices, parameters, and what these come to now.

    The prices are of a device second [1]: to a job that starts, and to one that preempts others. The weight
    says as how many jobs the end of the schedule counts.
    """

    now_s: float
    delay_s: float
    start_price: float
    preempt_price: float
    last_weight: float
    n_gpus: int
    tuning: Tuning

    def admit(self, tasks: Sequence[Task]) -> list[Task]:
        """Price and rank jobs that wait or are to wait, and return them in the order of their ranks."""
        priced: dict[tuple[int, float, bool], Task] = {}  # jobs that look alike are priced once
        for task in tasks:
            if not task.least_gpus:
                like = priced.setdefault((id(task.options), task.steps, task.is_guaranteed), task)
                if like is task:
                    self._price(task)
                else:
                    task.price_like(like)
        return sorted(tasks, key=attrgetter("rank"))

    def held_back(
        self, queue: Sequence[Task], running: Iterable[Task], arrivals: Arrivals
    ) -> tuple[Sequence[Task], list[Task]]:
        """Divide a queue into who may start, and guaranteed jobs that must wait for fewer arrivals.

        Who arrives while such a job runs waits for half of its time on average, if it fits beside the
        guaranteed jobs of now but not beside that one too.
        """
        if self.tuning.blocking_limit == inf:
            return queue, []
        rest = self.n_gpus - sum([it.held.item.n_gpus for it in running if it.is_guaranteed and it.held])
        starting: list[Task] = []
        held: list[Task] = []
        for task in queue:
            is_held = task.is_guaranteed and self._keeps_too_long(task, rest, arrivals)
            (held if is_held else starting).append(task)
        return starting, held

    def _keeps_too_long(self, task: Task, rest: int, arrivals: Arrivals) -> bool:
        """Whether a job with a share of the rest of the devices keeps arrivals waiting beyond the limit."""
        item = task.choices[0]
        time_s = self.delay_s + task.steps * task.options.step_s[item]
        own_s = self.now_s - task.job.spec.submit_time_s + time_s
        n_kept = arrivals.per_s * arrivals.share_between(rest - item.n_gpus, rest) * time_s
        return n_kept * time_s / 2 > self.tuning.blocking_limit * own_s

    def _price(self, task: Task) -> None:
        """Set the rank of a waiting job, little work first, and the options that it would start with.

        ``g`` devices for ``T`` s cost ``T (1 + price g)``; what costs little more than the least is
        acceptable.
        """
        price, (times, area) = self.start_price, task.options.times(task.steps, self.delay_s)
        costs = [time_s * (1.0 + price * n_gpus) for time_s, n_gpus in times]
        limit = min(costs) * self.tuning.cost_tolerance
        chosen = sorted([(cost, order) for order, cost in enumerate(costs) if cost <= limit])
        task.rank = (area * self.tuning.guarantee_factor if task.is_guaranteed else area, task.index)
        ranks = tuple([order for _, order in chosen])
        task.choices, task.least_gpus = task.options.choices(ranks)
        task.least_s = min([times[order][0] for order in ranks])
