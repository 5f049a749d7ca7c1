"""Primitives ``trace`` and ``trace_until``: capture the graph of a module, or of the path to some modules.

A trace is planned before it is applied: `_TracePlan` captures all graphs while the model stays unchanged, and
`_TracePlan.commit` replaces the modules only if every required capture succeeded.
"""

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree  # there is no public name for it

from makespan.slapo.errors import ArgumentError, ConflictError, KindError, TracingError, close_names, warn
from makespan.slapo.graphs import (
    NO_LEAVES,
    VARIADIC,
    Arguments,
    Example,
    Leaves,
    TracedModule,
    as_example,
    forward_of,
    is_inlined,
    is_same_argument,
    is_wrapped,
    replace_modules,
    trace_module,
)
from makespan.slapo.schedule import Primitive, register_primitive

if TYPE_CHECKING:
    from makespan.slapo.schedule import Schedule


# --- Plan of a trace ---

_SHOWN = 4


@dataclass
class _TracePlan:
    """Captured graphs by the id of the modules that they will replace.

    ``opaque`` holds the reason by path for each called module that could not be captured.
    """

    leaves: Leaves = NO_LEAVES
    only: Collection[str] | None = None
    traced: dict[int, TracedModule] = field(default_factory=dict)
    originals: dict[int, nn.Module] = field(default_factory=dict)
    arguments: dict[int, Arguments] = field(default_factory=dict)
    opaque: dict[str, str] = field(default_factory=dict)

    def add(self, module: nn.Module, path: str, arguments: Arguments, example: Example | None = None) -> None:
        """Capture a module and those that it calls; a called one that cannot be captured stays opaque."""
        traced = trace_module(module, path, arguments, self.leaves, example=example)
        self.traced[id(module)], self.originals[id(module)] = traced, module
        self.arguments[id(module)] = arguments
        calls: dict[str, list[fx.Node]] = {}
        for node in traced.graph.find_nodes(op="call_module"):
            calls.setdefault(str(node.target), []).append(node)
        for target, nodes in calls.items():
            child, inner = module.get_submodule(target), f"{path}.{target}" if path else target
            is_left = isinstance(child, fx.GraphModule) or is_inlined(child) or self.leaves.has(child)
            if is_left or (self.only is not None and inner not in self.only):
                continue
            try:
                self._add_called(child, inner, nodes, example)
            except TracingError as error:
                self.opaque[inner] = str(error)

    def _add_called(
        self, child: nn.Module, path: str, nodes: Sequence[fx.Node], example: Example | None
    ) -> None:
        arguments = _arguments_of_calls(child, path, nodes)
        known = self.arguments.get(id(child))
        if known is None:
            inner_example = None if example is None else example.of_call(child, forward_of(child), nodes[0])
            self.add(child, path, arguments, inner_example)
        elif known.inputs != arguments.inputs or not _have_same_values(known.fixed, arguments.fixed):
            # A shared module has one graph, which would be wrong for these arguments: it and all modules
            # below it stay untraced.
            for inner in child.modules():
                self.traced.pop(id(inner), None)
            raise _conflicting_calls(path)

    def reaches(self, node: "Schedule") -> bool:
        """Return True if the graphs call a module, or the modules in it, as for a list that is iterated."""
        if id(node.mod) in self.traced or isinstance(node.mod, fx.GraphModule) or self.leaves.has(node.mod):
            return True
        above = node.parent
        while above is not None and id(above.mod) not in self.traced:
            above = above.parent
        return above is not None and calls_inside(self.traced[id(above.mod)], above.path, node.path)

    def commit(self, sch: "Schedule") -> None:
        """Replace the modules by their graphs wherever the model holds them."""
        new = self.traced.get(id(sch.mod), sch.mod)
        # Captured graphs call the original modules: replace those inside the graphs as well as in the model.
        replace_modules((sch.root.mod, new), self.traced)
        sch.mod = new
        sch.rebuild()
        sch.metadata.slots[Trace.name()].update(self.opaque)


def calls_inside(owner: fx.GraphModule, owner_path: str, path: str) -> bool:
    """Return True if a graph calls modules below a path, and never the module at the path itself."""
    relative = path.removeprefix(owner_path).lstrip(".")
    targets = {str(node.target) for node in owner.graph.nodes}
    return relative not in targets and any(target.startswith(f"{relative}.") for target in targets)


def _have_same_values(known: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return known.keys() == other.keys() and all(is_same_argument(known[name], other[name]) for name in known)


def _conflicting_calls(path: str) -> TracingError:
    return TracingError(
        f"trace of {path!r}: calls pass different arguments, and one graph cannot serve them all;"
        " pass the same arguments everywhere, or declare it in leaf_modules"
    )


def _arguments_of_calls(module: nn.Module, path: str, nodes: Iterable[fx.Node]) -> Arguments:
    """Return the arguments with which a graph calls a module; values of the graph vary, others are fixed."""
    signature, arguments = forward_of(module), None
    for node in nodes:
        try:
            bound = signature.bind(*node.args, **node.kwargs).arguments
        except TypeError as error:
            raise TracingError(f"trace of {path!r}: {error}") from None
        for parameter in signature.parameters.values():
            more = bound.pop(parameter.name, None) if parameter.kind in VARIADIC else None
            if more and parameter.kind is parameter.VAR_POSITIONAL:
                raise TracingError(f"trace of {path!r}: it is called with a variable number of arguments")
            bound |= more or {}
        inputs = set()
        for name, value in bound.items():
            used: list[fx.Node] = []
            fx.node.map_arg(value, used.append)
            if used:
                inputs.add(name)
        fixed = {name: value for name, value in bound.items() if name not in inputs}
        called = Arguments(frozenset(inputs), fixed)
        if arguments is not None and (
            arguments.inputs != called.inputs or not _have_same_values(arguments.fixed, called.fixed)
        ):
            raise _conflicting_calls(path)
        arguments = called
    return arguments or Arguments(frozenset(), {})


def _arguments_from_options(
    sch: "Schedule",
    concrete_args: Mapping[str, Any] | None,
    inputs: Sequence[str] | None,
    example_inputs: Any,
) -> tuple[Arguments, Example | None]:
    """Return arguments and example for a user's options; arguments without a default vary unless fixed."""
    parameters = {
        parameter.name: parameter
        for parameter in forward_of(sch.mod).parameters.values()
        if parameter.kind not in VARIADIC
    }
    fixed, varying = dict(concrete_args or {}), [inputs] if isinstance(inputs, str) else list(inputs or ())
    where = f"trace of {sch.path!r} ({type(sch.mod).__name__})"
    example = None
    if example_inputs is not None:
        example = as_example(sch.mod, forward_of(sch.mod), example_inputs, where)
        for name, value in example.arguments.items():
            has_tensors = any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value))
            if has_tensors and name not in (*fixed, *varying):
                varying.append(name)
            elif not has_tensors and name not in varying:
                fixed.setdefault(name, value)
    for name in (*fixed, *varying):
        if name not in parameters:
            raise ArgumentError(f"{where}: forward has no argument {name!r}; {close_names(name, parameters)}")
    if both := sorted(set(fixed) & set(varying)):
        raise ArgumentError(f"{where}: {both[0]!r} is in concrete_args and in inputs; name it in one of them")
    required = {
        name for name, parameter in parameters.items() if parameter.default is inspect.Parameter.empty
    }
    varies = frozenset((required - set(fixed)) | set(varying))
    if not varies and inputs is None and parameters.keys() - fixed.keys():
        # The graph would record a single call without arguments.
        names = ", ".join(list(parameters)[:_SHOWN]) + (", ..." if len(parameters) > _SHOWN else "")
        raise TracingError(
            f"{where}: every argument has a default, so that all would be fixed; "
            f"name those that vary in inputs, among {names}"
        )
    if example is not None and (missing := sorted(varies - example.arguments.keys())):
        raise ArgumentError(
            f"{where}: example_inputs lacks {missing[0]!r}; expected a value for every argument that varies"
        )
    return Arguments(varies, fixed), example if example is None else Example(
        sch.mod, {**fixed, **example.arguments}
    )


def _check_tracer(sch: "Schedule", tracer: str) -> None:
    if tracer != "fx":
        raise ArgumentError(f"trace of {sch.path!r}: tracer is {tracer!r}; expected 'fx'")


def _capture_or_warn(sch: "Schedule", strict: bool, capture: Callable[[], None]) -> bool:
    """Run a capture; on failure raise the error if strict, else warn and return False."""
    try:
        capture()
    except TracingError as error:
        if strict:
            raise
        warn(str(error))
        return False
    return True


# --- Primitives ---


@register_primitive()
class Trace(Primitive):
    """Capture the static graph of a module, for primitives that change operations of its forward."""

    @classmethod
    def name(cls) -> str:
        """Return ``trace``."""
        return "trace"

    @classmethod
    def init_metadata(cls) -> dict[str, str]:
        """Return the reasons why modules stay opaque, by their paths."""
        return {}

    @classmethod
    def apply(
        cls,
        sch: "Schedule",
        recursive: bool = True,
        flatten: bool = False,
        leaf_modules: Sequence[str | type[nn.Module]] = (),
        leaf_functions: Sequence[str | Callable[..., Any]] = (),
        concrete_args: Mapping[str, Any] | None = None,
        tracer: str = "fx",
        strict: bool = True,
        inputs: Sequence[str] | None = None,
        example_inputs: Any = None,
    ) -> bool:
        """Replace the forward of this module by a graph, and return True if there is one.

        Parameters
        ----------
        recursive
            Also capture the modules that it calls, each in a graph of its own. A module without a static
            graph stays untraced, and the reason is in ``metadata.slots["trace"]`` by its path.
        flatten
            Capture one graph down to leaves; modules in between lose their nodes in the schedule.
        leaf_modules, leaf_functions
            Classes or their names, and functions or their full names, that the graph calls as a whole.
        concrete_args
            Values of arguments that do not vary.
        tracer
            ``fx``.
        strict
            Raise if this module has no static graph; otherwise warn and return False.
        inputs
            Arguments that vary although they have a default; the others keep their default. Required if every
            argument has a default, as in models that are called by keyword.
        example_inputs
            A tensor, positional arguments, or arguments by name; tensors among them vary. If a forward
            branches on a shape, a length or a type, the graph takes the branch of the example, and a call
            that would take another branch raises an error. None if the forward has no such branches.
        """
        _check_tracer(sch, tracer)
        leaves = Leaves.of(leaf_modules, leaf_functions)
        if isinstance(sch.mod, fx.GraphModule):
            return True
        if is_wrapped(sch.mod):
            raise ConflictError(
                f"trace of {sch.path!r}: its forward is wrapped, {sch.conflict('checkpoint')}; "
                "trace first, then wrap"
            )
        plan = _TracePlan(leaves, None if recursive else ())

        def capture() -> None:
            arguments, example = _arguments_from_options(sch, concrete_args, inputs, example_inputs)
            if flatten:
                traced = trace_module(sch.mod, sch.path, arguments, leaves, flatten=True, example=example)
                plan.traced[id(sch.mod)] = traced
            else:
                plan.add(sch.mod, sch.path, arguments, example)

        if not _capture_or_warn(sch, strict, capture):
            return False
        plan.commit(sch)
        return True


@register_primitive()
class TraceUntil(Primitive):
    """Capture the graphs of the model and of the modules on the path to some modules, before a cut."""

    @classmethod
    def name(cls) -> str:
        """Return ``trace_until``."""
        return "trace_until"

    @classmethod
    def apply(
        cls,
        sch: "Schedule",
        paths: str | Sequence[str],
        leaf_modules: Sequence[str | type[nn.Module]] = (),
        leaf_functions: Sequence[str | Callable[..., Any]] = (),
        concrete_args: Mapping[str, Any] | None = None,
        tracer: str = "fx",
        strict: bool = True,
        inputs: Sequence[str] | None = None,
        example_inputs: Any = None,
    ) -> bool:
        """Trace the root and exactly the modules along each path, its end included.

        Parameters
        ----------
        paths
            Paths of modules; other modules stay untraced.
        leaf_modules, leaf_functions, concrete_args, tracer, strict, inputs, example_inputs
            As of ``trace``.
        """
        _check_tracer(sch, tracer)
        if sch.parent is not None:
            raise ConflictError(f"trace_until of {sch.path!r}: expected the root of the schedule")
        if isinstance(sch.mod, fx.GraphModule):
            raise ConflictError(f"trace_until of the root: it is traced already, {sch.conflict('trace')}")
        wanted = [paths] if isinstance(paths, str) else list(paths)
        nodes = [sch[path] for path in wanted]
        on_the_way: dict[str, set[str]] = {}  # the path of a node with those of all its owners
        for node in nodes:
            tokens = node.path.split(".")
            on_the_way[node.path] = {".".join(tokens[: end + 1]) for end in range(len(tokens))}
        everything = {path for paths_down in on_the_way.values() for path in paths_down}
        plan = _TracePlan(Leaves.of(leaf_modules, leaf_functions), everything)

        def capture() -> None:
            arguments, example = _arguments_from_options(sch, concrete_args, inputs, example_inputs)
            plan.add(sch.mod, "", arguments, example)
            for node in nodes:
                for path, reason in plan.opaque.items():
                    if path in on_the_way[node.path]:
                        raise TracingError(reason)
                if not plan.reaches(node):
                    raise TracingError(
                        f"trace_until of {node.path!r}: no traced module calls it; "
                        "expected a module that the forward of its owner calls"
                    )

        if not _capture_or_warn(sch, strict, capture):
            return False
        plan.commit(sch)
        return True


def ensure_traced(sch: "Schedule") -> None:
    """Trace a node with defaults if it is not traced."""
    if not isinstance(sch.mod, fx.GraphModule):
        sch.trace()


def check_is_called(sch: "Schedule", primitive: str) -> None:
    """Reject a module that its owner no longer calls because its operations are in the graph of the owner."""
    owner = sch.parent.mod if sch.parent is not None else None
    if not (isinstance(owner, TracedModule) and is_inlined(sch.mod)):
        return
    nodes = [*owner.graph.find_nodes(op="call_module"), *owner.graph.find_nodes(op="get_attr")]
    if all(node.target != sch.name for node in nodes):
        raise ConflictError(
            f"{primitive} of {sch.path!r}: its operations are in the graph of its owner,"
            f" {sch.conflict('trace')}; apply {primitive} first, then trace"
        )


def graph_of(sch: "Schedule", primitive: str) -> TracedModule:
    """Return the traced module of a node, for a primitive that is about to change its graph."""
    if is_wrapped(sch.mod):
        raise ConflictError(
            f"{primitive} of {sch.path!r}: its forward is wrapped, {sch.conflict('checkpoint')};"
            " change the graph first, then wrap"
        )
    if not isinstance(sch.mod, TracedModule):
        raise KindError(
            f"{primitive} of {sch.path!r}: {type(sch.mod).__name__} is not traced; trace it first"
        )
    return sch.mod
