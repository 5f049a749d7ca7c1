"""State that code of the user keeps in Python: attributes of the model, variables of its files.

What a forward pass changes there belongs to the logical worker whose pass it was, and what code after the sum
of gradients changes belongs to all, as buffers do. A value is taken as tensors and plain values, so that it
can lie in a checkpoint, and given back in place where it can change in place, because others may refer to it.
"""

import argparse
import io
import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.random import mtrand
from torch import Tensor, nn

from makespan.errors import CheckpointError

ABSENT = ("absent",)
"""What stands for a value that is not there (yet)."""
_INTERNAL = set(vars(nn.Module())) - {"training"}
_PLAIN = {bool, int, float, str, bytes, type(None)}
_OPEN = (nn.Module, SimpleNamespace, argparse.Namespace)
_STEPPERS = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)
_MOST_ITEMS = 10_000
_LARGE_BYTES, _MOST_BYTES = 1 << 23, 1 << 26
"""From this size on, and beyond so many bytes in one place, values are compared by samples."""
_SAMPLED = 4096
_OF_DICTIONARY = 3
_MOST_OUTPUT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a value lies: under a key of a dictionary, as an attribute of a class, or in a cell."""

    owner: Any
    key: str

    def get(self) -> Any:
        if isinstance(self.owner, dict):
            return self.owner.get(self.key, ABSENT)
        if isinstance(self.owner, type):
            return vars(self.owner).get(self.key, ABSENT)
        try:
            return self.owner.cell_contents
        except ValueError:
            return ABSENT

    def put(self, value: Any) -> None:
        if isinstance(self.owner, dict):
            if value is ABSENT:
                self.owner.pop(self.key, None)
            else:
                self.owner[self.key] = value
        elif isinstance(self.owner, type):
            if value is not ABSENT:
                setattr(self.owner, self.key, value)
            elif self.key in vars(self.owner):
                delattr(self.owner, self.key)
        elif value is not ABSENT:
            self.owner.cell_contents = value


def user_modules(files: Iterable[str], names: Iterable[str]) -> list[ModuleType]:
    """Return the modules that are code of the user: those named, and what lies beside their files."""
    folders = {Path(file).resolve().parent for file in files}
    packages = {name.partition(".")[0] for name in names} - {"torch", "makespan"}
    found, every = [], dict[str, Any](sys.modules)
    for name, module in every.items():
        file = getattr(module, "__file__", None)
        if not file or not isinstance(module, ModuleType) or "site-packages" in file:
            continue
        top = name.partition(".")[0]
        if top == "makespan" or name == "__main__":
            continue
        if top in packages or Path(file).resolve().parent in folders:
            found.append(module)
    return found


class UserState:
    """Finds, takes and gives back what code of the user keeps in Python.

    Parameters
    ----------
    model
        Whose modules are looked at; what has a place of its own in a checkpoint, such as parameters and
        buffers, is left out.
    modules
        Modules that are code of the user.
    others
        Further objects by name, such as the optimizer. Checkpoints have their ``state_dict``; their other
        attributes are looked at.
    """

    def __init__(
        self, model: nn.Module, modules: Sequence[ModuleType], others: Mapping[str, object] | None = None
    ) -> None:
        self._model = model
        self._named = {
            name: one
            for name, one in (others or {}).items()
            if hasattr(one, "__dict__") and not type(one).__module__.startswith("makespan.")
        }
        self._modules = {_label(module): module for module in modules}
        self._names = {module.__name__: name for name, module in self._modules.items()}
        self._others = {id(one) for one in (others or {}).values()} | _of_all_code()
        self._found: dict[str, _Place] = {}
        self._known: set[int] = set()

    def places(self) -> dict[str, _Place]:
        """Return where values lie now, by name."""
        found: dict[str, _Place] = {}
        for path, module in self._model.named_modules():
            is_own = not type(module).__module__.startswith("torch.")
            where = f"model.{path}" if path else "model"
            for key, value in vars(module).items():
                if key not in _INTERNAL and (is_own or type(value) in _PLAIN):
                    found[f"{where}.{key}"] = _Place(vars(module), key)
        for label, other in self._named.items():
            left_out = _left_out(other)
            found |= {
                f"{label}.{key}": _Place(vars(other), key) for key in vars(other) if key not in left_out
            }
        for label, module in self._modules.items():
            for key, value in list(vars(module).items()):
                if key.startswith("__") or isinstance(value, ModuleType):
                    continue
                name = f"{label}:{key}"
                if isinstance(value, type | FunctionType):
                    if value.__module__ == module.__name__ and value.__name__ == key:
                        found |= self._inside(name, value)
                elif id(value) not in self._others:
                    found[name] = _Place(vars(module), key)
        self._found = found
        self._known = {id(one) for one in self._model.modules()} | self._others
        self._known |= {id(one) for one in self._model.parameters()}
        self._known |= {id(one) for one in self._model.buffers()}
        return found

    def _inside(self, name: str, value: "type | FunctionType") -> Iterator[tuple[str, _Place]]:
        """Places in a class, or in a function and what it closes over."""
        if isinstance(value, FunctionType):
            for key in vars(value):
                yield f"{name}.{key}", _Place(vars(value), key)
            for key, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                yield f"{name}.{key}", _Place(cell, key)
            return
        for key, one in vars(value).items():
            if not key.startswith("__") and not callable(one) and not hasattr(type(one), "__get__"):
                yield f"{name}.{key}", _Place(value, key)

    def snapshot(self, left_out: Iterable[str] = ()) -> dict[str, Any]:
        """Return all values for comparison; of a very large one a fingerprint."""
        skipped, places = set(left_out), self.places()
        return {
            name: _Taking(self._names, self._known, is_whole=False).take(place.get())
            for name, place in places.items()
            if name not in skipped
        }

    def iterators(self) -> dict[str, str]:
        """Return the kinds of iterators that are kept, by name: nobody can see where they are."""
        values = {name: place.get() for name, place in self.places().items()}
        return {
            name: type(value).__name__
            for name, value in values.items()
            if isinstance(value, Iterator) and not isinstance(value, io.IOBase)
        }

    def foreign_object(self, value: Any) -> str:
        """Class of an object that could not be made again where a checkpoint is read; empty for none."""
        if (
            type(value) is tuple
            and value
            and value[0] in ("object", "stepper")
            and value[1].split(":")[0] not in self._modules
        ):
            return str(value[1]).replace(":", ".")
        return ""

    def take(self, names: Iterable[str]) -> dict[str, Any]:
        """Return copies of values as tensors and plain values, `ABSENT` for what is not there."""
        return {name: self._take(self._found.get(name) or self._place_of(name)) for name in names}

    def _take(self, place: _Place | None) -> Any:
        if place is None or (value := place.get()) is ABSENT:
            return ABSENT
        return _Taking(self._names, self._known, is_whole=True).take(value)

    def give(self, values: Mapping[str, Any]) -> None:
        """Put values back that `take` or `snapshot` returned; what cannot be put back stays."""
        for name, value in values.items():
            place = self._found.get(name) or self._place_of(name)
            if place is not None:
                place.put(ABSENT if is_absent(value) else self._made(name, value, place.get()))

    def _place_of(self, name: str) -> _Place | None:
        """Return the place of a value that is not there yet."""
        if name.startswith("model."):
            path, _, key = name.removeprefix("model").removeprefix(".").rpartition(".")
            module = dict(self._model.named_modules()).get(path)
            return None if module is None else _Place(vars(module), key)
        home, _, rest = name.rpartition(":")
        module = self._modules.get(home)
        if module is None:
            label, _, key = name.partition(".")
            return _Place(vars(self._named[label]), key) if label in self._named else None
        owner, _, key = rest.rpartition(".")
        if not owner:
            return _Place(vars(module), key)
        holder = getattr(module, owner, None)
        return _Place(vars(holder) if isinstance(holder, FunctionType) else holder, key) if holder else None

    def _made(self, name: str, saved: Any, now: Any) -> Any:
        """Return what shall lie at a place: what lies there, changed in place, or something new."""
        if type(saved) in _PLAIN:
            return saved
        if isinstance(saved, Tensor):
            return _copied(saved, now)
        kind, *rest = saved
        if kind == "kept":
            return now
        if kind == "array":
            return _array(rest, now)
        if kind == "random":
            _set_generator(now, rest[0])
            return now
        if kind == "object":
            return self._object(name, rest[0], rest[1], now)
        if kind == "stepper":
            if not isinstance(now, _STEPPERS) or _kind(type(now), self._names) != rest[0]:
                found = f"{name} is {type(now).__name__}, and the checkpoint has a {rest[0]} there"
                raise CheckpointError(f"{found}; expected one that is made where the model is built")
            state = self._made(name, rest[1], None)
            if isinstance(now, torch.optim.Optimizer):
                load_optimizer(now, state)
            else:
                now.load_state_dict(state)
            return now
        if kind == "dict":
            old: dict[Any, Any] = now if isinstance(now, dict) else {}
            keys = [_key(self._made(name, key, None)) for key in rest[1]]
            fresh = {key: self._made(name, one, old.get(key)) for key, one in zip(keys, rest[0], strict=True)}
            return _filled(now, fresh) if isinstance(now, dict) else fresh
        olds = _items(now)
        made = [
            self._made(name, one, olds[number] if number < len(olds) else None)
            for number, one in enumerate(rest[0])
        ]
        return _sequence(kind, made, rest[1:], now)

    def _object(self, name: str, kind: str, values: Mapping[str, Any], now: Any) -> Any:
        if now is None or now is ABSENT or _kind(type(now), self._names) != kind:
            home, _, label = kind.rpartition(":")
            found = getattr(self._modules.get(home), label, None)
            if not isinstance(found, type):
                raise CheckpointError(f"{name} is a {kind}, of which nothing is found; accepted: its class")
            now = object.__new__(found)
        inside = vars(now)
        for key in [key for key in inside if key not in values]:
            del inside[key]
        for key, value in values.items():
            inside[key] = self._made(name, value, inside.get(key))
        return now


class _Taking:
    """One value on its way to tensors and plain values."""

    def __init__(self, names: Mapping[str, str], known: set[int], *, is_whole: bool) -> None:
        self._names, self._known, self._is_whole = names, known, is_whole
        self._above: set[int] = set()
        self._left, self._bytes_left = (sys.maxsize,) * 2 if is_whole else (_MOST_ITEMS, _MOST_BYTES)

    def take(self, value: Any) -> Any:
        if type(value) in _PLAIN:
            return value
        if value is ABSENT:
            return ABSENT
        if id(value) in self._known or id(value) in self._above:
            return ("kept",)
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, np.ndarray | np.generic):
            return self._numbers(np.asarray(value))
        if (state := _generator_state(value)) is not None:
            return ("random", state)
        self._above.add(id(value))
        try:
            return self._inside(value)
        finally:
            self._above.remove(id(value))

    def _is_large(self, n_bytes: int) -> bool:
        self._bytes_left -= n_bytes
        return not self._is_whole and (n_bytes > _LARGE_BYTES or self._bytes_left < 0)

    def _tensor(self, value: Tensor) -> Any:
        found = value.detach()
        if type(found) is not Tensor:
            found = found.as_subclass(Tensor)
        if found.layout != torch.strided or found.device.type == "meta":
            return ("kept", type(value).__name__, id(value))
        if value.grad_fn is not None and value.nbytes > _MOST_OUTPUT_BYTES:
            return ("kept", "large tensor with a gradient", id(value))
        if self._is_large(found.nbytes):
            flat = found.reshape(-1)
            sample = flat[:: max(len(flat) // _SAMPLED, 1)].clone()
            return ("kept", "large", str(found.dtype), tuple(found.shape), sample)
        return found.clone()

    def _numbers(self, value: "np.ndarray[Any, Any]") -> Any:
        if value.dtype.hasobject:
            return ("kept", "array of objects", id(value))
        if self._is_large(value.nbytes):
            flat = value.reshape(-1)
            sample = flat[:: max(len(flat) // _SAMPLED, 1)].tobytes()
            return ("kept", "large", value.dtype.str, value.shape, sample)
        return ("array", value.dtype.str, tuple(value.shape), value.tobytes())

    def _inside(self, value: Any) -> Any:
        if isinstance(value, dict | list | tuple | set | frozenset | deque):
            self._left -= len(value)
            if self._left < 0:
                return ("kept", "large", type(value).__name__, len(value))
        if isinstance(value, dict):
            return ("dict", [self.take(one) for one in value.values()], [self.take(key) for key in value])
        if isinstance(value, list):
            return ("list", [self.take(one) for one in value])
        if isinstance(value, tuple):
            return ("tuple", [self.take(one) for one in value])
        if isinstance(value, set | frozenset):
            return ("set", sorted((self.take(one) for one in value), key=repr))
        if isinstance(value, deque):
            return ("deque", [self.take(one) for one in value], value.maxlen)
        if isinstance(value, _STEPPERS):
            return ("stepper", _kind(type(value), self._names), self.take(value.state_dict()))
        kind = type(value)
        is_open = kind.__module__ in self._names or isinstance(value, _OPEN)
        if is_open and not isinstance(value, type) and hasattr(value, "__dict__"):
            inside = {key: self.take(one) for key, one in vars(value).items()}
            return ("object", _kind(kind, self._names), inside)
        return ("kept", kind.__name__, id(value))


def _label(module: ModuleType) -> str:
    """Name of a module that does not depend on where a file lies."""
    return module.__name__ if module.__spec__ is not None else Path(str(module.__file__)).name


def _kind(kind: type, names: Mapping[str, str]) -> str:
    return f"{names.get(kind.__module__, kind.__module__)}:{kind.__qualname__}"


def _left_out(thing: object) -> set[str]:
    """Names of the attributes that the ``state_dict`` of an optimizer, scaler or scheduler covers."""
    if isinstance(thing, torch.optim.Optimizer):
        return {*vars(torch.optim.SGD([torch.zeros(1)])), "step", "_opt_called", "_step_count"}
    if isinstance(thing, torch.amp.GradScaler):
        return set(vars(torch.amp.GradScaler("cpu", enabled=False)))
    return set(vars(thing)) if isinstance(thing, torch.optim.lr_scheduler.LRScheduler) else set()


def load_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Load a state into the dictionaries that an optimizer has: a wrapped optimizer may share them."""
    state, groups = optimizer.state, list(optimizer.param_groups)
    shared = optimizer.param_groups
    optimizer.load_state_dict(saved)
    if optimizer.state is not state:
        loaded = dict(optimizer.state)
        state.clear()
        state.update(loaded)
        optimizer.state = state
    for old, new in zip(groups, optimizer.param_groups, strict=True):
        if old is not new:
            old.clear()
            old.update(new)
    shared[:] = groups
    optimizer.param_groups = shared


def same_everywhere(value: Any) -> Any:
    """Leave out of a value that was taken what tells objects of one process apart."""
    if is_opaque(value):
        return value[:2]
    if isinstance(value, dict):
        return {key: same_everywhere(one) for key, one in value.items()}
    return type(value)(map(same_everywhere, value)) if isinstance(value, list | tuple) else value


def is_filled_cache(before: Any, now: Any) -> bool:
    """Return True for a captured dictionary with further entries whose old ones are unchanged."""
    kinds = [type(one) is tuple and len(one) == _OF_DICTIONARY and one[0] == "dict" for one in (before, now)]
    if not all(kinds) or len(now[1]) <= len(before[1]):
        return False
    n_before = len(before[1])
    return same_value(before[1:], (now[1][:n_before], now[2][:n_before]))


def changed_values(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that changed between two snapshots, without caches that were filled."""
    pairs = {name: (before.get(name, ABSENT), now.get(name, ABSENT)) for name in before.keys() | now.keys()}
    return {
        name: new
        for name, (old, new) in sorted(pairs.items())
        if not is_opaque(new) and not same_value(old, new) and not is_filled_cache(old, new)
    }


def is_generator(value: Any) -> bool:
    """Return True for the captured state of a random generator."""
    return type(value) is tuple and value[0] == "random"


def is_absent(value: Any) -> bool:
    """Whether a value that was taken, maybe from a file, says that nothing was there."""
    return type(value) is tuple and len(value) == 1 and value[0] == ABSENT[0]


def same_value(one: Any, other: Any) -> bool:
    """Whether two values that were taken are equal to the bit."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.dtype != other.dtype or one.shape != other.shape or one.device != other.device:
            return False
        raw = [each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other)]
        return torch.equal(*raw)
    if isinstance(one, Tensor) or isinstance(other, Tensor) or type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same_value(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same_value, one, other))
    return bool(one == other) or bool(one != one and other != other)


def _of_all_code() -> set[int]:
    """Ids of the generators behind the global random states, which are swapped anyway."""
    return {id(one) for one in (torch.default_generator, mtrand._rand, getattr(random, "_inst", None))}


def _generator_state(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, np.random.Generator):
        if value.bit_generator is mtrand.get_bit_generator():
            return None
        return listed(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return listed(value.get_state(legacy=False))
    if type(value) is random.Random:
        version, words, second = value.getstate()
        return [version, list(words), second]
    return None


def is_opaque(value: Any) -> bool:
    """Whether a value that was taken says no more than that something is there."""
    return type(value) is tuple and len(value) > 1 and value[0] == "kept"


def _set_generator(now: Any, state: Any) -> None:
    if isinstance(now, torch.Generator):
        now.set_state(state.cpu())
    elif isinstance(now, np.random.Generator):
        now.bit_generator.state = state
    elif isinstance(now, np.random.RandomState):
        now.set_state(state)
    elif isinstance(now, random.Random):
        now.setstate((state[0], tuple(state[1]), state[2]))


def listed(state: Any) -> Any:
    """Return the state of a generator of NumPy with lists for arrays, which a checkpoint does not take."""
    if isinstance(state, Mapping):
        return {name: listed(value) for name, value in state.items()}
    return state.tolist() if isinstance(state, np.ndarray | np.generic) else state


def _copied(saved: Tensor, now: Any) -> Tensor:
    if isinstance(now, Tensor) and now.shape == saved.shape and now.dtype == saved.dtype and not now.is_meta:
        if now.grad_fn is None:
            with torch.no_grad():
                now.copy_(saved)
            return now
        return saved.to(now.device, copy=True)
    return saved.clone()


def _array(rest: Sequence[Any], now: Any) -> Any:
    kind, shape, content = rest
    found = np.frombuffer(content, np.dtype(kind)).reshape(shape)
    if isinstance(now, np.ndarray) and now.dtype == found.dtype and now.shape == found.shape:
        if now.flags.writeable:
            now[...] = found
        return now
    return found.copy() if shape or isinstance(now, np.ndarray) else found[()]


def _items(now: Any) -> list[Any]:
    return list(now) if isinstance(now, list | tuple | deque) else []


def _key(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _filled(now: dict[Any, Any], fresh: dict[Any, Any]) -> dict[Any, Any]:
    now.clear()
    now.update(fresh)
    return now


def _sequence(kind: str, made: list[Any], rest: Sequence[Any], now: Any) -> Any:
    if kind == "list":
        if isinstance(now, list):
            now[:] = made
            return now
        return made
    if kind == "deque":
        if isinstance(now, deque) and now.maxlen == rest[0]:
            now.clear()
            now.extend(made)
            return now
        return deque(made, rest[0])
    if kind == "set":
        if isinstance(now, set):
            now.clear()
            now.update(made)
            return now
        return frozenset(made) if isinstance(now, frozenset) else set(made)
    return type(now)(*made) if hasattr(type(now), "_make") else tuple(made)
