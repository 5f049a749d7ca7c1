"""Functions that a graph calls as they are: their calls become nodes while a forward is captured."""

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import fx, nn

__all__ = ["recording"]


@contextmanager
def recording(
    tracer: fx.Tracer, module: nn.Module, functions: Sequence[Callable[..., Any]]
) -> Iterator[None]:
    """Make nodes of the calls of some functions, wherever a module has a name for one of them.

    Functions of torch that make a tensor of sizes are among them, since torch itself sees no node in a size
    that stands by itself.
    """
    with ExitStack() as stack:
        for name in _MAKERS:
            stack.enter_context(mock.patch.object(torch, name, _recorded(tracer, getattr(torch, name))))
        if functions:
            stack.enter_context(_recording_named(tracer, module, functions))
        yield


_MAKERS = (
    "finfo",
    "iinfo",
    "arange",
    "empty",
    "eye",
    "full",
    "linspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "zeros",
)


@contextmanager
def _recording_named(
    tracer: fx.Tracer, module: nn.Module, functions: Sequence[Callable[..., Any]]
) -> Iterator[None]:
    recorded = {id(one): _recorded(tracer, one) for one in functions}
    spaces = {id(space): space for space in _namespaces(module)}
    with ExitStack() as stack:
        for space in spaces.values():
            names = {name: recorded[id(one)] for name, one in list(space.items()) if id(one) in recorded}
            if names:
                stack.enter_context(mock.patch.dict(space, names))
        yield


def _namespaces(module: nn.Module) -> Iterator[dict[str, Any]]:
    for loaded in list(sys.modules.values()):
        if not getattr(loaded, "__name__", "torch").startswith("torch"):
            yield vars(loaded)
    for inner in module.modules():
        function = getattr(type(inner).forward, "__globals__", None)
        yield from (one for one in (function, *_behind(type(inner).forward)) if isinstance(one, dict))


def _behind(function: object) -> Iterator[dict[str, Any]]:
    """Namespaces of what a decorator wraps, whether it says so or holds it in a closure."""
    seen: set[int] = set()
    waiting: list[Any] = [function]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(space := getattr(one, "__globals__", None), dict):
            yield space
        cells = (cell.cell_contents for cell in getattr(one, "__closure__", None) or ())
        waiting += [getattr(one, "__wrapped__", None), *cells]


def _recorded(tracer: fx.Tracer, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def record(*args: Any, **kwargs: Any) -> Any:
        proxies: list[Any] = []

        def note(value: Any) -> Any:
            proxies.extend([value] if isinstance(value, fx.Proxy) else [])
            return value

        fx.node.map_aggregate((args, kwargs), note)
        if not proxies:
            return function(*args, **kwargs)
        return tracer.create_proxy("call_function", function, args, kwargs)

    return record
