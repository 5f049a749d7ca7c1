"""What was applied to a model: steps as values without tensors, modules or graphs, to print and to repeat."""

import functools
import hashlib
import inspect
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import fx, nn

from makespan.slapo._matcher import Match
from makespan.slapo._operations import Attribute

__all__ = ["JournalEntry", "Value", "described", "digest", "qualified"]

Value: TypeAlias = "bool | int | float | str | list[Value] | dict[str, Value] | None"


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One primitive that was applied.

    Parameters
    ----------
    op, path
        Name of the primitive and path of the module that it was applied to, as it was called then.
    arguments
        What was passed, by name of the parameter, as plain values: a callable or a class by its qualified
        name, a node of a graph by owner and name, anything else by its class.
    seconds
        Wall time that the primitive took, s.
    """

    op: str
    path: str
    arguments: Mapping[str, Value]
    seconds: float

    @property
    def call(self) -> str:
        """The step as it would be written, without the path."""
        return f"{self.op}({', '.join(f'{name}={_shown(one)}' for name, one in self.arguments.items())})"

    def __str__(self) -> str:
        """Return step and path."""
        return f"{self.call} at {self.path!r}"


def qualified(thing: Any) -> str:
    """Return module and qualified name of a function or a class."""
    return f"{thing.__module__}:{thing.__qualname__}"


def described(value: Any) -> Value:
    """Return a plain value that says what an argument was; `makespan...language._replay` turns it back."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], fx.Node):
        return {"$node": [str(value[0]), value[1].name]}
    if isinstance(value, Match):
        return {"$match": _described_match(value)}
    if isinstance(value, list | tuple):
        return [described(one) for one in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: described(one) for key, one in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((described(one) for one in value), key=repr)
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    if isinstance(value, functools.partial):
        parts = [described(value.func), [*map(described, value.args)], described(value.keywords)]
        return {"$partial": parts}
    if inspect.isclass(value) or (hasattr(value, "__qualname__") and hasattr(value, "__module__")):
        return {"$name": qualified(value)}
    kind = "$module" if isinstance(value, nn.Module) else "$object"
    return {kind: qualified(type(value))}


def _described_match(match: Match) -> Value:
    inputs: dict[str, Value] = {}
    for name, one in match.inputs.items():
        if isinstance(one, Attribute):
            inputs[name] = {"$attribute": one.target}
        else:
            inputs[name] = described((match.owner, one) if isinstance(one, fx.Node) else one)
    nodes: list[Value] = [node.name for node in match.nodes]
    outputs: list[Value] = [node.name for node in match.outputs]
    return {
        "owner": match.owner,
        "nodes": nodes,
        "inputs": inputs,
        "outputs": outputs,
        "returns_tuple": match.returns_tuple,
    }


def _shown(value: Value) -> str:
    match value:
        case {"$name": str(name)}:
            return name.partition(":")[2]
        case {"$module": str(name)} | {"$object": str(name)}:
            return f"<{name.partition(':')[2]}>"
        case {"$dtype": str(name)}:
            return name
        case {"$node": [str(owner), str(name)]}:
            return ".".join(filter(None, (owner, name)))
        case {"$match": {"owner": str(owner), "nodes": [*nodes]}}:
            return f"[{', '.join('.'.join(filter(None, (owner, str(node)))) for node in nodes)}]"
        case {"$partial": [function, *_]}:
            return f"partial({_shown(function)}, ...)"
        case list():
            return f"[{', '.join(map(_shown, value))}]"
        case dict():
            return "{" + ", ".join(f"{key!r}: {_shown(one)}" for key, one in value.items()) + "}"
    return repr(value)


def digest(journal: Iterable[JournalEntry]) -> str:
    """Return 16 hexadecimal digits that agree for processes that applied the same steps."""
    steps = [[entry.op, entry.path, dict(entry.arguments)] for entry in journal]
    return hashlib.blake2b(json.dumps(steps, sort_keys=True).encode(), digest_size=8).hexdigest()
