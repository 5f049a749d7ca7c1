"""Surgery on graphs: one call in the place of matches, and a match as a module of its own."""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

from torch import fx, nn

from makespan.slapo._errors import ArgumentError
from makespan.slapo._matcher import Match
from makespan.slapo._operations import Attribute
from makespan.slapo._traced import TracedModule
from makespan.slapo._tracer import has_hooks

__all__ = ["Call", "Part", "bound_arguments", "check_hooks", "check_is_closed", "insert_call", "part_of"]


@dataclass(frozen=True, slots=True)
class Call:
    """What takes the place of matches: a module or function, with its arguments as values of the graph."""

    target: nn.Module | Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def check_is_closed(where: str, match: Match) -> None:
    """Refuse a match of which somebody else uses a value, or that waits for what follows from it."""
    chosen = set(match.nodes)
    for node in match.nodes:
        users = [user for user in node.users if user not in chosen]
        if users and node not in match.outputs:
            raise ArgumentError(
                f"{where}: the value {node.name!r} inside the match is used outside of it, by"
                f" {users[0].name!r}; accepted: matches of which only the results are used"
            )
    waiting = [node for node in dict.fromkeys(_inputs_of(match)) if node not in chosen]
    waiting += [value for value in match.inputs.values() if isinstance(value, fx.Node)]
    seen: set[fx.Node] = set()
    while waiting:
        node = waiting.pop()
        if node in chosen:
            raise ArgumentError(
                f"{where}: an input of the match follows from its value {node.name!r}; accepted: matches"
                " whose inputs do not depend on their results"
            )
        if node not in seen:
            seen.add(node)
            waiting += node.all_input_nodes


def _inputs_of(match: Match) -> Iterator[fx.Node]:
    for node in match.nodes:
        yield from node.all_input_nodes


def check_hooks(where: str, owner: nn.Module, matches: Sequence[Match]) -> tuple[nn.Module, nn.Module] | None:
    """Return the modules at both ends of a match if their hooks can be kept; refuse all other hooks."""
    called = [[_called(owner, node) for node in match.nodes] for match in matches]
    hooked = [one for modules in called for one in modules if one is not None and has_hooks(one)]
    if not hooked:
        return None
    single = called[0] if len(called) == 1 else []
    first, last = (single[0], single[-1]) if single else (None, None)
    for one in hooked:
        before = bool(one._forward_pre_hooks or one._backward_hooks or one._backward_pre_hooks)
        if (before and one is not first) or (one._forward_hooks and one is not last) or not single:
            raise ArgumentError(
                f"{where}: a {type(one).__name__} in the match has hooks; accepted: one match, hooks before"
                " the forward and of the backward on its first module, hooks after the forward on its last"
            )
    return hooked[0], hooked[-1]


def _called(owner: nn.Module, node: fx.Node) -> nn.Module | None:
    return owner.get_submodule(str(node.target)) if node.op == "call_module" else None


def bound_arguments(
    where: str, target: nn.Module | Callable[..., Any], match: Match, concrete_args: Mapping[str, Any]
) -> Call:
    """Hand the inputs of a match over in the order of the pattern's parameters."""
    values = tuple(match.inputs.values())
    function = target.forward if isinstance(target, nn.Module) else target
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # functions of torch that are written in C have no signature
        return Call(target, values, concrete_args)
    names = [
        name for name, one in parameters.items() if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]
    unknown = [name for name in concrete_args if name not in names]
    takes_any = any(one.kind is one.VAR_POSITIONAL for one in parameters.values())
    left = [name for name in names if name not in concrete_args]
    required = [name for name in left if parameters[name].default is inspect.Parameter.empty]
    given = left[: len(values)]
    if unknown or not set(required) <= set(given) or (len(values) > len(left) and not takes_any):
        name = type(target).__name__ if isinstance(target, nn.Module) else getattr(target, "__name__", target)
        extra = f" and concrete_args ({', '.join(concrete_args)})" if concrete_args else ""
        raise ArgumentError(
            f"{where}: the match gives ({', '.join(match.inputs)}){extra}, but {name} takes"
            f" ({', '.join(map(str, parameters.values()))}); accepted: as many arguments as it takes"
        )
    if takes_any and len(values) > len(left):
        return Call(target, values, concrete_args)
    named = dict(zip(given, values, strict=True)) | dict(concrete_args)
    positional: list[Any] = []
    for name in names:
        if name not in named or parameters[name].kind is inspect.Parameter.KEYWORD_ONLY:
            break
        positional.append(named.pop(name))
    return Call(target, tuple(positional), named)


@contextmanager
def _edited(owner: TracedModule) -> Iterator[fx.Graph]:
    """Change a graph; if that fails, the module gets a copy of the graph that it had."""
    before = copy.deepcopy(owner.graph)
    try:
        yield owner.graph
        owner.graph.lint()
        owner.recompile()
    except BaseException:
        owner.graph = before
        raise


def insert_call(
    owner: TracedModule, matches: Sequence[Match], call: Call, name: str, keeps_modules: bool
) -> None:
    """Let one call compute what the matches compute; several matches get one element of its result each."""
    outputs = [one for match in matches for one in match.outputs]
    gives_tuple = len(matches) > 1 or matches[0].returns_tuple
    nodes = [node for match in matches for node in match.nodes]
    with _edited(owner) as graph:
        with graph.inserting_after(_last_input(graph, call)):
            node = _call_node(owner, graph, call, name)
        after = node
        for place, output in enumerate(outputs):
            result = node
            if gives_tuple:
                with graph.inserting_after(after):
                    result = after = graph.call_function(getitem, (node, place))
            output.replace_all_uses_with(result)
        targets = [str(one.target) for one in nodes if one.op == "call_module"]
        _erase(graph, nodes)
        _sort(graph)
    for target in targets if not keeps_modules else ():
        if not _is_used(graph, target):
            owner.delete_submodule(target)


def _last_input(graph: fx.Graph, call: Call) -> fx.Node | None:
    """Return the last node that a call waits for, which are at least the arguments of the forward."""
    wanted: set[fx.Node] = set(graph.find_nodes(op="placeholder"))
    fx.node.map_arg((call.args, dict(call.kwargs)), wanted.add)
    return next((node for node in reversed(graph.nodes) if node in wanted), None)


def _call_node(owner: TracedModule, graph: fx.Graph, call: Call, name: str) -> fx.Node:
    def read(value: Any) -> Any:
        if not isinstance(value, Attribute):
            return value
        return graph.get_attr(value.target)

    args = tuple(read(one) for one in call.args)
    kwargs = {key: read(one) for key, one in call.kwargs.items()}
    made = [one for one in (*args, *kwargs.values()) if isinstance(one, fx.Node) and one.op == "get_attr"]
    if isinstance(call.target, nn.Module):
        taken = set(owner._modules) | set(vars(owner))
        unique = next(one for one in (f"{name}_{k}" for k in range(len(taken) + 1)) if one not in taken)
        owner.add_module(unique, call.target)
        node = graph.call_module(unique, args, kwargs)
    else:
        node = graph.call_function(call.target, args, kwargs)
    for one in made:
        node.prepend(one)
    return node


def _erase(graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
    """Erase nodes whose results nobody uses, and what only they needed."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    for node in sorted(nodes, key=order.__getitem__, reverse=True):
        waiting = node.all_input_nodes
        graph.erase_node(node)
        while waiting:
            one = waiting.pop()
            is_dead = not one.users and one.op in ("get_attr", "call_function", "call_method")
            if is_dead and one in order and one not in nodes and not one.is_impure():
                order.pop(one)
                waiting += one.all_input_nodes
                graph.erase_node(one)


def _sort(graph: fx.Graph) -> None:
    """Move what uses a value behind it; everything else stays in order."""
    done: set[fx.Node] = set()
    waiting = list(graph.nodes)
    if all(_precede(node, waiting) for node in waiting):
        return
    last: fx.Node | None = None
    while waiting:
        node = next(one for one in waiting if done.issuperset(one.all_input_nodes))
        if last is not None:
            last.append(node)
        done.add(node)
        waiting.remove(node)
        last = node


def _precede(node: fx.Node, order: list[fx.Node]) -> bool:
    return all(one < node for one in node.all_input_nodes)


def _is_used(graph: fx.Graph, target: str) -> bool:
    reads = [*graph.find_nodes(op="call_module"), *graph.find_nodes(op="get_attr")]
    return any(str(one.target) == target or str(one.target).startswith(f"{target}.") for one in reads)


@dataclass(frozen=True, slots=True)
class Part:
    """A match as a graph of its own: inputs, and the modules it calls by the names they have in it."""

    graph: fx.Graph
    inputs: tuple[fx.Node, ...]
    modules: dict[str, nn.Module]


def part_of(
    owner: nn.Module, match: Match, ordered: Callable[[list[fx.Node]], Sequence[fx.Node]] | None = None
) -> Part:
    """Copy a match; inputs come in the order of the pattern, then what else it reads by first use."""
    chosen = set(match.nodes)
    inputs = list(dict.fromkeys(one for one in match.inputs.values() if isinstance(one, fx.Node)))
    names = {one: name for name, one in match.inputs.items() if isinstance(one, fx.Node)}
    inputs += [one for one in dict.fromkeys(_inputs_of(match)) if one not in chosen and one not in inputs]
    if ordered is not None:
        inputs = list(ordered(inputs))
    graph, modules = fx.Graph(), dict[str, nn.Module]()
    copies = {one: graph.placeholder(names.get(one, one.name)) for one in inputs}
    for node in match.nodes:
        copies[node] = new = graph.node_copy(node, copies.__getitem__)
        if node.op == "call_module":
            new.target = str(node.target).replace(".", "_")
            modules[new.target] = owner.get_submodule(str(node.target))
    results = tuple(copies[one] for one in match.outputs)
    graph.output(results if match.returns_tuple else results[0])
    graph.lint()
    return Part(graph, tuple(inputs), modules)
