"""Segments of live jobs: processes between a start and a stop, their slots, and who trains."""

import heapq
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Literal, Protocol

from makespan.errors import unknown_name
from makespan.hardware import NodeSpec
from makespan.plans import ExecutionPlan
from makespan.profiling import ProfilePoint, model_of, point_plan
from makespan.runtime import (
    Launcher,
    LocalLauncher,
    RunDirectory,
    SlurmLauncher,
    check_gpus,
    latest_checkpoint,
)
from makespan.sim import Configuration
from makespan.training import RunResult, TrainingJob, read_progress, request_stop, train
from makespan.workloads import JobSpec, workload

__all__ = [
    "Executor", "LaunchOn", "ProcessTrainer", "Segment", "SegmentEnd", "SegmentResult", "Target", "Trainer",
    "configuration_plan", "slots_of", "steady_wall_s",
]  # fmt: skip

_KILL_WAIT_S = 10.0


@dataclass(frozen=True, slots=True)
class Segment:
    """One stretch of a job: processes under one plan, from their start to their end.

    It serves the allocation of a ``generation``, a number that grows with each change of the job.
    """

    job: JobSpec
    generation: int
    configuration: Configuration
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SegmentResult:
    """What a segment did.

    Steps of the job that are done, counted from its very first one; steps of this segment, wall time
    that so many take once they are warm, with checkpoints between them [s], and loss of the last of them,
    NaN without any.
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

        A `WorkerError` says that a process died; the job can continue from its newest checkpoint.
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

    def _drain(self, limit_s: float, end_it: Callable[[Segment], None]) -> list[SegmentEnd]:
        ends: list[SegmentEnd] = []
        deadline = time.monotonic() + limit_s
        while self._active and time.monotonic() < deadline:
            for segment in self._active.values():
                end_it(segment)
            if (end := self.next_end(0.1)) is not None:
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


LaunchOn = Callable[[tuple[int, ...]], Launcher]
"""From slots to the launcher whose processes use them."""


def _local_slots(device: Literal["cpu", "cuda"]) -> LaunchOn:
    """Choose launchers on this machine: a slot is a CPU core, or a GPU."""
    if device == "cuda":
        return lambda slots: LocalLauncher(device="cuda", gpus=slots)
    cpus = sorted(os.sched_getaffinity(0))
    return lambda slots: LocalLauncher(cpus=tuple(cpus[slot % len(cpus)] for slot in slots))


def _slurm_slots(device: Literal["cpu", "cuda"]) -> LaunchOn:
    """Choose launchers inside an allocation of Slurm: a slot is a task with a device that no other has."""

    def launcher(slots: tuple[int, ...]) -> Launcher:
        gpus = (f"--gres=gpu:{len(slots)}",) if device == "cuda" else ()
        options = ("--nodes=1", "--exact", "--cpus-per-task=1", "--mem=0", *gpus)
        return SlurmLauncher(device, options, threads_per_process=1)

    return launcher


def slots_of(launcher: str, device: str, n_slots: int) -> LaunchOn:
    """Choose launchers by name; an `InputError` says that there are fewer GPUs here than slots."""
    known = {"local": _local_slots, "slurm": _slurm_slots}
    if launcher not in known:
        raise unknown_name("launcher", launcher, known)
    if device not in ("cpu", "cuda"):
        raise unknown_name("device", device, ("cpu", "cuda"))
    if (launcher, device) == ("local", "cuda"):
        check_gpus(LocalLauncher("cuda"), n_slots)
    return known[launcher]("cuda" if device == "cuda" else "cpu")


def steady_wall_s(result: RunResult) -> float:
    """Wall time of as many steps once they are warm, with checkpoints between them [s].

    A slow first step, and the checkpoint at the end, belong to the restart.
    """
    warm = result.paces_s[1:] or result.paces_s
    return len(result.paces_s) * fmean(warm) + sum(result.save_s[:-1]) if warm else 0.0


def configuration_plan(item: Configuration, node: NodeSpec) -> ExecutionPlan:
    """Return the execution plan of a configuration, with the micro-batch size of the profile."""
    point = ProfilePoint(item.plan, item.placement, item.cpu_threads)
    return point_plan(point, workload(item.workload), node)


class ProcessTrainer:
    """Trains small models in processes of their own.

    It keeps run directories and checkpoints in ``directory``, has the seed of each job and the steps
    between the checkpoints of each workload, and kills processes only if they are on this machine.
    """

    def __init__(
        self,
        directory: Path,
        node: NodeSpec,
        launch_on: LaunchOn,
        seeds: Mapping[str, int],
        checkpoint_every: Mapping[str, int],
        *,
        is_here: bool = True,
    ) -> None:
        self._directory, self._node, self._launch_on = directory, node, launch_on
        self._seeds, self._checkpoint_every, self._is_here = seeds, checkpoint_every, is_here

    def train(self, segment: Segment) -> SegmentResult:
        """Run a segment; see `Trainer.train`."""
        name, key = segment.job.job_id, segment.job.workload
        checkpoints = self._checkpoints(segment.job)
        checkpoints.mkdir(parents=True, exist_ok=True)
        model, plan = model_of(workload(key)), configuration_plan(segment.configuration, self._node)
        seed, every = self._seeds[name], self._checkpoint_every.get(key, 0)
        job = TrainingJob(model, plan, segment.job.steps, seed, seed, checkpoint_every=every)
        saved = self.saved_steps(segment.job)
        if saved >= segment.job.steps:  # it ended with its last step, but nobody was there to note it
            return SegmentResult(saved, 0, 0.0, float("nan"))
        result = train(
            job,
            launcher=self._launch_on(segment.slots),
            run_dir=self._run_dir(segment),
            checkpoint_dir=checkpoints,
            resume=checkpoints if saved else None,
        )
        loss = result.losses[-1] if result.losses else float("nan")
        return SegmentResult(result.last_step, len(result.losses), steady_wall_s(result), loss)

    def stop(self, segment: Segment) -> None:
        """Ask a segment to stop; see `Trainer.stop`."""
        with suppress(FileNotFoundError):  # it is only about to begin; the next request finds it
            request_stop(self._run_dir(segment))

    def kill(self, segment: Segment) -> None:
        """Kill the processes of a segment, if they are here and have reported themselves."""
        pids = RunDirectory(self._run_dir(segment)).meeting() if self._is_here else None
        for pid in pids or ():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    def steps_done(self, segment: Segment) -> int | None:
        """Return the steps that are done; see `Trainer.steps_done`."""
        progress = read_progress(self._run_dir(segment))
        return None if progress is None else progress.step

    def saved_steps(self, job: JobSpec) -> int:
        """Return the steps of the newest checkpoint; see `Trainer.saved_steps`."""
        newest = latest_checkpoint(self._checkpoints(job))
        return 0 if newest is None else newest.step

    def _run_dir(self, segment: Segment) -> Path:
        return self._directory / segment.job.job_id / f"segment-{segment.generation}"

    def _checkpoints(self, job: JobSpec) -> Path:
        return self._directory / job.job_id / "checkpoints"
