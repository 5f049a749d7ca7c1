"""Train: the calls that start processes and return what they did."""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from makespan.errors import CheckpointError, InputError
from makespan.leftovers import temporary_directory
from makespan.plans import ExecutionPlan
from makespan.runtime import Checkpoint, Launch, Launcher, LocalLauncher, RunDirectory, latest_checkpoint
from makespan.training._job import (
    Progress,
    RunResult,
    TrainingJob,
    check_supported,
    job_from,
    job_values,
    result_from,
)

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "cost_table", "read_progress", "request_stop", "train", "train_all", "train_compared", "train_switching",
]  # fmt: skip

_WORKER = "makespan.training._worker"
_MUST_AGREE = ("model", "seed", "data_seed", "learning_rate", "warmup_steps", "weight_decay")
_log = logging.getLogger(__name__)


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
    launcher, run_dir
        Where the processes run, None for `LocalLauncher` on CPU; directory for `read_progress` and
        `request_stop`, None for a temporary one.
    checkpoint_dir
        Where a checkpoint is written at the end, at a stop request and every
        ``job.checkpoint_every`` steps. None for no checkpoints.
    resume
        Directory of checkpoints from whose newest the run continues, whatever plan wrote it. Loading runs
        what is pickled in a checkpoint: name only directories whose writer you trust. Files that its
        manifest does not vouch for are refused before torch opens any.
    keep_gradients
        Whether the gradients of the first step are written (needs ``run_dir``).

    Raises
    ------
    InfeasiblePlanError, CheckpointError, ChecksumError
        Before a process starts: the plan cannot train the model here; there is no checkpoint with a
        manifest in ``resume``, or one of another run; a file of it is damaged or not in its manifest.
    WorkerError
        A process died or hung. All others were brought down.
    """
    launcher = launcher if launcher is not None else LocalLauncher()
    check_supported(job.plan, job.model, launcher.n_devices)
    source = None if resume is None else _continued(job, Path(resume))
    (result,) = _execute([job], launcher, run_dir, checkpoint_dir, source, keep_gradients)
    return result


def train_all(
    jobs: Sequence[TrainingJob],
    *,
    launcher: Launcher | None = None,
    run_dir: str | Path | None = None,
    keep_gradients: bool = False,
    on_beat: Callable[[Sequence[RunResult]], None] = lambda results: None,
) -> tuple[RunResult, ...]:
    """Train several jobs one after the other in one group of processes, without checkpoints.

    This saves the start of processes, for example when many plans are profiled. Options and errors are
    those of `train`; an `InputError` says that the jobs need different numbers of processes. With each
    heartbeat ``on_beat`` gets the results that are new, often none.
    """
    launcher = launcher if launcher is not None else LocalLauncher()
    if len({job.plan.n_gpus for job in jobs}) != 1:
        counts = ", ".join(str(job.plan.n_gpus) for job in jobs) or "no job"
        raise InputError(f"jobs that train together need equally many processes; found {counts}")
    for job in jobs:
        check_supported(job.plan, job.model, launcher.n_devices)
    return tuple(_execute(jobs, launcher, run_dir, None, None, keep_gradients, on_beat))


def _continued(job: TrainingJob, directory: Path) -> dict[str, Any]:
    """Find and check the checkpoint from which a job continues."""
    begun = time.perf_counter()
    checkpoint = latest_checkpoint(directory)
    if checkpoint is None:
        raise CheckpointError(f"{directory}: no complete checkpoint; accepted: step-<number> with a manifest")
    _check_continues(checkpoint, job)
    checkpoint.verify()
    source = {"path": str(checkpoint.path.resolve()), "step": checkpoint.step, "save_s": checkpoint.save_s}
    return source | {"verify_s": time.perf_counter() - begun}


def _check_continues(checkpoint: Checkpoint, job: TrainingJob) -> None:
    """Check that a job continues the run of a checkpoint; plan and processes may differ."""
    path = checkpoint.path
    try:
        before = job_from(checkpoint.values["job"])
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"{path}: its manifest has no job of makespan.training") from None
    for name in _MUST_AGREE:
        found, wanted = getattr(before, name), getattr(job, name)
        if found != wanted:
            raise CheckpointError(f"{path}: written with {name} {found}, the job has {wanted}")
    found, wanted = before.plan.global_batch_size, job.plan.global_batch_size
    if found != wanted:
        raise CheckpointError(f"{path}: written with global batch {found}, the plan has {wanted}")
    if checkpoint.step >= job.steps:
        raise CheckpointError(f"{path}: {checkpoint.step} steps are done, the job asks for {job.steps}")


def _execute(
    jobs: Sequence[TrainingJob],
    launcher: Launcher,
    run_dir: str | Path | None,
    checkpoint_dir: str | Path | None,
    source: Mapping[str, Any] | None,
    keep_gradients: bool,
    on_beat: Callable[[Sequence[RunResult]], None] = lambda results: None,
) -> list[RunResult]:
    """Run the request and read the results as they come."""
    if run_dir is None:
        if keep_gradients:
            raise InputError("keep_gradients needs run_dir, the directory in which they are kept")
        with temporary_directory("run") as name:
            return _execute(jobs, launcher, name, checkpoint_dir, source, keep_gradients, on_beat)
    directory, plan = Path(run_dir).resolve(), jobs[0].plan
    request = {
        "jobs": [job_values(job) for job in jobs],
        "checkpoint_dir": None if checkpoint_dir is None else str(Path(checkpoint_dir).resolve()),
        "resume": source,
        "keep_gradients": keep_gradients,
    }
    _log.info("%d job(s) on %d %s process(es)", len(jobs), plan.n_gpus, launcher.device)
    results: list[RunResult] = []

    def collect() -> None:
        known, found = len(results), RunDirectory(directory)
        while (values := found.result(len(results))) is not None:
            results.append(result_from(values))
        on_beat(results[known:])

    threads = plan.cpu_threads
    launcher.run(Launch(_WORKER, request, plan.n_gpus, directory, threads=threads, on_beat=collect))
    collect()
    return results


def request_stop(run_dir: str | Path) -> None:
    """Ask the run in a directory to stop at the end of its step, with a checkpoint.

    The signal SIGTERM to any of its processes does the same.
    """
    RunDirectory(Path(run_dir)).request_stop()


def read_progress(run_dir: str | Path) -> Progress | None:
    """Heartbeat of the run in a directory, None before its first one."""
    values = RunDirectory(Path(run_dir)).progress()
    if values is None:
        return None
    return Progress(values["step"], values["loss"], values["time_s"], tuple(values["pids"]))


def _train_grouped(jobs: Mapping[str, TrainingJob], launcher: Launcher) -> dict[str, RunResult]:
    """Train jobs by name; those with equally many processes share one group of them."""
    results: dict[str, RunResult] = {}
    for count in sorted({job.plan.n_gpus for job in jobs.values()}):
        group = {name: job for name, job in jobs.items() if job.plan.n_gpus == count}
        results |= zip(group, train_all(list(group.values()), launcher=launcher), strict=True)
    return {name: results[name] for name in jobs}


def train_switching(
    job: TrainingJob,
    switches: Sequence[tuple[int, ExecutionPlan]],
    *,
    launcher: Launcher | None = None,
    checkpoint_dir: str | Path | None = None,
) -> tuple[RunResult, ...]:
    """Train a job that changes its plan on the way, each time through checkpoint and restart.

    Returns a result for each plan in turn.

    Parameters
    ----------
    job, switches
        The job under its first plan; steps after which the plan changes, and the plan from then on. An
        `InputError` says that the steps do not grow from 1 to less than those of the job.
    launcher, checkpoint_dir
        As for `train`; None for a temporary directory.
    """
    bounds = [0, *(step for step, _ in switches), job.steps]
    if sorted(set(bounds)) != bounds:
        found = f"plans change after steps {bounds[1:-1]}"
        raise InputError(f"{found}; accepted: growing numbers from 1 to {job.steps - 1}")
    if checkpoint_dir is None:
        with temporary_directory("checkpoints") as name:
            return train_switching(job, switches, launcher=launcher, checkpoint_dir=name)
    results: list[RunResult] = []
    plans = [job.plan, *(plan for _, plan in switches)]
    for plan, end in zip(plans, bounds[1:], strict=True):
        part = replace(job, plan=plan, steps=end)
        source = checkpoint_dir if results else None
        results.append(train(part, launcher=launcher, checkpoint_dir=checkpoint_dir, resume=source))
    return tuple(results)


def train_compared(
    job: TrainingJob,
    plans: Mapping[str, ExecutionPlan],
    switches: Sequence[tuple[int, str]],
    other_seed: int,
    names: tuple[str, str],
    *,
    launcher: Launcher,
) -> dict[str, tuple[RunResult, ...]]:
    """Train a job under several plans, under changing plans, and with another seed.

    Plans for which there are too few devices are left out, with their switches; the log names them.
    Returns the parts of each run by its name: the plans in order, then the other two.

    Parameters
    ----------
    job, switches
        The job under the plan with which the changing run starts; steps after which it takes up
        another one of the ``plans``, and its name.
    other_seed, names
        Seed of the initial weights of the last run; names of the changing run and of that one.
    """
    available = launcher.n_devices
    fitting = {name: plan for name, plan in plans.items() if available is None or plan.n_gpus <= available}
    for name in [name for name in plans if name not in fitting]:
        _log.warning("plan %s left out: %d devices needed, %s at hand", name, plans[name].n_gpus, available)
    jobs = {name: replace(job, plan=plan) for name, plan in fitting.items()}
    results = _train_grouped(jobs | {names[1]: replace(job, seed=other_seed)}, launcher)
    runs = {name: (result,) for name, result in results.items()}
    changes = [(step, fitting[name]) for step, name in switches if name in fitting]
    return runs | {names[0]: train_switching(job, changes, launcher=launcher)}


def cost_table(runs: Mapping[str, Sequence[RunResult]]) -> "pd.DataFrame":
    """Tabulate what each run cost, from its parts in order.

    Columns ``run, restarts, restart_s, step_s``: parts that continue from a checkpoint, their mean cost
    [s], median step [s].
    """
    import pandas as pd

    records = []
    for name, parts in runs.items():
        restarts = [part.restart_cost.total_s for part in parts if part.restart_cost is not None]
        restart_s = fmean(restarts) if restarts else math.nan
        step_s = median(time.step_s for part in parts for time in part.times)
        records.append({"run": name, "restarts": len(restarts), "restart_s": restart_s, "step_s": step_s})
    return pd.DataFrame(records)
