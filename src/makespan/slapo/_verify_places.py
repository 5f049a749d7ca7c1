"""Where two runs part: what every module returned and which gradient its inputs got, module by module.

Between a sharded layer and the synchronisation after it a process has parts or summands of what the original
model has. A part is looked for along each axis. Summands are looked for only inside a module that is
synchronised itself: anywhere else a sum that is missing is the very error to be found.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree  # there is no public name for it

from makespan.slapo._agreement import Tolerance, compare, size_of
from makespan.slapo._collectives import Ranks, cut
from makespan.slapo._verify_weights import everywhere

__all__ = ["Capture", "Passage", "Parting", "captured", "first_partings", "is_part", "sums_agree"]

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
