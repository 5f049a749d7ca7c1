"""Primitive ``shard``: rules per layer, and padding of vocabularies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from makespan.slapo.errors import (
    ArgumentError,
    ConflictError,
    KindError,
    MemberError,
    PathError,
    ShardError,
    close_names,
    short_repr,
)
from makespan.slapo.layers import (
    LateBiasConvolution,
    LateBiasLinear,
    LateBiasTransposedConvolution,
    LateBiasTransposedLinear,
    become,
)
from makespan.slapo.layouts import (
    PARTIAL,
    Blocks,
    Layout,
    Ranks,
    Sharding,
    TensorShard,
    block_sizes,
    describe_blocks,
    partition,
    set_sharding,
    sharding_of,
)
from makespan.slapo.rewriting import check_not_fused
from makespan.slapo.schedule import Primitive, carry_tags, check_without_hooks, register_primitive
from makespan.training import refuse_plain_clipping

if TYPE_CHECKING:
    from makespan.slapo.schedule import Schedule


# --- Vocabularies ---


class VocabularyPart(nn.Module):
    """An embedding that holds the rows from ``first_row`` on; other ids of the vocabulary give zeros."""

    first_row = 0
    n_rows = 0

    if TYPE_CHECKING:
        weight: nn.Parameter
        num_embeddings: int
        padding_idx: int | None
        sparse: bool

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as of the whole layer
        """Look up the ids whose rows this process holds."""
        is_known = (input >= 0) & (input < self.n_rows)  # the whole layer rejects other ids, too
        torch._assert_async(is_known.all(), f"embedding: an id is outside of the {self.n_rows} rows")
        is_own = (input >= self.first_row) & (input < self.first_row + self.num_embeddings)
        own = torch.where(is_own, input - self.first_row, 0)
        rows = F.embedding(own, self.weight, self.padding_idx, sparse=self.sparse)
        return rows * is_own.unsqueeze(-1).to(rows.dtype)


def pad_vocabulary(model: nn.Module, paths: Sequence[str], multiple: int) -> int:
    """Enlarge a vocabulary so that it divides among processes; call it before scheduling.

    The new rows are zero. No id refers to them, and the loss must ignore the logits that they add.

    Parameters
    ----------
    model
        Any model, on any device; it is changed.
    paths
        All its modules with a row per token: embeddings, and linear layers that return logits. Tied
        parameters among them stay tied.
    multiple
        The new size is a multiple of it; Megatron-LM takes 128 times the number of processes.

    Returns
    -------
    The new size.

    Raises
    ------
    PathError
        There is no such module; also a `KeyError`.
    ArgumentError
        A module is not an embedding or linear layer, sizes differ, or ``multiple`` is less than one; also a
        `ValueError`. The model has not changed.
    ConflictError
        A module is already sharded; also a `RuntimeError`.
    """
    layers: list[tuple[str, nn.Embedding | nn.Linear]] = []
    for path in paths:
        try:
            layer = model.get_submodule(path)
        except AttributeError as error:
            raise PathError(f"pad_vocabulary: no module {path!r}; {error}") from None
        if not isinstance(layer, nn.Embedding | nn.Linear):
            raise ArgumentError(
                f"pad_vocabulary: {path!r} is a {type(layer).__name__}; expected an embedding or a linear "
                "layer"
            )
        if sharding_of(layer).tensors:
            raise ConflictError(f"pad_vocabulary: {path!r} is already sharded; pad before sharding")
        layers.append((path, layer))
    sizes = {len(layer.weight) for _, layer in layers}
    if len(sizes) != 1 or multiple < 1:
        sizes_text = ", ".join(f"{path!r} with {len(layer.weight)}" for path, layer in layers) or "no path"
        raise ArgumentError(
            f"pad_vocabulary: {sizes_text} to a multiple of {multiple}; expected layers of one "
            "size, and a multiple >= 1"
        )
    missing = -sizes.pop() % multiple
    padded: dict[int, nn.Parameter] = {}  # by the id of the old parameter, so that ties stay
    for _, table in layers:
        for name, old in list(table.named_parameters(recurse=False)):
            if id(old) not in padded:
                rows = torch.cat([old.detach(), old.new_zeros(missing, *old.shape[1:])])
                padded[id(old)] = nn.Parameter(rows, old.requires_grad)
                vars(padded[id(old)]).update(vars(old))
            setattr(table, name, padded[id(old)])
        size = len(table.weight)
        if isinstance(table, nn.Embedding):
            table.num_embeddings = size
        else:
            table.out_features = size
    return size


# --- Rules per layer ---
#
# A rule maps a `ShardRequest`, a tensor of a layer to cut, to a `ShardEffect`, the changes of the layer that
# keep its forward correct: sizes that it reads, another class, and the layout of its output. Users add rules
# for their layers.


@dataclass(frozen=True, slots=True)
class ShardRequest:
    """A tensor to cut, with checked name, axis and size.

    Parameters
    ----------
    module, path
        The layer, and its path in the model.
    name, axis, groups
        Parameter or buffer, its axis from zero on, and the blocks of the axis that are cut separately: the
        number of equal ones, or the size of each.
    local
        Size of the axis on each process.
    ranks
        The processes that share the layer.
    """

    module: Any
    path: str
    name: str
    axis: int
    groups: Blocks
    local: int
    ranks: Ranks

    def whole(self, attribute: str) -> Any:
        """Return the value of an attribute before the first tensor of the layer was cut."""
        return sharding_of(self.module).attributes.get(attribute, getattr(self.module, attribute))

    def __str__(self) -> str:
        """Return the text for messages."""
        return f"shard({self.name!r}, {self.axis}) at {self.path!r} ({type(self.module).__name__})"


@dataclass(frozen=True, slots=True)
class ShardEffect:
    """Changes of a layer if one of its tensors is cut.

    Parameters
    ----------
    returns
        Layout of its output, None if that is not known.
    attributes
        New values of its attributes.
    together
        Tensors that must all be cut if one of them is.
    behaviour
        Class that the layer gets in front of its own class if several processes share it.
    """

    returns: Layout | None = None
    attributes: Mapping[str, object] = field(default_factory=dict)
    together: frozenset[str] = frozenset()
    behaviour: type[nn.Module] | None = None


ShardRule = Callable[[ShardRequest], ShardEffect]
_RULES: dict[type[nn.Module] | str, ShardRule] = {}
_BOTH = frozenset({"weight", "bias"})


def register_shard_rule(*layers: type[nn.Module] | str) -> Callable[[ShardRule], ShardRule]:
    """Return a decorator that registers a function as the rule of layers and their subclasses.

    Parameters
    ----------
    *layers
        Classes, or their qualified names with the module for libraries that may not be installed. A rule
        that was registered before is replaced.

    Returns
    -------
    A decorator that returns its function. The function gets a `ShardRequest` and returns a `ShardEffect`, or
    raises `ArgumentError` or `ShardError` before anything has changed.

    Raises
    ------
    ArgumentError
        No layer is named.
    """
    if not layers:
        raise ArgumentError("register_shard_rule got no layer; expected classes or their qualified names")

    def register(rule: ShardRule) -> ShardRule:
        _RULES.update(dict.fromkeys(layers, rule))
        return rule

    return register


def shard_effect(request: ShardRequest) -> ShardEffect:
    """Return the effect by the rule of a layer: that of its class, or of the nearest base class.

    A layer of torch without a rule is rejected: its forward reads the sizes that it was built with, and
    kernels that rely on them, such as those of an LSTM, read memory beyond a part of a weight.
    """
    for kind in type(request.module).__mro__:
        rule = _RULES.get(kind) or _RULES.get(f"{kind.__module__}.{kind.__qualname__}")
        if rule is None:
            continue
        effect = rule(request)
        # A behaviour replaces the forward, so no subclass may override it.
        between = type(request.module).__mro__[: type(request.module).__mro__.index(kind)]
        new = effect.behaviour is not None and not isinstance(request.module, effect.behaviour)
        if new and any("forward" in vars(kind) for kind in between):
            raise ShardError(
                f"{request}: the class overrides forward, which the rule would replace; "
                f"replace the layer by a {kind.__name__}"
            )
        return effect
    computes = next(kind for kind in type(request.module).__mro__ if "forward" in vars(kind))
    if computes is not nn.Module and computes.__module__.startswith("torch.nn."):
        raise ShardError(
            f"{request}: {computes.__name__} of torch.nn has no shard rule; expected a layer with a rule "
            f"(register_shard_rule({computes.__name__}) adds it), or a module of your own"
        )
    return ShardEffect()


def _columns(request: ShardRequest, axis: int, *attributes: str) -> ShardEffect:
    return ShardEffect(partition(axis), dict.fromkeys(attributes, request.local), _BOTH)


def _rows(request: ShardRequest, attribute: str, behaviour: type[nn.Module]) -> ShardEffect:
    """Cut along the inputs: each process computes a summand, and the bias is added after the sum."""
    has_bias = request.module.bias is not None
    return ShardEffect(PARTIAL, {attribute: request.local}, behaviour=behaviour if has_bias else None)


@register_shard_rule(nn.Linear)
def _linear(request: ShardRequest) -> ShardEffect:
    if request.name not in _BOTH:
        return ShardEffect()
    if request.axis == 0:
        return _columns(request, -1, "out_features")
    return _rows(request, "in_features", LateBiasLinear)


@register_shard_rule("transformers.pytorch_utils.Conv1D")
def _transposed_linear(request: ShardRequest) -> ShardEffect:
    if request.name == "bias" or (request.name == "weight" and request.axis == 1):
        return _columns(request, -1, "nf")
    return _rows(request, "nx", LateBiasTransposedLinear) if request.name == "weight" else ShardEffect()


@register_shard_rule(nn.Conv1d, nn.Conv2d, nn.Conv3d)
def _convolution(request: ShardRequest) -> ShardEffect:
    return _convolved(request, ("out_channels", "in_channels"), LateBiasConvolution)


@register_shard_rule(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
def _transposed_convolution(request: ShardRequest) -> ShardEffect:
    return _convolved(request, ("in_channels", "out_channels"), LateBiasTransposedConvolution)


def _convolved(request: ShardRequest, channels: tuple[str, str], behaviour: type[nn.Module]) -> ShardEffect:
    """Cut a kernel; ``channels`` names its first two axes."""
    axis, size = request.axis, request.ranks.size
    if request.name not in _BOTH:
        return ShardEffect()
    if request.name == "weight" and axis > 1:
        raise ArgumentError(f"{request}: axis {axis} belongs to the kernel; expected axis 0 or 1")
    # A grouped convolution is cut between groups: a process keeps whole groups with their inputs and outputs.
    if (groups := request.whole("groups")) > 1:
        if request.name == "weight" and axis == 1:
            raise ArgumentError(f"{request}: none of its {groups} groups can be cut; expected axis 0")
        if groups % size:
            raise ShardError(f"{request}: {groups} groups do not divide among {size} processes")
        names = ("in_channels", "out_channels", "groups")
        return ShardEffect(partition(1), {name: request.whole(name) // size for name in names}, _BOTH)
    name = "out_channels" if request.name == "bias" else channels[axis]
    if name == "out_channels":
        return _columns(request, 1, "out_channels")
    return _rows(request, "in_channels", behaviour)


@register_shard_rule(nn.Bilinear)
def _bilinear(request: ShardRequest) -> ShardEffect:
    if request.axis:
        raise ShardError(f"{request}: only outputs can be cut; expected axis 0")
    return _columns(request, -1, "out_features")


@register_shard_rule(nn.PReLU)
def _prelu(request: ShardRequest) -> ShardEffect:
    return ShardEffect(partition(1), {"num_parameters": request.local})


@register_shard_rule(
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
def _batch_norm(request: ShardRequest) -> ShardEffect:
    together = frozenset({"weight", "bias", "running_mean", "running_var"})
    return ShardEffect(partition(1), {"num_features": request.local}, together)


@register_shard_rule(nn.Embedding)
def _embedding(request: ShardRequest) -> ShardEffect:
    module, local = request.module, request.local
    if request.name != "weight":
        return ShardEffect()
    if request.axis == 1:
        if module.max_norm is not None:
            raise ShardError(f"{request}: a part of a row has another norm; max_norm must be unset")
        return ShardEffect(partition(-1), {"embedding_dim": local})
    if module.max_norm is not None or module.scale_grad_by_freq:
        raise ShardError(
            f"{request}: ids of other processes would count for the first row; max_norm and "
            "scale_grad_by_freq must be unset"
        )
    if request.groups not in (1, (request.whole("num_embeddings"),)):
        raise ArgumentError(f"{request}: a process holds consecutive rows; expected groups=1")
    first, padding = request.ranks.rank * local, request.whole("padding_idx")
    is_own = padding is not None and first <= padding < first + local
    attributes = {
        "num_embeddings": local,
        "first_row": first,
        "n_rows": request.whole("num_embeddings"),
        "padding_idx": padding - first if is_own else None,
    }
    return ShardEffect(PARTIAL, attributes, behaviour=VocabularyPart)


# --- Primitive ---

CLIPPING = "makespan.slapo.clip_grad_norm(schedule, max_norm)"
"""Call that clips gradients by the norm of the whole model, for messages."""


@dataclass(frozen=True, slots=True)
class TiedShard:
    """The part that all tensors of a tie share, and the path at which it was cut."""

    path: str
    parameter: nn.Parameter
    shard: TensorShard


OVER = ("tensor", "context", "experts")
"""Kinds of parallelism whose processes an exchange may join."""
_DEALT = ("tensor", "experts", "context")
"""Kinds of parallelism over which tensors are dealt out, in the order of their parts."""


def ranks_of(sch: Schedule, over: str = "tensor") -> Ranks:
    """Return the processes that share the modules of a schedule, its sequences, or its experts."""
    if over == "tensor":
        return Ranks(sch.rank, sch.world_size, sch.group)
    return sch.metadata.context if over == "context" else sch.metadata.experts


def groups_of(sch: Schedule) -> dict[str, Ranks]:
    """Return the groups of several processes that this one exchanges anything with, each of them once."""
    groups = {over: ranks for over in OVER if (ranks := ranks_of(sch, over)).size > 1}
    if {"tensor", "context"} <= groups.keys():
        ours, theirs = (
            dist.get_process_group_ranks(groups[over].group or dist.group.WORLD)
            for over in ("tensor", "context")
        )
        if ours == theirs:  # a plan that shares nothing but sequences
            del groups["tensor"]
    return groups


def kinds_of(over: str | Sequence[str], where: str) -> tuple[str, ...]:
    """Return the kinds of parallelism over which something is dealt out; reject others."""
    kinds = (over,) if isinstance(over, str) else tuple(over)
    if not kinds or kinds != tuple(kind for kind in _DEALT if kind in kinds):
        raise ArgumentError(f"{where}: over is {over!r}; expected some of {', '.join(_DEALT)}, in this order")
    return kinds


def part_of_all(sch: Schedule, kinds: Sequence[str]) -> tuple[int, int]:
    """Return the index of this process among those of some kinds, and their number."""
    rank, size = 0, 1
    for ranks in (ranks_of(sch, kind) for kind in kinds):
        rank, size = rank * ranks.size + ranks.rank, size * ranks.size
    return rank, size


def tie_of(sch: Schedule, name: str) -> tuple[str, ...] | None:
    """Return the tie that a parameter of a module belongs to, None if it is not tied."""
    full = f"{sch.path}.{name}" if sch.path else name
    return next((group for group in sch.metadata.ties if full in group), None)


@register_primitive()
class Shard(Primitive):
    """Split tensors of a module evenly along an axis; each process keeps one part."""

    @classmethod
    def name(cls) -> str:
        """Return ``shard``."""
        return "shard"

    @classmethod
    def apply(
        cls,
        sch: Schedule,
        tensor_name: str | Sequence[str],
        axis: int,
        groups: int | Sequence[int] = 1,
        unit: int | None = None,
        over: str | Sequence[str] = "tensor",
    ) -> None:
        """Replace each tensor by the part of this process.

        Parameters
        ----------
        tensor_name
            Parameter or buffer of this module itself, or several of them.
        axis
            Axis of the cut; negative values count from the end.
        groups
            Blocks of the axis that are cut separately: the number of equal ones (three if queries, keys and
            values are one tensor), or their sizes if there are fewer keys and values than queries.
        unit
            Size of a unit that must not be cut, such as a head; 1 for none. None for the head size that an
            attribute of the owner gives, if outputs are whole heads.
        over
            ``tensor`` for the processes that share layers, ``experts`` for those of data parallelism that
            share experts, ``context`` for those of context parallelism; several, in this order, for all.
        """
        names = [tensor_name] if isinstance(tensor_name, str) else list(tensor_name)
        if (
            not names
            or len(set(names)) < len(names)
            or not all(isinstance(element, str) for element in names)
        ):
            raise KindError(
                f"shard of {sch.path!r}: got {short_repr(tensor_name)}; expected a name or several "
                "distinct names"
            )
        check_not_fused(sch, cls.name())
        blocks: Any = tuple(groups) if isinstance(groups, list | tuple) else groups
        # Plans make all checks before the first tensor or attribute changes.
        kinds = kinds_of(over, f"shard of {sch.path!r} ({type(sch.mod).__name__})")
        plans = [_plan_shard(sch, name, axis, blocks, unit, kinds) for name in names]
        sharding = sharding_of(sch.mod)
        for plan in plans:
            sharding = _sharding_after(sch, sharding, plan)
        # No check below this line: nothing may fail once the first tensor is cut.
        for plan in plans:
            _replace_by_part(sch, plan)
        if part_of_all(sch, kinds)[1] > 1:
            for behaviour in {
                plan_behaviour for plan in plans if (plan_behaviour := plan.effect.behaviour) is not None
            }:
                if not isinstance(sch.mod, behaviour):
                    become(sch.mod, behaviour)
        for plan in plans:
            for name, value in plan.effect.attributes.items():
                setattr(sch.mod, name, value)
        set_sharding(sch.mod, sharding)


@dataclass(frozen=True, slots=True)
class _Plan:
    """A tensor to cut, after all checks."""

    name: str
    tensor: Tensor
    shard: TensorShard
    effect: ShardEffect
    tied: TiedShard | None


def _plan_shard(
    sch: Schedule, name: str, axis: int, groups: Blocks, unit: int | None, over: tuple[str, ...]
) -> _Plan:
    """Check the cut of one tensor; nothing changes."""
    where = f"shard of {sch.path!r} ({type(sch.mod).__name__})"
    rank, n_parts = part_of_all(sch, over)
    tensors = dict(sch.mod.named_parameters(recurse=False)) | dict(sch.mod.named_buffers(recurse=False))
    if name not in tensors:
        is_none = name in {*sch.mod._parameters, *sch.mod._buffers}
        why = "it is None" if is_none else close_names(name, tensors)
        raise MemberError(f"{where}: no parameter or buffer {name!r}; {why}")
    tensor = tensors[name]
    known = sharding_of(sch.mod).tensors.get(name)
    if known is not None:
        raise ConflictError(
            f"{where}: {name!r} is sharded on axis {known.axis} already; {sch.conflict('shard')}"
        )
    if not _is_number(axis) or not -tensor.dim() <= axis < tensor.dim():
        raise ArgumentError(
            f"{where}: axis {axis!r} of {name!r}, whose shape is {tuple(tensor.shape)}; "
            + (
                f"expected {-tensor.dim()} to {tensor.dim() - 1}"
                if tensor.dim()
                else "a scalar cannot be cut"
            )
        )
    if n_parts > 1:
        check_without_hooks(tensor, name, where)
    axis %= tensor.dim()
    size = tensor.shape[axis]
    if isinstance(groups, tuple):
        if not groups or not all(_is_number(size) and size > 0 for size in groups) or sum(groups) != size:
            raise ArgumentError(
                f"{where}: groups are {short_repr(list(groups))}; expected sizes > 0 that add up to {size}, "
                f"the size of axis {axis} of {name!r}"
            )
        if wrong := [size for size in groups if size % n_parts]:
            raise ShardError(
                f"{where}: axis {axis} of {name!r} has a block of size {wrong[0]}, which does not divide "
                f"among {n_parts} processes; expected multiples of {n_parts}"
            )
    elif not _is_number(groups) or groups < 1:
        raise ArgumentError(
            f"{where}: groups is {short_repr(groups)}; expected a number >= 1, or the sizes of blocks"
        )
    elif size % (n_parts * groups):
        blocks = f" in {groups} groups" if groups > 1 else ""
        raise ShardError(
            f"{where}: axis {axis} of {name!r} has size {size}, which{blocks} does not divide among "
            f"{n_parts} processes; expected a multiple of {n_parts * groups}; pad the tensor"
        )
    shard = TensorShard(tuple(tensor.shape), axis, groups, rank, n_parts, over)
    # Processes of several kinds are no group, but a rule only asks for the number of this one.
    ranks = ranks_of(sch, over[0]) if len(over) == 1 else Ranks(rank, n_parts, None)
    request = ShardRequest(sch.mod, sch.path, name, axis, groups, tensor.shape[axis] // n_parts, ranks)
    effect = shard_effect(request)
    if effect.returns is not None and over != ("tensor",):
        raise ArgumentError(
            f"{where}: {type(sch.mod).__name__} is shared over 'tensor' only, not {over[-1]!r}"
        )
    if effect.returns is not None and effect.returns.kind == "partition":
        _check_units(sch, name, block_sizes(groups, size), unit, where)
    # All members of a tie share one part, so a later one must be cut like the first.
    group = tie_of(sch, name)
    tied_shards: dict[tuple[str, ...], TiedShard] = sch.metadata.slots["shard"]
    tied = None if group is None else tied_shards.get(group)
    if tied is not None and tied.shard != shard:
        raise ShardError(
            f"{where}: {name!r} is tied to {tied.path!r}, which is sharded on axis {tied.shard.axis} to "
            f"{tied.shard.shape}, in {describe_blocks(tied.shard.groups)}; this would be axis {shard.axis}, "
            f"{shard.shape}, in {describe_blocks(shard.groups)}; shard both in the same way"
        )
    return _Plan(name, tensor, shard, effect, tied)


_HEAD_SIZES = ("head_dim", "head_size", "attention_head_size", "key_value_proj_dim")


def _check_units(sch: Schedule, name: str, sizes: Sequence[int], unit: int | None, where: str) -> None:
    """Reject a cut through a head, which would mix two heads in attention, or fail when it runs."""
    if unit is None:
        owner = sch.parent.mod if sch.parent is not None else None
        named = [getattr(owner, attribute, None) for attribute in _HEAD_SIZES]
        unit = next((size for size in named if isinstance(size, int) and size > 1), 1)
        if any(size % unit for size in sizes):
            return  # outputs are not whole heads
    elif not _is_number(unit) or unit < 1:
        raise ArgumentError(f"{where}: unit is {short_repr(unit)}; expected an integer >= 1, or None")
    for size in sizes:
        if size % unit or size // unit % sch.world_size:
            raise ShardError(
                f"{where}: {name!r} has {size / unit:g} heads or units of {unit}, which do not divide among "
                f"{sch.world_size} processes; use a number of processes that divides them, or unit=1 "
                "to cut through them"
            )


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _sharding_after(sch: Schedule, before: Sharding, plan: _Plan) -> Sharding:
    """Return the sharding after a plan; reject a plan that contradicts the sharding before."""
    effect, where = plan.effect, f"shard of {sch.path!r} ({type(sch.mod).__name__})"
    returns = effect.returns
    if returns is not None and returns.kind == "partition":
        returns = replace(returns, groups=plan.shard.groups)
    # All cuts of a layer must agree on the layout of its output, and a sync before them relied on another
    # one.
    if returns is not None and before.computes not in (None, returns):
        raise ConflictError(
            f"{where}: with {plan.name!r} cut on axis {plan.shard.axis} it returns {returns}, but "
            f"{before.computes} by earlier cuts; {sch.conflict('shard')}"
        )
    if returns is not None and before.computes is None and before.returns is not None:
        raise ConflictError(
            f"{where}: its output was synchronised as {before.returns} before the shard made it "
            f"{returns}; shard before sync; {sch.conflict('sync')}"
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


def _replace_by_part(sch: Schedule, plan: _Plan) -> None:
    """Replace a tensor by its part; members of a tie share one part."""
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
    carry_tags(whole, part)
    vars(part)["shard"] = shard
    sch.metadata.tags.add("shard")
    if shard.world_size > 1:
        sch.metadata.tags.add(refuse_plain_clipping([part], CLIPPING))
    setattr(sch.mod, plan.name, part)
    if (group := tie_of(sch, plan.name)) is not None:
        full = f"{sch.path}.{plan.name}".removeprefix(".")
        sch.metadata.slots["shard"].setdefault(group, TiedShard(full, part, shard))
