"""Links between the processes of a generation: bytes over sockets whose end releases every wait.

The processes of a generation hold one connection to each other. A process that dies closes its connections,
and so does one that calls `PeerLinks.close`; whoever waits for bytes of it then gets a `LostPeerError` at
once. The collectives of gloo do not promise that: they may wait for a lost peer until their time limit. A
machine that disappears closes nothing; those that wait for it are released by the next generation.

The bytes of a connection are frames. A piece has a length that both sides know and arrives where the receiver
wants it; a message has any length. One thread sends and receives everything at the same time, so two
processes that send to each other never wait for each other.

A long piece for a process that can read the memory of this one is lent: its frame has the address alone, and
the receiver copies the piece and answers that it has taken it. Until then the piece must stay as it is. A
process that drops its links closes its `Window` first, so what it changes afterwards is never taken.
"""

import secrets
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Protocol

from makespan.errors import TrainingError
from makespan.runtime.memory import PeerMemory, Window, address_of
from makespan.runtime.messages import LOOPBACK, listening

_FRAME = struct.Struct("!BQQ")  # kind and bytes of a frame, and address of a lent piece
_PIECE, _MESSAGE, _LENT, _TAKEN, _READS = range(5)
_LEAST_LENT = 1 << 17  # bytes; a shorter piece takes less time on its way than the answer to a lent one
_SECRET_BYTES = 16
_RANK = struct.Struct("!I")
_LOOK_S = 0.02
_ANSWER_S = 2.0
"""Wait for the answer of a machine, or for bytes, before this process looks for a new generation [s]."""


class LostPeerError(TrainingError):
    """A transfer failed because the process at its other end is lost, or has dropped its groups."""


class Board(Protocol):
    """Values by which the processes of a generation find each other."""

    def offer(self, generation: int, key: str, value: bytes) -> None:
        """Set a value that the others get together with those of all, once each has offered one."""

    def wait(self, generation: int, key: str, timeout_s: float) -> bytes:
        """Wait for a value; raise `RuntimeError` after the timeout, or when a new generation begins."""

    def has(self, generation: int, key: str) -> bool:
        """Tell whether a value is set; raise `RuntimeError` if a new generation has begun."""


class _Link:
    """Connection to one peer, with what waits to be sent and where received pieces go.

    ``memory`` is that of the peer, None if it cannot be read from here.
    """

    def __init__(self, link: socket.socket, memory: PeerMemory | None) -> None:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.setblocking(False)
        self.link, self.fileno = link, link.fileno()
        self.outgoing: deque[memoryview] = deque()
        self.wanted: deque[memoryview] = deque()
        self.inbox: deque[bytes] = deque()
        self.n_awaited = 0  # messages that somebody waits for, besides those in the inbox
        self._header, self._n_header = bytearray(_FRAME.size), 0
        self._body: memoryview | None = None
        self._message: bytearray | None = None
        self.lent: deque[memoryview] = deque()  # pieces that the peer has not taken yet
        self._memory, self._lends = memory, False
        if memory is not None:
            self._queue(_READS)

    @property
    def is_reading(self) -> bool:
        """True while bytes of the peer are needed."""
        return bool(self.wanted) or bool(self.lent) or len(self.inbox) < self.n_awaited

    def send(self, piece: memoryview) -> None:
        """Queue a piece, or lend it."""
        if self._lends and len(piece) >= _LEAST_LENT:
            self.lent.append(piece)
            self._queue(_LENT, len(piece), address_of(piece))
        else:
            self.queue_bytes(_PIECE, piece)

    def queue_bytes(self, kind: int, view: memoryview) -> None:
        """Queue a frame of bytes."""
        self._queue(kind, len(view))
        if len(view):
            self.outgoing.append(view)

    def _queue(self, kind: int, size: int = 0, address: int = 0) -> None:
        self.outgoing.append(memoryview(_FRAME.pack(kind, size, address)))

    def write(self) -> bool:
        """Send what fits; return whether anything was sent."""
        is_sent = False
        with suppress(BlockingIOError):
            while self.outgoing:
                view = self.outgoing[0]
                n_sent = self.link.send(view)
                is_sent = True
                if n_sent == len(view):
                    self.outgoing.popleft()
                else:
                    self.outgoing[0] = view[n_sent:]
        return is_sent

    def read(self) -> bool:
        """Receive what has arrived and is needed; return whether anything was received."""
        is_received = False
        with suppress(BlockingIOError):
            while self.is_reading:
                if self._body is None:
                    n_bytes = self.link.recv_into(memoryview(self._header)[self._n_header :])
                    if not n_bytes:
                        raise ConnectionResetError("the connection was closed")
                    is_received, self._n_header = True, self._n_header + n_bytes
                    if self._n_header == _FRAME.size:
                        self._begin(*_FRAME.unpack(self._header))
                if self._body is not None:
                    while self._body:
                        n_bytes = self.link.recv_into(self._body)
                        if not n_bytes:
                            raise ConnectionResetError("the connection was closed")
                        is_received, self._body = True, self._body[n_bytes:]
                    self._end()
        return is_received

    def _begin(self, kind: int, size: int, address: int) -> None:
        self._n_header = 0
        if kind == _MESSAGE:
            self._message = bytearray(size)
            self._body = memoryview(self._message)
            return
        if kind == _READS:
            self._lends = True
            return
        if kind == _TAKEN:
            self.lent.popleft()
            return
        if not self.wanted or len(self.wanted[0]) != size:
            expected = f"a piece of {len(self.wanted[0])} bytes" if self.wanted else "a message"
            raise TrainingError(f"processes disagree: received a piece of {size} bytes, expected {expected}")
        if kind == _PIECE:
            self._body = self.wanted[0]
        elif self._memory is None:
            raise TrainingError(
                "processes disagree: received the address of a piece that cannot be read here"
            )
        else:
            self._memory.read(address, self.wanted.popleft())
            self._queue(_TAKEN)

    def _end(self) -> None:
        self._body = None
        if self._message is None:
            self.wanted.popleft()
        else:
            self.inbox.append(bytes(self._message))
            self._message = None


class PeerLinks:
    """Connections of this process to the other processes of its generation.

    Parameters
    ----------
    rank, size
        Number of this process among those of the generation, and how many there are.
    board, generation
        Store by which the processes find each other, and the generation; waits for peers that have not
        connected end when the next generation begins.
    meet_s
        Longest time until all connections are made [s].
    is_alone
        Whether all processes are on this machine; others cannot connect then.

    Raises
    ------
    LostPeerError
        Another process is lost, or did not connect in time.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        board: Board,
        generation: int,
        meet_s: float,
        *,
        is_alone: bool = True,
    ) -> None:
        self.rank, self.size, self.is_waiting = rank, size, False
        self._board, self._generation = board, generation
        self._links: dict[int, _Link] = {}
        self._window, self._memories = Window(), dict[int, PeerMemory | None]()
        if size == 1:
            return
        try:
            self._meet(time.monotonic() + meet_s, is_alone)
        except (OSError, RuntimeError) as error:
            self.close()
            raise LostPeerError(
                f"process {rank} of {size} could not connect to the others: {error}"
            ) from None

    def _meet(self, until_s: float, is_alone: bool) -> None:
        """Connect to all processes with a lower number, and accept those with a higher one."""
        secret, board, generation = secrets.token_bytes(_SECRET_BYTES), self._board, self._generation
        host, door = listening(is_alone, self.size)
        with door:
            address = f"{host} {door.getsockname()[1]} {secret.hex()} {self._window.text}"
            board.offer(generation, f"link/{self.rank}", address.encode())
            for peer in range(self.size):
                if peer == self.rank:
                    continue
                left_s = max(until_s - time.monotonic(), _LOOK_S)
                told = board.wait(generation, f"link/{peer}", left_s).decode()
                host, port, other, window = told.split(" ")
                self._memories[peer] = PeerMemory.behind(window)
                if peer > self.rank:
                    continue
                link = self._connected(LOOPBACK if is_alone else host, int(port), until_s)
                link.sendall(bytes.fromhex(other) + _RANK.pack(self.rank))
                self._add(peer, link)
            door.settimeout(_LOOK_S)
            while len(self._links) < self.size - 1:
                self._check_generation()
                if time.monotonic() > until_s:
                    raise RuntimeError(f"timed out with {len(self._links)} of {self.size - 1} connections")
                with suppress(TimeoutError):
                    self._accept(door.accept()[0], secret)

    def _connected(self, host: str, port: int, until_s: float) -> socket.socket:
        """Connect to a machine that may have disappeared."""
        while True:
            left_s = until_s - time.monotonic()
            try:
                return socket.create_connection((host, port), max(min(left_s, _ANSWER_S), _LOOK_S))
            except TimeoutError:
                if left_s < 0.0:
                    raise
                self._check_generation()

    def _check_generation(self) -> None:
        """Raise `RuntimeError` if the next generation has begun."""
        self._board.has(self._generation, "")

    def _accept(self, link: socket.socket, secret: bytes) -> None:
        """Take a connection of a peer that knows the secret; close any other."""
        link.settimeout(1.0)
        n_bytes = _SECRET_BYTES + _RANK.size
        greeting = b""
        with suppress(OSError):
            while len(greeting) < n_bytes and (block := link.recv(n_bytes - len(greeting))):
                greeting += block
        if len(greeting) == n_bytes and secrets.compare_digest(greeting[:_SECRET_BYTES], secret):
            (peer,) = _RANK.unpack(greeting[_SECRET_BYTES:])
            self._add(peer, link)
        else:
            link.close()

    def _add(self, peer: int, link: socket.socket) -> None:
        self._links[peer] = _Link(link, self._memories[peer])

    # --- transfers ----------------------------------------------------------------------------

    def send(self, peer: int, piece: memoryview) -> None:
        """Send bytes whose number the peer knows; they must not change before `finish` returns."""
        self._link(peer).send(piece)

    def receive(self, peer: int, place: memoryview) -> None:
        """Receive the next piece of a peer in place; it is complete when `finish` returns."""
        self._link(peer).wanted.append(place)

    def finish(self) -> None:
        """Wait until all pieces are sent, or taken, and received."""
        self._run(lambda: not any(link.outgoing or link.wanted or link.lent for link in self._links.values()))

    def post(self, peer: int, message: bytes) -> None:
        """Send a message, in order with the pieces; it is on its way when a later wait has returned."""
        self._link(peer).queue_bytes(_MESSAGE, memoryview(message))

    def take(self, peer: int) -> bytes:
        """Wait for the next message of a peer, and return it."""
        return self.take_all([peer])[0]

    def take_all(self, peers: Iterable[int]) -> list[bytes]:
        """Wait for a message of each of several peers, and until everything posted is on its way."""
        links = [self._link(peer) for peer in peers]
        for link in links:
            link.n_awaited += 1
        self._run(
            lambda: (
                all(len(link.inbox) >= link.n_awaited for link in links)
                and not any(link.outgoing for link in self._links.values())
            )
        )
        for link in links:
            link.n_awaited -= 1
        return [link.inbox.popleft() for link in links]

    def gather(self, message: bytes) -> list[bytes]:
        """Return a message of each process, in every process."""
        others = list(self._links)
        for peer in others:
            self.post(peer, message)
        received = dict(zip(others, self.take_all(others), strict=True)) | {self.rank: message}
        return [received[rank] for rank in range(self.size)]

    def close(self) -> None:
        """Close all connections, which releases the peers that wait for this process."""
        self._window.close()
        for link in self._links.values():
            with suppress(OSError):
                link.link.shutdown(socket.SHUT_RDWR)
            link.link.close()
        self._links.clear()

    def _link(self, peer: int) -> _Link:
        if peer not in self._links:
            raise LostPeerError(f"process {self.rank} has no connection to process {peer}")
        return self._links[peer]

    def _run(self, is_done: Callable[[], bool]) -> None:
        """Send and receive until a condition holds."""
        peer = -1
        try:
            while True:
                is_moving = False
                for peer, link in self._links.items():  # noqa: B007 - named in the error
                    is_moving |= bool(link.outgoing) and link.write()
                    is_moving |= link.is_reading and link.read()
                if is_done():
                    return
                if not is_moving:
                    self._wait()
        except OSError as error:
            problem = f"process {self.rank} lost process {peer}: {error.strerror or error}"
        except RuntimeError as error:
            problem = f"process {self.rank} stopped waiting for another one: {error}"
        except BaseException:
            self.close()
            raise
        self.close()
        raise LostPeerError(problem)

    def _wait(self) -> None:
        """Wait until a socket is ready for what is left to do."""
        poll = select.poll()
        for link in self._links.values():
            events = (select.POLLOUT if link.outgoing else 0) | (select.POLLIN if link.is_reading else 0)
            if events:
                poll.register(link.fileno, events)
        self.is_waiting = True
        try:
            if not poll.poll(1e3 * _ANSWER_S):
                self._check_generation()
        finally:
            self.is_waiting = False
