"""Look ahead: run all known jobs to their end by list scheduling."""

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from makespan.policies._placing import Room
from makespan.policies.morphling._draft import Draft, Task
from makespan.sim import Configuration

__all__ = ["Outlook", "foresee"]

_Run = tuple[float, int, Configuration, tuple[int, ...]]  # finish time [s], index, configuration, nodes


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
    max_foreseen: int | None = None,
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
    max_foreseen
        Blocked jobs to follow, from the head of the queue; the others count as ending when the last
        of these starts. None for all.
    bar_s
        Cost that must be undercut [s].

    Returns
    -------
    Outlook or None
        None as soon as it is clear that the cost is not below the bar.
    """
    heap: list[_Run] = [
        (slot.finish_s, task.index, slot.item, slot.nodes) for task, slot in draft.slots.items()
    ]
    waits_s: dict[Task, float] = {}
    total_s = sum(run[0] for run in heap)
    last_s = max((run[0] for run in heap), default=now_s)
    room, delay_s, waiting = draft.room.copy(), draft.start_s - now_s, list(blocked[:max_foreseen])
    n_beyond, time_s = len(blocked) - len(waiting), now_s
    heapq.heapify(heap)
    while heap and waiting:
        time_s, _, item, nodes = heapq.heappop(heap)
        room.give(item, nodes)
        if heap and heap[0][0] <= time_s + grain_s:
            continue
        if total_s + (len(waiting) + n_beyond) * time_s + last_weight * last_s >= bar_s:
            return None
        started, waiting = _start(room, waiting, time_s + delay_s)
        for task, run in started:
            heapq.heappush(heap, run)
            waits_s[task] = time_s - now_s
            total_s += run[0]
            last_s = max(last_s, run[0])
    waits_s |= dict.fromkeys(waiting, last_s - now_s)
    cost_s = total_s + len(waiting) * last_s + n_beyond * time_s + last_weight * last_s
    return Outlook(cost_s, waits_s) if cost_s < bar_s else None


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
