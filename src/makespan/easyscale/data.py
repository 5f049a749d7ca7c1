"""Data loading of ESTs: shards, batches, the forward pass on a batch, and loader processes.

The bits of a batch are those of a stock data loader with W processes per logical worker: batch ``s`` of an
epoch is made with the random states of loader ``s mod W``. Any process may make it, because the states are
sent along with the order. A saved state holds the states from before a batch that was made ahead and is not
used yet. So neither the size of the pool, nor its prefetch, nor the mapping influences a batch.
"""

import copy
import ctypes
import inspect
import io
import logging
import mmap
import pickle
import signal
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from os import getpid
from types import MappingProxyType, TracebackType
from typing import Any, TypeAlias

import torch
import torch.utils.data
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import DistributedSampler, default_collate

from makespan.cleanup import end_with_parent
from makespan.easyscale.context import virtual_rank
from makespan.easyscale.randomness import (
    capture_random_states,
    preserved_random_states,
    private_generators,
    restore_random_states,
    seed_everything,
    seed_stream,
)
from makespan.easyscale.user_state import (
    ABSENT,
    UserState,
    changed_values,
    is_generator,
    is_watched,
    same_value,
    unseen_changes,
)
from makespan.errors import CheckpointError, InputError, TrainingError, WorkerError, short_path

_log = logging.getLogger(__name__)


# --- Shards: the samples of each logical worker, and its position in them ---


@dataclass(frozen=True, slots=True)
class LoaderState:
    """Position of an EST in its data, and random states of its loaders; the same in every process.

    Parameters
    ----------
    epoch, batch
        The next batch.
    streams
        Random states of each of the W loaders before its next batch; None for a loader that has not made a
        batch in this epoch.
    python
        Python values that loaders see in this epoch, if training code has changed them: see `LoaderPool`.
    n_samples
        Length that the data set had when this epoch began; None before its first batch.
    """

    epoch: int
    batch: int
    streams: tuple[bytes | None, ...]
    python: Mapping[str, Any] = field(default_factory=dict)
    n_samples: int | None = None

    def values(self) -> dict[str, Any]:
        """Return the state as plain values and uint8 tensors, for a checkpoint."""
        streams = [
            None if states is None else torch.frombuffer(bytearray(states), dtype=torch.uint8)
            for states in self.streams
        ]
        plain: dict[str, Any] = {"epoch": self.epoch, "batch": self.batch, "streams": streams}
        plain |= {} if self.n_samples is None else {"n_samples": self.n_samples}
        return plain | ({"python": dict(self.python)} if self.python else {})

    @staticmethod
    def from_values(values: Mapping[str, Any]) -> "LoaderState":
        """Rebuild the state from its `values`."""
        streams = (None if states is None else states.numpy().tobytes() for states in values["streams"])
        python = values.get("python", {})
        epoch, batch = int(values["epoch"]), int(values["batch"])
        return LoaderState(epoch, batch, tuple(streams), python, values.get("n_samples"))


@dataclass(frozen=True, slots=True)
class Shards:
    """Assignment of samples to logical workers; part of the job, because it decides the bits.

    Parameters
    ----------
    n_logical_workers
        N; the samples of an epoch are dealt as `torch.utils.data.DistributedSampler` does.
    micro_batch_size
        Samples per batch of each logical worker.
    seed
        Seed of the order of samples, together with the epoch, and of the loaders, together with virtual rank
        and epoch.
    n_loaders
        W, loaders of each logical worker; with 0, samples are read in the training process, with the random
        states of the logical worker.
    shuffle
        Whether samples are dealt in a new random order each epoch.
    drop_last_samples
        Whether samples that cannot be dealt evenly are dropped; otherwise the first ones are dealt again.
    drop_last_batch
        Whether a last batch of less than full size is dropped.

    Raises
    ------
    InputError
        If a number is out of range.
    """

    n_logical_workers: int
    micro_batch_size: int
    seed: int
    n_loaders: int = 2
    shuffle: bool = True
    drop_last_samples: bool = False
    drop_last_batch: bool = False

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name, least in (("n_logical_workers", 1), ("micro_batch_size", 1), ("n_loaders", 0), ("seed", 0)):
            if getattr(self, name) < least:
                raise InputError(f"{name} is {getattr(self, name)}; expected a whole number >= {least}")

    def start(self) -> LoaderState:
        """Return the state of an EST before its first batch."""
        return LoaderState(0, 0, (None,) * self.n_loaders)

    def batches(self, dataset: Any, rank: int, epoch: int) -> list[tuple[int, ...]]:
        """Return the samples of each batch of a logical worker in an epoch.

        Parameters
        ----------
        dataset
            The data set; only its length is used.
        rank
            Virtual rank.
        epoch
            Epoch, from 0.

        Returns
        -------
        list of tuple of int
            Indices of samples; as many batches, of the same sizes, for every rank.

        Raises
        ------
        InputError
            If the data set has no length, or too few samples for a single batch.
        """
        if not hasattr(dataset, "__len__"):
            kind = type(dataset).__name__
            raise InputError(f"data set {kind} has no length; expected a map-style data set")
        size, per_batch, n_workers = len(dataset), self.micro_batch_size, self.n_logical_workers
        least = (n_workers if self.drop_last_samples else 1) * (per_batch if self.drop_last_batch else 1)
        if self.drop_last_batch and not self.drop_last_samples:
            # Samples per logical worker are rounded up, so these fill one batch.
            least = n_workers * (per_batch - 1) + 1
        if size < least:
            raise InputError(
                f"data set has {size} samples; expected at least {least}, for one batch of {per_batch} to "
                f"each of {n_workers} logical workers"
            )
        sampler: DistributedSampler[Any] = DistributedSampler(
            dataset, n_workers, rank, self.shuffle, self.seed, drop_last=self.drop_last_samples
        )
        sampler.set_epoch(epoch)
        dealt = list(sampler)
        end = len(dealt) - len(dealt) % per_batch if self.drop_last_batch else len(dealt)
        return [tuple(dealt[first : first + per_batch]) for first in range(0, end, per_batch)]


# --- Making a batch: random states in, samples, random states out ---

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True, slots=True)
class Order:
    """Order for one batch; ``before`` are the random states to start from, None at the start of an epoch."""

    seed: int
    n_logical_workers: int
    rank: int
    epoch: int
    batch: int
    stream: int
    indices: tuple[int, ...]
    n_loaders: int = 1
    before: bytes | None = None

    def __str__(self) -> str:
        """Return the name of the batch, for messages."""
        return f"batch {self.batch} of epoch {self.epoch} for logical worker {self.rank}"


@dataclass(frozen=True, slots=True)
class Made:
    """A batch, the random states after it, and the Python values that changed while it was made.

    ``changed`` maps the name of a value to True if it is a random generator.
    """

    batch: Any
    after: bytes
    changed: Mapping[str, bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Failed:
    """Traceback of an error that the code of the data set raised."""

    text: str


def samples_of(dataset: Any, indices: Sequence[int]) -> list[Any]:
    """Read samples as a stock data loader does: all at once if the data set has ``__getitems__``."""
    if getattr(dataset, "__getitems__", None):
        return list(dataset.__getitems__(list(indices)))
    return [dataset[index] for index in indices]


def make(dataset: Any, collate: Collate, order: Order) -> Made | Failed:
    """Make a batch in this process; this changes its global random states."""
    try:
        if order.before is None:
            seed_stream(order.seed, order.rank, order.epoch, order.stream)
        else:
            restore_random_states(order.before)
        with virtual_rank(order.rank, order.n_logical_workers), _worker_info(order, dataset):
            batch = collate(samples_of(dataset, order.indices))
        return Made(batch, capture_random_states())
    except Exception:  # noqa: BLE001 - user code; the error is raised where the batch is used
        return Failed(traceback.format_exc())


@contextmanager
def _worker_info(order: Order, dataset: Any) -> Iterator[None]:
    """Make ``get_worker_info`` describe the loader process that makes this batch in stock training."""
    state: Any = torch.utils.data._utils.worker
    before = state._worker_info
    state._worker_info = state.WorkerInfo(
        id=order.stream, num_workers=order.n_loaders, seed=torch.initial_seed(), dataset=dataset
    )
    try:
        yield
    finally:
        state._worker_info = before


class _Pickler(pickle.Pickler):
    """Pickles tensors as arrays, because shared memory would be lost with a killed process."""

    def reducer_override(self, obj: Any) -> Any:
        """Reduce a plain CPU tensor to an array, other objects as usual."""
        if type(obj) is Tensor and obj.device.type == "cpu" and not obj.requires_grad:
            with suppress(TypeError):  # a dtype that NumPy does not know
                return torch.from_numpy, (obj.numpy(),)
        return NotImplemented


def _packed(value: Any) -> bytes:
    written = io.BytesIO()
    _Pickler(written, pickle.HIGHEST_PROTOCOL).dump(value)
    return written.getvalue()


def read_answer(written: bytes) -> Made | Failed:
    """Read the answer of a loader process, which this process has started."""
    answer: Made | Failed = pickle.loads(written)
    return answer


def serve(
    connection: Connection,
    others: Sequence[Connection],
    dataset: Any,
    collate: Collate,
    parent: int,
    user_state: UserState | None = None,
) -> None:
    """Make batches until the training process closes the connection or exits.

    With each order come the Python values that this process is to have; None if they are as before.
    For the first batches, and at powers of two, the values that user code keeps in Python are compared before
    and after.
    """
    # A fork inherits the other ends of the connections, which would hide the exit of its parent, and signal
    # handlers of the training process.
    for other in others:
        other.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent(parent)
    torch.set_num_threads(1)
    n_made, built = 0, dict[str, Any]()  # values before any was given
    with suppress(EOFError, OSError):
        while True:
            (order, values), watch = pickle.loads(connection.recv_bytes()), None
            if user_state is not None and values is not None:
                built |= user_state.take(values.keys() - built.keys())
                user_state.give(built | values)
            if user_state is not None and is_watched(n_made):
                watch = user_state.snapshot
            n_made += 1
            before = {} if watch is None else watch()
            result = make(dataset, collate, order)
            if watch is not None and isinstance(result, Made):
                changed = changed_values(before, watch())
                result = replace(
                    result, changed={name: is_generator(value) for name, value in changed.items()}
                )
            connection.send_bytes(_packed(result))


# --- Forward pass on a batch ---

_PAIR = 2


def loss_of(
    model: nn.Module, loss: Callable[[Any, Any], Any], batch: Any, device: torch.device
) -> tuple[Tensor, str]:
    """Run the forward pass of a batch, and return its loss.

    A batch that is a pair consists of inputs and targets. Any other batch is passed whole to the model and,
    as the targets, to the loss. A mapping whose keys name arguments of the model is unpacked into them.

    Returns
    -------
    tuple
        The loss, and the unused part of the value that the loss function returned (empty for none).

    Raises
    ------
    makespan.errors.InputError
        The model does not accept such batches, or the loss returned a value that cannot be trained.
    """
    is_pair = isinstance(batch, list | tuple) and len(batch) == _PAIR
    inputs, targets = batch if is_pair else (batch, batch)
    inputs = to_device(inputs, device)
    targets = to_device(targets, device) if is_pair else inputs
    try:
        spread = isinstance(inputs, Mapping) and _accepts_keys(model, inputs)
        outputs = model(**inputs) if spread else model(inputs)
    except (TypeError, KeyError, AttributeError, IndexError) as error:
        if is_pair and not isinstance(inputs, Mapping):
            raise
        problem = f"model {type(model).__name__} does not accept a batch that is {_described(batch)}"
        expected = (
            "a pair of inputs and targets, which collate can make; or a model whose arguments have the "
            "names of the keys, or that accepts the batch as it is"
        )
        frame = traceback.extract_tb(error.__traceback__)[-1]
        lines = str(error).splitlines()
        cause = f"{type(error).__name__}: {lines[0][:200] if lines else ''}"
        cause = f"{cause}, at {short_path(frame.filename)}, line {frame.lineno}"
        raise InputError(f"{problem} ({cause}); expected {expected}") from error
    returned = loss(outputs, targets)
    expected = "a scalar tensor with a gradient, or a tuple with it first, or a mapping with the key 'loss'"
    value, unused = returned, ""
    if isinstance(returned, Mapping) and "loss" in returned:
        value, unused = returned["loss"], ", ".join(str(key) for key in returned if key != "loss")
    elif isinstance(returned, list | tuple) and returned:
        value = returned[0]
        unused = f"{len(returned) - 1} further value(s)" if len(returned) > 1 else ""
    if not isinstance(value, Tensor):
        raise InputError(f"loss returned a {_described(returned)}; expected {expected}")
    if value.numel() != 1:
        raise InputError(f"loss returned a tensor of shape {tuple(value.shape)}; expected {expected}")
    if not value.requires_grad:
        raise InputError(f"loss returned a tensor that requires no gradient; expected {expected}")
    return value.reshape(()) if value.ndim else value, unused


def _accepts_keys(model: nn.Module, inputs: Mapping[Any, Any]) -> bool:
    """Return True if the keys of a mapping name arguments of the model, and it has more than one argument."""
    if not all(isinstance(key, str) for key in inputs):
        return False
    try:
        signature = inspect.signature(model.forward)
        signature.bind(**inputs)
    except (TypeError, ValueError):
        return False
    named = [
        parameter.name
        for parameter in signature.parameters.values()
        if parameter.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    ]
    return len(named) > 1 and set(inputs) <= set(named)


def _described(value: Any) -> str:
    """Describe a value in a few words, for messages."""
    if isinstance(value, Mapping):
        return f"{type(value).__name__} with {', '.join(map(repr, list(value)[:6]))}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__} of {len(value)}"
    return type(value).__name__


def to_device(values: Any, device: torch.device) -> Any:
    """Move the tensors of a batch to a device; the types of all containers are kept."""
    if type(values) is Tensor:
        return values.to(device)

    def leaf(value: Any) -> Any:
        if isinstance(value, Tensor) or callable(getattr(value, "to", None)):
            return value.to(device)
        if isinstance(value, MutableMapping):  # of a type that tree_map does not enter
            moved = copy.copy(value)
            for key in value:
                moved[key] = to_device(value[key], device)
            return moved
        return value

    return tree_map(leaf, values)


# --- Streams: iterables with a state, one for each EST ---


@dataclass(frozen=True, slots=True)
class StreamState:
    """Position of an EST in its stream.

    Parameters
    ----------
    epoch
        Epochs that are done.
    is_begun
        Whether a batch of this epoch has been read.
    state
        ``state_dict`` of the stream; None if it has never been iterated.
    """

    epoch: int
    is_begun: bool
    state: Any

    def values(self) -> dict[str, Any]:
        """Return the position as tensors and plain values, as far as the ``state_dict`` consists of these."""
        return {"epoch": self.epoch, "is_begun": self.is_begun, "state": self.state}


class Streams:
    """Reads the batches of all ESTs that a process hosts, each from a stream of its own.

    A stream is an iterable of batches with ``state_dict`` and ``load_state_dict``, as torchdata defines them.
    At its end the next epoch of this EST begins: ``set_epoch`` is called if there is one, then the stream is
    iterated anew. Batches are read in the turn of their EST.

    A stream is asked for its state only after it was iterated in this process: a ``StatefulDataLoader``
    makes its iterator for the answer, with a seed from the random states of that moment.

    Parameters
    ----------
    make_stream
        Function of a virtual rank and N that returns a stream.
    ranks, n_logical_workers
        Virtual ranks of the hosted ESTs, and N.
    positions
        Values of `StreamState` by virtual rank; None at the start of a job.
    seed
        Seed of the random states in which streams are made, the same for all ESTs.

    Raises
    ------
    InputError
        A stream cannot be iterated, or has no state.
    """

    def __init__(
        self,
        make_stream: Callable[[int, int], Any],
        ranks: Sequence[int],
        n_logical_workers: int,
        positions: Mapping[int, Mapping[str, Any]] | None,
        seed: int,
    ) -> None:
        self._n, self.notices = n_logical_workers, set[str]()
        self._streams: dict[int, Any] = {}
        self._iterators: dict[int, Iterator[Any]] = {}
        self._epochs = dict.fromkeys(ranks, 0)
        self._begun = dict.fromkeys(ranks, False)
        self._loaded: dict[int, Any] = dict.fromkeys(ranks)  # states of streams that were not iterated since
        self._lazy = set[int]()  # ranks whose resumed iterator has run none of its code
        for rank in ranks:
            with preserved_random_states(), virtual_rank(rank, n_logical_workers):
                seed_everything(seed)
                stream = self._streams[rank] = make_stream(rank, n_logical_workers)
                missing = [
                    name
                    for name in ("__iter__", "state_dict", "load_state_dict")
                    if not hasattr(stream, name)
                ]
                if missing:
                    raise InputError(
                        f"data returned {_described(stream)} for logical worker {rank}, which has no "
                        f"{missing[0]}; expected an iterable with state_dict and load_state_dict, so that it "
                        "can resume"
                    )
                if positions is not None:
                    self._resume(rank, positions[rank])

    def _resume(self, rank: int, position: Mapping[str, Any]) -> None:
        """Resume a stream; what the new iterator draws was drawn before, so it leaves no trace."""
        self._epochs[rank], self._begun[rank] = position["epoch"], position["is_begun"]
        stream, state = self._streams[rank], position["state"]
        if state is not None:
            self._loaded[rank] = copy.deepcopy(state)
            stream.load_state_dict(state)
        if self._begun[rank]:
            self._iterate(rank)
            if inspect.isgeneratorfunction(type(stream).__iter__):
                self._lazy.add(rank)

    def _iterate(self, rank: int) -> None:
        self._iterators[rank] = iter(self._streams[rank])
        self._loaded.pop(rank, None)

    def next(self, rank: int) -> Any:
        """Return the next batch of an EST; an `InputError` is raised if its stream has none."""
        for _ in range(2):
            if rank not in self._iterators:
                stream = self._streams[rank]
                if hasattr(stream, "set_epoch"):
                    stream.set_epoch(self._epochs[rank])
                self._iterate(rank)
            is_lazy = rank in self._lazy
            before = capture_random_states() if is_lazy else b""
            try:
                batch = next(self._iterators[rank])
                if is_lazy:
                    self._check_lazy(rank, before)
            except StopIteration:
                self._lazy.discard(rank)
                del self._iterators[rank]
                self._epochs[rank], self._begun[rank] = self._epochs[rank] + 1, False
            else:
                self._begun[rank] = True
                return batch
        raise InputError(
            f"data of logical worker {rank} ends without a batch; expected one per epoch at least"
        )

    def _check_lazy(self, rank: int, before: bytes) -> None:
        """Add a notice if the first batch of a resumed generator draws: its first lines may do so."""
        self._lazy.discard(rank)
        if capture_random_states() != before:
            kind = type(self._streams[rank]).__name__
            self.notices.add(
                f"the stream {kind} draws in its first batch after a restart, and its __iter__ is a "
                "generator function, whose first lines run again there; if these draw, as a DataLoader does "
                "where it begins, bits differ; expected an __iter__ that begins it and returns an iterator"
            )

    def state(self, rank: int) -> StreamState:
        """Return the position of an EST, without a trace in the random states."""
        if rank in self._loaded:
            state = copy.deepcopy(self._loaded[rank])
        else:
            with preserved_random_states(), virtual_rank(rank, self._n):
                state = copy.deepcopy(self._streams[rank].state_dict())
        return StreamState(self._epochs[rank], self._begun[rank], state)

    def close(self) -> None:
        """Drop the streams."""
        self._iterators.clear()
        self._streams.clear()


# --- Pool of loader processes, shared by the ESTs of a process ---
#
# A request for a batch is pending, in work at one loader process, or answered. A stream (the loader of one
# EST in one epoch) has at most one request in work, because each batch starts from the random states after
# the previous one. When a loader process dies, its request becomes pending again with the same states, so the
# batch has the same bits.

_ATTEMPTS = 3  # processes that may be killed while they make the same batch
_Key: TypeAlias = tuple[int, int, int]


@dataclass(slots=True, eq=False)
class _Request:
    """A requested batch that is not used yet; ``is_dropped`` if it is no longer wanted."""

    order: Order
    answer: Made | Failed | None = None
    n_deaths: int = 0
    is_dropped: bool = False

    @property
    def key(self) -> _Key:
        return self.order.rank, self.order.epoch, self.order.stream


@dataclass(slots=True, eq=False)
class _Stream:
    """Random states of a loader after its last batch; ``is_busy`` while the next batch is in work."""

    state: bytes | None
    is_busy: bool = False


@dataclass(slots=True, eq=False)
class _Cursor:
    """Next batch of an EST; ``next_request`` has epoch and batch of the next batch to request.

    ``python`` has the changed Python values that loaders see in the epoch, ``n_samples`` the lengths of the
    data set that batches of ``epochs`` follow from.
    """

    epoch: int
    batch: int
    next_request: tuple[int, int]
    python: Mapping[str, Any]
    ahead: deque[_Request] = field(default_factory=deque)
    epochs: dict[int, list[tuple[int, ...]]] = field(default_factory=dict)
    n_samples: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _LoaderProcess:
    """A process of the pool, the request in work, and the Python values that it was given last."""

    handle: BaseProcess
    connection: Connection
    request: _Request | None = None
    python: Mapping[str, Any] | None = None


@contextmanager
def kept_from_forks(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Leave the memory of tensors on the host out of processes that are forked in the block, on Linux.

    This process would otherwise have to copy each page that it writes for as long as the other one is there,
    which takes five times as long as the write itself. A forked process must not read these tensors.
    """
    regions = list[tuple[int, int]]()
    for tensor in tensors if hasattr(mmap, "MADV_DONTFORK") else ():
        storage = tensor.untyped_storage()
        if storage.device.type == "cpu":
            begin = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
            end = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
            regions += [(begin, end - begin)] if end > begin else []
    # An error leaves pages in the fork, as they were.
    for begin, size in regions:
        _madvise(begin, size, mmap.MADV_DONTFORK)
    try:
        yield
    finally:
        for begin, size in regions:
            _madvise(begin, size, mmap.MADV_DOFORK)


def _madvise(begin: int, size: int, advice: int) -> None:
    ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), ctypes.c_int(advice))


class LoaderPool:
    """Loads the batches of all ESTs that a process hosts.

    Code of the data set sees the Python values that training code changes (an attribute of the data set, a
    variable of a module) as in stock training, whose loaders start anew with each epoch: those from the start
    of the epoch. The processes of the pool stay, and are sent the values that have changed since they began.
    So the pool is made before the state of a checkpoint is loaded, which holds these values, too.

    Parameters
    ----------
    dataset
        Map-style data set; its samples may draw from the global random states of Python, NumPy and torch.
    shards
        Assignment of samples.
    states
        State of each hosted EST, by virtual rank, in the order in which they use their batches; empty if
        `move` is called with them later.
    n_processes
        Processes of the pool; with 0, batches are made when they are used, with the same bits.
    prefetch
        Batches that are made ahead for each EST.
    collate
        Function that joins samples into a batch.
    user_state
        Finder of the Python values that user code changes; None to ignore them.
    private
        Returns tensors that only this process reads, see `kept_from_forks`.

    Raises
    ------
    InputError
        If a number is out of range, the data set cannot be dealt, or it has its own random generators.
    CheckpointError
        If a state has another number of loaders, or is past the end of an epoch.
    """

    def __init__(
        self,
        dataset: Any,
        shards: Shards,
        states: Mapping[int, LoaderState] = MappingProxyType({}),
        *,
        n_processes: int = 2,
        prefetch: int = 2,
        collate: Collate = default_collate,
        user_state: UserState | None = None,
        private: Callable[[], Iterable[Tensor]] = tuple,
    ) -> None:
        if n_processes < 0 or prefetch < 1:
            raise InputError(
                f"n_processes {n_processes} and prefetch {prefetch}; expected whole numbers >= 0 and >= 1"
            )
        if shards.n_loaders and (generators := private_generators(dataset)):
            raise InputError(
                f"data set {type(dataset).__name__} draws from {', '.join(generators)}; expected draws "
                "from the global random states of Python, NumPy and torch, which are sent between processes"
            )
        self._dataset, self._shards, self._collate = dataset, shards, collate
        self._user_state, self.notices = user_state, set[str]()
        self._streams: dict[_Key, _Stream] = {}
        self._cursors: dict[int, _Cursor] = {}
        self._pending: deque[_Request] = deque()
        self._processes: list[_LoaderProcess] = []
        self._n_processes, self._prefetch, self._private = n_processes, prefetch, private
        self._looked: int | None = None  # the epoch at whose start changed values were looked for
        self._changed = set[str]()  # names of values that training code has changed
        self._built = {} if user_state is None or not shards.n_loaders else user_state.snapshot()
        self._begun = self._built  # values when the processes began
        self.move(states)
        self._start_all()

    def move(self, states: Mapping[int, LoaderState]) -> None:
        """Load the batches of other ESTs from now on, or of the same ones from other positions.

        Processes of the pool stay: a fork of a process that trains makes it copy what it writes afterwards.

        Parameters
        ----------
        states
            State of each hosted EST, by virtual rank, in the order in which they use their batches.
        """
        self._streams, self._cursors, self._pending, self._looked = {}, {}, deque(), None
        for process in self._processes:
            if process.request is not None:
                process.request.is_dropped = True
        for rank, state in states.items():
            self._cursors[rank] = self._cursor(rank, state)
            self._changed |= set(state.python)
        self._request_ahead(self._cursors)

    def __enter__(self) -> "LoaderPool":
        """Return the pool."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the pool."""
        self.close()

    @property
    def process_ids(self) -> list[int]:
        """Ids of the current processes of the pool."""
        return [process.handle.pid for process in self._processes if process.handle.pid is not None]

    def next(self, rank: int) -> Any:
        """Return the next batch of an EST; epochs follow one another.

        Raises
        ------
        TrainingError
            If the code of the data set raised; the message has its traceback.
        WorkerError
            If several processes in a row were killed while they made this batch.
        """
        cursor = self._cursors[rank]
        if not self._shards.n_loaders:
            with virtual_rank(rank, self._shards.n_logical_workers):
                batch = self._collate(
                    samples_of(self._dataset, self._batches(rank, cursor.epoch)[cursor.batch])
                )
        else:
            if cursor.batch == 0:
                self._begin_epoch(rank)
            batch = self._wait_for(cursor.ahead[0])
            cursor.ahead.popleft()  # only now: after an error, the state is that from before the batch
        self._advance(rank)
        if self._shards.n_loaders:
            self._request_next(rank)
            self._dispatch()
        return batch

    def state(self, rank: int) -> LoaderState:
        """Return the state of an EST, as if no batch had been made ahead."""
        cursor = self._cursors[rank]
        keys = [(rank, cursor.epoch, stream) for stream in range(self._shards.n_loaders)]
        streams = tuple(self._before_next(cursor, key) for key in keys)
        python, n_samples = (cursor.python, cursor.n_samples[cursor.epoch]) if cursor.batch else ({}, None)
        return LoaderState(cursor.epoch, cursor.batch, streams, python, n_samples)

    def close(self) -> None:
        """Kill all processes, even busy ones."""
        for process in self._processes:
            _end(process)
        self._processes.clear()

    # --- positions of the ESTs ---

    def _cursor(self, rank: int, state: LoaderState) -> _Cursor:
        cursor = _Cursor(state.epoch, state.batch, (state.epoch, state.batch), state.python)
        batches = self._deal(cursor, rank, state.epoch, state.n_samples)
        if len(state.streams) != self._shards.n_loaders:
            raise CheckpointError(
                f"the state of logical worker {rank} has {len(state.streams)} loaders; "
                f"expected {self._shards.n_loaders}"
            )
        if not 0 <= state.batch < len(batches):
            raise CheckpointError(
                f"the state of logical worker {rank} is at batch {state.batch} of an epoch; "
                f"expected 0 to {len(batches) - 1}"
            )
        for stream, saved in enumerate(state.streams):
            self._streams[rank, state.epoch, stream] = _Stream(saved)
        return cursor

    def _before_next(self, cursor: _Cursor, key: _Key) -> bytes | None:
        """Return the random states of a loader before the first of its batches that is not used yet."""
        for request in cursor.ahead:
            if request.key == key and isinstance(request.answer, Made):
                return request.order.before  # the stream already has the states after this batch
        return self._streams[key].state if key in self._streams else None

    def _batches(self, rank: int, epoch: int) -> list[tuple[int, ...]]:
        cursor = self._cursors[rank]
        return cursor.epochs[epoch] if epoch in cursor.epochs else self._deal(cursor, rank, epoch)

    def _deal(
        self, cursor: _Cursor, rank: int, epoch: int, n_samples: int | None = None
    ) -> list[tuple[int, ...]]:
        """Deal out the samples of an epoch; by default as many as the data set has now."""
        dealt = self._dataset if n_samples is None else range(n_samples)
        cursor.epochs[epoch] = self._shards.batches(dealt, rank, epoch)
        cursor.n_samples[epoch] = len(dealt)
        return cursor.epochs[epoch]

    def _advance(self, rank: int) -> None:
        """Advance to the next batch; at the end of an epoch drop its streams and batches."""
        cursor = self._cursors[rank]
        cursor.batch += 1
        if cursor.batch == len(self._batches(rank, cursor.epoch)):
            for stream in range(self._shards.n_loaders):
                self._streams.pop((rank, cursor.epoch, stream), None)
            del cursor.epochs[cursor.epoch], cursor.n_samples[cursor.epoch]
            cursor.epoch, cursor.batch = cursor.epoch + 1, 0

    def _begin_epoch(self, rank: int) -> None:
        """Look for Python values that have changed; make batches again that were made ahead with others.

        Samples are dealt out again if the data set has another length.
        """
        user, cursor = self._user_state, self._cursors[rank]
        if cursor.n_samples[cursor.epoch] != len(self._dataset):
            self._drop_ahead(cursor)
            cursor.epochs.clear()
            self._request_ahead([rank])
        if user is None:
            return
        if self._looked != cursor.epoch:
            now, self._looked = user.snapshot(), cursor.epoch
            self._changed |= changed_values(self._built, now).keys()
            if unseen_changes(self._begun, now):  # objects that cannot be sent
                self._begun = now
                for each in self._cursors.values():
                    self._drop_ahead(each)
                self.close()
                self._start_all()
                self._request_ahead(self._cursors)
        python = user.take(sorted(self._changed))
        if not same_value(cursor.python, python):
            cursor.python = python
            self._drop_ahead(cursor)
            self._request_ahead([rank])

    def _drop_ahead(self, cursor: _Cursor) -> None:
        """Drop what was requested of an epoch that begins."""
        cursor.next_request = cursor.epoch, 0
        for request in cursor.ahead:
            request.is_dropped = True
            self._streams.pop(request.key, None)
        self._pending = deque(request for request in self._pending if not request.is_dropped)
        cursor.ahead.clear()

    def _request_ahead(self, ranks: Iterable[int]) -> None:
        """Request the next batches of ESTs that have none ahead."""
        if self._shards.n_loaders:
            for _ in range(self._prefetch):
                for rank in ranks:
                    self._request_next(rank)
            self._dispatch()

    def _request_next(self, rank: int) -> None:
        cursor = self._cursors[rank]
        (epoch, batch), shards = cursor.next_request, self._shards
        batches, stream = self._batches(rank, epoch), batch % shards.n_loaders
        order = Order(
            shards.seed, shards.n_logical_workers, rank, epoch, batch, stream, batches[batch],
            shards.n_loaders,
        )  # fmt: skip
        request = _Request(order)
        # None: the first batch of an epoch sets the seed.
        self._streams.setdefault(request.key, _Stream(None))
        cursor.ahead.append(request)
        self._pending.append(request)
        cursor.next_request = (epoch, batch + 1) if batch + 1 < len(batches) else (epoch + 1, 0)

    # --- work of the processes ---

    def _wait_for(self, request: _Request) -> Any:
        """Wait for a requested batch."""
        if self._processes:
            self._collect(0.0)
        while request.answer is None:
            if self._processes:
                self._collect(None)
            else:
                self._pending.remove(request)
                self._begin(request)
                with preserved_random_states(), self._shown(self._cursors[request.order.rank].python):
                    self._finish(request, make(self._dataset, self._collate, request.order))
        if isinstance(request.answer, Failed):
            raise TrainingError(f"{request.order} could not be read:\n{request.answer.text}")
        return request.answer.batch

    @contextmanager
    def _shown(self, python: Mapping[str, Any]) -> Iterator[None]:
        """Show code of the user the values that a loader has, in the block."""
        user = self._user_state
        if user is None:
            yield
            return
        present = user.snapshot()
        names = changed_values(self._built, present).keys() | python.keys()
        now = user.take(sorted(names))
        user.give({name: self._built.get(name, ABSENT) for name in names} | dict(python))
        if unseen_changes(self._begun, present):
            self.notices.add(
                "an object changed within an epoch in which a loader process began anew; equal bits are not "
                "guaranteed: change objects where an epoch ends"
            )
        try:
            yield
        finally:
            user.give(now)

    def _begin(self, request: _Request) -> None:
        stream = self._streams[request.key]
        stream.is_busy, request.order = True, replace(request.order, before=stream.state)

    def _finish(self, request: _Request, answer: Made | Failed) -> None:
        request.answer = answer
        if isinstance(answer, Made):  # after an error the stream remains busy: its states are unknown
            stream = self._streams[request.key]
            stream.is_busy, stream.state = False, answer.after
            for name, is_random in answer.changed.items():
                self._check_change(name, is_random)

    def _check_change(self, name: str, is_random: bool) -> None:
        """Reject a generator that loaders draw from, and add a notice of other state that they change."""
        problem = f"{name} changes while a loader reads samples"
        if is_random:
            raise InputError(
                f"{problem}: samples draw from their own generator; expected draws from the global random "
                "states of Python, NumPy and torch, which are sent between processes"
            )
        self.notices.add(
            f"{problem}, and each loader process has its own copy, so equal bits are not guaranteed; with "
            "n_loaders=0 every logical worker keeps it"
        )

    def _collect(self, timeout_s: float | None) -> None:
        """Receive finished batches, waiting for the first one, and replace processes that died."""
        ready = wait([process.connection for process in self._processes], timeout_s)
        for place, process in enumerate(self._processes):
            if process.connection in ready:
                try:
                    answer = read_answer(process.connection.recv_bytes())
                except (EOFError, OSError):
                    self._replace(place)
                else:
                    if process.request is not None:
                        if not process.request.is_dropped:
                            self._finish(process.request, answer)
                        process.request = None
        self._dispatch()

    def _dispatch(self) -> None:
        """Send the first pending requests of streams that are not busy to idle processes."""
        for place in range(len(self._processes)):
            while self._processes[place].request is None:
                ready = (request for request in self._pending if not self._streams[request.key].is_busy)
                if (request := next(ready, None)) is None:
                    return
                self._pending.remove(request)
                self._begin(request)
                self._processes[place].request = request
                process, python = self._processes[place], self._cursors[request.order.rank].python
                is_new = process.python is not python
                try:
                    process.connection.send_bytes(_packed((request.order, python if is_new else None)))
                    process.python = python
                except OSError:
                    self._replace(place)

    def _replace(self, place: int) -> None:
        """Replace a process that died, and queue its batch again with the same random states."""
        dead = self._processes[place]
        _end(dead)
        with self._shown({}):
            self._processes[place] = self._start()
        if (request := dead.request) is None or request.is_dropped:
            return
        request.n_deaths += 1
        if request.n_deaths == _ATTEMPTS:
            raise WorkerError(f"{_ATTEMPTS} processes were killed while they made {request.order}")
        _log.warning("the process that made %s died; the batch is made again", request.order)
        self._streams[request.key].is_busy = False
        self._pending.appendleft(request)  # before all others: an EST may wait for it

    def _start_all(self) -> None:
        """Start the processes, which begin with what is pending."""
        if self._shards.n_loaders:
            self._processes += [self._start() for _ in range(self._n_processes)]
            self._dispatch()

    def _start(self) -> _LoaderProcess:
        context = get_context("fork")  # the fork shares loaded libraries and data
        ours, theirs = context.Pipe()
        inherited = [
            ours,
            *(process.connection for process in self._processes if not process.connection.closed),
        ]
        arguments = theirs, inherited, self._dataset, self._collate, getpid(), self._user_state
        process = context.Process(target=serve, args=arguments, daemon=True)
        with kept_from_forks(self._private()):
            process.start()
        theirs.close()
        return _LoaderProcess(process, ours)


def _end(process: _LoaderProcess) -> None:
    process.handle.kill()
    process.handle.join()
    process.connection.close()
