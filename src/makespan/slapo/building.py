"""Build a scheduled model: checks, materialised parameters, and targets such as DDP, FSDP and pipelines."""

import hashlib
import inspect
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from makespan.arguments import check_kind
from makespan.slapo.errors import ArgumentError, BuildError, KindError, check_device, warn
from makespan.slapo.layouts import PARTIAL, Ranks, Sharding, gather_objects, gather_over, sharding_of
from makespan.slapo.pipelining import build_pipeline, check_order, own_stages, stages_of
from makespan.slapo.schedule import carry_tags, check_without_hooks, digest, is_leaf
from makespan.slapo.sharding import CLIPPING, groups_of
from makespan.training import refuse_plain_clipping
from makespan.training.bits import word_sum_of

if TYPE_CHECKING:
    from makespan.slapo.schedule import Schedule


# --- Checks before a build ---


def is_parallel(sch: "Schedule") -> bool:
    """Return True if the processes of the group share the model, False if each holds all of it."""
    return any(
        entry.op == "shard" or (entry.op == "sync" and isinstance(entry.arguments["sync_op_or_fn"], str))
        for entry in sch.metadata.journal
    )


def check_group(sch: "Schedule", mesh: DeviceMesh | None) -> None:
    """Reject a group smaller than the world, or one that differs from the mesh."""
    if not dist.is_initialized():
        return
    if mesh is None:
        if sch.world_size < dist.get_world_size():
            raise ArgumentError(
                f"build: the model is shared by {sch.world_size} of {dist.get_world_size()} processes, and "
                "the others have no role; pass mesh, with dimensions such as dp and tp"
            )
        return
    names = mesh.mesh_dim_names or ()
    if not set(names) <= {"dp", "tp", "ep", "pp", "cp"}:
        raise ArgumentError(f"build: mesh has dimensions {names!r}; expected dp, tp, ep, pp and cp")
    # Without tensor parallelism, the group of the schedule may share experts.
    is_tensor = "tp" in names and mesh.size(names.index("tp")) > 1
    shared = "ep" if "ep" in names and "cp" not in names and not is_tensor else "tp"
    _check_further(sch.metadata.context, mesh, "cp", "context")
    if shared == "tp":
        _check_further(sch.metadata.experts, mesh, "ep", "expert")
    ours = dist.get_process_group_ranks(sch.group or dist.group.WORLD)
    theirs = dist.get_process_group_ranks(mesh.get_group(shared)) if shared in names else [dist.get_rank()]
    if shared not in names and "cp" in names and ours == dist.get_process_group_ranks(mesh.get_group("cp")):
        return  # these processes share nothing but sequences
    if ours != theirs and (is_parallel(sch) or shared in names):
        raise ArgumentError(
            f"build: the schedule was created for the group of processes {ours}, {shared} of the mesh is "
            f'{theirs}; use create_schedule(model, group=mesh.get_group("{shared}"))'
        )


def _check_further(ranks: Ranks, mesh: DeviceMesh, name: str, kind: str) -> None:
    """Reject a mesh whose dimension has other processes than a schedule has beside its group."""
    is_named = name in (mesh.mesh_dim_names or ())
    ours = dist.get_process_group_ranks(ranks.group or dist.group.WORLD) if ranks.size > 1 else []
    theirs = dist.get_process_group_ranks(mesh.get_group(name)) if is_named else []
    if ours != theirs and not (ranks.size == 1 and len(theirs) == 1):
        raise ArgumentError(
            f"build: the processes of {kind} parallelism are {ours}, {name} of the mesh is {theirs}; use "
            f'apply_plan(..., {kind}_group=mesh.get_group("{name}"))'
        )


def check_same_program(sch: "Schedule") -> None:
    """Reject a build if processes applied different steps, since their collectives would deadlock."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    journals: list[Any] = [None] * dist.get_world_size()
    journal = sch.metadata.journal
    # One digest per step, so that the first step that differs can be named without sending the journals.
    dist.all_gather_object(journals, [digest([entry]) for entry in journal])
    for step in range(max(map(len, journals))):
        digests = [steps[step] if step < len(steps) else None for steps in journals]
        if len(set(digests)) > 1:
            here = str(journal[step]) if step < len(journal) else "nothing"
            other = next(rank for rank, text in enumerate(digests) if text != digests[dist.get_rank()])
            raise BuildError(
                f"build: processes applied different primitives; step {step + 1} is {here} here, and "
                f"another one in process {other}; apply the same schedule in all processes"
            )


def check_same_values(sch: "Schedule") -> None:
    """Reject parameters that processes hold whole with other values, as models of other seeds have."""
    if not is_parallel(sch):
        return
    groups = groups_of(sch)
    faults: list[str] = []
    for over, ranks in groups.items():
        sums = {}
        for path, module in sch.mod.named_modules():
            shards = sharding_of(module).tensors
            for name, parameter in module.named_parameters(recurse=False):
                # Parts of layers are those of one process of the group alone.
                if not parameter.is_meta and (name not in shards or over not in shards[name].over):
                    sums[f"{path}.{name}".lstrip(".")] = word_sum_of([parameter])
        values = torch.stack(list(sums.values())).tolist() if sums else []
        for other, theirs in enumerate(gather_objects(ranks, dict(zip(sums, values, strict=True)))):
            for name, value in zip(sums, values, strict=True):
                if theirs.get(name, value) != value:
                    faults.append(
                        f"parameter {name!r} has other values in process {other} of the group than in "
                        f"process {ranks.rank}"
                    )
    # Processes that find nothing in their groups would wait for those that raise.
    everywhere = itertools.chain(faults, *gather_over(list(groups.values()), faults[:1]))
    if fault := next(everywhere, ""):
        raise BuildError(
            f"build: {fault}; build the model from the same seed in all of them, or load the same weights "
            "before it is scheduled"
        )


def check_complete(sch: "Schedule", ties: str) -> None:
    """Reject layers and ties that are sharded only in part, and warn about missing synchronisation."""
    for path, node in sch.named_schedules():
        sharding = sharding_of(node.mod)
        names = [name for name in sorted(sharding.together) if getattr(node.mod, name, None) is not None]
        left = [name for name in names if name not in sharding.tensors]
        if sharding.tensors and left:
            raise BuildError(
                f"build: {', '.join(map(repr, left))} of {path!r} ({type(node.mod).__name__}) is whole, but "
                f"{', '.join(map(repr, sharding.tensors))} is sharded; shard {', '.join(names)} together"
            )
    for group in sch.metadata.ties:
        sharded: list[str] = []
        whole: list[str] = []
        for path in group:
            owner, _, name = path.rpartition(".")
            try:
                module = sch.mod.get_submodule(owner)
            except AttributeError:  # a primitive has replaced the owner
                continue
            if module._parameters.get(name) is not None:
                (sharded if name in sharding_of(module).tensors else whole).append(path)
        if not sharded or not whole:
            continue
        message = (
            f"build: {sharded[0]!r} and {whole[0]!r} were one parameter, but only {sharded[0]!r} is "
            "sharded; shard both in the same way"
        )
        if ties == "error":
            raise BuildError(message)
        warn(message)
    if sch.world_size > 1:
        for message in _missing_exchanges(sch):
            warn(message)


def _missing_exchanges(sch: "Schedule") -> Iterator[str]:
    """Yield a message per output that remains a partial sum, or whose parts no later layer takes."""
    nodes = [(path, node, sharding_of(node.mod)) for path, node in sch.named_schedules()]
    found = sch.metadata.structure
    judged = (
        set() if found is None else {part.path for part in found.parts}
    )  # trials say who takes their parts
    for place, (path, node, sharding) in enumerate(nodes):
        if sharding.computes is not None and sharding.returns == PARTIAL:
            yield (
                f"build: {path!r} ({type(node.mod).__name__}) returns partial sums that are never reduced; "
                "add sync('fwd_post', 'all_reduce') or 'reduce_scatter' there"
            )
        elif (
            not isinstance(node.mod, nn.Embedding)  # anything may read a table, such as that of positions
            and sharding.computes is not None
            and sharding.returns is not None
            and sharding.computes == sharding.returns
            and path not in judged
        ):
            # Parts are taken by a layer with the same parent, or by the next sharded layer elsewhere.
            siblings = [sharding for _, other, sharding in nodes if other.parent is node.parent]
            following = next(
                (
                    other_sharding
                    for _, other, other_sharding in nodes[place + 1 :]
                    if other_sharding.computes == PARTIAL
                    or (other_sharding.computes is not None and other.parent is not node.parent)
                ),
                Sharding(),
            )
            if all(sharding.computes != PARTIAL for sharding in (*siblings, following)):
                yield (
                    f"build: {path!r} ({type(node.mod).__name__}) returns a {sharding.returns} and no layer "
                    "after it takes parts; add sync('fwd_post', 'all_gather') there, or shard a later layer"
                )


# --- Empty weights, and their values ---

Initialiser = Callable[..., object]


@contextmanager
def init_empty_weights(enable: bool = True, include_buffers: bool = False) -> Iterator[None]:
    """Create the parameters of modules on the ``meta`` device, with a shape but without values.

    Parameters
    ----------
    enable
        False to do nothing.
    include_buffers
        Also create buffers without values. A build can only fill those of `torch.nn` layers.
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

    with _patched(nn.Module, "register_parameter", register_parameter):
        if not include_buffers:
            yield
            return
        with _patched(nn.Module, "register_buffer", register_buffer):
            yield


@contextmanager
def _patched(owner: Any, name: str, value: object) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def consolidate(
    sch: "Schedule",
    initialiser: Initialiser | None = None,
    *,
    seed: int | None = None,
    device: torch.device | str | None = None,
    again: bool = False,
    only: Collection[int] | None = None,
) -> None:
    """Give values to all parameters that have none, one module at a time.

    The first process of the group initialises whole tensors with a seed derived from ``seed`` and the path of
    the module, and each process keeps its part. So values do not depend on the number of processes, and no
    process ever holds more than one whole module.

    Parameters
    ----------
    initialiser
        Function of a module, or of module and path; None for ``_init_weights`` of the module or of an owner,
        else ``reset_parameters``.
    seed
        None for the current seed of torch.
    device
        Device of the parameters, None for the CPU.
    again
        Replace existing values.
    only
        Parameters and buffers that this process needs, by identity; None for all.
    """
    ranks = Ranks(sch.rank, sch.world_size, sch.group)
    filling = _Consolidation(sch, ranks, initialiser, seed, torch.device(device or "cpu"), again, only)
    for path, module in sch.mod.named_modules():
        filling.fill(path, module)
    check_filled(sch.mod, only)


def check_filled(model: nn.Module, only: Collection[int] | None = None) -> None:
    """Reject a model if a tensor that this process needs has no values."""
    for path, module in model.named_modules():
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        names = [name for name, tensor in tensors if tensor.is_meta and (only is None or id(tensor) in only)]
        if names:
            raise BuildError(
                f"build: {', '.join(map(repr, names))} of {path!r} ({type(module).__name__}) on meta, "
                "without values; pass init_weights=True or a function that initialises them"
            )


class _Consolidation:
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
        self.root, self.ranks, self.device = sch.mod, ranks, device
        self.again, self.only = again, only
        self.initialiser, self.seed = initialiser, torch.initial_seed() if seed is None else seed
        # Old and new parameter by the id of the old one, which is kept alive so that its id is not reused.
        self.replaced: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    def fill(self, path: str, module: nn.Module) -> None:
        """Give values to the parameters and buffers of one module itself."""
        parameters = {
            name: parameter for name, parameter in module._parameters.items() if parameter is not None
        }
        for name, parameter in parameters.items():
            if id(parameter) in self.replaced:
                setattr(module, name, self.replaced[id(parameter)][1])
        names = [
            name
            for name, parameter in parameters.items()
            if id(parameter) not in self.replaced
            and (parameter.is_meta or self.again)
            and self._is_needed(parameter)
        ]
        buffers = [
            name
            for name, buffer in module.named_buffers(recurse=False)
            if buffer.is_meta and self._is_needed(buffer)
        ]
        if not names and not buffers:
            return
        for name in names:
            check_without_hooks(parameters[name], name, f"build: {path!r} ({type(module).__name__})")
        initialise = self._initialise(path, module, buffers)
        wholes = self._whole_tensors(path, module, names + buffers, initialise)
        shards = sharding_of(module).tensors
        for name, whole in wholes.items():
            part = shards[name].part_of(whole) if name in shards else whole
            if name in buffers:
                setattr(module, name, part)
                continue
            new = nn.Parameter(part, parameters[name].requires_grad)
            carry_tags(parameters[name], new)
            self.replaced[id(parameters[name])] = parameters[name], new
            self.replaced[id(new)] = new, new
            setattr(module, name, new)

    def _is_needed(self, tensor: Tensor) -> bool:
        return self.only is None or id(tensor) in self.only

    def _initialise(self, path: str, module: nn.Module, buffers: list[str]) -> Callable[[], object] | None:
        """Return the function that initialises a module, or None, which means zeros."""
        if self.initialiser is not None:
            user, n_given = self.initialiser, len(inspect.signature(self.initialiser).parameters)
            return (lambda: user(module)) if n_given == 1 else (lambda: user(module, path))
        reset = getattr(module, "reset_parameters", None)
        if buffers and not (is_leaf(module) and callable(reset)):
            raise BuildError(
                f"build: buffers {', '.join(map(repr, buffers))} of {path!r} ({type(module).__name__}) "
                "are on meta, and no initialiser knows their values; pass a function as init_weights, "
                "or call init_empty_weights without include_buffers"
            )
        tokens = path.split(".") if path else []
        for depth in range(len(tokens), -1, -1):  # the module itself, then its owners
            owner = self.root.get_submodule(".".join(tokens[:depth]))
            init = getattr(owner, "_init_weights", None)
            if callable(init) and inspect.signature(init).parameters:
                return lambda: init(module)
            if callable(init) and owner is module:
                return lambda: init()
        if callable(reset):
            return lambda: reset()
        if any(True for _ in module.children()):
            warn(f"build: no initialiser for the parameters of {path!r} itself; they are zero")
            return None
        raise BuildError(
            f"build: {path!r} ({type(module).__name__}) is on meta, without _init_weights and "
            "reset_parameters; pass a function of a module as init_weights"
        )

    def _whole_tensors(
        self, path: str, module: nn.Module, names: list[str], initialise: Callable[[], object] | None
    ) -> dict[str, Tensor]:
        """Initialise whole tensors on the first process and broadcast them."""
        # Every process learns whether the first one succeeded; else the others would wait for its broadcast.
        if self.ranks.rank == 0:
            try:
                wholes = self._initialised(path, module, names, initialise)
            except BaseException:
                self._first_succeeded(False)
                raise
            self._first_succeeded(True)
        else:
            if not self._first_succeeded(True):
                raise BuildError(f"build: the first process could not initialise {path!r}")
            wholes = {name: self._empty(module, name) for name in names}
        if self.ranks.size > 1:
            for whole in wholes.values():
                dist.broadcast(whole, group=self.ranks.group, group_src=0)
        return wholes

    def _first_succeeded(self, is_well: bool) -> bool:
        """Return on every process whether the first one succeeded."""
        if self.ranks.size == 1:
            return is_well
        flag = torch.tensor([is_well], dtype=torch.int32, device=self.device)
        dist.broadcast(flag, group=self.ranks.group, group_src=0)
        return bool(flag.item())

    def _empty(self, module: nn.Module, name: str) -> Tensor:
        tensor: Tensor = getattr(module, name)
        shard = sharding_of(module).tensors.get(name)
        shape = tensor.shape if shard is None else shard.orig_shape
        return torch.empty(shape, dtype=tensor.dtype, device=self.device)

    def _initialised(
        self, path: str, module: nn.Module, names: list[str], initialise: Callable[[], object] | None
    ) -> dict[str, Tensor]:
        """Initialise a module while it holds whole tensors and the attributes of the whole layer."""
        every = [
            *(name for name, parameter in module._parameters.items() if parameter is not None),
            *(name for name, _ in module.named_buffers(recurse=False) if name in names),
        ]
        before = {name: getattr(module, name) for name in every}
        wholes = {name: self._empty(module, name) for name in every}
        attributes = sharding_of(module).attributes
        ours = {name: getattr(module, name) for name in attributes}
        # NaN marks elements that the initialiser leaves untouched; the check at the end reports them.
        for name, whole in wholes.items():
            whole.fill_(float("nan") if whole.is_floating_point() and initialise is not None else 0)
            is_parameter = isinstance(before[name], nn.Parameter)
            setattr(module, name, nn.Parameter(whole, before[name].requires_grad) if is_parameter else whole)
        try:
            for name, value in attributes.items():
                setattr(module, name, value)
            with torch.random.fork_rng(), torch.no_grad():
                # Unlike hash(), the digest is the same in every process and every run.
                key = hashlib.blake2b(f"{self.seed}:{path}".encode(), digest_size=7).digest()
                torch.manual_seed(int.from_bytes(key, "big"))
                if initialise is not None:
                    initialise()
            values = {name: getattr(module, name).detach() for name in names}
        finally:
            for name, value in (before | ours).items():
                setattr(module, name, value)
        for name, whole in values.items():
            if whole.is_floating_point() and bool(whole.isnan().any()):
                raise BuildError(
                    f"build: the initialiser of {path!r} ({type(module).__name__}) leaves "
                    f"{name!r} without values"
                )
        return values


# --- Targets of a build ---


@dataclass(frozen=True, slots=True)
class Target:
    """A runtime that a scheduled model is built for.

    Parameters
    ----------
    make
        Function of schedule, mesh and options that returns model and engine.
    options
        Names of the options that it accepts.
    part
        Function of the same arguments that returns the part of the model this process needs; None for all.
    """

    make: Callable[["Schedule", DeviceMesh | None, Mapping[str, Any]], tuple[nn.Module, Any]]
    options: frozenset[str] = frozenset()
    part: Callable[["Schedule", DeviceMesh | None, Mapping[str, Any]], nn.Module] | None = None


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
    """Make a scheduled model ready to run. All processes must call it.

    Parameters
    ----------
    sch
        Schedule of a whole model.
    target
        None or ``eager`` for the module itself, ``compile``, ``ddp``, ``fsdp`` or ``pipeline``.
    init_weights
        True to initialise parameters on ``meta`` with ``_init_weights`` of the module or of an owner, or with
        ``reset_parameters``; a function of module, or of module and path, that does; False to reject them.
    check
        Check for partly sharded layers and ties, missing synchronisation, and parameters that processes hold
        whole with other values.
    ties
        ``error`` or ``warn`` if only one member of a tie is sharded.
    mesh
        All processes, with dimensions named ``dp``, ``tp``, ``pp``, ``cp`` and, for experts over processes
        with samples of their own, ``ep``; None if they form one group.
    seed, device
        Seed of the initialisation, None for that of torch; device of the parameters, None for the CPU.
    reinitialise
        Replace existing values.
    **options
        Options of the target's class or function. For fsdp also ``units``, the paths of modules that are
        sharded separately; for a pipeline ``n_microbatches``, ``loss_fn`` (a mean over samples), and
        ``schedule``: ``1f1b`` (unless a plan says another one) or ``gpipe``, with one stage per process,
        ``interleaved``, with several, ``zero-bubble``, with one or several, or ``zero-bubble-v`` or
        ``dual-pipe-v``, with two. The latter three give gradients of weights after those of activations.

    Returns
    -------
    The scheduled module, or the stage of this process (a list of its stages if there are several), and its
    engine: compiled module, wrapped module, pipeline, or None.

    Raises
    ------
    ArgumentError
        A target, option or mesh is rejected; also a `ValueError`.
    KindError
        An argument is of another kind; also a `TypeError`.
    BuildError
        The schedule is not complete, or differs between processes, or so do parameters that they hold whole;
        also a `RuntimeError`.

    References
    ----------
    Slapo, section 3.4, the framework dialects that a schedule is built for.
    """
    target = "eager" if target is None else target
    if target not in tuple(TARGETS):
        raise ArgumentError(f"build: target is {target!r}; expected None or one of {', '.join(TARGETS)}")
    runtime = TARGETS[target]
    kinds: dict[str, tuple[object, Any]] = {
        "init_weights": (init_weights, bool | Callable), "check": (check, bool),
        "seed": (seed, int | None), "reinitialise": (reinitialise, bool),
    }  # fmt: skip
    for name, (value, kind) in kinds.items():
        check_kind(f"build: {name}", value, kind, KindError)
    check_device("build: ", device)
    if ties not in ("error", "warn"):
        raise ArgumentError(f"build: ties is {ties!r}; expected 'error' or 'warn'")
    if sch.parent is not None:
        raise ArgumentError(f"build of {sch.path!r}: expected the schedule of a whole model, sch.root")
    if unknown := sorted(options.keys() - runtime.options):
        known = f"one of {', '.join(sorted(runtime.options))}" if runtime.options else "no options"
        raise ArgumentError(f"build: unknown option {unknown[0]!r} for {target}; expected {known}")
    check_group(sch, mesh)
    check_same_program(sch)
    if check:
        check_complete(sch, ties)
    needed = None
    if runtime.part is not None:
        part = runtime.part(sch, mesh, options)
        needed = {id(tensor) for tensor in (*part.parameters(), *part.buffers())}
    if init_weights is False:
        check_filled(sch.mod, needed)
    else:
        initialiser = None if init_weights is True else init_weights
        # All processes need one seed: without an argument, that of the first process.
        seeds = [torch.initial_seed() if seed is None else seed]
        if seed is None and dist.is_initialized():
            dist.broadcast_object_list(seeds, src=0)
        consolidate(sch, initialiser, seed=seeds[0], device=device, again=reinitialise, only=needed)
    if check:
        check_same_values(sch)
    return runtime.make(sch, mesh, options)


def _eager(sch: "Schedule", mesh: DeviceMesh | None, options: Mapping[str, Any]) -> tuple[nn.Module, Any]:
    return sch.mod, None


def _compile(sch: "Schedule", mesh: DeviceMesh | None, options: Mapping[str, Any]) -> tuple[nn.Module, Any]:
    compiled: Any = torch.compile(sch.mod, **options)
    return compiled, compiled


def _replica_group(sch: "Schedule", mesh: DeviceMesh | None, target: str) -> dist.ProcessGroup | None:
    """Return the group of processes that hold the same part of the model, None for all."""
    if not dist.is_initialized():
        raise ArgumentError(f"build: {target} without a process group; call init_process_group first")
    if mesh is not None:
        if "dp" not in (mesh.mesh_dim_names or ()):
            raise ArgumentError(f"build: {target} on a mesh without dp; expected a dimension named dp")
        return mesh.get_group("dp")
    if is_parallel(sch) and sch.world_size > 1:
        raise ArgumentError(
            f"build: {target}, but all {sch.world_size} processes share one model; pass a mesh with dp and tp"
        )
    return None


def _ddp(sch: "Schedule", mesh: DeviceMesh | None, options: Mapping[str, Any]) -> tuple[nn.Module, Any]:
    group = _replica_group(sch, mesh, "ddp")
    wrapped = nn.parallel.DistributedDataParallel(sch.mod, process_group=group, **options)
    return wrapped, wrapped


def _fsdp(sch: "Schedule", mesh: DeviceMesh | None, options: Mapping[str, Any]) -> tuple[nn.Module, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard  # takes long to load

    _replica_group(sch, mesh, "fsdp")
    kind = next((parameter.device.type for parameter in sch.mod.parameters()), "cpu")
    along = init_device_mesh(kind, (dist.get_world_size(),)) if mesh is None else mesh["dp"]
    further = {name: value for name, value in options.items() if name != "units"}
    # Units first: the last fully_shard gathers only parameters outside of them.
    for unit in _fsdp_units(sch, options.get("units")):
        fully_shard(unit, mesh=along, **further)
    fully_shard(sch.mod, mesh=along, **further)
    if is_parallel(sch) and sch.world_size > 1:  # torch would sum over its own mesh only
        refuse_plain_clipping(sch.mod.parameters(), CLIPPING)
    return sch.mod, sch.mod


def _pipeline(sch: "Schedule", mesh: DeviceMesh | None, options: Mapping[str, Any]) -> tuple[nn.Module, Any]:
    return build_pipeline(sch, mesh, options, is_parallel(sch) and sch.world_size > 1)


def _stage(sch: "Schedule", mesh: DeviceMesh | None, options: Mapping[str, Any]) -> nn.Module:
    schedule = check_order(sch, options)
    parts, group = stages_of(sch, mesh, is_parallel(sch) and sch.world_size > 1)
    return own_stages(parts, group, schedule)


def _fsdp_units(sch: "Schedule", paths: object) -> list[nn.Module]:
    """Return the modules that are gathered separately: those named, or the outermost elements of lists."""
    if paths is not None:
        if isinstance(paths, str) or not isinstance(paths, list | tuple):
            raise ArgumentError(f"build: units is {paths!r}; expected a list of paths")
        return [sch[path].mod for path in paths]
    units, waiting = [], [sch]
    while waiting:
        node = waiting.pop(0)
        for name, child in node.child.items():
            if "." in name and any(True for _ in child.mod.parameters()):
                units.append(child.mod)
            else:
                waiting.append(child)
    return units


TARGETS: dict[str, Target] = {
    "eager": Target(_eager),
    "compile": Target(_compile, frozenset({"backend", "mode", "dynamic", "fullgraph", "options"})),
    "ddp": Target(_ddp, frozenset({"bucket_cap_mb", "find_unused_parameters", "gradient_as_bucket_view",
                                   "static_graph", "broadcast_buffers", "device_ids"})),
    "fsdp": Target(_fsdp, frozenset({"units", "mp_policy", "offload_policy", "reshard_after_forward"})),
    "pipeline": Target(_pipeline, frozenset({"n_microbatches", "loss_fn", "schedule"}), _stage),
}  # fmt: skip
"""Runtimes that a model can be built for, by name."""
