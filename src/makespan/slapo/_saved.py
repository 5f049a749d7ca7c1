"""Bytes that a forward pass keeps for the backward one: what a schedule frees, and an artificial memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from makespan.slapo._errors import ScheduleError

__all__ = ["OutOfBudgetError", "SavedTensors", "saved_tensors"]


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
