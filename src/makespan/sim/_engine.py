"""The engine: a heap of events, and the only place where anything changes."""

import heapq
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from makespan.errors import InputError
from makespan.hardware import ClusterSpec
from makespan.sim._catalogue import Allocation, Catalogue
from makespan.sim._decision import checked_changes
from makespan.sim._events import Event, EventKind, NodeEvent, NodeEventKind, Observer
from makespan.sim._inputs import absent_nodes
from makespan.sim._nodes import Nodes
from makespan.sim._policy import Decision, InfeasibleDecision, Policy, StalledError
from makespan.sim._view import ClusterView, JobView
from makespan.workloads import JobSpec

__all__ = ["Engine"]

# Order of what happens at one instant; the policy is asked last.
_NODE, _COMPLETION, _ARRIVAL, _ASK = range(4)

_MAX_IDLE_ROUNDS = 10_000  # rounds without any job on devices before a policy counts as stuck

_ROUNDING = 1e-9  # of a checkpoint interval: a checkpoint due at this very moment counts as written

_NAN = float("nan")


class Engine:
    """All mutable state of one simulation."""

    def __init__(
        self,
        cluster: ClusterSpec,
        catalogue: Catalogue,
        policy: Policy,
        restart_delay_s: float,
        interval_s: float | None,
        checkpoint_interval_s: float | None,
    ) -> None:
        self.policy = policy
        self.nodes = Nodes(cluster)
        self.view = ClusterView(
            cluster,
            catalogue,
            self.nodes,
            restart_delay_s=restart_delay_s,
            interval_s=interval_s,
            shows_remaining_work=policy.is_clairvoyant,
        )
        self.state = policy.initial_state(cluster, catalogue)
        self.checkpoint_interval_s = checkpoint_interval_s
        self.rows: list[tuple[Any, ...]] = []  # of the events table; plain tuples, for speed
        self.observers: list[Observer] = []
        self.finished: list[tuple[JobView, float]] = []
        self.policy_wall_s = 0.0
        self.n_decisions = 0
        self._heap: list[tuple[float, int, int, Callable[..., None], Any, Any]] = []
        self._seq = 0
        self._ask_times: set[float] = set()
        self._arrivals: list[JobView] = []
        self._n_arrived = 0
        self._n_node_events_left = 0
        self._idle_rounds = 0

    # --- the loop ---------------------------------------------------------------------------

    def load(self, jobs: Sequence[JobSpec], extra_steps: int, failures: Sequence[NodeEvent]) -> None:
        """Put the trace and the node events in the heap."""
        order = sorted(jobs, key=lambda job: job.submit_time_s)
        self._arrivals = [
            JobView(job, index, float(job.steps + extra_steps), self.view) for index, job in enumerate(order)
        ]
        if not jobs:
            return
        for node in absent_nodes(failures):
            self.nodes.fail(node)
            self._record_node(EventKind.NODE_FAILED.value, node, "absent until it joins")
        self._n_node_events_left = len(failures)
        for event in failures:
            self._push(event.time_s, _NODE, self._change_node, event, None)
        self._push_arrival()

    def run(self) -> None:
        """Handle events until no job is left."""
        heap, view = self._heap, self.view
        n_jobs, finished = len(self._arrivals), self.finished
        while heap and len(finished) < n_jobs:
            view.time_s, _, _, handler, first, second = heapq.heappop(heap)
            handler(first, second)
        if len(finished) < n_jobs:
            raise self._stalled()

    def _push(
        self, time_s: float, priority: int, handler: Callable[..., None], first: Any, second: Any
    ) -> None:
        self._seq += 1
        heapq.heappush(self._heap, (time_s, priority, self._seq, handler, first, second))

    def _stalled(self) -> StalledError:
        waiting = [job.spec.job_id for job in self.view.pending]
        return StalledError(
            f"policy {self.policy.name!r} at {self.view.time_s} s: {len(waiting)} job(s) wait and nothing "
            f"will happen any more; the first is {waiting[0]!r}"
        )

    # --- what happens to jobs ---------------------------------------------------------------

    def _push_arrival(self) -> None:
        if self._n_arrived < len(self._arrivals):
            job = self._arrivals[self._n_arrived]
            self._n_arrived += 1
            self._push(job.spec.submit_time_s, _ARRIVAL, self._submit, job, None)

    def _submit(self, job: JobView, _: None) -> None:
        self.view._pending[job.spec.job_id] = job
        self._record(EventKind.SUBMITTED.value, job, "trace")
        self._push_arrival()
        self._request_decision()

    def _become_ready(self, job: JobView, generation: int) -> None:
        if job._generation == generation:
            self._record(EventKind.READY.value, job, "restart over")

    def _finish(self, job: JobView, generation: int) -> None:
        if job._generation != generation:
            return
        self._release(job)
        job._steps_left = 0.0
        job.waiting_since_s = _NAN
        del self.view._running[job.spec.job_id]
        self.finished.append((job, self.view.time_s))
        self._record(EventKind.FINISHED.value, job, "last step")
        self._request_decision()

    def _release(self, job: JobView) -> None:
        """Take the devices of a job and settle its progress and times."""
        held = job.allocation
        if held is None:
            return
        now_s = self.view.time_s
        job._steps_left = job._steps_left_now()
        job._running_s = job.running_time_s
        job._restart_s = job.restart_time_s
        job._held_gpu_s = job.attained_service_gpu_s
        self.nodes.move(held, 1)
        job.allocation = None
        job.held_since_s = job.ready_time_s = _NAN
        job.waiting_since_s = now_s
        job._generation += 1

    def _hold(self, job: JobView, allocation: Allocation) -> None:
        """Give devices to a job that has none, and foresee its completion."""
        now_s = self.view.time_s
        job._waiting_s += now_s - job.waiting_since_s
        job.waiting_since_s = _NAN
        job.allocation = allocation
        job._held_text = allocation.text
        job.held_since_s = now_s
        job.ready_time_s = ready_s = now_s + self.view.restart_delay_s
        if job.first_start_s is None:
            job.first_start_s = now_s
        else:
            job.restart_count += 1
        generation = job._generation
        self._push(ready_s, _COMPLETION, self._become_ready, job, generation)
        finish_s = ready_s + job._steps_left * allocation.configuration.iter_time_s
        self._push(finish_s, _COMPLETION, self._finish, job, generation)

    def _queue_again(self, jobs: Sequence[JobView]) -> None:
        """Put jobs that lost their devices back to their places in the queue."""
        pending = self.view._pending
        for job in jobs:
            del self.view._running[job.spec.job_id]
            pending[job.spec.job_id] = job
        for job in sorted(pending.values(), key=lambda job: job.index):
            pending.move_to_end(job.spec.job_id)

    # --- what happens to nodes --------------------------------------------------------------

    def _change_node(self, event: NodeEvent, _: None) -> None:
        self._n_node_events_left -= 1
        if event.kind is NodeEventKind.JOINED:
            self.nodes.join(event.node_id)
            self._record_node(EventKind.NODE_JOINED.value, event.node_id, "joined")
        else:
            self._fail(event.node_id)
        self._request_decision()

    def _fail(self, node: int) -> None:
        running = self.view._running.values()
        hit = [job for job in running if job.allocation is not None and node in job.allocation.nodes]
        for job in hit:
            lost_steps = self._steps_since_checkpoint(job)
            self._release(job)
            job._steps_left += lost_steps
        self.nodes.fail(node)
        self._queue_again(hit)
        self._record_node(EventKind.NODE_FAILED.value, node, "failed")
        for job in hit:
            self._record(EventKind.INTERRUPTED.value, job, f"node {node} failed")

    def _steps_since_checkpoint(self, job: JobView) -> float:
        if self.checkpoint_interval_s is None or job.allocation is None:
            return 0.0
        elapsed_s, every_s = max(self.view.time_s - job.ready_time_s, 0.0), self.checkpoint_interval_s
        lost_s = elapsed_s - math.floor(elapsed_s / every_s + _ROUNDING) * every_s
        return max(lost_s, 0.0) / job.allocation.configuration.iter_time_s

    # --- decisions --------------------------------------------------------------------------

    def _request_decision(self) -> None:
        now_s = self.view.time_s
        self._ask_at(now_s if self.view.interval_s is None else _round_at(now_s, self.view.interval_s))

    def _ask_at(self, time_s: float) -> None:
        if time_s not in self._ask_times:
            self._ask_times.add(time_s)
            self._push(time_s, _ASK, self._ask, None, None)

    def _ask(self, _: None, __: None) -> None:
        view = self.view
        self._ask_times.discard(view.time_s)
        if not view._pending and not view._running:
            return
        began = time.perf_counter()
        decision, self.state = self.policy.decide(view, self.state)
        self.policy_wall_s += time.perf_counter() - began
        self.n_decisions += 1
        if decision.changes:
            self._apply(decision)
        self._ask_again(decision)

    def _ask_again(self, decision: Decision) -> None:
        view = self.view
        if decision.wake_up_s is not None:
            if not decision.wake_up_s > view.time_s:
                raise InfeasibleDecision(
                    f"policy {self.policy.name!r} at {view.time_s} s: wake_up_s is {decision.wake_up_s!r}; "
                    "accepted: a later time",
                    view,
                )
            wanted_s = decision.wake_up_s
            self._ask_at(wanted_s if view.interval_s is None else _round_at(wanted_s, view.interval_s))
        self._check_idle()

    def _check_idle(self) -> None:
        """Stop a policy that is asked again and again and never starts what waits."""
        if self.view._running or self._n_node_events_left or self._n_arrived < len(self._arrivals):
            self._idle_rounds = 0
            return
        self._idle_rounds += 1
        if self._idle_rounds > _MAX_IDLE_ROUNDS:
            raise self._stalled()

    def _apply(self, decision: Decision) -> None:
        changes = checked_changes(decision, self.view, self.nodes, self.policy)
        suspended = [job for job, new in changes if new is None]
        moved = {job.index for job, new in changes if new is not None and job.allocation is not None}
        for job, _ in changes:
            self._release(job)
        if suspended:
            self._queue_again(suspended)
        for job, new in changes:
            if new is None:
                self._record(EventKind.SUSPENDED.value, job, "policy")
                continue
            if job.index not in moved:
                self.view._running[job.spec.job_id] = self.view._pending.pop(job.spec.job_id)
            self.nodes.move(new, -1)
            self._hold(job, new)
            self._record(
                EventKind.RECONFIGURED.value if job.index in moved else EventKind.STARTED.value, job, "policy"
            )

    # --- records ----------------------------------------------------------------------------

    def _record(self, kind: str, job: JobView, reason: str) -> None:
        held = job.allocation
        if held is None:
            resources = ("", 0, "", reason, "", 0, _NAN)
        else:
            it = held.configuration
            text = job._held_text
            resources = (text, it.n_gpus, it.plan, reason, it.family, it.cpu_threads, it.iter_time_s)
        self._tell(kind, job.spec.job_id, resources, job._steps_left)

    def _record_node(self, kind: str, node: int, reason: str) -> None:
        self._tell(kind, "", (str(node), 0, "", reason, "", 0, _NAN), _NAN)

    def _tell(self, kind: str, job_id: str, resources: tuple[Any, ...], steps_left: float) -> None:
        rows = self.rows
        rows.append((self.view.time_s, len(rows), kind, job_id, *resources, steps_left))
        if self.observers:
            event = Event(*rows[-1])
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
