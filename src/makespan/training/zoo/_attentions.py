"""Stand-ins of embeddings and attention: NeuMF, Bert, Electra and SwinTransformer."""

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise

import torch
from torch import Tensor, nn

from makespan.training.zoo._layers import DropPath, SelfAttention, embedding
from makespan.training.zoo._stand_ins import StandIn

__all__ = ["ATTENTIONS"]

_COLOURS, _PATCH, _WINDOW, _HEADS = 3, 2, 4, 4


class MatrixFactors(nn.Module):
    """Stand-in of NeuMF: the product of two embeddings beside an MLP on two others."""

    def __init__(self, spec: StandIn) -> None:
        super().__init__()
        self.user_factors, self.item_factors = (embedding(spec.n_rows, spec.width) for _ in range(2))
        self.user, self.item = (embedding(spec.n_rows, spec.width) for _ in range(2))
        sizes = [2 * spec.width, *(spec.width for _ in range(spec.depth)), spec.width // 2]
        self.mlp = nn.Sequential(
            *(
                layer
                for inputs, outputs in pairwise(sizes)
                for layer in (nn.Linear(inputs, outputs), nn.ReLU())
            )
        )
        self.score = nn.Linear(spec.width + sizes[-1], 1)

    def forward(self, pairs: Tensor) -> Tensor:
        """Score ``(batch, 2)`` users and items: ``(batch,)``."""
        user, item = pairs.unbind(1)
        product = self.user_factors(user) * self.item_factors(item)
        mixed = self.mlp(torch.cat([self.user(user), self.item(item)], 1))
        result: Tensor = self.score(torch.cat([product, mixed], 1)).squeeze(1)
        return result


def _mlp(width: int, dropout: float = 0.0) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
    )


class EncoderLayer(nn.Module):
    """Attention and MLP, each with dropout and with LayerNorm after the sum."""

    def __init__(self, spec: StandIn) -> None:
        super().__init__()
        self.attention = SelfAttention(spec.width, _HEADS, spec.dropout)
        self.attention_drop = nn.Dropout(spec.dropout)
        self.attention_norm, self.mlp_norm = nn.LayerNorm(spec.width), nn.LayerNorm(spec.width)
        self.mlp = _mlp(spec.width, spec.dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """Transform ``(batch, tokens, width)``."""
        tokens = self.attention_norm(tokens + self.attention_drop(self.attention(tokens)))
        result: Tensor = self.mlp_norm(tokens + self.mlp(tokens))
        return result


class Encoder(nn.Module):
    """Tokens and their positions to features; the table may be narrower than the layers."""

    def __init__(self, spec: StandIn, table_width: int) -> None:
        super().__init__()
        self.tokens, self.positions = (
            embedding(spec.n_rows, table_width),
            embedding(spec.extent, table_width),
        )
        self.norm, self.drop = nn.LayerNorm(table_width), nn.Dropout(spec.dropout)
        self.widen = nn.Linear(table_width, spec.width) if table_width != spec.width else nn.Identity()
        self.layers = nn.Sequential(*(EncoderLayer(spec) for _ in range(spec.depth)))

    def forward(self, tokens: Tensor) -> Tensor:
        """Encode ``(batch, tokens)``."""
        hidden = self.tokens(tokens) + self.positions.weight
        result: Tensor = self.layers(self.widen(self.drop(self.norm(hidden))))
        return result


class SpanMarker(nn.Module):
    """Stand-in of Bert: which token opens the answer, and which one closes it."""

    def __init__(self, spec: StandIn) -> None:
        super().__init__()
        self.encoder = Encoder(spec, spec.width)
        self.ends = nn.Linear(spec.width, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return ``(batch, 2, tokens)`` scores."""
        result: Tensor = self.ends(self.encoder(tokens)).transpose(1, 2)
        return result


class ReplacedTokens(nn.Module):
    """Stand-in of Electra: for each token, whether it was replaced."""

    def __init__(self, spec: StandIn) -> None:
        super().__init__()
        self.encoder = Encoder(spec, spec.width // 2)
        self.head = nn.Sequential(nn.Linear(spec.width, spec.width), nn.GELU(), nn.Linear(spec.width, 1))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return ``(batch, tokens)`` scores."""
        result: Tensor = self.head(self.encoder(tokens)).squeeze(2)
        return result


class WindowBlock(nn.Module):
    """Block of SwinTransformer: attention within windows of a grid, which may be shifted by half of one."""

    def __init__(self, width: int, side: int, shifted: bool, drop_path: float) -> None:
        super().__init__()
        self.side, self.shift = side, _WINDOW // 2 if shifted and side > _WINDOW else 0
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mlp = SelfAttention(width, _HEADS), _mlp(width)
        self.drop_path = DropPath(drop_path)
        self.offsets = nn.Parameter(torch.empty((2 * _WINDOW - 1) ** 2, _HEADS))
        self.register_buffer("offset", _offsets(), persistent=False)
        self.register_buffer("mask", _mask(side, self.shift), persistent=False)

    def forward(self, grid: Tensor) -> Tensor:
        """Transform ``(batch, side, side, width)``."""
        grid = grid + self.drop_path(self._attend(self.attention_norm(grid)))
        result: Tensor = grid + self.drop_path(self.mlp(self.mlp_norm(grid)))
        return result

    def _attend(self, grid: Tensor) -> Tensor:
        batch, side, _, width = grid.shape
        if self.shift:
            grid = grid.roll((-self.shift, -self.shift), (1, 2))
        count = side // _WINDOW
        split = grid.view(batch, count, _WINDOW, count, _WINDOW, width).transpose(2, 3)
        bias = self.offsets[self.get_buffer("offset")].permute(2, 0, 1)
        bias = (bias + self.get_buffer("mask")[:, None]).repeat(batch, 1, 1, 1)
        mixed = self.attention(split.reshape(-1, _WINDOW * _WINDOW, width), bias)
        joined = mixed.view(batch, count, count, _WINDOW, _WINDOW, width).transpose(2, 3)
        grid = joined.reshape(batch, side, side, width)
        return grid.roll((self.shift, self.shift), (1, 2)) if self.shift else grid


def _offsets() -> Tensor:
    """Row of the table of offsets for each pair of tokens of a window."""
    places = torch.cartesian_prod(torch.arange(_WINDOW), torch.arange(_WINDOW))
    between = places[:, None] - places[None, :] + _WINDOW - 1
    return between[..., 0] * (2 * _WINDOW - 1) + between[..., 1]


def _mask(side: int, shift: int) -> Tensor:
    """Score that keeps tokens apart which only the shift brought into one window."""
    lines = torch.arange(side)
    part = (lines >= side - _WINDOW).long() + (lines >= side - shift).long()
    region = 3 * part[:, None] + part[None, :] if shift else torch.zeros(side, side)
    count = side // _WINDOW
    windows = region.view(count, _WINDOW, count, _WINDOW).transpose(1, 2).reshape(count * count, -1)
    apart = windows[:, :, None] != windows[:, None, :]
    return torch.zeros(apart.shape).masked_fill(apart, -torch.inf)


class WindowTransformer(nn.Module):
    """Stand-in of SwinTransformer.

    Patches are cut out and mapped by a linear layer: the same function as the strided convolution of the
    original, without an operator that has many kernels.
    """

    def __init__(self, spec: StandIn) -> None:
        super().__init__()
        side, rates = spec.extent // _PATCH, iter(torch.linspace(0, spec.dropout, 4 * spec.depth).tolist())
        self.patches = nn.Linear(_COLOURS * _PATCH * _PATCH, spec.width)
        self.patch_norm = nn.LayerNorm(spec.width)
        self.fine = nn.Sequential(*_pairs(spec.width, side, spec.depth, rates))
        self.merge_norm = nn.LayerNorm(4 * spec.width)
        self.merge = nn.Linear(4 * spec.width, 2 * spec.width, bias=False)
        self.coarse = nn.Sequential(*_pairs(2 * spec.width, side // 2, spec.depth, rates))
        self.norm = nn.LayerNorm(2 * spec.width)
        self.classifier = nn.Linear(2 * spec.width, spec.n_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return ``(batch, classes)`` scores."""
        grid = self.fine(self.patch_norm(self.patches(_blocks(images.permute(0, 2, 3, 1), _PATCH))))
        grid = self.coarse(self.merge(self.merge_norm(_blocks(grid, 2))))
        result: Tensor = self.classifier(self.norm(grid).mean((1, 2)))
        return result


def _pairs(width: int, side: int, depth: int, rates: Iterator[float]) -> list[nn.Module]:
    return [WindowBlock(width, side, index % 2 == 1, next(rates)) for index in range(2 * depth)]


def _blocks(grid: Tensor, size: int) -> Tensor:
    """Join the features of each square of ``size`` times ``size`` places."""
    batch, height, width, features = grid.shape
    split = grid.reshape(batch, height // size, size, width // size, size, features).transpose(2, 3)
    return split.reshape(batch, height // size, width // size, size * size * features)


ATTENTIONS: Mapping[str, Callable[[StandIn], nn.Module]] = {
    "neumf": MatrixFactors,
    "bert": SpanMarker,
    "electra": ReplacedTokens,
    "swintransformer": WindowTransformer,
}
"""Networks by the name of the model that they stand for; weights are not drawn yet."""
