"""Training runs: the job, the calls that train it in separate processes, and the result.

Jobs, requests and results cross process boundaries as JSON, which the codecs `JOB`, `REQUEST` and `RESULT`
write and read.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING

from pydantic import ConfigDict, TypeAdapter

from makespan.arguments import check_fields
from makespan.cleanup import temporary_directory
from makespan.errors import CheckpointError, InfeasiblePlanError, InputError
from makespan.plans import ExecutionPlan
from makespan.runtime import Launch, Launcher, LocalLauncher, RunDirectory, latest_checkpoint
from makespan.training.zoo import SmallModel

if TYPE_CHECKING:
    import pandas as pd

_log = logging.getLogger(__name__)


# --- Jobs and results -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """A training run under one execution plan; an `InputError` names a number that is out of range.

    The losses depend on the plan through floating-point rounding only: initial weights follow from
    ``seed``, and the samples of step *s* and their order from ``data_seed`` and *s*.

    Parameters
    ----------
    model, plan
        Model that is trained, in float32 with AdamW, and its use of the devices.
    steps
        Optimiser steps in total, including those before a run that resumes.
    seed, data_seed
        Seeds of the initial weights and of the data.
    learning_rate, warmup_steps, weight_decay
        Parameters of AdamW; the rate grows linearly over the first ``warmup_steps`` steps and is constant
        afterwards.
    checkpoint_every
        Steps between checkpoints; 0 for one at the end only (if a directory is given).
    """

    __pydantic_config__ = ConfigDict(extra="forbid")  # a job with unknown fields is another job

    model: SmallModel
    plan: ExecutionPlan
    steps: int
    seed: int = 0
    data_seed: int = 0
    learning_rate: float = 3e-3
    warmup_steps: int = 10
    weight_decay: float = 0.01
    checkpoint_every: int = 0

    def __post_init__(self) -> None:
        """Check the numbers."""
        counts = ("seed", "data_seed", "warmup_steps", "checkpoint_every")
        check_fields(self, "", positive=("steps",), not_negative=counts)
        if not self.learning_rate > 0:
            raise InputError(f"learning_rate is {self.learning_rate}; expected a number > 0")
        if not self.weight_decay >= 0:
            raise InputError(f"weight_decay is {self.weight_decay}; expected a number >= 0")


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """Wall times of one optimiser step, mean over the processes [s].

    The whole step includes the exchange of the loss. ``backward_sync_s`` is the time until gradients are
    ready, without the forward passes: backward passes, recomputation, exchange of gradients and activations,
    and pipeline bubbles. The optimiser's time includes transfers to and from the host and the exchange of
    parameters.
    """

    step_s: float
    forward_s: float
    backward_sync_s: float
    optimizer_s: float


@dataclass(frozen=True, slots=True)
class RestartCost:
    """Cost of resuming from a checkpoint [s].

    ``save_s`` is the time that writing the checkpoint took; ``process_start_s`` the time from the launch
    until all processes had joined; ``build_s`` the time to build and distribute the model under the new plan;
    ``load_s`` the time to check and read the checkpoint.
    """

    save_s: float
    process_start_s: float
    build_s: float
    load_s: float

    @property
    def total_s(self) -> float:
        """Sum of all parts."""
        return self.save_s + self.process_start_s + self.build_s + self.load_s


@dataclass(frozen=True, slots=True)
class Progress:
    """Heartbeat of a running job, rewritten after every step.

    ``step`` is the number of steps done in total; ``loss`` is the mean loss of the last step's global batch,
    NaN before the first; ``time_s`` is the time of writing [s since the epoch]; ``pids`` are the process ids
    by rank.
    """

    step: int
    loss: float
    time_s: float
    pids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RunResult:
    """Result of a run.

    Parameters
    ----------
    first_step
        Steps done before this run, 0 for a run that starts from scratch.
    losses, times
        Mean loss of the global batch at each step of this run, before its update; wall times.
    paces_s
        Wall time from the start of each step until the next one could start, including everything between
        them except checkpoints [s].
    stopped
        Whether the run ended at a stop request, before its last step.
    device
        ``cpu``, or the name of the GPU.
    process_start_s, build_s, save_s
        Time from launch to a joined group of processes; to build the model; to write each checkpoint [s].
    restart_cost
        Cost of resuming; None for a run that started from scratch.
    checkpoint, gradients
        Directory of the last checkpoint, and file with the gradients of the first step (NumPy
        archive, one full array per parameter); None without one.
    peak_memory_bytes
        Largest memory of any process: allocated on the device, or resident on CPU.
    """

    first_step: int
    losses: tuple[float, ...]
    times: tuple[PhaseTimes, ...]
    paces_s: tuple[float, ...]
    stopped: bool
    device: str
    process_start_s: float
    build_s: float
    save_s: tuple[float, ...]
    restart_cost: RestartCost | None
    checkpoint: str | None
    gradients: str | None
    peak_memory_bytes: int

    @property
    def last_step(self) -> int:
        """Optimiser steps done in total when the run ended."""
        return self.first_step + len(self.losses)


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Checkpoint from which a run resumes.

    ``path`` is its directory and ``step`` its number of steps done; writing it took ``save_s`` and checking
    its files ``verify_s`` [s].
    """

    path: Path
    step: int
    save_s: float
    verify_s: float


@dataclass(frozen=True, slots=True)
class TrainingRequest:
    """Request to train jobs one after the other in one group of processes; see `train` for the options."""

    jobs: tuple[TrainingJob, ...]
    checkpoint_dir: Path | None
    resume: ResumePoint | None
    keep_gradients: bool


JOB, REQUEST, RESULT = TypeAdapter(TrainingJob), TypeAdapter(TrainingRequest), TypeAdapter(RunResult)
PROGRESS = TypeAdapter(Progress)


def unsupported_reasons(plan: ExecutionPlan, model: SmallModel, n_devices: int | None = None) -> list[str]:
    """Return every reason why a plan cannot train a model on ``n_devices`` devices; empty if it can."""
    reasons = []
    if n_devices is not None and plan.n_gpus > n_devices:
        needed = f"dp={plan.dp} x tp={plan.tp} x pp={plan.pp} needs {plan.n_gpus} devices"
        reasons.append(f"{needed}, found {n_devices}")
    if plan.tp > 1:
        for name in ("heads", "kv_heads", "ffn"):
            if getattr(model, name) % plan.tp:
                reasons.append(f"tp={plan.tp} does not divide {name}={getattr(model, name)}")
        if plan.sequence_parallel and model.family == "vit":
            reasons.append(
                "sequence parallelism needs a result at every position, and vit averages over them"
            )
        if plan.sequence_parallel and model.seq % plan.tp:
            reasons.append(f"sequence parallelism with tp={plan.tp} does not divide seq={model.seq}")
    n_chunks = plan.pp * plan.interleave
    if n_chunks > model.n_layers:
        needed = f"{n_chunks} pipeline stages need at least one layer each"
        reasons.append(f"{needed}, the model has {model.n_layers}")
    if plan.partition is not None and sum(plan.partition) != model.n_layers:
        covered = sum(plan.partition)
        reasons.append(f"partition {plan.partition} covers {covered} of {model.n_layers} layers")
    if plan.pp > 1 and plan.grad_accum_steps < plan.pp:
        needed = f"a pipeline of {plan.pp} stages needs at least as many micro-batches in flight"
        reasons.append(f"{needed}, found {plan.grad_accum_steps}")
    if plan.interleave > 1 and plan.grad_accum_steps % plan.pp:
        reasons.append(f"the interleaved schedule needs micro-batches in multiples of {plan.pp}")
    return reasons


def check_supported(plan: ExecutionPlan, model: SmallModel, n_devices: int | None = None) -> None:
    """Check that a plan can train a model; an `InfeasiblePlanError` lists all reasons against it."""
    if reasons := unsupported_reasons(plan, model, n_devices):
        raise InfeasiblePlanError(f"the plan cannot train this {model.family} model: " + "; ".join(reasons))


# --- Training ---------------------------------------------------------------------------------------

_WORKER = "makespan.training.worker"
_MUST_AGREE = ("model", "seed", "data_seed", "learning_rate", "warmup_steps", "weight_decay")


def train(
    job: TrainingJob,
    *,
    launcher: Launcher | None = None,
    run_dir: str | Path | None = None,
    checkpoint_dir: str | Path | None = None,
    resume: str | Path | None = None,
    keep_gradients: bool = False,
    is_killed: Callable[[], bool] = lambda: False,
) -> RunResult:
    """Train a job in separate processes and wait for its end.

    This function may be called from a background thread; it does not import torch.

    Parameters
    ----------
    launcher, run_dir
        Launcher of the processes, None for `LocalLauncher` on CPU; directory for `read_progress` and
        `request_stop`, None for a temporary one.
    checkpoint_dir
        Directory in which a checkpoint is written at the end, at a stop request and every
        ``job.checkpoint_every`` steps; None for no checkpoints.
    resume
        Directory of checkpoints; the run resumes from the newest one, under any plan. Loading a checkpoint
        unpickles it, which can run code, so use only directories whose writer you trust. Files that the
        manifest does not list are rejected before torch opens any.
    keep_gradients
        Whether the gradients of the first step are written (needs ``run_dir``).
    is_killed
        Asked every 20 ms; once it returns True, all processes get SIGKILL and a `LostWorkerError` is raised.

    Raises
    ------
    InfeasiblePlanError, CheckpointError, ChecksumError
        Before a process starts: the plan cannot train the model on this machine; ``resume`` has no checkpoint
        with a manifest, or one of another run; a file of it is damaged or not in its manifest.
    WorkerError
        A process crashed or hung. All others were killed.
    """
    launcher = launcher if launcher is not None else LocalLauncher()
    check_supported(job.plan, job.model, launcher.n_devices)
    resume_point = None if resume is None else _resumable(job, Path(resume))
    (result,) = _execute(
        [job], launcher, run_dir, checkpoint_dir, resume_point, keep_gradients, is_killed=is_killed
    )
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

    This saves process starts, for example when many plans are profiled. Options and errors are those of
    `train`; jobs that need different numbers of processes raise an `InputError`. ``on_beat`` is called at
    each heartbeat with the new results, often none.
    """
    launcher = launcher if launcher is not None else LocalLauncher()
    if len({job.plan.n_gpus for job in jobs}) != 1:
        counts = ", ".join(str(job.plan.n_gpus) for job in jobs) or "no job"
        raise InputError(f"jobs that train together need equally many processes; found {counts}")
    for job in jobs:
        check_supported(job.plan, job.model, launcher.n_devices)
    return tuple(_execute(jobs, launcher, run_dir, None, None, keep_gradients, on_beat))


def _resumable(job: TrainingJob, directory: Path) -> ResumePoint:
    """Find and check the checkpoint from which a job resumes; its plan and its processes may differ."""
    begun = time.perf_counter()
    checkpoint = latest_checkpoint(directory)
    if checkpoint is None:
        raise CheckpointError(f"{directory}: no complete checkpoint; expected step-<number> with a manifest")
    path = checkpoint.path
    try:
        before = JOB.validate_python(checkpoint.values["job"])
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"{path}: its manifest has no job of makespan.training") from None
    for name in _MUST_AGREE:
        saved, wanted = getattr(before, name), getattr(job, name)
        if saved != wanted:
            raise CheckpointError(f"{path}: written with {name} {saved}, but the job has {wanted}")
    saved, wanted = before.plan.global_batch_size, job.plan.global_batch_size
    if saved != wanted:
        raise CheckpointError(f"{path}: written with global batch {saved}, but the plan has {wanted}")
    if checkpoint.step >= job.steps:
        raise CheckpointError(
            f"{path}: {checkpoint.step} steps are done; expected a job of more, got {job.steps}"
        )
    checkpoint.verify()
    return ResumePoint(path.resolve(), checkpoint.step, checkpoint.save_s, time.perf_counter() - begun)


def _execute(
    jobs: Sequence[TrainingJob],
    launcher: Launcher,
    run_dir: str | Path | None,
    checkpoint_dir: str | Path | None,
    resume: ResumePoint | None,
    keep_gradients: bool,
    on_beat: Callable[[Sequence[RunResult]], None] = lambda results: None,
    is_killed: Callable[[], bool] = lambda: False,
) -> list[RunResult]:
    """Run the request, and read the results as they arrive."""
    if run_dir is None:
        if keep_gradients:
            raise InputError("keep_gradients needs run_dir, the directory in which they are kept")
        with temporary_directory("run") as name:
            return _execute(jobs, launcher, name, checkpoint_dir, resume, keep_gradients, on_beat, is_killed)
    directory, plan = Path(run_dir).resolve(), jobs[0].plan
    checkpoints = None if checkpoint_dir is None else Path(checkpoint_dir).resolve()
    request = TrainingRequest(tuple(jobs), checkpoints, resume, keep_gradients)
    values = REQUEST.dump_python(request, mode="json")
    _log.info("%d job(s) on %d %s process(es)", len(jobs), plan.n_gpus, launcher.device)
    results: list[RunResult] = []

    def collect() -> None:
        n_known, run = len(results), RunDirectory(directory)
        while (result := run.result(len(results))) is not None:
            results.append(RESULT.validate_python(result))
        on_beat(results[n_known:])

    threads = plan.cpu_threads
    launcher.run(
        Launch(_WORKER, values, plan.n_gpus, directory, threads=threads, on_beat=collect, is_killed=is_killed)
    )
    collect()
    return results


def request_stop(run_dir: str | Path) -> None:
    """Request that the run in a directory stops at the end of its step, with a checkpoint.

    SIGTERM to any of its processes has the same effect.
    """
    RunDirectory(Path(run_dir)).request_stop()


def read_progress(run_dir: str | Path) -> Progress | None:
    """Return the last heartbeat of the run in a directory, None before its first one."""
    values = RunDirectory(Path(run_dir)).progress()
    return None if values is None else PROGRESS.validate_python(values)


def train_switching(
    job: TrainingJob,
    switches: Sequence[tuple[int, ExecutionPlan]],
    *,
    launcher: Launcher | None = None,
    checkpoint_dir: str | Path | None = None,
) -> tuple[RunResult, ...]:
    """Train a job that changes its plan, each time through a checkpoint and a restart.

    Returns one result per plan, in order.

    Parameters
    ----------
    job, switches
        The job under its first plan; steps after which the plan changes, and the plan from then on. An
        `InputError` is raised unless the steps increase from at least 1 to less than those of the job.
    launcher, checkpoint_dir
        As for `train`; None for a temporary directory.
    """
    bounds = [0, *(step for step, _ in switches), job.steps]
    if sorted(set(bounds)) != bounds:
        changes = f"plans change after steps {bounds[1:-1]}"
        raise InputError(f"{changes}; expected increasing numbers from 1 to {job.steps - 1}")
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

    Plans that need more devices than there are, and switches to them, are left out; the log names them.
    Returns the parts of each run by its name: the plans in order, then the other two.

    Parameters
    ----------
    job, switches
        The job under the first plan of the changing run; steps after which it changes to another one of the
        ``plans``, and the name of that plan.
    other_seed, names
        Seed of the initial weights of the last run; names of the changing run and of the last run.
    """
    available = launcher.n_devices
    fitting = {name: plan for name, plan in plans.items() if available is None or plan.n_gpus <= available}
    for name in [name for name in plans if name not in fitting]:
        _log.warning("plan %s left out: needs %d devices, found %s", name, plans[name].n_gpus, available)
    jobs = {name: replace(job, plan=plan) for name, plan in fitting.items()}
    jobs[names[1]] = replace(job, seed=other_seed)
    # Jobs with equally many processes share one group of processes.
    results: dict[str, RunResult] = {}
    for count in sorted({job.plan.n_gpus for job in jobs.values()}):
        group = {name: job for name, job in jobs.items() if job.plan.n_gpus == count}
        results |= zip(group, train_all(list(group.values()), launcher=launcher), strict=True)
    runs = {name: (results[name],) for name in jobs}
    changes = [(step, fitting[name]) for step, name in switches if name in fitting]
    return runs | {names[0]: train_switching(job, changes, launcher=launcher)}


def cost_table(runs: Mapping[str, Sequence[RunResult]]) -> "pd.DataFrame":
    """Tabulate the cost of each run, from its parts in order.

    Columns ``run, restarts, restart_s, step_s``: name, parts that resume from a checkpoint, their mean cost
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
