"""Elastic live jobs: jobs that lose a node, and resume from the memory of the processes that are left.

`ElasticProcessTrainer` runs the segments of jobs under the elastic runtime, `makespan.easyscale`. A job has a
fixed number of logical workers, which together train the global batch of its workload, and a process for each
slot that it holds. Its losses have the same bits for any number of processes.
"""

import logging
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from makespan.easyscale import ElasticResult, ElasticTrainer, join_run
from makespan.easyscale.trainer import RunFolder
from makespan.errors import InputError, LostWorkerError, TrainingError, WorkerError
from makespan.live.engine import LaunchOn, Segment, SegmentResult
from makespan.profiling import model_of
from makespan.runtime import Launch, LocalLauncher, latest_checkpoint
from makespan.runtime.forkserver import Process
from makespan.training import TrainingJob
from makespan.workloads import JobSpec, workload

_log = logging.getLogger(__name__)

_PARTS = "makespan.live.elastic_parts"
_HANG_S = 60.0  # a choice: processes that are well may be silent for long on a busy machine
_POLL_S = 0.02
_JOIN_S = 0.1  # between attempts of a process to join
_JOIN_ATTEMPTS = 100  # a run that starts or ends admits nobody for a while
_KILL_WAIT_S = 60.0  # for processes that get SIGKILL, on a machine that may be busy
_RUN = "run"
_EPOCH_STEPS = 4096  # after which samples repeat, whose order is a list in memory


def elastic_trainer(key: str, n_logical_workers: int, steps: int, seed: int, run_dir: Path) -> ElasticTrainer:
    """Return the elastic trainer of a live job.

    Parameters
    ----------
    key, steps, seed
        Workload, steps in total, and seed of weights and samples.
    n_logical_workers
        Logical workers, a divisor of the global batch of the workload.
    run_dir
        Directory of the run, with its checkpoints.
    """
    spec = workload(key)
    batch_size, sizes = spec.global_batch_size, asdict(model_of(spec))
    defaults = {each.name: each.default for each in fields(TrainingJob)}
    return ElasticTrainer(
        f"{_PARTS}:model",
        f"{_PARTS}:adamw",
        f"{_PARTS}:Samples",
        loss=f"{_PARTS}:loss",
        lr_scheduler=f"{_PARTS}:warm_up",
        run_dir=run_dir,
        options={
            "model": {"seed": seed, **sizes},
            "optimizer": {name: defaults[name] for name in ("learning_rate", "weight_decay")},
            "data": {"batch_size": batch_size, "steps": min(steps, _EPOCH_STEPS), "seed": seed, **sizes},
            "lr_scheduler": {"steps": defaults["warmup_steps"]},
        },
        n_logical_workers=n_logical_workers,
        micro_batch_size=batch_size // n_logical_workers,
        seed=seed,
        n_loaders=0,
        shuffle=False,
        fold="ring",
    )  # fmt: skip


def final_loss(result: ElasticResult) -> float:
    """Return the mean loss of the last step over the logical workers; NaN without steps."""
    last = result.steps[result.steps["step"] == result.step]
    return fmean(last["loss"]) if len(last) else float("nan")


# --- Processes of a run -----------------------------------------------------------------------------


class _SharedProcess:
    """Process that several threads may signal and wait for."""

    def __init__(self, process: Process) -> None:
        self._process, self._lock, self.pid = process, threading.Lock(), process.pid

    def poll(self) -> int | None:
        with self._lock:
            return self._process.poll()

    def wait(self, timeout: float | None = None) -> int:
        until = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if until is not None and time.monotonic() > until:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(_POLL_S)
        return status

    def send_signal(self, sig: int, /) -> None:
        with self._lock:
            self._process.send_signal(sig)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _not_set(launch: Launch, rank: int) -> Process:
    raise WorkerError(f"process {rank} of {launch.run_dir} has no slot")


@dataclass(frozen=True, slots=True)
class _SlotLauncher(LocalLauncher):
    """Launcher whose processes each have a slot of their own."""

    begin: Callable[[Launch, int], Process] = field(default=_not_set)

    @property
    def n_devices(self) -> int | None:
        """None, because slots have devices of their own."""
        return None

    def start(self, launch: Launch, rank: int) -> Process:
        """Start one process on its slot."""
        return self.begin(launch, rank)


class ElasticRun:
    """One call of the elastic runtime: its processes by slot, and its progress.

    ``done`` is the number of steps done; None until the processes train, at the start and after a loss.
    ``marks`` are pairs of steps done and time [s], in one list for each period without a loss or a change.
    """

    def __init__(self) -> None:
        self.done: int | None = None
        self.marks: list[list[tuple[int, float]]] = [[]]
        self.n_regroups = 0  # decisions about the processes, the first at the start
        self._processes: dict[int, _SharedProcess] = {}
        self._gone: set[int] = set()  # slots whose processes get SIGKILL or are asked to leave
        self._lock = threading.Lock()
        self._is_killed = self._is_over = False
        self._goes_on = threading.Event()
        self._goes_on.set()
        self._awaited = 0  # `n_regroups` from which reports count
        self._launch_on: LaunchOn | None = None
        self._path: Path | None = None  # of the run, once it begins

    def train(
        self,
        trainer: ElasticTrainer,
        slots: tuple[int, ...],
        launch_on: LaunchOn,
        survives: int,
        *,
        steps: int,
        checkpoint_every: int,
    ) -> ElasticResult:
        """Train on slots until so many steps are done in total, or the run is suspended or lost."""
        self._launch_on, self._path = launch_on, trainer.folder.path
        launcher = _SlotLauncher(
            launch_on(slots).device, begin=lambda launch, rank: self._start(launch, rank, slots[rank])
        )
        n_processes = min(len(slots), trainer.job.n_logical_workers)
        surviving: dict[str, Any] = {}
        if n_processes > 1 and survives:
            surviving = {"survives": min(survives, n_processes - 1), "on_regroup": self._regroup}
        try:
            return trainer.run(
                steps,
                devices=["A"] * n_processes,
                checkpoint_every=checkpoint_every,
                checkpoint_every_s=0,
                max_restarts=0,
                hang_s=_HANG_S,
                progress_s=0,
                on_progress=self._report,
                ends_on_signals=False,
                launcher=launcher,
                **surviving,
            )
        finally:
            with self._lock:
                self._is_over = True
            for process in list(self._processes.values()):
                process.kill()
                process.wait(_KILL_WAIT_S)

    @property
    def is_over(self) -> bool:
        """Whether all processes have ended."""
        return self._is_over

    @property
    def pids(self) -> dict[int, int]:
        """Process that was last started on each slot."""
        return {slot: process.pid for slot, process in list(self._processes.items())}

    def request_stop(self) -> None:
        """Request that the run writes a checkpoint and ends."""
        if self._path is not None:  # otherwise the next request will find it
            RunFolder(self._path).request_placing({})
        self._goes_on.set()

    def kill(self) -> None:
        """Kill all processes, now and those that are still to start."""
        with self._lock:
            self._is_killed = True
        self._goes_on.set()
        for process in list(self._processes.values()):
            process.kill()

    def lose(self, slots: Collection[int], *, waits: bool) -> None:
        """Kill the processes on slots, and wait until they have ended.

        With ``waits`` the others then wait for `resume`. Nothing counts as done until they train again.
        """
        with self._lock:
            self._gone |= set(slots)
            self._awaited = self.n_regroups + waits
            self.done = None
        if waits:
            self._goes_on.clear()
        lost = [self._processes[slot] for slot in slots if slot in self._processes]
        for process in lost:
            process.kill()
        for process in lost:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_KILL_WAIT_S)

    def resume(self, leaving: Collection[int]) -> None:
        """Let the processes go on after a loss, without those on some slots, which leave."""
        self._gone |= set(leaving)
        for slot in leaving:
            if slot in self._processes:
                self._processes[slot].send_signal(signal.SIGTERM)
        self.marks.append([])
        self._goes_on.set()

    def join(self, slot: int) -> None:
        """Start one more process on a slot, in the background."""
        with self._lock:
            self._gone.discard(slot)
            self._processes.pop(slot, None)
        threading.Thread(target=self._join, args=(slot,), daemon=True).start()

    def has_left(self, slot: int) -> bool:
        """Tell whether no process is on a slot any more."""
        process = self._processes.get(slot)
        return process is None or process.poll() is not None

    def crashed(self, slots: Collection[int]) -> tuple[int, ...]:
        """Return the slots whose processes were ended by a signal that nobody here has sent."""
        if self._is_over or self._is_killed:
            return ()
        ended = {
            slot: self._processes[slot].poll()
            for slot in slots
            if slot in self._processes and slot not in self._gone
        }
        return tuple(slot for slot, status in ended.items() if status is not None and status < 0)

    def _start(self, launch: Launch, rank: int, slot: int) -> Process:
        with self._lock:
            if self._is_over or self._launch_on is None:
                raise WorkerError(f"{launch.run_dir}: the run is over")
            process = _SharedProcess(self._launch_on((slot,)).start(launch, rank))
            self._processes[slot] = process
            is_killed = self._is_killed or slot in self._gone
        if is_killed:
            process.kill()
        return process

    def _join(self, slot: int) -> None:
        if self._launch_on is None:
            return
        launcher = _SlotLauncher(self._launch_on((slot,)).device, begin=partial(self._start, slot=slot))
        for _ in range(_JOIN_ATTEMPTS):
            if self._path is None or self._is_over or self._is_killed or slot in self._gone:
                return
            try:
                join_run(self._path, launcher)
            except (InputError, TrainingError) as error:
                _log.debug("%s: slot %d: %s", self._path, slot, error)
                if slot in self._processes:  # it had begun: the engine sees how it ended
                    return
                time.sleep(_JOIN_S)
            else:
                return
        _log.warning("%s: no process could join on slot %d", self._path, slot)

    def _regroup(self) -> None:
        """Wait, in the thread of the run, for the decision of the policy after a loss."""
        self._goes_on.wait()
        with self._lock:
            self.n_regroups += 1

    def _report(self, step: int, _: float) -> None:
        with self._lock:
            if not self._goes_on.is_set() or self.n_regroups < self._awaited:
                return
            self.done = step
        self.marks[-1].append((step, time.monotonic()))


def steady_pace_s(marks: list[list[tuple[int, float]]]) -> float:
    """Return the mean time of a step without the first ones of each period [s]; 0 if there are too few."""
    steps, time_s = 0, 0.0
    for period in marks:
        known = period[1:] if len(period) > 2 else period
        if len(known) > 1:
            steps += known[-1][0] - known[0][0]
            time_s += known[-1][1] - known[0][1]
    return time_s / steps if steps > 0 else 0.0


# --- Trainer ----------------------------------------------------------------------------------------


class ElasticProcessTrainer:
    """Trains small models under the elastic runtime, with a process on each slot of a segment.

    ``directory`` holds run directories with checkpoints; ``seeds`` has the seed of each job,
    ``checkpoint_every`` the steps between checkpoints of each workload; ``slots_per_node`` slots fail
    together.
    """

    def __init__(
        self,
        directory: Path,
        launch_on: LaunchOn,
        seeds: Mapping[str, int],
        checkpoint_every: Mapping[str, int],
        n_logical_workers: int,
        slots_per_node: int,
    ) -> None:
        self._directory, self._launch_on = directory, launch_on
        self._seeds, self._checkpoint_every = seeds, checkpoint_every
        self._n_logical_workers, self._slots_per_node = n_logical_workers, slots_per_node
        self._runs: dict[tuple[str, int], ElasticRun] = {}  # by job and generation
        self._lock = threading.Lock()

    def run_of(self, segment: Segment) -> ElasticRun:
        """Return the run of a segment."""
        with self._lock:
            return self._runs.setdefault((segment.job.job_id, segment.generation), ElasticRun())

    def train(self, segment: Segment) -> SegmentResult:
        """Run a segment; see `Trainer.train`."""
        name, key, steps = segment.job.job_id, segment.job.workload, segment.job.steps
        saved = self.saved_steps(segment.job)
        if saved >= steps:  # its last step was saved, but the scheduler crashed before it recorded that
            return SegmentResult(saved, 0, 0.0, float("nan"))
        run, path = self.run_of(segment), self._run_dir(segment.job)
        path.mkdir(parents=True, exist_ok=True)
        trainer = elastic_trainer(key, self._n_logical_workers, steps, self._seeds[name], path)
        on_node = Counter(slot // self._slots_per_node for slot in segment.slots)
        every = self._checkpoint_every.get(key, 0)
        result = run.train(
            trainer,
            segment.slots,
            self._launch_on,
            max(on_node.values()),
            steps=steps,
            checkpoint_every=every,
        )
        n_steps = result.step - saved
        return SegmentResult(result.step, n_steps, n_steps * steady_pace_s(run.marks), final_loss(result))

    def stop(self, segment: Segment) -> None:
        """Request the stop of a segment; see `Trainer.stop`."""
        self.run_of(segment).request_stop()

    def kill(self, segment: Segment) -> None:
        """Kill the processes of a segment; see `Trainer.kill`."""
        self.run_of(segment).kill()

    def steps_done(self, segment: Segment) -> int | None:
        """Return the steps that are done; see `Trainer.steps_done`."""
        return self.run_of(segment).done

    def saved_steps(self, job: JobSpec) -> int:
        """Return the steps of the newest checkpoint; see `Trainer.saved_steps`."""
        newest = latest_checkpoint(self._run_dir(job) / "checkpoints")
        return 0 if newest is None else newest.step

    # --- calls for segments that survive losses, see `makespan.live.engine.SurvivingTrainer` ---

    def lose(self, segment: Segment, slots: Collection[int], *, waits: bool) -> bool:
        """Kill the processes on slots, and let the others wait."""
        run = self.run_of(segment)
        if run.is_over:
            return False
        run.lose(slots, waits=waits)
        return True

    def resume(self, segment: Segment, before: Segment) -> None:
        """Let the processes that are left go on."""
        run = self.run_of(before)
        with self._lock:
            self._runs[segment.job.job_id, segment.generation] = run
        run.resume([slot for slot in before.slots if slot not in segment.slots])

    def join(self, segment: Segment, slots: Collection[int]) -> None:
        """Start one more process on each of some slots."""
        for slot in slots:
            self.run_of(segment).join(slot)

    def has_left(self, segment: Segment, slot: int) -> bool:
        """Tell whether the process on a slot has ended."""
        return self.run_of(segment).has_left(slot)

    def crashed(self, segment: Segment) -> tuple[int, ...]:
        """Return the slots whose processes have crashed while others go on."""
        return self.run_of(segment).crashed(segment.slots)

    def _run_dir(self, job: JobSpec) -> Path:
        return self._directory / job.job_id / _RUN


# --- Profile ----------------------------------------------------------------------------------------


def measured_pause_s(
    trainer: ElasticTrainer, slots: tuple[int, ...], launch_on: LaunchOn, n_steps: int
) -> float:
    """Lose a process after some steps, and return the time until the others train again [s].

    The mini-batch that they repeat counts as a step, not as part of the pause.
    """
    run, killed_s, total = ElasticRun(), list[float](), 3 * n_steps

    def kill() -> None:
        while not run.is_over and (run.done is None or run.done < n_steps):
            time.sleep(_POLL_S)
        killed_s.append(time.monotonic())
        run.lose(slots[-1:], waits=True)
        run.resume(())

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    run.train(trainer, slots, launch_on, 1, steps=total, checkpoint_every=0)
    killer.join()
    if not (len(run.marks) > 1 and run.marks[1]):
        raise LostWorkerError("the processes of a profile did not survive the loss of one of them")
    pause_s = run.marks[1][0][1] - killed_s[0] - steady_pace_s(run.marks[1:])
    return max(pause_s, _POLL_S)
