"""Growth: free devices go to the jobs that gain most from them."""

from collections.abc import Iterable

from makespan.policies.morphling._schedule import Context, Schedule, Slot, Task
from makespan.sim import Configuration

__all__ = ["grow"]

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
