"""The hooks that synchronised modules carry; a copy of a module has copies of them."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.fx import Proxy
from torch.utils import _pytree as pytree  # there is no public name for it
from torch.utils.weak import WeakIdKeyDictionary

from makespan.slapo._collectives import Exchange
from makespan.slapo._errors import ArgumentError, ShardError, TracingError

__all__ = ["ExchangeInputs", "ExchangeOutput", "SumParameterGradients", "input_places"]


def input_places(
    module: nn.Module, inputs: Sequence[int | str], where: str
) -> tuple[frozenset[int], frozenset[str]]:
    """Return places and names of arguments, each argument by both where it has both."""
    names = list(inspect.signature(module.forward).parameters)
    wanted = [inputs] if isinstance(inputs, int | str) else list(inputs)
    for one in wanted:
        if one not in names if isinstance(one, str) else not 0 <= one < len(names):
            raise ArgumentError(f"{where}: no input {one!r}; accepted: {', '.join(names)}, or their places")
    chosen = [names.index(one) if isinstance(one, str) else one for one in wanted]
    return frozenset(chosen), frozenset(names[one] for one in chosen)


@dataclass(frozen=True, slots=True)
class ExchangeInputs:
    """Exchange arguments before a module is called; its other arguments pass."""

    exchange: Exchange
    places: tuple[frozenset[int], frozenset[str]] | None
    where: str
    of_gradients: bool

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments that the module gets."""
        done = {place: self._done(one) for place, one in enumerate(args) if self._is_meant(place)}
        named = {name: self._done(one) for name, one in kwargs.items() if self._is_meant(name)}
        return tuple(done.get(place, one) for place, one in enumerate(args)), kwargs | named

    def _is_meant(self, which: int | str) -> bool:
        return self.places is None or which in self.places[isinstance(which, str)]

    def _done(self, value: Any) -> Any:
        """Exchange the tensors in a value, which keeps its class: a named tuple, an output of a model."""
        return pytree.tree_map(self._exchanged, value)

    def _exchanged(self, value: Any) -> Any:
        if isinstance(value, Proxy):
            return self.exchange(value)
        if not isinstance(value, Tensor):
            return value
        if self.of_gradients:
            is_meant = value.requires_grad
        else:
            is_meant = self.places is not None or value.is_floating_point()
        return _located(self.exchange, value, self.where) if is_meant else value


@dataclass(frozen=True, slots=True)
class ExchangeOutput:
    """Exchange what a module returns, or one element of it."""

    exchange: Exchange
    element: Any
    axis: int | None
    expected: int | None
    where: str

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Return the output that the caller gets."""
        if isinstance(output, Proxy):
            if self.element is not None:
                raise TracingError(f"{self.where}: a graph cannot take its output apart; accepted: a leaf")
            return self.exchange(output)
        if self.element is None:
            if not isinstance(output, Tensor):
                raise ShardError(
                    f"{self.where}: it returned a {type(output).__name__}; accepted: a tensor, or "
                    "output= to say which element is meant"
                )
            return self._done(output)
        done = self._done(output[self.element])
        if isinstance(output, tuple):
            place = range(len(output))[self.element]
            parts = [done if one == place else kept for one, kept in enumerate(output)]
            return type(output)(*parts) if hasattr(output, "_fields") else tuple(parts)
        output[self.element] = done  # a list or a mapping of any class
        return output

    def _done(self, value: Tensor) -> Tensor:
        axis, expected, n = self.axis, self.expected, value.dim()
        if axis is not None and expected is not None and axis % n != expected % n:
            raise ArgumentError(
                f"{self.where}: {self.exchange.name} on axis {axis} of an output of shape "
                f"{tuple(value.shape)}, which is cut along axis {expected}; accepted: that axis"
            )
        return _located(self.exchange, value, self.where)


@dataclass(frozen=True, slots=True)
class SumParameterGradients:
    """Sum the gradients of parameters that see other parts of the sequence on other processes.

    The hook of a parameter is set when it is first used, since copies of a module have other parameters.
    """

    SUMMED: ClassVar[WeakIdKeyDictionary] = WeakIdKeyDictionary()

    names: tuple[str, ...]
    exchange: Exchange

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Let the gradients of this pass be summed."""
        for name in self.names:
            parameter = getattr(module, name)
            if parameter.requires_grad and parameter not in self.SUMMED:
                parameter.register_hook(self.exchange.back)
                self.SUMMED[parameter] = True


def _located(exchange: Callable[[Tensor], Tensor], value: Tensor, where: str) -> Tensor:
    try:
        return exchange(value)
    except ShardError as error:
        raise ShardError(f"{where}: {error}") from None
