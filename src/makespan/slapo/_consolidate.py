"""Parameters that exist by shape alone, and how they get values when a schedule is complete."""

import hashlib
import inspect
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from makespan.slapo._annotate import carry_tags
from makespan.slapo._collectives import Ranks
from makespan.slapo._errors import BuildError
from makespan.slapo._layouts import sharding_of
from makespan.slapo._paths import is_leaf

if TYPE_CHECKING:
    from makespan.slapo._schedule import Schedule

__all__ = ["Initialiser", "check_filled", "consolidate", "init_empty_weights"]

Initialiser = Callable[..., object]


@contextmanager
def init_empty_weights(enable: bool = True, include_buffers: bool = False) -> Iterator[None]:
    """Create the parameters of modules on ``meta``, where they have a shape and no values.

    Parameters
    ----------
    enable
        False to do nothing.
    include_buffers
        Whether buffers are created so, too. A build can fill those of the layers of `torch.nn` alone.
    """
    if not enable:
        yield
        return
    parameters, buffers = nn.Module.register_parameter, nn.Module.register_buffer

    def register_parameter(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        parameters(self, name, param)
        if param is not None and not param.is_meta:
            empty = nn.Parameter(param.detach().to("meta"), param.requires_grad)
            vars(empty).update(vars(param))
            self._parameters[name] = empty

    def register_buffer(self: nn.Module, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        buffers(self, name, None if tensor is None else tensor.to("meta"), persistent)

    with _set(nn.Module, "register_parameter", register_parameter):
        if not include_buffers:
            yield
            return
        with _set(nn.Module, "register_buffer", register_buffer):
            yield


@contextmanager
def _set(thing: Any, name: str, value: object) -> Iterator[None]:
    before = getattr(thing, name)
    setattr(thing, name, value)
    try:
        yield
    finally:
        setattr(thing, name, before)


def consolidate(
    sch: "Schedule",
    initialiser: Initialiser | None = None,
    *,
    seed: int | None = None,
    device: torch.device | str | None = None,
    again: bool = False,
    only: Collection[int] | None = None,
) -> None:
    """Give values to all parameters that have none, those of one module at a time.

    The first process of the group initialises whole tensors, from a seed that follows from ``seed`` and the
    path of the module, and each keeps its part: how many processes there are changes nothing.

    Parameters
    ----------
    initialiser
        Function of a module, or of module and path; None for ``_init_weights`` of the module or of an owner,
        else ``reset_parameters``.
    seed
        None for the seed that torch has.
    device
        Where the parameters shall be, None for the CPU.
    again
        Whether parameters that have values get new ones.
    only
        Parameters and buffers that this process needs, by identity; None for all.
    """
    ranks = Ranks(sch.rank, sch.world_size, sch.group)
    filling = _Filling(sch, ranks, initialiser, seed, torch.device(device or "cpu"), again, only)
    for path, module in sch.mod.named_modules():
        filling.fill(path, module)
    check_filled(sch.mod, only)


def check_filled(model: nn.Module, only: Collection[int] | None = None) -> None:
    """Refuse a model of which something that is needed has no values."""
    for path, module in model.named_modules():
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        names = [name for name, tensor in own if tensor.is_meta and (only is None or id(tensor) in only)]
        if names:
            raise BuildError(
                f"build: {', '.join(map(repr, names))} of {path!r} ({type(module).__name__}) on meta, "
                "without values; accepted: init_weights=True or a function that gives values to it"
            )


class _Filling:
    """The state of one consolidation."""

    def __init__(
        self,
        sch: "Schedule",
        ranks: Ranks,
        initialiser: Initialiser | None,
        seed: int | None,
        device: torch.device,
        again: bool,
        only: Collection[int] | None,
    ) -> None:
        self.root, self.tags, self.ranks, self.device = sch.mod, sch.metadata.tags, ranks, device
        self.again, self.only = again, only
        self.initialiser, self.seed = initialiser, torch.initial_seed() if seed is None else seed
        # By identity of what had no values, which is kept alive so that no other gets its number.
        self.made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    def fill(self, path: str, module: nn.Module) -> None:
        """Give values to the parameters and buffers of one module itself."""
        own = {name: one for name, one in module._parameters.items() if one is not None}
        for name, parameter in own.items():
            if id(parameter) in self.made:
                setattr(module, name, self.made[id(parameter)][1])
        names = [
            name
            for name, one in own.items()
            if id(one) not in self.made and (one.is_meta or self.again) and self._is_needed(one)
        ]
        buffers = [
            name for name, one in module.named_buffers(recurse=False) if one.is_meta and self._is_needed(one)
        ]
        if not names and not buffers:
            return
        initialise = self._initialise(path, module, buffers)
        wholes = self._wholes(path, module, names + buffers, initialise)
        shards = sharding_of(module).tensors
        for name, whole in wholes.items():
            part = shards[name].part_of(whole) if name in shards else whole
            if name in buffers:
                setattr(module, name, part)
                continue
            new = nn.Parameter(part, own[name].requires_grad)
            carry_tags(own[name], new, self.tags)
            self.made[id(own[name])] = own[name], new
            self.made[id(new)] = new, new
            setattr(module, name, new)

    def _is_needed(self, tensor: Tensor) -> bool:
        return self.only is None or id(tensor) in self.only

    def _initialise(self, path: str, module: nn.Module, buffers: list[str]) -> Callable[[], object] | None:
        """Return what initialises a module; None for zeros, which are all that is known of its own."""
        if self.initialiser is not None:
            user, n_given = self.initialiser, len(inspect.signature(self.initialiser).parameters)
            return (lambda: user(module)) if n_given == 1 else (lambda: user(module, path))
        reset = getattr(module, "reset_parameters", None)
        if buffers and not (is_leaf(module) and callable(reset)):
            raise BuildError(
                f"build: buffers {', '.join(map(repr, buffers))} of {path!r} ({type(module).__name__}) "
                "on meta, and nobody knows their values; accepted: init_weights with a function that "
                "does, or init_empty_weights without include_buffers"
            )
        for owner in self._owners(path):
            init = getattr(owner, "_init_weights", None)
            if callable(init) and inspect.signature(init).parameters:
                return lambda: init(module)
            if callable(init) and owner is module:
                return lambda: init()
        if callable(reset):
            return lambda: reset()
        if any(True for _ in module.children()):
            warnings.warn(
                f"build: no initialiser for parameters of {path!r} itself; they are zero", stacklevel=4
            )
            return None
        raise BuildError(
            f"build: {path!r} ({type(module).__name__}) on meta, without _init_weights and "
            "reset_parameters; accepted: init_weights with a function of a module"
        )

    def _owners(self, path: str) -> Iterator[nn.Module]:
        tokens = path.split(".") if path else []
        for count in range(len(tokens), -1, -1):
            yield self.root.get_submodule(".".join(tokens[:count]))

    def _wholes(
        self, path: str, module: nn.Module, names: list[str], initialise: Callable[[], object] | None
    ) -> dict[str, Tensor]:
        """Initialise on the first process, and send to the others."""
        if self.ranks.rank == 0:
            try:
                wholes = self._initialised(path, module, names, initialise)
            except BaseException:
                self._agreed(False)
                raise
            self._agreed(True)
        else:
            if not self._agreed(True):
                raise BuildError(f"build: the first process could not initialise {path!r}")
            wholes = {name: self._empty(module, name) for name in names}
        if self.ranks.size > 1:
            for whole in wholes.values():
                dist.broadcast(whole, group=self.ranks.group, group_src=0)
        return wholes

    def _agreed(self, is_well: bool) -> bool:
        """Tell the others how it went, since they wait."""
        if self.ranks.size == 1:
            return is_well
        told = torch.tensor([is_well], dtype=torch.int32, device=self.device)
        dist.broadcast(told, group=self.ranks.group, group_src=0)
        return bool(told.item())

    def _empty(self, module: nn.Module, name: str) -> Tensor:
        tensor: Tensor = getattr(module, name)
        shard = sharding_of(module).tensors.get(name)
        shape = tensor.shape if shard is None else shard.orig_shape
        return torch.empty(shape, dtype=tensor.dtype, device=self.device)

    def _initialised(
        self, path: str, module: nn.Module, names: list[str], initialise: Callable[[], object] | None
    ) -> dict[str, Tensor]:
        """Let a module be whole for the time of its initialisation."""
        every = [
            *(name for name, one in module._parameters.items() if one is not None),
            *(name for name, _ in module.named_buffers(recurse=False) if name in names),
        ]
        before = {name: getattr(module, name) for name in every}
        wholes = {name: self._empty(module, name) for name in every}
        attributes = sharding_of(module).attributes
        ours = {name: getattr(module, name) for name in attributes}
        for name, whole in wholes.items():
            whole.fill_(float("nan") if whole.is_floating_point() and initialise is not None else 0)
            is_parameter = isinstance(before[name], nn.Parameter)
            setattr(module, name, nn.Parameter(whole, before[name].requires_grad) if is_parameter else whole)
        try:
            for name, value in attributes.items():
                setattr(module, name, value)
            with torch.random.fork_rng(), torch.no_grad():
                torch.manual_seed(_seed_of(self.seed, path))
                if initialise is not None:
                    initialise()
            found = {name: getattr(module, name).detach() for name in names}
        finally:
            for name, value in (before | ours).items():
                setattr(module, name, value)
        for name, whole in found.items():
            if whole.is_floating_point() and bool(whole.isnan().any()):
                raise BuildError(
                    f"build: the initialiser of {path!r} ({type(module).__name__}) leaves "
                    f"{name!r} without values"
                )
        return found


def _seed_of(seed: int, path: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}:{path}".encode(), digest_size=7).digest(), "big")
