"""What a logical worker has for itself beside its data: random states, buffers, state that code registers.

One logical worker of a process is live at a time; what the others have lies here.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from makespan.errors import InputError
from makespan.papers.easyscale.runtime._exchange import Steps, share
from makespan.papers.easyscale.runtime._hashes import implicit_sha, raw_bytes
from makespan.papers.easyscale.runtime._mapping import RankMapping
from makespan.papers.easyscale.runtime._randomness import give_randomness, take_randomness
from makespan.papers.easyscale.runtime._seeding import seed_everything

__all__ = ["Contexts", "register_generator", "register_state", "registered_state"]


@dataclass(frozen=True, slots=True)
class _Hook:
    """How implicit state of a user's code is taken and given back."""

    get: Callable[[], Any]
    set: Callable[[Any], object]


_hooks: dict[str, _Hook] = {}


def register_state(name: str, get: Callable[[], Any], set: Callable[[Any], object]) -> None:  # noqa: A002
    """Let each logical worker have a state of its own that the runtime cannot find.

    Parameters
    ----------
    name
        Its name in checkpoints; an `makespan.errors.InputError` says that it is taken.
    get, set
        Return a copy of the state, and restore it. A state consists of tensors and plain values.
    """
    if name in _hooks:
        raise InputError(f"state {name!r} is registered already; accepted: a name of its own")
    _hooks[name] = _Hook(get, set)


def register_generator(name: str, generator: np.random.Generator | torch.Generator) -> None:
    """Let each logical worker have its own state of a random generator; see `register_state`."""
    if isinstance(generator, torch.Generator):
        register_state(name, generator.get_state, generator.set_state)
    else:
        bits = generator.bit_generator
        register_state(name, lambda: _listed(bits.state), lambda state: setattr(bits, "state", state))


def _listed(state: Any) -> Any:
    """State of a generator of NumPy with lists for arrays, which a checkpoint does not take."""
    if isinstance(state, Mapping):
        return {name: _listed(value) for name, value in state.items()}
    return state.tolist() if isinstance(state, np.ndarray | np.generic) else state


def registered_state() -> dict[str, _Hook]:
    """All that is registered in this process, by name; removing an entry undoes it."""
    return _hooks


def _take_states(device: torch.device) -> dict[str, Any]:
    """Copy all random and registered states, as tensors and plain values."""
    states: dict[str, Any] = {
        "random": torch.frombuffer(bytearray(take_randomness()), dtype=torch.uint8),
        "registered": {name: hook.get() for name, hook in _hooks.items()},
    }
    return states | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def _give_states(states: Mapping[str, Any], device: torch.device) -> None:
    """Restore what `_take_states` took, also after a way through a file."""
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
    states: dict[str, Any]
    buffers: dict[str, Tensor]


def _same_bits(before: Tensor, now: Tensor) -> bool:
    return before.shape == now.shape and torch.equal(raw_bytes(before), raw_bytes(now))


class Contexts:
    """Contexts of the logical workers that a process hosts.

    A buffer that a forward pass changes is found by comparison, and every logical worker then has its
    own; it had the old value before. Buffers are copied into the storage that the model has, so that views
    of it stay valid.

    Parameters
    ----------
    model, device
        Whose buffers are swapped, and where it is.
    ranks
        Virtual ranks; their random states follow from ``seed`` and the rank.
    """

    def __init__(self, model: nn.Module, device: torch.device, ranks: Sequence[int], seed: int) -> None:
        self._model, self._device = model, device
        self._shared = {name: one.detach().clone() for name, one in model.named_buffers()}
        outside = _take_states(device)
        self._own: dict[int, _Context] = {}
        for rank in ranks:
            seed_everything(seed, "rank", rank)
            # Registered state is the same for all at the start: only random states follow from the rank.
            self._own[rank] = _Context(_take_states(device), {})
        _give_states(outside, device)

    @property
    def mutable_buffers(self) -> list[str]:
        """Names of the buffers of which every logical worker has its own."""
        return sorted({name for one in self._own.values() for name in one.buffers})

    @contextmanager
    def live(self, rank: int) -> Iterator[None]:
        """Make a logical worker the live one; what it leaves behind is kept if nothing fails."""
        self.enter(rank)
        yield
        self.leave(rank)

    def enter(self, rank: int) -> None:
        """Put a context into the model and this process."""
        self._put_buffers(self._own[rank])
        _give_states(self._own[rank].states, self._device)

    def leave(self, rank: int) -> None:
        """Take a context out of the model and this process."""
        context, buffers = self._own[rank], dict(self._model.named_buffers())
        # Always, and by value: BatchNorm writes its statistics without a new version of the tensor.
        for name in [name for name, one in self._shared.items() if not _same_bits(one, buffers[name])]:
            self._divide(name)
        for name, kept in context.buffers.items():
            kept.copy_(buffers[name])
        context.states = _take_states(self._device)

    def sha(self, rank: int) -> str:
        """Hash of the buffers and random states of a logical worker."""
        outside = _take_states(self._device)
        with self.live(rank):
            found = implicit_sha(self._model, self._device)
        _give_states(outside, self._device)
        return found

    def values(self, rank: int) -> dict[str, Any]:
        """Context as tensors and plain values, for a checkpoint.

        All buffers are in it, because other processes may have seen others change.
        """
        one = self._own[rank]
        buffers = {name: kept.cpu() for name, kept in (self._shared | one.buffers).items()}
        return {"states": one.states, "buffers": buffers}

    def install(self, rank: int, values: Mapping[str, Any]) -> None:
        """Take over a context from a checkpoint."""
        context, buffers = self._own[rank], values["buffers"]
        if odd := sorted(set(buffers) ^ (set(self._shared) | set(context.buffers))):
            raise InputError(
                f"buffers {', '.join(odd)} are in the context or in the model; accepted: in both"
            )
        for name, value in buffers.items():
            if name in self._shared and not _same_bits(self._shared[name], value):
                self._divide(name)
            if name in context.buffers:
                context.buffers[name].copy_(value)
        context.states = dict(values["states"])

    def from_first(self, mapping: RankMapping, process: int) -> Steps[None]:
        """Give every logical worker the buffers of the first, as DistributedDataParallel does by default."""
        live = dict(self._model.named_buffers())
        if not live:
            return
        lengths = [0] * mapping.n_processes
        host = mapping.host(0)
        lengths[host] = sum(one.nbytes for one in live.values())
        own = (
            [raw_bytes(self._own[0].buffers.get(name, one)) for name, one in live.items()]
            if process == host
            else []
        )
        parts = yield from share(torch.cat([torch.empty(0, dtype=torch.uint8), *own]), lengths)
        sizes = [one.nbytes for one in live.values()]
        for (name, one), part in zip(live.items(), torch.split(parts[host], sizes), strict=True):
            value = part.clone().view(one.dtype).view(one.shape)
            if name in self._shared and not _same_bits(self._shared[name], value):
                self._divide(name)
            for context in self._own.values():
                if name in context.buffers:
                    context.buffers[name].copy_(value)

    def _divide(self, name: str) -> None:
        """Give every logical worker its own of a buffer that was shared so far."""
        value = self._shared.pop(name)
        for context in self._own.values():
            context.buffers[name] = value.clone()

    def _put_buffers(self, context: _Context) -> None:
        buffers = dict(self._model.named_buffers())
        with torch.no_grad():
            for name, kept in context.buffers.items():
                buffers[name].copy_(kept)
