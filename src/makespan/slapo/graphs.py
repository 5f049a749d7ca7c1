"""Graphs of forwards: traced modules, the tracer that captures them, and examples that decide branches.

A `TracedModule` replaces the module that was traced, with the same parameters, names, arguments and hooks. An
`Example` gives the nodes of a graph values during the capture, so that a forward may branch on shapes and
types. A `StateSnapshot` lets a forward run a second time from the state in which the first run started.
"""

import copy
import functools
import inspect
import operator
import pickle
import pkgutil
import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, is_dataclass
from types import TracebackType
from typing import Any, Self
from unittest import mock

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.fx import _symbolic_trace as tracing  # a tracer patches modules, and nothing public undoes it
from torch.utils import _pytree as pytree  # there is no public name for it

from makespan.errors import failed_at
from makespan.slapo.errors import ArgumentError, KindError, TracingError, short_repr

# --- Traced modules ---

PLAIN = (bool, int, float, str, type(None))
# Attributes that belong to the graph, not to the module that was traced.
_OF_THE_GRAPH = frozenset(vars(fx.GraphModule(nn.Module(), fx.Graph()))) - frozenset(vars(nn.Module()))


class TracedModule(fx.GraphModule):
    """The graph of a forward, with all attributes of the traced module, used or not."""

    def __init__(self, root: nn.Module, graph: fx.Graph, class_name: str = "TracedModule") -> None:
        super().__init__(root, graph, class_name)
        self.origin = f"{type(root).__module__}.{type(root).__qualname__}"
        self.fixed: dict[str, Any] = {}
        self.required: frozenset[str] = frozenset()
        self.flattened = False
        self.argument_names = tuple(str(node.target) for node in graph.find_nodes(op="placeholder"))

    @classmethod
    def around(
        cls, module: nn.Module, graph: fx.Graph, fixed: Mapping[str, Any], constants: Mapping[str, Any]
    ) -> Self:
        """Build it around a traced module; constants are values that only its graph reads."""
        # A graph module copies the attributes that its graph reads from the root: set the constants there
        # meanwhile.
        vars(module).update(constants)
        try:
            traced = cls(module, graph, type(module).__name__)
        finally:
            for name in constants:
                del vars(module)[name]
        traced.take_over(module)
        for name, value in constants.items():
            vars(traced).pop(name, None)
            traced.keep(name, value)
        traced.fixed, traced.required = dict(fixed), frozenset(traced.argument_names) - frozenset(fixed)
        return traced

    def take_over(self, module: nn.Module) -> None:
        """Share the parameters, buffers, children, hooks and plain attributes of another module."""
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers", "_modules"):
                vars(self)[name] = dict(value)
            elif name == "_non_persistent_buffers_set":
                vars(self)[name] = set(value)
            elif name not in _OF_THE_GRAPH:
                vars(self)[name] = value

    def keep(self, name: str, value: object) -> None:
        """Set a constant that is not part of the state; a tensor moves between devices with the module."""
        if isinstance(value, Tensor):
            self.register_buffer(name, value, persistent=False)
        else:
            setattr(self, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph; reject arguments other than those of the trace."""
        arguments = dict(zip(self.argument_names, args, strict=False)) | kwargs
        for name, value in self.fixed.items():
            if name in arguments and not is_same_argument(arguments[name], value):
                raise TracingError(
                    f"{self.origin}: the argument {name!r} was fixed to {short_repr(value)} when it was"
                    f" traced; got {short_repr(arguments[name])}; pass that value, or trace again with"
                    f" {name!r} in inputs"
                )
        if missing := self.required - set(arguments):
            wanted = ", ".join(name for name in self.argument_names if name in self.required)
            raise TracingError(
                f"{self.origin}: called without {', '.join(map(repr, sorted(missing)))}; expected every"
                f" input that it was traced with: {wanted}"
            )
        return super().__call__(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> "TracedModule":
        """Copy with hooks and constants, which a plain graph module would lose."""
        kind = type(self).__mro__[1]  # each graph module has a class of its own that cannot be called
        result: TracedModule = kind(self, copy.deepcopy(self.graph, memo), type(self).__name__)
        memo[id(self)] = result
        for name, value in vars(self).items():
            if name not in _OF_THE_GRAPH and name != "_compiled_call_impl":
                vars(result)[name] = copy.deepcopy(value, memo)
        result.after_copy()
        return result

    def after_copy(self) -> None:
        """Finish a copy; subclasses override it."""


def _run_as_captured(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
    """Compile nothing: run what torch.compile has captured."""
    captured: Callable[..., Any] = graph.forward
    return captured


class FusedModule(TracedModule):
    """A part of a graph; the modules that it calls stay registered with the owner of the graph.

    So their parameters keep their names, and their training modes follow the model.
    """

    def __init__(self, root: nn.Module, graph: fx.Graph, class_name: str = "FusedModule") -> None:
        super().__init__(root, graph, class_name)
        self.backend: str | None = None
        self.borrowed: tuple[str, ...] = ()
        self.required = frozenset(self.argument_names)

    @classmethod
    def of(cls, graph: fx.Graph, modules: Mapping[str, nn.Module], class_name: str, training: bool) -> Self:
        """Build it from a graph and the modules that it calls."""
        holder = nn.Module()
        vars(holder).update(modules)
        module = cls(holder, graph, class_name)
        for name in modules:  # a plain attribute, since only the owner of the graph registers the module
            vars(module)[name] = module._modules.pop(name)
        module.borrowed = tuple(modules)
        module.training = training
        return module

    def exchange(self, new: Mapping[int, nn.Module]) -> None:
        """Replace called modules by new ones, by the id of the old."""
        for name in self.borrowed:
            vars(self)[name] = new.get(id(vars(self)[name]), vars(self)[name])

    def compile_by(self, backend: str | None) -> None:
        """Run the graph with a backend of torch.compile, from the first call on."""
        self.backend = backend
        self._compiled_call_impl = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph; the first call loads the compiler, which takes longer than to write a schedule."""
        is_compiled = self._compiled_call_impl is not None or torch.compiler.is_compiling()
        if self.backend is not None and not is_compiled:
            # As a function, since torch imports all compilers to find the one that a name stands for.
            self.compile(backend=_run_as_captured if self.backend == "eager" else self.backend)
        return super().__call__(*args, **kwargs)

    def after_copy(self) -> None:
        """Unregister borrowed modules, and compile again."""
        for name in self.borrowed:
            self._modules.pop(name, None)
        self.compile_by(self.backend)


def replace_borrowed(root: nn.Module, new: Mapping[int, nn.Module]) -> None:
    """Replace modules that parts of graphs call, by the id of the old module."""
    for part in root.modules():
        if isinstance(part, FusedModule):
            part.exchange(new)


def replace_modules(roots: Iterable[nn.Module], new: Mapping[int, nn.Module]) -> None:
    """Replace modules, by the id of the old one, in all modules that hold them or borrow them."""
    seen: set[int] = set()
    waiting = list(roots)
    while waiting:
        module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        children = module._modules
        for name, child in children.items():
            if id(child) in new:
                children[name] = new[id(child)]
        waiting += [child for child in children.values() if child is not None]
        if isinstance(module, FusedModule):
            module.exchange(new)


def is_same_argument(value: object, fixed: object) -> bool:
    """Return True if an argument has the value that it was fixed to."""
    if value is fixed:
        return True
    return type(value) is type(fixed) and isinstance(value, PLAIN) and value == fixed


# --- State of a forward, restored for a second pass ---
#
# Recomputation and examples run a forward twice, and the second run must neither see nor leave changes.
# Besides buffers, a forward may change attributes, lists, caches and generators: all are copied before the
# first run. A copy goes down to tensors, modules and functions, which are shared.

_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}
_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict, Counter)
_STATELESS = frozenset({type(None), bool, int, float, complex, str, bytes, nn.Parameter})


class _GeneratorStates:
    """Random generators with their states at one moment.

    The default generator of torch is not among them; the caller that runs a forward twice restores it.
    """

    def __init__(self, values: Iterable[Any], with_global: bool) -> None:
        self._access: list[_Access] = []
        if with_global:
            self._access += [(random.getstate, random.setstate), _GLOBAL_NUMPY]
        leaves = {id(leaf): leaf for value in values for leaf in pytree.tree_leaves(value)}
        self._access += [access for leaf in leaves.values() if (access := _access_to(leaf)) is not None]
        self._states = self.now()

    def now(self) -> list[Any]:
        """Return the states that the generators have now."""
        return [read() for read, _ in self._access]

    def drop_unchanged(self) -> bool:
        """Drop generators whose state has not changed since; return True if there are others."""
        kept = []
        for access, state, now in zip(self._access, self._states, self.now(), strict=True):
            if isinstance(state, Tensor):
                is_same_state = torch.equal(state, now)
            else:
                is_same_state = pickle.dumps(state) == pickle.dumps(now)
            if not is_same_state:
                kept.append((access, state))
        self._access, self._states = [access for access, _ in kept], [state for _, state in kept]
        return bool(kept)

    def restore(self, states: list[Any] | None = None) -> None:
        """Restore the states of the generators, or others that `now` returned."""
        for (_, write), state in zip(self._access, self._states if states is None else states, strict=True):
            write(state)


_Access = tuple[Callable[[], Any], Callable[[Any], Any]]
_GLOBAL_NUMPY: _Access = (np.random.get_state, np.random.set_state)


def _access_to(value: Any) -> _Access | None:
    """Return the functions that read and write the state of a generator; None for anything else."""
    match value:
        case torch.Generator():
            return value.get_state, value.set_state
        case random.Random():
            return value.getstate, value.setstate
        case np.random.RandomState():
            return value.get_state, value.set_state
        case np.random.Generator():
            bits = value.bit_generator
            return lambda: bits.state, lambda state: setattr(bits, "state", state)
    return None


class StateSnapshot:
    """Values of buffers and attributes, at one moment, of a module and all modules that it calls.

    Includes random generators among attributes and arguments, and those of Python and NumPy.

    Parameters
    ----------
    root
        The module.
    arguments
        Arguments of its forward.
    with_global_generators
        Include the global generators of Python and NumPy.
    """

    def __init__(self, root: nn.Module, arguments: Any = (), with_global_generators: bool = True) -> None:
        modules = list(_modules_run_by(root))
        memo: dict[int, Any] = {}  # one for all modules, so that an object that two share stays one object
        self._attributes = [
            (
                module,
                {
                    name: copied_object(value, memo)
                    for name, value in vars(module).items()
                    if name not in _OF_EVERY_MODULE
                },
            )
            for module in modules
        ]
        self._buffers = [(module, dict(module._buffers)) for module in modules if module._buffers]
        held = [buffer for _, buffers in self._buffers for buffer in buffers.values() if buffer is not None]
        self._values = {id(buffer): (buffer, buffer.detach().clone()) for buffer in held}
        values = [
            value for module, attributes in self._attributes for value in map(vars(module).get, attributes)
        ]
        self.draws = _GeneratorStates([values, arguments], with_global_generators)
        # Tensors that are no buffers, each with its version, which changes in place count.
        self._tensors = {
            id(leaf): (leaf, leaf._version, leaf.detach().clone())
            for leaf in pytree.tree_leaves(values)
            if type(leaf) is Tensor and not leaf.requires_grad and not leaf.is_inference()
        }

    def drop_unchanged(self) -> None:
        """Drop copies of buffers, other tensors and generators that have not changed since."""
        self.draws.drop_unchanged()
        self._tensors = {key: held for key, held in self._tensors.items() if held[0]._version != held[1]}
        now = {
            id(buffer)
            for module, _ in self._buffers
            for buffer in module._buffers.values()
            if buffer is not None
        }
        self._values = {
            key: (buffer, value)
            for key, (buffer, value) in self._values.items()
            if key not in now or not torch.equal(buffer, value)
        }

    def restored(self) -> "_Restored":
        """Return a context that sets modules to this state, and restores their previous state at its end."""
        return _Restored(self)

    def apply(self) -> None:
        """Set modules to this state, with buffers as separate tensors."""
        fresh = {key: value.clone() for key, (_, value) in self._values.items()}
        for module, buffers in self._buffers:
            vars(module)["_buffers"] = {
                name: fresh.get(id(buffer), buffer) for name, buffer in buffers.items()
            }
        memo: dict[int, Any] = {
            key: (values.clone(), tensor) for key, (tensor, _, values) in self._tensors.items()
        }
        for module, attributes in self._attributes:
            for name in vars(module).keys() - attributes.keys() - _OF_EVERY_MODULE:
                del vars(module)[name]
            vars(module).update({name: copied_object(value, memo) for name, value in attributes.items()})
        self.draws.restore()


class _Restored:
    """A reentrant context: each entry restores the state before it at its end."""

    def __init__(self, state: StateSnapshot) -> None:
        self._state = state
        self._found: list[list[tuple[nn.Module, dict[str, Any], dict[str, Tensor | None]]]] = []
        self._drawn: list[list[Any]] = []

    def __enter__(self) -> None:
        modules = [module for module, _ in self._state._attributes]
        self._found.append([(module, dict(vars(module)), vars(module)["_buffers"]) for module in modules])
        self._drawn.append(self._state.draws.now())
        self._state.apply()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for module, attributes, buffers in self._found.pop():
            for name in vars(module).keys() - attributes.keys():
                del vars(module)[name]
            vars(module).update(attributes, _buffers=buffers)
        self._state.draws.restore(self._drawn.pop())


def _modules_run_by(root: nn.Module) -> Iterator[nn.Module]:
    """Iterate over the modules that a forward may run, including those that parts of graphs borrow."""
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        for module in waiting.pop().modules():
            if id(module) in seen or isinstance(module, torch.jit.ScriptModule):
                continue
            seen.add(id(module))
            yield module
            if isinstance(module, FusedModule):
                waiting += [vars(module)[name] for name in module.borrowed]


def is_object(value: Any) -> bool:
    """Return True for an object with state, such as a cache, that is neither tensor, module nor callable."""
    return (
        (hasattr(value, "__dict__") or bool(_slots_of(value)))
        and not isinstance(value, Tensor | nn.Module | type)
        and not callable(value)
        and not isinstance(value, pytree.TreeSpec)
        and _access_to(value) is None
    )


def _slots_of(value: Any) -> list[str]:
    """Return the attributes that a user's class lists in ``__slots__``."""
    kind = type(value)
    space = kind.__module__.partition(".")[0]
    if space == "torch" or (space in sys.stdlib_module_names and space != "__main__"):
        return []
    listed = [vars(base).get("__slots__", ()) for base in kind.__mro__]
    names = [name for slots in listed for name in ((slots,) if isinstance(slots, str) else slots)]
    return [name for name in names if not name.startswith("__") and hasattr(value, name)]


def _attributes_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object by name."""
    return getattr(value, "__dict__", {}) | {name: getattr(value, name) for name in _slots_of(value)}


def copied_object(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """Copy an object and the containers in it, down to tensors, modules and functions, which are shared.

    An object that cannot be copied, such as a lock, is shared too.
    """
    memo = {} if memo is None else memo
    if id(value) in memo:
        return memo[id(value)][0]
    if type(value) is tuple:
        return tuple(copied_object(element, memo) for element in value)
    if not _has_state(value):
        return value
    try:
        new = copy.copy(value)
    except (TypeError, NotImplementedError, RuntimeError):
        return value
    memo[id(value)] = new, value  # the original too, so that its id is not reused
    if new is value:  # an object that cannot have copies, such as a logger
        return value
    if isinstance(new, dict):
        if not _STATELESS.issuperset(map(type, value.values())):
            new.update({key: copied_object(element, memo) for key, element in value.items()})
    elif type(new) in (list, deque) and not _STATELESS.issuperset(map(type, value)):
        for place, element in enumerate(value):
            new[place] = copied_object(element, memo)
    if is_object(new):
        for name, element in _attributes_of(value).items():
            object.__setattr__(new, name, copied_object(element, memo))
    return new


def _has_state(value: Any) -> bool:
    return is_object(value) or type(value) in _CONTAINERS


def argument_restorer(
    args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Callable[[tuple[Any, ...], Mapping[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]] | None:
    """Return a function that restores objects and containers among arguments, None if there are none.

    The function takes the arguments of a later pass and returns them with copies of the objects in their
    present state.
    """
    leaves, _ = pytree.tree_flatten((args, tuple(kwargs.values())), is_leaf=_has_state)
    memo: dict[int, Any] = {}  # one for all arguments, so that an object that two share stays one object
    objects = {place: copied_object(leaf, memo) for place, leaf in enumerate(leaves) if _has_state(leaf)}
    if not objects:
        return None

    def restore(
        positional: tuple[Any, ...], named: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        leaves, spec = pytree.tree_flatten((positional, tuple(named.values())), is_leaf=_has_state)
        again: dict[int, Any] = {}
        kept = [
            copied_object(objects[place], again) if place in objects else leaf
            for place, leaf in enumerate(leaves)
        ]
        positional, values = pytree.tree_unflatten(kept, spec)
        return positional, dict(zip(named, values, strict=True))

    return restore


def expanded(value: Any, above: tuple[int, ...] = ()) -> Any:
    """Return an object as a dictionary of its class and attributes, down to tensors and plain values."""
    if id(value) in above:
        return f"the {type(value).__name__} that holds it"
    inside = (*above, id(value))
    if is_object(value):
        held = {"class": f"{type(value).__module__}.{type(value).__qualname__}"}
        return held | {name: expanded(attribute, inside) for name, attribute in _attributes_of(value).items()}
    if type(value) in (list, tuple):
        return type(value)(expanded(element, inside) for element in value)
    if type(value) is dict:
        return {key: expanded(element, inside) for key, element in value.items()}
    return value


# --- Functions that stay calls in a graph ---


@contextmanager
def recording(
    tracer: fx.Tracer, module: nn.Module, functions: Sequence[Callable[..., Any]]
) -> Iterator[None]:
    """Record calls of some functions as nodes, under every name that any module has for one of them.

    Always recorded are the functions of torch that create a tensor from sizes, since a tracer does not see a
    call whose only nodes are sizes.
    """
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.autocast, "__enter__", _refuse_autocast))
        for name in _MAKERS:
            stack.enter_context(mock.patch.object(torch, name, _recorded(tracer, getattr(torch, name))))
        if functions:
            # A function may have been imported under any name anywhere, and decorators hide the module of a
            # forward.
            recorded = {id(function): _recorded(tracer, function) for function in functions}
            spaces: dict[int, dict[str, Any]] = {}
            for loaded in list(sys.modules.values()):
                if not getattr(loaded, "__name__", "torch").startswith("torch"):
                    namespace = vars(loaded)
                    spaces[id(namespace)] = namespace
            for inner in module.modules():
                spaces |= {id(space): space for space in _namespaces_behind(type(inner).forward)}
            for space in spaces.values():
                names = {
                    key: recorded[id(function)]
                    for key, function in list(space.items())
                    if id(function) in recorded
                }
                if names:
                    stack.enter_context(mock.patch.dict(space, names))
        yield


def _refuse_autocast(context: torch.autocast) -> None:
    raise fx.proxy.TraceError("it enters torch.autocast, which a graph would not do")


_MAKERS = (
    "finfo",
    "iinfo",
    "arange",
    "empty",
    "eye",
    "full",
    "linspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "zeros",
)


def _namespaces_behind(function: object) -> Iterator[dict[str, Any]]:
    """Yield the namespaces of a function and of all that its decorators wrap, openly or in a closure."""
    seen: set[int] = set()
    waiting: list[Any] = [function]
    while waiting:
        wrapped = waiting.pop()
        if wrapped is None or id(wrapped) in seen:
            continue
        seen.add(id(wrapped))
        if isinstance(space := getattr(wrapped, "__globals__", None), dict):
            yield space
        cells = (cell.cell_contents for cell in getattr(wrapped, "__closure__", None) or ())
        waiting += [getattr(wrapped, "__wrapped__", None), *cells]


def _recorded(tracer: fx.Tracer, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def record(*args: Any, **kwargs: Any) -> Any:
        proxies: list[Any] = []

        def note(value: Any) -> Any:
            proxies.extend([value] if isinstance(value, fx.Proxy) else [])
            return value

        fx.node.map_aggregate((args, kwargs), note)
        if not proxies:
            return function(*args, **kwargs)
        return tracer.create_proxy("call_function", function, args, kwargs)

    return record


# --- Examples ---
#
# A forward that branches on shapes and types is captured along the branches that an example takes. Each
# branch adds a check to the graph, which raises an error if a later call would take another one.


@fx.node.has_side_effect  # otherwise it would be dropped, since its result is not read
def check_branch(actual: Any, expected: Any, where: str) -> None:
    """Check in a running graph that the forward would branch as it did for the example of the trace."""
    if actual != expected:
        raise TracingError(
            f"{where}: traced with an example for which this is {short_repr(expected)}, but got "
            f"{short_repr(actual)}; trace again with an example like this call"
        )


class Example:
    """Values of the nodes of one graph.

    Parameters
    ----------
    root
        The module whose forward is traced.
    arguments
        Values of its arguments by name.
    """

    def __init__(self, root: nn.Module, arguments: Mapping[str, Any]) -> None:
        self._root, self.arguments = root, arguments
        self._values: dict[fx.Node, Any] = {}
        self.constants: dict[str, Any] = {}
        """Objects that a graph of the module reads as its attributes while it is traced."""
        self._modes = {path: module.training for path, module in root.named_modules()}

    def value(self, node: fx.Node) -> Any:
        """Return the value of a node for the example; buffers and random generators do not change."""
        if node not in self._values:
            # A tracer has patched modules, but the example runs them untraced.
            with (
                mock.patch.object(nn.Module, "__call__", tracing._orig_module_call),
                mock.patch.object(nn.Module, "__getattr__", tracing._orig_module_getattr),
                torch.no_grad(),
                torch.random.fork_rng(),
                StateSnapshot(self._root).restored(),
            ):
                self._run_to(node)
        return self._values[node]

    def _run_to(self, last: fx.Node) -> None:
        waiting, needed = [last], set[fx.Node]()
        while waiting:
            node = waiting.pop()
            if node not in self._values and node not in needed:
                needed.add(node)
                waiting += node.all_input_nodes
        for node in last.graph.nodes:
            if node in needed:
                self._values[node] = self._run(node)

    def _run(self, node: fx.Node) -> Any:
        args = fx.node.map_arg(node.args, self._values.__getitem__)
        kwargs = fx.node.map_arg(node.kwargs, self._values.__getitem__)
        target: Any = node.target
        match node.op:
            case "placeholder":
                return self.arguments.get(target)
            case "get_attr":
                owner, _, name = target.rpartition(".")
                if name == "training":
                    return self._modes[owner]
                if target in self.constants:
                    return self.constants[target]
                return getattr(self._root.get_submodule(owner), name)
            case "call_function":
                return target(*args, **kwargs)
            case "call_method":
                return getattr(args[0], target)(*args[1:], **kwargs)
        return self._root.get_submodule(target)(*args, **kwargs)

    def of_call(self, child: nn.Module, signature: inspect.Signature, node: fx.Node) -> "Example":
        """Return the example of a module that the graph calls, with the arguments of one call."""
        args = fx.node.map_arg(node.args, self.value)
        kwargs = fx.node.map_arg(node.kwargs, self.value)
        return Example(child, _by_name(signature, args, kwargs))


def _by_name(signature: inspect.Signature, args: Any, kwargs: Any) -> dict[str, Any]:
    bound = signature.bind(*args, **kwargs).arguments
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            bound |= bound.pop(parameter.name, {})
    return dict(bound)


def as_example(module: nn.Module, signature: inspect.Signature, inputs: Any, where: str) -> Example:
    """Return the example for a user's inputs: a tensor, positional arguments, or arguments by name."""
    args, kwargs = ((), inputs) if isinstance(inputs, Mapping) else (inputs, {})
    try:
        return Example(module, _by_name(signature, (args,) if isinstance(args, Tensor) else args, kwargs))
    except TypeError as error:
        raise ArgumentError(f"{where}: example_inputs do not fit {signature}: {error}") from None


# --- Capture ---


@dataclass(frozen=True, slots=True)
class Arguments:
    """Arguments of a forward: names of those that vary between calls, and values of all others."""

    inputs: frozenset[str]
    fixed: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Leaves:
    """Modules, by class or its name, and functions, which a graph calls without looking inside."""

    modules: tuple[str | type[nn.Module], ...] = ()
    functions: tuple[Callable[..., Any], ...] = ()

    @classmethod
    def of(cls, modules: Sequence[Any], functions: Sequence[Any]) -> "Leaves":
        """Check the modules and functions that a user listed."""
        for kind in modules:
            if not (isinstance(kind, str) or (inspect.isclass(kind) and issubclass(kind, nn.Module))):
                raise KindError(
                    f"leaf_modules has {kind!r}; expected a class of modules, its name or full name"
                )
        resolved = tuple(
            pkgutil.resolve_name(function) if isinstance(function, str) else function
            for function in functions
        )
        for function in resolved:
            if not callable(function):
                raise KindError(f"leaf_functions has {function!r}; expected a function or its full name")
        return cls(tuple(modules), resolved)

    def has(self, module: nn.Module) -> bool:
        """Return True if a graph calls a module without looking inside."""
        kind = type(module)
        if kind.__module__.startswith("torch.nn.") and not isinstance(module, nn.Sequential):
            return True
        if not getattr(module, "traceable", True) or is_wrapped(module):
            return True
        names = {kind.__name__, kind.__qualname__, f"{kind.__module__}.{kind.__qualname__}"}
        return any(
            kind in names if isinstance(kind, str) else isinstance(module, kind) for kind in self.modules
        )


NO_LEAVES = Leaves()
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def forward_of(module: nn.Module) -> inspect.Signature:
    """Return the signature of the undecorated forward, without self."""
    return inspect.signature(module.forward)


def is_wrapped(module: nn.Module) -> bool:
    """Return True if the forward of this module is wrapped, for example for recomputation."""
    return "forward" in vars(module)


def is_inlined(module: nn.Module) -> bool:
    """Return True if the operations of a module appear in the graph of its owner, as after ``decompose``."""
    return getattr(module, "traceable", None) is True and not is_wrapped(module)


def run_hooks_before(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Run the hooks before the forward of a module."""
    for key, hook in module._forward_pre_hooks.items():
        if key in module._forward_pre_hooks_with_kwargs:
            changed = hook(module, args, kwargs)
            args, kwargs = (args, kwargs) if changed is None else changed
        else:
            result = hook(module, args)
            args = args if result is None else result if isinstance(result, tuple) else (result,)
    return args, kwargs


def run_hooks_after(module: nn.Module, args: list[Any], kwargs: dict[str, Any], output: Any) -> Any:
    """Run the hooks after the forward of a module."""
    for key, hook in module._forward_hooks.items():
        with_kwargs = key in module._forward_hooks_with_kwargs
        result = (
            hook(module, tuple(args), kwargs, output) if with_kwargs else hook(module, tuple(args), output)
        )
        output = output if result is None else result
    return output


def has_hooks(module: nn.Module) -> bool:
    """Return True if a module has hooks, which the graph of its forward does not include."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(vars(module).get(name) for name in names)


_wrapped_once = functools.cache(tracing._create_wrapped_func)


class QuickTracer(fx.Tracer):
    """Tracer that wraps each function of the module math once, rather than once per trace."""

    def trace(self, root: nn.Module | Callable[..., Any], concrete_args: dict[str, Any] | None = None) -> Any:
        """Trace a module or a function."""
        with mock.patch.object(tracing, "_create_wrapped_func", _wrapped_once):
            return super().trace(root, concrete_args)


_WITHOUT_GRADIENT = frozenset(
    {
        *("size", "shape", "dim", "ndim", "numel", "dtype", "device", "requires_grad", "detach", "item"),
        *("eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "isfinite", "logical_not"),
        *("bool", "int", "long", "argmax", "argmin", "argsort", "zeros_like", "ones_like"),
    }
)
"""Functions, methods and attributes of tensors whose results have no gradient."""


class _Tracer(QuickTracer):
    """Tracer of one module; the graph keeps names and order of arguments, and reads buffers when it runs."""

    proxy_buffer_attributes = True

    def __init__(
        self, arguments: Arguments, leaves: Leaves, flatten: bool, example: Example | None, path: str
    ) -> None:
        super().__init__()
        self._arguments, self._leaves, self._flatten = arguments, leaves, flatten
        self._example, self._path = example, path
        self._training: list[tuple[nn.Module, bool]] = []
        self._has_gradients = torch.is_grad_enabled()
        self._plain: set[fx.Node] = set()
        self.constants: list[str] = []
        self._objects: dict[int, tuple[fx.Node, Any]] = {}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Look into modules marked as traceable, and into all others only to flatten."""
        if is_inlined(m):
            return False
        return not self._flatten or isinstance(m, fx.GraphModule) or has_hooks(m) or self._leaves.has(m)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call a module; the hooks of an inlined module become nodes before and after its operations."""
        path = self.path_of_module(m)
        if self.is_leaf_module(m, path) or not has_hooks(m):
            return super().call_module(m, forward, args, kwargs)
        itself = self.create_proxy("get_attr", path, (), {})
        inputs: Any = self.create_proxy("call_function", run_hooks_before, (itself, args, kwargs), {})
        plain = [inputs[0][place] for place in range(len(args))]
        named = {name: inputs[1][name] for name in kwargs}
        # The forward runs here, so that its operations become nodes between those of the hooks.
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
        """Create a node; rename a value called self, as the code of the graph uses that name."""
        named = "self_value" if name is None and target == "self" else name
        node = super().create_node(kind, target, args, kwargs, named, type_expr)
        if self._is_plain(node):
            self._plain.add(node)
        elif torch.is_grad_enabled() != self._has_gradients and node.op.startswith("call"):
            mode = "with" if torch.is_grad_enabled() else "without"
            raise fx.proxy.TraceError(
                f"it computes {node.name} {mode} gradients, as in torch.no_grad, which a graph would not do"
            )
        return node

    def _is_plain(self, node: fx.Node) -> bool:
        """Return True for a value without a gradient: a number, a truth value, or what is made of these."""
        match node.op:
            case "placeholder" | "call_module" | "output":
                return False
            case "get_attr":
                owner, _, name = str(node.target).rpartition(".")
                return getattr(self.root.get_submodule(owner), "_parameters", {}).get(name) is None
        target = str(getattr(node.target, "__name__", node.target))
        name = str(node.args[1]) if node.target is getattr else target
        return name in _WITHOUT_GRADIENT or self._plain.issuperset(node.all_input_nodes)

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        """Create a placeholder for every parameter; pass fixed arguments as values.

        Optional arguments are passed by name, because some decorators look for names.
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
            parameter = signature.parameters.get(name)
            is_positional = (
                parameter is not None
                and parameter.kind is not parameter.KEYWORD_ONLY
                and (parameter.default is parameter.empty or parameter.kind is parameter.POSITIONAL_ONLY)
            )
            if is_positional and not kwargs:
                args.append(value)
            else:
                kwargs[name] = value
        # A forward that passes self.training to a function reads it through a node, so that the graph follows
        # the mode of the module.
        for path, inner in module.named_modules():
            if inner is module or is_inlined(inner) or not self.is_leaf_module(inner, path):
                self._training.append((inner, inner.training))
                target = f"{path}.training" if path else "training"
                vars(inner)["training"] = self.create_proxy("get_attr", target, (), {})
        return lambda: root_fn(module, *args, **kwargs), []

    def finish(self) -> None:
        """Restore the modes of modules, and drop unused reads of modes."""
        for module, mode in self._training:
            vars(module)["training"] = mode
        for node in reversed(getattr(self, "graph", fx.Graph()).find_nodes(op="get_attr")):
            if str(node.target).rpartition(".")[2] == "training" and not node.users:
                self.graph.erase_node(node)

    def added(self) -> set[str]:
        """Return the names of the attributes of the module that the graph reads, and of its constants."""
        reads = getattr(self, "graph", fx.Graph()).find_nodes(op="get_attr")
        return {*self.constants, *(str(node.target) for node in reads)} & vars(self.root).keys()

    def create_arg(self, a: Any) -> Any:
        """Keep the class of a structured value; read objects that graphs cannot express as constants."""
        if is_dataclass(a) and not isinstance(a, type | fx.Node) and isinstance(a, dict):
            present = {entry.name: self.create_arg(getattr(a, entry.name)) for entry in fields(a)}
            return self.create_node("call_function", type(a), (), present)
        if is_dataclass(a) and not isinstance(a, type | fx.Node | fx.Proxy):
            proxies: list[fx.Proxy] = []

            def note(inner: Any) -> Any:
                proxies.extend([inner] if isinstance(inner, fx.Proxy) else [])
                return inner

            for entry in fields(a):
                fx.node.map_aggregate(getattr(a, entry.name, None), note)
            if not proxies:
                return self._constant(a)  # as a constant, since it may hold more than its fields
        if isinstance(a, dict) and type(a) is not dict:
            return self.create_node("call_function", type(a), (self.create_arg(dict(a)),), {})
        try:
            return super().create_arg(a)
        except NotImplementedError:
            return self._constant(a)

    def _constant(self, value: Any) -> fx.Node:
        """Return a node for an object created by the forward; each call gets a copy, as it may change it."""
        if id(value) in self._objects:
            return self._objects[id(value)][0]
        name = f"_constant_{len(self.constants)}"
        vars(self.root)[name] = copied_object(value) if is_object(value) else value
        self.constants.append(name)
        if self._example is not None:
            self._example.constants[name] = vars(self.root)[name]
        node = self.create_node("get_attr", name, (), {})
        if is_object(value):
            node = self.create_node("call_function", copied_object, (node,), {})
        self._objects[id(value)] = node, value  # the value too, so that its id is not reused
        return node

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """Create the proxy for a value; with an example, its length and numeric value are known."""
        return fx.Proxy(node, self) if self._example is None else _ExampleProxy(node, self)

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        """Iterate over a value whose length is known from the example, such as a shape."""
        if self._example is None:
            elements: Iterator[Any] = super().iter(obj)
            return elements
        if isinstance(self._example.value(obj.node), Tensor):
            raise fx.proxy.TraceError(f"it iterates over a tensor, {obj.node.format_node() or obj.node.name}")
        return iter([operator.getitem(obj, place) for place in range(self.measured_on_example(obj, len))])

    def measured_on_example(self, obj: fx.Proxy, measure: Callable[[Any], Any]) -> Any:
        """Return a number measured on the example; the graph checks it in every call."""
        value = None if self._example is None else self._example.value(obj.node)
        if isinstance(value, Tensor) and measure is not len:
            raise fx.proxy.TraceError(
                f"it branches on the elements of {obj.node.format_node() or obj.node.name}"
            )
        known = measure(value)
        measured = self.create_proxy("call_function", measure, (obj,), {})
        where = f"{self._path or 'the model'!r}, at {obj.node.name}"
        self.create_proxy("call_function", check_branch, (measured, known, where), {})
        return known

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Branch as the example does; without an example, raise an error that names the value."""
        if self._example is not None:
            is_true: bool = self.measured_on_example(obj, bool)
            return is_true
        if obj.node.op == "get_attr" and str(obj.node.target).endswith("training"):
            raise fx.proxy.TraceError("it branches on self.training, and a graph would keep one branch")
        raise fx.proxy.TraceError(f"it branches on the value of {obj.node.format_node() or obj.node.name}")


class _ExampleProxy(fx.Proxy):
    """Proxy for a value that has a length and a numeric value on the example."""

    tracer: _Tracer

    def __getattr__(self, name: str) -> "_KnownAttribute":
        """Return the proxy for an attribute."""
        return _KnownAttribute(self, name)

    def __len__(self) -> int:
        n: int = self.tracer.measured_on_example(self, len)
        return n

    def __index__(self) -> int:
        number: int = self.tracer.measured_on_example(self, operator.index)
        return number

    def __int__(self) -> int:
        number: int = self.tracer.measured_on_example(self, int)
        return number


class _KnownAttribute(_ExampleProxy, fx.proxy.Attribute):
    """An attribute of such a value; it becomes a node when it is first used."""


def _defaults(signature: inspect.Signature, arguments: Arguments) -> dict[str, tuple[Any, ...]]:
    """Return defaults in an order that source code allows: parameters with one follow those without.

    Keyword arguments that have no parameter of their own come last.
    """
    parameters = {
        parameter.name: parameter
        for parameter in list(signature.parameters.values())[1:]
        if parameter.kind not in VARIADIC
    }
    extra = sorted({*arguments.inputs, *arguments.fixed} - set(parameters))
    defaults: dict[str, tuple[Any, ...]] = {}
    # From the end: once a parameter has no default, none before it can have one. Those that are passed by
    # name get one, as the module checks itself that they are passed.
    open_end = True
    for name in reversed([*parameters, *extra]):
        value = parameters[name].default if name in parameters else inspect.Parameter.empty
        if name not in arguments.inputs:
            value = arguments.fixed.get(name, value)
        is_by_name = name not in parameters or parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        open_end = open_end and not (
            name in arguments.inputs and value is inspect.Parameter.empty and not is_by_name
        )
        defaults[name] = ((value if isinstance(value, PLAIN) else None),) if open_end else ()
    return {name: defaults[name] for name in [*parameters, *extra]}


def trace_module(
    module: nn.Module,
    path: str,
    arguments: Arguments,
    leaves: Leaves = NO_LEAVES,
    flatten: bool = False,
    example: Example | None = None,
) -> TracedModule:
    """Return a module that runs the graph of another one, which does not change."""
    tracer = _Tracer(arguments, leaves, flatten, example, path)
    # The trace adds constants as attributes of the module; they move to the traced module afterwards.
    before, state = torch.get_rng_state(), _StateBefore(module)
    assigned: list[str] = []
    try:
        with recording(tracer, module, leaves.functions):
            graph = tracer.trace(module)
        if state.has_drawn() or not torch.equal(before, torch.get_rng_state()):
            raise fx.proxy.TraceError(
                "it draws random numbers that depend on no input, which the graph would repeat"
            )
    except Exception as error:
        raise _tracing_error(module, path, error) from error
    finally:
        tracer.finish()
        torch.set_rng_state(before)
        constants = {name: vars(module).pop(name) for name in tracer.added() - state.attributes}
        assigned += state.restore()
    if assigned:
        refusal = fx.proxy.TraceError(f"it assigns {', '.join(assigned)}, which a graph would not do")
        raise _tracing_error(module, path, refusal)
    parameters = forward_of(module).parameters.values()
    defaults = {
        parameter.name: parameter.default
        for parameter in parameters
        if parameter.name not in arguments.inputs
    }
    fixed = {
        name: value
        for name, value in (defaults | dict(arguments.fixed)).items()
        if value is not inspect.Parameter.empty
    }
    traced = TracedModule.around(module, graph, fixed, dict(sorted(constants.items())))
    if flatten:
        traced.flattened = True
        vars(traced)["_modules"] = _shells(module, tracer)
    return traced


class _StateBefore:
    """Attributes, buffers and random generators of a module before its forward is traced.

    The forward runs while it is traced, on proxies: what it changes then, the graph would not change again.
    """

    def __init__(self, root: nn.Module) -> None:
        self.attributes = set(vars(root))
        memo: dict[int, Any] = {}  # one for all modules, so that an object that two share stays one object
        # Path of a module, a table of it, the table before, and copies of attributes with a state.
        self._names: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = []
        self._tensors: list[tuple[str, Tensor, int, Tensor]] = []
        for path, module in root.named_modules():
            for names in (vars(module), module._parameters, module._buffers, module._modules):
                is_run = names is vars(module) and not isinstance(module, fx.GraphModule)
                held = {name: value for name, value in names.items() if name not in _OF_EVERY_MODULE}
                copies = {name: copied_object(value, memo) for name, value in held.items() if is_run}
                self._names.append((path, names, dict(names), copies))
                self._tensors += [
                    (f"{path}.{name}".lstrip("."), value, value._version, value.detach().clone())
                    for name, value in held.items()
                    if is_run and isinstance(value, Tensor) and not value.is_inference()
                ]
        values = [value for _, _, names, copies in self._names for value in map(names.get, copies)]
        self._draws = _GeneratorStates(values, with_global=True)

    def has_drawn(self) -> bool:
        """Return True if numbers were drawn from a generator of Python, of NumPy, or of the module."""
        return self._draws.drop_unchanged()

    def restore(self) -> list[str]:
        """Restore what has changed, and return the paths of the attributes."""
        found = []
        for path, names, known, copies in self._names:
            for name in [*names, *(known.keys() - names.keys())]:
                value: Any = names.get(name)
                copied: Any = copies.get(name, known.get(name))
                if name in names and name in known and _is_unchanged(value, copied, set()):
                    continue
                found.append(f"{path}.{name}".lstrip("."))
                if name not in known:
                    del names[name]
                    continue
                if known[name] is not value:
                    names[name] = known[name]
                    continue
                match value:  # changed in place
                    case dict() | set():
                        value.clear()
                        value.update(copied)
                    case list() | deque():
                        value.clear()
                        value.extend(copied)
                    case _:
                        names[name] = copied
        for path, tensor, version, values in self._tensors:
            if tensor._version != version:
                found.append(path)
                with torch.no_grad():
                    tensor.copy_(values)
        self._draws.restore()
        return found


def _is_unchanged(value: Any, copied: Any, seen: set[int]) -> bool:
    """Return True if a value is as it was when `copied_object` copied it."""
    if value is copied or id(value) in seen:
        return True
    if type(value) is not type(copied):
        return False
    seen.add(id(value))
    match value:
        case dict():
            elements, others = [*value, *value.values()], [*copied, *copied.values()]
        case list() | tuple() | deque():
            elements, others = list(value), list(copied)
        case _ if is_object(value):
            attributes, before = _attributes_of(value), _attributes_of(copied)
            elements, others = [*attributes, *attributes.values()], [*before, *before.values()]
        case _:
            return isinstance(value, _COMPARED) and value == copied
    return len(elements) == len(others) and all(
        _is_unchanged(*pair, seen) for pair in zip(elements, others, strict=True)
    )


_COMPARED = (*PLAIN, complex, bytes, set, frozenset)
"""Types whose values are compared; others must be the same object."""


_LISTS = nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict


def _shells(module: nn.Module, tracer: _Tracer, path: str = "") -> dict[str, nn.Module | None]:
    """Return the children of a flattened module: leaves, inside shells that keep paths and parameters."""
    shells: dict[str, nn.Module | None] = {}
    for name, child in module._modules.items():
        inner = f"{path}{name}"
        if (
            child is None
            or is_inlined(child)
            or (tracer.is_leaf_module(child, inner) and not isinstance(child, _LISTS))
        ):
            shells[name] = child
            continue
        shell = nn.Module()
        for key in ("_parameters", "_buffers", "_non_persistent_buffers_set", "training"):
            vars(shell)[key] = vars(child)[key]
        vars(shell)["_modules"] = _shells(child, tracer, f"{inner}.")
        shells[name] = shell
    return shells


def _tracing_error(module: nn.Module, path: str, error: Exception) -> TracingError:
    forward = inspect.unwrap(type(module).forward)
    try:
        file = inspect.getsourcefile(forward) or ""
        line = failed_at(error.__traceback__, file) or inspect.getsourcelines(forward)[1]
        place = f"{file}:{line}"
    except (OSError, TypeError):  # entered at a prompt, or not written in Python
        place = "source unknown"
    name, cause = f"{type(module).__module__}.{type(module).__qualname__}", [*str(error).splitlines(), ""][0]
    return TracingError(
        f"trace of {path!r}: the forward of {name} ({place}) has no static graph: {type(error).__name__}:"
        f" {cause}; fix arguments by concrete_args, name those that vary in inputs, declare"
        " leaf_modules or leaf_functions, or trace a smaller subtree"
    )
