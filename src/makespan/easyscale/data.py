"""Samples of logical workers: shards, loading, batches, and loader processes whose state moves with them."""

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
from makespan.easyscale.context import seen_as
from makespan.easyscale.randomness import (
    apart_from_own,
    give_randomness,
    own_generators,
    seed_stream,
    take_randomness,
)
from makespan.easyscale.user_state import UserState, changed_values, is_generator
from makespan.errors import CheckpointError, InputError, TrainingError, WorkerError, short_path

_log = logging.getLogger(__name__)


# ------------------------------------------------------------------------------------------------
# Which samples a logical worker gets, and where it is in them.


@dataclass(frozen=True, slots=True)
class LoaderState:
    """Where a logical worker is in its data, and what its loaders draw next; the same for all hosts.

    Parameters
    ----------
    epoch, batch
        The batch that comes next.
    streams
        Random states of each of the W loaders before its next batch; None for one that has made none in
        this epoch.
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
        """Return the state of which these are the `values`."""
        streams = (None if one is None else one.numpy().tobytes() for one in values["streams"])
        return LoaderState(int(values["epoch"]), int(values["batch"]), tuple(streams))


@dataclass(frozen=True, slots=True)
class Shards:
    """How samples are dealt to logical workers; part of what a job is, because it decides the bits.

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
        random states that are there.
    shuffle
        Whether samples are dealt in a new random order each epoch.
    drop_last_samples
        Whether samples that do not go round are left out; otherwise the first ones are dealt again.
    drop_last_batch
        Whether a last batch of less than full size is left out.

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
                raise InputError(f"{name} is {found}; accepted: a whole number >= {least}")

    def start(self) -> LoaderState:
        """Return the state of a logical worker that has read nothing."""
        return LoaderState(0, 0, (None,) * self.n_loaders)

    def batches(self, dataset: Any, rank: int, epoch: int) -> list[tuple[int, ...]]:
        """Return the samples of each batch of a logical worker in an epoch.

        Parameters
        ----------
        dataset
            The data set, of which only the length is used.
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
            raise InputError(f"data set {found} has no length; accepted: a map-style data set")
        size, per_batch, n_workers = len(dataset), self.micro_batch_size, self.n_logical_workers
        least = (n_workers if self.drop_last_samples else 1) * (per_batch if self.drop_last_batch else 1)
        if self.drop_last_batch and not self.drop_last_samples:
            least = n_workers * (per_batch - 1) + 1
        if size < least:
            raise InputError(
                f"data set has {size} samples; accepted: at least {least}, for one batch of {per_batch} to "
                f"each of {n_workers} logical workers"
            )
        sampler: DistributedSampler[Any] = DistributedSampler(
            dataset, n_workers, rank, self.shuffle, self.seed, drop_last=self.drop_last_samples
        )
        sampler.set_epoch(epoch)
        dealt = list(sampler)
        end = len(dealt) - len(dealt) % per_batch if self.drop_last_batch else len(dealt)
        return [tuple(dealt[first : first + per_batch]) for first in range(0, end, per_batch)]


# ------------------------------------------------------------------------------------------------
# What makes a batch: random states in, samples, random states out; and a process that does it on request.

Collate = Callable[[list[Any]], Any]
_WATCHED_FIRST = 3  # batches


@dataclass(frozen=True, slots=True)
class Order:
    """One batch to be made; ``before`` are the states to start from, None at the start of an epoch."""

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
    """A batch, the random states after it was made, and the values in Python that changed meanwhile, by name.

    A changed value is a generator or not.
    """

    batch: Any
    after: bytes
    changed: Mapping[str, bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Failed:
    """What the code of the data set raised instead."""

    text: str


def samples_of(dataset: Any, indices: Sequence[int]) -> list[Any]:
    """Read samples as a stock data loader does: all at once where the data set offers that."""
    if getattr(dataset, "__getitems__", None):
        return list(dataset.__getitems__(list(indices)))
    return [dataset[index] for index in indices]


def make(dataset: Any, collate: Collate, order: Order) -> Made | Failed:
    """Make a batch in this process, whose random states are those of the order afterwards."""
    try:
        if order.before is None:
            seed_stream(order.seed, order.rank, order.epoch, order.stream)
        else:
            give_randomness(order.before)
        with seen_as(order.rank, order.n_logical_workers), _known_as(order, dataset):
            batch = collate(samples_of(dataset, order.indices))
        return Made(batch, take_randomness())
    except Exception:  # noqa: BLE001 - code of others; it is raised where the batch is used
        return Failed(traceback.format_exc())


@contextmanager
def _known_as(order: Order, dataset: Any) -> Iterator[None]:
    """Answer whoever asks for the process of a stock data loader as the one that would make this batch."""
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
    """Writes tensors as arrays: no memory is shared that a killed process could take along."""

    def reducer_override(self, obj: Any) -> Any:
        """Say how a tensor is made again; others as usual."""
        if type(obj) is Tensor and obj.device.type == "cpu" and not obj.requires_grad:
            with suppress(TypeError):  # a type of element that NumPy does not know
                return torch.from_numpy, (obj.numpy(),)
        return NotImplemented


def _answer(made: Made | Failed) -> bytes:
    written = io.BytesIO()
    _Pickler(written, pickle.HIGHEST_PROTOCOL).dump(made)
    return written.getvalue()


def read_answer(written: bytes) -> Made | Failed:
    """Read what a process of the pool, started by this one, has written."""
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
    """Make batches until the process that asks closes the connection or is gone.

    For the first batches, and at powers of two, code of the user is watched for what it changes in Python.

    A fork has what its parent has: the other ends of the connections, which would keep this process from
    noticing the end, and handlers of signals that are none of its business.
    """
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
            if user_state is not None and (n_made < _WATCHED_FIRST or n_made & (n_made + 1) == 0):
                watch = user_state.snapshot
            n_made += 1
            connection.send_bytes(_answer(_watched(dataset, collate, order, watch)))


def _watched(
    dataset: Any, collate: Collate, order: Order, watch: Callable[[], dict[str, Any]] | None
) -> Made | Failed:
    """Make a batch, and find what changes in Python meanwhile."""
    before = {} if watch is None else watch()
    made = make(dataset, collate, order)
    if watch is None or isinstance(made, Failed):
        return made
    changed = changed_values(before, watch())
    return replace(made, changed={name: is_generator(value) for name, value in changed.items()})


# ------------------------------------------------------------------------------------------------
# What a batch is to a model and a loss, and what a loss may return.

_PAIR = 2


def loss_of(
    model: nn.Module, loss: Callable[[Any, Any], Any], batch: Any, device: torch.device
) -> tuple[Tensor, str]:
    """Do a forward pass.

    A batch that is a pair consists of inputs and targets. Any other goes whole to the model and, as the
    targets, to the loss. A mapping whose keys are names of arguments of the model is spread over them.

    Returns
    -------
    tuple
        The loss, and what of the value that the loss function returned is not used, empty for nothing.

    Raises
    ------
    makespan.errors.InputError
        The model does not take such batches, or the loss returned something that cannot be trained.
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
        accepted = (
            "a pair of inputs and targets, which collate can make; or a model whose arguments are named as "
            "the keys, or that takes the batch as it is"
        )
        raise InputError(f"{found} ({_line(error)}); accepted: {accepted}") from error
    return _checked(loss(outputs, targets))


def _takes(model: nn.Module, inputs: Mapping[Any, Any]) -> bool:
    """Whether the keys of a mapping are names of arguments; a single one that is, is the mapping itself."""
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


def _checked(found: Any) -> tuple[Tensor, str]:
    accepted = "a scalar tensor with a gradient, first of a tuple or under the key 'loss' if there is more"
    loss, unused = found, ""
    if isinstance(found, Mapping) and "loss" in found:
        loss, unused = found["loss"], ", ".join(str(key) for key in found if key != "loss")
    elif isinstance(found, list | tuple) and found:
        loss, unused = found[0], f"{len(found) - 1} further value(s)" if len(found) > 1 else ""
    if not isinstance(loss, Tensor):
        raise InputError(f"loss returned a {_told(found)}; accepted: {accepted}")
    if loss.numel() != 1:
        raise InputError(f"loss returned a tensor of shape {tuple(loss.shape)}; accepted: {accepted}")
    if not loss.requires_grad:
        raise InputError(f"loss returned a tensor that requires no gradient; accepted: {accepted}")
    return loss.reshape(()) if loss.ndim else loss, unused


def _told(value: Any) -> str:
    """Say in a few words what a batch is."""
    if isinstance(value, Mapping):
        return f"{type(value).__name__} with {', '.join(map(repr, list(value)[:6]))}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__} of {len(value)}"
    return type(value).__name__


def _line(error: BaseException) -> str:
    """Say in a line what went wrong, and where."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    lines = str(error).splitlines()
    what = f"{type(error).__name__}: {lines[0][:200] if lines else ''}"
    return f"{what}, at {short_path(frame.filename)}, line {frame.lineno}"


def _moved(values: Any, device: torch.device) -> Any:
    """Tensors of a batch on a device, whatever they lie in; the kinds of what they lie in are kept."""
    return tree_map(lambda one: _leaf(one, device), values)


def _leaf(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor) or callable(getattr(value, "to", None)):
        return value.to(device)
    if isinstance(value, MutableMapping):
        moved = copy.copy(value)
        for key in value:
            moved[key] = _moved(value[key], device)
        return moved
    return value


# ------------------------------------------------------------------------------------------------
# A pool of processes that loads the samples of all logical workers of a host.
#
# As far as bits are concerned each logical worker has W loaders of its own: batch ``s`` of an epoch is made
# with the random states of its loader ``s mod W``, as by the W processes of a stock data loader. Any
# process may make it, because the states travel with the order. What was made ahead and taken by nobody is
# no part of a state: the states from before it was made are. So neither the size of the pool, nor how far
# it is ahead, nor who is hosted where influences a batch.

_ATTEMPTS = 3
_Key: TypeAlias = tuple[int, int, int]


@dataclass(slots=True, eq=False)
class _Request:
    """A batch that was asked for and not taken yet."""

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
    """Where a logical worker is, and where what was asked for ends."""

    epoch: int
    batch: int
    asked: tuple[int, int]
    ahead: deque[_Request] = field(default_factory=deque)
    epochs: dict[int, list[tuple[int, ...]]] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Hand:
    """A process of the pool, and what it is busy with."""

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
        Where each hosted logical worker is, by virtual rank, in the order in which they take their batches.
    n_processes
        Processes of the pool; with 0 batches are made when they are taken, with the same bits.
    prefetch
        Batches that are made ahead for each logical worker.
    collate
        Joins samples to a batch.
    user_state
        Finds what code of the user changes in Python while a process of the pool makes a batch; None to
        look for nothing.

    Raises
    ------
    InputError
        If a number is out of range, the data set cannot be dealt, or it has random generators of its own.
    CheckpointError
        If a state is that of another number of loaders, or lies behind the end of an epoch.
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
            raise InputError(f"{found}; accepted: whole numbers >= 0 and >= 1")
        if shards.n_loaders and (own := own_generators(dataset)):
            raise InputError(
                f"data set {type(dataset).__name__} draws from {', '.join(own)}; accepted: draws from the "
                "global random states of Python, NumPy and torch, which go from process to process"
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
        """Processes of the pool, as they are now."""
        return [hand.process.pid for hand in self._hands if hand.process.pid is not None]

    def next(self, rank: int) -> Any:
        """Return the next batch of a logical worker; after the last of an epoch comes the first of the next.

        Raises
        ------
        TrainingError
            If the code of the data set raised; the message has its traceback.
        WorkerError
            If process after process was killed while it made this batch.
        """
        feed = self._feeds[rank]
        if not self._shards.n_loaders:
            with seen_as(rank, self._shards.n_logical_workers):
                batch = self._collate(samples_of(self._dataset, self._batches(rank, feed.epoch)[feed.batch]))
        else:
            batch = self._taken(feed.ahead[0])
            feed.ahead.popleft()
        self._step(rank)
        if self._shards.n_loaders:
            self._ask(rank)
            self._hand_out()
        return batch

    def state(self, rank: int) -> LoaderState:
        """Return where a logical worker is, as if nothing had been made ahead."""
        feed = self._feeds[rank]
        keys = [(rank, feed.epoch, stream) for stream in range(self._shards.n_loaders)]
        return LoaderState(feed.epoch, feed.batch, tuple(self._before_next(feed, key) for key in keys))

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        for hand in self._hands:
            _end(hand)
        self._hands.clear()

    # --- who is where -------------------------------------------------------------------------------

    def _feed(self, rank: int, state: LoaderState) -> _Feed:
        feed = _Feed(state.epoch, state.batch, (state.epoch, state.batch))
        feed.epochs[state.epoch] = batches = self._shards.batches(self._dataset, rank, state.epoch)
        if len(state.streams) != self._shards.n_loaders:
            raise CheckpointError(
                f"the state of logical worker {rank} is that of {len(state.streams)} loaders; "
                f"accepted: {self._shards.n_loaders}"
            )
        if not 0 <= state.batch < len(batches):
            raise CheckpointError(
                f"the state of logical worker {rank} is at batch {state.batch} of an epoch; "
                f"accepted: 0 to {len(batches) - 1}"
            )
        for stream, known in enumerate(state.streams):
            self._streams[rank, state.epoch, stream] = _Stream(known)
        return feed

    def _before_next(self, feed: _Feed, key: _Key) -> bytes | None:
        """Random states of a loader before the first of its batches that nobody has taken."""
        for request in feed.ahead:
            if request.key == key and isinstance(request.answer, Made):
                return request.order.before
        return self._streams[key].state if key in self._streams else None

    def _batches(self, rank: int, epoch: int) -> list[tuple[int, ...]]:
        epochs = self._feeds[rank].epochs
        if epoch not in epochs:
            epochs[epoch] = self._shards.batches(self._dataset, rank, epoch)
        return epochs[epoch]

    def _step(self, rank: int) -> None:
        """Go to the next batch; what belongs to an epoch is forgotten at its end."""
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
        request = _Request(
            Order(
                shards.seed,
                shards.n_logical_workers,
                rank,
                epoch,
                batch,
                stream,
                batches[batch],
                shards.n_loaders,
            )
        )
        self._streams.setdefault(request.key, _Stream(None))
        feed.ahead.append(request)
        self._waiting.append(request)
        feed.asked = (epoch, batch + 1) if batch + 1 < len(batches) else (epoch + 1, 0)

    # --- work ---------------------------------------------------------------------------------------

    def _taken(self, request: _Request) -> Any:
        """Wait for a batch that was asked for."""
        if self._hands:
            self._collect(0.0)
        while request.answer is None:
            if self._hands:
                self._collect(None)
            else:
                self._waiting.remove(request)
                self._begin(request)
                with apart_from_own():
                    self._finish(request, make(self._dataset, self._collate, request.order))
        if isinstance(request.answer, Failed):
            raise TrainingError(f"{request.order} could not be read:\n{request.answer.text}")
        return request.answer.batch

    def _begin(self, request: _Request) -> None:
        stream = self._streams[request.key]
        stream.is_busy, request.order = True, replace(request.order, before=stream.state)

    def _finish(self, request: _Request, answer: Made | Failed) -> None:
        request.answer = answer
        if isinstance(answer, Made):  # otherwise nothing may be made with these states any more
            stream = self._streams[request.key]
            stream.is_busy, stream.state = False, answer.after
            for name, is_random in answer.changed.items():
                self._tell(name, is_random)

    def _tell(self, name: str, is_random: bool) -> None:
        """Reject a generator that loaders draw from, and give notice of other state that they keep."""
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
        """Take what is made, waiting for the first of it, and replace processes that are gone."""
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
        """Give the first batches that can be made to processes that have nothing to do."""
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
        """Start a process for one that is gone; what that was making is made again from the same states."""
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
        self._waiting.appendleft(request)

    def _start(self) -> _Hand:
        context = get_context("fork")  # a process that has its libraries and data already
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
