"""From a model shape to FLOP, bytes and parameters of every layer.

All quantities are per sample and forward pass. The counts of a transformer layer follow
Korthikanti et al. 2022 ("Reducing Activation Recomputation in Large Transformer Models"),
section 4; what differs between model families is data (``presets/families.toml``).
"""

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from makespan.presets import preset_entry

if TYPE_CHECKING:
    from makespan.workloads._spec import BlockSpec, ModelSpec

__all__ = ["Head", "Layer", "head", "layers", "parameter_count"]

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
    """What stands before the first and behind the last layer, per sample.

    Parameters
    ----------
    embedding_parameters, head_parameters
        Weights of the embeddings with positions, and of the output head; a tied head has none of its own.
    flop, logit_bytes
        Matrix products of the output head [FLOP], and what it puts out [B].
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
    """Derive one layer; ``travelling_bytes`` is the encoder output that a decoder passes on."""
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
    """Return the parameters of all layers, embeddings and the output head, as the layers imply them."""
    counts = _family_counts(model.family)
    held = sum(block.n_layers * _layer(block, counts, 0.0).parameters for block in model.blocks)
    ends = head.__wrapped__(model)  # not remembered, as a model asks while it is made
    return held + ends.embedding_parameters + ends.head_parameters
