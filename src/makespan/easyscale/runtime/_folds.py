"""Sums over the gradients of all logical workers whose order depends on virtual ranks alone."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from makespan.errors import unknown_name

__all__ = ["FOLDS", "Fold", "fold_named", "rank_fold", "ring_chunks", "ring_fold"]

_SEGMENT_BYTES = 1 << 20


class Fold(Protocol):
    """Adds up one range of a bucket."""

    def __call__(self, pieces: Sequence[Tensor], start: int, length: int) -> Tensor:
        """Sum ``pieces``, one a rank: elements from ``start`` on of a bucket of ``length`` elements."""


def ring_chunks(length: int, n_ranks: int, element_bytes: int) -> list[tuple[int, int]]:
    """First and last (exclusive) element of each chunk in which gloo's ring reduces a vector.

    Gloo cuts the vector into segments of about 1 MiB, at least two a rank and equally many of them for each
    (``gloo/allreduce.cc``). Late chunks may be short or empty.
    """
    wanted = max(-(-element_bytes * length // _SEGMENT_BYTES), 2 * n_ranks)
    per_rank = -(-wanted // n_ranks)
    chunk = per_rank * -(-length // (per_rank * n_ranks))
    return [(min(length, rank * chunk), min(length, (rank + 1) * chunk)) for rank in range(n_ranks)]


def ring_fold(pieces: Sequence[Tensor], start: int, length: int) -> Tensor:
    """Sum as gloo's all-reduce does: chunk c from rank c - 1 downwards, cyclically (see `Fold`)."""
    n_ranks, total = len(pieces), torch.empty_like(pieces[0])
    for chunk, (first, last) in enumerate(ring_chunks(length, n_ranks, total.element_size())):
        low, high = max(first - start, 0), min(last - start, total.numel())
        if low < high:
            order = [(chunk - back) % n_ranks for back in range(1, n_ranks + 1)]
            _left_fold([pieces[rank][low:high] for rank in order], total[low:high])
    return total


def rank_fold(pieces: Sequence[Tensor], start: int, length: int) -> Tensor:
    """Sum from rank 0 upwards, whatever the place in the bucket (see `Fold`)."""
    total = torch.empty_like(pieces[0])
    _left_fold(pieces, total)
    return total


def _left_fold(parts: Sequence[Tensor], total: Tensor) -> None:
    total.copy_(parts[0])
    for part in parts[1:]:
        total.add_(part)


FOLDS: dict[str, Fold] = {"ring": ring_fold, "rank": rank_fold}


def fold_named(name: str) -> Fold:
    """Fold of a name; an `makespan.errors.UnknownNameError` lists those that there are."""
    if name not in FOLDS:
        raise unknown_name("fold", name, FOLDS)
    return FOLDS[name]
