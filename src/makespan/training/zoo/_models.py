"""Small transformers in plain torch; nothing in them knows of parallelism.

A model is a chain that may be cut after any layer: embedding, numbered layers, head. What passes
from link to link is a tuple of hidden states, each ``(batch, seq, hidden)``: two for ``t5``
(encoder, decoder), one for all others. There is no dropout, so that equal samples give equal losses
under every plan.
"""

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from makespan.plans import ExecutionPlan
from makespan.training.zoo import SmallModel
from makespan.training.zoo._seeding import generator_for

__all__ = ["Attention", "Layer", "Mlp", "SmallTransformer", "build_model", "link_of", "n_hidden_states"]

_ROPE_BASE = 10000.0


def n_hidden_states(spec: SmallModel) -> int:
    """Return how many hidden states pass from layer to layer."""
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
    """Rotate pairs of features by angles that grow with the position."""
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


def _activation(spec: SmallModel) -> Callable[[Tensor], Tensor]:
    return {"llama": F.silu, "t5": F.relu}.get(spec.family, F.gelu)


class Layer(nn.Module):
    """One transformer layer; ``recompute`` says which activations its backward pass recomputes."""

    def __init__(self, spec: SmallModel, causal: bool, cross: bool) -> None:
        super().__init__()
        self.recompute = "none"
        self.attention_norm = _norm(spec)
        self.attention = Attention(spec, causal, rotary=spec.family == "llama")
        self.cross_norm = _norm(spec) if cross else None
        self.cross = Attention(spec, causal=False, rotary=False) if cross else None
        self.mlp_norm = _norm(spec)
        self.mlp = Mlp(spec, _activation(spec), bias=spec.family not in ("llama", "t5"))

    def forward(self, hidden: Tensor, memory: Tensor | None = None) -> Tensor:
        """Apply the layer; ``memory`` is what a decoder layer attends to across."""
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
    """A layer of the encoder of ``t5``; the decoder's state passes by."""

    def __init__(self, spec: SmallModel) -> None:
        super().__init__()
        self.layer = Layer(spec, causal=False, cross=False)

    def forward(self, encoded: Tensor, decoded: Tensor) -> tuple[Tensor, Tensor]:
        """Transform the encoder's state."""
        return self.layer(encoded), decoded.clone()


class DecoderLayer(nn.Module):
    """A layer of the decoder of ``t5``; it reads the encoder's state."""

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
    """A whole model, or the part of it that one pipeline stage holds."""

    def __init__(self, spec: SmallModel) -> None:
        super().__init__()
        self.embedding: Embedding | None = Embedding(spec)
        self.layers = nn.ModuleDict({str(index): _layer(spec, index) for index in range(spec.n_layers)})
        self.head: Head | None = Head(spec)

    def forward(self, *state: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Apply the parts that are there, from samples or hidden states to hidden states or logits."""
        if self.embedding is not None:
            state = _as_tuple(self.embedding(*state))
        for layer in self.layers.values():
            state = _as_tuple(layer(*state))
        if self.head is not None:
            logits: Tensor = self.head(*state)
            return logits
        return state if len(state) > 1 else state[0]

    def keep_stage(self, layers: range, first: bool, last: bool) -> None:
        """Drop everything that a pipeline stage does not hold; names of what stays are unchanged."""
        for name in list(self.layers):
            if int(name) not in layers:
                del self.layers[name]
        self.embedding = self.embedding if first else None
        self.head = self.head if last else None

    def set_recomputation(self, plan: ExecutionPlan) -> None:
        """Mark the first layers, as many as the plan's fraction asks for, for recomputation."""
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
    """Build one link of the chain that a model is; its weights are those of the whole model."""
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
        if name.endswith(("output.weight", "down.weight")):
            spread /= math.sqrt(2 * spec.n_layers)
        values = spread * rng.standard_normal(tuple(weight.shape), dtype=np.float32)
        weight.copy_(torch.from_numpy(values))
