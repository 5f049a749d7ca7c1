"""Python source as trees: which definition a name stands for, in whichever module; nothing is imported."""

import ast
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pandas as pd

import makespan
from makespan.errors import InputError, unknown_name
from makespan.lazy import parse_source
from makespan.papers.experiment import Experiment, Figure, Given

# ------------------------------------------------------------------------------------------------
# Python source as trees: which definition a name stands for, in whichever module; nothing is imported.

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Definition:
    """A function, class or constant at the top of a module."""

    module: str
    name: str
    node: ast.stmt

    @property
    def place(self) -> str:
        """Place in the source, for messages."""
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
        return {name: parse_source(path.read_bytes(), str(path)) for name, path in self._paths.items()}

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
                raise InputError(f"{one.place}: found an entry {ast.unparse(entry)}; expected 'key': name")
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


# ------------------------------------------------------------------------------------------------
# Table 4: how long schedules are, counted in the syntax tree of their functions; torch is not imported.
#
# Three counts a family. `helpers`: statements, where a call of a helper is one; a helper is a function that
# two families at least call and that does not ask for the family, and what is none counts with all of its
# statements. `expanded`: places that call a primitive, those in helpers included, each once. `listing`:
# lines of text of the function without those that contain "for", as the authors count. Not counted are the
# header of the function, headers of loops, docstrings, comments, loggers that are made and messages to a
# log.

_LOG_METHODS = ("debug", "info", "warning", "error", "exception", "critical", "log")
_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
_LOOPS = ast.For | ast.AsyncFor | ast.While


@dataclass(frozen=True)
class ScheduleLines:
    """Counts of one schedule."""

    helpers: int
    expanded: int
    listing: int
    called: tuple[str, ...]
    """Helpers that count as one line."""
    counted_whole: tuple[str, ...]
    """Functions that it calls and that are no helpers."""


@dataclass(frozen=True)
class ScheduleSources:
    """Source files with schedules, and the modules that define them.

    Attributes
    ----------
    sources
        Modules that define them, their helpers, and the primitives.
    schedules
        The function of each family.
    library
        Modules whose functions count; those of the language itself are part of it.
    """

    sources: Sources
    schedules: Mapping[str, Definition]
    library: Collection[str]

    @cached_property
    def primitives(self) -> frozenset[str]:
        """Names of primitives: what ``name()`` of a class returns that is decorated as one."""
        found = {
            name
            for module in self.sources.modules
            for one in self.sources.tops(module).values()
            if isinstance(one.node, ast.ClassDef) and _is_registered(one.node)
            for name in _own_name(one)
        }
        if not found:
            raise InputError(f"no class in {', '.join(self.sources.modules)} is registered as a primitive")
        return frozenset(found)

    @cached_property
    def functions(self) -> Mapping[str, tuple[Definition, ...]]:
        """Functions of these modules that the schedule of a family reaches, without itself."""
        return {family: tuple(self._reached(start)) for family, start in self.schedules.items()}

    @cached_property
    def helpers(self) -> frozenset[Definition]:
        """Functions that count as one line where they are called."""
        families: dict[Definition, set[str]] = {}
        for family, reached in self.functions.items():
            for one in reached:
                families.setdefault(one, set()).add(family)
        return frozenset(
            one for one, by in families.items() if len(by) > 1 and not _asks_for(one.node, self.schedules)
        )

    def whole(self, family: str) -> list[Definition]:
        """Return functions that count with their statements: reached without passing through a helper."""
        return self._reached(self.schedules[family], self.helpers)

    def _reached(self, start: Definition, but: Collection[Definition] = ()) -> list[Definition]:
        found: dict[Definition, None] = {}
        queue = [start]
        while queue:
            for one in self.sources.named_by(queue.pop(0), loaded_names):
                counts = one.module in self.library and isinstance(one.node, _FUNCTIONS)
                if counts and one != start and one not in found and one not in but:
                    found[one] = None
                    queue.append(one)
        return list(found)


def schedule_lines(source: ScheduleSources, family: str) -> ScheduleLines:
    """Count the schedule of a family."""
    start = source.schedules[family]
    whole = source.whole(family)
    n_statements = sum(_n_statements(source.sources, one, _body(one.node)) for one in (start, *whole))
    places = {
        place
        for one in (start, *source.functions[family])
        for place in _primitive_calls(one, source.primitives)
    }
    text = source.sources.text(start.module)
    body = [number for number in text_lines(start.node, text) if number >= _body(start.node)[0].lineno]
    listing = [number for number in body if "for" not in text.splitlines()[number - 1]]
    called = [one.name for one in source.functions[family] if one in source.helpers]
    names = tuple(one.name for one in whole)
    return ScheduleLines(n_statements, len(places), len(listing), tuple(called), names)


def _body(node: ast.stmt) -> Sequence[ast.stmt]:
    words = docstring_of(node)
    body: Sequence[ast.stmt] = getattr(node, "body", [])
    return [one for one in body if one is not words]


def _n_statements(sources: Sources, owner: Definition, body: Sequence[ast.stmt]) -> int:
    return sum(_weight(sources, owner, node) for node in body)


def _weight(sources: Sources, owner: Definition, node: ast.stmt) -> int:
    """Return how many lines a statement counts, with those below it."""
    own = 0 if isinstance(node, _LOOPS | ast.Pass | ast.Try) or _is_message(sources, owner, node) else 1
    if isinstance(node, _FUNCTIONS):
        return own + _n_statements(sources, owner, _body(node))
    below = [one for name in ("body", "orelse", "finalbody") for one in getattr(node, name, [])]
    handled = [one for handler in getattr(node, "handlers", []) for one in handler.body]
    cases = [one for case in getattr(node, "cases", []) for one in case.body]
    return own + _n_statements(sources, owner, [*below, *handled, *cases])


def _is_message(sources: Sources, owner: Definition, node: ast.stmt) -> bool:
    """Tell whether a statement only logs or makes a logger, however it is written."""
    if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Call):
        return _makes_logger(node.value)
    call = node.value if isinstance(node, ast.Expr) else None
    if not isinstance(call, ast.Call):
        return False
    if isinstance(call.func, ast.Name):
        return sources.imported(owner.module, call.func.id) in {f"logging.{one}" for one in _LOG_METHODS}
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in _LOG_METHODS:
        return False
    told = call.args[1:2] if call.func.attr == "log" else call.args[:1]
    return any(map(_is_text, told)) or any(
        _makes_logger(one) or (isinstance(one, ast.Name) and _names_logger(sources, owner, one.id))
        for one in ast.walk(call.func.value)
    )


def _is_text(node: ast.expr) -> bool:
    """Tell whether an expression is a text, perhaps with values filled in."""
    if isinstance(node, ast.BinOp):
        return _is_text(node.left) or _is_text(node.right)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return _is_text(node.func.value)
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _makes_logger(node: ast.AST) -> bool:
    """Tell whether an expression gets a logger, by the last name of the function that it calls."""
    called = node.func if isinstance(node, ast.Call) else None
    name = getattr(called, "attr", getattr(called, "id", ""))
    return name in ("getLogger", "get_logger", "getChild")


def _names_logger(sources: Sources, owner: Definition, name: str) -> bool:
    """Tell whether a name stands for the module of logs or for a logger, in the function or its module."""
    if name == "logging" or sources.imported(owner.module, name) == "logging":
        return True
    made = sources.find(owner.module, name)
    places = [owner.node] if made is None else [owner.node, made.node]
    return any(
        isinstance(one, ast.Assign | ast.AnnAssign)
        and one.value is not None
        and _makes_logger(one.value)
        and name in [target.id for target in ast.walk(one) if isinstance(target, ast.Name)]
        for place in places
        for one in ast.walk(place)
    )


def _primitive_calls(one: Definition, names: Collection[str]) -> Iterator[tuple[str, int, int]]:
    for node in ast.walk(one.node):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in names:
            end = node.func
            yield one.module, end.end_lineno or end.lineno, end.end_col_offset or end.col_offset


def _asks_for(node: ast.AST, families: Collection[str]) -> bool:
    """Tell whether a function branches on the family, by its name or by the name of one."""
    for one in ast.walk(node):
        words = (getattr(one, "id", None), getattr(one, "attr", None), getattr(one, "arg", None))
        if "family" in words or (isinstance(one, ast.Constant) and one.value in families):
            return True
    return False


def _is_registered(node: ast.ClassDef) -> bool:
    return any("register_primitive" in ast.unparse(one) for one in node.decorator_list)


def _own_name(one: Definition) -> Iterator[str]:
    for method in getattr(one.node, "body", []):
        if isinstance(method, _FUNCTIONS) and method.name == "name":
            for node in ast.walk(method):
                if isinstance(node, ast.Return) and isinstance(node.value, ast.Constant):
                    yield str(node.value.value)


# ------------------------------------------------------------------------------------------------
# Table 4: lines of our schedules beside those of the authors.

_LANGUAGE, _ZOO = "makespan.slapo", "makespan.training.zoo"
_SCHEDULES = (f"{_LANGUAGE}.library", "SCHEDULES")
_MODELS = (f"{_ZOO}.families", "_MODELS")
_SIZES = f"{_ZOO}.specs"


class Table4(Experiment):
    """Count the lines of the schedule of every family in its source, which is not imported."""

    name = "table4"
    tables = {"table4": "lines of the schedules, counted in their source, beside the paper's"}
    cells = ("table4",)
    sources = ("measured",)
    on_profile = True
    trains = True
    minutes, mem_mb = 60, 4000
    figures = (
        Figure(
            "table4",
            "Table 4",
            "Lines of the schedules of this project, counted in their source, source {source}: "
            "statements, where a call of a helper that several families share is one, and lines of "
            "text as the authors count. Hollow diamonds are the lines that the paper prints.",
            tables=("table4",),
            draw="schedule_lines",
            sources=("measured",),
        ),
    )

    def compute(self, given: Given) -> dict[str, pd.DataFrame]:
        """Return a row per family."""
        sources = Sources(Path(makespan.__file__).parents[1], [_LANGUAGE, _ZOO])
        schedules = sources.table(*_SCHEDULES)
        counted = ScheduleSources(sources, schedules, {one.module for one in schedules.values()})
        rows = []
        for family in schedules:
            lines = schedule_lines(counted, family)
            row = {"oracle": "measured", "family": family, "model_lines": _model_lines(sources, family)}
            rows.append(row | {name: getattr(lines, name) for name in ("helpers", "expanded", "listing")})
        cells = given.cells["table4"].drop(columns="source")
        return {"table4": pd.DataFrame(rows).merge(cells, how="left", on="family", validate="one_to_one")}


def _model_lines(sources: Sources, family: str) -> int:
    """Count lines of all that the model of a family is made of, without the module that lists sizes."""
    start = sources.table(*_MODELS)[family]
    parts = (one for one in sources.reached(start) if one.module != _SIZES)
    return sum(len(text_lines(one.node, sources.text(one.module))) for one in parts)
