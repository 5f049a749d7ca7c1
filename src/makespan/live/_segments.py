"""Segments of live jobs: processes between a start and a stop, and the slots on which they run."""

import heapq
import queue
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from makespan.sim import Configuration
from makespan.workloads import JobSpec

__all__ = ["Executor", "Segment", "SegmentEnd", "SegmentResult", "Target", "Trainer"]

_KILL_WAIT_S = 10.0


@dataclass(frozen=True, slots=True)
class Segment:
    """One stretch of a job: processes under one plan, from their start to their end.

    Parameters
    ----------
    job
        The job as submitted.
    generation
        Number of the allocation that it serves, growing with each change of the job.
    configuration
        Plan and devices.
    slots
        Slots that its processes use.
    """

    job: JobSpec
    generation: int
    configuration: Configuration
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SegmentResult:
    """What a segment did.

    Parameters
    ----------
    steps_done
        Optimiser steps of the job that are done, counted from its very first one.
    n_steps
        Steps of this segment.
    step_wall_s
        Wall time that so many steps take once they are warm [s].
    loss
        Loss of the last of them; NaN without any.
    """

    steps_done: int
    n_steps: int
    step_wall_s: float
    loss: float


@dataclass(frozen=True, slots=True)
class SegmentEnd:
    """The end of a segment, with its result or the error that ended it."""

    segment: Segment
    result: SegmentResult | None
    error: Exception | None


@dataclass(frozen=True, slots=True)
class Target:
    """What a job shall run as."""

    job: JobSpec
    generation: int
    configuration: Configuration


class Trainer(Protocol):
    """Whatever runs segments: real processes, or a stand-in for tests.

    A segment of a job that has a checkpoint continues from the newest one.
    """

    def train(self, segment: Segment) -> SegmentResult:
        """Run a segment and wait for its end: the last step of the job, or a stop request.

        Raises
        ------
        WorkerError
            A process died; the job can continue from its newest checkpoint.
        """

    def stop(self, segment: Segment) -> None:
        """Ask a segment to write a checkpoint and end; may be called more than once."""

    def kill(self, segment: Segment) -> None:
        """End the processes of a segment at once."""

    def steps_done(self, segment: Segment) -> int | None:
        """Return the steps of the job that are done; None before the segment is ready to train."""

    def saved_steps(self, job: JobSpec) -> int:
        """Return the steps in the newest checkpoint of a job, 0 without one."""


class Executor:
    """Runs segments in threads so that jobs come to run as they should.

    A job changes by stopping its segment and starting another one as soon as enough slots are free.

    Parameters
    ----------
    trainer
        Runs the segments.
    n_slots
        Slots of the machine.
    """

    def __init__(self, trainer: Trainer, n_slots: int) -> None:
        self.trainer = trainer
        self._free = list(range(n_slots))
        self._active: dict[str, Segment] = {}
        self._ends: queue.SimpleQueue[SegmentEnd] = queue.SimpleQueue()

    @property
    def active(self) -> tuple[Segment, ...]:
        """Segments that run or are being stopped."""
        return tuple(self._active.values())

    def reconcile(self, targets: Mapping[str, Target]) -> None:
        """Stop segments that serve no target any more, and start those for which slots are free."""
        for job_id, segment in self._active.items():
            target = targets.get(job_id)
            if target is None or target.generation != segment.generation:
                self.trainer.stop(segment)
        for job_id, target in targets.items():
            if job_id not in self._active and target.configuration.n_gpus <= len(self._free):
                slots = tuple(heapq.heappop(self._free) for _ in range(target.configuration.n_gpus))
                self._start(Segment(target.job, target.generation, target.configuration, slots))

    def next_end(self, timeout_s: float) -> SegmentEnd | None:
        """Wait for the end of a segment and free its slots; None if none ends in time."""
        try:
            end = self._ends.get(timeout=max(timeout_s, 0.0))
        except queue.Empty:
            return None
        del self._active[end.segment.job.job_id]
        for slot in end.segment.slots:
            heapq.heappush(self._free, slot)
        return end

    def shut_down(self, grace_s: float) -> list[SegmentEnd]:
        """Stop all segments, kill those that do not end within a time [s], and return their ends."""
        ends = self._drain(grace_s, self.trainer.stop)
        return ends + self._drain(_KILL_WAIT_S, self.trainer.kill) if self._active else ends

    def _drain(self, limit_s: float, end_it: "_Ending") -> list[SegmentEnd]:
        ends: list[SegmentEnd] = []
        deadline = time.monotonic() + limit_s
        while self._active and time.monotonic() < deadline:
            for segment in self._active.values():
                end_it(segment)
            end = self.next_end(0.1)
            if end is not None:
                ends.append(end)
        return ends

    def _start(self, segment: Segment) -> None:
        self._active[segment.job.job_id] = segment
        name = f"{segment.job.job_id}-{segment.generation}"
        threading.Thread(target=self._work, args=(segment,), name=name, daemon=True).start()

    def _work(self, segment: Segment) -> None:
        # Inherited by the processes: an interrupt from the keyboard reaches the scheduler alone,
        # which then lets them write their checkpoints.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._ends.put(SegmentEnd(segment, self.trainer.train(segment), None))
        except Exception as error:  # noqa: BLE001 - whatever it is, the scheduler must hear of it
            self._ends.put(SegmentEnd(segment, None, error))


class _Ending(Protocol):
    def __call__(self, segment: Segment) -> None: ...
