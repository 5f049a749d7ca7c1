"""Preemption: blocked jobs displace running ones where, by a lookahead, all known jobs together gain."""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

from makespan.policies._placing import Room
from makespan.policies.morphling._schedule import Context, Schedule, Slot, Task
from makespan.sim import Configuration

__all__ = ["Lookahead", "displace", "look_ahead", "preempt"]

_Run = tuple[float, int, Configuration, tuple[int, ...]]  # finish time [s], index, configuration, nodes


@dataclass(frozen=True, slots=True)
class Lookahead:
    """Sum of finish times plus weighted last one, and waits of blocked jobs [s], if nobody else arrives."""

    cost_s: float
    waits_s: dict[Task, float]


def look_ahead(
    schedule: Schedule, blocked: Sequence[Task], context: Context, limit_s: float = inf
) -> Lookahead | None:
    """Run all known jobs to their end by list scheduling: blocked ones start in order as others finish.

    Beyond ``max_foreseen`` they count as ending when the last of these starts. None at or above the limit
    [s].
    """
    now_s, tuning = context.now_s, context.tuning
    heap: list[_Run] = [
        (slot.finish_s, task.index, slot.item, slot.nodes) for task, slot in schedule.slots.items()
    ]
    waits_s: dict[Task, float] = {}
    total_s = sum(run[0] for run in heap)
    last_s = max((run[0] for run in heap), default=now_s)
    room, delay_s = schedule.room.copy(), schedule.start_s - now_s
    waiting = list(blocked[: tuning.max_foreseen])
    n_beyond, time_s = len(blocked) - len(waiting), now_s
    heapq.heapify(heap)
    while heap and waiting:
        time_s, _, item, nodes = heapq.heappop(heap)
        room.give(item, nodes)
        if heap and heap[0][0] <= time_s + tuning.grain_s:
            continue
        if total_s + (len(waiting) + n_beyond) * time_s + tuning.last_weight * last_s >= limit_s:
            return None
        started, waiting = _start(room, waiting, time_s + delay_s)
        for task, run in started:
            heapq.heappush(heap, run)
            waits_s[task] = time_s - now_s
            total_s += run[0]
            last_s = max(last_s, run[0])
    waits_s |= dict.fromkeys(waiting, last_s - now_s)
    cost_s = total_s + len(waiting) * last_s + n_beyond * time_s + tuning.last_weight * last_s
    return Lookahead(cost_s, waits_s) if cost_s < limit_s else None


def _start(room: Room, waiting: Iterable[Task], ready_s: float) -> tuple[list[tuple[Task, _Run]], list[Task]]:
    """Start in order what fits; return that, and what still waits."""
    started, left = [], []
    for task in waiting:
        chosen = room.first_fit(task.choices) if task.least_gpus <= room.n_gpus else None
        if chosen is None:
            left.append(task)
            continue
        item, nodes = chosen
        room.take(item, nodes)
        started.append((task, (ready_s + task.steps * item.predicted_iter_time_s, task.index, item, nodes)))
    return started, left


def preempt(schedule: Schedule, blocked: list[Task], context: Context) -> tuple[Schedule, list[Task]]:
    """Carry out the preemption that is worth most until none pays; return who is still blocked too."""
    tuning = context.tuning
    winners: set[Task] = set()
    ahead = look_ahead(schedule, blocked, context)
    while ahead is not None and blocked and len(winners) < tuning.max_preemptions:
        best: tuple[Lookahead, Task, Schedule, list[Task]] | None = None
        limit_s = ahead.cost_s - tuning.min_gain_s
        for task in blocked[: tuning.max_preempting]:
            if ahead.waits_s[task] < tuning.min_wait_delays * context.delay_s:
                continue
            for item in task.choices:
                trial = _try(schedule, blocked, task, item, winners, context)
                if trial is None:
                    continue
                foreseen = look_ahead(*trial, context, limit_s)
                if foreseen is not None:
                    limit_s = foreseen.cost_s
                    best = (foreseen, task, *trial)
        if best is None:
            break
        ahead, winner, schedule, blocked = best
        winners.add(winner)
    return schedule, blocked


def _try(
    schedule: Schedule,
    blocked: Sequence[Task],
    task: Task,
    item: Configuration,
    protected: set[Task],
    context: Context,
) -> tuple[Schedule, list[Task]] | None:
    """Return the schedule in which a job gets a configuration by preemption, and who waits then."""
    cleared = displace(schedule, task, item, protected, context.delay_s)
    if cleared is None:
        return None
    trial, suspended = cleared
    context.admit(suspended)
    queue = sorted(
        [*(other for other in blocked if other is not task), *suspended], key=lambda task: task.rank
    )
    return trial, trial.start(queue)


def displace(
    schedule: Schedule, task: Task, item: Configuration, protected: Iterable[Task], delay_s: float
) -> tuple[Schedule, list[Task]] | None:
    """Return a copy in which a job holds a configuration, and who lost everything for it.

    None if there are not enough nodes, or a guaranteed job could not be kept.
    """
    runtime_s = delay_s + task.steps * item.predicted_iter_time_s
    chosen = _cheapest_nodes(schedule, item, set(protected), delay_s, runtime_s)
    if chosen is None:
        return None
    nodes, victims = chosen
    trial = schedule.copy()
    lost = [(victim, trial.remove(victim)) for victim in victims]
    trial.place(task, item, nodes)
    lost.sort(key=lambda entry: (not entry[0].is_guaranteed, entry[1].finish_s, entry[0].index))
    suspended = []
    for victim, slot in lost:
        if not _relocate(trial, victim, slot, delay_s, runtime_s + delay_s):
            if victim.is_guaranteed:
                return None
            suspended.append(victim)
    return None if trial.room.has_shortage() else (trial, suspended)


def _relocate(trial: Schedule, victim: Task, slot: Slot, delay_s: float, break_s: float) -> bool:
    """Place a job elsewhere on as many devices at most, unless a break as long as given is better."""
    best: tuple[float, Configuration, tuple[int, ...]] | None = None
    for item in victim.options:
        if item.n_gpus > slot.item.n_gpus:
            break
        time_s = item.predicted_iter_time_s
        if best is None or time_s < best[0]:
            nodes = trial.room.fit(item)
            if nodes is not None:
                best = (time_s, item, nodes)
    if best is None:
        return False
    waiting_s = break_s + victim.steps * slot.item.predicted_iter_time_s
    if not victim.is_guaranteed and delay_s + victim.steps * best[0] > waiting_s:
        return False
    trial.place(victim, best[1], best[2])
    return True


def _cheapest_nodes(
    schedule: Schedule, item: Configuration, protected: set[Task], delay_s: float, runtime_s: float
) -> tuple[tuple[int, ...], list[Task]] | None:
    """Choose nodes for a configuration, and whom to remove from them, greedily by cost."""
    residents = _residents(schedule, protected, delay_s, runtime_s)
    nodes: list[int] = []
    victims: dict[Task, None] = {}
    for count, gpu_type in zip(item.counts, item.types_by_count, strict=True):
        best: tuple[tuple[float, int, int], list[Task]] | None = None
        usable = schedule.room.nodes_of_type(gpu_type)
        for node, free in enumerate(schedule.room.gpus):
            if node in nodes or not usable >> node & 1:
                continue
            found = _cheapest_victims(residents[node], victims, count - free)
            if found is None:
                continue
            key = (found[0], free, node)
            if best is None or key < best[0]:
                best = (key, found[1])
        if best is None:
            return None
        nodes.append(best[0][2])
        victims.update(dict.fromkeys(best[1]))
    return tuple(nodes), list(victims)


Residents = list[tuple[float, int, Task, int]]


def _residents(schedule: Schedule, protected: set[Task], delay_s: float, runtime_s: float) -> list[Residents]:
    """List for every node who could be removed: cost a device [s], index, job, devices there."""
    residents: list[Residents] = [[] for _ in schedule.room.gpus]
    for task, slot in schedule.slots.items():
        if task in protected:
            continue
        cost_s = delay_s if len(slot.nodes) == 1 else delay_s + runtime_s
        for node, count in zip(slot.nodes, slot.item.counts, strict=True):
            residents[node].append((cost_s / count, task.index, task, count))
    for entries in residents:
        entries.sort(key=lambda entry: entry[:2])
    return residents


def _cheapest_victims(
    residents: Residents, removed: dict[Task, None], shortfall: int
) -> tuple[float, list[Task]] | None:
    """Return what it costs to free so many devices of a node, and whom to remove; None if impossible."""
    if shortfall <= 0:
        return 0.0, []
    for _, _, task, count in residents:
        if task in removed:
            shortfall -= count
    cost_s, victims = 0.0, []
    for rate_s, _, task, count in residents:
        if shortfall <= 0:
            break
        if task not in removed:
            victims.append(task)
            cost_s += rate_s * count
            shortfall -= count
    return None if shortfall > 0 else (cost_s, victims)
