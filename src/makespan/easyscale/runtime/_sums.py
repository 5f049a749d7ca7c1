"""Explicit sums in an order of choice, which give two kernel sets that differ on every machine."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from makespan.easyscale.runtime._kernels import SumOrder

__all__ = ["ExplicitSums", "ordered_sum"]

_BLOCK = 64
_CONVOLUTIONS = (torch.conv1d, torch.conv2d, torch.conv3d)
_LOSSES = (
    F.cross_entropy, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
)  # fmt: skip


def ordered_sum(rows: Tensor, order: SumOrder) -> Tensor:
    """Sum over the first axis, by additions of whole rows alone, which round the same on every machine."""
    if order == "tree":
        while len(rows) > 1:
            half = (len(rows) + 1) // 2
            upper = len(rows) - half
            rows = torch.cat([rows[:upper] + rows[half:], rows[upper:half]])
        return rows[0].clone()
    blocks = list(torch.split(rows, _BLOCK))
    total = blocks[0].clone()
    for block in blocks[1:]:
        total[: len(block)] += block
    found = total[0].clone()
    for row in total[1:]:
        found += row
    return found


class _AddBias(torch.autograd.Function):
    """Bias added along an axis, whose gradient is an explicit sum."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, bias: Tensor, axis: int, order: SumOrder) -> Tensor:
        ctx.axis, ctx.order = axis, order
        shape = [1] * values.dim()
        shape[axis] = -1
        return values + bias.view(shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (gradient,) = gradients
        rows = gradient.movedim(ctx.axis, -1).reshape(-1, gradient.shape[ctx.axis])
        return gradient, ordered_sum(rows, ctx.order), None, None


class _Mean(torch.autograd.Function):
    """Mean of all elements by an explicit sum."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, order: SumOrder) -> Tensor:
        ctx.shape = values.shape
        return ordered_sum(values.reshape(-1, 1), order)[0] / values.numel()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        return (gradient / ctx.shape.numel()).expand(ctx.shape), None


class ExplicitSums(TorchFunctionMode):
    """While this is entered, gradients of biases and means in losses are explicit sums."""

    def __init__(self, order: SumOrder) -> None:
        super().__init__()
        self._order: SumOrder = order

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Replace the functions that sum."""
        named = dict(kwargs or {})
        if func is F.linear:
            return self._with_bias(func, args, named, lambda found: found.dim() - 1)
        if func in _CONVOLUTIONS:
            return self._with_bias(func, args, named, lambda found: found.dim() - args[1].dim() + 1)
        if func in _LOSSES and _is_plain_mean(args, named):
            each = func(*args, **(named | {"reduction": "none"}))
            return _Mean.apply(each, self._order)  # type: ignore[no-untyped-call]
        return func(*args, **named)

    def _with_bias(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        named: dict[str, Any],
        axis: Callable[[Tensor], int],
    ) -> Any:
        bias = args[2] if len(args) > 2 else named.pop("bias", None)
        found = func(*args[:2], None, *args[3:], **named)
        if bias is None:
            return found
        return _AddBias.apply(found, bias, axis(found), self._order)  # type: ignore[no-untyped-call]


def _is_plain_mean(args: tuple[Any, ...], named: Mapping[str, Any]) -> bool:
    """Whether a loss is the mean over all elements, without weights and without targets left out."""
    target: Any = args[1] if len(args) > 1 else named.get("target")
    skips = not target.is_floating_point() and bool((target == named.get("ignore_index", -100)).any())
    plain = named.get("reduction", "mean") == "mean" and named.get("weight") is None and not skips
    return plain and len(args) <= 2 and not named.get("label_smoothing")
