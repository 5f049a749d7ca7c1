"""Gradients of a scheduled model, limited by the norm of all that its processes hold."""

from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

from makespan.slapo._build_checks import is_parallel
from makespan.slapo._errors import ArgumentError
from makespan.slapo._layouts import sharding_of
from makespan.slapo._state import owners_of
from makespan.training import clip_grad_norm as clip_everywhere

if TYPE_CHECKING:
    from makespan.slapo._schedule import Schedule

__all__ = ["clip_grad_norm"]


def clip_grad_norm(
    sch: "Schedule", max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale the gradients of a scheduled model so that their norm is at most so large.

    The norm is that of the whole model, whatever is split: parts of sharded parameters are added up, and what
    all processes have, or several stages of a pipeline share, counts once. All processes must call this after
    the backward passes, or after the step of a pipeline.

    Parameters
    ----------
    sch
        Schedule of a whole model, built for any target.
    max_norm, norm_type, error_if_nonfinite
        As of `torch.nn.utils.clip_grad_norm_`, whose bits are the same where nothing is split.

    Returns
    -------
    The norm before, a scalar, the same on all processes.

    Raises
    ------
    ArgumentError
        This is no root; also a `ValueError`.
    """
    if sch.parent is not None:
        raise ArgumentError(f"clip_grad_norm of {sch.path!r}: accepted: the schedule of a whole model")
    owners, is_shared = owners_of(sch), is_parallel(sch) and sch.world_size > 1
    held, counted = {}, set()
    for path, module in sch.mod.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) in held:
                continue  # of a tie the first place counts, in the stage that has it
            held[id(parameter)] = parameter
            shard = sharding_of(module).tensors.get(name)
            counts_here = not is_shared or sch.rank == 0 or (shard is not None and shard.world_size > 1)
            if counts_here and not owners.is_elsewhere(f"{path}.{name}".removeprefix(".")):
                counted.add(id(parameter))
    groups: list[dist.ProcessGroup | None] = [sch.group] if is_shared else []
    if owners.ranks.size > 1:
        groups.append(owners.ranks.group)
    return clip_everywhere(
        held.values(), max_norm, norm_type, counted=counted, groups=groups,
        error_if_nonfinite=error_if_nonfinite,
    )  # fmt: skip
