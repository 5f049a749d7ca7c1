"""Preemption: blocked jobs displace running ones where, by a lookahead, all known jobs together gain."""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

from makespan.policies.morphling._schedule import Context, Schedule, Slot, Task
from makespan.sim import Configuration

__all__ = ["Lookahead", "Residents", "displace", "look_ahead", "preempt"]

_Run = tuple[float, int, Configuration, tuple[int, ...]]  # finish time [s], index, configuration, nodes


@dataclass(frozen=True, slots=True)
class Lookahead:
    """Sum of finish times, the last one weighted, and those of blocked jobs [s], if nobody else arrives."""

    cost_s: float
    ends_s: dict[Task, float]


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
    total_s = sum([run[0] for run in heap])
    last_s = max([run[0] for run in heap], default=now_s)
    waiting = list(blocked[: tuning.max_foreseen])
    n_beyond, time_s, weight = len(blocked) - len(waiting), now_s, tuning.last_weight
    rest_s = sum([task.least_s for task in waiting])  # what is to be added at least to the time
    ends_s: dict[Task, float] = {}
    if total_s + rest_s + len(blocked) * now_s + weight * last_s >= limit_s:
        return None
    room, delay_s, grain_s = schedule.room.copy(), schedule.delay_s, tuning.grain_s
    heapq.heapify(heap)
    while heap and waiting:
        time_s, _, item, nodes = heapq.heappop(heap)
        room.give(item, nodes)
        if heap and heap[0][0] <= time_s + grain_s:
            continue
        if total_s + rest_s + (len(waiting) + n_beyond) * time_s + weight * last_s >= limit_s:
            return None
        left = []
        for task in waiting:
            chosen = room.first_fit(task.choices) if task.least_gpus <= room.n_gpus else None
            if chosen is None:
                left.append(task)
                continue
            room.take(*chosen)
            end_s = time_s + delay_s + task.steps * task.options.step_s[chosen[0]]
            heapq.heappush(heap, (end_s, task.index, *chosen))
            ends_s[task] = end_s
            total_s += end_s
            rest_s -= task.least_s
            last_s = max(last_s, end_s)
        waiting = left
    ends_s |= dict.fromkeys(waiting, last_s)
    cost_s = total_s + len(waiting) * last_s + n_beyond * time_s + weight * last_s
    return Lookahead(cost_s, ends_s) if cost_s < limit_s else None


def preempt(schedule: Schedule, blocked: list[Task], context: Context) -> tuple[Schedule, list[Task]]:
    """Carry out the preemption that is worth most until none pays; return who is still blocked too."""
    tuning = context.tuning
    winners: set[Task] = set()
    ahead = look_ahead(schedule, blocked, context)
    while ahead is not None and blocked and len(winners) < tuning.max_preemptions:
        best: tuple[Lookahead, Task, Schedule, list[Task]] | None = None
        limit_s = ahead.cost_s
        residents = Residents(schedule, winners)
        for task in blocked[: tuning.max_preempting]:
            for item in task.choices:
                runtime_s = context.delay_s + task.steps * task.options.step_s[item]
                # Nobody but the job itself gains, and everybody removed loses a restart.
                saved_s = ahead.ends_s[task] - context.now_s - runtime_s
                trial = _try(schedule, residents, blocked, (task, item), saved_s, context)
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
    residents: "Residents",
    blocked: Sequence[Task],
    wanted: tuple[Task, Configuration],
    saved_s: float,
    context: Context,
) -> tuple[Schedule, list[Task]] | None:
    """Return the schedule in which a job gets a configuration by preemption, and who waits then.

    None where that is impossible, or costs those removed more than the job saves [s].
    """
    if saved_s <= 0:
        return None
    task, item = wanted
    chosen = residents.cheapest(item)
    if chosen is None or len(chosen[1]) * context.delay_s >= saved_s:
        return None
    cleared = displace(schedule, task, item, *chosen)
    if cleared is None:
        return None
    trial, suspended = cleared
    context.admit(suspended)
    queue = [*(other for other in blocked if other is not task), *suspended]
    if suspended:
        queue.sort(key=lambda task: task.rank)
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

    __slots__ = ("_of_node", "_room")

    def __init__(self, schedule: Schedule, protected: Iterable[Task]) -> None:
        kept = set(protected)
        entries: list[list[tuple[int, int, int, Task]]] = [[] for _ in schedule.room.gpus]
        for task, slot in schedule.slots.items():
            if task not in kept:
                n_nodes = len(slot.nodes)
                for node, count in zip(slot.nodes, slot.item.counts, strict=True):
                    entries[node].append((n_nodes, -count, task.index, task))
        for found in entries:
            found.sort()
        self._of_node = entries
        self._room = schedule.room

    def cheapest(self, item: Configuration) -> tuple[tuple[int, ...], list[Task]] | None:
        """Choose nodes for a configuration, and whom to remove from them, greedily by cost."""
        nodes: list[int] = []
        victims: dict[Task, None] = {}
        for count, gpu_type in zip(item.counts, item.types_by_count, strict=True):
            best: tuple[tuple[int, int, int], list[Task]] | None = None
            usable = self._room.nodes_of_type(gpu_type)
            for node, free in enumerate(self._room.gpus):
                if node in nodes or not usable >> node & 1:
                    continue
                found = self._victims(node, victims, count - free)
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

    def _victims(self, node: int, removed: dict[Task, None], shortfall: int) -> tuple[int, list[Task]] | None:
        """Return whom to remove to free devices of a node, and from how many nodes; None if impossible."""
        if shortfall <= 0:
            return 0, []
        entries = self._of_node[node]
        if removed:
            for _, negative, _, task in entries:
                if task in removed:
                    shortfall += negative
        cost, victims = 0, []
        for n_nodes, negative, _, task in entries:
            if shortfall <= 0:
                break
            if task not in removed:
                victims.append(task)
                cost += n_nodes
                shortfall += negative
        return None if shortfall > 0 else (cost, victims)
