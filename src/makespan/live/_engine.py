"""The engine of the simulator, driven by a clock on the wall and by processes that really train."""

import logging
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from makespan.errors import MakespanError, WorkerError
from makespan.hardware import ClusterSpec
from makespan.live._segments import Executor, Segment, SegmentEnd, Target
from makespan.sim import (
    DECISION_LIMIT_S,
    Allocation,
    Catalogue,
    Engine,
    EventKind,
    JobView,
    NodeEvent,
    Policy,
    RestartCost,
)
from makespan.workloads import JobSpec

__all__ = ["LiveClock", "LiveEngine", "LiveJob"]

_POLL_WALL_S = 0.1
_SAVE_EVERY_WALL_S = 2.0
_MAX_LOSSES = 3  # processes of a job that die one after the other without a step kept between them
_log = logging.getLogger(__name__)


class LiveClock:
    """Time of a live run: wall time since its beginning, pauses left out, times a scale."""

    def __init__(self, scale: float = 1.0, start_s: float = 0.0) -> None:
        self.scale = scale
        self._start_s = start_s
        self._began = time.monotonic()

    def now_s(self) -> float:
        """Return the time of the schedule [s]."""
        return self._start_s + self.scale * (time.monotonic() - self._began)

    def wall_s(self, time_s: float) -> float:
        """Return the wall time until a time of the schedule [s], 0 if it is over."""
        return max(time_s - self.now_s(), 0.0) / self.scale


class LiveJob(JobView):
    """A job whose steps are counted by its processes instead of foreseen."""

    __slots__ = ()

    @property
    def steps_done(self) -> int:
        """Steps that its processes have done."""
        return round(self.spec.steps - self._steps_left)

    def _steps_left_now(self) -> float:
        return self._steps_left


class LiveEngine(Engine):
    """Runs a trace for real: decisions as in the simulator, everything else as it happens.

    Arrivals and requests for decisions wait in the queue of the simulator. What the simulator
    foresees, restarts that are over and last steps, comes from the processes. ``overheads_s`` is, of each
    segment that ended well, the time that its job held devices for it, less that of as many warm steps [s];
    ``began_at`` is the time of day before the first job started.
    """

    def __init__(
        self,
        cluster: ClusterSpec,
        catalogue: Catalogue,
        policy: Policy,
        restart_cost: RestartCost,
        interval_s: float | None,
        executor: Executor,
        clock: LiveClock,
        save: Callable[["LiveEngine"], None] = lambda engine: None,
        decision_limit_s: float | None = DECISION_LIMIT_S,
    ) -> None:
        super().__init__(cluster, catalogue, policy, restart_cost, interval_s, None, decision_limit_s)
        self.began_at = datetime.now(UTC).isoformat(timespec="milliseconds")
        self.overheads_s: list[float] = []
        self.jobs: dict[str, LiveJob] = {}
        self.final_losses: dict[str, float] = {}
        self._executor = executor
        self._clock = clock
        self._save = save
        self._saved = (-1, 0.0)
        self._ready: set[tuple[str, int]] = set()
        self._held: dict[tuple[str, int], list[float]] = {}
        self._losses: dict[str, tuple[int, int]] = {}

    # --- the loop ---------------------------------------------------------------------------

    def load(
        self, jobs: Sequence[JobSpec], extra_steps: float = 0, node_events: Sequence[NodeEvent] = ()
    ) -> None:
        """Take in the trace; live jobs run exactly their steps, and nodes do not fail on schedule."""
        if extra_steps or node_events:
            raise MakespanError("a live run knows neither extra steps nor planned failures")
        order = sorted(jobs, key=lambda job: job.submit_time_s)
        self.jobs = {
            job.job_id: LiveJob(job, index, float(job.steps), self.view) for index, job in enumerate(order)
        }
        self.final_losses = dict.fromkeys(self.jobs, float("nan"))
        self.arrivals = list(self.jobs.values())
        self.push_arrival()

    def begin_after(self, n_arrived: int) -> None:
        """Expect only the arrivals behind the first few, which came before this process took over."""
        self.queue.clear()
        self.n_arrived = n_arrived
        self.push_arrival()
        self.request_decision()

    def wait_again(self, job: LiveJob, reason: str | None) -> None:
        """Queue a job with the steps of its newest checkpoint; a reason says how it lost devices."""
        self._count(job, self._executor.trainer.saved_steps(job.spec))
        self.cluster_state.submit(job)
        if reason is not None:
            self.record(EventKind.INTERRUPTED, job, reason)

    def run(self) -> None:
        """Run until no job is left; stop all processes, with checkpoints, if that is not to be."""
        try:
            with self.adviser.watch:
                self._handle_due(self._clock.now_s())
                while len(self.finished) < len(self.arrivals):
                    self._turn()
            self._save(self)
        except BaseException:
            self.shut_down()
            raise

    def shut_down(self, grace_s: float = 30.0) -> None:
        """End all processes, with checkpoints where they write them in time [s], and save the state."""
        for end in self._executor.shut_down(grace_s):
            self._note_end(end)
        self.cluster_state.advance(max(self.view.time_s, self._clock.now_s()))
        self._save(self)

    def _turn(self) -> None:
        self._executor.reconcile(self._targets())
        self._save_now_and_then()
        end = self._executor.next_end(min(self._clock.wall_s(self.queue.next_time_s()), _POLL_WALL_S))
        now_s = self._clock.now_s()
        self._handle_due(now_s)
        self.cluster_state.advance(now_s)
        if end is not None:
            self._take_end(end)
        self._look()
        self._handle_due(now_s)
        is_idle = not (self.queue or self.view.running or self._executor.active)
        if is_idle and len(self.finished) < len(self.arrivals):
            raise self.stalled()

    def foresee(self, job: JobView, ready_s: float, *, is_ready: bool = False) -> None:
        """Enter nothing: the processes will tell."""

    def _handle_due(self, now_s: float) -> None:
        while self.queue.next_time_s() <= now_s:
            time_s, (handler, first, second) = self.queue.pop()
            self.cluster_state.advance(time_s)
            handler(first, second)

    def _targets(self) -> dict[str, Target]:
        return {
            job.spec.job_id: Target(job.spec, job.generation, job.allocation.configuration)
            for job in self.view.running
            if job.allocation is not None
        }

    def _save_now_and_then(self) -> None:
        rows, when = self._saved
        now = time.monotonic()
        if rows != len(self.rows) or now - when > _SAVE_EVERY_WALL_S:
            self._saved = (len(self.rows), now)
            self._save(self)

    # --- what processes tell ----------------------------------------------------------------

    def _look(self) -> None:
        """Count steps, and see which restarts are over."""
        for segment in self._executor.active:
            done = self._executor.trainer.steps_done(segment)
            if done is None:
                continue
            job = self.jobs[segment.job.job_id]
            self._count(job, done)
            key = (segment.job.job_id, segment.generation)
            if self._is_current(segment) and key not in self._ready:
                self._ready.add(key)
                self.cluster_state.set_ready(job, self.view.time_s)
                self.record(EventKind.READY, job, "processes train")
        for view in self.view.running:
            if (view.spec.job_id, view.generation) not in self._ready:
                self.cluster_state.set_ready(view, max(view.ready_time_s, self.view.time_s))

    def _take_end(self, end: SegmentEnd) -> None:
        """Let a job finish, go on under its next plan, or wait after a loss."""
        job = self.jobs[end.segment.job.job_id]
        self._note_end(end)
        if end.error is not None:
            self._count_loss(end, job)
        if job.steps_done >= job.spec.steps:
            self.finish(job)
        elif self._is_current(end.segment):
            reason = "stopped from outside" if end.error is None else str(end.error).splitlines()[0]
            self.evict([job])
            self.record(EventKind.INTERRUPTED, job, reason)
            self.request_decision()

    def _note_end(self, end: SegmentEnd) -> None:
        job = self.jobs[end.segment.job.job_id]
        if end.result is None:
            self._count(job, self._executor.trainer.saved_steps(job.spec))
            return
        self._count(job, end.result.steps_done)
        if end.result.n_steps:
            self.final_losses[job.spec.job_id] = end.result.loss
        self._note_overhead(end.segment, end.result.step_wall_s)

    def _note_overhead(self, segment: Segment, step_wall_s: float) -> None:
        held = self._held.get((segment.job.job_id, segment.generation))
        if held is not None:
            until_s = held[1] if len(held) > 1 else self.view.time_s
            self.overheads_s.append(until_s - held[0] - step_wall_s * self._clock.scale)

    def _count_loss(self, end: SegmentEnd, job: LiveJob) -> None:
        """Give up, with the error, on a job that dies again and again where it is."""
        if not isinstance(end.error, WorkerError):
            raise end.error if end.error is not None else MakespanError("a segment ended without result")
        kept = job.steps_done
        before, count = self._losses.get(job.spec.job_id, (kept, 0))
        count = count + 1 if before == kept else 1
        self._losses[job.spec.job_id] = (kept, count)
        _log.warning("job %s lost its processes at step %d: %s", job.spec.job_id, kept, end.error)
        if count >= _MAX_LOSSES:
            raise end.error

    def _is_current(self, segment: Segment) -> bool:
        job = self.jobs[segment.job.job_id]
        return job.allocation is not None and job.generation == segment.generation

    # --- what happens to jobs ---------------------------------------------------------------

    def _count(self, job: LiveJob, done: int) -> None:
        self.cluster_state.set_steps_left(job, float(job.spec.steps - done))

    def hold(self, job: JobView, allocation: Allocation) -> None:
        """Give devices to a job, and note since when it holds them."""
        super().hold(job, allocation)
        self._held[(job.spec.job_id, job.generation)] = [job.held_since_s]

    def release(self, job: JobView) -> None:
        """Take the devices of a job, and note until when it held them."""
        if job.allocation is not None:
            self._held[(job.spec.job_id, job.generation)].append(self.view.time_s)
        super().release(job)
