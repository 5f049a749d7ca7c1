"""Contexts of logical workers: the process identity that user code sees, and state swapped in and out.

One logical worker of a process is live at a time. Its random states, its buffers and the Python values that
forward passes change are in the model and the process; those of the others wait in `Contexts`.
"""

import functools
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d

from makespan.easyscale.job import RankMapping
from makespan.easyscale.randomness import (
    give_randomness,
    implicit_sha,
    raw_bytes,
    seed_everything,
    take_randomness,
    value_sha,
)
from makespan.easyscale.reduction import Steps, share
from makespan.easyscale.user_state import (
    ABSENT,
    UserState,
    is_filled_cache,
    is_opaque,
    listed,
    same_everywhere,
    same_value,
)
from makespan.errors import InputError

# --- Process identity that user code sees ---
#
# User code runs while another group replaces the default one of ``torch.distributed``. The group answers
# with the virtual rank and the number of logical workers, and rejects communication: logical workers take
# turns, so one that waited for another would wait forever, and a sum over processes would depend on the
# mapping.

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
    """Default process group that user code finds."""

    def __init__(self) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]

    def rank(self) -> int:
        """Virtual rank of the live logical worker."""
        return _seen[-1][0]

    def size(self) -> int:
        """Return the number of logical workers."""
        return _seen[-1][1]

    def name(self) -> str:
        """Name of the backend."""
        return "logical"


def _refusing(name: str) -> Callable[..., Any]:
    def method(self: _LogicalGroup, *arguments: Any, **named: Any) -> Any:
        raise _refuse(name)

    return method


for _name in _OF_GROUP:
    setattr(_LogicalGroup, _name, _refusing(_name))
# Device meshes, FSDP and functional collectives read the group name before they communicate.
_LogicalGroup.group_name = property(_refusing("ProcessGroup.group_name"))  # type: ignore[assignment]


@contextmanager
def seen_as(rank: int, n_logical_workers: int) -> Iterator[None]:
    """Show user code the identity of one process per logical worker: rank, world size, and environment."""
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
    """Make ``torch.distributed`` show user code its logical worker, and reject communication by name.

    The default process group must exist. Calls outside of `seen_as`, by this package and by torch, still
    reach it.
    """
    world: Any = distributed_c10d._world
    while _groups:  # of an earlier job in this process
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


# --- State of each logical worker: random states, buffers, registered state, Python values ---


@dataclass(frozen=True, slots=True)
class _Hook:
    """Functions that read and restore a registered state."""

    get: Callable[[], Any]
    set: Callable[[Any], object]


_hooks: dict[str, _Hook] = {}
_OTHER_SHAPE = 2  # kind of a buffer in `Contexts.first_for_all`; 0 is shared, 1 one per logical worker


def register_state(name: str, get: Callable[[], Any], set: Callable[[Any], object]) -> None:  # noqa: A002
    """Register state that the runtime cannot find by itself.

    Changes by forward passes, losses and samples belong to each logical worker. Changes by ``after_reduce``,
    an optimizer or a scheduler belong to all of them.

    Parameters
    ----------
    name
        Its name in checkpoints; an `makespan.errors.InputError` is raised if it is registered already.
    get, set
        Return a copy of the state, and restore it. A state consists of tensors and plain values.
    """
    if name in _hooks:
        raise InputError(f"state {name!r} is registered already; accepted: a name of its own")
    _hooks[name] = _Hook(get, set)


def register_generator(name: str, generator: np.random.Generator | torch.Generator) -> None:
    """Register a random generator, so that each logical worker has its own state; see `register_state`."""
    if isinstance(generator, torch.Generator):
        register_state(name, generator.get_state, generator.set_state)
    else:
        bits = generator.bit_generator
        register_state(name, lambda: listed(bits.state), lambda state: setattr(bits, "state", state))


def registered_state() -> dict[str, _Hook]:
    """Return the registered state of this process, by name; removing an entry unregisters it."""
    return _hooks


def _take_states(device: torch.device) -> dict[str, Any]:
    """Copy all random and registered states, as tensors and plain values."""
    states: dict[str, Any] = {
        "random": torch.frombuffer(bytearray(take_randomness()), dtype=torch.uint8),
        "registered": {name: hook.get() for name, hook in _hooks.items()},
    }
    return states | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def _give_states(states: Mapping[str, Any], device: torch.device) -> None:
    """Restore what `_take_states` returned, also after it was saved and loaded."""
    give_randomness(states["random"].numpy().tobytes())
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
    for name, value in states["registered"].items():
        if name not in _hooks:
            raise InputError(
                f"state {name!r} is in the context and not registered; call register_state first"
            )
        _hooks[name].set(value)


@dataclass(slots=True)
class _Context:
    """State of one logical worker; a buffer is None until this worker registers it."""

    states: dict[str, Any]
    buffers: dict[str, Tensor | None]
    python: dict[str, Any]


def _same_bits(before: Tensor, now: Tensor) -> bool:
    return before.shape == now.shape and torch.equal(raw_bytes(before), raw_bytes(now))


class Contexts:
    """Contexts of the logical workers that a process hosts, and the state that all of them share.

    Buffers, and values that user code keeps in Python, are shared until a forward pass changes one.
    Comparison finds the change, and from then on every logical worker has its own copy, which starts from
    the value before the change. Changes after the sum of gradients belong to all. Buffers are copied into
    the storage of the model, so that views of it stay valid as long as the shape does not change.

    Parameters
    ----------
    model, device
        The model whose buffers are swapped, and its device.
    ranks
        Virtual ranks; their random states follow from ``seed`` and the rank.
    user_state
        Finds the values that user code keeps in Python; None to ignore them.
    late
        Buffers that did not exist, or had another shape, when the model was built.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        ranks: Sequence[int],
        seed: int,
        user_state: UserState | None = None,
        late: Collection[str] = (),
    ) -> None:
        self._model, self._device, self._user, self._late = model, device, user_state, set(late)
        self._empty = {  # registered without a value; None must not unregister them
            f"{path}.{key}" if path else key
            for path, module in model.named_modules()
            for key, value in module._buffers.items()
            if value is None
        }
        self._shared = {name: one.detach().clone() for name, one in model.named_buffers()}
        self._built = {name: _form(one) for name, one in self._shared.items() if name not in late}
        self._own: dict[int, _Context] = {}
        outside = _take_states(device)
        for rank in ranks:
            seed_everything(seed, "rank", rank)
            # Registered state is the same for all at the start: only random states follow from the rank.
            self._own[rank] = _Context(_take_states(device), {}, {})
        seed_everything(seed, "shared")
        self._of_all = _take_states(device)
        _give_states(outside, device)
        self._registered = set(_hooks)
        self._first: dict[str, Tensor] = {}
        self._apart = set[str]()
        self._python: dict[str, Any] = {} if user_state is None else user_state.snapshot()
        self.notices: list[str] = []
        for name, kind in ({} if user_state is None else user_state.iterators()).items():
            problem = f"{name} is an iterator ({kind}), of which nobody can see how far it is"
            if name.startswith("model."):
                raise InputError(
                    f"{problem}; accepted: a number that a forward pass counts up, or register_state"
                )
            self.notices.append(f"{problem}; if a forward pass goes on with it, keep a number instead")
        self._shared_python: set[str] = set()
        self._own_registered: set[str] = set()
        self._missed: set[str] = set()

    @property
    def mutable_buffers(self) -> list[str]:
        """Names of the buffers that every logical worker has its own copy of."""
        return sorted({name for one in self._own.values() for name in one.buffers})

    @property
    def late_buffers(self) -> dict[str, bool]:
        """Buffers that came or changed their shape after the model was built; True for persistent ones."""
        now = self._model.named_buffers()
        late = {name for name, one in now if self._built.get(name) != _form(one)}
        late |= {
            name
            for context in self._own.values()
            for name, one in context.buffers.items()
            if one is None or self._built.get(name) != _form(one)
        }
        return {name: _is_persistent(self._model, name) for name in sorted(late)}

    @contextmanager
    def live(self, rank: int, *, watches: bool = False) -> Iterator[None]:
        """Make a logical worker the live one; its changes are kept unless an error is raised.

        ``watches`` compares all values that user code keeps in Python before and after.
        """
        self.enter(rank)
        yield
        self.leave(rank, watches=watches)

    def enter(self, rank: int) -> None:
        """Load a context into the model and this process."""
        context = self._own[rank]
        self._put_buffers(context.buffers)
        _give_states(context.states, self._device)
        if self._user is not None and context.python:
            self._user.give(context.python)

    def leave(self, rank: int, *, watches: bool = False) -> None:
        """Store the context of the live logical worker."""
        context, buffers = self._own[rank], dict(self._model.named_buffers())
        # Compare values, not tensor versions: BatchNorm writes its statistics without a new version.
        changed = [
            name
            for name, one in self._shared.items()
            if name not in buffers or not _same_bits(one, buffers[name])
        ]
        for name in changed:
            self._divide(name)
        for name in buffers.keys() - context.buffers.keys() - self._shared.keys():
            for other in self._own.values():
                other.buffers[name] = None  # until the pass of that logical worker registers it
        for name in context.buffers:
            context.buffers[name] = _kept(context.buffers[name], buffers.get(name))
        before, context.states = context.states["registered"], _take_states(self._device)
        if watches:
            self._own_registered |= {
                name
                for name, value in context.states["registered"].items()
                if not same_value(before.get(name), value)
            }
        if set(context.states["registered"]) != self._registered:
            odd = sorted(set(context.states["registered"]) ^ self._registered)
            accepted = "register_state in the functions that build model, optimizer and data"
            raise InputError(f"state {odd[0]!r} is registered by a forward pass; accepted: {accepted}")
        if self._user is not None:
            if watches:
                self._watch(rank)
            if context.python:
                context.python = self._user.take(context.python)

    def sha(self, rank: int) -> str:
        """Hash of the buffers and random states of a logical worker."""
        outside = _take_states(self._device)
        with self.live(rank):
            digest = implicit_sha(self._model, self._device)
        _give_states(outside, self._device)
        return digest

    def values(self, rank: int) -> dict[str, Any]:
        """Context as tensors and plain values, for a checkpoint.

        It holds all buffers, shared ones too, because other processes may have seen other buffers change.
        """
        context = self._own[rank]
        every = self._shared | context.buffers
        buffers = {name: kept.cpu() for name, kept in every.items() if kept is not None}
        python: dict[str, Any] = {"python": context.python} if context.python else {}
        return {"states": context.states, "buffers": buffers} | python

    def install(self, rank: int, values: Mapping[str, Any]) -> None:
        """Restore a context from a checkpoint."""
        context, buffers = self._own[rank], values["buffers"]
        known = set(self._shared) | set(context.buffers)
        if odd := sorted(name for name in (set(buffers) ^ known) - self._late):
            raise InputError(
                f"buffers {', '.join(odd)} are in the context or in the model; accepted: in both"
            )
        for name in known - set(buffers):
            self._divide(name)
            context.buffers[name] = None
        for name, value in buffers.items():
            if name in self._shared and not _same_bits(self._shared[name], value):
                self._divide(name)
            elif name not in known:
                for other in self._own.values():
                    other.buffers.setdefault(name, None)
            if name in context.buffers:
                context.buffers[name] = _kept(context.buffers[name], value.to(self._device))
        context.states = dict(values["states"])
        for name, value in values.get("python", {}).items():
            self._divide_python(name)
            context.python[name] = value

    def from_first(self, mapping: RankMapping, process: int) -> Steps[None]:
        """Give every logical worker the buffers of the first, as DistributedDataParallel does by default."""
        live = dict(self._model.named_buffers())
        if not live:
            return
        if late := self.late_buffers:
            found = f"buffer {next(iter(late))} came late or changed its shape"
            accepted = "buffers that the model is built with and that keep their shape, or buffers='per_rank'"
            raise InputError(f"{found}; accepted: {accepted}")
        values = yield from self._sent_by_first(live, mapping, process)
        for name, value in values.items():
            if name in self._shared and not _same_bits(self._shared[name], value):
                self._divide(name)
            for context in self._own.values():
                if name in context.buffers:
                    context.buffers[name] = _kept(context.buffers[name], value)

    def _sent_by_first(
        self, live: Mapping[str, Tensor], mapping: RankMapping, process: int
    ) -> Steps[dict[str, Tensor]]:
        """Return the buffers of the first logical worker, sent by the process that hosts it."""
        lengths, host = [0] * mapping.n_processes, mapping.host(0)
        lengths[host] = sum(one.nbytes for one in live.values())
        sent = []
        if process == host:
            kept = self._own[0].buffers
            sent = [raw_bytes(one if (own := kept.get(name)) is None else own) for name, one in live.items()]
        # The empty vector lets the other processes take part: torch.cat rejects an empty list.
        parts = yield from share(torch.cat([torch.empty(0, dtype=torch.uint8), *sent]), lengths)
        split = torch.split(parts[host], [one.nbytes for one in live.values()])
        return {
            name: part.clone().view(one.dtype).view(one.shape)
            for (name, one), part in zip(live.items(), split, strict=True)
        }

    # --- state of all logical workers ---

    def first_for_all(self, mapping: RankMapping, process: int) -> Steps[None]:
        """Send the buffers of the first logical worker to every process, for code that follows the sum.

        Each process sees only the passes of its own logical workers, so the processes first agree on the
        kind of every buffer: the maximum over processes of shared, one per logical worker, other shape.
        """
        self._first, self._apart = {}, set()
        if not self._built:
            return
        live, names = dict(self._model.named_buffers()), list(self._built)
        local = [
            _OTHER_SHAPE
            if name not in live or _form(live[name]) != self._built[name]
            else int(name not in self._shared)
            for name in names
        ]
        gathered = yield from share(
            torch.tensor(local, dtype=torch.uint8), [len(names)] * mapping.n_processes
        )
        kinds = dict(zip(names, torch.stack(gathered).amax(dim=0).tolist(), strict=True))
        self._apart = {name for name, kind in kinds.items() if kind == _OTHER_SHAPE}
        wanted = [name for name, kind in kinds.items() if kind == 1]
        for name in wanted:
            self._divide(name)
        if wanted and mapping.n_processes > 1:
            like = {name: live[name] for name in wanted}
            self._first = yield from self._sent_by_first(like, mapping, process)

    @contextmanager
    def live_for_all(self, *, watches: bool = False) -> Iterator[None]:
        """Make live the state that code after the sum of gradients may see, and keep its changes for all.

        This is the context of the first logical worker, as far as this process has it, and separate random
        states that are the same in all processes.
        """
        shown = self._own[min(self._own)]
        before = shown.buffers | self._first
        self._put_buffers(before)
        registered = shown.states["registered"]
        _give_states(self._of_all | {"registered": registered}, self._device)
        if self._user is not None and shown.python:
            self._user.give(shown.python)
        yield
        buffers = dict(self._model.named_buffers())
        for name, now in buffers.items():
            if name in self._shared:
                if not _same_bits(self._shared[name], now):
                    self._shared[name] = now.detach().clone()
            elif (old := before.get(name)) is None or not _same_bits(old, now):
                if name in self._apart or name not in self._built:
                    found = (
                        f"buffer {name} came late or changed its shape, and what follows the sum changes it"
                    )
                    raise InputError(f"{found}; accepted: a buffer that the model is built with")
                for context in self._own.values():
                    context.buffers[name] = now.detach().clone()
        self._of_all = _take_states(self._device)
        for name, value in self._of_all.pop("registered").items():
            if not same_value(registered.get(name), value):
                for context in self._own.values():
                    context.states["registered"][name] = _hooks[name].get()
        if self._user is not None:
            self._keep_python_of_all(shown, watches=watches)

    def _keep_python_of_all(self, shown: _Context, *, watches: bool) -> None:
        user = self._user
        if user is None:
            return
        for name, value in user.take(shown.python).items():
            if not same_value(shown.python[name], value):
                for context in self._own.values():
                    context.python[name] = value
        if watches:
            now = user.snapshot(shown.python)
            changed = self._changed_in_python(now, set(shown.python))
            for name in sorted(changed):
                self._check_kind(name, self._python.get(name, ABSENT), now.get(name, ABSENT))
                self._notice_opaque(name, now.get(name, ABSENT), "what follows the sum of gradients")
            self._shared_python |= changed
            self._python = now

    def values_of_all(self) -> dict[str, Any]:
        """State that all logical workers share, without buffers, for a checkpoint."""
        values: dict[str, Any] = {"states": {n: one for n, one in self._of_all.items() if n != "registered"}}
        if self._user is None:
            return values
        own_names = self._python_names()
        now = self._user.snapshot(own_names)
        self._shared_python |= self._changed_in_python(now, own_names)
        self._python = now
        return values | {"python": self._user.take(sorted(self._shared_python - own_names))}

    def install_for_all(self, values: Mapping[str, Any]) -> None:
        """Restore the shared state from a checkpoint."""
        self._of_all = self._of_all | dict(values.get("states", {}))
        if self._user is not None:
            python = values.get("python", {})
            self._user.give(python)
            self._shared_python |= set(python)
            self._python = self._user.snapshot(self._python_names())

    def sha_of_all(self) -> dict[str, str]:
        """Hash the state, beside parameters and optimizer, that all logical workers share; by name."""
        found = {f"buffer {name}": one for name, one in self._model.named_buffers() if name in self._shared}
        values: dict[str, Any] = dict(found)
        states = self._own[min(self._own)].states["registered"]
        values |= {f"state {name!r}": one for name, one in states.items() if name not in self._own_registered}
        values["the random states that follow the sum"] = self._of_all["random"]
        if self._user is not None:
            values |= same_everywhere(self._user.take(sorted(self._shared_python)))
        return {name: value_sha(value) for name, value in values.items()}

    # --- state in Python ---

    def begin_watching(self) -> None:
        """Record the values that user code keeps in Python, and which ones changed while nobody watched."""
        if self._user is None:
            return
        now = self._user.snapshot(self._python_names())
        self._missed = self._changed_in_python(now, self._shared_python)
        self._python = now

    def _changed_in_python(self, now: Mapping[str, Any], left_out: set[str]) -> set[str]:
        """Names of shared values that differ from the last record."""
        before = self._python
        names = (now.keys() | before.keys()) - left_out
        return {one for one in names if not same_value(before.get(one, ABSENT), now.get(one, ABSENT))}

    def _python_names(self) -> set[str]:
        return {name for one in self._own.values() for name in one.python}

    def _watch(self, rank: int) -> None:
        """Find the values in Python that the pass of a logical worker changed."""
        user = self._user
        if user is None:
            return
        own = self._python_names()
        now = user.snapshot(own)
        for name in sorted(self._changed_in_python(now, own)):
            old, new = self._python.get(name, ABSENT), now.get(name, ABSENT)
            self._check_kind(name, old, new)
            if name.startswith("data.") and is_filled_cache(old, new):
                self._python[name] = new  # a cache of samples, the same for every logical worker
                continue
            if is_opaque(new) or is_opaque(old):
                self._notice_opaque(name, new, "a forward pass")
                self._python[name] = new
                continue
            if name in self._missed and len(self._own) > 1:
                self.notices.append(
                    f"{name} was changed by forward passes before that was noticed, so equal bits are not "
                    "promised; make it a buffer, or call register_state"
                )
            self._divide_python(name)
        context = self._own[rank]
        context.python = user.take(context.python)

    def _check_kind(self, name: str, old: Any, new: Any) -> None:
        """Reject an object that a restart could not build again."""
        kind = "" if self._user is None else self._user.foreign_object(new)
        if kind and self._user is not None and self._user.foreign_object(old) != kind:
            accepted = "one that is made where model, optimizer or data are built"
            raise InputError(
                f"{name} became a {kind}, which no checkpoint can make again; accepted: {accepted}"
            )

    def _notice_opaque(self, name: str, value: Any, by: str) -> None:
        if is_opaque(value) and len(value) > 1:
            self.notices.append(
                f"{name} is changed by {by} and is a {value[1]}, which no checkpoint holds and all logical "
                "workers share; make it tensors or plain values, or call register_state"
            )

    def _divide_python(self, name: str) -> None:
        """Give every logical worker its own copy of a Python value that was shared so far."""
        value = self._python.pop(name, ABSENT)
        self._shared_python.discard(name)
        for context in self._own.values():
            context.python.setdefault(name, value)

    # --- buffers ---

    def _divide(self, name: str) -> None:
        """Give every logical worker its own copy of a buffer that was shared so far."""
        if name in self._shared:
            value = self._shared.pop(name)
            for context in self._own.values():
                context.buffers[name] = value.clone()

    def _put_buffers(self, kept: Mapping[str, Tensor | None]) -> None:
        buffers = dict(self._model.named_buffers()) if kept else {}
        with torch.no_grad():
            for name, value in kept.items():
                now = buffers.get(name)
                if value is not None and now is not None and _form(now) == _form(value):
                    now.copy_(value)
                else:
                    bind_buffer(self._model, name, value)
                    if value is None and name in self._empty:
                        path, _, key = name.rpartition(".")
                        self._model.get_submodule(path)._buffers[key] = None


def _form(tensor: Tensor) -> tuple[torch.dtype, torch.Size]:
    return tensor.dtype, tensor.shape


def _kept(old: Tensor | None, value: Tensor | None) -> Tensor | None:
    """Return a copy of a buffer, in the storage of the old copy if it fits."""
    if value is None or old is None or _form(old) != _form(value):
        return None if value is None else value.detach().clone()
    return old.copy_(value)


def bind_buffer(
    model: nn.Module, name: str, value: Tensor | None, *, is_persistent: bool | None = None
) -> None:
    """Register a buffer anew with a copy of a value of any shape; None removes it."""
    path, _, key = name.rpartition(".")
    module = model.get_submodule(path)
    if value is not None:
        kept = _is_persistent(model, name) if is_persistent is None else is_persistent
        module.register_buffer(key, value.clone(), persistent=kept)
    elif key in module._buffers:
        del module._buffers[key]


def _is_persistent(model: nn.Module, name: str) -> bool:
    path, _, key = name.rpartition(".")
    return key not in model.get_submodule(path)._non_persistent_buffers_set
