"""Synthetic samples that a small model can learn; they depend on the data seed and the step only."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from makespan.training.zoo._seeding import generator_for
from makespan.training.zoo._spec import SmallModel

__all__ = ["IGNORED", "Batch", "Tokens", "global_batch", "targets_per_sample", "token_walk"]

IGNORED = -100
"""Target of a position that does not count."""

_MASK, _START = 0, 0
_PREDICTABLE = 0.8
_MASKED_SHARE = 0.15
_NOISE = 1.0

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples of one optimiser step."""

    inputs: npt.NDArray[np.int64] | npt.NDArray[np.float32]
    targets: Tokens


def targets_per_sample(spec: SmallModel) -> int:
    """Return how many targets of a sample count; the same for every sample of a model."""
    if spec.family == "vit":
        return 1
    return max(1, round(_MASKED_SHARE * spec.seq)) if spec.family == "bert" else spec.seq


def global_batch(spec: SmallModel, batch_size: int, data_seed: int, step: int) -> Batch:
    """Draw the global batch of a step.

    Tokens follow a random successor table and, now and then, a random jump; images are a class
    pattern under noise. Model, batch size, seed and step decide, no plan does.
    """
    rng, fixed = generator_for("data", data_seed, step), generator_for("data", data_seed, -1)
    if spec.family == "vit":
        classes = rng.integers(0, spec.vocab, batch_size)
        patterns = fixed.standard_normal((spec.vocab, spec.seq, spec.patch_features), dtype=np.float32)
        noise = rng.standard_normal((batch_size, spec.seq, spec.patch_features), dtype=np.float32)
        return Batch(patterns[classes] + np.float32(_NOISE) * noise, classes)
    tokens = token_walk(rng, fixed.permutation(spec.vocab), batch_size, spec.seq + 1)
    if spec.family in ("llama", "gpt"):
        return Batch(tokens[:, :-1].copy(), tokens[:, 1:].copy())
    tokens = tokens[:, 1:]
    if spec.family == "bert":
        return _masked(rng, tokens, targets_per_sample(spec))
    corrupted = np.where(rng.random(tokens.shape) < _MASKED_SHARE, _MASK, tokens)
    shifted = np.concatenate([np.full((batch_size, 1), _START), tokens[:, :-1]], axis=1)
    return Batch(np.stack([corrupted, shifted], axis=1), tokens.copy())


def token_walk(rng: np.random.Generator, successor: Tokens, batch_size: int, length: int) -> Tokens:
    """Draw sequences in which most tokens are followed by their successor, the others by any token."""
    jumps = rng.integers(0, len(successor), (batch_size, length))
    follows = rng.random((batch_size, length)) < _PREDICTABLE
    tokens = jumps.copy()
    for position in range(1, length):
        expected = successor[tokens[:, position - 1]]
        tokens[:, position] = np.where(follows[:, position], expected, jumps[:, position])
    return tokens


def _masked(rng: np.random.Generator, tokens: Tokens, count: int) -> Batch:
    order = np.argsort(rng.random(tokens.shape), axis=1)
    chosen = order < count
    return Batch(np.where(chosen, _MASK, tokens), np.where(chosen, tokens, IGNORED))
