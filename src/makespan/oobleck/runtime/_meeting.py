"""Where the members of a generation meet: what each says reaches all over the connections to the coordinator.

A wait there ends when a new generation begins. No port is opened for it and no name is looked up.
"""

import base64
import importlib
import threading
import time
from collections.abc import Callable
from typing import Any

from makespan.oobleck.runtime._messages import Message, Shared

__all__ = ["Board", "store_on"]


class Board:
    """What was said in the newest generations."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send, self._newest, self._said = send, 0, dict[tuple[int, str], bytes]()
        self._changed = threading.Condition()

    def renew(self, generation: int) -> None:
        """Forget what is older, and end the waits of those who belong to that."""
        with self._changed:
            self._newest = generation
            self._said = {key: one for key, one in self._said.items() if key[0] >= generation}
            self._changed.notify_all()

    def take(self, message: Shared) -> None:
        """Note what a member said."""
        with self._changed:
            self._said[message.generation, message.key] = base64.b64decode(message.value)
            self._changed.notify_all()

    def tell(self, generation: int, key: str, value: bytes) -> None:
        """Say something to all, oneself included."""
        message = Shared(generation, key, base64.b64encode(value).decode())
        self.take(message)
        self._send(message)

    def has(self, generation: int, key: str) -> bool:
        """Whether somebody said it; a `RuntimeError` says that a new generation has begun."""
        with self._changed:
            self._check(generation)
            return (generation, key) in self._said

    def wait(self, generation: int, key: str, timeout_s: float) -> bytes:
        """Wait for something; a `RuntimeError` says that a new generation has begun, or that time is over."""
        place = (generation, key)
        with self._changed:
            self._changed.wait_for(lambda: place in self._said or self._newest > generation, timeout_s)
            self._check(generation)
            if place not in self._said:
                raise RuntimeError(f"nobody said {key} within {timeout_s:g} s")
            return self._said[place]

    def _check(self, generation: int) -> None:
        if self._newest > generation:
            raise RuntimeError(f"generation {generation} is over")


def store_on(board: Board, generation: int, timeout_s: float) -> Any:
    """Store of torch for a generation, whose values are on the board."""

    def put(_: Any, key: str, value: Any) -> None:
        board.tell(generation, key, value.encode() if isinstance(value, str) else bytes(value))

    def get(_: Any, key: str) -> bytes:
        return board.wait(generation, key, timeout_s)

    def wait(_: Any, keys: list[str], timeout: Any = None) -> None:
        until_s = time.monotonic() + (timeout_s if timeout is None else timeout.total_seconds())
        for key in keys:
            board.wait(generation, key, max(until_s - time.monotonic(), 0.0))

    def check(_: Any, keys: list[str]) -> bool:
        return all(board.has(generation, key) for key in keys)

    # The stubs of torch hide its public stores.
    base: Any = importlib.import_module("torch.distributed").Store
    methods = {"set": put, "get": get, "wait": wait, "check": check}
    return type("BoardStore", (base,), methods)()
