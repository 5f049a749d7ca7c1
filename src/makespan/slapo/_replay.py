"""A journal as a file, and the same steps on a fresh model."""

import functools
import inspect
import json
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import fx, nn

from makespan.slapo._errors import ReplayError, ScheduleError
from makespan.slapo._journal import Value
from makespan.slapo._matcher import Match
from makespan.slapo._operations import Attribute
from makespan.slapo._registry import primitive_named
from makespan.slapo._schedule import Schedule, create_schedule

if TYPE_CHECKING:
    from makespan.slapo._journal import JournalEntry

__all__ = ["replay"]


def replay(
    model: nn.Module,
    journal: "str | Sequence[JournalEntry]",
    *,
    group: dist.ProcessGroup | None = None,
    given: Mapping[int, Mapping[str, Any]] | None = None,
) -> Schedule:
    """Apply the steps of a journal to a fresh model.

    Parameters
    ----------
    model
        A model like the one that was scheduled, without a schedule.
    journal
        Text of ``sch.dump()``, or ``sch.metadata.journal`` itself.
    group
        Processes of tensor parallelism; their number may differ from that of the first time.
    given
        Arguments by step, from one, and by name. What was no plain value, function or class, such as a
        module that took the place of another one, is not in a journal and must be given.

    Returns
    -------
    The new schedule, whose journal is the same but for the times.

    Raises
    ------
    ReplayError
        The text is no journal, a step names what does not exist, or its argument must be given; also a
        `RuntimeError`. What a primitive raises is its cause.
    """
    sch = create_schedule(model, group=group)
    for step, (op, path, arguments) in enumerate(_steps(journal), start=1):
        primitive = primitive_named(op)
        if primitive is None:
            raise ReplayError(f"step {step} of the journal: no primitive {op!r} is registered")
        try:
            node = sch[path]
            known = dict((given or {}).get(step, {}))
            values = known | {
                name: _value(one, node.mod) for name, one in arguments.items() if name not in known
            }
            signature = inspect.signature(primitive.apply)
            args, kwargs = _call(signature, values)
            getattr(node, op)(*args, **kwargs)
        except (ScheduleError, ImportError, AttributeError, LookupError, ValueError) as error:
            raise ReplayError(f"step {step} of the journal, {op} at {path!r}: {error}") from error
    return sch


def _steps(journal: "str | Sequence[JournalEntry]") -> list[tuple[str, str, dict[str, Value]]]:
    if not isinstance(journal, str):
        return [(entry.op, entry.path, dict(entry.arguments)) for entry in journal]
    try:
        return [(one["op"], one["path"], dict(one["arguments"])) for one in json.loads(journal)["steps"]]
    except (ValueError, TypeError, LookupError) as error:
        raise ReplayError(f"this is no journal ({error!r}); accepted: the text of Schedule.dump()") from None


def _call(signature: inspect.Signature, values: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return positional and named arguments; those of ``*args`` come after all that are positional."""
    parameters = list(signature.parameters.values())[1:]
    several = next((one for one in parameters if one.kind is one.VAR_POSITIONAL), None)
    if several is None or several.name not in values:
        return [], values
    before = parameters[: parameters.index(several)]
    left = {one.name for one in before} | {several.name}
    args = [values[one.name] for one in before] + values[several.name]
    return args, {name: one for name, one in values.items() if name not in left}


def _value(value: Value, module: nn.Module) -> Any:
    """Turn a described argument back into what it was."""
    match value:
        case {"$name": str(name)}:
            return _named(name)
        case {"$dtype": str(name)}:
            return getattr(torch, name)
        case {"$node": [str(owner), str(name)]}:
            return owner, _node(module.get_submodule(owner), owner, name)
        case {"$match": dict(match)}:
            return _match(match, module)
        case {"$attribute": str(name)}:
            return Attribute(name)
        case {"$partial": [function, [*args], dict(named)]}:
            arguments = {key: _value(one, module) for key, one in named.items()}
            return functools.partial(
                _value(function, module), *(_value(one, module) for one in args), **arguments
            )
        case {"$module": str(name)} | {"$object": str(name)}:
            raise ReplayError(f"a {name} is not in a journal; accepted: hand it over with given")
        case dict():
            return {key: _value(one, module) for key, one in value.items()}
        case list():
            return [_value(one, module) for one in value]
    return value


def _named(name: str) -> Any:
    module, _, path = name.partition(":")
    if "<" in path:
        raise ReplayError(f"{name} is defined inside a function; accepted: hand it over with given")
    return functools.reduce(getattr, path.split("."), import_module(module))


def _match(value: Mapping[str, Any], module: nn.Module) -> Match:
    path = value["owner"]
    owner = module.get_submodule(path)
    inputs = {name: _value(one, module) for name, one in value["inputs"].items()}
    inputs = {name: one[1] if isinstance(one, tuple) else one for name, one in inputs.items()}
    nodes, outputs = ([_node(owner, path, name) for name in value[key]] for key in ("nodes", "outputs"))
    return Match(path, nodes, inputs, outputs, value["returns_tuple"])


def _node(owner: nn.Module, path: str, name: str) -> fx.Node:
    nodes: list[fx.Node] = list(owner.graph.nodes) if isinstance(owner, fx.GraphModule) else []
    found = next((node for node in nodes if node.name == name), None)
    if found is None:
        raise ReplayError(f"{path!r} has no node {name!r} in its graph")
    return found
