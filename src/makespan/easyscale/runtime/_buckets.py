"""How gradients are laid out in flat vectors: DistributedDataParallel's layouts, and packing by them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from makespan.easyscale.runtime._offload import HostCopies
from makespan.errors import InputError

__all__ = [
    "BucketMap",
    "Buckets",
    "GradientSet",
    "ReadyOrder",
    "provisional_map",
    "rebuilt_map",
    "trained_parameters",
]

BucketMap = tuple[tuple[str, ...], ...]
"""Names of the parameters of each bucket, in the order in which they lie there."""

_FIRST_BYTES = 1 << 20
_LATER_BYTES = 25 << 20
_ACCEPTED = (torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class GradientSet:
    """Gradients of one logical worker.

    Parameters
    ----------
    buckets
        One flat vector a bucket, already multiplied by what the reduction asks for.
    used
        bool, (n_parameters,): which parameters, in registration order, had a gradient; others count as
        zero.
    """

    buckets: list[Tensor]
    used: Tensor


def trained_parameters(model: torch.nn.Module) -> dict[str, Parameter]:
    """Parameters that want a gradient, by name in registration order; an `InputError` names an odd one."""
    found = {name: one for name, one in model.named_parameters() if one.requires_grad}
    for name, one in found.items():
        if one.dtype not in _ACCEPTED:
            raise InputError(f"parameter {name} is {one.dtype}; accepted: {', '.join(map(str, _ACCEPTED))}")
    return found


def provisional_map(parameters: Mapping[str, Parameter]) -> BucketMap:
    """Layout before the first backward pass: one bucket in registration order."""
    return _packed(parameters, parameters, (inf,))


def rebuilt_map(
    parameters: Mapping[str, Parameter], ready: Sequence[str], cap_bytes: int | None = None
) -> BucketMap:
    """Layout from the second mini-batch on.

    Parameters
    ----------
    ready
        Names in the order in which gradients became ready; those that had none come last.
    cap_bytes
        Size at which a bucket is full; None for the default, 1 MiB for the first one and 25 MiB for others.
    """
    known = set(ready)
    order = [*ready, *(name for name in parameters if name not in known)]
    limits = (_FIRST_BYTES, _LATER_BYTES) if cap_bytes is None else (cap_bytes,)
    return _packed(parameters, order, limits)


def _packed(parameters: Mapping[str, Parameter], order: Iterable[str], limits: Sequence[float]) -> BucketMap:
    """Fill buckets, those of one type each, until each reaches its limit; the last limit holds on."""
    closed: list[list[str]] = []
    opened: dict[torch.dtype, tuple[list[str], int]] = {}
    n_closed: dict[torch.dtype, int] = {}
    for name in order:
        one = parameters[name]
        names, size = opened.get(one.dtype, ([], 0))
        names, size = [*names, name], size + one.numel() * one.element_size()
        opened[one.dtype] = names, size
        number = n_closed.get(one.dtype, 0)
        if size >= limits[min(number, len(limits) - 1)]:
            closed.append(names)
            del opened[one.dtype]
            n_closed[one.dtype] = number + 1
    return tuple(map(tuple, [*closed, *(names for names, _ in opened.values())]))


class ReadyOrder:
    """Records in which order gradients become ready, until `finish` is called."""

    def __init__(self, parameters: Mapping[str, Parameter]) -> None:
        self._names: list[str] = []
        self._handles = [self._listen(name, one) for name, one in parameters.items()]

    def _listen(self, name: str, parameter: Parameter) -> RemovableHandle:
        handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            lambda _: self._names.append(name)
        )
        return handle

    def finish(self) -> list[str]:
        """Stop recording and return the names."""
        for handle in self._handles:
            handle.remove()
        return list(dict.fromkeys(self._names))


class Buckets:
    """Packs gradients of parameters into flat vectors and hands sums back, by a bucket map."""

    def __init__(self, parameters: Mapping[str, Parameter], bucket_map: BucketMap) -> None:
        listed = sorted(name for names in bucket_map for name in names)
        if listed != sorted(parameters):
            odd = sorted(set(listed) ^ set(parameters)) or [name for name in listed if listed.count(name) > 1]
            raise InputError(f"bucket map: {', '.join(odd[:3])}; accepted: each trained parameter once")
        self.bucket_map = bucket_map
        self._parameters = dict(parameters)
        self.lengths = [sum(parameters[name].numel() for name in names) for names in bucket_map]

    def pack(self, scale: float, copies: HostCopies | None = None) -> GradientSet:
        """Move the gradients, times ``scale``, out of the model, to the host if there are ``copies``."""
        used = torch.tensor([one.grad is not None for one in self._parameters.values()])
        flat = [
            self._empty(names, length) for names, length in zip(self.bucket_map, self.lengths, strict=True)
        ]
        for name, view in self._views(flat).items():
            gradient = self._parameters[name].grad
            if gradient is None:
                view.zero_()
            elif gradient.is_sparse:
                raise InputError(
                    f"parameter {name} has a sparse gradient; accepted: dense ones (sparse=False)"
                )
            else:
                torch.mul(gradient, scale, out=view)
            self._parameters[name].grad = None
        return GradientSet(flat if copies is None else copies.start(flat), used)

    def unpack(self, sums: Sequence[Tensor], used: Tensor) -> None:
        """Make the sums the gradients of the model; a parameter that no logical worker used gets none."""
        flat = [
            one.to(self._parameters[names[0]].device)
            for names, one in zip(self.bucket_map, sums, strict=True)
        ]
        views = self._views(flat)
        for (name, parameter), is_used in zip(self._parameters.items(), used.tolist(), strict=True):
            parameter.grad = views[name] if is_used else None

    def _empty(self, names: Sequence[str], length: int) -> Tensor:
        like = self._parameters[names[0]]
        return torch.empty(length, dtype=like.dtype, device=like.device)

    def _views(self, flat: Sequence[Tensor]) -> dict[str, Tensor]:
        """View flat vectors in the shapes of the parameters, and in their memory layouts if dense."""
        views = {}
        for names, vector in zip(self.bucket_map, flat, strict=True):
            offset = 0
            for name in names:
                like = self._parameters[name]
                views[name] = vector.as_strided(like.shape, _dense_strides(like), offset)
                offset += like.numel()
        return views


def _dense_strides(like: Tensor) -> tuple[int, ...]:
    """Strides of a tensor without gaps; those of a contiguous one if it has some."""
    extent = 1 + sum((size - 1) * step for size, step in zip(like.shape, like.stride(), strict=True))
    return like.stride() if extent == like.numel() else torch.empty(like.shape, device="meta").stride()
