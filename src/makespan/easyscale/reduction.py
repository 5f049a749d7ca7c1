"""Gradient reduction whose bits depend on virtual ranks alone: buckets, reduction orders, and exchanges.

Floating-point addition is not associative, so the order of summands decides the bits of a sum. Every chunk of
a bucket is summed in an order of virtual ranks that does not depend on the mapping: the running sum travels
from host to host in this order, and the host of the last summand sends the result to all processes. A process
is a generator of `Exchange`, `Transfer` and `Broadcast` steps: `over_group` carries them out with
``torch.distributed``, `over_links` over sockets that release a process when another one is lost, and
`in_memory` between generators of one thread.
"""

import functools
import hashlib
import importlib
import logging
import math
import platform
import sys
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate, groupby, pairwise
from math import inf
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

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
from makespan.runtime.links import PeerLinks

_log = logging.getLogger(__name__)


# --- Copies from a device to the host ---


class HostCopies:
    """Copies vectors from a device to pinned memory on a separate stream; on a CPU it returns the vectors.

    The copies overlap with the computation of the next EST.

    Parameters
    ----------
    device
        Device of the vectors.
    sums_on_host
        Whether sums are taken where the copies are, and copied back; False if they are taken on the device.
    """

    def __init__(self, device: torch.device, *, sums_on_host: bool = False) -> None:
        self._device = device
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._stream: Any = None if self._module is None else self._module.Stream(device)
        self._copied: list[Any] = []
        self.sums_on_host = sums_on_host and self.is_needed

    @property
    def is_needed(self) -> bool:
        """Whether vectors are copied at all."""
        return self._stream is not None

    def start(self, vectors: Sequence[Tensor], kept: Sequence[Tensor] = ()) -> list[Tensor]:
        """Return copies on the host, in pinned memory that an earlier call returned if given as ``kept``.

        They are complete after `finish`.
        """
        if self._stream is None:
            return list(vectors)
        self._stream.wait_stream(self._module.current_stream(self._device))
        copies = list(kept) or [host_memory(vector, vector.shape) for vector in vectors]
        with self._module.stream(self._stream):
            for vector, copy in zip(vectors, copies, strict=True):
                copy.copy_(vector, non_blocking=True)
                # The allocator must not hand out the memory of the vector before the copy is made.
                vector.record_stream(self._stream)
            event = self._module.Event()
            event.record(self._stream)
        self._copied.append(event)
        return copies

    def before_reuse(self) -> None:
        """Let what the device computes from now on wait for the copies; the host does not wait."""
        if self._stream is not None:
            self._module.current_stream(self._device).wait_stream(self._stream)

    def finish(self) -> None:
        """Wait for all copies."""
        for event in self._copied:
            event.synchronize()
        self._copied.clear()


def host_memory(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Return new host memory for a copy of a vector; it is pinned if CUDA reads or writes it."""
    return torch.empty(shape, dtype=like.dtype, pin_memory=like.device.type == "cuda")


def synchronize(device: torch.device) -> None:
    """Wait for the computation on a device, so that a clock measures it; copies may still be running."""
    if device.type != "cpu":
        torch.get_device_module(device).current_stream(device).synchronize()


# --- Buckets: the layouts of DistributedDataParallel, and gradients in them ---

BucketMap = tuple[tuple[str, ...], ...]
"""Names of the parameters of each bucket, in their order there."""
_FIRST_BYTES, _LATER_BYTES = 1 << 20, 25 << 20  # limits of DistributedDataParallel
_DTYPES = (torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class GradientSet:
    """Gradients of one EST.

    Parameters
    ----------
    pieces
        Flat vectors by bucket, which lie in it one after the other.
    used
        Whether each parameter, in registration order, had a gradient: (n_parameters,), bool or any number but
        zero. The others count as zero.
    scale
        Factor by which the sum still has to multiply each gradient.
    versions
        Versions of all pieces when they were taken, which change with the pieces; empty for copies.
    """

    pieces: list[list[Tensor]]
    used: Tensor
    scale: float = 1.0
    versions: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class GradientSum:
    """Sum of the gradients of all ESTs: one flat vector per bucket, and which parameters any EST used."""

    buckets: list[Tensor]
    used: Tensor


class SumRoom:
    """Vectors for sums of gradient sets that are kept from step to step: new memory costs more than the sums.

    Parameters
    ----------
    sums
        One vector per bucket and one for ``used``, on the device where the sum is needed.
    """

    def __init__(self, sums: list[Tensor]) -> None:
        self.sums = sums
        self._staged: dict[tuple[str, int], Tensor] = {}
        self._views: list[list[tuple[Tensor, list[Tensor]]]] = []
        self._viewed: tuple[Any, Any] = None, None  # chunks and sums of the views

    def views(
        self, chunks: Sequence[Sequence["_HostedChunk"]]
    ) -> Sequence[Sequence[tuple[Tensor, list[Tensor]]]]:
        """Return the part of the sums that each chunk is, by bucket: the whole, and by block."""
        if self._viewed[0] is not chunks or self._viewed[1] is not self.sums:
            self._viewed = chunks, self.sums
            self._views = [
                [
                    (
                        self.sums[chunk.vector][chunk.first : chunk.last],
                        [self.sums[chunk.vector][block.first : block.last] for block in chunk.blocks],
                    )
                    for chunk in of_bucket
                ]
                for of_bucket in chunks
            ]
        return self._views

    def joined(
        self, name: str, number: int, pieces: Sequence[Tensor]
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Return one vector as long as pieces of a sum, by its number, together.

        It consists of the pieces if they lie side by side. Otherwise it is a kept vector with a name, and
        pairs of each piece and its place in the vector are returned, too.
        """
        length = sum(piece.numel() for piece in pieces)
        if pieces and all(
            left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
            and left.storage_offset() + left.numel() == right.storage_offset()
            for left, right in pairwise(pieces)
        ):
            return pieces[0].as_strided((length,), (1,)), []
        staged = self._staged.get((name, number))
        if staged is None or staged.numel() < length:
            staged = self._staged[name, number] = self.sums[number].new_empty(length)
        places = torch.split(staged[:length], [piece.numel() for piece in pieces])
        return staged[:length], list(zip(pieces, places, strict=True))


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


def unordered_map(parameters: Mapping[str, Parameter], cap_bytes: int | None = None) -> BucketMap:
    """Return the layout of a model whose passes may leave parameters out, in registration order.

    It holds from the first mini-batch on, because no pass need tell the order of all gradients.
    """
    return rebuilt_map(parameters, (), cap_bytes)


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

    def restart(self) -> None:
        """Forget the gradients that became ready so far: only the last backward pass of a turn counts."""
        self._names.clear()

    def finish(self) -> list[str]:
        """Stop recording and return the names."""
        for handle in self._handles:
            handle.remove()
        return list(dict.fromkeys(self._names))  # a parameter that is used twice becomes ready twice


class Buckets:
    """Takes gradients out of a model in the layout of a bucket map, and puts their sums back."""

    def __init__(self, parameters: Mapping[str, Parameter], bucket_map: BucketMap) -> None:
        listed = sorted(name for names in bucket_map for name in names)
        if listed != sorted(parameters):
            wrong = sorted(set(listed) ^ set(parameters)) or [
                name for name in listed if listed.count(name) > 1
            ]
            raise InputError(f"bucket map: {', '.join(wrong[:3])}; expected each trained parameter once")
        self.bucket_map = bucket_map
        self.parameters = dict(parameters)
        self.lengths = [sum(parameters[name].numel() for name in names) for names in bucket_map]
        self._strides = {name: _strides_of(parameter) for name, parameter in parameters.items()}
        self._all_used = torch.ones(len(parameters), dtype=torch.bool)

    @torch.no_grad()
    def take(self, scale: float) -> GradientSet:
        """Take the gradients out of the model as they are; the sum has to multiply them by ``scale``."""
        taken, used = {}, []
        for name, parameter in self.parameters.items():
            gradient = self._dense_gradient(name)
            used.append(gradient is not None)
            length, strides = parameter.numel(), self._strides[name]
            if gradient is None:
                gradient = parameter.new_zeros(()).expand(length)
            elif gradient.stride() == strides:
                gradient = gradient.as_strided((length,), (1,))
            else:
                packed = parameter.new_empty(length)
                packed.as_strided(parameter.shape, strides).copy_(gradient)
                gradient = packed
            taken[name] = gradient
            parameter.grad = None
        pieces = [[taken[name] for name in names] for names in self.bucket_map]
        versions = tuple(piece._version for vectors in pieces for piece in vectors)
        return GradientSet(pieces, self._all_used if all(used) else torch.tensor(used), scale, versions)

    def pack(self, views: Mapping[str, Tensor], scale: float) -> Tensor:
        """Move the gradients, times ``scale``, out of the model into views of flat vectors.

        Returns whether each parameter had one; others become zero.
        """
        used = []
        for name, view in views.items():
            gradient = self._dense_gradient(name)
            used.append(gradient is not None)
            if gradient is None:
                view.zero_()
            else:
                torch.mul(gradient, scale, out=view)
            self.parameters[name].grad = None
        return self._all_used if all(used) else torch.tensor(used)

    def _dense_gradient(self, name: str) -> Tensor | None:
        """Return a gradient; a sparse one raises an `InputError`."""
        gradient = self.parameters[name].grad
        if gradient is not None and gradient.is_sparse:
            raise InputError(
                f"parameter {name} has a sparse gradient; expected dense gradients (sparse=False)"
            )
        return gradient

    def bind(self, views: Mapping[str, Tensor], used: Tensor) -> None:
        """Make `views` of sums the gradients of the model; a parameter that no EST used gets none."""
        for (name, parameter), is_used in zip(self.parameters.items(), used.tolist(), strict=True):
            parameter.grad = views[name] if is_used else None

    def empty(self, n_more: int = 0, *, on_host: bool = False) -> list[Tensor]:
        """Return new vectors for all buckets, on the device of the parameters or on the host.

        With ``n_more`` there is one more for so many numbers, side by side with the last one.
        """
        vectors = []
        for number, names in enumerate(self.bucket_map, start=1):
            more, like = n_more if number == len(self.lengths) else 0, self.parameters[names[0]]
            length = self.lengths[number - 1]
            vector = (
                host_memory(like, (length + more,))
                if on_host
                else torch.empty(length + more, dtype=like.dtype, device=like.device)
            )
            vectors += [vector[:length], vector[length:]] if more else [vector]
        return vectors

    def views(self, flat: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return views of flat vectors, in the order of the parameters.

        They have the shapes and, if these have no gaps, the memory layouts of the parameters.
        """
        views = dict.fromkeys(self.parameters, flat[0]) if flat else {}
        for names, vector in zip(self.bucket_map, flat, strict=True):
            offset = 0
            for name in names:
                like = self.parameters[name]
                views[name] = vector.as_strided(like.shape, self._strides[name], offset)
                offset += like.numel()
        return views


def _strides_of(parameter: Tensor) -> tuple[int, ...]:
    """Return the strides of the gradient of a parameter, which has no gaps.

    A parameter without gaps has them itself (such as channels_last); others have contiguous gradients.
    """
    strides = parameter.stride()
    extent = 1 + sum((size - 1) * step for size, step in zip(parameter.shape, strides, strict=True))
    if extent != parameter.numel():
        strides = torch.empty(parameter.shape, device="meta").stride()
    return strides


# --- Reduction orders: sums over the gradients of all ESTs in an order of virtual ranks ---

_SEGMENT_BYTES = 1 << 20  # of gloo


Chunk: TypeAlias = tuple[int, int, tuple[int, ...]]
"""First and last (exclusive) element of a part of a bucket, and virtual ranks in the order of its sum."""


class ReductionOrder(Protocol):
    """Function that cuts a bucket into chunks, each with the order of its summands."""

    def __call__(self, length: int, n_ranks: int, element_bytes: int) -> list[Chunk]:
        """Cut a bucket of ``length`` elements; the chunks depend on nothing but the arguments."""


def ring_chunks(length: int, n_ranks: int, element_bytes: int) -> list[tuple[int, int]]:
    """Return first and last (exclusive) element of each chunk that gloo's ring reduces.

    Gloo cuts a vector into segments of about 1 MiB, at least two per rank and equally many for each rank
    (``gloo/allreduce.cc``). The last chunks may be short or empty.
    """
    wanted = max(-(-element_bytes * length // _SEGMENT_BYTES), 2 * n_ranks)
    per_rank = -(-wanted // n_ranks)
    chunk = per_rank * -(-length // (per_rank * n_ranks))
    return [(min(length, rank * chunk), min(length, (rank + 1) * chunk)) for rank in range(n_ranks)]


def order_by_ring(length: int, n_ranks: int, element_bytes: int) -> list[Chunk]:
    """Sum as gloo's all-reduce does: chunk c from rank c - 1 downwards, cyclically (see `ReductionOrder`)."""
    return [
        (first, last, tuple((chunk - back) % n_ranks for back in range(1, n_ranks + 1)))
        for chunk, (first, last) in enumerate(ring_chunks(length, n_ranks, element_bytes))
        if first < last
    ]


def order_by_rank(length: int, n_ranks: int, element_bytes: int) -> list[Chunk]:
    """Sum from rank 0 upwards, everywhere in the bucket (see `ReductionOrder`)."""
    return [(0, length, tuple(range(n_ranks)))] if length else []


ORDERS: dict[str, ReductionOrder] = {"ring": order_by_ring, "rank": order_by_rank}


def order_named(name: str) -> ReductionOrder:
    """Return an order; an unknown name raises a `makespan.errors.UnknownNameError`."""
    if name not in ORDERS:
        raise unknown_name("reduction order", name, ORDERS)
    return ORDERS[name]


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
    rng, reduction = np.random.default_rng(_SEED), Reduction(n_ranks, order)
    mapping = RankMapping.even(n_ranks, 1)
    with GlooThreads(n_ranks) as gloo:
        for length in checked_lengths(n_ranks):
            drawn = rng.standard_normal((n_ranks, length), dtype=np.float32)
            vectors, used = list(torch.from_numpy(drawn)), torch.ones(1)
            sets = [GradientSet([[vector]], used, reduction.set_scale) for vector in vectors]
            (total,) = in_memory([reduce_sets(sets, mapping, 0, reduction)])
            expected = gloo.all_reduce([vector * reduction.set_scale for vector in vectors])
            if not all(torch.equal(each, total.buckets[0]) for each in expected):
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


@dataclass(frozen=True, slots=True)
class Transfer:
    """Pieces of a sum that a process sends to each process, and pieces that it receives in place from each.

    Parameters
    ----------
    sent, received
        Pieces by process; those of two processes for each other are equally many and long.
    room, number
        Memory where pieces of a sum may be joined, and the number of the sum there.
    """

    sent: list[list[Tensor]]
    received: list[list[Tensor]]
    room: SumRoom
    number: int


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Vectors that processes send whole to some of the others, which receive them in place.

    Parameters
    ----------
    vectors
        Vectors by sender, without gaps; none where this process neither sends nor receives.
    targets
        Processes that receive those of each sender.
    """

    vectors: list[list[Tensor]]
    targets: list[tuple[int, ...]]


Steps = Generator[Exchange | list[Transfer] | Broadcast, list[Tensor], T]


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
    find_unused_parameters
        Whether buckets are those of DistributedDataParallel with this option, see `unordered_map`.
    """

    n_logical_workers: int
    order: str = "ring"
    scaling: Scaling = "pre"
    bucket_cap_bytes: int | None = None
    find_unused_parameters: bool = False

    def __post_init__(self) -> None:
        """Check the choices."""
        order_named(self.order)
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
    hosted: Sequence[GradientSet],
    mapping: RankMapping,
    process: int,
    reduction: Reduction,
    room: SumRoom | None = None,
) -> Steps[GradientSum]:
    """Sum the sets of all ESTs; ``hosted`` are those of this process, in the order of the mapping.

    An all-reduce would add the partial sums of processes, whose bits depend on the mapping. In turn t, the
    t-th host of each chunk, in the order of its sum, sends the running sum to the next host; the last one
    sends the result to all. A chunk whose order changes host n times moves n + M - 1 times. The sum is in
    the vectors of ``room``, or in new ones.
    """
    like, n_processes = hosted[0].pieces, mapping.n_processes
    # Whether a parameter has a gradient is summed like one more chunk of the last bucket.
    flags = [each.used.to(like[-1][0].dtype) if like else each.used for each in hosted]
    own = {
        rank: [*gradients.pieces, [flag]]
        for rank, gradients, flag in zip(mapping.hosted[process], hosted, flags, strict=True)
    }
    if room is None:
        lengths = (sum(piece.numel() for piece in pieces) for pieces in like)
        vectors = [pieces[0].new_empty(length) for pieces, length in zip(like, lengths, strict=True)]
        room = SumRoom([*vectors, torch.empty_like(flags[0])])
    sums = room.sums
    # A device adds whole chunks: what it reads in host memory needs no blocks.
    block = _BLOCK if sums[0].device.type == "cpu" else sys.maxsize
    sizes = tuple((tuple(piece.numel() for piece in pieces), pieces[0].element_size()) for pieces in like)
    by_bucket = _hosted_chunks(sizes, flags[0].numel(), mapping, reduction.order, block)
    views = room.views(by_bucket)
    for turn in range(max((len(chunk.hosts) for chunks in by_bucket for chunk in chunks), default=0)):
        transfers = []
        for number, chunks in enumerate(by_bucket):
            of_chunks = zip(chunks, views[number], strict=True)
            left = [(chunk, view) for chunk, view in of_chunks if turn < len(chunk.hosts)]
            sent: list[list[Tensor]] = [[] for _ in range(n_processes)]
            received: list[list[Tensor]] = [[] for _ in range(n_processes)]
            for chunk, (running, blocks) in left:
                (host, ranks), is_last = chunk.hosts[turn], turn == len(chunk.hosts) - 1
                if host == process:
                    parts = [own[rank][chunk.vector] for rank in ranks]
                    scale = hosted[0].scale if chunk.vector < len(like) else 1.0
                    _add_in_order(blocks, chunk.blocks, parts, scale, is_first=turn == 0)
                for target in range(n_processes) if is_last else (chunk.hosts[turn + 1][0],):
                    if process != target and host == process:
                        sent[target].append(running)
                    elif process == target and host != process:
                        received[host].append(running)
            if left and n_processes > 1:
                transfers.append(Transfer(sent, received, room, number))
        if transfers:
            yield transfers
    if reduction.scaling == "post":
        for total in sums[:-1]:
            total.mul_(1.0 / reduction.n_logical_workers)
    return GradientSum(sums[:-1], sums[-1] != 0)


_BLOCK = 1 << 16  # elements; of a running sum that stays in the cache while all summands are added
_SHORT = 1 << 12  # elements; of pieces that are joined, because a call takes as long as to add so many


@dataclass(frozen=True, slots=True)
class _Block:
    """Part of a vector, and its places where that is in pieces: piece, and elements there (None for all)."""

    first: int
    last: int
    places: tuple[tuple[int, slice | None], ...]


@dataclass(frozen=True, slots=True)
class _HostedChunk:
    """Part of a vector, its blocks, and its hosts in the order of the sum, each with the ranks it adds."""

    vector: int
    first: int
    last: int
    blocks: tuple[_Block, ...]
    hosts: tuple[tuple[int, tuple[int, ...]], ...]


@functools.lru_cache(maxsize=64)
def _hosted_chunks(
    sizes: tuple[tuple[tuple[int, ...], int], ...], n_flags: int, mapping: RankMapping, order: str, block: int
) -> list[list[_HostedChunk]]:
    """Cut buckets, given by elements of pieces and bytes of one, into chunks; the last also has the flags."""
    host_of = {rank: number for number, ranks in enumerate(mapping.hosted) for rank in ranks}
    cut, n_ranks = order_named(order), mapping.n_logical_workers

    def hosts_of(ranks: Sequence[int]) -> tuple[tuple[int, tuple[int, ...]], ...]:
        return tuple((host, tuple(turn)) for host, turn in groupby(ranks, host_of.__getitem__))

    chunks = [
        [
            _HostedChunk(number, first, end, _blocks_of(lengths, first, end, block), hosts_of(ranks))
            for first, end, ranks in cut(sum(lengths), n_ranks, element_bytes)
        ]
        for number, (lengths, element_bytes) in enumerate(sizes)
    ]
    if chunks:
        hosts = chunks[-1][-1].hosts if chunks[-1] else hosts_of(range(n_ranks))
        blocks = _blocks_of((n_flags,), 0, n_flags, block)
        chunks[-1].append(_HostedChunk(len(sizes), 0, n_flags, blocks, hosts))
    return chunks


def _blocks_of(lengths: Sequence[int], first: int, last: int, size: int) -> tuple[_Block, ...]:
    """Cut a part of a vector in pieces into blocks of one long piece or of several short ones."""
    blocks: list[_Block] = []
    for number, stop in enumerate(accumulate(lengths)):
        start, at = stop - lengths[number], max(first, stop - lengths[number])
        while at < min(last, stop):
            end = min(last, stop, at + size)
            span = None if (at, end) == (start, stop) else slice(at - start, end - start)
            before = blocks[-1] if blocks else None
            if before and end - before.first <= min(size, _SHORT):
                blocks[-1] = _Block(before.first, end, (*before.places, (number, span)))
            else:
                blocks.append(_Block(at, end, ((number, span),)))
            at = end
    return tuple(blocks)


def _add_in_order(
    running: Sequence[Tensor],
    blocks: Sequence[_Block],
    parts: Sequence[list[Tensor]],
    scale: float,
    *,
    is_first: bool,
) -> None:
    """Add summands times a factor to a running sum, in their order; if they are the first, begin with them.

    ``running`` is the sum by block.
    """
    for total, block in zip(running, blocks, strict=True):
        divisor = _divisor(scale, total.dtype)
        for number, pieces in enumerate(parts):
            taken = [pieces[piece] if span is None else pieces[piece][span] for piece, span in block.places]
            summand = taken[0] if len(taken) == 1 else torch.cat(taken)
            if summand.device != total.device:
                summand = summand.to(total.device, non_blocking=True)
            if is_first and number == 0:
                torch.mul(summand, scale, out=total)
            elif scale == 1:
                total.add_(summand)
            elif divisor is not None:
                total.addcdiv_(summand, divisor)
            else:
                total.add_(summand * scale)


@functools.lru_cache(maxsize=64)
def _divisor(scale: float, dtype: torch.dtype) -> Tensor | None:
    """Return what to divide by instead of a multiplication by a power of two; None for other factors.

    The quotient has the bits of the product, and takes one operation with an addition.
    """
    is_power = math.frexp(scale)[0] == 0.5
    return torch.tensor(1 / scale, dtype=dtype, device="cpu") if is_power else None


def share(part: Tensor, lengths: list[int]) -> Steps[list[Tensor]]:
    """Send one vector to all processes, and return the vectors of all processes."""
    return [part] if len(lengths) == 1 else (yield Exchange([part] * len(lengths), lengths))


def over_group(steps: Steps[T], device: torch.device | None = None) -> T:
    """Carry out the steps of this process together with the other processes of the default group.

    Parameters
    ----------
    device
        Device on which the group takes the vectors of an `Exchange`; None to leave them where they are.
    """
    reply: list[Tensor] | None = None
    try:
        while True:
            request = next(steps) if reply is None else steps.send(reply)
            if isinstance(request, list):
                staged: list[tuple[Tensor, Tensor]] = []
                works = [_exchanged(each, staged) for each in request]
                for work in works:
                    work.wait()
                for piece, place in staged:
                    piece.copy_(place)
                reply = []
                continue
            if isinstance(request, Broadcast):
                # Each is a collective of the group, so all that do not send must receive.
                works = [
                    dist.broadcast(vector, src=sender, async_op=True)
                    for sender, vectors in enumerate(request.vectors)
                    for vector in vectors
                ]
                for work in works:
                    work.wait()
                reply = []
                continue
            home = request.parts[0].device
            sent = torch.cat(request.parts).to(home if device is None else device)
            received = sent.new_empty(sum(request.lengths))
            dist.all_to_all_single(received, sent, request.lengths, [part.numel() for part in request.parts])
            reply = list(torch.split(received.to(home), request.lengths))
    except StopIteration as end:
        result: T = end.value
        return result


def _exchanged(transfer: Transfer, staged: list[tuple[Tensor, Tensor]]) -> Any:
    """Begin a transfer with the group, whose pieces are joined; add the places of what has to be copied."""
    vectors, lengths = [], []
    for name, of_processes in (("sent", transfer.sent), ("received", transfer.received)):
        pieces = [piece for part in of_processes for piece in part]
        vector, places = transfer.room.joined(name, transfer.number, pieces)
        vectors.append(vector)
        lengths.append([sum(piece.numel() for piece in part) for part in of_processes])
        if name == "received":
            staged += places
        else:
            for piece, place in places:
                place.copy_(piece)
    return dist.all_to_all_single(vectors[1], vectors[0], lengths[1], lengths[0], async_op=True)


def over_links(steps: Steps[T], links: PeerLinks, places: Sequence[int], process: int) -> T:
    """Carry out the steps of a process together with others, over links that the end of a process releases.

    Parameters
    ----------
    links, places
        Links, and the number there of each process of the mapping. Vectors are on the CPU; only those of a
        `Broadcast` may be on a device, and are then copied from or to it.
    process
        Number of this process in the mapping.
    """
    reply: list[Tensor] | None = None
    try:
        while True:
            request = next(steps) if reply is None else steps.send(reply)
            copies: list[tuple[Tensor, Tensor]] = []
            pairs: list[tuple[list[list[Tensor]], list[list[Tensor]]]] = []
            if isinstance(request, list):
                reply, pairs = [], [(each.sent, each.received) for each in request]
            elif isinstance(request, Broadcast):
                reply = []
                for sender, (vectors, targets) in enumerate(
                    zip(request.vectors, request.targets, strict=True)
                ):
                    for vector in vectors:
                        on_host = vector.device.type == "cpu"
                        staged = vector if on_host else host_memory(vector, vector.shape)
                        if sender != process:
                            links.receive(places[sender], _bytes_of(staged))
                            copies += [] if on_host else [(vector, staged)]
                            continue
                        if not on_host:
                            staged.copy_(vector)
                        for target in targets:
                            links.send(places[target], _bytes_of(staged))
            else:
                like = request.parts[0]
                reply = [like.new_empty(length) for length in request.lengths]
                reply[process] = request.parts[process]
                pairs = [([[part] for part in request.parts], [[part] for part in reply])]
            for sent, received in pairs:
                for number, place in enumerate(places):
                    if number == process:
                        continue
                    for piece in sent[number]:
                        if piece.numel():
                            links.send(place, _bytes_of(piece))
                    for piece in received[number]:
                        if piece.numel():
                            links.receive(place, _bytes_of(piece))
            links.finish()
            for vector, staged in copies:
                vector.copy_(staged)
    except StopIteration as end:
        result: T = end.value
        return result


def _bytes_of(vector: Tensor) -> memoryview:
    """Return the memory of a vector without gaps."""
    return vector.detach().view(torch.uint8).numpy().data


def in_memory(processes: Sequence[Steps[T]]) -> list[T]:
    """Carry out the steps of all processes in lockstep, in this thread; return their results."""
    replies: list[list[Tensor]] | None = None
    results: list[T] = []
    while len(results) < len(processes):
        requests: list[Exchange | list[Transfer] | Broadcast] = []
        for number, steps in enumerate(processes):
            try:
                requests.append(next(steps) if replies is None else steps.send(replies[number]))
            except StopIteration as end:
                results.append(end.value)
        if requests and results:
            raise RuntimeError(f"processes disagree: {len(results)} of {len(processes)} have ended")
        exchanges = [request for request in requests if isinstance(request, Exchange)]
        transfers = [request for request in requests if isinstance(request, list)]
        broadcasts = [request for request in requests if isinstance(request, Broadcast)]
        if len(requests) not in (len(exchanges), len(transfers), len(broadcasts)):
            raise RuntimeError(f"processes disagree: {len(exchanges)} of {len(processes)} exchange vectors")
        replies = [[request.parts[number] for request in exchanges] for number in range(len(exchanges))]
        for reply, exchange in zip(replies, exchanges, strict=True):
            _check_lengths(reply, exchange.lengths)
        for of_bucket in zip(*transfers, strict=True):
            _transfer_in_memory(of_bucket)
        for sender, broadcast in enumerate(broadcasts):
            for target in broadcast.targets[sender]:
                received = broadcasts[target].vectors[sender]
                for vector, place in zip(broadcast.vectors[sender], received, strict=True):
                    place.copy_(vector)
        if transfers or broadcasts:
            replies = [[] for _ in requests]
    return results


def _transfer_in_memory(transfers: Sequence[Transfer]) -> None:
    """Copy what each of several processes sends to where the others receive it."""
    # All of it is read before anything is overwritten.
    sent = [[[piece.clone() for piece in part] for part in each.sent] for each in transfers]
    for target, transfer in enumerate(transfers):
        for source, places in enumerate(transfer.received):
            pieces = sent[source][target]
            _check_lengths(pieces, [place.numel() for place in places])
            for piece, place in zip(pieces, places, strict=True):
                place.copy_(piece)


def _check_lengths(parts: Sequence[Tensor], expected: Sequence[int]) -> None:
    if (sent := [part.numel() for part in parts]) != list(expected):
        raise RuntimeError(f"processes disagree: sent {sent}, expected {list(expected)} elements")


# --- The gradients of a model: taken EST by EST, summed, and put back ---


class GradientTaker:
    """Takes the gradients of one EST after the other out of a model, and puts back their sum.

    On a CPU the tensors that backward passes have made stay as they are until they are summed: to pack them
    into vectors would take longer than to add them from where they are. Gradients on a device are packed
    there, and copied to the host while the next EST computes.

    Parameters
    ----------
    buckets, scale
        Layout of the sums, and factor of the gradients.
    copies
        Copies to the host, where the sets of all ESTs are kept.
    keeps_sums
        Whether a sum may always overwrite the one before. False where user code may have kept that: new
        memory is then allocated if a tensor of user code still shares the old one.
    accumulates
        Whether a turn may have several backward passes, each in `passing`; an `InputError` is raised if
        gradients change in a turn in any other way.
    """

    def __init__(
        self,
        buckets: Buckets,
        scale: float,
        copies: HostCopies,
        *,
        keeps_sums: bool,
        accumulates: bool = False,
    ) -> None:
        self._buckets, self._scale, self._copies, self._keeps_sums = buckets, scale, copies, keeps_sums
        # A device has one set, which is copied to the host before the next EST needs it.
        # Whether parameters have a gradient stands behind the last bucket, so that both travel as one vector.
        self._packed = buckets.empty(len(buckets.parameters)) if copies.is_needed else []
        self._views = buckets.views(self._packed[:-1]) if copies.is_needed else {}
        self._copied: dict[int, list[Tensor]] = {}
        self._room = SumRoom([])
        self._allocate_sums()
        self._is_listening, self._is_passing = False, False
        self._touched: list[str] = []
        self._accumulated: dict[str, tuple[Tensor, int]] = {}  # gradients with their versions
        self._accumulates, self._handles = accumulates, dict[str, RemovableHandle]()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take gradients of ESTs one after the other, and notice backward passes where they accumulate."""
        if self._accumulates:
            for name, parameter in self._buckets.parameters.items():
                # Not once and for all, because user code may freeze a parameter for a while.
                if parameter.requires_grad and name not in self._handles:
                    self._handles[name] = self._listen(name, parameter)
        self._is_listening = True
        try:
            yield
        finally:
            self._is_listening = False

    def close(self) -> None:
        """Remove the hooks of the parameters."""
        for handle in self._handles.values():
            handle.remove()

    def _listen(self, name: str, parameter: Parameter) -> RemovableHandle:
        def notice(_: Tensor) -> None:
            if self._is_listening and not self._is_passing:
                raise InputError(
                    f"a backward pass that the loop does not know adds to the gradient of {name}; expected "
                    "mini_batch.backward(loss) instead of loss.backward()"
                )
            self._touched.append(name)

        handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(notice)  # type: ignore[no-untyped-call]
        return handle

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Let a backward pass add to the gradients of the turn."""
        self._check_unchanged()
        self._touched.clear()
        self._is_passing = True
        try:
            yield
        finally:
            self._is_passing = False
        # Of all, not only those that were touched: gradients of parameters that were joined for a product are
        # parts of one tensor, and an addition to one of them counts as a change of the others.
        for name in dict.fromkeys([*self._accumulated, *self._touched]):
            gradient = self._buckets.parameters[name].grad
            self._accumulated.pop(name, None)
            if gradient is not None:
                self._accumulated[name] = gradient, gradient._version

    def _check_unchanged(self) -> None:
        """Reject gradients that anything but a backward pass has changed."""
        for name, (gradient, version) in self._accumulated.items():
            if self._buckets.parameters[name].grad is not gradient or gradient._version != version:
                raise InputError(
                    f"the gradient of {name} was changed in the turn of a logical worker, after its backward "
                    "pass; expected changes of the sum, between mini_batch.sum and mini_batch.step"
                )

    def take(self, number: int) -> GradientSet:
        """Return the gradients of an EST, by its number in the process; none is left in the model."""
        self._check_unchanged()
        self._accumulated.clear()
        if number == 0 and not self._keeps_sums and _n_sharing(self._sums) != self._n_sharing:
            self._allocate_sums()
        if not self._copies.is_needed:
            return self._buckets.take(self._scale)
        self._copies.before_reuse()
        self._packed[-1].copy_(self._buckets.pack(self._views, self._scale))
        copied = self._copied[number] = self._copies.start(self._packed, self._copied.get(number, ()))
        return GradientSet([[vector] for vector in copied[:-1]], copied[-1])

    def _allocate_sums(self) -> None:
        """Allocate memory for the sum; the old one belongs to whoever kept a part of it."""
        n_used, on_host = len(self._buckets.parameters), self._copies.sums_on_host
        self._sums = self._buckets.empty(n_used)
        if not on_host:
            self._room.sums = self._sums
        elif not self._room.sums:
            self._room.sums = self._buckets.empty(n_used, on_host=True)
        self._sum_views = self._buckets.views(self._sums[:-1])
        self._n_sharing = _n_sharing(self._sums)

    def sum(
        self, hosted: Sequence[GradientSet], mapping: RankMapping, process: int, reduction: Reduction
    ) -> Steps[None]:
        """Make the sum over all ESTs the gradients of the model until the next sum; see `reduce_sets`."""
        self._check_kept(hosted)
        total = yield from reduce_sets(hosted, mapping, process, reduction, self._room)
        self._n_sharing = _n_sharing(self._sums)  # nobody else has a part of this sum yet
        if self._copies.sums_on_host:
            # The next sum comes after `synchronize`, so it does not overwrite what is still copied.
            for vector, summed in zip(self._sums[:-1], total.buckets, strict=True):
                vector.copy_(summed, non_blocking=True)
        # Tensors of their own, so that those which user code keeps are counted.
        views = {name: view.detach() for name, view in self._sum_views.items()}
        self._buckets.bind(self._sum_views if self._keeps_sums else views, total.used)

    def _check_kept(self, hosted: Sequence[GradientSet]) -> None:
        """Reject gradients that user code has kept, and changed since the turn of their EST."""
        names = [name for names in self._buckets.bucket_map for name in names]
        for each in hosted:
            pieces = [piece for vectors in each.pieces for piece in vectors]
            # Copies have no versions.
            for name, piece, version in zip(names, pieces, each.versions, strict=False):
                if piece._version != version:
                    raise InputError(
                        f"a gradient of {name} was changed after the turn of its logical worker, by code "
                        "that keeps it; expected that code to keep a copy"
                    )


def _n_sharing(vectors: Sequence[Tensor]) -> list[int]:
    """Count the tensors that share the memory of each vector."""
    count: Any = torch._C._storage_Use_Count  # there is no public name for it
    return [count(vector.untyped_storage()._cdata) for vector in vectors]
