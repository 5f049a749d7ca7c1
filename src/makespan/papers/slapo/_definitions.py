"""Python source as trees: which definition a name stands for, in whichever module; nothing is imported."""

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from makespan.errors import InputError, unknown_name
from makespan.syntax import parsed

__all__ = ["Definition", "Sources", "docstring_of", "text_lines"]

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Definition:
    """A function, class or constant at the top of a module."""

    module: str
    name: str
    node: ast.stmt

    @property
    def place(self) -> str:
        """Where it stands, for messages."""
        return f"{self.module}:{self.name}"


class Sources:
    """Modules of packages of a project by dotted name, parsed when they are needed.

    Parameters
    ----------
    top
        Directory that holds the outermost package.
    packages
        Dotted names of packages, or of single modules.
    """

    def __init__(self, top: Path, packages: Sequence[str]) -> None:
        self._paths: dict[str, Path] = {}
        for name in packages:
            folder = top.joinpath(*name.split("."))
            files = [folder.with_suffix(".py")] if not folder.is_dir() else sorted(folder.rglob("*.py"))
            for path in files:
                if not path.is_file():
                    raise InputError(f"no module {name} below {top}")
                parts = path.relative_to(top).with_suffix("").parts
                self._paths[".".join(part for part in parts if part != "__init__")] = path
        self._tops: dict[str, dict[str, Definition]] = {}
        self._imports: dict[str, dict[str, tuple[str, str]]] = {}

    @property
    def modules(self) -> list[str]:
        """All modules by name."""
        return sorted(self._paths)

    @cached_property
    def _trees(self) -> dict[str, ast.Module]:
        return {name: parsed(path.read_bytes(), str(path)) for name, path in self._paths.items()}

    def text(self, module: str) -> str:
        """Return the source of a module."""
        return self._paths[module].read_text("utf-8")

    def tops(self, module: str) -> dict[str, Definition]:
        """Return what a module defines at its top, by name."""
        if module not in self._tops:
            found = {}
            for node in _statements(self._trees[module].body):
                for name in _names(node):
                    found[name] = Definition(module, name, node)
            self._tops[module] = found
        return self._tops[module]

    def find(self, module: str, name: str) -> Definition | None:
        """Return what a name of a module stands for, through imports of these modules; else None."""
        for _ in range(len(self._paths) + 1):
            if module not in self._paths:
                return None
            if name in self.tops(module):
                return self.tops(module)[name]
            found = self._imported(module).get(name)
            if found is None:
                return None
            module, name = found
        raise InputError(f"imports of {name} in {module} go round in a circle")

    def imported(self, module: str, name: str) -> str | None:
        """Return the full name of what a module imports under a name, None if it imports nothing so."""
        for node in ast.walk(self._trees[module]):
            if isinstance(node, ast.Import | ast.ImportFrom):
                home = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return f"{home}{alias.name}"
        return None

    def _imported(self, module: str) -> dict[str, tuple[str, str]]:
        if module not in self._imports:
            self._imports[module] = dict(self._imports_of(module))
        return self._imports[module]

    def _imports_of(self, module: str) -> Iterator[tuple[str, tuple[str, str]]]:
        package = module if self._paths[module].name == "__init__.py" else module.rpartition(".")[0]
        for node in ast.walk(self._trees[module]):
            if not isinstance(node, ast.ImportFrom):
                continue
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            home = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield alias.asname or alias.name, (home, alias.name)

    def named_by(self, definition: Definition, names: Callable[[ast.AST], Iterator[str]]) -> list[Definition]:
        """Return definitions that the names in a definition stand for, each once, in order."""
        found = dict.fromkeys(
            one
            for name in names(definition.node)
            if (one := self.find(definition.module, name)) is not None and one != definition
        )
        return list(found)

    def reached(self, start: Definition) -> list[Definition]:
        """Return a definition and all that it names, however far away, in the order of discovery."""
        found = {start: None}
        queue = [start]
        while queue:
            for one in self.named_by(queue.pop(0), loaded_names):
                if one not in found:
                    found[one] = None
                    queue.append(one)
        return list(found)

    def table(self, module: str, name: str) -> dict[str, Definition]:
        """Return the entries of a dictionary of names that a module assigns: text to definition."""
        one = self.find(module, name)
        value = getattr(one.node, "value", None) if one else None
        if one is None or not isinstance(value, ast.Dict):
            raise unknown_name("dictionary of functions", f"{module}.{name}", self.modules)
        found = {}
        for key, entry in zip(value.keys, value.values, strict=True):
            target = self.find(one.module, entry.id) if isinstance(entry, ast.Name) else None
            if not isinstance(key, ast.Constant) or target is None:
                raise InputError(f"{one.place}: found an entry {ast.unparse(entry)}; accepted: 'key': name")
            found[str(key.value)] = target
        return found


def loaded_names(node: ast.AST) -> Iterator[str]:
    """Yield names that are read anywhere in a node."""
    for one in ast.walk(node):
        if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load):
            yield one.id


def docstring_of(node: ast.AST) -> ast.stmt | None:
    """Return the statement that is the docstring of a function or class."""
    first = node.body[0] if isinstance(node, Function | ast.ClassDef) else None
    is_text = isinstance(first, ast.Expr) and isinstance(getattr(first.value, "value", None), str)
    return first if is_text else None


def text_lines(node: ast.stmt, text: str) -> list[int]:
    """Return numbers of the lines of a definition that hold code: no blank line, comment or docstring."""
    first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))])
    last = node.end_lineno or node.lineno
    shown = text.splitlines()
    told = {
        number
        for one in ast.walk(node)
        if (words := docstring_of(one)) is not None
        for number in range(words.lineno, (words.end_lineno or words.lineno) + 1)
    }
    kept = (number for number in range(first, last + 1) if number not in told)
    return [number for number in kept if (line := shown[number - 1].strip()) and not line.startswith("#")]


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements at the top of a module, those below an ``if`` included."""
    for node in body:
        if isinstance(node, ast.If):
            yield from _statements([*node.body, *node.orelse])
        else:
            yield node


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, Function | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return []
