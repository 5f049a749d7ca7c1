"""Two models of a user, written without a thought of schedules: a small Mixer and a small ViT."""

import torch
from torch import nn

__all__ = ["CLASSES", "SIDE", "Mixer", "Vit", "images"]

COLOURS, SIDE, PATCH, CLASSES = 3, 8, 2, 8
TOKENS = (SIDE // PATCH) ** 2


def images(n=3):
    """Return images that are to be classified."""
    return torch.randn(n, COLOURS, SIDE, SIDE)


class Patches(nn.Module):
    """Squares of an image as tokens."""

    def __init__(self, width):
        super().__init__()
        self.project = nn.Conv2d(COLOURS, width, PATCH, stride=PATCH)

    def forward(self, pictures):
        return self.project(pictures).flatten(2).transpose(1, 2)


class Mlp(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.wide, self.act, self.narrow = nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, hidden):
        return self.drop(self.narrow(self.act(self.wide(hidden))))


class MixerLayer(nn.Module):
    """Mixes over tokens, then over channels."""

    def __init__(self, width, tokens):
        super().__init__()
        self.token_norm, self.channel_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.over_tokens, self.over_channels = Mlp(tokens, 2 * tokens), Mlp(width, 2 * width)

    def forward(self, hidden):
        mixed = self.over_tokens(self.token_norm(hidden).transpose(1, 2)).transpose(1, 2)
        hidden = hidden + mixed
        return hidden + self.over_channels(self.channel_norm(hidden))


class Mixer(nn.Module):
    def __init__(self, width=16, depth=2):
        super().__init__()
        self.patches = Patches(width)
        self.layers = nn.ModuleList([MixerLayer(width, TOKENS) for _ in range(depth)])
        self.norm, self.classify = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, pictures):
        hidden = self.patches(pictures)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.classify(self.norm(hidden).mean(1))


class Attention(nn.Module):
    """Attention whose three projections are one layer."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, hidden):
        batch, tokens = hidden.shape[0], hidden.shape[1]
        split = self.qkv(hidden).view(batch, tokens, 3, self.heads, self.size).permute(2, 0, 3, 1, 4)
        query, key, value = split[0], split[1], split[2]
        scores = torch.matmul(query, key.transpose(-2, -1)) * self.size**-0.5
        mixed = torch.matmul(self.drop(torch.softmax(scores, dim=-1)), value)
        return self.project(mixed.transpose(1, 2).reshape(batch, tokens, self.heads * self.size))


class VitLayer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mlp = Attention(width, heads), Mlp(width, 4 * width)

    def forward(self, hidden):
        hidden = hidden + self.attention(self.attention_norm(hidden))
        return hidden + self.mlp(self.mlp_norm(hidden))


class Vit(nn.Module):
    """Patches, a token that stands for the class, positions: parameters that belong to no layer."""

    def __init__(self, width=16, depth=2, heads=4):
        super().__init__()
        self.patches = Patches(width)
        self.class_token = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, TOKENS + 1, width))
        self.layers = nn.Sequential(*(VitLayer(width, heads) for _ in range(depth)))
        self.norm, self.classify = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, pictures):
        tokens = self.patches(pictures)
        first = self.class_token.expand(tokens.shape[0], -1, -1)
        hidden = self.layers(torch.cat([first, tokens], 1) + self.positions)
        return self.classify(self.norm(hidden)[:, 0])
