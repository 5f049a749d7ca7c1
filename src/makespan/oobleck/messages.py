"""Messages between coordinator and nodes, and their encoding on a connection."""

import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Literal

from makespan.errors import WorkerError

# ------------------------------------------------------------------------------------------------
# What coordinator and nodes say to each other, and how it goes over a connection.
#
# A message is a line of JSON behind its length. Whoever connects first says `Hello` or asks for something,
# with the token that stands in the directory of the run.

SIZE = struct.Struct("!I")
LARGEST_BYTES = 1 << 28


class Cause(StrEnum):
    """Where a failure comes from."""

    PEER = "peer"  # a node with which this one was connected is gone, or gave up its groups
    OWN = "own"  # the node itself
    INPUT = "input"  # what it was asked to train: another attempt would end in the same way


@dataclass(frozen=True, slots=True)
class Hello:
    """A process wants to take part, or, for ``keeps``, to end the one with this id when it hangs."""

    token: str
    pid: int
    host: str
    node: int | None = None
    keeps: bool = False


@dataclass(frozen=True, slots=True)
class Welcome:
    """It is this node, and the run is asked for this."""

    node: int
    request: Any


@dataclass(frozen=True, slots=True)
class Ready:
    """The node has loaded what it needs, and waits."""


@dataclass(frozen=True, slots=True)
class Freeze:
    """A new generation begins: give up what goes on, and every group of the one before."""

    generation: int


@dataclass(frozen=True, slots=True)
class Frozen:
    """Nothing of an earlier generation is left; the node has this many steps behind it, and these layers."""

    generation: int
    step: int
    layers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Form:
    """Meet the other members, copy what is missing, and do as the work says."""

    generation: int
    step: int
    members: tuple[int, ...]
    work: Any


@dataclass(frozen=True, slots=True)
class Copied:
    """Groups stand, and the layers that the node owns from now on have these checksums."""

    generation: int
    checksums: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Shared:
    """What members of a generation tell each other to build groups, passed on to all; a value is Base64."""

    generation: int
    key: str
    value: str


@dataclass(frozen=True, slots=True)
class Train:
    """Compute an iteration and reduce its gradients."""

    generation: int
    iteration: int


@dataclass(frozen=True, slots=True)
class Prepared:
    """The gradients of an iteration are complete here."""

    generation: int
    iteration: int
    report: Any = None


@dataclass(frozen=True, slots=True)
class Commit:
    """All are prepared: step, then go on with the next iteration or wait."""

    generation: int
    iteration: int
    then: Literal["train", "wait"]


@dataclass(frozen=True, slots=True)
class Failed:
    """Something went wrong with the groups of a generation, or with what they compute."""

    generation: int
    error: str
    cause: Cause = Cause.OWN


@dataclass(frozen=True, slots=True)
class Save:
    """Write layers where a checkpoint is being made."""

    generation: int
    step: int
    layers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Saved:
    """They are written."""

    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class Leaving:
    """The node was asked to end, and wants to go when it can without loss."""


@dataclass(frozen=True, slots=True)
class Leave:
    """Nothing of the run needs the node any more."""

    reason: str


@dataclass(frozen=True, slots=True)
class Announce:
    """The node is in this phase of an iteration from now on."""

    phase: str
    iteration: int


@dataclass(frozen=True, slots=True)
class Beat:
    """The node is alive, and may be waiting for another one."""

    is_waiting: bool = False


@dataclass(frozen=True, slots=True)
class Drain:
    """Somebody outside wants nodes to leave; none for the whole run, which writes a checkpoint then."""

    token: str
    nodes: tuple[int, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class Hold:
    """Stay at the end of a phase, because the process shall be killed there: a fault is tried."""

    phase: str
    iteration: int


@dataclass(frozen=True, slots=True)
class Kill:
    """The process that somebody keeps hangs: end it."""

    pid: int


Message = (
    Hello | Welcome | Ready | Freeze | Frozen | Form | Copied | Train | Prepared | Commit | Failed | Save
    | Saved | Leaving | Leave | Announce | Beat | Drain | Hold | Kill | Shared
)  # fmt: skip
_KINDS: dict[str, Callable[..., Message]] = {
    kind.__name__: kind
    for kind in (
        Hello, Welcome, Ready, Freeze, Frozen, Form, Copied, Train, Prepared, Commit, Failed, Save, Saved,
        Leaving, Leave, Announce, Beat, Drain, Hold, Kill, Shared,
    )
}  # fmt: skip
_TUPLES = ("layers", "members", "nodes")


def encoded(message: Message) -> bytes:
    """Bytes of a message, its length first."""
    text = json.dumps([type(message).__name__, asdict(message)]).encode()
    return SIZE.pack(len(text)) + text


def decoded(text: bytes) -> Message:
    """Message of the bytes behind a length; a `makespan.errors.WorkerError` says that it is none."""
    try:
        kind, values = json.loads(text)
        for name in _TUPLES:
            if name in values:
                values[name] = tuple(values[name])
        return _KINDS[kind](**values)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise WorkerError(f"a connection of the run brought {text[:80]!r}, which is no message") from None


# ------------------------------------------------------------------------------------------------
# A connection between coordinator and node: messages in order, and its end, which tells of a death.

_BLOCK = 1 << 16
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""A machine that is gone without a word is noticed after so many seconds, and so many tries."""


class Connection:
    """Messages over a socket; several threads may send, one receives."""

    def __init__(self, link: socket.socket) -> None:
        self.link, self._received, self._sending = link, bytearray(), threading.Lock()
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def fileno(self) -> int:
        """Handle of the socket."""
        return self.link.fileno()

    def send(self, message: Message) -> None:
        """Send a message; an `OSError` says that nobody is there, or that it takes nothing any more."""
        with self._sending:
            self.link.sendall(encoded(message))

    def receive(self) -> list[Message] | None:
        """Messages that have arrived, waiting for some bytes; None at the end of the connection."""
        try:
            block = self.link.recv(_BLOCK)
        except OSError:
            return None
        if not block:
            return None
        self._received += block
        return list(self._complete())

    def _complete(self) -> Iterator[Message]:
        """Take the messages that are complete out of what was received."""
        while len(self._received) >= SIZE.size:
            (size,) = SIZE.unpack_from(self._received)
            if size > LARGEST_BYTES:
                raise WorkerError(f"a connection of the run brought a message of {size} bytes")
            if len(self._received) < SIZE.size + size:
                return
            text = bytes(self._received[SIZE.size : SIZE.size + size])
            del self._received[: SIZE.size + size]
            yield decoded(text)

    def close(self) -> None:
        """Close it."""
        self.link.close()


def connected(host: str, port: int, timeout_s: float) -> Connection:
    """Connect to a coordinator; an `OSError` says that none is there."""
    link = socket.create_connection((host, port), timeout_s)
    link.settimeout(None)
    return Connection(link)
