"""Another module in the place of one: of one node, or of all modules of a type."""

import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from makespan.slapo._annotate import carry_tags
from makespan.slapo._errors import ArgumentError, ConflictError, KindError
from makespan.slapo._layouts import hand_over
from makespan.slapo._registry import Primitive, register_primitive
from makespan.slapo._subgraphs import replace_subgraph
from makespan.slapo._trace import check_is_called
from makespan.slapo._traced import exchange_borrowed
from makespan.slapo._wrapping import move_hooks, wrapped_forward

if TYPE_CHECKING:
    from makespan.slapo._schedule import Schedule

__all__ = ["Replace", "ReplaceAll", "put_in_place"]


def put_in_place(sch: "Schedule", new: nn.Module) -> None:
    """Let a module take the place of that of a node, wherever the model holds it, with its hooks and tags."""
    old = sch.mod
    if new is old:
        return
    for name, parameter in new.named_parameters(recurse=False):
        before = old._parameters.get(name)
        if before is not None and before is not parameter and before.shape == parameter.shape:
            carry_tags(before, parameter, sch.metadata.tags)
    move_hooks(old, new)
    hand_over(old, new)
    inside = {id(one) for one in new.modules()}
    for holder in [one for one in sch.root.mod.modules() if id(one) not in inside]:
        for name, one in holder._modules.items():
            if one is old:
                holder._modules[name] = new
    exchange_borrowed(sch.root.mod, {id(old): new})
    sch.mod = new
    (sch.parent or sch).rebuild()


def _warn_of_differences(sch: "Schedule", new: nn.Module) -> None:
    """Warn where the new module is in another mode, on another device or of another precision."""
    pairs: list[tuple[str, object, object]] = [("training mode", sch.mod.training, new.training)]
    before = next((one for one in sch.mod.parameters() if one.is_floating_point()), None)
    after = next((one for one in new.parameters() if one.is_floating_point()), None)
    if before is not None and after is not None:
        pairs += [("device", before.device, after.device), ("dtype", before.dtype, after.dtype)]
    for what, was, now in pairs:
        if was != now:
            done = "; it takes that of the old one" if what == "training mode" else ""
            message = (
                f"replace of {sch.path!r}: {what} of the old module is {was}, of the new one {now}{done}"
            )
            warnings.warn(message, stacklevel=5)


def _whole_module(sch: "Schedule", given: object, name: str | None) -> nn.Module:
    """Check what should take the place of a module, and make it if a function was given."""
    new = given if isinstance(given, nn.Module) else given(sch.mod) if callable(given) else None
    if not isinstance(new, nn.Module):
        raise KindError(
            f"replace of {sch.path!r}: got {type(given).__name__}"
            + (f", which returned {type(new).__name__}" if callable(given) else "")
            + "; accepted: a module, or a function that makes one of the old module"
        )
    wrapper = wrapped_forward(sch.mod)
    if wrapper is not None and not wrapped_forward(new):
        raise ConflictError(
            f"replace of {sch.path!r}: its forward is wrapped, {sch.conflict(wrapper.op)}; "
            "accepted: replace first, then wrap"
        )
    inside = next((path for path, one in new.named_modules() if one is sch.root.mod), None)
    if inside is not None and sch.parent is not None:
        raise ArgumentError(f"replace of {sch.path!r}: the new module holds the whole model at {inside!r}")
    if name is not None and name != sch.name:
        message = (
            f"replace of {sch.path!r}: the name {name!r} is ignored, a whole module keeps that of its node"
        )
        warnings.warn(message, stacklevel=4)
    return new


@register_primitive()
class Replace(Primitive):
    """Put another module or function in the place of a module, or of nodes of its graph."""

    @classmethod
    def name(cls) -> str:
        """Return ``replace``."""
        return "replace"

    @classmethod
    def apply(
        cls,
        sch: "Schedule",
        new_mod_or_func: nn.Module | Callable[..., Any],
        target_ops: object = None,
        name: str | None = None,
        concrete_args: Mapping[str, Any] | None = None,
        each: bool = False,
    ) -> Any:
        """Replace the whole module, or what `find` found in its graph.

        Parameters
        ----------
        new_mod_or_func
            For a whole module: the new one, or a function that makes it of the old one. For parts of a graph:
            a module or a function with the parameters of the pattern; a function of the index of a match
            that returns one with ``each``.
        target_ops
            Matches of `find`, or one pair of `find_node`; None for the whole module.
        name
            What the new module is called in the graph, with a number; a whole module keeps its name.
        concrete_args
            Values of parameters that have no counterpart in the pattern.
        each
            Replace every match by a module or function of its own.
        """
        if target_ops is not None:
            return replace_subgraph(sch, new_mod_or_func, target_ops, name, concrete_args, each)
        if concrete_args is not None or each:
            raise ArgumentError(f"replace of {sch.path!r}: concrete_args and each need target_ops")
        check_is_called(sch, cls.name())
        new = _whole_module(sch, new_mod_or_func, name)
        _warn_of_differences(sch, new)
        if new.training != sch.mod.training:
            new.train(sch.mod.training)
        put_in_place(sch, new)
        return None


def _is_module_type(thing: object) -> bool:
    return isinstance(thing, type) and issubclass(thing, nn.Module)


@register_primitive()
class ReplaceAll(Primitive):
    """Put another module in the place of every module of a type."""

    @classmethod
    def name(cls) -> str:
        """Return ``replace_all``."""
        return "replace_all"

    @classmethod
    def apply(
        cls,
        sch: "Schedule",
        module_type: type[nn.Module],
        make_mod_fn: Callable[..., nn.Module],
        **kwargs: Any,
    ) -> int:
        """Replace all modules of a type at and below this one, and return how many there were.

        Parameters
        ----------
        module_type
            Class of the modules; subclasses count.
        make_mod_fn
            Called with path, old module and ``kwargs``; returns the new module, which may contain the old.
        """
        if not _is_module_type(module_type):
            raise KindError(f"replace_all of {sch.path!r}: got {module_type!r}; accepted: a class of modules")
        targets = [(path, one) for path, one in sch.named_schedules() if isinstance(one.mod, module_type)]
        # The innermost first: their nodes are gone once an owner is replaced.
        for path, node in reversed(targets):
            node.replace(make_mod_fn(path, node.mod, **kwargs))
        return len(targets)
