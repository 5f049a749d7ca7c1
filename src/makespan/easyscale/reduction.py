"""Gradient reduction whose bits depend on virtual ranks alone: buckets, reduction orders, and exchanges.

Each process receives its range of every bucket from all logical workers, folds it in the order of virtual
ranks, and sends the result to all processes. A process is a generator of `Exchange` steps: `over_group`
carries them out with ``torch.distributed``, `in_memory` between generators of one thread.
"""

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


# --- Copies from a device to the host ---


class HostCopies:
    """Copies vectors from a device to pinned memory on a separate stream; on a CPU it returns the vectors.

    The next logical worker computes meanwhile.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copied: list[torch.cuda.Event] = []

    def start(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """Return copies on the host; they are complete after `finish`."""
        if self._stream is None:
            return list(vectors)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        copies = [torch.empty(one.shape, dtype=one.dtype, pin_memory=True) for one in vectors]
        with torch.cuda.stream(self._stream):
            for vector, copy in zip(vectors, copies, strict=True):
                copy.copy_(vector, non_blocking=True)
                # The allocator must not hand out the memory of the vector before the copy is made.
                vector.record_stream(self._stream)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        self._copied.append(event)
        return copies

    def finish(self) -> None:
        """Wait for all copies."""
        for event in self._copied:
            event.synchronize()
        self._copied.clear()


def settle(device: torch.device) -> None:
    """Wait for the computation on a device, so that a clock measures it; copies are not waited for."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


# --- Buckets: the layouts of DistributedDataParallel, and packing of gradients ---

BucketMap = tuple[tuple[str, ...], ...]
"""Names of the parameters of each bucket, in their order there."""
_FIRST_BYTES, _LATER_BYTES = 1 << 20, 25 << 20  # limits of DistributedDataParallel
_ACCEPTED = (torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class GradientSet:
    """Gradients of one logical worker.

    Parameters
    ----------
    buckets
        One flat vector per bucket, already multiplied by `Reduction.set_scale`.
    used
        bool, (n_parameters,): the parameters, in registration order, that had a gradient; others count as
        zero.
    """

    buckets: list[Tensor]
    used: Tensor


def trained_parameters(model: torch.nn.Module) -> dict[str, Parameter]:
    """Parameters that require a gradient, by name; other dtypes than float raise an `InputError`."""
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    for name, one in trained.items():
        if one.dtype not in _ACCEPTED:
            raise InputError(f"parameter {name} is {one.dtype}; accepted: {', '.join(map(str, _ACCEPTED))}")
    return trained


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
        Names in the order in which gradients became ready; parameters without gradient come last.
    cap_bytes
        Size at which a bucket is full; None for the default, 1 MiB for the first one and 25 MiB for others.
    """
    known = set(ready)
    order = [*ready, *(name for name in parameters if name not in known)]
    limits = (_FIRST_BYTES, _LATER_BYTES) if cap_bytes is None else (cap_bytes,)
    return _packed(parameters, order, limits)


def _packed(parameters: Mapping[str, Parameter], order: Iterable[str], limits: Sequence[float]) -> BucketMap:
    """Fill buckets, each of one dtype, up to their limits; the last limit holds for all further buckets."""
    closed: list[list[str]] = []
    opened: dict[torch.dtype, tuple[list[str], int]] = {}
    n_closed: dict[torch.dtype, int] = {}
    for name in order:
        parameter = parameters[name]
        names, size = opened.get(parameter.dtype, ([], 0))
        names, size = [*names, name], size + parameter.numel() * parameter.element_size()
        opened[parameter.dtype] = names, size
        number = n_closed.get(parameter.dtype, 0)
        # As in DistributedDataParallel, the parameter that reaches the limit is the last of its bucket.
        if size >= limits[min(number, len(limits) - 1)]:
            closed.append(names)
            del opened[parameter.dtype]
            n_closed[parameter.dtype] = number + 1
    return tuple(map(tuple, [*closed, *(names for names, _ in opened.values())]))


class ReadyOrder:
    """Records the order in which gradients become ready, until `finish` is called."""

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
        return list(dict.fromkeys(self._names))  # a parameter that is used twice is ready twice


class Buckets:
    """Packs gradients into the flat vectors of a bucket map, and unpacks their sums."""

    def __init__(self, parameters: Mapping[str, Parameter], bucket_map: BucketMap) -> None:
        listed = sorted(name for names in bucket_map for name in names)
        if listed != sorted(parameters):
            odd = sorted(set(listed) ^ set(parameters)) or [name for name in listed if listed.count(name) > 1]
            raise InputError(f"bucket map: {', '.join(odd[:3])}; accepted: each trained parameter once")
        self.bucket_map = bucket_map
        self._parameters = dict(parameters)
        self.lengths = [sum(parameters[name].numel() for name in names) for names in bucket_map]

    def pack(self, scale: float, copies: HostCopies | None = None) -> GradientSet:
        """Move the gradients, times ``scale``, out of the model, and to the host if ``copies`` is given."""
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
                # A tensor without gaps keeps its strides (channels_last, for one); others become contiguous.
                strides = like.stride()
                extent = 1 + sum((size - 1) * step for size, step in zip(like.shape, strides, strict=True))
                if extent != like.numel():
                    strides = torch.empty(like.shape, device="meta").stride()
                views[name] = vector.as_strided(like.shape, strides, offset)
                offset += like.numel()
        return views


# --- Folds: sums over the gradients of all logical workers in an order of virtual ranks ---

_SEGMENT_BYTES = 1 << 20  # of gloo


class Fold(Protocol):
    """Function that adds up one range of a bucket."""

    def __call__(self, pieces: Sequence[Tensor], start: int, length: int) -> Tensor:
        """Sum ``pieces``, one per rank: elements from ``start`` on of a bucket of ``length`` elements."""


def ring_chunks(length: int, n_ranks: int, element_bytes: int) -> list[tuple[int, int]]:
    """First and last (exclusive) element of each chunk that gloo's ring reduces.

    Gloo cuts a vector into segments of about 1 MiB, at least two per rank and equally many for each rank
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
    """Sum from rank 0 upwards, everywhere in the bucket (see `Fold`)."""
    total = torch.empty_like(pieces[0])
    _left_fold(pieces, total)
    return total


def _left_fold(parts: Sequence[Tensor], total: Tensor) -> None:
    total.copy_(parts[0])
    for part in parts[1:]:
        total.add_(part)


FOLDS: dict[str, Fold] = {"ring": ring_fold, "rank": rank_fold}


def fold_named(name: str) -> Fold:
    """Fold of a name; an unknown name raises a `makespan.errors.UnknownNameError`."""
    if name not in FOLDS:
        raise unknown_name("fold", name, FOLDS)
    return FOLDS[name]


# --- Trial of a fold against gloo on this machine ---

_TIMEOUT = timedelta(seconds=60)
_SEED = 20231114


class GlooThreads(AbstractContextManager["GlooThreads"]):
    """Ranks of one gloo group, one thread per rank; the group is separate from the default one."""

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
        """Return the sum of one vector per rank, as each rank has it."""
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
    """Return True if a fold gives the bits of gloo's all-reduce on this machine, with this torch.

    It takes less than a second. `fold_of_machine` keeps the answer per machine and version of torch.
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
    """Return the fold that reproduces stock training on this machine, ``ring``, or else ``rank``.

    Parameters
    ----------
    n_ranks
        Number of logical workers.
    directory
        Directory that keeps the answer, in one file per machine, version of torch and number of workers.
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


# --- Sum of the gradients of all logical workers over processes ---

T = TypeVar("T")
Scaling = Literal["pre", "post"]


@dataclass(frozen=True, slots=True)
class Exchange:
    """One vector for each process, and the number of elements that each sends back."""

    parts: list[Tensor]
    lengths: list[int]


Steps = Generator[Exchange, list[Tensor], T]


@dataclass(frozen=True, slots=True)
class Reduction:
    """Order and scaling of the sum of gradients; part of the job, because they decide the bits.

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
        """Factor of each gradient set before the sum."""
        return 1.0 / self.n_logical_workers if self.scaling == "pre" else 1.0


def reduce_sets(
    own: Sequence[GradientSet], mapping: RankMapping, process: int, reduction: Reduction
) -> Steps[GradientSet]:
    """Sum the sets of all logical workers; ``own`` are those of this process, in the order of the mapping."""
    fold = fold_named(reduction.fold)
    sums = []
    for bucket in zip(*(one.buckets for one in own), strict=True):
        sums.append((yield from _reduce_bucket(bucket, mapping, process, fold)))
    if reduction.scaling == "post":
        sums = [one * (1.0 / reduction.n_logical_workers) for one in sums]
    # A parameter has a sum if any logical worker of any process used it.
    used = torch.stack([one.used for one in own]).any(dim=0)
    everywhere = yield from share(used.to(torch.uint8), [used.numel()] * mapping.n_processes)
    return GradientSet(sums, torch.stack(everywhere).any(dim=0))


def _reduce_bucket(own: Sequence[Tensor], mapping: RankMapping, process: int, fold: Fold) -> Steps[Tensor]:
    # Each process folds the range of the bucket that belongs to it.
    length, n_processes = own[0].numel(), mapping.n_processes
    ranges = list(pairwise(length * number // n_processes for number in range(n_processes + 1)))
    start, end = ranges[process]
    # A single process exchanges nothing: a copy of every set would double its memory.
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
    """Carry out the steps of this process together with the other processes of the default group.

    Parameters
    ----------
    device
        Device on which the group takes vectors; None to leave them where they are.
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
        result: T = end.value
        return result


def in_memory(processes: Sequence[Steps[T]]) -> list[T]:
    """Carry out the steps of all processes in turn, in this thread; return their results."""
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
            if (sent := [part.numel() for part in reply]) != request.lengths:
                raise RuntimeError(f"processes disagree: sent {sent}, expected {request.lengths} elements")
    return results
