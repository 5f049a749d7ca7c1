"""The solver of integer programmes, without the lines that it prints."""

import ctypes
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from scipy.optimize import milp

__all__ = ["quiet_output", "solve"]

_STDOUT = 1
_LOCK = threading.Lock()


def solve(*arguments: Any, **options: Any) -> Any:
    """Call `scipy.optimize.milp` and let nothing of it reach the standard output.

    HiGHS reports some internal steps with a plain ``printf``, whatever its options say.
    """
    with quiet_output():
        return milp(*arguments, **options)


@contextmanager
def quiet_output() -> Iterator[None]:
    """Send what the process writes to its standard output to nowhere, compiled code included.

    One thread at a time; what other threads write meanwhile is lost as well. A process without a standard
    output is left alone.
    """
    with _LOCK:
        _flush()
        try:
            kept = os.dup(_STDOUT)
        except OSError:
            yield
            return
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, _STDOUT)
        os.close(nowhere)
        try:
            yield
        finally:
            _flush_compiled()
            os.dup2(kept, _STDOUT)
            os.close(kept)


def _flush() -> None:
    """Write out what belongs before, so that it does not get lost."""
    with suppress(AttributeError, OSError, ValueError):  # no stream, or a closed one
        sys.stdout.flush()
    _flush_compiled()


def _flush_compiled() -> None:
    with suppress(AttributeError, OSError, TypeError):  # a platform without the C library under this name
        ctypes.CDLL(None).fflush(None)
