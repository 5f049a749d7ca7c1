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
    ``traceable`` is true. The arguments of a forward are those of the whole layer.
    """

    reduce: Callable[[Any], Any] | None = None
    traceable: bool = False

    if TYPE_CHECKING:
        weight: nn.Parameter
        bias: nn.Parameter

    def finished(self, product: Tensor) -> Tensor:
        """Reduce the summand of this process, and add the bias."""
        total, bias = product if self.reduce is None else self.reduce(product), self.added()
        # Autocast converts the bias of a whole layer, too; patterns expect a graph without a node for it.
        return total + (bias if self.traceable else bias.to(total.dtype))

    def added(self) -> Tensor:
        """Return the bias in the shape in which it is added."""
        return self.bias


class LateBiasLinear(LateBias):
    """A linear layer, whole or cut along its inputs."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as of the whole layer
        """Multiply, reduce, and add the bias."""
        return self.finished(F.linear(input, self.weight))


class LateBiasTransposedLinear(LateBias):
    """A linear layer whose weight is kept as inputs times outputs, cut along its inputs."""

    def forward(self, x: Tensor) -> Tensor:
        """Multiply, reduce, and add the bias."""
        return self.finished(x @ self.weight)


class LateBiasConvolution(LateBias):
    """A convolution cut along its input channels."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as of the whole layer
        """Convolve, reduce, and add the bias."""
        convolve: Callable[..., Tensor] = self.__getattribute__("_conv_forward")  # it knows the padding modes
        return self.finished(convolve(input, self.weight, None))

    def added(self) -> Tensor:
        """Return the bias with an axis for each axis of the image."""
        return self.bias.view(-1, *(1,) * (self.weight.dim() - 2))


class LateBiasTransposedConvolution(LateBiasConvolution):
    """A transposed convolution cut along its input channels."""

    if TYPE_CHECKING:
        stride: tuple[int, ...]
        padding: tuple[int, ...]
        groups: int
        dilation: tuple[int, ...]
        kernel_size: tuple[int, ...]
        _output_padding: Callable[..., list[int]]

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:  # noqa: A002 - as above
        """Convolve, reduce, and add the bias."""
        n_axes = self.weight.dim() - 2
        convolve = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[n_axes - 1]
        more = self._output_padding(
            input, output_size, self.stride, self.padding, self.kernel_size, n_axes, self.dilation
        )
        return self.finished(
            convolve(input, self.weight, None, self.stride, self.padding, more, self.groups, self.dilation)
        )


# One class per pair, so that layers of the same class keep equal classes.
_mixed: dict[tuple[type[nn.Module], type[nn.Module]], type[nn.Module]] = {}


def become(module: nn.Module, behaviour: type[nn.Module]) -> None:
    """Put a behaviour in front of the class of a module, which remains an instance of its class."""
    layer = type(module)
    if (behaviour, layer) not in _mixed:
        bases, space = (behaviour, layer), {"__module__": __name__}
        _mixed[behaviour, layer] = type(behaviour.__name__, bases, space)
    module.__class__ = _mixed[behaviour, layer]
