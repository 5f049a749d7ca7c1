"""Software stacks, and training runs: model, sequences, batch and precision."""

from dataclasses import dataclass
from functools import cache
from typing import Literal

from makespan.arguments import check_fields, typed
from makespan.errors import InputError, unknown_name
from makespan.files import preset_entry, read_preset
from makespan.planning.architecture import Architecture

_PACKAGE = "makespan.planning"
PRECISIONS = ("bf16", "fp16", "tf32", "fp32", "fp8", "fp4")
"""Precisions of matrix products."""
_KERNELS = ("unfused", "first", "second", "third")


@dataclass(frozen=True, slots=True)
class Software:
    """Facts about training software that change time or memory.

    Parameters
    ----------
    name, source
        Key in the catalogue, and origin of the facts.
    attention
        Generation of the fused attention kernel, or ``unfused``.
    gradient_bytes
        Of one gradient, in memory and on the wire.
    element_passes
        Times that activations go through memory, over what fused kernels need.
    overlaps_tensor
        Share of the collectives of tensor parallelism that run beside the products.
    regathers
        True if FSDP gathers parameters for every micro-batch under pipeline parallelism, too.
    logit_bytes
        Kept per token and row of the vocabulary: 6 with a fused loss, 14 without.
    sequence_parallel
        True if tensor parallelism divides norms and dropout, too, where a layout does not say.
    fills_pipelines
        True if a step has at least as many micro-batches as stages, however large they were asked for.
    like
        Stack whose factors it has, if it is another setting of the same software; empty for its own.
    cast_passes
        Times that conversions to 8 bits go through memory, over those with one scale per tensor.
    repeats_keys
        True if context parallelism sends keys and values once per query head that they serve.
    launched_share
        Share of the kernels that the host launches one by one; CUDA graphs launch the others.
    expert_share
        Time of kernels of experts, over that of one kernel per matrix [1].
    is_written_out
        True if Python runs a model operator by operator: norms, gates and activations keep what lies between
        them, the residual stream has 32 bits under autocast, and a device may wait for the host.
    frees_gradients
        True if a device without peers frees gradients after each step, so that they come back when the
        logits are gone.
    regathers_inputs
        True if sequence parallelism keeps a part of the input of products alone, and gathers the others again
        in the backward pass.
    """

    name: str
    attention: Literal["unfused", "first", "second", "third"]
    gradient_bytes: int
    element_passes: float
    overlaps_tensor: float
    regathers: bool
    logit_bytes: float
    source: str
    sequence_parallel: bool = False
    fills_pipelines: bool = False
    like: str = ""
    cast_passes: float = 1.0
    repeats_keys: bool = False
    launched_share: float = 1.0
    expert_share: float = 1.0
    is_written_out: bool = False
    frees_gradients: bool = False
    regathers_inputs: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.attention not in _KERNELS:
            raise unknown_name("attention kernel", self.attention, _KERNELS)

    def bytes_of_gradient(self, training: "Training") -> float:
        """Return the bytes of one gradient [B], which has 4 where products have."""
        return 4.0 if training.element_bytes == 4.0 else float(self.gradient_bytes)

    def head_tokens(self, training: "Training") -> float:
        """Return the tokens of a sample that get logits; transformers computes those of all tokens."""
        model = training.model
        if self.is_written_out and model.head == "masked-lm":
            return float(training.seq)
        return model.head_tokens(training.seq) * training.computed_share

    @property
    def family(self) -> str:
        """Key of the stack whose factors it has."""
        return self.like or self.name


def stack_names() -> tuple[str, ...]:
    """Return the keys of all stacks."""
    return tuple(read_preset(_PACKAGE, "stacks"))


@typed
@cache
def software(name: str) -> Software:
    """Return a stack of the catalogue; raises `UnknownNameError` for another name."""
    entry = preset_entry(_PACKAGE, "stacks", "stack", name)
    if "like" in entry:
        entry = {**preset_entry(_PACKAGE, "stacks", "stack", entry["like"]), **entry}
    return Software(name=name, **entry)


@dataclass(frozen=True, slots=True)
class Training:
    """A training run, apart from where and how it runs.

    Parameters
    ----------
    model, seq, global_batch, precision
        Model, tokens of a sample, samples of a step, and precision of matrix products. If all
        layers of the model have a fixed length, ``seq`` is that of the last ones, whatever is given.
    computed_share
        Share of the tokens that are computed; less than 1 where padding is left out.
    is_adapter
        True if the weights are frozen and small adapters beside them are trained (LoRA); adapters themselves
        are not counted.
    """

    model: Architecture
    seq: int
    global_batch: int
    precision: str = "bf16"
    computed_share: float = 1.0
    is_adapter: bool = False

    def __post_init__(self) -> None:
        check_fields(self, "training", positive=("seq", "global_batch"))
        if self.precision not in PRECISIONS:
            raise unknown_name("precision", self.precision, PRECISIONS)
        if not 0 < self.computed_share <= 1:
            raise InputError(
                f"training: computed_share is {self.computed_share!r}; expected above 0, up to 1"
            )
        if self._has_fixed_length:
            object.__setattr__(self, "seq", self.model.layers[-1].seq)

    @property
    def _has_fixed_length(self) -> bool:
        return all(run.seq for run in self.model.layers)

    @property
    def element_bytes(self) -> float:
        """Bytes of an activation or a parameter in products [B]; 8-bit products cast when they read."""
        return 4.0 if self.precision in ("fp32", "tf32") else 2.0

    @property
    def is_narrow(self) -> bool:
        """True if products have 8 bits or less."""
        return self.precision in ("fp8", "fp4")

    @property
    def core_precision(self) -> str:
        """Precision of attention cores, which stay at 16 bits where other products have fewer."""
        return self.precision if self.precision in ("fp32", "tf32", "fp16") else "bf16"

    @property
    def tokens_per_step(self) -> float:
        """Tokens of one step, padding included."""
        return float(self.model.tokens(self.model.layers[-1], self.seq) * self.global_batch)

    @property
    def flop_per_step(self) -> float:
        """Model FLOP of one step, see `Architecture.flop_per_sample` [FLOP]."""
        return self.global_batch * self.model.flop_per_sample(self.seq) * self.computed_share

    @property
    def remarks(self) -> tuple[str, ...]:
        """Warnings about the run: sequences that the model does not have, and predictions without rows."""
        model = self.model
        found = []
        if model.max_seq and self.seq > model.max_seq:
            found.append(
                f"{self.seq} tokens are more than the {model.max_seq} of the configuration of {model.name}"
            )
        if self._has_fixed_length:
            found.append(f"{model.name} has samples of {self.seq} tokens, whatever is asked for")
        elif fixed := sorted({run.seq for run in model.layers if run.seq}):
            found.append(
                f"{model.name} has {', '.join(map(str, fixed))} tokens in some layers, whatever is asked for"
            )
        if model.is_recurrent:
            n_recurrent = sum(run.n_layers for run in model.kinds if run.recurrent is not None)
            found.append(
                f"{model.name} has {n_recurrent} recurrent layers: no published row stands behind the time "
                "of their scans, which widens intervals, and no layout has context parallelism"
            )
        return tuple(found)
