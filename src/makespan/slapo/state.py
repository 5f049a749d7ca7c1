"""The state of a scheduled model under the keys and shapes of the original one, whatever the group."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from makespan.slapo.errors import ArgumentError, ShardError, close_names
from makespan.slapo.layouts import Ranks, TensorShard, sharding_of
from makespan.slapo.schedule import carry_tags

if TYPE_CHECKING:
    from makespan.slapo.schedule import Schedule


_OWNERS = "owners of the state"


@dataclass(frozen=True, slots=True)
class _Owners:
    """Which stage of a pipeline has what of the state."""

    ranks: Ranks
    stage: Mapping[str, int]

    def is_elsewhere(self, key: str) -> bool:
        """Whether another stage has it, and this one has not."""
        return self.stage.get(key, self.ranks.rank) != self.ranks.rank


def note_owners(sch: "Schedule", ranks: Ranks, stages: Sequence[nn.Module]) -> None:
    """Remember that from now on a process has the state of its own stage only."""
    owned = {key: index for index in reversed(range(len(stages))) for key in stages[index].state_dict()}
    sch.metadata.slots[_OWNERS] = _Owners(ranks, owned)


def owners_of(sch: "Schedule") -> _Owners:
    """Return which stage of a pipeline has what; without stages everything is here."""
    found = dict.get(sch.metadata.slots, _OWNERS)
    return found if isinstance(found, _Owners) else _Owners(Ranks(0, 1, None), {})


def full_state_dict(sch: "Schedule") -> dict[str, Tensor]:
    """Return the whole state of a scheduled model; all processes of the group must call this.

    Parameters
    ----------
    sch
        Schedule of a whole model, built or not.

    Returns
    -------
    Tensors by the keys of the original model's ``state_dict``, in their original shapes, copies on their
    device. Every process has all of them, those of other stages of a pipeline too.

    Raises
    ------
    ArgumentError
        This is no root, or a parameter has no values yet; also a `ValueError`.
    """
    state: dict[str, Tensor] = {}
    owners = owners_of(sch)
    for key, module, name, tensor in _entries(sch):
        shard = sharding_of(module).tensors.get(name)
        if owners.is_elsewhere(key):
            state[key] = torch.empty(tensor.shape if shard is None else shard.orig_shape, dtype=tensor.dtype)
            continue
        if tensor.is_meta:
            raise ArgumentError(f"full_state_dict: {key!r} has no values; accepted: a built model")
        own = _local(tensor)
        state[key] = own.clone() if shard is None or shard.world_size == 1 else _gathered(sch, own, shard)
    if owners.ranks.size > 1:
        device = next((one.device for key, one in state.items() if not owners.is_elsewhere(key)), None)
        for key in [one for one in state if one in owners.stage]:
            state[key] = state[key].to(device)
            dist.broadcast(state[key], group=owners.ranks.group, group_src=owners.stage[key])
    return state


def load_full_state_dict(sch: "Schedule", state: Mapping[str, Tensor]) -> None:
    """Take the own parts of a whole state; parameters without values get them.

    Parameters
    ----------
    sch
        Schedule of a whole model; the number of processes may differ from that of the state's.
    state
        What `full_state_dict` returned, or the ``state_dict`` of the original model.

    Raises
    ------
    ArgumentError
        A key is missing or unknown; also a `ValueError`. Nothing is loaded then.
    ShardError
        A tensor has another shape than the original one; also a `RuntimeError`. Nothing is loaded then.
    """
    entries = list(_entries(sch))
    keys = {key for key, *_ in entries}
    if keys != state.keys():
        missing, unknown = sorted(keys - state.keys()), sorted(state.keys() - keys)
        found = [f"no {missing[0]!r} ({len(missing)} missing)"] if missing else []
        if unknown:
            found.append(f"{unknown[0]!r} ({len(unknown)} unknown; {close_names(unknown[0], keys)})")
        raise ArgumentError(f"load_full_state_dict: {', '.join(found)}; accepted: the keys of the model")
    for key, module, name, tensor in entries:
        shard = sharding_of(module).tensors.get(name)
        shape = tuple(tensor.shape) if shard is None else shard.orig_shape
        if tuple(state[key].shape) != shape:
            raise ShardError(
                f"load_full_state_dict: {key!r} has shape {tuple(state[key].shape)}; accepted: {shape}"
            )
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    owners = owners_of(sch)
    for key, module, name, tensor in entries:
        if tensor.is_meta and owners.is_elsewhere(key):
            continue
        shard = sharding_of(module).tensors.get(name)
        part = state[key] if shard is None else shard.part_of(state[key])
        _take(sch, module, name, tensor, part, made)


@torch.no_grad()
def _take(
    sch: "Schedule",
    module: nn.Module,
    name: str,
    tensor: Tensor,
    part: Tensor,
    made: dict[int, tuple[nn.Parameter, nn.Parameter]],
) -> None:
    if not tensor.is_meta:
        spread = _spread(tensor, part)
        tensor.copy_(spread)
    elif isinstance(tensor, nn.Parameter):
        if id(tensor) not in made:
            new = nn.Parameter(part.to(tensor.dtype, copy=True), tensor.requires_grad)
            carry_tags(tensor, new, sch.metadata.tags)
            made[id(tensor)] = tensor, new
        setattr(module, name, made[id(tensor)][1])
    else:
        setattr(module, name, part.to(tensor.dtype, copy=True))


def _entries(sch: "Schedule") -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Go through key, module, name and tensor of the state, in its order."""
    if sch.parent is not None:
        raise ArgumentError(f"the state of {sch.path!r}: accepted: the schedule of a whole model")
    for path, module in sch.mod.named_modules(remove_duplicate=False):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield f"{path}.{name}".removeprefix("."), module, name, parameter
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}".removeprefix("."), module, name, buffer


def _gathered(sch: "Schedule", own: Tensor, shard: TensorShard) -> Tensor:
    own = own.contiguous()
    parts = [torch.empty_like(own) for _ in range(shard.world_size)]
    dist.all_gather(parts, own, group=sch.group)
    return shard.whole_of(parts)


def _local(tensor: Tensor) -> Tensor:
    """Return what a process of the group has, of which data parallelism may have cut another part."""
    whole = getattr(tensor, "full_tensor", None)
    found: Tensor = tensor.detach() if whole is None else whole().detach()
    return found


def _spread(tensor: Tensor, part: Tensor) -> Tensor:
    """Cut a part like a tensor that data parallelism has cut."""
    from torch.distributed.tensor import DTensor, distribute_tensor  # takes long to load

    if isinstance(tensor, DTensor):
        return distribute_tensor(part.to(tensor.device), tensor.device_mesh, tensor.placements)
    return part
