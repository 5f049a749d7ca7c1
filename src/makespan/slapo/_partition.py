"""A traced model as pipeline stages: one flat sequence of operations, split where the schedule was cut."""

import builtins
import operator
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import fx, nn

from makespan.slapo._errors import ArgumentError
from makespan.slapo._traced import FusedModule, TracedModule

if TYPE_CHECKING:
    from makespan.slapo._schedule import Schedule

__all__ = ["Partition", "Tie", "default_cuts", "partition", "staged_operations"]

_SCALAR_METHODS = frozenset({"size", "dim", "ndimension", "numel", "element_size", "stride"})
_SCALAR_ATTRIBUTES = frozenset({"shape", "ndim", "dtype", "device", "requires_grad", "is_cuda"})
_SCALAR_SPACES = frozenset({"_operator", "builtins", "math"})


@dataclass
class _Flat:
    """The operations of a model and of its containers in one graph, each with its stage."""

    root: TracedModule
    containers: Collection[str]
    cuts: Collection[str]
    graph: fx.Graph = field(default_factory=fx.Graph)
    stage: dict[fx.Node, int] = field(default_factory=dict)
    current: int = 0
    result: Any = None

    def build(self) -> None:
        """Go through the model as it would run."""
        inputs = {
            str(one.target): self._placeholder(one) for one in self.root.graph.find_nodes(op="placeholder")
        }
        self.result = self._emit(self.root, "", inputs)
        for node in self.graph.nodes:
            if (
                node.op == "call_function"
                and node.target is operator.getitem
                and isinstance(node.args[1], int)
            ):
                self.stage[node] = self.stage[
                    node.args[0]
                ]  # what a tuple holds can be sent, the tuple cannot

    def _placeholder(self, node: fx.Node) -> fx.Node:
        return self._note(self.graph.node_copy(node))

    def _note(self, node: fx.Node) -> fx.Node:
        self.stage[node] = self.current
        return node

    def _emit(self, module: TracedModule, prefix: str, inputs: dict[str, Any]) -> Any:
        values: dict[fx.Node, Any] = {}
        for node in module.graph.nodes:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            target: Any = f"{prefix}{node.target}" if node.op in ("get_attr", "call_module") else node.target
            if node.op == "output":
                return args[0]
            if node.op == "placeholder":
                values[node] = inputs.get(str(node.target), *args)
            elif node.op == "call_module" and target in self.containers:
                values[node] = self._inlined(target, args, kwargs)
            elif node.target is operator.getitem and isinstance(args[0], tuple | list | dict):
                values[node] = args[0][args[1]]
            else:
                values[node] = self._note(self.graph.create_node(node.op, target, args, kwargs, node.name))
            if node.op == "call_module" and target in self.cuts:
                self.current += 1
        raise ArgumentError(f"the graph of {prefix!r} returns nothing")

    def _inlined(self, target: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = self.root.get_submodule(target)
        if not isinstance(module, TracedModule):
            raise ArgumentError(f"{target!r} is not traced any more; accepted: a cut in traced modules")
        given = dict(zip(module.argument_names, args, strict=False)) | kwargs
        return self._emit(module, f"{target}.", given)

    def is_copied(self, node: fx.Node) -> bool:
        """Whether a value is made anew in every stage that needs it: attributes of the model, and numbers."""
        if node.op == "get_attr":
            return True
        if node.op == "call_method":
            return node.target in _SCALAR_METHODS
        if node.op != "call_function":
            return False
        if node.target is builtins.getattr:
            return node.args[1] in _SCALAR_ATTRIBUTES
        is_plain = getattr(node.target, "__module__", "") in _SCALAR_SPACES
        return is_plain and bool(node.all_input_nodes) and all(map(self._is_number, node.all_input_nodes))

    def _is_number(self, node: fx.Node) -> bool:
        return node.op != "get_attr" and self.is_copied(node)

    def needs(self, nodes: Iterable[fx.Node]) -> Iterator[fx.Node]:
        """Go through the values that must be there for some others to be had."""
        waiting, seen = list(nodes), set[fx.Node]()
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            if self.is_copied(node):
                waiting += node.all_input_nodes
            else:
                yield node


@dataclass(frozen=True, slots=True)
class Tie:
    """A parameter that several stages have: its path in each of them, by the index of the stage."""

    paths: dict[int, str]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Partition:
    """The stages of a model.

    Parameters
    ----------
    stages
        Modules that take what the stage before returned, with the names of the whole model inside.
    ties
        Parameters that are in several stages.
    values
        Names of the values that each stage hands to the next.
    """

    stages: tuple[nn.Module, ...]
    ties: tuple[Tie, ...]
    values: tuple[tuple[str, ...], ...]

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run all stages one after the other in this process."""
        first, *others = self.stages
        values = first(*args, **kwargs)
        for stage in others:
            values = stage(*values)
        return values


def staged_operations(sch: "Schedule", cuts: Collection[str]) -> _Flat:
    """Put the operations of a model in order, each with its stage; a stage has to compute something."""
    root = sch.root.mod
    if not isinstance(root, TracedModule):
        raise ArgumentError("the model is not traced; accepted: after trace_until")
    containers = {node.path for one in cuts for node in _above(sch.root[one])}
    flat = _Flat(root, containers, frozenset(cuts))
    flat.build()
    computing = {
        flat.stage[node]
        for node in flat.graph.nodes
        if node.op.startswith("call") and not flat.is_copied(node)
    }
    empty = sorted(set(range(flat.current + 1)) - computing)
    if empty:
        raise ArgumentError(f"stage {empty[0]} of {flat.current + 1} would compute nothing")
    return flat


def _above(node: "Schedule") -> Iterator["Schedule"]:
    above = node.parent
    while above is not None and above.parent is not None:
        yield above
        above = above.parent


def partition(sch: "Schedule") -> Partition:
    """Return the stages of a schedule that was cut; a schedule without cuts is one stage."""
    cuts = sch.root.metadata.slots["cut_pipeline_stage"]
    flat = staged_operations(sch, cuts)
    order = {node: place for place, node in enumerate(flat.graph.nodes)}
    count = flat.current + 1
    results: list[fx.Node] = []
    fx.node.map_arg(flat.result, results.append)
    used: list[set[fx.Node]] = [set() for _ in range(count)]
    for node, stage in flat.stage.items():
        if not flat.is_copied(node):
            used[stage].update(flat.needs(node.all_input_nodes))
    used[-1].update(flat.needs(results))
    handed: list[list[fx.Node]] = []
    for stage in range(1, count):
        later = set().union(*used[stage:])
        handed.append(sorted((one for one in later if flat.stage[one] < stage), key=order.__getitem__))
    stages = tuple(_stage(flat, index, handed) for index in range(count))
    return Partition(
        stages, tuple(_ties(stages)), tuple(tuple(one.name for one in values) for values in handed)
    )


def _stage(flat: _Flat, index: int, handed: list[list[fx.Node]]) -> TracedModule:
    graph, values = fx.Graph(), dict[fx.Node, fx.Node]()
    inputs = flat.graph.find_nodes(op="placeholder") if index == 0 else handed[index - 1]
    for node in inputs:
        values[node] = graph.node_copy(node) if index == 0 else graph.placeholder(node.name)

    def copied(node: fx.Node) -> fx.Node:
        if node not in values:
            values[node] = graph.node_copy(node, copied)
        return values[node]

    for node in flat.graph.nodes:
        if flat.stage[node] == index and not flat.is_copied(node):
            copied(node)
    if index == len(handed):
        graph.output(fx.node.map_arg(flat.result, copied))
    else:  # what is sent has to lie in one piece
        graph.output(tuple(copied(one) for one in handed[index]))
    stage = TracedModule(flat.root, graph, f"Stage{index}")
    for target in {str(one.target) for one in graph.nodes if one.op == "call_module"}:
        part = flat.root.get_submodule(target)
        if isinstance(part, FusedModule):
            _lend(flat.root, stage, part)
    _keep_transient(flat.root, stage)
    fixed = flat.root.fixed if index == 0 else {}
    stage.origin, stage.fixed = flat.root.origin, dict(fixed)
    stage.required = frozenset(stage.argument_names) - frozenset(fixed)
    return stage


def _lend(root: nn.Module, stage: nn.Module, part: FusedModule) -> None:
    """Register what a part of a graph calls, under the name that it has in the model."""
    borrowed = {id(vars(part)[name]) for name in part.borrowed}
    for path, module in root.named_modules():
        if id(module) in borrowed:
            holder = stage
            *above, name = path.split(".")
            for token in above:
                if token not in holder._modules:
                    holder.add_module(token, nn.Module())
                holder = holder.get_submodule(token)
            holder._modules[name] = module


def _keep_transient(root: nn.Module, stage: nn.Module) -> None:
    """Keep buffers out of the state that were out of it in the model."""
    for path, module in stage.named_modules():
        if not module._buffers:
            continue
        original = root.get_submodule(path)
        module._non_persistent_buffers_set |= original._non_persistent_buffers_set & set(module._buffers)


def _ties(stages: Iterable[nn.Module]) -> Iterator[Tie]:
    found: dict[int, dict[int, str]] = {}
    shapes: dict[int, tuple[int, ...]] = {}
    for index, stage in enumerate(stages):
        for path, parameter in stage.named_parameters():
            found.setdefault(id(parameter), {})[index] = path
            shapes[id(parameter)] = tuple(parameter.shape)
    return (Tie(paths, shapes[key]) for key, paths in found.items() if len(paths) > 1)


def default_cuts(n_layers: int, n_stages: int) -> list[int]:
    """Return the layers after which to cut: stages of equal length, the last ones a layer longer if need be.

    Parameters
    ----------
    n_layers, n_stages
        Number of layers and of stages.

    Raises
    ------
    ArgumentError
        There are fewer layers than stages, or no stage; also a `ValueError`.
    """
    if not 1 <= n_stages <= n_layers:
        raise ArgumentError(
            f"default_cuts got {n_layers} layers, {n_stages} stages; accepted: 1 to {n_layers} stages"
        )
    shorter, longer = n_layers // n_stages, n_layers % n_stages
    lengths = [shorter + (index >= n_stages - longer) for index in range(n_stages)]
    return [sum(lengths[: index + 1]) - 1 for index in range(n_stages - 1)]
