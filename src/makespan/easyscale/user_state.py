"""State that user code keeps in Python: attributes of the model, variables of its modules.

As with buffers, changes by a forward pass belong to its logical worker, and changes after the sum of
gradients belong to all. A value is captured as tensors and plain values, so that a checkpoint can hold it. It
is restored in place if its type allows that, because other objects may refer to it.

A captured value is a plain value, a tensor, or a tuple of a kind and its content. The kind ``kept`` marks
values that are not captured, such as open files; they stay as they are.
"""

import argparse
import array
import gc
import importlib
import io
import random
import sys
import threading
import weakref
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from functools import _lru_cache_wrapper as Memo, partial
from importlib.machinery import ModuleSpec, PathFinder
from itertools import starmap, zip_longest
from pathlib import Path
from queue import Queue, SimpleQueue
from types import CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.random import mtrand
from torch import Tensor, nn

from makespan.easyscale.randomness import preserved_random_states
from makespan.errors import CheckpointError
from makespan.training.bits import has_equal_bits

ABSENT = ("absent",)
"""Marks a value that does not exist (yet)."""
_INTERNAL = set(vars(nn.Module())) - {"training"}
_HOOKS = tuple(sorted(name for name in _INTERNAL if name.endswith("_hooks")))
PLAIN_TYPES = {bool, int, float, str, bytes, type(None)}
"""Types that a checkpoint holds as they are."""
_OPEN = (nn.Module, SimpleNamespace, argparse.Namespace, torch.utils.data.Dataset)
_PLAIN_OBJECTS: dict[str, type] = {
    f"{kind.__module__}:{kind.__qualname__}": kind
    for kind in (UserDict, UserList, ChainMap, Counter, OrderedDict, threading.local)
}
"""Classes of Python whose objects consist of attributes and items; of a local object those of this thread."""
_PLAIN_KINDS = set(_PLAIN_OBJECTS.values())
_CALLABLES = (FunctionType, MethodType, partial)
_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_MEMO = "cache of functools.lru_cache, of which results are drawn or changed"
_DRAWING = {
    "bernoulli", "bernoulli_", "choice", "choices", "dropout", "exponential_", "gauss", "integers",
    "multinomial", "normal", "normal_", "permutation", "rand", "rand_like", "randint", "randint_like",
    "randn", "randn_like", "random", "randperm", "randrange", "sample", "shuffle", "standard_normal",
    "uniform", "uniform_",
}  # fmt: skip
"""Names that code has which draws."""
_WEAK = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet)
_STEPPERS = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)
_MOST_ITEMS = 10_000  # of containers of one value that a snapshot looks at
_LARGE_BYTES, _MOST_BYTES = 1 << 23, 1 << 26
"""Larger tensors and arrays, and all beyond so many bytes of one value, are compared by samples."""
_SAMPLED = 4096  # elements
_OF_DICTIONARY = 3  # length of a taken dictionary: kind, values, keys
_OF_UNKEPT = 4  # length of a queue that was taken: kept, its class, a word, items
_MOST_OUTPUT_BYTES = 1 << 20  # of a tensor with a gradient function, such as a stored output
_WATCHED_FIRST = 3


def is_watched(number: int) -> bool:
    """Return True for the batches, from 0, that are watched: the first ones, and every 2^k-th.

    Comparing all Python values takes time, so most batches are not watched.
    """
    return number < _WATCHED_FIRST or number & (number + 1) == 0


@dataclass(frozen=True, slots=True)
class _Place:
    """Place of a value: a key of a dictionary, an attribute of a class or function, a cell of a closure."""

    owner: Any
    key: str

    def get(self) -> Any:
        if isinstance(self.owner, dict):
            return self.owner.get(self.key, ABSENT)
        if isinstance(self.owner, type):
            return vars(self.owner).get(self.key, ABSENT)
        if isinstance(self.owner, _CALLABLES):
            return getattr(self.owner, self.key)
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
        elif isinstance(self.owner, FunctionType):
            setattr(self.owner, self.key, value)
        elif value is not ABSENT and isinstance(self.owner, CellType):  # others hold what changes in place
            self.owner.cell_contents = value


def user_modules(files: Iterable[str], names: Iterable[str]) -> list[ModuleType]:
    """Return the imported modules of the user: those of named packages, and those beside the files."""
    folders = {Path(file).resolve().parent for file in files}
    packages = {name.partition(".")[0] for name in names} - {"torch", "makespan"}
    of_user = []
    for name, module in dict[str, Any](sys.modules).items():
        file = getattr(module, "__file__", None)
        if not file or not isinstance(module, ModuleType) or "site-packages" in file:
            continue
        top = name.partition(".")[0]
        if top == "makespan" or name == "__main__":
            continue
        if top in packages or Path(file).resolve().parent in folders:
            of_user.append(module)
    return of_user


class _Imports:
    """Reports modules of the user that are imported later, such as in a forward pass, before they change.

    Parameters
    ----------
    is_of_user
        Tells whether a module is the user's, by its name and file.
    report
        Is called with the module, once its code has run.
    """

    def __init__(self, is_of_user: Callable[[str, str], bool], report: Callable[[ModuleType], None]) -> None:
        self._is_of_user, self._report = weakref.WeakMethod(is_of_user), weakref.WeakMethod(report)

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        """Find a module of the user, and have its loader report it; leave others to the other finders."""
        is_of_user, spec = self._is_of_user(), PathFinder.find_spec(name, path, target)
        loader: Any = None if spec is None else spec.loader
        if spec is None or loader is None or is_of_user is None or not is_of_user(name, spec.origin or ""):
            return None
        run = loader.exec_module

        def run_and_report(module: ModuleType) -> None:
            run(module)
            if (report := self._report()) is not None:
                report(module)

        loader.exec_module = run_and_report
        return spec

    def remove(self) -> None:
        """Stop watching imports."""
        with suppress(ValueError):
            sys.meta_path.remove(self)


class UserState:
    """Finds, captures and restores the values that user code keeps in Python.

    Parameters
    ----------
    model
        Model whose modules are searched; state that checkpoints hold elsewhere, such as parameters and
        buffers, is left out.
    modules
        Modules of the user.
    others
        Further objects by name, such as the optimizer. Checkpoints hold their ``state_dict``; their other
        attributes are searched.
    """

    def __init__(
        self, model: nn.Module, modules: Sequence[ModuleType], others: Mapping[str, object] | None = None
    ) -> None:
        self._model = model
        self._named = {
            name: each
            for name, each in (others or {}).items()
            if hasattr(each, "__dict__") and not type(each).__module__.startswith("makespan.")
        }
        self._modules = {
            # The label of a file must not depend on its directory: checkpoints hold it.
            module.__name__ if module.__spec__ is not None else Path(str(module.__file__)).name: module
            for module in modules
        }
        self._names = {module.__name__: name for name, module in self._modules.items()}
        # The generators behind the global random states are no user state: contexts swap them anyway.
        of_all_code = (torch.default_generator, mtrand._rand, getattr(random, "_inst", None))
        self._others = {id(each) for each in (*(others or {}).values(), *of_all_code)}
        self._found: dict[str, _Place] = {}
        self._known: set[int] = set()
        self._results: dict[int, tuple[int, dict[int, tuple[Any, Any]]]] = {}
        self._imported: dict[str, Any] = {}
        self._unfound = set[str]()
        self._folders = {
            Path(file).resolve().parent for each in modules if (file := getattr(each, "__file__", ""))
        }
        self._packages = {
            module.__name__.partition(".")[0] for module in modules if module.__spec__ is not None
        }
        if modules:
            imports = _Imports(self._is_of_user, self._add)
            sys.meta_path.insert(0, imports)
            weakref.finalize(self, imports.remove)

    def _is_of_user(self, name: str, file: str) -> bool:
        """Return True for a module of the user by its name and file."""
        is_beside = name.partition(".")[0] in self._packages or Path(file).resolve().parent in self._folders
        return bool(file) and is_beside and "site-packages" not in file

    def _add(self, module: ModuleType) -> None:
        """Also search a module that user code has just imported; keep its first values."""
        label = module.__name__
        self._modules[label], self._names[label] = module, label
        places = self.places()
        new = {name for name in places if name.startswith(f"{label}:")}
        self._imported |= {name: self._captured(places[name], is_whole=False) for name in new}

    def imported(self) -> dict[str, Any]:
        """Return the first values of modules that were imported since the last call."""
        values, self._imported = self._imported, {}
        return values

    def places(self) -> dict[str, _Place]:
        """Return the current places of values, by name."""
        places, seen = dict[str, _Place](), set[int]()
        for path, module in self._model.named_modules():
            is_of_user = not type(module).__module__.startswith("torch.")
            prefix = f"model.{path}" if path else "model"
            for key, value in vars(module).items():
                if key not in _INTERNAL and (is_of_user or _is_of_user(module, key, value)):
                    places[f"{prefix}.{key}"] = _Place(vars(module), key)
            for kind in _HOOKS:
                for number, key in enumerate(hooks := vars(module)[kind]):
                    places[f"{prefix}.{kind}.{number}"] = _Place(hooks, key)
            if (home := self._names.get(type(module).__module__)) and "<locals>" in type(module).__qualname__:
                places |= self._inside(f"{home}:{type(module).__qualname__}", type(module), seen)
        for path, tensor in (*self._model.named_parameters(), *self._model.named_buffers()):
            inside = vars(tensor)
            places |= {
                f"model.{path}.{key}": _Place(inside, key) for key in inside if not key.startswith("_dynamo")
            }
            places |= self._in_hooks(f"model.{path}", tensor, seen)
        for label, other in self._named.items():
            if isinstance(other, _CALLABLES):
                places |= self._held(label, other, seen)
                continue
            left_out = _left_out(other)
            places |= {
                f"{label}.{key}": _Place(vars(other), key) for key in vars(other) if key not in left_out
            }
        for label, module in self._modules.items():
            for key, value in list(vars(module).items()):
                if key.startswith("__") or isinstance(value, ModuleType):
                    continue
                name = f"{label}:{key}"
                if isinstance(value, type) and value.__module__ == module.__name__ and value.__name__ == key:
                    places |= self._inside(name, value, seen)
                elif id(value) not in self._others:
                    places[name] = _Place(vars(module), key)
        for name, place in list(places.items()):
            if isinstance(value := place.get(), (*_CALLABLES, Memo)):
                places |= self._held(name, value, seen)
        self._found = places
        self._known = {id(part) for part in self._model.modules()} | self._others
        self._known |= {id(part) for part in self._model.parameters()}
        self._known |= {id(part) for part in self._model.buffers()}
        return places

    def _held(self, name: str, value: Any, seen: set[int]) -> Iterator[tuple[str, _Place]]:
        """Places in what a callable holds.

        These are attributes, closure and defaults of a function of the user, arguments of a partial function,
        the object of a method, and the same of callables in these.
        """
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, Memo):
            yield from self._held(f"{name}.__wrapped__", value.__wrapped__, seen)
            return
        if isinstance(value, partial):
            held = [(key, _Place(value, key)) for key in ("func", "args", "keywords")]
            for key, inner in (*enumerate(value.args), *value.keywords.items()):
                if isinstance(inner, (*_CALLABLES, Memo)):
                    yield from self._held(f"{name}.{key}", inner, seen)
        elif isinstance(value, MethodType):
            held = [("__self__", _Place(value, "__self__"))]
        elif not isinstance(value, FunctionType) or value.__module__ not in self._names:
            return
        else:
            cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
            held = [(key, _Place(vars(value), key)) for key in vars(value)]
            held += [
                (key, _Place(cell, key))
                for key, cell in cells
                if id(cell) not in seen and key != "__class__"  # the class of a method that calls super()
            ]
            held += [
                (key, _Place(value, key))
                for key in ("__defaults__", "__kwdefaults__")
                if not _is_plain(getattr(value, key))
            ]
        for key, place in held:
            inner = place.get()
            if isinstance(place.owner, CellType):
                seen.add(id(place.owner))
            if isinstance(inner, _CALLABLES):
                yield from self._held(f"{name}.{key}", inner, seen)
            else:
                yield f"{name}.{key}", place
                if isinstance(inner, Memo):
                    yield from self._held(f"{name}.{key}", inner, seen)

    def _inside(self, name: str, value: type, seen: set[int]) -> Iterator[tuple[str, _Place]]:
        """Places in a class, and in its methods and properties."""
        for key, attribute in list(vars(value).items()):
            function = _function_of(attribute)
            if isinstance(function, Memo):
                yield f"{name}.{key}", _Place({key: function}, key)
            if isinstance(function, FunctionType | Memo):
                yield from self._held(f"{name}.{key}", function, seen)
            elif (
                not key.startswith("__")
                and not callable(attribute)
                and not hasattr(type(attribute), "__get__")
            ):
                yield f"{name}.{key}", _Place(value, key)

    def _in_hooks(self, name: str, tensor: Tensor, seen: set[int]) -> Iterator[tuple[str, _Place]]:
        """Places in the hooks that user code has registered with a parameter or buffer."""
        for kind in _TENSOR_HOOKS:
            hooks: dict[Any, Any] = getattr(tensor, kind, None) or {}
            own = [key for key, hook in hooks.items() if not _module_of(hook).startswith("makespan.")]
            for number, key in enumerate(own):
                label, hook = f"{name}.{kind}.{number}", hooks[key]
                if isinstance(hook, _CALLABLES):
                    yield from self._held(label, hook, seen)
                elif _module_of(hook) in self._names:
                    yield label, _Place(hooks, key)

    def snapshot(self, left_out: Iterable[str] = ()) -> dict[str, Any]:
        """Return all values for comparison; of a very large one a fingerprint."""
        skipped, places = set(left_out), self.places()
        return {
            name: self._captured(place, is_whole=False)
            for name, place in places.items()
            if name not in skipped
        }

    def _captured(self, place: _Place, *, is_whole: bool) -> Any:
        value, capture = place.get(), _Capture(self._names, self._known, is_whole=is_whole)
        return self._memo(value, capture) if isinstance(value, Memo) else capture.take(value)

    def _memo(self, memo: Any, capture: "_Capture") -> Any:
        """Return a mark of a cache that changes where it matters whose calls filled it.

        That is where the function draws, or where a result was changed after it was stored.
        """
        n_changes, known = self._results.get(id(memo), (0, {}))
        results = dict[int, tuple[Any, Any]]()
        for result in _results_of(memo):
            if type(result) not in PLAIN_TYPES:
                taken = result._version if isinstance(result, Tensor) else capture.take(result)
                results[id(result)] = result, taken
                if id(result) in known and not same_value(known[id(result)][1], taken):
                    n_changes += 1
        self._results[id(memo)] = n_changes, results
        return ("kept", _MEMO, n_changes, memo.cache_info().misses if _draws(memo, set()) else 0)

    def iterators(self) -> dict[str, str]:
        """Return the types of kept iterators, by name: their position cannot be read."""
        values = {name: place.get() for name, place in self.places().items()}
        return {
            name: type(value).__name__
            for name, value in values.items()
            if isinstance(value, Iterator) and not isinstance(value, io.IOBase)
        }

    def foreign_object(self, value: Any) -> str:
        """Class of an object that cannot be rebuilt from a checkpoint; empty for none."""
        if (
            type(value) is tuple
            and value
            and value[0] in ("object", "stepper")
            and value[1].split(":")[0] not in self._modules
            and value[1] not in _PLAIN_OBJECTS
        ):
            return str(value[1]).replace(":", ".")
        return ""

    def take(self, names: Iterable[str]) -> dict[str, Any]:
        """Return copies of values as tensors and plain values, `ABSENT` for values that do not exist."""
        taken = dict[str, Any]()
        for name in names:
            place = self._found.get(name) or self._place_of(name)
            if place is None or place.get() is ABSENT:
                taken[name] = ABSENT
            else:
                taken[name] = self._captured(place, is_whole=True)
        return taken

    def give(self, values: Mapping[str, Any]) -> None:
        """Restore values that `take` or `snapshot` returned; kept values stay as they are."""
        for name, value in values.items():
            place = self._found.get(name) or self._place_of(name)
            if place is not None:
                place.put(ABSENT if is_absent(value) else self._made(name, value, place.get()))

    def _place_of(self, name: str) -> _Place | None:
        """Return the place of a value that does not exist yet."""
        if name.startswith("model."):
            path, _, key = name.removeprefix("model").removeprefix(".").rpartition(".")
            found: Any = dict(self._model.named_modules()).get(path)
            if found is None:  # an attribute of a tensor
                found = dict((*self._model.named_parameters(), *self._model.named_buffers())).get(path)
            return None if found is None else _Place(vars(found), key)
        home, _, rest = name.rpartition(":")
        module = self._modules.get(home) or self._import(home)
        if module is None:
            label, _, key = name.partition(".")
            return _Place(vars(self._named[label]), key) if label in self._named else None
        owner, _, key = rest.rpartition(".")
        if not owner:
            return _Place(vars(module), key)
        holder = _function_of(_found_in(module, owner))  # a class, or a function or method of the user
        return _Place(vars(holder) if isinstance(holder, FunctionType) else holder, key) if holder else None

    def _import(self, home: str) -> ModuleType | None:
        """Import a module of the user that passes had imported before the checkpoint; None for none."""
        if not home or home.endswith(".py") or home in self._unfound:
            return None
        with preserved_random_states():
            try:
                importlib.import_module(home)
            except ImportError:
                self._unfound.add(home)
        return self._modules.get(home)

    def _made(self, name: str, saved: Any, now: Any) -> Any:
        """Return the restored value of a place: the current value ``now``, changed in place, or a new one."""
        if type(saved) in PLAIN_TYPES:
            return saved
        if isinstance(saved, Tensor):
            is_like = isinstance(now, Tensor) and now.shape == saved.shape and now.dtype == saved.dtype
            if not is_like or now.is_meta:
                return saved.clone()
            if now.grad_fn is not None:  # an output cannot change in place
                return saved.to(now.device, copy=True)
            with torch.no_grad():
                now.copy_(saved)
            return now
        kind, *rest = saved
        if kind == "kept":
            return now
        if kind == "array":
            dtype, shape, content = rest
            values = np.frombuffer(content, np.dtype(dtype)).reshape(shape)
            if isinstance(now, np.ndarray) and now.dtype == values.dtype and now.shape == values.shape:
                if now.flags.writeable:
                    now[...] = values
                return now
            # A scalar of NumPy is taken as an array without axes.
            return values.copy() if shape or isinstance(now, np.ndarray) else values[()]
        if kind == "random":
            _set_generator(now, rest[0])
            return now
        if kind in ("bytearray", "numbers"):
            fresh: Any = bytearray(rest[0]) if kind == "bytearray" else array.array(*rest)
            if type(now) is not type(fresh) or getattr(now, "typecode", "") != getattr(fresh, "typecode", ""):
                return fresh
            now[:] = fresh
            return now
        if kind == "context":
            if isinstance(now, ContextVar) and not is_absent(rest[0]):
                now.set(self._made(name, rest[0], now.get(None)))
            return now
        if kind == "holder":
            label, content, attributes = rest
            if now is None or now is ABSENT or _kind(type(now), self._names) != label:
                now = _blank(_PLAIN_OBJECTS.get(label) or self._class(name, label))
                if isinstance(now, deque):
                    now = type(now)((), content[2])
            self._made(name, content, now)
            return self._object(name, label, attributes, now)
        if kind == "object":
            return self._object(name, rest[0], rest[1], now)
        if kind in ("named", "member"):
            if kind == "named":
                found = _found_in(self._modules.get(rest[0]), rest[1])
            else:
                found = self._class(name, rest[0]).__members__.get(rest[1])
            if found is None:
                label = ":".join(rest)
                raise CheckpointError(
                    f"{name} is {label}, which cannot be found; expected it in the code of the job"
                )
            return found
        if kind == "stepper":
            if not isinstance(now, _STEPPERS) or _kind(type(now), self._names) != rest[0]:
                problem = f"{name} is {type(now).__name__}, and the checkpoint has a {rest[0]} there"
                raise CheckpointError(
                    f"{problem}; expected an object that is created where the model is built"
                )
            state = self._made(name, rest[1], None)
            if isinstance(now, torch.optim.Optimizer):
                load_optimizer(now, state)
            else:
                now.load_state_dict(state)
            return now
        if kind == "dict":
            old: dict[Any, Any] = now if isinstance(now, dict) else {}
            made_keys = [self._made(name, key, None) for key in rest[1]]
            keys = [tuple(key) if isinstance(key, list) else key for key in made_keys]
            # Values are restored into the old ones before the dictionary itself is cleared.
            made = {
                key: self._made(name, item, old.get(key)) for key, item in zip(keys, rest[0], strict=True)
            }
            if not isinstance(now, dict):
                return made
            now.clear()
            now.update(made)
            return now
        olds = list(now) if isinstance(now, list | tuple | deque) else []
        items = [
            self._made(name, item, olds[number] if number < len(olds) else None)
            for number, item in enumerate(rest[0])
        ]
        if kind == "tuple" and len(rest) > 1:
            return self._class(name, rest[1])._make(items)
        return _sequence(kind, items, rest[1:], now)

    def _object(self, name: str, kind: str, values: Mapping[str, Any], now: Any) -> Any:
        if now is None or now is ABSENT or _kind(type(now), self._names) != kind:
            now = _blank(_PLAIN_OBJECTS.get(kind) or self._class(name, kind))
        inside, slots = getattr(now, "__dict__", {}), _slots(type(now))
        for key in [key for key in inside if key not in values]:
            del inside[key]
        for key in [key for key in slots if hasattr(now, key) and key not in values]:
            object.__delattr__(now, key)
        for key, value in values.items():
            if key in slots:  # also those of frozen data classes
                object.__setattr__(now, key, self._made(name, value, getattr(now, key, None)))
            else:
                inside[key] = self._made(name, value, inside.get(key))
        return now

    def _class(self, name: str, kind: str) -> Any:
        """Return the class of the user that `_kind` describes."""
        home, _, label = kind.rpartition(":")
        found = _found_in(self._modules.get(home), label)
        if not isinstance(found, type):
            raise CheckpointError(
                f"{name} is a {kind}, which cannot be found; expected its class in the code of the job"
            )
        return found


class _Capture:
    """Conversion of one value to tensors and plain values.

    ``is_whole`` takes all of it, for a checkpoint; otherwise fingerprints replace large parts.
    """

    def __init__(self, names: Mapping[str, str], known: set[int], *, is_whole: bool) -> None:
        self._names, self._known, self._is_whole = names, known, is_whole
        self._above: set[int] = set()
        self._left, self._bytes_left = (sys.maxsize,) * 2 if is_whole else (_MOST_ITEMS, _MOST_BYTES)

    def take(self, value: Any) -> Any:
        if type(value) in PLAIN_TYPES:
            return value
        if value is ABSENT:
            return ABSENT
        # Parameters and buffers are saved elsewhere; a value inside of itself would never end.
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
        plain = value.detach()
        if type(plain) is not Tensor:
            plain = plain.as_subclass(Tensor)
        if plain.layout != torch.strided or plain.device.type == "meta":
            return ("kept", type(value).__name__, id(value))
        if value.grad_fn is not None and value.nbytes > _MOST_OUTPUT_BYTES:
            return ("kept", "large tensor with a gradient", id(value))
        if self._is_large(plain.nbytes):
            flat = plain.reshape(-1)
            sample = flat[:: max(len(flat) // _SAMPLED, 1)].clone()
            return ("kept", "large", str(plain.dtype), tuple(plain.shape), sample)
        return plain.clone()

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
            kind = type(value)
            is_open = kind.__module__ in self._names or kind in _PLAIN_KINDS
            if is_open and isinstance(value, dict | list | set | deque):
                inside = {key: self.take(attribute) for key, attribute in _attributes(value).items()}
                return ("holder", _kind(kind, self._names), self._items(value), inside)
            return self._items(value)
        return self._object(value)

    def _items(self, value: Any) -> Any:
        """Take a container."""
        if isinstance(value, dict):
            return ("dict", [self.take(item) for item in value.values()], [self.take(key) for key in value])
        if isinstance(value, list):
            return ("list", [self.take(item) for item in value])
        if isinstance(value, tuple):
            items = [self.take(item) for item in value]
            # A named tuple of the user is rebuilt by its class, if a checkpoint can find that.
            kind = type(value)
            is_named = hasattr(kind, "_make") and kind.__module__ in self._names
            if is_named and _found_in(sys.modules.get(kind.__module__), kind.__qualname__) is kind:
                return ("tuple", items, _kind(kind, self._names))
            return ("tuple", items)
        if isinstance(value, set | frozenset):
            label = "set" if isinstance(value, set) else "frozenset"
            return (label, sorted((self.take(item) for item in value), key=repr))
        return ("deque", [self.take(item) for item in value], value.maxlen)

    def _object(self, value: Any) -> Any:
        """Take an object that is no container."""
        if type(value) is bytearray:
            return ("bytearray", bytes(value))
        if type(value) is array.array:
            return ("numbers", value.typecode, value.tobytes())
        if isinstance(value, ContextVar):
            try:
                return ("context", self.take(value.get()))
            except LookupError:
                return ("context", ABSENT)
        if isinstance(value, _STEPPERS):
            return ("stepper", _kind(type(value), self._names), self.take(value.state_dict()))
        kind = type(value)
        is_open = kind.__module__ in self._names or isinstance(value, _OPEN) or kind in _PLAIN_KINDS
        if not is_open and isinstance(value, (Queue, SimpleQueue, *_WEAK)):
            return self._unkept(value)
        if isinstance(value, type | FunctionType) and (home := self._names.get(value.__module__)):
            if _found_in(sys.modules.get(value.__module__), value.__qualname__) is value:
                return ("named", home, value.__qualname__)
            return ("kept", kind.__name__, id(value))
        if is_open and isinstance(value, Enum):
            return ("member", _kind(kind, self._names), value.name)
        if is_open and not isinstance(value, type) and (hasattr(value, "__dict__") or _slots(kind)):
            inside = {key: self.take(attribute) for key, attribute in _attributes(value).items()}
            return ("object", _kind(kind, self._names), inside)
        return ("kept", kind.__name__, id(value))

    def _unkept(self, value: Any) -> Any:
        """Take a queue or a weak dictionary: it is not restored, but its changes show."""
        if isinstance(value, SimpleQueue):
            items: Any = value.qsize()
        elif isinstance(value, Queue):
            items = [self.take(item) for item in list(value.queue)]
        else:
            items = [
                self.take(item)
                for item in list(value if isinstance(value, weakref.WeakSet) else value.values())
            ]
        return ("kept", type(value).__name__, "content", items)


class StateComparison:
    """Comparison of single values of user code, such as local variables.

    Parameters
    ----------
    modules
        Modules of the user, whose objects are looked into.
    known
        Ids of objects that are left out, because a checkpoint holds them.
    """

    def __init__(self, modules: Sequence[ModuleType], known: set[int]) -> None:
        self._names, self._known = {module.__name__: module.__name__ for module in modules}, known

    def take(self, value: Any) -> Any:
        """Return a captured value, for `same_value`."""
        return _Capture(self._names, self._known, is_whole=False).take(value)

    def differs_in_tensors(self, before: Any, now: Any) -> bool:
        """Return True if two captured values differ in a tensor, a generator or the state of an optimizer."""
        if same_value(before, now):
            return False
        if isinstance(before, Tensor):
            return True
        if type(before) is tuple and before and before[0] in ("stepper", "random"):
            return True
        if isinstance(before, dict) and isinstance(now, dict):
            return any(self.differs_in_tensors(each, now.get(key)) for key, each in before.items())
        if isinstance(before, list | tuple) and type(before) is type(now):
            added = now[len(before) :]
            return any(map(self.differs_in_tensors, before, now)) or any(map(_has_tensors, added))
        return False


def _has_tensors(value: Any) -> bool:
    """Return True if a captured value has a tensor, a generator or the state of an optimizer."""
    if isinstance(value, dict):
        return any(map(_has_tensors, value.values()))
    if isinstance(value, list | tuple):
        is_marked = len(value) > 0 and type(value[0]) is str and value[0] in ("stepper", "random")
        return is_marked or any(map(_has_tensors, value))
    return isinstance(value, Tensor)


def _function_of(attribute: Any) -> Any:
    """Return the function behind an attribute of a class, such as a static method or a property."""
    for key in ("__func__", "fget", "func"):
        if isinstance(inner := getattr(attribute, key, None), FunctionType | Memo):
            return inner
    return attribute


def _module_of(hook: Any) -> str:
    """Return the name of the module of a function, or of the class of another object."""
    if isinstance(hook, partial):
        return _module_of(hook.func)
    return str(hook.__module__ if isinstance(hook, FunctionType | MethodType) else type(hook).__module__)


def _results_of(memo: Any) -> Iterator[Any]:
    """Return what a cache of ``functools.lru_cache`` holds; of one with a limit the arguments, too."""
    is_bounded = memo.cache_info().maxsize is not None
    for held in gc.get_referents(memo):
        if held is vars(memo) or held is memo.__wrapped__ or isinstance(held, type):
            continue
        if not is_bounded:
            yield from held.values() if isinstance(held, dict) else ()
        # Another dictionary maps arguments to entries of the cache, which are objects of functools.
        elif not (
            isinstance(held, dict) and any(type(entry).__module__ == "functools" for entry in held.values())
        ):
            yield held


def _draws(function: Any, seen: set[int]) -> bool:
    """Return True if the code of a function, or of functions that it calls, has names of random draws."""
    function = getattr(function, "__wrapped__", function)
    if not isinstance(function, FunctionType) or id(function) in seen:
        return False
    seen.add(id(function))
    names, codes = set[str](), [function.__code__]
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
    if names & _DRAWING:
        return True
    called = (function.__globals__.get(name) for name in names)
    return any(
        _draws(each, seen) for each in called if getattr(each, "__module__", "") == function.__module__
    )


def _blank(kind: Any) -> Any:
    """Return an object of a class without ``__init__``, which may need arguments."""
    is_plain = not issubclass(kind, (dict, list, set, deque, threading.local))
    return object.__new__(kind) if is_plain else kind.__new__(kind)


def _is_plain(defaults: Any) -> bool:
    values = defaults.values() if isinstance(defaults, dict) else defaults or ()
    return all(type(value) in PLAIN_TYPES for value in values)


def _found_in(module: ModuleType | None, label: str) -> Any:
    """Return the object of a qualified name in a module, None for none."""
    found: Any = module
    for part in label.split("."):
        found = getattr(found, part, None)
    return found


def _is_of_user(module: nn.Module, key: str, value: Any) -> bool:
    """Return True for an attribute of a torch module that user code may have set and may change.

    Weights that hooks of torch compute before each pass are no state, nor is what a traced graph knows.
    """
    if type(value) in PLAIN_TYPES:
        return True
    is_computed = key == "meta" or any(
        name.startswith(f"{key}_") for name in (*module._parameters, *module._buffers)
    )
    return isinstance(value, Tensor | np.ndarray | list | dict | set | deque) and not is_computed


def _slots(kind: type) -> list[str]:
    """Return the names of the slots of a class and its bases."""
    found = list[str]()
    for each in kind.__mro__:
        slots = vars(each).get("__slots__", ())
        found += [slots] if isinstance(slots, str) else list(slots)
    return [name for name in found if name not in ("__dict__", "__weakref__")]


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, those in slots too."""
    inside = {key: getattr(value, key) for key in _slots(type(value)) if hasattr(value, key)}
    return inside | getattr(value, "__dict__", {})


def _kind(kind: type, names: Mapping[str, str]) -> str:
    return f"{names.get(kind.__module__, kind.__module__)}:{kind.__qualname__}"


def _left_out(thing: object) -> set[str]:
    """Names of the attributes that the ``state_dict`` of an optimizer, scaler or scheduler covers."""
    # A fresh instance has the attributes that torch itself sets, whatever its version.
    if isinstance(thing, torch.optim.Optimizer):
        return {*vars(torch.optim.SGD([torch.zeros(1)])), "step", "_opt_called", "_step_count"}
    if isinstance(thing, torch.amp.GradScaler):
        return set(vars(torch.amp.GradScaler("cpu", enabled=False)))
    return set(vars(thing)) if isinstance(thing, torch.optim.lr_scheduler.LRScheduler) else set()


def load_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Load a state into the existing dictionaries of an optimizer: a wrapped optimizer may share them."""
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


def without_ids(value: Any) -> Any:
    """Remove from a captured value the ids that differ between processes."""
    if is_opaque(value):
        return value[:2]
    if isinstance(value, dict):
        return {key: without_ids(item) for key, item in value.items()}
    return type(value)(map(without_ids, value)) if isinstance(value, list | tuple) else value


def is_filled_cache(before: Any, now: Any) -> bool:
    """Return True for a captured dictionary that got new entries while the old ones are unchanged."""
    if all(type(value) is tuple and value[0] == "holder" for value in (before, now)):
        return same_value(before[3], now[3]) and is_filled_cache(before[2], now[2])
    kinds = [
        type(value) is tuple and len(value) == _OF_DICTIONARY and value[0] == "dict"
        for value in (before, now)
    ]
    if not all(kinds) or len(now[1]) <= len(before[1]):
        return False
    n_before = len(before[1])
    return same_value(before[1:], (now[1][:n_before], now[2][:n_before]))


def changed_values(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that changed between two snapshots, without filled caches."""
    pairs = {name: (before.get(name, ABSENT), now.get(name, ABSENT)) for name in before.keys() | now.keys()}
    return {
        name: new
        for name, (old, new) in sorted(pairs.items())
        if not is_opaque(new) and not same_value(old, new) and not is_filled_cache(old, new)
    }


def unseen_changes(before: Any, now: Any) -> bool:
    """Return True if a part of a captured value is another object than before, and marked as kept."""
    if is_opaque(before) or is_opaque(now):
        return not same_value(before, now)
    if isinstance(before, dict) and isinstance(now, dict):
        keys = before.keys() | now.keys()
        return any(unseen_changes(before.get(key, ABSENT), now.get(key, ABSENT)) for key in keys)
    if isinstance(before, list | tuple) and type(before) is type(now):
        return any(starmap(unseen_changes, zip_longest(before, now, fillvalue=ABSENT)))
    return False


def unkept_change(before: Any, now: Any) -> str:
    """Class of a queue or weak dictionary inside of a captured value that changed; empty for none."""
    if is_opaque(before) and is_opaque(now):
        has_content = len(before) == len(now) == _OF_UNKEPT and before[2] == now[2] == "content"
        return str(now[1]) if has_content and not same_value(before, now) else ""
    if isinstance(before, dict) and isinstance(now, dict):
        pairs = [(each, now[key]) for key, each in before.items() if key in now]
    elif isinstance(before, list | tuple) and type(before) is type(now):
        pairs = list(zip(before, now, strict=False))
    else:
        return ""
    return next((kind for pair in pairs if (kind := unkept_change(*pair))), "")


def is_generator(value: Any) -> bool:
    """Return True for the captured state of a random generator."""
    return type(value) is tuple and value[0] == "random"


def is_absent(value: Any) -> bool:
    """Return True for `ABSENT`, also after it was read from a file."""
    return type(value) is tuple and len(value) == 1 and value[0] == ABSENT[0]


def same_value(first: Any, second: Any) -> bool:
    """Return True if two captured values are bitwise equal."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return first.device == second.device and has_equal_bits(first, second)
    if isinstance(first, Tensor) or isinstance(second, Tensor) or type(first) is not type(second):
        return False
    if isinstance(first, dict):
        return list(first) == list(second) and all(same_value(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same_value, first, second))
    return bool(first == second) or bool(first != first and second != second)  # two NaNs are the same


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
    """Return True for a value that was not captured, only marked as kept."""
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
    """Return the state of a NumPy generator with lists for arrays, which a checkpoint cannot hold."""
    if isinstance(state, Mapping):
        return {name: listed(value) for name, value in state.items()}
    return state.tolist() if isinstance(state, np.ndarray | np.generic) else state


def _sequence(kind: str, items: list[Any], rest: Sequence[Any], now: Any) -> Any:
    if kind == "list":
        if isinstance(now, list):
            now[:] = items
            return now
        return items
    if kind == "deque":
        if isinstance(now, deque) and now.maxlen == rest[0]:
            now.clear()
            now.extend(items)
            return now
        return deque(items, rest[0])
    if kind == "frozenset" or (kind == "set" and isinstance(now, frozenset)):  # older checkpoints say set
        return frozenset(items)
    if kind == "set":
        if isinstance(now, set):
            now.clear()
            now.update(items)
            return now
        return set(items)
    return type(now)(*items) if hasattr(type(now), "_make") else tuple(items)  # a named tuple keeps its type
