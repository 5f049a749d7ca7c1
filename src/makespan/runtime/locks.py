"""Files that a process holds for itself until it ends, however it ends."""

import fcntl
import os
import time
from pathlib import Path

_POLL_S = 0.05


def take(path: Path, wait_s: float = 0.0) -> int | None:
    """Lock a file for this process alone, and return the handle that holds it.

    Parameters
    ----------
    path
        Made if it is not there; its directory must be.
    wait_s
        How long others may keep it [s].

    Returns
    -------
    int or None
        To be closed by the caller; None if others keep the file for longer.
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


def is_taken(path: Path) -> bool:
    """Say whether some process holds a file.

    Parameters
    ----------
    path
        Need not be there.

    Returns
    -------
    bool
        Whether it does now.
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
