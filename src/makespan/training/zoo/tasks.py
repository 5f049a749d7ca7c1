"""Networks of the stand-ins, the generated samples that they learn, and their losses."""

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from numpy.random.mtrand import get_bit_generator
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from makespan.training.zoo.layers import DropPath, SelfAttention, conv_norm, embedding, upsample
from makespan.training.zoo.small import token_walk
from makespan.training.zoo.specs import StandIn, generator_for

# --- Networks of embeddings and attention: NeuMF, Bert, Electra and SwinTransformer -----------------

_COLOURS, _PATCH, _WINDOW, _HEADS = 3, 2, 4, 4


class MatrixFactors(nn.Module):
    """Stand-in of NeuMF: the product of two embeddings joined with an MLP on two others."""

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
    """Stand-in of Bert: scores for the first and for the last token of an answer."""

    def __init__(self, spec: StandIn) -> None:
        super().__init__()
        self.encoder = Encoder(spec, spec.width)
        self.ends = nn.Linear(spec.width, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return ``(batch, 2, tokens)`` scores."""
        result: Tensor = self.ends(self.encoder(tokens)).transpose(1, 2)
        return result


class ReplacedTokens(nn.Module):
    """Stand-in of Electra: a score for each token, high if it was replaced."""

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
        # The row of the table of offsets for each pair of tokens of a window.
        places = torch.cartesian_prod(torch.arange(_WINDOW), torch.arange(_WINDOW))
        between = places[:, None] - places[None, :] + _WINDOW - 1
        offset = between[..., 0] * (2 * _WINDOW - 1) + between[..., 1]
        self.register_buffer("offset", offset, persistent=False)
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


def _mask(side: int, shift: int) -> Tensor:
    """Return scores that separate tokens which only the cyclic shift brought into one window."""
    lines = torch.arange(side)
    # Along each axis: untouched lines, lines of the last window, and lines that the shift wrapped around.
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


# --- Networks of convolutions: ShuffleNetv2, ResNet50, VGG19 and YOLOv3 -----------------------------

_BOX = 5  # values of a box: object, position and size


class ShuffleUnit(nn.Module):
    """Unit of ShuffleNetv2: half of the channels pass unchanged, or at stride 2 both halves see all."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        half = outputs // 2
        seen = inputs if stride == 2 else half
        self.side = (
            nn.Sequential(
                conv_norm(inputs, inputs, 3, 2, groups=inputs, active=False), conv_norm(inputs, half)
            )
            if stride == 2
            else None
        )
        self.main = nn.Sequential(
            conv_norm(seen, half),
            conv_norm(half, half, 3, stride, groups=half, active=False),
            conv_norm(half, half),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Transform, join and shuffle the channels of both halves."""
        if self.side is None:
            past, seen = images.chunk(2, 1)
        else:
            past, seen = self.side(images), images
        joined = torch.cat([past, self.main(seen)], 1)
        batch, channels, height, width = joined.shape
        pairs = joined.view(batch, 2, channels // 2, height, width).transpose(1, 2)
        return pairs.reshape(batch, channels, height, width)


class Bottleneck(nn.Module):
    """Unit of ResNet50: three convolutions with a shortcut."""

    def __init__(self, inputs: int, inner: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.main = nn.Sequential(
            conv_norm(inputs, inner),
            conv_norm(inner, inner, 3, stride),
            conv_norm(inner, outputs, active=False),
        )
        self.past = (
            nn.Identity()
            if inputs == outputs and stride == 1
            else conv_norm(inputs, outputs, 1, stride, active=False)
        )
        self.activation = nn.ReLU()

    def forward(self, images: Tensor) -> Tensor:
        """Return the sum of the convolutions and the shortcut."""
        result: Tensor = self.activation(self.main(images) + self.past(images))
        return result


class Pool(nn.Module):
    """Mean over all pixels; a plain sum, because adaptive pooling has no fixed order on GPUs."""

    def forward(self, images: Tensor) -> Tensor:
        """Return one value per channel."""
        return images.mean((2, 3))


def _shufflenet(spec: StandIn) -> nn.Module:
    layers: list[nn.Module] = [conv_norm(_COLOURS, spec.width, 3)]
    channels = spec.width
    for _ in range(2):
        layers.append(ShuffleUnit(channels, 2 * channels, stride=2))
        channels *= 2
        layers += [ShuffleUnit(channels, channels, stride=1) for _ in range(spec.depth)]
    layers += [conv_norm(channels, 2 * channels), Pool(), nn.Linear(2 * channels, spec.n_classes)]
    return nn.Sequential(*layers)


def _resnet(spec: StandIn) -> nn.Module:
    layers: list[nn.Module] = [conv_norm(_COLOURS, spec.width, 3)]
    channels = spec.width
    for part in range(3):
        inner, outputs = (spec.width // 2) * 2**part, 2 * spec.width * 2**part
        layers.append(Bottleneck(channels, inner, outputs, stride=1 if part == 0 else 2))
        layers += [Bottleneck(outputs, inner, outputs, stride=1) for _ in range(spec.depth - 1)]
        channels = outputs
    return nn.Sequential(*layers, Pool(), nn.Linear(channels, spec.n_classes))


def _vgg(spec: StandIn) -> nn.Module:
    layers: list[nn.Module] = []
    channels = _COLOURS
    for part in range(3):
        for _ in range(spec.depth):
            layers += [nn.Conv2d(channels, spec.width * 2**part, 3, padding=1), nn.ReLU()]
            channels = spec.width * 2**part
        layers.append(nn.MaxPool2d(2))
    large = 16 * spec.width
    layers += [nn.Flatten(), nn.Linear(channels * (spec.extent // 8) ** 2, large), nn.ReLU()]
    layers += [nn.Dropout(spec.dropout), nn.Linear(large, large), nn.ReLU(), nn.Dropout(spec.dropout)]
    return nn.Sequential(*layers, nn.Linear(large, spec.n_classes))


class _Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.main = nn.Sequential(conv_norm(channels, channels // 2), conv_norm(channels // 2, channels, 3))

    def forward(self, images: Tensor) -> Tensor:
        result: Tensor = images + self.main(images)
        return result


class Detector(nn.Module):
    """Stand-in of YOLOv3: three resolutions, joined from coarse to fine, with a head at each."""

    def __init__(self, spec: StandIn) -> None:
        super().__init__()
        widths = [spec.width * 2**part for part in range(4)]
        self.stem = conv_norm(_COLOURS, widths[0], 3)
        self.down = nn.ModuleList(
            nn.Sequential(conv_norm(inputs, outputs, 3, 2), *(_Residual(outputs) for _ in range(spec.depth)))
            for inputs, outputs in pairwise(widths)
        )
        self.up = nn.ModuleList(
            conv_norm(fine + coarse, fine, 3)
            for coarse, fine in ((widths[3], widths[2]), (widths[2], widths[1]))
        )
        self.heads = nn.ModuleList(nn.Conv2d(inputs, _BOX + spec.n_classes, 1) for inputs in widths[:0:-1])

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Return ``(batch, 5 + classes, cells, cells)`` for each scale, the coarsest first."""
        seen = [self.stem(images)]
        for down in self.down:
            seen.append(down(seen[-1]))
        features = [seen.pop()]
        for up in self.up:
            features.append(up(torch.cat([seen.pop(), upsample(features[-1])], 1)))
        return tuple(head(feature) for head, feature in zip(self.heads, features, strict=True))


CONVOLUTIONS: Mapping[str, Callable[[StandIn], nn.Module]] = {
    "shufflenetv2": _shufflenet,
    "resnet50": _resnet,
    "vgg19": _vgg,
    "yolov3": Detector,
}
"""Networks by the name of the model that they stand for; weights are not drawn yet."""


# --- Samples and losses -----------------------------------------------------------------------------
#
# A sample follows from the seed and its index alone. Augmentation draws from the global random states of
# Python, NumPy and torch, as the transformations of users do; never from a normal distribution, whose bits
# depend on kernels.

Targets: TypeAlias = Tensor | tuple[Tensor, ...]
_Pixels: TypeAlias = npt.NDArray[np.float32]
_SCALES = (8, 4, 2)  # pixels per cell
_KEPT = 1024  # images that are cached
_WRONG = 0.05
_TASTES = 4
_OPEN, _CLOSE, _MASK, _WORDS = 2, 4, 6, 7
_REPLACED = 0.15


def _numpy() -> np.random.Generator:
    """Return a generator that draws from the global state of NumPy."""
    return np.random.Generator(get_bit_generator())


class Samples(ABC, Dataset[tuple[Tensor, Targets]]):
    """Samples of a task; see `makespan.training.zoo.stand_in_data`."""

    def __init__(
        self, spec: StandIn, n_samples: int, seed: int, *, held_out: bool, augment: bool, noise: float
    ) -> None:
        self.spec, self.n_samples, self.seed = spec, n_samples, seed
        self.held_out, self.augment, self.noise = held_out, augment, noise
        self.learn(generator_for("task", spec.name, seed))

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.n_samples

    def __getitem__(self, index: int) -> tuple[Tensor, Targets]:
        """Return one sample, augmented if asked for."""
        if not 0 <= index < self.n_samples:
            raise IndexError(f"sample {index} of {self.n_samples}")
        return self.sample(index)

    @abstractmethod
    def learn(self, rng: np.random.Generator) -> None:
        """Draw the parts that all samples have in common."""

    @abstractmethod
    def sample(self, index: int) -> tuple[Tensor, Targets]:
        """Draw a sample."""

    def generator(self, index: int) -> np.random.Generator:
        """Return the generator from which a sample is drawn, before it is augmented."""
        part = "held out" if self.held_out else "training"
        return generator_for("sample", self.spec.name, self.seed, part, index)


class Images(Samples):
    """Striped images: colours and direction of the stripes depend on the class."""

    def learn(self, rng: np.random.Generator) -> None:
        """Draw colours and stripes of the classes."""
        n_classes = self.spec.n_classes
        self.ground, self.colours = (
            rng.random((2, n_classes, 3, 1, 1), dtype=np.float32) - np.float32(0.5)
        ) * np.float32(2)
        self.slopes = rng.integers(0, 4, (n_classes, 2))
        self.drawn: dict[int, tuple[int, _Pixels]] = {}

    def image(self, index: int) -> tuple[int, _Pixels]:
        """Draw the class and the pixels of an image; cached, because this is half the cost of a read."""
        if index in self.drawn:
            return self.drawn[index]
        rng, side = self.generator(index), self.spec.extent
        kind = int(rng.integers(self.spec.n_classes))
        tint = self.amplitude(rng.random((3, 1, 1), dtype=np.float32))
        image = self.pattern(kind, int(rng.integers(8))) + tint
        drawn = kind, image + self.amplitude(rng.random((3, side, side), dtype=np.float32))
        if len(self.drawn) < _KEPT:
            self.drawn[index] = drawn
        return drawn

    def sample(self, index: int) -> tuple[Tensor, Targets]:
        """Draw an image of some class."""
        kind, image = self.image(index)
        pixels = torch.from_numpy(image.copy())
        if self.augment:
            shifts = random.randint(-2, 2), random.randint(-2, 2)
            pixels = pixels.roll(shifts, (1, 2))
            pixels = pixels.flip(2) if _numpy().random() < 0.5 else pixels
            pixels = pixels * (0.8 + 0.4 * torch.rand(())) + 0.1 * torch.rand(pixels.shape)
        return pixels, torch.tensor(kind)

    def pattern(self, kind: int, phase: int) -> _Pixels:
        """Return the stripes of a class, ``(3, extent, extent)``; from whole numbers, without rounding."""
        lines = np.arange(self.spec.extent)
        rows, columns = self.slopes[kind]
        stripes = (rows * lines[:, None] + columns * lines[None, :] + phase) // 4 % 2
        pixels: _Pixels = self.ground[kind] + self.colours[kind] * stripes.astype(np.float32)
        return pixels

    def amplitude(self, uniform: _Pixels) -> _Pixels:
        """Scale draws from 0 to 1 to the amplitude of the noise."""
        scaled: _Pixels = (uniform - np.float32(0.5)) * np.float32(self.noise)
        return scaled


class Boxes(Images):
    """One or two striped boxes on noise, each to be detected at the scale of its size."""

    def sample(self, index: int) -> tuple[Tensor, Targets]:
        """Draw an image with boxes."""
        rng, side = self.generator(index), self.spec.extent
        image = self.amplitude(rng.random((3, side, side), dtype=np.float32))
        boxes = []
        for _ in range(int(rng.integers(1, 3))):
            kind, scale = int(rng.integers(self.spec.n_classes)), int(rng.integers(len(_SCALES)))
            size = _SCALES[scale] * (0.75 + rng.random(2))
            middle = side * rng.random(2)
            first, last = (middle - size / 2).clip(0, side - 1), (middle + size / 2).clip(1, side)
            within = (slice(None), *(slice(int(a), int(b) + 1) for a, b in zip(first, last, strict=True)))
            image[within] += self.pattern(kind, int(rng.integers(8)))[within]
            boxes.append((scale, kind, middle, size))
        pixels, flipped = torch.from_numpy(image), False
        if self.augment:
            flipped = bool(_numpy().random() < 0.5)
            pixels = pixels.flip(2) if flipped else pixels
            pixels = pixels * random.uniform(0.8, 1.2) + 0.1 * torch.rand(pixels.shape)
        targets = [np.zeros((6, side // cell, side // cell), np.float32) for cell in _SCALES]
        for scale, kind, (y, x), (height, width) in boxes:
            cell, x = _SCALES[scale], side - x if flipped else x
            column, row = (min(int(place / cell), side // cell - 1) for place in (x, y))
            place = (1, x / cell - column, y / cell - row, width / cell, height / cell, kind)
            targets[scale][:, row, column] = place
        return pixels, tuple(map(torch.from_numpy, targets))


class Likes(Samples):
    """Users and items with hidden tastes; a user likes items that are popular or match its taste."""

    def learn(self, rng: np.random.Generator) -> None:
        """Draw the tastes."""
        self.users, self.items = rng.random((2, self.spec.n_rows, _TASTES)) - 0.5
        self.popularity = 0.5 * (rng.random(self.spec.n_rows) - 0.5)

    def sample(self, index: int) -> tuple[Tensor, Targets]:
        """Draw a user, an item and whether it is liked; augmented, the item may be another one."""
        rng = self.generator(index)
        user, item = rng.integers(self.spec.n_rows, size=2)
        wrong = rng.random() < _WRONG * self.noise
        if self.augment:
            item = _numpy().integers(self.spec.n_rows) if random.random() < 0.5 else item
            wrong = bool(torch.rand(()) < _WRONG * self.noise)
        agreement = (self.users[user] * self.items[item]).sum() + self.popularity[item]
        liked = bool(agreement > 0) != wrong
        return torch.tensor([int(user), int(item)]), torch.tensor(float(liked))


class Answers(Samples):
    """A question of one token, and a passage with an answer to it and one to the other question."""

    def learn(self, rng: np.random.Generator) -> None:
        """Do nothing: the tokens that open and close an answer are the same in all tasks."""

    def sample(self, index: int) -> tuple[Tensor, Targets]:
        """Draw a passage; augmentation draws the question anew, and replaces and masks words."""
        rng = self.generator(index)
        length = self.spec.extent
        tokens = rng.integers(_WORDS, self.spec.n_rows, length)
        half = (length - 1) // 2
        spans = np.stack(
            [1 + part * half + np.sort(rng.choice(half, 2, replace=False)) for part in range(2)]
        )[rng.permutation(2)]
        question, wrong = int(rng.integers(2)), bool(rng.random() < _WRONG * self.noise)
        if self.augment:
            question = random.randrange(2)
            other = _numpy().integers(_WORDS, self.spec.n_rows, length)
            chance = torch.rand(length).numpy()
            tokens = np.where(chance < 0.1, other, np.where(chance < 0.15, _MASK, tokens))
        tokens[0] = question
        for kind, (first, last) in enumerate(spans):
            tokens[first], tokens[last] = _OPEN + kind, _CLOSE + kind
        return torch.from_numpy(tokens), torch.from_numpy(spans[int(question != wrong)])


class Replacements(Samples):
    """Token sequences that mostly follow a rule, with some of the tokens replaced by any."""

    def learn(self, rng: np.random.Generator) -> None:
        """Draw the rule: which token follows which, in one half of the vocabulary."""
        self.successor = rng.permutation(self.spec.n_rows // 2)

    def sample(self, index: int) -> tuple[Tensor, Targets]:
        """Draw a sequence; augmentation replaces other tokens."""
        rng = self.generator(index)
        length, n_rows = self.spec.extent, self.spec.n_rows
        tokens = token_walk(rng, self.successor, 1, length)[0]
        share, other, chance = _REPLACED, rng.integers(n_rows, size=length), rng.random(length)
        wrong = rng.random(length) < _WRONG * self.noise
        if self.augment:
            share = random.uniform(0.5 * _REPLACED, 1.5 * _REPLACED)
            other = _numpy().integers(n_rows, size=length)
            chance = torch.rand(length, dtype=torch.float64).numpy()
        changed = np.where(chance < share, other, tokens)
        targets = ((changed != tokens) != wrong).astype(np.float32)
        return torch.from_numpy(changed), torch.from_numpy(targets)


TASKS: Mapping[str, type[Samples]] = {
    "shufflenetv2": Images,
    "resnet50": Images,
    "vgg19": Images,
    "yolov3": Boxes,
    "neumf": Likes,
    "bert": Answers,
    "electra": Replacements,
    "swintransformer": Images,
}
"""Data set that each stand-in learns."""


def _class_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets)


def _binary_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(outputs, targets)


def _span_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def _box_loss(outputs: tuple[Tensor, ...], targets: tuple[Tensor, ...]) -> Tensor:
    """Sum over scales: presence of objects in all cells, then place, size and class in cells with one."""
    losses = []
    for scores, true in zip(outputs, targets, strict=True):
        cells, wanted = (values.permute(0, 2, 3, 1).flatten(0, 2) for values in (scores, true))
        is_there = wanted[:, 0]
        objects = F.binary_cross_entropy_with_logits(cells[:, 0], is_there)
        places = torch.cat([cells[:, 1:3].sigmoid(), cells[:, 3:5]], 1)
        misplaced = (places - wanted[:, 1:5]).square().sum(1)
        misnamed = F.cross_entropy(cells[:, 5:], wanted[:, 5].long(), reduction="none")
        missed = ((misplaced + misnamed) * is_there).sum() / is_there.sum().clamp(min=1.0)
        losses.append(objects + missed)
    return torch.stack(losses).sum()


LOSSES: Mapping[str, Callable[..., Tensor]] = {
    "shufflenetv2": _class_loss,
    "resnet50": _class_loss,
    "vgg19": _class_loss,
    "yolov3": _box_loss,
    "neumf": _binary_loss,
    "bert": _span_loss,
    "electra": _binary_loss,
    "swintransformer": _class_loss,
}
"""Mean loss of a batch, from the outputs of the model and the targets."""
