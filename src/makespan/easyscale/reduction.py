"""Gradient reduction whose bits depend on virtual ranks alone: buckets, reduction orders, and exchanges."""

import hashlib
import importlib
import logging
import platform
from collections.abc import Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from math import inf
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from makespan.easyscale.job import RankMapping
from makespan.errors import InputError, unknown_name
from makespan.files import read_json, write_json
from makespan.runtime import describe_machine

_log = logging.getLogger(__name__)


# ------------------------------------------------------------------------------------------------
# Gradients on their way from a device to the host, while the device goes on.


class HostCopies:
    """Copies vectors of a device to pinned memory on a stream of its own; on a CPU they stay where they are.

    The next logical worker computes meanwhile. What is copied keeps its memory until then: the allocator is
    told of the other stream, so that whoever gets the memory next waits for the copy.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copied: list[torch.cuda.Event] = []

    def start(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """Return copies on the host, which may be read after `finish`."""
        if self._stream is None:
            return list(vectors)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        copies = [torch.empty(one.shape, dtype=one.dtype, pin_memory=True) for one in vectors]
        with torch.cuda.stream(self._stream):
            for vector, copy in zip(vectors, copies, strict=True):
                copy.copy_(vector, non_blocking=True)
                vector.record_stream(self._stream)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        self._copied.append(event)
        return copies

    def finish(self) -> None:
        """Wait until all copies are made."""
        for event in self._copied:
            event.synchronize()
        self._copied.clear()


def settle(device: torch.device) -> None:
    """Wait for what a device was given to compute, so that a clock says how long it took; not for copies."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


# ------------------------------------------------------------------------------------------------
# How gradients are laid out in flat vectors: DistributedDataParallel's layouts, and packing by them.

BucketMap = tuple[tuple[str, ...], ...]
"""Names of the parameters of each bucket, in the order in which they lie there."""
_FIRST_BYTES = 1 << 20
_LATER_BYTES = 25 << 20
_ACCEPTED = (torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class GradientSet:
    """Gradients of one logical worker.

    Parameters
    ----------
    buckets
        One flat vector a bucket, already multiplied by what the reduction asks for.
    used
        bool, (n_parameters,): which parameters, in registration order, had a gradient; others count as
        zero.
    """

    buckets: list[Tensor]
    used: Tensor


def trained_parameters(model: torch.nn.Module) -> dict[str, Parameter]:
    """Parameters that want a gradient, by name in registration order; an `InputError` names an odd one."""
    found = {name: one for name, one in model.named_parameters() if one.requires_grad}
    for name, one in found.items():
        if one.dtype not in _ACCEPTED:
            raise InputError(f"parameter {name} is {one.dtype}; accepted: {', '.join(map(str, _ACCEPTED))}")
    return found


def provisional_map(parameters: Mapping[str, Parameter]) -> BucketMap:
    """Layout before the first backward pass: one bucket in registration order."""
    return _packed(parameters, parameters, (inf,))


def rebuilt_map(
    parameters: Mapping[str, Parameter], ready: Sequence[str], cap_bytes: int | None = None
) -> BucketMap:
    """Layout from the second mini-batch on.

    Parameters
    ----------
    ready
        Names in the order in which gradients became ready; those that had none come last.
    cap_bytes
        Size at which a bucket is full; None for the default, 1 MiB for the first one and 25 MiB for others.
    """
    known = set(ready)
    order = [*ready, *(name for name in parameters if name not in known)]
    limits = (_FIRST_BYTES, _LATER_BYTES) if cap_bytes is None else (cap_bytes,)
    return _packed(parameters, order, limits)


def _packed(parameters: Mapping[str, Parameter], order: Iterable[str], limits: Sequence[float]) -> BucketMap:
    """Fill buckets, those of one type each, until each reaches its limit; the last limit holds on."""
    closed: list[list[str]] = []
    opened: dict[torch.dtype, tuple[list[str], int]] = {}
    n_closed: dict[torch.dtype, int] = {}
    for name in order:
        one = parameters[name]
        names, size = opened.get(one.dtype, ([], 0))
        names, size = [*names, name], size + one.numel() * one.element_size()
        opened[one.dtype] = names, size
        number = n_closed.get(one.dtype, 0)
        if size >= limits[min(number, len(limits) - 1)]:
            closed.append(names)
            del opened[one.dtype]
            n_closed[one.dtype] = number + 1
    return tuple(map(tuple, [*closed, *(names for names, _ in opened.values())]))


class ReadyOrder:
    """Records in which order gradients become ready, until `finish` is called."""

    def __init__(self, parameters: Mapping[str, Parameter]) -> None:
        self._names: list[str] = []
        self._handles = [self._listen(name, one) for name, one in parameters.items()]

    def _listen(self, name: str, parameter: Parameter) -> RemovableHandle:
        handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            lambda _: self._names.append(name)
        )
        return handle

    def finish(self) -> list[str]:
        """Stop recording and return the names."""
        for handle in self._handles:
            handle.remove()
        return list(dict.fromkeys(self._names))


class Buckets:
    """Packs gradients of parameters into flat vectors and hands sums back, by a bucket map."""

    def __init__(self, parameters: Mapping[str, Parameter], bucket_map: BucketMap) -> None:
        listed = sorted(name for names in bucket_map for name in names)
        if listed != sorted(parameters):
            odd = sorted(set(listed) ^ set(parameters)) or [name for name in listed if listed.count(name) > 1]
            raise InputError(f"bucket map: {', '.join(odd[:3])}; accepted: each trained parameter once")
        self.bucket_map = bucket_map
        self._parameters = dict(parameters)
        self.lengths = [sum(parameters[name].numel() for name in names) for names in bucket_map]

    def pack(self, scale: float, copies: HostCopies | None = None) -> GradientSet:
        """Move the gradients, times ``scale``, out of the model, to the host if there are ``copies``."""
        used = torch.tensor([one.grad is not None for one in self._parameters.values()])
        flat = [
            self._empty(names, length) for names, length in zip(self.bucket_map, self.lengths, strict=True)
        ]
        for name, view in self._views(flat).items():
            gradient = self._parameters[name].grad
            if gradient is None:
                view.zero_()
            elif gradient.is_sparse:
                raise InputError(
                    f"parameter {name} has a sparse gradient; accepted: dense ones (sparse=False)"
                )
            else:
                torch.mul(gradient, scale, out=view)
            self._parameters[name].grad = None
        return GradientSet(flat if copies is None else copies.start(flat), used)

    def unpack(self, sums: Sequence[Tensor], used: Tensor) -> None:
        """Make the sums the gradients of the model; a parameter that no logical worker used gets none."""
        flat = [
            one.to(self._parameters[names[0]].device)
            for names, one in zip(self.bucket_map, sums, strict=True)
        ]
        views = self._views(flat)
        for (name, parameter), is_used in zip(self._parameters.items(), used.tolist(), strict=True):
            parameter.grad = views[name] if is_used else None

    def _empty(self, names: Sequence[str], length: int) -> Tensor:
        like = self._parameters[names[0]]
        return torch.empty(length, dtype=like.dtype, device=like.device)

    def _views(self, flat: Sequence[Tensor]) -> dict[str, Tensor]:
        """View flat vectors in the shapes of the parameters, and in their memory layouts if dense."""
        views = {}
        for names, vector in zip(self.bucket_map, flat, strict=True):
            offset = 0
            for name in names:
                like = self._parameters[name]
                views[name] = vector.as_strided(like.shape, _dense_strides(like), offset)
                offset += like.numel()
        return views


def _dense_strides(like: Tensor) -> tuple[int, ...]:
    """Strides of a tensor without gaps; those of a contiguous one if it has some."""
    extent = 1 + sum((size - 1) * step for size, step in zip(like.shape, like.stride(), strict=True))
    return like.stride() if extent == like.numel() else torch.empty(like.shape, device="meta").stride()


# ------------------------------------------------------------------------------------------------
# Sums over the gradients of all logical workers whose order depends on virtual ranks alone.

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


# ------------------------------------------------------------------------------------------------
# Whether a fold adds up as gloo does on this machine, tried with ranks that are threads of this process.

_TIMEOUT = timedelta(seconds=60)
_SEED = 20231114


class GlooThreads(AbstractContextManager["GlooThreads"]):
    """Ranks of one gloo group, each a thread; a process group of its own keeps them apart from any other."""

    def __init__(self, n_ranks: int) -> None:
        # The stubs of torch hide the public HashStore, and what a group of one's own can do.
        dist: Any = importlib.import_module("torch.distributed")
        self._pool, store = ThreadPoolExecutor(n_ranks), dist.HashStore()
        joined = [
            self._pool.submit(dist.ProcessGroupGloo, store, rank, n_ranks, _TIMEOUT)
            for rank in range(n_ranks)
        ]
        self._groups = [one.result() for one in joined]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the threads and leave the group."""
        self._pool.shutdown()
        self._groups.clear()

    def all_reduce(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """Sum of one vector a rank, as each rank has it."""
        copies = [one.clone() for one in vectors]
        running = [
            self._pool.submit(lambda group, one: group.allreduce([one]).wait(), group, one)
            for group, one in zip(self._groups, copies, strict=True)
        ]
        for one in running:
            one.result()
        return copies


def checked_lengths(n_ranks: int) -> tuple[int, ...]:
    """Lengths that gloo cuts in different ways: empty chunks, short ones, more than two segments a rank."""
    return 7, 1001, 100_003, n_ranks * 524_288 + 1


def folds_like_gloo(fold: str, n_ranks: int) -> bool:
    """Whether a fold gives the bits of gloo's all-reduce on this machine, with this torch.

    It takes parts of a second. The answer holds for a machine and a version of torch, so it is asked once
    and not at each start.
    """
    add, rng = fold_named(fold), np.random.default_rng(_SEED)
    with GlooThreads(n_ranks) as gloo:
        for length in checked_lengths(n_ranks):
            drawn = rng.standard_normal((n_ranks, length), dtype=np.float32)
            vectors = list(torch.from_numpy(drawn))
            expected = add(vectors, 0, length)
            if not all(torch.equal(one, expected) for one in gloo.all_reduce(vectors)):
                return False
    return True


def fold_of_machine(n_ranks: int, directory: Path) -> str:
    """Return the fold with which stock training on this machine can be met: ``ring``, else ``rank``.

    Parameters
    ----------
    n_ranks
        Number of logical workers.
    directory
        Where the answer is kept for the next start, one file a machine, version of torch and number.
    """
    system = [describe_machine()["processor"], platform.system(), torch.__version__]
    key = hashlib.sha256("/".join(map(str, [*system, n_ranks])).encode()).hexdigest()[:16]
    path = directory / f"fold-{key}.json"
    if (known := read_json(path)) is None:
        known = {"system": system, "n_ranks": n_ranks, "ring": folds_like_gloo("ring", n_ranks)}
        directory.mkdir(parents=True, exist_ok=True)
        write_json(known, path)
    if known["ring"]:
        return "ring"
    _log.warning("gloo adds up in another order than the fold ring here; the fold rank takes its place, and "
                 "only training that sums by the same fold has its bits")  # fmt: skip
    return "rank"


# ------------------------------------------------------------------------------------------------
# The sum of the gradients of all logical workers, wherever they are hosted.
#
# What a process does is a generator of `Exchange` steps; `over_group` carries them out with
# ``torch.distributed``, `in_memory` between generators of one thread. Each process receives its range of
# every bucket from all logical workers, folds it in their order, and sends the result to all.

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
