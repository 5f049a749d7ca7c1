"""Copies of modules that run by themselves: what is patched, hooked or compiled comes along.

`copy.deepcopy` drops the hooks of a traced module, and a function that is hung into a module keeps calling
the module that it was made for.
"""

import copy
import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from makespan.slapo._traced import TracedModule

__all__ = ["copy_module"]

_TABLES = ("_parameters", "_buffers", "_modules")
_MADE_ANEW = ("_graph", "_compiled_call_impl")
_Mapped = Callable[[Tensor], Tensor]


def copy_module(module: nn.Module, tensor_of: Callable[[Tensor], Tensor]) -> nn.Module:
    """Return a module of the same structure with other parameters and buffers.

    Graphs are copied, and generators of random numbers in their state; functions and process groups are
    shared, but functions and methods that were made for a module of the original are made for its copy anew.

    Parameters
    ----------
    module
        What is copied; nothing in it changes.
    tensor_of
        Called once for each parameter and buffer, returns the one of the copy; ties stay.
    """
    return _Copier(tensor_of).copy(module)


class _Copier:
    """What has been copied so far, by identity."""

    def __init__(self, tensor_of: _Mapped) -> None:
        self._tensor_of = tensor_of
        self._done: dict[int, Any] = {}
        self._kept: list[Any] = []  # so that no identity is used again

    def copy(self, root: nn.Module) -> nn.Module:
        """Copy a module and all below it: first the objects, then what is in them, as they go in circles."""
        modules = list(root.modules())
        for module in modules:
            self._remember(module, type(module).__new__(type(module)))
        for module in modules:
            for table in ("_parameters", "_buffers"):
                for tensor in getattr(module, table).values():
                    if tensor is not None and id(tensor) not in self._done:
                        self._remember(tensor, self._tensor_of(tensor))
        for module in modules:
            self._fill(module, self._done[id(module)])
        for module in reversed(modules):
            if isinstance(module, fx.GraphModule):
                new = self._done[id(module)]  # of a class of its own, as each traced module is
                type(new).__name__ = type(module).__name__
                new.graph = copy.deepcopy(module.graph)
                if isinstance(module, TracedModule):
                    new.after_copy()
            if "__getstate__" in vars(type(module)):  # it has its own way to come to life, as compiled ones
                get_state: Callable[[], dict[str, Any]] = module.__getstate__
                self._done[id(module)].__setstate__(self._mapped(get_state()))
        copied: nn.Module = self._done[id(root)]
        return copied

    def _remember(self, old: Any, new: Any) -> None:
        self._done[id(old)] = new
        self._kept.append(old)

    def _fill(self, old: nn.Module, new: nn.Module) -> None:
        for name, value in vars(old).items():
            if name in _TABLES:
                mapped = {key: None if one is None else self._done[id(one)] for key, one in value.items()}
                vars(new)[name] = type(value)(mapped)
            elif name in _MADE_ANEW:
                continue
            else:
                mapped = self._mapped(value)
                is_own = mapped is value and isinstance(value, dict | list | set)
                vars(new)[name] = value.copy() if is_own else mapped

    def _mapped(self, value: Any) -> Any:
        """Return what takes the place of a value in the copy, itself if nothing of a module is in it."""
        if id(value) in self._done:
            return self._done[id(value)]
        match value:
            case torch.Generator():
                self._remember(value, value.clone_state())
                return self._done[id(value)]
            case types.MethodType():
                return types.MethodType(value.__func__, self._mapped(value.__self__))
            case functools.partial():
                keywords = {key: self._mapped(one) for key, one in value.keywords.items()}
                return functools.partial(self._mapped(value.func), *map(self._mapped, value.args), **keywords)
            case types.FunctionType():
                return self._function(value)
            case dict():
                mapped = {key: self._mapped(one) for key, one in value.items()}
                return _refilled(value, mapped) if _is_other(mapped, value) else value
            case list() | set() | tuple():
                parts = list(map(self._mapped, value))
                if all(one is other for one, other in zip(parts, value, strict=True)):
                    return value
                return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        if callable(value) and not isinstance(value, type) and hasattr(value, "__dict__"):
            return self._object(value)
        return value

    def _object(self, value: Any) -> Any:
        """Copy an object that is called, such as what wraps a forward, if it has hold of something copied."""
        self._remember(value, value)  # it may have hold of itself
        mapped = {name: self._mapped(one) for name, one in vars(value).items()}
        if not _is_other(mapped, vars(value)):
            return value
        new = object.__new__(type(value))
        vars(new).update(mapped)
        self._done[id(value)] = new
        return new

    def _function(self, value: types.FunctionType) -> types.FunctionType:
        """Make a function anew if it has hold of something that is copied."""
        cells = value.__closure__ or ()
        if not cells:
            return value
        self._remember(value, value)  # a function may have hold of itself
        held = [cell.cell_contents if _is_set(cell) else cell for cell in cells]
        mapped = [
            self._mapped(one) if one is not cell else cell for one, cell in zip(held, cells, strict=True)
        ]
        if all(one is other for one, other in zip(held, mapped, strict=True)):
            return value
        closure = tuple(
            cell if one is cell else types.CellType(one) for one, cell in zip(mapped, cells, strict=True)
        )
        new = types.FunctionType(
            value.__code__, value.__globals__, value.__name__, value.__defaults__, closure
        )
        new.__kwdefaults__, new.__qualname__ = value.__kwdefaults__, value.__qualname__
        vars(new).update(vars(value))
        self._done[id(value)] = new
        return new


def _is_other(mapped: dict[Any, Any], value: dict[Any, Any]) -> bool:
    return any(mapped[key] is not one for key, one in value.items())


def _refilled(value: dict[Any, Any], mapped: dict[Any, Any]) -> dict[Any, Any]:
    new = value.copy()  # of the same class, in the same order
    new.update(mapped)
    return new


def _is_set(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
