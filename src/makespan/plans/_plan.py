"""The execution plan: how a job uses its devices."""

from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal, cast

from makespan.errors import PlanError, unknown_name

__all__ = ["DEFAULT_CPU_THREADS", "ExecutionPlan", "PlanFamily"]

DEFAULT_CPU_THREADS = 8
"""CPU threads a GPU that a job asks for unless it says otherwise (Morphling, workload table)."""

_COUNTS = (
    "dp", "tp", "pp", "global_batch_size", "micro_batch_size", "grad_accum_steps", "interleave",
    "cpu_threads", "zero_stage",
)  # fmt: skip
_SCHEDULES = ("1f1b", "gpipe", "interleaved")
_CHECKPOINT_METHODS = ("full", "selective")


class PlanFamily(Enum):
    """Families of execution plans, named as in the tables of Morphling."""

    DP = "DP"
    """Data parallel, with gradient accumulation where memory requires it."""
    GC = "GC"
    """Data parallel with activation checkpointing."""
    ZERO_DP = "ZeRO-DP+GA"
    """Data parallel with partitioned optimiser and gradients."""
    ZERO_OFFLOAD = "ZeRO-Offload"
    """Partitioned, with optimiser state and step on the host."""
    ZERO_OFFLOAD_GC = "ZeRO-Offload+GC"
    """The same with activation checkpointing."""
    TP_GA = "TP+GA"
    """Tensor parallel on all devices, with gradient accumulation."""
    TP_PP = "TP+PP"
    """Tensor and pipeline parallel, one replica."""
    DP_TP_PP = "DP+TP+PP"
    """Tensor and pipeline parallel, several replicas."""

    @property
    def title(self) -> str:
        """Name for tables and legends."""
        return str(self.value)

    @property
    def word(self) -> str:
        """Text of the family's plain plans; empty for families that are written by their degrees."""
        return _WORDS.get(self, "")

    @property
    def is_model_parallel(self) -> bool:
        """Whether plans of the family may split the model over devices."""
        return self in (PlanFamily.TP_GA, PlanFamily.TP_PP, PlanFamily.DP_TP_PP)


_WORDS = {
    PlanFamily.DP: "ga",
    PlanFamily.GC: "gc",
    PlanFamily.ZERO_DP: "zero-dp",
    PlanFamily.ZERO_OFFLOAD: "zero-offload",
    PlanFamily.ZERO_OFFLOAD_GC: "zero-offload+gc",
    PlanFamily.TP_GA: "tp+ga",
}


@dataclass(frozen=True, slots=True)
class ExecutionPlan:
    """How a job uses its devices; raises `PlanError` if its values contradict each other.

    Parameters
    ----------
    dp, tp, pp
        Data-, tensor- and pipeline-parallel degree.
    global_batch_size
        Samples an optimiser step, *B = b a d*.
    micro_batch_size
        Samples a replica and forward pass, *b*.
    grad_accum_steps
        Passes an optimiser step and replica, *a*; under pipeline parallelism these are the
        micro-batches in flight.
    zero_stage
        0 none, 1 optimiser state, 2 plus gradients, 3 plus parameters.
    offload
        Whether optimiser state and step are on the host; needs ``zero_stage >= 1``.
    checkpoint_fraction, checkpoint_method
        Share of the layers with activation checkpointing in [0, 1]; ``full`` or ``selective``.
    schedule, interleave
        Pipeline schedule ``1f1b``, ``gpipe`` or ``interleaved``, and model chunks a stage.
    cpu_threads
        CPU threads a GPU.
    sequence_parallel
        Whether tensor parallelism also shards norms and dropout.
    partition
        Layers of each model chunk, in the order of the model: one chunk a pipeline stage, or
        ``interleave`` chunks dealt to the stages in turn; None for an even split.
    family
        Family of the plan; derived from the degrees if not given.

    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    global_batch_size: int = 1
    micro_batch_size: int = 1
    grad_accum_steps: int = 1
    zero_stage: int = 0
    offload: bool = False
    checkpoint_fraction: float = 0.0
    checkpoint_method: Literal["full", "selective"] = "full"
    schedule: Literal["1f1b", "gpipe", "interleaved"] = "1f1b"
    interleave: int = 1
    cpu_threads: int = DEFAULT_CPU_THREADS
    sequence_parallel: bool = False
    partition: tuple[int, ...] | None = None
    family: PlanFamily | None = None

    def __post_init__(self) -> None:
        self._check_ranges()
        self._check_options()
        product = self.micro_batch_size * self.grad_accum_steps * self.dp
        if product != self.global_batch_size:
            raise PlanError(
                f"batch identity broken: micro_batch_size {self.micro_batch_size} x "
                f"grad_accum_steps {self.grad_accum_steps} x dp {self.dp} = {product}, "
                f"but global_batch_size is {self.global_batch_size}"
            )
        if self.family is None:
            object.__setattr__(self, "family", _derive_family(self))
        else:
            _check_family(self)

    def _check_ranges(self) -> None:
        for name in _COUNTS:
            value, least = getattr(self, name), int(name != "zero_stage")
            if value < least:
                raise PlanError(f"{name} is {value}; accepted: a whole number >= {least}")
        if self.zero_stage > 3:
            raise PlanError(f"zero_stage is {self.zero_stage}; accepted: 0, 1, 2, 3")
        if not 0.0 <= self.checkpoint_fraction <= 1.0:
            raise PlanError(f"checkpoint_fraction is {self.checkpoint_fraction}; accepted: [0, 1]")

    def _check_options(self) -> None:
        if self.schedule not in _SCHEDULES:
            raise unknown_name("pipeline schedule", self.schedule, _SCHEDULES)
        if self.checkpoint_method not in _CHECKPOINT_METHODS:
            raise unknown_name("checkpoint method", self.checkpoint_method, _CHECKPOINT_METHODS)
        if self.offload and self.zero_stage == 0:
            raise PlanError("offload needs a partitioned optimiser; accepted: zero_stage >= 1")
        if self.interleave > 1 and self.schedule != "interleaved":
            raise PlanError(f"interleave {self.interleave} needs schedule 'interleaved'")
        if self.partition is not None and (len(self.partition) != self.n_chunks or min(self.partition) < 1):
            raise PlanError(
                f"partition {self.partition} must give at least one layer to each of pp={self.pp} x "
                f"interleave={self.interleave} model chunks"
            )

    @property
    def n_gpus(self) -> int:
        """Devices that the plan needs, *d t p*."""
        return self.dp * self.tp * self.pp

    @property
    def n_chunks(self) -> int:
        """Model chunks of a pipeline; chunk k belongs to stage k mod *p*."""
        return self.pp * self.interleave

    @property
    def n_microbatches(self) -> int:
        """Micro-batches through each pipeline in one optimiser step."""
        return self.grad_accum_steps

    @property
    def activation_checkpointing(self) -> bool:
        """Whether any layer recomputes its activations."""
        return self.checkpoint_fraction > 0

    @property
    def plan_family(self) -> PlanFamily:
        """Family of the plan; the field ``family`` after construction."""
        return cast(PlanFamily, self.family)

    @property
    def is_model_parallel(self) -> bool:
        """Whether the plan belongs to a family that may split the model."""
        return self.plan_family.is_model_parallel

    @property
    def replica_batch_size(self) -> int:
        """Samples of one replica in one optimiser step, *b a*."""
        return self.micro_batch_size * self.grad_accum_steps

    def with_micro_batch(self, micro_batch_size: int) -> "ExecutionPlan":
        """Return the plan with another micro-batch size, which divides the replica's batch."""
        steps, rest = divmod(self.replica_batch_size, max(micro_batch_size, 1))
        if rest or micro_batch_size < 1:
            raise PlanError(
                f"micro_batch_size {micro_batch_size} does not divide the replica's batch of "
                f"{self.replica_batch_size} samples"
            )
        return replace(self, micro_batch_size=micro_batch_size, grad_accum_steps=steps)

    def with_cpu_threads(self, cpu_threads: int) -> "ExecutionPlan":
        """Return the plan with another number of CPU threads a GPU."""
        return replace(self, cpu_threads=cpu_threads)


def _derive_family(plan: ExecutionPlan) -> PlanFamily:
    if plan.tp * plan.pp > 1:
        return PlanFamily.TP_PP if plan.dp == 1 else PlanFamily.DP_TP_PP
    if plan.offload:
        checkpointed = plan.activation_checkpointing
        return PlanFamily.ZERO_OFFLOAD_GC if checkpointed else PlanFamily.ZERO_OFFLOAD
    if plan.zero_stage:
        return PlanFamily.ZERO_DP
    return PlanFamily.GC if plan.activation_checkpointing else PlanFamily.DP


def _check_family(plan: ExecutionPlan) -> None:
    family, derived = plan.plan_family, _derive_family(plan)
    if family == derived:
        return
    one_replica = plan.dp == 1
    allowed = {
        PlanFamily.TP_GA: one_replica and plan.pp == 1,
        PlanFamily.TP_PP: one_replica,
        PlanFamily.DP_TP_PP: not one_replica,
    }
    if not allowed.get(family, False):
        raise PlanError(
            f"family {family.title!r} does not fit dp={plan.dp} tp={plan.tp} pp={plan.pp} "
            f"zero_stage={plan.zero_stage} offload={plan.offload}; these make {derived.title!r}"
        )
