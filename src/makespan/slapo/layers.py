"""Layers that hold a part of their weight and add their bias after a reduction.

A layer becomes one of these in place: its class changes; parameters, hooks and names stay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn import functional as F


class LateBias(nn.Module):
    """A layer that adds its bias in a separate step, after ``reduce``, which `sync` sets.

    So the bias is added once, to the sum of the products over the processes. A tracer looks inside if
    ``traceable`` is true.
    """

    reduce: Callable[[Any], Any] | None = None
    traceable: bool = False

    if TYPE_CHECKING:
        weight: nn.Parameter
        bias: nn.Parameter

    def forward(self, hidden: Tensor) -> Tensor:
        """Multiply, reduce, and add the bias."""
        product, reduce = self.product(hidden), self.reduce
        return (product if reduce is None else reduce(product)) + self.added()

    def product(self, hidden: Tensor) -> Tensor:
        """Return the summand of this process."""
        raise NotImplementedError

    def added(self) -> Tensor:
        """Return the bias in the shape in which it is added."""
        return self.bias


class LateBiasLinear(LateBias):
    """A linear layer, whole or cut along its inputs."""

    def product(self, hidden: Tensor) -> Tensor:
        """Return the summand of this process."""
        return F.linear(hidden, self.weight)


class LateBiasTransposedLinear(LateBias):
    """A linear layer whose weight is kept as inputs times outputs, cut along its inputs."""

    def product(self, hidden: Tensor) -> Tensor:
        """Return the summand of this process."""
        return hidden @ self.weight


class LateBiasConvolution(LateBias):
    """A convolution cut along its input channels."""

    def product(self, hidden: Tensor) -> Tensor:
        """Return the summand of this process."""
        convolve: Callable[..., Tensor] = self.__getattribute__("_conv_forward")  # it knows the padding modes
        return convolve(hidden, self.weight, None)

    def added(self) -> Tensor:
        """Return the bias with an axis for each axis of the image."""
        return self.bias.view(-1, *(1,) * (self.weight.dim() - 2))


class LateBiasTransposedConvolution(LateBiasConvolution):
    """A transposed convolution cut along its input channels."""

    if TYPE_CHECKING:
        stride: tuple[int, ...]
        padding: tuple[int, ...]
        output_padding: tuple[int, ...]
        groups: int
        dilation: tuple[int, ...]

    def product(self, hidden: Tensor) -> Tensor:
        """Return the summand of this process."""
        convolve = {3: F.conv_transpose1d, 4: F.conv_transpose2d, 5: F.conv_transpose3d}[self.weight.dim()]
        product: Tensor = convolve(
            hidden, self.weight, None, self.stride, self.padding, self.output_padding, self.groups,
            self.dilation,
        )  # fmt: skip
        return product


# One class per pair, so that layers of the same class keep equal classes.
_mixed: dict[tuple[type[nn.Module], type[nn.Module]], type[nn.Module]] = {}


def become(module: nn.Module, behaviour: type[nn.Module]) -> None:
    """Put a behaviour in front of the class of a module, which remains an instance of its class."""
    layer = type(module)
    if (behaviour, layer) not in _mixed:
        bases, space = (behaviour, layer), {"__module__": __name__}
        _mixed[behaviour, layer] = type(behaviour.__name__, bases, space)
    module.__class__ = _mixed[behaviour, layer]
