"""State that a second pass of a forward finds as the first one did, and leaves as it was before it."""

import copy
import pickle
import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree  # there is no public name for it

from makespan.slapo._traced import FusedModule

__all__ = ["KeptState", "copied_object", "is_object", "kept_arguments", "opened"]

_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}
_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict, Counter)
_STATELESS = frozenset({type(None), bool, int, float, complex, str, bytes, Tensor, nn.Parameter})


class _Draws:
    """Generators of random numbers with the states that they have at one moment.

    Torch's own default generator is not among them; who runs a forward twice sees to it.
    """

    def __init__(self, values: Iterable[Any], with_global: bool) -> None:
        self._access: list[_Access] = []
        if with_global:
            self._access += [(random.getstate, random.setstate), _GLOBAL_NUMPY]
        found = {id(one): one for value in values for one in pytree.tree_leaves(value)}
        self._access += [access for one in found.values() if (access := _access_to(one)) is not None]
        self._states = self.now()

    def now(self) -> list[Any]:
        """Return the states that the generators have now."""
        return [read() for read, _ in self._access]

    def forget_what_is_the_same(self) -> None:
        """Drop generators from which nobody has drawn since."""
        pairs = zip(self._access, self._states, self.now(), strict=True)
        kept = [(access, state) for access, state, now in pairs if not _is_same_state(state, now)]
        self._access, self._states = [one for one, _ in kept], [one for _, one in kept]

    def put_back(self, states: list[Any] | None = None) -> None:
        """Give the generators their states, or others that `now` returned."""
        for (_, write), state in zip(self._access, self._states if states is None else states, strict=True):
            write(state)


_Access = tuple[Callable[[], Any], Callable[[Any], Any]]
_GLOBAL_NUMPY: _Access = (np.random.get_state, np.random.set_state)


def _access_to(value: Any) -> _Access | None:
    """Return what reads and what writes the state of a generator; None for anything else."""
    match value:
        case torch.Generator():
            return value.get_state, value.set_state
        case random.Random():
            return value.getstate, value.setstate
        case np.random.RandomState():
            return value.get_state, value.set_state
        case np.random.Generator():
            bits = value.bit_generator
            return lambda: bits.state, lambda state: setattr(bits, "state", state)
    return None


def _is_same_state(state: Any, other: Any) -> bool:
    if isinstance(state, Tensor):
        return torch.equal(state, other)
    return pickle.dumps(state) == pickle.dumps(other)


class KeptState:
    """Buffers with their values, and attributes, of a module and all that it calls, at one moment.

    Generators of random numbers among attributes and arguments are part of it, and those of Python and NumPy.

    Parameters
    ----------
    root
        The module.
    given
        Arguments of its forward.
    with_global_draws
        Whether the generators that Python and NumPy have for everybody are part of it.
    """

    def __init__(self, root: nn.Module, given: Any = (), with_global_draws: bool = True) -> None:
        modules = list(_called_by(root))
        memo: dict[int, Any] = {}  # of all together, so that what two modules share stays one
        self._attributes = [(one, _attributes_of(one, memo)) for one in modules]
        self._buffers = [(one, dict(one._buffers)) for one in modules if one._buffers]
        held = [one for _, buffers in self._buffers for one in buffers.values() if one is not None]
        self._values = {id(one): (one, one.detach().clone()) for one in held}
        values = [one for module, own in self._attributes for one in map(vars(module).get, own)]
        self.draws = _Draws([values, given], with_global_draws)

    def forget_what_is_the_same(self) -> None:
        """Drop copies of buffers that nobody has changed since, and generators that nobody has used."""
        self.draws.forget_what_is_the_same()
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
        memo: dict[int, Any] = {}
        for module, attributes in self._attributes:
            _set_attributes(module, attributes, memo)
        self.draws.put_back()


class _PutBack:
    """A context that may be entered again, also by what runs in it."""

    def __init__(self, state: KeptState) -> None:
        self._state = state
        self._found: list[list[tuple[nn.Module, dict[str, Any], dict[str, Tensor | None]]]] = []
        self._drawn: list[list[Any]] = []

    def __enter__(self) -> None:
        modules = [one for one, _ in self._state._attributes]
        self._found.append([(one, dict(vars(one)), vars(one)["_buffers"]) for one in modules])
        self._drawn.append(self._state.draws.now())
        self._state.enter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for module, attributes, buffers in self._found.pop():
            for name in vars(module).keys() - attributes.keys():
                del vars(module)[name]
            vars(module).update(attributes, _buffers=buffers)
        self._state.draws.put_back(self._drawn.pop())


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


def _attributes_of(module: nn.Module, memo: dict[int, Any]) -> dict[str, Any]:
    own = {name: one for name, one in vars(module).items() if name not in _OF_EVERY_MODULE}
    return {name: copied_object(one, memo) for name, one in own.items()}


def _set_attributes(module: nn.Module, attributes: dict[str, Any], memo: dict[int, Any]) -> None:
    for name in vars(module).keys() - attributes.keys() - _OF_EVERY_MODULE:
        del vars(module)[name]
    vars(module).update({name: copied_object(one, memo) for name, one in attributes.items()})


def is_object(value: Any) -> bool:
    """Whether a value is an object with a state of its own, such as a cache, but no tensor or module."""
    return (
        (hasattr(value, "__dict__") or bool(_slots_of(value)))
        and not isinstance(value, Tensor | nn.Module | type)
        and not callable(value)
        and not isinstance(value, pytree.TreeSpec)
        and _access_to(value) is None
    )


def _slots_of(value: Any) -> list[str]:
    """Return the attributes of an object whose class, that of a user, lists them in ``__slots__``."""
    kind = type(value)
    space = kind.__module__.partition(".")[0]
    if space == "torch" or (space in sys.stdlib_module_names and space != "__main__"):
        return []
    listed = [vars(one).get("__slots__", ()) for one in kind.__mro__]
    names = [name for one in listed for name in ((one,) if isinstance(one, str) else one)]
    return [name for name in names if not name.startswith("__") and hasattr(value, name)]


def _held_by(value: Any) -> dict[str, Any]:
    """Return the attributes of an object by name."""
    return getattr(value, "__dict__", {}) | {name: getattr(value, name) for name in _slots_of(value)}


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
    if new is value:  # there is only one, such as a logger of a name
        return value
    if isinstance(new, dict):
        if not _STATELESS.issuperset(map(type, value.values())):
            new.update({key: copied_object(one, memo) for key, one in value.items()})
    elif type(new) in (list, deque) and not _STATELESS.issuperset(map(type, value)):
        for place, one in enumerate(value):
            new[place] = copied_object(one, memo)
    if is_object(new):
        for name, one in _held_by(value).items():
            object.__setattr__(new, name, copied_object(one, memo))
    return new


def _has_state(value: Any) -> bool:
    return is_object(value) or type(value) in _CONTAINERS


def kept_arguments(
    args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Callable[[tuple[Any, ...], Mapping[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]] | None:
    """Return what puts objects and containers among arguments back as they are now, None without any.

    What is returned gets the arguments of a later pass, and returns them with copies of the objects.
    """
    leaves, _ = pytree.tree_flatten((args, tuple(kwargs.values())), is_leaf=_has_state)
    memo: dict[int, Any] = {}  # of all together, so that what two arguments share stays one
    objects = {place: copied_object(one, memo) for place, one in enumerate(leaves) if _has_state(one)}
    if not objects:
        return None

    def put_back(own: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        found, spec = pytree.tree_flatten((own, tuple(named.values())), is_leaf=_has_state)
        again: dict[int, Any] = {}
        kept = [
            copied_object(objects[place], again) if place in objects else one
            for place, one in enumerate(found)
        ]
        positional, values = pytree.tree_unflatten(kept, spec)
        return positional, dict(zip(named, values, strict=True))

    return put_back


def opened(value: Any, above: tuple[int, ...] = ()) -> Any:
    """Return an object as a dictionary of its class and its attributes, down to tensors and plain values."""
    if id(value) in above:
        return f"the {type(value).__name__} that holds it"
    inside = (*above, id(value))
    if is_object(value):
        held = {"class": f"{type(value).__module__}.{type(value).__qualname__}"}
        return held | {name: opened(one, inside) for name, one in _held_by(value).items()}
    if type(value) in (list, tuple):
        return type(value)(opened(one, inside) for one in value)
    if type(value) is dict:
        return {key: opened(one, inside) for key, one in value.items()}
    return value
