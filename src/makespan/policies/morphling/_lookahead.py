"""Lookahead: what follows from a schedule if nobody else arrives, followed no further than anybody asks."""

from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from math import inf

from makespan.policies.morphling._schedule import Context, Schedule, Task
from makespan.sim import Configuration

__all__ = ["Lookahead"]

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
