"""Transformers whose sequences are shared throughout their layers; some of them cannot be."""

import torch
from sequence_models import HEADS, SEQ, WIDTH, WORDS, words
from torch import nn
from torch.nn import functional as F


def heads_of(tensor):
    return tensor.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)


class Causal(nn.Module):
    """Causal attention with half as many keys and values as queries, turned by what it is handed."""

    def __init__(self):
        super().__init__()
        self.query, self.back = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.both = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden, turns):
        cos, sin = (turn[:, None] for turn in turns)
        key, value = map(heads_of, self.both(hidden).chunk(2, -1))
        query, key = (one * cos + one.flip(-1) * sin for one in (heads_of(self.query(hidden)), key))
        mixed = F.scaled_dot_product_attention(query, key, value, None, 0.0, True, enable_gqa=True)
        return self.back(mixed.transpose(1, 2).flatten(2))


class Turned(nn.Module):
    """A layer that is handed rotations and the weight of each token."""

    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.RMSNorm(WIDTH), Causal()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden, turns=None, weights=None, unread=None):
        hidden = hidden + self.attention(self.norm(hidden), turns)
        return hidden + self.down(F.silu(self.up(hidden))) * weights[..., None]


class Turning(nn.Module):
    """A decoder of such layers, with attention that begins anew where tokens are zero."""

    def __init__(self, depth=2, layer=Turned):
        super().__init__()
        self.words, self.layers = nn.Embedding(WORDS, WIDTH), nn.ModuleList(layer() for _ in range(depth))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words):
        hidden = self.words(words)
        angles = torch.arange(words.shape[1])[:, None] * torch.linspace(0.1, 1.0, WIDTH // HEADS)
        angles = angles.expand(len(words), -1, -1)
        for layer in self.layers:
            weights = 1.0 + (words % 3).float()
            hidden = layer(hidden, turns=(angles.cos(), angles.sin()), weights=weights, unread=words)
        return self.head(hidden)


class Attention(nn.Module):
    """Attention from one sequence to another one, or to itself."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.back = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, hidden, memory, mask=None, causal=False):
        query, key, value = map(heads_of, (self.query(hidden), self.key(memory), self.value(memory)))
        mixed = F.scaled_dot_product_attention(
            query, key, attn_mask=mask, value=value, is_causal=causal, scale=0.3
        )
        return self.back(mixed.transpose(1, 2).flatten(2))


class Encoding(nn.Module):
    """A layer of an encoder, whose attention skips tokens that are padding."""

    def __init__(self):
        super().__init__()
        self.norm, self.attention, self.drop = nn.LayerNorm(WIDTH), Attention(), nn.Dropout(0.2)

    def forward(self, hidden, mask):
        told = self.norm(hidden)
        return hidden + self.drop(self.attention(told, told, mask))


class Decoding(nn.Module):
    """A layer that attends to its own sequence, with a learnt bias, and to that of the encoder."""

    def __init__(self):
        super().__init__()
        self.norm, self.own, self.other = nn.LayerNorm(WIDTH), Attention(), Attention()

    def forward(self, hidden, memory, bias, mask):
        told = self.norm(hidden)
        hidden = hidden + self.own(told, told, bias)
        return hidden + self.other(hidden, memory, mask)


class Translator(nn.Module):
    """Two stacks; every layer of the second reads the result of the first, and a table of biases."""

    def __init__(self):
        super().__init__()
        self.words, self.bias = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.randn(HEADS, SEQ, SEQ))
        self.encoder = nn.ModuleList(Encoding() for _ in range(2))
        self.decoder = nn.ModuleList(Decoding() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, read, written):
        memory, hidden = self.words(read), self.words(written)
        mask = (read > 3)[:, None, None]
        for layer in self.encoder:
            memory = layer(memory, mask)
        length = written.shape[1]
        bias = self.bias.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf)
        for layer in self.decoder:
            hidden = layer(hidden, memory, bias, mask)
        return self.head(hidden)


class Written(Causal):
    """Attention that multiplies scores itself."""

    def forward(self, hidden, turns):
        query, key, value = (heads_of(self.query(hidden)), *map(heads_of, self.both(hidden).chunk(2, -1)))
        scores = query @ key.repeat_interleave(2, 1).transpose(-1, -2)
        mixed = scores.softmax(-1) @ value.repeat_interleave(2, 1)
        return self.back(mixed.transpose(1, 2).flatten(2))


class Local(Causal):
    """Attention that makes its mask from the length of what it is given."""

    def forward(self, hidden, turns):
        query, key, value = (heads_of(self.query(hidden)), *map(heads_of, self.both(hidden).chunk(2, -1)))
        mask = torch.ones(hidden.shape[1], hidden.shape[1], dtype=torch.bool).tril()
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
        return self.back(mixed.transpose(1, 2).flatten(2))


class Counting(Causal):
    """Attention that turns by the places of the tokens that it is given."""

    def forward(self, hidden, turns):
        angles = torch.arange(hidden.shape[1])[:, None] * torch.linspace(0.1, 1.0, WIDTH // HEADS)
        return super().forward(hidden, (angles.cos()[None], angles.sin()[None]))


class Folded(Turned):
    """A layer of torch, whose attention no function mode sees."""

    def __init__(self):
        super().__init__()
        self.inner = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, batch_first=True)

    def forward(self, hidden, turns=None, weights=None, unread=None):
        return self.inner(hidden)


def with_attention(kind):
    def layer():
        made = Turned()
        made.attention = kind()
        return made

    return Turning(layer=layer)


class Tied(Turning):
    """A decoder whose layers use a weight of its head."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH)
        self.head.weight = self.layers[0].attention.back.weight


MODELS = {
    "Turning": Turning,
    "Translator": Translator,
    "Written": lambda: with_attention(Written),
    "Local": lambda: with_attention(Local),
    "Counting": lambda: with_attention(Counting),
    "Folded": lambda: Turning(layer=Folded),
    "Tied": Tied,
}


def seeded(kind):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return MODELS[kind]()


def inputs(kind, length=SEQ):
    return (words(length), words(length, seed=1)) if kind == "Translator" else (words(length),)
