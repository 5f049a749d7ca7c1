"""State that a second pass of a forward finds as the first one did, and leaves as it was before it."""

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree  # there is no public name for it

from makespan.papers.slapo.language._traced import FusedModule

__all__ = ["KeptState", "copied_object", "is_object", "kept_arguments", "opened"]

_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}
_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict, Counter)


class KeptState:
    """Buffers with their values, and attributes, of a module and all that it calls, at one moment."""

    def __init__(self, root: nn.Module) -> None:
        modules = list(_called_by(root))
        self._attributes = [(one, _attributes_of(one)) for one in modules]
        self._buffers = [(one, dict(one._buffers)) for one in modules if one._buffers]
        held = [one for _, buffers in self._buffers for one in buffers.values() if one is not None]
        self._values = {id(one): (one, one.detach().clone()) for one in held}

    def forget_what_is_the_same(self) -> None:
        """Drop copies of buffers that nobody has changed since."""
        now = {id(one) for module, _ in self._buffers for one in module._buffers.values() if one is not None}
        self._values = {
            key: (one, value)
            for key, (one, value) in self._values.items()
            if key not in now or not torch.equal(one, value)
        }

    def put_back(self) -> "_PutBack":
        """Return a context in which modules have this state; at its end they have what they had before it."""
        return _PutBack(self)

    def enter(self) -> None:
        """Give modules this state, buffers as tensors of their own."""
        fresh = {key: value.clone() for key, (_, value) in self._values.items()}
        for module, buffers in self._buffers:
            vars(module)["_buffers"] = {name: fresh.get(id(one), one) for name, one in buffers.items()}
        for module, attributes in self._attributes:
            _set_attributes(module, attributes)


class _PutBack:
    """A context that may be entered again, also by what runs in it."""

    def __init__(self, state: KeptState) -> None:
        self._state = state
        self._found: list[list[tuple[nn.Module, dict[str, Any], dict[str, Tensor | None]]]] = []

    def __enter__(self) -> None:
        modules = [one for one, _ in self._state._attributes]
        self._found.append([(one, dict(vars(one)), vars(one)["_buffers"]) for one in modules])
        self._state.enter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for module, attributes, buffers in self._found.pop():
            for name in vars(module).keys() - attributes.keys():
                del vars(module)[name]
            vars(module).update(attributes, _buffers=buffers)


def _called_by(root: nn.Module) -> Iterator[nn.Module]:
    """Go through the modules that a forward may run, those of a part of a graph too."""
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        for one in waiting.pop().modules():
            if id(one) in seen or isinstance(one, torch.jit.ScriptModule):
                continue
            seen.add(id(one))
            yield one
            if isinstance(one, FusedModule):
                waiting += [vars(one)[name] for name in one.borrowed]


def _attributes_of(module: nn.Module) -> dict[str, Any]:
    return {name: _copied(one) for name, one in vars(module).items() if name not in _OF_EVERY_MODULE}


def _set_attributes(module: nn.Module, attributes: dict[str, Any]) -> None:
    for name in vars(module).keys() - attributes.keys() - _OF_EVERY_MODULE:
        del vars(module)[name]
    vars(module).update({name: _copied(one) for name, one in attributes.items()})


def _copied(value: Any) -> Any:
    return copy.copy(value) if type(value) in _CONTAINERS else value


def is_object(value: Any) -> bool:
    """Whether a value is an object with a state of its own, such as a cache, but no tensor or module."""
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, Tensor | nn.Module | type)
        and not callable(value)
        and not isinstance(value, pytree.TreeSpec)
    )


def copied_object(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """Return a value with a state of its own that is made of the same tensors, modules and functions.

    What cannot be copied, such as a lock, is shared.
    """
    memo = {} if memo is None else memo
    if id(value) in memo:
        return memo[id(value)][0]
    if type(value) is tuple:
        return tuple(copied_object(one, memo) for one in value)
    if not (is_object(value) or type(value) in _CONTAINERS):
        return value
    try:
        new = copy.copy(value)
    except (TypeError, NotImplementedError, RuntimeError):
        return value
    memo[id(value)] = new, value  # the old one too, so that no identity is used again
    if isinstance(new, dict):
        new.update({key: copied_object(one, memo) for key, one in value.items()})
    elif type(new) in (list, deque):
        for place, one in enumerate(value):
            new[place] = copied_object(one, memo)
    if is_object(new):
        vars(new).update({name: copied_object(one, memo) for name, one in vars(value).items()})
    return new


def kept_arguments(given: Any) -> Callable[[Any], Any] | None:
    """Return what puts objects among arguments back as they are now, None where there are none.

    What is returned gets the arguments of a later pass, and returns them with copies of the objects.
    """
    leaves, _ = pytree.tree_flatten(given, is_leaf=is_object)
    objects = {place: copied_object(one) for place, one in enumerate(leaves) if is_object(one)}
    if not objects:
        return None

    def put_back(later: Any) -> Any:
        found, spec = pytree.tree_flatten(later, is_leaf=is_object)
        kept = [copied_object(objects[place]) if place in objects else one for place, one in enumerate(found)]
        return pytree.tree_unflatten(kept, spec)

    return put_back


def opened(value: Any, above: tuple[int, ...] = ()) -> Any:
    """Return an object as a dictionary of its class and its attributes, down to tensors and plain values."""
    if id(value) in above:
        return f"the {type(value).__name__} that holds it"
    inside = (*above, id(value))
    if is_object(value):
        held = {"class": f"{type(value).__module__}.{type(value).__qualname__}"}
        return held | {name: opened(one, inside) for name, one in vars(value).items()}
    if type(value) in (list, tuple):
        return type(value)(opened(one, inside) for one in value)
    if type(value) is dict:
        return {key: opened(one, inside) for key, one in value.items()}
    return value
