"""Transformers whose layers read whole sequences at different places; some of them cannot share sequences."""

import torch
from torch import nn
from torch.nn import functional as F

WORDS, WIDTH, HEADS, SEQ = 32, 16, 4, 8


class Attention(nn.Module):
    """Attention that reads the length of what it is given; dropout and sum are its own, as in some models."""

    def __init__(self, heads=HEADS, size=WIDTH // HEADS):
        super().__init__()
        self.heads, self.size = heads, size
        self.three, self.back = nn.Linear(WIDTH, 3 * heads * size), nn.Linear(heads * size, WIDTH)

    def forward(self, hidden, rest, mask=None):
        split = self.three(hidden).view(*hidden.shape[:2], self.heads, 3, self.size)
        query, key, value = split.transpose(1, 2).unbind(3)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        mixed = self.back(mixed.transpose(1, 2).flatten(2))
        return rest + F.dropout(mixed, 0.1, self.training), None


class ByHead(nn.Module):
    """A number for each distance and head, which a method and a call without arguments return."""

    def __init__(self):
        super().__init__()
        self.numbers = nn.Parameter(torch.randn(2 * SEQ - 1, HEADS))

    def of(self, distances):
        return self.numbers[distances].permute(2, 0, 1)

    def forward(self):
        return self.numbers[SEQ - 1, :, None, None]


class Near(nn.Module):
    """Attention by distances, with numbers of heads, what all heads share, and a scale of its result.

    A head has as many features as there are heads.
    """

    def __init__(self):
        super().__init__()
        self.three, self.back = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.shared = nn.Parameter(torch.randn(2 * SEQ - 1, WIDTH // HEADS))
        self.by_head, self.called = ByHead(), ByHead()
        self.made = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, HEADS))
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, hidden, rest, mask=None):
        steps = torch.arange(hidden.shape[1])
        distances = steps[:, None] - steps + SEQ - 1
        parts = self.three(hidden).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in parts)
        near = torch.einsum("bhqf,qkf->bhqk", query, self.shared[distances]) + self.by_head.of(distances)
        near = near + self.made(distances[..., None] / SEQ).permute(2, 0, 1) + mask
        mixed = F.scaled_dot_product_attention(query, key, value * self.called(), attn_mask=near)
        return rest + self.scale * self.back(mixed.transpose(1, 2).flatten(2)), None


class Layer(nn.Module):
    """A layer with a scale of its own, and a feed-forward part for tokens without samples."""

    returns_pair = True

    def __init__(self, attention=Attention):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.drop = attention(), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden, mask):
        hidden, _ = self.attention(self.before(hidden), hidden, mask=mask)
        flat = self.after(hidden).reshape(-1, WIDTH)
        flat = self.drop(self.down(F.gelu(self.up(flat)))) * self.scale
        return (hidden + flat.view(hidden.shape), None)


class Experts(nn.Module):
    """Experts in two tensors, of which each token gets two."""

    def __init__(self, experts=4, wide=24):
        super().__init__()
        self.experts = experts
        self.wide = nn.Parameter(torch.randn(experts, 2 * wide, WIDTH) * 0.2)
        self.narrow = nn.Parameter(torch.randn(experts, WIDTH, wide) * 0.2)

    def forward(self, tokens, chosen, weights):
        result = torch.zeros_like(tokens)
        for expert in range(self.experts):
            rows, places = torch.where(chosen == expert)
            gate, value = F.linear(tokens[rows], self.wide[expert]).chunk(2, -1)
            made = F.linear(F.silu(gate) * value, self.narrow[expert])
            result = result.index_add(0, rows, made * weights[rows, places, None])
        return result


class Shifted(Experts):
    """Experts with a weight that they share."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, tokens, chosen, weights):
        return super().forward(tokens, chosen, weights) + self.shift


class Kept(Experts):
    """Experts that return what they are given, too, which would be added up."""

    def forward(self, tokens, chosen, weights):
        return tokens + super().forward(tokens, chosen, weights)


class Choice(nn.Module):
    """Experts, the choice of two for each token, and a part that all tokens take."""

    def __init__(self):
        super().__init__()
        self.choice, self.experts = nn.Linear(WIDTH, 4, bias=False), Experts()
        self.enter, self.leave = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden):
        tokens = hidden.reshape(-1, WIDTH)
        weights, chosen = torch.softmax(self.choice(tokens), -1).topk(2, -1)
        made = self.experts(tokens, chosen, weights / weights.sum(-1, keepdim=True))
        return made.view(hidden.shape) + self.leave(torch.relu(self.enter(hidden)))


class ChoiceLayer(nn.Module):
    """A layer with attention of three heads, which stays whole, and experts."""

    returns_pair = False

    def __init__(self, heads=3):
        super().__init__()
        self.before, self.after = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention, self.choice = Attention(heads=heads), Choice()

    def forward(self, hidden, mask):
        hidden, _ = self.attention(self.before(hidden), hidden, mask=mask)
        return hidden + self.choice(self.after(hidden))


class SharedLayer(ChoiceLayer):
    """Such a layer with attention of four heads, which can be shared."""

    def __init__(self):
        super().__init__(heads=4)


class Stalls(nn.Module):
    """Experts that are modules, of which a token takes one; a few tokens leave some without any."""

    def __init__(self, experts=12):
        super().__init__()
        self.choice = nn.Linear(WIDTH, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH)) for _ in range(experts)
        )

    def forward(self, hidden):
        tokens = hidden.reshape(-1, WIDTH)
        weights, chosen = torch.softmax(self.choice(tokens), -1).max(-1)
        result = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            rows = torch.where(chosen == index)[0]
            if len(rows):
                result = result.index_add(0, rows, expert(tokens[rows]) * weights[rows, None])
        return result.view(hidden.shape)


class StallLayer(nn.Module):
    """A layer with such experts."""

    returns_pair = False

    def __init__(self):
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.stalls = Attention(), Stalls()

    def forward(self, hidden, mask):
        hidden, _ = self.attention(self.before(hidden), hidden, mask=mask)
        return hidden + self.stalls(self.after(hidden))


class Stack(nn.Module):
    """Layers of one kind with a mask and a head."""

    def __init__(self, layer, depth=2, between=False):
        super().__init__()
        self.words, self.layers = nn.Embedding(WORDS, WIDTH), nn.ModuleList(layer() for _ in range(depth))
        self.head, self.between = nn.Linear(WIDTH, WORDS), between

    def forward(self, words):
        hidden = self.words(words)
        length = words.shape[1]
        mask = torch.full((length, length), -torch.inf).triu(1).to(hidden)
        for layer in self.layers:
            made = layer(hidden, mask)
            hidden = made[0] if layer.returns_pair else made
            if self.between:
                hidden = hidden + hidden.mean(1, keepdim=True)
        return self.head(hidden)


class Inside(nn.Module):
    """A layer that computes attention in its own forward."""

    returns_pair = False

    def __init__(self):
        super().__init__()
        self.norm, self.three, self.back = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, hidden, mask):
        split = self.three(self.norm(hidden)).view(*hidden.shape[:2], HEADS, 3, -1)
        query, key, value = split.transpose(1, 2).unbind(3)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return hidden + self.back(mixed.transpose(1, 2).flatten(2))


class NearLayer(Layer):
    """A layer with attention by distances."""

    def __init__(self):
        super().__init__(Near)


class Loose(Layer):
    """A layer that drops values in its own forward."""

    returns_pair = False

    def forward(self, hidden, mask):
        hidden, _ = super().forward(F.dropout(hidden, 0.1, self.training), mask)
        return hidden


KINDS = {
    "Layer": Layer,
    "ChoiceLayer": ChoiceLayer,
    "SharedLayer": SharedLayer,
    "StallLayer": StallLayer,
    "Inside": Inside,
    "Loose": Loose,
    "NearLayer": NearLayer,
}


def words(length=SEQ, seed=0):
    return torch.randint(WORDS, (2, length), generator=torch.Generator().manual_seed(seed))


def seeded(kind, **options):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return Stack(KINDS[kind], **options)
