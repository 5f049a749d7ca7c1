"""AntMan: guaranteed jobs run as requested; best-effort jobs use free devices and the idle time of others."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Any

from makespan.hardware import ClusterSpec
from makespan.policies.base import Queue, acceptable, preempt
from makespan.policies.placing import GuestPlacement, PlacementCache
from makespan.sim import Allocation, Catalogue, ClusterView, Configuration, Decision, JobView

Options = tuple[Configuration, ...]
_Waiting = tuple[tuple[Any, ...], Options, list[Any]]  # next entry of a group of the queue, options, group


@dataclass(frozen=True, slots=True)
class AntMan:
    """Run guaranteed jobs as requested and best-effort jobs on the rest, first come first served.

    A guaranteed job preempts best-effort jobs, latest start first. A preempted job becomes a guest on its
    devices: it computes while they are idle, and holds them again as soon as no other job does. A best-effort
    job that does not fit on free devices starts as a guest on the devices where it is fastest, if it makes at
    least ``least_pace`` of the progress that it would make alone. Best-effort jobs accept more nodes up to
    ``max_slowdown`` times the predicted step.

    Reading: a guest moves to free devices elsewhere once it has been in place for as long as a restart takes.
    Deviation: a guest must fit into the memory that other jobs leave, while the original moves part of its
    memory to the host. A guest that does not fit, or that needs host memory, is suspended. If devices are not
    shared, every preempted job is suspended.
    """

    max_slowdown: float = 1.5  # ratio of predicted steps up to which best-effort jobs accept more nodes
    shares: bool = True  # whether jobs may be guests, where the engine supports it
    least_pace: float = 0.0  # least pace at which a job starts as a guest, over its progress alone
    name: str = "antman"
    title: str = "AntMan"
    interval_s: float | None = None
    is_clairvoyant: bool = False
    honours_guarantees: bool = True
    references: tuple[str, ...] = (
        "W. Xiao et al. AntMan: dynamic scaling on GPU clusters for deep learning. OSDI 2020.",
    )

    def initial_state(self, cluster: ClusterSpec, catalogue: Catalogue) -> Queue:
        """Return an empty queue."""
        return Queue(PlacementCache.on(cluster, catalogue))

    def decide(self, view: ClusterView, state: Queue) -> tuple[Decision, Queue]:
        """Serve guaranteed jobs, then the others, each by submission."""
        requested = view.catalogue.as_requested

        def order(job: JobView) -> tuple[bool, float]:
            return (not job.spec.is_guaranteed, job.spec.submit_time_s)

        def options(job: JobView) -> Options:
            if job.spec.is_guaranteed:
                return requested(job.spec)[:1] * 2  # twice, so that no best-effort job has the same options
            return acceptable(job, requested(job.spec), 1.0, 0.0, self.max_slowdown)

        least = self.least_pace if self.shares and view.shares_devices else None
        draft = _Draft(view, least, state)
        draft.end_sharing()
        state.update(view, order, options)
        started: dict[Options, int] = {}
        groups = [(group[0], choices, group) for choices, group in state.groups(view.n_gpus)]
        guaranteed = [entry for entry in groups if entry[0][-1].spec.is_guaranteed]
        _serve(guaranteed, draft.start_guaranteed, started)
        draft.make_memory(range(view.n_nodes))
        others: list[_Waiting] = [entry for entry in groups if not entry[0][-1].spec.is_guaranteed]
        delay_s = view.restart_delay_s
        # Displaced jobs compete for what is left, and so do guests once in place for a restart delay.
        restless = [job for job, _ in draft.guests() if job.held_since_s + delay_s <= view.time_s]
        others += [((*order(job), job.index, job), options(job), []) for job in draft.displaced + restless]
        _serve(others, draft.start, started)
        state.note(started, draft.displaced)
        return Decision(draft.changes, draft.next_move_s()), state


def _serve(
    waiting: list[_Waiting], start: Callable[[JobView, Options], bool], started: dict[Options, int]
) -> None:
    """Start jobs in order; once a job does not start, later ones with the same options are skipped."""
    heapify(waiting)
    blocked: set[Options] = set()
    while waiting:
        entry, choices, group = heappop(waiting)
        if choices in blocked:
            continue
        if not start(entry[-1], choices):
            blocked.add(choices)
        elif group:
            position = started[choices] = started.get(choices, 0) + 1
            if position < len(group):
                heappush(waiting, (group[position], choices, group))


class _Draft:
    """Tentative allocations of all jobs within one decision.

    Invariant: ``_held``, ``_free`` and ``_guests`` always describe the same allocations; every change of one
    goes through `_give` or `_displace`, which also record it for the decision.
    """

    def __init__(self, view: ClusterView, least_pace: float | None, queue: Queue) -> None:
        self.changes: dict[str, Allocation | None] = {}
        self.displaced: list[JobView] = []
        self._view = view
        self._shares = least_pace is not None
        self._least = least_pace or 0.0
        self._free = queue.free_resources(view)
        self._guests = GuestPlacement(view, self._free.placements)
        self._held = {job.index: (job, job.allocation) for job in view.running if job.allocation is not None}

    def guests(self) -> list[tuple[JobView, Allocation]]:
        """Return the guests, by submission."""
        return [entry for _, entry in sorted(self._held.items()) if entry[1].is_guest]

    def next_move_s(self) -> float | None:
        """Return the time at which the next guest may move: a restart delay after its last change [s]."""
        now_s, delay_s = self._view.time_s, self._view.restart_delay_s
        since_s = [now_s if job.spec.job_id in self.changes else job.held_since_s for job, _ in self.guests()]
        return min((time_s + delay_s for time_s in since_s if time_s + delay_s > now_s), default=None)

    def end_sharing(self) -> None:
        """Turn guests into holders of their devices where no other job holds them; this costs no restart."""
        for job, held in self.guests():
            if self._free.take_if_free(held.configuration, held.nodes[::-1]):
                self._give(job, held.colocated(is_guest=False))

    def start_guaranteed(self, job: JobView, options: Options) -> bool:
        """Start a job on free devices, or on those of best-effort jobs, which become guests there."""
        fit = self._free.first_fit(options)
        if fit is None:
            holders = [(other, held) for other, held in self._held.values() if not held.is_guest]
            yielding = [other for other, _ in holders if not other.spec.is_guaranteed]
            yielding.sort(key=lambda other: (-other.held_since_s, other.index))
            preemption = preempt(self._free, options, yielding)
            if preemption is None:
                return False
            self._free, fit, preempted = preemption
            for other in preempted:
                self._yield(other)
        self._free.take(*fit)
        self._give(job, fit[0].on(fit[1]))
        return True

    def make_memory(self, nodes: Iterable[int]) -> None:
        """Displace guests, the latest first, from nodes with too little device memory for all of them."""
        for node in nodes:
            while self._guests.is_crowded(node):
                there = [job for job, held in self.guests() if node in held.nodes]
                self._displace(max(there, key=lambda job: (self._held_since_s(job), job.index)))

    def _held_since_s(self, job: JobView) -> float:
        """Return the time at which a job got its devices [s]: now, if it gets them in this decision."""
        return self._view.time_s if math.isnan(job.held_since_s) else job.held_since_s

    def start(self, job: JobView, options: Options) -> bool:
        """Start a best-effort job on free devices, else as a guest; a job that is a guest moves or stays."""
        fit = self._free.first_fit(options)
        if fit is not None:
            self._free.take(*fit)
            self._give(job, fit[0].on(fit[1]))
            self.make_memory(fit[1])
            return True
        if job.index in self._held:  # it is a guest already
            return True
        for item in options:
            place = self._guests.fastest(item, self._least) if self._shares else None
            if place is not None:
                self._give(job, item.on(place[1]).colocated(is_guest=True))
                return True
        return False

    def _yield(self, job: JobView) -> None:
        """Make a job a guest on its own devices, or displace it."""
        _, held = self._held[job.index]
        if self._shares and self._guests.has_devices(held):
            self._give(job, held.colocated(is_guest=True))
        else:
            self._displace(job)

    def _give(self, job: JobView, allocation: Allocation) -> None:
        self._remove(job)
        self._held[job.index] = job, allocation
        self._guests.add(job.index, allocation)
        self.changes[job.spec.job_id] = allocation

    def _displace(self, job: JobView) -> None:
        self._remove(job)
        self.changes[job.spec.job_id] = None
        self.displaced.append(job)

    def _remove(self, job: JobView) -> None:
        if job.index in self._held:
            self._guests.remove(job.index, self._held.pop(job.index)[1])


POLICIES = (AntMan(),)
