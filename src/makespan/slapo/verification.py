"""Verify a scheduled model against the original: outputs, gradients, buffers, and where they diverge."""

import copy
import functools
import inspect
import math
import random
import sys
import types
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from types import TracebackType
from typing import Any, Self, TypeAlias, TypeVar
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree  # there is no public name for it

from makespan.slapo.building import consolidate
from makespan.slapo.errors import ArgumentError, KindError, VerificationError, shown
from makespan.slapo.graphs import TracedModule, copied_object, opened
from makespan.slapo.layouts import PARTIAL, Ranks, TensorShard, cut, sharding_of
from makespan.slapo.pipelining import Partition, partition
from makespan.slapo.schedule import JournalEntry, Schedule, digest, primitive_named

# ------------------------------------------------------------------------------------------------
# When two tensors count as equal, and by how much they differ.

OUTPUT, GRADIENT = "output", "gradient"
_TOLERANCES = {
    torch.float64: {OUTPUT: 1e-10, GRADIENT: 1e-9},
    torch.float32: {OUTPUT: 1e-5, GRADIENT: 1e-4},
    torch.float16: {OUTPUT: 4e-3, GRADIENT: 2e-2},
    torch.bfloat16: {OUTPUT: 3e-2, GRADIENT: 1e-1},
}


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far a value may be off: ``rtol`` of itself, and ``atol`` of the largest value of its tensor."""

    rtol: float
    atol: float

    def __str__(self) -> str:
        """Return it as reports name it."""
        return f"{self.rtol:g} of the value and {self.atol:g} of the largest"


@dataclass(frozen=True, slots=True)
class Comparison:
    """A tensor of the scheduled model beside that of the original one.

    Parameters
    ----------
    kind, name
        What it is, such as ``parameter gradient``, and whose.
    max_abs_error, max_rel_error
        Largest difference, and the same over the largest value of the original tensor; NaN where they cannot
        be compared.
    fault
        What is wrong, empty where they agree.
    """

    kind: str
    name: str
    max_abs_error: float
    max_rel_error: float
    fault: str = ""

    def __str__(self) -> str:
        """Return it as a line of a report."""
        return f"{self.kind} {self.name}: {self.fault or 'agrees'}"


def tolerance_for(dtype: torch.dtype, what: str, rtol: float | None, atol: float | None) -> Tolerance:
    """Return what is accepted of an output or gradient of a type, where nobody said it otherwise."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return Tolerance(0.0, 0.0)
    known = _TOLERANCES.get(dtype.to_real(), _TOLERANCES[torch.bfloat16])[what]
    return Tolerance(known if rtol is None else rtol, known if atol is None else atol)


def size_of(tensor: Tensor) -> float:
    """Return the largest finite magnitude in a tensor."""
    values = tensor.detach()
    if values.numel() == 0:
        return 0.0
    if not (values.is_floating_point() or values.is_complex()):
        values = values.to(torch.float64)
    largest = float(torch.linalg.vector_norm(values, math.inf))  # one pass, without a second tensor
    if math.isfinite(largest):
        return largest
    magnitudes = values.abs()
    return float(torch.where(magnitudes.isfinite(), magnitudes, torch.zeros_like(magnitudes)).max())


def compare(
    kind: str, name: str, actual: Tensor, expected: Tensor, accepted: Tolerance, size: float | None = None
) -> Comparison:
    """Compare a tensor with what is expected.

    ``size`` takes the place of the largest expected value: of a whole of which this is a part, or of other
    tensors of the kind where all values of this one may be rounding.
    """
    if actual.shape != expected.shape:
        fault = f"has shape {tuple(actual.shape)}; expected: {tuple(expected.shape)}"
        return Comparison(kind, name, math.nan, math.nan, fault)
    if actual.dtype != expected.dtype:
        return Comparison(
            kind, name, math.nan, math.nan, f"has type {actual.dtype}; expected: {expected.dtype}"
        )
    scale = size_of(expected) if size is None else size
    actual, expected = actual.detach(), expected.detach()
    is_number = expected.is_floating_point() or expected.is_complex()
    wide = torch.promote_types(expected.dtype, torch.float32)
    difference = actual.to(wide) - expected.to(wide)
    largest = size_of(difference)
    relative = largest / scale if scale else math.inf if largest else 0.0
    rtol, atol = (accepted.rtol, accepted.atol * scale) if is_number else (0.0, 0.0)
    is_finite = bool(torch.isfinite(difference.sum()))
    if is_finite and largest <= atol:
        return Comparison(kind, name, largest, relative)
    try:
        torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol, equal_nan=True, check_stride=False)
    except AssertionError:
        n_off = int((~torch.isclose(actual, expected, rtol=rtol, atol=atol, equal_nan=True)).sum())
        fault = (
            f"{n_off} of {expected.numel()} values differ, by up to {largest:.3g} where the largest is "
            f"{scale:.3g}; accepted: {accepted}"
        )
        return Comparison(kind, name, largest, relative, fault)
    return Comparison(kind, name, largest, relative)


# ------------------------------------------------------------------------------------------------
# Copies of modules that run by themselves: what is patched, hooked or compiled comes along.
#
# `copy.deepcopy` drops the hooks of a traced module, and a function that is hung into a module keeps
# calling the module that it was made for.

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


# ------------------------------------------------------------------------------------------------
# What a verification found.

IN_TRAINING = " in training"
"""End of the kind of what was compared in training mode, after it had agreed in evaluation mode."""
_SHOWN_PLACES = 6


@dataclass(frozen=True, slots=True)
class Place:
    """A module at which original and scheduled model part.

    Parameters
    ----------
    what
        ``output``, ``input gradient``, ``parameter gradient``, ``buffer`` or ``error``.
    path, module
        Path of the module in the scheduled model, and its class.
    call
        Which call of the module it is, from 0.
    ranks
        Processes of the group that see it.
    step
        The last step of the schedule at the module or above it, None without one.
    stage
        The pipeline stage in which the module runs, None where the schedule has no stages.
    is_summand
        Whether the processes have summands of what is expected, so that an exchange is missing.
    """

    what: str
    path: str
    module: str
    call: int
    ranks: tuple[int, ...]
    step: JournalEntry | None
    stage: int | None = None
    is_summand: bool = False

    def __str__(self) -> str:
        """Return it as a line of a report."""
        which = {
            "output": "first output that differs",
            "input gradient": "last input gradient that differs",
            "parameter gradient": "first parameter gradient that differs",
            "buffer": "first buffer that differs",
            "error": "the error was raised in",
        }[self.what]
        again = f", call {self.call}" if self.call else ""
        stage = "" if self.stage is None else f" in stage {self.stage}"
        where = f"{which}: {self.path!r} ({self.module}){stage}{again}, seen by {_listed('rank', self.ranks)}"
        remedy = ""
        if self.is_summand:
            missing = {
                "output": "sync('fwd_post', 'all_reduce') is missing there",
                "input gradient": "sync('bwd_post', 'all_reduce') is missing there or above",
                "parameter gradient": "sync('bwd_post', 'all_reduce', on='parameters') is missing there, or "
                "sync('bwd_post', 'all_reduce') after it",
            }[self.what]
            remedy = f"; the processes have summands of what is expected: {missing}"
        return f"{where}; last step there: {self.step if self.step is not None else 'none'}{remedy}"


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What a verification found.

    Parameters
    ----------
    path, world_size
        What was verified, and the number of processes that share it.
    steps
        The steps of the schedule in the block that was verified.
    comparisons
        Every tensor that was compared, of all processes together: those with a fault first.
    faults
        What else is wrong.
    places
        Where original and scheduled model part; empty where they agree.
    not_compared
        Parameters of either model without a counterpart in the other.
    notes
        What one should know of the comparison.
    """

    path: str
    world_size: int
    steps: Sequence[JournalEntry]
    comparisons: Sequence[Comparison]
    faults: Sequence[str] = ()
    places: Sequence[Place] = ()
    not_compared: Sequence[str] = ()
    notes: Sequence[str] = field(default=())

    @property
    def is_equal(self) -> bool:
        """Whether the scheduled model computes what the original one does."""
        return not self.faults and all(not one.fault for one in self.comparisons)

    def largest(self, kind: str) -> tuple[float, float]:
        """Return the largest absolute and the largest relative error of a kind, 0 where there is none."""
        alike = [one for one in self.comparisons if one.kind == kind and not math.isnan(one.max_abs_error)]
        return (
            max((one.max_abs_error for one in alike), default=0.0),
            max((one.max_rel_error for one in alike), default=0.0),
        )

    def count(self, kind: str) -> int:
        """Return how many tensors of a kind were compared."""
        return sum(one.kind == kind for one in self.comparisons)

    def __str__(self) -> str:
        """Return the report as text."""
        head = f"{self.path!r}" if self.path else "the model"
        state = "agrees with" if self.is_equal else "differs from"
        on = f"{self.world_size} process{'es' if self.world_size > 1 else ''}"
        lines = [f"{head} {state} the original on {on}, after {_listed('step', len(self.steps))}"]
        lines += [f"  {fault}" for fault in self.faults]
        wrong = [one for one in self.comparisons if one.fault]
        lines += _few([f"  {one}" for one in wrong])
        lines += [f"  {place}" for place in self.places]
        for kind in dict.fromkeys(one.kind for one in self.comparisons):
            absolute, relative = self.largest(kind)
            lines.append(
                f"  {self.count(kind)} x {kind}: largest error {absolute:.3g}, {relative:.3g} of the "
                "largest value of its tensor"
            )
        lines += [f"  note: {note}" for note in self.notes]
        if self.not_compared:
            lines.append("  without counterpart: " + ", ".join(_few(list(self.not_compared))))
        return "\n".join(lines)


def _few(lines: list[str]) -> list[str]:
    more = len(lines) - _SHOWN_PLACES
    return lines if more <= 1 else [*lines[:_SHOWN_PLACES], f"  and {more} more"]


def _listed(what: str, which: Iterable[int] | int) -> str:
    if isinstance(which, int):
        return f"{which} {what}{'' if which == 1 else 's'}"
    numbers = list(which)
    return f"{what}{'' if len(numbers) == 1 else 's'} {', '.join(map(str, numbers))}"


# ------------------------------------------------------------------------------------------------
# The weights under which original and scheduled model are compared: the same, and nobody else's.

ORIGIN = "makespan_verified_name"
"""Tag of a parameter: its name when the verification began, which it keeps wherever it goes."""
_SPREAD = 0.1
_WHOLE_NUMBERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_Object = TypeVar("_Object")


def everywhere(ranks: Ranks, value: _Object) -> list[_Object]:
    """Return what all processes of the group have, in their order."""
    if ranks.size == 1:
        return [value]
    found: list[Any] = [None] * ranks.size
    dist.all_gather_object(found, value, group=ranks.group)
    return found


def from_first(ranks: Ranks, value: _Object) -> _Object:
    """Return what the first process of the group has."""
    if ranks.size == 1:
        return value
    held: list[Any] = [value]
    dist.broadcast_object_list(held, group=ranks.group, group_src=0)
    given: _Object = held[0]
    return given


class Original:
    """A model as it was when a verification began: it shares the parameters, and has buffers of its own."""

    def __init__(self, module: nn.Module) -> None:
        self._seen: list[tuple[str, nn.Parameter, int, int]] = []
        self._begun: list[nn.Parameter] = []
        self.module = copy_module(module, _sharing)
        for (name, one), (_, begun) in zip(
            self.module.named_parameters(), module.named_parameters(), strict=True
        ):
            setattr(begun, ORIGIN, name)
            self._begun.append(begun)
            self._seen.append((name, one, one._version, _checksum(one)))

    def forget(self, scheduled: nn.Module) -> None:
        """Take the tags away again."""
        for one in (*self._begun, *scheduled.parameters()):
            vars(one).pop(ORIGIN, None)

    def changed(self) -> list[str]:
        """Return the parameters whose values somebody has changed in place."""
        return [
            name
            for name, one, version, checksum in self._seen
            if one._version != version or _checksum(one) != checksum
        ]


def _sharing(tensor: Tensor) -> Tensor:
    """Return a parameter with the same memory, or a copy of a buffer."""
    if isinstance(tensor, nn.Parameter):
        return _like(tensor, tensor.detach())
    return tensor.detach().clone()


def _like(old: nn.Parameter, values: Tensor) -> nn.Parameter:
    new = nn.Parameter(values, requires_grad=old.requires_grad)
    vars(new).update({tag: one for tag, one in vars(old).items() if not tag.startswith("_")})
    return new


def _checksum(tensor: Tensor) -> int:
    if tensor.is_meta:
        return 0
    values = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    return int(values.contiguous().view(_WHOLE_NUMBERS[values.element_size()]).sum())


@dataclass(slots=True)
class Weights:
    """Copies of both models with the same weights, and which parameter is which.

    Parameters
    ----------
    original, scheduled
        The copies.
    origin
        Name of the original parameter by that of the scheduled one, and how the latter is cut out of it.
    own, lost
        Parameters that only the scheduled model has, which keep their values, or only the original one.
    differed
        Parameters and buffers whose values were not the same on all processes.
    buffers
        How buffers are cut out of those of the original model.
    """

    original: nn.Module
    scheduled: nn.Module
    origin: dict[str, tuple[str, TensorShard | None]] = field(default_factory=dict)
    own: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    differed: list[str] = field(default_factory=list)
    buffers: dict[str, TensorShard] = field(default_factory=dict)


def filled(module: nn.Module, ranks: Ranks, seed: int, device: torch.device) -> nn.Module:
    """Return a module with values for parameters that exist by shape alone, as a build would give them."""
    if not any(one.is_meta for one in (*module.parameters(), *module.buffers())):
        return module
    own = copy_module(module, lambda tensor: tensor)
    consolidate(Schedule(own, group=ranks.group), seed=seed, device=device)
    return own


def same_weights(
    original: nn.Module, scheduled: nn.Module, ranks: Ranks, device: torch.device, seed: int
) -> Weights:
    """Copy both models, with the weights of the first process of the group.

    Parameters that are all the same number, such as biases of zero, are moved off it: else nobody would see
    that one is missing. All processes of the group must come here.
    """
    sources = dict(original.named_parameters())
    origin, own = _counterparts(sources, scheduled)
    kept = {name for name, _ in origin.values()}
    found = Weights(original, scheduled, origin, own, [name for name in sources if name not in kept])
    names = {id(one): name for name, one in (*sources.items(), *original.named_buffers())}
    prepared: dict[str, Tensor] = {}

    def prepare(tensor: Tensor) -> Tensor:
        name, values = names[id(tensor)], tensor.detach()
        if ranks.size > 1 and getattr(tensor, "shard", None) is None:
            values = _of_first(ranks, values, lambda: found.differed.append(name))
        if name in kept or name.endswith(("running_mean", "running_var")):
            values = _off_constant(values, seed, name)
        values = values.to(device)
        if not isinstance(tensor, nn.Parameter):
            prepared[name] = values.clone()
            return values.clone()
        prepared[name] = values
        return _like(tensor, values)

    found.original = copy_module(original, prepare)
    shards = _buffer_shards(scheduled)
    places = {id(one): name for name, one in (*scheduled.named_parameters(), *scheduled.named_buffers())}

    def take(tensor: Tensor) -> Tensor:
        name = places[id(tensor)]
        if isinstance(tensor, nn.Parameter):
            if name not in origin:
                return _like(tensor, tensor.detach().to(device))
            source, shard = origin[name]
            values = prepared[source] if shard is None else shard.part_of(prepared[source])
            return _like(tensor, values.to(tensor.dtype))
        whole = prepared.get(name)
        shard = _shard(tensor, shards.get(id(tensor)), whole)
        if whole is None or (shard is None and whole.shape != tensor.shape):
            return tensor.detach().to(device, copy=True)
        if shard is not None:
            found.buffers[name] = shard
        return (whole if shard is None else shard.part_of(whole)).to(tensor.dtype, copy=True)

    found.scheduled = copy_module(scheduled, take)
    return found


def _counterparts(
    sources: dict[str, nn.Parameter], scheduled: nn.Module
) -> tuple[dict[str, tuple[str, TensorShard | None]], list[str]]:
    """Say of which original parameter each scheduled one is a part: by its tag, or else by its name."""
    origin: dict[str, tuple[str, TensorShard | None]] = {}
    own = []
    for name, one in scheduled.named_parameters():
        source = getattr(one, ORIGIN, name)
        whole = sources.get(source)
        shard = _shard(one, getattr(one, "shard", None), whole)
        if whole is None or (shard is None and whole.shape != one.shape):
            own.append(name)
        else:
            origin[name] = (source, shard)
    return origin, own


def _shard(part: Tensor, shard: TensorShard | None, whole: Tensor | None) -> TensorShard | None:
    """Return how a tensor is cut out of the original one, None if it has been its size already."""
    if shard is None or whole is None or part.shape == whole.shape or shard.orig_shape != tuple(whole.shape):
        return None
    return shard


def _buffer_shards(module: nn.Module) -> dict[int, TensorShard]:
    found = {}
    for one in module.modules():
        for name, shard in sharding_of(one).tensors.items():
            if (buffer := one._buffers.get(name)) is not None:
                found[id(buffer)] = shard
    return found


def _of_first(ranks: Ranks, values: Tensor, note: Callable[[], None]) -> Tensor:
    """Return the values of the first process; the own tensor where they are the same."""
    received = values.clone(memory_format=torch.contiguous_format)
    dist.broadcast(received, group=ranks.group, group_src=0)
    if torch.equal(received.nan_to_num(), values.nan_to_num()):
        return values
    note()
    return received


def _off_constant(values: Tensor, seed: int, name: str) -> Tensor:
    """Move a tensor whose elements are all one number off it; variances stay positive."""
    flat = values.flatten()
    if not values.is_floating_point() or values.numel() == 0 or bool(flat[0] != flat[-1]):
        return values
    if bool((flat != flat[0]).any()):
        return values
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    drawn = torch.rand(values.shape, generator=generator, dtype=torch.float32)
    return values + (_SPREAD + _SPREAD * drawn).to(values)


# ------------------------------------------------------------------------------------------------
# Where two runs part: what every module returned and which gradient its inputs got, module by module.
#
# Between a sharded layer and the synchronisation after it a process has parts or summands of what the
# original model has. A part is looked for along each axis. Summands are looked for only inside a module
# that is synchronised itself: anywhere else a sum that is missing is the very error to be found.

_SAME, _DIFFERS, _SUMMAND, _UNKNOWN = "same", "differs", "summand", "unknown"
_Key = tuple[str, int]


@dataclass(slots=True)
class Passage:
    """One call of a module: copies of its results, and of the gradients of its inputs."""

    module: str
    results: list[Tensor] = field(default_factory=list)
    gradients: dict[int, Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class Capture:
    """What happened in a run, by path of a module and number of the call."""

    passages: dict[_Key, Passage] = field(default_factory=dict)
    begun: list[_Key] = field(default_factory=list)
    ended: list[_Key] = field(default_factory=list)
    running: list[_Key] = field(default_factory=list)
    is_forward: bool = True


@contextmanager
def captured(model: nn.Module) -> Iterator[Capture]:
    """Record every call of a module in the forward pass, and the gradients that come to its inputs."""
    capture, counts = Capture(), dict[str, int]()
    handles = []
    try:
        for path, module in _seen_modules(model):
            enter, leave = _recorders(capture, counts, path)
            handles.append(module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
            handles.append(module.register_forward_hook(leave))
        yield capture
    finally:
        for handle in handles:
            handle.remove()


def _seen_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Go through modules, but not into what is compiled as a whole."""
    hidden: list[str] = []
    for path, module in model.named_modules():
        if any(path.startswith(prefix) for prefix in hidden):
            continue
        if "__getstate__" in vars(type(module)):
            hidden.append(f"{path}." if path else "_orig_mod")
        yield path, module


def _recorders(capture: Capture, counts: dict[str, int], path: str) -> tuple[Callable[..., Any], ...]:
    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        if not capture.is_forward:  # recomputed in the backward pass
            return
        key = (path, counts.setdefault(path, 0))
        counts[path] += 1
        passage = capture.passages[key] = Passage(type(module).__name__)
        capture.begun.append(key)
        capture.running.append(key)
        for place, one in enumerate(pytree.tree_leaves((args, kwargs))):
            if isinstance(one, Tensor) and one.requires_grad:
                register: Callable[..., Any] = one.register_hook
                register(_keep(passage.gradients, place))

    def leave(module: nn.Module, args: Any, result: Any) -> None:
        if not capture.is_forward:
            return
        key = capture.running.pop()
        leaves = pytree.tree_leaves(result)
        capture.passages[key].results = [one.detach().clone() for one in leaves if isinstance(one, Tensor)]
        capture.ended.append(key)

    return enter, leave


def _keep(gradients: dict[int, Tensor], place: int) -> Callable[[Tensor], None]:
    def keep(gradient: Tensor) -> None:
        gradients[place] = gradient.detach().clone()

    return keep


@dataclass(frozen=True, slots=True)
class Parting:
    """A module at which two runs part."""

    what: str
    path: str
    module: str
    call: int
    ranks: tuple[int, ...]
    is_summand: bool = False
    """Whether the sum over the processes is what is expected."""


def first_partings(
    original: Capture,
    scheduled: Capture,
    synced: Mapping[str, Sequence[str]],
    ranks: Ranks,
    accepted: Mapping[str, Callable[[torch.dtype], Tolerance]],
) -> list[Parting]:
    """Return the first module whose output differs, and the last whose input gradient does.

    The order is that of execution, results after those of modules inside. ``synced`` says which modules are
    synchronised, by the mode. All processes of the group must come here, with runs of the same modules.
    """
    found = []
    both = [key for key in scheduled.ended if key in original.passages]
    summed = synced.get("fwd_post", ())
    outputs = {key: (original.passages[key].results, scheduled.passages[key].results) for key in both}
    place = _first(outputs, summed, ranks, accepted["output"])
    if place is not None:
        found.append(_parting("output", place, scheduled))
    summed = [*synced.get("fwd_pre", ()), *synced.get("bwd_post", ())]
    gradients = {key: _gradients(original.passages[key], scheduled.passages[key])
                 for key in reversed(scheduled.begun) if key in original.passages}  # fmt: skip
    place = _first(gradients, summed, ranks, accepted["gradient"])
    if place is not None:
        found.append(_parting("input gradient", place, scheduled))
    return found


def _gradients(original: Passage, scheduled: Passage) -> tuple[list[Tensor], list[Tensor]]:
    if not scheduled.gradients and any(map(size_of, original.gradients.values())):
        return [torch.ones(1)], [torch.zeros(1)]  # none came, though it should
    places = [one for one in original.gradients if one in scheduled.gradients]
    return [original.gradients[one] for one in places], [scheduled.gradients[one] for one in places]


def _parting(what: str, place: tuple[_Key, tuple[int, ...], bool], run: Capture) -> Parting:
    (path, call), ranks, is_summand = place
    return Parting(what, path, run.passages[path, call].module, call, ranks, is_summand)


def _first(
    pairs: Mapping[_Key, tuple[Sequence[Tensor], Sequence[Tensor]]],
    summed: Sequence[str],
    ranks: Ranks,
    accepted: Callable[[torch.dtype], Tolerance],
) -> tuple[_Key, tuple[int, ...], bool] | None:
    """Return the first call where something differs, on which processes, and whether their sum agrees."""
    verdicts = {}
    for (path, call), (expected, actual) in pairs.items():
        may_sum = ranks.size > 1 and any(_is_inside(path, above) for above in summed)
        if len(expected) != len(actual):
            verdicts[path, call] = [_UNKNOWN]
            continue
        verdicts[path, call] = [
            _verdict(one, other, may_sum, ranks, accepted(other.dtype))
            for one, other in zip(actual, expected, strict=True)
        ]
    for key, seen in _of_all(ranks, verdicts):
        expected, actual = pairs[key]
        off = {rank for rank, own in enumerate(seen) if _DIFFERS in own}
        for index in range(max(map(len, seen))):
            if any(_SUMMAND in own[index : index + 1] for own in seen):
                total = actual[index].clone(memory_format=torch.contiguous_format)
                dist.all_reduce(total, group=ranks.group)
                whole = expected[index]
                if compare("", "", total, whole, accepted(whole.dtype)).fault:
                    off.update(range(ranks.size))
        if off:
            return key, tuple(sorted(off)), sums_agree(actual, expected, ranks, accepted)
    return None


def sums_agree(
    actual: Sequence[Tensor],
    expected: Sequence[Tensor],
    ranks: Ranks,
    accepted: Callable[[torch.dtype], Tolerance],
) -> bool:
    """Whether the sums over the processes are what is expected; all processes must come here."""
    shapes = everywhere(ranks, [(tuple(one.shape), one.dtype) for one in actual])
    is_possible = ranks.size > 1 and bool(actual) and len({str(one) for one in shapes}) == 1
    if not all(everywhere(ranks, is_possible and len(actual) == len(expected))):
        return False
    agrees = True
    for one, whole in zip(actual, expected, strict=True):
        total = one.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ranks.group)
        agrees = agrees and not compare("", "", total, whole, accepted(whole.dtype)).fault
    return all(everywhere(ranks, agrees))


def _is_inside(path: str, above: str) -> bool:
    return path != above and (not above or path.startswith(f"{above}."))


def _of_all(ranks: Ranks, verdicts: dict[_Key, list[str]]) -> Iterator[tuple[_Key, list[list[str]]]]:
    found = everywhere(ranks, verdicts)
    for key in verdicts:
        yield key, [one.get(key, [_UNKNOWN]) for one in found]


def _verdict(actual: Tensor, expected: Tensor, may_sum: bool, ranks: Ranks, accepted: Tolerance) -> str:
    """Say whether a tensor is the original one, or a part of it."""
    if actual.dtype != expected.dtype:
        return _DIFFERS
    if actual.shape == expected.shape:
        if not compare("", "", actual, expected, accepted).fault:
            return _SAME
        return _SUMMAND if may_sum else _DIFFERS
    if actual.numel() == expected.numel():
        return _DIFFERS
    if actual.dim() != expected.dim():
        return _UNKNOWN
    axes = [axis for axis in range(actual.dim()) if actual.shape[axis] != expected.shape[axis]]
    if len(axes) != 1 or expected.shape[axes[0]] != ranks.size * actual.shape[axes[0]]:
        return _UNKNOWN
    if is_part(actual, expected, axes[0], ranks, accepted):
        return _SAME
    return _UNKNOWN if may_sum else _DIFFERS


def is_part(actual: Tensor, expected: Tensor, axis: int, ranks: Ranks, accepted: Tolerance) -> bool:
    """Whether a tensor is the part of this process, the axis cut in any number of equal blocks."""
    size, length = size_of(expected), actual.shape[axis]
    for n_blocks in (one for one in range(1, length + 1) if length % one == 0):
        part = cut(expected, axis, ranks.size, n_blocks)[ranks.rank]
        if not compare("", "", actual, part, accepted, size).fault:
            return True
    return False


# ------------------------------------------------------------------------------------------------
# One forward and one backward pass of a model on given inputs, of which nothing remains outside.

Inputs: TypeAlias = "Tensor | Sequence[Any] | Mapping[str, Any] | Callable[[torch.Generator], Any]"
LossFunction: TypeAlias = Callable[[Any], Tensor]


@dataclass(frozen=True, slots=True)
class Call:
    """Arguments of a forward pass, the names of the positional ones, and of those that want a gradient."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    names: tuple[str, ...] = ()
    wanting: frozenset[str] | None = None

    def leaves(self) -> dict[str, Tensor]:
        """Return the tensors among the arguments by name."""
        return named_tensors(self.named())

    def named(self) -> dict[str, Any]:
        """Return all arguments by name."""
        return dict(zip(self.names, self.args, strict=True)) | self.kwargs

    def fresh(self, device: torch.device) -> "Call":
        """Return copies; those of real numbers want a gradient, or those among them that are named."""

        def copied(name: str, value: Any) -> Any:
            wants = self.wanting is None or name in self.wanting

            def copy(one: Any) -> Any:
                if not isinstance(one, Tensor):
                    return copied_object(one)  # a cache grows in each model by itself
                new = one.detach().to(device, copy=True)
                return new.requires_grad_(wants and (new.is_floating_point() or new.is_complex()))

            return pytree.tree_map(copy, value)

        args = tuple(copied(name, one) for name, one in zip(self.names, self.args, strict=True))
        kwargs = {name: copied(name, one) for name, one in self.kwargs.items()}
        return Call(args, kwargs, self.names, self.wanting)


@dataclass(slots=True)
class Outcome:
    """What came of a forward pass.

    ``held`` names the tensors that are inside of objects, such as a cache: what a model keeps there for
    itself may be the part of a process, and no gradient starts from it.
    """

    leaves: dict[str, Tensor]
    passed: dict[str, Tensor]
    structure: pytree.TreeSpec
    tensors: dict[str, Tensor]
    loss: Tensor | None = None
    others: dict[str, Any] = field(default_factory=dict)
    held: frozenset[str] = frozenset()

    def changed_inputs(self) -> list[str]:
        """Return which arguments the model has changed in place."""
        return [
            name
            for name, leaf in self.leaves.items()
            if not torch.equal(self.passed[name].detach().nan_to_num(), leaf.detach().nan_to_num())
        ]


def call_from(inputs: Inputs, seed: int) -> Call:
    """Return the arguments that a user gave: positional ones, keyword ones, or what a function draws."""
    given = inputs(torch.Generator().manual_seed(seed)) if callable(inputs) else inputs
    if isinstance(given, Tensor):
        return Call((given,), {})
    if isinstance(given, Mapping) and all(isinstance(name, str) for name in given):
        return Call((), dict(given))
    if isinstance(given, Sequence) and not isinstance(given, str):
        return Call(tuple(given), {})
    raise KindError(
        f"Verify: example inputs are {type(given).__name__}; accepted: a tensor, a sequence of positional "
        "arguments, a mapping of keyword arguments, or a function of a generator that returns one of these"
    )


def checked_call(model: nn.Module, call: Call, path: str, wanting: Sequence[str] | None) -> Call:
    """Name the arguments; refuse those that the forward pass does not take."""
    signature = inspect.signature(model.forward)
    try:
        signature.bind(*call.args, **call.kwargs)
    except TypeError as error:
        raise KindError(
            f"Verify of {path!r}: the example inputs do not fit {type(model).__name__}.forward"
            f"{signature}: {error}"
        ) from None
    known = [one.name for one in signature.parameters.values() if one.kind is not one.VAR_POSITIONAL]
    names = tuple([*known, *map(str, range(len(call.args)))][: len(call.args)])
    if isinstance(wanting, str) or (wanting is not None and set(wanting) - {*names, *call.kwargs}):
        accepted = ", ".join([*names, *call.kwargs])
        raise ArgumentError(f"Verify of {path!r}: input_grads {wanting!r}; accepted: names among {accepted}")
    return Call(call.args, call.kwargs, names, None if wanting is None else frozenset(wanting))


def named_tensors(tree: Any) -> dict[str, Tensor]:
    """Return the tensors in a tree by their place."""
    leaves, _ = pytree.tree_flatten_with_path(tree)
    return {_named(place): one for place, one in leaves if isinstance(one, Tensor)}


def _named(place: tuple[Any, ...]) -> str:
    if not place:
        return "itself"
    first, others = place[:1], place[1:]
    return pytree.keystr(first).strip("[].'") + pytree.keystr(others).replace("'", "")


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Draw random numbers from a seed, those of Python and NumPy too; leave the generators as they were."""
    devices = [device] if device.type == "cuda" else []
    of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - models may draw from it
    try:
        with torch.random.fork_rng(devices):
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)  # noqa: NPY002
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002


@contextmanager
def without_dropout() -> Iterator[None]:
    """Let dropout of models in training mode drop nothing, and draw nothing.

    So that they can be compared: which values are dropped depends on the order of all that draws, and on how
    tensors are split. The functions are exchanged rather than intercepted, because no interception of torch
    reaches what is recomputed in a backward pass. What is compiled runs as it was written meanwhile.
    """
    compiler = sys.modules.get("torch._dynamo")  # not loaded as long as nothing compiled has run
    with ExitStack() as stack:
        if compiler is not None:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for space, rates in ((torch.nn.functional, _RATES), (torch, _RATES), (torch._VF, _RATES_OF_LAYERS)):
            for name, place in rates.items():
                if callable(dropping := getattr(space, name, None)):
                    stack.enter_context(mock.patch.object(space, name, _at_rate_of_zero(dropping, place)))
        yield


_RATES: Mapping[str, tuple[str, int | None]] = {
    name: ("p", 1)
    for plain in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout",
                  "feature_alpha_dropout", "native_dropout")
    for name in (plain, f"{plain}_")
} | {
    "scaled_dot_product_attention": ("dropout_p", 4),
    "multi_head_attention_forward": ("dropout_p", 10),
}  # fmt: skip
"""Functions that drop something: name and place of the rate."""
_RATES_OF_LAYERS: Mapping[str, tuple[str, int | None]] = dict.fromkeys(
    ("lstm", "gru", "rnn_tanh", "rnn_relu"), ("dropout", None)
)
"""The same of recurrent layers, whose only fraction is the rate."""


def _at_rate_of_zero(dropping: Callable[..., Any], rate: tuple[str, int | None]) -> Callable[..., Any]:
    name, place = rate

    @functools.wraps(dropping)
    def keep_all(*args: Any, **kwargs: Any) -> Any:
        if place is None:
            return dropping(*(0.0 if isinstance(one, float) else one for one in args), **kwargs)
        if len(args) > place:
            return dropping(*args[:place], 0.0, *args[place + 1 :], **kwargs)
        return dropping(*args, **kwargs | {name: 0.0})

    return keep_all


def run_forward(
    model: nn.Module, call: Call, seed: int, device: torch.device, loss_fn: LossFunction | None
) -> Outcome:
    """Run a model forward on copies of the arguments."""
    own = call.fresh(device)
    # What a model does in place it may not do to a leaf.
    passed = pytree.tree_map_only(Tensor, Tensor.clone, (own.args, own.kwargs))
    seen = Call(passed[0], passed[1], own.names)
    with _seeded(seed, device), torch.enable_grad():
        outputs = model(*passed[0], **passed[1])
        loss = None if loss_fn is None else loss_fn(outputs)
    direct = named_tensors(outputs)
    contents = pytree.tree_map(opened, outputs)
    leaves, structure = pytree.tree_flatten_with_path(contents)
    others = {_named(place): one for place, one in leaves if not isinstance(one, Tensor)}
    tensors = named_tensors(contents)
    held = frozenset(tensors.keys() - direct.keys())
    return Outcome(own.leaves(), seen.leaves(), structure, tensors, loss, others, held)


def run_backward(outcome: Outcome, seed: int, device: torch.device) -> None:
    """Run backward from the loss, or from all outputs with gradients that the seed decides."""
    if outcome.loss is not None:
        ends = {"loss": outcome.loss}
    else:
        results = {name: one for name, one in outcome.tensors.items() if name not in outcome.held}
        ends = {name: one for name, one in results.items() if one.requires_grad}
    starts = []
    for name, one in ends.items():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        drawn = torch.randn(one.shape, generator=generator, dtype=torch.float32)
        starts.append(torch.ones_like(one) if outcome.loss is not None else drawn.to(one))
    if ends:
        with _seeded(seed, device):
            torch.autograd.backward(list(ends.values()), starts)


# ------------------------------------------------------------------------------------------------
# The pipeline stages of a scheduled model, run in the processes that verify it.

_CUT = "cut_pipeline_stage"


class Staged(nn.Module):
    """Stages that one process runs one after the other: each gets what its pipeline would send it."""

    def __init__(self, parts: Partition) -> None:
        super().__init__()
        self.stages = nn.ModuleList(parts.stages)
        self._parts = parts

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run all stages."""
        return self._parts.run(*args, **kwargs)

    def stage_of(self, path: str) -> int | None:
        """Return the stage in which a module of the whole model runs, None for one that several share."""
        found = [index for index, stage in enumerate(self.stages) if _has(stage, path)]
        return found[0] if len(found) == 1 else None


def _has(stage: nn.Module, path: str) -> bool:
    try:
        return bool(path) and stage.get_submodule(path) is not None
    except AttributeError:
        return False


def scheduled_copy(sch: "Schedule", copied: nn.Module) -> "Schedule":
    """Return a schedule of a copy of the model, with the cuts of the original one."""
    from makespan.slapo.schedule import create_schedule

    new = create_schedule(copied, group=sch.group)
    new.metadata.slots[_CUT] = list(sch.metadata.slots[_CUT])
    return new


def in_stages(sch: "Schedule", copied: nn.Module) -> nn.Module:
    """Return what runs a copy of the model: its stages, or itself where the schedule cuts none."""
    if sch.parent is not None or not sch.metadata.slots[_CUT]:
        return copied
    return Staged(partition(scheduled_copy(sch, copied)))


# ------------------------------------------------------------------------------------------------
# Original and scheduled model side by side: first what they compute, and if it differs, where.

MARGIN, _UNITS = 10.0, 4.0
"""Times the measured noise that is accepted, and rounding units by which weights are moved to measure it."""
_ROUNDING = 1e-2
"""Share of the usual size of gradients below which a whole tensor of them may be rounding."""
Accepted = Mapping[str, Callable[[torch.dtype], Tolerance]]


@dataclass
class Passes:
    """Forward and backward passes of both models on one call.

    Parameters
    ----------
    weights, call
        The models and their arguments.
    scheduled
        What is called of the scheduled model: itself, or its stages one after the other.
    ranks, device, seed
        Processes that share the scheduled model, where it runs, and what decides all that is drawn.
    accepted
        Accepted differences by type, of outputs and of gradients.
    loss_fn, check_grad
        Where gradients start, and whether they are asked for.
    suffix
        What is added to the kind of every comparison, such as the mode of the models.
    noise
        What rounding alone may change of a tensor, by its kind and name, relative to its largest value.
    """

    weights: Weights
    call: Call
    scheduled: nn.Module
    ranks: Ranks
    device: torch.device
    seed: int
    accepted: Accepted
    loss_fn: LossFunction | None
    check_grad: bool
    suffix: str = ""
    noise: Mapping[tuple[str, str], float] = field(default_factory=dict)
    comparisons: list[Comparison] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def reference(self) -> Outcome:
        """Return what the original model computes, with its gradients."""
        expected = self._forward(self.weights.original)
        if self.check_grad:
            self._backward(expected)
        return expected

    def run(self, expected: Outcome) -> bool:
        """Compare what the scheduled model computes with the reference; whether it agrees everywhere."""
        buffers = {name: one.clone() for name, one in self.weights.original.named_buffers()}
        try:
            actual = self._forward(self.scheduled)
            self._compare_outputs(actual, expected)
            if self._all_agree() and self.check_grad:
                self._compare_gradients(actual, expected)
        except Exception as error:  # noqa: BLE001 - whatever a model raises
            self.faults.append(f"the scheduled model raises {type(error).__name__}: {error}")
        self._compare_buffers(buffers)
        self._clear()
        return self._all_agree()

    def _forward(self, model: nn.Module) -> Outcome:
        return run_forward(model, self.call, self.seed, self.device, self.loss_fn)

    def _backward(self, outcome: Outcome) -> None:
        run_backward(outcome, self.seed, self.device)

    def _all_agree(self) -> bool:
        own = not self.faults and not any(one.fault for one in self.comparisons)
        return all(everywhere(self.ranks, own))

    def _clear(self) -> None:
        for model in (self.weights.original, self.scheduled):
            for one in model.parameters():
                one.grad = None

    def _note(
        self, kind: str, name: str, actual: Tensor, expected: Tensor, size: float | None = None,
        source: str | None = None,
    ) -> None:  # fmt: skip
        what = GRADIENT if "gradient" in kind else OUTPUT
        accepted = self.accepted[what](expected.dtype)
        if noise := self.noise.get((kind, name if source is None else source), 0.0):
            accepted = Tolerance(accepted.rtol, accepted.atol + MARGIN * noise)
        self.comparisons.append(compare(kind + self.suffix, name, actual, expected, accepted, size))

    def _compare_outputs(self, actual: Outcome, expected: Outcome) -> None:
        if actual.structure != expected.structure:
            structures = [shown(str(one.structure)) for one in (actual, expected)]
            self.faults.append(f"the output is {structures[0]}; expected: {structures[1]}")
            return
        for name, one in expected.tensors.items():
            found = actual.tensors.get(name)
            if found is None:
                self.faults.append(f"output {name} is {shown(actual.others[name])}; expected: a tensor")
            elif not (name in expected.held and self._is_own_part(found, one)):
                self._note("output", name, found, one)
        if expected.loss is not None and actual.loss is not None:
            self._note("loss", "of the outputs", actual.loss, expected.loss)
        for name, value in expected.others.items():
            other = actual.tensors.get(name, actual.others.get(name))
            if not _is_same_value(other, value):
                self.faults.append(f"output {name} is {shown(other)}; expected: {shown(value)}")
        changed = sorted({*actual.changed_inputs()} ^ {*expected.changed_inputs()})
        self.faults += [f"input {name} is changed in place by one model only" for name in changed]

    def _is_own_part(self, actual: Tensor, expected: Tensor) -> bool:
        """Whether a tensor in an object is what this process has of the whole, as keys of its own heads."""
        if actual.dtype != expected.dtype or actual.dim() != expected.dim():
            return False
        axes = [axis for axis in range(actual.dim()) if actual.shape[axis] != expected.shape[axis]]
        if len(axes) != 1 or expected.shape[axes[0]] != self.ranks.size * actual.shape[axes[0]]:
            return False
        accepted = self.accepted[OUTPUT](expected.dtype)
        return is_part(actual, expected, axes[0], self.ranks, accepted)

    def _compare_gradients(self, actual: Outcome, expected: Outcome) -> None:
        original = dict(self.weights.original.named_parameters())
        sizes = {name: size_of(one.grad) for name, one in original.items() if one.grad is not None}
        floor = _ROUNDING * median(sizes.values()) if sizes else 0.0
        arrived: set[str] = set()

        def arrive(name: str, parameter: Tensor) -> None:
            source, shard = self.weights.origin[name]
            gradient, whole = parameter.grad, original[source].grad
            parameter.grad = None  # compared and dropped, so that both gradients never stand side by side
            arrived.add(name)
            if gradient is None:
                return
            if whole is None:
                whole = torch.zeros_like(original[source])
            part = whole if shard is None else shard.part_of(whole)
            size = max(sizes.get(source, 0.0), floor)
            self._note("parameter gradient", name, gradient, part, size, source)

        handles = []
        for name, one in self.weights.scheduled.named_parameters():
            if name in self.weights.origin and one.requires_grad:
                register: Callable[..., Any] = one.register_post_accumulate_grad_hook
                handles.append(register(partial(arrive, name)))
        try:
            self._backward(actual)
        finally:
            for handle in handles:
                handle.remove()
        for name, (source, _) in self.weights.origin.items():
            if name not in arrived and sizes.get(source, 0.0) > floor:
                fault = f"gets no gradient; expected: one with values up to {sizes[source]:.3g}"
                kind = f"parameter gradient{self.suffix}"
                self.comparisons.append(Comparison(kind, name, math.nan, math.nan, fault))
        for name, leaf in expected.leaves.items():
            if leaf.grad is not None:
                own = actual.leaves[name].grad
                self._note("input gradient", name, torch.zeros_like(leaf) if own is None else own, leaf.grad)

    def _compare_buffers(self, expected: Mapping[str, Tensor]) -> None:
        """Compare what a forward pass leaves in buffers, such as running means."""
        for name, one in self.weights.scheduled.named_buffers():
            shard, whole = self.weights.buffers.get(name), expected.get(name)
            if whole is not None and (shard is not None or whole.shape == one.shape):
                self._note("buffer", name, one, whole if shard is None else shard.part_of(whole))

    def buffers(self) -> list[tuple[nn.Module, str, Tensor, Tensor]]:
        """Return the buffers of both models with their owners and names, each with a copy."""
        models = (self.weights.original, self.scheduled)
        modules = {id(one): one for model in models for one in model.modules()}
        return [
            (module, name, one, one.detach().clone())
            for module in modules.values()
            for name, one in module._buffers.items()
            if one is not None
        ]

    def measured_noise(self) -> dict[tuple[str, str], float]:
        """Return by how much the original model changes when its weights change by rounding alone.

        Batch norm over a few samples divides by what is nearly nothing, so that a sum in another order is
        seen in the result; no fixed tolerance tells that from a mistake.
        """
        original = self.weights.original
        generator = torch.Generator().manual_seed(self.seed)

        def moved(tensor: Tensor) -> Tensor:
            values = tensor.detach().clone()
            if not isinstance(tensor, nn.Parameter):
                return values
            if values.is_floating_point():
                unit = _UNITS * torch.finfo(values.dtype).eps
                drawn = 2 * torch.rand(values.shape, generator=generator, dtype=torch.float32) - 1
                values *= 1 + unit * drawn.to(values)
            return nn.Parameter(values, tensor.requires_grad)

        other = copy_module(original, moved)
        found = []
        for model in (original, other):
            outcome = self._forward(model)
            if self.check_grad:
                self._backward(outcome)
            gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
            inputs = {name: one.grad for name, one in outcome.leaves.items() if one.grad is not None}
            tensors = {
                "output": outcome.tensors,
                "loss": {} if outcome.loss is None else {"of the outputs": outcome.loss},
                "parameter gradient": gradients,
                "input gradient": inputs,
                "buffer": {name: one.clone() for name, one in model.named_buffers()},
            }
            found.append(
                {(kind, name): one for kind, all_of in tensors.items() for name, one in all_of.items()}
            )
        expected, actual = found
        noise = {}
        for key, one in expected.items():
            if one.is_floating_point() and (size := size_of(one)) and key in actual:
                noise[key] = size_of(actual[key].detach() - one.detach()) / size
        self._clear()
        return noise

    def partings(self, synced: Mapping[str, Sequence[str]]) -> list[Parting]:
        """Run both models once more, and return where they part."""
        with captured(self.weights.original) as expected:
            self._recorded(self.weights.original, expected)
        with captured(self.weights.scheduled) as actual:
            stopped: tuple[str, int, str] | None = None
            try:
                self._recorded(self.scheduled, actual)
            except Exception:  # noqa: BLE001 - as it did before
                key = actual.running[-1] if actual.running else ("", 0)
                stopped = (*key, actual.passages[key].module if key in actual.passages else "")
        stops = {one: ranks for one, ranks in _together(everywhere(self.ranks, stopped)).items() if one}
        found = [Parting("error", path, module, call, who) for (path, call, module), who in stops.items()][:1]
        for one in first_partings(expected, actual, synced, self.ranks, self.accepted):
            returns = sharding_of(self.weights.scheduled.get_submodule(one.path)).returns
            found.append(
                replace(one, is_summand=one.is_summand or (one.what == "output" and returns == PARTIAL))
            )
        parameters = [name for name, _ in self.weights.scheduled.named_parameters()]
        buffers = [name for name, _ in self.weights.scheduled.named_buffers()]
        found = found or self._by_name("parameter gradient", parameters) or self._by_name("buffer", buffers)
        self._clear()
        return found or [
            Parting("output", "", type(self.weights.scheduled).__name__, 0, tuple(range(self.ranks.size)))
        ]

    def _by_name(self, kind: str, names: Sequence[str]) -> list[Parting]:
        """Return the module of the first tensor of a kind that differs, in the order of the model."""
        wrong = {one.name for one in self.comparisons if one.kind == kind + self.suffix and one.fault}
        seen = everywhere(self.ranks, wrong)
        for name in names:
            if who := tuple(rank for rank, own in enumerate(seen) if name in own):
                path = name.rpartition(".")[0]
                module = type(self.weights.scheduled.get_submodule(path)).__name__
                return [Parting(kind, path, module, 0, who, self._is_summand(kind, name))]
        return []

    def _is_summand(self, kind: str, name: str) -> bool:
        """Whether the gradients that the processes have of a whole parameter add up to what is expected."""
        source, shard = self.weights.origin.get(name, ("", None))
        if kind != "parameter gradient" or shard is not None or not source:
            return False
        own = self.weights.scheduled.get_parameter(name).grad
        whole = self.weights.original.get_parameter(source).grad
        pairs = [] if own is None or whole is None else [(own, whole)]
        actual, expected = [one for one, _ in pairs], [one for _, one in pairs]
        return sums_agree(actual, expected, self.ranks, self.accepted[GRADIENT])

    def _recorded(self, model: nn.Module, capture: Capture) -> None:
        outcome = self._forward(model)
        capture.is_forward = False
        if self.check_grad:
            self._backward(outcome)


@torch.no_grad()
def put_back(buffers: Sequence[tuple[nn.Module, str, Tensor, Tensor]]) -> None:
    """Give modules the buffers that they had, with the values of their copies."""
    for module, name, one, values in buffers:
        module._buffers[name] = one.copy_(values)


def _is_same_value(found: Any, expected: Any) -> bool:
    """Compare what is no tensor; what is no number is equal to itself."""
    if found is expected:
        return True
    try:
        return bool(found == expected) or bool(found != found and expected != expected)
    except (ValueError, TypeError, RuntimeError):  # an array has an answer for each element
        return repr(found) == repr(expected)


def _together(seen: Sequence[Any]) -> dict[Any, tuple[int, ...]]:
    return {key: tuple(rank for rank, one in enumerate(seen) if one == key) for key in dict.fromkeys(seen)}


# ------------------------------------------------------------------------------------------------
# Check that a scheduled model computes what the original one does: outputs and gradients, everywhere.

_SHOWN_NAMES = 4


class Verify:
    """Verify the primitives that are applied in a block.

    On leaving the block without an error, original and scheduled model are run on the same inputs with the
    same weights: outputs, input gradients and the gradient of every parameter must agree on every process of
    the group, and so must what a step in training mode leaves in buffers. What differs is reported by place.
    Weights that are all one number, such as biases of zero, are moved off it in both. The schedule, its
    model, the modes of its modules and the generators of random numbers stay as they were. Where the schedule
    cuts a pipeline, its stages run one after the other.

    Parameters
    ----------
    sch
        The schedule, or a node of it; all processes of its group must verify it together.
    example_inputs
        A tensor, positional arguments, keyword arguments by name, or a function of a `torch.Generator` that
        draws any of these. Those of the first process of the group are taken.
    device
        Where the models run; None for where the parameters are.
    eval_mode
        True to run both models in evaluation mode only, False in their own modes only. None for both modes of
        all modules: evaluation first, then training, where batch norm counts but nothing is dropped. Where
        the original model raises an error in training mode, evaluation mode alone is compared.
    check_grad
        Whether gradients are compared, too.
    rtol, atol
        Accepted differences, of the value and of the largest value in its tensor; None for those of the type.
    loss_fn
        Loss of the outputs, from which gradients start; None for a random gradient of every output.
    enable
        False to do nothing.
    input_grads
        Names of arguments whose gradients are compared; None for all that are real numbers. A mask that is
        never trained may be left out.
    seed
        Of inputs that are drawn, dropout and gradients at the outputs.

    Attributes
    ----------
    report
        The `VerifyReport` after the block, None before or where nothing was verified.

    Raises
    ------
    VerificationError
        The models differ, on every process of the group; also an `AssertionError`. The message is the report.
    KindError, ArgumentError
        The inputs are of another kind than accepted, or do not fit the model; a tolerance is negative, or a
        name is not one of an argument.

    References
    ----------
    Slapo, section 3.5, verification.
    """

    def __init__(
        self,
        sch: "Schedule",
        example_inputs: Inputs,
        device: torch.device | str | None = None,
        eval_mode: bool | None = None,
        check_grad: bool = True,
        rtol: float | None = None,
        atol: float | None = None,
        loss_fn: LossFunction | None = None,
        enable: bool = True,
        *,
        input_grads: Sequence[str] | None = None,
        seed: int = 0,
    ) -> None:
        for name, one in (("rtol", rtol), ("atol", atol)):
            if one is not None and not one >= 0:
                raise ArgumentError(
                    f"Verify of {sch.path!r}: {name} is {one!r}; accepted: a number >= 0, or None"
                )
        self.report: VerifyReport | None = None
        self._sch, self._inputs, self._device = sch, example_inputs, device
        self._eval_mode, self._check_grad, self._loss_fn = eval_mode, check_grad, loss_fn
        self._enable, self._input_grads, self._seed = enable, input_grads, seed
        self._accepted = {
            what: partial(tolerance_for, what=what, rtol=rtol, atol=atol) for what in (OUTPUT, GRADIENT)
        }
        self._ranks = Ranks(sch.rank, sch.world_size, sch.group)
        self._running: nn.Module = sch.mod
        self._notes: list[str] = []

    def __enter__(self) -> Self:
        """Keep the model as it is."""
        if self._enable:
            given = call_from(self._inputs, self._seed)
            self._call = checked_call(self._sch.mod, given, self._sch.path, self._input_grads)
            self._n_steps = len(self._sch.metadata.journal)
            self._original = Original(self._sch.mod)
            self._sch.metadata.tags.add(ORIGIN)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Compare the models, unless the block has failed."""
        if not self._enable:
            return
        try:
            if error is None:
                self.report = self._verified()
        finally:
            self._original.forget(self._sch.mod)
            self._sch.metadata.tags.discard(ORIGIN)
        if self.report is not None and not self.report.is_equal:
            raise VerificationError(str(self.report))

    def _verified(self) -> VerifyReport:
        ranks, journal = self._ranks, self._sch.metadata.journal
        if len(set(everywhere(ranks, digest(journal)))) > 1:
            return self._report([], [_other_steps(everywhere(ranks, [str(one) for one in journal]))], [])
        device = torch.device(self._device) if self._device is not None else _device_of(self._sch.mod)
        call = from_first(ranks, self._call)
        original = filled(self._original.module, ranks, self._seed, device)
        weights = same_weights(original, self._sch.mod, ranks, device, self._seed)
        self._running = in_stages(self._sch, weights.scheduled)
        if self._eval_mode is not False:
            self._switch(weights, is_training=False)
        passes = Passes(
            weights, call, self._running, ranks, device, self._seed, self._accepted, self._loss_fn,
            self._check_grad,
        )  # fmt: skip
        agrees = passes.run(passes.reference())
        places = [] if agrees else passes.partings(self._synced())
        if agrees and self._eval_mode is None:
            self._switch(weights, is_training=True)
            places = self._trained(passes)
        faults = [*passes.faults]
        faults += [f"parameter {name} was changed in place" for name in self._original.changed()]
        found = everywhere(ranks, (passes.comparisons, faults, weights.differed))
        weights.differed = [name for _, _, names in found for name in names]
        merged = _merged([one[:2] for one in found])
        return self._report(*merged, places, weights)

    def _trained(self, passes: Passes) -> list[Parting]:
        """Compare the models in training mode, too; return where they part."""
        training = replace(passes, suffix=IN_TRAINING, comparisons=[], faults=[])
        before = training.buffers()
        with without_dropout():
            try:
                expected = training.reference()
            except Exception as error:  # noqa: BLE001 - whatever a model raises
                why = shown(f"{type(error).__name__}: {error}")
                self._notes.append(f"not compared in training mode, where the original raises {why}")
                return []
            agrees = training.run(expected)
            if not agrees:
                put_back(before)
                training.noise = training.measured_noise()
                put_back(before)
                training.comparisons, training.faults = [], []
                agrees = training.run(training.reference())
                if agrees:
                    largest = max(everywhere(self._ranks, max(training.noise.values(), default=0.0)))
                    self._notes.append(
                        f"in training mode rounding alone changes results by up to {largest:.3g} of their "
                        f"largest value; {MARGIN:g} times what it changes of each was accepted"
                    )
            places = [] if agrees else training.partings(self._synced())
        passes.comparisons += training.comparisons
        passes.faults += [f"in training mode, {one}" for one in training.faults]
        return places

    def _switch(self, weights: Weights, is_training: bool) -> None:
        for one in (weights.original, weights.scheduled, self._running):
            one.train(is_training)

    def _report(
        self,
        comparisons: Sequence[Comparison],
        faults: Sequence[str],
        partings: Sequence[Parting],
        weights: Weights | None = None,
    ) -> VerifyReport:
        steps = self._sch.metadata.journal[self._n_steps :]
        places = [
            Place(
                one.what,
                self._full(one.path),
                one.module,
                one.call,
                one.ranks,
                self._step(one.path),
                self._stage(one.path),
                one.is_summand,
            )
            for one in partings
        ]
        counts = Counter(
            step.op
            for step in steps
            if (primitive := primitive_named(step.op)) is not None and not primitive.is_verifiable()
        )
        notes = [*self._notes]
        notes += [f"{count} x {op}, which may change results" for op, count in counts.items()]
        if weights is not None and (differed := sorted(set(weights.differed))):
            more = f" and {len(differed) - _SHOWN_NAMES} more" if len(differed) > _SHOWN_NAMES else ""
            names = ", ".join(differed[:_SHOWN_NAMES]) + more
            notes.append(f"as the first process has them, since they differ between processes: {names}")
        lost = [] if weights is None else [*weights.lost, *weights.own]
        return VerifyReport(self._sch.path, self._ranks.size, steps, comparisons, faults, places, lost, notes)

    def _full(self, path: str) -> str:
        return ".".join(filter(None, (self._sch.path, path)))

    def _stage(self, path: str) -> int | None:
        running = self._running
        return running.stage_of(path) if isinstance(running, Staged) else None

    def _step(self, path: str) -> JournalEntry | None:
        """Return the last step at a module or above it, of the block if there is one."""
        full = self._full(path)
        for journal in (self._sch.metadata.journal[self._n_steps :], self._sch.metadata.journal):
            for entry in reversed(journal):
                if not entry.path or full == entry.path or full.startswith(f"{entry.path}."):
                    return entry
        return None

    def _synced(self) -> dict[str, list[str]]:
        """Return the modules that are synchronised, by the mode."""
        found: dict[str, list[str]] = {}
        start = f"{self._sch.path}." if self._sch.path else ""
        for entry in self._sch.metadata.journal:
            if entry.op != "sync" or entry.arguments.get("on") == "parameters":
                continue
            if f"{entry.path}.".startswith(start):
                found.setdefault(str(entry.arguments["mode"]), []).append(entry.path.removeprefix(start))
        return found


def _device_of(module: nn.Module) -> torch.device:
    devices = {one.device for one in (*module.parameters(), *module.buffers()) if not one.is_meta}
    return next(iter(devices), torch.device("cpu"))


def _other_steps(journals: Sequence[Sequence[str]]) -> str:
    """Say where the schedules of the processes part."""
    length = max(map(len, journals))
    for step in range(length):
        texts = [journal[step] if step < len(journal) else "nothing" for journal in journals]
        if len(set(texts)) > 1:
            said = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))
            return f"the processes have other schedules, from step {step + 1} on: {said}"
    return "the processes have other schedules"


def _merged(
    found: Sequence[tuple[Sequence[Comparison], Sequence[str]]],
) -> tuple[list[Comparison], list[str]]:
    """Put together what the processes found: of each tensor the worst."""
    worst: dict[tuple[str, str], Comparison] = {}
    for rank, (comparisons, _) in enumerate(found):
        for one in comparisons:
            known = worst.get((one.kind, one.name))
            if known is None or (bool(one.fault), one.max_rel_error) > (
                bool(known.fault),
                known.max_rel_error,
            ):
                where = f"on rank {rank}: {one.fault}" if one.fault and len(found) > 1 else one.fault
                worst[one.kind, one.name] = replace(one, fault=where)
    faults = dict.fromkeys(fault for _, own in found for fault in own)
    return sorted(worst.values(), key=lambda one: not one.fault), list(faults)
