"""Sharing: best-effort jobs that wait compute meanwhile on devices that others hold, where these are idle."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import exp, inf
from operator import attrgetter
from typing import Any

from makespan.hardware import ClusterSpec
from makespan.policies.morphling import FULL_FREEDOM, LESS, Freedom, Options, OptionTable
from makespan.policies.placing import GuestRoom, Places, Room
from makespan.sim import Allocation, Catalogue, ClusterView, Configuration, Decision, JobView

# ------------------------------------------------------------------------------------------------
# Every number of our policies that is a choice, in one place.


@dataclass(frozen=True, slots=True)
class Tuning:
    """Parameters of both variants, one set each for all lists, restart delays and sizes of clusters.

    The first nine are searched by ``benchmarks/search_policies.py``, others bound the effort of a decision.

    Parameters
    ----------
    start_horizon_s, growth_horizon_s, preempt_horizon_s
        Arrivals within it are those that a starting job delays, one that takes more devices, which it can
        give back, or one that takes them from others [s].
    cost_tolerance
        Ratio of its least cost at which a job starts at once rather than wait.
    guarantee_factor, preempt_factor
        On the area of guaranteed jobs: in the queue, where 0 serves them first, and where it is priced, as
        they preempt others.
    blocking_limit
        Share of the time that it has waited and will run itself for which a guaranteed job, which nothing
        stops, may keep arrivals waiting, all of them together; one that would keep them longer is held back.
    last_share
        Share of all known jobs that the end of the schedule counts as.
    min_growth_share
        Share of the time left by which a running job ends earlier with more devices, restart and devices
        paid for.
    arrival_memory_s
        Age at which an arrival counts 1/e in the arrival rate [s].
    look_again_s
        Period after which to decide again while devices are free beside running jobs [s].
    grain_s
        Finish times closer than this are one instant to the lookahead [s].
    max_foreseen, max_preempting
        Blocked jobs, from the head of the queue, that the lookahead follows, and that may preempt others.
    max_trials, max_preemptions
        Preemptions that are tried, by what they could save at most, for each that is carried out, and these
        in one decision.
    """

    start_horizon_s: float = 300.0
    growth_horizon_s: float = 150.0
    preempt_horizon_s: float = 700.0
    cost_tolerance: float = 1.3
    guarantee_factor: float = 0.13
    preempt_factor: float = 1.3
    blocking_limit: float = 2.7
    last_share: float = 0.32
    min_growth_share: float = 0.14
    arrival_memory_s: float = 3600.0
    look_again_s: float = 600.0
    grain_s: float = 30.0
    max_foreseen: int = 64
    max_preempting: int = 8
    max_trials: int = 4
    max_preemptions: int = 12


CLAIRVOYANT = Tuning()
"""Parameters of `morphling-work`."""
NON_CLAIRVOYANT = Tuning(
    start_horizon_s=4800.0,
    growth_horizon_s=140.0,
    preempt_horizon_s=400.0,
    cost_tolerance=1.0,
    guarantee_factor=0.12,
    preempt_factor=0.28,
    blocking_limit=inf,
    last_share=0.02,
    min_growth_share=0.05,
)
"""Parameters of `morphling-lookahead`, which foresees no end by estimates alone."""


# ------------------------------------------------------------------------------------------------
# Tentative schedule: what every known job would hold after a decision, and in which order jobs enter it.


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


# ------------------------------------------------------------------------------------------------
# Sharing: best-effort jobs that wait compute meanwhile on devices that others hold, where these are idle.


def start_guests(tasks: Iterable[Task], schedule: Schedule, context: Context) -> list[Task]:
    """Give guests that may start so the free devices where they are, and return who is still to start.

    Guests start elsewhere only where they would end earlier, restart included.
    """
    kept = []
    for task in tasks:
        guest, now_s = task.guest, context.now_s
        if guest is not None:
            item, step_s = guest.item, task.options.step_s
            if item in task.choices and schedule.room.take_if_free(item, guest.nodes):
                begins_s = max(now_s, task.job.ready_time_s)
                finish_s = begins_s + task.steps * step_s[item]
                schedule.slots[task] = Slot(item, guest.nodes, step_s[item], finish_s)
                continue
            left_s = guest.finish_s - now_s - context.delay_s
            task.choices = tuple([item for item in task.choices if task.steps * step_s[item] < left_s])
            task.least_gpus = min([item.n_gpus for item in task.choices], default=0)
        if task.choices:
            kept.append(task)
    return kept


def with_guests(
    decision: Decision, view: ClusterView, schedule: Schedule, tasks: Sequence[Task], context: Context
) -> Decision:
    """Let best-effort jobs without devices be guests, first those that are or had devices, where they are.

    A guest that finds no memory any more beside new holders is suspended. Any other job of the queue goes
    where it makes most progress.
    """
    slots = schedule.slots
    rest = sorted([task for task in tasks if task not in slots], key=attrgetter("rank"))
    if not rest:
        return decision
    changes, room = dict(decision.changes), GuestRoom(view, schedule.room.places)
    _make_room(
        [task for task in rest[::-1] if task.guest], _with_holders(room, schedule, tasks), room, changes
    )
    for task in rest:
        if (
            task.held is not None
            and not task.is_guaranteed
            and room.has_place(task.held.item, task.held.nodes)
        ):
            guest = changes[task.job.spec.job_id] = task.held.item.on(task.held.nodes).beside(is_guest=True)
            room.add(task.index, guest)
    waiting = [task for task in rest if not task.is_guaranteed and _has_nothing(task, changes)]
    refused: set[tuple[Configuration, ...]] = set()
    for task in waiting[: context.tuning.max_foreseen]:
        options = task.options
        found = None if options.items in refused else room.fastest_of(options.by_step)
        if found is None:
            refused.add(options.items)
        else:
            room.add(task.index, found)
            changes[task.job.spec.job_id] = found
    return Decision(changes, wake_up_s=decision.wake_up_s)


def _has_nothing(task: Task, changes: Mapping[str, Allocation | None]) -> bool:
    return changes.get(task.job.spec.job_id, task.job.allocation) is None


def _with_holders(room: GuestRoom, schedule: Schedule, tasks: Iterable[Task]) -> set[int]:
    """Take in who holds what from now on; return the nodes on which there is somebody new."""
    found: set[int] = set()
    for task in tasks:
        slot, held = schedule.slots.get(task), task.job.allocation
        if slot is task.held:
            continue
        if held is not None:
            room.remove(task.index, held)
        if slot is not None:
            room.add(task.index, slot.item.on(slot.nodes))
            found.update(slot.nodes)
    return found


def _make_room(
    guests: Iterable[Task], touched: set[int], room: GuestRoom, changes: dict[str, Allocation | None]
) -> None:
    """Suspend guests, in the order given, of nodes where not all find a device with memory for them."""
    for task in guests:
        held = task.job.allocation
        if held is not None and any(node in touched and room.is_crowded(node) for node in held.nodes):
            room.remove(task.index, held)
            changes[task.job.spec.job_id] = None


# ------------------------------------------------------------------------------------------------
# Growth: free devices go to the jobs that gain most from them.

Step = tuple[float, Configuration]


def grow(schedule: Schedule, price: float, context: Context) -> None:
    """Carry out the steepest step that fits, until none is worth its devices at the price of waiting.

    Blocked jobs and arrivals set the price, so what nobody waits for is used where a restart pays.
    """
    room = schedule.room
    if not room.n_gpus:
        return
    steps = {task: _steps(schedule, task, slot, price, context) for task, slot in schedule.slots.items()}
    while room.n_gpus:
        found = _steepest(schedule, steps)
        if found is None:
            return
        task, item, nodes = found
        schedule.remove(task)
        schedule.place(task, item, nodes)
        steps[task] = _steps(schedule, task, schedule.slots[task], price, context)


def _steps(schedule: Schedule, task: Task, slot: Slot, price: float, context: Context) -> list[Step]:
    """List larger configurations that pay, with the share of time saved a device, the steepest first."""
    left_s = slot.finish_s - context.now_s
    delay_s, steps, held = context.delay_s, task.steps, slot.item.n_gpus
    least_s = context.tuning.min_growth_share * left_s if slot is task.held else 0.0
    upgrades, fastest_s = task.options.upgrades(slot.item, slot.step_s)
    if left_s - (delay_s + steps * fastest_s) <= least_s:
        return []
    budget_s, most = left_s * (1.0 + price * held) - least_s, schedule.room.n_gpus + held
    found: list[tuple[float, int, Configuration]] = []
    for order, (step_s, item) in enumerate(upgrades):
        if item.n_gpus > most:
            break
        time_s = delay_s + steps * step_s
        if time_s * (1.0 + price * item.n_gpus) >= budget_s or left_s - time_s <= least_s:
            continue
        slope = (left_s - time_s) / max(item.n_gpus - held, 1)
        found.append((-slope / left_s, order, item))
    found.sort()
    return [(-slope, item) for slope, _, item in found]


def _steepest(
    schedule: Schedule, steps: dict[Task, list[Step]]
) -> tuple[Task, Configuration, tuple[int, ...]] | None:
    """Return the steepest step of all jobs for which there is room now."""
    best: tuple[float, Task, Configuration, tuple[int, ...]] | None = None
    for task, options in steps.items():
        if not options or (best is not None and options[0][0] <= best[0]):
            continue
        found = _first_with_room(schedule, task, options, 0.0 if best is None else best[0])
        if found is not None:
            best = (found[0], task, *found[1:])
    return None if best is None else best[1:]


def _first_with_room(
    schedule: Schedule, task: Task, options: Iterable[Step], above: float
) -> tuple[float, Configuration, tuple[int, ...]] | None:
    """Return the first step steeper than a bound that fits once the job gives back what it holds."""
    slot, room = schedule.slots[task], schedule.room
    most = room.n_gpus + slot.item.n_gpus
    room.give(slot.item, slot.nodes)
    found = None
    for slope, item in options:
        if slope <= above:
            break
        if item.n_gpus <= most:
            nodes = room.fit(item)
            if nodes is not None:
                found = (slope, item, nodes)
                break
    room.take(slot.item, slot.nodes)
    return found


# ------------------------------------------------------------------------------------------------
# Lookahead: what follows from a schedule if nobody else arrives, followed no further than anybody asks.

_Run = tuple[float, int, Configuration, tuple[int, ...]]  # finish time [s], index, configuration, nodes
_Group = list[tuple[int, Task]]  # places in the queue, and jobs, the first one last


class Lookahead:
    """All known jobs run to their end by list scheduling: blocked ones start in order as others finish.

    The cost is the sum of all finish times, the last one weighted, and the price of the devices that jobs
    hold until then, which others will want who arrive. Jobs beyond ``max_foreseen`` count as ending when the
    last of these starts.

    Attributes
    ----------
    ends_s
        When blocked jobs end [s], as far as they were followed.
    last_s
        The last of these ends and those of running jobs [s].
    """

    __slots__ = (
        "_context", "_groups", "_heap", "_n_beyond", "_n_waiting", "_rest_s", "_room", "_time_s", "_total_s",
        "ends_s", "last_s",
    )  # fmt: skip

    def __init__(self, schedule: Schedule, blocked: Sequence[Task], context: Context) -> None:
        self._context, self._time_s, self._room = context, context.now_s, schedule.room.copy()
        self._heap: list[_Run] = [
            (slot.finish_s, task.index, slot.item, slot.nodes) for task, slot in schedule.slots.items()
        ]
        price, now_s = context.preempt_price, context.now_s
        self._total_s = sum([end_s + price * it.n_gpus * (end_s - now_s) for end_s, _, it, _ in self._heap])
        heapify(self._heap)
        self.last_s = max([run[0] for run in self._heap], default=now_s)
        foreseen = blocked[: context.tuning.max_foreseen]
        self._n_waiting, self._n_beyond = len(foreseen), len(blocked) - len(foreseen)
        self._rest_s = sum([task.least_s for task in foreseen])  # what is to be added at least to the time
        self._groups: dict[tuple[Configuration, ...], _Group] = {}
        for place in range(len(foreseen) - 1, -1, -1):
            task = foreseen[place]
            self._groups.setdefault(task.choices, []).append((place, task))
        self.ends_s: dict[Task, float] = {}

    def follow(self, tasks: Iterable[Task]) -> None:
        """Go on until it is known when some blocked jobs end."""
        self._run({task for task in tasks if task not in self.ends_s}, inf)

    def cost_s(self, limit_s: float = inf) -> float | None:
        """Follow all jobs and return the cost [s], or None where it is not below a limit."""
        if not self._run({None}, limit_s):
            return None
        weight = self._context.last_weight
        waiting_s = self._n_waiting * self.last_s + self._n_beyond * self._time_s
        cost_s = self._total_s + waiting_s + weight * self.last_s
        return cost_s if cost_s < limit_s else None

    def _run(self, awaited: set[Task] | set[None], limit_s: float) -> bool:
        """Let time go on until the ends of all awaited jobs are known; False if the limit is reached."""
        tuning, price, delay_s = self._context.tuning, self._context.preempt_price, self._context.delay_s
        weight, factor, n_beyond = self._context.last_weight, tuning.preempt_factor, self._n_beyond
        grain_s = tuning.grain_s
        heap, groups, room, ends_s = self._heap, self._groups, self._room, self.ends_s
        total_s, rest_s, last_s, n_waiting = self._total_s, self._rest_s, self.last_s, self._n_waiting
        time_s = self._time_s
        while heap and groups and awaited:
            time_s, _, item, nodes = heappop(heap)
            room.give(item, nodes)
            if heap and heap[0][0] <= time_s + grain_s:
                continue
            if total_s + rest_s + (n_waiting + n_beyond) * time_s + weight * last_s >= limit_s:
                return False
            n_gpus = room.n_gpus
            turns = [(group[-1][0], group) for group in groups.values() if group[-1][1].least_gpus <= n_gpus]
            heapify(turns)
            while turns:
                group = heappop(turns)[1]
                task = group[-1][1]
                chosen = room.first_fit(task.choices) if task.least_gpus <= room.n_gpus else None
                if chosen is None:
                    continue  # nor does anybody else with these choices fit now
                group.pop()
                if group:
                    heappush(turns, (group[-1][0], group))
                else:
                    del groups[task.choices]
                room.take(*chosen)
                held_s = delay_s + task.steps * task.options.step_s[chosen[0]]
                end_s = ends_s[task] = time_s + held_s
                heappush(heap, (end_s, task.index, *chosen))
                own_price = price * factor if task.is_guaranteed else price
                total_s += end_s + own_price * chosen[0].n_gpus * held_s
                rest_s -= task.least_s
                last_s = max(last_s, end_s)
                n_waiting -= 1
                awaited.discard(task)
        self._total_s, self._rest_s, self.last_s, self._n_waiting = total_s, rest_s, last_s, n_waiting
        self._time_s = time_s
        if not heap:  # what never fits
            ends_s |= {task: last_s for group in groups.values() for _, task in group}
        return True


# ------------------------------------------------------------------------------------------------
# Preemption: blocked jobs displace running ones where, by a lookahead, all known jobs together gain.

_Entry = tuple[int, int, int, Task]  # nodes of a job, minus its devices on this one, index, job
_Clearing = tuple[int, int, int, list[Task]]  # stops on nodes, free devices, node, whom to remove
_Victims = tuple[tuple[int, ...], list[Task]]  # nodes, and whom to remove from them
_Trial = tuple[float, Task, Configuration, _Victims]  # gain expected [s], who gets what, and from whom


def preempt(schedule: Schedule, blocked: list[Task], context: Context) -> tuple[Schedule, list[Task]]:
    """Carry out the preemption that gains most until none pays; return who is still blocked too."""
    winners: set[Task] = set()
    ahead = Lookahead(schedule, blocked, context)
    while blocked and len(winners) < context.tuning.max_preemptions:
        trials = _worth_a_trial(schedule, blocked, winners, ahead, context)
        now_s = ahead.cost_s() if trials else None
        if now_s is None:
            break
        best: tuple[Lookahead, Task, Schedule, list[Task]] | None = None
        limit_s = now_s
        for expected_s, task, item, clearing in trials:
            if expected_s <= now_s - limit_s:
                break
            cleared = displace(schedule, task, item, *clearing)
            if cleared is None:
                continue
            trial, waiting = _started(*cleared, [other for other in blocked if other is not task], context)
            foreseen = Lookahead(trial, waiting, context)
            cost_s = foreseen.cost_s(limit_s)
            if cost_s is not None:
                limit_s = cost_s
                best = (foreseen, task, trial, waiting)
        if best is None:
            break
        ahead, winner, schedule, blocked = best
        winners.add(winner)
    return schedule, blocked


def _worth_a_trial(
    schedule: Schedule, blocked: Sequence[Task], winners: set[Task], ahead: Lookahead, context: Context
) -> list[_Trial]:
    """List what blocked jobs could get by force, and from whom, by what may be gained [s], most first.

    A job ends earlier, which moves the end of the schedule where it ends last, and elsewhere may let others
    end earlier, which counts as much again at most; everybody removed loses a restart; and whoever waits, or
    arrives meanwhile, does without the devices for as long.
    """
    tuning, delay_s = context.tuning, context.delay_s
    tasks = blocked[: tuning.max_preempting]
    ahead.follow(tasks)
    price = context.preempt_price + (len(blocked) - 1) / context.n_gpus
    possible = []
    for task in tasks:
        spare_s, step_s = ahead.ends_s[task] - context.now_s, task.options.step_s
        is_last = ahead.ends_s[task] >= ahead.last_s
        weight = 1.0 + (context.last_weight if is_last else min(context.last_weight, 1.0))
        own_price = price * tuning.preempt_factor if task.is_guaranteed else price
        for order, item in enumerate(task.choices):
            held_s = delay_s + task.steps * step_s[item]
            gain_s = (spare_s - held_s) * weight - own_price * item.n_gpus * held_s
            if gain_s > 0:
                possible.append((-gain_s, task.index, order, task, item))
    if not possible:
        return []
    possible.sort(key=_by_worth)
    residents = Residents(schedule, winners)
    found: list[tuple[float, int, int, Task, Configuration, _Victims]] = []
    for worth, index, order, task, item in possible:
        if len(found) == tuning.max_trials and worth > found[-1][0]:
            break  # whoever is in the way, the rest gains less than what was found
        clearing = residents.cheapest(item)
        if clearing is not None and worth + len(clearing[1]) * delay_s < 0:
            found.append((worth + len(clearing[1]) * delay_s, index, order, task, item, clearing))
            found.sort(key=_by_worth)
            del found[tuning.max_trials :]
    return [(-entry[0], *entry[3:]) for entry in found]


def _by_worth(entry: tuple[Any, ...]) -> tuple[float, int, int]:
    return entry[:3]


def _started(
    trial: Schedule, suspended: list[Task], blocked: list[Task], context: Context
) -> tuple[Schedule, list[Task]]:
    """Let waiting jobs and suspended ones start where there is room; return who waits."""
    queue = context.admit([*blocked, *suspended]) if suspended else blocked
    return trial, trial.start(queue)


def displace(
    schedule: Schedule,
    task: Task,
    item: Configuration,
    nodes: tuple[int, ...],
    victims: Sequence[Task],
) -> tuple[Schedule, list[Task]] | None:
    """Return a copy in which a job holds a configuration on nodes instead of others, and who lost everything.

    None if a guaranteed job could not be kept.
    """
    trial = schedule.copy()
    lost = [(victim, trial.remove(victim)) for victim in victims]
    trial.place(task, item, nodes)
    break_s = trial.slots[task].finish_s
    lost.sort(key=lambda entry: (not entry[0].is_guaranteed, entry[1].finish_s, entry[0].index))
    suspended = []
    for victim, slot in lost:
        if not _relocate(trial, victim, slot, break_s):
            if victim.is_guaranteed:
                return None
            suspended.append(victim)
    return None if trial.room.has_shortage() else (trial, suspended)


def _relocate(trial: Schedule, victim: Task, slot: Slot, break_s: float) -> bool:
    """Place a job elsewhere on as many devices at most, unless to go on after a time [s] is better."""
    step_s = victim.options.step_s
    best: tuple[float, Configuration, tuple[int, ...]] | None = None
    for item in victim.options.items:
        if item.n_gpus > slot.item.n_gpus:
            break
        time_s = step_s[item]
        if best is None or time_s < best[0]:
            nodes = trial.room.fit(item)
            if nodes is not None:
                best = (time_s, item, nodes)
    if best is None:
        return False
    resumed_s = break_s + trial.delay_s + victim.steps * slot.step_s
    if not victim.is_guaranteed and trial.start_s + victim.steps * best[0] > resumed_s:
        return False
    trial.place(victim, best[1], best[2])
    return True


class Residents:
    """Who could be removed from every node of a schedule, whom it is cheapest to remove first.

    Jobs on one node come before those on several, which are hard to move, and those with many devices first.
    """

    __slots__ = ("_cheapest", "_free", "_of_node", "_places", "_rankings", "_slots")

    def __init__(self, schedule: Schedule, protected: Iterable[Task]) -> None:
        kept = set(protected)
        self._free, self._places, self._slots = schedule.room.gpus, schedule.room.places, schedule.slots
        self._of_node: list[list[_Entry]] = [[] for _ in self._free]
        for task, slot in schedule.slots.items():
            if task not in kept:
                n_nodes = len(slot.nodes)
                for node, count in zip(slot.nodes, slot.item.counts, strict=True):
                    self._of_node[node].append((n_nodes, -count, task.index, task))
        for entries in self._of_node:
            entries.sort()
        self._rankings: dict[tuple[int, str], list[_Clearing]] = {}
        self._cheapest: dict[tuple[tuple[int, ...], tuple[str, ...]], _Victims | None] = {}

    def cheapest(self, item: Configuration) -> _Victims | None:
        """Choose nodes for a configuration, and whom to remove from them, greedily by cost."""
        shape = (item.counts, item.types_by_count)
        if shape not in self._cheapest:
            self._cheapest[shape] = self._chosen(item)
        return self._cheapest[shape]

    def _chosen(self, item: Configuration) -> _Victims | None:
        nodes: list[int] = []
        victims: dict[Task, None] = {}
        touched: set[int] = set()  # nodes on which jobs are removed already
        for count, gpu_type in zip(item.counts, item.types_by_count, strict=True):
            ranking = self._ranking(count, gpu_type)
            best = next((it for it in ranking if it[2] not in touched and it[2] not in nodes), None)
            if victims:
                usable = self._places.nodes_of_type(gpu_type)
                for node in sorted(touched.difference(nodes).intersection(usable)):
                    found = self._clearing(node, count, victims)
                    if found is not None and (best is None or found[:3] < best[:3]):
                        best = found
            if best is None:
                return None
            nodes.append(best[2])
            for task in best[3]:
                victims[task] = None
                touched.update(self._slots[task].nodes)
        return tuple(nodes), list(victims)

    def _ranking(self, count: int, gpu_type: str) -> list[_Clearing]:
        """Return how so many devices of each node are freed, the cheapest first."""
        found = self._rankings.get((count, gpu_type))
        if found is None:
            possible = [self._clearing(node, count, {}) for node in self._places.nodes_of_type(gpu_type)]
            found = sorted([it for it in possible if it is not None], key=_by_cost)
            self._rankings[count, gpu_type] = found
        return found

    def _clearing(self, node: int, count: int, removed: dict[Task, None]) -> _Clearing | None:
        """Return how so many devices of a node are freed beside what is removed; None if impossible."""
        free, entries = self._free[node], self._of_node[node]
        shortfall = count - free
        if removed:
            shortfall += sum([negative for _, negative, _, task in entries if task in removed])
        n_stops, victims = 0, []
        for n_nodes, negative, _, task in entries:
            if shortfall <= 0:
                break
            if task not in removed:
                victims.append(task)
                n_stops += n_nodes
                shortfall += negative
        return None if shortfall > 0 else (n_stops, free, node, victims)


def _by_cost(clearing: _Clearing) -> tuple[int, int, int]:
    return clearing[:3]


# ------------------------------------------------------------------------------------------------
# Our policies after Morphling: clairvoyant or not, and what each loses with less to choose.

_REFERENCES = (
    "Morphling: Exploiting Job Reconfigurability for Deep Learning Cluster Scheduling. MLSys 2025.",
)


@dataclass(frozen=True, slots=True)
class PolicyState:
    """What the policies remember."""

    options: OptionTable
    places: Places
    arrivals: Arrivals


def _decide(
    view: ClusterView,
    state: PolicyState,
    tuning: Tuning,
    steps_left: Callable[[JobView], float],
    shares: bool,
) -> tuple[Decision, PolicyState]:
    """Start what fits, let blocked jobs preempt others where that pays, hand out what is left, and share."""
    now_s, n_gpus = view.time_s, max(view.n_gpus, 1)
    waiting, there = (
        [Task(job, state.options.of(job), steps_left(job), now_s) for job in jobs]
        for jobs in (view.pending, view.running)
    )
    running = [task for task in there if task.held is not None]
    waiting += [task for task in there if task.guest is not None]
    arrivals = state.arrivals.updated(waiting, now_s, tuning.arrival_memory_s)
    per_gpu_s = arrivals.per_s / n_gpus
    start_price, preempt_price = per_gpu_s * tuning.start_horizon_s, per_gpu_s * tuning.preempt_horizon_s
    last_weight = tuning.last_share * (len(waiting) + len(running))
    prices = start_price, preempt_price
    context = Context(now_s, view.restart_delay_s, *prices, last_weight, n_gpus, tuning)
    schedule = Schedule.of(view, running, state.places)
    ranked = start_guests(context.admit(waiting), schedule, context)
    queue, held = context.held_back(ranked, running, arrivals)
    blocked = schedule.start(queue)
    if blocked:
        schedule, blocked = preempt(schedule, blocked, context)
    growth_price = (arrivals.per_s * tuning.growth_horizon_s + len(blocked)) / n_gpus
    grow(schedule, growth_price, context)
    has_idle = schedule.room.n_gpus > 0 and bool(schedule.slots or held)
    wake_up_s = _next_multiple(now_s, tuning.look_again_s) if has_idle else None
    tasks = [*running, *waiting]
    decision = schedule.decision(tasks, wake_up_s)
    if shares and view.shares_devices:
        decision = with_guests(decision, view, schedule, tasks, context)
    return decision, PolicyState(state.options, state.places, arrivals)


@dataclass(frozen=True, slots=True)
class _Variant:
    """What both variants have; whether best-effort jobs may be guests, where the engine lets them."""

    freedom: Freedom = FULL_FREEDOM
    tuning: Tuning = CLAIRVOYANT
    shares: bool = True

    def initial_state(self, cluster: ClusterSpec, catalogue: Catalogue) -> PolicyState:
        """Return an empty table of options and no arrivals."""
        fitting = catalogue.on(cluster)
        return PolicyState(OptionTable(fitting, self.freedom), Places.on(cluster, fitting), Arrivals())


@dataclass(frozen=True, slots=True)
class MorphlingLookahead(_Variant):
    """Choose devices and plans together by sensitivity curves, expecting of jobs what they showed.

    Run times are heavy-tailed, so a job that has run for long will probably run on for as long again. Of jobs
    from which equally much is expected, the one with the steepest normalised curve is served first.

    Parameters
    ----------
    tuning
        Parameters shared with the variant that knows run times.
    expected_s
        Time that a new job is expected to run at its requested speed [s].
    expected_share
        Share of the time that a job has run which it is expected to run on.
    """

    tuning: Tuning = NON_CLAIRVOYANT
    expected_s: float = 35.0
    expected_share: float = 0.8
    name: str = "morphling-lookahead"
    title: str = "Morphling (lookahead)"
    interval_s: float | None = None
    is_clairvoyant: bool = False
    honours_guarantees: bool = True
    references: tuple[str, ...] = _REFERENCES

    def decide(self, view: ClusterView, state: PolicyState) -> tuple[Decision, PolicyState]:
        """Schedule all known jobs by estimates and return what changes."""
        return _decide(view, state, self.tuning, lambda job: self.expected_steps(job, view), self.shares)

    def expected_steps(self, job: JobView, view: ClusterView) -> float:
        """Estimate the steps that a job has left from the time that it has run."""
        reference_s = job.step_s(view.catalogue.requested(job.spec))
        left_s = self.expected_s + self.expected_share * job.running_time_s
        return left_s / reference_s


def _next_multiple(time_s: float, every_s: float) -> float:
    """Return the next multiple after a time [s]: the same for all decisions in between."""
    turn = time_s // every_s + 1
    return turn * every_s if turn * every_s > time_s else (turn + 1) * every_s


@dataclass(frozen=True, slots=True)
class MorphlingWork(_Variant):
    """Choose devices and plans together, knowing how many steps each job has left."""

    name: str = "morphling-work"
    title: str = "Morphling (work-aware)"
    interval_s: float | None = None
    is_clairvoyant: bool = True
    honours_guarantees: bool = True
    references: tuple[str, ...] = _REFERENCES

    def decide(self, view: ClusterView, state: PolicyState) -> tuple[Decision, PolicyState]:
        """Schedule all known jobs and return what changes."""
        return _decide(view, state, self.tuning, lambda job: job.steps_left, self.shares)


_OWN = "devices of its own"
POLICIES = (
    MorphlingLookahead(),
    MorphlingWork(),
    MorphlingLookahead(shares=False, name="morphling-lookahead-s", title=f"Morphling (lookahead, {_OWN})"),
    MorphlingWork(shares=False, name="morphling-work-s", title=f"Morphling (work-aware, {_OWN})"),
    *(
        MorphlingLookahead(
            freedom, name=f"morphling-lookahead{suffix}", title=f"Morphling (lookahead, {title})"
        )
        for suffix, (freedom, title) in LESS.items()
    ),
    *(
        MorphlingWork(freedom, name=f"morphling-work{suffix}", title=f"Morphling (work-aware, {title})")
        for suffix, (freedom, title) in LESS.items()
    ),
)
"""Both variants, each also without guests and with less to choose."""
