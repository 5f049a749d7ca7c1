"""A pool of processes that loads the samples of all logical workers of a host.

As far as bits are concerned each logical worker has W loaders of its own: batch ``s`` of an epoch is made
with the random states of its loader ``s mod W``, as by the W processes of a stock data loader. Any process
may make it, because the states travel with the order. What was made ahead and taken by nobody is no part of
a state: the states from before it was made are. So neither the size of the pool, nor how far it is ahead,
nor who is hosted where influences a batch.
"""

import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from os import getpid
from types import TracebackType
from typing import Any, TypeAlias

from torch.utils.data import default_collate

from makespan.easyscale.runtime._loading import (
    Collate,
    Failed,
    Made,
    Order,
    make,
    read_answer,
    samples_of,
    serve,
)
from makespan.easyscale.runtime._randomness import apart_from_own, own_generators
from makespan.easyscale.runtime._shards import LoaderState, Shards
from makespan.easyscale.runtime._user_state import UserState
from makespan.easyscale.runtime._virtual import seen_as
from makespan.errors import CheckpointError, InputError, TrainingError, WorkerError

__all__ = ["LoaderPool"]

_log = logging.getLogger(__name__)
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
