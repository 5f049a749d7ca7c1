"""Tasks of the stand-ins: generated samples, how each is altered when it is read, and losses.

What a sample is follows from the seed and its index alone. Augmentation draws from the global random states
of Python, NumPy and torch, as the transformations of users do; never from a normal distribution, whose bits
depend on kernels.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from numpy.random.mtrand import get_bit_generator
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from makespan.training.zoo._data import token_walk
from makespan.training.zoo._seeding import generator_for
from makespan.training.zoo._stand_ins import StandIn

__all__ = ["LOSSES", "TASKS", "Samples"]

Targets: TypeAlias = Tensor | tuple[Tensor, ...]
_Pixels: TypeAlias = npt.NDArray[np.float32]

_SCALES = (8, 4, 2)  # pixels a cell
_KEPT = 1024  # images that are drawn once
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
        """How many samples there are."""
        return self.n_samples

    def __getitem__(self, index: int) -> tuple[Tensor, Targets]:
        """Make one sample, altered if asked for."""
        if not 0 <= index < self.n_samples:
            raise IndexError(f"sample {index} of {self.n_samples}")
        return self.sample(index)

    @abstractmethod
    def learn(self, rng: np.random.Generator) -> None:
        """Draw what all samples have in common."""

    @abstractmethod
    def sample(self, index: int) -> tuple[Tensor, Targets]:
        """Draw a sample."""

    def generator(self, index: int) -> np.random.Generator:
        """Return what a sample is drawn from, before it is altered."""
        part = "held out" if self.held_out else "training"
        return generator_for("sample", self.spec.name, self.seed, part, index)


class Images(Samples):
    """Striped images: colours and direction of the stripes tell the class."""

    def learn(self, rng: np.random.Generator) -> None:
        """Draw colours and stripes of the classes."""
        n_classes = self.spec.n_classes
        self.ground, self.colours = (
            rng.random((2, n_classes, 3, 1, 1), dtype=np.float32) - np.float32(0.5)
        ) * np.float32(2)
        self.slopes = rng.integers(0, 4, (n_classes, 2))
        self.drawn: dict[int, tuple[int, _Pixels]] = {}

    def image(self, index: int) -> tuple[int, _Pixels]:
        """Draw the class and the pixels of an image; half of what it takes to read one."""
        if index in self.drawn:
            return self.drawn[index]
        rng, side = self.generator(index), self.spec.extent
        kind = int(rng.integers(self.spec.n_classes))
        tint = self.amplitude(rng.random((3, 1, 1), dtype=np.float32))
        image = self.pattern(kind, int(rng.integers(8))) + tint
        found = kind, image + self.amplitude(rng.random((3, side, side), dtype=np.float32))
        if len(self.drawn) < _KEPT:
            self.drawn[index] = found
        return found

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
        """Return the stripes of a class, ``(3, extent, extent)``; whole numbers decide, no rounding."""
        lines = np.arange(self.spec.extent)
        rows, columns = self.slopes[kind]
        stripes = (rows * lines[:, None] + columns * lines[None, :] + phase) // 4 % 2
        pixels: _Pixels = self.ground[kind] + self.colours[kind] * stripes.astype(np.float32)
        return pixels

    def amplitude(self, uniform: _Pixels) -> _Pixels:
        """Scale draws from 0 to 1 to the noise that was asked for."""
        scaled: _Pixels = (uniform - np.float32(0.5)) * np.float32(self.noise)
        return scaled


class Boxes(Images):
    """One or two striped boxes before noise, each to be found at the scale of its size."""

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
    """Users and items with hidden tastes; a user likes what is popular or agrees with the own taste."""

    def learn(self, rng: np.random.Generator) -> None:
        """Draw the tastes."""
        self.users, self.items = rng.random((2, self.spec.n_rows, _TASTES)) - 0.5
        self.popularity = 0.5 * (rng.random(self.spec.n_rows) - 0.5)

    def sample(self, index: int) -> tuple[Tensor, Targets]:
        """Draw a user, an item and whether it is liked; altered, the item may be another one."""
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
        """Draw a passage; altered, it is asked either question, and words are replaced and masked."""
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
        """Draw a sequence; altered, it is others of its tokens that are replaced."""
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
"""What each stand-in learns."""


def _class_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets)


def _binary_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(outputs, targets)


def _span_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def _box_loss(outputs: tuple[Tensor, ...], targets: tuple[Tensor, ...]) -> Tensor:
    """Sum over scales of: objects or not in all cells, then place, size and class in cells with an object."""
    losses = [_scale_loss(found, true) for found, true in zip(outputs, targets, strict=True)]
    return torch.stack(losses).sum()


def _scale_loss(found: Tensor, true: Tensor) -> Tensor:
    cells, wanted = (values.permute(0, 2, 3, 1).flatten(0, 2) for values in (found, true))
    is_there = wanted[:, 0]
    objects = F.binary_cross_entropy_with_logits(cells[:, 0], is_there)
    places = torch.cat([cells[:, 1:3].sigmoid(), cells[:, 3:5]], 1)
    misplaced = (places - wanted[:, 1:5]).square().sum(1)
    misnamed = F.cross_entropy(cells[:, 5:], wanted[:, 5].long(), reduction="none")
    missed = ((misplaced + misnamed) * is_there).sum() / is_there.sum().clamp(min=1.0)
    return objects + missed


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
