"""Primitives that find and rewrite: ``find``, ``replace``, ``fuse``, ``decompose``.

Rollback does not cover changes inside a graph. So a primitive checks all matches before it changes the first
node, and `insert_call` restores the graph if an edit fails.
"""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import getitem
from typing import TYPE_CHECKING, Any

from torch import fx, nn

from makespan.slapo.compiling import device_of, why_no_inductor
from makespan.slapo.errors import ArgumentError, ConflictError, KindError, warn
from makespan.slapo.graphs import (
    FusedModule,
    TracedModule,
    has_hooks,
    replace_borrowed,
)
from makespan.slapo.layers import LateBiasLinear, become
from makespan.slapo.layouts import copy_sharding
from makespan.slapo.patterns import Attribute, Match, checked_regex, matches_in, pattern_graph
from makespan.slapo.schedule import (
    Primitive,
    carry_tags,
    move_hooks,
    register_primitive,
    wrapped_forward,
)
from makespan.slapo.tracing import check_is_called, ensure_traced, graph_of

if TYPE_CHECKING:
    from makespan.slapo.schedule import Schedule


# --- Find ---


def _traced_modules(sch: "Schedule") -> Iterator[tuple[str, TracedModule]]:
    """Iterate over the traced modules at and below a node, with their paths from it."""
    ensure_traced(sch)
    for path, node in sch.named_schedules():
        if isinstance(node.mod, TracedModule):
            yield path[len(sch.path) :].lstrip("."), node.mod


class _Query(Primitive):
    @classmethod
    def is_query(cls) -> bool:
        """Return True: the model does not change; if it has to be traced, that is a step of its own."""
        return True


@register_primitive()
class Find(_Query):
    """Find calls of modules by name, or a pattern by its data flow."""

    @classmethod
    def name(cls) -> str:
        """Return ``find``."""
        return "find"

    @classmethod
    def apply(cls, sch: "Schedule", pattern: str | Callable[..., Any]) -> list[Any]:
        """Search the graphs of this module and of those below it; trace it first if necessary.

        Parameters
        ----------
        pattern
            A regular expression, matched from the start of the targets of called modules; the result is a
            list of pairs of owner and node. Or a function or `Pattern`, whose parameters stand for any
            value; the result is a list of matches, each a list of such pairs in the order of the graph.
        """
        if not isinstance(pattern, str):
            return list(FindSubgraph.apply(sch, pattern))
        regex = checked_regex(pattern, f"find of {sch.path!r}")
        calls: list[tuple[str, fx.Node]] = sch.find_node(
            lambda node: node.op == "call_module" and regex.match(str(node.target)) is not None
        )
        return calls


@register_primitive()
class FindNode(_Query):
    """Find nodes of graphs by a condition."""

    @classmethod
    def name(cls) -> str:
        """Return ``find_node``."""
        return "find_node"

    @classmethod
    def apply(cls, sch: "Schedule", condition: Callable[[fx.Node], bool]) -> list[tuple[str, fx.Node]]:
        """Return pairs of owner and node, for all kinds of nodes for which a condition holds.

        Parameters
        ----------
        condition
            Called with each node.
        """
        function: object = condition
        if not callable(function) or isinstance(function, type):
            raise KindError(f"find_node of {sch.path!r}: got {condition!r}; expected a function of a node")
        return [
            (owner, node)
            for owner, mod in _traced_modules(sch)
            for node in mod.graph.nodes
            if condition(node)
        ]


@register_primitive()
class FindSubgraph(_Query):
    """Find a pattern in graphs by its data flow."""

    @classmethod
    def name(cls) -> str:
        """Return ``find_subgraph``."""
        return "find_subgraph"

    @classmethod
    def apply(cls, sch: "Schedule", pattern: Callable[..., Any]) -> list[Match]:
        """Return the matches of a pattern in the order of their first nodes; they do not overlap.

        Parameters
        ----------
        pattern
            A function or a `Pattern`; its parameters stand for any value.
        """
        wanted = pattern_graph(pattern)
        return [
            match
            for owner, mod in _traced_modules(sch)
            for match in matches_in(wanted, owner, mod, mod.graph)
        ]


def as_matches(sch: "Schedule", primitive: str, targets: object) -> list[Match]:
    """Return checked matches for search results: one or several matches, or pairs of owner and node."""
    where = f"{primitive} of {sch.path!r}"
    if isinstance(targets, Match) or _is_pair(targets):
        targets = [targets]
    if not isinstance(targets, list | tuple):
        raise KindError(f"{where}: got {targets!r}; expected the result of find or find_node")
    if not targets:
        raise ArgumentError(
            f"{where}: got no match; expected a result of find or find_node that is not empty"
        )
    matches = [_match_from_pairs(where, target) for target in targets]
    for match in matches:
        owner = sch[match.owner].mod
        graph = owner.graph if isinstance(owner, TracedModule) else None
        current = set() if graph is None else set(graph.nodes)
        for node in match.nodes:
            if node.graph is not graph or node not in current:
                raise ArgumentError(
                    f"{where}: node {node.name!r} is no longer in the graph of {match.owner!r}; search again"
                )
    nodes = [node for match in matches for node in match.nodes]
    if len(set(nodes)) < len(nodes):
        raise ArgumentError(f"{where}: two of the matches share a node; expected matches that do not overlap")
    return matches


def _is_pair(value: object) -> bool:
    return (
        isinstance(value, tuple)
        and len(value) == 2
        and isinstance(value[0], str)
        and isinstance(value[1], fx.Node)
    )


def _match_from_pairs(where: str, value: Any) -> Match:
    """Return a match of nodes that were chosen without a pattern, with inputs in the order of first use."""
    if isinstance(value, Match):
        return value
    pairs = [value] if _is_pair(value) else value
    if not isinstance(pairs, list) or not pairs or not all(map(_is_pair, pairs)):
        raise KindError(f"{where}: got {value!r}; expected pairs of owner and node, or lists of them")
    if len({owner for owner, _ in pairs}) > 1:
        raise ArgumentError(f"{where}: a match has nodes of several owners; expected nodes of one graph")
    chosen = {node for _, node in pairs}
    if bad := [node.name for node in chosen if not node.op.startswith("call_")]:
        raise ArgumentError(f"{where}: node {bad[0]!r} computes nothing; expected nodes that call something")
    nodes = [node for node in pairs[0][1].graph.nodes if node in chosen]
    inputs: dict[str, Any] = {}
    for node in nodes:
        for source in node.all_input_nodes:
            if source not in chosen:
                inputs.setdefault(source.name, source)
    outputs = [node for node in nodes if all(user not in chosen for user in node.users)]
    return Match(pairs[0][0], nodes, inputs, outputs, returns_tuple=len(outputs) > 1)


# --- Change graphs ---


@dataclass(frozen=True, slots=True)
class Call:
    """The replacement of matches: a module or function, with values of the graph as arguments."""

    target: nn.Module | Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def check_is_closed(where: str, match: Match) -> None:
    """Reject a match that one call cannot replace.

    An inner value is used outside, or an input depends on a result, which would make the graph cyclic.
    """
    chosen = set(match.nodes)
    for node in match.nodes:
        users = [user for user in node.users if user not in chosen]
        if users and node not in match.outputs:
            raise ArgumentError(
                f"{where}: the value {node.name!r} inside the match is used outside of it, by"
                f" {users[0].name!r}; only the results of a match may be used outside"
            )
    # Walk back from the inputs: a path that reaches the match again would become a cycle through the call.
    waiting = [node for node in dict.fromkeys(_inputs_of(match)) if node not in chosen]
    waiting += [value for value in match.inputs.values() if isinstance(value, fx.Node)]
    seen: set[fx.Node] = set()
    while waiting:
        node = waiting.pop()
        if node in chosen:
            raise ArgumentError(
                f"{where}: an input of the match depends on its value {node.name!r};"
                " expected inputs that do not depend on the results"
            )
        if node not in seen:
            seen.add(node)
            waiting += node.all_input_nodes


def _inputs_of(match: Match) -> Iterator[fx.Node]:
    for node in match.nodes:
        yield from node.all_input_nodes


def check_hooks(where: str, owner: nn.Module, matches: Sequence[Match]) -> tuple[nn.Module, nn.Module] | None:
    """Return the modules at both ends of a match whose hooks move to its replacement; reject other hooks."""
    called = [
        [owner.get_submodule(str(node.target)) if node.op == "call_module" else None for node in match.nodes]
        for match in matches
    ]
    hooked = [module for modules in called for module in modules if module is not None and has_hooks(module)]
    if not hooked:
        return None
    # A call runs hooks before and after the whole match. So only hooks of its first and last module can move.
    single = called[0] if len(called) == 1 else []
    first, last = (single[0], single[-1]) if single else (None, None)
    for module in hooked:
        before = bool(module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks)
        if (before and module is not first) or (module._forward_hooks and module is not last) or not single:
            raise ArgumentError(
                f"{where}: a {type(module).__name__} in the match has hooks; expected one match, with"
                " hooks before the forward and of the backward on its first module, and hooks after the"
                " forward on its last"
            )
    return hooked[0], hooked[-1]


def bound_arguments(
    where: str, target: nn.Module | Callable[..., Any], match: Match, concrete_args: Mapping[str, Any]
) -> Call:
    """Return the call of a replacement with the inputs of a match, in the order of its pattern."""
    values = tuple(match.inputs.values())
    function = target.forward if isinstance(target, nn.Module) else target
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # functions of torch that are written in C have no signature
        return Call(target, values, concrete_args)
    names = [
        name
        for name, parameter in parameters.items()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    unknown = [name for name in concrete_args if name not in names]
    takes_any = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters.values())
    left = [name for name in names if name not in concrete_args]
    required = [name for name in left if parameters[name].default is inspect.Parameter.empty]
    filled = left[: len(values)]
    if unknown or not set(required) <= set(filled) or (len(values) > len(left) and not takes_any):
        name = type(target).__name__ if isinstance(target, nn.Module) else getattr(target, "__name__", target)
        extra = f" and concrete_args ({', '.join(concrete_args)})" if concrete_args else ""
        raise ArgumentError(
            f"{where}: the match gives ({', '.join(match.inputs)}){extra}, but {name} takes"
            f" ({', '.join(map(str, parameters.values()))})"
        )
    if takes_any and len(values) > len(left):
        return Call(target, values, concrete_args)
    named = dict(zip(filled, values, strict=True)) | dict(concrete_args)
    # By position up to the first gap; later and keyword-only arguments are passed by name.
    positional: list[Any] = []
    for name in names:
        if name not in named or parameters[name].kind is inspect.Parameter.KEYWORD_ONLY:
            break
        positional.append(named.pop(name))
    return Call(target, tuple(positional), named)


def insert_call(
    owner: TracedModule, matches: Sequence[Match], call: Call, name: str, keeps_modules: bool
) -> None:
    """Replace matches by one call; each of several matches gets one element of its result."""
    outputs = [output for match in matches for output in match.outputs]
    gives_tuple = len(matches) > 1 or matches[0].returns_tuple
    nodes = [node for match in matches for node in match.nodes]
    # A failed edit restores this copy, since a rollback only restores the reference to the graph.
    before, graph = copy.deepcopy(owner.graph), owner.graph
    try:
        # After its last argument, and after all placeholders even if it has no argument.
        inputs: set[fx.Node] = set(graph.find_nodes(op="placeholder"))
        fx.node.map_arg((call.args, dict(call.kwargs)), inputs.add)
        with graph.inserting_after(next((node for node in reversed(graph.nodes) if node in inputs), None)):
            node = _insert_node(owner, graph, call, name)
        after = node
        for place, output in enumerate(outputs):
            result = node
            if gives_tuple:
                with graph.inserting_after(after):
                    result = after = graph.call_function(getitem, (node, place))
            output.replace_all_uses_with(result)
        targets = [str(node.target) for node in nodes if node.op == "call_module"]
        _erase_nodes(graph, nodes)
        _sort_nodes(graph)
        graph.lint()
        owner.recompile()
    except BaseException:
        owner.graph = before
        raise
    if keeps_modules:
        return
    # Modules that no node uses any more leave the owner, and with it the schedule.
    reads = [*graph.find_nodes(op="call_module"), *graph.find_nodes(op="get_attr")]
    used = [str(node.target) for node in reads]
    for target in targets:
        if not any(path == target or path.startswith(f"{target}.") for path in used):
            owner.delete_submodule(target)


def _insert_node(owner: TracedModule, graph: fx.Graph, call: Call, name: str) -> fx.Node:
    """Insert the node of a call at the current place of the graph; a new module gets a name in the owner."""

    def read(value: Any) -> Any:
        if not isinstance(value, Attribute):
            return value
        return graph.get_attr(value.target)

    args = tuple(read(value) for value in call.args)
    kwargs = {key: read(value) for key, value in call.kwargs.items()}
    reads = [
        value for value in (*args, *kwargs.values()) if isinstance(value, fx.Node) and value.op == "get_attr"
    ]
    if isinstance(call.target, nn.Module):
        taken = set(owner._modules) | set(vars(owner))
        unique = next(
            candidate
            for candidate in (f"{name}_{k}" for k in range(len(taken) + 1))
            if candidate not in taken
        )
        owner.add_module(unique, call.target)
        node = graph.call_module(unique, args, kwargs)
    else:
        node = graph.call_function(call.target, args, kwargs)
    # Reads of parameters stand directly before the call, wherever fx has put them.
    for read_node in reads:
        node.prepend(read_node)
    return node


def _erase_nodes(graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
    """Erase nodes, and those whose results only they used."""
    # From the end, since fx does not erase a node that has users.
    order = {node: place for place, node in enumerate(graph.nodes)}
    for node in sorted(nodes, key=order.__getitem__, reverse=True):
        waiting = node.all_input_nodes
        graph.erase_node(node)
        while waiting:
            value = waiting.pop()
            is_dead = not value.users and value.op in ("get_attr", "call_function", "call_method")
            if is_dead and value in order and value not in nodes and not value.is_impure():
                order.pop(value)
                waiting += value.all_input_nodes
                graph.erase_node(value)


def _sort_nodes(graph: fx.Graph) -> None:
    """Sort nodes topologically; nodes keep their order as far as possible.

    The new call stands after its last argument. A user of a replaced value may stand before that argument,
    and then has to move behind the call.
    """
    placed: set[fx.Node] = set()
    waiting = list(graph.nodes)
    if all(used < node for node in waiting for used in node.all_input_nodes):
        return
    last: fx.Node | None = None
    while waiting:
        node = next(candidate for candidate in waiting if placed.issuperset(candidate.all_input_nodes))
        if last is not None:
            last.append(node)
        placed.add(node)
        waiting.remove(node)
        last = node


@dataclass(frozen=True, slots=True)
class Part:
    """A match as a separate graph: inputs, and the called modules by their names in it."""

    graph: fx.Graph
    inputs: tuple[fx.Node, ...]
    modules: dict[str, nn.Module]


def part_of(
    owner: nn.Module, match: Match, ordered: Callable[[list[fx.Node]], Sequence[fx.Node]] | None = None
) -> Part:
    """Copy a match to a graph; inputs of the pattern come first, then other values by first use."""
    chosen = set(match.nodes)
    inputs = list(dict.fromkeys(value for value in match.inputs.values() if isinstance(value, fx.Node)))
    names = {value: name for name, value in match.inputs.items() if isinstance(value, fx.Node)}
    inputs += [
        value for value in dict.fromkeys(_inputs_of(match)) if value not in chosen and value not in inputs
    ]
    if ordered is not None:
        inputs = list(ordered(inputs))
    graph, modules = fx.Graph(), dict[str, nn.Module]()
    copies = {value: graph.placeholder(names.get(value, value.name)) for value in inputs}
    for node in match.nodes:
        copies[node] = new = graph.node_copy(node, copies.__getitem__)
        if node.op == "call_module":
            new.target = str(node.target).replace(".", "_")
            modules[new.target] = owner.get_submodule(str(node.target))
    results = tuple(copies[output] for output in match.outputs)
    graph.output(results if match.returns_tuple else results[0])
    graph.lint()
    return Part(graph, tuple(inputs), modules)


# --- Fuse ---

_BACKENDS = {"inductor": "inductor", "dynamo": "eager", "torchscript": "inductor", None: None}


@register_primitive()
class Fuse(Primitive):
    """Turn a part of a graph into one module, and compile it."""

    @classmethod
    def name(cls) -> str:
        """Return ``fuse``."""
        return "fuse"

    @classmethod
    def apply(
        cls, sch: "Schedule", subgraph: object, compiler: str | None = "inductor", name: str = "FusedModule"
    ) -> None:
        """Fuse one match of at least two nodes.

        Parameters
        ----------
        subgraph
            A match of `find`, or the list that `find` returned if it has one.
        compiler
            ``inductor`` compiles when the part first runs, or runs it eagerly with a warning if there is no
            compiler; ``dynamo`` captures without compiling; ``torchscript`` means inductor; None only groups
            the nodes.
        name
            Class of the module, and with a number its name in the owner of the graph.
        """
        where = f"fuse of {sch.path!r}"
        if compiler not in _BACKENDS:
            known = ", ".join(map(repr, _BACKENDS))
            raise ArgumentError(f"{where}: compiler is {compiler!r}; expected one of {known}")
        if compiler == "torchscript":
            warn(f"{where}: torch.jit.script is deprecated; inductor is used instead")
        backend = _BACKENDS[compiler]
        if backend == "inductor" and (reason := why_no_inductor(device_of(sch.mod))):
            warn(f"{where}: {reason}, so the part runs eagerly")
            backend = None
        if not name.isidentifier():
            raise ArgumentError(f"{where}: name is {name!r}; expected an identifier")
        matches = as_matches(sch, cls.name(), subgraph)
        if len(matches) != 1 or len(matches[0]) < 2:
            size = f"{len(matches)} matches" if len(matches) != 1 else "a match of one node"
            raise ArgumentError(f"{where}: got {size}; expected one match of at least two nodes")
        extract_module(sch, cls.name(), matches[0], name).compile_by(backend)


def check_not_fused(sch: "Schedule", primitive: str) -> None:
    """Reject a change of tensors that a fused part of a graph uses."""
    if sch.parent is None:
        return
    for node in sch.parent.child.values():
        part, owner = node.mod, sch.parent.mod
        if not isinstance(part, FusedModule) or not isinstance(owner, TracedModule):
            continue
        calls = [call for call in owner.graph.find_nodes(op="call_module") if call.target == node.name]
        reads = [
            str(value.target) for call in calls for value in call.all_input_nodes if value.op == "get_attr"
        ]
        borrows = any(vars(part)[name] is sch.mod for name in part.borrowed)
        if borrows or any(target.startswith(f"{sch.name}.") for target in reads):
            raise ConflictError(
                f"{primitive} of {sch.path!r}: {node.path!r} uses its tensors,"
                f" {sch.conflict('fuse')}; apply {primitive} first, then fuse"
            )


def extract_module(
    sch: "Schedule", primitive: str, match: Any, name: str, order_args_fn: Any = None
) -> FusedModule:
    """Move a match into a new module, which replaces it in the graph; return the module."""
    owner, where = graph_of(sch[match.owner], primitive), f"{primitive} of {sch.path!r}"
    check_is_closed(where, match)
    check_hooks(where, owner, [match])
    part = part_of(owner, match)
    inputs = part.inputs
    if order_args_fn is not None:
        inputs = tuple(order_args_fn(list(inputs)))
        if sorted(value.name for value in inputs) != sorted(value.name for value in part.inputs):
            raise ArgumentError(
                f"{where}: order_args_fn returned {inputs!r}; expected a permutation of {part.inputs!r}"
            )
        part = part_of(owner, match, lambda _: inputs)
    module = FusedModule.of(part.graph, part.modules, name, owner.training)
    insert_call(owner, [match], Call(module, inputs), name, keeps_modules=True)
    sch[match.owner].rebuild()
    return module


# --- Replace parts of graphs ---


def replace_subgraph(
    sch: "Schedule",
    new: nn.Module | Callable[..., Any],
    target_ops: object,
    name: str | None,
    concrete_args: Mapping[str, Any] | None,
    each: bool,
) -> None:
    """Replace one match, several with the same inputs by one call, or each match separately."""
    where = f"replace of {sch.path!r}"
    matches = as_matches(sch, "replace", target_ops)
    if not callable(new):
        raise KindError(f"{where}: got {type(new).__name__}; expected a module or a function")
    if each:
        if isinstance(new, nn.Module):
            raise KindError(
                f"{where}: got each=True with a module; expected a function of the index of a match"
            )
        groups = [([match], new(index)) for index, match in enumerate(matches)]
    else:
        first = list(matches[0].inputs.values())
        for match in matches[1:]:
            if match.owner != matches[0].owner or list(match.inputs.values()) != first:
                raise ArgumentError(
                    f"{where}: got {len(matches)} matches with different inputs; expected one match, matches"
                    " with the same inputs, or each=True with a function that makes a module from the index"
                    " of a match"
                )
            if len(match.outputs) != 1:
                raise ArgumentError(
                    f"{where}: got several matches of several results; expected one result per match"
                )
        groups = [(matches, new)]
    # All calls are checked before the first graph changes, as rollback does not restore graphs.
    calls = []
    for group, replacement in groups:
        if not callable(replacement):
            raise KindError(
                f"{where}: the factory returned {type(replacement).__name__}; expected a module or a function"
            )
        for match in group:
            check_is_closed(where, match)
        ends = check_hooks(where, graph_of(sch[group[0].owner], "replace"), group)
        if ends is not None and not isinstance(replacement, nn.Module):
            raise ArgumentError(f"{where}: a module in the match has hooks, which a function cannot carry")
        calls.append(bound_arguments(where, replacement, group[0], concrete_args or {}))
    for (group, replacement), call in zip(groups, calls, strict=True):
        owner = graph_of(sch[group[0].owner], "replace")
        if isinstance(replacement, nn.Module):
            for module in dict.fromkeys(check_hooks(where, owner, group) or ()):
                move_hooks(module, replacement)
            replacement.train(owner.training)
        insert_call(owner, group, call, name or type(replacement).__name__, keeps_modules=False)
        sch[group[0].owner].rebuild()


# --- Replace modules ---


def replace_module(sch: "Schedule", new: nn.Module) -> None:
    """Replace the module of a node at all its paths; hooks, tags and sharding carry over."""
    old = sch.mod
    if new is old:
        return
    for name, parameter in new.named_parameters(recurse=False):
        before = old._parameters.get(name)
        if before is not None and before is not parameter and before.shape == parameter.shape:
            carry_tags(before, parameter, sch.metadata.tags)
    move_hooks(old, new)
    copy_sharding(old, new)
    # A new module may contain the old one, which it keeps; every other owner gets the new module.
    inside = {id(module) for module in new.modules()}
    for holder in [module for module in sch.root.mod.modules() if id(module) not in inside]:
        for name, module in holder._modules.items():
            if module is old:
                holder._modules[name] = new
    replace_borrowed(sch.root.mod, {id(old): new})
    sch.mod = new
    (sch.parent or sch).rebuild()


def _replacement_module(sch: "Schedule", source: object, name: str | None) -> nn.Module:
    """Return the checked replacement of a module, made by a function or given; warn of differences."""
    new = source if isinstance(source, nn.Module) else source(sch.mod) if callable(source) else None
    if not isinstance(new, nn.Module):
        raise KindError(
            f"replace of {sch.path!r}: got {type(source).__name__}"
            + (f", which returned {type(new).__name__}" if callable(source) else "")
            + "; expected a module, or a function that makes one from the old module"
        )
    wrapper = wrapped_forward(sch.mod)
    if wrapper is not None and not wrapped_forward(new):
        raise ConflictError(
            f"replace of {sch.path!r}: its forward is wrapped, {sch.conflict(wrapper.op)}; "
            "replace first, then wrap"
        )
    inside = next((path for path, module in new.named_modules() if module is sch.root.mod), None)
    if inside is not None and sch.parent is not None:
        raise ArgumentError(f"replace of {sch.path!r}: the new module holds the whole model at {inside!r}")
    if name is not None and name != sch.name:
        warn(f"replace of {sch.path!r}: the name {name!r} is ignored; the module keeps that of its node")
    pairs: list[tuple[str, object, object]] = [("training mode", sch.mod.training, new.training)]
    before = next((parameter for parameter in sch.mod.parameters() if parameter.is_floating_point()), None)
    after = next((parameter for parameter in new.parameters() if parameter.is_floating_point()), None)
    if before is not None and after is not None:
        pairs += [("device", before.device, after.device), ("dtype", before.dtype, after.dtype)]
    for trait, of_old, of_new in pairs:
        if of_old != of_new:
            note = "; it is changed to that of the old one" if trait == "training mode" else ""
            warn(
                f"replace of {sch.path!r}: {trait} of the old module is {of_old}, of the new one {of_new}"
                f"{note}"
            )
    return new


@register_primitive()
class Replace(Primitive):
    """Replace a module, or nodes of its graph, by another module or function."""

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
        """Replace the whole module, or matches of `find` in its graph.

        Parameters
        ----------
        new_mod_or_func
            For a whole module: the new one, or a function that makes it from the old one. For parts of a
            graph: a module or a function with the parameters of the pattern; with ``each``, a function of the
            index of a match that returns one.
        target_ops
            Matches of `find`, or one pair of `find_node`; None for the whole module.
        name
            Name of the new module in the graph, completed by a number; a whole module keeps its name.
        concrete_args
            Values of parameters that have no counterpart in the pattern.
        each
            Replace every match by a separate module or function.
        """
        if target_ops is not None:
            return replace_subgraph(sch, new_mod_or_func, target_ops, name, concrete_args, each)
        if concrete_args is not None or each:
            raise ArgumentError(f"replace of {sch.path!r}: concrete_args and each need target_ops")
        check_is_called(sch, cls.name())
        new = _replacement_module(sch, new_mod_or_func, name)
        if new.training != sch.mod.training:
            new.train(sch.mod.training)
        replace_module(sch, new)
        return None


@register_primitive()
class ReplaceAll(Primitive):
    """Replace every module of a type."""

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
        kind: object = module_type
        if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
            raise KindError(f"replace_all of {sch.path!r}: got {module_type!r}; expected a class of modules")
        targets = [(path, node) for path, node in sch.named_schedules() if isinstance(node.mod, module_type)]
        # Innermost first, since the nodes below an owner vanish when it is replaced.
        for path, node in reversed(targets):
            node.replace(make_mod_fn(path, node.mod, **kwargs))
        return len(targets)


# --- Decompose ---


@register_primitive()
class Decompose(Primitive):
    """Split a linear layer into two nodes of a graph: product and bias addition."""

    @classmethod
    def name(cls) -> str:
        """Return ``decompose``."""
        return "decompose"

    @classmethod
    def apply(cls, sch: "Schedule") -> None:
        """Add the bias of this linear layer in a separate step, under autocast in the type of the bias."""
        mod = sch.mod
        is_late = isinstance(mod, LateBiasLinear)
        if is_late and vars(mod).get("traceable"):
            raise ConflictError(
                f"decompose of {sch.path!r}: it is already decomposed, {sch.conflict('decompose')}"
            )
        if not isinstance(mod, nn.Linear) or mod._parameters["bias"] is None:
            layer = "Linear without bias" if isinstance(mod, nn.Linear) else type(mod).__name__
            raise ConflictError(f"decompose of {sch.path!r}: got {layer}; expected nn.Linear with bias")
        if not is_late:
            if type(mod).forward is not nn.Linear.forward:
                raise ConflictError(
                    f"decompose of {sch.path!r}: {type(mod).__name__} overrides forward; "
                    "expected nn.Linear with bias"
                )
            become(mod, LateBiasLinear)
        vars(mod)["traceable"] = True
