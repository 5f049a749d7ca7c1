"""Gradients limited by the norm of all of them, whoever holds which part.

Torch's own `torch.nn.utils.clip_grad_norm_` sees the gradients of one process. Where processes hold different
parts of a model it takes the norm of a part for that of the whole, and each process scales by another factor.
"""

import functools
import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad as torchs

from makespan.errors import InputError, MakespanError
from makespan.training._optimizer import is_distributed

__all__ = ["PartialNormError", "clip_grad_norm", "refuse_plain_clipping"]

_REMEDY = "clipped_by"
"""Attribute of a parameter of which torch's own clipping would take a part for the whole."""


class PartialNormError(MakespanError, RuntimeError):
    """Gradients were to be clipped by the norm of what one process holds; the message says what to call."""


@torch.no_grad()
def clip_grad_norm(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    counted: Collection[int] | None = None,
    groups: Sequence[dist.ProcessGroup | None] = (),
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale gradients so that the norm of all of them, over all processes, is at most so large.

    All processes of the groups must call this. What is distributed by torch itself, as `fully_shard` does, is
    added up over its mesh; without that and without groups the bits are those of
    `torch.nn.utils.clip_grad_norm_`.

    Parameters
    ----------
    parameters
        Those that this process holds; those without a gradient are left out.
    max_norm
        Largest norm.
    norm_type
        Which norm, > 0; ``inf`` for the largest magnitude.
    counted
        Identities (`id`) of the parameters whose gradients this process counts, so that one that several
        processes have counts once; None for all. The others are scaled, too.
    groups
        Processes that hold other parts of the model, one group after the other; None for all processes.
    error_if_nonfinite
        Whether a norm that is no finite number is an error.

    Returns
    -------
    The norm before, a scalar, the same on all processes.

    Raises
    ------
    InputError
        A limit or a kind of norm is not accepted.
    RuntimeError
        The norm is not finite, where that is an error; no gradient has changed.
    """
    if not max_norm > 0 or not norm_type > 0:
        raise InputError(
            f"clip_grad_norm: found max_norm {max_norm}, norm_type {norm_type}; accepted: numbers > 0"
        )
    held = list(parameters)
    own = [one for one in held if one.grad is not None]
    gradients: list[Tensor] = [one.grad for one in own if one.grad is not None]
    if not groups and not any(map(is_distributed, gradients)):
        return torchs.clip_grad_norm_(own, max_norm, norm_type, error_if_nonfinite)
    device = next((one.device for one in (*gradients, *held)), torch.device("cpu"))
    chosen = [
        gradient
        for one, gradient in zip(own, gradients, strict=True)
        if counted is None or id(one) in counted
    ]
    is_largest = math.isinf(norm_type)
    # In doubles, and summed before the root is taken, so that the order of processes does not matter much.
    total = _over_meshes(chosen, norm_type, device)
    for group in groups:
        dist.all_reduce(total, dist.ReduceOp.MAX if is_largest else dist.ReduceOp.SUM, group=group)
    norm = total if is_largest else total ** (1.0 / norm_type)
    if error_if_nonfinite and not math.isfinite(norm.item()):
        raise RuntimeError(f"clip_grad_norm: the norm of order {norm_type} is {norm.item()}")
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        part = _local(gradient)
        part.mul_(factor.to(device=part.device, dtype=torch.promote_types(part.dtype, torch.float32)))
    kinds = {one.dtype for one in gradients}
    return norm.to(functools.reduce(torch.promote_types, kinds, torch.float32))


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if is_distributed(gradient) else gradient


def _over_meshes(gradients: Sequence[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Return the sum of powers, or the largest magnitude, of gradients with all that other meshes hold."""
    is_largest = math.isinf(norm_type)
    parts: dict[tuple[Any, tuple[int, ...]], list[Tensor]] = {}
    for gradient in gradients:
        where: tuple[Any, tuple[int, ...]] = (None, ())
        if is_distributed(gradient):
            if any(one.is_partial() for one in gradient.placements):
                raise InputError(
                    "clip_grad_norm: a gradient is a sum that is not complete; accepted: after the exchange"
                )
            cut = tuple(place for place, one in enumerate(gradient.placements) if one.is_shard())
            where = (gradient.device_mesh, cut)
        local = _local(gradient)
        norm = torch.linalg.vector_norm(
            local, norm_type, dtype=torch.promote_types(local.dtype, torch.float32)
        )
        parts.setdefault(where, []).append(norm.double().to(device))
    totals = []
    for (mesh, cut), norms in parts.items():
        all_norms = torch.stack(norms)
        total = all_norms.max() if is_largest else (all_norms**norm_type).sum()
        for place in cut:
            operation = dist.ReduceOp.MAX if is_largest else dist.ReduceOp.SUM
            dist.all_reduce(total, operation, group=mesh.get_group(place))
        totals.append(total)
    if not totals:
        return torch.zeros((), dtype=torch.float64, device=device)
    together = torch.stack(totals)
    return together.max() if is_largest else together.sum()


def refuse_plain_clipping(parameters: Iterable[nn.Parameter], remedy: str) -> str:
    """Let torch's own clipping of any of these parameters raise a `PartialNormError` that says what to call.

    It is refused wherever it was imported from, before a gradient changes. Returns the name of the attribute
    that says so of a parameter, which what takes its place must have, too.
    """
    for one in parameters:
        vars(one)[_REMEDY] = remedy
    if not hasattr(torchs._clip_grads_with_norm_, _REMEDY):
        torchs._clip_grads_with_norm_ = _guarded(torchs._clip_grads_with_norm_)
    return _REMEDY


def _guarded(scale: Any) -> Any:
    @functools.wraps(scale)
    def scale_if_whole(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        held = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if remedies := [vars(one)[_REMEDY] for one in held if _REMEDY in getattr(one, "__dict__", {})]:
            raise PartialNormError(
                "clip_grad_norm_: this process holds a part of the model, whose norm is not that of the "
                f"whole; accepted: {remedies[0]}"
            )
        return scale(held, *args, **kwargs)

    setattr(scale_if_whole, _REMEDY, True)
    return scale_if_whole
