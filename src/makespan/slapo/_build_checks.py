"""What a schedule must have done before its model is built, as far as the tree can tell."""

import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from makespan.slapo._errors import ArgumentError, BuildError
from makespan.slapo._journal import digest
from makespan.slapo._layouts import PARTIAL, Sharding, sharding_of

if TYPE_CHECKING:
    from makespan.slapo._schedule import Schedule

__all__ = ["agreed_seed", "check_complete", "check_group", "check_same_program", "is_parallel"]


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
