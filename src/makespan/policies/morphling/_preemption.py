"""Preemption: blocked jobs displace running ones where, by a lookahead, all known jobs together gain."""

from collections.abc import Iterable, Sequence
from typing import Any

from makespan.policies.morphling._lookahead import Lookahead
from makespan.policies.morphling._schedule import Context, Schedule, Slot, Task
from makespan.sim import Configuration

__all__ = ["Residents", "displace", "preempt"]

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
