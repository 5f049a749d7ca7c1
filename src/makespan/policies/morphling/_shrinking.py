"""Take devices from running jobs with flat curves, for a job with a steeper one or a guarantee."""

from collections.abc import Callable, Iterator

from makespan.policies.morphling._draft import Draft, Slot, Task
from makespan.policies.morphling._slopes import Curve
from makespan.policies.morphling._tuning import RuleTuning
from makespan.sim import ClusterView, Configuration, JobView
from makespan.workloads import JobSpec

__all__ = ["passes_gate", "shrink_for"]

Curves = Callable[[JobSpec], Curve]


def passes_gate(job: JobView, view: ClusterView, least_share: float) -> bool:
    """Whether a running job has run long enough to be reconfigured once more (rule 5).

    After the reconfiguration, the share of its time that it did not spend restarting must reach a
    bound: (T - N delay) / T, with N restarts, the next one included, in T seconds since its start.
    """
    if job.first_start_s is None:
        return True
    elapsed_s = view.time_s - job.first_start_s
    lost_s = (job.restart_count + 1) * view.restart_delay_s
    return elapsed_s - lost_s >= least_share * elapsed_s


def shrink_for(draft: Draft, task: Task, view: ClusterView, curves: Curves, tuning: RuleTuning) -> bool:
    """Shrink running jobs, the flattest first, until a job fits; change nothing if it never does.

    A best-effort job takes only from flatter jobs that pass the gate; a guaranteed one from all. No
    job is shrunk below its own least option, and only best-effort jobs are stopped.
    """
    bound = float("inf") if task.is_guaranteed else curves(task.job.spec).efficiency(task.choices[0])
    trial = draft.copy()
    victims = {
        other: curves(other.job.spec)
        for other, slot in draft.slots.items()
        if slot is other.held and (task.is_guaranteed or passes_gate(other.job, view, tuning.yield_share))
    }
    while victims:
        step = min(_steps(trial, victims), key=lambda entry: entry[:2], default=None)
        if step is None or step[0] >= bound:
            return False
        _, _, victim, item = step
        if not _shrink(trial, victim, item):
            del victims[victim]
            continue
        found = trial.room.first_fit(task.choices)
        if found is not None and not trial.room.has_shortage():
            trial.place(task, *found)
            draft.room, draft.slots = trial.room, trial.slots
            return True
    return False


def _steps(
    trial: Draft, victims: dict[Task, Curve]
) -> Iterator[tuple[float, int, Task, Configuration | None]]:
    """List the next smaller option of every victim, with the speed lost a device."""
    for victim, curve in victims.items():
        slot = trial.slots.get(victim)
        if slot is None:
            continue
        smaller = curve.smaller(slot.item)
        if smaller:
            yield curve.slope(smaller[0], slot.item), victim.index, victim, smaller[0]
        elif not victim.is_guaranteed:
            yield curve.efficiency(slot.item), victim.index, victim, None


def _shrink(trial: Draft, victim: Task, item: Configuration | None) -> bool:
    """Give a job a smaller option or nothing; leave it alone if the option does not fit."""
    slot: Slot = trial.remove(victim)
    if item is None:
        return True
    nodes = trial.room.fit(item)
    if nodes is None:
        trial.room.take(slot.item, slot.nodes)
        trial.slots[victim] = slot
        return False
    trial.place(victim, item, nodes)
    return True
