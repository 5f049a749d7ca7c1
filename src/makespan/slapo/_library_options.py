"""Options of the schedules of families, and the modules that these put into models."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree  # there is no public name for it

from makespan.slapo._errors import ArgumentError, close_names

__all__ = ["BroadcastInputs", "EfficientAttention", "ScheduleOptions"]

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_ATTENTIONS = ("eager", "sdpa")
_POLICIES = ("even", "head")


@dataclass(frozen=True, slots=True)
class ScheduleOptions:
    """How a family is scheduled.

    Parameters
    ----------
    dtype
        Type of parameters: ``fp32``, ``fp16`` or ``bf16``, one of them; None for what they are.
    ckpt_ratio, ckpt_policy
        Share of the layers that are recomputed, and which: spread (``even``) or the first (``head``).
    shard_embedding
        Whether vocabulary and logits are split.
    attn
        ``eager`` as the model has it, ``sdpa`` for one kernel.
    fuse, compiler
        Whether element-wise operations are fused, and by what, see the primitive ``fuse``.
    pipeline_cuts
        Number of stages of nearly equal numbers of layers, or paths of modules behind which a stage ends.
    group
        Processes of tensor parallelism, as for `create_schedule`.
    prefix
        Path of the model in a larger one.
    broadcast_input
        Whether the first process gives its samples to the others of the group.
    """

    dtype: str | None = None
    ckpt_ratio: float = 0.0
    ckpt_policy: str = "even"
    shard_embedding: bool = False
    attn: str = "eager"
    fuse: bool = False
    compiler: str | None = "inductor"
    pipeline_cuts: int | Sequence[str] = 1
    group: dist.ProcessGroup | None = None
    prefix: str = ""
    broadcast_input: bool = False

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "ScheduleOptions":
        """Check options by name and value."""
        names = [one.name for one in fields(cls)]
        for name in options:
            if name not in names:
                raise ArgumentError(f"apply_schedule: no option {name!r}; {close_names(name, names)}")
        chosen = cls(**options)
        for name, accepted in (("dtype", _DTYPES), ("attn", _ATTENTIONS), ("ckpt_policy", _POLICIES)):
            found = getattr(chosen, name)
            if found not in (None, *accepted) or (found is None and name != "dtype"):
                raise ArgumentError(
                    f"apply_schedule: {name} is {found!r}; accepted: one of {', '.join(accepted)}"
                )
        if chosen.broadcast_input and chosen.pipeline_cuts != 1:
            raise ArgumentError(
                "apply_schedule: broadcast_input and pipeline_cuts, but stages run no hooks of the whole "
                "model; accepted: one of them"
            )
        ratio: Any = chosen.ckpt_ratio
        if not isinstance(ratio, int | float) or not 0 <= ratio <= 1:
            raise ArgumentError(f"apply_schedule: ckpt_ratio is {ratio!r}; accepted: from 0 to 1")
        return chosen

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """Type of the parameters, None for what they are."""
        return None if self.dtype is None else _DTYPES[self.dtype]


class EfficientAttention(nn.Module):
    """Attention in one kernel.

    Parameters
    ----------
    dropout
        Probability with which a share is dropped in training.
    scale
        What scores are multiplied by.
    """

    def __init__(self, dropout: float, scale: float) -> None:
        super().__init__()
        self.p, self.scale = dropout, scale

    def extra_repr(self) -> str:
        """Return what a printed schedule shows."""
        return f"dropout={self.p}, scale={self.scale}"

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        """Return what ``(n, heads, seq, size)`` queries see; ``mask`` is added to the scaled scores."""
        rate = self.p if self.training else 0.0
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=rate, scale=self.scale
        )


class BroadcastInputs:
    """A hook that gives a module the tensors that the first process of a group passes it."""

    with_kwargs = True

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the inputs of the first process; those that were passed stay as they are."""
        group = self.group if self.group is not None else dist.group.WORLD
        source = 0 if group is None else dist.get_global_rank(group, 0)

        def sent(value: Tensor) -> Tensor:
            copied = value.clone()
            with torch.no_grad():  # gradients pass, as if the values had been the same
                dist.broadcast(copied, source, group=self.group)
            return copied

        return pytree.tree_map_only(Tensor, sent, (args, kwargs))
