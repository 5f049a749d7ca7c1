"""Source of Python as a tree of its syntax, for any number of threads at a time."""

import ast
from contextlib import suppress

__all__ = ["parsed"]

_ATTEMPTS = 100


def parsed(source: str | bytes, name: str = "<unknown>") -> ast.Module:
    """Return the tree of some source, as `ast.parse` does, whatever other threads parse meanwhile.

    CPython 3.11 counts how deep it is in the trees of all threads in one number, and raises a `SystemError`
    in a thread that another one disturbed. The count starts anew with each tree, so trying again is enough. A
    lock would not keep out threads of other libraries, and a process forked while it is held would wait for
    ever.

    Parameters
    ----------
    source, name
        Text, or bytes as in a file; what a `SyntaxError` calls it.
    """
    for _ in range(_ATTEMPTS):
        with suppress(SystemError):
            return ast.parse(source, name)
    return ast.parse(source, name)
