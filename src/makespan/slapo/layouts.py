"""Tensor layouts on a group of processes, and the exchanges between them with their gradients."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.fx import Proxy

from makespan.slapo.errors import ShardError

# --- Exchanges ---
#
# An exchange pairs an operation of the forward pass with the matching operation on gradients. Which one
# matches depends on the readers of the result: if they are sharded, each process has a summand of the
# gradient, which is reduced; if all processes compute the same, they have the same gradient, which is cut or
# passed on.

_Raw = Callable[[Tensor], Tensor]


class Rehearsal:
    """A group whose members are threads of one process, in which exchanges are tried before a model is split.

    Parameters
    ----------
    size
        Number of threads.
    """

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size)
        self._held: list[tuple[Any, Any]] = [(None, None)] * size

    def gathered(self, rank: int, what: Any, value: Any) -> list[Any]:
        """Return the values of all members; what they exchange must be the same, or they all raise."""
        self._held[rank] = what, value
        self._barrier.wait()
        found = list(self._held)
        self._barrier.wait()
        if any(other != what for other, _ in found):
            raise ShardError(
                f"processes exchange different tensors: {', '.join(str(one[0]) for one in found)}"
            )
        return [value for _, value in found]

    def abort(self) -> None:
        """Let the others raise instead of waiting for this member."""
        self._barrier.abort()


@dataclass(frozen=True, slots=True)
class Ranks:
    """The processes that share a layer, from the view of one of them; copies of a model share it."""

    rank: int
    size: int
    group: Any  # a process group, None for the default one; in trials a `Rehearsal` in its place

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        """Return itself, since the connections of a process group cannot be copied."""
        return self


_Object = TypeVar("_Object")


def gather_objects(ranks: Ranks, value: _Object) -> list[_Object]:
    """Return the values of all processes of the group, in the order of ranks."""
    if ranks.size == 1:
        return [value]
    if isinstance(ranks.group, Rehearsal):
        return ranks.group.gathered(ranks.rank, "objects", value)
    values: list[Any] = [None] * ranks.size
    dist.all_gather_object(values, value, group=ranks.group)
    return values


def gather_over(groups: Sequence[Ranks], value: _Object) -> list[_Object]:
    """Return the values of the processes of several groups that cross each other, in one order."""
    values = [value]
    for ranks in reversed(groups):
        values = [one for theirs in gather_objects(ranks, values) for one in theirs]
    return values


def broadcast_object(ranks: Ranks, value: _Object) -> _Object:
    """Return the value of the first process of the group."""
    if ranks.size == 1:
        return value
    held: list[Any] = [value]
    dist.broadcast_object_list(held, group=ranks.group, group_src=0)
    received: _Object = held[0]
    return received


class _Conjugate(torch.autograd.Function):
    """An operation forward and another one backward; the backward pass is differentiable as well."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, there: _Raw, back: _Raw) -> Tensor:
        ctx.there, ctx.back = there, back
        return there(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _conjugate(gradients[0], ctx.back, ctx.there), None, None


_conjugate: Callable[..., Any] = _Conjugate.apply


@dataclass(frozen=True, slots=True)
class Exchange:
    """An operation on a tensor of each process, and the operation on its gradient.

    Parameters
    ----------
    name
        Name in messages and prints.
    operation, gradient_operation
        The operation, and the one on the gradient of its result. Neither changes its input.
    """

    name: str
    operation: _Raw
    gradient_operation: _Raw

    @property
    def __name__(self) -> str:
        """Return the name under which a traced graph shows it."""
        return self.name

    def __call__(self, tensor: Any) -> Any:
        """Exchange a tensor with the group; all its processes must call it in the same order."""
        if isinstance(tensor, Proxy):  # one opaque operation of the graph
            return tensor.tracer.create_proxy("call_function", self, (tensor,), {})
        return _conjugate(tensor, self.operation, self.gradient_operation)


Blocks: TypeAlias = int | tuple[int, ...]
"""Blocks of an axis that are cut separately: the number of equal blocks, or the size of each."""


def block_sizes(blocks: Blocks, length: int) -> tuple[int, ...]:
    """Return the sizes of the blocks of an axis, or of the part of it that one process holds."""
    if isinstance(blocks, int):
        return (length // blocks,) * blocks
    return tuple(size * length // sum(blocks) for size in blocks)


def cut(tensor: Tensor, axis: int, n_parts: int, groups: Blocks = 1) -> list[Tensor]:
    """Cut a tensor into parts along an axis, each block of the axis separately."""
    length = tensor.shape[axis]
    sizes = block_sizes(groups, length)
    if sum(sizes) != length or any(size % n_parts for size in sizes):
        among = f", in {groups} blocks," if isinstance(groups, int) and groups > 1 else ""
        among = f", in blocks of {', '.join(map(str, sizes))}," if isinstance(groups, tuple) else among
        raise ShardError(
            f"axis {axis} of a tensor of shape {tuple(tensor.shape)} does not divide{among} among {n_parts} "
            "processes"
        )
    # Part i holds piece i of every block, such as its heads of queries, keys and values.
    blocks = [block.chunk(n_parts, axis) for block in torch.split(tensor, list(sizes), axis)]
    return [torch.cat([block[part] for block in blocks], axis) for part in range(n_parts)]


def joined(parts: list[Tensor], axis: int, groups: Blocks = 1) -> Tensor:
    """Undo `cut`."""
    blocks = [torch.split(part, list(block_sizes(groups, part.shape[axis])), axis) for part in parts]
    return torch.cat([piece for block in zip(*blocks, strict=True) for piece in block], axis)


def _same(tensor: Tensor) -> Tensor:
    return tensor.view_as(tensor)


def _summed(ranks: Ranks, tensor: Tensor) -> Tensor:
    if isinstance(ranks.group, Rehearsal):
        return torch.stack(ranks.group.gathered(ranks.rank, ("a sum", tuple(tensor.shape)), tensor)).sum(0)
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=ranks.group)
    return total


def _gathered(ranks: Ranks, axis: int, tensor: Tensor, groups: Blocks = 1) -> Tensor:
    part = tensor.contiguous()
    if isinstance(ranks.group, Rehearsal):
        parts = ranks.group.gathered(ranks.rank, ("parts", tuple(part.shape)), part)
    else:
        parts = [torch.empty_like(part) for _ in range(ranks.size)]
        dist.all_gather(parts, part, group=ranks.group)
    return joined(parts, axis, groups)


def _own_part(ranks: Ranks, axis: int, tensor: Tensor, groups: Blocks = 1) -> Tensor:
    return cut(tensor, axis, ranks.size, groups)[ranks.rank]


def _sum_scattered(ranks: Ranks, axis: int, tensor: Tensor, groups: Blocks = 1) -> Tensor:
    if isinstance(ranks.group, Rehearsal):
        return _own_part(ranks, axis, _summed(ranks, tensor), groups)
    parts = cut(tensor, axis, ranks.size, groups)
    part = torch.empty_like(parts[0])
    dist.reduce_scatter(part, parts, group=ranks.group)
    return part


def _swapped(ranks: Ranks, split: int, join: int, tensor: Tensor) -> Tensor:
    parts = torch.stack(cut(tensor, split, ranks.size))
    if isinstance(ranks.group, Rehearsal):
        of_all = ranks.group.gathered(ranks.rank, ("parts", tuple(parts.shape)), parts)
        return torch.cat([sent[ranks.rank] for sent in of_all], join)
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=ranks.group)
    return torch.cat(list(received.unbind()), join)


def all_reduce(ranks: Ranks) -> Exchange:
    """Sum over the processes; pass the gradient of the sum on unchanged."""
    return Exchange("all_reduce", partial(_summed, ranks), _same)


def sum_gradient(ranks: Ranks) -> Exchange:
    """Pass a tensor on unchanged, and sum its gradient over the processes."""
    return Exchange("sum_gradient", _same, partial(_summed, ranks))


def mean_gradient(ranks: Ranks) -> Exchange:
    """Pass a tensor on unchanged, and average its gradient over the processes."""

    def averaged(gradient: Tensor) -> Tensor:
        return _summed(ranks, gradient).div_(ranks.size)

    return Exchange("mean_gradient", _same, averaged)


def share_of_gradient(ranks: Ranks) -> Exchange:
    """Pass a tensor on unchanged, and divide its gradient by the number of processes."""
    return Exchange("share_of_gradient", _same, lambda gradient: gradient / ranks.size)


def send_rows(ranks: Ranks, sent: Sequence[int], received: Sequence[int]) -> Exchange:
    """Send blocks of rows to the processes in turn, and receive theirs; gradients go the other way.

    Parameters
    ----------
    ranks
        The processes.
    sent, received
        Rows for each process, and from each.
    """

    def moved(there: list[int], back: list[int], rows: Tensor) -> Tensor:
        if isinstance(ranks.group, Rehearsal):
            of_all = ranks.group.gathered(ranks.rank, ("rows", tuple(rows.shape[1:])), (rows, there))
            return torch.cat([theirs.split(sizes)[ranks.rank] for theirs, sizes in of_all])
        result = rows.new_empty(sum(back), *rows.shape[1:])
        dist.all_to_all_single(result, rows.contiguous(), back, there, group=ranks.group)
        return result

    out, into = list(sent), list(received)
    return Exchange("send_rows", partial(moved, out, into), partial(moved, into, out))


def all_gather(
    ranks: Ranks, axis: int, tensor_parallel_output_grad: bool = True, groups: Blocks = 1
) -> Exchange:
    """Join the parts of the processes.

    If readers of the whole are sharded, gradients differ between processes: they are summed and cut.
    Otherwise all processes have the same gradient, and each takes its part.
    """
    back = _sum_scattered if tensor_parallel_output_grad else _own_part
    return Exchange(
        "all_gather",
        partial(_gathered, ranks, axis, groups=groups),
        partial(back, ranks, axis, groups=groups),
    )


def reduce_scatter(ranks: Ranks, axis: int) -> Exchange:
    """Sum over the processes; each keeps its part of the sum."""
    return Exchange("reduce_scatter", partial(_sum_scattered, ranks, axis), partial(_gathered, ranks, axis))


def scatter(ranks: Ranks, axis: int) -> Exchange:
    """Keep the part of this process of a replicated tensor."""
    return Exchange("scatter", partial(_own_part, ranks, axis), partial(_gathered, ranks, axis))


_AXES: dict[str, int | None] = {"RR": None, "RS": -1, "SR": -2}
SCHEMES = tuple(f"{there}->{back}" for there in _AXES for back in _AXES)
"""Schemes of `reshard`: layout of the last two axes before and after."""


def reshard(ranks: Ranks, scheme: str) -> Exchange:
    """Change which of the last two axes is cut; a scheme uses R for replicated and S for sharded.

    A gradient has the layout of its tensor, so it takes the reverse exchange. The gradient of a replicated
    tensor is the same on all processes.
    """
    before, after = (_AXES[letters] for letters in scheme.split("->"))
    return Exchange(scheme, _moved(ranks, before, after), _moved(ranks, after, before))


def _moved(ranks: Ranks, before: int | None, after: int | None) -> _Raw:
    if before is None:
        return _same if after is None else partial(_own_part, ranks, after)
    if after is None:
        return partial(_gathered, ranks, before)
    return _same if before == after else partial(_swapped, ranks, after, before)


# --- Layouts, and the sharding of a module ---


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of a tensor on the processes.

    Parameters
    ----------
    kind
        ``partition`` for parts along an axis, ``partial`` for summands, ``replicated`` for the same on all.
    axis, groups
        The axis of a partition, and the blocks along it that are cut separately: the number of equal ones, or
        their sizes.
    """

    kind: str
    axis: int | None = None
    groups: Blocks = 1

    def __str__(self) -> str:
        """Return the text for messages."""
        blocks = "" if self.groups == 1 else f" in {describe_blocks(self.groups)}"
        return self.kind if self.axis is None else f"{self.kind} on axis {self.axis}{blocks}"


def describe_blocks(groups: Blocks) -> str:
    """Return the text for messages."""
    if isinstance(groups, int):
        return f"{groups} groups"
    return f"groups of {', '.join(map(str, groups))}"


PARTIAL, REPLICATED = Layout("partial"), Layout("replicated")


def partition(axis: int) -> Layout:
    """Return the layout of parts along an axis."""
    return Layout("partition", axis)


@dataclass(frozen=True, slots=True)
class TensorShard:
    """The part of a tensor that a process holds; the attribute ``shard`` of its parameter.

    Parameters
    ----------
    orig_shape
        Shape of the whole tensor.
    axis, groups
        Axis that is cut, and the blocks along it that are cut separately: the number of equal ones, or their
        sizes in the whole tensor.
    rank, world_size
        Index of the part, and number of parts.
    over
        Kinds of parallelism whose processes hold the parts, one after the other; the last one varies first.
    """

    orig_shape: tuple[int, ...]
    axis: int
    groups: Blocks
    rank: int
    world_size: int
    over: tuple[str, ...] = ("tensor",)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        sizes = list(self.orig_shape)
        sizes[self.axis] //= self.world_size
        return tuple(sizes)

    def part_of(self, whole: Tensor) -> Tensor:
        """Cut the part of this process out of the whole; the same tensor for a single process."""
        if self.world_size == 1:
            return whole
        return cut(whole, self.axis, self.world_size, self.groups)[self.rank]

    def whole_of(self, parts: list[Tensor]) -> Tensor:
        """Join the parts of all processes, in the order of their ranks."""
        return joined(parts, self.axis, self.groups)


@dataclass(frozen=True, slots=True)
class Sharding:
    """Sharded tensors and layouts of a module; an attribute of the module, copied with it.

    Parameters
    ----------
    tensors
        Its sharded parameters and buffers by name.
    together
        Names of tensors that must all be sharded if one of them is.
    attributes
        Values of its attributes in the whole layer.
    computes, returns
        Layout of its own output, and of the output after synchronisation; None if that is not known.
    """

    tensors: Mapping[str, TensorShard] = field(default_factory=dict)
    together: frozenset[str] = frozenset()
    attributes: Mapping[str, object] = field(default_factory=dict)
    computes: Layout | None = None
    returns: Layout | None = None


_ATTRIBUTE = "_makespan_sharding"


def sharding_of(module: nn.Module) -> Sharding:
    """Return the sharding of a module."""
    known = module.__dict__.get(_ATTRIBUTE)
    return known if isinstance(known, Sharding) else Sharding()


def copy_sharding(old: nn.Module, new: nn.Module) -> None:
    """Set the sharding of a module for the tensors that it shares with another one."""
    known, kept = sharding_of(old), {}
    for name, shard in known.tensors.items():
        if getattr(new, name, None) is getattr(old, name):
            kept[name] = shard
    if kept:
        set_sharding(new, Sharding(tensors=kept))


def set_sharding(module: nn.Module, sharding: Sharding) -> None:
    """Set the sharding of a module, as an attribute that is copied with it."""
    module.__dict__[_ATTRIBUTE] = sharding
