"""Contexts of ESTs: the process identity that user code sees, and state that is swapped in and out.

One EST (EasyScaleThread, the logical worker of the paper) of a process is live at a time. Its random states,
its buffers and the Python values that forward passes change are in the model and the process; those of the
others are stored in `Contexts`.
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
    RandomStates,
    implicit_sha,
    seed_everything,
    value_sha,
)
from makespan.easyscale.reduction import Steps, share
from makespan.easyscale.user_state import (
    ABSENT,
    UserState,
    is_absent,
    is_filled_cache,
    is_opaque,
    listed,
    same_value,
    unkept_change,
    without_ids,
)
from makespan.errors import InputError
from makespan.training.bits import has_equal_bits, raw_bytes

# --- Process identity that user code sees ---
#
# While user code runs, a virtual group replaces the default group of ``torch.distributed``. It answers with
# the virtual rank and the number of ESTs, and rejects communication: ESTs take turns, so one that waited for
# another would deadlock, and a sum over processes would depend on the mapping.

_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_SLURM_VARIABLES = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS")
_REJECTED_FUNCTIONS = (
    "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_gather_single",
    "all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "batch_isend_irecv",
    "broadcast", "broadcast_object_list", "destroy_process_group", "gather", "gather_object",
    "init_process_group", "irecv", "isend", "monitored_barrier", "new_group", "new_subgroups",
    "new_subgroups_by_enumeration", "recv", "recv_object_list", "reduce", "reduce_scatter",
    "reduce_scatter_single", "reduce_scatter_tensor", "scatter", "scatter_object_list", "send",
    "send_object_list", "shrink_group", "split_group", "_get_default_store",
)  # fmt: skip
_REJECTED_METHODS = (
    "all_gather_single", "all_gather_single_coalesced", "all_to_all_single", "_allgather_base", "allgather",
    "allgather_coalesced", "allgather_into_tensor_coalesced", "allreduce", "allreduce_coalesced", "alltoall",
    "alltoall_base", "barrier", "broadcast", "gather", "get_group_store", "merge_remote_group",
    "monitored_barrier", "recv", "recv_anysource", "reduce", "_reduce_scatter_base", "reduce_scatter",
    "reduce_scatter_single", "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "scatter",
    "send", "split_group",
)  # fmt: skip
_identities: list[tuple[int, int]] = []  # virtual rank and number of ESTs, innermost last
_groups: list["_VirtualGroup"] = []
_real_groups: list[Any] = []  # default group of the process, which the virtual one replaces


def _communication_error(name: str) -> InputError:
    return InputError(
        f"code of the job calls torch.distributed.{name}; expected no communication, because logical "
        "workers take turns; move code that concerns all of them to after_reduce, or behind the turns of a "
        "loop"
    )


class _VirtualGroup(dist.ProcessGroup):
    """Default process group that user code sees."""

    def __init__(self) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]

    def rank(self) -> int:
        """Return the virtual rank of the live EST."""
        return _identities[-1][0]

    def size(self) -> int:
        """Return the number of ESTs."""
        return _identities[-1][1]

    def name(self) -> str:
        """Return the name of the backend."""
        return "logical"


def _rejecting_method(name: str) -> Callable[..., Any]:
    def method(self: _VirtualGroup, *arguments: Any, **named: Any) -> Any:
        raise _communication_error(name)

    return method


for _name in _REJECTED_METHODS:
    setattr(_VirtualGroup, _name, _rejecting_method(_name))
# Device meshes, FSDP and functional collectives read the group name before they communicate.
_VirtualGroup.group_name = property(_rejecting_method("ProcessGroup.group_name"))  # type: ignore[assignment]


@contextmanager
def virtual_rank(rank: int, n_logical_workers: int) -> Iterator[Callable[[int], None]]:
    """Show user code the identity of one process per logical worker: rank, world size, and environment.

    Gives a function that shows another rank instead, for the rest of the block. A block inside of another
    one, and that function, set only what differs: this is done for each micro-batch.
    """
    saved: dict[str, str | None] = {}

    def show(number: int) -> None:
        if _identities[-1] == (number, n_logical_workers):
            return
        _identities[-1] = number, n_logical_workers
        values = dict(zip(_VARIABLES, (number, number, n_logical_workers, n_logical_workers), strict=True))
        slurm = zip(_SLURM_VARIABLES, (number, number, n_logical_workers), strict=True)
        values |= {name: value for name, value in slurm if name in os.environ}
        for name, value in values.items():
            found, text = os.environ.get(name), str(value)
            if found != text:
                saved.setdefault(name, found)
                os.environ[name] = text

    member: Any = distributed_c10d.GroupMember
    world = member.WORLD
    _identities.append(_identities[-1] if _identities else (-1, -1))
    if _groups and world is not None:
        member.WORLD = _groups[-1]
    try:
        show(rank)
        yield show
    finally:
        _identities.pop()
        if _groups and world is not None:
            member.WORLD = world
        for name, value in saved.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def own_communication() -> Iterator[None]:
    """Leave the identity that user code sees for a block of this package, which may communicate."""
    member: Any = distributed_c10d.GroupMember
    identities, world = list(_identities), member.WORLD
    _identities.clear()
    if _real_groups:
        member.WORLD = _real_groups[-1]
    try:
        yield
    finally:
        _identities[:] = identities
        member.WORLD = world


def patch_distributed(n_logical_workers: int) -> None:
    """Make ``torch.distributed`` answer user code as a process of its EST, and reject communication by name.

    The default process group must exist. Calls outside of `virtual_rank`, by this package and by torch, still
    reach it.
    """
    world: Any = distributed_c10d._world
    while _groups:  # of an earlier job in this process
        old = _groups.pop()
        world.pg_map.pop(old, None)
        world.pg_group_ranks.pop(old, None)
    group: Any = _VirtualGroup()
    world.pg_map[group] = ("logical", None)
    world.pg_group_ranks[group] = {rank: rank for rank in range(n_logical_workers)}
    _groups.append(group)
    _real_groups[:] = [distributed_c10d.GroupMember.WORLD]
    for name in _REJECTED_FUNCTIONS:
        original: Any = getattr(distributed_c10d, name, None)
        if not callable(original) or hasattr(original, "_rejects_user_code"):
            continue
        guarded = _guarded(name, original)
        for module in (distributed_c10d, dist):
            if getattr(module, name, None) is original:
                setattr(module, name, guarded)


def _guarded(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def function(*arguments: Any, **named: Any) -> Any:
        if _identities:
            raise _communication_error(name)
        return original(*arguments, **named)

    function._rejects_user_code = True  # type: ignore[attr-defined]
    return function


# --- State of each EST: random states, buffers, registered state, Python values ---


@dataclass(frozen=True, slots=True)
class _RegisteredState:
    """Functions that read and restore a registered state."""

    get: Callable[[], Any]
    set: Callable[[Any], object]


_registered: dict[str, _RegisteredState] = {}
_in_place: list["Contexts"] = []  # at most one, whose EST has left its context in this process
_MOST_NAMED = 3  # values in a notice
_SHARED, _PER_EST, _OTHER_SHAPE = range(3)  # kinds of a buffer in `Contexts.send_first_buffers`


def register_state(name: str, get: Callable[[], Any], set: Callable[[Any], object]) -> None:  # noqa: A002
    """Register state that the runtime cannot find by itself.

    Each logical worker keeps its own changes by forward passes, losses and samples. Changes by
    ``after_reduce``, an optimizer or a scheduler apply to all logical workers.

    Parameters
    ----------
    name
        Its name in checkpoints; an `makespan.errors.InputError` is raised if it is registered already.
    get, set
        Return a copy of the state, and restore it. A state consists of tensors and plain values.
    """
    if name in _registered:
        raise InputError(f"state {name!r} is already registered; expected another name")
    _registered[name] = _RegisteredState(get, set)


def register_generator(name: str, generator: np.random.Generator | torch.Generator) -> None:
    """Register a random generator, so that each logical worker has its own state; see `register_state`."""
    if isinstance(generator, torch.Generator):
        register_state(name, generator.get_state, generator.set_state)
    else:
        bits = generator.bit_generator
        register_state(name, lambda: listed(bits.state), lambda state: setattr(bits, "state", state))


def registered_state() -> dict[str, _RegisteredState]:
    """Return the registered state of this process, by name; removing an entry unregisters it."""
    return _registered


def _capture_states(device: torch.device) -> dict[str, Any]:
    """Copy all random and registered states."""
    states: dict[str, Any] = {
        "random": RandomStates.capture(),
        "registered": {name: hook.get() for name, hook in _registered.items()},
    }
    if device.type != "cpu":
        states["cuda"] = torch.get_device_module(device).get_rng_state(device)
    return states


def _restore_states(states: Mapping[str, Any], device: torch.device) -> None:
    """Restore what `_capture_states` returned."""
    states["random"].restore()
    if "cuda" in states:
        torch.get_device_module(device).set_rng_state(states["cuda"], device)
    for name, value in states["registered"].items():
        if name not in _registered:
            raise InputError(
                f"state {name!r} is in the context and not registered; call register_state first"
            )
        _registered[name].set(value)


def _plain_states(states: Mapping[str, Any]) -> dict[str, Any]:
    """Convert what `_capture_states` returned to tensors and plain values, for a checkpoint."""
    raw = bytearray(states["random"].to_bytes())
    return {**states, "random": torch.frombuffer(raw, dtype=torch.uint8)}


def _states_of(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Convert `_plain_states` back."""
    return {**plain, "random": RandomStates.from_bytes(plain["random"].numpy().tobytes())}


@dataclass(slots=True)
class _Context:
    """State of one EST; a buffer is None until a forward pass of this EST registers it."""

    states: dict[str, Any]
    buffers: dict[str, Tensor | None]
    python: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _OpenState:
    """State that is shown to code after the sum of gradients: whose context, and its values before."""

    shown: _Context
    buffers: dict[str, Tensor | None]
    registered: dict[str, Any]
    watches: bool


class Contexts:
    """Contexts of the ESTs that a process hosts, and the state that all ESTs share.

    A buffer, or a value that user code keeps in Python, is in one of two states:

    - shared: all ESTs have the same value, in ``_shared`` (a buffer) or where user code keeps it (a value)
    - per EST: every context has its own copy

    It starts as shared and becomes per EST when a forward pass changes it, which a comparison of bits
    detects; all copies then start from the value before the change. It never becomes shared again. Changes
    after the sum of gradients apply to all ESTs. Buffers are copied into the storage of the model, so that
    views of it remain valid as long as the shape does not change.

    A single EST leaves its context in the model and the process between passes, where nothing else draws or
    writes. Whoever needs the context calls `store` first.

    Parameters
    ----------
    model, device
        The model whose buffers are swapped, and its device.
    ranks
        Virtual ranks; their random states follow from ``seed`` and the rank.
    user_state
        Finder of the values that user code keeps in Python; None to ignore them.
    late
        Buffers that did not exist, or had another shape, when the model was built.

    Attributes
    ----------
    changes_for_all
        Buffers, registered state and Python values that code after the last sum of gradients has changed for
        all ESTs, once `store` has applied them.
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
        self._walk = _walked(model)
        self._empty = {  # registered without a value; None must not unregister them
            f"{path}.{key}" if path else key
            for path, module in model.named_modules()
            for key, value in module._buffers.items()
            if value is None
        }
        self._shared = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
        self._built = {name: _form(buffer) for name, buffer in self._shared.items() if name not in late}
        self._contexts: dict[int, _Context] = {}
        outside = _capture_states(device)
        for rank in ranks:
            seed_everything(seed, "rank", rank)
            # Registered state starts the same for all ESTs: only random states follow from the rank.
            self._contexts[rank] = _Context(_capture_states(device), {}, {})
        seed_everything(seed, "shared")
        self._shared_states = _capture_states(device)
        _restore_states(outside, device)
        self._registered = set(_registered)
        self._first: dict[str, Tensor] = {}
        self._apart = set[str]()
        self._open: _OpenState | None = None
        self._python: dict[str, Any] = {} if user_state is None else user_state.snapshot()
        self.notices: list[str] = []
        for name, kind in ({} if user_state is None else user_state.iterators()).items():
            problem = f"{name} is an iterator ({kind}), whose position cannot be saved"
            if name.startswith("model."):
                raise InputError(
                    f"{problem}; expected a counter that a forward pass increments, or register_state"
                )
            self.notices.append(f"{problem}; if a forward pass advances it, use a counter instead")
        self._shared_python: set[str] = set()
        self._unsure = set[str]()  # of these, the ones that changed where nobody watched who changed them
        self._is_in_place = False
        self._changed_registered: set[str] = set()
        self._missed: set[str] = set()
        self._watched_python: dict[str, Any] = dict(self._python)
        self.changes_for_all: dict[str, dict[str, Any]] = {}

    @property
    def mutable_buffers(self) -> list[str]:
        """Names of the buffers of which every EST has its own copy."""
        self.store()
        return sorted({name for context in self._contexts.values() for name in context.buffers})

    @property
    def late_buffers(self) -> dict[str, bool]:
        """Buffers that were added or resized after the model was built; True for persistent ones."""
        self.store()
        now = self._model.named_buffers()
        late = {name for name, buffer in now if self._built.get(name) != _form(buffer)}
        late |= {
            name
            for context in self._contexts.values()
            for name, buffer in context.buffers.items()
            if buffer is None or self._built.get(name) != _form(buffer)
        }
        return {name: _is_persistent(self._model, name) for name in sorted(late)}

    @contextmanager
    def live(self, rank: int, *, watches: bool = False) -> Iterator[None]:
        """Make an EST the live one; its changes are stored unless an error is raised.

        ``watches`` compares all values that user code keeps in Python before and after.
        """
        self.enter(rank)
        yield
        self.leave(rank, watches=watches)

    def enter(self, rank: int) -> None:
        """Load a context into the model and this process."""
        if self._is_in_place and _in_place == [self]:
            return
        self.store()
        context = self._contexts[rank]
        self._put_buffers(context.buffers)
        _restore_states(context.states, self._device)
        if self._user is not None and context.python:
            self._user.give(context.python)

    def leave(self, rank: int, *, watches: bool = False) -> None:
        """Store the context of the live EST; a single EST leaves it in place, until somebody needs it."""
        if set(_registered) != self._registered:
            odd = sorted(set(_registered) ^ self._registered)
            raise InputError(
                f"state {odd[0]!r} is registered by a forward pass; expected register_state in the "
                "functions that build model, optimizer and data"
            )
        self._is_in_place = len(self._contexts) == 1 and not watches
        _in_place[:] = [self] if self._is_in_place else []
        if not self._is_in_place:
            self._store(rank, watches=watches)

    def store(self) -> None:
        """Store the context that a single EST of this process left in place, or the state shown to all."""
        self.close_for_all()
        for contexts in list(_in_place):
            contexts._is_in_place = False
            _in_place.clear()
            if set(_registered) == contexts._registered:  # otherwise another job has begun
                contexts._store(next(iter(contexts._contexts)), watches=False)

    def _store(self, rank: int, *, watches: bool) -> None:
        context, buffers = self._contexts[rank], self._live_buffers()
        # Compare values, not tensor versions: BatchNorm writes its statistics without a new version.
        changed = [
            name
            for name, shared in self._shared.items()
            if name not in buffers or not has_equal_bits(shared, buffers[name])
        ]
        for name in changed:
            self.make_per_worker(name)
        for name in buffers.keys() - context.buffers.keys() - self._shared.keys():
            for other in self._contexts.values():
                other.buffers[name] = None  # until a pass of that EST registers it
        for name in context.buffers:
            context.buffers[name] = _stored(context.buffers[name], buffers.get(name))
        before, context.states = context.states["registered"], _capture_states(self._device)
        if watches:
            self._changed_registered |= {
                name
                for name, value in context.states["registered"].items()
                if not same_value(before.get(name), value)
            }
        if self._user is not None:
            if watches:
                self._watch(rank)
            if context.python:
                context.python = self._user.take(context.python)

    def sha(self, rank: int) -> str:
        """Return a hash of the buffers and random states of an EST."""
        self.store()
        outside = _capture_states(self._device)
        with self.live(rank):
            digest = implicit_sha(self._model, self._device)
        self.store()
        _restore_states(outside, self._device)
        return digest

    def values(self, rank: int) -> dict[str, Any]:
        """Return a context as tensors and plain values, for a checkpoint.

        It holds all buffers, shared ones too, because other processes may have seen other buffers change.
        """
        self.store()
        context = self._contexts[rank]
        all_buffers = self._shared | context.buffers
        buffers = {name: buffer.cpu() for name, buffer in all_buffers.items() if buffer is not None}
        python: dict[str, Any] = {"python": context.python} if context.python else {}
        return {"states": _plain_states(context.states), "buffers": buffers} | python

    def install(self, rank: int, values: Mapping[str, Any]) -> None:
        """Restore a context from a checkpoint."""
        self.store()
        context, buffers = self._contexts[rank], values["buffers"]
        known = set(self._shared) | set(context.buffers)
        if odd := sorted(name for name in (set(buffers) ^ known) - self._late):
            raise InputError(
                f"buffers {', '.join(odd)} are only in the context or only in the model; expected both"
            )
        for name in known - set(buffers):
            self.make_per_worker(name)
            context.buffers[name] = None
        for name, value in buffers.items():
            if name in self._shared and not has_equal_bits(self._shared[name], value):
                self.make_per_worker(name)
            elif name not in known:
                for other in self._contexts.values():
                    other.buffers.setdefault(name, None)
            if name in context.buffers:
                context.buffers[name] = _stored(context.buffers[name], value.to(self._device))
        context.states = _states_of(values["states"])
        for name, value in values.get("python", {}).items():
            self.make_python_per_worker(name)
            context.python[name] = value

    def discard(self) -> None:
        """Drop what passes, or code after the sum of gradients, have left in the model and this process."""
        if _in_place == [self]:
            _in_place.clear()
        self._is_in_place, self._open = False, None

    def rehost(
        self, contexts: Mapping[int, Mapping[str, Any]], changes: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Host other ESTs, with contexts from `values`; what passes have changed since then is dropped.

        Parameters
        ----------
        contexts
            Values by virtual rank, all after the same mini-batch.
        changes
            Changes by code after the sum of gradients of that mini-batch, see ``changes_for_all``; they came
            after the passes, so they apply to all contexts.
        """
        self.discard()
        self._first, self._apart = {}, set()
        buffers = {name for context in self._contexts.values() for name in context.buffers}
        first = next(iter(contexts.values()))
        for name in self._live_buffers().keys() - first["buffers"].keys():
            bind_buffer(self._model, name, None)
        # Buffers that are shared have the value of any context.
        self._put_buffers(
            {name: value.to(self._device) for name, value in first["buffers"].items() if value is not None}
        )
        for name in self._shared.keys() & first["buffers"].keys():
            self._shared[name] = first["buffers"][name].to(self._device).clone()
        if self._user is not None:
            # Values that became per EST in the dropped passes are shared again, as they were before these.
            kept = {name for context in contexts.values() for name in context.get("python", {})}
            dropped = {name: self._watched_python.get(name, ABSENT) for name in self._python_names() - kept}
            self._user.give(dropped)
            self._python |= {name: value for name, value in dropped.items() if not is_absent(value)}
        self._late |= first["buffers"].keys() - self._shared.keys() - buffers
        self._contexts = {
            rank: _Context(_states_of(values["states"]), dict.fromkeys(buffers), {})
            for rank, values in contexts.items()
        }
        for rank, values in contexts.items():
            self._late |= values["buffers"].keys() ^ first["buffers"].keys()
            self.install(rank, values)
        for context in self._contexts.values():
            context.states["registered"] |= changes.get("registered", {})
            context.python |= changes.get("python", {})
            for name, value in changes.get("buffers", {}).items():
                if name in context.buffers:
                    context.buffers[name] = value.to(self._device).clone()
        shared = {
            name: value.to(self._device)
            for name, value in changes.get("buffers", {}).items()
            if name in self._shared
        }
        self._shared |= {name: value.clone() for name, value in shared.items()}
        self._put_buffers(shared)

    def broadcast_buffers(self, mapping: RankMapping, process: int) -> Steps[None]:
        """Give every EST the buffers of the first, as DistributedDataParallel does by default."""
        self.store()
        live = self._live_buffers()
        if not live:
            return
        if late := self.late_buffers:
            raise InputError(
                f"buffer {next(iter(late))} was added or resized after the model was built; expected "
                "buffers that keep their shape, or buffers='per_rank'"
            )
        values = yield from self._buffers_of_first(live, mapping, process)
        for name, value in values.items():
            if name in self._shared and not has_equal_bits(self._shared[name], value):
                self.make_per_worker(name)
            for context in self._contexts.values():
                if name in context.buffers:
                    context.buffers[name] = _stored(context.buffers[name], value)

    def _buffers_of_first(
        self, live: Mapping[str, Tensor], mapping: RankMapping, process: int
    ) -> Steps[dict[str, Tensor]]:
        """Return the buffers of the first EST, sent by the process that hosts it."""
        lengths, host = [0] * mapping.n_processes, mapping.host(0)
        lengths[host] = sum(buffer.nbytes for buffer in live.values())
        sent = []
        if process == host:
            stored = self._contexts[0].buffers
            for name, buffer in live.items():
                copy = stored.get(name)
                sent.append(raw_bytes(buffer if copy is None else copy))
        # The empty vector lets the other processes take part: torch.cat rejects an empty list.
        parts = yield from share(torch.cat([torch.empty(0, dtype=torch.uint8), *sent]), lengths)
        split = torch.split(parts[host], [buffer.nbytes for buffer in live.values()])
        return {
            name: part.clone().view(buffer.dtype).view(buffer.shape)
            for (name, buffer), part in zip(live.items(), split, strict=True)
        }

    # --- state that all ESTs share ---

    def send_first_buffers(self, mapping: RankMapping, process: int) -> Steps[None]:
        """Send the buffers of the first EST to every process, for code that follows the sum of gradients.

        Each process sees only the passes of its own ESTs, so the processes first agree on the kind of every
        buffer: the maximum over processes of shared, per EST, other shape.
        """
        self.store()
        self._first, self._apart = {}, set()
        if not self._built:
            return
        live, names = self._live_buffers(), list(self._built)
        local = [
            _OTHER_SHAPE
            if name not in live or _form(live[name]) != self._built[name]
            else (_SHARED if name in self._shared else _PER_EST)
            for name in names
        ]
        gathered = yield from share(
            torch.tensor(local, dtype=torch.uint8), [len(names)] * mapping.n_processes
        )
        kinds = dict(zip(names, torch.stack(gathered).amax(dim=0).tolist(), strict=True))
        self._apart = {name for name, kind in kinds.items() if kind == _OTHER_SHAPE}
        per_est = [name for name, kind in kinds.items() if kind == _PER_EST]
        for name in per_est:
            self.make_per_worker(name)
        if per_est and mapping.n_processes > 1:
            like = {name: live[name] for name in per_est}
            self._first = yield from self._buffers_of_first(like, mapping, process)

    @contextmanager
    def active_for_all(self, *, watches: bool = False) -> Iterator[None]:
        """Activate the state of `open_for_all`, and apply its changes to all ESTs after the block."""
        self.open_for_all(watches=watches)
        yield
        self.close_for_all()

    def open_for_all(self, *, watches: bool = False) -> None:
        """Activate the state that code after the sum of gradients may see, until somebody needs a context.

        This is the context of the first EST, as far as this process has it, and separate random states that
        are the same in all processes. `store` applies its changes to all ESTs.
        """
        if self._open is not None:
            return
        self.store()
        shown = self._contexts[min(self._contexts)]
        before = shown.buffers | self._first
        self._put_buffers(before)
        registered = shown.states["registered"]
        _restore_states(self._shared_states | {"registered": registered}, self._device)
        if self._user is not None and shown.python:
            self._user.give(shown.python)
        self._open = _OpenState(shown, before, registered, watches)

    def close_for_all(self) -> None:
        """Apply the changes since `open_for_all` to all ESTs."""
        if self._open is None:
            return
        opened, self._open = self._open, None
        shown, before, registered = opened.shown, opened.buffers, opened.registered
        buffers = self._live_buffers()
        changed: dict[str, Any] = {}
        self.changes_for_all = {"buffers": changed, "registered": {}, "python": {}}
        for name, now in buffers.items():
            if name in self._shared:
                if not has_equal_bits(self._shared[name], now):
                    self._shared[name] = changed[name] = now.detach().clone()
            elif (old := before.get(name)) is None or not has_equal_bits(old, now):
                if name in self._apart or name not in self._built:
                    raise InputError(
                        f"code after the sum of gradients changes buffer {name}, which was added or resized "
                        "after the model was built; expected a buffer that the model is built with"
                    )
                for context in self._contexts.values():
                    context.buffers[name] = now.detach().clone()
                changed[name] = now.detach().clone()
                if name in self._first:
                    self._first[name] = now.detach().clone()
        self._shared_states = _capture_states(self._device)
        for name, value in self._shared_states.pop("registered").items():
            if not same_value(registered.get(name), value):
                self.changes_for_all["registered"][name] = value
                for context in self._contexts.values():
                    context.states["registered"][name] = _registered[name].get()
        if self._user is not None:
            self._store_shared_python(shown, watches=opened.watches)

    def _store_shared_python(self, shown: _Context, *, watches: bool) -> None:
        user = self._user
        if user is None:
            return
        for name, value in user.take(shown.python).items():
            if not same_value(shown.python[name], value):
                self.changes_for_all["python"][name] = value
                for context in self._contexts.values():
                    context.python[name] = value
        if watches:
            now = user.snapshot(shown.python)
            changed = self._changed_in_python(now, set(shown.python))
            for name in sorted(changed):
                self._check_kind(name, self._python.get(name, ABSENT), now.get(name, ABSENT))
                self._notice_opaque(name, now.get(name, ABSENT), "code after the sum of gradients")
            self._shared_python |= changed
            self._unsure -= changed
            unsure = self._unsure & self._missed & self._shared_python
            if odd := sorted(unsure, key=lambda name: (len(name), name)):
                more = f" and {len(odd) - _MOST_NAMED} more" if len(odd) > _MOST_NAMED else ""
                self.notices.append(
                    f"{', '.join(odd[:_MOST_NAMED])}{more} changed in a mini-batch in which nobody looked "
                    "by what, with one value for all logical workers; if a forward pass changes it, use a "
                    "buffer, or call register_state"
                )
            self._python = now

    def shared_values(self, *, records: bool = True) -> dict[str, Any]:
        """Return the state that all ESTs share, without buffers, for a checkpoint.

        ``records`` also records which values in Python have changed since the last look; without it, a value
        that a pass has changed unwatched is found as such later.
        """
        self.store()
        states = _plain_states(self._shared_states)
        states.pop("registered", None)
        values: dict[str, Any] = {"states": states}
        if self._user is None:
            return values
        per_est = self._python_names()
        now = self._user.snapshot(per_est)
        shared = self._shared_python | self._changed_in_python(now, per_est)
        if records:
            self._shared_python, self._python = shared, now
        return values | {"python": self._user.take(sorted(shared - per_est))}

    def install_shared(self, values: Mapping[str, Any]) -> None:
        """Restore the shared state from a checkpoint."""
        self.store()
        if states := values.get("states", {}):
            self._shared_states = self._shared_states | _states_of(states)
        if self._user is not None:
            python = values.get("python", {})
            self._user.give(python)
            self._shared_python |= set(python)
            self._python = self._user.snapshot(self._python_names())

    def shared_hashes(self) -> dict[str, str]:
        """Return hashes of the state that all ESTs share besides parameters and optimizer, by name."""
        self.store()
        values: dict[str, Any] = {
            f"buffer {name}": buffer for name, buffer in self._model.named_buffers() if name in self._shared
        }
        states = self._contexts[min(self._contexts)].states["registered"]
        values |= {
            f"state {name!r}": value for name, value in states.items() if name not in self._changed_registered
        }
        values["the random states after the sum of gradients"] = _plain_states(self._shared_states)["random"]
        if self._user is not None:
            values |= without_ids(self._user.take(sorted(self._shared_python - self._unsure)))
        return {name: value_sha(value) for name, value in values.items()}

    # --- state in Python ---

    def begin_watching(self) -> None:
        """Record the values that user code keeps in Python, and which of them changed unwatched."""
        self.store()
        if self._user is None:
            return
        now = self._user.snapshot(self._python_names())
        self._missed, before = self._changed_in_python(now, self._shared_python), self._python
        for name in sorted(self._missed):
            old, new = before.get(name, ABSENT), now.get(name, ABSENT)
            self._check_kind(name, old, new)
            if is_opaque(new):
                self._notice_opaque(name, new, "training code")
            elif not is_filled_cache(old, new):
                self._shared_python.add(name)
                self._unsure.add(name)
        self._python, self._watched_python = now, dict(now)

    def _changed_in_python(self, now: Mapping[str, Any], left_out: set[str]) -> set[str]:
        """Return the names of shared values that differ from the last record."""
        if self._user is not None:  # modules that a pass has imported
            known = self._python.keys() | self._python_names()
            first = {name: value for name, value in self._user.imported().items() if name not in known}
            self._python |= first
            self._watched_python |= first
        before = self._python
        names = (now.keys() | before.keys()) - left_out
        return {name for name in names if not same_value(before.get(name, ABSENT), now.get(name, ABSENT))}

    def _python_names(self) -> set[str]:
        """Return the names of the values in Python of which every EST has its own copy."""
        return {name for context in self._contexts.values() for name in context.python}

    def _watch(self, rank: int) -> None:
        """Find the values in Python that the pass of an EST changed, and make them per EST."""
        user = self._user
        if user is None:
            return
        per_est = self._python_names()
        now = user.snapshot(per_est)
        for name in sorted(self._changed_in_python(now, per_est)):
            old, new = self._python.get(name, ABSENT), now.get(name, ABSENT)
            self._check_kind(name, old, new)
            if name.startswith("data.") and is_filled_cache(old, new):
                self._python[name] = new  # a cache of samples, the same for every EST
                continue
            if is_opaque(new) or is_opaque(old):
                self._notice_opaque(name, new, "a forward pass")
                self._python[name] = new
                continue
            if kind := unkept_change(old, new):
                self._notice_opaque(name, ("kept", kind), "a forward pass")
            if name in self._missed and len(self._contexts) > 1:
                self.notices.append(
                    f"{name} was changed by forward passes before the change was detected, so equal bits "
                    "are not guaranteed; make it a buffer, or call register_state"
                )
            self.make_python_per_worker(name)
        context = self._contexts[rank]
        context.python = user.take(context.python)

    def _check_kind(self, name: str, old: Any, new: Any) -> None:
        """Reject an object that a restart could not build again."""
        kind = "" if self._user is None else self._user.foreign_object(new)
        if kind and self._user is not None and self._user.foreign_object(old) != kind:
            raise InputError(
                f"{name} became a {kind}, which a checkpoint cannot rebuild; expected an object that is "
                "created where model, optimizer or data are built"
            )

    def _notice_opaque(self, name: str, value: Any, by: str) -> None:
        if is_opaque(value) and len(value) > 1:
            self.notices.append(
                f"{by} changes {name}, a {value[1]}, which no checkpoint holds and all logical workers "
                "share; use tensors or plain values, or call register_state"
            )

    def make_python_per_worker(self, name: str) -> None:
        """Give every EST its own copy of a Python value that was shared so far."""
        value = self._python.pop(name, ABSENT)
        self._shared_python.discard(name)
        for context in self._contexts.values():
            context.python.setdefault(name, value)

    # --- buffers ---

    def make_per_worker(self, name: str) -> None:
        """Give every EST its own copy of a buffer that was shared so far."""
        if name in self._shared:
            value = self._shared.pop(name)
            for context in self._contexts.values():
                context.buffers[name] = value.clone()

    def _live_buffers(self) -> dict[str, Tensor]:
        """Return the buffers in the model, as ``named_buffers`` does.

        That walks all modules, in every micro-batch; here modules are looked for only where children changed.
        """
        found, seen = dict[str, Tensor](), set[int]()
        for prefix, module, children in self._walk:
            if module._modules != children:
                self._walk = _walked(self._model)
                return self._live_buffers()
            if module._buffers:
                for key, buffer in module._buffers.items():
                    if buffer is not None and id(buffer) not in seen:
                        seen.add(id(buffer))
                        found[f"{prefix}{key}"] = buffer
        return found

    def _put_buffers(self, stored: Mapping[str, Tensor | None]) -> None:
        """Copy stored buffers into the model; a value of None removes the buffer."""
        buffers = self._live_buffers() if stored else {}
        with torch.no_grad():
            for name, value in stored.items():
                now = buffers.get(name)
                if value is not None and now is not None and _form(now) == _form(value):
                    now.copy_(value)
                else:
                    bind_buffer(self._model, name, value)
                    if value is None and name in self._empty:
                        path, _, key = name.rpartition(".")
                        self._model.get_submodule(path)._buffers[key] = None


def _walked(model: nn.Module) -> list[tuple[str, nn.Module, dict[str, nn.Module | None]]]:
    """List all modules of a model, with the prefix of their names and their children."""
    return [
        (f"{path}." if path else "", module, dict(module._modules)) for path, module in model.named_modules()
    ]


def _form(tensor: Tensor) -> tuple[torch.dtype, torch.Size]:
    return tensor.dtype, tensor.shape


def _stored(old: Tensor | None, value: Tensor | None) -> Tensor | None:
    """Return a copy of a buffer, in the storage of the old copy if it fits."""
    if value is None or old is None or _form(old) != _form(value):
        return None if value is None else value.detach().clone()
    return old.copy_(value)


def bind_buffer(
    model: nn.Module, name: str, value: Tensor | None, *, is_persistent: bool | None = None
) -> None:
    """Replace a buffer by a copy of a value of any shape; None removes the buffer."""
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
