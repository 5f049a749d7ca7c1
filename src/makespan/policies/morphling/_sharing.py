"""Sharing: best-effort jobs that wait compute meanwhile on devices that others hold, where these are idle."""

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter

from makespan.policies._guests import GuestRoom
from makespan.policies.morphling._schedule import Context, Schedule, Slot, Task
from makespan.sim import Allocation, ClusterView, Configuration, Decision

__all__ = ["start_guests", "with_guests"]


def start_guests(tasks: Iterable[Task], schedule: Schedule, context: Context) -> list[Task]:
    """Give guests that may start so the free devices where they are, and return who is still to start.

    Guests start elsewhere only where they would end earlier, restart included.
    """
    kept = []
    for task in tasks:
        guest, now_s = task.guest, context.now_s
        if guest is not None:
            item, step_s = guest.item, task.options.step_s
            if item in task.choices and schedule.room.take_if_free(item, guest.nodes):
                begins_s = max(now_s, task.job.ready_time_s)
                finish_s = begins_s + task.steps * step_s[item]
                schedule.slots[task] = Slot(item, guest.nodes, step_s[item], finish_s)
                continue
            left_s = guest.finish_s - now_s - context.delay_s
            task.choices = tuple([item for item in task.choices if task.steps * step_s[item] < left_s])
            task.least_gpus = min([item.n_gpus for item in task.choices], default=0)
        if task.choices:
            kept.append(task)
    return kept


def with_guests(
    decision: Decision, view: ClusterView, schedule: Schedule, tasks: Sequence[Task], context: Context
) -> Decision:
    """Let best-effort jobs without devices be guests, first those that are or had devices, where they are.

    A guest that finds no memory any more beside new holders is suspended. Any other job of the queue goes
    where it makes most progress.
    """
    slots = schedule.slots
    rest = sorted([task for task in tasks if task not in slots], key=attrgetter("rank"))
    if not rest:
        return decision
    changes, room = dict(decision.changes), GuestRoom(view, schedule.room.places)
    _make_room(
        [task for task in rest[::-1] if task.guest], _with_holders(room, schedule, tasks), room, changes
    )
    for task in rest:
        if (
            task.held is not None
            and not task.is_guaranteed
            and room.has_place(task.held.item, task.held.nodes)
        ):
            guest = changes[task.job.spec.job_id] = task.held.item.on(task.held.nodes).beside(is_guest=True)
            room.add(task.index, guest)
    waiting = [task for task in rest if not task.is_guaranteed and _has_nothing(task, changes)]
    refused: set[tuple[Configuration, ...]] = set()
    for task in waiting[: context.tuning.max_foreseen]:
        options = task.options
        found = None if options.items in refused else room.fastest_of(options.by_step)
        if found is None:
            refused.add(options.items)
        else:
            room.add(task.index, found)
            changes[task.job.spec.job_id] = found
    return Decision(changes, wake_up_s=decision.wake_up_s)


def _has_nothing(task: Task, changes: Mapping[str, Allocation | None]) -> bool:
    return changes.get(task.job.spec.job_id, task.job.allocation) is None


def _with_holders(room: GuestRoom, schedule: Schedule, tasks: Iterable[Task]) -> set[int]:
    """Take in who holds what from now on; return the nodes on which there is somebody new."""
    found: set[int] = set()
    for task in tasks:
        slot, held = schedule.slots.get(task), task.job.allocation
        if slot is task.held:
            continue
        if held is not None:
            room.remove(task.index, held)
        if slot is not None:
            room.add(task.index, slot.item.on(slot.nodes))
            found.update(slot.nodes)
    return found


def _make_room(
    guests: Iterable[Task], touched: set[int], room: GuestRoom, changes: dict[str, Allocation | None]
) -> None:
    """Suspend guests, in the order given, of nodes where not all find a device with memory for them."""
    for task in guests:
        held = task.job.allocation
        if held is not None and any(node in touched and room.is_crowded(node) for node in held.nodes):
            room.remove(task.index, held)
            changes[task.job.spec.job_id] = None
