"""Lookahead policies after Morphling, with and without knowledge of remaining work.

A decision builds a tentative schedule in five steps: it prices and ranks the queue, starts the jobs that fit,
lets blocked jobs preempt others where a lookahead finds that all known jobs together gain, grows running
jobs on the remaining devices, and lets jobs that still wait share devices as guests.

Devices have a price: the number of jobs that wait, or are expected to arrive, per device. A device second
that a job holds costs as many seconds of waiting of others, so one price compares all options of a job.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import exp, inf
from operator import attrgetter
from typing import Any

from makespan.hardware import ClusterSpec
from makespan.policies.morphling import FULL_FREEDOM, LESS, Freedom, Options, OptionTable
from makespan.policies.placing import FreeResources, GuestPlacement, PlacementCache
from makespan.sim import Allocation, Catalogue, ClusterView, Configuration, Decision, JobView

# --- Parameters ---


@dataclass(frozen=True, slots=True)
class Tuning:
    """Parameters of a variant, the same for all job lists, restart delays and cluster sizes.

    ``benchmarks/search_policies.py`` searches the first nine; the others bound the effort of a decision.

    Parameters
    ----------
    start_horizon_s, growth_horizon_s, preempt_horizon_s
        Horizons of the price of devices: the arrivals of this time count as delayed by a job that starts, by
        a job that grows (it can give the devices back), and by a job that preempts others [s].
    cost_tolerance
        A job starts at once with any option that costs at most this times its least cost.
    guarantee_factor
        Factor on the area of guaranteed jobs in the order of the queue; 0 serves them first.
    preempt_factor
        Factor on the price of devices when guaranteed jobs preempt others.
    blocking_limit
        A guaranteed job cannot be suspended. It is held back if the expected waiting time of all arrivals
        that it would block exceeds this times its own waiting and run time.
    last_share
        Weight of the end of the schedule, as a share of the number of known jobs.
    min_growth_share
        Share of its time left by which a running job must end earlier to grow, its restart and the price of
        the devices included.
    arrival_memory_s
        Age at which the weight of an arrival in the arrival rate has fallen to 1/e [s].
    look_again_s
        Period after which to decide again while devices are free beside running jobs [s].
    grain_s
        The lookahead treats finish times closer than this as one instant [s].
    max_foreseen, max_preempting
        Number of blocked jobs, from the head of the queue, that the lookahead follows, and that may preempt
        others.
    max_trials
        Preemptions tried for each that is carried out, those with the largest possible gain.
    max_preemptions
        Preemptions carried out in one decision.
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
"""Parameters of `morphling-lookahead`, which estimates all finish times."""


# --- Tentative schedule ---


class Slot:
    """A configuration, its nodes in the order of its `counts`, its step time and the finish time [s]."""

    __slots__ = ("finish_s", "item", "nodes", "step_s")

    def __init__(self, item: Configuration, nodes: tuple[int, ...], step_s: float, finish_s: float) -> None:
        self.item = item
        self.nodes = nodes
        self.step_s = step_s
        self.finish_s = finish_s


class Task:
    """A job within one decision.

    It has at most one of ``held``, the devices that it holds, and ``guest``, those that it shares.
    ``choices`` are the options that it may start with, ``least_gpus`` and ``least_s`` the fewest devices and
    the shortest time [s] of any of these. ``rank`` is its sorting key in the queue.
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
                step_s /= job.speed
            finish_s = max(now_s, job.ready_time_s) + steps * step_s
            slot = Slot(item, allocation.nodes[::-1], step_s, finish_s)
            if allocation.is_guest:
                self.guest = slot
            else:
                self.held = slot

    def price_like(self, other: "Task") -> None:
        """Copy the choices and the rank of another job with the same options and steps."""
        self.choices, self.least_gpus, self.least_s = other.choices, other.least_gpus, other.least_s
        self.rank = (other.rank[0], self.index)


class Schedule:
    """Tentative schedule, copied for trials.

    Invariant: ``free`` and ``slots`` together are all devices of the cluster. A job whose slot is not
    `Task.held` itself starts or changes, and makes progress from ``start_s`` on [s].
    """

    __slots__ = ("delay_s", "free", "slots", "start_s")

    def __init__(self, free: FreeResources, slots: dict[Task, Slot], start_s: float, delay_s: float) -> None:
        self.free = free
        self.slots = slots
        self.start_s = start_s
        self.delay_s = delay_s

    @classmethod
    def of(cls, view: ClusterView, running: Iterable[Task], placements: PlacementCache) -> "Schedule":
        """Return the schedule in which nothing changes."""
        slots = {task: task.held for task in running if task.held is not None}
        delay_s = view.restart_delay_s
        return cls(placements.free_resources(view), slots, view.time_s + delay_s, delay_s)

    def copy(self) -> "Schedule":
        """Return an independent copy."""
        return Schedule(self.free.copy(), self.slots.copy(), self.start_s, self.delay_s)

    def place(self, task: Task, item: Configuration, nodes: tuple[int, ...]) -> None:
        """Place a job that holds nothing."""
        self.free.take(item, nodes)
        step_s = task.options.step_s[item]
        self.slots[task] = Slot(item, nodes, step_s, self.start_s + task.steps * step_s)

    def remove(self, task: Task) -> Slot:
        """Remove a job and return the slot that it held."""
        slot = self.slots.pop(task)
        self.free.give(slot.item, slot.nodes)
        return slot

    def start(self, queue: Iterable[Task]) -> list[Task]:
        """Place each job of a queue on the first of its choices that fits; return the rest."""
        blocked = []
        free = self.free
        for task in queue:
            fit = free.first_fit(task.choices) if task.least_gpus <= free.n_gpus else None
            if fit is None:
                blocked.append(task)
            else:
                self.place(task, *fit)
        return blocked

    def decision(self, tasks: Iterable[Task], wake_up_s: float | None = None) -> Decision:
        """Return the changes that lead from the present allocations to the schedule."""
        changes: dict[str, Allocation | None] = {}
        for task in tasks:
            slot = self.slots.get(task)
            # Compared by identity: a job that was removed and placed again on the same nodes has a new slot,
            # and the engine ignores changes to an equal allocation.
            if slot is not task.held:
                changes[task.job.spec.job_id] = None if slot is None else slot.item.on(slot.nodes)
        return Decision(changes, wake_up_s=wake_up_s)


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Statistics of the arrivals so far, up to the job with index ``last_index``.

    ``per_s`` is the arrival rate at ``time_s``, with exponential forgetting [1/s]; ``sizes`` counts jobs by
    the fewest devices that they can run on.
    """

    per_s: float = 0.0
    time_s: float = 0.0
    last_index: int = -1
    sizes: Mapping[int, int] = field(default_factory=dict)

    def updated(self, tasks: Iterable[Task], now_s: float, memory_s: float) -> "Arrivals":
        """Return the statistics with the jobs that are new; an arrival of age ``memory_s`` counts 1/e."""
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
        """Return the share of jobs that need more than ``n_gpus`` devices, and at most ``limit``."""
        number = sum([count for size, count in self.sizes.items() if n_gpus < size <= limit])
        return number / sum(self.sizes.values()) if number else 0.0


@dataclass(frozen=True, slots=True)
class Context:
    """Inputs that all steps of a decision share.

    ``start_price`` and ``preempt_price`` are the price of a device second [1] for a job that starts and for a
    job that preempts others: the arrivals per device within the horizon. ``last_weight`` is the weight of the
    last finish time, as a number of jobs.
    """

    now_s: float
    delay_s: float
    start_price: float
    preempt_price: float
    last_weight: float
    n_gpus: int
    tuning: Tuning

    def admit(self, tasks: Sequence[Task]) -> list[Task]:
        """Price and rank jobs that wait or will wait, and return them in the order of their ranks."""
        priced: dict[tuple[int, float, bool], Task] = {}  # equal jobs are priced once
        for task in tasks:
            if not task.least_gpus:
                first = priced.setdefault((id(task.options), task.steps, task.is_guaranteed), task)
                if first is task:
                    self._price(task)
                else:
                    task.price_like(first)
        return sorted(tasks, key=attrgetter("rank"))

    def held_back(
        self, queue: Sequence[Task], running: Iterable[Task], arrivals: Arrivals
    ) -> tuple[Sequence[Task], list[Task]]:
        """Divide a queue into jobs that may start, and guaranteed jobs that would block too many arrivals.

        An arrival that fits beside the present guaranteed jobs, but not beside this one too, waits for half
        of this job's run time on average.
        """
        if self.tuning.blocking_limit == inf:
            return queue, []
        rest = self.n_gpus - sum([it.held.item.n_gpus for it in running if it.is_guaranteed and it.held])
        starting: list[Task] = []
        held_back: list[Task] = []
        for task in queue:
            is_held_back = task.is_guaranteed and self._blocks_too_much(task, rest, arrivals)
            (held_back if is_held_back else starting).append(task)
        return starting, held_back

    def _blocks_too_much(self, task: Task, rest: int, arrivals: Arrivals) -> bool:
        """Return True if a job that takes a part of the ``rest`` devices exceeds the limit on blocking."""
        item = task.choices[0]
        run_s = self.delay_s + task.steps * task.options.step_s[item]
        completion_s = self.now_s - task.job.spec.submit_time_s + run_s
        n_blocked = arrivals.per_s * arrivals.share_between(rest - item.n_gpus, rest) * run_s
        return n_blocked * run_s / 2 > self.tuning.blocking_limit * completion_s

    def _price(self, task: Task) -> None:
        """Set the rank of a waiting job, least area first, and the options that it may start with.

        ``g`` devices for ``T`` s cost ``T (1 + price g)``. Options up to ``cost_tolerance`` times the least
        cost are acceptable, the cheapest first.
        """
        price, (times, area) = self.start_price, task.options.times(task.steps, self.delay_s)
        costs = [time_s * (1.0 + price * n_gpus) for time_s, n_gpus in times]
        limit = min(costs) * self.tuning.cost_tolerance
        chosen = sorted([(cost, order) for order, cost in enumerate(costs) if cost <= limit])
        task.rank = (area * self.tuning.guarantee_factor if task.is_guaranteed else area, task.index)
        ranks = tuple([order for _, order in chosen])
        task.choices, task.least_gpus = task.options.choices(ranks)
        task.least_s = min([times[order][0] for order in ranks])


# --- Guests ---


def start_guests(tasks: Iterable[Task], schedule: Schedule, context: Context) -> list[Task]:
    """Give guests their devices where these are free; return the jobs that are still to start.

    Becoming the holder costs no restart. A guest may start elsewhere only if it would end earlier, restart
    included.
    """
    still_waiting = []
    for task in tasks:
        guest, now_s = task.guest, context.now_s
        if guest is not None:
            item, step_s = guest.item, task.options.step_s
            if item in task.choices and schedule.free.take_if_free(item, guest.nodes):
                begins_s = max(now_s, task.job.ready_time_s)
                finish_s = begins_s + task.steps * step_s[item]
                schedule.slots[task] = Slot(item, guest.nodes, step_s[item], finish_s)
                continue
            left_s = guest.finish_s - now_s - context.delay_s
            task.choices = tuple([item for item in task.choices if task.steps * step_s[item] < left_s])
            task.least_gpus = min([item.n_gpus for item in task.choices], default=0)
        if task.choices:
            still_waiting.append(task)
    return still_waiting


def with_guests(
    decision: Decision, view: ClusterView, schedule: Schedule, tasks: Sequence[Task], context: Context
) -> Decision:
    """Add best-effort jobs without devices to a decision, as guests.

    Jobs that lose their devices become guests where they were; other waiting jobs go where they make the most
    progress. A guest without enough memory beside new holders is suspended.
    """
    slots = schedule.slots
    rest = sorted([task for task in tasks if task not in slots], key=attrgetter("rank"))
    if not rest:
        return decision
    changes, guests = dict(decision.changes), GuestPlacement(view, schedule.free.placements)
    new_nodes: set[int] = set()  # nodes with new holders
    for task in tasks:
        slot, allocation = slots.get(task), task.job.allocation
        if slot is task.held:
            continue
        if allocation is not None:
            guests.remove(task.index, allocation)
        if slot is not None:
            guests.add(task.index, slot.item.on(slot.nodes))
            new_nodes.update(slot.nodes)
    # On nodes that now have too little memory, guests are suspended from the end of the queue on.
    for task in rest[::-1]:
        allocation = task.job.allocation if task.guest else None
        if allocation is not None and any(
            node in new_nodes and guests.is_crowded(node) for node in allocation.nodes
        ):
            guests.remove(task.index, allocation)
            changes[task.job.spec.job_id] = None
    for task in rest:
        if (
            task.held is not None
            and not task.is_guaranteed
            and guests.has_place(task.held.item, task.held.nodes)
        ):
            guest = changes[task.job.spec.job_id] = task.held.item.on(task.held.nodes).colocated(
                is_guest=True
            )
            guests.add(task.index, guest)
    waiting = [
        task
        for task in rest
        if not task.is_guaranteed and changes.get(task.job.spec.job_id, task.job.allocation) is None
    ]
    without_place: set[tuple[Configuration, ...]] = set()  # options with which no guest fits any more
    for task in waiting[: context.tuning.max_foreseen]:
        options = task.options
        fastest = None if options.items in without_place else guests.fastest_of(options.by_step)
        if fastest is None:
            without_place.add(options.items)
        else:
            guests.add(task.index, fastest)
            changes[task.job.spec.job_id] = fastest
    return Decision(changes, wake_up_s=decision.wake_up_s)


# --- Growth ---

Step = tuple[float, Configuration]  # share of time saved per device, and configuration


def grow(schedule: Schedule, price: float, context: Context) -> None:
    """Carry out the steepest step that fits, until none is worth its devices at a price.

    Blocked jobs and arrivals set the price. Where no job waits it is low, and devices are used wherever a
    restart pays.
    """
    free = schedule.free
    if not free.n_gpus:
        return
    steps = {task: _steps(schedule, task, slot, price, context) for task, slot in schedule.slots.items()}
    while free.n_gpus:
        best: tuple[float, Task, Configuration, tuple[int, ...]] | None = None
        for task, options in steps.items():
            # Steps are sorted, so a job whose first step is no steeper than the best cannot win.
            if not options or (best is not None and options[0][0] <= best[0]):
                continue
            step = _first_that_fits(schedule, task, options, 0.0 if best is None else best[0])
            if step is not None:
                best = (step[0], task, *step[1:])
        if best is None:
            return
        _, task, item, nodes = best
        schedule.remove(task)
        schedule.place(task, item, nodes)
        steps[task] = _steps(schedule, task, schedule.slots[task], price, context)


def _steps(schedule: Schedule, task: Task, slot: Slot, price: float, context: Context) -> list[Step]:
    """List the configurations that pay, with the share of time saved per added device, steepest first."""
    left_s = slot.finish_s - context.now_s
    delay_s, steps, held = context.delay_s, task.steps, slot.item.n_gpus
    least_s = context.tuning.min_growth_share * left_s if slot is task.held else 0.0
    upgrades, fastest_s = task.options.upgrades(slot.item, slot.step_s)
    if left_s - (delay_s + steps * fastest_s) <= least_s:
        return []  # not even the fastest option pays for a restart
    # A step pays if the cost of the rest of the run, devices included, falls by more than the required gain.
    budget_s, most = left_s * (1.0 + price * held) - least_s, schedule.free.n_gpus + held
    paying: list[tuple[float, int, Configuration]] = []
    for order, (step_s, item) in enumerate(upgrades):
        if item.n_gpus > most:
            break  # options are in the order of their devices
        time_s = delay_s + steps * step_s
        if time_s * (1.0 + price * item.n_gpus) >= budget_s or left_s - time_s <= least_s:
            continue
        slope = (left_s - time_s) / max(item.n_gpus - held, 1)
        paying.append((-slope / left_s, order, item))
    paying.sort()
    return [(-slope, item) for slope, _, item in paying]


def _first_that_fits(
    schedule: Schedule, task: Task, options: Iterable[Step], above: float
) -> tuple[float, Configuration, tuple[int, ...]] | None:
    """Return the first step, steeper than ``above``, that fits once the job has released its devices."""
    slot, free = schedule.slots[task], schedule.free
    most = free.n_gpus + slot.item.n_gpus
    free.give(slot.item, slot.nodes)
    first = None
    for slope, item in options:
        if slope <= above:
            break
        if item.n_gpus <= most:
            nodes = free.fit(item)
            if nodes is not None:
                first = (slope, item, nodes)
                break
    free.take(slot.item, slot.nodes)
    return first


# --- Lookahead ---

_Run = tuple[float, int, Configuration, tuple[int, ...]]  # finish time [s], index, configuration, nodes
_Group = list[tuple[int, Task]]  # positions in the queue, and jobs; the next one is at the end


class Lookahead:
    """Simulation of all known jobs to their finish times, without arrivals, by list scheduling.

    Blocked jobs start in order as others finish. The simulation is lazy: it advances only as far as a caller
    asks. The cost is the sum of all finish times, with the last one counted ``last_weight`` times more, and
    of the price of the devices that jobs hold until then, as future arrivals will want them. Jobs beyond
    ``max_foreseen`` count as if they finished at the end of the simulation of the others.

    Invariants at every instant: ``_heap`` has all jobs that run, ``_groups`` all that wait, by their choices;
    ``_total_s`` is the cost of all jobs that have started, and ``_rest_s`` the least time that the waiting
    ones still need. So ``_total_s`` and ``_rest_s`` give a lower bound of the whole cost, and a trial ends as
    soon as the bound reaches the cost of a better one.

    Attributes
    ----------
    ends_s
        Finish times of blocked jobs [s], as far as they were followed.
    last_s
        The last finish time of these and of running jobs [s].
    """

    __slots__ = (
        "_context",
        "_free",
        "_groups",
        "_heap",
        "_n_beyond",
        "_n_waiting",
        "_rest_s",
        "_time_s",
        "_total_s",
        "ends_s",
        "last_s",
    )  # fmt: skip

    def __init__(self, schedule: Schedule, blocked: Sequence[Task], context: Context) -> None:
        self._context, self._time_s, self._free = context, context.now_s, schedule.free.copy()
        self._heap: list[_Run] = [
            (slot.finish_s, task.index, slot.item, slot.nodes) for task, slot in schedule.slots.items()
        ]
        price, now_s = context.preempt_price, context.now_s
        self._total_s = sum([end_s + price * it.n_gpus * (end_s - now_s) for end_s, _, it, _ in self._heap])
        heapify(self._heap)
        self.last_s = max([run[0] for run in self._heap], default=now_s)
        foreseen = blocked[: context.tuning.max_foreseen]
        self._n_waiting, self._n_beyond = len(foreseen), len(blocked) - len(foreseen)
        self._rest_s = sum([task.least_s for task in foreseen])
        self._groups: dict[tuple[Configuration, ...], _Group] = {}
        for place in range(len(foreseen) - 1, -1, -1):
            task = foreseen[place]
            self._groups.setdefault(task.choices, []).append((place, task))
        self.ends_s: dict[Task, float] = {}

    def follow(self, tasks: Iterable[Task]) -> None:
        """Advance until the finish times of some blocked jobs are known."""
        self._run({task for task in tasks if task not in self.ends_s}, inf)

    def cost_s(self, limit_s: float = inf) -> float | None:
        """Follow all jobs and return the cost [s]; None if it is not below a limit."""
        if not self._run({None}, limit_s):
            return None
        weight = self._context.last_weight
        waiting_s = self._n_waiting * self.last_s + self._n_beyond * self._time_s
        cost_s = self._total_s + waiting_s + weight * self.last_s
        return cost_s if cost_s < limit_s else None

    def _run(self, awaited: set[Task] | set[None], limit_s: float) -> bool:
        """Advance until the finish times of all awaited jobs are known; False if the cost reaches the limit.

        ``{None}`` is never emptied, so the simulation runs to the end.
        """
        tuning, price, delay_s = self._context.tuning, self._context.preempt_price, self._context.delay_s
        weight, factor, n_beyond = self._context.last_weight, tuning.preempt_factor, self._n_beyond
        grain_s = tuning.grain_s
        heap, groups, free, ends_s = self._heap, self._groups, self._free, self.ends_s
        total_s, rest_s, last_s, n_waiting = self._total_s, self._rest_s, self.last_s, self._n_waiting
        time_s = self._time_s
        while heap and groups and awaited:
            time_s, _, item, nodes = heappop(heap)
            free.give(item, nodes)
            if heap and heap[0][0] <= time_s + grain_s:
                continue  # start jobs only once all devices of this instant are free
            # A lower bound of the cost: waiting jobs cannot start before now, and need `rest_s` at least.
            if total_s + rest_s + (n_waiting + n_beyond) * time_s + weight * last_s >= limit_s:
                return False
            n_gpus = free.n_gpus
            turns = [(group[-1][0], group) for group in groups.values() if group[-1][1].least_gpus <= n_gpus]
            heapify(turns)
            while turns:
                group = heappop(turns)[1]
                task = group[-1][1]
                fit = free.first_fit(task.choices) if task.least_gpus <= free.n_gpus else None
                if fit is None:
                    continue  # no other job with these choices fits either
                group.pop()
                if group:
                    heappush(turns, (group[-1][0], group))
                else:
                    del groups[task.choices]
                free.take(*fit)
                held_s = delay_s + task.steps * task.options.step_s[fit[0]]
                end_s = ends_s[task] = time_s + held_s
                heappush(heap, (end_s, task.index, *fit))
                job_price = price * factor if task.is_guaranteed else price
                total_s += end_s + job_price * fit[0].n_gpus * held_s
                rest_s -= task.least_s
                last_s = max(last_s, end_s)
                n_waiting -= 1
                awaited.discard(task)
        self._total_s, self._rest_s, self.last_s, self._n_waiting = total_s, rest_s, last_s, n_waiting
        self._time_s = time_s
        if not heap:  # jobs that are left fit on no nodes at all; they count as finishing last
            ends_s |= {task: last_s for group in groups.values() for _, task in group}
        return True


# --- Preemption ---

_Entry = tuple[int, int, int, Task]  # nodes of a job, minus its devices on this one, index, job
_Clearing = tuple[int, int, int, list[Task]]  # nodes on which jobs stop, free devices, node, jobs to remove
_Victims = tuple[tuple[int, ...], list[Task]]  # nodes, and jobs to remove from them
_Trial = tuple[float, Task, Configuration, _Victims]  # possible gain [s], job, its configuration, victims


def preempt(schedule: Schedule, blocked: list[Task], context: Context) -> tuple[Schedule, list[Task]]:
    """Carry out the preemption with the largest gain until none pays; return schedule and blocked jobs.

    Each candidate is judged by a lookahead over all known jobs, which is costly. So candidates are sorted by
    the most that they could gain, and the search stops at the first that cannot beat the best one so far. A
    job that has preempted others in this decision is no victim itself, or two jobs could take turns.
    """
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
                break  # trials are sorted: no other one can gain more than the best so far
            cleared = displace(schedule, task, item, *clearing)
            if cleared is None:
                continue
            trial, suspended = cleared
            # Victims without another place join the queue, and whatever fits on leftover devices starts.
            others = [other for other in blocked if other is not task]
            waiting = trial.start(context.admit([*others, *suspended]) if suspended else others)
            trial_ahead = Lookahead(trial, waiting, context)
            cost_s = trial_ahead.cost_s(limit_s)
            if cost_s is not None:
                limit_s = cost_s
                best = (trial_ahead, task, trial, waiting)
        if best is None:
            break
        ahead, winner, schedule, blocked = best
        winners.add(winner)
    return schedule, blocked


def _worth_a_trial(
    schedule: Schedule, blocked: Sequence[Task], winners: set[Task], ahead: Lookahead, context: Context
) -> list[_Trial]:
    """List preemptions by the most that they could gain [s], largest gain first.

    An earlier finish counts once for the job itself. If the job finishes last, it also counts as the end of
    the schedule; otherwise at most once more, for other jobs that may then finish earlier. Every victim loses
    the time of a restart, and jobs that wait or arrive meanwhile lack the devices.
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
        job_price = price * tuning.preempt_factor if task.is_guaranteed else price
        for order, item in enumerate(task.choices):
            held_s = delay_s + task.steps * step_s[item]
            gain_s = (spare_s - held_s) * weight - job_price * item.n_gpus * held_s
            if gain_s > 0:
                possible.append((-gain_s, task.index, order, task, item))
    if not possible:
        return []
    possible.sort(key=_by_worth)
    residents = Residents(schedule, winners)
    trials: list[tuple[float, int, int, Task, Configuration, _Victims]] = []
    for worth, index, order, task, item in possible:
        if len(trials) == tuning.max_trials and worth > trials[-1][0]:
            break  # the rest gains less than these trials, even without any victim
        clearing = residents.cheapest(item)
        if clearing is not None and worth + len(clearing[1]) * delay_s < 0:
            trials.append((worth + len(clearing[1]) * delay_s, index, order, task, item, clearing))
            trials.sort(key=_by_worth)
            del trials[tuning.max_trials :]
    return [(-entry[0], *entry[3:]) for entry in trials]


def _by_worth(entry: tuple[Any, ...]) -> tuple[float, int, int]:
    return entry[:3]


def displace(
    schedule: Schedule,
    task: Task,
    item: Configuration,
    nodes: tuple[int, ...],
    victims: Sequence[Task],
) -> tuple[Schedule, list[Task]] | None:
    """Return a copy in which a job displaces victims from nodes, and the victims that are suspended.

    Returns None if a guaranteed victim would be suspended.
    """
    trial = schedule.copy()
    lost = [(victim, trial.remove(victim)) for victim in victims]
    trial.place(task, item, nodes)
    break_s = trial.slots[task].finish_s
    # Guaranteed victims choose first, because they must not be suspended; then those that would finish first.
    lost.sort(key=lambda entry: (not entry[0].is_guaranteed, entry[1].finish_s, entry[0].index))
    suspended = []
    for victim, slot in lost:
        if not _relocate(trial, victim, slot, break_s):
            if victim.is_guaranteed:
                return None
            suspended.append(victim)
    return None if trial.free.has_shortage() else (trial, suspended)


def _relocate(trial: Schedule, victim: Task, slot: Slot, break_s: float) -> bool:
    """Place a victim elsewhere on no more devices than before, on the fastest configuration that fits.

    A best-effort victim is not placed if it would finish earlier by resuming where it was at ``break_s`` [s].
    """
    step_s = victim.options.step_s
    best: tuple[float, Configuration, tuple[int, ...]] | None = None
    for item in victim.options.items:
        if item.n_gpus > slot.item.n_gpus:
            break
        time_s = step_s[item]
        if best is None or time_s < best[0]:
            nodes = trial.free.fit(item)
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
    """Jobs that could be removed from each node of a schedule, the cheapest to remove first.

    Jobs on one node come before jobs on several, which are harder to move, and jobs with many devices first,
    so that few victims are enough.
    """

    __slots__ = ("_cheapest", "_free", "_of_node", "_placements", "_rankings", "_slots")

    def __init__(self, schedule: Schedule, protected: Iterable[Task]) -> None:
        safe = set(protected)
        self._free, self._placements, self._slots = (
            schedule.free.gpus,
            schedule.free.placements,
            schedule.slots,
        )
        self._of_node: list[list[_Entry]] = [[] for _ in self._free]
        for task, slot in schedule.slots.items():
            if task not in safe:
                n_nodes = len(slot.nodes)
                for node, count in zip(slot.nodes, slot.item.counts, strict=True):
                    self._of_node[node].append((n_nodes, -count, task.index, task))
        for entries in self._of_node:
            entries.sort()
        self._rankings: dict[tuple[int, str], list[_Clearing]] = {}
        self._cheapest: dict[tuple[tuple[int, ...], tuple[str, ...]], _Victims | None] = {}

    def cheapest(self, item: Configuration) -> _Victims | None:
        """Choose nodes for a configuration, and the jobs to remove from them, greedily by cost."""
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
                usable = self._placements.nodes_of_type(gpu_type)
                # Nodes of the victims so far may be cheaper than ranked, because those victims leave anyway.
                for node in sorted(touched.difference(nodes).intersection(usable)):
                    clearing = self._clearing(node, count, victims)
                    if clearing is not None and (best is None or clearing[:3] < best[:3]):
                        best = clearing
            if best is None:
                return None
            nodes.append(best[2])
            for task in best[3]:
                victims[task] = None
                touched.update(self._slots[task].nodes)
        return tuple(nodes), list(victims)

    def _ranking(self, count: int, gpu_type: str) -> list[_Clearing]:
        """Return how to free ``count`` devices on each node of a type, the cheapest node first."""
        ranking = self._rankings.get((count, gpu_type))
        if ranking is None:
            possible = [self._clearing(node, count, {}) for node in self._placements.nodes_of_type(gpu_type)]
            ranking = sorted([it for it in possible if it is not None], key=lambda clearing: clearing[:3])
            self._rankings[count, gpu_type] = ranking
        return ranking

    def _clearing(self, node: int, count: int, removed: dict[Task, None]) -> _Clearing | None:
        """Return how to free ``count`` devices on a node, given removed jobs; None if that is impossible."""
        free, entries = self._free[node], self._of_node[node]
        shortfall = count - free
        if removed:
            shortfall += sum([minus_gpus for _, minus_gpus, _, task in entries if task in removed])
        n_stops, victims = 0, []
        for n_nodes, minus_gpus, _, task in entries:
            if shortfall <= 0:
                break
            if task not in removed:
                victims.append(task)
                n_stops += n_nodes
                shortfall += minus_gpus
        return None if shortfall > 0 else (n_stops, free, node, victims)


# --- Policies ---

_REFERENCES = (
    "Morphling: Exploiting Job Reconfigurability for Deep Learning Cluster Scheduling. MLSys 2025.",
)


@dataclass(frozen=True, slots=True)
class PolicyState:
    """State of the policies between decisions."""

    options: OptionTable
    placements: PlacementCache
    arrivals: Arrivals


def _decide(
    view: ClusterView,
    state: PolicyState,
    tuning: Tuning,
    steps_left: Callable[[JobView], float],
    shares: bool,
) -> tuple[Decision, PolicyState]:
    """Start jobs that fit, preempt where that pays, grow running jobs, and add guests."""
    now_s, n_gpus = view.time_s, max(view.n_gpus, 1)
    waiting, active = (
        [Task(job, state.options.of(job), steps_left(job), now_s) for job in jobs]
        for jobs in (view.pending, view.running)
    )
    running = [task for task in active if task.held is not None]
    waiting += [task for task in active if task.guest is not None]  # guests wait for devices to themselves
    arrivals = state.arrivals.updated(waiting, now_s, tuning.arrival_memory_s)
    per_gpu_s = arrivals.per_s / n_gpus
    start_price, preempt_price = per_gpu_s * tuning.start_horizon_s, per_gpu_s * tuning.preempt_horizon_s
    last_weight = tuning.last_share * (len(waiting) + len(running))
    prices = start_price, preempt_price
    context = Context(now_s, view.restart_delay_s, *prices, last_weight, n_gpus, tuning)
    schedule = Schedule.of(view, running, state.placements)
    ranked = start_guests(context.admit(waiting), schedule, context)
    queue, held_back = context.held_back(ranked, running, arrivals)
    blocked = schedule.start(queue)
    if blocked:
        schedule, blocked = preempt(schedule, blocked, context)
    growth_price = (arrivals.per_s * tuning.growth_horizon_s + len(blocked)) / n_gpus
    grow(schedule, growth_price, context)
    has_idle = schedule.free.n_gpus > 0 and bool(schedule.slots or held_back)
    wake_up_s = _next_multiple(now_s, tuning.look_again_s) if has_idle else None
    tasks = [*running, *waiting]
    decision = schedule.decision(tasks, wake_up_s)
    if shares and view.shares_devices:
        decision = with_guests(decision, view, schedule, tasks, context)
    return decision, PolicyState(state.options, state.placements, arrivals)


@dataclass(frozen=True, slots=True)
class _Variant:
    """Fields of both variants; with ``shares`` best-effort jobs may be guests, where the engine allows it."""

    freedom: Freedom = FULL_FREEDOM
    tuning: Tuning = CLAIRVOYANT
    shares: bool = True

    def initial_state(self, cluster: ClusterSpec, catalogue: Catalogue) -> PolicyState:
        """Return an empty table of options and no arrivals."""
        fitting = catalogue.on(cluster)
        return PolicyState(
            OptionTable(fitting, self.freedom), PlacementCache.on(cluster, fitting), Arrivals()
        )


@dataclass(frozen=True, slots=True)
class MorphlingLookahead(_Variant):
    """Choose devices and plans together by sensitivity curves, with remaining work estimated from run time.

    Run times are heavy-tailed, so a job that has run for a long time will probably run for as long again. Of
    jobs with equal estimates, the one with the steepest normalised curve is served first.

    Parameters
    ----------
    tuning
        Parameters shared with the variant that knows run times.
    expected_s
        Time that a new job is expected to run at its requested speed [s].
    expected_share
        Time that a job is expected to run on, per time that it has run [1].
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
        """Schedule all known jobs by estimates and return the changes."""
        return _decide(view, state, self.tuning, lambda job: self.expected_steps(job, view), self.shares)

    def expected_steps(self, job: JobView, view: ClusterView) -> float:
        """Estimate the steps that a job has left from its run time so far."""
        reference_s = job.step_s(view.catalogue.requested(job.spec))
        left_s = self.expected_s + self.expected_share * job.running_time_s
        return left_s / reference_s


def _next_multiple(time_s: float, period_s: float) -> float:
    """Return the next multiple of a period after a time [s]: the same for all decisions in between."""
    # The floored quotient of floats may be one too small, and its multiple is then not after the time.
    turn = time_s // period_s + 1
    return turn * period_s if turn * period_s > time_s else (turn + 1) * period_s


@dataclass(frozen=True, slots=True)
class MorphlingWork(_Variant):
    """Choose devices and plans together, with known remaining steps of each job."""

    name: str = "morphling-work"
    title: str = "Morphling (work-aware)"
    interval_s: float | None = None
    is_clairvoyant: bool = True
    honours_guarantees: bool = True
    references: tuple[str, ...] = _REFERENCES

    def decide(self, view: ClusterView, state: PolicyState) -> tuple[Decision, PolicyState]:
        """Schedule all known jobs and return the changes."""
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
