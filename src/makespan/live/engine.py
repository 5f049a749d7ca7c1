"""Live engine: the simulator's engine driven by a wall clock and by processes that really train.

Segments run in threads of an `Executor`; the `LiveEngine` counts steps and losses as the processes report
them, and saves its state so that another process can resume the run.
"""

import heapq
import logging
import math
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, Protocol

from makespan.errors import InputError, MakespanError, TrainingError, WorkerError, unknown_name
from makespan.files import read_json, write_json
from makespan.hardware import NodeSpec
from makespan.plans import ExecutionPlan
from makespan.profiling import ProfilePoint, model_of, point_plan
from makespan.runtime import (
    Launcher,
    LocalLauncher,
    SlurmLauncher,
    check_gpus,
    latest_checkpoint,
)
from makespan.sim import (
    RECOVERY_KINDS,
    Configuration,
    Engine,
    EventKind,
    JobView,
    Loss,
    LossOutcome,
    NodeEvent,
    NodeEventKind,
    Policy,
    RecoveryKind,
    Scenario,
    absent_nodes,
    ordered_node_events,
)
from makespan.training import RunResult, TrainingJob, read_progress, request_stop, train
from makespan.workloads import JobSpec, workload

_log = logging.getLogger(__name__)


# --- Segments ---------------------------------------------------------------------------------------

_KILL_WAIT_S = 10.0
_NODE_KILL_WAIT_S = 60.0  # for processes that get SIGKILL, on a machine that may be busy
_KILL_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Segment:
    """One segment of a job: its processes under one plan, from their start to their end.

    A segment serves one allocation, whose ``generation`` increases with each change of the job.
    """

    job: JobSpec
    generation: int
    configuration: Configuration
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SegmentResult:
    """Result of a segment.

    ``steps_done`` is the number of steps of the job in total, ``n_steps`` that of this segment;
    ``step_wall_s`` is the wall time of as many warm steps, with the checkpoints between them [s], NaN if
    unknown; ``loss`` is that of the last step, NaN without steps.
    """

    steps_done: int
    n_steps: int
    step_wall_s: float
    loss: float


@dataclass(frozen=True, slots=True)
class SegmentEnd:
    """End of a segment, with its result or the error that ended it."""

    segment: Segment
    result: SegmentResult | None
    error: Exception | None


@dataclass(frozen=True, slots=True)
class Target:
    """Configuration that the policy has chosen for a job, and the slots on each node, by its number."""

    job: JobSpec
    generation: int
    configuration: Configuration
    shares: tuple[tuple[int, int], ...]


class Trainer(Protocol):
    """Interface that runs segments: with real processes, or with a stand-in in tests.

    A segment of a job with checkpoints resumes from the newest one.
    """

    def train(self, segment: Segment) -> SegmentResult:
        """Run a segment and wait for its end: the last step of the job, or a stop request.

        A `WorkerError` is raised if a process crashed; the job can resume from its newest checkpoint.
        """

    def stop(self, segment: Segment) -> None:
        """Request that a segment writes a checkpoint and ends; may be called repeatedly."""

    def kill(self, segment: Segment) -> None:
        """Kill the processes of a segment, now and those that are still to start; may be called repeatedly.

        `train` then raises a `WorkerError`, or returns if the processes had ended before.
        """

    def steps_done(self, segment: Segment) -> int | None:
        """Return the steps done of the job; None before the segment is ready to train."""

    def saved_steps(self, job: JobSpec) -> int:
        """Return the steps in the newest checkpoint of a job, 0 without one."""


class SurvivingTrainer(Trainer, Protocol):
    """Trainer whose segments survive the loss of some of their processes; jobs with such a recovery need it.

    After a loss the processes that are left keep the state of the job in memory. The segment goes on under
    another generation, and `Trainer.train` returns once, at the end.
    """

    def lose(self, segment: Segment, slots: Collection[int], *, waits: bool) -> bool:
        """Kill the processes on slots, and return once they have ended; False if the segment has ended.

        With ``waits`` the others stop, and wait for `resume` or a stop request. `Trainer.steps_done` is None
        until they train again.
        """

    def resume(self, segment: Segment, before: Segment) -> None:
        """Let a segment that lost slots, ``before``, go on as another one, which has some of its slots.

        Processes on the slots that it does not have leave, and keep them until they have left.
        """

    def join(self, segment: Segment, slots: Collection[int]) -> None:
        """Start a process on each slot that a segment has got; training goes on meanwhile."""

    def has_left(self, segment: Segment, slot: int) -> bool:
        """Tell whether the process on a slot has ended."""

    def crashed(self, segment: Segment) -> tuple[int, ...]:
        """Return the slots of a segment whose processes have crashed while others go on."""


class Executor:
    """Runs segments in threads until every job runs under its target.

    The slots are spread evenly over the nodes, in the order of their numbers. To change a job, its segment is
    stopped and another one started as soon as enough slots are free on its nodes. A slot is either free or
    held by exactly one active segment; it becomes free when the end of that segment is taken.

    A segment that survives the loss of slots waits for the next target of its job. It goes on with the slots
    that this target leaves to it, gives back the others, and gets further ones as soon as they are free. If
    none is left to it, it writes a checkpoint.
    """

    def __init__(self, trainer: Trainer, n_slots: int, n_nodes: int = 1) -> None:
        self.trainer: Any = trainer  # a `SurvivingTrainer` if jobs survive losses
        self.waiting: set[str] = set()  # jobs that lost slots, and wait for their next target
        self._leaving: dict[str, list[int]] = {}  # slots of processes that leave, by job
        self._per_node = n_slots // n_nodes
        self._free = [  # of each node
            list(range(node * self._per_node, (node + 1) * self._per_node)) for node in range(n_nodes)
        ]
        self._active: dict[str, Segment] = {}
        self._ends: queue.SimpleQueue[SegmentEnd] = queue.SimpleQueue()

    @property
    def active(self) -> tuple[Segment, ...]:
        """Segments that run or are being stopped."""
        return tuple(self._active.values())

    def reconcile(self, targets: Mapping[str, Target], undecided: Collection[str] = ()) -> None:
        """Stop segments that no longer serve a target, and start those for which slots are free.

        Segments that lost slots wait while the policy has not yet decided about their jobs, ``undecided``.
        """
        for job_id, segment in list(self._active.items()):
            target = targets.get(job_id)
            self._free_left(segment)
            if job_id in self.waiting:
                if target is not None:
                    self._resume(segment, target)
                elif job_id not in undecided:  # suspended: it writes a checkpoint
                    self.waiting.discard(job_id)
                    self.trainer.stop(segment)
            elif target is None or target.generation != segment.generation:
                self.trainer.stop(segment)
            elif len(segment.slots) < sum(count for _, count in target.shares):
                self._join(segment, target)
        for job_id, target in targets.items():
            if job_id not in self._active and all(
                count <= len(self._free[node]) for node, count in target.shares
            ):
                slots = tuple(
                    heapq.heappop(self._free[node]) for node, count in target.shares for _ in range(count)
                )
                self._start(Segment(target.job, target.generation, target.configuration, slots))

    def next_end(self, timeout_s: float) -> SegmentEnd | None:
        """Wait for the end of a segment and free its slots; None if the wait timed out."""
        try:
            end = self._ends.get(timeout=max(timeout_s, 0.0))
        except queue.Empty:
            return None
        return self._free_slots(end)

    def _free_slots(self, end: SegmentEnd) -> SegmentEnd:
        """Free the slots of a segment that has ended; return its end with the segment as it was last.

        The time of the steps of a segment that went on after a loss is NaN, since it has pauses.
        """
        job_id, result = end.segment.job.job_id, end.result
        segment = self._active.pop(job_id)
        if result is not None and segment.generation != end.segment.generation:
            result = replace(result, step_wall_s=math.nan)
        self.waiting.discard(job_id)
        self._free_all([*segment.slots, *self._leaving.pop(job_id, ())])
        return replace(end, segment=segment, result=result)

    def _free_all(self, slots: Iterable[int]) -> None:
        for slot in slots:
            heapq.heappush(self._free[slot // self._per_node], slot)

    def _free_left(self, segment: Segment) -> None:
        """Free the slots whose processes have left a segment."""
        leaving = self._leaving.get(segment.job.job_id, [])
        for slot in [slot for slot in leaving if self.trainer.has_left(segment, slot)]:
            leaving.remove(slot)
            self._free_all([slot])

    def _resume(self, segment: Segment, target: Target) -> None:
        """Let a segment that lost slots go on with those that its target leaves to it."""
        job_id = segment.job.job_id
        self.waiting.discard(job_id)
        kept = [slot for node, count in target.shares for slot in self._on(segment, node)[:count]]
        if not kept:
            self.trainer.stop(segment)  # the next segment resumes from the checkpoint
            return
        resumed = Segment(target.job, target.generation, target.configuration, tuple(kept))
        self._active[job_id] = resumed
        self._leaving.setdefault(job_id, []).extend(slot for slot in segment.slots if slot not in kept)
        self.trainer.resume(resumed, segment)

    def _join(self, segment: Segment, target: Target) -> None:
        """Give a segment the slots that it lacks, as far as they are free."""
        new = [
            heapq.heappop(self._free[node])
            for node, count in target.shares
            for _ in range(min(count - len(self._on(segment, node)), len(self._free[node])))
        ]
        if new:
            self._active[segment.job.job_id] = grown = replace(segment, slots=(*segment.slots, *new))
            self.trainer.join(grown, new)

    def _on(self, segment: Segment, node: int) -> list[int]:
        return [slot for slot in segment.slots if slot // self._per_node == node]

    def nodes_left(self, job_id: str) -> set[int]:
        """Return the nodes of the processes that a job that lost slots has left; empty if it lost none."""
        segment = self._active.get(job_id)
        if segment is None or job_id not in self.waiting:
            return set()
        return {slot // self._per_node for slot in segment.slots}

    def lose(self, segment: Segment, slots: Collection[int], *, waits: bool = True) -> bool:
        """Take slots from a segment that survives that, and let it wait; False if it does not survive."""
        left = tuple(slot for slot in segment.slots if slot not in slots)
        if not left or not self.trainer.lose(segment, slots, waits=waits):
            return False
        job_id = segment.job.job_id
        self._active[job_id] = replace(segment, slots=left)
        self._leaving[job_id] = [slot for slot in self._leaving.get(job_id, ()) if slot not in slots]
        self.waiting.add(job_id)
        self._free_all(slots)
        return True

    def kill_node(self, node: int, survivors: Collection[str] = ()) -> list[SegmentEnd]:
        """Kill the processes on a node, and take the ends of the segments that do not survive that.

        Segments of the jobs ``survivors`` survive if they have slots on another node. All processes of other
        segments with a slot on the node are killed. A `TrainingError` is raised if a segment does not end.
        """
        missing = set[str]()
        for job_id, segment in list(self._active.items()):
            held = (*segment.slots, *self._leaving.get(job_id, ()))
            lost = [slot for slot in held if slot // self._per_node == node]
            if not lost or (job_id in survivors and self.lose(segment, lost)):
                continue
            self.trainer.kill(segment)
            missing.add(job_id)
        return self._ends_of(missing, f"node {node}: the processes of job")

    def kill_waiting(self, job_id: str) -> list[SegmentEnd]:
        """Kill the processes of a job that lost slots and waits, and take its end."""
        self.trainer.kill(self._active[job_id])
        return self._ends_of({job_id}, "the processes of job")

    def _ends_of(self, killed: Collection[str], whose: str) -> list[SegmentEnd]:
        """Wait for the ends of killed segments, and take those."""
        missing = set(killed)
        seen: list[SegmentEnd] = []
        deadline = time.monotonic() + _NODE_KILL_WAIT_S
        try:
            while missing:
                with suppress(queue.Empty):
                    seen.append(self._ends.get(timeout=_KILL_POLL_S))
                    missing.discard(seen[-1].segment.job.job_id)
                if missing and time.monotonic() > deadline:
                    raise TrainingError(
                        f"{whose} {min(missing)!r} were killed and have not ended within "
                        f"{_NODE_KILL_WAIT_S:g} s"
                    )
        except BaseException:
            for end in seen:
                self._ends.put(end)
            raise
        ended = []
        for end in seen:  # those of other segments wait for their turn
            if end.segment.job.job_id in killed:
                ended.append(self._free_slots(end))
            else:
                self._ends.put(end)
        return ended

    def shut_down(self, grace_s: float) -> list[SegmentEnd]:
        """Stop all segments, kill those that do not end within ``grace_s`` seconds, and return their ends."""
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
        # The processes inherit the mask, so a keyboard interrupt reaches only the scheduler, which then lets
        # the processes write their checkpoints.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._ends.put(SegmentEnd(segment, self.trainer.train(segment), None))
        except Exception as error:  # noqa: BLE001 - every failure must reach the scheduler
            self._ends.put(SegmentEnd(segment, None, error))


LaunchOn = Callable[[tuple[int, ...]], Launcher]
"""Maps slots to the launcher whose processes use them."""


def _local_slots(device: Literal["cpu", "cuda"]) -> LaunchOn:
    """Choose launchers on this machine: a slot is a CPU core, or a GPU."""
    if device == "cuda":
        return lambda slots: LocalLauncher(device="cuda", gpus=slots)
    cpus = sorted(os.sched_getaffinity(0))
    return lambda slots: LocalLauncher(cpus=tuple(cpus[slot % len(cpus)] for slot in slots))


def _slurm_slots(device: Literal["cpu", "cuda"]) -> LaunchOn:
    """Choose launchers inside a Slurm allocation: a slot is a task with a device of its own."""

    def launcher(slots: tuple[int, ...]) -> Launcher:
        gpus = (f"--gres=gpu:{len(slots)}",) if device == "cuda" else ()
        options = ("--nodes=1", "--exact", "--cpus-per-task=1", "--mem=0", *gpus)
        return SlurmLauncher(device, options, threads_per_process=1)

    return launcher


def slots_of(launcher: str, device: str, n_slots: int) -> LaunchOn:
    """Choose launchers by name; an `InputError` is raised if this machine has fewer GPUs than slots."""
    known = {"local": _local_slots, "slurm": _slurm_slots}
    if launcher not in known:
        raise unknown_name("launcher", launcher, known)
    if device not in ("cpu", "cuda"):
        raise unknown_name("device", device, ("cpu", "cuda"))
    if (launcher, device) == ("local", "cuda"):
        check_gpus(LocalLauncher("cuda"), n_slots)
    return known[launcher]("cuda" if device == "cuda" else "cpu")


def steady_wall_s(result: RunResult) -> float:
    """Return the wall time of as many warm steps as a run did, with the checkpoints between them [s].

    A slow first step and the final checkpoint count towards the restart.
    """
    warm = result.paces_s[1:] or result.paces_s
    return len(result.paces_s) * fmean(warm) + sum(result.save_s[:-1]) if warm else 0.0


def configuration_plan(item: Configuration, node: NodeSpec) -> ExecutionPlan:
    """Return the execution plan of a configuration, with the micro-batch size of the profile."""
    point = ProfilePoint(item.plan, item.placement, item.cpu_threads)
    return point_plan(point, workload(item.workload), node)


class ProcessTrainer:
    """Trains small models in separate processes.

    ``directory`` holds run directories and checkpoints; ``seeds`` has the seed of each job,
    ``checkpoint_every`` the steps between checkpoints of each workload.
    """

    def __init__(
        self,
        directory: Path,
        node: NodeSpec,
        launch_on: LaunchOn,
        seeds: Mapping[str, int],
        checkpoint_every: Mapping[str, int],
    ) -> None:
        self._directory, self._node, self._launch_on = directory, node, launch_on
        self._seeds, self._checkpoint_every = seeds, checkpoint_every
        self._killed: set[tuple[str, int]] = set()  # jobs and generations of segments

    def train(self, segment: Segment) -> SegmentResult:
        """Run a segment; see `Trainer.train`."""
        name, key = segment.job.job_id, segment.job.workload
        checkpoints = self._checkpoints(segment.job)
        checkpoints.mkdir(parents=True, exist_ok=True)
        model, plan = model_of(workload(key)), configuration_plan(segment.configuration, self._node)
        seed, every = self._seeds[name], self._checkpoint_every.get(key, 0)
        job = TrainingJob(model, plan, segment.job.steps, seed, seed, checkpoint_every=every)
        saved = self.saved_steps(segment.job)
        if (
            saved >= segment.job.steps
        ):  # its last step was saved, but the scheduler crashed before it recorded that
            return SegmentResult(saved, 0, 0.0, float("nan"))
        result = train(
            job,
            launcher=self._launch_on(segment.slots),
            run_dir=self._run_dir(segment),
            checkpoint_dir=checkpoints,
            resume=checkpoints if saved else None,
            is_killed=lambda: (name, segment.generation) in self._killed,
        )
        loss = result.losses[-1] if result.losses else float("nan")
        return SegmentResult(result.last_step, len(result.losses), steady_wall_s(result), loss)

    def stop(self, segment: Segment) -> None:
        """Request the stop of a segment; see `Trainer.stop`."""
        with suppress(FileNotFoundError):  # no run directory yet; the next request will find one
            request_stop(self._run_dir(segment))

    def kill(self, segment: Segment) -> None:
        """Kill the processes of a segment; their launcher does so within 20 ms."""
        self._killed.add((segment.job.job_id, segment.generation))

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


# --- Engine -----------------------------------------------------------------------------------------

_POLL_WALL_S = 0.1
_SAVE_EVERY_WALL_S = 2.0
_MAX_CRASHES = 3  # consecutive crashes of a job's processes without a saved step between them
_FAILED, _JOINED = NodeEventKind.FAILED, NodeEventKind.JOINED


def check_live_recovery(kind: RecoveryKind, launcher: str, device: str) -> None:
    """Check that live jobs can recover in a way; an `InputError` says what it would need."""
    if kind not in RECOVERY_KINDS:
        raise unknown_name("kind of recovery", kind, RECOVERY_KINDS)
    if kind != "restart" and (launcher, device) != ("local", "cpu"):
        raise InputError(
            f"recovery {kind!r} with launcher {launcher!r} and device {device!r}: jobs resume from the "
            "memory of processes on the CPUs of this machine only; expected launcher 'local' and device "
            "'cpu', or recovery 'restart'"
        )


def check_live_events(node_events: Iterable[NodeEvent]) -> None:
    """Check that whole nodes fail and join; an `InputError` names another kind of event."""
    for event in node_events:
        if event.kind not in (_FAILED, _JOINED):
            raise InputError(
                f"node event at {event.in_force_s:g} s: devices of node {event.node_id} are "
                f"{event.kind.value}; expected nodes of a live run that fail and join"
            )


_NOTHING_LOST = Loss(0.0, 0.0, LossOutcome.CHECKPOINT)


def _loss(steps: int, configuration: Configuration) -> Loss:
    """Return the loss of steps in a configuration."""
    gpu_s = steps * configuration.iter_time_s * configuration.n_gpus
    return Loss(float(steps), gpu_s, LossOutcome.CHECKPOINT)


class LiveClock:
    """Time of a live run: scaled wall time, without the time between interrupt and resumption."""

    def __init__(self, scale: float = 1.0, start_s: float = 0.0) -> None:
        self.scale = scale
        self._start_s = start_s
        self._began = time.monotonic()

    def now_s(self) -> float:
        """Return the time of the schedule [s]."""
        return self._start_s + self.scale * (time.monotonic() - self._began)

    def wall_s(self, time_s: float) -> float:
        """Return the wall time until a time of the schedule [s], 0 if it has passed."""
        return max(time_s - self.now_s(), 0.0) / self.scale


class LiveJob(JobView):
    """Job whose steps are reported by its processes instead of predicted from time."""

    __slots__ = ()

    @property
    def steps_done(self) -> int:
        """Steps that its processes have completed."""
        return round(self.spec.steps - self._steps_left)

    def _steps_left_now(self) -> float:
        return self._steps_left


class LiveEngine(Engine):
    """Runs a trace with real processes; decisions are made as in the simulator.

    Arrivals and requests for decisions are events in the queue of the simulator. Ends of restarts and last
    steps, which the simulator predicts, are reported by the processes. ``overheads_s`` has, for each segment
    that ended without an error, the time for which its job held devices minus that of as many warm steps [s];
    ``began_at`` is the time of day before the first job started.

    A job is pending (no devices), restarting (devices, processes not ready) or training (processes report
    steps). Its current segment is that with the generation of its allocation; reports of older segments only
    count steps.

    When a node fails, the processes of all segments with a slot on it are killed before anything else
    happens. ``losses`` are the steps that a job's processes had reported beyond its newest checkpoint,
    whatever interrupted it; their device time is that of as many steps as profiled.

    A job whose recovery is ``elastic`` or ``resilient`` loses the processes on the node alone. The others
    keep its state and wait: a resilient job resumes with them at once, an elastic one if the next decision of
    the policy gives it devices; otherwise they are killed, and the job returns to its checkpoint. A process
    that crashes is replaced, for both kinds. The trainer is then a `SurvivingTrainer`.
    """

    def __init__(
        self,
        scenario: Scenario,
        policy: Policy,
        executor: Executor,
        clock: LiveClock,
        save: Callable[["LiveEngine"], None] = lambda engine: None,
    ) -> None:
        super().__init__(scenario, policy)
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
        self._crashes: dict[str, tuple[int, int]] = {}
        self._lost: dict[str, Loss] = {}  # of processes that were killed or crashed at this instant, by job

    def load(self) -> None:
        """Load the trace and the node events; live jobs run exactly their steps."""
        node_events = ordered_node_events(self.scenario.failures, self.scenario.cluster)
        if self.scenario.extra_steps:
            raise MakespanError("a live run supports no extra steps; expected none")
        check_live_events(node_events)
        order = sorted(self.scenario.jobs, key=lambda job: job.submit_time_s)
        self.jobs = {
            job.job_id: LiveJob(job, index, float(job.steps), self.view, self.scenario.recovery_of(job))
            for index, job in enumerate(order)
        }
        self.final_losses = dict.fromkeys(self.jobs, float("nan"))
        self.arrivals = list(self.jobs.values())
        self.load_nodes(node_events)
        self.push_arrival()

    def begin_after(self, n_arrived: int) -> None:
        """Expect only what comes after the rows: they have the first ``n_arrived`` arrivals."""
        node_events = ordered_node_events(self.scenario.failures, self.scenario.cluster)
        kinds = (EventKind.NODE_FAILED.value, EventKind.NODE_JOINED.value)
        n_happened = sum(row[2] in kinds for row in self.rows) - len(absent_nodes(node_events))
        for event in node_events[:n_happened]:
            change = self.cluster_state.nodes.fail if event.kind is _FAILED else self.cluster_state.nodes.join
            change(event.node_id)
        self.queue.clear()
        self.queue_node_events(node_events[n_happened:])
        self.n_arrived = n_arrived
        self.push_arrival()
        self.request_decision()

    def wait_again(self, job: LiveJob, done: int, reason: str | None) -> None:
        """Queue a job with the steps of its newest checkpoint, after it had ``done`` steps.

        ``reason`` is that of a loss of devices.
        """
        saved = self._executor.trainer.saved_steps(job.spec)
        self._count(job, saved)
        self.cluster_state.submit(job)
        if reason is not None:
            requested = self.view.catalogue.requested(job.spec)  # its last configuration is not on record
            self.record_loss(job, _loss(max(done - saved, 0), requested), -1)
            self.record(EventKind.INTERRUPTED, job, reason)

    def run(self) -> None:
        """Run until all jobs are finished; on an error or interrupt, stop all processes with checkpoints."""
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
        """Stop all processes, with checkpoints if ``grace_s`` seconds suffice, and save the state."""
        for end in self._executor.shut_down(grace_s):
            self._lose(self.jobs[end.segment.job.job_id], self._note_end(end))
        self.cluster_state.advance(max(self.view.time_s, self._clock.now_s()))
        self._save(self)

    def _turn(self) -> None:
        """Reconcile, wait for the next event or end of a segment, and handle what is due."""
        self._executor.reconcile(
            {
                job.spec.job_id: Target(
                    job.spec, job.generation, job.allocation.configuration, job.allocation.shares
                )
                for job in self.view.running
                if job.allocation is not None
            },
            {job.spec.job_id for job in self._interruptions.jobs},
        )
        n_rows, saved_at = self._saved
        now = time.monotonic()
        if n_rows != len(self.rows) or now - saved_at > _SAVE_EVERY_WALL_S:
            self._saved = (len(self.rows), now)
            self._save(self)
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

    def schedule_ends(self, job: JobView, ready_s: float, *, is_ready: bool = False) -> None:
        """Record when a job got its devices; its processes report when they are ready and when they end."""
        self._held[(job.spec.job_id, job.generation)] = [job.held_since_s]

    def _handle_due(self, now_s: float) -> None:
        while self.queue.next_time_s() <= now_s:
            time_s, (handler, first, second) = self.queue.pop()
            # What was due while a run that is resumed was stopping happens now.
            self.cluster_state.advance(max(time_s, self.view.time_s))
            handler(first, second)

    def _look(self) -> None:
        """Count the steps that processes report, and record which restarts have ended."""
        for segment in self._executor.active:
            self._look_at(segment)
            if self._can_survive(segment) and self._is_current(segment):
                self._replace_crashed(segment)
        for view in self.view.running:
            if (view.spec.job_id, view.generation) not in self._ready:
                self.cluster_state.set_ready(view, max(view.ready_time_s, self.view.time_s))

    def _look_at(self, segment: Segment) -> None:
        done = self._executor.trainer.steps_done(segment)
        if done is None:
            return
        job = self.jobs[segment.job.job_id]
        self._count(job, done)
        key = (segment.job.job_id, segment.generation)
        if self._is_current(segment) and key not in self._ready:
            self._ready.add(key)
            self.cluster_state.set_ready(job, self.view.time_s)
            self.record(EventKind.READY, job, "processes train")

    def _can_survive(self, segment: Segment) -> bool:
        """Tell whether a job keeps its state in memory if it loses some of its processes now.

        A segment that is being stopped because the policy has changed its job does not.
        """
        job = self.jobs[segment.job.job_id]
        if job._recovery is None or job._recovery.kind == "restart":
            return False
        return self._is_current(segment) or segment.job.job_id in self._executor.waiting

    def _replace_crashed(self, segment: Segment) -> None:
        """Record that processes of a job have crashed while others go on; the executor replaces them."""
        crashed, job = self._executor.trainer.crashed(segment), self.jobs[segment.job.job_id]
        before, recovery = job.allocation, job._recovery
        if not crashed or before is None or recovery is None:
            return
        if not self._executor.lose(segment, crashed, waits=False):
            return  # nobody is left, and the segment ends
        _log.warning("job %s lost %d process(es) and continues", job.spec.job_id, len(crashed))
        (loss,) = self.evict([job])
        self.record_loss(job, loss, -1)
        self.record(EventKind.INTERRUPTED, job, f"{len(crashed)} process(es) crashed")
        delay_s = self._interruptions.start(job, recovery)
        self.schedule_ends(job, self.cluster_state.hold(job, before, delay_s=delay_s))
        self.record(EventKind.REGROUPED, job, "0 GPUs fewer")

    def _take_end(self, end: SegmentEnd) -> None:
        """Finish the job of a segment, leave it to its next segment, or queue it again after a loss."""
        job = self.jobs[end.segment.job.job_id]
        loss = self._note_end(end)
        if end.error is not None:
            self._count_crash(end, job)
        if job.steps_done >= job.spec.steps:
            self.finish(job)
        elif self._is_current(end.segment):
            reason = "stopped from outside" if end.error is None else str(end.error).splitlines()[0]
            self._lose(job, loss)
            (loss,) = self.evict([job])
            self.record_loss(job, loss, -1)
            self.record(EventKind.INTERRUPTED, job, reason)
            self.request_decision()
        elif self._interruptions.nodes_left(job):  # the processes that kept its state have ended
            self._lose(job, loss)
            self._forget_memory(job, -1, "its processes ended")
            self.request_decision()

    def _forget_memory(self, job: LiveJob, node: int, reason: str) -> None:
        """Return a job that waits with its state in memory to its checkpoint."""
        self._interruptions.return_to_checkpoint(job)
        self._roll_back(job, self._lost.pop(job.spec.job_id, _NOTHING_LOST), node, reason)

    def _change_node(self, event: NodeEvent, _: None) -> None:
        """Apply a node event; if the node fails, first kill the processes on it, and see what they saved."""
        if event.kind is _FAILED:
            surviving = [one for one in self._executor.active if self._can_survive(one)]
            for one in surviving:
                self._look_at(one)  # the last steps may not have been seen before
            survivors = {one.job.job_id for one in surviving}
            for end in self._executor.kill_node(event.node_id, survivors):
                job = self.jobs[end.segment.job.job_id]
                if end.error is not None and not isinstance(end.error, WorkerError):
                    raise end.error
                loss = self._note_end(end)
                if job.steps_done >= job.spec.steps:  # the last checkpoint was complete
                    self.finish(job)
                else:
                    self._lose(job, loss)
        # An interrupt from the keyboard comes after the event, so that no state on disk has a part of it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            super()._change_node(event, None)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _lose(self, job: LiveJob, loss: Loss) -> None:
        """Note a loss; the steps count as done until the job is interrupted or rolled back."""
        if loss.steps or self._interruptions.nodes_left(job):
            self._lost[job.spec.job_id] = loss
            self.cluster_state.set_steps_left(job, job._steps_left - loss.steps)

    def jobs_on(self, node: int) -> list[JobView]:
        """Return the jobs that hold devices of a node, or lost progress with their former devices there."""
        holders = super().jobs_on(node)
        moved = [job for job in self.view.running if job.spec.job_id in self._lost and job not in holders]
        return [*holders, *moved]

    def lost_from_memory(self, node: int) -> Iterator[tuple[JobView, Loss]]:
        """Yield the waiting jobs whose processes were killed before they had written their checkpoint."""
        for job in self.view.pending:
            if left := self._executor.nodes_left(job.spec.job_id):
                self._interruptions.wait_in_memory(job, left)
            elif job.spec.job_id in self._lost:
                self._interruptions.return_to_checkpoint(job)
                yield job, self._lost.pop(job.spec.job_id)

    def loss_of(self, job: JobView, node: int, n_left: int = 0) -> Loss:
        """Return what a job loses whose processes were killed or crashed at this instant.

        A job that resumes from memory loses the running step, which no process has reported.
        """
        if left := self._executor.nodes_left(job.spec.job_id):
            self._interruptions.wait_in_memory(job, left)
            return _NOTHING_LOST._replace(outcome=LossOutcome.IN_MEMORY)
        self._interruptions.return_to_checkpoint(job)
        return self._lost.pop(job.spec.job_id, _NOTHING_LOST)

    def given_up(self) -> Iterator[tuple[JobView, Loss]]:
        """Kill the processes of jobs that waited with their state in memory, and yield what these lose."""
        for view in self._interruptions.jobs:
            job = self.jobs[view.spec.job_id]
            for end in self._executor.kill_waiting(job.spec.job_id):
                if end.error is not None and not isinstance(end.error, WorkerError):
                    raise end.error
                self._lose(job, self._note_end(end))
            if job.steps_done >= job.spec.steps:  # the last checkpoint was complete
                self._lost.pop(job.spec.job_id, None)
                self.finish(job)
                continue
            self._interruptions.return_to_checkpoint(job)
            yield job, self._lost.pop(job.spec.job_id, _NOTHING_LOST)

    def _note_end(self, end: SegmentEnd) -> Loss:
        """Count the steps in the result or the checkpoint of a segment; return those that are lost."""
        job, trainer = self.jobs[end.segment.job.job_id], self._executor.trainer
        if end.result is None:
            self._look_at(end.segment)  # the last steps may not have been seen before
            saved = trainer.saved_steps(job.spec)
            n_lost = max(job.steps_done - saved, 0)
            self._count(job, saved)
            return _loss(n_lost, end.segment.configuration)
        self._count(job, end.result.steps_done)
        if end.result.n_steps:
            self.final_losses[job.spec.job_id] = end.result.loss
        held = self._held.get((end.segment.job.job_id, end.segment.generation))
        if held is not None and not math.isnan(end.result.step_wall_s):
            until_s = held[1] if len(held) > 1 else self.view.time_s
            self.overheads_s.append(until_s - held[0] - end.result.step_wall_s * self._clock.scale)
        return _loss(0, end.segment.configuration)

    def _count_crash(self, end: SegmentEnd, job: LiveJob) -> None:
        """Raise the error of a job whose processes crash repeatedly at the same step.

        Processes that were killed with their node do not come here.
        """
        if not isinstance(end.error, WorkerError):
            raise end.error if end.error is not None else MakespanError("a segment ended without a result")
        done = job.steps_done
        done_before, count = self._crashes.get(job.spec.job_id, (done, 0))
        count = count + 1 if done_before == done else 1
        self._crashes[job.spec.job_id] = (done, count)
        _log.warning("job %s lost its processes at step %d: %s", job.spec.job_id, done, end.error)
        if count >= _MAX_CRASHES:
            raise end.error

    def _is_current(self, segment: Segment) -> bool:
        job = self.jobs[segment.job.job_id]
        return job.allocation is not None and job.generation == segment.generation

    def _count(self, job: LiveJob, done: int) -> None:
        self.cluster_state.set_steps_left(job, float(job.spec.steps - done))

    def release(self, job: JobView) -> None:
        """Release the devices of a job, and record the time until which it held them."""
        if job.allocation is not None:
            self._held[(job.spec.job_id, job.generation)].append(self.view.time_s)
        super().release(job)


# --- State on disk ----------------------------------------------------------------------------------

_VERSION = 3


def save_state(engine: LiveEngine, path: Path) -> None:
    """Write the state atomically, with the times that each job would have if it lost its devices now."""
    ends = {job.spec.job_id: time_s for job, time_s in engine.finished}
    state = {
        "version": _VERSION,
        "time_s": engine.view.time_s,
        "rows": engine.rows,
        "began_at": engine.began_at,
        "overheads_s": engine.overheads_s,
        "losses": engine.losses,
        "jobs": {
            name: {
                "generation": job.generation,
                "first_start_s": job.first_start_s,
                "finish_time_s": ends.get(name),
                "restart_count": job.restart_count,
                "held": job.allocation is not None,
                "steps_done": job.steps_done,
                "running_s": job.running_time_s,
                "restart_s": job.restart_time_s,
                "held_gpu_s": job.attained_service_gpu_s,
                "waiting_s": job.waiting_time_s,
                "observed": [
                    [item.plan, item.placement.text, item.cpu_threads, list(item.gpu_types)]
                    for item in job.observed
                ],
                "final_loss": engine.final_losses[name],
            }
            for name, job in engine.jobs.items()
        },
    }
    write_json(state, path)


def read_state(path: Path) -> dict[str, Any] | None:
    """Read a state file of this version; None if there is no file."""
    state: dict[str, Any] | None = read_json(path, TrainingError)
    if state is None:
        return None
    if state.get("version") != _VERSION:
        raise TrainingError(f"{path}: state has version {state.get('version')!r}; expected {_VERSION}")
    return state


def restore(engine: LiveEngine, state: dict[str, Any]) -> None:
    """Restore the saved state of a run in an engine with the same jobs, and queue unfinished jobs again."""
    if set(state["jobs"]) != set(engine.jobs):
        raise TrainingError("the state file has other jobs; expected the jobs of this run")
    engine.rows[:] = [tuple(row) for row in state["rows"]]
    engine.began_at = state["began_at"]
    engine.overheads_s[:] = state["overheads_s"]
    engine.losses[:] = [tuple(row) for row in state.get("losses", [])]  # since nodes can fail
    engine.cluster_state.advance(state["time_s"])
    submitted = {row[3] for row in engine.rows if row[2] == EventKind.SUBMITTED.value}
    engine.begin_after(len(submitted))
    for name in [name for name in engine.jobs if name in submitted]:
        job, saved = engine.jobs[name], state["jobs"][name]
        engine.final_losses[name] = saved["final_loss"]
        # A configuration that the catalogue no longer has cannot be used again, so it is dropped.
        observed = [
            engine.view.catalogue.find(job.spec.workload, plan, placement, cpu_threads, tuple(gpu_types))
            for plan, placement, cpu_threads, gpu_types in saved["observed"]
        ]
        engine.cluster_state.restore(
            job,
            generation=saved["generation"] + 1,  # the run directory of the old segment is not reused
            first_start_s=saved["first_start_s"],
            restart_count=saved["restart_count"],
            times_s=(saved["waiting_s"], saved["running_s"], saved["restart_s"]),
            held_gpu_s=saved["held_gpu_s"],
            observed=[item for item in observed if item is not None],
        )
        if saved["finish_time_s"] is None:
            reason = "the scheduler ended" if saved["held"] else None
            engine.wait_again(job, saved.get("steps_done", 0), reason)
            continue
        engine.cluster_state.submit(job)
        engine.cluster_state.finish(job)
        engine.finished.append((job, saved["finish_time_s"]))
