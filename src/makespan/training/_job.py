"""What to train, and what came of it; plain values that cross process boundaries as JSON."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from makespan.errors import InfeasiblePlanError, InputError
from makespan.plans import ExecutionPlan, PlanFamily
from makespan.training.zoo import SmallModel

__all__ = [
    "PhaseTimes", "Progress", "RestartCost", "RunResult", "TrainingJob", "check_supported", "job_from",
    "job_values", "result_from", "unsupported_reasons",
]  # fmt: skip


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
