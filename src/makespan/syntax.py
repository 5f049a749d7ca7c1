"""Source of Python as a tree of its syntax, for any number of threads at a time."""

import ast
import threading
from contextlib import suppress

__all__ = ["parsed"]

_lock = threading.Lock()
_ATTEMPTS = 100  # others parse without the lock


def parsed(source: str | bytes, name: str = "<unknown>") -> ast.Module:
    """Return the tree of some source; raises what `ast.parse` does for source that is none.

    CPython 3.11 counts how deep it is in the trees of all threads in one number, and raises a `SystemError`
    in one of two that are at it together.
    """
    with _lock:
        for _ in range(_ATTEMPTS):
            with suppress(SystemError):
                return ast.parse(source, name)
    return ast.parse(source, name)
