"""Packages that import what they show when it is first asked for."""

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from makespan.syntax import parsed

__all__ = ["shown_lazily"]


def shown_lazily(package: str, file: str) -> Callable[[str], object]:
    """Return the ``__getattr__`` of a package whose imports stand under ``if TYPE_CHECKING``.

    Those imports say both to a type checker and here where each name is defined, so that importing the
    package imports nothing else.
    """
    homes = {
        alias.asname or alias.name: (str(node.module), alias.name)
        for node in ast.walk(parsed(Path(file).read_bytes(), file))
        if isinstance(node, ast.ImportFrom) and node.module != "typing"
        for alias in node.names
    }

    def find(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, original = homes[name]
        return getattr(import_module(module), original)

    return find
