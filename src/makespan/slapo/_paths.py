"""Which modules of a model are nodes of its schedule, and how a path leads to one."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import nn
from torch.jit import ScriptModule

from makespan.slapo._errors import KindError, PathError, close_names

if TYPE_CHECKING:
    from makespan.slapo._schedule import Schedule

__all__ = ["found_at", "is_leaf", "is_list", "node_modules"]


def is_leaf(module: nn.Module) -> bool:
    """Whether a schedule does not look inside: the layers of torch.nn itself, and what torch.jit made."""
    if isinstance(module, ScriptModule):
        return True
    return type(module).__module__.startswith("torch.nn.") and not isinstance(module, nn.Sequential)


def is_list(module: nn.Module) -> bool:
    """Whether a module only holds others, which its owner calls: lists, and what a flat graph leaves."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return type(module).forward is nn.Module.forward
    return type(module) is nn.Module


def node_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Go through name and module of the children of a node."""
    if is_list(module) or not is_leaf(module):
        yield from _elements(module, "")


def _elements(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, one in module.named_children():
        if is_list(one):
            yield from _elements(one, f"{prefix}{name}.")
        else:
            yield prefix + name, one


def found_at(start: "Schedule", path: str) -> "Schedule":
    """Return the node of a path below another one."""
    if not isinstance(path, str):
        raise KindError(f"a schedule is indexed with a path such as 'layers.0', not with {path!r}")
    node, tokens = start, path.split(".") if path else []
    while tokens:
        for count in range(1, len(tokens) + 1):
            if (name := ".".join(tokens[:count])) in node.child:
                node, tokens = node.child[name], tokens[count:]
                break
        else:
            return _elsewhere(start, path, node, tokens)
    return node


def _elsewhere(start: "Schedule", path: str, node: "Schedule", tokens: list[str]) -> "Schedule":
    """Return the node of a module that stands at another path as well, or say why there is none."""
    module, walked = node.mod, 0
    for token in tokens:
        inner = dict(module._modules.items()).get(token)
        if inner is None:
            break
        module, walked = inner, walked + 1
        if not is_list(module):
            same = next((one for _, one in start.root.named_schedules() if one.mod is module), None)
            if same is not None:
                return _in_shared(same, f"{start.path}.{path}".lstrip("."), tokens[walked:])
            break
    raise PathError(_why_not(start, path, node, tokens, walked, module))


def _in_shared(same: "Schedule", full: str, tokens: list[str]) -> "Schedule":
    try:
        return found_at(same, ".".join(tokens))
    except PathError as error:
        raise PathError(
            f"no module {full!r} in the schedule: it stands at {same.path!r}, too, and there is {error}"
        ) from None


def _why_not(
    start: "Schedule", path: str, node: "Schedule", tokens: list[str], walked: int, module: nn.Module
) -> str:
    full = f"{start.path}.{path}" if start.path else path
    for above in _ancestors(node):
        for step, entry in enumerate(node.metadata.journal, start=1):
            if entry.op == "trace" and entry.path == above.path and entry.arguments.get("flatten") is True:
                return f"no module {full!r} in the schedule: step {step} swallowed it, {entry}"
    where = f"no module {full!r} in the schedule"
    if 0 < walked < len(tokens) and is_list(module):
        stop = ".".join(filter(None, (node.path, *tokens[:walked])))
        known = close_names(tokens[walked], module._modules)
        return f"{where}: {type(module).__name__} at {stop!r} has no {tokens[walked]!r}; {known}"
    if walked and is_list(module):
        elements = [f"{full}.{name}" for name, _ in _elements(module, "")]
        kind = type(module).__name__
        return f"{where}: it is a {kind}, which nobody calls; index an element, {_few(elements)}"
    owner = f"{type(node.mod).__name__} at {node.path!r}" if node.path else f"{type(node.mod).__name__}"
    if walked:
        return f"{where}: {owner} is a layer of torch.nn or a script, inside which schedules do not look"
    names = [*node.child, *{name.partition(".")[0] for name in node.child if "." in name}]
    return f"{where}: {owner} has no {tokens[0]!r}; {close_names('.'.join(tokens[:2]), names)}"


def _ancestors(node: "Schedule") -> Iterator["Schedule"]:
    above: Schedule | None = node
    while above is not None:
        yield above
        above = above.parent


def _few(names: list[str]) -> str:
    shown = [*names[:2], "...", names[-1]] if len(names) > 3 else names
    return ", ".join(one if one == "..." else repr(one) for one in shown) if shown else "of which it has none"
