"""T5: an encoder of corrupted text and a decoder of the original, with relative positions and without biases.

Modules have the names that the published weights have, except that the table of relative positions belongs
to the stack, whose layers share it, and not to its first layer.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from makespan.training.zoo._families import TransformerSpec
from makespan.training.zoo._family_layers import attend, causal_mask, join_heads, padding_mask, split_heads

__all__ = ["T5"]

_EPSILON = 1e-6


class RelativePositions(nn.Module):
    """Scores by distance, in one table for all layers; the buckets of far tokens are wider."""

    def __init__(self, spec: TransformerSpec, is_decoder: bool) -> None:
        super().__init__()
        self.is_decoder = is_decoder
        self.n_buckets = spec.n_buckets if is_decoder else spec.n_buckets // 2
        self.max_distance = spec.max_distance
        self.relative_attention_bias = nn.Embedding(spec.n_buckets, spec.heads)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the scores ``(1, heads, seq, seq)`` to add; a decoder sees nothing that follows."""
        places = torch.ones_like(hidden[0, :, 0], dtype=torch.long).cumsum(0)
        offset = places[None, :] - places[:, None]
        bias: Tensor = self.relative_attention_bias(self._bucket(offset)).permute(2, 0, 1).unsqueeze(0)
        return bias + causal_mask(hidden) if self.is_decoder else bias

    def _bucket(self, offset: Tensor) -> Tensor:
        n_exact = self.n_buckets // 2
        distance = (-offset).clamp(min=0) if self.is_decoder else offset.abs()
        growth = (distance.clamp(min=1).float() / n_exact).log() / math.log(self.max_distance / n_exact)
        far = (n_exact + growth * (self.n_buckets - n_exact)).long().clamp(max=self.n_buckets - 1)
        bucket = torch.where(distance < n_exact, distance, far)
        return bucket if self.is_decoder else bucket + (offset > 0).long() * self.n_buckets


class T5Attention(nn.Module):
    """Attention of unscaled scores, to the own tokens or to those of the encoder."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.num_heads, self.head_size = spec.heads, spec.head_size
        self.q, self.k, self.v = (nn.Linear(spec.hidden, spec.inner, bias=False) for _ in range(3))
        self.o = nn.Linear(spec.inner, spec.hidden, bias=False)
        self.attn_dropout = nn.Dropout(spec.attention_dropout)

    def forward(self, hidden: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        """Return what ``(n, seq, hidden)`` attends to in ``(n, rows, hidden)``."""
        query = split_heads(self.q(hidden), self.num_heads, self.head_size)
        key = split_heads(self.k(memory), self.num_heads, self.head_size)
        value = split_heads(self.v(memory), self.num_heads, self.head_size)
        result: Tensor = self.o(join_heads(attend(query, key, value, mask, self.attn_dropout)))
        return result


class SelfAttentionPart(nn.Module):
    """Attention to the own tokens, behind a norm and added to what came in."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.SelfAttention = T5Attention(spec)
        self.layer_norm = nn.RMSNorm(spec.hidden, eps=_EPSILON)
        self.dropout = nn.Dropout(spec.dropout)

    def forward(self, hidden: Tensor, bias: Tensor) -> Tensor:
        """Transform ``(n, seq, hidden)``."""
        normed = self.layer_norm(hidden)
        result: Tensor = hidden + self.dropout(self.SelfAttention(normed, normed, bias))
        return result


class CrossAttentionPart(nn.Module):
    """Attention to the tokens of the encoder, behind a norm and added to what came in."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.EncDecAttention = T5Attention(spec)
        self.layer_norm = nn.RMSNorm(spec.hidden, eps=_EPSILON)
        self.dropout = nn.Dropout(spec.dropout)

    def forward(self, hidden: Tensor, encoded: Tensor, mask: Tensor) -> Tensor:
        """Transform ``(n, seq, hidden)``."""
        result: Tensor = hidden + self.dropout(self.EncDecAttention(self.layer_norm(hidden), encoded, mask))
        return result


class DenseReluDense(nn.Module):
    """Feed-forward part."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.wi = nn.Linear(spec.hidden, spec.ffn, bias=False)
        self.wo = nn.Linear(spec.ffn, spec.hidden, bias=False)
        self.dropout = nn.Dropout(spec.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """Transform ``(n, seq, hidden)``."""
        result: Tensor = self.wo(self.dropout(F.relu(self.wi(hidden))))
        return result


class FeedForwardPart(nn.Module):
    """Feed-forward part, behind a norm and added to what came in."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.DenseReluDense = DenseReluDense(spec)
        self.layer_norm = nn.RMSNorm(spec.hidden, eps=_EPSILON)
        self.dropout = nn.Dropout(spec.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """Transform ``(n, seq, hidden)``."""
        result: Tensor = hidden + self.dropout(self.DenseReluDense(self.layer_norm(hidden)))
        return result


class EncoderBlock(nn.Module):
    """A layer of the encoder."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.layer = nn.ModuleList([SelfAttentionPart(spec), FeedForwardPart(spec)])

    def forward(self, hidden: Tensor, bias: Tensor) -> Tensor:
        """Transform ``(n, seq, hidden)``."""
        result: Tensor = self.layer[1](self.layer[0](hidden, bias))
        return result


class DecoderBlock(nn.Module):
    """A layer of the decoder."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.layer = nn.ModuleList([SelfAttentionPart(spec), CrossAttentionPart(spec), FeedForwardPart(spec)])

    def forward(self, hidden: Tensor, encoded: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
        """Transform ``(n, decoder_seq, hidden)``."""
        attended = self.layer[1](self.layer[0](hidden, bias), encoded, mask)
        result: Tensor = self.layer[2](attended)
        return result


class T5Encoder(nn.Module):
    """Layers that share one table of relative positions."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.position_bias = RelativePositions(spec, is_decoder=False)
        self.block = nn.ModuleList(EncoderBlock(spec) for _ in range(spec.n_layers))
        self.final_layer_norm = nn.RMSNorm(spec.hidden, eps=_EPSILON)
        self.dropout = nn.Dropout(spec.dropout)

    def forward(self, embedded: Tensor, mask: Tensor) -> Tensor:
        """Transform ``(n, seq, hidden)``."""
        hidden = self.dropout(embedded)
        bias = self.position_bias(hidden) + mask
        for block in self.block:
            hidden = block(hidden, bias)
        result: Tensor = self.dropout(self.final_layer_norm(hidden))
        return result


class T5Decoder(nn.Module):
    """Layers that share one table of relative positions and attend to the encoder."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.position_bias = RelativePositions(spec, is_decoder=True)
        self.block = nn.ModuleList(DecoderBlock(spec) for _ in range(spec.n_decoder_layers))
        self.final_layer_norm = nn.RMSNorm(spec.hidden, eps=_EPSILON)
        self.dropout = nn.Dropout(spec.dropout)

    def forward(self, embedded: Tensor, encoded: Tensor, mask: Tensor) -> Tensor:
        """Transform ``(n, decoder_seq, hidden)``."""
        hidden = self.dropout(embedded)
        bias = self.position_bias(hidden)
        for block in self.block:
            hidden = block(hidden, encoded, bias, mask)
        result: Tensor = self.dropout(self.final_layer_norm(hidden))
        return result


class T5(nn.Module):
    """T5 with one embedding for encoder, decoder and head."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.scale = spec.hidden**-0.5
        self.shared = nn.Embedding(spec.vocab, spec.hidden)
        self.encoder, self.decoder = T5Encoder(spec), T5Decoder(spec)
        self.lm_head = nn.Linear(spec.hidden, spec.vocab, bias=False)
        self.lm_head.weight = self.shared.weight

    def forward(self, tokens: Tensor, visible: Tensor, decoded: Tensor) -> Tensor:
        """Return ``(n, decoder_seq, vocab)`` logits; ``visible`` is 0 for what fills ``tokens`` up."""
        embedded = self.shared(tokens)
        mask = padding_mask(visible, embedded)
        encoded = self.encoder(embedded, mask)
        hidden = self.decoder(self.shared(decoded), encoded, mask)
        result: Tensor = self.lm_head(hidden * self.scale)
        return result
