"""Build a scheduled model: checks, materialised parameters, and targets such as DDP, FSDP and pipelines."""

import hashlib
import inspect
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from makespan.slapo.errors import ArgumentError, BuildError
from makespan.slapo.layouts import PARTIAL, Ranks, Sharding, sharding_of
from makespan.slapo.schedule import carry_tags, digest, is_leaf
from makespan.slapo.sharding import CLIPPING
from makespan.training import refuse_plain_clipping

if TYPE_CHECKING:
    from makespan.slapo.schedule import Schedule


# ------------------------------------------------------------------------------------------------
# What a schedule must have done before its model is built, as far as the tree can tell.


def is_parallel(sch: "Schedule") -> bool:
    """Whether the processes of the group share the model, rather than each having it whole."""
    return any(
        entry.op == "shard" or (entry.op == "sync" and isinstance(entry.arguments["sync_op_or_fn"], str))
        for entry in sch.metadata.journal
    )


def agreed_seed(seed: int | None) -> int:
    """Return the seed of all processes: the one given, or that of the first one."""
    if seed is not None:
        return seed
    told = [torch.initial_seed()]
    if dist.is_initialized():
        dist.broadcast_object_list(told, src=0)
    return told[0]


def check_group(sch: "Schedule", mesh: DeviceMesh | None) -> None:
    """Refuse a group that is smaller than the world, or another one than the mesh has."""
    if not dist.is_initialized():
        return
    if mesh is None:
        if sch.world_size < dist.get_world_size():
            raise ArgumentError(
                f"build: the model is shared by {sch.world_size} of {dist.get_world_size()} processes and "
                "nobody says what the others do; accepted: mesh, with dimensions such as dp and tp"
            )
        return
    names = mesh.mesh_dim_names or ()
    if not set(names) <= {"dp", "tp", "pp"}:
        raise ArgumentError(f"build: mesh with dimensions {names!r}; accepted: dp, tp and pp")
    ours = dist.get_process_group_ranks(sch.group or dist.group.WORLD)
    theirs = dist.get_process_group_ranks(mesh.get_group("tp")) if "tp" in names else [dist.get_rank()]
    if ours != theirs and (is_parallel(sch) or "tp" in names):
        raise ArgumentError(
            f"build: the schedule was created for the group of processes {ours}, tp of the mesh is {theirs}; "
            'accepted: create_schedule(model, group=mesh.get_group("tp"))'
        )


def check_same_program(sch: "Schedule") -> None:
    """Refuse to build where processes applied different steps, since they would wait for each other."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    told: list[Any] = [None] * dist.get_world_size()
    journal = sch.metadata.journal
    dist.all_gather_object(told, [digest([entry]) for entry in journal])
    for step in range(max(map(len, told))):
        found = [one[step] if step < len(one) else None for one in told]
        if len(set(found)) > 1:
            own = str(journal[step]) if step < len(journal) else "nothing"
            other = next(rank for rank, one in enumerate(found) if one != found[dist.get_rank()])
            raise BuildError(
                f"build: processes applied different primitives; step {step + 1} is {own} here, and "
                f"another one in process {other}; accepted: the same schedule in all"
            )


def check_complete(sch: "Schedule", ties: str) -> None:
    """Refuse layers and ties of which a part is sharded alone, and warn of forgotten exchanges."""
    for path, node in sch.named_schedules():
        sharding = sharding_of(node.mod)
        names = [name for name in sorted(sharding.together) if getattr(node.mod, name, None) is not None]
        left = [name for name in names if name not in sharding.tensors]
        if sharding.tensors and left:
            raise BuildError(
                f"build: {', '.join(map(repr, left))} of {path!r} ({type(node.mod).__name__}) is whole, but "
                f"{', '.join(map(repr, sharding.tensors))} is sharded; accepted: {', '.join(names)} together"
            )
    for group in _broken_ties(sch):
        message = (
            f"build: {group[0]!r} and {group[1]!r} were one parameter, of which {group[0]!r} alone is "
            "sharded; accepted: the same shard of both"
        )
        if ties == "error":
            raise BuildError(message)
        warnings.warn(message, stacklevel=4)
    if sch.world_size > 1:
        for message in _forgotten(sch):
            warnings.warn(message, stacklevel=4)


def _broken_ties(sch: "Schedule") -> Iterator[tuple[str, str]]:
    """Pairs of a sharded and a whole member of a tie."""
    for group in sch.metadata.ties:
        known = {path: _sharding_at(sch, path) for path in group}
        sharded = [path for path, one in known.items() if one is True]
        whole = [path for path, one in known.items() if one is False]
        if sharded and whole:
            yield sharded[0], whole[0]


def _sharding_at(sch: "Schedule", path: str) -> bool | None:
    """Whether a parameter is sharded; None if there is no such parameter any more."""
    owner, _, name = path.rpartition(".")
    try:
        module = sch.mod.get_submodule(owner)
    except AttributeError:
        return None
    return name in sharding_of(module).tensors if module._parameters.get(name) is not None else None


def _forgotten(sch: "Schedule") -> Iterator[str]:
    """Messages on outputs that stay partial, or in parts that no layer after them takes."""
    nodes = [(path, node, sharding_of(node.mod)) for path, node in sch.named_schedules()]
    for place, (path, node, sharding) in enumerate(nodes):
        if sharding.computes is not None and sharding.returns == PARTIAL:
            yield (
                f"build: {path!r} ({type(node.mod).__name__}) returns partial sums that nobody adds up; "
                "accepted: sync('fwd_post', 'all_reduce') or 'reduce_scatter' there"
            )
        elif (
            not isinstance(node.mod, nn.Embedding)  # a table may be read by anything, as that of positions is
            and sharding.computes is not None
            and sharding.returns is not None
            and sharding.computes == sharding.returns
        ):
            siblings = [one for _, other, one in nodes if other.parent is node.parent]
            if not _is_taken(node, siblings, nodes[place + 1 :]):
                yield (
                    f"build: {path!r} ({type(node.mod).__name__}) returns a {sharding.returns} and no layer "
                    "after it takes parts; accepted: sync('fwd_post', 'all_gather') there, or one that does"
                )


def _is_taken(
    node: "Schedule", siblings: list[Sharding], later: list[tuple[str, "Schedule", Sharding]]
) -> bool:
    """Whether a layer beside, or the next sharded one elsewhere, takes what a layer returns in parts."""
    if any(one.computes == PARTIAL for one in siblings):
        return True
    for _, other, sharding in later:
        if sharding.computes == PARTIAL:
            return True
        if sharding.computes is not None and other.parent is not node.parent:
            return False
    return False


# ------------------------------------------------------------------------------------------------
# Parameters that exist by shape alone, and how they get values when a schedule is complete.

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


# ------------------------------------------------------------------------------------------------
# From a schedule to a model that runs: parameters get values, and the model is handed to what runs it.


@dataclass(frozen=True, slots=True)
class Target:
    """What a model is handed to.

    Parameters
    ----------
    make
        Function of schedule, mesh and options that returns model and engine.
    options
        Names of the options that it accepts.
    part
        Function of schedule and mesh that returns what this process needs of the model; None for all.
    """

    make: Callable[["Schedule", DeviceMesh | None, Mapping[str, Any]], tuple[nn.Module, Any]]
    options: frozenset[str] = frozenset()
    part: Callable[["Schedule", DeviceMesh | None], nn.Module] | None = None


def build(
    sch: "Schedule",
    target: str | None = None,
    init_weights: bool | Initialiser = True,
    *,
    check: bool = True,
    ties: str = "error",
    mesh: DeviceMesh | None = None,
    seed: int | None = None,
    device: torch.device | str | None = None,
    reinitialise: bool = False,
    **options: Any,
) -> tuple[nn.Module, Any]:
    """Make a scheduled model ready to run; all processes must call this.

    Parameters
    ----------
    sch
        Schedule of a whole model.
    target
        None or ``eager`` for the module as it is, ``compile``, ``ddp``, ``fsdp`` or ``pipeline``.
    init_weights
        True to initialise parameters on ``meta`` by ``_init_weights`` of a module or of what holds it, or by
        ``reset_parameters``; a function of module, or module and path, that does; False to refuse them.
    check
        Whether to look for sharded layers and ties of which a part is whole, and for forgotten exchanges.
    ties
        ``error`` or ``warn``, for ties of which a member alone is sharded.
    mesh
        All processes, with dimensions named ``dp``, ``tp`` and ``pp``; None where they are one group.
    seed, device
        Seed of the initialisation, None for that of torch; device of the parameters, None for the CPU.
    reinitialise
        Whether parameters that have values get new ones.
    **options
        Options of the target's class or function; ``units`` of fsdp, paths to shard each by itself; of a
        pipeline ``n_microbatches``, ``loss_fn``, a mean, and ``schedule``, ``1f1b`` or ``gpipe``.

    Returns
    -------
    The scheduled module, or its stage here, and what runs it: compiled module, wrapped one, pipeline or None.

    Raises
    ------
    ArgumentError
        A target, option or mesh is not accepted; also a `ValueError`.
    BuildError
        The schedule is not complete or differs between processes; also a `RuntimeError`.

    References
    ----------
    Slapo, section 3.4, the framework dialects that a schedule is built for.
    """
    made = _checked(sch, target or "eager", ties, options)
    check_group(sch, mesh)
    check_same_program(sch)
    if check:
        check_complete(sch, ties)
    _fill(sch, init_weights, seed, device, reinitialise, _needed(sch, made, mesh))
    return made.make(sch, mesh, options)


def _checked(sch: "Schedule", target: str, ties: str, options: Mapping[str, Any]) -> Target:
    made = TARGETS.get(target)
    if made is None:
        raise ArgumentError(f"build: target {target!r}; accepted: None, {', '.join(TARGETS)}")
    if ties not in ("error", "warn"):
        raise ArgumentError(f"build: ties {ties!r}; accepted: 'error' or 'warn'")
    if sch.parent is not None:
        raise ArgumentError(f"build of {sch.path!r}: accepted: the schedule of a whole model, sch.root")
    if unknown := sorted(options.keys() - made.options):
        accepted = ", ".join(sorted(made.options)) or "none"
        raise ArgumentError(f"build: option {unknown[0]!r} for {target}; accepted: {accepted}")
    return made


def _fill(
    sch: "Schedule",
    init_weights: bool | Initialiser,
    seed: int | None,
    device: torch.device | str | None,
    again: bool,
    needed: Collection[int] | None,
) -> None:
    if init_weights is False:
        check_filled(sch.mod, needed)
    else:
        user = None if init_weights is True else init_weights
        consolidate(sch, user, seed=agreed_seed(seed), device=device, again=again, only=needed)


def _needed(sch: "Schedule", made: Target, mesh: DeviceMesh | None) -> set[int] | None:
    if made.part is None:
        return None
    module = made.part(sch, mesh)
    return {id(one) for one in (*module.parameters(), *module.buffers())}


def _eager(sch: "Schedule", mesh: DeviceMesh | None, options: Mapping[str, Any]) -> tuple[nn.Module, Any]:
    return sch.mod, None


def _compile(sch: "Schedule", mesh: DeviceMesh | None, options: Mapping[str, Any]) -> tuple[nn.Module, Any]:
    compiled: Any = torch.compile(sch.mod, **options)
    return compiled, compiled


def _replicas(sch: "Schedule", mesh: DeviceMesh | None, target: str) -> dist.ProcessGroup | None:
    """Return the processes that have the same part of the model, None for all."""
    if not dist.is_initialized():
        raise ArgumentError(f"build: {target} without a process group; accepted: after init_process_group")
    if mesh is not None:
        if "dp" not in (mesh.mesh_dim_names or ()):
            raise ArgumentError(f"build: {target} on a mesh without dp; accepted: a dimension named dp")
        return mesh.get_group("dp")
    if is_parallel(sch) and sch.world_size > 1:
        raise ArgumentError(
            f"build: {target}, but all {sch.world_size} processes share one model; "
            "accepted: mesh with dp and tp"
        )
    return None


def _ddp(sch: "Schedule", mesh: DeviceMesh | None, options: Mapping[str, Any]) -> tuple[nn.Module, Any]:
    group = _replicas(sch, mesh, "ddp")
    wrapped = nn.parallel.DistributedDataParallel(sch.mod, process_group=group, **options)
    return wrapped, wrapped


def _fsdp(sch: "Schedule", mesh: DeviceMesh | None, options: Mapping[str, Any]) -> tuple[nn.Module, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard  # takes long to load

    _replicas(sch, mesh, "fsdp")
    kind = next((one.device.type for one in sch.mod.parameters()), "cpu")
    along = init_device_mesh(kind, (dist.get_world_size(),)) if mesh is None else mesh["dp"]
    further = {name: value for name, value in options.items() if name != "units"}
    for unit in _units(sch, options.get("units")):
        fully_shard(unit, mesh=along, **further)
    fully_shard(sch.mod, mesh=along, **further)
    if is_parallel(sch) and sch.world_size > 1:  # torch adds up over its own mesh alone
        refuse_plain_clipping(sch.mod.parameters(), CLIPPING)
    return sch.mod, sch.mod


def _pipeline(sch: "Schedule", mesh: DeviceMesh | None, options: Mapping[str, Any]) -> tuple[nn.Module, Any]:
    from makespan.slapo.pipelining import build_pipeline  # takes long to load

    return build_pipeline(sch, mesh, options, is_parallel(sch) and sch.world_size > 1)


def _stage(sch: "Schedule", mesh: DeviceMesh | None) -> nn.Module:
    from makespan.slapo.pipelining import stages_of  # takes long to load

    parts, group = stages_of(sch, mesh, is_parallel(sch) and sch.world_size > 1)
    return parts.stages[dist.get_rank(group)]


def _units(sch: "Schedule", paths: object) -> list[nn.Module]:
    """Modules that are gathered each by itself: those named, or the outermost elements of lists."""
    if paths is not None:
        if isinstance(paths, str) or not isinstance(paths, list | tuple):
            raise ArgumentError(f"build: units {paths!r}; accepted: a list of paths")
        return [sch[path].mod for path in paths]
    found, waiting = [], [sch]
    while waiting:
        node = waiting.pop(0)
        for name, child in node.child.items():
            if "." in name and any(True for _ in child.mod.parameters()):
                found.append(child.mod)
            else:
                waiting.append(child)
    return found


TARGETS: dict[str, Target] = {
    "eager": Target(_eager),
    "compile": Target(_compile, frozenset({"backend", "mode", "dynamic", "fullgraph", "options"})),
    "ddp": Target(_ddp, frozenset({"bucket_cap_mb", "find_unused_parameters", "gradient_as_bucket_view",
                                   "static_graph", "broadcast_buffers", "device_ids"})),
    "fsdp": Target(_fsdp, frozenset({"units", "mp_policy", "offload_policy", "reshard_after_forward"})),
    "pipeline": Target(_pipeline, frozenset({"n_microbatches", "loss_fn", "schedule"}), _stage),
}  # fmt: skip
"""What a model can be handed to, by name."""
