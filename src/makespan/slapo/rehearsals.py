"""Rehearsals: threads of one process run the parts of all processes, before a layer is changed.

Each thread has a copy of the layer with all steps applied, and its part of each sequence. The threads
exchange what processes would, forward and backward. What they compute must be parts of the results and
gradients of the whole layer.
"""

import copy
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree  # there is no public name for it

from makespan.slapo.errors import ScheduleError
from makespan.slapo.flow import first_tensor, fresh
from makespan.slapo.layouts import Ranks, Rehearsal, cut, sharding_of
from makespan.slapo.schedule import create_schedule
from makespan.slapo.syncing import HeadsPart, Place
from makespan.slapo.trials import Sample, Step

TOKENS = -2
"""The axis of tokens in activations, whether samples have an axis of their own or not."""
_TOLERANCE = 1e-3  # of the largest value of a tensor, for sums of gradients in another order
_SMALL = 0.01  # of the median size of gradients, below which all of a gradient may be rounding
_SEED = 7  # of gradients; any would do


class RefusedError(Exception):
    """What a plan says cannot be done in a layer: the reason, what that is, and what to write instead."""

    def __init__(
        self,
        why: str,
        what: str = "sequence parallelism cannot be placed",
        expected: str = "a plan without it (nosp)",
    ) -> None:
        super().__init__(why)
        self.what, self.expected = what, expected


class DiffersError(Exception):
    """A process of a rehearsal does not compute its part."""


@dataclass(frozen=True, slots=True)
class LayerRehearsal:
    """A layer, and how processes share it.

    Parameters
    ----------
    sample
        The layer.
    local, results
        Arguments and results of which a process has its heads only, as of `trials.why_not`.
    learnt
        Arguments that have a gradient in training, by position or name.
    n_tensor, n_context
        Numbers of processes of tensor and of context parallelism; all pairs of them take part.
    along_sequence
        True if those of tensor parallelism share sequences, too.
    """

    sample: Sample
    local: Sequence[Place]
    results: Mapping[int, int]
    learnt: frozenset[int | str]
    n_tensor: int
    n_context: int = 1
    along_sequence: bool = True

    def why_not(self, steps: Sequence[Step]) -> str:
        """Return why the parts of all processes do not compute the whole, empty if they do."""
        whole = copy.deepcopy(self.sample.layer).cpu()
        leaves, expected = _run(whole, self.sample.args, self.sample.kwargs)
        result = first_tensor(expected)
        if result is None or result.shape != hidden_of(leaves[0], leaves[1]).shape:
            return "it does not return a tensor like the one that it reads"
        start = torch.randn(result.shape, generator=torch.Generator().manual_seed(_SEED))
        if result.requires_grad:
            torch.autograd.backward([result], [start])
        rows = [Rehearsal(self.n_tensor) for _ in range(self.n_context)]
        columns = [Rehearsal(self.n_context) for _ in range(self.n_tensor)]
        everyone = [
            (Ranks(tensor, self.n_tensor, rows[context]), Ranks(context, self.n_context, columns[tensor]))
            for context in range(self.n_context)
            for tensor in range(self.n_tensor)
        ]
        try:
            parts = [self._part(steps, *who) for who in everyone]
        except ScheduleError as error:
            return str(error)
        failures: dict[int, Exception] = {}

        def run(index: int) -> None:
            try:
                self._rehearse(parts[index], *everyone[index], (whole, leaves, expected, start))
            except threading.BrokenBarrierError:
                pass  # another one has failed
            except Exception as error:  # noqa: BLE001 - whatever a layer raises with parts that do not fit
                failures[index] = error
            else:
                return
            for group in (*rows, *columns):
                group.abort()

        threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(everyone))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return _said(failures[min(failures)]) if failures else ""

    def _part(self, steps: Sequence[Step], tensor: Ranks, context: Ranks) -> nn.Module:
        part = copy.deepcopy(self.sample.layer).cpu()
        sch = create_schedule(part)
        sch.metadata.context = context
        for _, node in sch.named_schedules():
            node.world_size, node.rank, node.group = tensor.size, tensor.rank, cast(Any, tensor.group)
        for step in steps:
            step.apply(sch)
        return part

    def _own(self, value: Tensor, tensor: Ranks, context: Ranks) -> Tensor:
        """Return the part of a sequence that a process holds."""
        part = cut(value, TOKENS, context.size)[context.rank]
        return cut(part, TOKENS, tensor.size)[tensor.rank] if self.along_sequence else part

    def _rehearse(self, part: nn.Module, tensor: Ranks, context: Ranks, whole: tuple[Any, ...]) -> None:
        """Run one process of the rehearsal and compare it with the whole layer."""
        layer, leaves, expected, start = whole
        heads_part = HeadsPart(self.local, Ranks(tensor.rank, tensor.size, None))
        args, kwargs = heads_part(part, self.sample.args, self.sample.kwargs)
        hidden = hidden_of(args, kwargs)
        args, kwargs = replaced((args, kwargs), hidden, self._own(hidden, tensor, context))
        given, output = _run(part, args, kwargs)
        results = [[one for one in pytree.tree_leaves(value) if isinstance(one, Tensor)]
                   for value in (output, expected)]  # fmt: skip
        if len(results[0]) != len(results[1]):
            raise DiffersError(f"it returns {len(results[0])} tensors instead of {len(results[1])}")
        made, result = first_tensor(output), first_tensor(expected)
        for place, (found, wanted) in enumerate(zip(*results, strict=True)):
            if result is not None and wanted is result:
                wanted = self._own(wanted, tensor, context)
            elif place in self.results:
                wanted = cut(wanted, self.results[place], tensor.size)[tensor.rank]
            _compare(found, wanted, "the result of the layer")
        if made is not None and made.requires_grad:
            torch.autograd.backward([made], [self._own(start, tensor, context)])
        for ranks in (tensor, context):
            ranks.group.gathered(ranks.rank, "the end", None)
        named = [*enumerate(leaves[0]), *leaves[1].items()]
        mine: dict[int | str, Any] = dict([*enumerate(given[0]), *given[1].items()])
        heads = {place for place, _, _ in self.local}
        first = hidden_of(leaves[0], leaves[1])
        for place, one in named:
            if not isinstance(one, Tensor) or one.grad is None:
                continue
            if one is first:
                wanted = self._own(one.grad, tensor, context)
                _compare(mine[place].grad, wanted, "the gradient of what the layer reads")
            elif place in self.learnt and place not in heads:
                _compare(mine[place].grad, one.grad, f"the gradient of the argument {place!r}")
        _compare_weights(part, layer)


def _compare_weights(part: nn.Module, layer: nn.Module) -> None:
    wholes = {name: one.grad for name, one in layer.named_parameters() if one.grad is not None}
    sizes = sorted(float(gradient.abs().max()) for gradient in wholes.values())
    floor = _SMALL * sizes[len(sizes) // 2] if sizes else 0.0
    for path, module in part.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            gradient = wholes.get(f"{path}.{name}".lstrip("."))
            if gradient is None:
                continue
            shard = sharding_of(module).tensors.get(name)
            size = max(float(gradient.abs().max()), floor)
            wanted = gradient if shard is None else shard.part_of(gradient)
            found = torch.zeros_like(wanted) if parameter.grad is None else parameter.grad
            _compare(found, wanted, f"the gradient of {name!r} of {path!r}", size)


def hidden_of(args: Any, kwargs: Any) -> Tensor:
    """Return the sequence that a layer reads; a `RefusedError` says why there is none."""
    hidden = first_tensor((args, kwargs))
    if hidden is None or hidden.dim() != 3:
        shape = None if hidden is None else tuple(hidden.shape)
        raise RefusedError(f"it reads a tensor of shape {shape}; expected samples, tokens and features")
    return hidden


def _run(layer: nn.Module, args: Any, kwargs: Any) -> tuple[tuple[Any, Any], Any]:
    """Run a layer; return copies of its arguments, which take gradients, and its results."""

    def leaf(one: Tensor) -> Tensor:
        return one.detach().cpu().clone().requires_grad_(one.is_floating_point())

    copies = pytree.tree_map_only(Tensor, leaf, fresh((args, kwargs)))
    with torch.enable_grad():
        # Clones, since a layer may change what it reads in place.
        positional, named = pytree.tree_map_only(Tensor, Tensor.clone, copies)
        return copies, layer(*positional, **named)


def replaced(arguments: Any, old: Tensor, new: Tensor) -> Any:
    """Return arguments with another tensor in the place of one of them."""
    return pytree.tree_map_only(Tensor, lambda one: new if one is old else one, arguments)


def _compare(found: Any, wanted: Tensor, what: str, size: float | None = None) -> None:
    if not isinstance(found, Tensor) or found.shape != wanted.shape:
        shape = tuple(found.shape) if isinstance(found, Tensor) else None
        raise DiffersError(f"{what} has shape {shape} instead of {tuple(wanted.shape)}")
    scale = size if size is not None else float(wanted.detach().abs().max()) if wanted.numel() else 0.0
    if not torch.allclose(found.detach(), wanted.detach(), rtol=0.0, atol=_TOLERANCE * scale, equal_nan=True):
        raise DiffersError(f"{what} is not as before")


def _said(error: Exception) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, DiffersError | ScheduleError):
        return text
    return f"with its part of the sequence, a process raises {type(error).__name__}: {text[:120]}"
