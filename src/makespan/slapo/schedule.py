"""Schedules: the tree over a model, its primitives, the journal, rollback, and replay.

A primitive is atomic: it succeeds and adds one entry to the journal, or it raises an error and leaves model,
tree and metadata unchanged. Primitives that it applies in turn are part of the same step.

The tree keeps three invariants between primitives. A module has exactly one node, at its first path in the
model. The module of a node is the one that the model holds at the path of the node. A node that remains in
the tree keeps its identity, so a user may hold it across steps.
"""

import base64
import copy
import functools
import hashlib
import inspect
import json
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from itertools import groupby
from types import MappingProxyType
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar, overload

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.jit import ScriptModule

from makespan.files import parse_json
from makespan.notebook import text_html
from makespan.slapo.errors import (
    ArgumentError,
    ConflictError,
    KindError,
    MemberError,
    PathError,
    ReplayError,
    ScheduleError,
    close_names,
)
from makespan.slapo.layouts import Ranks
from makespan.slapo.patterns import Attribute, Match

# --- Nodes and paths ---


def is_leaf(module: nn.Module) -> bool:
    """Return True for a module without nodes below it: a layer of torch.nn itself, or a scripted module."""
    if isinstance(module, ScriptModule):
        return True
    return type(module).__module__.startswith("torch.nn.") and not isinstance(module, nn.Sequential)


def is_list(module: nn.Module) -> bool:
    """Return True for a container whose elements its owner calls: a list, or a shell of a flattened graph."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return type(module).forward is nn.Module.forward
    return type(module) is nn.Module


def node_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Iterate over the names and modules of the children of a node; elements of lists are among them."""
    if is_list(module) or not is_leaf(module):
        yield from _elements(module, "")


def _elements(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if is_list(child):
            yield from _elements(child, f"{prefix}{name}.")
        else:
            yield prefix + name, child


def node_at(start: "Schedule", path: str) -> "Schedule":
    """Return the node at a path below another one."""
    if not isinstance(path, str):
        raise KindError(f"a schedule is indexed with a path such as 'layers.0', not with {path!r}")
    node, tokens = start, path.split(".") if path else []
    # A child has a dotted name if it is an element of a list, so try one token, then two, and so on.
    while tokens:
        for count in range(1, len(tokens) + 1):
            if (name := ".".join(tokens[:count])) in node.child:
                node, tokens = node.child[name], tokens[count:]
                break
        else:
            return _node_of_shared_module(start, path, node, tokens)
    return node


def _node_of_shared_module(start: "Schedule", path: str, node: "Schedule", tokens: list[str]) -> "Schedule":
    """Return the node of a shared module that has another path in the tree, or raise an error."""
    # A module has one node, at its first path. Walk the model along the rest of this path until it reaches a
    # module that has a node elsewhere, and continue in the tree from there.
    module, walked = node.mod, 0
    for token in tokens:
        inner = dict(module._modules.items()).get(token)
        if inner is None:
            break
        module, walked = inner, walked + 1
        if not is_list(module):
            same = next((node for _, node in start.root.named_schedules() if node.mod is module), None)
            if same is None:
                break
            try:
                return node_at(same, ".".join(tokens[walked:]))
            except PathError as error:
                full = f"{start.path}.{path}".lstrip(".")
                raise PathError(
                    f"no module {full!r} in the schedule: its owner is shared with {same.path!r}; {error}"
                ) from None
    raise PathError(_path_message(start, path, node, tokens, walked, module))


def _path_message(
    start: "Schedule", path: str, node: "Schedule", tokens: list[str], walked: int, module: nn.Module
) -> str:
    """Return the message for a path that ends below a node, after some tokens that lead to a module."""
    # From the most specific cause to the general one: part of a flattened graph, no such element, a list
    # instead of an element, inside a leaf, no such child.
    full = f"{start.path}.{path}" if start.path else path
    above: Schedule | None = node
    while above is not None:
        for step, entry in enumerate(node.metadata.journal, start=1):
            if entry.op == "trace" and entry.path == above.path and entry.arguments.get("flatten") is True:
                return f"no module {full!r} in the schedule: step {step} flattened it, {entry}"
        above = above.parent
    where = f"no module {full!r} in the schedule"
    if 0 < walked < len(tokens) and is_list(module):
        stop = ".".join(filter(None, (node.path, *tokens[:walked])))
        known = close_names(tokens[walked], module._modules)
        return f"{where}: {type(module).__name__} at {stop!r} has no {tokens[walked]!r}; {known}"
    if walked and is_list(module):
        elements = [repr(f"{full}.{name}") for name, _ in _elements(module, "")]
        if len(elements) > 3:
            elements = [*elements[:2], "...", elements[-1]]
        listed = ", ".join(elements) if elements else "but it has none"
        kind = type(module).__name__
        return f"{where}: it is a {kind}, which is never called; index an element, {listed}"
    owner = f"{type(node.mod).__name__} at {node.path!r}" if node.path else f"{type(node.mod).__name__}"
    if walked:
        return f"{where}: {owner} is a layer of torch.nn or a script, which has no nodes inside"
    names = [*node.child, *{name.partition(".")[0] for name in node.child if "." in name}]
    return f"{where}: {owner} has no {tokens[0]!r}; {close_names('.'.join(tokens[:2]), names)}"


# --- Rollback ---
#
# A snapshot holds references and shallow copies only. Values that change in place, those of tensors and of
# traced graphs, are not covered: primitives change them last, after all checks.


def _contents(container: Any) -> tuple[Any, ...]:
    return tuple(dict.items(container)) if isinstance(container, dict) else tuple(container)


class Snapshot:
    """The state of a node, of all below it, and of the modules that hold it, without copies of tensors."""

    def __init__(self, sch: "Schedule") -> None:
        root = sch.root
        held, owner = [root.mod], root.mod
        for token in sch.path.split(".") if sch.path else ():
            owner = owner.get_submodule(token)
            held.append(owner)
        # A primitive changes modules below the node, and those on the way to it, which hold the module. A
        # shared module is also replaced elsewhere, so that the whole tree may change.
        top = root if sch.metadata.has_shared else sch
        modules = {id(module): module for module in (*held, *top.mod.modules())}
        self._modules = []
        for module in modules.values():
            containers = {
                key: _contents(value)
                for key, value in module.__dict__.items()
                if isinstance(value, dict | set | list)
            }
            self._modules.append((module, type(module), module.__dict__.copy(), containers))
        parameters = {id(parameter): parameter for parameter in sch.mod.parameters()}
        self._parameters = [
            (parameter, parameter.__dict__.copy(), parameter.requires_grad)
            for parameter in parameters.values()
        ]
        nodes = [node for _, node in top.named_schedules()] + ([sch.parent] if sch.parent else [])
        self._nodes = [(node, node.mod, node.child, _contents(node.child)) for node in nodes]
        self._metadata = sch.metadata
        self._state = (
            [*sch.metadata.ties],
            {*sch.metadata.tags},
            {name: copy.copy(state) for name, state in sch.metadata.slots.items()},
            len(sch.metadata.journal),
            sch.metadata.has_shared,
        )
        self._plan = sch.metadata.context, sch.metadata.experts, sch.metadata.order
        self._root = root

    def restore(self) -> None:
        """Restore everything; containers keep their identity, since handles of hooks refer to them."""
        for module, kind, attributes, contents in self._modules:
            if type(module) is not kind:
                module.__class__ = kind
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for key, content in contents.items():
                _refill(attributes[key], content)
        for parameter, tags, requires_grad in self._parameters:
            parameter.__dict__.clear()
            parameter.__dict__.update(tags)
            if parameter.requires_grad != requires_grad:
                parameter.requires_grad_(requires_grad)
        for node, mod, child, content in self._nodes:
            node.mod, node.child = mod, child
            _refill(child, content)
        ties, tag_names, slots, n_steps, had_shared = self._state
        self._metadata.context, self._metadata.experts, self._metadata.order = self._plan
        self._metadata.ties[:] = ties
        self._metadata.tags.clear()
        self._metadata.tags.update(tag_names)
        self._metadata.slots.clear()
        self._metadata.slots.update(slots)
        del self._metadata.journal[n_steps:]
        if self._metadata.has_shared != had_shared:
            self._root.rebuild()
            self._metadata.has_shared = had_shared


def _refill(container: Any, content: tuple[Any, ...]) -> None:
    """Restore the content of a container if it has changed, as containers of users may be read-only."""
    now, held = _contents(container), content
    if isinstance(container, dict):
        now, held = (tuple(part for pair in pairs for part in pair) for pairs in (now, held))
    if len(now) == len(held) and all(element is other for element, other in zip(now, held, strict=True)):
        return
    container.clear()
    if isinstance(container, list):
        container.extend(content)
    else:
        container.update(content)


# --- Journal ---
#
# Steps are plain values without modules or graphs: they can be printed, compared and replayed. Of tensors
# they hold those of example inputs, since a graph takes the branches of the example.

Value: TypeAlias = "bool | int | float | str | list[Value] | dict[str, Value] | None"


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One primitive that was applied.

    Parameters
    ----------
    op, path
        Name of the primitive, and path at that time of the module that it was applied to.
    arguments
        Arguments by name of the parameter, as plain values: a callable or a class by its qualified name, a
        node of a graph by owner and name, a small tensor by its elements, anything else by its class.
    seconds
        Wall time that the primitive took, s.
    """

    op: str
    path: str
    arguments: Mapping[str, Value]
    seconds: float

    @property
    def call(self) -> str:
        """The step as it would be written in code, without the path."""
        arguments = (f"{name}={_format_value(argument)}" for name, argument in self.arguments.items())
        return f"{self.op}({', '.join(arguments)})"

    def __str__(self) -> str:
        """Return step and path."""
        return f"{self.call} at {self.path!r}"


def full_name(definition: Any) -> str:
    """Return module and qualified name of a function or a class."""
    return f"{definition.__module__}:{definition.__qualname__}"


def journal_value(value: Any) -> Value:
    """Return an argument as a plain value for the journal; `replay` reverses this."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], fx.Node):
        return {"$node": [str(value[0]), value[1].name]}
    if isinstance(value, Match):
        inputs: dict[str, Value] = {}
        for name, source in value.inputs.items():
            if isinstance(source, Attribute):
                inputs[name] = {"$attribute": source.target}
            else:
                inputs[name] = journal_value((value.owner, source) if isinstance(source, fx.Node) else source)
        nodes: list[Value] = [node.name for node in value.nodes]
        outputs: list[Value] = [node.name for node in value.outputs]
        fields: dict[str, Value] = {"owner": value.owner, "nodes": nodes, "inputs": inputs}
        return {"$match": fields | {"outputs": outputs, "returns_tuple": value.returns_tuple}}
    if isinstance(value, list | tuple):
        return [journal_value(element) for element in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: journal_value(element) for key, element in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((journal_value(element) for element in value), key=repr)
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    if isinstance(value, functools.partial):
        parts = [journal_value(value.func), [*map(journal_value, value.args)], journal_value(value.keywords)]
        return {"$partial": parts}
    if inspect.isclass(value) or (hasattr(value, "__qualname__") and hasattr(value, "__module__")):
        return {"$name": full_name(value)}
    if type(value) is Tensor and _can_be_kept(value):
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return {
            "$tensor": {
                "dtype": str(value.dtype).removeprefix("torch."),
                "shape": [*value.shape],
                "data": base64.b64encode(zlib.compress(data)).decode(),
            }
        }
    kind = "$module" if isinstance(value, nn.Module) else "$object"
    return {kind: full_name(type(value))}


_MOST_BYTES = 1 << 20  # of a tensor in a journal


def _can_be_kept(tensor: Tensor) -> bool:
    is_plain = tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_quantized)
    return is_plain and tensor.numel() * tensor.element_size() <= _MOST_BYTES


def _kept_tensor(dtype: str, shape: Sequence[int], data: str, device: torch.device) -> Tensor:
    """Return a tensor of a journal, on the device of the model: without values, its shapes are known, too."""
    try:
        elements = bytearray(zlib.decompressobj().decompress(base64.b64decode(data), _MOST_BYTES))
        kind: torch.dtype = getattr(torch, dtype)
        tensor = torch.frombuffer(elements, dtype=kind) if elements else torch.empty(0, dtype=kind)
        return tensor.reshape(tuple(shape)).to(device)
    except (zlib.error, ValueError, TypeError, AttributeError, RuntimeError) as error:
        what = f"a tensor of shape {list(shape)} and type {dtype!r}"
        raise ReplayError(f"{what} is damaged: {error}") from None


def _format_value(value: Value) -> str:
    match value:
        case {"$name": str(name)}:
            return name.partition(":")[2]
        case {"$tensor": _}:
            return "<Tensor>"
        case {"$module": str(name)} | {"$object": str(name)}:
            return f"<{name.partition(':')[2]}>"
        case {"$dtype": str(name)}:
            return name
        case {"$node": [str(owner), str(name)]}:
            return ".".join(filter(None, (owner, name)))
        case {"$match": {"owner": str(owner), "nodes": [*nodes]}}:
            return f"[{', '.join('.'.join(filter(None, (owner, str(node)))) for node in nodes)}]"
        case {"$partial": [function, *_]}:
            return f"partial({_format_value(function)}, ...)"
        case list():
            return f"[{', '.join(map(_format_value, value))}]"
        case dict():
            return (
                "{" + ", ".join(f"{key!r}: {_format_value(element)}" for key, element in value.items()) + "}"
            )
    return repr(value)


def digest(journal: Iterable[JournalEntry]) -> str:
    """Return a hash of the steps, 16 hexadecimal digits, which processes compare.

    Elements of tensors do not count: processes may have batches of their own as examples.
    """
    steps = [[entry.op, entry.path, _without_elements(dict(entry.arguments))] for entry in journal]
    return hashlib.blake2b(json.dumps(steps, sort_keys=True).encode(), digest_size=8).hexdigest()


def _without_elements(value: Value) -> Value:
    match value:
        case {"$tensor": _}:
            return {"$tensor": None}
        case dict():
            return {key: _without_elements(element) for key, element in value.items()}
        case list():
            return [_without_elements(element) for element in value]
    return value


# --- Primitives ---


class Primitive:
    """One transformation of a model; subclass it, implement `name` and `apply`, and register the class.

    A schedule offers a registered primitive as a method: ``sch.<name>(...)`` calls ``apply(sch, ...)``. The
    call is timed and written to the journal. If it raises an error, structure, attributes, hooks and tags of
    the subtree, the tree and the metadata are rolled back. Values that are changed in place, those of tensors
    and of traced graphs, are not: check all arguments first, and change such values last.

    `apply` must call ``sch.rebuild()`` after it changed the modules below ``sch``.
    """

    @classmethod
    def name(cls) -> str:
        """Return the name under which schedules offer the primitive, an identifier."""
        raise NotImplementedError(f"{cls.__name__} must implement name()")

    @classmethod
    def apply(cls, sch: "Schedule", *args: Any, **kwargs: Any) -> Any:
        """Transform the module of ``sch`` and the modules below it; the caller gets the result."""
        raise NotImplementedError(f"{cls.__name__} must implement apply()")

    @classmethod
    def init_metadata(cls) -> Any:
        """Return the initial value of ``sch.metadata.slots[name]``, the state of the primitive in a tree."""
        return {}

    @classmethod
    def is_verifiable(cls) -> bool:
        """Return True if a model must compute the same after this primitive as before."""
        return True

    @classmethod
    def is_query(cls) -> bool:
        """Return True if the primitive changes nothing; only those that it applies are journalled."""
        return False


_PRIMITIVES: dict[str, type[Primitive]] = {}
_Any = TypeVar("_Any", bound=type[Primitive])


def register_primitive() -> Callable[[_Any], _Any]:
    """Return a decorator that makes a `Primitive` a method of every schedule.

    Returns
    -------
    A decorator that returns its class.

    Raises
    ------
    ArgumentError
        The class is not a subclass of `Primitive`, its name is not an identifier, or another primitive or a
        member of `Schedule` has the name; also a `ValueError`.
    """

    def register(cls: _Any) -> _Any:
        decorated: object = cls  # a user may decorate anything
        if not (inspect.isclass(decorated) and issubclass(decorated, Primitive)):
            raise ArgumentError(f"cannot register {cls!r}; expected a subclass of Primitive")
        name = cls.name()
        if not name.isidentifier() or name.startswith("_"):
            raise ArgumentError(
                f"{cls.__name__} is named {name!r}; expected an identifier without a leading underscore"
            )
        if name in _PRIMITIVES:
            raise ArgumentError(f"primitive {name!r} is registered already, by {_PRIMITIVES[name].__name__}")
        if name in {*dir(Schedule), *Schedule.FIELDS}:
            raise ArgumentError(f"primitive {name!r} would hide the member of that name of Schedule")
        _PRIMITIVES[name] = cls
        return cls

    return register


_BUILT_IN = (
    "makespan.slapo.compiling",
    "makespan.slapo.contexts",
    "makespan.slapo.experts",
    "makespan.slapo.memory",
    "makespan.slapo.pipelining",
    "makespan.slapo.recomputing",
    "makespan.slapo.rewriting",
    "makespan.slapo.sharding",
    "makespan.slapo.syncing",
    "makespan.slapo.tracing",
)


def _import_built_in_primitives() -> None:
    """Import the modules of the built-in primitives, which register themselves."""
    for module in _BUILT_IN:
        import_module(module)


def primitive_named(name: str) -> type[Primitive] | None:
    """Return the primitive with a name, or None."""
    _import_built_in_primitives()
    return _PRIMITIVES.get(name)


@overload
def list_primitives(name_only: Literal[True] = True) -> list[str]: ...
@overload
def list_primitives(name_only: Literal[False]) -> Mapping[str, type[Primitive]]: ...
def list_primitives(name_only: bool = True) -> list[str] | Mapping[str, type[Primitive]]:
    """Return the registered primitives, sorted by name.

    Parameters
    ----------
    name_only
        True for a list of names, False for a mapping from names to classes.
    """
    _import_built_in_primitives()
    ordered = dict(sorted(_PRIMITIVES.items()))
    return list(ordered) if name_only else MappingProxyType(ordered)


# --- Application of a primitive ---
#
# ``sch["fc"].shard("weight", axis=0)`` takes these steps:
#
# 1. `Schedule.__getitem__` returns the node at the path.
# 2. `Schedule.__getattr__` looks up the class that is registered as ``shard`` and binds
#    `apply_primitive` to this class and to the node.
# 3. `apply_primitive` checks arguments and node, takes a `Snapshot`, and calls ``Shard.apply(node, ...)``.
# 4. If that succeeds, the journal gets a `JournalEntry`; if it raises an error, the snapshot is restored.


def apply_primitive(primitive: type[Primitive], sch: "Schedule", /, *args: Any, **kwargs: Any) -> Any:
    """Apply a primitive to a node and journal the step; roll back on an error.

    Only the outermost of nested primitives is journalled and rolled back.
    """
    name = primitive.name()
    signature = inspect.signature(primitive.apply)
    try:
        bound = signature.bind(sch, *args, **kwargs)
    except TypeError as error:
        parameters = ", ".join(map(str, list(signature.parameters.values())[1:]))
        raise KindError(f"{name} of {sch.path!r}: {error}; expected {name}({parameters})") from None
    _check_in_tree(name, sch)
    metadata = sch.metadata
    if primitive.is_query() or metadata.depth:
        return primitive.apply(*bound.args, **bound.kwargs)
    # Recorded before the call, since a primitive may change its arguments; without the node and defaults.
    arguments: dict[str, Value] = {}
    for parameter in list(signature.parameters.values())[1:]:
        if parameter.name in bound.arguments:
            value = bound.arguments[parameter.name]
            named = value if parameter.kind is parameter.VAR_KEYWORD else {parameter.name: value}
            arguments |= {key: journal_value(argument) for key, argument in named.items()}
    before, start = Snapshot(sch), time.perf_counter()
    metadata.depth += 1  # above zero, primitives that this one applies are part of its step
    try:
        result = primitive.apply(*bound.args, **bound.kwargs)
    except BaseException:
        before.restore()
        raise
    finally:
        metadata.depth = 0
    metadata.journal.append(JournalEntry(name, sch.path, arguments, time.perf_counter() - start))
    return result


def _check_in_tree(name: str, sch: "Schedule") -> None:
    """Reject a node that is no longer part of the tree or the model: a change of it would have no effect."""
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
            "call rebuild() of the node above after such a change"
        )


# --- Wrappers and hooks of a forward ---

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


class ForwardWrapper:
    """Callable that replaces the ``forward`` of one module and calls the wrapped one.

    An attribute of the module holds it, so that it is copied with the module and changes neither structure
    nor names. A tracer of a module above treats a module with a wrapped forward as a leaf.
    """

    op: ClassVar[str]
    """Name of the primitive that applies the wrapper."""

    def __init__(self, module: nn.Module) -> None:
        self.inner: Callable[..., Any] = module.forward

    @property
    def __signature__(self) -> inspect.Signature:
        """Arguments of the wrapped forward."""
        return inspect.signature(self.inner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped forward."""
        return self.inner(*args, **kwargs)


def wrap_forward(module: nn.Module, wrapper: ForwardWrapper) -> None:
    """Replace the forward of a module by a wrapper that was made for this module."""
    object.__setattr__(module, "forward", wrapper)


def wrapped_forward(module: nn.Module, kind: type[ForwardWrapper] = ForwardWrapper) -> ForwardWrapper | None:
    """Return the wrapper of a kind around the forward of a module, None if there is none."""
    return next((wrapper for wrapper in wrappers_of(module) if isinstance(wrapper, kind)), None)


def wrappers_of(module: nn.Module) -> Iterator[ForwardWrapper]:
    """Iterate over the wrappers around the forward of a module, the outermost first."""
    forward = module.__dict__.get("forward")
    while isinstance(forward, ForwardWrapper):
        yield forward
        forward = forward.inner


def move_hooks(old: nn.Module, new: nn.Module) -> None:
    """Move hooks to another module; those of the old module come first, and their handles remain valid."""
    # A handle refers to the dictionary itself, so the new module takes over the one of the old module.
    for kind in _HOOKS:
        of_old, of_new = getattr(old, kind), getattr(new, kind)
        if of_old:
            of_old.update(of_new)
            object.__setattr__(new, kind, of_old)
            object.__setattr__(old, kind, OrderedDict())
    if old._is_full_backward_hook is not None:
        new._is_full_backward_hook = old._is_full_backward_hook


# --- Printed schedules ---


def format_tree(sch: "Schedule") -> str:
    """Return the tree below a node as text; equal consecutive siblings are printed once."""
    calls: dict[str, list[str]] = {}
    paths = {path for path, _ in sch.root.named_schedules()}
    for entry in sch.metadata.journal:
        # A later step may have removed the node: the nearest owner that is left shows the step.
        path, inside = entry.path, ""
        while path not in paths:
            path, _, last = path.rpartition(".")
            inside = f"{last}.{inside}".rstrip(".")
        calls.setdefault(path, []).append(f"{inside}: {entry.call}" if inside else entry.call)
    return "\n".join(_tree_lines(sch, calls))


def _tree_lines(sch: "Schedule", calls: dict[str, list[str]]) -> Iterator[str]:
    yield type(sch.mod).__name__ if sch.child else repr(sch.mod).partition("\n")[0]
    yield from (f"  | {call}" for call in calls.get(sch.path, ()))
    texts = [(name, tuple(_tree_lines(node, calls))) for name, node in sch.child.items()]
    for body, alike in groupby(texts, key=lambda text: text[1]):
        names = [name for name, _ in alike]
        head = ", ".join(names) if len(names) < 4 else f"{names[0]} ... {names[-1]}"
        yield f"  {head}: {body[0]}" + (f", {len(names)} alike" if len(names) > 3 else "")
        yield from (f"  {line}" for line in body[1:])


# --- Tree ---


class _Slots(dict[str, Any]):
    """State of the primitives, created on first access."""

    def __missing__(self, name: str) -> Any:
        primitive = primitive_named(name)
        if primitive is None:
            raise MemberError(f"no primitive {name!r}; {close_names(name, list_primitives())}")
        self[name] = primitive.init_metadata()
        return self[name]


@dataclass(slots=True)
class Metadata:
    """State that all nodes of a tree share.

    Parameters
    ----------
    ties
        Groups of parameters that were one object when the schedule was created, by their paths.
    tags
        Names of attributes that a parameter keeps when another object takes its place.
    slots
        State of each primitive, by its name.
    journal
        Primitives that were applied, in order; steps are counted from one.
    has_shared
        True if a module has several places in the model.
    depth
        Number of nested primitives that are running.
    structure
        What `makespan.slapo.apply_plan` has found in the model, and how it is cut; None without a plan.
    context
        Processes of context parallelism, which hold parts of every sequence.
    experts
        Processes of data parallelism that share experts, beside those that share layers.
    order
        Order of micro-batches in a pipeline, unless `build` is given another one.
    """

    ties: list[tuple[str, ...]] = field(default_factory=list)
    tags: set[str] = field(default_factory=set)
    slots: dict[str, Any] = field(default_factory=_Slots)
    journal: list[JournalEntry] = field(default_factory=list)
    has_shared: bool = False
    depth: int = 0
    structure: Any = None
    context: Ranks = field(default_factory=lambda: Ranks(0, 1, None))
    experts: Ranks = field(default_factory=lambda: Ranks(0, 1, None))
    order: str = "1f1b"


class Schedule:
    """A node of the tree over a model, see `create_schedule`; its primitives are methods.

    Parameters
    ----------
    mod
        The module, or the one that replaced it.
    name, path
        Name in the parent, ``"layers.0"`` for an element of a list, and path from the root.
    parent
        The node above, None for the root.
    group
        Processes of tensor parallelism; None for the default group, or for one process without any.

    Attributes
    ----------
    child
        Nodes below by name, in the order of the module.
    world_size, rank
        Number of processes in the group, and the rank of this one.
    metadata
        State that all nodes share, see `Metadata`.
    """

    FIELDS: ClassVar = ("mod", "name", "path", "parent", "group", "child", "world_size", "rank", "metadata")

    def __init__(
        self,
        mod: nn.Module,
        *,
        name: str = "",
        path: str = "",
        parent: "Schedule | None" = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.mod, self.name, self.path, self.parent, self.group = mod, name, path, parent, group
        self.child: dict[str, Schedule] = {}
        self.world_size: int
        self.rank: int
        if parent is not None:
            self.metadata: Metadata = parent.metadata
            self.world_size, self.rank = parent.world_size, parent.rank
            return
        self.metadata = Metadata()
        parallel = dist.is_available() and dist.is_initialized()
        self.world_size = dist.get_world_size(group) if parallel else 1
        self.rank = dist.get_rank(group) if parallel else 0

    @property
    def root(self) -> "Schedule":
        """The node of the whole model."""
        node = self
        while node.parent is not None:
            node = node.parent
        return node

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return a primitive bound to this node."""
        primitive = None if name.startswith("_") else primitive_named(name)
        if primitive is None:
            message = f"a schedule has no primitive {name!r}; {close_names(name, list_primitives())}"
            raise MemberError(message)
        return functools.partial(apply_primitive, primitive, self)

    def __getitem__(self, path: str) -> "Schedule":
        """Return the node at a path below this one; a `PathError` names the place where the path ends."""
        return node_at(self, path)

    def __contains__(self, path: object) -> bool:
        """Return True if there is a node at that path."""
        try:
            return isinstance(path, str) and node_at(self, path) is not None
        except KeyError:
            return False

    def __str__(self) -> str:
        """Return the tree as text, with the primitives applied to each module."""
        return format_tree(self)

    def _repr_html_(self) -> str:
        """Return the tree as text in a fixed-width font."""
        return text_html(str(self))

    def __repr__(self) -> str:
        """Return path and class of the module as text."""
        return f"<Schedule {self.path!r}: {type(self.mod).__name__}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> "Schedule":
        """Copy the whole tree with its model; groups of processes are shared."""
        if self.parent is not None:
            return copy.deepcopy(self.root, memo)[self.path]
        if self.group is not None:
            memo[id(self.group)] = self.group
        mod = copy.deepcopy(self.mod, memo)
        for old, new_parameter in zip(self.mod.parameters(), mod.parameters(), strict=True):
            known = self.metadata.tags & vars(old).keys()  # which copies of parameters do not have
            vars(new_parameter).update({tag: copy.deepcopy(vars(old)[tag], memo) for tag in known})
        new = Schedule(mod, group=self.group)
        memo[id(self)] = new
        new.metadata = copy.deepcopy(self.metadata, memo)
        new.rebuild()
        return new

    def named_schedules(self) -> Iterator[tuple[str, "Schedule"]]:
        """Iterate over paths and nodes, from this one down, owners first."""
        yield self.path, self
        for node in self.child.values():
            yield from node.named_schedules()

    def get_module(self, name: str) -> nn.Module:
        """Return the module at a path below this node."""
        return self[name].mod

    def get_top_schedule(self) -> "Schedule":
        """Return the node of the whole model."""
        return self.root

    def rebuild(self) -> None:
        """Update the tree below this node to its modules; nodes that remain keep their identity.

        Primitives call it after they changed modules below this node, or ``mod`` itself.
        """
        # A module has one node, at its first path: modules of nodes elsewhere in the tree count as seen.
        seen, waiting = {id(self.mod)}, [self.root]
        while waiting:
            node = waiting.pop()
            if node is not self:
                seen.add(id(node.mod))
                waiting += node.child.values()
        self._rebuild(seen)
        if self.metadata.has_shared and self.parent is not None:  # nodes elsewhere may appear or vanish
            self.root._rebuild({id(self.root.mod)})

    def _rebuild(self, seen: set[int]) -> None:
        old, self.child = self.child, {}
        for name, module in node_modules(self.mod):
            if id(module) in seen:
                self.metadata.has_shared = True
                continue
            seen.add(id(module))
            node = old.get(name)
            if node is None:
                path = f"{self.path}.{name}" if self.path else name
                node = Schedule(module, name=name, path=path, parent=self, group=self.group)
            node.mod, node.metadata = module, self.metadata
            self.child[name] = node
            node._rebuild(seen)

    def dump(self) -> str:
        """Return the journal as JSON, for `replay` on a fresh model."""
        fields = ("op", "path", "arguments", "seconds")
        steps = [{name: getattr(entry, name) for name in fields} for entry in self.metadata.journal]
        return json.dumps({"steps": steps}, indent=1)

    def conflict(self, op: str) -> str:
        """Quote the step that applied a primitive to this module, or to the nearest one above.

        Returns
        -------
        The end of a message such as ``conflicts with step 7: shard(tensor_name='weight') at 'fc'``.
        """
        # The latest step of the primitive here, else of the primitive above, else of any primitive above.
        steps = list(enumerate(self.metadata.journal, start=1))[::-1]
        same = [step for step in steps if step[1].op == op and step[1].path == self.path]
        above = [step for step in steps if self._is_below(step[1].path)]
        for step, entry in (*same, *(step for step in above if step[1].op == op), *above):
            return f"conflicts with step {step}: {entry}"
        return f"conflicts with {op} of {self.path!r} in the same step"

    def _is_below(self, path: str) -> bool:
        return not path or self.path == path or self.path.startswith(f"{path}.")


def create_schedule(
    root: nn.Module,
    *,
    name: str = "",
    path: str = "",
    parent: Schedule | None = None,
    group: dist.ProcessGroup | None = None,
    context_group: dist.ProcessGroup | None = None,
    expert_group: dist.ProcessGroup | None = None,
) -> Schedule:
    """Return the schedule of a model: a tree of its modules; the model is not changed or copied.

    Elements of a ``ModuleList`` or ``ModuleDict`` are children of the owner of the list, named
    ``"<list>.<element>"``; layers of `torch.nn` except ``Sequential`` have no children. A module with several
    paths in the model has one node, at the first path; the other paths lead to it.

    Parameters
    ----------
    root
        The model, on any device, including ``meta``.
    name, path, parent
        Position in a larger tree whose model already holds ``root`` there; omit them for a whole model.
    group
        Processes of tensor parallelism; None for the default group, or for one process without any.
    context_group
        Processes of context parallelism, None for none; those of ``group`` if nothing else is shared.
    expert_group
        Processes of data parallelism that share experts, one of each ``group``; None for none.

    Raises
    ------
    KindError
        ``root`` is not a module, or a group is none; also a `TypeError`.
    PathError
        ``parent`` has no such module of that name; also a `KeyError`.

    References
    ----------
    Slapo, section 3.1, the schedule as a tree beside the model.
    """
    if not isinstance(root, nn.Module):
        raise KindError(f"create_schedule got {type(root).__name__}; expected a torch.nn.Module")
    groups: dict[str, object] = {"group": group, "context_group": context_group, "expert_group": expert_group}
    for which, processes in groups.items():
        if not isinstance(processes, dist.ProcessGroup | None):
            raise KindError(f"create_schedule: {which} is {processes!r}; expected a process group or None")
    if parent is not None:
        parent.rebuild()
        if (
            name not in parent.child
            or parent.child[name].mod is not root
            or path not in ("", parent.child[name].path)
        ):
            raise PathError(
                f"create_schedule: {parent.path!r} has no {type(root).__name__} {name!r} at {path!r}"
            )
        return parent.child[name]
    if name or path:
        raise ArgumentError(f"create_schedule: name {name!r} and path {path!r} need a parent")
    schedule = Schedule(root, group=group)
    if context_group is not None:
        schedule.metadata.context = ranks_in(context_group)
    if expert_group is not None:
        schedule.metadata.experts = ranks_in(expert_group)
    # Ties are recorded now, since primitives replace parameters, and a tie is lost with its identity.
    paths: dict[int, list[str]] = {}
    for parameter_path, parameter in root.named_parameters(remove_duplicate=False):
        paths.setdefault(id(parameter), []).append(parameter_path)
    schedule.metadata.ties = [tuple(tied) for tied in paths.values() if len(tied) > 1]
    schedule.rebuild()
    return schedule


def ranks_in(group: dist.ProcessGroup) -> Ranks:
    """Return the processes of a group, from the view of this one."""
    return Ranks(dist.get_rank(group), dist.get_world_size(group), group)


# --- Primitives that annotate ---


def carry_tags(old: nn.Parameter, new: nn.Parameter, tags: Iterable[str] | None = None) -> None:
    """Copy tags, or all attributes, to the parameter that replaces another one, except those that it has.

    A part of a parameter keeps all attributes, such as one by which an optimizer chooses its weight decay.
    """
    for tag in list(vars(old)) if tags is None else tags:
        if tag in old.__dict__ and tag not in new.__dict__:
            setattr(new, tag, old.__dict__[tag])


def check_without_hooks(parameter: Tensor, name: str, where: str) -> None:
    """Reject a parameter with a hook on its gradient, which the one that takes its place would not run."""
    kinds = (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None))
    for hook in [hook for hooks in kinds for hook in (hooks or {}).values()]:
        # Those of exchanges are registered again.
        if not str(getattr(getattr(hook, "func", hook), "__module__", "")).startswith("makespan."):
            raise ConflictError(
                f"{where}: {name!r} has a hook on its gradient, which would be lost, as another parameter "
                "takes its place; register the hook afterwards"
            )


@register_primitive()
class Annotate(Primitive):
    """Tag a parameter."""

    @classmethod
    def name(cls) -> str:
        """Return ``annotate``."""
        return "annotate"

    @classmethod
    def apply(cls, sch: "Schedule", param: str, key: str, value: Any) -> None:
        """Set an attribute of a parameter that survives sharding, replacement and consolidation.

        Parameters
        ----------
        param
            Name of a parameter of this module itself.
        key, value
            Name of the attribute, an identifier that tensors do not use, and its value.
        """
        parameter = sch.mod._parameters.get(param)
        if parameter is None:
            known = close_names(
                param, (name for name, parameter in sch.mod._parameters.items() if parameter is not None)
            )
            raise MemberError(f"annotate of {sch.path!r}: no parameter {param!r}; {known}")
        if not key.isidentifier() or hasattr(nn.Parameter, key):
            raise ArgumentError(
                f"annotate of {sch.path!r}: cannot tag {param!r} with {key!r}; expected an identifier "
                "that tensors do not use"
            )
        setattr(parameter, key, value)
        sch.metadata.tags.add(key)


@register_primitive()
class SetAttr(Primitive):
    """Change attributes of a module, such as the number of heads per process."""

    @classmethod
    def name(cls) -> str:
        """Return ``set_attr``."""
        return "set_attr"

    @classmethod
    def apply(cls, sch: "Schedule", **values: Any) -> None:
        """Set attributes that the module has, except parameters, buffers and modules.

        Parameters
        ----------
        **values
            Values by name. A name such as ``config.n_heads`` is that of an attribute of an object that the
            module holds; the module gets a changed copy, since others may hold the object, too.
        """
        within: dict[str, dict[str, Any]] = {}
        for name in [name for name in values if "." in name]:
            holder, _, attribute = name.partition(".")
            within.setdefault(holder, {})[attribute] = values.pop(name)
        # Attributes that the module and its classes below nn.Module define: values, no methods.
        names = list(vars(sch.mod))
        for kind in type(sch.mod).__mro__:
            if not issubclass(nn.Module, kind):
                names += [
                    name
                    for name, value in vars(kind).items()
                    if not (callable(value) or isinstance(value, property | classmethod | staticmethod))
                ]
        plain = {
            name
            for name in names
            if not (name.startswith("_") or hasattr(nn.Module, name) or name == "training")
        }
        for name in (*values, *within):
            if isinstance(getattr(sch.mod, name, None), Tensor | nn.Module):
                raise ArgumentError(
                    f"set_attr of {sch.path!r}: {name!r} is a tensor or a module; expected a plain attribute"
                )
            if name not in plain:
                known = close_names(name, sorted(plain))
                raise MemberError(f"set_attr of {sch.path!r}: no attribute {name!r}; {known}")
        if isinstance(sch.mod, fx.GraphModule):
            raise ConflictError(
                f"set_attr of {sch.path!r}: its graph holds the attributes of the time of its capture, "
                f"{sch.conflict('trace')}; call set_attr before trace"
            )
        for holder, changed in within.items():
            values[holder] = copy.copy(getattr(sch.mod, holder))
            for name, value in changed.items():
                if not hasattr(values[holder], name):
                    known = close_names(name, dir(values[holder]))
                    raise MemberError(
                        f"set_attr of {sch.path!r}: {holder!r} has no attribute {name!r}; {known}"
                    )
                setattr(values[holder], name, value)
        for name, value in values.items():
            setattr(sch.mod, name, value)


@register_primitive()
class Bind(Primitive):
    """Record in the journal the values of the symbols of a schedule."""

    @classmethod
    def name(cls) -> str:
        """Return ``bind``."""
        return "bind"

    @classmethod
    def apply(cls, sch: "Schedule", **symbols: Any) -> None:
        """Bind symbols to values; a bound symbol keeps its value."""
        bound: dict[str, Any] = sch.metadata.slots[cls.name()]
        for name, value in symbols.items():
            if name in bound and bound[name] != value:
                raise ArgumentError(
                    f"bind of {sch.path!r}: {name} is {value!r}, but was bound to {bound[name]!r}; "
                    "a symbol has one value"
                )
        bound.update(symbols)


# --- Replay ---


def replay(
    model: nn.Module,
    journal: "str | Sequence[JournalEntry]",
    *,
    group: dist.ProcessGroup | None = None,
    context_group: dist.ProcessGroup | None = None,
    expert_group: dist.ProcessGroup | None = None,
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
        Processes of tensor parallelism; their number may differ from that of the first run.
    context_group
        Processes of context parallelism, as for `create_schedule`.
    expert_group
        Processes of data parallelism that share experts, as for `create_schedule`.
    given
        Arguments by step, counted from one, and by name. A journal only holds plain values, functions and
        classes; pass any other argument here, such as a module that replaced another one.

    Returns
    -------
    The new schedule; its journal is the same except for the times.

    Raises
    ------
    ReplayError
        The text is not a journal, a step names something unknown, or an argument is missing in ``given``;
        also a `RuntimeError`. The error of a primitive is its cause.
    """
    sch = create_schedule(model, group=group, context_group=context_group, expert_group=expert_group)
    if isinstance(journal, str):
        try:
            entries = [
                (raw["op"], raw["path"], dict(raw["arguments"])) for raw in parse_json(journal)["steps"]
            ]
        except (ValueError, TypeError, LookupError) as error:
            raise ReplayError(f"not a journal ({error!r}); expected the text of Schedule.dump()") from None
    else:
        entries = [(entry.op, entry.path, dict(entry.arguments)) for entry in journal]
    for step, (op, path, arguments) in enumerate(entries, start=1):
        primitive = primitive_named(op)
        if primitive is None:
            raise ReplayError(f"step {step} of the journal: no primitive {op!r} is registered")
        try:
            node = sch[path]
            known = dict((given or {}).get(step, {}))
            values = known | {
                name: _argument_value(argument, node.mod)
                for name, argument in arguments.items()
                if name not in known
            }
            signature = inspect.signature(primitive.apply)
            args, kwargs = _split_arguments(signature, values)
            getattr(node, op)(*args, **kwargs)
        except (ScheduleError, ImportError, AttributeError, LookupError, ValueError) as error:
            raise ReplayError(f"step {step} of the journal, {op} at {path!r}: {error}") from error
    return sch


def _split_arguments(
    signature: inspect.Signature, values: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Return positional and named arguments; those of ``*args`` come after all that are positional."""
    parameters = list(signature.parameters.values())[1:]
    several = next(
        (parameter for parameter in parameters if parameter.kind is parameter.VAR_POSITIONAL), None
    )
    if several is None or several.name not in values:
        return [], values
    before = parameters[: parameters.index(several)]
    left = {parameter.name for parameter in before} | {several.name}
    args = [values[parameter.name] for parameter in before] + values[several.name]
    return args, {name: argument for name, argument in values.items() if name not in left}


def _argument_value(value: Value, module: nn.Module) -> Any:
    """Return the argument that a plain value of a journal stands for, see `journal_value`."""
    match value:
        case {"$name": str(name)}:
            module_name, _, qualified_name = name.partition(":")
            if "<" in qualified_name:
                raise ReplayError(f"{name} is defined inside a function; pass it in given")
            return functools.reduce(getattr, qualified_name.split("."), import_module(module_name))
        case {"$dtype": str(name)}:
            return getattr(torch, name)
        case {"$node": [str(owner), str(name)]}:
            return owner, _graph_node(module.get_submodule(owner), owner, name)
        case {"$match": dict(match)}:
            fields: Any = match
            path = fields["owner"]
            traced = module.get_submodule(path)
            inputs = {name: _argument_value(matched, module) for name, matched in fields["inputs"].items()}
            # A node is decoded together with its owner, which a match has only once.
            inputs = {
                name: matched[1] if isinstance(matched, tuple) else matched
                for name, matched in inputs.items()
            }
            nodes, outputs = (
                [_graph_node(traced, path, name) for name in fields[key]] for key in ("nodes", "outputs")
            )
            return Match(path, nodes, inputs, outputs, fields["returns_tuple"])
        case {"$attribute": str(name)}:
            return Attribute(name)
        case {"$partial": [function, [*args], dict(named)]}:
            arguments = {key: _argument_value(argument, module) for key, argument in named.items()}
            return functools.partial(
                _argument_value(function, module),
                *(_argument_value(argument, module) for argument in args),
                **arguments,
            )
        case {"$tensor": {"dtype": str(dtype), "shape": [*shape], "data": str(data)}}:
            device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
            return _kept_tensor(dtype, [int(str(size)) for size in shape], data, device)
        case {"$module": str(name)} | {"$object": str(name)}:
            raise ReplayError(f"a journal cannot hold a {name}; pass it in given")
        case dict():
            return {key: _argument_value(element, module) for key, element in value.items()}
        case list():
            return [_argument_value(element, module) for element in value]
    return value


def _graph_node(owner: nn.Module, path: str, name: str) -> fx.Node:
    nodes: list[fx.Node] = list(owner.graph.nodes) if isinstance(owner, fx.GraphModule) else []
    node_of_name = next((node for node in nodes if node.name == name), None)
    if node_of_name is None:
        raise ReplayError(f"{path!r} has no node {name!r} in its graph")
    return node_of_name
