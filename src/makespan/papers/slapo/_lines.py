"""Table 4: how long schedules are, counted in the syntax tree of their functions; torch is not imported.

Three counts a family. `helpers`: statements, where a call of a helper is one; a helper is a function that two
families at least call and that does not ask for the family, and what is none counts with all of its
statements. `expanded`: places that call a primitive, those in helpers included, each once. `listing`: lines
of text of the function without those that contain "for", as the authors count. Not counted are the header of
the function, headers of loops, docstrings, comments, loggers that are made and messages to a log.
"""

import ast
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from makespan.errors import InputError
from makespan.papers.slapo._definitions import Definition, Sources, docstring_of, loaded_names, text_lines

__all__ = ["ScheduleLines", "ScheduleSources", "schedule_lines"]

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
    """Where schedules stand.

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
    """Say whether a statement only tells a log something, or makes a logger, however it is written."""
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
    """Whether an expression is written as a text, perhaps with values filled in."""
    if isinstance(node, ast.BinOp):
        return _is_text(node.left) or _is_text(node.right)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return _is_text(node.func.value)
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _makes_logger(node: ast.AST) -> bool:
    """Whether an expression gets a logger: the last name of what is called says so."""
    called = node.func if isinstance(node, ast.Call) else None
    name = getattr(called, "attr", getattr(called, "id", ""))
    return name in ("getLogger", "get_logger", "getChild")


def _names_logger(sources: Sources, owner: Definition, name: str) -> bool:
    """Whether a name stands for the module of logs, or for a logger, in the function or its module."""
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
    """Say whether a function decides by the family: by its name, or by a name of one."""
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
