"""Modules whose forward runs inside something else; their structure, names and state stay as they are."""

from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["ForwardWrapper", "wrap_forward", "wrapped_forward"]


class ForwardWrapper:
    """What stands in for the ``forward`` of one module; calls what it wraps.

    Being an attribute of the module, it is copied with it. A module with such a forward is a leaf for a
    tracer of a module above.
    """

    def __init__(self, module: nn.Module) -> None:
        self.inner: Callable[..., Any] = module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped forward."""
        return self.inner(*args, **kwargs)


def wrap_forward(module: nn.Module, wrapper: ForwardWrapper) -> None:
    """Let a wrapper, made of this module, stand in for its forward."""
    object.__setattr__(module, "forward", wrapper)


def wrapped_forward(module: nn.Module, kind: type[ForwardWrapper] = ForwardWrapper) -> ForwardWrapper | None:
    """Return the wrapper of a kind around the forward of a module, None if there is none."""
    found = module.__dict__.get("forward")
    while isinstance(found, ForwardWrapper):
        if isinstance(found, kind):
            return found
        found = found.inner
    return None
