"""Random numbers that differ between the processes of a group, while the global generators stay in step."""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from makespan.slapo._errors import ConflictError
from makespan.slapo._registry import Primitive, register_primitive
from makespan.slapo._trace import check_is_called
from makespan.slapo._wrapping import ForwardWrapper, wrap_forward, wrapped_forward

if TYPE_CHECKING:
    from makespan.slapo._schedule import Schedule

__all__ = ["ForkRng", "Forked"]

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
