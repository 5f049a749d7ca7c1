"""Pipeline stages: the primitive that cuts, the partition of a traced model, and its execution."""

import builtins
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from makespan.slapo.compiling import Compiled
from makespan.slapo.errors import ArgumentError, BuildError, ConflictError, TracingError
from makespan.slapo.graphs import FusedModule, TracedModule, expanded, has_hooks, is_object, is_wrapped
from makespan.slapo.layouts import Ranks
from makespan.slapo.recomputing import Checkpointed
from makespan.slapo.schedule import Primitive, register_primitive, wrapped_forward
from makespan.slapo.sharding import CLIPPING
from makespan.slapo.state import record_owners
from makespan.slapo.tracing import calls_inside, graph_of
from makespan.training import refuse_plain_clipping

if TYPE_CHECKING:
    from makespan.slapo.schedule import Schedule


# --- Partition ---
#
# The graphs of the model and of all containers above a cut are joined into one flat sequence of operations,
# which is split at the cuts. Two invariants hold: an operation runs in the stage in which the model runs it,
# and a stage sends the next one every tensor that any later stage needs. Sizes and other numbers are not
# sent: each stage computes those that it needs.

_SCALAR_METHODS = frozenset({"size", "dim", "ndimension", "numel", "element_size", "stride"})
_SCALAR_ATTRIBUTES = frozenset({"shape", "ndim", "dtype", "device", "requires_grad", "is_cuda"})
_SCALAR_SPACES = frozenset({"_operator", "builtins", "math"})


@dataclass
class _FlatGraph:
    """The operations of a model and of its containers in one graph, each with its stage."""

    root: TracedModule
    containers: Collection[str]
    cuts: Collection[str]
    graph: fx.Graph = field(default_factory=fx.Graph)
    stage: dict[fx.Node, int] = field(default_factory=dict)
    current: int = 0
    result: Any = None

    def build(self) -> None:
        """Emit the operations of the model in the order of execution."""
        inputs = {
            str(node.target): self._note(self.graph.node_copy(node))
            for node in self.root.graph.find_nodes(op="placeholder")
        }
        self.result = self._emit(self.root, "", inputs)
        # Elements of a tuple can be sent, the tuple cannot: index it in the stage that computes it.
        for node in self.graph.nodes:
            is_element = node.op == "call_function" and node.target is operator.getitem
            if is_element and isinstance(node.args[1], int):
                self.stage[node] = self.stage[node.args[0]]

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
                values[node] = self._inline(target, args, kwargs)
            elif node.target is operator.getitem and isinstance(args[0], tuple | list | dict):
                # An inlined container returns its values, not a node that yields them: index them now.
                values[node] = args[0][args[1]]
            else:
                values[node] = self._note(self.graph.create_node(node.op, target, args, kwargs, node.name))
            if node.op == "call_module" and target in self.cuts:
                self.current += 1
        raise ArgumentError(f"the graph of {prefix!r} returns nothing")

    def _inline(self, target: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = self.root.get_submodule(target)
        if not isinstance(module, TracedModule):
            raise ArgumentError(f"{target!r} is no longer traced; a cut needs traced modules")
        inputs = dict(zip(module.argument_names, args, strict=False)) | kwargs
        return self._emit(module, f"{target}.", inputs)

    def is_copied(self, node: fx.Node) -> bool:
        """Return True if each stage computes a value for itself: an attribute of the model, or a number."""
        if node.op == "get_attr":
            return True
        if node.op == "call_method":
            return node.target in _SCALAR_METHODS
        if node.op != "call_function":
            return False
        if node.target is builtins.getattr:
            return node.args[1] in _SCALAR_ATTRIBUTES
        # A plain function of numbers is a number; attributes of the model may be tensors.
        is_plain = getattr(node.target, "__module__", "") in _SCALAR_SPACES
        inputs = node.all_input_nodes
        return (
            is_plain
            and bool(inputs)
            and all(source.op != "get_attr" and self.is_copied(source) for source in inputs)
        )

    def needs(self, nodes: Iterable[fx.Node]) -> Iterator[fx.Node]:
        """Iterate over the values that other stages must provide to compute some nodes."""
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
    """A parameter in several stages, with its path in each of them by the index of the stage."""

    paths: dict[int, str]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Partition:
    """The stages of a model.

    Parameters
    ----------
    stages
        Modules that take the result of the previous stage, with paths as in the whole model.
    ties
        Parameters in several stages.
    values
        Names of the values that each stage sends to the next.
    """

    stages: tuple[nn.Module, ...]
    ties: tuple[Tie, ...]
    values: tuple[tuple[str, ...], ...]

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run all stages in sequence in this process."""
        first, *others = self.stages
        values = first(*args, **kwargs)
        for stage in others:
            values = stage(*values)
        return values


def staged_operations(sch: "Schedule", cuts: Collection[str]) -> _FlatGraph:
    """Return the operations of a model in order, each with its stage; reject an empty stage."""
    root = sch.root.mod
    if not isinstance(root, TracedModule):
        raise ArgumentError("the model is not traced; call trace_until first")
    containers: set[str] = set()
    for path in cuts:
        above = sch.root[path].parent
        while above is not None and above.parent is not None:
            containers.add(above.path)
            above = above.parent
    flat = _FlatGraph(root, containers, frozenset(cuts))
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


def partition(sch: "Schedule") -> Partition:
    """Return the stages of a schedule, one without cuts."""
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
    # A stage communicates with its neighbours only, so a value passes through all stages up to the last that
    # needs it.
    sent: list[list[fx.Node]] = []
    for stage in range(1, count):
        later = set().union(*used[stage:])
        sent.append(sorted((node for node in later if flat.stage[node] < stage), key=order.__getitem__))
    stages = tuple(_stage_module(flat, index, sent) for index in range(count))
    paths: dict[int, dict[int, str]] = {}
    shapes: dict[int, tuple[int, ...]] = {}
    for index, module in enumerate(stages):
        for path, parameter in module.named_parameters():
            paths.setdefault(id(parameter), {})[index] = path
            shapes[id(parameter)] = tuple(parameter.shape)
    ties = tuple(Tie(places, shapes[key]) for key, places in paths.items() if len(places) > 1)
    return Partition(stages, ties, tuple(tuple(node.name for node in values) for values in sent))


def _stage_module(flat: _FlatGraph, index: int, sent: list[list[fx.Node]]) -> TracedModule:
    graph, values = fx.Graph(), dict[fx.Node, fx.Node]()
    inputs = flat.graph.find_nodes(op="placeholder") if index == 0 else sent[index - 1]
    for node in inputs:
        values[node] = graph.node_copy(node) if index == 0 else graph.placeholder(node.name)

    def copied(node: fx.Node) -> fx.Node:
        # Copies a node with its inputs: those that an earlier stage computes are placeholders of this one,
        # all others are attributes and numbers, which each stage computes for itself.
        if node not in values:
            values[node] = graph.node_copy(node, copied)
        return values[node]

    for node in flat.graph.nodes:
        if flat.stage[node] == index and not flat.is_copied(node):
            copied(node)
    if index == len(sent):
        graph.output(fx.node.map_arg(flat.result, copied))
    else:
        graph.output(tuple(copied(node) for node in sent[index]))
    stage = TracedModule(flat.root, graph, f"Stage{index}")
    for target in {str(node.target) for node in graph.nodes if node.op == "call_module"}:
        part = flat.root.get_submodule(target)
        if isinstance(part, FusedModule):
            _register_borrowed(flat.root, stage, part)
    # A stage keeps buffers out of its state that are not part of the state of the model.
    for path, module in stage.named_modules():
        if module._buffers:
            original = flat.root.get_submodule(path)
            module._non_persistent_buffers_set |= original._non_persistent_buffers_set & set(module._buffers)
    fixed = flat.root.fixed if index == 0 else {}
    stage.origin, stage.fixed = flat.root.origin, dict(fixed)
    stage.required = frozenset(stage.argument_names) - frozenset(fixed)
    return stage


def _register_borrowed(root: nn.Module, stage: nn.Module, part: FusedModule) -> None:
    """Register the modules that a fused part of a graph calls, under their paths in the model."""
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


def default_cuts(n_layers: int, n_stages: int) -> list[int]:
    """Return the layers after which to cut; if stages differ in length, the last ones have one layer more.

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
            f"default_cuts got {n_layers} layers, {n_stages} stages; expected 1 to {n_layers} stages"
        )
    shorter, longer = n_layers // n_stages, n_layers % n_stages
    lengths = [shorter + (index >= n_stages - longer) for index in range(n_stages)]
    return [sum(lengths[: index + 1]) - 1 for index in range(n_stages - 1)]


# --- Primitive ---


@register_primitive()
class CutPipelineStage(Primitive):
    """End a pipeline stage after a module."""

    @classmethod
    def name(cls) -> str:
        """Return ``cut_pipeline_stage``."""
        return "cut_pipeline_stage"

    @classmethod
    def init_metadata(cls) -> list[str]:
        """Return the paths of the modules that end a stage."""
        return []

    @classmethod
    def apply(cls, sch: "Schedule") -> None:
        """Make this module the last one of its stage; all modules above it must be traced."""
        where = f"cut_pipeline_stage of {sch.path!r}"
        if sch.parent is None:
            raise ArgumentError(f"{where}: nothing follows the whole model; expected a module in it")
        cuts: list[str] = sch.metadata.slots[cls.name()]
        if sch.path in cuts:
            raise ConflictError(f"{where}: a stage already ends here, {sch.conflict(cls.name())}")
        _check_owners(where, sch)
        owner = sch.parent
        while owner.parent is not None and not isinstance(owner.mod, TracedModule):
            owner = owner.parent  # past a list that is iterated, and never called itself
        graph = graph_of(owner, cls.name()).graph
        target = sch.path.removeprefix(owner.path).lstrip(".")
        calls = [node for node in graph.find_nodes(op="call_module") if node.target == target]
        if len(calls) != 1:
            raise ArgumentError(f"{where}: its owner calls it {len(calls)} times; expected one call")
        try:
            staged_operations(sch, [*cuts, sch.path])
        except ArgumentError as error:
            raise ArgumentError(
                f"{where}: {error}; expected a module that other operations of the stage follow"
            ) from None
        cuts.append(sch.path)


def _check_owners(where: str, sch: "Schedule") -> None:
    """Reject a cut below a module that stages cannot run: untraced, wrapped, or with hooks."""
    above = sch.parent
    while above is not None:
        if is_wrapped(above.mod):
            raise ConflictError(
                f"{where}: the forward of {above.path!r} above it is wrapped, {above.conflict('checkpoint')};"
                " no module above a cut may be wrapped"
            )
        if not isinstance(above.mod, TracedModule):
            if not _is_never_called(above):
                raise TracingError(
                    f"{where}: {above.path!r} above it is not traced; call"
                    f" trace_until({sch.parent.path if sch.parent else ''!r}) on the root first"
                )
        elif has_hooks(above.mod):
            raise ConflictError(
                f"{where}: {above.path!r} above it has hooks, which stages do not run,"
                f" {above.conflict('sync')}; no module above a cut may have hooks"
            )
        above = above.parent


def _is_never_called(sch: "Schedule") -> bool:
    """Return True for a container whose modules a traced owner calls directly by their paths."""
    owner = sch.parent
    while owner is not None and not isinstance(owner.mod, TracedModule):
        owner = owner.parent
    if owner is None or is_wrapped(owner.mod):
        return False
    return calls_inside(graph_of(owner, "cut_pipeline_stage"), owner.path, sch.path)


# --- Execution ---
#
# Stage s runs in process s modulo the number of processes: one stage each, or several, interleaved. In a V,
# the second half of the stages runs backwards through the processes, so that the last one is with the first.


@dataclass(frozen=True, slots=True)
class _Order:
    """An order of micro-batches: its class of torch, the stages per process, and how they are placed."""

    kind: str
    is_single: bool = False
    needs_rounds: bool = False
    is_v: bool = False
    is_split: bool = False


_ORDERS = {
    "gpipe": _Order("ScheduleGPipe", is_single=True),
    "1f1b": _Order("Schedule1F1B", is_single=True),
    "interleaved": _Order("ScheduleInterleaved1F1B", needs_rounds=True),
    "zero-bubble": _Order("ScheduleInterleavedZeroBubble", needs_rounds=True, is_split=True),
    "zero-bubble-v": _Order("ScheduleZBVZeroBubble", is_v=True, is_split=True),
    "dual-pipe-v": _Order("ScheduleDualPipeV", is_v=True, is_split=True),
}
ORDERS = tuple(_ORDERS)
"""Orders of micro-batches; the latter three give gradients of weights later than those of activations."""


def stage_owners(n_stages: int, n_processes: int, schedule: str) -> list[int]:
    """Return the process of each stage."""
    rounds = [divmod(stage, n_processes) for stage in range(n_stages)]
    is_v = _ORDERS[schedule].is_v
    return [n_processes - 1 - place if is_v and count % 2 else place for count, place in rounds]


@dataclass(frozen=True, slots=True)
class _Structure:
    """Nested values without their tensors, which are sent: other leaves, and the positions of tensors."""

    spec: TreeSpec
    leaves: tuple[Any, ...]
    is_tensor: tuple[bool, ...]

    @classmethod
    def of(cls, values: Any) -> tuple["_Structure", tuple[Tensor, ...]]:
        """Split values into their structure and their tensors."""
        leaves, spec = tree_flatten(values)
        places = tuple(isinstance(leaf, Tensor) for leaf in leaves)
        others = tuple(None if place else leaf for leaf, place in zip(leaves, places, strict=True))
        return cls(spec, others, places), tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))

    def filled(self, tensors: Tensor | Sequence[Tensor]) -> Any:
        """Rebuild the values from tensors."""
        rest = iter([tensors] if isinstance(tensors, Tensor) else tensors)
        pairs = zip(self.leaves, self.is_tensor, strict=True)
        return tree_unflatten([next(rest) if place else leaf for leaf, place in pairs], self.spec)


class _TensorStage(nn.Module):
    """A stage that takes and returns only tensors, as the pipeline runtime of torch requires."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.takes: _Structure | None = None
        self.gives: _Structure | None = None

    def forward(self, *tensors: Tensor, **named: Any) -> tuple[Tensor, ...]:
        """Run the stage; named values are inputs of the model, which the first stage alone takes."""
        args = tensors if self.takes is None else self.takes.filled(tensors)
        gives, results = _Structure.of(self.module(*args, **(named if self.takes is None else {})))
        if self.gives is not None and gives.is_tensor != self.gives.is_tensor:
            n_now, n_before = (sum(structure.is_tensor) for structure in (gives, self.gives))
            raise BuildError(
                f"a stage returned {n_now} tensors, and {n_before} before; every micro-batch must give the"
                " same number: pass anything that depends on the samples, such as a mask, as an input"
            )
        self.gives = gives
        # The runtime receives into contiguous buffers.
        return tuple(tensor.contiguous() for tensor in results)

    def output(self, tensors: Tensor | Sequence[Tensor]) -> Any:
        """Return the result of the stage for these tensors."""
        return tensors if self.gives is None else self.gives.filled(tensors)


class Pipeline:
    """The stages of this process, and the pipeline schedule that runs them with those of the others.

    Parameters
    ----------
    parts
        All stages; this process runs those that `stage_owners` gives it.
    group
        The processes of the pipeline, in order.
    lines
        The processes of all pipelines, one sequence per pipeline, in that order.
    replicas
        Processes with the same stages, over which gradients are averaged; None without replicas.
    n_microbatches
        Number of micro-batches per step.
    loss_fn
        Function of output and target that returns the mean over samples; None for forward passes only.
    schedule
        One of `ORDERS`.

    Attributes
    ----------
    module
        The stage of this process, or a list of its stages.
    """

    def __init__(
        self,
        parts: Partition,
        group: dist.ProcessGroup,
        lines: Sequence[Sequence[int]],
        replicas: dist.ProcessGroup | None,
        n_microbatches: int,
        loss_fn: Callable[..., Tensor] | None,
        schedule: str,
    ) -> None:
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._group, self._replicas = group, replicas
        self._count, self._parts = len(parts.stages), parts
        self._place = stage_owners(self._count, self._size, schedule)
        self._own = [index for index, place in enumerate(self._place) if place == self._rank]
        self.module = own_stages(parts, group, schedule)
        self.ties = parts.ties
        self._n_microbatches, self._loss_fn, self._kind = n_microbatches, loss_fn, schedule
        self._is_first, self._is_last = self._rank == 0, self._count - 1 in self._own
        self._schedule: Any = None
        self._handed: list[Any] = [None]  # by a stage to the next one in the same process
        self._owners = list(self._groups_of_ties(lines))

    def _groups_of_ties(
        self, lines: Sequence[Sequence[int]]
    ) -> Iterator[tuple[nn.Parameter, dist.ProcessGroup]]:
        """Yield the tied parameters of this process with the processes that share each.

        Stages of one process have the same parameter, whose gradient is that of all of them.
        """
        # new_group is collective: every process creates the groups of all pipelines, in the same order.
        groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for tie in self.ties:
            places = sorted({self._place[stage] for stage in tie.paths})
            for line in lines if len(places) > 1 else ():
                ranks = tuple(line[place] for place in places)
                groups[ranks] = groups.get(ranks) or dist.new_group(list(ranks))
                if dist.get_rank() in ranks:
                    stage = next(stage for stage in self._own if stage in tie.paths)
                    yield self._parts.stages[stage].get_parameter(tie.paths[stage]), groups[ranks]

    def step(
        self, *args: Any, target: Tensor | None = None, losses: list[Tensor] | None = None, **kwargs: Any
    ) -> Any:
        """Run all micro-batches forward and backward; gradients accumulate.

        Parameters
        ----------
        args, kwargs
            Inputs of the model, used by the first stage.
        target
            Targets of the loss, used by the last stage.
        losses
            List to which the last stage appends the loss of each micro-batch.

        Returns
        -------
        The output of the model in the last stage, None in the others.
        """
        if self._schedule is None:
            self._schedule = self._prepare(args, kwargs)
        parameters = list(self.module.parameters())
        before = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None  # so that only gradients of this step are summed and averaged
        run, stage = self._schedule
        if self._is_last:
            inputs, named = (args, kwargs) if self._is_first else ((), {})
            result = stage.output(run.step(*inputs, target=target, losses=losses, **named))
        else:
            result = run.step(*args, **kwargs) if self._is_first else run.step()
        if self._loss_fn is not None:
            for parameter in parameters:  # once each, also where stages share one
                if parameter.grad is not None:
                    parameter.grad /= self._n_microbatches
            self._reduce_gradients()
        for parameter, gradient in zip(parameters, before, strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else gradient + parameter.grad
        return result

    def _reduce_gradients(self) -> None:
        """Sum the gradients of tied parameters over their stages, then average all over the replicas."""
        for parameter, owners in self._owners:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=owners)
        if self._replicas is None:
            return
        n_replicas = dist.get_world_size(self._replicas)
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=self._replicas)
                parameter.grad /= n_replicas

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one micro-batch through all stages to learn shapes, and restore the buffers."""
        buffers = [(buffer, buffer.clone()) for buffer in self.module.buffers()]
        stages = {index: _TensorStage(self._parts.stages[index]) for index in self._own}
        trials = {index: self._trial_pass(index, stage, args, kwargs) for index, stage in stages.items()}
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        # A process that raised alone would block the others.
        failures: list[list[str]] = [[] for _ in range(self._size)]
        own = [failure for *_, failure in trials.values() if failure is not None]
        dist.all_gather_object(failures, own, group=self._group)
        if reported := [text for texts in failures for text in texts]:
            raise BuildError(reported[0])
        # Imported here, because the runtime loads the compiler of torch, which takes long.
        from torch.distributed import pipelining

        from makespan.slapo.split_stages import SplitStage

        order = _ORDERS[self._kind]
        made = SplitStage if order.is_split else pipelining.PipelineStage
        runs = [
            made(
                stages[index], index, self._count, self._device(), tuple(inputs), tuple(results),
                group=self._group,
            )
            for index, (inputs, results, _) in trials.items()
        ]  # fmt: skip
        last, user = stages[self._own[-1]], self._loss_fn

        def loss(outputs: Any, target: Any) -> Tensor:
            return user(last.output(outputs), target) if user else torch.zeros(())

        run: Any = runs[0] if order.is_single else runs
        kind = getattr(pipelining, order.kind)
        return kind(run, self._n_microbatches, loss if user else None, scale_grads=False), last

    def _trial_pass(
        self, index: int, stage: _TensorStage, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Any], Sequence[Tensor], str | None]:
        """Return inputs, outputs and error of a stage; send the outputs to the next stage."""
        inputs, named, failure = [self._first_microbatch(value) for value in args], {}, None
        results: Sequence[Tensor] = ()
        ranks = dist.get_process_group_ranks(self._group)
        if index == 0:
            named = {name: self._first_microbatch(value) for name, value in kwargs.items()}
        else:
            if self._place[index - 1] == self._rank:
                received = self._handed
            else:
                received = [None]
                dist.recv_object_list(received, src=ranks[self._place[index - 1]], group=self._group)
            stage.takes, sent = received[0]
            inputs = [tensor.to(self._device()).requires_grad_(needs) for tensor, needs in sent]
        if index == 0 or stage.takes is not None:
            try:
                with torch.random.fork_rng():
                    results = stage(*inputs, **named)
            except Exception as error:  # noqa: BLE001 - any error must reach the other stages
                failure = f"stage {index} of {self._count}: {error}"
        is_last = index == self._count - 1
        if not is_last and failure is None and stage.gives is not None:
            failure = self._object_error(index, stage.gives)
        if not is_last:  # even after a failure, as the next stage waits
            # Through the host: a tensor of a GPU would be unpickled onto the GPU with the same index.
            sent = [(tensor.detach().cpu(), tensor.requires_grad) for tensor in results]
            self._handed = [(stage.gives, sent)]
            if self._place[index + 1] != self._rank:
                dist.send_object_list(self._handed, dst=ranks[self._place[index + 1]], group=self._group)
        if failure is None and self._loss_fn is not None and _ORDERS[self._kind].is_split:
            from makespan.slapo.split_stages import why_not_split  # see _prepare

            reason = why_not_split(stage, results, inputs)
            failure = reason and f"stage {index} of {self._count}: {reason}; expected schedule 1f1b"
        return inputs, results, failure

    def _object_error(self, index: int, gives: "_Structure") -> str | None:
        """Return an error if the stage passes on an object that holds tensors, such as a cache."""
        for leaf in filter(is_object, gives.leaves):
            if any(isinstance(part, Tensor) for part in tree_flatten(expanded(leaf))[0]):
                return (
                    f"stage {index} of {self._count} passes on a {type(leaf).__name__}, whose tensors "
                    "are not sent; stages may pass on tensors only, so no cache (use_cache=False)"
                )
        return None

    def _device(self) -> torch.device:
        return next((parameter.device for parameter in self.module.parameters()), torch.device("cpu"))

    def _first_microbatch(self, value: Any) -> Any:
        return value.chunk(self._n_microbatches)[0] if isinstance(value, Tensor) else value


def stages_of(
    sch: "Schedule", mesh: DeviceMesh | None, is_shared: bool
) -> tuple[Partition, dist.ProcessGroup]:
    """Return the stages of a schedule, and the group with one process per stage."""
    if not dist.is_initialized():
        raise ArgumentError("build: pipeline without a process group; call init_process_group first")
    names = () if mesh is None else mesh.mesh_dim_names or ()
    if "pp" not in names and (mesh is not None or is_shared):
        raise ArgumentError("build: pipeline without pp; expected a mesh with a dimension named pp")
    group = dist.group.WORLD if mesh is None else mesh.get_group("pp")
    parts = partition(sch)
    n_processes = 0 if group is None else dist.get_world_size(group)
    if group is None or len(parts.stages) % n_processes:
        raise BuildError(
            f"build: {len(parts.stages)} stages for {n_processes} processes; expected one process per stage, "
            "or the same number of stages in each process"
        )
    return parts, group


def own_stages(parts: Partition, group: dist.ProcessGroup, schedule: str) -> nn.Module:
    """Return the stage of this process, or a list of its stages."""
    places, rank = stage_owners(len(parts.stages), dist.get_world_size(group), schedule), dist.get_rank(group)
    own = [stage for stage, place in zip(parts.stages, places, strict=True) if place == rank]
    return own[0] if len(own) == 1 else nn.ModuleList(own)


def check_order(sch: "Schedule", options: Mapping[str, Any]) -> str:
    """Return the order of micro-batches: that of the options, or of a plan; reject one that is not known."""
    schedule: Any = options.get("schedule", sch.metadata.order)
    if schedule not in ORDERS:
        raise ArgumentError(f"build: schedule is {schedule!r}; expected one of {', '.join(ORDERS)}")
    return str(schedule)


def _check_count(schedule: str, count: Any, n_stages: int, n_processes: int) -> None:
    """Reject a number of micro-batches, or of stages per process, that an order cannot have."""
    order, found = _ORDERS[schedule], f"{n_stages} stages for {n_processes} processes"
    if n_stages > n_processes and order.is_single:
        raise BuildError(
            f"build: {found} and schedule {schedule}; expected one process per stage, or schedule interleaved"
        )
    if order.needs_rounds and not order.is_split and not 1 < n_processes < n_stages:
        raise BuildError(
            f"build: {found} and schedule {schedule}; expected several processes with several stages each"
        )
    if order.needs_rounds and n_processes == 1 < n_stages:
        raise BuildError(f"build: {found} and schedule {schedule}; expected several processes, or one stage")
    if order.is_v and n_stages != 2 * n_processes:
        raise BuildError(f"build: {found} and schedule {schedule}; expected two stages per process")
    least = {"gpipe": 1, "dual-pipe-v": n_stages}.get(schedule, n_processes)
    if not isinstance(count, int) or count < least:
        raise ArgumentError(
            f"build: n_microbatches is {count!r}; expected at least {least} for {n_stages} stages of "
            f"{schedule}"
            if least > 1
            else f"build: n_microbatches is {count!r}; expected an integer >= 1"
        )
    if order.needs_rounds and count % (count // n_processes):
        raise ArgumentError(
            f"build: n_microbatches is {count}; expected a number that rounds of {n_processes} or more share "
            f"evenly, such as {count // n_processes * n_processes}, for schedule {schedule}"
        )


def _prepare_split(kind: str, stage: nn.Module) -> None:
    """Let layers that are recomputed run again once for both parts; reject what cannot be split."""
    for path, module in stage.named_modules():
        if wrapped_forward(module, Compiled):
            raise BuildError(
                f"build: {path!r} is compiled, and compiled code gives all gradients at once, not those of "
                "weights later; leave it uncompiled, or use schedule 1f1b"
            )
        wrapper = wrapped_forward(module, Checkpointed)
        if isinstance(wrapper, Checkpointed):
            wrapper.keeps_second_pass = True
    from torch.distributed import pipelining  # see Pipeline._prepare

    if not hasattr(pipelining, kind) or not hasattr(pipelining.PipelineStage, "backward_maybe_with_nosync"):
        raise BuildError(f"build: torch {torch.__version__} has no {kind} with passes of its stages in parts")


def build_pipeline(
    sch: "Schedule", mesh: DeviceMesh | None, options: Mapping[str, Any], is_shared: bool
) -> tuple[nn.Module, Pipeline]:
    """Return the stages of this process and the pipeline that runs them."""
    parts, group = stages_of(sch, mesh, is_shared)
    names = () if mesh is None else mesh.mesh_dim_names or ()
    replicas = mesh.get_group("dp") if mesh is not None and "dp" in names else None
    schedule = check_order(sch, options)
    count: Any = options.get("n_microbatches")
    n_processes = dist.get_world_size(group)
    _check_count(schedule, count, len(parts.stages), n_processes)
    if _ORDERS[schedule].is_v and options.get("loss_fn") is None:
        raise ArgumentError(
            f"build: schedule {schedule} without loss_fn; forward passes alone need 1f1b, or zero-bubble"
        )
    lines = [dist.get_process_group_ranks(group)]
    if mesh is not None:
        lines = mesh.mesh.movedim(names.index("pp"), -1).reshape(-1, n_processes).tolist()
    places = stage_owners(len(parts.stages), n_processes, schedule)
    record_owners(sch, Ranks(dist.get_rank(group), n_processes, group), parts.stages, places)
    engine = Pipeline(parts, group, lines, replicas, count, options.get("loss_fn"), schedule)
    refuse_plain_clipping(engine.module.parameters(), CLIPPING)
    if _ORDERS[schedule].is_split:
        _prepare_split(_ORDERS[schedule].kind, engine.module)
    return engine.module, engine
