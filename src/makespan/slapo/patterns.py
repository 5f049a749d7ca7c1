"""Patterns over graphs: normal forms of operations, patterns, and the matcher that compares data flow."""

import builtins
import enum
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from makespan.slapo.errors import ArgumentError, KindError
from makespan.slapo.graphs import QuickTracer, TracedModule

# --- Normal forms of operations ---
#
# A function, a method and a module that compute the same have equal operations, so that a pattern matches
# however a model spells a computation.


@dataclass(frozen=True, slots=True)
class Attribute:
    """A tensor of the owner of a graph, by its path, that no node reads yet."""

    target: str


@dataclass(frozen=True, slots=True)
class Operation:
    """A kind of operation, and its operands by name or position, in the order of parameters."""

    kind: str
    operands: Mapping[str | int, Any]
    is_commutative: bool = False


class _Ignored:
    """Type of the mark for an operand that is not compared."""

    def __repr__(self) -> str:
        return "IGNORED"


IGNORED = _Ignored()
_ALIASES = {
    "truediv": "div",
    "true_divide": "div",
    "divide": "div",
    "multiply": "mul",
    "subtract": "sub",
    "negative": "neg",
    "concat": "cat",
    "concatenate": "cat",
    "swapaxes": "transpose",
    "swapdims": "transpose",
    "__getitem__": "getitem",
}
_CONV = "input weight bias=None stride=1 padding=0 dilation=1 groups=1"
_MAX_POOL = "input kernel_size stride=None padding=0 dilation=1 ceil_mode=False return_indices=False"
_ACTIVATION = "input inplace=~"
# Parameters in order, with the defaults of torch; ~ marks one that is not compared: it does not change the
# result, or depends on the mode.
_PARAMETERS = {
    "add": "input other alpha=1",
    "sub": "input other alpha=1",
    "mul": "input other",
    "div": "input other rounding_mode=None",
    "matmul": "input other",
    "pow": "input exponent",
    "transpose": "input dim0 dim1",
    "softmax": "input dim=None dtype=None _stacklevel=~",
    "log_softmax": "input dim=None dtype=None _stacklevel=~",
    "dropout": "input p=~ training=~ inplace=~",
    "gelu": "input approximate='none'",
    "relu": _ACTIVATION,
    "relu6": _ACTIVATION,
    "silu": _ACTIVATION,
    "mish": _ACTIVATION,
    "hardswish": _ACTIVATION,
    "hardsigmoid": _ACTIVATION,
    "selu": _ACTIVATION,
    "tanh": "input",
    "sigmoid": "input",
    "softplus": "input beta=1 threshold=20",
    "elu": "input alpha=1.0 inplace=~",
    "leaky_relu": "input negative_slope=0.01 inplace=~",
    "layer_norm": "input normalized_shape weight=None bias=None eps=1e-5",
    "rms_norm": "input normalized_shape weight=None eps=None",
    "group_norm": "input num_groups weight=None bias=None eps=1e-5",
    "batch_norm": "input running_mean running_var weight=None bias=None training=~ momentum=0.1 eps=1e-5",
    "linear": "input weight bias=None",
    "embedding": "input weight padding_idx=None max_norm=None norm_type=2.0 scale_grad_by_freq=False"
    " sparse=False",
    "conv1d": _CONV,
    "conv2d": _CONV,
    "conv3d": _CONV,
    "max_pool1d": _MAX_POOL,
    "max_pool2d": _MAX_POOL,
    "max_pool3d": _MAX_POOL,
    "avg_pool2d": "input kernel_size stride=None padding=0 ceil_mode=False count_include_pad=True"
    " divisor_override=None",
    "adaptive_avg_pool1d": "input output_size",
    "adaptive_avg_pool2d": "input output_size",
    "flatten": "input start_dim=0 end_dim=-1",
    "masked_fill": "input mask value",
    "cat": "tensors dim=0",
    "sum": "input dim=None keepdim=False dtype=None",
    "mean": "input dim=None keepdim=False dtype=None",
}
_MODULES: dict[type[nn.Module], str] = {
    nn.BatchNorm1d: "batch_norm",
    nn.BatchNorm2d: "batch_norm",
    nn.BatchNorm3d: "batch_norm",
    nn.SiLU: "silu",
    nn.ELU: "elu",
    nn.SELU: "selu",
    nn.GELU: "gelu",
    nn.ReLU: "relu",
    nn.ReLU6: "relu6",
    nn.Mish: "mish",
    nn.Tanh: "tanh",
    nn.Sigmoid: "sigmoid",
    nn.Softplus: "softplus",
    nn.Hardswish: "hardswish",
    nn.Hardsigmoid: "hardsigmoid",
    nn.LeakyReLU: "leaky_relu",
    nn.Softmax: "softmax",
    nn.LogSoftmax: "log_softmax",
    nn.Dropout: "dropout",
    nn.LayerNorm: "layer_norm",
    nn.RMSNorm: "rms_norm",
    nn.GroupNorm: "group_norm",
    nn.Linear: "linear",
    nn.Embedding: "embedding",
    nn.Conv1d: "conv1d",
    nn.Conv2d: "conv2d",
    nn.Conv3d: "conv3d",
    nn.MaxPool1d: "max_pool1d",
    nn.MaxPool2d: "max_pool2d",
    nn.MaxPool3d: "max_pool3d",
    nn.AvgPool2d: "avg_pool2d",
    nn.AdaptiveAvgPool1d: "adaptive_avg_pool1d",
    nn.AdaptiveAvgPool2d: "adaptive_avg_pool2d",
    nn.Flatten: "flatten",
}
_COMMUTATIVE = frozenset({"add", "mul"})
_REQUIRED = object()


def _parse_signature(text: str) -> dict[str, Any]:
    parameters: dict[str, Any] = {}
    for parameter in text.split():
        name, _, default = parameter.partition("=")
        constants = {
            "None": None,
            "True": True,
            "False": False,
            "~": IGNORED,
            "'none'": "none",
            "": _REQUIRED,
        }
        parameters[name] = constants[default] if default in constants else float(default)
    return parameters


_SIGNATURES = {name: _parse_signature(text) for name, text in _PARAMETERS.items()}


# Names of functions of torch and of operators by id; if a function has several, the last one is used.
_NAMES = {
    id(function): _ALIASES.get(name, name)
    for space in (torch, F, operator)
    for name, function in vars(space).items()
    if callable(function) and not isinstance(function, type) and not name.startswith("_")
} | {id(builtins.getattr): "getattr"}


def operation(node: fx.Node, owner: nn.Module, is_pattern: bool = False) -> Operation | None:
    """Return the operation of a node; None for a placeholder, an output, or a read of an attribute.

    Tensors of a module in a pattern are not compared, since a graph cannot have them.
    """
    if node.op == "call_module":
        return _module_operation(node, owner.get_submodule(str(node.target)), is_pattern)
    if node.op == "call_method":
        kind = _ALIASES.get(str(node.target), str(node.target))
    elif node.op == "call_function":
        kind = _NAMES.get(id(node.target), "") or f"{id(node.target)}"
    else:
        return None
    return Operation(kind, _named_operands(kind, node.args, node.kwargs), kind in _COMMUTATIVE)


def _module_operation(node: fx.Node, module: nn.Module, is_pattern: bool) -> Operation:
    kind = _MODULES.get(type(module))
    inputs = [*node.args, *node.kwargs.values()]
    if kind is None or len(inputs) != 1 or getattr(module, "padding_mode", "zeros") != "zeros":
        name = f"{type(module).__module__}.{type(module).__qualname__}"
        return Operation(
            module.origin if isinstance(module, TracedModule) else name,
            _named_operands("", node.args, node.kwargs),
        )
    # Attributes of a module are the operands after the first, as in a call of the function.
    first, *others = _SIGNATURES[kind]
    operands: dict[str | int, Any] = {first: inputs[0]}
    for name in others:
        default = _SIGNATURES[kind][name]
        value = getattr(module, name, default)
        if default is IGNORED:
            value = IGNORED
        elif isinstance(value, Tensor):
            value = IGNORED if is_pattern else Attribute(f"{node.target}.{name}")
        operands[name] = value
    return Operation(kind, operands)


def _named_operands(kind: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str | int, Any]:
    signature = _SIGNATURES.get(kind)
    if signature is None or len(args) > len(signature) or not set(kwargs) <= set(signature):
        return {**dict(enumerate(args)), **{name: kwargs[name] for name in sorted(kwargs)}}
    passed = dict(zip(signature, args, strict=False)) | dict(kwargs)
    operands: dict[str | int, Any] = {}
    for name, default in signature.items():
        if default is IGNORED:
            operands[name] = IGNORED
        elif name in passed or default is not _REQUIRED:
            operands[name] = passed.get(name, default)
    return operands


# --- Patterns ---


class _Any(enum.Enum):
    ANY = "any constant"


ANY = _Any.ANY
"""A literal in a pattern that matches any value."""


class Pattern(nn.Module):
    """A pattern with modules: subclass it, and write the computation to find in ``forward``.

    A module in it matches any module of its class, or the function that computes the same; a `ModulePattern`
    matches any module by its name.
    """


class ModulePattern(nn.Module):
    """A module that matches any module of the graph by a regular expression of its target.

    Parameters
    ----------
    regex
        Regular expression, matched from the start of the target.
    """

    def __init__(self, regex: str) -> None:
        super().__init__()
        self.regex = regex

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise an error, as it cannot run."""
        raise KindError("a ModulePattern cannot run; use it in a pattern for find")


def call_module(regex: str, *args: Any, **kwargs: Any) -> Any:
    """Match, in a pattern, the call of any module whose target matches a regular expression.

    Parameters
    ----------
    regex
        Regular expression, matched from the start of the target.
    args, kwargs
        Arguments of the call.

    Raises
    ------
    KindError
        It is called outside of a pattern; also a `TypeError`.
    """
    proxy = next((value for value in (*args, *kwargs.values()) if isinstance(value, fx.Proxy)), None)
    if proxy is None:
        raise KindError("call_module cannot be called outside of a pattern for find")
    return proxy.tracer.create_proxy("call_function", call_module, (regex, *args), kwargs)


class _PatternTracer(QuickTracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return True: each module of a pattern matches one of the graph."""
        return True


@dataclass(frozen=True, slots=True)
class PatternGraph:
    """A pattern as a graph: its parameters in order, and the nodes of its results."""

    owner: nn.Module
    parameters: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    returns_tuple: bool

    def regex(self, node: fx.Node) -> str | None:
        """Return the regular expression of a node for the target of a module, or None."""
        if node.op == "call_function" and node.target is call_module:
            return str(node.args[0])
        if node.op == "call_module":
            module = self.owner.get_submodule(str(node.target))
            return module.regex if isinstance(module, ModulePattern) else None
        return None


def pattern_graph(pattern: Callable[..., Any]) -> PatternGraph:
    """Capture a pattern."""
    if not isinstance(pattern, FunctionType | Pattern):
        raise KindError(
            f"find got {pattern!r}; expected a regular expression for targets of modules, a function or a"
            " Pattern"
        )
    name = getattr(pattern, "__name__", type(pattern).__name__)
    try:
        graph = _PatternTracer().trace(pattern)
    except Exception as error:
        raise ArgumentError(f"the pattern {name} cannot be traced: {error}") from error
    results: list[fx.Node] = []
    output = graph.output_node().args[0]
    fx.node.map_arg(output, results.append)
    parameters = tuple(graph.find_nodes(op="placeholder"))
    unused = [str(parameter.target) for parameter in parameters if not parameter.users]
    if unused:
        raise ArgumentError(f"the pattern {name} does not use its parameter {unused[0]!r}")
    if not results or any(node.op in ("placeholder", "get_attr") for node in results):
        raise ArgumentError(f"the pattern {name} must return a computed value")
    for node in graph.nodes:
        if node.op == "call_function" and node.target is call_module:
            checked_regex(cast("str", node.args[0]), f"the pattern {name}")
    owner = pattern if isinstance(pattern, nn.Module) else nn.Module()
    return PatternGraph(owner, parameters, tuple(dict.fromkeys(results)), not isinstance(output, fx.Node))


def checked_regex(text: object, where: str) -> re.Pattern[str]:
    """Compile a regular expression."""
    if not isinstance(text, str):
        raise KindError(f"{where}: got {text!r}; expected a regular expression")
    try:
        return re.compile(text)
    except re.error as error:
        raise ArgumentError(f"{where}: {text!r} is not a regular expression: {error}") from None


# --- Matching ---
#
# A depth-first search with backtracking against the flow of data, from the results of the pattern to its
# parameters. Every step yields the states that are still consistent, several where an operation is
# commutative. A state is immutable, so that each alternative continues from its own.


class Match(list[tuple[str, fx.Node]]):
    """Nodes that match a pattern, with the path of their owner, in the order of the graph.

    Parameters
    ----------
    owner
        Path of the traced module, from the node of the schedule that was searched.
    nodes
        Nodes of its graph.
    inputs
        Values of the parameters of the pattern, by name and in order: a node, a constant, or a tensor of the
        module that no node reads.
    outputs
        Nodes whose values the pattern returns.
    returns_tuple
        True if the pattern returns a tuple, even of one value.
    """

    def __init__(
        self,
        owner: str,
        nodes: Sequence[fx.Node],
        inputs: dict[str, Any],
        outputs: Sequence[fx.Node],
        returns_tuple: bool,
    ) -> None:
        super().__init__((owner, node) for node in nodes)
        self.owner, self.inputs = owner, inputs
        self.outputs, self.returns_tuple = tuple(outputs), returns_tuple

    @property
    def nodes(self) -> list[fx.Node]:
        """The nodes alone."""
        return [node for _, node in self]


@dataclass(frozen=True, slots=True)
class _State:
    """Values of parameters and nodes of the pattern so far."""

    inputs: dict[fx.Node, Any] = field(default_factory=dict)
    nodes: dict[fx.Node, fx.Node] = field(default_factory=dict)


class _Search:
    """Search of one pattern in one graph."""

    def __init__(self, pattern: PatternGraph, owner: nn.Module, graph: fx.Graph) -> None:
        self.pattern, self.owner = pattern, owner
        self.order = {node: place for place, node in enumerate(graph.nodes)}
        self.operations = {node: operation(node, owner) for node in graph.nodes}
        self.of_pattern: dict[fx.Node, Operation | None] = {}

    def all(self) -> list[_State]:
        """Return a state for each node that matches the first result of the pattern, if all others match."""
        first, *others = self.pattern.outputs
        states = []
        for node in self.order:
            # The first state suffices, since matches with the same first result overlap.
            state = next(self._with_others(self.nodes(first, node, _State()), others), None)
            if state is not None:
                states.append(state)
        return states

    def _with_others(self, states: Iterator[_State], outputs: list[fx.Node]) -> Iterator[_State]:
        for state in states:
            if not outputs:
                yield state
                continue
            first, *others = outputs
            candidates = [state.nodes[first]] if first in state.nodes else list(self.order)
            for node in candidates:
                yield from self._with_others(self.nodes(first, node, state), others)

    def nodes(self, wanted: fx.Node, candidate: fx.Node, state: _State) -> Iterator[_State]:
        """Yield the states in which a node and its inputs match a node of the pattern."""
        if wanted in state.nodes:
            if state.nodes[wanted] is candidate:
                yield state
            return
        if candidate in state.nodes.values():  # different nodes of a pattern match different nodes
            return
        for pairs in self._orders(wanted, candidate):
            yield from self.operands(pairs, _State(state.inputs, {**state.nodes, wanted: candidate}))

    def _orders(self, wanted: fx.Node, candidate: fx.Node) -> Iterator[list[tuple[Any, Any]]]:
        """Yield the pairs of operands to compare, in each order to try; nothing if the operations differ."""
        regex = self.pattern.regex(wanted)
        if regex is not None:
            if candidate.op == "call_module" and re.match(regex, str(candidate.target)):
                args = wanted.args[1:] if wanted.op == "call_function" else wanted.args
                if len(args) == len(candidate.args) and wanted.kwargs.keys() == candidate.kwargs.keys():
                    named = [(wanted.kwargs[name], candidate.kwargs[name]) for name in wanted.kwargs]
                    yield [*zip(args, candidate.args, strict=True), *named]
            return
        if wanted not in self.of_pattern:
            self.of_pattern[wanted] = operation(wanted, self.pattern.owner, is_pattern=True)
        pattern_operation, other = self.of_pattern[wanted], self.operations[candidate]
        if (
            pattern_operation is None
            or other is None
            or pattern_operation.kind != other.kind
            or pattern_operation.operands.keys() != other.operands.keys()
        ):
            return
        yield [
            (pattern_operation.operands[name], other.operands[name]) for name in pattern_operation.operands
        ]
        if pattern_operation.is_commutative:
            swapped: dict[str | int, Any] = dict(other.operands)
            swapped["input"], swapped["other"] = swapped["other"], swapped["input"]
            yield [(pattern_operation.operands[name], swapped[name]) for name in pattern_operation.operands]

    def operands(self, pairs: list[tuple[Any, Any]], state: _State) -> Iterator[_State]:
        """Yield the states in which all pairs of operands match."""
        if not pairs:
            yield state
            return
        (wanted, actual), *others = pairs
        for after in self.operand(wanted, actual, state):
            yield from self.operands(others, after)

    def operand(self, wanted: Any, actual: Any, state: _State) -> Iterator[_State]:
        """Yield the states in which one operand matches."""
        if wanted is IGNORED or actual is IGNORED or wanted is ANY:
            yield state
        elif isinstance(wanted, fx.Node) and wanted.op in ("placeholder", "get_attr"):
            yield from self._bound(wanted, actual, state)
        elif isinstance(wanted, fx.Node):
            if isinstance(actual, fx.Node):
                yield from self.nodes(wanted, actual, state)
        elif isinstance(wanted, tuple | list) and isinstance(actual, tuple | list):
            if len(wanted) == len(actual):
                yield from self.operands(list(zip(wanted, actual, strict=True)), state)
        elif isinstance(wanted, slice) and isinstance(actual, slice):
            ends = [(wanted.start, actual.start), (wanted.stop, actual.stop), (wanted.step, actual.step)]
            yield from self.operands(ends, state)
        elif _is_equal(wanted, actual):
            yield state

    def _bound(self, wanted: fx.Node, actual: Any, state: _State) -> Iterator[_State]:
        reads = isinstance(actual, Attribute) or (isinstance(actual, fx.Node) and actual.op == "get_attr")
        if wanted.op == "get_attr" and not reads:
            return
        if wanted not in state.inputs:
            yield _State({**state.inputs, wanted: actual}, state.nodes)
            return
        # A parameter that is used twice matches the same node, or equal constants.
        known = state.inputs[wanted]
        is_node = isinstance(known, fx.Node) or isinstance(actual, fx.Node)
        if known is actual if is_node else _is_equal(known, actual):
            yield state


def _is_equal(wanted: Any, actual: Any) -> bool:
    """Return True if two constants are equal; a number equals a tuple of it, as in ``kernel_size``."""
    if isinstance(actual, tuple | list) and actual and not isinstance(wanted, tuple | list):
        return all(_is_equal(wanted, element) for element in actual)
    if isinstance(wanted, tuple | list) and wanted and not isinstance(actual, tuple | list):
        return all(_is_equal(element, actual) for element in wanted)
    if isinstance(wanted, bool) != isinstance(actual, bool):
        return False
    return bool(wanted == actual)


def matches_in(pattern: PatternGraph, owner: str, module: nn.Module, graph: fx.Graph) -> list[Match]:
    """Return matches that do not overlap, in the order of their first nodes."""
    search = _Search(pattern, module, graph)
    candidates = []
    for state in search.all():
        nodes = sorted(state.nodes.values(), key=search.order.__getitem__)
        candidates.append((search.order[nodes[0]], nodes, state))
    matches, taken = [], set[fx.Node]()
    for _, nodes, state in sorted(candidates, key=lambda candidate: candidate[0]):
        if taken.isdisjoint(nodes):
            taken.update(nodes)
            inputs = {str(parameter.target): state.inputs.get(parameter) for parameter in pattern.parameters}
            outputs = [state.nodes[output] for output in pattern.outputs]
            matches.append(Match(owner, nodes, inputs, outputs, pattern.returns_tuple))
    return matches
