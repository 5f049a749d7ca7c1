"""Parts of a traced graph in the hands of primitives that also work on whole modules."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from makespan.slapo._errors import ArgumentError, KindError
from makespan.slapo._find import as_matches
from makespan.slapo._fused import take_out
from makespan.slapo._matcher import Match
from makespan.slapo._rewrite import bound_arguments, check_hooks, check_is_closed, insert_call
from makespan.slapo._trace import graph_of
from makespan.slapo._traced import FusedModule
from makespan.slapo._wrapping import move_hooks

if TYPE_CHECKING:
    from makespan.slapo._schedule import Schedule

__all__ = ["checkpoint_subgraph", "replace_subgraph"]


def replace_subgraph(
    sch: "Schedule",
    new: nn.Module | Callable[..., Any],
    target_ops: object,
    name: str | None,
    concrete_args: Mapping[str, Any] | None,
    each: bool,
) -> None:
    """Replace matches in graphs: one, several with the same inputs by one call, or each by its own."""
    where = f"replace of {sch.path!r}"
    matches = as_matches(sch, "replace", target_ops)
    if not callable(new):
        raise KindError(f"{where}: got {type(new).__name__}; accepted: a module or a function")
    if each:
        if isinstance(new, nn.Module):
            raise KindError(f"{where}: each=True with a module; accepted: a function of the index of a match")
        made = [new(index) for index in range(len(matches))]
        groups = [([match], one) for match, one in zip(matches, made, strict=True)]
    else:
        _check_same_inputs(where, matches)
        groups = [(matches, new)]
    ready = [_ready(sch, where, group, one, concrete_args or {}) for group, one in groups]
    for (group, one), call in zip(groups, ready, strict=True):
        owner = graph_of(sch[group[0].owner], "replace")
        if isinstance(one, nn.Module):
            _take_hooks(where, owner, group, one)
            one.train(owner.training)
        insert_call(owner, group, call, name or type(one).__name__, keeps_modules=False)
        sch[group[0].owner].rebuild()


def _check_same_inputs(where: str, matches: Sequence[Match]) -> None:
    first = list(matches[0].inputs.values())
    for match in matches[1:]:
        others = list(match.inputs.values())
        if match.owner != matches[0].owner or first != others:
            raise ArgumentError(
                f"{where}: {len(matches)} matches with different inputs; accepted: one match, matches with"
                " the same inputs, or each=True with a function that makes a module of the index of a match"
            )
        if len(match.outputs) != 1:
            raise ArgumentError(f"{where}: several matches of several results; accepted: one result a match")


def _ready(
    sch: "Schedule", where: str, group: Sequence[Match], new: Any, concrete_args: Mapping[str, Any]
) -> Any:
    """Check everything that can be wrong before anything is changed."""
    if not callable(new):
        raise KindError(
            f"{where}: the factory returned {type(new).__name__}; accepted: a module or a function"
        )
    owner = graph_of(sch[group[0].owner], "replace")
    for match in group:
        check_is_closed(where, match)
    ends = check_hooks(where, owner, group)
    if ends is not None and not isinstance(new, nn.Module):
        raise ArgumentError(f"{where}: a module in the match has hooks, which a function cannot carry")
    return bound_arguments(where, new, group[0], concrete_args)


def _take_hooks(where: str, owner: nn.Module, group: Sequence[Match], new: nn.Module) -> None:
    """Hand the hooks of the modules at the ends of a match to what takes its place."""
    for module in dict.fromkeys(check_hooks(where, owner, group) or ()):
        move_hooks(module, new)


def checkpoint_subgraph(
    sch: "Schedule", subgraph: object, order_args_fn: Callable[..., Any] | None
) -> FusedModule:
    """Make a module of one match, for its activations to be recomputed."""
    matches = as_matches(sch, "checkpoint", subgraph)
    if len(matches) != 1:
        raise ArgumentError(f"checkpoint of {sch.path!r}: found {len(matches)} matches; accepted: one")
    return take_out(sch, "checkpoint", matches[0], "Recomputed", order_args_fn)
