"""Memory of other processes of this machine, which Linux copies with one call and without their help.

A piece that travels through a socket is copied into the kernel and out of it, a part at a time. Here the
receiver copies it once, from where the sender has it. The sender opens a `Window` and names an address; the
receiver reads with `PeerMemory`. Where the kernel, its settings or another machine do not allow that,
`PeerMemory.behind` finds it out with the first word.
"""

import ctypes
import os
import secrets
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np

_SET_PTRACER = 0x59616D61  # option of prctl
_AT_ONCE = 1 << 26  # bytes of one call, which copies less than 2 GiB


class _Range(ctypes.Structure):
    """``struct iovec``."""

    _fields_ = (("address", ctypes.c_void_p), ("size", ctypes.c_size_t))


@cache
def _library() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def address_of(view: memoryview) -> int:
    """Return the address of memory without gaps, which must stay where it is as long as others read it."""
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])


class Window:
    """Permission of other processes to read this one, until it is closed.

    Linux lets processes of one user read each other. Where Yama restricts that to ancestors, this process
    admits its parent with all descendants, among which are those of its run.

    What is read after that may have changed since, so each reading ends with a secret word: `close` removes
    it, before anything changes.
    """

    def __init__(self) -> None:
        self._word = ctypes.c_uint64(secrets.randbits(63) + 1)
        with suppress(AttributeError, OSError):
            _library().prctl(_SET_PTRACER, ctypes.c_ulong(os.getppid()), 0, 0, 0)
        self.text = f"{os.getpid()}/{ctypes.addressof(self._word)}/{self._word.value}"
        """What `PeerMemory.behind` needs."""

    def close(self) -> None:
        """Make all further reading fail."""
        self._word.value = 0


class PeerMemory:
    """Memory behind the window of another process."""

    def __init__(self, pid: int, word_address: int, word: int) -> None:
        self._pid, self._word = pid, word
        self._found = ctypes.c_uint64(0)
        self._own_word = _Range(ctypes.addressof(self._found), 8)
        self._its_word = _Range(word_address, 8)

    @staticmethod
    def behind(text: str) -> "PeerMemory | None":
        """Return the memory behind a `Window`, by its text; None if it cannot be read from here."""
        memory = PeerMemory(*map(int, text.split("/")))
        try:
            memory.read(0, memoryview(b""))
        except (OSError, AttributeError):
            return None
        return memory

    def read(self, address: int, place: memoryview) -> None:
        """Copy memory into a place; a `ConnectionResetError` says that the window is closed."""
        size, done = len(place), 0
        target = address_of(place) if size else 0
        while True:
            part = min(_AT_ONCE, size - done)
            own = (_Range * 2)(_Range(target + done, part), self._own_word)
            its = (_Range * 2)(_Range(address + done, part), self._its_word)
            self._found.value = 0
            n_read = _library().process_vm_readv(self._pid, own, 2, its, 2, 0)
            done += part
            if n_read != part + 8 or self._found.value != self._word:
                raise ConnectionResetError("its memory cannot be read any more")
            if done == size:
                return
