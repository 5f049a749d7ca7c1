"""State of a scheduled model under the keys and shapes of the original one, for any group of processes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from makespan.slapo.errors import ArgumentError, ShardError, close_names
from makespan.slapo.layouts import Ranks, sharding_of
from makespan.slapo.schedule import carry_tags, check_without_hooks
from makespan.slapo.sharding import ranks_of

if TYPE_CHECKING:
    from makespan.slapo.schedule import Schedule


_OWNERS = "owners of the state"


@dataclass(frozen=True, slots=True)
class _Owners:
    """The process of a pipeline that holds each entry of the state."""

    ranks: Ranks
    place: Mapping[str, int]

    def is_elsewhere(self, key: str) -> bool:
        """Return True if another process holds the entry."""
        return self.place.get(key, self.ranks.rank) != self.ranks.rank


def record_owners(sch: "Schedule", ranks: Ranks, stages: Sequence[nn.Module], places: Sequence[int]) -> None:
    """Record that each process holds the state of its stages only, given the process of each stage."""
    # Backwards, so that an entry in several stages belongs to the first of them.
    owned: dict[str, int] = {}
    for index in reversed(range(len(stages))):
        owned |= dict.fromkeys(stages[index].state_dict(), places[index])
    sch.metadata.slots[_OWNERS] = _Owners(ranks, owned)


def owners_of(sch: "Schedule") -> _Owners:
    """Return the owners of the state; without stages this process owns all of it."""
    # dict.get bypasses __missing__ of the slots, which would look for a primitive of that name.
    owners = dict.get(sch.metadata.slots, _OWNERS)
    return owners if isinstance(owners, _Owners) else _Owners(Ranks(0, 1, None), {})


def full_state_dict(sch: "Schedule") -> dict[str, Tensor]:
    """Return the whole state of a scheduled model. All processes of the group must call it.

    Parameters
    ----------
    sch
        Schedule of a whole model, built or not.

    Returns
    -------
    Copies of tensors on their device, by the keys and in the shapes of the original model's ``state_dict``.
    Every process gets all of them, including those of other pipeline stages.

    Raises
    ------
    ArgumentError
        The schedule is not that of a whole model, or a parameter has no values yet; also a `ValueError`.
    """
    state: dict[str, Tensor] = {}
    owners = owners_of(sch)
    for key, module, name, tensor in state_entries(sch):
        shard = sharding_of(module).tensors.get(name)
        if owners.is_elsewhere(key):
            state[key] = torch.empty(tensor.shape if shard is None else shard.orig_shape, dtype=tensor.dtype)
            continue
        if tensor.is_meta:
            raise ArgumentError(f"full_state_dict: {key!r} has no values; build the model first")
        # Data parallelism may have cut the part of this process again; full_tensor reverses that.
        full_tensor = getattr(tensor, "full_tensor", None)
        local: Tensor = tensor.detach() if full_tensor is None else full_tensor().detach()
        if shard is None or shard.world_size == 1:
            state[key] = local.clone()
        else:
            held = local.contiguous().unsqueeze(0)  # parts in their order, the last kind first
            for ranks in (ranks_of(sch, over) for over in reversed(shard.over)):
                if ranks.size > 1:
                    parts = [torch.empty_like(held) for _ in range(ranks.size)]
                    dist.all_gather(parts, held, group=ranks.group)
                    held = torch.cat(parts)
            state[key] = shard.whole_of(list(held))
    if owners.ranks.size > 1:
        device = next((tensor.device for key, tensor in state.items() if not owners.is_elsewhere(key)), None)
        for key in [key for key in state if key in owners.place]:
            state[key] = state[key].to(device)
            dist.broadcast(state[key], group=owners.ranks.group, group_src=owners.place[key])
    return state


def load_full_state_dict(sch: "Schedule", state: Mapping[str, Tensor]) -> None:
    """Load the parts of this process from a whole state, also into parameters without values.

    Parameters
    ----------
    sch
        Schedule of a whole model; its number of processes may differ from that which saved the state.
    state
        Result of `full_state_dict`, or the ``state_dict`` of the original model.

    Raises
    ------
    ArgumentError
        A key is missing or unknown; also a `ValueError`. Nothing is loaded then.
    ShardError
        A tensor has another shape than the original one; also a `RuntimeError`. Nothing is loaded then.
    """
    entries = list(state_entries(sch))
    keys = {key for key, *_ in entries}
    if keys != state.keys():
        missing, unknown = sorted(keys - state.keys()), sorted(state.keys() - keys)
        faults = [f"no {missing[0]!r} ({len(missing)} missing)"] if missing else []
        if unknown:
            faults.append(f"{unknown[0]!r} ({len(unknown)} unknown; {close_names(unknown[0], keys)})")
        raise ArgumentError(f"load_full_state_dict: {', '.join(faults)}; expected the keys of the model")
    # Check all shapes before the first tensor changes.
    for key, module, name, tensor in entries:
        shard = sharding_of(module).tensors.get(name)
        shape = tuple(tensor.shape) if shard is None else shard.orig_shape
        if tuple(state[key].shape) != shape:
            raise ShardError(
                f"load_full_state_dict: {key!r} has shape {tuple(state[key].shape)}; expected {shape}"
            )
        if tensor.is_meta:
            check_without_hooks(tensor, key, "load_full_state_dict")
    loaded: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    owners = owners_of(sch)
    for key, module, name, tensor in entries:
        if tensor.is_meta and owners.is_elsewhere(key):
            continue
        shard = sharding_of(module).tensors.get(name)
        part = state[key] if shard is None else shard.part_of(state[key])
        _load_tensor(module, name, tensor, part, loaded)


@torch.no_grad()
def _load_tensor(
    module: nn.Module,
    name: str,
    tensor: Tensor,
    part: Tensor,
    loaded: dict[int, tuple[nn.Parameter, nn.Parameter]],
) -> None:
    if not tensor.is_meta:
        from torch.distributed.tensor import DTensor, distribute_tensor  # takes long to load

        if isinstance(tensor, DTensor):  # data parallelism has cut the tensor: cut the part in the same way
            part = distribute_tensor(part.to(tensor.device), tensor.device_mesh, tensor.placements)
        tensor.copy_(part)
    elif isinstance(tensor, nn.Parameter):
        if id(tensor) not in loaded:
            new = nn.Parameter(part.to(tensor.dtype, copy=True), tensor.requires_grad)
            carry_tags(tensor, new)
            loaded[id(tensor)] = tensor, new
        setattr(module, name, loaded[id(tensor)][1])
    else:
        setattr(module, name, part.to(tensor.dtype, copy=True))


def state_entries(sch: "Schedule") -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Iterate over key, module, name and tensor of each entry of the state, in order."""
    if sch.parent is not None:
        raise ArgumentError(f"the state of {sch.path!r}: expected the schedule of a whole model")
    for path, module in sch.mod.named_modules(remove_duplicate=False):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield f"{path}.{name}".removeprefix("."), module, name, parameter
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}".removeprefix("."), module, name, buffer
