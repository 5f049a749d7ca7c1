"""What a model, a software stack, a workload and a job are."""

import math
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from makespan.errors import InputError, unknown_name
from makespan.workloads._layers import parameter_count

__all__ = ["BlockSpec", "BoundWorkload", "JobSpec", "MaySplit", "ModelSpec", "Stack", "Workload"]

BlockKind = Literal["enc", "dec", "causal", "vit"]
_BLOCK_KINDS = ("enc", "dec", "causal", "vit")
_HOST_OPTIMIZERS = ("fused", "slow")
_PHASE_STYLES = ("ddp", "zero", "3d")
_COUNT_TOLERANCE = 0.1  # of stated parameters: papers print two digits, and OPT-350M has narrower embeddings
_MOST_BYTES = 4  # of a gradient


class MaySplit(Protocol):
    """What may split the model over devices, such as an execution plan."""

    @property
    def is_model_parallel(self) -> bool:
        """Whether the plan belongs to a family with tensor or pipeline parallelism."""


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """A run of equal transformer layers."""

    n_layers: int
    kind: BlockKind  # ``dec`` has self and cross attention
    seq: int  # tokens a sample
    hidden: int
    heads: int
    kv_heads: int
    ffn: int  # feed-forward size
    gated: bool  # whether the feed-forward part has a gate, that is three matrices
    kv_channels: int  # size of one attention head

    def __post_init__(self) -> None:
        if self.kind not in _BLOCK_KINDS:
            raise unknown_name("block kind", self.kind, _BLOCK_KINDS)
        for name in ("n_layers", "seq", "hidden", "heads", "kv_heads", "ffn", "kv_channels"):
            if getattr(self, name) < 1:
                raise InputError(f"BlockSpec: {name} is {getattr(self, name)}; accepted: >= 1")
        if self.heads % self.kv_heads:
            raise InputError(f"BlockSpec: {self.heads} heads are not a multiple of {self.kv_heads} kv_heads")


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model architecture.

    Parameters
    ----------
    key, title, family
        Key in the catalogue, title in tables and figures, and architecture, such as ``bert`` or ``llama``.
    blocks
        Runs of equal layers, from input to output.
    vocab
        Rows of the output head, or classes of an image model.
    tied_head
        Whether the embedding has the same weights.
    max_positions
        Rows of a learned position table; 0 without one.
    parameters
        Published count, used for memory, communication and optimiser volumes; 0 for that of the layers.
    source
        Where the numbers come from.

    Raises
    ------
    InputError
        There is no block, a count is not positive, or the stated parameters contradict the layers.
    UnknownNameError
        The family is not known.
    """

    key: str
    title: str
    family: str
    blocks: tuple[BlockSpec, ...]
    vocab: int
    tied_head: bool
    max_positions: int
    parameters: int
    source: str

    def __post_init__(self) -> None:
        if not self.blocks or self.parameters < 0 or self.vocab < 1 or self.max_positions < 0:
            raise InputError(
                f"ModelSpec {self.key!r}: needs one block or more, a positive vocab, and no negative "
                "parameters or max_positions"
            )
        kinds = {block.kind for block in self.blocks}
        if "dec" in kinds and "enc" not in kinds:
            raise InputError(
                f"ModelSpec {self.key!r}: blocks of kind 'dec' attend to an encoder, but there is no 'enc' "
                "block; add one, or use kind 'causal'"
            )
        implied = parameter_count(self)
        if self.parameters == 0:
            object.__setattr__(self, "parameters", implied)
        elif abs(self.parameters - implied) > _COUNT_TOLERANCE * implied:
            raise InputError(
                f"ModelSpec {self.key!r}: parameters is {self.parameters}, but its layers, embeddings and "
                f"head have {implied}; expected a difference of at most {_COUNT_TOLERANCE:.0%}, or 0 for "
                "what they have"
            )

    @property
    def n_layers(self) -> int:
        """Layers of all blocks."""
        return sum(block.n_layers for block in self.blocks)

    @property
    def hidden(self) -> int:
        """Hidden size of the first block."""
        return self.blocks[0].hidden

    @property
    def heads(self) -> int:
        """Attention heads of the first block."""
        return self.blocks[0].heads

    @property
    def seq(self) -> int:
        """Tokens a sample in the first block."""
        return self.blocks[0].seq

    def with_seq(self, *seq: int) -> "ModelSpec":
        """Return the model with another sequence length for each block."""
        if len(seq) != len(self.blocks):
            raise InputError(f"ModelSpec {self.key!r}: {len(seq)} lengths, {len(self.blocks)} blocks")
        blocks = tuple(replace(block, seq=s) for block, s in zip(self.blocks, seq, strict=True))
        return replace(self, blocks=blocks)


@dataclass(frozen=True, slots=True)
class Stack:
    """What the training software does, as far as it changes time or memory."""

    name: str
    version: str  # the vintage that it describes
    gradient_bytes: int  # of one gradient under plain data parallelism, in memory and on the wire
    overlaps_gradients: bool  # whether the exchange runs in buckets beside the backward pass
    partitioned_bytes: int  # of one gradient or parameter under a partitioned optimiser, in the same places
    fused_optimizer: bool  # whether the device optimiser is one fused kernel
    host_optimizer: Literal["fused", "slow"]  # the one used under offload
    fused_attention: bool  # whether attention scores stay out of memory
    sequence_parallel: bool  # whether tensor parallelism also shards norm and dropout layers
    full_checkpointing: bool  # whether every layer recomputes, whatever the plan says
    hierarchical_collectives: bool  # whether the exchange may reduce inside the nodes first
    phase_style: Literal["ddp", "zero", "3d"]  # which work the reported phase columns contain
    calibrated: bool  # whether measured rows stand behind the constants
    source: str
    variant_of: str = ""  # name of the stack whose software this is with other options; empty if of none

    def __post_init__(self) -> None:
        if self.host_optimizer not in _HOST_OPTIMIZERS:
            raise unknown_name("host_optimizer", self.host_optimizer, _HOST_OPTIMIZERS)
        if self.phase_style not in _PHASE_STYLES:
            raise unknown_name("phase_style", self.phase_style, _PHASE_STYLES)
        for name in ("gradient_bytes", "partitioned_bytes"):
            if getattr(self, name) not in range(1, _MOST_BYTES + 1):
                raise InputError(
                    f"Stack {self.name!r}: {name} is {getattr(self, name)!r}; expected a whole number of "
                    f"bytes from 1 to {_MOST_BYTES}"
                )

    @property
    def label(self) -> str:
        """Name and vintage, such as ``megatron@2022``."""
        return f"{self.name}@{self.version}"

    @property
    def software(self) -> str:
        """Name that all variants of one training software share."""
        return self.variant_of or self.name


@dataclass(frozen=True, slots=True)
class BoundWorkload:
    """A workload as one plan sees it: one model shape, with its sequence length, and one stack."""

    key: str
    model: ModelSpec
    stack: Stack
    global_batch_size: int
    precision: str
    max_microbatches: int


@dataclass(frozen=True, slots=True)
class Workload:
    """What a job trains.

    Parameters
    ----------
    key, aliases
        Key in the catalogue, and other names accepted for it.
    model, global_batch_size, precision
        What is trained, samples an optimiser step, and ``fp16`` or the like.
    families
        Plan families that users choose from, values of `makespan.plans.PlanFamily`.
    data_parallel_stack, model_parallel_stack
        Training software, the second of plans with tensor or pipeline parallelism.
    max_microbatches
        Largest number of micro-batches an optimiser step.
    source
        Where the numbers come from.
    model_parallel_seq
        Tokens a sample of each block under plans of the second stack, where they differ.
    trace_cpu_threads
        CPU threads a GPU in published traces, first of rows that do not say.
    used_for_calibration
        Whether what is behind published traces is clear enough.
    """

    key: str
    aliases: tuple[str, ...]
    model: ModelSpec
    global_batch_size: int
    precision: str
    families: tuple[str, ...]
    data_parallel_stack: Stack
    model_parallel_stack: Stack
    max_microbatches: int
    source: str
    model_parallel_seq: tuple[int, ...] = ()
    trace_cpu_threads: tuple[int, ...] = ()
    used_for_calibration: bool = True

    def __post_init__(self) -> None:
        if self.global_batch_size < 1 or self.max_microbatches < 1:
            raise InputError(
                f"Workload {self.key!r}: global_batch_size and max_microbatches must be >= 1; "
                f"found {self.global_batch_size} and {self.max_microbatches}"
            )
        if self.model_parallel_seq:
            self.model.with_seq(*self.model_parallel_seq)  # as many lengths as blocks

    def for_plan(self, plan: MaySplit) -> BoundWorkload:
        """Return the model shape and the stack under which a plan runs."""
        is_parallel = plan.is_model_parallel
        shape = self.model
        if is_parallel and self.model_parallel_seq:
            shape = self.model.with_seq(*self.model_parallel_seq)
        return BoundWorkload(
            key=self.key,
            model=shape,
            stack=self.model_parallel_stack if is_parallel else self.data_parallel_stack,
            global_batch_size=self.global_batch_size,
            precision=self.precision,
            max_microbatches=self.max_microbatches,
        )


@dataclass(frozen=True, slots=True)
class JobSpec:
    """One row of a job trace; raises `InputError` for empty names, wrong times and wrong counts.

    Parameters
    ----------
    job_id, workload
        Name of the job, and key of what it trains.
    submit_time_s
        When the job enters the system [s].
    n_gpus, n_cpus, plan
        What the user asks for: GPUs, CPU threads and execution plan in trace notation.
    steps
        Optimiser steps to run.
    is_guaranteed
        Whether it must run at least as fast as with what it asks for.
    tenant
        Owner of a quota.
    duration_s
        As the trace states [s]; the engine never reads it.
    """

    job_id: str
    submit_time_s: float
    workload: str
    n_gpus: int
    n_cpus: int
    plan: str
    steps: int
    is_guaranteed: bool = False
    tenant: str = ""
    duration_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("job_id", "workload", "plan"):
            if not getattr(self, name):
                raise self._error(name, "a text that is not empty")
        if not (math.isfinite(self.submit_time_s) and self.submit_time_s >= 0):
            raise self._error("submit_time_s", "a finite time in s, not negative")
        if self.duration_s is not None and not (math.isfinite(self.duration_s) and self.duration_s >= 0):
            raise self._error("duration_s", "a finite time in s, not negative, or None")
        for name, least in (("n_gpus", 1), ("n_cpus", 0), ("steps", 1)):
            value = getattr(self, name)
            if not math.isfinite(value) or value < least or value != int(value):
                raise self._error(name, f"a whole number >= {least}")

    def _error(self, name: str, accepted: str) -> InputError:
        return InputError(f"job {self.job_id!r}: {name} is {getattr(self, name)!r}; accepted: {accepted}")
