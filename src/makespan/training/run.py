"""What to train, and what came of it; plain values that cross process boundaries as JSON."""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from makespan.cleanup import temporary_directory
from makespan.errors import CheckpointError, InfeasiblePlanError, InputError
from makespan.plans import ExecutionPlan, PlanFamily
from makespan.runtime import Checkpoint, Launch, Launcher, LocalLauncher, RunDirectory, latest_checkpoint
from makespan.training.zoo import SmallModel

if TYPE_CHECKING:
    import pandas as pd

_log = logging.getLogger(__name__)


# ------------------------------------------------------------------------------------------------
# What to train, and what came of it; plain values that cross process boundaries as JSON.


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """A training run under one execution plan; an `InputError` says that a number is out of range.

    The losses depend on the plan through floating-point rounding only: initial weights follow from
    ``seed``, and the samples of step *s* and their order from ``data_seed`` and *s*.

    Parameters
    ----------
    model, plan
        What is trained, in float32 with AdamW, and how the devices are used.
    steps
        Optimiser steps, counted from the very first one, also in a run that continues.
    seed, data_seed
        Seeds of the initial weights and of the data.
    learning_rate, warmup_steps, weight_decay
        Of AdamW; the rate grows linearly over the first ``warmup_steps`` steps and is constant then.
    checkpoint_every
        Steps between checkpoints; 0 for one at the end only (where a directory is given).
    """

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
        for name, least in (("steps", 1), ("warmup_steps", 0), ("checkpoint_every", 0)):
            if getattr(self, name) < least:
                raise InputError(f"{name} is {getattr(self, name)}; accepted: a whole number >= {least}")
        if not self.learning_rate > 0:
            raise InputError(f"learning_rate is {self.learning_rate}; accepted: a number > 0")
        if not self.weight_decay >= 0:
            raise InputError(f"weight_decay is {self.weight_decay}; accepted: a number >= 0")


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """Wall times of one optimiser step, mean over the processes [s].

    The whole step includes the exchange of the loss. ``backward_sync_s`` is all but the forward passes
    until gradients are ready: backward passes, recomputation, exchange of gradients and activations,
    waiting in the pipeline. The optimiser's time includes transfers to and from the host and exchange
    of parameters.
    """

    step_s: float
    forward_s: float
    backward_sync_s: float
    optimizer_s: float


@dataclass(frozen=True, slots=True)
class RestartCost:
    """What continuing from a checkpoint cost [s].

    Writing it, measured then; from the launch until all processes had met; building and distributing
    the model under the new plan; checking and reading the checkpoint.
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

    Steps done, counted from the very first one; mean loss of the last step's global batch, NaN before
    the first; when it was written [s since the epoch]; process ids by rank.
    """

    step: int
    loss: float
    time_s: float
    pids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a run did.

    Parameters
    ----------
    first_step
        Steps that were done before this run, 0 for one that starts anew.
    losses, times
        Mean loss of the global batch at each step of this run, before its update; wall times.
    paces_s
        Wall time from the beginning of each step until the next one could begin, with what comes between
        them but for checkpoints [s].
    stopped
        Whether it ended at a stop request, before its last step.
    device
        ``cpu``, or the name of the GPU.
    process_start_s, build_s, save_s
        From launch to a joined group of processes; building the model; each checkpoint [s].
    restart_cost
        What continuing cost; None for a run that started anew.
    checkpoint, gradients
        Directory of the last checkpoint, and file with the gradients of the first step (NumPy
        archive, one full array a parameter); None without one.
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
        """Optimiser steps done in all when the run ended."""
        return self.first_step + len(self.losses)


def job_values(job: TrainingJob) -> dict[str, Any]:
    """Return a job as nested plain values."""
    values = asdict(job)
    values["plan"]["family"] = job.plan.plan_family.value
    return values


def job_from(values: Mapping[str, Any]) -> TrainingJob:
    """Build a job from the values of `job_values`."""
    plan = dict(values["plan"])
    plan["family"] = PlanFamily(plan["family"])
    if plan["partition"] is not None:
        plan["partition"] = tuple(plan["partition"])
    return TrainingJob(**{**values, "model": SmallModel(**values["model"]), "plan": ExecutionPlan(**plan)})


def result_from(values: Mapping[str, Any]) -> RunResult:
    """Build a result from the plain values that a worker writes."""
    cost = values["restart_cost"]
    nested = {
        "losses": tuple(values["losses"]),
        "times": tuple(PhaseTimes(**row) for row in values["times"]),
        "paces_s": tuple(values["paces_s"]),
        "save_s": tuple(values["save_s"]),
        "restart_cost": None if cost is None else RestartCost(**cost),
    }
    return RunResult(**{**values, **nested})


def unsupported_reasons(plan: ExecutionPlan, model: SmallModel, n_devices: int | None = None) -> list[str]:
    """Return every reason why a plan cannot train a model on so many devices; empty if it can."""
    reasons = []
    if n_devices is not None and plan.n_gpus > n_devices:
        found = f"dp={plan.dp} x tp={plan.tp} x pp={plan.pp} needs {plan.n_gpus} devices"
        reasons.append(f"{found}, {n_devices} at hand")
    if plan.tp > 1:
        reasons += _tensor_reasons(plan, model)
    return [*reasons, *_pipeline_reasons(plan, model)]


def check_supported(plan: ExecutionPlan, model: SmallModel, n_devices: int | None = None) -> None:
    """Check that a plan can train a model; an `InfeasiblePlanError` gives all reasons why not."""
    if reasons := unsupported_reasons(plan, model, n_devices):
        raise InfeasiblePlanError(f"the plan cannot train this {model.family} model: " + "; ".join(reasons))


def _tensor_reasons(plan: ExecutionPlan, model: SmallModel) -> Iterator[str]:
    for name in ("heads", "kv_heads", "ffn"):
        if getattr(model, name) % plan.tp:
            yield f"tp={plan.tp} does not divide {name}={getattr(model, name)}"
    if plan.sequence_parallel and model.family == "vit":
        yield "sequence parallelism needs a result at every position, and vit averages over them"
    if plan.sequence_parallel and model.seq % plan.tp:
        yield f"sequence parallelism with tp={plan.tp} does not divide seq={model.seq}"


def _pipeline_reasons(plan: ExecutionPlan, model: SmallModel) -> Iterator[str]:
    chunks = plan.pp * plan.interleave
    if chunks > model.n_layers:
        yield f"{chunks} pipeline stages need at least one layer each, the model has {model.n_layers}"
    if plan.partition is not None and sum(plan.partition) != model.n_layers:
        yield f"partition {plan.partition} covers {sum(plan.partition)} of {model.n_layers} layers"
    if plan.pp > 1 and plan.grad_accum_steps < plan.pp:
        needed = f"a pipeline of {plan.pp} stages needs at least as many micro-batches in flight"
        yield f"{needed}, found {plan.grad_accum_steps}"
    if plan.interleave > 1 and plan.grad_accum_steps % plan.pp:
        yield f"the interleaved schedule needs micro-batches in multiples of {plan.pp}"


# ------------------------------------------------------------------------------------------------
# Train: the calls that start processes and return what they did.

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
