"""Registry of policies, policies in user files, and the queue that several policies share."""

from __future__ import annotations

import re
from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from heapq import heapify, heappop, heappush
from pathlib import Path
from types import ModuleType
from typing import Any

from makespan.arguments import typed
from makespan.errors import short_path, unknown_name
from makespan.policies.placing import Fit, FreeResources, PlacementCache
from makespan.sim import (
    Allocation,
    ClusterView,
    Configuration,
    Decision,
    JobView,
    Policy,
    PolicyError,
    check_policy,
)
from makespan.user_code import load_file, load_module, user_file

# --- Registry ---

_MODULES = {
    "antman": "makespan.policies.antman",
    "easyscale-heter": "makespan.policies.easyscale",
    "easyscale-heter-growth": "makespan.policies.easyscale",
    "easyscale-homo": "makespan.policies.easyscale",
    "fifo": "makespan.policies.queues",
    "fifo-serial": "makespan.policies.queues",
    "gavel": "makespan.policies.gavel",
    "gavel-ftf": "makespan.policies.gavel",
    "gavel-makespan": "makespan.policies.gavel",
    "morphling": "makespan.policies.morphling",
    "morphling-e": "makespan.policies.morphling",
    "morphling-lookahead": "makespan.policies.lookahead",
    "morphling-lookahead-e": "makespan.policies.lookahead",
    "morphling-lookahead-n": "makespan.policies.lookahead",
    "morphling-lookahead-r": "makespan.policies.lookahead",
    "morphling-lookahead-s": "makespan.policies.lookahead",
    "morphling-n": "makespan.policies.morphling",
    "morphling-r": "makespan.policies.morphling",
    "morphling-work": "makespan.policies.lookahead",
    "morphling-work-e": "makespan.policies.lookahead",
    "morphling-work-n": "makespan.policies.lookahead",
    "morphling-work-r": "makespan.policies.lookahead",
    "morphling-work-s": "makespan.policies.lookahead",
    "sia": "makespan.policies.sia",
    "sjf": "makespan.policies.queues",
    "srtf": "makespan.policies.queues",
    "synergy": "makespan.policies.queues",
    "tiresias": "makespan.policies.queues",
    "tiresias-pollux": "makespan.policies.queues",
}


class _Registry(Mapping[str, "Policy"]):
    """Policies by name, imported on access: listing the names is fast, and works if a module is broken."""

    def __getitem__(self, name: str) -> Policy:
        return policy_in_module(_MODULES[name], name)

    def __contains__(self, name: object) -> bool:
        return name in _MODULES

    def __iter__(self) -> Iterator[str]:
        return iter(_MODULES)

    def __len__(self) -> int:
        return len(_MODULES)


REGISTRY: Mapping[str, Policy] = _Registry()
"""Every policy by its name, sorted."""


def policy_names() -> tuple[str, ...]:
    """Return the names of all policies, sorted."""
    return tuple(REGISTRY)


@typed
def policy(name: str | Path) -> Policy:
    """Return a policy by its name, or from a file: ``mine.py``, or ``mine.py:NAME`` if it has several.

    Raises
    ------
    UnknownNameError
        No policy has that name.
    PolicyError
        The policy file is broken, or its policy has the name of a built-in one.
    """
    text = str(name)
    if text in REGISTRY:
        return REGISTRY[text]
    if not (isinstance(name, Path) or is_file_name(text)):
        raise unknown_name("policy", text, (*REGISTRY, "FILE.py"))
    loaded = policy_in_file(text)
    if loaded.name in REGISTRY:
        raise PolicyError(f"{text}: name {loaded.name!r} is that of a built-in policy; choose another name")
    return loaded


# --- Policies in modules and files ---

_FILE = re.compile(r"(?P<path>.*\.py)(?::(?P<name>[^/:]+))?", re.DOTALL)


def is_file_name(text: str) -> bool:
    """Return True if a text is a path, optionally with the name of one of its policies after a colon."""
    return "/" in text or _FILE.fullmatch(text) is not None


def policy_in_module(module: str, name: str) -> Policy:
    """Import a module by its dotted name and return a policy of its tuple ``POLICIES``."""
    imported, file = load_module(module, PolicyError)
    return _chosen(imported, file, name)


def policy_in_file(text: str) -> Policy:
    """Return the policy of a file, ``FILE.py``, or one of several, ``FILE.py:NAME``."""
    match = _FILE.fullmatch(text)
    if match is None:
        raise PolicyError(f"{text}: not a policy file; expected a path that ends in .py, or in .py:NAME")
    path = user_file(match["path"], "a policy file", PolicyError)
    stat = path.stat()
    file = str(path.resolve())
    return _chosen(_loaded(file, stat.st_mtime_ns, stat.st_size), file, match["name"])


@cache
def _loaded(file: str, mtime_ns: int, size: int) -> ModuleType:
    """Run a file as a module, without a bytecode cache; time and size are in the key, so edits are seen."""
    return load_file(file, PolicyError)


def _chosen(module: ModuleType, file: str, name: str | None) -> Policy:
    where, listed = short_path(file), getattr(module, "POLICIES", None)
    if not isinstance(listed, tuple) or not listed:
        problem = "no POLICIES" if listed is None else f"POLICIES is {type(listed).__name__} {listed!r:.80}"
        raise PolicyError(f"{where}: {problem}; expected a tuple of policies, POLICIES = (MyPolicy(),)")
    by_name = {getattr(entry, "name", None): entry for entry in listed}
    if name is None and len(listed) > 1:
        accepted = " or ".join(f"{where}:{key}" for key in by_name)
        raise PolicyError(f"{where}: has {len(listed)} policies; expected {accepted}")
    if name is not None and name not in by_name:
        accepted = ", ".join(map(str, by_name))
        raise PolicyError(f"{where}: no policy in POLICIES has the name {name!r}; found: {accepted}")
    entry: Policy = listed[0] if name is None else by_name[name]
    check_policy(entry)
    return entry


# --- Queue of policies that keep requests and choose only the order ---

Key = tuple[Any, ...]
Order = Callable[[JobView], Key]
Options = tuple[Configuration, ...]


def acceptable(job: JobView, options: Options, steps: float, delay_s: float, max_stretch: float) -> Options:
    """Return the options whose run, restart included, is at most ``max_stretch`` times that of the first."""
    limit_s = max_stretch * (delay_s + steps * job.step_s(options[0]))
    chosen = tuple(item for item in options if delay_s + steps * job.step_s(item) <= limit_s)
    return options if len(chosen) == len(options) else chosen


class Queue:
    """Waiting jobs grouped by their options, each group sorted by the key of a policy.

    If the first job of a group does not fit, no other job of the group does, so a decision looks at one job
    per group and not at the whole queue. A policy may keep a queue in its state if neither the key nor the
    options of a job change while it waits. ``placements`` is the placement cache of the cluster, if the
    policy keeps one.

    Invariants: after `update`, every waiting job is in exactly one group, and groups are sorted; no group is
    ever empty; ``_last_index`` is the largest index of any job that was added.
    """

    __slots__ = ("_displaced", "_groups", "_last_index", "_n_jobs", "placements")

    def __init__(self, placements: PlacementCache | None = None) -> None:
        self.placements = placements
        self._groups: dict[Options, list[Key]] = {}  # of each job its key, its index and itself
        self._displaced: list[JobView] = []
        self._last_index = -1
        self._n_jobs = 0

    def free_resources(self, view: ClusterView, kept_threads: int = 0) -> FreeResources:
        """Return the free resources of a cluster, see `FreeResources`."""
        if self.placements is None:
            return FreeResources.of(view, is_tight=True, kept_threads=kept_threads)
        return self.placements.free_resources(view, kept_threads)

    def update(self, view: ClusterView, order: Order, options: Callable[[JobView], Options]) -> None:
        """Add the jobs that arrived or were displaced since the last decision, or rebuild the queue."""
        new = [job for job in self._displaced if job.allocation is None]
        new += view.waiting_after(self._last_index)
        self._displaced = []
        # Jobs interrupted by the failure of a node are in neither list. The count then differs from that of
        # the view, and the queue is rebuilt from all waiting jobs.
        is_partial = self._n_jobs + len(new) == len(view.pending)
        if not is_partial:
            self._groups.clear()
            new = list(view.pending)
        for job in new:
            entry = (*order(job), job.index, job)
            if is_partial:
                insort(self._groups.setdefault(options(job), []), entry)
            else:
                self._groups.setdefault(options(job), []).append(entry)
            self._last_index = max(self._last_index, job.index)
        if not is_partial:
            for group in self._groups.values():
                group.sort()
        self._n_jobs = len(view.pending)

    def groups(self, n_gpus: int) -> Iterator[tuple[Options, list[Key]]]:
        """Yield the groups with an option for at most ``n_gpus`` devices."""
        for choices, group in self._groups.items():
            if any(item.n_gpus <= n_gpus for item in choices):
                yield choices, group

    def note(self, started: Mapping[Options, int], displaced: Iterable[JobView]) -> None:
        """Remove the first jobs of each group, which start now, and note the jobs that lost their devices."""
        for choices, number in started.items():
            del self._groups[choices][:number]
            if not self._groups[choices]:
                del self._groups[choices]
            self._n_jobs -= number
        self._displaced.extend(displaced)


def serve(
    view: ClusterView,
    order: Order,
    options: Callable[[JobView], Options],
    victims: Callable[[JobView], Iterable[JobView]] | None = None,
    queue: Queue | None = None,
    kept_threads: int = 0,
) -> Decision:
    """Give devices to waiting jobs in order, skipping those that do not fit.

    Once a job does not fit, later jobs with the same options are skipped without a search.

    Parameters
    ----------
    order
        Sorting key of a job, smallest first. A victim must sort behind the job that displaces it, or the two
        would displace each other for ever.
    options
        Configurations that a job may run as, best first.
    victims
        Running jobs that a job may displace, in the order of preemption; None for no preemption.
    queue
        Queue kept between decisions, if keys and options of waiting jobs never change.
    kept_threads
        CPU threads reserved for each device that stays free, see `FreeResources`.
    """
    queue = Queue() if queue is None else queue
    free = queue.free_resources(view, kept_threads)
    if not (free.n_gpus or victims is not None):
        return Decision()
    queue.update(view, order, options)
    most = free.n_gpus if victims is None else view.n_gpus
    # The heap holds the first job of each group. When it starts, the next one of the group takes its place.
    waiting = [(group[0], choices, group) for choices, group in queue.groups(most)]
    heapify(waiting)
    changes: dict[str, Allocation | None] = {}
    started, displaced = dict[Options, int](), list[JobView]()
    blocked: set[Options] = set()
    while waiting and (free.n_gpus or victims is not None):
        entry, choices, group = heappop(waiting)
        if choices in blocked:
            continue
        job: JobView = entry[-1]
        fit = free.first_fit(choices)
        if fit is None and victims is not None:
            unchanged = (other for other in victims(job) if other.spec.job_id not in changes)
            preempted = preempt(free, choices, unchanged)
            if preempted is not None:
                free, fit, preempted_jobs = preempted
                # A victim may start elsewhere in this decision; it belongs to no group of the queue.
                for victim in preempted_jobs:
                    changes[victim.spec.job_id] = None
                    heappush(waiting, ((*order(victim), victim.index, victim), options(victim), []))
                displaced += preempted_jobs
        if fit is None:
            blocked.add(choices)
            continue
        free.take(*fit)
        changes[job.spec.job_id] = fit[0].on(fit[1])
        if group:
            position = started[choices] = started.get(choices, 0) + 1
            if position < len(group):
                heappush(waiting, (group[position], choices, group))
    queue.note(started, displaced)
    return Decision(changes)


def preempt(
    free: FreeResources, options: tuple[Configuration, ...], victims: Iterable[JobView]
) -> tuple[FreeResources, Fit, list[JobView]] | None:
    """Preempt as few jobs as necessary so that one of some options fits.

    Victims lose their devices in the given order until an option fits. Then each gets its devices back, the
    last one first, if the option still fits without them: the first victims may be on nodes that the option
    does not use in the end.

    Returns
    -------
    tuple or None
        Free resources after the preemption, the option with its nodes, and the jobs that stay preempted;
        None if no option fits even with the devices of all victims.
    """
    held = [(job, job.allocation) for job in victims if job.allocation is not None]
    if not held:
        return None
    trial = free.copy()
    for _, allocation in held:
        trial.give(allocation.configuration, allocation.nodes[::-1])
    if trial.first_fit(options) is None:  # no option fits even with the devices of all victims
        return None
    trial = free.copy()
    fit, n_preempted = trial.first_fit(options), 0
    while fit is None:
        allocation = held[n_preempted][1]
        trial.give(allocation.configuration, allocation.nodes[::-1])
        n_preempted += 1
        fit = trial.first_fit(options)
    preempted = [job for job, _ in held[:n_preempted]]
    for victim, allocation in held[:n_preempted][::-1]:
        trial.take(allocation.configuration, allocation.nodes[::-1])
        nodes = trial.fit(fit[0])
        if nodes is None:
            trial.give(allocation.configuration, allocation.nodes[::-1])
        else:
            fit = (fit[0], nodes)
            preempted.remove(victim)
    return trial, fit, preempted
