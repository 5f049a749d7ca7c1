"""Preemption: blocked jobs displace running ones where, by a lookahead, all known jobs together gain."""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from makespan.policies.morphling._schedule import Context, Schedule, Slot, Task
from makespan.sim import Configuration

__all__ = ["Lookahead", "Residents", "displace", "look_ahead", "preempt"]

_Clearing = tuple[int, int, int, list[Task]]  # stops on nodes, free devices, node, whom to remove
_Victims = tuple[tuple[int, ...], list[Task]]  # nodes, and whom to remove from them
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
    foreseen = blocked[: tuning.max_foreseen]
    n_waiting, n_beyond = len(foreseen), len(blocked) - len(foreseen)
    time_s, weight = now_s, tuning.last_weight
    rest_s = sum([task.least_s for task in foreseen])  # what is to be added at least to the time
    ends_s: dict[Task, float] = {}
    if total_s + rest_s + len(blocked) * now_s + weight * last_s >= limit_s:
        return None
    room, delay_s, grain_s = schedule.room.copy(), schedule.delay_s, tuning.grain_s
    groups = _by_choices(foreseen)
    heapq.heapify(heap)
    while heap and groups:
        time_s, _, item, nodes = heapq.heappop(heap)
        room.give(item, nodes)
        if heap and heap[0][0] <= time_s + grain_s:
            continue
        if total_s + rest_s + (n_waiting + n_beyond) * time_s + weight * last_s >= limit_s:
            return None
        turns = [(group[-1][0], group) for group in groups.values() if group[-1][1].least_gpus <= room.n_gpus]
        heapq.heapify(turns)
        while turns:
            group = heapq.heappop(turns)[1]
            task = group[-1][1]
            chosen = room.first_fit(task.choices) if task.least_gpus <= room.n_gpus else None
            if chosen is None:
                continue  # nor does anybody else with these choices fit now
            group.pop()
            if group:
                heapq.heappush(turns, (group[-1][0], group))
            else:
                del groups[task.choices]
            n_waiting -= 1
            room.take(*chosen)
            end_s = time_s + delay_s + task.steps * task.options.step_s[chosen[0]]
            heapq.heappush(heap, (end_s, task.index, *chosen))
            ends_s[task] = end_s
            total_s += end_s
            rest_s -= task.least_s
            last_s = max(last_s, end_s)
    ends_s |= {task: last_s for group in groups.values() for _, task in group}
    cost_s = total_s + n_waiting * last_s + n_beyond * time_s + weight * last_s
    return Lookahead(cost_s, ends_s) if cost_s < limit_s else None


def _by_choices(tasks: Sequence[Task]) -> dict[tuple[Configuration, ...], list[tuple[int, Task]]]:
    """Group jobs by what they may start as: with their places in the queue, the first one last."""
    groups: dict[tuple[Configuration, ...], list[tuple[int, Task]]] = {}
    for place in range(len(tasks) - 1, -1, -1):
        groups.setdefault(tasks[place].choices, []).append((place, tasks[place]))
    return groups


def preempt(schedule: Schedule, blocked: list[Task], context: Context) -> tuple[Schedule, list[Task]]:
    """Carry out the preemption that is worth most until none pays; return who is still blocked too."""
    winners: set[Task] = set()
    ahead = look_ahead(schedule, blocked, context)
    while ahead is not None and blocked and len(winners) < context.tuning.max_preemptions:
        best: tuple[Lookahead, Task, Schedule, list[Task]] | None = None
        limit_s = ahead.cost_s
        for most_s, task, item, clearing in _worth_a_trial(schedule, blocked, winners, ahead, context):
            if most_s <= ahead.cost_s - limit_s:
                break
            cleared = displace(schedule, task, item, *clearing)
            if cleared is None:
                continue
            trial, waiting = _started(*cleared, [other for other in blocked if other is not task], context)
            foreseen = look_ahead(trial, waiting, context, limit_s)
            if foreseen is not None:
                limit_s = foreseen.cost_s
                best = (foreseen, task, trial, waiting)
        if best is None:
            break
        ahead, winner, schedule, blocked = best
        winners.add(winner)
    return schedule, blocked


def _worth_a_trial(
    schedule: Schedule, blocked: Sequence[Task], winners: set[Task], ahead: Lookahead, context: Context
) -> list[tuple[float, Task, Configuration, _Victims]]:
    """List what blocked jobs could get by force, and from whom, by what it saves at most [s], most first.

    Only the job itself gains, once more where it ends last, and everybody removed loses a restart.
    """
    tuning, residents, delay_s = context.tuning, Residents(schedule, winners), context.delay_s
    possible = []
    for task in blocked[: tuning.max_preempting]:
        spare_s, step_s = ahead.ends_s[task] - schedule.start_s, task.options.step_s
        for order, item in enumerate(task.choices):
            most_s = (spare_s - task.steps * step_s[item]) * (1.0 + tuning.last_weight)
            if most_s > 0:
                possible.append((-most_s, task.index, order, task, item))
    possible.sort(key=_by_worth)
    found: list[tuple[float, int, int, Task, Configuration, _Victims]] = []
    for worth, index, order, task, item in possible:
        if len(found) == tuning.max_trials and worth > found[-1][0]:
            break  # whoever is in the way, the rest saves less than what was found
        clearing = residents.cheapest(item)
        if clearing is not None:
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

    __slots__ = ("_cheapest", "_of_node", "_rankings", "_room", "_slots")

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
        self._slots = schedule.slots
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
            usable = self._room.nodes_of_type(gpu_type)
            for node in sorted(touched.difference(nodes)):
                if usable >> node & 1:
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
            usable = self._room.nodes_of_type(gpu_type)
            nodes = [node for node in range(len(self._of_node)) if usable >> node & 1]
            possible = [self._clearing(node, count, {}) for node in nodes]
            found = sorted([it for it in possible if it is not None], key=lambda it: it[:3])
            self._rankings[count, gpu_type] = found
        return found

    def _clearing(self, node: int, count: int, removed: dict[Task, None]) -> _Clearing | None:
        """Return how so many devices of a node are freed beside what is removed; None if impossible."""
        free = self._room.gpus[node]
        shortfall = count - free
        entries = self._of_node[node]
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
