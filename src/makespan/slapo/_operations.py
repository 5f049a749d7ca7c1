"""What a node of a graph computes, in one form for functions, methods and modules that compute the same."""

import builtins
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from makespan.slapo._traced import TracedModule

__all__ = ["IGNORED", "Attribute", "Operation", "operation"]


@dataclass(frozen=True, slots=True)
class Attribute:
    """A tensor of the module that owns a graph, by its path, where no node reads it yet."""

    target: str


@dataclass(frozen=True, slots=True)
class Operation:
    """A kind of operation and its operands by name or place, in the order of the parameters."""

    kind: str
    operands: Mapping[str | int, Any]
    is_commutative: bool = False


class _Ignored:
    """Stands for an operand that is not compared."""

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
# Parameters in order, with the defaults of torch; ~ marks what does not steer what is computed, or is a mode.
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


def _parsed(text: str) -> dict[str, Any]:
    parameters: dict[str, Any] = {}
    for one in text.split():
        name, _, default = one.partition("=")
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


_SIGNATURES = {name: _parsed(text) for name, text in _PARAMETERS.items()}


def _names() -> Iterator[tuple[Any, str]]:
    """Functions of torch and operators, by identity; later ones count where a function has two names."""
    for space in (torch, F, operator):
        for name, value in vars(space).items():
            if callable(value) and not isinstance(value, type) and not name.startswith("_"):
                yield value, name
    yield builtins.getattr, "getattr"


_NAMES = {id(function): _ALIASES.get(name, name) for function, name in _names()}


def operation(node: fx.Node, owner: nn.Module, is_pattern: bool = False) -> Operation | None:
    """Return what a node computes; None for what only reads, takes in or gives back.

    The tensors of a module in a pattern are not compared: they are its own.
    """
    if node.op == "call_module":
        return _of_module(node, owner.get_submodule(str(node.target)), is_pattern)
    if node.op == "call_method":
        kind = _ALIASES.get(str(node.target), str(node.target))
    elif node.op == "call_function":
        kind = _NAMES.get(id(node.target), "") or f"{id(node.target)}"
    else:
        return None
    return Operation(kind, _named(kind, node.args, node.kwargs), kind in _COMMUTATIVE)


def _of_module(node: fx.Node, module: nn.Module, is_pattern: bool) -> Operation:
    kind = _MODULES.get(type(module))
    inputs = [*node.args, *node.kwargs.values()]
    if kind is None or len(inputs) != 1 or getattr(module, "padding_mode", "zeros") != "zeros":
        name = f"{type(module).__module__}.{type(module).__qualname__}"
        return Operation(
            module.origin if isinstance(module, TracedModule) else name, _named("", node.args, node.kwargs)
        )
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


def _named(kind: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str | int, Any]:
    signature = _SIGNATURES.get(kind)
    if signature is None or len(args) > len(signature) or not set(kwargs) <= set(signature):
        return {**dict(enumerate(args)), **{name: kwargs[name] for name in sorted(kwargs)}}
    given = dict(zip(signature, args, strict=False)) | dict(kwargs)
    operands: dict[str | int, Any] = {}
    for name, default in signature.items():
        if default is IGNORED:
            operands[name] = IGNORED
        elif name in given or default is not _REQUIRED:
            operands[name] = given.get(name, default)
    return operands
