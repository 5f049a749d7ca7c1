"""Hand devices that are left to the steepest jobs (rule 4)."""

from makespan.policies.morphling._draft import Draft, Task
from makespan.policies.morphling._shrinking import Curves, passes_gate
from makespan.policies.morphling._tuning import RuleTuning
from makespan.sim import ClusterView, Configuration

__all__ = ["hand_out"]


def hand_out(draft: Draft, view: ClusterView, curves: Curves, tuning: RuleTuning) -> None:
    """Give the steepest job its next configuration, re-planning it, until no job gains.

    A running job must pass the gate; one that starts now pays nothing for a larger start.
    """
    open_tasks = {
        task
        for task, slot in draft.slots.items()
        if slot is not task.held or passes_gate(task.job, view, tuning.least_share)
    }
    while draft.room.n_gpus:
        best: tuple[float, int, Task, Configuration, tuple[int, ...]] | None = None
        for task in open_tasks:
            found = _step(draft, task, curves, tuning)
            if found is not None and (best is None or (-found[0], task.index) < best[:2]):
                best = (-found[0], task.index, task, found[1], found[2])
        if best is None:
            return
        _, _, task, item, nodes = best
        draft.remove(task)
        draft.place(task, item, nodes)


def _step(
    draft: Draft, task: Task, curves: Curves, tuning: RuleTuning
) -> tuple[float, Configuration, tuple[int, ...]] | None:
    """Return the steepest step of a job for which there is room, if it is steep enough."""
    curve, slot, room = curves(task.job.spec), draft.slots[task], draft.room
    least = tuning.least_slope * curve.efficiency(slot.item)
    most = slot.item.n_gpus + room.n_gpus
    steps = [
        (-curve.slope(slot.item, item), order, item)
        for order, item in enumerate(curve.options)
        if slot.item.n_gpus < item.n_gpus <= most
    ]
    room.give(slot.item, slot.nodes)
    found = None
    for negative, _, item in sorted(entry for entry in steps if -entry[0] > least):
        nodes = room.fit(item)
        if nodes is not None:
            found = (-negative, item, nodes)
            break
    room.take(slot.item, slot.nodes)
    return found
