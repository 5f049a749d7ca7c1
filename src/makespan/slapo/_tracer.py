"""Capture the graph of one module: its forward, with the modules it calls as they are or down to leaves."""

import inspect
import operator
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx, nn

from makespan.errors import failed_at
from makespan.slapo._errors import KindError, TracingError
from makespan.slapo._examples import Example, check_branch
from makespan.slapo._kept_state import copied_object, is_object
from makespan.slapo._recording import recording
from makespan.slapo._traced import PLAIN, TracedModule

__all__ = [
    "NO_LEAVES",
    "VARIADIC",
    "Arguments",
    "Leaves",
    "forward_of",
    "has_hooks",
    "is_inlined",
    "is_wrapped",
    "run_hooks_after",
    "run_hooks_before",
    "trace_module",
]


@dataclass(frozen=True, slots=True)
class Arguments:
    """How a forward is called: parameters that vary from call to call, and values of all others."""

    inputs: frozenset[str]
    fixed: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Leaves:
    """What is not looked into: modules by class or its name, functions by object or dotted name."""

    modules: tuple[str | type[nn.Module], ...] = ()
    functions: tuple[Callable[..., Any], ...] = ()

    @classmethod
    def of(cls, modules: Sequence[Any], functions: Sequence[Any]) -> "Leaves":
        """Check what a user listed."""
        for one in modules:
            if not (isinstance(one, str) or (inspect.isclass(one) and issubclass(one, nn.Module))):
                raise KindError(
                    f"leaf_modules has {one!r}; accepted: a class of modules, its name or full name"
                )
        found = tuple(pkgutil.resolve_name(one) if isinstance(one, str) else one for one in functions)
        for one in found:
            if not callable(one):
                raise KindError(f"leaf_functions has {one!r}; accepted: a function or its full name")
        return cls(tuple(modules), found)

    def has(self, module: nn.Module) -> bool:
        """Whether a graph calls a module and does not look inside."""
        kind = type(module)
        if kind.__module__.startswith("torch.nn.") and not isinstance(module, nn.Sequential):
            return True
        if not getattr(module, "traceable", True) or is_wrapped(module):
            return True
        names = {kind.__name__, kind.__qualname__, f"{kind.__module__}.{kind.__qualname__}"}
        return any(one in names if isinstance(one, str) else isinstance(module, one) for one in self.modules)


NO_LEAVES = Leaves()
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def forward_of(module: nn.Module) -> inspect.Signature:
    """Signature of a forward, seen through decorators, without self."""
    return inspect.signature(module.forward)


def is_wrapped(module: nn.Module) -> bool:
    """Whether something was put around the forward of this very module, such as recomputation."""
    return "forward" in vars(module)


def is_inlined(module: nn.Module) -> bool:
    """Whether the operations of a module appear in the graph of its owner, as those of a decomposed one."""
    return getattr(module, "traceable", None) is True and not is_wrapped(module)


def run_hooks_before(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Do what a module does before its forward."""
    for key, hook in module._forward_pre_hooks.items():
        if key in module._forward_pre_hooks_with_kwargs:
            changed = hook(module, args, kwargs)
            args, kwargs = (args, kwargs) if changed is None else changed
        else:
            result = hook(module, args)
            args = args if result is None else result if isinstance(result, tuple) else (result,)
    return args, kwargs


def run_hooks_after(module: nn.Module, args: list[Any], kwargs: dict[str, Any], output: Any) -> Any:
    """Do what a module does after its forward."""
    for key, hook in module._forward_hooks.items():
        with_kwargs = key in module._forward_hooks_with_kwargs
        result = (
            hook(module, tuple(args), kwargs, output) if with_kwargs else hook(module, tuple(args), output)
        )
        output = output if result is None else result
    return output


def has_hooks(module: nn.Module) -> bool:
    """Whether something runs before or after a module that its forward does not show."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(vars(module).get(name) for name in names)


class _Tracer(fx.Tracer):
    """Tracer of one module that keeps names and order of the parameters, and reads buffers when it runs."""

    proxy_buffer_attributes = True

    def __init__(
        self, arguments: Arguments, leaves: Leaves, flatten: bool, example: Example | None, path: str
    ) -> None:
        super().__init__()
        self._arguments, self._leaves, self._flatten = arguments, leaves, flatten
        self._example, self._path = example, path
        self._training: list[tuple[nn.Module, bool]] = []
        self.constants: list[str] = []
        self._objects: dict[int, tuple[fx.Node, Any]] = {}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Look into what is written to be looked into, and into everything else only to flatten."""
        if is_inlined(m):
            return False
        return not self._flatten or isinstance(m, fx.GraphModule) or has_hooks(m) or self._leaves.has(m)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call a module; one that is inlined keeps its hooks, as nodes before and after."""
        path = self.path_of_module(m)
        if self.is_leaf_module(m, path) or not has_hooks(m):
            return super().call_module(m, forward, args, kwargs)
        itself = self.create_proxy("get_attr", path, (), {})
        inputs: Any = self.create_proxy("call_function", run_hooks_before, (itself, args, kwargs), {})
        plain = [inputs[0][place] for place in range(len(args))]
        named = {name: inputs[1][name] for name in kwargs}
        output = m.forward(*plain, **named)
        if not m._forward_hooks:
            return output
        return self.create_proxy("call_function", run_hooks_after, (itself, plain, named, output), {})

    def create_node(
        self,
        kind: str,
        target: Any,
        args: Any,
        kwargs: Any,
        name: str | None = None,
        type_expr: Any = None,
    ) -> fx.Node:
        """Make a node; the value of a module named self is called otherwise in the code of the graph."""
        named = "self_value" if name is None and target == "self" else name
        return super().create_node(kind, target, args, kwargs, named, type_expr)

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        """Make a placeholder of every parameter; those that are fixed are passed as they are.

        All that can be left out are passed by name, because some decorators look for names.
        """
        signature, module = inspect.signature(root_fn), self.root
        defaults = _defaults(signature, self._arguments)
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for name, default in defaults.items():
            proxy = self.create_proxy("placeholder", name, default, {})
            if name in self._arguments.inputs:
                value: Any = proxy
            elif name in self._arguments.fixed:
                value = self._arguments.fixed[name]
            else:
                continue
            if _is_positional(signature.parameters.get(name)) and not kwargs:
                args.append(value)
            else:
                kwargs[name] = value
        self._keep_training_live(module)
        return lambda: root_fn(module, *args, **kwargs), []

    def _keep_training_live(self, root: nn.Module) -> None:
        for path, module in root.named_modules():
            if module is root or is_inlined(module) or not self.is_leaf_module(module, path):
                self._training.append((module, module.training))
                target = f"{path}.training" if path else "training"
                vars(module)["training"] = self.create_proxy("get_attr", target, (), {})

    def finish(self) -> None:
        """Give modules their modes back, and drop the reads of modes that nothing used."""
        for module, mode in self._training:
            vars(module)["training"] = mode
        for node in reversed(getattr(self, "graph", fx.Graph()).find_nodes(op="get_attr")):
            if str(node.target).rpartition(".")[2] == "training" and not node.users:
                self.graph.erase_node(node)

    def create_arg(self, a: Any) -> Any:
        """Keep the class of a structured value, and pass on an object that graphs know nothing of."""
        if is_dataclass(a) and not isinstance(a, type | fx.Node) and isinstance(a, dict):
            present = {one.name: self.create_arg(getattr(a, one.name)) for one in fields(a)}
            return self.create_node("call_function", type(a), (), present)
        if is_dataclass(a) and not isinstance(a, type | fx.Node | fx.Proxy) and not _has_proxies(a):
            return self._as_it_is(a)  # its fields may not be all of it
        if isinstance(a, dict) and type(a) is not dict:
            return self.create_node("call_function", type(a), (self.create_arg(dict(a)),), {})
        try:
            return super().create_arg(a)
        except NotImplementedError:
            return self._as_it_is(a)

    def _as_it_is(self, value: Any) -> fx.Node:
        """Read an object that was made while tracing; each call gets its own, for a cache grows in a call."""
        if id(value) in self._objects:
            return self._objects[id(value)][0]
        name = f"_constant_{len(self.constants)}"
        vars(self.root)[name] = copied_object(value) if is_object(value) else value
        self.constants.append(name)
        node = self.create_node("get_attr", name, (), {})
        if is_object(value):
            node = self.create_node("call_function", copied_object, (node,), {})
        self._objects[id(value)] = node, value  # the value too, so that no identity is used again
        return node

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """Make what stands for a value; with an example its length and its number are known."""
        return fx.Proxy(node, self) if self._example is None else _Measured(node, self)

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        """Take a value apart that has a known length for the example, such as a shape."""
        if self._example is None:
            found: Iterator[Any] = super().iter(obj)
            return found
        if isinstance(self._example.value(obj.node), Tensor):
            raise fx.proxy.TraceError(f"it iterates over a tensor, {obj.node.format_node() or obj.node.name}")
        return iter([operator.getitem(obj, place) for place in range(self.as_in_example(obj, len))])

    def as_in_example(self, obj: fx.Proxy, measure: Callable[[Any], Any]) -> Any:
        """Return a number of a value as the example has it, which the graph checks at every call."""
        value = None if self._example is None else self._example.value(obj.node)
        if isinstance(value, Tensor) and measure is not len:
            raise fx.proxy.TraceError(
                f"it branches on the elements of {obj.node.format_node() or obj.node.name}"
            )
        known = measure(value)
        found = self.create_proxy("call_function", measure, (obj,), {})
        where = f"{self._path or 'the model'!r}, at {obj.node.name}"
        self.create_proxy("call_function", check_branch, (found, known, where), {})
        return known

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Branch as the example does, or say on what a forward branches that is known only when it runs."""
        if self._example is not None:
            is_true: bool = self.as_in_example(obj, bool)
            return is_true
        if obj.node.op == "get_attr" and str(obj.node.target).endswith("training"):
            raise fx.proxy.TraceError("it branches on self.training, of which a graph would keep one side")
        raise fx.proxy.TraceError(f"it branches on the value of {obj.node.format_node() or obj.node.name}")


class _Measured(fx.Proxy):
    """What stands for a value that an example has; its length and its number are those of the example."""

    tracer: _Tracer

    def __getattr__(self, name: str) -> "_KnownAttribute":
        """Return what stands for an attribute."""
        return _KnownAttribute(self, name)

    def __len__(self) -> int:
        n: int = self.tracer.as_in_example(self, len)
        return n

    def __index__(self) -> int:
        number: int = self.tracer.as_in_example(self, operator.index)
        return number

    def __int__(self) -> int:
        number: int = self.tracer.as_in_example(self, int)
        return number


class _KnownAttribute(_Measured, fx.proxy.Attribute):
    """An attribute of such a value, which is a node once somebody uses it."""


def _has_proxies(value: Any) -> bool:
    """Whether any field of a dataclass is known only when the graph runs."""
    found: list[Any] = []
    for one in fields(value):
        fx.node.map_aggregate(
            getattr(value, one.name, None), lambda inner: found.append(isinstance(inner, fx.Proxy))
        )
    return any(found)


def _is_positional(parameter: inspect.Parameter | None) -> bool:
    """Whether a parameter must be given, or can be given by its place only."""
    if parameter is None or parameter.kind is parameter.KEYWORD_ONLY:
        return False
    return parameter.default is parameter.empty or parameter.kind is parameter.POSITIONAL_ONLY


def _defaults(signature: inspect.Signature, arguments: Arguments) -> dict[str, tuple[Any, ...]]:
    """Defaults as a signature in source code can have them: none before a parameter without one.

    Keyword arguments that have no parameter of their own come last.
    """
    own = {one.name: one for one in list(signature.parameters.values())[1:] if one.kind not in VARIADIC}
    extra = sorted({*arguments.inputs, *arguments.fixed} - set(own))
    defaults: dict[str, tuple[Any, ...]] = {}
    open_end = True
    for name in reversed([*own, *extra]):
        value = own[name].default if name in own else inspect.Parameter.empty
        if name not in arguments.inputs:
            value = arguments.fixed.get(name, value)
        open_end = open_end and not (name in arguments.inputs and value is inspect.Parameter.empty)
        defaults[name] = ((value if isinstance(value, PLAIN) else None),) if open_end else ()
    return {name: defaults[name] for name in [*own, *extra]}


def trace_module(
    module: nn.Module,
    path: str,
    arguments: Arguments,
    leaves: Leaves = NO_LEAVES,
    flatten: bool = False,
    example: Example | None = None,
) -> TracedModule:
    """Return a module that runs the graph of another one, which stays as it is."""
    tracer = _Tracer(arguments, leaves, flatten, example, path)
    before, attributes = torch.get_rng_state(), set(vars(module))
    try:
        with recording(tracer, module, leaves.functions):
            graph = tracer.trace(module)
        if not torch.equal(before, torch.get_rng_state()):
            raise fx.proxy.TraceError(
                "it draws random numbers that depend on no input: the graph would keep them"
            )
    except Exception as error:
        raise _untraceable(module, path, error) from error
    finally:
        tracer.finish()
        torch.set_rng_state(before)
        constants = {name: vars(module).pop(name) for name in set(vars(module)) - attributes}
    fixed = {
        name: value
        for name, value in _fixed(module, arguments).items()
        if value is not inspect.Parameter.empty
    }
    traced = TracedModule.around(module, graph, fixed, dict(sorted(constants.items())))
    if flatten:
        traced.flattened = True
        vars(traced)["_modules"] = _shells(module, tracer)
    return traced


def _fixed(module: nn.Module, arguments: Arguments) -> Mapping[str, Any]:
    parameters = forward_of(module).parameters.values()
    defaults = {one.name: one.default for one in parameters if one.name not in arguments.inputs}
    return MappingProxyType(defaults | dict(arguments.fixed))


def _shells(module: nn.Module, tracer: _Tracer, path: str = "") -> dict[str, nn.Module | None]:
    """Children of a flat module: its leaves, inside of what has the names and parameters of the others."""
    shells: dict[str, nn.Module | None] = {}
    for name, child in module._modules.items():
        inner = f"{path}{name}"
        if child is None or is_inlined(child) or _is_called(child, inner, tracer):
            shells[name] = child
            continue
        shell = nn.Module()
        for key in ("_parameters", "_buffers", "_non_persistent_buffers_set", "training"):
            vars(shell)[key] = vars(child)[key]
        vars(shell)["_modules"] = _shells(child, tracer, f"{inner}.")
        shells[name] = shell
    return shells


def _is_called(module: nn.Module, path: str, tracer: _Tracer) -> bool:
    lists = nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict
    return tracer.is_leaf_module(module, path) and not isinstance(module, lists)


def _untraceable(module: nn.Module, path: str, error: Exception) -> TracingError:
    forward = inspect.unwrap(type(module).forward)
    try:
        file = inspect.getsourcefile(forward) or ""
        line = failed_at(error.__traceback__, file) or inspect.getsourcelines(forward)[1]
        place = f"{file}:{line}"
    except (OSError, TypeError):  # typed at a prompt, or not written in Python
        place = "source unknown"
    name, cause = f"{type(module).__module__}.{type(module).__qualname__}", [*str(error).splitlines(), ""][0]
    return TracingError(
        f"trace of {path!r}: the forward of {name} ({place}) has no static graph: {type(error).__name__}:"
        f" {cause}; accepted: fix arguments by concrete_args, name those that vary in inputs, declare"
        " leaf_modules or leaf_functions, or trace a smaller subtree"
    )
