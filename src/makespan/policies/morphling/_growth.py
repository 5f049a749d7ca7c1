"""Hand free devices to the jobs that gain most from them."""

from collections.abc import Iterable

from makespan.policies.morphling._draft import Draft, Slot, Task
from makespan.policies.morphling._options import OptionBook
from makespan.policies.morphling._pricing import Moment
from makespan.sim import Configuration, JobView

__all__ = ["grow", "passes_gate"]

Step = tuple[float, Configuration]


def grow(draft: Draft, book: OptionBook, price: float, moment: Moment) -> None:
    """Carry out the steepest step that fits, until none is worth its devices.

    Parameters
    ----------
    draft
        Changed in place.
    book
        Options of jobs.
    price
        Seconds of waiting that one more device second costs all others.
    moment
        Time and parameters.
    """
    room = draft.room
    steps = {task: _steps(draft, task, slot, book, price, moment) for task, slot in draft.slots.items()}
    while room.n_gpus:
        found = _steepest(draft, steps)
        if found is None:
            return
        task, item, nodes = found
        draft.remove(task)
        draft.place(task, item, nodes)
        steps[task] = _steps(draft, task, draft.slots[task], book, price, moment)


def _steps(
    draft: Draft, task: Task, slot: Slot, book: OptionBook, price: float, moment: Moment
) -> list[Step]:
    """List larger configurations that pay, with their gain a device, the steepest first.

    The gain is the share of the remaining time that is saved; a running job pays its restart, and
    the device time beyond what the job would use anyway is paid at the price.
    """
    left_s = slot.finish_s - moment.now_s
    least_s = 1.0
    if slot is task.held:
        if not passes_gate(task.job, moment):
            return []
        least_s = max(moment.tuning.min_growth_s, moment.tuning.min_growth_share * left_s)
        if left_s < moment.delay_s + least_s:
            return []
    area = slot.item.n_gpus * left_s
    found: list[tuple[float, int, Configuration]] = []
    for order, item in enumerate(book.upgrades(task.options, slot.item)):
        time_s = moment.delay_s + task.steps * item.predicted_iter_time_s
        saved_s = left_s - time_s
        if saved_s < least_s:
            continue
        if saved_s - price * (item.n_gpus * time_s - area) < least_s:
            continue
        slope = saved_s / left_s / (item.n_gpus - slot.item.n_gpus)
        found.append((-slope, order, item))
    found.sort()
    return [(-slope, item) for slope, _, item in found]


def passes_gate(job: JobView, moment: Moment) -> bool:
    """Whether a running job has run long enough to restart once more for its own good.

    Of its time ``T`` since it started, the share ``(T - N delay) / T`` that it will not have spent
    on its ``N`` reconfigurations, the next one included, must reach a bound.
    """
    if job.first_start_s is None or not moment.tuning.gate_share:
        return True
    elapsed_s = moment.now_s - job.first_start_s
    lost_s = (job.restart_count + 1) * moment.delay_s
    return elapsed_s - lost_s >= moment.tuning.gate_share * elapsed_s


def _steepest(
    draft: Draft, steps: dict[Task, list[Step]]
) -> tuple[Task, Configuration, tuple[int, ...]] | None:
    """Return the steepest step of all jobs for which there is room now."""
    best: tuple[float, Task, Configuration, tuple[int, ...]] | None = None
    for task, options in steps.items():
        if not options or (best is not None and options[0][0] <= best[0]):
            continue
        found = _first_with_room(draft, task, options, 0.0 if best is None else best[0])
        if found is not None:
            best = (found[0], task, *found[1:])
    return None if best is None else best[1:]


def _first_with_room(
    draft: Draft, task: Task, options: Iterable[Step], above: float
) -> tuple[float, Configuration, tuple[int, ...]] | None:
    """Return the first step steeper than a bound that fits once the job gives back what it holds."""
    slot, room = draft.slots[task], draft.room
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
