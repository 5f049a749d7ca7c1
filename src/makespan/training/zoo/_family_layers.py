"""What the families have in common: attention written out, masks, positions.

Everything is computed from the tensors that pass by, so that the modules can be traced symbolically, and no
buffer depends on the length of the samples.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["attend", "causal_mask", "join_heads", "padding_mask", "positions_in", "split_heads"]

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
    """Return what ``(n, heads, seq, size)`` queries see; ``mask`` is added to the scaled scores."""
    scores = torch.matmul(query, key.transpose(-1, -2))
    if scale != 1.0:
        scores = scores * scale
    shares = dropout(F.softmax(scores + mask, dim=-1))
    return torch.matmul(shares, value)


def padding_mask(visible: Tensor, hidden: Tensor) -> Tensor:
    """Turn ``(n, seq)``, 0 for what fills samples up, into scores to add, of the type of ``hidden``."""
    return (1.0 - visible[:, None, None, :].type_as(hidden)) * _UNSEEN


def causal_mask(hidden: Tensor, window: int = 0) -> Tensor:
    """Return the ``(seq, seq)`` scores that hide what follows, and what is ``window`` tokens back or more."""
    line = hidden[0, :, 0]
    hidden_scores = torch.full_like(torch.outer(line, line), -torch.inf)
    mask = hidden_scores.triu(1)
    return mask + hidden_scores.tril(-window) if window else mask


def positions_in(tokens: Tensor) -> Tensor:
    """Return the position of each token, from 0, in the shape of the tokens ``(n, seq)``."""
    return torch.ones_like(tokens).cumsum(1) - 1
