"""Models, software stacks, workloads and jobs: their types, presets, and counts per layer."""

import math
from dataclasses import dataclass, replace
from functools import cache
from numbers import Real
from typing import Any, Literal, Protocol

from makespan.arguments import check_fields, typed
from makespan.errors import InputError, shown, unknown_name
from makespan.files import preset_entry, read_preset

# --- Types ---

BlockKind = Literal["enc", "dec", "causal", "vit"]
_BLOCK_KINDS = ("enc", "dec", "causal", "vit")
_HOST_OPTIMIZERS = ("fused", "slow")
_PHASE_STYLES = ("ddp", "zero", "3d")
_COUNT_TOLERANCE = 0.1  # of stated parameters: papers print two digits, and OPT-350M has narrower embeddings
_MOST_BYTES = 4  # of a gradient


class MaySplit(Protocol):
    """A plan that may split the model over devices, such as an execution plan."""

    @property
    def is_model_parallel(self) -> bool:
        """True if the plan belongs to a family with tensor or pipeline parallelism."""


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """A run of equal transformer layers."""

    n_layers: int
    kind: BlockKind  # ``dec`` has self and cross attention
    seq: int  # tokens per sample
    hidden: int
    heads: int
    kv_heads: int
    ffn: int  # feed-forward size
    gated: bool  # True if the feed-forward part has a gate, that is three matrices
    kv_channels: int  # size of one attention head

    def __post_init__(self) -> None:
        counts = ("n_layers", "seq", "hidden", "heads", "kv_heads", "ffn", "kv_channels")
        check_fields(self, positive=counts)
        if self.kind not in _BLOCK_KINDS:
            raise unknown_name("block kind", self.kind, _BLOCK_KINDS)
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
        True if the embedding has the same weights.
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
        check_fields(self)
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
        """Tokens per sample in the first block."""
        return self.blocks[0].seq

    def with_seq(self, *seq: int) -> "ModelSpec":
        """Return the model with another sequence length for each block."""
        if len(seq) != len(self.blocks):
            raise InputError(f"ModelSpec {self.key!r}: {len(seq)} lengths, {len(self.blocks)} blocks")
        blocks = tuple(replace(block, seq=s) for block, s in zip(self.blocks, seq, strict=True))
        return replace(self, blocks=blocks)


@dataclass(frozen=True, slots=True)
class Stack:
    """Properties of the training software that change time or memory."""

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
    calibrated: bool  # whether the constants were fitted to measured rows
    source: str
    variant_of: str = ""  # stack of the same software with other options; empty if none

    def __post_init__(self) -> None:
        for name in ("gradient_bytes", "partitioned_bytes"):
            value = getattr(self, name)
            if not isinstance(value, Real) or value not in range(1, _MOST_BYTES + 1):
                raise InputError(
                    f"Stack {self.name!r}: {name} is {shown(value)}; expected a whole number of "
                    f"bytes from 1 to {_MOST_BYTES}"
                )
        check_fields(self)
        if self.host_optimizer not in _HOST_OPTIMIZERS:
            raise unknown_name("host_optimizer", self.host_optimizer, _HOST_OPTIMIZERS)
        if self.phase_style not in _PHASE_STYLES:
            raise unknown_name("phase_style", self.phase_style, _PHASE_STYLES)

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
    """A workload under one plan: one model shape, with its sequence length, and one stack."""

    key: str
    model: ModelSpec
    stack: Stack
    global_batch_size: int
    precision: str
    max_microbatches: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Training task of a job: model, batch, precision and software.

    Parameters
    ----------
    key, aliases
        Key in the catalogue, and other names accepted for it.
    model, global_batch_size, precision
        Model, samples per optimiser step, and precision such as ``fp16``.
    families
        Plan families available to users, values of `makespan.plans.PlanFamily`.
    data_parallel_stack, model_parallel_stack
        Training software; the second one runs plans with tensor or pipeline parallelism.
    max_microbatches
        Largest number of micro-batches per optimiser step.
    source
        Where the numbers come from.
    model_parallel_seq
        Tokens per sample of each block under plans of the second stack, where they differ.
    trace_cpu_threads
        CPU threads per GPU in published traces; the first number holds for rows that do not state any.
    used_for_calibration
        False if the traced configuration is not clear.
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
        check_fields(self)
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
        Name of the job, and key of its workload.
    submit_time_s
        When the job enters the system [s].
    n_gpus, n_cpus, plan
        Requested GPUs, CPU threads and execution plan in trace notation.
    steps
        Optimiser steps to run.
    is_guaranteed
        True if it must run at least as fast as with the requested resources and plan.
    tenant
        Owner of the job, a label for tables: there are no quotas, and no policy here reads it.
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
        check_fields(self, "job {0.job_id!r:.80}")
        for name in ("job_id", "workload", "plan"):
            if not getattr(self, name):
                raise self._error(name, "a text that is not empty")
        if not (math.isfinite(self.submit_time_s) and self.submit_time_s >= 0):
            raise self._error("submit_time_s", "a finite time in s, not negative")
        if self.duration_s is not None and not (math.isfinite(self.duration_s) and self.duration_s >= 0):
            raise self._error("duration_s", "a finite time in s, not negative, or None")
        for name, least in (("n_gpus", 1), ("n_cpus", 0), ("steps", 1)):
            value = getattr(self, name)
            if value < least:
                raise self._error(name, f"a whole number >= {least}")

    def _error(self, name: str, accepted: str) -> InputError:
        return InputError(f"job {self.job_id!r}: {name} is {getattr(self, name)!r}; expected {accepted}")


# --- Presets of models, stacks and workloads from the packaged TOML files, and workloads of the user ---

_PACKAGE = "makespan.workloads"
_SMALL_STACK, _SMALL_PRECISION = "torch-fp32", "fp32"
_EVERY_FAMILY = (
    "DP", "GC", "ZeRO-DP+GA", "ZeRO-Offload", "ZeRO-Offload+GC", "TP+GA", "TP+PP", "DP+TP+PP",
)  # fmt: skip
# Proportions of a decoder that stands in for a model of which only the number of parameters is known: about
# those of the GPT-3 family (Brown et al. 2020, table 2.1).
_OWN_STACK, _OWN_PRECISION = "modern", "bf16"
_HEAD_CHANNELS, _HIDDEN_PER_LAYER, _FFN_PER_HIDDEN, _PARAMETERS_PER_CHANNEL = 128, 128, 4, 12
_OWN_SEQ, _LEAST_PARAMETERS, _MOST_PARAMETERS = 1024, 1e4, 1e18


def model_keys() -> tuple[str, ...]:
    """Return the keys of all models in the zoo."""
    return tuple(read_preset(_PACKAGE, "models"))


def workload_keys() -> tuple[str, ...]:
    """Return the keys of all workloads."""
    return tuple(read_preset(_PACKAGE, "workloads"))


@typed
@cache
def stack(name: str) -> Stack:
    """Return a software stack; raises `UnknownNameError` for another name."""
    entry = preset_entry(_PACKAGE, "stacks", "software stack", name)
    return Stack(name=name, **entry)


@typed
@cache
def model(key: str) -> ModelSpec:
    """Return a model of the zoo; raises `UnknownNameError` for another key."""
    entry = preset_entry(_PACKAGE, "models", "model", key)
    blocks = tuple(_block(block) for block in entry.pop("blocks"))
    return ModelSpec(key=key, blocks=blocks, **entry)


def _block(entry: dict[str, Any]) -> BlockSpec:
    heads = entry["heads"]
    defaults = {"kv_heads": heads, "gated": False, "kv_channels": entry["hidden"] // heads}
    return BlockSpec(**{**defaults, **entry})


@cache
def _aliases() -> dict[str, str]:
    return {
        alias: key for key, entry in read_preset(_PACKAGE, "workloads").items() for alias in entry["aliases"]
    }


@typed
def resolve_workload_key(name: str) -> str:
    """Return the key of a workload from its key or an alias; raises `UnknownNameError` otherwise."""
    key = _aliases().get(name, name)
    if key not in read_preset(_PACKAGE, "workloads"):
        raise unknown_name("model or workload", name, [*workload_keys(), *_aliases()])
    return key


def small_workload_keys() -> tuple[str, ...]:
    """Return the keys of the workloads that are small enough to train for real on a few CPU cores."""
    return tuple(read_preset(_PACKAGE, "small"))


@typed
@cache
def workload(name: str) -> Workload:
    """Return a workload from its key or an alias, small ones too; raises `UnknownNameError` otherwise."""
    if name in small_workload_keys():
        entry = preset_entry(_PACKAGE, "small", "small workload", name)
        batch, microbatches = entry.pop("global_batch_size"), entry.pop("max_microbatches")
        blocks = tuple(_block(block) for block in entry.pop("blocks"))
        return Workload(
            key=name,
            aliases=(),
            model=ModelSpec(key=name, blocks=blocks, **entry),
            global_batch_size=batch,
            precision=_SMALL_PRECISION,
            families=("DP", "GC", "ZeRO-DP+GA", "ZeRO-Offload", "ZeRO-Offload+GC", "TP+PP", "DP+TP+PP"),
            data_parallel_stack=stack(_SMALL_STACK),
            model_parallel_stack=stack(_SMALL_STACK),
            max_microbatches=microbatches,
            used_for_calibration=False,
            source=entry["source"],
        )
    key = resolve_workload_key(name)
    read = read_preset(_PACKAGE, "workloads")[key]
    fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in read.items()}
    for role in ("data_parallel_stack", "model_parallel_stack"):
        fields[role] = stack(fields[role])
    return Workload(key=key, model=model(fields.pop("model")), **fields)


def is_in_zoo(name: str) -> bool:
    """Return True if `workload` accepts a name."""
    return name in small_workload_keys() or _aliases().get(name, name) in workload_keys()


@typed
def workload_of(name: str, global_batch_size: int, parameters: float) -> Workload:
    """Return the workload of a table of the user's own measurements.

    A workload of the zoo gets the global batch of the table. For any other name only the size of the model is
    known, so a decoder of usual proportions stands in for it; ``parameters`` is used only in that case.

    Raises
    ------
    InputError
        The batch or the number of parameters is out of range.
    """
    if is_in_zoo(name):
        known = workload(name)
        is_same = known.global_batch_size == global_batch_size
        return known if is_same else replace(known, global_batch_size=global_batch_size)
    if not _LEAST_PARAMETERS <= parameters <= _MOST_PARAMETERS:
        raise InputError(
            f"workload {name!r}: {parameters:g} parameters; expected >= {_LEAST_PARAMETERS:g}, up to "
            f"{_MOST_PARAMETERS:g}"
        )
    hidden = (parameters * _HIDDEN_PER_LAYER / _PARAMETERS_PER_CHANNEL) ** (1 / 3)
    # A small model has one layer with most of its parameters; the vocabulary gets the rest.
    hidden = min(hidden, (parameters / (_PARAMETERS_PER_CHANNEL + 1)) ** 0.5)
    heads = max(int(hidden / _HEAD_CHANNELS), 1)
    channels = heads * _HEAD_CHANNELS if hidden >= _HEAD_CHANNELS else int(hidden)
    in_layer = _PARAMETERS_PER_CHANNEL * channels**2
    n_layers = max(int(parameters / in_layer), 1)
    block = BlockSpec(
        n_layers=n_layers,
        kind="causal",
        seq=_OWN_SEQ,
        hidden=channels,
        heads=heads,
        kv_heads=heads,
        ffn=_FFN_PER_HIDDEN * channels,
        gated=False,
        kv_channels=channels // heads,
    )
    source = "own measurements; shape assumed from the number of parameters"
    return Workload(
        key=name,
        aliases=(),
        model=ModelSpec(
            key=name,
            title=f"{name} ({parameters / 1e6:.4g} M parameters)",
            family="gpt2",
            blocks=(block,),
            vocab=max(round((parameters - n_layers * in_layer) / channels), 1),
            tied_head=True,
            max_positions=0,
            parameters=round(parameters),
            source=source,
        ),
        global_batch_size=global_batch_size,
        precision=_OWN_PRECISION,
        families=_EVERY_FAMILY,
        data_parallel_stack=stack(_OWN_STACK),
        model_parallel_stack=stack(_OWN_STACK),
        max_microbatches=global_batch_size,
        used_for_calibration=False,
        source=source,
    )


# --- Layers: weights, FLOP and kept bytes per layer ---

_BYTES_16_BIT = 2
_LOGIT_BYTES = 6  # 16-bit logits and the fp32 copy of the loss
_FLOP_PER_MAC = 2


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of a model, per sample and forward pass.

    Parameters
    ----------
    kind
        As of the block that it belongs to: ``enc``, ``dec``, ``causal`` or ``vit``.
    parameters
        Weights of the layer.
    flop, attention_flop
        Matrix products, and those of the attention core in them [FLOP].
    replicated_bytes, sharded_bytes
        Kept for the backward pass: on every rank of a tensor group, and divided between the ranks [B].
    attention_bytes
        Kept scores, divided as well [B].
    input_bytes
        At 16 bit; kept by full checkpointing, moved by an all-reduce [B].
    boundary_bytes
        Sent across a pipeline boundary behind the layer [B].
    n_all_reduces, n_kernels
        All-reduces of tensor parallelism and kernels, in one forward pass.
    """

    kind: str
    parameters: int
    flop: float
    attention_flop: float
    replicated_bytes: float
    sharded_bytes: float
    attention_bytes: float
    input_bytes: float
    boundary_bytes: float
    n_all_reduces: int
    n_kernels: int

    def kept_bytes(self, tp: int, *, sequence_parallel: bool = False, fused_attention: bool = False) -> float:
        """Return the bytes kept for the backward pass on one rank of a tensor group."""
        replicated = self.replicated_bytes / tp if sequence_parallel else self.replicated_bytes
        attention = 0.0 if fused_attention else self.attention_bytes / tp
        return replicated + self.sharded_bytes / tp + attention


@dataclass(frozen=True, slots=True)
class Head:
    """Embedding before the first layer and output head behind the last one, per sample.

    Parameters
    ----------
    embedding_parameters, head_parameters
        Weights of the embeddings with positions, and of the output head; a tied head has none of its own.
    flop, logit_bytes
        Matrix products of the output head [FLOP], and its output [B].
    """

    embedding_parameters: int
    head_parameters: int
    flop: float
    logit_bytes: float


@dataclass(frozen=True, slots=True)
class _FamilyCounts:
    vectors_per_layer: int
    ffn_vectors_per_layer: int
    head_matrices: int
    replicated_per_token_channel: float
    sharded_per_token_channel: float
    ffn_per_token_channel: float
    attention_per_score: float
    cross_replicated_per_token_channel: float
    cross_sharded_per_token_channel: float
    cross_attention_per_score: float
    kernels: int
    cross_kernels: int
    source: str


@cache
def _family_counts(family: str) -> _FamilyCounts:
    return _FamilyCounts(**preset_entry("makespan.workloads", "families", "model family", family))


@cache
def layers(model: "ModelSpec") -> tuple[Layer, ...]:
    """Return the layers of a model, first to last; raises `UnknownNameError` for families without counts."""
    counts = _family_counts(model.family)
    encoder_bytes = [_input_bytes(block) for block in model.blocks if block.kind == "enc"]
    travelling = encoder_bytes[0] if any(block.kind == "dec" for block in model.blocks) else 0.0
    return tuple(
        layer
        for block in model.blocks
        for layer in (_layer(block, counts, travelling if block.kind == "dec" else 0.0),) * block.n_layers
    )


def _input_bytes(block: "BlockSpec") -> float:
    return float(_BYTES_16_BIT * block.seq * block.hidden)


def _layer(block: "BlockSpec", counts: _FamilyCounts, travelling_bytes: float) -> Layer:
    """Return one layer of a block; ``travelling_bytes`` is the encoder output that a decoder passes on."""
    inner = block.heads * block.kv_channels
    kv_inner = block.kv_heads * block.kv_channels
    attention_weights = block.hidden * (2 * inner + 2 * kv_inner)
    ffn_weights = (3 if block.gated else 2) * block.hidden * block.ffn
    cross = int(block.kind == "dec")
    n_attentions = 1 + cross
    weights = n_attentions * attention_weights + ffn_weights
    attention_flop = n_attentions * 2 * _FLOP_PER_MAC * block.seq**2 * inner
    token_channels, scores = block.seq * block.hidden, block.heads * block.seq**2
    return Layer(
        kind=block.kind,
        parameters=weights
        + counts.vectors_per_layer * block.hidden
        + counts.ffn_vectors_per_layer * block.ffn,
        flop=float(_FLOP_PER_MAC * block.seq * weights + attention_flop),
        attention_flop=float(attention_flop),
        replicated_bytes=token_channels
        * (counts.replicated_per_token_channel + cross * counts.cross_replicated_per_token_channel),
        sharded_bytes=token_channels
        * (counts.sharded_per_token_channel + cross * counts.cross_sharded_per_token_channel)
        + block.seq * block.ffn * counts.ffn_per_token_channel,
        attention_bytes=scores * (counts.attention_per_score + cross * counts.cross_attention_per_score),
        input_bytes=_input_bytes(block),
        boundary_bytes=_input_bytes(block) + travelling_bytes,
        n_all_reduces=2 + cross,
        n_kernels=counts.kernels + cross * counts.cross_kernels,
    )


@cache
def head(model: "ModelSpec") -> Head:
    """Return the embedding and the output head of a model.

    An image model embeds patches and classifies one token, so its logits and the FLOP of its
    head are negligible.
    """
    first, last = model.blocks[0], model.blocks[-1]
    positions = model.max_positions * first.hidden
    if model.family == "vit":
        patch_weights = first.hidden * 3 * 16**2
        return Head(patch_weights + positions, last.hidden * model.vocab, 0.0, 0.0)
    table = model.vocab * first.hidden
    transform = _family_counts(model.family).head_matrices * last.hidden**2
    return Head(
        embedding_parameters=table + positions,
        head_parameters=transform + (0 if model.tied_head else table),
        flop=float(_FLOP_PER_MAC * last.seq * last.hidden * model.vocab),
        logit_bytes=float(_LOGIT_BYTES * last.seq * model.vocab),
    )


def parameter_count(model: "ModelSpec") -> int:
    """Return the number of parameters of all layers, embeddings and the output head."""
    counts = _family_counts(model.family)
    held = sum(block.n_layers * _layer(block, counts, 0.0).parameters for block in model.blocks)
    ends = head.__wrapped__(model)  # uncached, as a model calls this while it is constructed
    return held + ends.embedding_parameters + ends.head_parameters
