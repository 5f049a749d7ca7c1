"""The queue of policies that keep what users asked for and only choose the order, and its preemption."""

from bisect import insort
from collections.abc import Callable, Iterable
from typing import Any

from makespan.policies._placing import Fit, Room
from makespan.sim import Allocation, ClusterView, Configuration, Decision, JobView

__all__ = ["acceptable", "preempt", "serve"]

Key = tuple[Any, ...]


def acceptable(
    options: tuple[Configuration, ...], steps: float, delay_s: float, max_stretch: float
) -> tuple[Configuration, ...]:
    """Options on which a run, restart delay included, takes at most ``max_stretch`` times the first's."""
    limit_s = max_stretch * (delay_s + steps * options[0].predicted_iter_time_s)
    chosen = tuple(option for option in options if delay_s + steps * option.predicted_iter_time_s <= limit_s)
    return options if len(chosen) == len(options) else chosen


def serve(
    view: ClusterView,
    order: Callable[[JobView], Key],
    options: Callable[[JobView], tuple[Configuration, ...]],
    victims: Callable[[JobView], Iterable[JobView]] | None = None,
) -> Decision:
    """Give devices to waiting jobs in order, skipping those that do not fit.

    A refused job makes later ones with the same options refused.

    Parameters
    ----------
    order
        Sorting key of a job, smallest first; must put victims behind those they yield to.
    options
        Configurations that a job may run as, best first.
    victims
        Running jobs that a job may displace, first to go first; None for no preemption.
    """
    room = Room.of(view, is_tight=True)
    queue = sorted((*order(job), job.index, job) for job in view.pending)
    changes: dict[str, Allocation | None] = {}
    refused: set[tuple[Configuration, ...]] = set()
    position = 0
    while position < len(queue) and (room.n_gpus or victims is not None):
        job: JobView = queue[position][-1]
        position += 1
        choices = options(job)
        if choices in refused:
            continue
        found = room.first_fit(choices)
        if found is None and victims is not None:
            unchanged = (other for other in victims(job) if other.spec.job_id not in changes)
            preempted = preempt(room, choices, unchanged)
            if preempted is not None:
                room, found, gone = preempted
                for victim in gone:
                    changes[victim.spec.job_id] = None
                    insort(queue, (*order(victim), victim.index, victim), lo=position)
        if found is None:
            refused.add(choices)
        else:
            room.take(*found)
            changes[job.spec.job_id] = found[0].on(found[1])
    return Decision(changes)


def preempt(
    room: Room, options: tuple[Configuration, ...], victims: Iterable[JobView]
) -> tuple[Room, Fit, list[JobView]] | None:
    """Room after running jobs lost their devices, what then fits, and who they are; None if all are too few.

    Victims are given up in order until an option fits, then spared again if not needed, the last first.
    """
    held = [(job, job.allocation) for job in victims if job.allocation is not None]
    trial = room.copy()
    for _, allocation in held:
        trial.give(allocation.configuration, allocation.nodes[::-1])
    if trial.first_fit(options) is None:
        return None
    trial = room.copy()
    found, n_gone = trial.first_fit(options), 0
    while found is None:
        allocation = held[n_gone][1]
        trial.give(allocation.configuration, allocation.nodes[::-1])
        n_gone += 1
        found = trial.first_fit(options)
    gone = [job for job, _ in held[:n_gone]]
    for victim, allocation in held[:n_gone][::-1]:
        trial.take(allocation.configuration, allocation.nodes[::-1])
        nodes = trial.fit(found[0])
        if nodes is None:
            trial.give(allocation.configuration, allocation.nodes[::-1])
        else:
            found = (found[0], nodes)
            gone.remove(victim)
    return trial, found, gone
