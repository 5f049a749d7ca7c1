"""Gradient reduction whose bits depend on virtual ranks alone: buckets, reduction orders, and exchanges.

Floating-point addition is not associative, so the order of summands decides the bits of a sum. Each process
receives its range of every bucket from all ESTs, sums it in an order of virtual ranks that does not depend on
the mapping, and sends the result to all processes. A process is a generator of `Exchange` steps: `over_group`
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

    The copies overlap with the computation of the next EST.
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
        copies = [torch.empty(vector.shape, dtype=vector.dtype, pin_memory=True) for vector in vectors]
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


def synchronize(device: torch.device) -> None:
    """Wait for the computation on a device, so that a clock measures it; copies may still be running."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


# --- Buckets: the layouts of DistributedDataParallel, and packing of gradients ---

BucketMap = tuple[tuple[str, ...], ...]
"""Names of the parameters of each bucket, in their order there."""
_FIRST_BYTES, _LATER_BYTES = 1 << 20, 25 << 20  # limits of DistributedDataParallel
_DTYPES = (torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class GradientSet:
    """Gradients of one EST, or their sum over all ESTs.

    Parameters
    ----------
    buckets
        One flat vector per bucket, already multiplied by `Reduction.set_scale`.
    used
        Whether each parameter, in registration order, had a gradient: bool, (n_parameters,). The others count
        as zero.
    """

    buckets: list[Tensor]
    used: Tensor


def trained_parameters(model: torch.nn.Module) -> dict[str, Parameter]:
    """Return the parameters that require a gradient, by name; an `InputError` names one of another dtype."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    for name, parameter in trained.items():
        if parameter.dtype not in _DTYPES:
            expected = ", ".join(map(str, _DTYPES))
            raise InputError(f"parameter {name} is {parameter.dtype}; expected {expected}")
    return trained


def provisional_map(parameters: Mapping[str, Parameter]) -> BucketMap:
    """Return the layout before the first backward pass: one bucket in registration order."""
    return _packed(parameters, parameters, (inf,))


def rebuilt_map(
    parameters: Mapping[str, Parameter], ready: Sequence[str], cap_bytes: int | None = None
) -> BucketMap:
    """Return the layout from the second mini-batch on.

    Parameters
    ----------
    ready
        Names in the order in which gradients became ready; parameters without a gradient come last.
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
        self._handles = [self._listen(name, parameter) for name, parameter in parameters.items()]

    def _listen(self, name: str, parameter: Parameter) -> RemovableHandle:
        handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            lambda _: self._names.append(name)
        )
        return handle

    def finish(self) -> list[str]:
        """Stop recording and return the names."""
        for handle in self._handles:
            handle.remove()
        return list(dict.fromkeys(self._names))  # a parameter that is used twice becomes ready twice


class Buckets:
    """Packs gradients into the flat vectors of a bucket map, and unpacks their sums."""

    def __init__(self, parameters: Mapping[str, Parameter], bucket_map: BucketMap) -> None:
        listed = sorted(name for names in bucket_map for name in names)
        if listed != sorted(parameters):
            wrong = sorted(set(listed) ^ set(parameters)) or [
                name for name in listed if listed.count(name) > 1
            ]
            raise InputError(f"bucket map: {', '.join(wrong[:3])}; expected each trained parameter once")
        self.bucket_map = bucket_map
        self._parameters = dict(parameters)
        self.lengths = [sum(parameters[name].numel() for name in names) for names in bucket_map]

    def pack(self, scale: float, copies: HostCopies | None = None) -> GradientSet:
        """Move the gradients, times ``scale``, out of the model, and to the host if ``copies`` is given."""
        used = torch.tensor([parameter.grad is not None for parameter in self._parameters.values()])
        flat = [
            self._empty(names, length) for names, length in zip(self.bucket_map, self.lengths, strict=True)
        ]
        for name, view in self._views(flat).items():
            gradient = self._parameters[name].grad
            if gradient is None:
                view.zero_()
            elif gradient.is_sparse:
                raise InputError(
                    f"parameter {name} has a sparse gradient; expected dense gradients (sparse=False)"
                )
            else:
                torch.mul(gradient, scale, out=view)
            self._parameters[name].grad = None
        return GradientSet(flat if copies is None else copies.start(flat), used)

    def unpack(self, sums: Sequence[Tensor], used: Tensor) -> None:
        """Make the sums the gradients of the model; a parameter that no EST used gets none."""
        flat = [
            bucket.to(self._parameters[names[0]].device)
            for names, bucket in zip(self.bucket_map, sums, strict=True)
        ]
        views = self._views(flat)
        for (name, parameter), is_used in zip(self._parameters.items(), used.tolist(), strict=True):
            parameter.grad = views[name] if is_used else None

    def _empty(self, names: Sequence[str], length: int) -> Tensor:
        like = self._parameters[names[0]]
        return torch.empty(length, dtype=like.dtype, device=like.device)

    def _views(self, flat: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return views of flat vectors with the shapes and, if dense, the memory layouts of parameters."""
        views = {}
        for names, vector in zip(self.bucket_map, flat, strict=True):
            offset = 0
            for name in names:
                like = self._parameters[name]
                # A tensor without gaps keeps its strides (such as channels_last); others become contiguous.
                strides = like.stride()
                extent = 1 + sum((size - 1) * step for size, step in zip(like.shape, strides, strict=True))
                if extent != like.numel():
                    strides = torch.empty(like.shape, device="meta").stride()
                views[name] = vector.as_strided(like.shape, strides, offset)
                offset += like.numel()
        return views


# --- Reduction orders: sums over the gradients of all ESTs in an order of virtual ranks ---

_SEGMENT_BYTES = 1 << 20  # of gloo


class OrderedSum(Protocol):
    """Function that sums one range of a bucket in a fixed order of virtual ranks."""

    def __call__(self, pieces: Sequence[Tensor], start: int, length: int) -> Tensor:
        """Sum ``pieces``, one per rank: elements from ``start`` on of a bucket of ``length`` elements."""


def ring_chunks(length: int, n_ranks: int, element_bytes: int) -> list[tuple[int, int]]:
    """Return first and last (exclusive) element of each chunk that gloo's ring reduces.

    Gloo cuts a vector into segments of about 1 MiB, at least two per rank and equally many for each rank
    (``gloo/allreduce.cc``). The last chunks may be short or empty.
    """
    wanted = max(-(-element_bytes * length // _SEGMENT_BYTES), 2 * n_ranks)
    per_rank = -(-wanted // n_ranks)
    chunk = per_rank * -(-length // (per_rank * n_ranks))
    return [(min(length, rank * chunk), min(length, (rank + 1) * chunk)) for rank in range(n_ranks)]


def sum_by_ring(pieces: Sequence[Tensor], start: int, length: int) -> Tensor:
    """Sum as gloo's all-reduce does: chunk c from rank c - 1 downwards, cyclically (see `OrderedSum`)."""
    n_ranks, total = len(pieces), torch.empty_like(pieces[0])
    for chunk, (first, last) in enumerate(ring_chunks(length, n_ranks, total.element_size())):
        low, high = max(first - start, 0), min(last - start, total.numel())
        if low < high:
            order = [(chunk - back) % n_ranks for back in range(1, n_ranks + 1)]
            _sum_in_order([pieces[rank][low:high] for rank in order], total[low:high])
    return total


def sum_by_rank(pieces: Sequence[Tensor], start: int, length: int) -> Tensor:
    """Sum from rank 0 upwards, everywhere in the bucket (see `OrderedSum`)."""
    total = torch.empty_like(pieces[0])
    _sum_in_order(pieces, total)
    return total


def _sum_in_order(parts: Sequence[Tensor], total: Tensor) -> None:
    total.copy_(parts[0])
    for part in parts[1:]:
        total.add_(part)


ORDERS: dict[str, OrderedSum] = {"ring": sum_by_ring, "rank": sum_by_rank}


def ordered_sum_of(order: str) -> OrderedSum:
    """Return the sum of an order; an unknown name raises a `makespan.errors.UnknownNameError`."""
    if order not in ORDERS:
        raise unknown_name("reduction order", order, ORDERS)
    return ORDERS[order]


# --- Trial of an order against gloo on this machine ---

_TIMEOUT = timedelta(seconds=60)
_SEED = 20231114


class GlooThreads(AbstractContextManager["GlooThreads"]):
    """Ranks of one gloo group, one thread per rank; the group is separate from the default one."""

    def __init__(self, n_ranks: int) -> None:
        # The stubs of torch lack the public HashStore and ProcessGroupGloo.
        dist: Any = importlib.import_module("torch.distributed")
        self._pool, store = ThreadPoolExecutor(n_ranks), dist.HashStore()
        futures = [
            self._pool.submit(dist.ProcessGroupGloo, store, rank, n_ranks, _TIMEOUT)
            for rank in range(n_ranks)
        ]
        self._groups = [future.result() for future in futures]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the threads and leave the group."""
        self._pool.shutdown()
        self._groups.clear()

    def all_reduce(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """Return the sum of one vector per rank, as each rank receives it."""
        copies = [vector.clone() for vector in vectors]
        futures = [
            self._pool.submit(lambda group, vector: group.allreduce([vector]).wait(), group, vector)
            for group, vector in zip(self._groups, copies, strict=True)
        ]
        for future in futures:
            future.result()
        return copies


def checked_lengths(n_ranks: int) -> tuple[int, ...]:
    """Return lengths for which gloo's chunks are empty, short, or of more than two segments per rank."""
    return 7, 1001, 100_003, n_ranks * 524_288 + 1


def sums_like_gloo(order: str, n_ranks: int) -> bool:
    """Return True if an order gives the bits of gloo's all-reduce on this machine, with this torch.

    The trial takes less than a second. `detect_gloo_order` keeps the answer per machine and version of torch.
    """
    ordered_sum, rng = ordered_sum_of(order), np.random.default_rng(_SEED)
    with GlooThreads(n_ranks) as gloo:
        for length in checked_lengths(n_ranks):
            drawn = rng.standard_normal((n_ranks, length), dtype=np.float32)
            vectors = list(torch.from_numpy(drawn))
            expected = ordered_sum(vectors, 0, length)
            if not all(torch.equal(total, expected) for total in gloo.all_reduce(vectors)):
                return False
    return True


def detect_gloo_order(n_ranks: int, directory: Path) -> str:
    """Return the order that reproduces stock training on this machine, ``ring``, or else ``rank``.

    Parameters
    ----------
    n_ranks
        Number of logical workers.
    directory
        Directory that keeps the answer, in one file per machine, version of torch and number of logical
        workers.
    """
    system = [describe_machine()["processor"], platform.system(), torch.__version__]
    key = hashlib.sha256("/".join(map(str, [*system, n_ranks])).encode()).hexdigest()[:16]
    path = directory / f"fold-{key}.json"
    if (trial := read_json(path)) is None:
        trial = {"system": system, "n_ranks": n_ranks, "ring": sums_like_gloo("ring", n_ranks)}
        directory.mkdir(parents=True, exist_ok=True)
        write_json(trial, path)
    if trial["ring"]:
        return "ring"
    _log.warning(
        "gloo does not sum in the order ring on this machine; using the order rank instead, whose bits only "
        "training in the same order reproduces"
    )
    return "rank"


# --- Sum of the gradients of all ESTs over processes ---

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
        Number of gradient sets in one sum.
    order
        ``ring``, the order of gloo's all-reduce, or ``rank``, ascending.
    scaling
        Whether each set is multiplied by 1/N (``pre``, as DistributedDataParallel does) or the sum
        (``post``).
    bucket_cap_bytes
        Size at which a bucket is full; None for DistributedDataParallel's default.
    """

    n_logical_workers: int
    order: str = "ring"
    scaling: Scaling = "pre"
    bucket_cap_bytes: int | None = None

    def __post_init__(self) -> None:
        """Check the choices."""
        ordered_sum_of(self.order)
        if self.scaling not in ("pre", "post"):
            raise InputError(f"scaling is {self.scaling!r}; expected pre, post")
        for name in ("n_logical_workers", "bucket_cap_bytes"):
            if (number := getattr(self, name)) is not None and number < 1:
                raise InputError(f"{name} is {number}; expected a whole number >= 1")

    @property
    def set_scale(self) -> float:
        """Factor of each gradient set before the sum."""
        return 1.0 / self.n_logical_workers if self.scaling == "pre" else 1.0


def reduce_sets(
    hosted: Sequence[GradientSet], mapping: RankMapping, process: int, reduction: Reduction
) -> Steps[GradientSet]:
    """Sum the sets of all ESTs; ``hosted`` are those of this process, in the order of the mapping."""
    ordered_sum = ordered_sum_of(reduction.order)
    sums = []
    for bucket in zip(*(gradients.buckets for gradients in hosted), strict=True):
        sums.append((yield from _reduce_bucket(bucket, mapping, process, ordered_sum)))
    if reduction.scaling == "post":
        sums = [total * (1.0 / reduction.n_logical_workers) for total in sums]
    # A parameter has a sum if any EST of any process used it.
    used = torch.stack([gradients.used for gradients in hosted]).any(dim=0)
    gathered = yield from share(used.to(torch.uint8), [used.numel()] * mapping.n_processes)
    return GradientSet(sums, torch.stack(gathered).any(dim=0))


def _reduce_bucket(
    hosted: Sequence[Tensor], mapping: RankMapping, process: int, ordered_sum: OrderedSum
) -> Steps[Tensor]:
    # Each process sums its own range of the bucket, over all ESTs. An all-reduce would add the partial sums
    # of processes, whose bits depend on the mapping.
    length, n_processes = hosted[0].numel(), mapping.n_processes
    ranges = list(pairwise(length * number // n_processes for number in range(n_processes + 1)))
    start, end = ranges[process]
    # A single process exchanges nothing: a copy of every set would double its memory.
    pieces = dict(zip(mapping.hosted[process], hosted, strict=True))
    if n_processes > 1:
        parts = [torch.cat([vector[first:last] for vector in hosted]) for first, last in ranges]
        received = yield Exchange(parts, [len(ranks) * (end - start) for ranks in mapping.hosted])
        for ranks, part in zip(mapping.hosted, received, strict=True):
            pieces |= zip(ranks, part.view(len(ranks), end - start), strict=True)
    total = ordered_sum([pieces[rank] for rank in range(mapping.n_logical_workers)], start, length)
    return torch.cat((yield from share(total, [last - first for first, last in ranges])))


def share(part: Tensor, lengths: list[int]) -> Steps[list[Tensor]]:
    """Send one vector to all processes, and return the vectors of all processes."""
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
    """Carry out the steps of all processes in lockstep, in this thread; return their results."""
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
