"""Patterns to look for in graphs: functions or modules, of which the data flow counts."""

import enum
import re
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any, cast

from torch import fx, nn

from makespan.slapo._errors import ArgumentError, KindError

__all__ = ["ANY", "ModulePattern", "Pattern", "PatternGraph", "call_module", "pattern_graph"]


class _Any(enum.Enum):
    ANY = "any constant"


ANY = _Any.ANY
"""A literal in a pattern that stands for any value."""


class Pattern(nn.Module):
    """A pattern with modules of its own: subclass it, and write in ``forward`` what is looked for.

    A module in it stands for any module of its class, or for the function that computes the same; a
    `ModulePattern` for any module by its name.
    """


class ModulePattern(nn.Module):
    """Any module of the graph whose target matches a regular expression from its start.

    Parameters
    ----------
    regex
        Regular expression.
    """

    def __init__(self, regex: str) -> None:
        super().__init__()
        self.regex = regex

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse to compute: it only stands for a module."""
        raise KindError("a ModulePattern computes nothing; it belongs in a pattern for find")


def call_module(regex: str, *args: Any, **kwargs: Any) -> Any:
    """Stand, in a pattern, for the call of any module whose target matches a regular expression.

    Parameters
    ----------
    regex
        Regular expression, matched from the start of the target.
    args, kwargs
        What the module is called with.

    Raises
    ------
    KindError
        It is called outside of a pattern; also a `TypeError`.
    """
    proxy = next((one for one in (*args, *kwargs.values()) if isinstance(one, fx.Proxy)), None)
    if proxy is None:
        raise KindError(
            "call_module stands for a module in a pattern for find; it cannot be called elsewhere"
        )
    return proxy.tracer.create_proxy("call_function", call_module, (regex, *args), kwargs)


class _PatternTracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Look into no module: each stands for one."""
        return True


@dataclass(frozen=True, slots=True)
class PatternGraph:
    """A pattern as a graph: its parameters in order, and the nodes of its results."""

    owner: nn.Module
    parameters: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    returns_tuple: bool

    def regex(self, node: fx.Node) -> str | None:
        """Return the expression that a node has for the target of a module, if it has one."""
        if node.op == "call_function" and node.target is call_module:
            return str(node.args[0])
        if node.op == "call_module":
            module = self.owner.get_submodule(str(node.target))
            return module.regex if isinstance(module, ModulePattern) else None
        return None


def pattern_graph(pattern: Callable[..., Any]) -> PatternGraph:
    """Capture a pattern."""
    if not isinstance(pattern, FunctionType | Pattern):
        raise KindError(
            f"find got {pattern!r}; accepted: a regular expression for targets of modules, a function or a"
            " Pattern"
        )
    name = getattr(pattern, "__name__", type(pattern).__name__)
    try:
        graph = _PatternTracer().trace(pattern)
    except Exception as error:
        raise ArgumentError(f"the pattern {name} cannot be traced: {error}") from error
    results: list[fx.Node] = []
    output = graph.output_node().args[0]
    fx.node.map_arg(output, results.append)
    parameters = tuple(graph.find_nodes(op="placeholder"))
    unused = [str(one.target) for one in parameters if not one.users]
    if unused:
        raise ArgumentError(f"the pattern {name} does not use its parameter {unused[0]!r}")
    if not results or any(one.op in ("placeholder", "get_attr") for one in results):
        raise ArgumentError(f"the pattern {name} has to return what it computes")
    for node in graph.nodes:
        _check_regex(node, name)
    owner = pattern if isinstance(pattern, nn.Module) else nn.Module()
    return PatternGraph(owner, parameters, tuple(dict.fromkeys(results)), not isinstance(output, fx.Node))


def _check_regex(node: fx.Node, name: str) -> None:
    if node.op == "call_function" and node.target is call_module:
        checked_regex(cast("str", node.args[0]), f"the pattern {name}")


def checked_regex(text: object, where: str) -> re.Pattern[str]:
    """Compile a regular expression."""
    if not isinstance(text, str):
        raise KindError(f"{where}: found {text!r}; accepted: a regular expression")
    try:
        return re.compile(text)
    except re.error as error:
        raise ArgumentError(f"{where}: {text!r} is no regular expression: {error}") from None
