"""Segments of live jobs as real training runs."""

import os
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Literal

from makespan.errors import unknown_name
from makespan.hardware import NodeSpec
from makespan.live._segments import Segment, SegmentResult
from makespan.plans import ExecutionPlan
from makespan.profiling import ProfilePoint, model_of, point_plan
from makespan.runtime import Launcher, LocalLauncher, SlurmLauncher, latest_checkpoint
from makespan.sim import Configuration
from makespan.training import RunResult, TrainingJob, read_progress, request_stop, train
from makespan.workloads import JobSpec, workload

__all__ = [
    "LaunchOn",
    "ProcessTrainer",
    "configuration_plan",
    "local_slots",
    "slots_of",
    "slurm_slots",
    "steady_wall_s",
]

LaunchOn = Callable[[tuple[int, ...]], Launcher]
"""From slots to the launcher whose processes use them."""


def local_slots(device: Literal["cpu", "cuda"]) -> LaunchOn:
    """Return a choice of launchers on this machine: a slot is a CPU core, or a GPU.

    Parameters
    ----------
    device
        What a slot is.
    """
    if device == "cuda":
        return lambda slots: LocalLauncher(device="cuda", gpus=slots)
    cpus = sorted(os.sched_getaffinity(0))
    return lambda slots: LocalLauncher(cpus=tuple(cpus[slot % len(cpus)] for slot in slots))


def slurm_slots(device: Literal["cpu", "cuda"]) -> LaunchOn:
    """Return a choice of launchers inside an allocation of Slurm: a slot is a task with its device.

    Every segment is a step of its own, to which Slurm gives cores and devices that no other step has.

    Parameters
    ----------
    device
        What each process uses.
    """

    def launcher(slots: tuple[int, ...]) -> Launcher:
        options = ["--nodes=1", "--exact", "--cpus-per-task=1", "--mem=0"]
        if device == "cuda":
            options.append(f"--gres=gpu:{len(slots)}")
        return SlurmLauncher(device, tuple(options), threads_per_process=1)

    return launcher


def slots_of(launcher: str, device: str) -> LaunchOn:
    """Return a choice of launchers by name.

    Parameters
    ----------
    launcher
        ``local`` or ``slurm``.
    device
        ``cpu`` or ``cuda``.

    Raises
    ------
    UnknownNameError
        There is no such launcher or device.
    """
    known = {"local": local_slots, "slurm": slurm_slots}
    if launcher not in known:
        raise unknown_name("launcher", launcher, known)
    if device not in ("cpu", "cuda"):
        raise unknown_name("device", device, ("cpu", "cuda"))
    return known[launcher]("cuda" if device == "cuda" else "cpu")


def steady_wall_s(result: RunResult) -> float:
    """Return the wall time that the steps of a run take once they are warm [s].

    The first step of new processes is slow, and that belongs to what a restart costs.
    """
    return len(result.times) * median(step.step_s for step in result.times) if result.times else 0.0


def configuration_plan(item: Configuration, node: NodeSpec) -> ExecutionPlan:
    """Return the execution plan of a configuration, with the micro-batch size of the profile."""
    point = ProfilePoint(item.plan, item.placement, item.cpu_threads)
    return point_plan(point, workload(item.workload), node)


class ProcessTrainer:
    """Trains small models in processes of their own.

    Parameters
    ----------
    directory
        Where runs and checkpoints are kept, one directory a job.
    node
        Decides micro-batch sizes, as in the profile.
    launch_on
        Where processes run.
    seeds
        Seed of each job by its name.
    checkpoint_every
        Steps between checkpoints of each workload, besides those at stops; 0 for none.
    is_here
        Whether processes run on this machine, so that it may kill them.
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
        self._directory = directory
        self._node = node
        self._launch_on = launch_on
        self._seeds = seeds
        self._checkpoint_every = checkpoint_every
        self._is_here = is_here

    def train(self, segment: Segment) -> SegmentResult:
        """Run a segment; see `Trainer.train`."""
        name, key = segment.job.job_id, segment.job.workload
        checkpoints = self._checkpoints(segment.job)
        checkpoints.mkdir(parents=True, exist_ok=True)
        job = TrainingJob(
            model_of(workload(key)),
            configuration_plan(segment.configuration, self._node),
            segment.job.steps,
            seed=self._seeds[name],
            data_seed=self._seeds[name],
            checkpoint_every=self._checkpoint_every.get(key, 0),
        )
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
        progress = read_progress(self._run_dir(segment)) if self._is_here else None
        for pid in () if progress is None else progress.pids:
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
