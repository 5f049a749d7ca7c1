"""BERT, RoBERTa and ALBERT: bidirectional encoders with norms after the sums, which fill in masked tokens.

Modules have the names that the published weights have.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from makespan.training.zoo._families import TransformerSpec
from makespan.training.zoo._family_layers import attend, join_heads, padding_mask, positions_in, split_heads

__all__ = ["Albert", "Bert", "Roberta"]

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
        """Return positions that count words only, from behind the one of what fills samples up."""
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
        """Return what ``(n, seq, hidden)`` attends to, ``(n, seq, heads * size)``."""
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
    """Layers one after the other."""

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
    """Linear layer, activation and norm before the words of BERT are guessed."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.dense = nn.Linear(spec.hidden, spec.embedding_width)
        self.LayerNorm = _norm(spec, spec.embedding_width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Transform ``(n, seq, hidden)``."""
        result: Tensor = self.LayerNorm(F.gelu(self.dense(hidden)))
        return result


class BertPredictions(nn.Module):
    """Guess masked words; the weight of the decoder is the embedding."""

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
    """What BERT has behind its encoder."""

    def __init__(self, spec: TransformerSpec, table: nn.Embedding) -> None:
        super().__init__()
        self.predictions = BertPredictions(spec, table)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return ``(n, seq, vocab)`` logits."""
        result: Tensor = self.predictions(hidden)
        return result


class Bert(nn.Module):
    """BERT that fills in masked words."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.bert = Backbone(spec, Encoder(spec))
        self.cls = BertHead(spec, self.bert.embeddings.word_embeddings)

    def forward(self, tokens: Tensor, visible: Tensor) -> Tensor:
        """Return ``(n, seq, vocab)`` logits of ``(n, seq)`` tokens; ``visible`` is 0 for what fills up."""
        result: Tensor = self.cls(self.bert(tokens, visible))
        return result


class RobertaHead(nn.Module):
    """Guess masked words; the weight of the decoder is the embedding."""

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
    """RoBERTa that fills in masked words; positions count words only."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.roberta = Backbone(spec, Encoder(spec))
        self.lm_head = RobertaHead(spec, self.roberta.embeddings.word_embeddings)

    def forward(self, tokens: Tensor, visible: Tensor) -> Tensor:
        """Return ``(n, seq, vocab)`` logits of ``(n, seq)`` tokens; ``visible`` is 0 for what fills up."""
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
    """The layer that ALBERT has once and applies again and again."""

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
    """Guess masked words in the width of the embedding, which is the weight of the decoder."""

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
    """ALBERT that fills in masked words: all layers are one, applied again and again."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.albert = Backbone(spec, AlbertEncoder(spec))
        self.predictions = AlbertHead(spec, self.albert.embeddings.word_embeddings)

    def forward(self, tokens: Tensor, visible: Tensor) -> Tensor:
        """Return ``(n, seq, vocab)`` logits of ``(n, seq)`` tokens; ``visible`` is 0 for what fills up."""
        result: Tensor = self.predictions(self.albert(tokens, visible))
        return result
