"""Table 4: lines of the schedules of the library, counted in their syntax trees.

Neither the schedules nor torch are imported: `Sources` parses modules and resolves names across them.
"""

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
# Parsed modules, and the definitions that names in them refer to.

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
    """Modules of a project by dotted name, parsed on demand.

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
        """Sorted names of all modules."""
        return sorted(self._paths)

    @cached_property
    def _trees(self) -> dict[str, ast.Module]:
        return {name: parse_source(path.read_bytes(), str(path)) for name, path in self._paths.items()}

    def text(self, module: str) -> str:
        """Return the source of a module."""
        return self._paths[module].read_text("utf-8")

    def tops(self, module: str) -> dict[str, Definition]:
        """Return the definitions at the top of a module by name."""
        if module not in self._tops:
            definitions: dict[str, Definition] = {}
            for node in _statements(self._trees[module].body):
                if isinstance(node, Function | ast.ClassDef):
                    names = [node.name]
                else:
                    targets = node.targets if isinstance(node, ast.Assign) else []
                    targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
                    names = [target.id for target in targets if isinstance(target, ast.Name)]
                definitions |= {name: Definition(module, name, node) for name in names}
            self._tops[module] = definitions
        return self._tops[module]

    def find(self, module: str, name: str) -> Definition | None:
        """Return the definition that a name of a module refers to, directly or by imports, or None."""
        for _ in range(len(self._paths) + 1):
            if module not in self._paths:
                return None
            if name in self.tops(module):
                return self.tops(module)[name]
            imported = self._imported(module).get(name)
            if imported is None:
                return None
            module, name = imported
        raise InputError(
            f"circular imports of {name!r}, found at {module}; expected a module that defines it"
        )

    def imported(self, module: str, name: str) -> str | None:
        """Return the full name of the object that a module imports under a name, or None."""
        for node in ast.walk(self._trees[module]):
            if isinstance(node, ast.Import | ast.ImportFrom):
                home = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return f"{home}{alias.name}"
        return None

    def _imported(self, module: str) -> dict[str, tuple[str, str]]:
        """Return the module and name behind each name that a module imports by ``from ... import``."""
        if module not in self._imports:
            package = module if self._paths[module].name == "__init__.py" else module.rpartition(".")[0]
            imports = {}
            for node in ast.walk(self._trees[module]):
                if not isinstance(node, ast.ImportFrom):
                    continue
                base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
                home = ".".join([*base, *([node.module] if node.module else [])])
                for alias in node.names:
                    imports[alias.asname or alias.name] = home, alias.name
            self._imports[module] = imports
        return self._imports[module]

    def named_by(self, definition: Definition, names: Callable[[ast.AST], Iterator[str]]) -> list[Definition]:
        """Return the definitions that names in a definition refer to, each once, in order."""
        targets = (self.find(definition.module, name) for name in names(definition.node))
        return list(dict.fromkeys(each for each in targets if each is not None and each != definition))

    def reached(self, start: Definition) -> list[Definition]:
        """Return a definition and all that it refers to, directly or not, in breadth-first order."""
        reached = [start]
        for definition in reached:  # grows while it is read
            reached += [each for each in self.named_by(definition, loaded_names) if each not in reached]
        return reached

    def table(self, module: str, name: str) -> dict[str, Definition]:
        """Return the definitions in a dictionary ``{"key": name, ...}`` of a module, by key."""
        dictionary = self.find(module, name)
        value = getattr(dictionary.node, "value", None) if dictionary else None
        if dictionary is None or not isinstance(value, ast.Dict):
            raise unknown_name("dictionary of functions", f"{module}.{name}", self.modules)
        entries = {}
        for key, entry in zip(value.keys, value.values, strict=True):
            target = self.find(dictionary.module, entry.id) if isinstance(entry, ast.Name) else None
            if not isinstance(key, ast.Constant) or target is None:
                raise InputError(
                    f"{dictionary.place}: found an entry {ast.unparse(entry)}; expected 'key': name"
                )
            entries[str(key.value)] = target
        return entries


def loaded_names(node: ast.AST) -> Iterator[str]:
    """Yield the names that a node reads."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load):
            yield part.id


def docstring_of(node: ast.AST) -> ast.stmt | None:
    """Return the docstring statement of a function or class, or None."""
    first = node.body[0] if isinstance(node, Function | ast.ClassDef) else None
    is_text = isinstance(first, ast.Expr) and isinstance(getattr(first.value, "value", None), str)
    return first if is_text else None


def text_lines(node: ast.stmt, text: str) -> list[int]:
    """Return the line numbers of a definition without blank lines, comments and docstrings."""
    first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
    last = node.end_lineno or node.lineno
    lines = text.splitlines()
    in_docstrings = {
        number
        for part in ast.walk(node)
        if (docstring := docstring_of(part)) is not None
        for number in range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1)
    }
    kept = (number for number in range(first, last + 1) if number not in in_docstrings)
    return [number for number in kept if (line := lines[number - 1].strip()) and not line.startswith("#")]


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements at the top of a module, including those inside ``if``."""
    for node in body:
        if isinstance(node, ast.If):
            yield from _statements([*node.body, *node.orelse])
        else:
            yield node


# ------------------------------------------------------------------------------------------------
# Lengths of schedules. Each family has three counts:
#
# - `helpers`: statements, where the call of a helper is one. A helper is a function that at least two
# families   call and that does not branch on the family; any other function counts with all of its
# statements. - `expanded`: places that call a primitive, including those in helpers, each place once. -
# `listing`: lines of text of the function without those that contain "for", as the authors count.
#
# No count includes function headers, loop headers, docstrings, comments, or statements that only log.

_LOG_METHODS = ("debug", "info", "warning", "error", "exception", "critical", "log")
_LOOPS = ast.For | ast.AsyncFor | ast.While


@dataclass(frozen=True)
class ScheduleLines:
    """Counts of one schedule."""

    helpers: int
    expanded: int
    listing: int
    called: tuple[str, ...]
    """Helpers, whose calls count as one line."""
    counted_whole: tuple[str, ...]
    """Functions that it calls and that are not helpers."""


@dataclass(frozen=True)
class ScheduleSources:
    """Source files with schedules, and the modules that define them.

    Attributes
    ----------
    sources
        Modules of the schedules, their helpers, and the primitives.
    schedules
        Function of each family.
    library
        Modules whose functions count. Functions of other modules belong to the language.
    """

    sources: Sources
    schedules: Mapping[str, Definition]
    library: Collection[str]

    @cached_property
    def primitives(self) -> frozenset[str]:
        """Names of primitives: the return values of ``name()`` of classes with ``register_primitive``."""
        names = {
            str(part.value.value)
            for module in self.sources.modules
            for definition in self.sources.tops(module).values()
            if isinstance(definition.node, ast.ClassDef)
            and any("register_primitive" in ast.unparse(each) for each in definition.node.decorator_list)
            for method in definition.node.body
            if isinstance(method, Function) and method.name == "name"
            for part in ast.walk(method)
            if isinstance(part, ast.Return) and isinstance(part.value, ast.Constant)
        }
        if not names:
            raise InputError(
                f"no class is decorated with register_primitive; searched {', '.join(self.sources.modules)}"
            )
        return frozenset(names)

    @cached_property
    def functions(self) -> Mapping[str, tuple[Definition, ...]]:
        """Functions of the library that the schedule of a family reaches, without the schedule itself."""
        return {family: tuple(self._reached(start)) for family, start in self.schedules.items()}

    @cached_property
    def helpers(self) -> frozenset[Definition]:
        """Functions that count as one line where they are called."""
        families: dict[Definition, set[str]] = {}
        for family, reached in self.functions.items():
            for function in reached:
                families.setdefault(function, set()).add(family)
        return frozenset(
            function
            for function, callers in families.items()
            if len(callers) > 1 and not _branches_on_family(function.node, self.schedules)
        )

    def whole(self, family: str) -> list[Definition]:
        """Return the functions that count with their statements: reached without passing a helper."""
        return self._reached(self.schedules[family], self.helpers)

    def _reached(self, start: Definition, but: Collection[Definition] = ()) -> list[Definition]:
        reached = [start]
        for definition in reached:  # grows while it is read
            reached += [
                each
                for each in self.sources.named_by(definition, loaded_names)
                if each.module in self.library and isinstance(each.node, Function)
                if each not in reached and each not in but
            ]
        return reached[1:]


def schedule_lines(source: ScheduleSources, family: str) -> ScheduleLines:
    """Count the schedule of a family."""
    start = source.schedules[family]
    whole = source.whole(family)
    n_statements = sum(_n_statements(source.sources, each, _body(each.node)) for each in (start, *whole))
    # A place is the end of the attribute that is called: a schedule that is cut into lines counts the same.
    places = {
        (function.module, node.func.end_lineno, node.func.end_col_offset)
        for function in (start, *source.functions[family])
        for node in ast.walk(function.node)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if node.func.attr in source.primitives
    }
    text = source.sources.text(start.module)
    body = [number for number in text_lines(start.node, text) if number >= _body(start.node)[0].lineno]
    listing = [number for number in body if "for" not in text.splitlines()[number - 1]]
    called = [function.name for function in source.functions[family] if function in source.helpers]
    names = tuple(function.name for function in whole)
    return ScheduleLines(n_statements, len(places), len(listing), tuple(called), names)


def _body(node: ast.stmt) -> Sequence[ast.stmt]:
    docstring = docstring_of(node)
    body: Sequence[ast.stmt] = getattr(node, "body", [])
    return [statement for statement in body if statement is not docstring]


def _n_statements(sources: Sources, owner: Definition, body: Sequence[ast.stmt]) -> int:
    """Count the statements of a body, with those nested in them."""
    number = 0
    for node in body:
        is_free = isinstance(node, _LOOPS | ast.Pass | ast.Try) or _only_logs(sources, owner, node)
        number += not is_free
        if isinstance(node, Function):
            number += _n_statements(sources, owner, _body(node))
            continue
        nested = [each for name in ("body", "orelse", "finalbody") for each in getattr(node, name, [])]
        nested += [each for handler in getattr(node, "handlers", []) for each in handler.body]
        nested += [each for case in getattr(node, "cases", []) for each in case.body]
        number += _n_statements(sources, owner, nested)
    return number


def _only_logs(sources: Sources, owner: Definition, node: ast.stmt) -> bool:
    """Tell whether a statement only logs, or makes a logger."""
    if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Call):
        return _makes_logger(node.value)
    call = node.value if isinstance(node, ast.Expr) else None
    if not isinstance(call, ast.Call):
        return False
    if isinstance(call.func, ast.Name):
        return sources.imported(owner.module, call.func.id) in {f"logging.{name}" for name in _LOG_METHODS}
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in _LOG_METHODS:
        return False
    message = call.args[1:2] if call.func.attr == "log" else call.args[:1]
    return any(map(_is_text, message)) or any(
        _makes_logger(part) or (isinstance(part, ast.Name) and _names_logger(sources, owner, part.id))
        for part in ast.walk(call.func.value)
    )


def _is_text(node: ast.expr) -> bool:
    """Tell whether an expression is a string, possibly with values filled in."""
    if isinstance(node, ast.BinOp):
        return _is_text(node.left) or _is_text(node.right)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return _is_text(node.func.value)
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _makes_logger(node: ast.AST) -> bool:
    """Tell whether an expression gets a logger, judged by the last name of the function that it calls."""
    called = node.func if isinstance(node, ast.Call) else None
    name = getattr(called, "attr", getattr(called, "id", ""))
    return name in ("getLogger", "get_logger", "getChild")


def _names_logger(sources: Sources, owner: Definition, name: str) -> bool:
    """Tell whether a name refers to the module ``logging`` or to a logger, in the function or its module."""
    if name == "logging" or sources.imported(owner.module, name) == "logging":
        return True
    definition = sources.find(owner.module, name)
    places = [owner.node] if definition is None else [owner.node, definition.node]
    return any(
        isinstance(part, ast.Assign | ast.AnnAssign)
        and part.value is not None
        and _makes_logger(part.value)
        and name in [target.id for target in ast.walk(part) if isinstance(target, ast.Name)]
        for place in places
        for part in ast.walk(place)
    )


def _branches_on_family(node: ast.AST, families: Collection[str]) -> bool:
    """Tell whether a function branches on the family: it mentions ``family``, or a family by its name."""
    for part in ast.walk(node):
        names = (getattr(part, "id", None), getattr(part, "attr", None), getattr(part, "arg", None))
        if "family" in names or (isinstance(part, ast.Constant) and part.value in families):
            return True
    return False


# ------------------------------------------------------------------------------------------------
# The experiment: lines of our schedules, with those of the authors.

_LANGUAGE, _ZOO = "makespan.slapo", "makespan.training.zoo"
_SCHEDULES = (f"{_LANGUAGE}.library", "SCHEDULES")
_MODELS = (f"{_ZOO}.families", "_MODELS")
_SIZES = f"{_ZOO}.specs"


class Table4(Experiment):
    """Count the lines of the schedule of every family in its source."""

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
            "Lines of the schedules of this project, source {source}: counted "
            "once in their source code. Statements, where a call of a helper that "
            "several families share is one, and lines of text as the authors "
            "count. Hollow diamonds are the lines that the paper prints.",
            tables=("table4",),
            draw="schedule_lines",
            sources=("measured",),
        ),
    )

    def compute(self, given: Given) -> dict[str, pd.DataFrame]:
        """Return a row per family."""
        sources = Sources(Path(makespan.__file__).parents[1], [_LANGUAGE, _ZOO])
        schedules, models = sources.table(*_SCHEDULES), sources.table(*_MODELS)
        counted = ScheduleSources(sources, schedules, {function.module for function in schedules.values()})
        rows = []
        for family in schedules:
            lines = schedule_lines(counted, family)
            # The model is everything that its class reaches, without the module that lists sizes.
            parts = [part for part in sources.reached(models[family]) if part.module != _SIZES]
            rows.append({
                "oracle": "measured", "family": family,
                "model_lines": sum(len(text_lines(part.node, sources.text(part.module))) for part in parts),
                "helpers": lines.helpers, "expanded": lines.expanded, "listing": lines.listing,
            })  # fmt: skip
        cells = given.cells["table4"].drop(columns="source")
        return {"table4": pd.DataFrame(rows).merge(cells, how="left", on="family", validate="one_to_one")}
