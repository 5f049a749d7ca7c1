"""What happens when a primitive is applied: check the call, do it, write it down, or undo all of it."""

import inspect
import time
from typing import TYPE_CHECKING, Any

from makespan.slapo._errors import ConflictError, KindError
from makespan.slapo._journal import JournalEntry, Value, described
from makespan.slapo._registry import Primitive
from makespan.slapo._snapshot import Snapshot

if TYPE_CHECKING:
    from makespan.slapo._schedule import Schedule

__all__ = ["applied"]


def applied(primitive: type[Primitive], sch: "Schedule", /, *args: Any, **kwargs: Any) -> Any:
    """Apply a primitive to a node.

    Only the outermost of nested primitives is journalled, and only it has to be undone.
    """
    name = primitive.name()
    signature = inspect.signature(primitive.apply)
    try:
        bound = signature.bind(sch, *args, **kwargs)
    except TypeError as error:
        accepted = ", ".join(str(one) for one in list(signature.parameters.values())[1:])
        raise KindError(f"{name} of {sch.path!r}: {error}; accepted: {name}({accepted})") from None
    _check_is_there(name, sch)
    metadata = sch.metadata
    if primitive.is_query() or metadata.depth:
        return primitive.apply(*bound.args, **bound.kwargs)
    arguments = _arguments(bound)
    before, start = Snapshot(sch), time.perf_counter()
    metadata.depth += 1
    try:
        result = primitive.apply(*bound.args, **bound.kwargs)
    except BaseException:
        before.restore()
        raise
    finally:
        metadata.depth = 0
    metadata.journal.append(JournalEntry(name, sch.path, arguments, time.perf_counter() - start))
    return result


def _arguments(bound: inspect.BoundArguments) -> dict[str, Value]:
    """Return what was passed by name, without the node itself and without defaults."""
    arguments: dict[str, Value] = {}
    for parameter in list(bound.signature.parameters.values())[1:]:
        if parameter.name in bound.arguments:
            value = bound.arguments[parameter.name]
            named = value if parameter.kind is parameter.VAR_KEYWORD else {parameter.name: value}
            arguments |= {key: described(one) for key, one in named.items()}
    return arguments


def _check_is_there(name: str, sch: "Schedule") -> None:
    """Refuse a node that tree or model have lost, since nobody would see what is done to it."""
    node = sch
    while node.parent is not None:
        if node.parent.child.get(node.name) is not node:
            raise ConflictError(
                f"{name} of {sch.path!r}: the schedule no longer has this module, {sch.conflict('replace')}"
            )
        node = node.parent
    try:
        agrees = node.mod.get_submodule(sch.path) is sch.mod
    except AttributeError:
        agrees = False
    if not agrees:
        raise ConflictError(
            f"{name} of {sch.path!r}: the model was changed there without the schedule; "
            "accepted: call rebuild() of the node above after such a change"
        )
