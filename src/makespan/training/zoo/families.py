"""Models of the families that schedules are written for, their samples and the drawing of their weights.

Modules have the names of the published weights.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from makespan.training.zoo.layers import (
    attend,
    causal_mask,
    join_heads,
    padding_mask,
    positions_in,
    split_heads,
)
from makespan.training.zoo.small import IGNORED, Tokens, token_walk
from makespan.training.zoo.specs import ConvolutionSpec, FamilySpec, TransformerSpec, generator_for

# --- Samples: token sequences that follow a rule, and noise in the colour of a class ----------------

_FIRST_WORD, _MASK, _START = 3, 2, 0
_MASKED_SHARE = 0.15
_SHORTEST = 0.75
_NOISE = 0.5


@dataclass(frozen=True, slots=True)
class FamilyBatch:
    """Samples: the inputs of a model, in its order, and its targets."""

    inputs: tuple[Tensor, ...]
    targets: Tensor


def _words(spec: TransformerSpec, rng: np.random.Generator, n: int, length: int, seed: int) -> Tokens:
    successor = generator_for("family", spec.family, seed).permutation(spec.vocab - _FIRST_WORD)
    return _FIRST_WORD + token_walk(rng, successor, n, length)


def _generator(spec: TransformerSpec | ConvolutionSpec, n: int, seed: int) -> np.random.Generator:
    return generator_for("family samples", spec.family, spec.size, n, seed)


def _corrupted(
    spec: TransformerSpec, n: int, seed: int, words: Tokens
) -> tuple[Tokens, Tensor, npt.NDArray[np.bool]]:
    """Pad samples behind a drawn length and mask some tokens before it; return tokens, visible, masked."""
    rng = generator_for("corruption", spec.family, spec.size, n, seed)
    lengths = rng.integers(int(_SHORTEST * spec.seq), spec.seq, n, endpoint=True)
    visible = np.arange(spec.seq) < lengths[:, None]
    masked = (rng.random(words.shape) < _MASKED_SHARE) & visible
    masked[:, 0] = True  # every sample has at least one target
    tokens = np.where(visible, np.where(masked, _MASK, words), spec.padding)
    return tokens, torch.from_numpy(visible.astype(np.int64)), masked


def _masked(spec: TransformerSpec, n_samples: int, seed: int) -> FamilyBatch:
    words = _words(spec, _generator(spec, n_samples, seed), n_samples, spec.seq, seed)
    tokens, visible, masked = _corrupted(spec, n_samples, seed, words)
    targets = np.where(masked, words, IGNORED)
    return FamilyBatch((torch.from_numpy(tokens), visible), torch.from_numpy(targets))


def _next_words(spec: TransformerSpec, n_samples: int, seed: int) -> FamilyBatch:
    words = torch.from_numpy(_words(spec, _generator(spec, n_samples, seed), n_samples, spec.seq + 1, seed))
    return FamilyBatch((words[:, :-1].contiguous(),), words[:, 1:].contiguous())


def _restored(spec: TransformerSpec, n_samples: int, seed: int) -> FamilyBatch:
    words = _words(spec, _generator(spec, n_samples, seed), n_samples, spec.seq, seed)
    tokens, visible, _ = _corrupted(spec, n_samples, seed, words)
    targets = words[:, : spec.decoder_seq]
    started = np.concatenate([np.full((n_samples, 1), _START), targets[:, :-1]], axis=1)
    inputs = (torch.from_numpy(tokens), visible, torch.from_numpy(started))
    return FamilyBatch(inputs, torch.from_numpy(targets.copy()))


def _images(spec: ConvolutionSpec, n_samples: int, seed: int) -> FamilyBatch:
    rng, side = _generator(spec, n_samples, seed), spec.image_side
    patterns = generator_for("family", spec.family, seed)
    colours = patterns.standard_normal((spec.n_classes, 3, 1, 1), dtype=np.float32)
    classes = rng.integers(0, spec.n_classes, n_samples)
    noise = rng.standard_normal((n_samples, 3, side, side), dtype=np.float32)
    images = colours[classes] + np.float32(_NOISE) * noise
    return FamilyBatch((torch.from_numpy(images),), torch.from_numpy(classes))


SAMPLES: Mapping[str, Callable[[Any, int, int], FamilyBatch]] = {
    "bert": _masked,
    "roberta": _masked,
    "albert": _masked,
    "gpt": _next_words,
    "opt": _next_words,
    "t5": _restored,
    "llama": _next_words,
    "wideresnet": _images,
}
"""Sampling function of each family."""


# --- BERT, RoBERTa and ALBERT: bidirectional encoders with norms after the sums ---------------------

_EPSILON = {"bert": 1e-12, "roberta": 1e-5, "albert": 1e-12}


def _norm(spec: TransformerSpec, width: int) -> nn.LayerNorm:
    return nn.LayerNorm(width, eps=_EPSILON[spec.family])


class Embeddings(nn.Module):
    """Sum of the embeddings of tokens, positions and the first type of token."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        width = spec.embedding_width
        self.padding = spec.padding
        self.counts_padding = spec.family != "roberta"
        positions_padding = None if self.counts_padding else spec.padding
        self.word_embeddings = nn.Embedding(spec.vocab, width, padding_idx=spec.padding)
        self.position_embeddings = nn.Embedding(spec.max_positions, width, padding_idx=positions_padding)
        self.token_type_embeddings = nn.Embedding(spec.n_types, width)
        self.LayerNorm = _norm(spec, width)
        self.dropout = nn.Dropout(spec.dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """Embed ``(n, seq)`` tokens."""
        places = positions_in(tokens) if self.counts_padding else self._places_of_words(tokens)
        types = self.token_type_embeddings(torch.zeros_like(tokens))
        summed = self.word_embeddings(tokens) + types + self.position_embeddings(places)
        result: Tensor = self.dropout(self.LayerNorm(summed))
        return result

    def _places_of_words(self, tokens: Tensor) -> Tensor:
        """Return positions that count words only, starting after the position of padding."""
        is_word = tokens.ne(self.padding).long()
        return is_word.cumsum(1) * is_word + self.padding


class SelfAttention(nn.Module):
    """Heads of attention; all of them, or those of one shard."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.num_heads, self.head_size = spec.heads, spec.head_size
        self.query, self.key, self.value = (nn.Linear(spec.hidden, spec.inner) for _ in range(3))
        self.dropout = nn.Dropout(spec.attention_dropout)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Attend within ``(n, seq, hidden)``; return ``(n, seq, heads * size)``."""
        query = split_heads(self.query(hidden), self.num_heads, self.head_size)
        key = split_heads(self.key(hidden), self.num_heads, self.head_size)
        value = split_heads(self.value(hidden), self.num_heads, self.head_size)
        return join_heads(attend(query, key, value, mask, self.dropout, self.head_size**-0.5))


class ResidualOutput(nn.Module):
    """Linear layer, dropout, sum with the residual, norm."""

    def __init__(self, spec: TransformerSpec, inputs: int) -> None:
        super().__init__()
        self.dense = nn.Linear(inputs, spec.hidden)
        self.LayerNorm = _norm(spec, spec.hidden)
        self.dropout = nn.Dropout(spec.dropout)

    def forward(self, features: Tensor, residual: Tensor) -> Tensor:
        """Return ``(n, seq, hidden)``."""
        result: Tensor = self.LayerNorm(self.dropout(self.dense(features)) + residual)
        return result


class AttentionBlock(nn.Module):
    """Attention with its output."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.self = SelfAttention(spec)
        self.output = ResidualOutput(spec, spec.inner)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Transform ``(n, seq, hidden)``."""
        result: Tensor = self.output(self.self(hidden, mask), hidden)
        return result


class Intermediate(nn.Module):
    """First half of the feed-forward part."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.dense = nn.Linear(spec.hidden, spec.ffn)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return ``(n, seq, ffn)``."""
        return F.gelu(self.dense(hidden))


class EncoderLayer(nn.Module):
    """Attention, then the feed-forward part."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.attention = AttentionBlock(spec)
        self.intermediate = Intermediate(spec)
        self.output = ResidualOutput(spec, spec.ffn)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Transform ``(n, seq, hidden)``."""
        hidden = self.attention(hidden, mask)
        result: Tensor = self.output(self.intermediate(hidden), hidden)
        return result


class Encoder(nn.Module):
    """Sequence of layers."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.layer = nn.ModuleList(EncoderLayer(spec) for _ in range(spec.n_layers))

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Transform ``(n, seq, hidden)``."""
        for layer in self.layer:
            hidden = layer(hidden, mask)
        return hidden


class Backbone(nn.Module):
    """Embeddings and encoder."""

    def __init__(self, spec: TransformerSpec, encoder: nn.Module) -> None:
        super().__init__()
        self.embeddings = Embeddings(spec)
        self.encoder = encoder

    def forward(self, tokens: Tensor, visible: Tensor) -> Tensor:
        """Return ``(n, seq, hidden)``."""
        embedded = self.embeddings(tokens)
        result: Tensor = self.encoder(embedded, padding_mask(visible, embedded))
        return result


class Transform(nn.Module):
    """Linear layer, activation and norm before the predictions of BERT."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.dense = nn.Linear(spec.hidden, spec.embedding_width)
        self.LayerNorm = _norm(spec, spec.embedding_width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Transform ``(n, seq, hidden)``."""
        result: Tensor = self.LayerNorm(F.gelu(self.dense(hidden)))
        return result


class BertPredictions(nn.Module):
    """Predict masked tokens; the weight of the decoder is the embedding."""

    def __init__(self, spec: TransformerSpec, table: nn.Embedding) -> None:
        super().__init__()
        self.transform = Transform(spec)
        self.decoder = nn.Linear(spec.embedding_width, spec.vocab)
        self.decoder.weight = table.weight

    def forward(self, hidden: Tensor) -> Tensor:
        """Return ``(n, seq, vocab)`` logits."""
        result: Tensor = self.decoder(self.transform(hidden))
        return result


class BertHead(nn.Module):
    """Head of BERT, after its encoder."""

    def __init__(self, spec: TransformerSpec, table: nn.Embedding) -> None:
        super().__init__()
        self.predictions = BertPredictions(spec, table)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return ``(n, seq, vocab)`` logits."""
        result: Tensor = self.predictions(hidden)
        return result


class Bert(nn.Module):
    """BERT for masked-language modelling."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.bert = Backbone(spec, Encoder(spec))
        self.cls = BertHead(spec, self.bert.embeddings.word_embeddings)

    def forward(self, tokens: Tensor, visible: Tensor) -> Tensor:
        """Return ``(n, seq, vocab)`` logits of ``(n, seq)`` tokens; ``visible`` is 0 for padding."""
        result: Tensor = self.cls(self.bert(tokens, visible))
        return result


class RobertaHead(nn.Module):
    """Predict masked tokens; the weight of the decoder is the embedding."""

    def __init__(self, spec: TransformerSpec, table: nn.Embedding) -> None:
        super().__init__()
        self.dense = nn.Linear(spec.hidden, spec.embedding_width)
        self.layer_norm = _norm(spec, spec.embedding_width)
        self.decoder = nn.Linear(spec.embedding_width, spec.vocab)
        self.decoder.weight = table.weight

    def forward(self, hidden: Tensor) -> Tensor:
        """Return ``(n, seq, vocab)`` logits."""
        result: Tensor = self.decoder(self.layer_norm(F.gelu(self.dense(hidden))))
        return result


class Roberta(nn.Module):
    """RoBERTa for masked-language modelling; positions count words only."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.roberta = Backbone(spec, Encoder(spec))
        self.lm_head = RobertaHead(spec, self.roberta.embeddings.word_embeddings)

    def forward(self, tokens: Tensor, visible: Tensor) -> Tensor:
        """Return ``(n, seq, vocab)`` logits of ``(n, seq)`` tokens; ``visible`` is 0 for padding."""
        result: Tensor = self.lm_head(self.roberta(tokens, visible))
        return result


class AlbertAttention(nn.Module):
    """Attention with output, dropout, residual and norm in one module."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.num_heads, self.head_size = spec.heads, spec.head_size
        self.query, self.key, self.value = (nn.Linear(spec.hidden, spec.inner) for _ in range(3))
        self.attention_dropout = nn.Dropout(spec.attention_dropout)
        self.dense = nn.Linear(spec.inner, spec.hidden)
        self.output_dropout = nn.Dropout(spec.dropout)
        self.LayerNorm = _norm(spec, spec.hidden)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Transform ``(n, seq, hidden)``."""
        query = split_heads(self.query(hidden), self.num_heads, self.head_size)
        key = split_heads(self.key(hidden), self.num_heads, self.head_size)
        value = split_heads(self.value(hidden), self.num_heads, self.head_size)
        mixed = attend(query, key, value, mask, self.attention_dropout, self.head_size**-0.5)
        output = self.output_dropout(self.dense(join_heads(mixed)))
        result: Tensor = self.LayerNorm(output + hidden)
        return result


class AlbertLayer(nn.Module):
    """Layer that ALBERT has once and applies repeatedly."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.full_layer_layer_norm = _norm(spec, spec.hidden)
        self.attention = AlbertAttention(spec)
        self.ffn = nn.Linear(spec.hidden, spec.ffn)
        self.ffn_output = nn.Linear(spec.ffn, spec.hidden)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Transform ``(n, seq, hidden)``."""
        attended = self.attention(hidden, mask)
        raised = F.gelu(self.ffn(attended), approximate="tanh")
        result: Tensor = self.full_layer_layer_norm(self.ffn_output(raised) + attended)
        return result


class AlbertGroup(nn.Module):
    """Layers that share nothing among each other; here there is one."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.albert_layers = nn.ModuleList([AlbertLayer(spec)])

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Transform ``(n, seq, hidden)``."""
        for layer in self.albert_layers:
            hidden = layer(hidden, mask)
        return hidden


class AlbertEncoder(nn.Module):
    """Widen the embedding, then apply the one group as often as there are layers."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.n_layers = spec.n_layers
        self.embedding_hidden_mapping_in = nn.Linear(spec.embedding_width, spec.hidden)
        self.albert_layer_groups = nn.ModuleList([AlbertGroup(spec)])

    def forward(self, embedded: Tensor, mask: Tensor) -> Tensor:
        """Turn ``(n, seq, embedding)`` into ``(n, seq, hidden)``."""
        hidden: Tensor = self.embedding_hidden_mapping_in(embedded)
        for _ in range(self.n_layers):
            hidden = self.albert_layer_groups[0](hidden, mask)
        return hidden


class AlbertHead(nn.Module):
    """Predict masked tokens in the width of the embedding, which is the weight of the decoder."""

    def __init__(self, spec: TransformerSpec, table: nn.Embedding) -> None:
        super().__init__()
        self.dense = nn.Linear(spec.hidden, spec.embedding_width)
        self.LayerNorm = _norm(spec, spec.embedding_width)
        self.decoder = nn.Linear(spec.embedding_width, spec.vocab)
        self.decoder.weight = table.weight

    def forward(self, hidden: Tensor) -> Tensor:
        """Return ``(n, seq, vocab)`` logits."""
        raised = F.gelu(self.dense(hidden), approximate="tanh")
        result: Tensor = self.decoder(self.LayerNorm(raised))
        return result


class Albert(nn.Module):
    """ALBERT for masked-language modelling: all layers share one set of weights."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.albert = Backbone(spec, AlbertEncoder(spec))
        self.predictions = AlbertHead(spec, self.albert.embeddings.word_embeddings)

    def forward(self, tokens: Tensor, visible: Tensor) -> Tensor:
        """Return ``(n, seq, vocab)`` logits of ``(n, seq)`` tokens; ``visible`` is 0 for padding."""
        result: Tensor = self.predictions(self.albert(tokens, visible))
        return result


# --- GPT (as GPT-Neo), OPT and LLaMA: causal decoders -----------------------------------------------

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
    """Holder of the attention, as in the published weights."""

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
    """GPT-Neo for next-token prediction; the weight of the head is the embedding."""

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
    """Holder of the decoder, as in the published weights."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.decoder = OptDecoder(spec)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return ``(n, seq, width of the embedding)``."""
        result: Tensor = self.decoder(tokens)
        return result


class Opt(nn.Module):
    """OPT for next-token prediction; the weight of the head is the embedding."""

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
    """LLaMA for next-token prediction."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.model = LlamaBackbone(spec)
        self.lm_head = nn.Linear(spec.hidden, spec.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return ``(n, seq, vocab)`` logits of ``(n, seq)`` tokens."""
        result: Tensor = self.lm_head(self.model(tokens))
        return result


# --- T5: encoder and decoder with relative positions and without biases -----------------------------
#
# Unlike in the published weights, the table of relative positions belongs to the stack, whose layers share
# it, and not to its first layer.

_T5_EPSILON = 1e-6


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
        """Attend from ``(n, seq, hidden)`` to ``(n, rows, hidden)``."""
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
        self.layer_norm = nn.RMSNorm(spec.hidden, eps=_T5_EPSILON)
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
        self.layer_norm = nn.RMSNorm(spec.hidden, eps=_T5_EPSILON)
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
        self.layer_norm = nn.RMSNorm(spec.hidden, eps=_T5_EPSILON)
        self.dropout = nn.Dropout(spec.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """Transform ``(n, seq, hidden)``."""
        result: Tensor = hidden + self.dropout(self.DenseReluDense(self.layer_norm(hidden)))
        return result


class EncoderBlock(nn.Module):
    """Layer of the encoder."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.layer = nn.ModuleList([SelfAttentionPart(spec), FeedForwardPart(spec)])

    def forward(self, hidden: Tensor, bias: Tensor) -> Tensor:
        """Transform ``(n, seq, hidden)``."""
        result: Tensor = self.layer[1](self.layer[0](hidden, bias))
        return result


class DecoderBlock(nn.Module):
    """Layer of the decoder."""

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
        self.final_layer_norm = nn.RMSNorm(spec.hidden, eps=_T5_EPSILON)
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
        self.final_layer_norm = nn.RMSNorm(spec.hidden, eps=_T5_EPSILON)
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
        """Return ``(n, decoder_seq, vocab)`` logits; ``visible`` is 0 for padding in ``tokens``."""
        embedded = self.shared(tokens)
        mask = padding_mask(visible, embedded)
        encoded = self.encoder(embedded, mask)
        hidden = self.decoder(self.shared(decoded), encoded, mask)
        result: Tensor = self.lm_head(hidden * self.scale)
        return result


# --- WideResNet: residual bottlenecks with wide convolutions inside ---------------------------------

_COLOURS = 3


class Bottleneck(nn.Module):
    """Three convolutions, the inner one wide, with a shortcut."""

    def __init__(self, inputs: int, width: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU()
        self.downsample = (
            nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
            if stride != 1 or inputs != outputs
            else None
        )

    def forward(self, images: Tensor) -> Tensor:
        """Transform ``(n, channels, height, width)``."""
        past = images if self.downsample is None else self.downsample(images)
        hidden = self.relu(self.bn1(self.conv1(images)))
        hidden = self.relu(self.bn2(self.conv2(hidden)))
        result: Tensor = self.relu(self.bn3(self.conv3(hidden)) + past)
        return result


class WideResNet(nn.Module):
    """Stem, four parts of bottlenecks, classifier."""

    def __init__(self, spec: ConvolutionSpec) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(_COLOURS, spec.planes, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(spec.planes)
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1, self.layer2, self.layer3, self.layer4 = (_part(spec, part) for part in range(4))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(spec.outputs(3), spec.n_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return ``(n, classes)`` logits of ``(n, 3, side, side)`` images."""
        hidden = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        hidden = self.layer4(self.layer3(self.layer2(self.layer1(hidden))))
        result: Tensor = self.fc(self.avgpool(hidden).flatten(1))
        return result


def _part(spec: ConvolutionSpec, part: int) -> nn.Sequential:
    width, outputs = spec.width(part), spec.outputs(part)
    before = spec.planes if part == 0 else spec.outputs(part - 1)
    first = Bottleneck(before, width, outputs, 1 if part == 0 else 2)
    others = (Bottleneck(outputs, width, outputs, 1) for _ in range(spec.blocks[part] - 1))
    return nn.Sequential(first, *others)


# --- Building ---------------------------------------------------------------------------------------

_MODELS: Mapping[str, Callable[[Any], nn.Module]] = {
    "bert": Bert,
    "roberta": Roberta,
    "albert": Albert,
    "gpt": Gpt,
    "opt": Opt,
    "t5": T5,
    "llama": Llama,
    "wideresnet": WideResNet,
}
_SPREAD, _GAIN = 0.02, 2.0


def build(spec: FamilySpec, seed: int, *, meta: bool) -> nn.Module:
    """Build a model; see `makespan.training.zoo.build_family`."""
    with torch.random.fork_rng(devices=[]), torch.device("meta") if meta else nullcontext():
        model = _MODELS[spec.family](spec)
    if not meta:
        _draw(model, seed)
    return model


@torch.no_grad()
def _draw(model: nn.Module, seed: int) -> None:
    """Draw all weights, also biases and norms: a lost one would go unnoticed if it were zero or one."""
    for name, weight in model.named_parameters():
        owner = model.get_submodule(name.rpartition(".")[0])
        values = generator_for(seed, name).standard_normal(tuple(weight.shape), dtype=np.float32)
        is_norm = weight.dim() == 1 and name.endswith("weight")
        spread = (_GAIN / weight[0].numel()) ** 0.5 if isinstance(owner, nn.Conv2d) else _SPREAD
        weight.copy_(torch.from_numpy(values * np.float32(spread) + np.float32(is_norm)))
        if isinstance(owner, nn.Embedding) and owner.padding_idx is not None:
            weight[owner.padding_idx] = 0.0
