"""What a device second is worth, which options a job starts with, and who comes first."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import exp, inf

from makespan.policies.morphling._draft import Task
from makespan.policies.morphling._tuning import Tuning

__all__ = ["Arrivals", "Moment", "critical", "price_tasks", "rank_tasks"]


@dataclass(frozen=True, slots=True)
class Arrivals:
    """How fast jobs have been arriving; a weighted mean that forgets.

    Parameters
    ----------
    per_s
        Jobs a second.
    time_s
        When that was [s].
    last_index
        Position of the last job that is counted in it.
    """

    per_s: float = 0.0
    time_s: float = 0.0
    last_index: int = -1

    def updated(self, tasks: Iterable[Task], now_s: float, memory_s: float) -> "Arrivals":
        """Return the rate after what has arrived since.

        Parameters
        ----------
        tasks
            Jobs that wait.
        now_s
            The time [s].
        memory_s
            Age at which an arrival counts 1/e [s].
        """
        new = [task.index for task in tasks if task.index > self.last_index]
        per_s = self.per_s * exp((self.time_s - now_s) / memory_s) + len(new) / memory_s
        return Arrivals(per_s, now_s, max(new, default=self.last_index))


@dataclass(frozen=True, slots=True)
class Moment:
    """What the parts of one decision share.

    Parameters
    ----------
    now_s, delay_s
        Time and restart delay [s].
    start_price
        Seconds of waiting that one device second of a starting job costs all others.
    tuning
        Parameters of the policy.
    """

    now_s: float
    delay_s: float
    start_price: float
    tuning: Tuning

    def admit(self, tasks: Sequence[Task], critical_tasks: frozenset[Task] = frozenset()) -> None:
        """Price and rank jobs that wait or are to wait."""
        price_tasks(tasks, self.delay_s, self.start_price, self.tuning.cost_tolerance)
        rank_tasks(tasks, self.now_s, self.tuning, critical_tasks)


def price_tasks(tasks: Iterable[Task], delay_s: float, price: float, tolerance: float) -> None:
    """Set the least area of jobs, and the options that they would start with.

    A device second costs others ``price`` seconds of waiting, so a job that takes ``g`` devices for
    ``T`` seconds costs ``T (1 + price g)`` in all. Free devices favour the fastest option, scarce
    ones the option of the least area.

    Parameters
    ----------
    tasks
        Jobs that wait.
    delay_s
        Restart delay [s].
    price
        Seconds of waiting that one device second costs all others.
    tolerance
        Options up to this ratio of the least cost are acceptable.
    """
    for task in tasks:
        steps = task.steps
        costs = []
        least_area = float("inf")
        for order, item in enumerate(task.options):
            time_s = delay_s + steps * item.predicted_iter_time_s
            area = time_s * item.n_gpus
            if area < least_area:
                least_area = area
            costs.append((time_s + price * area, order, item))
        limit = min(costs)[0] * tolerance
        choices = sorted(entry for entry in costs if entry[0] <= limit)
        task.area_gpu_s = least_area
        task.choices = tuple([item for _, _, item in choices])
        task.least_gpus = min(item.n_gpus for item in task.choices)


def rank_tasks(tasks: Iterable[Task], now_s: float, tuning: Tuning, critical_tasks: frozenset[Task]) -> None:
    """Set the sort keys of waiting jobs: critical ones, then little work first, with ageing.

    The area of a guaranteed job counts less, and that of a job counts less the longer it waits.
    """
    for task in tasks:
        waited_s = now_s - task.job.spec.submit_time_s
        area = task.area_gpu_s / (1.0 + waited_s / tuning.ageing_s)
        if task.is_guaranteed:
            area *= tuning.guarantee_factor
        task.rank = (task not in critical_tasks, area, task.index)


def critical(
    waiting: Sequence[Task], running: Iterable[Task], moment: Moment, n_gpus: int
) -> frozenset[Task]:
    """Return the waiting jobs that decide when the schedule ends.

    Such a job takes longer by itself, on its fastest option, than the cluster needs for all other
    known work; if it comes last, the cluster idles beside it.

    Parameters
    ----------
    waiting
        Jobs that wait, priced.
    running
        Jobs that hold something.
    moment
        Time and parameters.
    n_gpus
        Devices of the cluster.
    """
    tuning = moment.tuning
    if tuning.critical_ratio == inf:
        return frozenset()
    held = [task.held for task in running if task.held is not None]
    work = sum(slot.item.n_gpus * (slot.finish_s - moment.now_s) for slot in held)
    work += sum(task.area_gpu_s for task in waiting)
    least_s = tuning.critical_delays * moment.delay_s
    found = []
    for task in waiting:
        alone_s = moment.delay_s + task.steps * min(item.predicted_iter_time_s for item in task.options)
        others = work - task.area_gpu_s
        if alone_s > least_s and alone_s * n_gpus >= tuning.critical_ratio * others:
            found.append(task)
    return frozenset(found)
