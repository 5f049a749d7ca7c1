"""What makes a batch: random states in, samples, random states out; and a process that does it on request."""

import io
import pickle
import signal
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.utils.data
from torch import Tensor

from makespan.easyscale.runtime._randomness import give_randomness, take_randomness
from makespan.easyscale.runtime._seeding import seed_stream
from makespan.easyscale.runtime._user_state import UserState, changed_values, is_generator
from makespan.easyscale.runtime._virtual import seen_as
from makespan.leftovers import end_with_parent

__all__ = ["Collate", "Failed", "Made", "Order", "make", "read_answer", "samples_of", "serve"]

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
