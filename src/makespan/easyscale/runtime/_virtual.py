"""What code of the user sees of the job: its logical worker, and nothing of the processes.

Code of the user runs while a group stands in for the default one of ``torch.distributed``. It answers with
virtual rank and number, whoever asks in whatever way, and refuses to communicate: logical workers take turns,
so one that waited for another would wait forever, and a sum over processes would depend on the mapping.
"""

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from makespan.errors import InputError

__all__ = ["hide_processes", "seen_as"]

_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_OF_SLURM = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS")
_REFUSED = (
    "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_gather_single",
    "all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "batch_isend_irecv",
    "broadcast", "broadcast_object_list", "destroy_process_group", "gather", "gather_object",
    "init_process_group", "irecv", "isend", "monitored_barrier", "new_group", "new_subgroups",
    "new_subgroups_by_enumeration", "recv", "recv_object_list", "reduce", "reduce_scatter",
    "reduce_scatter_single", "reduce_scatter_tensor", "scatter", "scatter_object_list", "send",
    "send_object_list", "shrink_group", "split_group", "_get_default_store",
)  # fmt: skip
_OF_GROUP = (
    "all_gather_single", "all_gather_single_coalesced", "all_to_all_single", "_allgather_base", "allgather",
    "allgather_coalesced", "allgather_into_tensor_coalesced", "allreduce", "allreduce_coalesced", "alltoall",
    "alltoall_base", "barrier", "broadcast", "gather", "get_group_store", "merge_remote_group",
    "monitored_barrier", "recv", "recv_anysource", "reduce", "_reduce_scatter_base", "reduce_scatter",
    "reduce_scatter_single", "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "scatter",
    "send", "split_group",
)  # fmt: skip
_seen: list[tuple[int, int]] = []
_groups: list["_LogicalGroup"] = []


def _refuse(name: str) -> InputError:
    accepted = (
        "no communication: logical workers take turns, and what concerns all of them is done in after_reduce"
    )
    return InputError(f"code of the job calls torch.distributed.{name}; accepted: {accepted}")


class _LogicalGroup(dist.ProcessGroup):
    """The default group as code of the user finds it."""

    def __init__(self) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]

    def rank(self) -> int:
        """Virtual rank of the logical worker whose code runs."""
        return _seen[-1][0]

    def size(self) -> int:
        """Return the number of logical workers."""
        return _seen[-1][1]

    def name(self) -> str:
        """Name of its backend."""
        return "logical"


def _refusing(name: str) -> Callable[..., Any]:
    def method(self: _LogicalGroup, *arguments: Any, **named: Any) -> Any:
        raise _refuse(name)

    return method


for _name in _OF_GROUP:
    setattr(_LogicalGroup, _name, _refusing(_name))
# A device mesh, FSDP and functional collectives ask for it before they communicate.
_LogicalGroup.group_name = property(_refusing("ProcessGroup.group_name"))  # type: ignore[assignment]


@contextmanager
def seen_as(rank: int, n_logical_workers: int) -> Iterator[None]:
    """Answer as the process of this virtual rank would, of as many as there are logical workers."""
    values = dict(zip(_VARIABLES, (rank, rank, n_logical_workers, n_logical_workers), strict=True))
    values |= {
        name: value
        for name, value in zip(_OF_SLURM, (rank, rank, n_logical_workers), strict=True)
        if name in os.environ
    }
    before = {name: os.environ.get(name) for name in values}
    member: Any = distributed_c10d.GroupMember
    world = member.WORLD
    _seen.append((rank, n_logical_workers))
    os.environ |= {name: str(value) for name, value in values.items()}
    if _groups and world is not None:
        member.WORLD = _groups[-1]
    try:
        yield
    finally:
        _seen.pop()
        if _groups and world is not None:
            member.WORLD = world
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def hide_processes(n_logical_workers: int) -> None:
    """Let ``torch.distributed`` show code of the user its logical worker, and refuse to communicate by name.

    The process group of the processes has to be there. What this package and torch itself call outside of
    `seen_as` finds it as before.
    """
    world: Any = distributed_c10d._world
    while _groups:
        old = _groups.pop()
        world.pg_map.pop(old, None)
        world.pg_group_ranks.pop(old, None)
    group: Any = _LogicalGroup()
    world.pg_map[group] = ("logical", None)
    world.pg_group_ranks[group] = {rank: rank for rank in range(n_logical_workers)}
    _groups.append(group)
    for name in _REFUSED:
        original: Any = getattr(distributed_c10d, name, None)
        if not callable(original) or hasattr(original, "_is_refused_to_users"):
            continue
        guarded = _guarded(name, original)
        for module in (distributed_c10d, dist):
            if getattr(module, name, None) is original:
                setattr(module, name, guarded)


def _guarded(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def function(*arguments: Any, **named: Any) -> Any:
        if _seen:
            raise _refuse(name)
        return original(*arguments, **named)

    function._is_refused_to_users = True  # type: ignore[attr-defined]
    return function
