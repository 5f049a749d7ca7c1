"""GPT (as GPT-Neo), OPT and LLaMA: causal decoders, which guess the next token.

Modules have the names that the published weights have.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from makespan.training.zoo._families import TransformerSpec
from makespan.training.zoo._family_layers import attend, causal_mask, join_heads, positions_in, split_heads

__all__ = ["Gpt", "Llama", "Opt"]

_ROPE_BASE = 10000.0
_OPT_OFFSET = 2
_LLAMA_EPSILON = 1e-6


class GptAttention(nn.Module):
    """Attention of unscaled scores, in every second layer limited to a window; only the output has a bias."""

    def __init__(self, spec: TransformerSpec, window: int) -> None:
        super().__init__()
        self.num_heads, self.head_size, self.window = spec.heads, spec.head_size, window
        self.k_proj, self.v_proj, self.q_proj = (
            nn.Linear(spec.hidden, spec.inner, bias=False) for _ in range(3)
        )
        self.out_proj = nn.Linear(spec.inner, spec.hidden)
        self.attn_dropout = nn.Dropout(spec.attention_dropout)
        self.resid_dropout = nn.Dropout(spec.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """Transform ``(n, seq, hidden)``."""
        query = split_heads(self.q_proj(hidden), self.num_heads, self.head_size)
        key = split_heads(self.k_proj(hidden), self.num_heads, self.head_size)
        value = split_heads(self.v_proj(hidden), self.num_heads, self.head_size)
        mixed = attend(query, key, value, causal_mask(hidden, self.window), self.attn_dropout)
        result: Tensor = self.resid_dropout(self.out_proj(join_heads(mixed)))
        return result


class GptAttentionBlock(nn.Module):
    """Holds the attention, as the published weights have it."""

    def __init__(self, spec: TransformerSpec, window: int) -> None:
        super().__init__()
        self.attention = GptAttention(spec, window)

    def forward(self, hidden: Tensor) -> Tensor:
        """Transform ``(n, seq, hidden)``."""
        result: Tensor = self.attention(hidden)
        return result


class GptMlp(nn.Module):
    """Feed-forward part."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.c_fc = nn.Linear(spec.hidden, spec.ffn)
        self.c_proj = nn.Linear(spec.ffn, spec.hidden)
        self.dropout = nn.Dropout(spec.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """Transform ``(n, seq, hidden)``."""
        result: Tensor = self.dropout(self.c_proj(F.gelu(self.c_fc(hidden), approximate="tanh")))
        return result


class GptLayer(nn.Module):
    """Attention and feed-forward part, each behind a norm and added to what came in."""

    def __init__(self, spec: TransformerSpec, window: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(spec.hidden), nn.LayerNorm(spec.hidden)
        self.attn = GptAttentionBlock(spec, window)
        self.mlp = GptMlp(spec)

    def forward(self, hidden: Tensor) -> Tensor:
        """Transform ``(n, seq, hidden)``."""
        hidden = hidden + self.attn(self.ln_1(hidden))
        result: Tensor = hidden + self.mlp(self.ln_2(hidden))
        return result


class GptBackbone(nn.Module):
    """Embeddings, layers, norm."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.wte = nn.Embedding(spec.vocab, spec.hidden)
        self.wpe = nn.Embedding(spec.max_positions, spec.hidden)
        self.drop = nn.Dropout(spec.dropout)
        self.h = nn.ModuleList(GptLayer(spec, spec.window * (index % 2)) for index in range(spec.n_layers))
        self.ln_f = nn.LayerNorm(spec.hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return ``(n, seq, hidden)``."""
        hidden = self.drop(self.wte(tokens) + self.wpe(positions_in(tokens)))
        for layer in self.h:
            hidden = layer(hidden)
        result: Tensor = self.ln_f(hidden)
        return result


class Gpt(nn.Module):
    """GPT-Neo that guesses the next token; the weight of the head is the embedding."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.transformer = GptBackbone(spec)
        self.lm_head = nn.Linear(spec.hidden, spec.vocab, bias=False)
        self.lm_head.weight = self.transformer.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return ``(n, seq, vocab)`` logits of ``(n, seq)`` tokens."""
        result: Tensor = self.lm_head(self.transformer(tokens))
        return result


class OptAttention(nn.Module):
    """Attention with biases everywhere."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.num_heads, self.head_size = spec.heads, spec.head_size
        self.k_proj, self.v_proj, self.q_proj = (nn.Linear(spec.hidden, spec.inner) for _ in range(3))
        self.out_proj = nn.Linear(spec.inner, spec.hidden)
        self.attn_dropout = nn.Dropout(spec.attention_dropout)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Transform ``(n, seq, hidden)``."""
        query = split_heads(self.q_proj(hidden), self.num_heads, self.head_size)
        key = split_heads(self.k_proj(hidden), self.num_heads, self.head_size)
        value = split_heads(self.v_proj(hidden), self.num_heads, self.head_size)
        mixed = attend(query, key, value, mask, self.attn_dropout, self.head_size**-0.5)
        result: Tensor = self.out_proj(join_heads(mixed))
        return result


class OptLayer(nn.Module):
    """Attention and feed-forward part with norms before them, in one size behind the sums."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.norm_first = spec.norm_first
        self.self_attn = OptAttention(spec)
        self.self_attn_layer_norm = nn.LayerNorm(spec.hidden)
        self.fc1 = nn.Linear(spec.hidden, spec.ffn)
        self.fc2 = nn.Linear(spec.ffn, spec.hidden)
        self.final_layer_norm = nn.LayerNorm(spec.hidden)
        self.dropout = nn.Dropout(spec.dropout)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Transform ``(n, seq, hidden)``."""
        seen = self.self_attn_layer_norm(hidden) if self.norm_first else hidden
        hidden = hidden + self.dropout(self.self_attn(seen, mask))
        hidden = hidden if self.norm_first else self.self_attn_layer_norm(hidden)
        seen = self.final_layer_norm(hidden) if self.norm_first else hidden
        hidden = hidden + self.dropout(self.fc2(F.relu(self.fc1(seen))))
        result: Tensor = hidden if self.norm_first else self.final_layer_norm(hidden)
        return result


class OptDecoder(nn.Module):
    """Embeddings, layers, norm; the embedding may be narrower than the layers."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        narrow = spec.embedding_width
        self.embed_tokens = nn.Embedding(spec.vocab, narrow, padding_idx=spec.padding)
        self.embed_positions = nn.Embedding(spec.max_positions + _OPT_OFFSET, spec.hidden)
        is_narrow = narrow != spec.hidden
        self.project_in = nn.Linear(narrow, spec.hidden, bias=False) if is_narrow else None
        self.project_out = nn.Linear(spec.hidden, narrow, bias=False) if is_narrow else None
        self.layers = nn.ModuleList(OptLayer(spec) for _ in range(spec.n_layers))
        self.final_layer_norm = nn.LayerNorm(spec.hidden) if spec.norm_first else None

    def forward(self, tokens: Tensor) -> Tensor:
        """Return ``(n, seq, width of the embedding)``."""
        embedded: Tensor = self.embed_tokens(tokens)
        if self.project_in is not None:
            embedded = self.project_in(embedded)
        hidden: Tensor = embedded + self.embed_positions(positions_in(tokens) + _OPT_OFFSET)
        mask = causal_mask(hidden)
        for layer in self.layers:
            hidden = layer(hidden, mask)
        if self.final_layer_norm is not None:
            hidden = self.final_layer_norm(hidden)
        if self.project_out is not None:
            hidden = self.project_out(hidden)
        return hidden


class OptBackbone(nn.Module):
    """Holds the decoder, as the published weights have it."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.decoder = OptDecoder(spec)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return ``(n, seq, width of the embedding)``."""
        result: Tensor = self.decoder(tokens)
        return result


class Opt(nn.Module):
    """OPT that guesses the next token; the weight of the head is the embedding."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.model = OptBackbone(spec)
        self.lm_head = nn.Linear(spec.embedding_width, spec.vocab, bias=False)
        self.lm_head.weight = self.model.decoder.embed_tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return ``(n, seq, vocab)`` logits of ``(n, seq)`` tokens."""
        result: Tensor = self.lm_head(self.model(tokens))
        return result


class RotaryAngles(nn.Module):
    """Cosines and sines of the angles by which queries and keys are turned."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        rates = _ROPE_BASE ** (-torch.arange(0, spec.head_size, 2, dtype=torch.float32) / spec.head_size)
        self.register_buffer("rates", rates, persistent=False)

    def forward(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return two tensors ``(1, 1, seq, size)`` of the type of ``hidden`` for ``(n, seq)`` tokens."""
        places = positions_in(tokens[:1])[:, None, :, None]
        angles = places * self.get_buffer("rates").float()
        doubled = torch.cat([angles, angles], dim=-1)
        return doubled.cos().type_as(hidden), doubled.sin().type_as(hidden)


def _turned(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    return heads * cosines + torch.cat([-second, first], dim=-1) * sines


class LlamaAttention(nn.Module):
    """Attention with rotary positions; key-value heads may serve several query heads each."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = spec.heads, spec.kv_heads
        self.head_size = spec.head_size
        kv_inner = spec.kv_heads * spec.head_size
        self.q_proj = nn.Linear(spec.hidden, spec.inner, bias=False)
        self.k_proj = nn.Linear(spec.hidden, kv_inner, bias=False)
        self.v_proj = nn.Linear(spec.hidden, kv_inner, bias=False)
        self.o_proj = nn.Linear(spec.inner, spec.hidden, bias=False)
        self.attn_dropout = nn.Dropout(spec.attention_dropout)

    def forward(self, hidden: Tensor, mask: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """Transform ``(n, seq, hidden)``."""
        query = split_heads(self.q_proj(hidden), self.num_heads, self.head_size)
        key = split_heads(self.k_proj(hidden), self.num_kv_heads, self.head_size)
        value = split_heads(self.v_proj(hidden), self.num_kv_heads, self.head_size)
        query, key = _turned(query, cosines, sines), _turned(key, cosines, sines)
        if self.num_kv_heads != self.num_heads:
            n_sharing = self.num_heads // self.num_kv_heads
            key, value = key.repeat_interleave(n_sharing, 1), value.repeat_interleave(n_sharing, 1)
        mixed = attend(query, key, value, mask, self.attn_dropout, self.head_size**-0.5)
        result: Tensor = self.o_proj(join_heads(mixed))
        return result


class LlamaMlp(nn.Module):
    """Feed-forward part with a gate."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(spec.hidden, spec.ffn, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(spec.ffn, spec.hidden, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Transform ``(n, seq, hidden)``."""
        result: Tensor = self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return result


class LlamaLayer(nn.Module):
    """Attention and feed-forward part, each behind a norm and added to what came in."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(spec)
        self.mlp = LlamaMlp(spec)
        self.input_layernorm = nn.RMSNorm(spec.hidden, eps=_LLAMA_EPSILON)
        self.post_attention_layernorm = nn.RMSNorm(spec.hidden, eps=_LLAMA_EPSILON)

    def forward(self, hidden: Tensor, mask: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """Transform ``(n, seq, hidden)``."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), mask, cosines, sines)
        result: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return result


class LlamaBackbone(nn.Module):
    """Embedding, layers, norm."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(spec.vocab, spec.hidden)
        self.rotary_emb = RotaryAngles(spec)
        self.layers = nn.ModuleList(LlamaLayer(spec) for _ in range(spec.n_layers))
        self.norm = nn.RMSNorm(spec.hidden, eps=_LLAMA_EPSILON)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return ``(n, seq, hidden)``."""
        hidden = self.embed_tokens(tokens)
        mask = causal_mask(hidden)
        cosines, sines = self.rotary_emb(tokens, hidden)
        for layer in self.layers:
            hidden = layer(hidden, mask, cosines, sines)
        result: Tensor = self.norm(hidden)
        return result


class Llama(nn.Module):
    """LLaMA that guesses the next token."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.model = LlamaBackbone(spec)
        self.lm_head = nn.Linear(spec.hidden, spec.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return ``(n, seq, vocab)`` logits of ``(n, seq)`` tokens."""
        result: Tensor = self.lm_head(self.model(tokens))
        return result
