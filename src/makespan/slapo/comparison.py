"""Compare what a scheduled model computes with the original: tensors, and the modules where both diverge."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree  # there is no public name for it

from makespan.slapo.layouts import Ranks, cut, gather_objects
from makespan.slapo.schedule import JournalEntry

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


# --- Divergence, module by module ---
#
# Between a sharded layer and the next synchronisation, a process holds a part or a summand of the original
# tensor, which is not a fault. A tensor of another shape agrees if it is this process's part along some
# axis. A tensor of the same shape may be a summand only inside a synchronised module, where the sum over
# the processes must agree; anywhere else, a missing sum is the error that the verification looks for.


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
        ranks = numbered("rank", self.ranks)
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


def numbered(noun: str, numbers: Sequence[int] | int) -> str:
    """Return a count, such as ``2 steps``, or a list, such as ``ranks 0, 1``."""
    if isinstance(numbers, int):
        return f"{numbers} {noun}{'' if numbers == 1 else 's'}"
    return f"{noun}{'' if len(numbers) == 1 else 's'} {', '.join(map(str, numbers))}"


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
