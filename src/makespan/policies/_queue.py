"""The common loop of policies that keep what the user asked for and only choose the order."""

from bisect import insort
from collections.abc import Callable, Iterable
from typing import Any

from makespan.policies._pool import Pool, make_room
from makespan.sim import Allocation, ClusterView, Configuration, Decision, JobView

__all__ = ["acceptable", "serve"]

Key = tuple[Any, ...]
Options = Callable[[JobView], tuple[Configuration, ...]]
Victims = Callable[[JobView], Iterable[JobView]]


def acceptable(
    options: tuple[Configuration, ...], steps: float, delay_s: float, max_stretch: float
) -> tuple[Configuration, ...]:
    """Return the options on which a run is not much longer than on the first.

    Parameters
    ----------
    options
        Configurations of one job, fewest nodes first.
    steps
        Steps to run.
    delay_s
        Restart delay that every run begins with [s].
    max_stretch
        Largest accepted ratio of predicted run times, at least 1.
    """
    limit_s = max_stretch * (delay_s + steps * options[0].predicted_iter_time_s)
    chosen = tuple(option for option in options if delay_s + steps * option.predicted_iter_time_s <= limit_s)
    return options if len(chosen) == len(options) else chosen


def serve(
    view: ClusterView,
    order: Callable[[JobView], Key],
    options: Options,
    victims: Victims | None = None,
) -> Decision:
    """Give devices to waiting jobs in order, skipping those that do not fit.

    A job that was refused makes every later job refused that has the same options and finds no
    other victims, so a long queue of equal jobs costs one trial.

    Parameters
    ----------
    view
        The cluster.
    order
        Sort key of a job; must be total and must order victims behind those they yield to.
    options
        What a job may run as, preferred first.
    victims
        Running jobs that a job may displace, first to go first; None if nobody is displaced.
        Displaced jobs join the queue of the same decision.
    """
    pool = Pool.of(view)
    queue = sorted((*order(job), job.index, job) for job in view.pending)
    changes: dict[str, Allocation | None] = {}
    refused: set[tuple[Configuration, ...]] = set()
    position = 0
    while position < len(queue) and (pool.n_gpus or victims is not None):
        job: JobView = queue[position][-1]
        position += 1
        choices = options(job)
        if choices in refused:
            continue
        allocation = pool.fit_first(choices)
        if allocation is not None:
            pool.take(allocation)
        elif victims is not None:
            room = make_room(pool, choices, _unchanged(victims(job), changes))
            if room is not None:
                allocation, gone = room
                for victim in gone:
                    changes[victim.spec.job_id] = None
                    insort(queue, (*order(victim), victim.index, victim), lo=position)
        if allocation is None:
            refused.add(choices)
        else:
            changes[job.spec.job_id] = allocation
    return Decision(changes)


def _unchanged(jobs: Iterable[JobView], changes: dict[str, Allocation | None]) -> Iterable[JobView]:
    return (job for job in jobs if job.spec.job_id not in changes)
