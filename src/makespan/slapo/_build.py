"""From a schedule to a model that runs: parameters get values, and the model is handed to what runs it."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from makespan.slapo._build_checks import (
    agreed_seed,
    check_complete,
    check_group,
    check_same_program,
    is_parallel,
)
from makespan.slapo._consolidate import Initialiser, check_filled, consolidate
from makespan.slapo._errors import ArgumentError
from makespan.slapo._shard import CLIPPING
from makespan.training import refuse_plain_clipping

if TYPE_CHECKING:
    from makespan.slapo._schedule import Schedule

__all__ = ["TARGETS", "Target", "build"]


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
    from makespan.slapo._pipeline import build_pipeline  # takes long to load

    return build_pipeline(sch, mesh, options, is_parallel(sch) and sch.world_size > 1)


def _stage(sch: "Schedule", mesh: DeviceMesh | None) -> nn.Module:
    from makespan.slapo._pipeline import stages_of  # takes long to load

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
