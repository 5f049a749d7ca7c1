"""The limit on the time that one call of a policy may take."""

import ctypes
import math
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any

from makespan.errors import InputError

__all__ = ["DECISION_LIMIT_S", "TookTooLong", "Watch"]

DECISION_LIMIT_S = 600.0
"""Wall time that one call of a policy may take [s]; far more than any policy needs at any size tried."""

_TICKS = 8  # looks at a call before it counts as too long, unless the limit is so long that more fit in
_MIN_TICK_S, _MAX_TICK_S = 0.001, 1.0
_AGAIN = 16  # ticks until a call that swallowed the interruption is interrupted once more


class TookTooLong(BaseException):
    """Raised inside a call that exceeds the limit; no ``except Exception`` of a policy swallows it."""


class Watch:
    """Ends calls that take too long, from a thread that looks at the running call now and then.

    Unlike a signal this works in every thread and beside whatever else uses signals. While the process is
    stopped, the thread does not look either, so that this time does not count. Only code of Python is ended,
    not a single call of C that never returns.
    """

    def __init__(self, limit_s: float | None) -> None:
        if limit_s is not None and not (math.isfinite(limit_s) and limit_s >= 0):
            raise InputError(f"decision_limit_s is {limit_s!r}; accepted: a time in s, 0 or None for none")
        self.limit_s = limit_s
        self._number = 0
        self._is_open = self._is_interrupted = False
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "Watch":
        """Begin to look at calls of this thread."""
        if self.limit_s:
            # Made anew each time: a thread does not outlive a fork, and forks warn while one is there.
            self._over = threading.Event()
            watched = threading.get_ident()
            self._thread = threading.Thread(
                target=self._look, args=(watched, self.limit_s), name="makespan-watch", daemon=True
            )
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave no thread behind."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def call(self, function: Callable[..., Any], *arguments: object) -> Any:
        """Call a function and return what it returns, or let `TookTooLong` through."""
        try:
            try:
                self._number += 1
                self._is_open = True
                return function(*arguments)
            finally:
                self._close()
        except TookTooLong:
            self._close()  # it may have come while the first one was under way
            raise

    def _close(self) -> None:
        with self._lock:
            self._is_open = False
            was_interrupted, self._is_interrupted = self._is_interrupted, False
        if was_interrupted:
            _receive()

    def _look(self, watched: int, limit_s: float) -> None:
        tick_s = min(max(limit_s / _TICKS, _MIN_TICK_S), _MAX_TICK_S)
        n_ticks = max(round(limit_s / tick_s), 1)
        seen = ticks = 0
        while not self._over.wait(tick_s):
            ticks = ticks + 1 if self._is_open and self._number == seen else 0
            seen = self._number
            if ticks < n_ticks or (ticks - n_ticks) % _AGAIN:
                continue
            with self._lock:
                if self._is_open and self._number == seen:
                    self._is_interrupted = True
                    _raise_in(watched, TookTooLong)


def _raise_in(thread: int, kind: type[BaseException]) -> None:
    """Raise an exception in a thread at its next instruction of Python."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))


def _receive() -> None:
    """Let what may still be on its way to this thread arrive here, so that it does not arrive later.

    Taking it back would leave the interpreter looking for it: slower from then on, and for ever where a
    tracer follows the program. There is place for one: a second one takes the place of the first.
    """
    with suppress(TookTooLong):
        _raise_in(threading.get_ident(), TookTooLong)
        while True:
            pass
