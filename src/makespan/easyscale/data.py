"""Data loading of logical workers: shards, batches, the forward pass on a batch, and loader processes.

Each logical worker has W loaders of its own as far as bits are concerned: batch ``s`` of an epoch is made
with the random states of its loader ``s mod W``, as by the W processes of a stock data loader. Any process
may make it, because the states travel with the order. A batch that was made ahead and not taken yet is no
part of a saved state: the states from before it was made are. So neither the size of the pool, nor its
prefetch, nor the mapping influences a batch.
"""

import copy
import inspect
import io
import logging
import pickle
import signal
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from os import getpid
from types import TracebackType
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
    seed_stream,
)
from makespan.easyscale.user_state import UserState, changed_values, is_generator, is_watched
from makespan.errors import CheckpointError, InputError, TrainingError, WorkerError, short_path

_log = logging.getLogger(__name__)


# --- Shards: the samples of each logical worker, and its position in them ---


@dataclass(frozen=True, slots=True)
class LoaderState:
    """Position of a logical worker in its data and random states of its loaders; the same on every host.

    Parameters
    ----------
    epoch, batch
        The next batch.
    streams
        Random states of each of the W loaders before its next batch; None for a loader that has made no batch
        of this epoch.
    """

    epoch: int
    batch: int
    streams: tuple[bytes | None, ...]

    def values(self) -> dict[str, Any]:
        """Return the state as plain values and uint8 tensors, for a checkpoint."""
        streams = [
            None if one is None else torch.frombuffer(bytearray(one), dtype=torch.uint8)
            for one in self.streams
        ]
        return {"epoch": self.epoch, "batch": self.batch, "streams": streams}

    @staticmethod
    def from_values(values: Mapping[str, Any]) -> "LoaderState":
        """Rebuild the state from its `values`."""
        streams = (None if one is None else one.numpy().tobytes() for one in values["streams"])
        return LoaderState(int(values["epoch"]), int(values["batch"]), tuple(streams))


@dataclass(frozen=True, slots=True)
class Shards:
    """Assignment of samples to logical workers; part of the job, because it decides the bits.

    Parameters
    ----------
    n_logical_workers
        N; the samples of an epoch are dealt as `torch.utils.data.DistributedSampler` does.
    micro_batch_size
        Samples of a batch of one logical worker.
    seed
        Seed of the order of samples, with the epoch, and of the loaders, with virtual rank and epoch.
    n_loaders
        W, loaders of each logical worker; with 0 its samples are read in the training process, with the
        random states of the logical worker.
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
                found = getattr(self, name)
                raise InputError(f"{name} is {found}; expected a whole number >= {least}")

    def start(self) -> LoaderState:
        """Return the state of a logical worker before its first batch."""
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
            found = type(dataset).__name__
            raise InputError(f"data set {found} has no length; expected a map-style data set")
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
        """Name of the batch, for messages."""
        return f"batch {self.batch} of epoch {self.epoch} for logical worker {self.rank}"


@dataclass(frozen=True, slots=True)
class Made:
    """A batch, the random states after it, and the names of the Python values that changed meanwhile.

    ``changed`` is True for the name of a random generator.
    """

    batch: Any
    after: bytes
    changed: Mapping[str, bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Failed:
    """Traceback of an error that the code of the data set raised instead."""

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
        with virtual_rank(order.rank, order.n_logical_workers), _known_as(order, dataset):
            batch = collate(samples_of(dataset, order.indices))
        return Made(batch, capture_random_states())
    except Exception:  # noqa: BLE001 - user code; the error is raised where the batch is used
        return Failed(traceback.format_exc())


@contextmanager
def _known_as(order: Order, dataset: Any) -> Iterator[None]:
    """Make ``get_worker_info`` describe the loader process that would make this batch in stock training."""
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
    """Pickles tensors as arrays: a killed process cannot take shared memory along."""

    def reducer_override(self, obj: Any) -> Any:
        """Reduce a plain CPU tensor to an array, other objects as usual."""
        if type(obj) is Tensor and obj.device.type == "cpu" and not obj.requires_grad:
            with suppress(TypeError):  # a dtype that NumPy does not know
                return torch.from_numpy, (obj.numpy(),)
        return NotImplemented


def read_answer(written: bytes) -> Made | Failed:
    """Read the answer of a process of the pool, which this process has started."""
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
    """Make batches until the asking process closes the connection or ends.

    For the first batches, and at powers of two, compare the values that user code keeps in Python before and
    after.
    """
    # A fork inherits the other ends of the connections, which would keep it from noticing the end of its
    # parent, and signal handlers of the training process.
    for other in others:
        other.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent(parent)
    torch.set_num_threads(1)
    n_made = 0
    with suppress(EOFError, OSError):
        while True:
            order, watch = connection.recv(), None
            if user_state is not None and is_watched(n_made):
                watch = user_state.snapshot
            n_made += 1
            before = {} if watch is None else watch()
            made = make(dataset, collate, order)
            if watch is not None and isinstance(made, Made):
                changed = changed_values(before, watch())
                made = replace(made, changed={name: is_generator(value) for name, value in changed.items()})
            written = io.BytesIO()
            _Pickler(written, pickle.HIGHEST_PROTOCOL).dump(made)
            connection.send_bytes(written.getvalue())


# --- Forward pass on a batch ---

_PAIR = 2


def loss_of(
    model: nn.Module, loss: Callable[[Any, Any], Any], batch: Any, device: torch.device
) -> tuple[Tensor, str]:
    """Do a forward pass.

    A batch that is a pair consists of inputs and targets. Any other batch goes whole to the model and, as the
    targets, to the loss. A mapping whose keys name arguments of the model is unpacked into them.

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
    inputs = _moved(inputs, device)
    targets = _moved(targets, device) if is_pair else inputs
    try:
        spread = isinstance(inputs, Mapping) and _takes(model, inputs)
        outputs = model(**inputs) if spread else model(inputs)
    except (TypeError, KeyError, AttributeError, IndexError) as error:
        if is_pair and not isinstance(inputs, Mapping):
            raise
        found = f"model {type(model).__name__} does not take a batch that is {_told(batch)}"
        expected = (
            "a pair of inputs and targets, which collate can make; or a model whose arguments are named as "
            "the keys, or that takes the batch as it is"
        )
        frame = traceback.extract_tb(error.__traceback__)[-1]
        lines = str(error).splitlines()
        cause = f"{type(error).__name__}: {lines[0][:200] if lines else ''}"
        cause = f"{cause}, at {short_path(frame.filename)}, line {frame.lineno}"
        raise InputError(f"{found} ({cause}); expected {expected}") from error
    returned = loss(outputs, targets)
    expected = "a scalar tensor with a gradient, first of a tuple or under the key 'loss' if there is more"
    value, unused = returned, ""
    if isinstance(returned, Mapping) and "loss" in returned:
        value, unused = returned["loss"], ", ".join(str(key) for key in returned if key != "loss")
    elif isinstance(returned, list | tuple) and returned:
        value = returned[0]
        unused = f"{len(returned) - 1} further value(s)" if len(returned) > 1 else ""
    if not isinstance(value, Tensor):
        raise InputError(f"loss returned a {_told(returned)}; expected {expected}")
    if value.numel() != 1:
        raise InputError(f"loss returned a tensor of shape {tuple(value.shape)}; expected {expected}")
    if not value.requires_grad:
        raise InputError(f"loss returned a tensor that requires no gradient; expected {expected}")
    return value.reshape(()) if value.ndim else value, unused


def _takes(model: nn.Module, inputs: Mapping[Any, Any]) -> bool:
    """Return True if the keys of a mapping name arguments of the model.

    A model with a single argument takes the mapping itself.
    """
    if not all(isinstance(key, str) for key in inputs):
        return False
    try:
        signature = inspect.signature(model.forward)
        signature.bind(**inputs)
    except (TypeError, ValueError):
        return False
    named = [
        one.name
        for one in signature.parameters.values()
        if one.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    ]
    return len(named) > 1 and set(inputs) <= set(named)


def _told(value: Any) -> str:
    """Describe a value in a few words, for messages."""
    if isinstance(value, Mapping):
        return f"{type(value).__name__} with {', '.join(map(repr, list(value)[:6]))}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__} of {len(value)}"
    return type(value).__name__


def _moved(values: Any, device: torch.device) -> Any:
    """Move the tensors of a batch to a device; the types of all containers are kept."""

    def leaf(value: Any) -> Any:
        if isinstance(value, Tensor) or callable(getattr(value, "to", None)):
            return value.to(device)
        if isinstance(value, MutableMapping):  # of a type that tree_map does not enter
            moved = copy.copy(value)
            for key in value:
                moved[key] = _moved(value[key], device)
            return moved
        return value

    return tree_map(leaf, values)


# --- Pool of loader processes, shared by the logical workers of a host ---

_ATTEMPTS = 3  # processes that may be killed while they make the same batch
_Key: TypeAlias = tuple[int, int, int]


@dataclass(slots=True, eq=False)
class _Request:
    """A batch that was requested and not taken yet."""

    order: Order
    answer: Made | Failed | None = None
    n_deaths: int = 0

    @property
    def key(self) -> _Key:
        return self.order.rank, self.order.epoch, self.order.stream


@dataclass(slots=True, eq=False)
class _Stream:
    """Random states of a loader after its last batch; ``is_busy`` while the next one is being made."""

    state: bytes | None
    is_busy: bool = False


@dataclass(slots=True, eq=False)
class _Feed:
    """Next batch of a logical worker, and ``asked``: epoch and batch of the next request."""

    epoch: int
    batch: int
    asked: tuple[int, int]
    ahead: deque[_Request] = field(default_factory=deque)
    epochs: dict[int, list[tuple[int, ...]]] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Hand:
    """A process of the pool, and the request that it works on."""

    process: BaseProcess
    connection: Connection
    request: _Request | None = None


class LoaderPool:
    """Loads the batches of all logical workers that a process hosts.

    Parameters
    ----------
    dataset
        Map-style data set; its samples may draw from the global random states of Python, NumPy and torch.
    shards
        How samples are dealt.
    states
        State of each hosted logical worker, by virtual rank, in the order in which they take their batches.
    n_processes
        Processes of the pool; with 0 batches are made when they are taken, with the same bits.
    prefetch
        Batches that are made ahead for each logical worker.
    collate
        Joins samples into a batch.
    user_state
        Finds the Python values that user code changes while a process of the pool makes a batch; None to
        ignore them.

    Raises
    ------
    InputError
        If a number is out of range, the data set cannot be dealt, or it has random generators of its own.
    CheckpointError
        If a state has another number of loaders, or is past the end of an epoch.
    """

    def __init__(
        self,
        dataset: Any,
        shards: Shards,
        states: Mapping[int, LoaderState],
        *,
        n_processes: int = 2,
        prefetch: int = 2,
        collate: Collate = default_collate,
        user_state: UserState | None = None,
    ) -> None:
        if n_processes < 0 or prefetch < 1:
            found = f"n_processes {n_processes} and prefetch {prefetch}"
            raise InputError(f"{found}; expected whole numbers >= 0 and >= 1")
        if shards.n_loaders and (generators := private_generators(dataset)):
            raise InputError(
                f"data set {type(dataset).__name__} draws from {', '.join(generators)}; expected draws "
                "from the global random states of Python, NumPy and torch, which go from process to process"
            )
        self._dataset, self._shards, self._collate = dataset, shards, collate
        self._user_state, self.notices = user_state, set[str]()
        self._streams: dict[_Key, _Stream] = {}
        self._feeds: dict[int, _Feed] = {}
        self._waiting: deque[_Request] = deque()
        self._hands: list[_Hand] = []
        for rank, state in states.items():
            self._feeds[rank] = self._feed(rank, state)
        if shards.n_loaders:
            for _ in range(n_processes):
                self._hands.append(self._start())
            for _ in range(prefetch):
                for rank in self._feeds:
                    self._ask(rank)
            self._hand_out()

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
        return [hand.process.pid for hand in self._hands if hand.process.pid is not None]

    def next(self, rank: int) -> Any:
        """Return the next batch of a logical worker; epochs follow one another.

        Raises
        ------
        TrainingError
            If the code of the data set raised; the message has its traceback.
        WorkerError
            If several processes in a row were killed while they made this batch.
        """
        feed = self._feeds[rank]
        if not self._shards.n_loaders:
            with virtual_rank(rank, self._shards.n_logical_workers):
                batch = self._collate(samples_of(self._dataset, self._batches(rank, feed.epoch)[feed.batch]))
        else:
            batch = self._taken(feed.ahead[0])
            feed.ahead.popleft()  # only now: after an error the state is that from before the batch
        self._step(rank)
        if self._shards.n_loaders:
            self._ask(rank)
            self._hand_out()
        return batch

    def state(self, rank: int) -> LoaderState:
        """Return the state of a logical worker, as if no batch had been made ahead."""
        feed = self._feeds[rank]
        keys = [(rank, feed.epoch, stream) for stream in range(self._shards.n_loaders)]
        return LoaderState(feed.epoch, feed.batch, tuple(self._before_next(feed, key) for key in keys))

    def close(self) -> None:
        """Kill the processes, even busy ones."""
        for hand in self._hands:
            _end(hand)
        self._hands.clear()

    # --- positions of the logical workers ---

    def _feed(self, rank: int, state: LoaderState) -> _Feed:
        feed = _Feed(state.epoch, state.batch, (state.epoch, state.batch))
        feed.epochs[state.epoch] = batches = self._shards.batches(self._dataset, rank, state.epoch)
        if len(state.streams) != self._shards.n_loaders:
            raise CheckpointError(
                f"the state of logical worker {rank} is that of {len(state.streams)} loaders; "
                f"expected {self._shards.n_loaders}"
            )
        if not 0 <= state.batch < len(batches):
            raise CheckpointError(
                f"the state of logical worker {rank} is at batch {state.batch} of an epoch; "
                f"expected 0 to {len(batches) - 1}"
            )
        for stream, known in enumerate(state.streams):
            self._streams[rank, state.epoch, stream] = _Stream(known)
        return feed

    def _before_next(self, feed: _Feed, key: _Key) -> bytes | None:
        """Random states of a loader before the first of its batches that was not taken."""
        for request in feed.ahead:
            if request.key == key and isinstance(request.answer, Made):
                return request.order.before  # the states of the stream are those after this batch
        return self._streams[key].state if key in self._streams else None

    def _batches(self, rank: int, epoch: int) -> list[tuple[int, ...]]:
        epochs = self._feeds[rank].epochs
        if epoch not in epochs:
            epochs[epoch] = self._shards.batches(self._dataset, rank, epoch)
        return epochs[epoch]

    def _step(self, rank: int) -> None:
        """Advance to the next batch; at the end of an epoch drop its streams and batches."""
        feed = self._feeds[rank]
        feed.batch += 1
        if feed.batch == len(self._batches(rank, feed.epoch)):
            for stream in range(self._shards.n_loaders):
                self._streams.pop((rank, feed.epoch, stream), None)
            del feed.epochs[feed.epoch]
            feed.epoch, feed.batch = feed.epoch + 1, 0

    def _ask(self, rank: int) -> None:
        feed = self._feeds[rank]
        (epoch, batch), shards = feed.asked, self._shards
        batches, stream = self._batches(rank, epoch), batch % shards.n_loaders
        order = Order(
            shards.seed, shards.n_logical_workers, rank, epoch, batch, stream, batches[batch],
            shards.n_loaders,
        )  # fmt: skip
        request = _Request(order)
        self._streams.setdefault(request.key, _Stream(None))  # None: the first batch of an epoch seeds it
        feed.ahead.append(request)
        self._waiting.append(request)
        feed.asked = (epoch, batch + 1) if batch + 1 < len(batches) else (epoch + 1, 0)

    # --- work of the processes ---

    def _taken(self, request: _Request) -> Any:
        """Wait for a requested batch."""
        if self._hands:
            self._collect(0.0)
        while request.answer is None:
            if self._hands:
                self._collect(None)
            else:
                self._waiting.remove(request)
                self._begin(request)
                with preserved_random_states():
                    self._finish(request, make(self._dataset, self._collate, request.order))
        if isinstance(request.answer, Failed):
            raise TrainingError(f"{request.order} could not be read:\n{request.answer.text}")
        return request.answer.batch

    def _begin(self, request: _Request) -> None:
        stream = self._streams[request.key]
        stream.is_busy, request.order = True, replace(request.order, before=stream.state)

    def _finish(self, request: _Request, answer: Made | Failed) -> None:
        request.answer = answer
        if isinstance(answer, Made):  # after an error the stream stays busy: its states are unknown
            stream = self._streams[request.key]
            stream.is_busy, stream.state = False, answer.after
            for name, is_random in answer.changed.items():
                self._tell(name, is_random)

    def _tell(self, name: str, is_random: bool) -> None:
        """Reject a generator that loaders draw from, and note other state that they keep."""
        what = f"{name} changes while a loader reads samples"
        if is_random:
            raise InputError(
                f"{what}: they draw from a generator of their own; expected draws from the global "
                "random states of Python, NumPy and torch, which go from process to process"
            )
        self.notices.add(
            f"{what}, and each loader process has its own, so equal bits are not promised; with n_loaders=0 "
            "every logical worker keeps it"
        )

    def _collect(self, timeout_s: float | None) -> None:
        """Receive finished batches, waiting for the first one, and replace processes that died."""
        ready = wait([hand.connection for hand in self._hands], timeout_s)
        for place, hand in enumerate(self._hands):
            if hand.connection in ready:
                try:
                    answer = read_answer(hand.connection.recv_bytes())
                except (EOFError, OSError):
                    self._replace(place)
                else:
                    if hand.request is not None:
                        self._finish(hand.request, answer)
                        hand.request = None
        self._hand_out()

    def _hand_out(self) -> None:
        """Send the first requests that can be started to idle processes.

        A stream has one batch in work at a time, because the next one starts from the states after it.
        """
        for place in range(len(self._hands)):
            while self._hands[place].request is None:
                free = (one for one in self._waiting if not self._streams[one.key].is_busy)
                if (request := next(free, None)) is None:
                    return
                self._waiting.remove(request)
                self._begin(request)
                self._hands[place].request = request
                try:
                    self._hands[place].connection.send(request.order)
                except OSError:
                    self._replace(place)

    def _replace(self, place: int) -> None:
        """Start a process for one that died, and make its batch again from the same random states."""
        gone = self._hands[place]
        _end(gone)
        self._hands[place] = self._start()
        if (request := gone.request) is None:
            return
        request.n_deaths += 1
        if request.n_deaths == _ATTEMPTS:
            raise WorkerError(f"{_ATTEMPTS} processes were killed while they made {request.order}")
        _log.warning("the process that made %s is gone; it is made again", request.order)
        self._streams[request.key].is_busy = False
        self._waiting.appendleft(request)  # before all others: a logical worker may wait for it

    def _start(self) -> _Hand:
        context = get_context("fork")  # libraries and data are there already
        ours, theirs = context.Pipe()
        inherited = [ours, *(hand.connection for hand in self._hands if not hand.connection.closed)]
        arguments = theirs, inherited, self._dataset, self._collate, getpid(), self._user_state
        process = context.Process(target=serve, args=arguments, daemon=True)
        process.start()
        theirs.close()
        return _Hand(process, ours)


def _end(hand: _Hand) -> None:
    hand.process.kill()
    hand.process.join()
    hand.connection.close()
