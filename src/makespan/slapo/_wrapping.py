"""What runs around a forward: wrappers, which leave structure, names and state as they are, and hooks."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, ClassVar

from torch import nn

__all__ = ["ForwardWrapper", "move_hooks", "wrap_forward", "wrapped_forward"]

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


class ForwardWrapper:
    """What stands in for the ``forward`` of one module; calls what it wraps.

    Being an attribute of the module, it is copied with it. A module with such a forward is a leaf for a
    tracer of a module above.
    """

    op: ClassVar[str]
    """Name of the primitive that wraps so."""

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


def move_hooks(old: nn.Module, new: nn.Module) -> None:
    """Hand the hooks over; those of the old module come first, and their handles remain valid."""
    for kind in _HOOKS:
        mine, others = getattr(old, kind), getattr(new, kind)
        if mine:
            mine.update(others)
            object.__setattr__(new, kind, mine)
            object.__setattr__(old, kind, OrderedDict())
    if old._is_full_backward_hook is not None:
        new._is_full_backward_hook = old._is_full_backward_hook
