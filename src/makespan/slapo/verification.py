"""Verify a scheduled model against the original: outputs, gradients, buffers, and where they diverge.

Copies of both models run with the same weights, inputs and random numbers: by default first in evaluation
mode, then in training mode without dropout. If they differ, both run once more with hooks that record every
module, and the report names the modules at which they diverge.

Two rules hold throughout. Processes exchange their results before they branch on them, so that all of them
reach the same collectives. The user's model, its modes and its random generators do not change.
"""

import copy
import functools
import inspect
import math
import pickle
import random
import sys
import types
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from types import TracebackType
from typing import Any, Self, TypeAlias, TypeVar, cast
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree  # there is no public name for it

from makespan.notebook import text_html
from makespan.slapo.building import consolidate
from makespan.slapo.errors import ArgumentError, KindError, VerificationError, short_repr
from makespan.slapo.graphs import TracedModule, copied_object, expanded
from makespan.slapo.layered import (
    Handed,
    NoLayersError,
    StandIns,
    Templates,
    repeated_layers,
    shared_modules,
    state_of,
    structure_of,
)
from makespan.slapo.layouts import PARTIAL, Ranks, TensorShard, cut, sharding_of
from makespan.slapo.pipelining import Partition, partition
from makespan.slapo.schedule import JournalEntry, Schedule, create_schedule, digest, primitive_named
from makespan.training.bits import word_sum_of

# --- Comparison of tensors ---

OUTPUT, GRADIENT = "output", "gradient"
# Schedules change the order of sums, so results agree up to rounding. The limits are about 100 roundings in
# float32 and 4 in 16-bit types, whose kernels add in float32; float64 stays far below its limit. Gradients
# add over all tokens and pass more operations: their limits are three to ten times as wide. All are
# relative to the largest value of a tensor, since its small values may be differences of large ones.
_TOLERANCES = {
    torch.float64: {OUTPUT: 1e-10, GRADIENT: 1e-9},
    torch.float32: {OUTPUT: 1e-5, GRADIENT: 1e-4},
    torch.float16: {OUTPUT: 4e-3, GRADIENT: 2e-2},
    torch.bfloat16: {OUTPUT: 3e-2, GRADIENT: 1e-1},
}


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Tolerated error: ``rtol`` of the value, and ``atol`` of the largest value of its tensor."""

    rtol: float
    atol: float

    def __str__(self) -> str:
        """Return the text for reports."""
        return f"{self.rtol:g} of the value and {self.atol:g} of the largest"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Comparison of a tensor of the scheduled model with that of the original one.

    Parameters
    ----------
    kind, name
        Kind of the tensor, such as ``parameter gradient``, and its name.
    max_abs_error, max_rel_error
        Largest difference, and its ratio to the largest value of the original tensor; NaN if they cannot be
        compared.
    fault
        Description of the difference, empty if they agree.
    """

    kind: str
    name: str
    max_abs_error: float
    max_rel_error: float
    fault: str = ""

    def __str__(self) -> str:
        """Return a line of a report."""
        return f"{self.kind} {self.name}: {self.fault or 'agrees'}"


def tolerance_for(dtype: torch.dtype, kind: str, rtol: float | None, atol: float | None) -> Tolerance:
    """Return the tolerance of outputs or gradients of a type; ``rtol`` and ``atol`` override defaults."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return Tolerance(0.0, 0.0)
    known = _TOLERANCES.get(dtype.to_real(), _TOLERANCES[torch.bfloat16])[kind]
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


_BLOCK = 1 << 17
"""Elements that are subtracted at a time, so that the differences stay in the cache."""


def _largest_difference(actual: Tensor, expected: Tensor) -> tuple[float, bool]:
    """Return the largest finite difference, and True if all differences are finite."""
    wide = torch.promote_types(expected.dtype, torch.float32)
    if actual.numel() <= _BLOCK:
        blocks = iter([(actual, expected)])
    else:
        blocks = zip(*(torch.split(tensor.reshape(-1), _BLOCK) for tensor in (actual, expected)), strict=True)
    largest, is_finite = 0.0, True
    for part, other in blocks:
        difference = part.to(wide) - other.to(wide)
        size = float(torch.linalg.vector_norm(difference, math.inf)) if difference.numel() else 0.0
        if not math.isfinite(size):  # one NaN or infinity among the elements shows in their norm
            is_finite, size = False, size_of(difference)
        largest = max(largest, size)
    return largest, is_finite


def compare(
    kind: str, name: str, actual: Tensor, expected: Tensor, tolerance: Tolerance, size: float | None = None
) -> Comparison:
    """Compare a tensor with the expected one.

    ``size`` replaces the largest expected value: that of the whole if the tensor is a part, or that of other
    tensors of the kind if all values of this one may be rounding errors.
    """
    if actual.shape != expected.shape:
        fault = f"has shape {tuple(actual.shape)}; expected {tuple(expected.shape)}"
        return Comparison(kind, name, math.nan, math.nan, fault)
    if actual.dtype != expected.dtype:
        return Comparison(
            kind, name, math.nan, math.nan, f"has type {actual.dtype}; expected {expected.dtype}"
        )
    scale = size_of(expected) if size is None else size
    actual, expected = actual.detach(), expected.detach()
    is_number = expected.is_floating_point() or expected.is_complex()
    largest, is_finite = _largest_difference(actual, expected)
    relative = largest / scale if scale else math.inf if largest else 0.0
    rtol, atol = (tolerance.rtol, tolerance.atol * scale) if is_number else (0.0, 0.0)
    # Tensors that agree need no second pass; assert_close decides on NaN, infinity and relative tolerance.
    if is_finite and largest <= atol:
        return Comparison(kind, name, largest, relative)
    try:
        torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol, equal_nan=True, check_stride=False)
    except AssertionError:
        n_off = int((~torch.isclose(actual, expected, rtol=rtol, atol=atol, equal_nan=True)).sum())
        fault = (
            f"{n_off} of {expected.numel()} values differ, by up to {largest:.3g} where the largest is "
            f"{scale:.3g}; tolerated: {tolerance}"
        )
        return Comparison(kind, name, largest, relative, fault)
    return Comparison(kind, name, largest, relative)


# --- Copies of modules ---
#
# `copy.deepcopy` does not suffice: it drops the hooks of a traced module, and a function that is attached to
# a module keeps calling the original module. Buffers and parameters also get values of our own.

_TABLES = ("_parameters", "_buffers", "_modules")
_REBUILT = ("_graph", "_compiled_call_impl")
_Mapped = Callable[[Tensor], Tensor]


def copy_module(module: nn.Module, tensor_of: Callable[[Tensor], Tensor]) -> nn.Module:
    """Return a module of the same structure with other parameters and buffers.

    Graphs are copied, and random generators with their state. Functions and process groups are shared, except
    functions and methods that refer to a module of the original: the copy gets its own.

    Parameters
    ----------
    module
        The original; it does not change.
    tensor_of
        Function that is called once per parameter and buffer and returns the one of the copy; ties stay.
    """
    return _Copier(tensor_of).copy(module)


class _Copier:
    """State of one copy: copied objects by the id of the original."""

    def __init__(self, tensor_of: _Mapped) -> None:
        self._tensor_of = tensor_of
        self._done: dict[int, Any] = {}
        self._kept: list[Any] = []  # originals are kept alive, so that no id is reused

    def copy(self, root: nn.Module) -> nn.Module:
        """Copy a module and all modules below it."""
        # Empty objects first, then their content: modules, hooks and wrappers refer to each other in circles.
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
                new = self._done[id(module)]  # each traced module has a class of its own
                type(new).__name__ = type(module).__name__
                new.graph = copy.deepcopy(module.graph)
                if isinstance(module, TracedModule):
                    new.after_copy()
            if "__getstate__" in vars(type(module)):  # as compiled modules have, which restore themselves
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
                mapped = {
                    key: None if entry is None else self._done[id(entry)] for key, entry in value.items()
                }
                vars(new)[name] = type(value)(mapped)
            elif name in _REBUILT:
                continue
            else:
                mapped = self._mapped(value)
                is_own = mapped is value and isinstance(value, dict | list | set)
                vars(new)[name] = value.copy() if is_own else mapped

    def _mapped(self, value: Any) -> Any:
        """Return the counterpart of a value in the copy, the value itself if it refers to nothing copied."""
        if id(value) in self._done:
            return self._done[id(value)]
        match value:
            case torch.Generator():
                self._remember(value, value.clone_state())
                return self._done[id(value)]
            case types.MethodType():
                return types.MethodType(value.__func__, self._mapped(value.__self__))
            case functools.partial():
                keywords = {key: self._mapped(element) for key, element in value.keywords.items()}
                return functools.partial(self._mapped(value.func), *map(self._mapped, value.args), **keywords)
            case types.FunctionType():
                return self._function(value)
            case dict():
                mapped = {key: self._mapped(element) for key, element in value.items()}
                if not _is_other(mapped, value):
                    return value
                new = value.copy()  # of the same class, in the same order
                new.update(mapped)
                return new
            case list() | set() | tuple():
                parts = list(map(self._mapped, value))
                if all(element is other for element, other in zip(parts, value, strict=True)):
                    return value
                return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        if callable(value) and not isinstance(value, type) and hasattr(value, "__dict__"):
            return self._object(value)
        return value

    def _object(self, value: Any) -> Any:
        """Copy a callable object, such as a wrapper of a forward, if it refers to something copied."""
        self._remember(value, value)  # it may refer to itself
        mapped = {name: self._mapped(attribute) for name, attribute in vars(value).items()}
        if not _is_other(mapped, vars(value)):
            return value
        new = object.__new__(type(value))
        vars(new).update(mapped)
        self._done[id(value)] = new
        return new

    def _function(self, value: types.FunctionType) -> types.FunctionType:
        """Copy a function if its closure refers to something copied."""
        cells = value.__closure__ or ()
        if not cells:
            return value
        self._remember(value, value)  # a function may refer to itself
        held: list[Any] = []
        for cell in cells:
            try:
                held.append(cell.cell_contents)
            except ValueError:  # the variable has no value yet
                held.append(cell)
        mapped = [
            self._mapped(content) if content is not cell else cell
            for content, cell in zip(held, cells, strict=True)
        ]
        if all(content is other for content, other in zip(held, mapped, strict=True)):
            return value
        closure = tuple(
            cell if content is cell else types.CellType(content)
            for content, cell in zip(mapped, cells, strict=True)
        )
        new = types.FunctionType(
            value.__code__, value.__globals__, value.__name__, value.__defaults__, closure
        )
        new.__kwdefaults__, new.__qualname__ = value.__kwdefaults__, value.__qualname__
        vars(new).update(vars(value))
        self._done[id(value)] = new
        return new


def _is_other(mapped: dict[Any, Any], value: dict[Any, Any]) -> bool:
    return any(mapped[key] is not element for key, element in value.items())


# --- Report ---

IN_TRAINING = " in training"
"""Suffix of kinds that are compared in training mode, after evaluation mode agreed."""
_SHOWN_PLACES = 6


@dataclass(frozen=True, slots=True)
class Divergence:
    """A module at which original and scheduled model diverge.

    Parameters
    ----------
    kind
        ``output``, ``input gradient``, ``parameter gradient``, ``buffer`` or ``error``.
    path, module
        Path of the module in the scheduled model, and its class.
    call
        Index of the call of the module, from 0.
    ranks
        Processes of the group on which they differ.
    is_summand
        True if the sum over the processes is the expected value, so that an exchange is missing.
    step
        The last step of the schedule at the module or above it, or None.
    stage
        The pipeline stage in which the module runs, None if the schedule has no stages.
    """

    kind: str
    path: str
    module: str
    call: int
    ranks: tuple[int, ...]
    is_summand: bool = False
    step: JournalEntry | None = None
    stage: int | None = None

    def __str__(self) -> str:
        """Return a line of a report."""
        headline = {
            "output": "first output that differs",
            "input gradient": "last input gradient that differs",
            "parameter gradient": "first parameter gradient that differs",
            "buffer": "first buffer that differs",
            "error": "the error was raised in",
        }[self.kind]
        again = f", call {self.call}" if self.call else ""
        stage = "" if self.stage is None else f" in stage {self.stage}"
        ranks = _numbered("rank", self.ranks)
        where = f"{headline}: {self.path!r} ({self.module}){stage}{again}, seen by {ranks}"
        remedy = ""
        if self.is_summand:
            missing = {
                "output": "sync('fwd_post', 'all_reduce') is missing there",
                "input gradient": "sync('bwd_post', 'all_reduce') is missing there or above",
                "parameter gradient": "sync('bwd_post', 'all_reduce', on='parameters') is missing there, or "
                "sync('bwd_post', 'all_reduce') after it",
            }[self.kind]
            remedy = f"; the processes have summands of the expected value: {missing}"
        return f"{where}; last step there: {self.step if self.step is not None else 'none'}{remedy}"


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Result of a verification.

    Parameters
    ----------
    path, world_size
        Path of the verified module, and number of processes that share it.
    steps
        The steps of the schedule in the verified block.
    comparisons
        All tensors that were compared, each with the worst result of all processes: those with a fault first.
    faults
        Other differences.
    divergences
        Modules at which original and scheduled model diverge; empty if they agree.
    not_compared
        Parameters of either model without a counterpart in the other.
    notes
        Remarks on the comparison.
    layers
        In a verification by layers, each compared layer with all layers of its structure, itself included.
    """

    path: str
    world_size: int
    steps: Sequence[JournalEntry]
    comparisons: Sequence[Comparison]
    faults: Sequence[str] = ()
    divergences: Sequence[Divergence] = ()
    not_compared: Sequence[str] = ()
    notes: Sequence[str] = field(default=())
    layers: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def is_equal(self) -> bool:
        """True if the scheduled model computes the same as the original one."""
        return not self.faults and all(not comparison.fault for comparison in self.comparisons)

    def largest(self, kind: str) -> tuple[float, float]:
        """Return the largest absolute and the largest relative error of a kind, 0 if there is none."""
        alike = [
            comparison
            for comparison in self.comparisons
            if comparison.kind == kind and not math.isnan(comparison.max_abs_error)
        ]
        return (
            max((comparison.max_abs_error for comparison in alike), default=0.0),
            max((comparison.max_rel_error for comparison in alike), default=0.0),
        )

    @property
    def places(self) -> Sequence[Divergence]:
        """Return `divergences`, under their name in the last version."""
        warnings.warn("VerifyReport.places is now divergences", DeprecationWarning, stacklevel=2)
        return self.divergences

    def count(self, kind: str) -> int:
        """Return how many tensors of a kind were compared."""
        return sum(comparison.kind == kind for comparison in self.comparisons)

    def _repr_html_(self) -> str:
        """Return the report in a fixed-width font."""
        return text_html(str(self))

    def __str__(self) -> str:
        """Return the report as text."""
        head = f"{self.path!r}" if self.path else "the model"
        state = "agrees with" if self.is_equal else "differs from"
        on = f"{self.world_size} process{'es' if self.world_size > 1 else ''}"
        lines = [f"{head} {state} the original on {on}, after {_numbered('step', len(self.steps))}"]
        lines += [f"  {fault}" for fault in self.faults]
        wrong = [comparison for comparison in self.comparisons if comparison.fault]
        lines += _abridged([f"  {comparison}" for comparison in wrong])
        lines += [f"  {divergence}" for divergence in self.divergences]
        for kind in dict.fromkeys(comparison.kind for comparison in self.comparisons):
            absolute, relative = self.largest(kind)
            lines.append(
                f"  {self.count(kind)} x {kind}: largest error {absolute:.3g}, {relative:.3g} of the "
                "largest value of its tensor"
            )
        if self.layers:
            alike = [f"{path} for {len(others)}" for path, others in self.layers.items()]
            lines.append("  layers of the same structure were compared once: " + ", ".join(_abridged(alike)))
        lines += [f"  note: {note}" for note in self.notes]
        if self.not_compared:
            lines.append("  without counterpart: " + ", ".join(_abridged(list(self.not_compared))))
        return "\n".join(lines)


def _abridged(lines: list[str]) -> list[str]:
    more = len(lines) - _SHOWN_PLACES
    return lines if more <= 1 else [*lines[:_SHOWN_PLACES], f"  and {more} more"]


def _numbered(noun: str, numbers: Sequence[int] | int) -> str:
    """Return a count, such as ``2 steps``, or a list, such as ``ranks 0, 1``."""
    if isinstance(numbers, int):
        return f"{numbers} {noun}{'' if numbers == 1 else 's'}"
    return f"{noun}{'' if len(numbers) == 1 else 's'} {', '.join(map(str, numbers))}"


# --- Weights ---

ORIGIN = "makespan_verified_name"
"""Tag of a parameter: its name when the verification began; it follows the parameter through primitives."""
_SPREAD = 0.1
_Object = TypeVar("_Object")


def gather_objects(ranks: Ranks, value: _Object) -> list[_Object]:
    """Return the values of all processes of the group, in the order of ranks."""
    if ranks.size == 1:
        return [value]
    values: list[Any] = [None] * ranks.size
    dist.all_gather_object(values, value, group=ranks.group)
    return values


def broadcast_object(ranks: Ranks, value: _Object) -> _Object:
    """Return the value of the first process of the group."""
    if ranks.size == 1:
        return value
    held: list[Any] = [value]
    dist.broadcast_object_list(held, group=ranks.group, group_src=0)
    received: _Object = held[0]
    return received


class Original:
    """Copy of a model when a verification began: it shares parameter memory and has its own buffers."""

    def __init__(self, module: nn.Module) -> None:
        self._seen: list[tuple[str, nn.Parameter, int, int]] = []
        self._begun: list[nn.Parameter] = []
        self.module = copy_module(module, _with_shared_memory)
        for (name, copied), (_, begun) in zip(
            self.module.named_parameters(), module.named_parameters(), strict=True
        ):
            setattr(begun, ORIGIN, name)
            self._begun.append(begun)
            self._seen.append((name, copied, copied._version, _checksum(copied)))

    def forget(self, scheduled: nn.Module) -> None:
        """Remove the tags."""
        for parameter in (*self._begun, *scheduled.parameters()):
            vars(parameter).pop(ORIGIN, None)

    def changed(self) -> list[str]:
        """Return the parameters whose values have changed in place."""
        # The version misses changes in place through .data, hence the checksum.
        return [
            name
            for name, parameter, version, checksum in self._seen
            if parameter._version != version or _checksum(parameter) != checksum
        ]


def _with_shared_memory(tensor: Tensor) -> Tensor:
    """Return a parameter with the same memory, or a copy of a buffer."""
    if isinstance(tensor, nn.Parameter):
        return _parameter_like(tensor, tensor.detach())
    return tensor.detach().clone()


def _parameter_like(old: nn.Parameter, values: Tensor) -> nn.Parameter:
    new = nn.Parameter(values, requires_grad=old.requires_grad)
    vars(new).update({tag: tag_value for tag, tag_value in vars(old).items() if not tag.startswith("_")})
    return new


def _checksum(tensor: Tensor) -> int:
    return 0 if tensor.is_meta else int(word_sum_of([tensor]))


@dataclass(slots=True)
class Weights:
    """Copies of both models with the same weights, and the correspondence of their parameters.

    Parameters
    ----------
    original, scheduled
        The copies.
    origin
        Name of the original parameter by that of the scheduled one, and the shard that cuts one out of the
        other.
    added, lost
        Parameters of the scheduled model only, which keep their values, and of the original one only.
    differed
        Parameters and buffers whose values differed between processes.
    buffers
        Shards that cut buffers out of those of the original model.
    """

    original: nn.Module
    scheduled: nn.Module
    origin: dict[str, tuple[str, TensorShard | None]] = field(default_factory=dict)
    added: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    differed: list[str] = field(default_factory=list)
    buffers: dict[str, TensorShard] = field(default_factory=dict)


def initialised(module: nn.Module, ranks: Ranks, seed: int, device: torch.device) -> nn.Module:
    """Return a module with values for parameters on ``meta``, as a build would initialise them."""
    if not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        return module
    copied = copy_module(module, lambda tensor: tensor)
    consolidate(Schedule(copied, group=ranks.group), seed=seed, device=device)
    return copied


def same_weights(
    original: nn.Module, scheduled: nn.Module, ranks: Ranks, device: torch.device, seed: int
) -> Weights:
    """Copy both models, with the weights of the first process of the group.

    Parameters with equal elements, such as biases of zero, are moved off their value: otherwise a missing one
    would go unnoticed. All processes of the group must call it.
    """
    sources = dict(original.named_parameters())
    origin, added = _counterparts(sources, scheduled)
    kept = {name for name, _ in origin.values()}
    weights = Weights(original, scheduled, origin, added, [name for name in sources if name not in kept])
    names = {id(tensor): name for name, tensor in (*sources.items(), *original.named_buffers())}
    prepared: dict[str, Tensor] = {}

    # First the original gets its values, then each tensor of the scheduled model is cut out of them: so both
    # models agree whatever the processes held before, and shards fit together.
    def prepare(tensor: Tensor) -> Tensor:
        name, values = names[id(tensor)], tensor.detach()
        if ranks.size > 1 and getattr(tensor, "shard", None) is None:
            received = values.clone(memory_format=torch.contiguous_format)
            dist.broadcast(received, group=ranks.group, group_src=0)
            # Equal values need no second copy.
            if not torch.equal(received.nan_to_num(), values.nan_to_num()):
                weights.differed.append(name)
                values = received
        if name in kept or name.endswith(("running_mean", "running_var")):
            values = _perturbed_constant(values, seed, name)
        values = values.to(device)
        if not isinstance(tensor, nn.Parameter):
            prepared[name] = values.clone()
            return values.clone()
        prepared[name] = values
        return _parameter_like(tensor, values)

    weights.original = copy_module(original, prepare)
    shards: dict[int, TensorShard] = {}
    for module in scheduled.modules():
        for name, shard in sharding_of(module).tensors.items():
            if (buffer := module._buffers.get(name)) is not None:
                shards[id(buffer)] = shard
    places = {
        id(tensor): name for name, tensor in (*scheduled.named_parameters(), *scheduled.named_buffers())
    }

    def take(tensor: Tensor) -> Tensor:
        name = places[id(tensor)]
        if isinstance(tensor, nn.Parameter):
            if name not in origin:
                return _parameter_like(tensor, tensor.detach().to(device))
            source, shard = origin[name]
            values = prepared[source] if shard is None else shard.part_of(prepared[source])
            return _parameter_like(tensor, values.to(tensor.dtype))
        whole = prepared.get(name)
        shard = _shard(tensor, shards.get(id(tensor)), whole)
        if whole is None or (shard is None and whole.shape != tensor.shape):
            return tensor.detach().to(device, copy=True)
        if shard is not None:
            weights.buffers[name] = shard
        return (whole if shard is None else shard.part_of(whole)).to(tensor.dtype, copy=True)

    weights.scheduled = copy_module(scheduled, take)
    return weights


def _counterparts(
    sources: dict[str, nn.Parameter], scheduled: nn.Module
) -> tuple[dict[str, tuple[str, TensorShard | None]], list[str]]:
    """Return original parameter and shard of each scheduled one (by tag, else by name), and the rest."""
    origin: dict[str, tuple[str, TensorShard | None]] = {}
    added = []
    for name, parameter in scheduled.named_parameters():
        source = getattr(parameter, ORIGIN, name)
        whole = sources.get(source)
        shard = _shard(parameter, getattr(parameter, "shard", None), whole)
        if whole is None or (shard is None and whole.shape != parameter.shape):
            added.append(name)
        else:
            origin[name] = (source, shard)
    return origin, added


def _shard(part: Tensor, shard: TensorShard | None, whole: Tensor | None) -> TensorShard | None:
    """Return the shard that cuts a tensor out of the original one, None if the tensor is whole."""
    if shard is None or whole is None or part.shape == whole.shape or shard.orig_shape != tuple(whole.shape):
        return None
    return shard


def _perturbed_constant(values: Tensor, seed: int, name: str) -> Tensor:
    """Add 0.1 to 0.2 to each element if all are equal; positive, so that variances stay positive.

    A layer that lost a bias of zeros, or swapped two norms with weights of one, would compute the same
    otherwise.
    """
    flat = values.flatten()
    if not values.is_floating_point() or values.numel() == 0 or bool(flat[0] != flat[-1]):
        return values
    if bool((flat != flat[0]).any()):
        return values
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    drawn = torch.rand(values.shape, generator=generator, dtype=torch.float32)
    return values + (_SPREAD + _SPREAD * drawn).to(values)


# --- Divergence, module by module ---
#
# Between a sharded layer and the next synchronisation, a process holds a part or a summand of the original
# tensor, which is not a fault. A tensor of another shape agrees if it is this process's part along some
# axis. A tensor of the same shape may be a summand only inside a synchronised module, where the sum over
# the processes must agree; anywhere else, a missing sum is the error that the verification looks for.

_SAME, _DIFFERS, _SUMMAND, _UNKNOWN = "same", "differs", "summand", "unknown"
_Key = tuple[str, int]  # path of a module, and index of the call
_Pair = tuple[Sequence[Tensor], Sequence[Tensor]]  # expected and actual tensors


@dataclass(slots=True)
class ModuleCall:
    """One call of a module: copies of its results, and of the gradients of its inputs."""

    module: str
    results: list[Tensor] = field(default_factory=list)
    gradients: dict[int, Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class CallRecord:
    """Record of a run, by path of a module and index of the call."""

    calls: dict[_Key, ModuleCall] = field(default_factory=dict)
    begun: list[_Key] = field(default_factory=list)
    ended: list[_Key] = field(default_factory=list)
    running: list[_Key] = field(default_factory=list)
    is_forward: bool = True


@contextmanager
def recorded_calls(model: nn.Module) -> Iterator[CallRecord]:
    """Record every call of a module in the forward pass, and the gradients of its inputs."""
    record, counts = CallRecord(), dict[str, int]()
    handles = []
    try:
        hidden: list[str] = []  # a module that is compiled as a whole runs no hooks of modules inside
        for path, module in model.named_modules():
            if any(path.startswith(prefix) for prefix in hidden):
                continue
            if "__getstate__" in vars(type(module)):
                hidden.append(f"{path}." if path else "_orig_mod")
            enter, leave = _record_hooks(record, counts, path)
            handles.append(module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
            handles.append(module.register_forward_hook(leave))
        yield record
    finally:
        for handle in handles:
            handle.remove()


def _record_hooks(record: CallRecord, counts: dict[str, int], path: str) -> tuple[Callable[..., Any], ...]:
    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        if not record.is_forward:  # recomputed in the backward pass
            return
        key = (path, counts.setdefault(path, 0))
        counts[path] += 1
        module_call = record.calls[key] = ModuleCall(type(module).__name__)
        record.begun.append(key)
        record.running.append(key)
        for place, argument in enumerate(pytree.tree_leaves((args, kwargs))):
            if isinstance(argument, Tensor) and argument.requires_grad:

                def keep(
                    gradient: Tensor, gradients: dict[int, Tensor] = module_call.gradients, place: int = place
                ) -> None:
                    gradients[place] = gradient.detach().clone()

                register: Callable[..., Any] = argument.register_hook
                register(keep)

    def leave(module: nn.Module, args: Any, result: Any) -> None:
        if not record.is_forward:
            return
        key = record.running.pop()
        leaves = pytree.tree_leaves(result)
        record.calls[key].results = [leaf.detach().clone() for leaf in leaves if isinstance(leaf, Tensor)]
        record.ended.append(key)

    return enter, leave


def first_divergences(
    original: CallRecord,
    scheduled: CallRecord,
    synced: Mapping[str, Sequence[str]],
    ranks: Ranks,
    tolerances: Mapping[str, Callable[[torch.dtype], Tolerance]],
) -> list[Divergence]:
    """Return the first module whose output differs, and the last whose input gradient does.

    Modules are in the order of execution; a module follows those that it calls. ``synced`` lists the
    synchronised modules by mode. All processes of the group must call it, with runs of the same modules.
    """
    divergences = []

    def add(kind: str, pairs: Mapping[_Key, _Pair], summed: Sequence[str]) -> None:
        first = _first_difference(pairs, summed, ranks, tolerances[OUTPUT if kind == "output" else GRADIENT])
        if first is not None:
            (path, call), off, is_summand = first
            module = scheduled.calls[path, call].module
            divergences.append(Divergence(kind, path, module, call, off, is_summand))

    both = [key for key in scheduled.ended if key in original.calls]
    outputs = {key: (original.calls[key].results, scheduled.calls[key].results) for key in both}
    add("output", outputs, synced.get("fwd_post", ()))
    gradients: dict[_Key, _Pair] = {}
    for key in reversed(scheduled.begun):
        if key not in original.calls:
            continue
        expected, actual = original.calls[key].gradients, scheduled.calls[key].gradients
        if not actual and any(map(size_of, expected.values())):
            gradients[key] = [torch.ones(1)], [torch.zeros(1)]  # a gradient is missing: any pair that differs
            continue
        shared = [index for index in expected if index in actual]
        gradients[key] = [expected[index] for index in shared], [actual[index] for index in shared]
    add("input gradient", gradients, [*synced.get("fwd_pre", ()), *synced.get("bwd_post", ())])
    return divergences


def _first_difference(
    pairs: Mapping[_Key, _Pair],
    summed: Sequence[str],
    ranks: Ranks,
    tolerance_of: Callable[[torch.dtype], Tolerance],
) -> tuple[_Key, tuple[int, ...], bool] | None:
    """Return the first call that differs, the processes on which it does, and True if their sum agrees."""
    verdicts = {}
    for (path, call), (expected, actual) in pairs.items():
        may_sum = ranks.size > 1 and any(
            path != above and (not above or path.startswith(f"{above}.")) for above in summed
        )
        if len(expected) != len(actual):
            verdicts[path, call] = [_UNKNOWN]
            continue
        verdicts[path, call] = [
            _verdict(tensor, other, may_sum, ranks, tolerance_of(other.dtype))
            for tensor, other in zip(actual, expected, strict=True)
        ]
    # One exchange of all verdicts, so that every process then visits the same calls in the same order and
    # joins the all_reduce of each tensor that any of them holds as a summand.
    gathered = gather_objects(ranks, verdicts)
    for key in verdicts:
        seen = [of_rank.get(key, [_UNKNOWN]) for of_rank in gathered]
        expected, actual = pairs[key]
        off = {rank for rank, verdicts_of_rank in enumerate(seen) if _DIFFERS in verdicts_of_rank}
        for index in range(max(map(len, seen))):
            # A summand is right if the sum is, which only a collective of all processes can tell.
            if any(_SUMMAND in verdicts_of_rank[index : index + 1] for verdicts_of_rank in seen):
                total = actual[index].clone(memory_format=torch.contiguous_format)
                dist.all_reduce(total, group=ranks.group)
                whole = expected[index]
                if compare("", "", total, whole, tolerance_of(whole.dtype)).fault:
                    off.update(range(ranks.size))
        if off:
            return key, tuple(sorted(off)), sums_agree(actual, expected, ranks, tolerance_of)
    return None


def sums_agree(
    actual: Sequence[Tensor],
    expected: Sequence[Tensor],
    ranks: Ranks,
    tolerance_of: Callable[[torch.dtype], Tolerance],
) -> bool:
    """Return True if the sums over the processes are the expected tensors; all processes must call it."""
    shapes = gather_objects(ranks, [(tuple(tensor.shape), tensor.dtype) for tensor in actual])
    is_possible = ranks.size > 1 and bool(actual) and len({str(rank_shapes) for rank_shapes in shapes}) == 1
    if not all(gather_objects(ranks, is_possible and len(actual) == len(expected))):
        return False
    agrees = True
    for tensor, whole in zip(actual, expected, strict=True):
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ranks.group)
        agrees = agrees and not compare("", "", total, whole, tolerance_of(whole.dtype)).fault
    return all(gather_objects(ranks, agrees))


def _verdict(actual: Tensor, expected: Tensor, may_sum: bool, ranks: Ranks, tolerance: Tolerance) -> str:
    """Return the verdict on a tensor: the original one or a part of it, a summand, different, or unknown."""
    if actual.dtype != expected.dtype:
        return _DIFFERS
    if actual.shape == expected.shape:
        if not compare("", "", actual, expected, tolerance).fault:
            return _SAME
        return _SUMMAND if may_sum else _DIFFERS
    if actual.numel() == expected.numel():
        return _DIFFERS
    if actual.dim() != expected.dim():
        return _UNKNOWN
    axes = [axis for axis in range(actual.dim()) if actual.shape[axis] != expected.shape[axis]]
    if len(axes) != 1 or expected.shape[axes[0]] != ranks.size * actual.shape[axes[0]]:
        return _UNKNOWN
    if is_part(actual, expected, axes[0], ranks, tolerance):
        return _SAME
    return _UNKNOWN if may_sum else _DIFFERS


def is_part(actual: Tensor, expected: Tensor, axis: int, ranks: Ranks, tolerance: Tolerance) -> bool:
    """Return True if a tensor is the part of this process of another one, for any number of equal blocks.

    Fused projections are cut in several blocks, as of query, key and value, and the recorded tensor does
    not tell in how many.
    """
    size, length = size_of(expected), actual.shape[axis]
    for n_blocks in (count for count in range(1, length + 1) if length % count == 0):
        part = cut(expected, axis, ranks.size, n_blocks)[ranks.rank]
        if not compare("", "", actual, part, tolerance, size).fault:
            return True
    return False


# --- One forward and one backward pass ---

Inputs: TypeAlias = "Tensor | Sequence[Any] | Mapping[str, Any] | Callable[[torch.Generator], Any]"
LossFunction: TypeAlias = Callable[[Any], Tensor]


@dataclass(frozen=True, slots=True)
class Call:
    """Arguments of a forward pass, names of the positional ones, and names of those that need a gradient."""

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
        """Return a call with copies; floating-point ones, or only those in ``wanting``, need a gradient."""

        def copied(name: str, value: Any) -> Any:
            wants = self.wanting is None or name in self.wanting

            def copy(leaf: Any) -> Any:
                if not isinstance(leaf, Tensor):
                    return copied_object(leaf)  # such as a cache, which each model fills for itself
                new = leaf.detach().to(device, copy=True)
                return new.requires_grad_(wants and (new.is_floating_point() or new.is_complex()))

            return pytree.tree_map(copy, value)

        args = tuple(copied(name, value) for name, value in zip(self.names, self.args, strict=True))
        kwargs = {name: copied(name, value) for name, value in self.kwargs.items()}
        return Call(args, kwargs, self.names, self.wanting)


@dataclass(slots=True)
class Outcome:
    """Result of a forward pass.

    ``held`` names the tensors inside objects, such as a cache: a process may hold only its part of them, and
    no gradient starts from them.
    """

    leaves: dict[str, Tensor]
    passed: dict[str, Tensor]
    structure: pytree.TreeSpec
    tensors: dict[str, Tensor]
    loss: Tensor | None = None
    others: dict[str, Any] = field(default_factory=dict)
    held: frozenset[str] = frozenset()

    def changed_inputs(self) -> list[str]:
        """Return the names of arguments that the model has changed in place."""
        return [
            name
            for name, leaf in self.leaves.items()
            if not torch.equal(self.passed[name].detach().nan_to_num(), leaf.detach().nan_to_num())
        ]


def call_from(inputs: Inputs, seed: int) -> Call:
    """Return the call for a user's inputs: positional or keyword arguments, or a function that draws them."""
    drawn = inputs(torch.Generator().manual_seed(seed)) if callable(inputs) else inputs
    if isinstance(drawn, Tensor):
        return Call((drawn,), {})
    if isinstance(drawn, Mapping) and all(isinstance(name, str) for name in drawn):
        return Call((), dict(drawn))
    if isinstance(drawn, Sequence) and not isinstance(drawn, str):
        return Call(tuple(drawn), {})
    raise KindError(
        f"Verify: example inputs are {type(drawn).__name__}; expected a tensor, a sequence of positional "
        "arguments, a mapping of keyword arguments, or a function of a generator that returns one of these"
    )


def checked_call(model: nn.Module, call: Call, path: str, wanting: Sequence[str] | None) -> Call:
    """Name the arguments; reject those that the forward pass does not take."""
    signature = inspect.signature(model.forward)
    try:
        signature.bind(*call.args, **call.kwargs)
    except TypeError as error:
        raise KindError(
            f"Verify of {path!r}: the example inputs do not fit {type(model).__name__}.forward"
            f"{signature}: {error}"
        ) from None
    known = [
        parameter.name
        for parameter in signature.parameters.values()
        if parameter.kind is not parameter.VAR_POSITIONAL
    ]
    names = tuple([*known, *map(str, range(len(call.args)))][: len(call.args)])
    if isinstance(wanting, str) or (wanting is not None and set(wanting) - {*names, *call.kwargs}):
        known_names = ", ".join([*names, *call.kwargs])
        raise ArgumentError(
            f"Verify of {path!r}: input_grads is {wanting!r}; expected names among {known_names}"
        )
    return Call(call.args, call.kwargs, names, None if wanting is None else frozenset(wanting))


def named_tensors(tree: Any) -> dict[str, Tensor]:
    """Return the tensors in a tree by their path in it."""
    leaves, _ = pytree.tree_flatten_with_path(tree)
    return {_tensor_name(place): leaf for place, leaf in leaves if isinstance(leaf, Tensor)}


def _tensor_name(place: tuple[Any, ...]) -> str:
    if not place:
        return "itself"
    first, others = place[:1], place[1:]
    return pytree.keystr(first).strip("[].'") + pytree.keystr(others).replace("'", "")


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch, Python and NumPy; restore the generators at the end."""
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
    """Make dropout in training mode neither drop values nor draw random numbers.

    Otherwise models could not be compared, since the dropped values depend on the order of all draws and on
    the split of tensors. The functions are replaced rather than intercepted, because no interception of torch
    reaches the recomputation in a backward pass. Compiled code runs eagerly in the block.
    """
    compiler = sys.modules.get("torch._dynamo")  # loaded only if compiled code has run
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
"""Functions with dropout: name and position of the rate."""
_RATES_OF_LAYERS: Mapping[str, tuple[str, int | None]] = dict.fromkeys(
    ("lstm", "gru", "rnn_tanh", "rnn_relu"), ("dropout", None)
)
"""The same for recurrent layers; their only argument of type float is the rate."""


def _at_rate_of_zero(dropping: Callable[..., Any], rate: tuple[str, int | None]) -> Callable[..., Any]:
    name, place = rate

    @functools.wraps(dropping)
    def keep_all(*args: Any, **kwargs: Any) -> Any:
        if place is None:
            return dropping(
                *(0.0 if isinstance(argument, float) else argument for argument in args), **kwargs
            )
        if len(args) > place:
            return dropping(*args[:place], 0.0, *args[place + 1 :], **kwargs)
        return dropping(*args, **kwargs | {name: 0.0})

    return keep_all


def run_forward(
    model: nn.Module, call: Call, seed: int, device: torch.device, loss_fn: LossFunction | None
) -> Outcome:
    """Run a model forward on copies of the arguments."""
    fresh_call = call.fresh(device)
    # Clones, because a model may change its inputs in place, which autograd forbids for a leaf.
    passed = pytree.tree_map_only(Tensor, Tensor.clone, (fresh_call.args, fresh_call.kwargs))
    seen = Call(passed[0], passed[1], fresh_call.names)
    with _seeded(seed, device), torch.enable_grad():
        outputs = model(*passed[0], **passed[1])
        loss = None if loss_fn is None else loss_fn(outputs)
    direct = named_tensors(outputs)
    contents = pytree.tree_map(expanded, outputs)
    leaves, structure = pytree.tree_flatten_with_path(contents)
    others = {_tensor_name(place): leaf for place, leaf in leaves if not isinstance(leaf, Tensor)}
    tensors = named_tensors(contents)
    held = frozenset(tensors.keys() - direct.keys())
    return Outcome(fresh_call.leaves(), seen.leaves(), structure, tensors, loss, others, held)


def run_backward(outcome: Outcome, seed: int, device: torch.device) -> None:
    """Run backward from the loss, or from all outputs with random gradients."""
    if outcome.loss is not None:
        ends = {"loss": outcome.loss}
    else:
        results = {name: tensor for name, tensor in outcome.tensors.items() if name not in outcome.held}
        ends = {name: tensor for name, tensor in results.items() if tensor.requires_grad}
    starts = []
    for name, end in ends.items():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        drawn = torch.randn(end.shape, generator=generator, dtype=torch.float32)
        starts.append(torch.ones_like(end) if outcome.loss is not None else drawn.to(end))
    if ends:
        with _seeded(seed, device):
            torch.autograd.backward(list(ends.values()), starts)


# --- Pipeline stages in one process ---

_CUT = "cut_pipeline_stage"


class SequentialStages(nn.Module):
    """Stages that one process runs in sequence; each gets the tensors that a pipeline would send."""

    def __init__(self, parts: Partition) -> None:
        super().__init__()
        self.stages = nn.ModuleList(parts.stages)
        self._parts = parts

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run all stages."""
        return self._parts.run(*args, **kwargs)

    def stage_of(self, path: str) -> int | None:
        """Return the stage in which a module of the whole model runs, None if several share it."""
        holders = []
        for index, stage in enumerate(self.stages):
            try:
                if path and stage.get_submodule(path) is not None:
                    holders.append(index)
            except AttributeError:
                pass
        return holders[0] if len(holders) == 1 else None


def staged_copy(sch: "Schedule", copied: nn.Module) -> nn.Module:
    """Return the stages of a copy of the model, or the copy itself if the schedule cuts none."""
    if sch.parent is not None or not sch.metadata.slots[_CUT]:
        return copied
    cut_copy = create_schedule(copied, group=sch.group)
    cut_copy.metadata.slots[_CUT] = list(sch.metadata.slots[_CUT])
    return SequentialStages(partition(cut_copy))


# --- Passes of both models ---

MARGIN, _UNITS = 10.0, 4.0
"""Tolerated multiple of the measured noise, and rounding units by which weights change to measure it."""
_ROUNDING = 1e-2
"""Share of the median size of gradients below which a whole gradient may be rounding error."""
Tolerances = Mapping[str, Callable[[torch.dtype], Tolerance]]


@dataclass
class Passes:
    """Forward and backward passes of both models on one call.

    Parameters
    ----------
    weights, call
        The models and their arguments.
    scheduled
        The scheduled model, or its stages one after the other.
    ranks, device, seed
        Processes that share the scheduled model, device, and seed of all random numbers.
    tolerances
        Tolerances by type, of outputs and of gradients.
    loss_fn, check_grad
        Loss from which gradients start, and True to compare gradients.
    suffix
        Suffix of the kind of every comparison, such as the mode of the models.
    noise
        Change of a tensor by rounding alone, by its kind and name, relative to its largest value.
    """

    weights: Weights
    call: Call
    scheduled: nn.Module
    ranks: Ranks
    device: torch.device
    seed: int
    tolerances: Tolerances
    loss_fn: LossFunction | None
    check_grad: bool
    suffix: str = ""
    noise: Mapping[tuple[str, str], float] = field(default_factory=dict)
    comparisons: list[Comparison] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def reference(self) -> Outcome:
        """Run the original model and return its outcome, with gradients."""
        expected = self._forward(self.weights.original)
        if self.check_grad:
            self._backward(expected)
        return expected

    def run(self, expected: Outcome) -> bool:
        """Run the scheduled model and compare it with the reference; return True if all processes agree."""
        buffers = {name: buffer.clone() for name, buffer in self.weights.original.named_buffers()}
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
        agrees = not self.faults and not any(comparison.fault for comparison in self.comparisons)
        return all(gather_objects(self.ranks, agrees))

    def _clear(self) -> None:
        for model in (self.weights.original, self.scheduled):
            for parameter in model.parameters():
                parameter.grad = None

    def _tolerance(self, kind: str, dtype: torch.dtype) -> Tolerance:
        return self.tolerances[GRADIENT if "gradient" in kind else OUTPUT](dtype)

    def _compare(
        self, kind: str, name: str, actual: Tensor, expected: Tensor, size: float | None = None,
        source: str | None = None,
    ) -> None:  # fmt: skip
        tolerance = self._tolerance(kind, expected.dtype)
        if noise := self.noise.get((kind, name if source is None else source), 0.0):
            tolerance = Tolerance(tolerance.rtol, tolerance.atol + MARGIN * noise)
        self.comparisons.append(compare(kind + self.suffix, name, actual, expected, tolerance, size))

    def _compare_outputs(self, actual: Outcome, expected: Outcome) -> None:
        if actual.structure != expected.structure:
            structures = [short_repr(str(outcome.structure)) for outcome in (actual, expected)]
            self.faults.append(f"the output is {structures[0]}; expected {structures[1]}")
            return
        for name, tensor in expected.tensors.items():
            output = actual.tensors.get(name)
            if output is None:
                self.faults.append(f"output {name} is {short_repr(actual.others[name])}; expected a tensor")
            elif not (name in expected.held and self._is_local_part(output, tensor)):
                self._compare("output", name, output, tensor)
        if expected.loss is not None and actual.loss is not None:
            self._compare("loss", "of the outputs", actual.loss, expected.loss)
        for name, value in expected.others.items():
            other = actual.tensors.get(name, actual.others.get(name))
            if not _is_same_value(other, value):
                self.faults.append(f"output {name} is {short_repr(other)}; expected {short_repr(value)}")
        changed = sorted({*actual.changed_inputs()} ^ {*expected.changed_inputs()})
        self.faults += [f"input {name} is changed in place by one model only" for name in changed]

    def _is_local_part(self, actual: Tensor, expected: Tensor) -> bool:
        """Return True if a tensor in an object is the part of this process, such as the keys of its heads."""
        if actual.dtype != expected.dtype or actual.dim() != expected.dim():
            return False
        axes = [axis for axis in range(actual.dim()) if actual.shape[axis] != expected.shape[axis]]
        if len(axes) != 1 or expected.shape[axes[0]] != self.ranks.size * actual.shape[axes[0]]:
            return False
        tolerance = self.tolerances[OUTPUT](expected.dtype)
        return is_part(actual, expected, axes[0], self.ranks, tolerance)

    def _compare_gradients(self, actual: Outcome, expected: Outcome) -> None:
        original = dict(self.weights.original.named_parameters())
        sizes = {
            name: size_of(parameter.grad)
            for name, parameter in original.items()
            if parameter.grad is not None
        }
        floor = _ROUNDING * median(sizes.values()) if sizes else 0.0
        arrived: set[str] = set()

        def arrive(name: str, parameter: Tensor) -> None:
            source, shard = self.weights.origin[name]
            gradient, whole = parameter.grad, original[source].grad
            # Compared and dropped as it arrives: the gradients of both models never need memory at once.
            parameter.grad = None
            arrived.add(name)
            if gradient is None:
                return
            if whole is None:
                whole = torch.zeros_like(original[source])
            part = whole if shard is None else shard.part_of(whole)
            size = max(sizes.get(source, 0.0), floor)
            self._compare("parameter gradient", name, gradient, part, size, source)

        handles = []
        for name, scheduled_parameter in self.weights.scheduled.named_parameters():
            if name in self.weights.origin and scheduled_parameter.requires_grad:
                register: Callable[..., Any] = scheduled_parameter.register_post_accumulate_grad_hook
                handles.append(register(partial(arrive, name)))
        try:
            self._backward(actual)
        finally:
            for handle in handles:
                handle.remove()
        for name, (source, _) in self.weights.origin.items():
            if name not in arrived and sizes.get(source, 0.0) > floor:
                fault = f"gets no gradient; expected one with values up to {sizes[source]:.3g}"
                kind = f"parameter gradient{self.suffix}"
                self.comparisons.append(Comparison(kind, name, math.nan, math.nan, fault))
        for name, leaf in expected.leaves.items():
            if leaf.grad is not None:
                gradient = actual.leaves[name].grad
                if gradient is None:
                    gradient = torch.zeros_like(leaf)
                self._compare("input gradient", name, gradient, leaf.grad)

    def _compare_buffers(self, expected: Mapping[str, Tensor]) -> None:
        """Compare buffers after a forward pass, such as running means."""
        for name, buffer in self.weights.scheduled.named_buffers():
            shard, whole = self.weights.buffers.get(name), expected.get(name)
            if whole is not None and (shard is not None or whole.shape == buffer.shape):
                self._compare("buffer", name, buffer, whole if shard is None else shard.part_of(whole))

    def buffers(self) -> list[tuple[nn.Module, str, Tensor, Tensor]]:
        """Return the buffers of both models with their owners and names, each with a copy."""
        models = (self.weights.original, self.scheduled)
        modules = {id(module): module for model in models for module in model.modules()}
        return [
            (module, name, buffer, buffer.detach().clone())
            for module in modules.values()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    def measured_noise(self) -> dict[tuple[str, str], float]:
        """Return the change of each result of the original model if its weights change by rounding errors.

        Batch norm over a few samples divides by nearly zero, so that another order of summation changes the
        result visibly; no fixed tolerance distinguishes that from a fault.
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
        results = []
        for model in (original, other):
            outcome = self._forward(model)
            if self.check_grad:
                self._backward(outcome)
            gradients = {
                name: parameter.grad
                for name, parameter in model.named_parameters()
                if parameter.grad is not None
            }
            inputs = {name: leaf.grad for name, leaf in outcome.leaves.items() if leaf.grad is not None}
            tensors = {
                "output": outcome.tensors,
                "loss": {} if outcome.loss is None else {"of the outputs": outcome.loss},
                "parameter gradient": gradients,
                "input gradient": inputs,
                "buffer": {name: buffer.clone() for name, buffer in model.named_buffers()},
            }
            results.append(
                {(kind, name): tensor for kind, all_of in tensors.items() for name, tensor in all_of.items()}
            )
        expected, actual = results
        noise = {}
        for key, expected_tensor in expected.items():
            if expected_tensor.is_floating_point() and (size := size_of(expected_tensor)) and key in actual:
                noise[key] = size_of(actual[key].detach() - expected_tensor.detach()) / size
        self._clear()
        return noise

    def divergences(self, synced: Mapping[str, Sequence[str]]) -> list[Divergence]:
        """Run both models once more, and return the modules at which they diverge."""
        with recorded_calls(self.weights.original) as expected:
            self._run_recorded(self.weights.original, expected)
        with recorded_calls(self.weights.scheduled) as actual:
            stopped: tuple[str, int, str] | None = None
            try:
                self._run_recorded(self.scheduled, actual)
            except Exception:  # noqa: BLE001 - as it did before
                key = actual.running[-1] if actual.running else ("", 0)
                stopped = (*key, actual.calls[key].module if key in actual.calls else "")
        # An error comes first: that of the first process that stopped, and all processes that stopped there.
        stops = gather_objects(self.ranks, stopped)
        divergences: list[Divergence] = []
        if (stop := next(filter(None, stops), None)) is not None:
            path, call, module = stop
            stopped_ranks = tuple(rank for rank, other in enumerate(stops) if other == stop)
            divergences.append(Divergence("error", path, module, call, stopped_ranks))
        for first in first_divergences(expected, actual, synced, self.ranks, self.tolerances):
            returns = sharding_of(self.weights.scheduled.get_submodule(first.path)).returns
            is_partial_output = first.kind == "output" and returns == PARTIAL
            divergences.append(replace(first, is_summand=first.is_summand or is_partial_output))
        # Tensors that no module call shows are compared by their names; the last resort is the whole model.
        if not divergences:
            parameters = [name for name, _ in self.weights.scheduled.named_parameters()]
            buffers = [name for name, _ in self.weights.scheduled.named_buffers()]
            divergences = self._by_name("parameter gradient", parameters) or self._by_name("buffer", buffers)
        self._clear()
        every_rank = tuple(range(self.ranks.size))
        return divergences or [Divergence("output", "", type(self.weights.scheduled).__name__, 0, every_rank)]

    def _by_name(self, kind: str, names: Sequence[str]) -> list[Divergence]:
        """Return the module of the first tensor of a kind that differs, in the order of the model."""
        differing = {
            comparison.name
            for comparison in self.comparisons
            if comparison.kind == kind + self.suffix and comparison.fault
        }
        by_rank = gather_objects(self.ranks, differing)
        for name in names:
            if off := tuple(rank for rank, its_names in enumerate(by_rank) if name in its_names):
                path = name.rpartition(".")[0]
                module = type(self.weights.scheduled.get_submodule(path)).__name__
                return [Divergence(kind, path, module, 0, off, self._is_summand(kind, name))]
        return []

    def _is_summand(self, kind: str, name: str) -> bool:
        """Return True if the gradients of an unsharded parameter add up to the expected one."""
        source, shard = self.weights.origin.get(name, ("", None))
        if kind != "parameter gradient" or shard is not None or not source:
            return False
        gradient = self.weights.scheduled.get_parameter(name).grad
        whole = self.weights.original.get_parameter(source).grad
        # The exchange is collective: a process without a gradient joins with empty lists.
        if gradient is None or whole is None:
            return sums_agree([], [], self.ranks, self.tolerances[GRADIENT])
        return sums_agree([gradient], [whole], self.ranks, self.tolerances[GRADIENT])

    def _run_recorded(self, model: nn.Module, record: CallRecord) -> None:
        outcome = self._forward(model)
        record.is_forward = False
        if self.check_grad:
            self._backward(outcome)


@torch.no_grad()
def restore_buffers(buffers: Sequence[tuple[nn.Module, str, Tensor, Tensor]]) -> None:
    """Restore the buffers of modules, with the values of their copies."""
    for module, name, buffer, values in buffers:
        module._buffers[name] = buffer.copy_(values)


def _is_same_value(actual: Any, expected: Any) -> bool:
    """Compare values other than tensors; NaN is equal to NaN."""
    if actual is expected:
        return True
    try:
        return bool(actual == expected) or bool(actual != actual and expected != expected)
    except (ValueError, TypeError, RuntimeError):  # an array compares element by element
        return repr(actual) == repr(expected)


# --- Passes by layers ---


class RestPasses(Passes):
    """Passes of both models with stand-ins for their layers."""

    stand_ins: Mapping[int, StandIns]
    """Stand-ins by the id of the model."""

    def _forward(self, model: nn.Module) -> Outcome:
        self.stand_ins[id(model)].is_forward = True
        try:
            return super()._forward(model)
        finally:
            self.stand_ins[id(model)].is_forward = False


class OneLayerPasses(Passes):
    """Passes of one of several layers, with a share of the tolerance of the model."""

    n_layers: int

    def _tolerance(self, kind: str, dtype: torch.dtype) -> Tolerance:
        """Return the share of the model's tolerance that one layer may use up.

        In the model, errors of outputs and of input gradients add up over the layers, and a gradient of a
        parameter has the error of its layer besides that of the gradient that arrives there.
        """
        whole = Passes._tolerance(self, kind, dtype)
        if not (dtype.is_floating_point or dtype.is_complex):
            return whole
        share = 1 / 2 if kind == "parameter gradient" else 1 / self.n_layers
        rounding = _UNITS * torch.finfo(dtype).eps
        return Tolerance(
            min(whole.rtol, max(share * whole.rtol, rounding)),
            min(whole.atol, max(share * whole.atol, rounding)),
        )


class LayerPasses:
    """Passes of the rest of a model, and of layers that stand for all layers of their structure.

    Parameters
    ----------
    passes
        Passes of the whole models, which do not run.

    Raises
    ------
    NoLayersError
        The models cannot be taken apart.
    """

    def __init__(self, passes: Passes) -> None:
        self._whole = passes
        self._paths = repeated_layers(passes.weights.original)
        self.comparisons: list[Comparison] = []
        self.layers: dict[str, list[str]] = {}
        """Compared layers, each with all layers of its structure."""
        self._joined(self._take_apart)

    def _take_apart(self) -> None:
        weights = self._whole.weights
        if not self._paths:
            raise NoLayersError("no list has two layers")
        for model in (weights.original, weights.scheduled):
            for path in self._paths:
                try:
                    model.get_submodule(path)
                except AttributeError:
                    raise NoLayersError(f"the schedule has no {path!r}") from None
            if (shared := next(shared_modules(model, self._paths), None)) is not None:
                raise NoLayersError(f"{shared!r} shares a module or weight with the rest of the model")
        for name, (source, _) in weights.origin.items():
            if self._layer_of(name) != self._layer_of(source):
                raise NoLayersError(f"parameter {name!r} was {source!r}")
        self._parts = {path: self._part(path) for path in ("", *self._paths)}
        self._kinds = {path: self._structure(path) for path in self._paths}

    def _layer_of(self, name: str) -> str:
        return next((path for path in self._paths if name.startswith(f"{path}.")), "")

    def _part(self, path: str) -> Weights:
        """Return the weights of a layer, with names inside of it, or those of the rest."""
        whole = self._whole.weights
        names = [name for name in (*whole.origin, *whole.buffers) if self._layer_of(name) == path]
        start = f"{path}." if path else ""
        return Weights(
            whole.original.get_submodule(path),
            whole.scheduled.get_submodule(path),
            {
                name.removeprefix(start): (source.removeprefix(start), shard)
                for name in names
                if name in whole.origin
                for source, shard in [whole.origin[name]]
            },
            buffers={
                name.removeprefix(start): whole.buffers[name] for name in names if name in whole.buffers
            },
        )

    def _structure(self, path: str) -> str:
        """Return a text that is equal for layers of which one may stand for the other."""
        part = self._parts[path]
        original, scheduled = (dict(model.named_parameters()) for model in (part.original, part.scheduled))
        kept: dict[str, list[str]] = {}
        for name, (source, _) in part.origin.items():
            kept.setdefault(source, []).append(name)
        return " ".join(
            (
                structure_of(
                    part.original, path, {id(original[name]): names for name, names in kept.items()}
                ),
                structure_of(
                    part.scheduled,
                    path,
                    {id(scheduled[name]): source for name, (source, _) in part.origin.items()},
                ),
            )
        )

    def run(self, suffix: str) -> None:
        """Run all parts in the present mode.

        Raises
        ------
        NoLayersError
            On all processes: a part differs, or the models cannot be taken apart after all. A difference says
            no more than that the whole model has to be compared, since errors may cancel between layers.
        """
        whole, rest = self._whole, self._parts[""]
        templates = Templates(self._kinds, partial(_undrawn, whole.seed, whole.device))
        expected = StandIns(rest.original, self._paths, templates.learn)
        actual = StandIns(rest.scheduled, self._paths, lambda key, _, handed: templates.known(key[0], handed))
        passes = RestPasses(
            rest, whole.call, rest.scheduled, whole.ranks, whole.device, whole.seed, whole.tolerances,
            whole.loss_fn, whole.check_grad, suffix,
        )  # fmt: skip
        passes.stand_ins = {id(rest.original): expected, id(rest.scheduled): actual}

        def reference() -> Outcome:
            outcome = passes.reference()
            _check_numbers("the rest of the model", passes, outcome)
            if expected.refusal is not None:  # the model caught it
                raise expected.refusal
            return outcome

        def compare_handed() -> None:
            if actual.refusal is not None:
                raise actual.refusal
            _refuse(_first_fault("the rest of the model", passes))
            self._check_others("the rest of the model")
            self._compare_handed(passes, expected, actual)
            _refuse(_first_fault("the rest of the model", passes))

        with expected, actual:
            passes.run(self._joined(reference))
        self._joined(compare_handed)
        self.comparisons += passes.comparisons
        firsts = gather_objects(whole.ranks, list(templates.first.values()))
        if any(other != firsts[0] for other in firsts):
            raise NoLayersError("the processes find other layers alike")
        for (kind, _), (path, index) in templates.first.items():
            self.layers.setdefault(path, [other for other in self._paths if self._kinds[other] == kind])
            self._run_layer(path, expected.calls[path, index], suffix)

    def _run_layer(self, path: str, handed: Handed, suffix: str) -> None:
        passes = self._layer_passes(path, handed, suffix)

        def reference() -> tuple[str, Outcome]:
            outcome = passes.reference()
            _check_numbers(repr(path), passes, outcome)
            return state_of(passes.scheduled, path), outcome

        before, outcome = self._joined(reference)
        passes.run(outcome)

        def check() -> None:
            _refuse(_first_fault(repr(path), passes))
            self._check_others(repr(path))
            if state_of(passes.scheduled, path) != before:
                raise NoLayersError(f"{path!r} keeps state in attributes")

        self._joined(check)
        self.comparisons += [_of_layer(comparison, path) for comparison in passes.comparisons]

    def _check_others(self, where: str) -> None:
        """Raise an error if gradients have arrived at parts other than the one that ran."""
        weights = self._whole.weights
        for name, parameter in (
            *weights.original.named_parameters(),
            *weights.scheduled.named_parameters(),
        ):
            if parameter.grad is not None:
                raise NoLayersError(f"{where} uses {name!r}, which belongs elsewhere")

    def _joined(self, step: Callable[[], _Object]) -> _Object:
        """Run a step without communication; raise a `NoLayersError` on all processes if one of them fails."""
        refusal, result = "", None
        try:
            result = step()
        except Exception as error:  # noqa: BLE001 - whatever a model raises
            is_known = isinstance(error, NoLayersError)
            refusal = str(error) if is_known else short_repr(f"{type(error).__name__}: {error}")
        for text in gather_objects(self._whole.ranks, refusal):
            if text:
                raise NoLayersError(text)
        return cast("_Object", result)

    def _layer_passes(self, path: str, handed: Handed, suffix: str) -> OneLayerPasses:
        """Return the passes of one layer on what the model handed to it."""
        whole, part = self._whole, self._parts[path]
        call = checked_call(part.original, Call(handed.args, handed.kwargs), path, None)
        needs = iter(handed.needs_gradient)
        wanting = {
            name
            for name, value in (*zip(call.names, call.args, strict=True), *call.kwargs.items())
            if sum(next(needs) for _ in pytree.tree_leaves(value))
        }
        passes = OneLayerPasses(
            part, replace(call, wanting=frozenset(wanting)), part.scheduled, whole.ranks, whole.device,
            whole.seed, whole.tolerances, None, whole.check_grad, suffix,
        )  # fmt: skip
        passes.n_layers = len(self._paths)
        return passes

    def _compare_handed(self, passes: Passes, expected: StandIns, actual: StandIns) -> None:
        """Compare what the rest of both models handed to the layers, and the gradients that arrived there."""
        if [*expected.calls] != [*actual.calls]:
            passes.faults.append("the layers are called in another order")
            return
        for (path, index), handed in expected.calls.items():
            other = actual.calls[path, index]
            for place, (leaf, value) in enumerate(zip(handed.leaves, other.leaves, strict=True)):
                if isinstance(leaf, Tensor):
                    passes._compare("layer input", f"{path} {index} {place}", value, leaf)
            if self._whole.check_grad and handed.gradients.keys() != other.gradients.keys():
                passes.faults.append(f"gradients arrive at other results of {path!r}")
                continue
            for place, gradient in handed.gradients.items():
                passes._compare(
                    "layer output gradient", f"{path} {index} {place}", other.gradients[place], gradient
                )


@contextmanager
def _undrawn(seed: int, device: torch.device, path: str) -> Iterator[None]:
    """Run a layer by itself; raise an error if it draws random numbers."""
    with _seeded(seed, device):
        before = _random_states()
        yield
        if _random_states() != before:
            raise NoLayersError(f"{path!r} draws random numbers")


def _random_states() -> tuple[Any, ...]:
    initialised: Callable[[], bool] = torch.cuda.is_initialized
    devices = range(torch.cuda.device_count()) if initialised() else ()
    states = [torch.get_rng_state(), *(torch.cuda.get_rng_state(index) for index in devices)]
    of_numpy = pickle.dumps(np.random.get_state())  # noqa: NPY002 - models may draw from it
    return random.getstate(), of_numpy, *(state.numpy().tobytes() for state in states)


def _check_numbers(where: str, passes: Passes, outcome: Outcome) -> None:
    """Raise an error if a result of the original is NaN, which agrees with that of most faults."""
    gradients = [parameter.grad for parameter in passes.weights.original.parameters()]
    for tensor in (*outcome.tensors.values(), *(gradient for gradient in gradients if gradient is not None)):
        is_float = tensor.is_floating_point() or tensor.is_complex()
        if is_float and math.isnan(float(torch.linalg.vector_norm(tensor.detach()))):
            raise NoLayersError(f"{where} returns NaN by itself")


def _refuse(reason: str) -> None:
    if reason:
        raise NoLayersError(reason)


def _first_fault(where: str, passes: Passes) -> str:
    """Return the first fault of this process, empty if there is none."""
    faults = [*passes.faults, *(str(comparison) for comparison in passes.comparisons if comparison.fault)]
    return f"{where} differs by itself: {short_repr(faults[0])}" if faults else ""


def _of_layer(comparison: Comparison, path: str) -> Comparison:
    """Return a comparison of a layer under its name in the whole model."""
    of_parameter = comparison.kind.startswith(("parameter", "buffer"))
    return replace(
        comparison,
        kind=comparison.kind if of_parameter else f"layer {comparison.kind}",
        name=f"{path}.{comparison.name}" if of_parameter else f"{path} {comparison.name}",
    )


# --- Verification ---

_SHOWN_NAMES = 4


class Verify:
    """Verify the primitives that are applied in a block.

    When the block ends without an error, original and scheduled model run on the same inputs with the same
    weights. Outputs, input gradients and the gradients of all parameters must agree on every process of the
    group, and so must buffers after a step in training mode. The report names the modules at which they
    diverge. Weights with equal elements, such as biases of zero, are moved off their value in both models.
    The schedule, its model, the modes of its modules and the random generators do not change. If the schedule
    cuts a pipeline, its stages run one after the other.

    Parameters
    ----------
    sch
        The schedule, or a node of it; all processes of its group must verify it together.
    example_inputs
        A tensor, positional arguments, keyword arguments by name, or a function of a `torch.Generator` that
        draws any of these. All processes use the inputs of the first one of the group.
    device
        Device of the models; None for that of the parameters.
    eval_mode
        True to run both models in evaluation mode only, False in their own modes only. None for both modes of
        all modules: evaluation first, then training with batch statistics but without dropout. If the
        original model raises an error in training mode, only evaluation mode is compared.
    check_grad
        Compare gradients, too.
    rtol, atol
        Tolerated differences, relative to the value and to the largest value in its tensor; None for the
        defaults of the type.
    loss_fn
        Loss of the outputs, from which gradients start; None for a random gradient of every output.
    enable
        False to do nothing.
    input_grads
        Names of arguments whose gradients are compared; None for all of floating-point numbers. A mask that
        is never trained may be left out.
    seed
        Seed of drawn inputs, dropout, and gradients at the outputs.
    by_layers
        Compare repeated layers one at a time, and one of those of the same structure, which takes a fraction
        of time and memory, see Notes.

    Attributes
    ----------
    report
        The `VerifyReport` after the block, None before or if nothing was verified.

    Raises
    ------
    VerificationError
        The models differ, on every process of the group; also an `AssertionError`. The message is the report.
    KindError, ArgumentError
        The inputs have the wrong kind or do not fit the model; a tolerance is negative, or a name is not
        that of an argument.

    Notes
    -----
    A verification by layers first compares the rest of the model, with stand-ins for the layers; whatever the
    rest hands to a stand-in, and the gradients that arrive there, must agree. Then it compares layers by
    themselves, on what was handed to them. If anything differs, or if the model cannot be taken apart, the
    whole model is verified, and a note says why. A model cannot be taken apart if its layers share weights,
    draw random numbers, change their arguments or attributes, or exchange objects such as caches, or if it is
    cut into stages. State that layers keep in global variables goes unnoticed, and a branch on the values of
    weights is compared for one layer of a structure. Errors of layers add up, so that outputs and input
    gradients of a layer must agree within the tolerance of the model divided by the number of layers.

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
        by_layers: bool = False,
    ) -> None:
        for name, limit in (("rtol", rtol), ("atol", atol)):
            if limit is not None and not limit >= 0:
                raise ArgumentError(
                    f"Verify of {sch.path!r}: {name} is {limit!r}; expected a number >= 0, or None"
                )
        self.report: VerifyReport | None = None
        self._sch, self._inputs, self._device = sch, example_inputs, device
        self._eval_mode, self._check_grad, self._loss_fn = eval_mode, check_grad, loss_fn
        self._enable, self._input_grads, self._seed = enable, input_grads, seed
        self._tolerances = {
            category: partial(tolerance_for, kind=category, rtol=rtol, atol=atol)
            for category in (OUTPUT, GRADIENT)
        }
        self._ranks = Ranks(sch.rank, sch.world_size, sch.group)
        self._by_layers = by_layers
        self._running: nn.Module = sch.mod
        self._notes: list[str] = []

    def __enter__(self) -> Self:
        """Keep a copy of the model before the block."""
        if self._enable:
            call = call_from(self._inputs, self._seed)
            self._call = checked_call(self._sch.mod, call, self._sch.path, self._input_grads)
            self._n_steps = len(self._sch.metadata.journal)
            self._original = Original(self._sch.mod)
            self._sch.metadata.tags.add(ORIGIN)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Compare the models, unless the block raised an error."""
        if not self._enable:
            return
        try:
            if error is None:
                self.report = self._compared()
        finally:
            self._original.forget(self._sch.mod)
            self._sch.metadata.tags.discard(ORIGIN)
        if self.report is not None and not self.report.is_equal:
            raise VerificationError(str(self.report))

    def _compared(self) -> VerifyReport:
        ranks, journal = self._ranks, self._sch.metadata.journal
        if len(set(gather_objects(ranks, digest(journal)))) > 1:
            return self._report(
                [], [_other_steps(gather_objects(ranks, [str(step) for step in journal]))], []
            )
        if self._device is not None:
            device = torch.device(self._device)
        else:
            tensors = (*self._sch.mod.parameters(), *self._sch.mod.buffers())
            devices = {tensor.device for tensor in tensors if not tensor.is_meta}
            device = next(iter(devices), torch.device("cpu"))
        call = broadcast_object(ranks, self._call)
        original = initialised(self._original.module, ranks, self._seed, device)
        weights = same_weights(original, self._sch.mod, ranks, device, self._seed)
        self._running = staged_copy(self._sch, weights.scheduled)
        passes = Passes(
            weights, call, self._running, ranks, device, self._seed, self._tolerances, self._loss_fn,
            self._check_grad,
        )  # fmt: skip
        if self._by_layers and (report := self._compared_by_layers(passes)) is not None:
            return report
        if self._eval_mode is not False:
            self._set_modes(weights, is_training=False)
        agrees = passes.run(passes.reference())
        divergences = [] if agrees else passes.divergences(self._synced_modules())
        if agrees and self._eval_mode is None:
            self._set_modes(weights, is_training=True)
            divergences = self._compared_in_training(passes)
        return self._report(*self._merged(passes), divergences, weights)

    def _merged(self, passes: Passes) -> tuple[list[Comparison], list[str]]:
        """Merge comparisons and faults of all processes."""
        faults = [*passes.faults]
        faults += [f"parameter {name} was changed in place" for name in self._original.changed()]
        results = gather_objects(self._ranks, (passes.comparisons, faults, passes.weights.differed))
        passes.weights.differed = [name for _, _, names in results for name in names]
        return _merged([result[:2] for result in results])

    def _compared_by_layers(self, passes: Passes) -> VerifyReport | None:
        """Compare the rest of the model, then layers; return None if the whole model has to be compared."""
        modes = (False, True) if self._eval_mode is None else (False if self._eval_mode else None,)
        buffers = passes.buffers()
        try:
            if isinstance(self._running, SequentialStages):
                raise NoLayersError("the schedule cuts stages")
            parts = LayerPasses(passes)
            for mode in modes:
                if mode is not None:
                    self._set_modes(passes.weights, mode)
                with without_dropout() if mode else nullcontext():
                    parts.run(IN_TRAINING if mode else "")
        except NoLayersError as error:
            self._notes.append(f"compared as a whole, not by layers: {error}")
            passes._clear()
            restore_buffers(buffers)
            return None
        merged = self._merged(replace(passes, comparisons=parts.comparisons, faults=[]))
        return self._report(*merged, [], passes.weights, parts.layers)

    def _compared_in_training(self, passes: Passes) -> list[Divergence]:
        """Compare the models in training mode, too; return the modules at which they diverge."""
        training = replace(passes, suffix=IN_TRAINING, comparisons=[], faults=[])
        before = training.buffers()
        with without_dropout():
            try:
                expected = training.reference()
            except Exception as error:  # noqa: BLE001 - whatever a model raises
                why = short_repr(f"{type(error).__name__}: {error}")
                self._notes.append(f"not compared in training mode, in which the original raises {why}")
                return []
            agrees = training.run(expected)
            # A difference may be rounding alone, see `measured_noise`: compare again with that tolerance.
            if not agrees:
                restore_buffers(before)
                training.noise = training.measured_noise()
                restore_buffers(before)
                training.comparisons, training.faults = [], []
                agrees = training.run(training.reference())
                if agrees:
                    largest = max(gather_objects(self._ranks, max(training.noise.values(), default=0.0)))
                    self._notes.append(
                        f"in training mode, rounding alone changes results by up to {largest:.3g} of their "
                        f"largest value; {MARGIN:g} times the change of each was tolerated"
                    )
            divergences = [] if agrees else training.divergences(self._synced_modules())
        passes.comparisons += training.comparisons
        passes.faults += [f"in training mode, {fault}" for fault in training.faults]
        return divergences

    def _set_modes(self, weights: Weights, is_training: bool) -> None:
        for module in (weights.original, weights.scheduled, self._running):
            module.train(is_training)

    def _report(
        self,
        comparisons: Sequence[Comparison],
        faults: Sequence[str],
        divergences: Sequence[Divergence],
        weights: Weights | None = None,
        layers: Mapping[str, Sequence[str]] | None = None,
    ) -> VerifyReport:
        steps = self._sch.metadata.journal[self._n_steps :]
        stages = self._running
        located = [
            replace(
                divergence,
                path=self._full_path(divergence.path),
                step=self._last_step(divergence.path),
                stage=stages.stage_of(divergence.path) if isinstance(stages, SequentialStages) else None,
            )
            for divergence in divergences
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
            notes.append(f"taken from the first process, since they differ between processes: {names}")
        unmatched = [] if weights is None else [*weights.lost, *weights.added]
        return VerifyReport(
            self._sch.path,
            self._ranks.size,
            steps,
            comparisons,
            faults,
            located,
            unmatched,
            notes,
            layers or {},
        )

    def _full_path(self, path: str) -> str:
        return ".".join(filter(None, (self._sch.path, path)))

    def _last_step(self, path: str) -> JournalEntry | None:
        """Return the last step at a module or above it, if possible one of the verified block."""
        full = self._full_path(path)
        for journal in (self._sch.metadata.journal[self._n_steps :], self._sch.metadata.journal):
            for entry in reversed(journal):
                if not entry.path or full == entry.path or full.startswith(f"{entry.path}."):
                    return entry
        return None

    def _synced_modules(self) -> dict[str, list[str]]:
        """Return the synchronised modules by mode."""
        synced: dict[str, list[str]] = {}
        start = f"{self._sch.path}." if self._sch.path else ""
        for entry in self._sch.metadata.journal:
            if entry.op != "sync" or entry.arguments.get("on") == "parameters":
                continue
            if f"{entry.path}.".startswith(start):
                synced.setdefault(str(entry.arguments["mode"]), []).append(entry.path.removeprefix(start))
        return synced


def _other_steps(journals: Sequence[Sequence[str]]) -> str:
    """Return a fault that names the first step at which the schedules of the processes differ."""
    length = max(map(len, journals))
    for step in range(length):
        texts = [journal[step] if step < len(journal) else "nothing" for journal in journals]
        if len(set(texts)) > 1:
            listed = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))
            return f"the schedules of the processes differ from step {step + 1} on: {listed}"
    return "the schedules of the processes differ"


def _merged(
    results: Sequence[tuple[Sequence[Comparison], Sequence[str]]],
) -> tuple[list[Comparison], list[str]]:
    """Merge the results of the processes: the worst comparison of each tensor, and all faults once."""
    worst: dict[tuple[str, str], Comparison] = {}
    for rank, (comparisons, _) in enumerate(results):
        for comparison in comparisons:
            known = worst.get((comparison.kind, comparison.name))
            if known is None or (bool(comparison.fault), comparison.max_rel_error) > (
                bool(known.fault),
                known.max_rel_error,
            ):
                where = (
                    f"on rank {rank}: {comparison.fault}"
                    if comparison.fault and len(results) > 1
                    else comparison.fault
                )
                worst[comparison.kind, comparison.name] = replace(comparison, fault=where)
    faults = dict.fromkeys(fault for _, rank_faults in results for fault in rank_faults)
    return sorted(worst.values(), key=lambda comparison: not comparison.fault), list(faults)
