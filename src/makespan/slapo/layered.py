"""Parts of a verification by layers: repeated layers, their structure, and modules that stand in for them.

A model of many layers is compared without ever running its layers together. `StandIn` modules take the
place of the layers in both models, so that the rest of the model runs alone: its embedding, its head, and
everything in between. Each stand-in keeps what the rest hands to its layer. Then each layer is compared by
itself, on what it was handed. Layers of one structure compute the same function of their inputs and weights,
so that one of them is compared for all.
"""

import dataclasses
import enum
import functools
import hashlib
import math
import pickle
import random
import re
import types
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree  # there is no public name for it

from makespan.slapo.comparison import Comparison, Tolerance
from makespan.slapo.errors import short_repr
from makespan.slapo.graphs import StateSnapshot
from makespan.slapo.passes import ROUNDING_UNITS, Call, Outcome, Passes, checked_call, seeded
from makespan.slapo.weights import Weights
from makespan.training.bits import raw_bytes


class NoLayersError(Exception):
    """A model cannot be compared by layers; the text says why."""


# --- Layers ---


def repeated_layers(model: nn.Module) -> list[str]:
    """Return the paths of the outermost lists' elements: modules with parameters, at least two in a list."""
    found: list[str] = []
    waiting: list[tuple[str, nn.Module]] = [("", model)]
    while waiting:
        path, module = waiting.pop()
        children = [(name, child) for name, child in module._modules.items() if child is not None]
        paths = [f"{path}.{name}" if path else name for name, _ in children]
        elements = [child for _, child in children]
        is_list = type(module) in (nn.ModuleList, nn.ModuleDict) or (
            type(module) is nn.Sequential and len({type(element) for element in elements}) == 1
        )
        are_layers = all(
            type(element) not in (nn.ModuleList, nn.ModuleDict) and any(True for _ in element.parameters())
            for element in elements
        )
        if is_list and are_layers and len(elements) > 1:
            found += paths
        else:
            waiting += zip(paths, elements, strict=True)
    return sorted(found, key=[path for path, _ in model.named_modules()].index)


# --- Structure ---
#
# Two layers have one structure if everything that can decide what they compute is equal: classes, attributes,
# hooks, graphs, code and closures of functions, and the values of tensors that are no weights. An object that
# the description does not understand is equal only to itself, so that layers are rather compared too often.

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout)
_OF_A_GRAPH = frozenset(vars(fx.GraphModule(nn.Module(), fx.Graph()))) - frozenset(vars(nn.Module()))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_HOOKS = {
    "_forward_hooks_with_kwargs": "_forward_hooks",
    "_forward_hooks_always_called": "_forward_hooks",
    "_forward_pre_hooks_with_kwargs": "_forward_pre_hooks",
}
_SKIPPED = {"_compiled_call_impl", "_modules", "_parameters"}
_OWN_CODE = str(Path(__file__).parents[1])  # of this package


def structure_of(layer: nn.Module, path: str, weights: Mapping[int, Any]) -> str:
    """Return a digest that layers share if they compute the same function of inputs and weights.

    Parameters
    ----------
    layer, path
        The layer, and its path in the model, which texts of equal layers may contain.
    weights
        Description of each parameter whose values may differ between equal layers, by id.

    Raises
    ------
    NoLayersError
        The layer refers to a module outside of it.
    """
    described = _Description(layer, path, weights).lines
    return hashlib.sha256("\n".join(described).encode()).hexdigest()


class _Description:
    """Text of everything that decides what a module computes, one line per value."""

    def __init__(self, layer: nn.Module, path: str, weights: Mapping[int, Any]) -> None:
        self.lines: list[str] = []
        self._path, self._weights = path, weights
        self._own = re.compile(rf"(?<![\w.]){re.escape(path)}(?!\w)")
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []  # so that no id is reused
        modules = [*layer.modules()]
        self._numbers = {id(module): number for number, module in enumerate(modules)}
        self._parameters = {id(parameter) for parameter in layer.parameters()}
        for module in modules:
            self._module(module)

    def _add(self, *parts: object) -> None:
        self.lines.append(" ".join(map(repr, parts)))

    def _module(self, module: nn.Module) -> None:
        is_graph = isinstance(module, fx.GraphModule)
        kind = type(module).__mro__[1] if is_graph else type(module)  # each graph has a class of its own
        self._add("module", self._numbers[id(module)], kind.__module__, kind.__qualname__, id(kind))
        for name, child in module._modules.items():
            self._add("child", name, None if child is None else self._numbers[id(child)])
        for name, parameter in module._parameters.items():
            self._add("parameter", name)
            self._value(parameter)
        for name in sorted(vars(module)):
            if name in _SKIPPED or (is_graph and name in _OF_A_GRAPH):
                continue
            value = vars(module)[name]
            self._add("attribute", name)
            if name in _HOOKS and isinstance(value, dict):
                self._value([*value.values()])
            elif name in _OF_HOOKS and isinstance(value, dict):
                hooks = [*vars(module)[_OF_HOOKS[name]]]  # by number, which differs between equal layers
                self._value([hooks.index(number) for number in value if number in hooks])
            else:
                self._value(value)
        if isinstance(module, fx.GraphModule):
            self._graph(module.graph)

    def _graph(self, graph: fx.Graph) -> None:
        numbers = {node: number for number, node in enumerate(graph.nodes)}
        for node in graph.nodes:
            self._add("node", node.op)
            self._value(node.target)
            for arguments in (node.args, node.kwargs):
                self._value(fx.node.map_arg(arguments, lambda used: ("node", numbers[used])))

    def _value(self, value: Any) -> None:
        if isinstance(value, str):
            self._add(self._own.sub("<the layer>", value))
        elif isinstance(value, _PLAIN) or value is Ellipsis:
            self._add(type(value).__name__, value)
        elif isinstance(value, enum.Enum | slice | range | torch.Size):
            self._add(type(value).__name__, repr(value))
        elif isinstance(value, type | types.ModuleType | types.BuiltinFunctionType | dist.ProcessGroup):
            self._add("itself", id(value))
        elif id(value) in self._seen:
            self._add("again", self._seen[id(value)])
        else:
            self._seen[id(value)] = len(self._seen)
            self._kept.append(value)
            self._object(value)

    def _object(self, value: Any) -> None:
        match value:
            case nn.Module():
                if id(value) not in self._numbers:
                    raise NoLayersError(f"{self._path!r} refers to a {type(value).__name__} outside of it")
                self._add("inner module", self._numbers[id(value)])
            case Tensor():
                self._tensor(value)
            case torch.Generator():
                self._add("generator", _digest(value.get_state()))
            case list() | tuple() | deque():
                self._add(type(value).__name__, id(type(value)), len(value))
                for element in value:
                    self._value(element)
            case set() | frozenset():
                self._add(type(value).__name__, len(value))
                for element in sorted(value, key=repr):
                    self._value(element)
            case dict():
                self._add(type(value).__name__, id(type(value)), len(value))
                for key, element in value.items():
                    self._value(key)
                    self._value(element)
                if hasattr(value, "default_factory"):
                    self._value(value.default_factory)
            case types.MethodType():
                self._add("method")
                self._value(value.__func__)
                self._value(value.__self__)
            case functools.partial():
                self._add("partial")
                self._value(value.func)
                self._value(value.args)
                self._value(value.keywords)
            case types.FunctionType():
                self._function(value)
            case _ if dataclasses.is_dataclass(value):
                self._add("dataclass", id(type(value)))
                for entry in dataclasses.fields(value):
                    self._value(getattr(value, entry.name, None))
            case _ if _has_only_attributes(value):
                self._add("object", id(type(value)))
                self._value(vars(value))
            case _:
                self._add("itself", id(value))

    def _tensor(self, tensor: Tensor) -> None:
        if tensor.requires_grad and id(tensor) not in self._parameters:
            raise NoLayersError(f"{self._path!r} refers to a weight outside of it")
        # Without the name that a verification sets, and without marks that a compiler leaves behind.
        tags = {
            name: tag
            for name, tag in vars(tensor).items()
            if not name.startswith(("makespan_verified", "_dynamo"))
        }
        self._add("tensor", type(tensor).__name__, tuple(tensor.shape), str(tensor.dtype))
        self._add(tensor.requires_grad)
        self._value(tags)
        if (weight := self._weights.get(id(tensor))) is not None:
            self._value(weight)
        else:
            self._add(_digest(tensor))

    def _function(self, function: types.FunctionType) -> None:
        self._add("function", id(function.__globals__))
        code = function.__code__
        if code.co_filename.startswith(_OWN_CODE):
            # A tool that counts the lines that run may exchange this object for an equal one at any time.
            self._add(code.co_filename, code.co_firstlineno, code.co_qualname, code.co_names)
        else:
            self._value(code)
        self._value(function.__defaults__)
        self._value(function.__kwdefaults__)
        self._value(vars(function))
        for cell in function.__closure__ or ():
            try:
                self._value(cell.cell_contents)
            except ValueError:  # the variable has no value yet
                self._add("empty cell")


def _has_only_attributes(value: Any) -> bool:
    """Return True for an object of a class written in Python whose state is its ``__dict__``."""
    kinds = type(value).__mro__[:-1]
    return hasattr(value, "__dict__") and all(
        kind.__flags__ & (1 << 9) and not vars(kind).get("__slots__") for kind in kinds
    )  # flag 9: a heap type, which is one of a class statement or of an extension in C


def _digest(tensor: Tensor) -> str:
    if tensor.is_meta or tensor.numel() == 0:
        return str(tuple(tensor.shape))
    return hashlib.sha256(raw_bytes(tensor).numpy().data).hexdigest()


# --- Stand-ins ---

Key = tuple[str, int]
"""Path of a layer, and index of its call."""


@dataclass(slots=True)
class Handed:
    """What a model handed to a layer in one call.

    Parameters
    ----------
    args, kwargs
        Copies of the arguments.
    needs_gradient
        True for each leaf of the arguments that is a tensor with a gradient.
    gradients
        Gradients that arrived at the results, by the index of the leaf.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    needs_gradient: tuple[bool, ...]
    gradients: dict[int, Tensor] = field(default_factory=dict)

    @property
    def leaves(self) -> list[Any]:
        """Tensors and plain values among the arguments."""
        return pytree.tree_leaves((self.args, self.kwargs))


@dataclass(frozen=True, slots=True)
class _Template:
    """Results of a layer: their leaves, and their structure."""

    leaves: list[Any]
    structure: pytree.TreeSpec


class Templates:
    """Results of layers, by structure of the layer and by shapes and types of its arguments.

    Parameters
    ----------
    kinds
        Structure of each layer by its path.
    runs_alone
        Context in which a layer runs by itself; it raises an error if the run draws random numbers.
    """

    def __init__(self, kinds: Mapping[str, str], runs_alone: Callable[[str], Any]) -> None:
        self.kinds, self._runs_alone = kinds, runs_alone
        self.first: dict[tuple[str, str], Key] = {}
        """First call of each structure with arguments of each kind."""
        self._known: dict[tuple[str, str], _Template] = {}

    def learn(self, key: Key, layer: nn.Module, handed: Handed) -> _Template:
        """Return the results of a layer of the original model; run it if there are none of its kind."""
        kind = self.kinds[key[0]], _kind_of(handed)
        if kind not in self._known:
            self.first[kind] = key
            self._known[kind] = self._run(key[0], layer, handed)
        return self._known[kind]

    def known(self, path: str, handed: Handed) -> _Template:
        """Return the results of a layer of the scheduled model."""
        template = self._known.get((self.kinds[path], _kind_of(handed)))
        if template is None:
            raise NoLayersError(f"{path!r} is handed other kinds of arguments than in the original model")
        return template

    def _run(self, path: str, layer: nn.Module, handed: Handed) -> _Template:
        leaves, structure = pytree.tree_flatten((handed.args, handed.kwargs))
        fresh = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        for leaf, needs in zip(fresh, handed.needs_gradient, strict=True):
            if needs:
                leaf.requires_grad_()
        # A view, since a layer may not change a leaf that needs a gradient in place.
        passed = [leaf.view_as(leaf) if isinstance(leaf, Tensor) else leaf for leaf in fresh]
        args, kwargs = pytree.tree_unflatten(passed, structure)
        with StateSnapshot(layer).restored(), self._runs_alone(path), torch.enable_grad():
            before = state_of(layer, path)
            results = layer(*args, **kwargs)
            if state_of(layer, path) != before:
                raise NoLayersError(f"{path!r} keeps state in attributes")
        for now, leaf in zip(passed, leaves, strict=True):
            if isinstance(leaf, Tensor) and not torch.equal(now.detach().nan_to_num(), leaf.nan_to_num()):
                raise NoLayersError(f"{path!r} changes its arguments in place")
        leaves, structure = pytree.tree_flatten(results)
        _check_leaves(path, "returns", leaves)
        kept = [
            leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
            for leaf in leaves
        ]
        return _Template(kept, structure)


def state_of(layer: nn.Module, path: str) -> str:
    """Return a digest of the attributes of a layer, without values of parameters and buffers."""
    tensors = [*layer.named_parameters(), *layer.named_buffers()]
    return structure_of(layer, path, {id(tensor): name for name, tensor in tensors})


def _kind_of(handed: Handed) -> str:
    """Return a text that two sets of arguments share if they differ in the elements of tensors alone."""
    leaves, structure = pytree.tree_flatten((handed.args, handed.kwargs))
    kinds = [
        f"{leaf.dtype} {tuple(leaf.shape)} {needs}" if isinstance(leaf, Tensor) else repr(leaf)
        for leaf, needs in zip(leaves, handed.needs_gradient, strict=True)
    ]
    return f"{structure} {kinds}"


def _check_leaves(path: str, verb: str, leaves: Iterable[Any]) -> None:
    for leaf in leaves:
        if not isinstance(leaf, (Tensor, torch.Size, enum.Enum, *_PLAIN)):
            raise NoLayersError(f"{path!r} {verb} an object, {type(leaf).__name__}")


class StandIn(nn.Module):
    """A module in the place of a layer; it has the plain attributes of the layer and none of its modules."""

    def __init__(self, layer: nn.Module, path: str, call: Callable[..., Any]) -> None:
        super().__init__()
        vars(self).update(layer=layer, path=path, call=call)
        self.training = layer.training

    def __getattr__(self, name: str) -> Any:
        """Return a plain attribute of the layer."""
        value = getattr(vars(self)["layer"], name)
        if isinstance(value, nn.Module | Tensor):
            raise NoLayersError(
                f"the model uses {name!r} of {vars(self)['path']!r} without calling the layer"
            )
        return value

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return results of the kind that the layer has."""
        return vars(self)["call"](self, args, kwargs)


class StandIns:
    """Stand-ins for the layers of a model while the context lasts, and all that the model hands to them.

    The results of a stand-in are those of a layer of its structure plus a share of every argument that has a
    gradient, another one for each layer. So arguments in another order, or handed to another layer, change
    what follows, and gradients flow through a stand-in as they do through a layer.
    """

    def __init__(
        self, model: nn.Module, layers: Sequence[str], results: Callable[[Key, nn.Module, Handed], _Template]
    ) -> None:
        self.calls: dict[Key, Handed] = {}
        self.is_forward = True
        """False while a backward pass runs, whose recomputation calls layers again."""
        self.refusal: NoLayersError | None = None
        self._model, self._layers, self._results = model, layers, results
        self._replaced: list[tuple[nn.Module, str, nn.Module]] = []

    def __enter__(self) -> "StandIns":
        for path in self._layers:
            above, _, name = path.rpartition(".")
            owner = self._model.get_submodule(above)
            layer = owner.get_submodule(name)
            self._replaced.append((owner, name, layer))
            owner._modules[name] = StandIn(layer, path, self._call)
        return self

    def __exit__(self, *error: object) -> None:
        for owner, name, layer in self._replaced:
            owner._modules[name] = layer

    def _call(self, stand_in: StandIn, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return self._results_of(vars(stand_in)["path"], vars(stand_in)["layer"], args, kwargs)
        except NoLayersError as refusal:  # the model may catch it
            self.refusal = self.refusal or refusal
            raise

    def _results_of(self, path: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, structure = pytree.tree_flatten((args, kwargs))
        _check_leaves(path, "is handed", leaves)
        copies = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        needs_gradient = tuple(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves)
        copied_args, copied_kwargs = pytree.tree_unflatten(copies, structure)
        handed = Handed(copied_args, copied_kwargs, needs_gradient)
        key = path, sum(path == other for other, _ in self.calls)
        template = self._results(key, layer, handed)
        if self.is_forward:
            self.calls[key] = handed
        inputs = [leaf for leaf, needs in zip(leaves, handed.needs_gradient, strict=True) if needs]
        results = []
        for place, leaf in enumerate(template.leaves):
            if not isinstance(leaf, Tensor):
                results.append(leaf)
                continue
            result = leaf.detach().clone().requires_grad_(leaf.requires_grad)
            if leaf.requires_grad:
                # A small part of an argument of another shape, as a mask or table may be large or infinite.
                small = 0.1 * float(leaf.detach().nan_to_num(posinf=0.0, neginf=0.0).abs().mean())
                for number, value in enumerate(inputs):
                    share = _share(f"{path} {place} {number}") / len(inputs)
                    is_alike = value.shape == result.shape
                    part = value if is_alike else small * torch.tanh(value).mean()
                    result = result + share * part.to(result)
                if self.is_forward:
                    register: Callable[..., Any] = result.register_hook
                    register(functools.partial(_keep, handed.gradients, place))
            results.append(result)
        return pytree.tree_unflatten(results, template.structure)


def _keep(gradients: dict[int, Tensor], place: int, gradient: Tensor) -> None:
    gradients[place] = gradient.detach().clone()


def _share(text: str) -> float:
    """Return a number from 0.5 to 0.9 that depends on a text."""
    return 0.5 + 0.4 * zlib.crc32(text.encode()) / 2**32


def shared_modules(model: nn.Module, layers: Sequence[str]) -> Iterator[str]:
    """Iterate over the layers that share a module or a parameter with the rest of the model."""
    owners: dict[int, str] = {}
    inside = {path: model.get_submodule(path) for path in layers}
    held = {path: [*layer.modules(), *layer.parameters()] for path, layer in inside.items()}
    for path, parts in held.items():
        if any(owners.setdefault(id(part), path) != path for part in parts):
            yield path
    seen: set[int] = {id(layer) for layer in inside.values()}
    waiting = [model]
    while waiting:
        module = waiting.pop()
        seen.add(id(module))
        for part in (*module._parameters.values(), module):
            if part is not None and id(part) in owners:
                yield owners[id(part)]
        waiting += [
            child for child in module._modules.values() if child is not None and id(child) not in seen
        ]


# --- Passes by layers ---

_Object = TypeVar("_Object")


class RestPasses(Passes):
    """Passes of both models with stand-ins for their layers."""

    stand_ins: Mapping[int, StandIns]
    """Stand-ins by the id of the model."""

    def _forward(self, model: nn.Module) -> Outcome:
        self.stand_ins[id(model)].is_forward = True
        try:
            return super()._forward(model)
        finally:
            self.stand_ins[id(model)].is_forward = False


class OneLayerPasses(Passes):
    """Passes of one of several layers, with a share of the tolerance of the model."""

    n_layers: int

    def _tolerance(self, kind: str, dtype: torch.dtype) -> Tolerance:
        """Return the share of the model's tolerance that one layer may use up.

        In the model, errors of outputs and of input gradients add up over the layers, and a gradient of a
        parameter has the error of its layer besides that of the gradient that arrives there.
        """
        whole = Passes._tolerance(self, kind, dtype)
        if not (dtype.is_floating_point or dtype.is_complex):
            return whole
        share = 1 / 2 if kind == "parameter gradient" else 1 / self.n_layers
        rounding = ROUNDING_UNITS * torch.finfo(dtype).eps
        return Tolerance(
            min(whole.rtol, max(share * whole.rtol, rounding)),
            min(whole.atol, max(share * whole.atol, rounding)),
        )


class LayerPasses:
    """Passes of the rest of a model, and of layers that stand for all layers of their structure.

    Parameters
    ----------
    passes
        Passes of the whole models, which do not run.

    Raises
    ------
    NoLayersError
        The models cannot be taken apart.
    """

    def __init__(self, passes: Passes) -> None:
        self._whole = passes
        self._paths = repeated_layers(passes.weights.original)
        self.comparisons: list[Comparison] = []
        self.layers: dict[str, list[str]] = {}
        """Compared layers, each with all layers of its structure."""
        self._joined(self._take_apart)

    def _take_apart(self) -> None:
        weights = self._whole.weights
        if not self._paths:
            raise NoLayersError("no list has two layers")
        for model in (weights.original, weights.scheduled):
            for path in self._paths:
                try:
                    model.get_submodule(path)
                except AttributeError:
                    raise NoLayersError(f"the schedule has no {path!r}") from None
            if (shared := next(shared_modules(model, self._paths), None)) is not None:
                raise NoLayersError(f"{shared!r} shares a module or weight with the rest of the model")
        for name, (source, _) in weights.origin.items():
            if self._layer_of(name) != self._layer_of(source):
                raise NoLayersError(f"parameter {name!r} was {source!r}")
        self._parts = {path: self._part(path) for path in ("", *self._paths)}
        self._kinds = {path: self._structure(path) for path in self._paths}

    def _layer_of(self, name: str) -> str:
        return next((path for path in self._paths if name.startswith(f"{path}.")), "")

    def _part(self, path: str) -> Weights:
        """Return the weights of a layer, with names inside of it, or those of the rest."""
        whole = self._whole.weights
        names = [name for name in (*whole.origin, *whole.buffers) if self._layer_of(name) == path]
        start = f"{path}." if path else ""
        return Weights(
            whole.original.get_submodule(path),
            whole.scheduled.get_submodule(path),
            {
                name.removeprefix(start): (source.removeprefix(start), shard)
                for name in names
                if name in whole.origin
                for source, shard in [whole.origin[name]]
            },
            buffers={
                name.removeprefix(start): whole.buffers[name] for name in names if name in whole.buffers
            },
        )

    def _structure(self, path: str) -> str:
        """Return a text that is equal for layers of which one may stand for the other."""
        part = self._parts[path]
        original, scheduled = (dict(model.named_parameters()) for model in (part.original, part.scheduled))
        kept: dict[str, list[str]] = {}
        for name, (source, _) in part.origin.items():
            kept.setdefault(source, []).append(name)
        return " ".join(
            (
                structure_of(
                    part.original, path, {id(original[name]): names for name, names in kept.items()}
                ),
                structure_of(
                    part.scheduled,
                    path,
                    {id(scheduled[name]): source for name, (source, _) in part.origin.items()},
                ),
            )
        )

    def run(self, suffix: str) -> None:
        """Run all parts in the present mode.

        Raises
        ------
        NoLayersError
            On all processes: a part differs, or the models cannot be taken apart after all. A difference says
            no more than that the whole model has to be compared, since errors may cancel between layers.
        """
        whole, rest = self._whole, self._parts[""]
        templates = Templates(self._kinds, partial(_undrawn, whole.seed, whole.device))
        expected = StandIns(rest.original, self._paths, templates.learn)
        actual = StandIns(rest.scheduled, self._paths, lambda key, _, handed: templates.known(key[0], handed))
        passes = RestPasses(
            rest, whole.call, rest.scheduled, whole.ranks, whole.device, whole.seed, whole.tolerances,
            whole.loss_fn, whole.check_grad, suffix, whole.everyone,
        )  # fmt: skip
        passes.stand_ins = {id(rest.original): expected, id(rest.scheduled): actual}

        def reference() -> Outcome:
            outcome = passes.reference()
            _check_numbers("the rest of the model", passes, outcome)
            if expected.refusal is not None:  # the model caught it
                raise expected.refusal
            return outcome

        def compare_handed() -> None:
            if actual.refusal is not None:
                raise actual.refusal
            _refuse(_first_fault("the rest of the model", passes))
            self._check_others("the rest of the model")
            self._compare_handed(passes, expected, actual)
            _refuse(_first_fault("the rest of the model", passes))

        with expected, actual:
            passes.run(self._joined(reference))
        self._joined(compare_handed)
        self.comparisons += passes.comparisons
        firsts = whole.gathered(list(templates.first.values()))
        if any(other != firsts[0] for other in firsts):
            raise NoLayersError("the processes find other layers alike")
        for (kind, _), (path, index) in templates.first.items():
            self.layers.setdefault(path, [other for other in self._paths if self._kinds[other] == kind])
            self._run_layer(path, expected.calls[path, index], suffix)

    def _run_layer(self, path: str, handed: Handed, suffix: str) -> None:
        passes = self._layer_passes(path, handed, suffix)

        def reference() -> tuple[str, Outcome]:
            outcome = passes.reference()
            _check_numbers(repr(path), passes, outcome)
            return state_of(passes.scheduled, path), outcome

        before, outcome = self._joined(reference)
        passes.run(outcome)

        def check() -> None:
            _refuse(_first_fault(repr(path), passes))
            self._check_others(repr(path))
            if state_of(passes.scheduled, path) != before:
                raise NoLayersError(f"{path!r} keeps state in attributes")

        self._joined(check)
        self.comparisons += [_of_layer(comparison, path) for comparison in passes.comparisons]

    def _check_others(self, where: str) -> None:
        """Raise an error if gradients have arrived at parts other than the one that ran."""
        weights = self._whole.weights
        for name, parameter in (
            *weights.original.named_parameters(),
            *weights.scheduled.named_parameters(),
        ):
            if parameter.grad is not None:
                raise NoLayersError(f"{where} uses {name!r}, which belongs elsewhere")

    def _joined(self, step: Callable[[], _Object]) -> _Object:
        """Run a step without communication; raise a `NoLayersError` on all processes if one of them fails."""
        refusal, result = "", None
        try:
            result = step()
        except Exception as error:  # noqa: BLE001 - whatever a model raises
            is_known = isinstance(error, NoLayersError)
            refusal = str(error) if is_known else short_repr(f"{type(error).__name__}: {error}")
        for text in self._whole.gathered(refusal):
            if text:
                raise NoLayersError(text)
        return cast("_Object", result)

    def _layer_passes(self, path: str, handed: Handed, suffix: str) -> OneLayerPasses:
        """Return the passes of one layer on what the model handed to it."""
        whole, part = self._whole, self._parts[path]
        call = checked_call(part.original, Call(handed.args, handed.kwargs), path, None)
        needs = iter(handed.needs_gradient)
        wanting = {
            name
            for name, value in (*zip(call.names, call.args, strict=True), *call.kwargs.items())
            if sum(next(needs) for _ in pytree.tree_leaves(value))
        }
        passes = OneLayerPasses(
            part, replace(call, wanting=frozenset(wanting)), part.scheduled, whole.ranks, whole.device,
            whole.seed, whole.tolerances, None, whole.check_grad, suffix, whole.everyone,
        )  # fmt: skip
        passes.n_layers = len(self._paths)
        return passes

    def _compare_handed(self, passes: Passes, expected: StandIns, actual: StandIns) -> None:
        """Compare what the rest of both models handed to the layers, and the gradients that arrived there."""
        if [*expected.calls] != [*actual.calls]:
            passes.faults.append("the layers are called in another order")
            return
        for (path, index), handed in expected.calls.items():
            other = actual.calls[path, index]
            for place, (leaf, value) in enumerate(zip(handed.leaves, other.leaves, strict=True)):
                if isinstance(leaf, Tensor):
                    passes._compare("layer input", f"{path} {index} {place}", value, leaf)
            if self._whole.check_grad and handed.gradients.keys() != other.gradients.keys():
                passes.faults.append(f"gradients arrive at other results of {path!r}")
                continue
            for place, gradient in handed.gradients.items():
                passes._compare(
                    "layer output gradient", f"{path} {index} {place}", other.gradients[place], gradient
                )


@contextmanager
def _undrawn(seed: int, device: torch.device, path: str) -> Iterator[None]:
    """Run a layer by itself; raise an error if it draws random numbers."""
    with seeded(seed, device):
        before = _random_states()
        yield
        if _random_states() != before:
            raise NoLayersError(f"{path!r} draws random numbers")


def _random_states() -> tuple[Any, ...]:
    initialised: Callable[[], bool] = torch.cuda.is_initialized
    devices = range(torch.cuda.device_count()) if initialised() else ()
    states = [torch.get_rng_state(), *(torch.cuda.get_rng_state(index) for index in devices)]
    of_numpy = pickle.dumps(np.random.get_state())  # noqa: NPY002 - models may draw from it
    return random.getstate(), of_numpy, *(state.numpy().tobytes() for state in states)


def _check_numbers(where: str, passes: Passes, outcome: Outcome) -> None:
    """Raise an error if a result of the original is NaN, which agrees with that of most faults."""
    gradients = [parameter.grad for parameter in passes.weights.original.parameters()]
    for tensor in (*outcome.tensors.values(), *(gradient for gradient in gradients if gradient is not None)):
        is_float = tensor.is_floating_point() or tensor.is_complex()
        if is_float and math.isnan(float(torch.linalg.vector_norm(tensor.detach()))):
            raise NoLayersError(f"{where} returns NaN by itself")


def _refuse(reason: str) -> None:
    if reason:
        raise NoLayersError(reason)


def _first_fault(where: str, passes: Passes) -> str:
    """Return the first fault of this process, empty if there is none."""
    faults = [*passes.faults, *(str(comparison) for comparison in passes.comparisons if comparison.fault)]
    return f"{where} differs by itself: {short_repr(faults[0])}" if faults else ""


def _of_layer(comparison: Comparison, path: str) -> Comparison:
    """Return a comparison of a layer under its name in the whole model."""
    of_parameter = comparison.kind.startswith(("parameter", "buffer"))
    return replace(
        comparison,
        kind=comparison.kind if of_parameter else f"layer {comparison.kind}",
        name=f"{path}.{comparison.name}" if of_parameter else f"{path} {comparison.name}",
    )
