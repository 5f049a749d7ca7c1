"""Lock files that a process holds until it releases them or ends, even if it is killed."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from makespan.errors import InputError

_POLL_S = 0.05


def acquire(path: Path, wait_s: float = 0.0) -> int | None:
    """Lock a file exclusively for this process, and return the handle that holds the lock.

    Parameters
    ----------
    path
        Created if it does not exist; its directory must exist.
    wait_s
        Longest wait for another process to release the lock [s].

    Returns
    -------
    int or None
        Handle that the caller closes to release the lock; None if the wait timed out.
    """
    handle, deadline = os.open(path, os.O_RDWR | os.O_CREAT, 0o644), time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(handle)
                return None
            time.sleep(_POLL_S)
        else:
            return handle


@contextmanager
def held_directory(path: Path, use: str, wait_s: float = 0.0) -> Iterator[None]:
    """Hold a directory, which is created if needed, for this process, by its file ``lock``.

    Raises an `InputError` that names the ``use``, such as ``run``, if another process still holds it after
    ``wait_s``.
    """
    path.mkdir(parents=True, exist_ok=True)
    handle = acquire(path / "lock", wait_s)
    if handle is None:
        raise InputError(f"{path}: another {use} is active here; wait for its end, or use another directory")
    try:
        yield
    finally:
        os.close(handle)


def is_locked(path: Path) -> bool:
    """Return True if a process holds an exclusive lock on a file now.

    Parameters
    ----------
    path
        Lock file; it need not exist.

    Returns
    -------
    bool
        False also if there is no such file.
    """
    try:
        handle = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False
