"""Small transformers in plain torch, their tensor parallelism, and the samples that they learn.

The models themselves do not know of parallelism. A model is a chain that may be cut after any layer:
embedding, numbered layers, head. The links pass on a tuple of hidden states, each ``(batch, seq, hidden)``:
two for ``t5`` (encoder, decoder), one for all others. There is no dropout, so that equal samples give equal
losses under every plan.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from makespan.plans import ExecutionPlan
from makespan.training.zoo.specs import SmallModel, generator_for

# --- Models -----------------------------------------------------------------------------------------

_ROPE_BASE = 10000.0


def n_hidden_states(spec: SmallModel) -> int:
    """Return the number of hidden states that layers pass on."""
    return 2 if spec.family == "t5" else 1


class Attention(nn.Module):
    """Multi-head attention with grouped key-value heads; heads may be a shard of all heads."""

    def __init__(self, spec: SmallModel, causal: bool, rotary: bool) -> None:
        super().__init__()
        self.head_size = spec.hidden // spec.heads
        self.causal, self.rotary = causal, rotary
        self.query = nn.Linear(spec.hidden, spec.hidden, bias=False)
        self.key = nn.Linear(spec.hidden, spec.kv_heads * self.head_size, bias=False)
        self.value = nn.Linear(spec.hidden, spec.kv_heads * self.head_size, bias=False)
        self.output = nn.Linear(spec.hidden, spec.hidden, bias=False)

    def forward(self, hidden: Tensor, memory: Tensor) -> Tensor:
        """Attend from ``hidden`` to ``memory``, which is the same tensor in self-attention."""
        query, key, value = (
            self._heads(project(source))
            for project, source in ((self.query, hidden), (self.key, memory), (self.value, memory))
        )
        if self.rotary:
            query, key = _rotate(query), _rotate(key)
        groups = query.shape[1] // key.shape[1]
        if groups > 1:
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        result: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return result

    def _heads(self, projected: Tensor) -> Tensor:
        batch, seq, _ = projected.shape
        return projected.view(batch, seq, -1, self.head_size).transpose(1, 2)


@lru_cache(maxsize=16)
def _rotation(seq: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    rates = _ROPE_BASE ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angles = torch.outer(torch.arange(seq, dtype=torch.float64), rates)
    return angles.cos().float().to(device), angles.sin().float().to(device)


def _rotate(heads: Tensor) -> Tensor:
    """Apply rotary positions: rotate pairs of features by angles that grow with the position."""
    cos, sin = _rotation(heads.shape[2], heads.shape[3], heads.device)
    first, second = heads.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Mlp(nn.Module):
    """Two linear layers, or three with a gate; only the first may have a bias."""

    def __init__(self, spec: SmallModel, activation: Callable[[Tensor], Tensor], bias: bool) -> None:
        super().__init__()
        self.activation = activation
        self.gate = nn.Linear(spec.hidden, spec.ffn, bias=False) if spec.family == "llama" else None
        self.up = nn.Linear(spec.hidden, spec.ffn, bias=bias)
        self.down = nn.Linear(spec.ffn, spec.hidden, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map each position by itself."""
        raised = self.up(hidden)
        gated = self.activation(raised) if self.gate is None else self.activation(self.gate(hidden)) * raised
        result: Tensor = self.down(gated)
        return result


def _norm(spec: SmallModel) -> nn.Module:
    if spec.family in ("llama", "t5"):
        return nn.RMSNorm(spec.hidden, eps=1e-5)
    return nn.LayerNorm(spec.hidden, eps=1e-5)


class Layer(nn.Module):
    """One transformer layer; ``recompute`` selects the activations that its backward pass recomputes."""

    def __init__(self, spec: SmallModel, causal: bool, cross: bool) -> None:
        super().__init__()
        self.recompute = "none"
        self.attention_norm = _norm(spec)
        self.attention = Attention(spec, causal, rotary=spec.family == "llama")
        self.cross_norm = _norm(spec) if cross else None
        self.cross = Attention(spec, causal=False, rotary=False) if cross else None
        self.mlp_norm = _norm(spec)
        activation: Callable[[Tensor], Tensor] = {"llama": F.silu, "t5": F.relu}.get(spec.family, F.gelu)
        self.mlp = Mlp(spec, activation, bias=spec.family not in ("llama", "t5"))

    def forward(self, hidden: Tensor, memory: Tensor | None = None) -> Tensor:
        """Apply the layer; ``memory`` is the input of the cross attention of a decoder layer."""
        if self.recompute == "full" and torch.is_grad_enabled():
            done: Tensor = checkpoint(self._transform, hidden, memory, use_reentrant=False)
            return done
        return self._transform(hidden, memory)

    def _transform(self, hidden: Tensor, memory: Tensor | None) -> Tensor:
        normed = self.attention_norm(hidden)
        hidden = hidden + self._attend(self.attention, normed, normed)
        if self.cross is not None and self.cross_norm is not None and memory is not None:
            hidden = hidden + self._attend(self.cross, self.cross_norm(hidden), memory)
        result: Tensor = hidden + self.mlp(self.mlp_norm(hidden))
        return result

    def _attend(self, attention: Attention, hidden: Tensor, memory: Tensor) -> Tensor:
        if self.recompute == "selective" and torch.is_grad_enabled():
            done: Tensor = checkpoint(attention, hidden, memory, use_reentrant=False)
            return done
        result: Tensor = attention(hidden, memory)
        return result


class EncoderLayer(nn.Module):
    """Layer of the encoder of ``t5``; it passes on the decoder's state."""

    def __init__(self, spec: SmallModel) -> None:
        super().__init__()
        self.layer = Layer(spec, causal=False, cross=False)

    def forward(self, encoded: Tensor, decoded: Tensor) -> tuple[Tensor, Tensor]:
        """Transform the encoder's state."""
        return self.layer(encoded), decoded.clone()


class DecoderLayer(nn.Module):
    """Layer of the decoder of ``t5``; it reads the encoder's state."""

    def __init__(self, spec: SmallModel) -> None:
        super().__init__()
        self.layer = Layer(spec, causal=True, cross=True)

    def forward(self, encoded: Tensor, decoded: Tensor) -> tuple[Tensor, Tensor]:
        """Transform the decoder's state."""
        return encoded.clone(), self.layer(decoded, encoded)


class Embedding(nn.Module):
    """Tokens or image patches to hidden states."""

    def __init__(self, spec: SmallModel) -> None:
        super().__init__()
        self.is_vit, self.n_states = spec.family == "vit", n_hidden_states(spec)
        self.table: nn.Module
        if self.is_vit:
            self.table = nn.Linear(spec.patch_features, spec.hidden)
        else:
            self.table = nn.Embedding(spec.vocab, spec.hidden)
        has_positions = spec.family != "llama"
        self.positions = nn.Parameter(torch.empty(spec.seq, spec.hidden)) if has_positions else None

    def forward(self, samples: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Embed ``(batch, seq)`` tokens, ``(batch, 2, seq)`` for ``t5``, or patches."""
        hidden: Tensor = self.table(samples)
        if self.positions is not None:
            hidden = hidden + self.positions
        return hidden if self.n_states == 1 else (hidden[:, 0].contiguous(), hidden[:, 1].contiguous())


class Head(nn.Module):
    """Final norm and classifier."""

    def __init__(self, spec: SmallModel) -> None:
        super().__init__()
        self.pools = spec.family == "vit"
        self.norm = _norm(spec)
        self.classifier = nn.Linear(spec.hidden, spec.vocab, bias=False)

    def forward(self, *state: Tensor) -> Tensor:
        """Return logits ``(batch, seq, vocab)`` of the last state; ``(batch, classes)`` for ``vit``."""
        normed = self.norm(state[-1])
        result: Tensor = self.classifier(normed.mean(1) if self.pools else normed)
        return result


class SmallTransformer(nn.Module):
    """Whole model, or the part of it that one pipeline stage holds."""

    def __init__(self, spec: SmallModel) -> None:
        super().__init__()
        self.embedding: Embedding | None = Embedding(spec)
        self.layers = nn.ModuleDict({str(index): _layer(spec, index) for index in range(spec.n_layers)})
        self.head: Head | None = Head(spec)

    def forward(self, *state: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Apply the parts that this stage holds, from samples or hidden states to hidden states or logits."""
        if self.embedding is not None:
            state = _as_tuple(self.embedding(*state))
        for layer in self.layers.values():
            state = _as_tuple(layer(*state))
        if self.head is not None:
            logits: Tensor = self.head(*state)
            return logits
        return state if len(state) > 1 else state[0]

    def keep_stage(self, layers: range, first: bool, last: bool) -> None:
        """Drop everything that a pipeline stage does not hold; the names of the rest are unchanged."""
        for name in list(self.layers):
            if int(name) not in layers:
                del self.layers[name]
        self.embedding = self.embedding if first else None
        self.head = self.head if last else None

    def set_recomputation(self, plan: ExecutionPlan) -> None:
        """Mark the first layers for recomputation, as many as the fraction of the plan."""
        count = math.ceil(plan.checkpoint_fraction * len(self.layers) - 1e-9)
        for layer in [module for module in self.modules() if isinstance(module, Layer)][:count]:
            layer.recompute = plan.checkpoint_method


def _as_tuple(state: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return state if isinstance(state, tuple) else (state,)


def _layer(spec: SmallModel, index: int) -> nn.Module:
    if spec.family == "t5":
        return EncoderLayer(spec) if index < spec.n_encoder_layers else DecoderLayer(spec)
    return Layer(spec, causal=spec.family in ("llama", "gpt"), cross=False)


def build_model(spec: SmallModel, seed: int) -> SmallTransformer:
    """Build a whole model on the CPU; each weight follows from the seed and its own name."""
    model = SmallTransformer(spec)
    _draw(model, "", spec, seed)
    return model


def link_of(spec: SmallModel, seed: int, index: int) -> nn.Module:
    """Build one link of a model; its weights are those of the link in the whole model."""
    link: nn.Module
    if index == 0:
        name, link = "embedding", Embedding(spec)
    elif index <= spec.n_layers:
        name, link = f"layers.{index - 1}", _layer(spec, index - 1)
    else:
        name, link = "head", Head(spec)
    _draw(link, name, spec, seed)
    return link


@torch.no_grad()
def _draw(module: nn.Module, prefix: str, spec: SmallModel, seed: int) -> None:
    for name, weight in module.named_parameters(prefix):
        if weight.dim() < 2:
            weight.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        rng = generator_for(seed, name)
        spread = 1.0 / math.sqrt(weight.shape[1])
        if name.endswith(("output.weight", "down.weight")):  # last matrices of the residual branches
            spread /= math.sqrt(2 * spec.n_layers)
        values = spread * rng.standard_normal(tuple(weight.shape), dtype=np.float32)
        weight.copy_(torch.from_numpy(values))


# --- Tensor parallelism -----------------------------------------------------------------------------


def shard_tensors(model: SmallTransformer, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    """Distribute the matrices of a model, or of a pipeline stage, in place.

    Queries, keys, values and the first MLP layers are cut by columns, the layers after them by rows,
    the classifier by columns if the axis divides it. Embeddings and norms stay whole. With
    sequence parallelism the hidden states between layers are cut along the sequence.
    """
    between = Shard(1) if sequence_parallel else Replicate()
    for layer in (module for module in model.modules() if isinstance(module, Layer)):
        parallelize_module(layer, mesh, _layer_plan(layer, between))
    if model.embedding is not None and sequence_parallel:
        whole = (Replicate(),) * model.embedding.n_states
        cut = (between,) * model.embedding.n_states
        parallelize_module(
            model.embedding, mesh, PrepareModuleOutput(output_layouts=whole, desired_output_layouts=cut)
        )
    if model.head is not None:
        plan: dict[str, ParallelStyle] = {}
        divides = model.head.classifier.out_features % mesh.size() == 0
        if divides or sequence_parallel:
            plan["classifier"] = ColwiseParallel(input_layouts=between, output_layouts=Replicate())
        if sequence_parallel:
            plan["norm"] = SequenceParallel()
        if plan:
            parallelize_module(model.head, mesh, plan)


def _layer_plan(layer: Layer, between: Shard | Replicate) -> dict[str, ParallelStyle]:
    """Return the style of each part of a layer; ``between`` is the layout of the hidden states."""
    plan: dict[str, ParallelStyle] = {}
    for name, part in layer.named_children():
        if isinstance(part, Attention):
            plan |= {
                name: PrepareModuleInput(
                    input_layouts=(between, between), desired_input_layouts=(Replicate(), Replicate())
                ),
                **{f"{name}.{matrix}": ColwiseParallel() for matrix in ("query", "key", "value")},
                f"{name}.output": RowwiseParallel(output_layouts=between),
            }
        elif isinstance(part, Mlp):
            plan |= {
                name: PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),)),
                f"{name}.up": ColwiseParallel(),
                f"{name}.down": RowwiseParallel(output_layouts=between),
            }
            if part.gate is not None:
                plan[f"{name}.gate"] = ColwiseParallel()
        elif isinstance(between, Shard):
            plan[name] = SequenceParallel()  # norms
    return plan


# --- Samples ----------------------------------------------------------------------------------------

IGNORED = -100
"""Target of a position that does not count in the loss."""
_MASK, _START = 0, 0
_PREDICTABLE = 0.8
_MASKED_SHARE = 0.15
_NOISE = 1.0
Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples of one optimiser step."""

    inputs: npt.NDArray[np.int64] | npt.NDArray[np.float32]
    targets: Tokens


def targets_per_sample(spec: SmallModel) -> int:
    """Return the number of targets of a sample that count, the same for every sample of a model."""
    if spec.family == "vit":
        return 1
    return max(1, round(_MASKED_SHARE * spec.seq)) if spec.family == "bert" else spec.seq


def global_batch(spec: SmallModel, batch_size: int, data_seed: int, step: int) -> Batch:
    """Draw the global batch of a step.

    Tokens follow a random successor table with occasional random jumps; images are a class pattern under
    noise. The batch depends on model, batch size, seed and step, and not on the plan.
    """
    rng, fixed = generator_for("data", data_seed, step), generator_for("data", data_seed, -1)
    if spec.family == "vit":
        classes = rng.integers(0, spec.vocab, batch_size)
        patterns = fixed.standard_normal((spec.vocab, spec.seq, spec.patch_features), dtype=np.float32)
        noise = rng.standard_normal((batch_size, spec.seq, spec.patch_features), dtype=np.float32)
        return Batch(patterns[classes] + np.float32(_NOISE) * noise, classes)
    tokens = token_walk(rng, fixed.permutation(spec.vocab), batch_size, spec.seq + 1)
    if spec.family in ("llama", "gpt"):
        return Batch(tokens[:, :-1].copy(), tokens[:, 1:].copy())
    tokens = tokens[:, 1:]
    if spec.family == "bert":
        # Mask equally many positions of each sample, so that all micro-batches weigh the same.
        chosen = np.argsort(rng.random(tokens.shape), axis=1) < targets_per_sample(spec)
        return Batch(np.where(chosen, _MASK, tokens), np.where(chosen, tokens, IGNORED))
    corrupted = np.where(rng.random(tokens.shape) < _MASKED_SHARE, _MASK, tokens)
    shifted = np.concatenate([np.full((batch_size, 1), _START), tokens[:, :-1]], axis=1)
    return Batch(np.stack([corrupted, shifted], axis=1), tokens.copy())


def token_walk(rng: np.random.Generator, successor: Tokens, batch_size: int, length: int) -> Tokens:
    """Draw sequences in which most tokens are followed by their successor, the others by any token."""
    jumps = rng.integers(0, len(successor), (batch_size, length))
    follows = rng.random((batch_size, length)) < _PREDICTABLE
    tokens = jumps.copy()
    for position in range(1, length):
        expected = successor[tokens[:, position - 1]]
        tokens[:, position] = np.where(follows[:, position], expected, jumps[:, position])
    return tokens
