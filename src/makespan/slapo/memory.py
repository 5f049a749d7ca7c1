"""Memory that a forward pass keeps for the backward one, and the primitive ``fork_rng``."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from makespan.slapo.errors import ConflictError, ScheduleError
from makespan.slapo.schedule import (
    ForwardWrapper,
    Primitive,
    register_primitive,
    wrap_forward,
    wrapped_forward,
)
from makespan.slapo.tracing import check_is_called

if TYPE_CHECKING:
    from makespan.slapo.schedule import Schedule


# ------------------------------------------------------------------------------------------------
# Bytes that a forward pass keeps for the backward one: what a schedule frees, and an artificial memory.


class OutOfBudgetError(ScheduleError, MemoryError):
    """A forward pass keeps more bytes for the backward pass than it may; where a device would be full."""


@dataclass
class SavedTensors:
    """What was kept so far."""

    n_bytes: int = 0
    storages: set[int] = field(default_factory=set)


@contextmanager
def saved_tensors(model: nn.Module, *, budget_bytes: int | None = None) -> Iterator[SavedTensors]:
    """Count what is kept in the block, each storage once, without parameters and buffers of the model.

    A checkpointed region keeps its inputs only; what it keeps while it is computed again is not counted.

    Parameters
    ----------
    model
        Model whose own tensors do not count.
    budget_bytes
        Most bytes that may be kept; None for any number.

    Raises
    ------
    OutOfBudgetError
        More than that is kept; raised in the operation that keeps too much.
    """
    found = SavedTensors()
    own = {_address(one) for one in (*model.parameters(), *model.buffers()) if not one.is_meta}

    def keep(tensor: Tensor) -> Tensor:
        address = _address(tensor)
        if address not in own and address not in found.storages:
            found.storages.add(address)
            found.n_bytes += tensor.untyped_storage().nbytes()
            if budget_bytes is not None and found.n_bytes > budget_bytes:
                raise OutOfBudgetError(
                    f"the forward pass keeps {found.n_bytes} bytes for the backward pass so far; "
                    f"accepted: at most {budget_bytes}"
                )
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, _same):
        yield found


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


# ------------------------------------------------------------------------------------------------
# Random numbers that differ between the processes of a group, while the global generators stay in step.

_OFFSET = 2718  # Megatron-LM, seeds of tensor-parallel regions


class Forked(ForwardWrapper):
    """A forward that draws from generators of this process.

    The seed follows from one number of the global generator. So it is another one at every call, and the same
    one when `torch.utils.checkpoint` repeats the call with the global state of the first.
    """

    op = "fork_rng"

    def __init__(self, module: nn.Module, rank: int) -> None:
        super().__init__(module)
        self.rank = rank

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward under a seed of this process; then put the global generators back in step."""
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
    """Let a module that works on partitioned activations draw other numbers in each process."""

    @classmethod
    def name(cls) -> str:
        """Return ``fork_rng``."""
        return "fork_rng"

    @classmethod
    def apply(cls, sch: "Schedule") -> None:
        """Run the forward of this module under a generator of each process; of one process, unchanged."""
        check_is_called(sch, cls.name())
        if wrapped_forward(sch.mod, Forked):
            raise ConflictError(f"fork_rng of {sch.path!r}: it is forked already, {sch.conflict('fork_rng')}")
        if sch.world_size > 1:
            wrap_forward(sch.mod, Forked(sch.mod, sch.rank))

    @classmethod
    def is_verifiable(cls) -> bool:
        """Say that masks differ from those of the original model."""
        return False
