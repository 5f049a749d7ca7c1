"""Train: the calls that start processes and return what they did."""

from collections.abc import Sequence
from pathlib import Path

from makespan.training._job import Progress, RunResult, TrainingJob
from makespan.training._launch import Launcher

__all__ = ["read_progress", "request_stop", "train", "train_all"]


def train(
    job: TrainingJob,
    *,
    launcher: Launcher | None = None,
    run_dir: str | Path | None = None,
    checkpoint_dir: str | Path | None = None,
    resume: str | Path | None = None,
    keep_gradients: bool = False,
) -> RunResult:
    """Train a job in processes of its own and wait for its end.

    May be called from a background thread; this process does not import torch.

    Parameters
    ----------
    job
        What to train, and under which plan.
    launcher
        Where the processes run; None for `LocalLauncher` on CPU.
    run_dir
        Directory for request, heartbeat, stop request and result; None for a temporary one that is
        removed. See `read_progress` and `request_stop`.
    checkpoint_dir
        Directory of checkpoints; one is written at the end, at a stop request and every
        ``job.checkpoint_every`` steps. None for no checkpoints.
    resume
        Directory of checkpoints from whose newest the run continues, whatever plan wrote it.
    keep_gradients
        Whether the gradients of the first step are written (needs ``run_dir``).

    Returns
    -------
    RunResult
        Losses, times and, for a run that continues, the cost of the restart.

    Raises
    ------
    InfeasiblePlanError
        The plan cannot train the model here; raised before a process starts.
    CheckpointError
        There is no checkpoint in ``resume``, or it belongs to another run; raised before a process
        starts.
    ChecksumError
        A file of the checkpoint is not what was written.
    WorkerError
        A process died or hung. All others were brought down.
    """
    raise NotImplementedError


def train_all(
    jobs: Sequence[TrainingJob],
    *,
    launcher: Launcher | None = None,
    run_dir: str | Path | None = None,
    keep_gradients: bool = False,
) -> tuple[RunResult, ...]:
    """Train several jobs one after the other in one group of processes, without checkpoints.

    This saves the start of processes, for example when many plans are profiled.

    Parameters
    ----------
    jobs
        Jobs whose plans need the same number of processes.
    launcher, run_dir, keep_gradients
        As for `train`.

    Returns
    -------
    tuple of RunResult
        In the order of ``jobs``.

    Raises
    ------
    InputError
        There is no job, or they need different numbers of processes.
    InfeasiblePlanError, WorkerError
        As for `train`.
    """
    raise NotImplementedError


def request_stop(run_dir: str | Path) -> None:
    """Ask the run in a directory to stop at the end of its step, with a checkpoint.

    The signal SIGTERM to any of its processes does the same.
    """
    raise NotImplementedError


def read_progress(run_dir: str | Path) -> Progress | None:
    """Return the heartbeat of the run in a directory, None before its first one."""
    raise NotImplementedError
