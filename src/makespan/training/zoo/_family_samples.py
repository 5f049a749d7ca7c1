"""Synthetic samples of the families: token sequences with a rule in them, and striped noise for images."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from makespan.training.zoo._data import IGNORED, Tokens, token_walk
from makespan.training.zoo._families import ConvolutionSpec, TransformerSpec
from makespan.training.zoo._seeding import generator_for

__all__ = ["SAMPLES", "FamilyBatch"]

_FIRST_WORD, _MASK, _START = 3, 2, 0
_MASKED_SHARE = 0.15
_SHORTEST = 0.75
_NOISE = 0.5


@dataclass(frozen=True, slots=True)
class FamilyBatch:
    """Samples: what a model takes, in its order, and what it shall find."""

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
    """Fill samples up to a drawn length and mask some of what is left: tokens, visible, masked ones."""
    rng = generator_for("corruption", spec.family, spec.size, n, seed)
    lengths = rng.integers(int(_SHORTEST * spec.seq), spec.seq, n, endpoint=True)
    visible = np.arange(spec.seq) < lengths[:, None]
    masked = (rng.random(words.shape) < _MASKED_SHARE) & visible
    masked[:, 0] = True
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
"""What each family learns from."""
