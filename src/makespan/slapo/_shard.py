"""The primitive that splits parameters and buffers of a module among the processes of a group."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from makespan.slapo._annotate import carry_tags
from makespan.slapo._collectives import Blocks, Ranks, sizes_of
from makespan.slapo._errors import (
    ArgumentError,
    ConflictError,
    KindError,
    MemberError,
    ShardError,
    close_names,
    shown,
)
from makespan.slapo._fused import check_not_fused
from makespan.slapo._layouts import Sharding, TensorShard, keep_sharding, said, sharding_of
from makespan.slapo._registry import Primitive, register_primitive
from makespan.slapo._shard_rules import ShardEffect, ShardRequest, shard_effect
from makespan.slapo._split_layers import become
from makespan.training import refuse_plain_clipping

if TYPE_CHECKING:
    from makespan.slapo._schedule import Schedule

__all__ = ["CLIPPING", "Shard", "TiedShard", "ranks_of", "tie_of"]

CLIPPING = "makespan.slapo.clip_grad_norm(schedule, max_norm)"
"""What clips gradients by the norm of the whole model."""


@dataclass(frozen=True, slots=True)
class TiedShard:
    """The part that all tensors of a tie share, kept by the path at which it was made."""

    path: str
    parameter: nn.Parameter
    shard: TensorShard


def ranks_of(sch: "Schedule") -> Ranks:
    """Return the processes that share the modules of a schedule."""
    return Ranks(sch.rank, sch.world_size, sch.group)


def tie_of(sch: "Schedule", name: str) -> tuple[str, ...] | None:
    """Return the group of parameters that are one object, to which a parameter of a module belongs."""
    full = f"{sch.path}.{name}" if sch.path else name
    return next((group for group in sch.metadata.ties if full in group), None)


@register_primitive()
class Shard(Primitive):
    """Split tensors of a module evenly along an axis, of which each process keeps a part."""

    @classmethod
    def name(cls) -> str:
        """Return ``shard``."""
        return "shard"

    @classmethod
    def apply(
        cls,
        sch: "Schedule",
        tensor_name: str | Sequence[str],
        axis: int,
        groups: int | Sequence[int] = 1,
        unit: int | None = None,
    ) -> None:
        """Keep the part of this process.

        Parameters
        ----------
        tensor_name
            Parameter or buffer of this module itself, or several of them.
        axis
            Axis along which it is cut; negative ones count from the end.
        groups
            Blocks of the axis that are cut each by itself: how many equal ones, three for queries, keys and
            values in one, or their sizes, where there are fewer keys and values than queries.
        unit
            What a process has a whole number of, such as the size of a head; 1 for no such thing. None for
            the size of heads that the owner of a layer names, where its outputs are whole heads.
        """
        names = [tensor_name] if isinstance(tensor_name, str) else list(tensor_name)
        if not names or len(set(names)) < len(names) or not all(isinstance(one, str) for one in names):
            raise KindError(f"shard of {sch.path!r}: found {shown(tensor_name)}; accepted: a name or several")
        check_not_fused(sch, cls.name())
        blocks: Any = tuple(groups) if isinstance(groups, list | tuple) else groups
        plans = [_planned(sch, name, axis, blocks, unit) for name in names]
        sharding = sharding_of(sch.mod)
        for plan in plans:
            sharding = _after(sch, sharding, plan)
        for plan in plans:
            _keep_part(sch, plan)
        if sch.world_size > 1:
            for behaviour in {one for plan in plans if (one := plan.effect.behaviour) is not None}:
                if not isinstance(sch.mod, behaviour):
                    become(sch.mod, behaviour)
        for plan in plans:
            for name, value in plan.effect.attributes.items():
                setattr(sch.mod, name, value)
        keep_sharding(sch.mod, sharding)


@dataclass(frozen=True, slots=True)
class _Plan:
    """A tensor that will be cut, checked."""

    name: str
    tensor: Tensor
    shard: TensorShard
    effect: ShardEffect
    tied: TiedShard | None


def _planned(sch: "Schedule", name: str, axis: int, groups: Blocks, unit: int | None) -> _Plan:
    """Check one tensor, without changing anything."""
    where = f"shard of {sch.path!r} ({type(sch.mod).__name__})"
    tensor = _tensor(sch.mod, name, where)
    known = sharding_of(sch.mod).tensors.get(name)
    if known is not None:
        raise ConflictError(
            f"{where}: {name!r} is sharded on axis {known.axis} already; {sch.conflict('shard')}"
        )
    if not _is_number(axis) or not -tensor.dim() <= axis < tensor.dim():
        raise ArgumentError(
            f"{where}: axis {axis!r} of {name!r}, whose shape is {tuple(tensor.shape)}; accepted: "
            + (f"{-tensor.dim()} to {tensor.dim() - 1}" if tensor.dim() else "none, it is a scalar")
        )
    axis %= tensor.dim()
    size = tensor.shape[axis]
    if isinstance(groups, tuple):
        if not groups or not all(_is_number(one) and one > 0 for one in groups) or sum(groups) != size:
            raise ArgumentError(
                f"{where}: groups of {shown(list(groups))}; accepted: sizes > 0 that add up to {size}, that "
                f"of axis {axis} of {name!r}"
            )
        if wrong := [one for one in groups if one % sch.world_size]:
            raise ShardError(
                f"{where}: axis {axis} of {name!r} has a block of size {wrong[0]}, which does not divide "
                f"among {sch.world_size} processes; accepted: blocks that are multiples of {sch.world_size}"
            )
    elif not _is_number(groups) or groups < 1:
        raise ArgumentError(f"{where}: {shown(groups)} groups; accepted: 1 or more, or the sizes of blocks")
    elif size % (sch.world_size * groups):
        blocks = f" in {groups} groups" if groups > 1 else ""
        raise ShardError(
            f"{where}: axis {axis} of {name!r} has size {size}, which{blocks} does not divide among "
            f"{sch.world_size} processes; accepted: a multiple of {sch.world_size * groups}, after padding"
        )
    shard = TensorShard(tuple(tensor.shape), axis, groups, sch.rank, sch.world_size)
    request = ShardRequest(
        sch.mod, sch.path, name, axis, groups, tensor.shape[axis] // sch.world_size, ranks_of(sch)
    )
    effect = shard_effect(request)
    if effect.returns is not None and effect.returns.kind == "partition":
        _check_units(sch, name, sizes_of(groups, size), unit, where)
    return _Plan(name, tensor, shard, effect, _tied(sch, name, shard, where))


_HEAD_SIZES = ("head_dim", "head_size", "attention_head_size", "key_value_proj_dim")


def _check_units(sch: "Schedule", name: str, sizes: Sequence[int], unit: int | None, where: str) -> None:
    """Refuse a cut through a head: attention would take parts of two heads for one, or fail when it runs."""
    if unit is None:
        owner = sch.parent.mod if sch.parent is not None else None
        named = [getattr(owner, one, None) for one in _HEAD_SIZES]
        unit = next((one for one in named if isinstance(one, int) and one > 1), 1)
        if any(one % unit for one in sizes):
            return  # these are no heads
    elif not _is_number(unit) or unit < 1:
        raise ArgumentError(f"{where}: unit {shown(unit)}; accepted: a whole number >= 1, or None")
    for size in sizes:
        if size % unit or size // unit % sch.world_size:
            raise ShardError(
                f"{where}: {name!r} has {size / unit:g} heads or units of {unit}, which do not divide among "
                f"{sch.world_size} processes; accepted: a number of processes that divides them, or unit=1 "
                "to cut through them"
            )


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _tensor(module: nn.Module, name: str, where: str) -> Tensor:
    own = dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
    if name not in own:
        why = "it is None" if name in {*module._parameters, *module._buffers} else close_names(name, own)
        raise MemberError(f"{where}: no parameter or buffer {name!r}; {why}")
    return own[name]


def _tied(sch: "Schedule", name: str, shard: TensorShard, where: str) -> TiedShard | None:
    """Return the part that another member of the tie has; it must be the same part."""
    group = tie_of(sch, name)
    made: dict[tuple[str, ...], TiedShard] = sch.metadata.slots["shard"]
    known = None if group is None else made.get(group)
    if known is None:
        return None
    if known.shard != shard:
        raise ShardError(
            f"{where}: {name!r} is tied to {known.path!r}, which is sharded on axis {known.shard.axis} to "
            f"{known.shard.shape}, in {said(known.shard.groups)}; this would be axis {shard.axis}, "
            f"{shard.shape}, in {said(shard.groups)}; accepted: the same part"
        )
    return known


def _after(sch: "Schedule", before: Sharding, plan: _Plan) -> Sharding:
    """Return what is sharded once a plan is carried out; contradictions are errors."""
    effect, where = plan.effect, f"shard of {sch.path!r} ({type(sch.mod).__name__})"
    returns = effect.returns
    if returns is not None and returns.kind == "partition":
        returns = replace(returns, groups=plan.shard.groups)
    if returns is not None and before.computes not in (None, returns):
        raise ConflictError(
            f"{where}: with {plan.name!r} cut on axis {plan.shard.axis} it returns {returns}, but "
            f"{before.computes} by what is cut already; {sch.conflict('shard')}"
        )
    if returns is not None and before.computes is None and before.returns is not None:
        raise ConflictError(
            f"{where}: its output is synchronised as {before.returns} already, before it was known that it "
            f"is {returns}; accepted: shard before sync; {sch.conflict('sync')}"
        )
    attributes = {name: getattr(sch.mod, name, None) for name in effect.attributes}
    return replace(
        before,
        tensors={**before.tensors, plan.name: plan.shard},
        together=before.together | effect.together,
        attributes={**attributes, **before.attributes},
        computes=before.computes or returns,
        returns=before.returns or returns,
    )


def _keep_part(sch: "Schedule", plan: _Plan) -> None:
    """Put the part in the place of the whole tensor; members of a tie share it."""
    whole, shard = plan.tensor, plan.shard
    if not isinstance(whole, nn.Parameter):
        setattr(sch.mod, plan.name, shard.part_of(whole))
        return
    if plan.tied is not None:
        part = plan.tied.parameter
    elif shard.world_size == 1:
        part = whole
    else:
        part = nn.Parameter(shard.part_of(whole.detach()), whole.requires_grad)
    carry_tags(whole, part, sch.metadata.tags)
    vars(part)["shard"] = shard
    sch.metadata.tags.add("shard")
    if shard.world_size > 1:
        sch.metadata.tags.add(refuse_plain_clipping([part], CLIPPING))
    setattr(sch.mod, plan.name, part)
    if (group := tie_of(sch, plan.name)) is not None:
        full = f"{sch.path}.{plan.name}".removeprefix(".")
        sch.metadata.slots["shard"].setdefault(group, TiedShard(full, part, shard))
