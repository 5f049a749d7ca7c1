"""Layers that several models share, and the drawing of the weights of stand-ins."""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from makespan.training.zoo.specs import StandIn, generator_for

# --- Stand-ins --------------------------------------------------------------------------------------


def draw_weights(network: Callable[[StandIn], nn.Module], spec: StandIn, seed: int) -> nn.Module:
    """Build a network and draw all its weights, each from the seed and its own name."""
    with torch.random.fork_rng(devices=[]):
        model = network(spec)
    with torch.no_grad():
        for owner, module in model.named_modules():
            for name, weight in module.named_parameters(recurse=False):
                if weight.dim() < 2:
                    weight.fill_(0.0 if name == "bias" else 1.0)
                else:
                    # Uniform, because bits of normal draws depend on the kernels of a library.
                    rng = generator_for(seed, spec.name, owner, name)
                    numerator = 6.0 if isinstance(module, nn.Conv2d) else 3.0
                    bound = np.float32(math.sqrt(numerator / weight[0].numel()))
                    values = rng.random(tuple(weight.shape), dtype=np.float32)
                    weight.copy_(torch.from_numpy((values - np.float32(0.5)) * (2 * bound)))
    return model


def embedding(n_rows: int, width: int) -> nn.Embedding:
    """Return an empty table for `draw_weights`; the constructor would draw from a normal distribution."""
    return nn.Embedding(n_rows, width, _weight=torch.zeros(n_rows, width))


def conv_norm(
    inputs: int, outputs: int, size: int = 1, stride: int = 1, groups: int = 1, active: bool = True
) -> nn.Sequential:
    """Return convolution and BatchNorm, with ReLU if active; the resolution is kept at stride 1."""
    convolution = nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False)
    layers = [convolution, nn.BatchNorm2d(outputs), *([nn.ReLU()] if active else [])]
    return nn.Sequential(*layers)


def upsample(images: Tensor) -> Tensor:
    """Double the resolution; written so that its gradient is a sum in fixed order on every device."""
    batch, channels, height, width = images.shape
    doubled = images[:, :, :, None, :, None].expand(batch, channels, height, 2, width, 2)
    return doubled.reshape(batch, channels, 2 * height, 2 * width)


class DropPath(nn.Module):
    """Stochastic depth: a residual branch is dropped for some of the samples."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability

    def forward(self, branch: Tensor) -> Tensor:
        """Zero the branch of each sample with the probability, and scale those that stay."""
        if not self.training or self.probability == 0.0:
            return branch
        keep = 1.0 - self.probability
        shape = (branch.shape[0],) + (1,) * (branch.dim() - 1)
        kept = torch.rand(shape, device=branch.device) < keep
        return branch * (kept.to(branch.dtype) / keep)


class SelfAttention(nn.Module):
    """Attention among the tokens of a group, written out so that dropout acts on the attention weights."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.inward = nn.Linear(width, 3 * width)
        self.outward = nn.Linear(width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, tokens: Tensor, bias: Tensor | None = None) -> Tensor:
        """Attend within ``(groups, tokens, width)``; ``bias`` is added to all scores."""
        groups, length, width = tokens.shape
        split = self.inward(tokens).view(groups, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-2, -1) * (width // self.heads) ** -0.5
        if bias is not None:
            scores = scores + bias
        mixed = self.drop(scores.softmax(-1)) @ value
        result: Tensor = self.outward(mixed.transpose(1, 2).reshape(groups, length, width))
        return result


# --- Families ---------------------------------------------------------------------------------------
#
# Everything is computed from the input tensors, so that the modules can be traced symbolically and no buffer
# depends on the length of the samples.

_UNSEEN = -10000.0


def split_heads(projected: Tensor, n_heads: int, head_size: int) -> Tensor:
    """Turn ``(n, seq, heads * size)`` into ``(n, heads, seq, size)``."""
    return torch.unflatten(projected, -1, (n_heads, head_size)).transpose(1, 2)


def join_heads(mixed: Tensor) -> Tensor:
    """Turn ``(n, heads, seq, size)`` into ``(n, seq, heads * size)``."""
    return mixed.transpose(1, 2).flatten(2)


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, dropout: nn.Module, scale: float = 1.0
) -> Tensor:
    """Attend with ``(n, heads, seq, size)`` queries; ``mask`` is added to the scaled scores."""
    scores = torch.matmul(query, key.transpose(-1, -2))
    if scale != 1.0:
        scores = scores * scale
    shares = dropout(F.softmax(scores + mask, dim=-1))
    return torch.matmul(shares, value)


def padding_mask(visible: Tensor, hidden: Tensor) -> Tensor:
    """Turn ``(n, seq)``, 0 for padding, into scores to add, of the type of ``hidden``."""
    return (1.0 - visible[:, None, None, :].type_as(hidden)) * _UNSEEN


def causal_mask(hidden: Tensor, window: int = 0) -> Tensor:
    """Return ``(seq, seq)`` scores that hide later tokens, and tokens at least ``window`` back."""
    line = hidden[0, :, 0]
    hidden_scores = torch.full_like(torch.outer(line, line), -torch.inf)
    mask = hidden_scores.triu(1)
    return mask + hidden_scores.tril(-window) if window else mask


def positions_in(tokens: Tensor) -> Tensor:
    """Return the position of each token, from 0, in the shape of the tokens ``(n, seq)``."""
    return torch.ones_like(tokens).cumsum(1) - 1
