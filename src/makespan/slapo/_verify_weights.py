"""The weights under which original and scheduled model are compared: the same, and nobody else's."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from makespan.slapo._collectives import Ranks
from makespan.slapo._consolidate import consolidate
from makespan.slapo._copies import copy_module
from makespan.slapo._layouts import TensorShard, sharding_of
from makespan.slapo._schedule import Schedule

__all__ = ["ORIGIN", "Original", "Weights", "everywhere", "filled", "from_first", "same_weights"]

ORIGIN = "makespan_verified_name"
"""Tag of a parameter: its name when the verification began, which it keeps wherever it goes."""
_SPREAD = 0.1
_WHOLE_NUMBERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_Object = TypeVar("_Object")


def everywhere(ranks: Ranks, value: _Object) -> list[_Object]:
    """Return what all processes of the group have, in their order."""
    if ranks.size == 1:
        return [value]
    found: list[Any] = [None] * ranks.size
    dist.all_gather_object(found, value, group=ranks.group)
    return found


def from_first(ranks: Ranks, value: _Object) -> _Object:
    """Return what the first process of the group has."""
    if ranks.size == 1:
        return value
    held: list[Any] = [value]
    dist.broadcast_object_list(held, group=ranks.group, group_src=0)
    given: _Object = held[0]
    return given


class Original:
    """A model as it was when a verification began: it shares the parameters, and has buffers of its own."""

    def __init__(self, module: nn.Module) -> None:
        self._seen: list[tuple[str, nn.Parameter, int, int]] = []
        self._begun: list[nn.Parameter] = []
        self.module = copy_module(module, _sharing)
        for (name, one), (_, begun) in zip(
            self.module.named_parameters(), module.named_parameters(), strict=True
        ):
            setattr(begun, ORIGIN, name)
            self._begun.append(begun)
            self._seen.append((name, one, one._version, _checksum(one)))

    def forget(self, scheduled: nn.Module) -> None:
        """Take the tags away again."""
        for one in (*self._begun, *scheduled.parameters()):
            vars(one).pop(ORIGIN, None)

    def changed(self) -> list[str]:
        """Return the parameters whose values somebody has changed in place."""
        return [
            name
            for name, one, version, checksum in self._seen
            if one._version != version or _checksum(one) != checksum
        ]


def _sharing(tensor: Tensor) -> Tensor:
    """Return a parameter with the same memory, or a copy of a buffer."""
    if isinstance(tensor, nn.Parameter):
        return _like(tensor, tensor.detach())
    return tensor.detach().clone()


def _like(old: nn.Parameter, values: Tensor) -> nn.Parameter:
    new = nn.Parameter(values, requires_grad=old.requires_grad)
    vars(new).update({tag: one for tag, one in vars(old).items() if not tag.startswith("_")})
    return new


def _checksum(tensor: Tensor) -> int:
    if tensor.is_meta:
        return 0
    values = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    return int(values.contiguous().view(_WHOLE_NUMBERS[values.element_size()]).sum())


@dataclass(slots=True)
class Weights:
    """Copies of both models with the same weights, and which parameter is which.

    Parameters
    ----------
    original, scheduled
        The copies.
    origin
        Name of the original parameter by that of the scheduled one, and how the latter is cut out of it.
    own, lost
        Parameters that only the scheduled model has, which keep their values, or only the original one.
    differed
        Parameters and buffers whose values were not the same on all processes.
    buffers
        How buffers are cut out of those of the original model.
    """

    original: nn.Module
    scheduled: nn.Module
    origin: dict[str, tuple[str, TensorShard | None]] = field(default_factory=dict)
    own: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    differed: list[str] = field(default_factory=list)
    buffers: dict[str, TensorShard] = field(default_factory=dict)


def filled(module: nn.Module, ranks: Ranks, seed: int, device: torch.device) -> nn.Module:
    """Return a module with values for parameters that exist by shape alone, as a build would give them."""
    if not any(one.is_meta for one in (*module.parameters(), *module.buffers())):
        return module
    own = copy_module(module, lambda tensor: tensor)
    consolidate(Schedule(own, group=ranks.group), seed=seed, device=device)
    return own


def same_weights(
    original: nn.Module, scheduled: nn.Module, ranks: Ranks, device: torch.device, seed: int
) -> Weights:
    """Copy both models, with the weights of the first process of the group.

    Parameters that are all the same number, such as biases of zero, are moved off it: else nobody would see
    that one is missing. All processes of the group must come here.
    """
    sources = dict(original.named_parameters())
    origin, own = _counterparts(sources, scheduled)
    kept = {name for name, _ in origin.values()}
    found = Weights(original, scheduled, origin, own, [name for name in sources if name not in kept])
    names = {id(one): name for name, one in (*sources.items(), *original.named_buffers())}
    prepared: dict[str, Tensor] = {}

    def prepare(tensor: Tensor) -> Tensor:
        name, values = names[id(tensor)], tensor.detach()
        if ranks.size > 1 and getattr(tensor, "shard", None) is None:
            values = _of_first(ranks, values, lambda: found.differed.append(name))
        if name in kept or name.endswith(("running_mean", "running_var")):
            values = _off_constant(values, seed, name)
        values = values.to(device)
        if not isinstance(tensor, nn.Parameter):
            prepared[name] = values.clone()
            return values.clone()
        prepared[name] = values
        return _like(tensor, values)

    found.original = copy_module(original, prepare)
    shards = _buffer_shards(scheduled)
    places = {id(one): name for name, one in (*scheduled.named_parameters(), *scheduled.named_buffers())}

    def take(tensor: Tensor) -> Tensor:
        name = places[id(tensor)]
        if isinstance(tensor, nn.Parameter):
            if name not in origin:
                return _like(tensor, tensor.detach().to(device))
            source, shard = origin[name]
            values = prepared[source] if shard is None else shard.part_of(prepared[source])
            return _like(tensor, values.to(tensor.dtype))
        whole = prepared.get(name)
        shard = _shard(tensor, shards.get(id(tensor)), whole)
        if whole is None or (shard is None and whole.shape != tensor.shape):
            return tensor.detach().to(device, copy=True)
        if shard is not None:
            found.buffers[name] = shard
        return (whole if shard is None else shard.part_of(whole)).to(tensor.dtype, copy=True)

    found.scheduled = copy_module(scheduled, take)
    return found


def _counterparts(
    sources: dict[str, nn.Parameter], scheduled: nn.Module
) -> tuple[dict[str, tuple[str, TensorShard | None]], list[str]]:
    """Say of which original parameter each scheduled one is a part: by its tag, or else by its name."""
    origin: dict[str, tuple[str, TensorShard | None]] = {}
    own = []
    for name, one in scheduled.named_parameters():
        source = getattr(one, ORIGIN, name)
        whole = sources.get(source)
        shard = _shard(one, getattr(one, "shard", None), whole)
        if whole is None or (shard is None and whole.shape != one.shape):
            own.append(name)
        else:
            origin[name] = (source, shard)
    return origin, own


def _shard(part: Tensor, shard: TensorShard | None, whole: Tensor | None) -> TensorShard | None:
    """Return how a tensor is cut out of the original one, None if it has been its size already."""
    if shard is None or whole is None or part.shape == whole.shape or shard.orig_shape != tuple(whole.shape):
        return None
    return shard


def _buffer_shards(module: nn.Module) -> dict[int, TensorShard]:
    found = {}
    for one in module.modules():
        for name, shard in sharding_of(one).tensors.items():
            if (buffer := one._buffers.get(name)) is not None:
                found[id(buffer)] = shard
    return found


def _of_first(ranks: Ranks, values: Tensor, note: Callable[[], None]) -> Tensor:
    """Return the values of the first process; the own tensor where they are the same."""
    received = values.clone(memory_format=torch.contiguous_format)
    dist.broadcast(received, group=ranks.group, group_src=0)
    if torch.equal(received.nan_to_num(), values.nan_to_num()):
        return values
    note()
    return received


def _off_constant(values: Tensor, seed: int, name: str) -> Tensor:
    """Move a tensor whose elements are all one number off it; variances stay positive."""
    flat = values.flatten()
    if not values.is_floating_point() or values.numel() == 0 or bool(flat[0] != flat[-1]):
        return values
    if bool((flat != flat[0]).any()):
        return values
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    drawn = torch.rand(values.shape, generator=generator, dtype=torch.float32)
    return values + (_SPREAD + _SPREAD * drawn).to(values)
