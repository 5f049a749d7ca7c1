"""Lazy exports for package ``__init__`` modules, and a parser of Python source that is safe with threads."""

import ast
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

_ATTEMPTS = 100


def parse_source(source: str | bytes, name: str = "<unknown>") -> ast.Module:
    """Parse Python source as `ast.parse` does, while other threads parse too.

    CPython 3.11 counts the depth of the trees of all threads in one number, and raises a `SystemError` in a
    thread that another one disturbed. The count restarts with each tree, so trying again is enough. A lock
    would not keep out threads of other libraries, and a process forked while it is held would wait forever.

    Parameters
    ----------
    source, name
        Text, or bytes as in a file; the name that a `SyntaxError` gives it.
    """
    for _ in range(_ATTEMPTS):
        with suppress(SystemError):
            return ast.parse(source, name)
    return ast.parse(source, name)


def lazy_exports(
    package: str, file: str, renamed: Mapping[str, str] | None = None
) -> Callable[[str], object]:
    """Return the ``__getattr__`` of a package whose imports stand under ``if TYPE_CHECKING``.

    Type checkers read these imports, and so does this function, so that a name is listed once; importing the
    package imports nothing else. ``__all__`` is the list of the names. ``renamed`` maps names of the last
    version to those of today; a use of one warns.
    """
    homes = {
        alias.asname or alias.name: (str(node.module), alias.name)
        for node in ast.walk(parse_source(Path(file).read_bytes(), file))
        if isinstance(node, ast.ImportFrom) and node.module not in ("typing", __name__)
        for alias in node.names
    }

    def find(name: str) -> object:
        if name == "__all__":
            return sorted(homes)
        if renamed and name in renamed:
            return find(_current(package, name, renamed[name]))
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, original = homes[name]
        return getattr(import_module(module), original)

    return find


def renamed_names(module: str, renamed: Mapping[str, str]) -> Callable[[str], object]:
    """Return the ``__getattr__`` of a module that still finds names of the last version, with a warning."""

    def find(name: str) -> object:
        if name not in renamed:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(import_module(module), _current(module, name, renamed[name]))

    return find


def renamed_attributes(renamed: Mapping[str, str]) -> Callable[[Any, str], Any]:
    """Return the ``__getattr__`` of a class that finds attributes of the last version, and warns."""

    def find(self: Any, name: str) -> Any:
        kind = type(self).__name__
        if name not in renamed:
            raise AttributeError(f"{kind!r} object has no attribute {name!r}")
        return getattr(self, _current(kind, name, renamed[name]))

    return find


def _current(module: str, old: str, new: str) -> str:
    warnings.warn(f"{module}.{old} is now {new}", DeprecationWarning, stacklevel=3)
    return new
