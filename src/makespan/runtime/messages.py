"""Messages between coordinator and nodes, and their encoding on a connection.

A message is a line of JSON behind its length. The first message of every connection is a `Hello` or a
request, with the token from the directory of the run.
"""

import json
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Literal, get_args

from makespan.errors import WorkerError

SIZE = struct.Struct("!I")
LARGEST_BYTES = 1 << 28


class Cause(StrEnum):
    """Origin of a failure."""

    PEER = "peer"  # a node to which this one was connected is lost, or dropped its groups
    OWN = "own"  # the node itself
    INPUT = "input"  # the job: another attempt would fail in the same way


@dataclass(frozen=True, slots=True)
class Hello:
    """A process joins the run; a watchdog started the process with this rank, and kills it if it hangs."""

    token: str
    pid: int
    host: str
    node: int | None = None
    is_watchdog: bool = False
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Welcome:
    """The number of the node, and the request of the run."""

    node: int
    request: Any


@dataclass(frozen=True, slots=True)
class Ready:
    """The node has loaded the job, and waits."""


@dataclass(frozen=True, slots=True)
class Freeze:
    """A new generation begins: abort the running work, and drop every group of the previous generation."""

    generation: int


@dataclass(frozen=True, slots=True)
class Frozen:
    """All earlier groups are dropped; the node has applied this many steps, and holds these layers."""

    generation: int
    step: int
    layers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Form:
    """Build groups with the other members, copy missing layers, and prepare the plan in ``work``."""

    generation: int
    step: int
    members: tuple[int, ...]
    work: Any


@dataclass(frozen=True, slots=True)
class Copied:
    """Groups are built, and the layers that the node owns from now on have these checksums."""

    generation: int
    checksums: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Shared:
    """Values (Base64) by key, by which members build groups; the coordinator forwards them to all members."""

    generation: int
    values: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Offered:
    """Values like those of `Shared`, forwarded together once each member has offered some in a generation."""

    generation: int
    values: Mapping[str, str]


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
    """All members are prepared: step, then continue with the next iteration or wait."""

    generation: int
    iteration: int
    then: Literal["train", "wait"]


@dataclass(frozen=True, slots=True)
class Failed:
    """Building the groups of a generation failed, or computing with them."""

    generation: int
    error: str
    cause: Cause = Cause.OWN


@dataclass(frozen=True, slots=True)
class Save:
    """Write layers into the checkpoint that is being made."""

    generation: int
    step: int
    layers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Saved:
    """The layers are written."""

    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class Leaving:
    """The node received SIGTERM, and asks to leave at the next boundary of iterations."""


@dataclass(frozen=True, slots=True)
class Leave:
    """The run no longer needs the node."""

    reason: str


@dataclass(frozen=True, slots=True)
class Announce:
    """The node enters this phase of an iteration."""

    phase: str
    iteration: int


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Heartbeat of a node, which may be waiting for another one."""

    is_waiting: bool = False


@dataclass(frozen=True, slots=True)
class Drain:
    """Request from outside that nodes leave; none to end the whole run with a checkpoint."""

    token: str
    nodes: tuple[int, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class Asked:
    """Answer to `Drain`: the nodes that it names and the run does not have, and those that the run has."""

    unknown: tuple[int, ...]
    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Hold:
    """Stay at the end of a phase, so that an injected fault can kill the process there."""

    phase: str
    iteration: int


@dataclass(frozen=True, slots=True)
class Kill:
    """The process that the receiver started hangs: kill it."""

    pid: int


Message = (
    Hello | Welcome | Ready | Freeze | Frozen | Form | Copied | Train | Prepared | Commit | Failed | Save
    | Saved | Leaving | Leave | Announce | Heartbeat | Drain | Asked | Hold | Kill | Shared | Offered
)  # fmt: skip
_KINDS: dict[str, Callable[..., Message]] = {kind.__name__: kind for kind in get_args(Message)}
_TUPLES = ("layers", "members", "nodes", "unknown")


def encoded(message: Message) -> bytes:
    """Return the bytes of a message, its length first."""
    text = json.dumps([type(message).__name__, asdict(message)]).encode()
    return SIZE.pack(len(text)) + text


def decoded(text: bytes) -> Message:
    """Return the message in the bytes behind a length; raise `WorkerError` if they are no message."""
    try:
        kind, values = json.loads(text)
        for name in _TUPLES:  # JSON knows lists only
            if name in values:
                values[name] = tuple(values[name])
        return _KINDS[kind](**values)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise WorkerError(f"received an invalid message: {text[:80]!r}") from None


# --- Connection -------------------------------------------------------------------------------------

_BLOCK = 1 << 16
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""Probes that detect a machine that disappeared without closing its connections."""


class Connection:
    """Messages in order over a socket, and its end; several threads may send, one receives."""

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
        """Send a message; raise `OSError` if the connection is closed."""
        self.send_encoded(encoded(message))

    def send_encoded(self, text: bytes) -> None:
        """Send what `encoded` returned; raise `OSError` if the connection is closed."""
        with self._sending:
            self.link.sendall(text)

    def receive(self) -> list[Message] | None:
        """Wait for bytes and return the messages that are complete; None at the end of the connection."""
        try:
            block = self.link.recv(_BLOCK)
        except OSError:
            return None
        if not block:
            return None
        self._received += block
        messages = []
        while len(self._received) >= SIZE.size:
            (size,) = SIZE.unpack_from(self._received)
            if size > LARGEST_BYTES:
                raise WorkerError(f"received a message of {size} bytes; the limit is {LARGEST_BYTES}")
            if len(self._received) < SIZE.size + size:
                break
            text = bytes(self._received[SIZE.size : SIZE.size + size])
            del self._received[: SIZE.size + size]
            messages.append(decoded(text))
        return messages

    def close(self) -> None:
        """Close the socket."""
        self.link.close()


LOOPBACK = "127.0.0.1"


def listening(is_alone: bool, backlog: int) -> tuple[str, socket.socket]:
    """Listen on a free port of this machine only, or of all its networks.

    Returns
    -------
    tuple
        Name by which others reach this machine, and the socket.
    """
    host, door = (LOOPBACK, LOOPBACK) if is_alone else (socket.gethostname(), "")
    return host, socket.create_server((door, 0), backlog=backlog)


def connected(host: str, port: int, timeout_s: float) -> Connection:
    """Connect to a coordinator; raise `OSError` if none listens there."""
    link = socket.create_connection((host, port), timeout_s)
    link.settimeout(None)
    return Connection(link)
