"""Layers that hold a part of their weight and compute something else than the whole layer would.

A layer becomes one of these where it stands: its class changes; parameters, hooks and names stay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn import functional as F


class LateBias(nn.Module):
    """A layer that adds its bias in a step of its own, after ``reduce``, which `sync` sets.

    So a bias is added once to a product whose summands the processes have. A tracer looks inside where
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
        """Return the part of the sum that this process has."""
        raise NotImplementedError

    def added(self) -> Tensor:
        """Return the bias as it is added."""
        return self.bias


class LateBiasLinear(LateBias):
    """A linear layer, whole or cut along its inputs."""

    def product(self, hidden: Tensor) -> Tensor:
        """Return the part of the sum that this process has."""
        return F.linear(hidden, self.weight)


class LateBiasTransposedLinear(LateBias):
    """A linear layer whose weight is kept as inputs times outputs, cut along its inputs."""

    def product(self, hidden: Tensor) -> Tensor:
        """Return the part of the sum that this process has."""
        return hidden @ self.weight


class LateBiasConvolution(LateBias):
    """A convolution cut along its input channels."""

    def product(self, hidden: Tensor) -> Tensor:
        """Return the part of the sum that this process has."""
        convolve: Callable[..., Tensor] = self.__getattribute__("_conv_forward")  # it knows the padding modes
        return convolve(hidden, self.weight, None)

    def added(self) -> Tensor:
        """Return the bias with an axis for each of the image."""
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
        """Return the part of the sum that this process has."""
        turned = {3: F.conv_transpose1d, 4: F.conv_transpose2d, 5: F.conv_transpose3d}[self.weight.dim()]
        done: Tensor = turned(
            hidden, self.weight, None, self.stride, self.padding, self.output_padding, self.groups,
            self.dilation,
        )  # fmt: skip
        return done


_mixed: dict[tuple[type[nn.Module], type[nn.Module]], type[nn.Module]] = {}


def become(module: nn.Module, behaviour: type[nn.Module]) -> None:
    """Let a module behave in another way; it remains an instance of what it is."""
    layer = type(module)
    if (behaviour, layer) not in _mixed:
        bases, space = (behaviour, layer), {"__module__": __name__}
        _mixed[behaviour, layer] = type(behaviour.__name__, bases, space)
    module.__class__ = _mixed[behaviour, layer]
