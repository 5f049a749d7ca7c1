"""The engine: what happens at each event of the queue, and what of it is recorded."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from makespan.errors import InputError
from makespan.hardware import ClusterSpec
from makespan.sim._catalogue import Allocation, Catalogue
from makespan.sim._costs import RestartCost
from makespan.sim._events import (
    Event,
    EventKind,
    EventQueue,
    NodeEvent,
    NodeEventKind,
    Observer,
    absent_nodes,
)
from makespan.sim._policy import Adviser, Decision, Policy, StalledError, checked_changes, known_as
from makespan.sim._sharing import crowded_guest, memory_by_device
from makespan.sim._state import ClusterState
from makespan.sim._view import ClusterView, JobView
from makespan.sim._watch import DECISION_LIMIT_S
from makespan.workloads import JobSpec

__all__ = ["Engine"]

# Order of what happens at one instant; the policy is asked last, and then it is known how fast guests go.
_NODE, _COMPLETION, _ARRIVAL, _ASK, _RATE = range(5)

_MAX_IDLE_ROUNDS = 10_000  # rounds without any job on devices before a policy counts as stuck

_ROUNDING = 1e-9  # of a checkpoint interval: a checkpoint due at this very moment counts as written

_NAN = float("nan")


class Engine:
    """Runs a trace under a policy in simulated time.

    An engine for real runs overrides how the end of a restart and of a job become known (`foresee`)
    and how time goes on (`run`); everything else is the same. ``rows`` are those of the events table so far,
    plain tuples in the order of the fields of `Event`; ``finished`` has the jobs that ended, with times [s].

    Parameters
    ----------
    interval_s, checkpoint_interval_s
        Length of a round [s], None to ask after each event; running time between checkpoints [s], None if
        an interruption loses no progress.
    decision_limit_s
        Wall time that one call of the policy may take [s], None for no limit.
    reveals_requests, shares_devices
        Whether users state with a job how long a step takes as requested; whether jobs may be guests.
    """

    def __init__(
        self,
        cluster: ClusterSpec,
        catalogue: Catalogue,
        policy: Policy,
        restart_cost: RestartCost,
        interval_s: float | None,
        checkpoint_interval_s: float | None,
        decision_limit_s: float | None = DECISION_LIMIT_S,
        *,
        reveals_requests: bool = False,
        shares_devices: bool = False,
    ) -> None:
        self.policy = policy
        self.reveals_requests = reveals_requests
        self.adviser = Adviser(policy, decision_limit_s)
        self.cluster_state = ClusterState(
            cluster,
            catalogue,
            restart_cost,
            interval_s,
            shows_remaining_work=policy.is_clairvoyant,
            shares_devices=shares_devices,
        )
        self.view: ClusterView = self.cluster_state.view
        self.policy_state = self.adviser.initial_state(cluster, catalogue)
        self.checkpoint_interval_s = checkpoint_interval_s
        self.rows: list[tuple[Any, ...]] = []
        self.observers: list[Observer] = []
        self.finished: list[tuple[JobView, float]] = []
        self.policy_wall_s = 0.0
        self.n_decisions = self._n_starts = self._n_known_starts = 0
        self.queue: EventQueue[tuple[Callable[..., None], Any, Any]] = EventQueue()
        self.arrivals: list[JobView] = []
        self.n_arrived = 0
        self._ask_times: set[float] = set()
        self._n_node_events_left = 0
        self._idle_rounds = 0
        self._rating_s = _NAN

    # --- the loop ---------------------------------------------------------------------------

    def load(self, jobs: Sequence[JobSpec], extra_steps: float, node_events: Sequence[NodeEvent]) -> None:
        """Enter the trace and the node events, which are checked and in order."""
        order = sorted(jobs, key=lambda job: job.submit_time_s)
        self.arrivals = [
            JobView(job, index, float(job.steps + extra_steps), self.view) for index, job in enumerate(order)
        ]
        if not jobs:
            return
        for node in absent_nodes(node_events):
            self.cluster_state.nodes.fail(node)
            self._record_node(EventKind.NODE_FAILED, node, "absent until it joins")
        self._n_node_events_left = len(node_events)
        for event in node_events:
            if event.notice_s:
                self.queue.push(event.time_s, _NODE, (self._announce, event, None))
            self.queue.push(event.in_force_s, _NODE, (self._change_node, event, None))
        self.push_arrival()

    def run(self) -> None:
        """Handle events until no job is left."""
        queue, pop, advance = self.queue, self.queue.pop, self.cluster_state.advance
        n_jobs, finished = len(self.arrivals), self.finished
        with self.adviser.watch:
            while queue and len(finished) < n_jobs:
                time_s, (handler, first, second) = pop()
                advance(time_s)
                handler(first, second)
        if len(finished) < n_jobs:
            raise self.stalled()
        queue.clear()  # what is out of date refers to the engine, and would keep all of it alive

    def stalled(self) -> StalledError:
        """Return the error that says who waits for ever."""
        waiting = [job.spec.job_id for job in self.view.pending]
        return StalledError(
            f"{known_as(self.policy)} at {self.view.time_s} s: {len(waiting)} job(s) wait and nothing "
            f"will happen any more; the first is {waiting[0]!r}"
        )

    # --- what happens to jobs ---------------------------------------------------------------

    def push_arrival(self) -> None:
        """Expect the next job of the trace."""
        if self.n_arrived < len(self.arrivals):
            job = self.arrivals[self.n_arrived]
            self.n_arrived += 1
            self.queue.push(job.spec.submit_time_s, _ARRIVAL, (self._submit, job, None))

    def _submit(self, job: JobView, _: None) -> None:
        self.cluster_state.submit(job)
        if self.reveals_requests:
            self.cluster_state.reveal(job, self.view.catalogue.requested(job.spec))
        self.record(EventKind.SUBMITTED, job, "trace")
        self.push_arrival()
        self.request_decision()

    @property
    def known_starts(self) -> float:
        """Share of all starts and changes to something whose time the job knew before [1]."""
        return self._n_known_starts / self._n_starts if self._n_starts else _NAN

    def hold(self, job: JobView, allocation: Allocation) -> None:
        """Give devices to a job that has none."""
        self._n_starts += 1
        self._n_known_starts += job.knows(allocation.configuration)
        self.foresee(job, self.cluster_state.hold(job, allocation))

    def go_on(self, job: JobView, allocation: Allocation, ready_s: float) -> None:
        """Give a job where it was what it had just now, shared or no longer; ready at a time [s]."""
        self.cluster_state.hold(job, allocation, max(ready_s, self.view.time_s))
        self.foresee(job, job.ready_time_s, is_ready=ready_s <= self.view.time_s)

    def release(self, job: JobView) -> None:
        """Take the devices of a job."""
        self.cluster_state.release(job)

    def foresee(self, job: JobView, ready_s: float, *, is_ready: bool = False) -> None:
        """Enter the end of a restart [s], if that is still to come, and, from there, the last step."""
        if job.allocation is None:
            return
        if not is_ready:
            self.queue.push(ready_s, _COMPLETION, (self._become_ready, job, job.generation))
        finish_s = job._since_s + job._steps_left * job._step_s
        self.queue.push(finish_s, _COMPLETION, (self._complete, job, job.generation))

    def _become_ready(self, job: JobView, generation: int) -> None:
        if job.generation == generation:
            self.record(EventKind.READY, job, "restart over")

    def _complete(self, job: JobView, generation: int) -> None:
        if job.generation == generation:
            self.finish(job)

    def finish(self, job: JobView) -> None:
        """Let a job end now."""
        self.release(job)
        self.cluster_state.finish(job)
        self.finished.append((job, self.view.time_s))
        self.record(EventKind.FINISHED, job, "last step")
        self._expect_rating()
        self.request_decision()

    def evict(self, jobs: Sequence[JobView]) -> None:
        """Take the devices of jobs, and the progress that no checkpoint holds; they wait again."""
        for job in jobs:
            lost_steps = self._steps_since_checkpoint(job)
            self.release(job)
            self.cluster_state.set_steps_left(job, job._steps_left + lost_steps)
        self.cluster_state.queue_again(jobs)

    # --- what happens to nodes --------------------------------------------------------------

    def _announce(self, event: NodeEvent, _: None) -> None:
        self.cluster_state.announce(event)
        reason = f"{event.kind.value} at {event.in_force_s} s"
        self._record_node(EventKind.CAPACITY_ANNOUNCED, event.node_id, reason, event.n_gpus or 0)
        self.request_decision()

    def _change_node(self, event: NodeEvent, _: None) -> None:
        self._n_node_events_left -= 1
        node, nodes, n_gpus = event.node_id, self.cluster_state.nodes, event.n_gpus or 0
        hit: list[JobView] = []
        if event.kind is NodeEventKind.JOINED:
            nodes.join(node)
            self._record_node(EventKind.NODE_JOINED, node, "joined")
        elif event.kind is NodeEventKind.RETURNED:
            self.cluster_state.change_capacity(event, -n_gpus)
            self._record_node(EventKind.CAPACITY_RETURNED, node, "returned", n_gpus)
        elif event.kind is NodeEventKind.WITHDRAWN:
            hit = self._in_the_way(node, n_gpus)
            self.evict(hit)
            self.cluster_state.change_capacity(event, n_gpus)
            self._record_node(EventKind.CAPACITY_WITHDRAWN, node, "withdrawn", n_gpus)
        else:
            hit = self.cluster_state.holders(node)
            self.evict(hit)
            nodes.fail(node)
            self._record_node(EventKind.NODE_FAILED, node, "failed")
        self.cluster_state.devices_changed(node)
        for job in hit:
            self.record(EventKind.INTERRUPTED, job, f"node {node} {event.kind.value}")
        self._expect_rating()
        self.request_decision()

    def _in_the_way(self, node: int, n_gpus: int) -> list[JobView]:
        """Return who must go for devices of a node to be withdrawn: last started, first out."""
        nodes, hit = self.cluster_state.nodes, []
        if not nodes.up[node]:
            return []
        missing = {False: n_gpus - nodes.free_gpus[node], True: n_gpus - nodes.unshared(node)}  # by is_guest
        for job in reversed(self.cluster_state.holders(node)):
            held = job.allocation
            if held is not None and missing[held.is_guest] > 0:
                hit.append(job)
                missing[held.is_guest] -= dict(held.shares)[node]
        return hit + self._crowded_out(node, n_gpus, hit)

    def _crowded_out(self, node: int, n_gpus: int, gone: Sequence[JobView]) -> list[JobView]:
        """Return the guests that find no memory once devices and jobs are gone: last started, first out."""
        there_bytes = self.view.cluster.nodes[node].gpu.usable_bytes
        left = [job for job in self.cluster_state.holders(node) if job not in gone]
        guests = [job for job in left if job.allocation is not None and job.allocation.is_guest]
        n_devices, hit = self.view.gpus_per_node[node] - n_gpus, list[JobView]()
        while guests:
            kept = [job.allocation for job in left if job not in hit]
            holders, guests_bytes = (found[node] for found in memory_by_device(kept, self.view.n_nodes))
            if crowded_guest(holders, guests_bytes, n_devices, there_bytes) is None:
                break
            hit.append(guests.pop())
        return hit

    def _steps_since_checkpoint(self, job: JobView) -> float:
        if self.checkpoint_interval_s is None or job.allocation is None:
            return 0.0
        elapsed_s, every_s = max(self.view.time_s - job.ready_time_s, 0.0), self.checkpoint_interval_s
        lost_s = elapsed_s - math.floor(elapsed_s / every_s + _ROUNDING) * every_s
        if lost_s <= 0 or not job.allocation.is_guest:
            return max(lost_s, 0.0) / job._step_s
        times_s, steps_left = zip(*job._marks, (self.view.time_s, job._steps_left_now()), strict=True)
        return float(np.interp(self.view.time_s - lost_s, times_s, steps_left) - steps_left[-1])

    # --- guests -----------------------------------------------------------------------------

    def _expect_rating(self) -> None:
        """Look at the end of this instant how fast guests go."""
        if self._rating_s != self.view.time_s and any(self.cluster_state.nodes.guests):
            self._rating_s = self.view.time_s
            self.queue.push(self.view.time_s, _RATE, (self._rate, None, None))

    def _rate(self, _: None, __: None) -> None:
        self._rating_s = _NAN
        for job in self.cluster_state.guests_to_rate():
            if self.cluster_state.pace(job):
                self.foresee(job, job.ready_time_s, is_ready=job.ready_time_s <= self.view.time_s)
                self.record(EventKind.RATED, job, "idle time")

    # --- decisions --------------------------------------------------------------------------

    def request_decision(self) -> None:
        """Ask the policy once everything of this instant has happened, or in the next round."""
        self._ask_at(self.view.time_s)

    def _ask_at(self, time_s: float) -> None:
        if self.view.interval_s is not None:
            time_s = _round_at(time_s, self.view.interval_s)
        if time_s not in self._ask_times:
            self._ask_times.add(time_s)
            self.queue.push(time_s, _ASK, (self._ask, None, None))

    def _ask(self, _: None, __: None) -> None:
        view = self.view
        self._ask_times.discard(view.time_s)
        if self.cluster_state.is_empty:
            return
        began = time.perf_counter()
        decision, self.policy_state = self.adviser.decide(view, self.policy_state)
        self.policy_wall_s += time.perf_counter() - began
        self.n_decisions += 1
        if decision.changes:
            self._apply(decision)
        if decision.wake_up_s is not None:
            self._ask_at(decision.wake_up_s)
        self._check_idle()

    def _check_idle(self) -> None:
        """Stop a policy that is asked again and again and never starts what waits."""
        if self.view.running or self._n_node_events_left or self.n_arrived < len(self.arrivals):
            self._idle_rounds = 0
            return
        self._idle_rounds += 1
        if self._idle_rounds > _MAX_IDLE_ROUNDS:
            raise self.stalled()

    def _apply(self, decision: Decision) -> None:
        changes = checked_changes(decision, self.cluster_state, self.policy)
        suspended = [job for job, new in changes if new is None]
        moved = {job.index for job, new in changes if new is not None and job.allocation is not None}
        ready_s: dict[int, float] = {}  # of those that stay where they are
        for job, new in changes:
            if job.allocation is not None:
                if new is not None and new.beside(job.allocation.is_guest) == job.allocation:
                    ready_s[job.index] = job.ready_time_s
                self.release(job)
        if suspended:
            self.cluster_state.queue_again(suspended)
        self.cluster_state.expect(changes)
        for job, new in changes:
            if new is None:
                self.record(EventKind.SUSPENDED, job, "policy")
                continue
            if job.index in ready_s:
                self.go_on(job, new, ready_s[job.index])
                self.record(EventKind.SHARING, job, "policy")
                continue
            self.hold(job, new)
            self.record(EventKind.RECONFIGURED if job.index in moved else EventKind.STARTED, job, "policy")
        self._expect_rating()

    # --- records ----------------------------------------------------------------------------

    def record(self, kind: EventKind, job: JobView, reason: str) -> None:
        """Note what happened to a job, and tell the observers."""
        held, rows = job.allocation, self.rows
        what = (self.view.time_s, len(rows), kind._value_, job.spec.job_id)
        if held is None:
            rows.append((*what, "", 0, "", reason, "", 0, _NAN, job._steps_left, ""))
        else:
            it, text, shared = held.configuration, job._held_text, ""
            if held.is_guest:
                text, shared = shared, text
            resources = (text, held.n_gpus, it.plan, reason, it.family, it.cpu_threads, job._step_s)
            rows.append((*what, *resources, job._steps_left, shared))
        if self.observers:
            self._tell_observers()

    def _record_node(self, kind: EventKind, node: int, reason: str, n_gpus: int = 0) -> None:
        what = (self.view.time_s, len(self.rows), kind._value_, "")
        self.rows.append((*what, str(node), n_gpus, "", reason, "", 0, _NAN, _NAN, ""))
        if self.observers:
            self._tell_observers()

    def _tell_observers(self) -> None:
        event = Event(*self.rows[-1])
        for observer in self.observers:
            observer.observe(event, self.view)


def _round_at(time_s: float, interval_s: float) -> float:
    """Return the first multiple of the interval that is not before a time."""
    number = math.ceil(time_s / interval_s)
    while number * interval_s < time_s:
        number += 1
    if not math.isfinite(number * interval_s):
        raise InputError(f"no round of {interval_s} s at {time_s} s")
    return number * interval_s
