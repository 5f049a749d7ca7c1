"""Copies of the original and of the scheduled model that start from the same weights."""

import copy
import functools
import types
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.nn.utils.parametrize import is_parametrized

from makespan.slapo.building import consolidate
from makespan.slapo.graphs import TracedModule
from makespan.slapo.layouts import Ranks, TensorShard, sharding_of
from makespan.slapo.schedule import Schedule
from makespan.training.bits import word_sum_of

# --- Copies of modules ---
#
# `copy.deepcopy` does not suffice: it drops the hooks of a traced module, and a function that is attached to
# a module keeps calling the original module. Buffers and parameters also get values of our own.

_TABLES = ("_parameters", "_buffers", "_modules")
_REBUILT = ("_graph", "_compiled_call_impl")
_Mapped = Callable[[Tensor], Tensor]


def copy_module(module: nn.Module, tensor_of: Callable[[Tensor], Tensor]) -> nn.Module:
    """Return a module of the same structure with other parameters and buffers.

    Graphs are copied, and random generators with their state. Functions and process groups are shared, except
    functions and methods that refer to a module of the original: the copy gets its own.

    Parameters
    ----------
    module
        The original; it does not change.
    tensor_of
        Function that is called once per parameter and buffer and returns the one of the copy; ties stay.
    """
    return _Copier(tensor_of).copy(module)


class _Copier:
    """State of one copy: copied objects by the id of the original."""

    def __init__(self, tensor_of: _Mapped) -> None:
        self._tensor_of = tensor_of
        self._done: dict[int, Any] = {}
        self._kept: list[Any] = []  # originals are kept alive, so that no id is reused

    def copy(self, root: nn.Module) -> nn.Module:
        """Copy a module and all modules below it."""
        # Empty objects first, then their content: modules, hooks and wrappers refer to each other in circles.
        modules = list(root.modules())
        for module in modules:
            self._remember(module, type(module).__new__(type(module)))
        for module in modules:
            for table in ("_parameters", "_buffers"):
                for tensor in getattr(module, table).values():
                    if tensor is not None and id(tensor) not in self._done:
                        self._remember(tensor, self._tensor_of(tensor))
        for module in modules:
            self._fill(module, self._done[id(module)])
        for module in reversed(modules):
            if isinstance(module, fx.GraphModule):
                new = self._done[id(module)]  # each traced module has a class of its own
                type(new).__name__ = type(module).__name__
                new.graph = copy.deepcopy(module.graph)
                if isinstance(module, TracedModule):
                    new.after_copy()
            # Compiled modules restore themselves; parametrized ones have all in their attributes.
            if "__getstate__" in vars(type(module)) and not is_parametrized(module):
                get_state: Callable[[], dict[str, Any]] = module.__getstate__
                self._done[id(module)].__setstate__(self._mapped(get_state()))
        copied: nn.Module = self._done[id(root)]
        return copied

    def _remember(self, old: Any, new: Any) -> None:
        self._done[id(old)] = new
        self._kept.append(old)

    def _fill(self, old: nn.Module, new: nn.Module) -> None:
        for name, value in vars(old).items():
            if name in _TABLES:
                mapped = {
                    key: None if entry is None else self._done[id(entry)] for key, entry in value.items()
                }
                vars(new)[name] = type(value)(mapped)
            elif name in _REBUILT:
                continue
            else:
                mapped = self._mapped(value)
                is_own = mapped is value and isinstance(value, dict | list | set)
                vars(new)[name] = value.copy() if is_own else mapped

    def _mapped(self, value: Any) -> Any:
        """Return the counterpart of a value in the copy, the value itself if it refers to nothing copied."""
        if id(value) in self._done:
            return self._done[id(value)]
        match value:
            case torch.Generator():
                self._remember(value, value.clone_state())
                return self._done[id(value)]
            case Tensor():  # no parameter and no buffer, and a forward may change it
                self._remember(value, value.detach().clone().requires_grad_(value.requires_grad))
                return self._done[id(value)]
            case types.MethodType():
                return types.MethodType(value.__func__, self._mapped(value.__self__))
            case functools.partial():
                keywords = {key: self._mapped(element) for key, element in value.keywords.items()}
                return functools.partial(self._mapped(value.func), *map(self._mapped, value.args), **keywords)
            case types.FunctionType():
                return self._function(value)
            case dict():
                mapped = {key: self._mapped(element) for key, element in value.items()}
                if not _is_other(mapped, value):
                    return value
                new = value.copy()  # of the same class, in the same order
                new.update(mapped)
                return new
            case list() | set() | tuple():
                parts = list(map(self._mapped, value))
                if all(element is other for element, other in zip(parts, value, strict=True)):
                    return value
                return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        if callable(value) and not isinstance(value, type) and hasattr(value, "__dict__"):
            return self._object(value)
        return value

    def _object(self, value: Any) -> Any:
        """Copy a callable object, such as a wrapper of a forward, if it refers to something copied."""
        self._remember(value, value)  # it may refer to itself
        mapped = {name: self._mapped(attribute) for name, attribute in vars(value).items()}
        if not _is_other(mapped, vars(value)):
            return value
        new = object.__new__(type(value))
        vars(new).update(mapped)
        self._done[id(value)] = new
        return new

    def _function(self, value: types.FunctionType) -> types.FunctionType:
        """Copy a function if its closure refers to something copied."""
        cells = value.__closure__ or ()
        if not cells:
            return value
        self._remember(value, value)  # a function may refer to itself
        held: list[Any] = []
        for cell in cells:
            try:
                held.append(cell.cell_contents)
            except ValueError:  # the variable has no value yet
                held.append(cell)
        mapped = [
            self._mapped(content) if content is not cell else cell
            for content, cell in zip(held, cells, strict=True)
        ]
        if all(content is other for content, other in zip(held, mapped, strict=True)):
            return value
        closure = tuple(
            cell if content is cell else types.CellType(content)
            for content, cell in zip(mapped, cells, strict=True)
        )
        new = types.FunctionType(
            value.__code__, value.__globals__, value.__name__, value.__defaults__, closure
        )
        new.__kwdefaults__, new.__qualname__ = value.__kwdefaults__, value.__qualname__
        vars(new).update(vars(value))
        self._done[id(value)] = new
        return new


def _is_other(mapped: dict[Any, Any], value: dict[Any, Any]) -> bool:
    return any(mapped[key] is not element for key, element in value.items())


# --- Weights ---

ORIGIN = "makespan_verified_name"
"""Tag of a parameter: its name when the verification began; it follows the parameter through primitives."""
_SPREAD = 0.1


class Original:
    """Copy of a model when a verification began: it shares parameter memory and has its own buffers."""

    def __init__(self, module: nn.Module) -> None:
        self._seen: list[tuple[str, nn.Parameter, int, int]] = []
        self._begun: list[nn.Parameter] = []
        self.module = copy_module(module, _with_shared_memory)
        for (name, copied), (_, begun) in zip(
            self.module.named_parameters(), module.named_parameters(), strict=True
        ):
            setattr(begun, ORIGIN, name)
            self._begun.append(begun)
            self._seen.append((name, copied, copied._version, _checksum(copied)))

    def forget(self, scheduled: nn.Module) -> None:
        """Remove the tags."""
        for parameter in (*self._begun, *scheduled.parameters()):
            vars(parameter).pop(ORIGIN, None)

    def changed(self) -> list[str]:
        """Return the parameters whose values have changed in place."""
        # The version misses changes in place through .data, hence the checksum.
        return [
            name
            for name, parameter, version, checksum in self._seen
            if parameter._version != version or _checksum(parameter) != checksum
        ]


def _with_shared_memory(tensor: Tensor) -> Tensor:
    """Return a parameter with the same memory, or a copy of a buffer."""
    if isinstance(tensor, nn.Parameter):
        return _parameter_like(tensor, tensor.detach())
    return tensor.detach().clone()


def _parameter_like(old: nn.Parameter, values: Tensor) -> nn.Parameter:
    new = nn.Parameter(values, requires_grad=old.requires_grad)
    vars(new).update({tag: tag_value for tag, tag_value in vars(old).items() if not tag.startswith("_")})
    return new


def _checksum(tensor: Tensor) -> int:
    return 0 if tensor.is_meta else int(word_sum_of([tensor]))


@dataclass(slots=True)
class Weights:
    """Copies of both models with the same weights, and the correspondence of their parameters.

    Parameters
    ----------
    original, scheduled
        The copies.
    origin
        Name of the original parameter by that of the scheduled one, and the shard that cuts one out of the
        other.
    added, lost
        Parameters of the scheduled model only, which keep their values, and of the original one only.
    differed
        Parameters and buffers whose values differed between processes.
    renewed
        Parameters of the scheduled model that came with values other than those of the original.
    buffers
        Shards that cut buffers out of those of the original model.
    """

    original: nn.Module
    scheduled: nn.Module
    origin: dict[str, tuple[str, TensorShard | None]] = field(default_factory=dict)
    added: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    differed: list[str] = field(default_factory=list)
    renewed: list[str] = field(default_factory=list)
    buffers: dict[str, TensorShard] = field(default_factory=dict)


def initialised(module: nn.Module, ranks: Ranks, seed: int, device: torch.device) -> nn.Module:
    """Return a module with values for parameters on ``meta``, as a build would initialise them."""
    if not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        return module
    copied = copy_module(module, lambda tensor: tensor)
    consolidate(Schedule(copied, group=ranks.group), seed=seed, device=device)
    return copied


def same_weights(
    original: nn.Module, scheduled: nn.Module, groups: Sequence[Ranks], device: torch.device, seed: int
) -> Weights:
    """Copy both models, with the weights of the first process of the groups, which cross each other.

    Parameters with equal elements, such as biases of zero, are moved off their value: otherwise a missing one
    would go unnoticed. All processes of the groups must call it.
    """
    sources = dict(original.named_parameters())
    origin, added = _counterparts(sources, scheduled)
    kept = {name for name, _ in origin.values()}
    weights = Weights(original, scheduled, origin, added, [name for name in sources if name not in kept])
    names = {id(tensor): name for name, tensor in (*sources.items(), *original.named_buffers())}
    prepared: dict[str, Tensor] = {}
    normalised = {
        id(table.weight)
        for table in original.modules()
        if isinstance(table, nn.Embedding | nn.EmbeddingBag) and table.max_norm is not None
    }  # a forward changes them

    # First the original gets its values, then each tensor of the scheduled model is cut out of them: so both
    # models agree whatever the processes held before, and shards fit together.
    def prepare(tensor: Tensor) -> Tensor:
        name, values = names[id(tensor)], tensor.detach()
        is_shared = any(ranks.size > 1 for ranks in groups)
        if is_shared and getattr(tensor, "shard", None) is None:
            received = values.clone(memory_format=torch.contiguous_format)
            for ranks in groups:
                if ranks.size > 1:
                    dist.broadcast(received, group=ranks.group, group_src=0)
            # Equal values need no second copy.
            if not torch.equal(received.nan_to_num(), values.nan_to_num()):
                weights.differed.append(name)
                values = received
        if name in kept or name.endswith(("running_mean", "running_var")):
            values = _perturbed_constant(values, seed, name)
        values = values.to(device)
        if not isinstance(tensor, nn.Parameter):
            prepared[name] = values.clone()
            return values.clone()
        prepared[name] = values.clone() if id(tensor) in normalised else values
        return _parameter_like(tensor, prepared[name].clone() if id(tensor) in normalised else values)

    weights.original = copy_module(original, prepare)
    shards: dict[int, TensorShard] = {}
    for module in scheduled.modules():
        for name, shard in sharding_of(module).tensors.items():
            if (buffer := module._buffers.get(name)) is not None:
                shards[id(buffer)] = shard
    places = {
        id(tensor): name for name, tensor in (*scheduled.named_parameters(), *scheduled.named_buffers())
    }

    def take(tensor: Tensor) -> Tensor:
        name = places[id(tensor)]
        if isinstance(tensor, nn.Parameter):
            if name not in origin:
                return _parameter_like(tensor, tensor.detach().to(device))
            source, shard = origin[name]
            if not _has_values_of(sources[source], shard, tensor):
                weights.renewed.append(name)
            values = prepared[source] if shard is None else shard.part_of(prepared[source])
            return _parameter_like(tensor, values.to(tensor.dtype))
        whole = prepared.get(name)
        shard = _shard(tensor, shards.get(id(tensor)), whole)
        if whole is None or (shard is None and whole.shape != tensor.shape):
            return tensor.detach().to(device, copy=True)
        if shard is not None:
            weights.buffers[name] = shard
        return (whole if shard is None else shard.part_of(whole)).to(tensor.dtype, copy=True)

    weights.scheduled = copy_module(scheduled, take)
    for model in (weights.original, weights.scheduled):
        for module in model.modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                module.sparse = False  # gradients are compared as a whole
    return weights


def _has_values_of(whole: Tensor, shard: TensorShard | None, tensor: Tensor) -> bool:
    """Return True if a parameter holds its part of an original one, or one of them has no values yet."""
    if whole.is_meta or tensor.is_meta or whole.data_ptr() == tensor.data_ptr():
        return True
    part = whole if shard is None else shard.part_of(whole)
    return torch.equal(part.detach().to(tensor), tensor.detach())


def _counterparts(
    sources: dict[str, nn.Parameter], scheduled: nn.Module
) -> tuple[dict[str, tuple[str, TensorShard | None]], list[str]]:
    """Return original parameter and shard of each scheduled one (by tag, else by name), and the rest."""
    origin: dict[str, tuple[str, TensorShard | None]] = {}
    added = []
    for name, parameter in scheduled.named_parameters():
        source = getattr(parameter, ORIGIN, name)
        whole = sources.get(source)
        shard = _shard(parameter, getattr(parameter, "shard", None), whole)
        if whole is None or (shard is None and whole.shape != parameter.shape):
            added.append(name)
        else:
            origin[name] = (source, shard)
    return origin, added


def _shard(part: Tensor, shard: TensorShard | None, whole: Tensor | None) -> TensorShard | None:
    """Return the shard that cuts a tensor out of the original one, None if the tensor is whole."""
    if shard is None or whole is None or part.shape == whole.shape or shard.orig_shape != tuple(whole.shape):
        return None
    return shard


def _perturbed_constant(values: Tensor, seed: int, name: str) -> Tensor:
    """Add 0.1 to 0.2 to each element if all are equal; positive, so that variances stay positive.

    A layer that lost a bias of zeros, or swapped two norms with weights of one, would compute the same
    otherwise.
    """
    flat = values.flatten()
    if not values.is_floating_point() or values.numel() == 0 or bool(flat[0] != flat[-1]):
        return values
    if bool((flat != flat[0]).any()):
        return values
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    drawn = torch.rand(values.shape, generator=generator, dtype=torch.float32)
    return values + (_SPREAD + _SPREAD * drawn).to(values)
