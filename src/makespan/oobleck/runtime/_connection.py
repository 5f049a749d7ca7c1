"""A connection between coordinator and node: messages in order, and its end, which tells of a death."""

import socket
import threading
from collections.abc import Iterator

from makespan.errors import WorkerError
from makespan.oobleck.runtime._messages import LARGEST_BYTES, SIZE, Message, decoded, encoded

__all__ = ["Connection", "connected"]

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
