"""Memory that a forward pass keeps for the backward pass, and the primitive ``fork_rng``."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree  # there is no public name for it

from makespan.slapo.errors import ArgumentError, ConflictError, ScheduleError
from makespan.slapo.schedule import (
    ForwardWrapper,
    Primitive,
    register_primitive,
    wrap_forward,
    wrappers_of,
)
from makespan.slapo.sharding import OVER, ranks_of
from makespan.slapo.tracing import check_is_called

if TYPE_CHECKING:
    from makespan.slapo.schedule import Schedule


# --- Saved tensors ---


class OutOfBudgetError(ScheduleError, MemoryError):
    """A forward pass saves more bytes for the backward pass than the budget allows, like a full device."""


@dataclass
class SavedTensors:
    """Bytes and storages saved so far."""

    n_bytes: int = 0
    storages: set[int] = field(default_factory=set)


@contextmanager
def saved_tensors(model: nn.Module, *, budget_bytes: int | None = None) -> Iterator[SavedTensors]:
    """Count the bytes saved in the block, each storage once, without parameters and buffers of the model.

    A checkpointed region only saves its inputs and the results that it is told to keep; bytes that it saves
    during recomputation do not count.

    Parameters
    ----------
    model
        Model whose own tensors do not count.
    budget_bytes
        Largest number of bytes that may be saved; None for no limit.

    Raises
    ------
    OutOfBudgetError
        The budget is exceeded; raised in the operation that exceeds it.
    """
    kept = SavedTensors()
    own_addresses = {
        _address(tensor) for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta
    }

    def keep(tensor: Tensor) -> Tensor:
        address = _address(tensor)
        if address not in own_addresses and address not in kept.storages:
            kept.storages.add(address)
            kept.n_bytes += tensor.untyped_storage().nbytes()
            if budget_bytes is not None and kept.n_bytes > budget_bytes:
                raise OutOfBudgetError(
                    f"the forward pass has saved {kept.n_bytes} bytes for the backward pass; "
                    f"the budget is {budget_bytes}"
                )
        return tensor

    _COUNTERS.append(keep)
    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, _same):
            yield kept
    finally:
        _COUNTERS.remove(keep)


_COUNTERS: list[Callable[[Tensor], Tensor]] = []


def count_kept(values: Any) -> None:
    """Count tensors that a checkpointed region keeps beside its inputs, in all blocks around it."""
    for keep in _COUNTERS:
        pytree.tree_map_only(Tensor, keep, values)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


# --- Random numbers that differ between processes ---

_OFFSET = 2718  # Megatron-LM, seeds of tensor-parallel regions


class Forked(ForwardWrapper):
    """A forward that draws from a separate generator in each process.

    Its seed is derived from one number of the global generator. So it changes with every call, but not when
    `torch.utils.checkpoint` repeats a call from the same global state.
    """

    op = "fork_rng"

    def __init__(self, module: nn.Module, rank: int, over: str = "tensor") -> None:
        super().__init__(module)
        self.rank, self.over = rank, over

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward with a seed of this process; then restore the global generators."""
        # Drawn outside of the fork, so that the global generators of all processes stay in step.
        base = int(torch.randint(2**62, ()).item())
        seed = base + _OFFSET + self.rank
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.random.fork_rng(devices=devices):
            torch.default_generator.manual_seed(seed)
            if devices:
                torch.cuda.manual_seed(seed)
            return self.inner(*args, **kwargs)


@register_primitive()
class ForkRng(Primitive):
    """Make a module that works on partitioned activations draw different numbers in each process."""

    @classmethod
    def name(cls) -> str:
        """Return ``fork_rng``."""
        return "fork_rng"

    @classmethod
    def apply(cls, sch: "Schedule", over: str = "tensor") -> None:
        """Run the forward of this module with a separate generator per process; no change for one process.

        Parameters
        ----------
        over
            ``tensor`` for the processes that share layers, ``context`` for those of context parallelism,
            ``experts`` for those of data parallelism that share experts; a module that works on parts of
            several has one after the other.
        """
        check_is_called(sch, cls.name())
        if over not in OVER:
            raise ArgumentError(f"fork_rng of {sch.path!r}: over is {over!r}; expected {' or '.join(OVER)}")
        if any(isinstance(one, Forked) and one.over == over for one in wrappers_of(sch.mod)):
            raise ConflictError(f"fork_rng of {sch.path!r}: it is already forked, {sch.conflict('fork_rng')}")
        ranks = ranks_of(sch, over)
        if ranks.size > 1:
            wrap_forward(sch.mod, Forked(sch.mod, ranks.rank, over))

    @classmethod
    def is_verifiable(cls) -> bool:
        """Return False: masks differ from those of the original model."""
        return False
