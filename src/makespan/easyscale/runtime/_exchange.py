"""The sum of the gradients of all logical workers, wherever they are hosted.

What a process does is a generator of `Exchange` steps; `over_group` carries them out with
``torch.distributed``, `in_memory` between generators of one thread. Each process receives its range of
every bucket from all logical workers, folds it in their order, and sends the result to all.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from makespan.easyscale.runtime._buckets import GradientSet
from makespan.easyscale.runtime._folds import Fold, fold_named
from makespan.easyscale.runtime._mapping import RankMapping
from makespan.errors import InputError

__all__ = ["Exchange", "Reduction", "Scaling", "Steps", "in_memory", "over_group", "reduce_sets", "share"]

T = TypeVar("T")
Scaling = Literal["pre", "post"]


@dataclass(frozen=True, slots=True)
class Exchange:
    """One vector for each process, and how many elements come back from each."""

    parts: list[Tensor]
    lengths: list[int]


Steps = Generator[Exchange, list[Tensor], T]


@dataclass(frozen=True, slots=True)
class Reduction:
    """How gradients are added up; part of what a job is, because it decides the bits.

    Parameters
    ----------
    n_logical_workers
        Gradient sets that make one sum.
    fold
        ``ring``, the order of gloo's all-reduce, or ``rank``, ascending.
    scaling
        Whether each set is multiplied by 1/N (``pre``, as DistributedDataParallel does) or the sum
        (``post``).
    bucket_cap_bytes
        Size at which a bucket is full; None for DistributedDataParallel's default.
    """

    n_logical_workers: int
    fold: str = "ring"
    scaling: Scaling = "pre"
    bucket_cap_bytes: int | None = None

    def __post_init__(self) -> None:
        """Check the choices."""
        fold_named(self.fold)
        if self.scaling not in ("pre", "post"):
            raise InputError(f"scaling {self.scaling!r}; accepted: pre, post")
        for name in ("n_logical_workers", "bucket_cap_bytes"):
            if (number := getattr(self, name)) is not None and number < 1:
                raise InputError(f"{name} {number}; accepted: a whole number >= 1")

    @property
    def set_scale(self) -> float:
        """What each gradient set is multiplied by before the sum."""
        return 1.0 / self.n_logical_workers if self.scaling == "pre" else 1.0


def reduce_sets(
    own: Sequence[GradientSet], mapping: RankMapping, process: int, reduction: Reduction
) -> Steps[GradientSet]:
    """Sum the sets of all logical workers; ``own`` are those of a process, in the order of the mapping."""
    fold = fold_named(reduction.fold)
    sums = []
    for bucket in zip(*(one.buckets for one in own), strict=True):
        sums.append((yield from _reduce_bucket(bucket, mapping, process, fold)))
    if reduction.scaling == "post":
        sums = [one * (1.0 / reduction.n_logical_workers) for one in sums]
    used = torch.stack([one.used for one in own]).any(dim=0)
    everywhere = yield from share(used.to(torch.uint8), [used.numel()] * mapping.n_processes)
    return GradientSet(sums, torch.stack(everywhere).any(dim=0))


def _reduce_bucket(own: Sequence[Tensor], mapping: RankMapping, process: int, fold: Fold) -> Steps[Tensor]:
    length, n_processes = own[0].numel(), mapping.n_processes
    ranges = list(pairwise(length * number // n_processes for number in range(n_processes + 1)))
    start, end = ranges[process]
    # One process has all that it needs; a copy of every set would double its memory.
    pieces = dict(zip(mapping.hosted[process], own, strict=True))
    if n_processes > 1:
        parts = [torch.cat([one[first:last] for one in own]) for first, last in ranges]
        received = yield Exchange(parts, [len(ranks) * (end - start) for ranks in mapping.hosted])
        for ranks, part in zip(mapping.hosted, received, strict=True):
            pieces |= zip(ranks, part.view(len(ranks), end - start), strict=True)
    folded = fold([pieces[rank] for rank in range(mapping.n_logical_workers)], start, length)
    return torch.cat((yield from share(folded, [last - first for first, last in ranges])))


def share(part: Tensor, lengths: list[int]) -> Steps[list[Tensor]]:
    """Send one vector to all processes and return those of all."""
    return [part] if len(lengths) == 1 else (yield Exchange([part] * len(lengths), lengths))


def over_group(steps: Steps[T], device: torch.device | None = None) -> T:
    """Carry out the steps of this process with those of the others of the default process group.

    Parameters
    ----------
    device
        Where the group wants its vectors, None for where they are.
    """
    reply: list[Tensor] | None = None
    try:
        while True:
            request = next(steps) if reply is None else steps.send(reply)
            home = request.parts[0].device
            sent = torch.cat(request.parts).to(home if device is None else device)
            received = sent.new_empty(sum(request.lengths))
            dist.all_to_all_single(received, sent, request.lengths, [part.numel() for part in request.parts])
            reply = list(torch.split(received.to(home), request.lengths))
    except StopIteration as end:
        found: T = end.value
        return found


def in_memory(processes: Sequence[Steps[T]]) -> list[T]:
    """Carry out the steps of all processes in turn, in this thread; what each returned."""
    replies: list[list[Tensor]] | None = None
    results: list[T] = []
    while len(results) < len(processes):
        requests = []
        for number, steps in enumerate(processes):
            try:
                requests.append(next(steps) if replies is None else steps.send(replies[number]))
            except StopIteration as end:
                results.append(end.value)
        if requests and results:
            raise RuntimeError(f"processes disagree: {len(results)} of {len(processes)} have ended")
        replies = [[request.parts[number] for request in requests] for number in range(len(requests))]
        for reply, request in zip(replies, requests, strict=True):
            if (found := [part.numel() for part in reply]) != request.lengths:
                raise RuntimeError(f"processes disagree: sent {found}, expected {request.lengths} elements")
    return results
