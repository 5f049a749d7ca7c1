"""What a module returns on each process when its tensors are sharded, and what synchronising makes of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from makespan.slapo._collectives import Blocks, cut, joined

__all__ = ["PARTIAL", "REPLICATED", "Layout", "Sharding", "TensorShard", "hand_over", "keep_sharding",
           "partition", "said", "sharding_of"]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Layout:
    """How the processes share a tensor.

    Parameters
    ----------
    kind
        ``partition`` for parts along an axis, ``partial`` for summands, ``replicated`` for the same on all.
    axis, groups
        The axis of a partition, and the blocks along it that are cut each by itself: how many equal ones, or
        their sizes.
    """

    kind: str
    axis: int | None = None
    groups: Blocks = 1

    def __str__(self) -> str:
        """Return it as messages name it."""
        blocks = "" if self.groups == 1 else f" in {said(self.groups)}"
        return self.kind if self.axis is None else f"{self.kind} on axis {self.axis}{blocks}"


def said(groups: Blocks) -> str:
    """Return blocks as messages name them."""
    if isinstance(groups, int):
        return f"{groups} groups"
    return f"groups of {', '.join(map(str, groups))}"


PARTIAL, REPLICATED = Layout("partial"), Layout("replicated")


def partition(axis: int) -> Layout:
    """Layout of parts along an axis."""
    return Layout("partition", axis)


@dataclass(frozen=True, slots=True)
class TensorShard:
    """Which part of a tensor a process holds; it stands on the parameter as ``shard``.

    Parameters
    ----------
    orig_shape
        Shape of the whole tensor.
    axis, groups
        Axis that is cut, and the blocks along it that are cut each by itself: how many equal ones, or their
        sizes in the whole tensor.
    rank, world_size
        Number of the part, and of parts.
    """

    orig_shape: tuple[int, ...]
    axis: int
    groups: Blocks
    rank: int
    world_size: int

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
    """What of a module is sharded and synchronised; it stands on the module, and is copied with it.

    Parameters
    ----------
    tensors
        Its sharded parameters and buffers by name.
    together
        Tensors of which all that the module has must be sharded if one is.
    attributes
        Values that its attributes had before, for whoever needs the whole layer.
    computes, returns
        What it returns by itself, and after it is synchronised; None where that is not known.
    """

    tensors: Mapping[str, TensorShard] = field(default_factory=dict)
    together: frozenset[str] = frozenset()
    attributes: Mapping[str, object] = field(default_factory=dict)
    computes: Layout | None = None
    returns: Layout | None = None


_PLACE = "_makespan_sharding"


def sharding_of(module: nn.Module) -> Sharding:
    """Return what is sharded of a module."""
    known = module.__dict__.get(_PLACE)
    return known if isinstance(known, Sharding) else Sharding()


def hand_over(old: nn.Module, new: nn.Module) -> None:
    """Let a module that has tensors of another one, the same objects, know how they are sharded."""
    known, kept = sharding_of(old), {}
    for name, shard in known.tensors.items():
        if getattr(new, name, None) is getattr(old, name):
            kept[name] = shard
    if kept:
        keep_sharding(new, Sharding(tensors=kept))


def keep_sharding(module: nn.Module, sharding: Sharding) -> None:
    """Leave on a module what is sharded of it."""
    module.__dict__[_PLACE] = sharding
