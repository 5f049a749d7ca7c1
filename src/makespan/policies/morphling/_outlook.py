"""Look ahead: run all known jobs to their end by list scheduling."""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from makespan.policies.morphling._draft import Draft, Task
from makespan.sim import Configuration

__all__ = ["Outlook", "foresee"]


@dataclass(frozen=True, slots=True)
class Outlook:
    """What becomes of the known jobs if a draft is carried out and nobody else arrives.

    Parameters
    ----------
    cost_s
        Sum of finish times plus the weighted time of the last [s]; lower is better.
    waits_s
        How long each blocked job still waits [s]; up to the end of the others if it never fits.
    """

    cost_s: float
    waits_s: dict[Task, float]


def foresee(
    draft: Draft,
    blocked: Sequence[Task],
    now_s: float,
    *,
    last_weight: float,
    grain_s: float,
    bar_s: float = math.inf,
) -> Outlook | None:
    """Start blocked jobs in order whenever running ones finish, and add up.

    Parameters
    ----------
    draft
        What the other jobs hold.
    blocked
        Jobs that wait, the first in the queue first.
    now_s
        The time [s].
    last_weight
        How many jobs the end of the schedule counts as.
    grain_s
        Finish times that are closer than this count as one instant [s].
    bar_s
        Cost that must be undercut [s].

    Returns
    -------
    Outlook or None
        None as soon as it is clear that the cost is not below the bar.
    """
    heap: list[tuple[float, int, Configuration, tuple[int, ...]]] = [
        (slot.finish_s, task.index, slot.item, slot.nodes) for task, slot in draft.slots.items()
    ]
    total_s = sum(entry[0] for entry in heap)
    last_s = max((entry[0] for entry in heap), default=now_s)
    waits_s: dict[Task, float] = {}
    if blocked:
        heapq.heapify(heap)
        room, delay_s, waiting = draft.room.copy(), draft.start_s - now_s, list(blocked)
        while heap and waiting:
            time_s, _, item, nodes = heapq.heappop(heap)
            room.give(item, nodes)
            if heap and heap[0][0] <= time_s + grain_s:
                continue
            if total_s + len(waiting) * time_s + last_weight * last_s >= bar_s:
                return None
            left = []
            for task in waiting:
                chosen = room.first_fit(task.choices) if task.least_gpus <= room.n_gpus else None
                if chosen is None:
                    left.append(task)
                    continue
                item, nodes = chosen
                room.take(item, nodes)
                finish_s = time_s + delay_s + task.steps * item.predicted_iter_time_s
                heapq.heappush(heap, (finish_s, task.index, item, nodes))
                waits_s[task] = time_s - now_s
                total_s += finish_s
                last_s = max(last_s, finish_s)
            waiting = left
        for task in waiting:
            waits_s[task] = last_s - now_s
            total_s += last_s
    cost_s = total_s + last_weight * last_s
    return Outlook(cost_s, waits_s) if cost_s < bar_s else None
