"""Run the original and the scheduled model on the same inputs and random numbers, and compare the results.

The modes and random generators of the models that are given do not change.
"""

import functools
import inspect
import math
import random
import sys
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any, TypeAlias, TypeVar
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree  # there is no public name for it

from makespan.slapo.comparison import (
    GRADIENT,
    OUTPUT,
    CallRecord,
    Comparison,
    Divergence,
    Tolerance,
    compare,
    first_divergences,
    is_part,
    recorded_calls,
    size_of,
    sums_agree,
)
from makespan.slapo.errors import ArgumentError, KindError, short_repr
from makespan.slapo.graphs import copied_object, expanded
from makespan.slapo.layouts import PARTIAL, Ranks, gather_objects, gather_over, sharding_of
from makespan.slapo.pipelining import Partition, partition
from makespan.slapo.schedule import Schedule, create_schedule
from makespan.slapo.weights import Weights, copy_module

# --- One forward and one backward pass ---

Inputs: TypeAlias = "Tensor | Sequence[Any] | Mapping[str, Any] | Callable[[torch.Generator], Any]"
LossFunction: TypeAlias = Callable[[Any], Tensor]


@dataclass(frozen=True, slots=True)
class Call:
    """Arguments of a forward pass, names of the positional ones, and names of those that need a gradient."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    names: tuple[str, ...] = ()
    wanting: frozenset[str] | None = None

    def leaves(self) -> dict[str, Tensor]:
        """Return the tensors among the arguments by name."""
        return named_tensors(self.named())

    def named(self) -> dict[str, Any]:
        """Return all arguments by name."""
        return dict(zip(self.names, self.args, strict=True)) | self.kwargs

    def fresh(self, device: torch.device) -> "Call":
        """Return a call with copies; floating-point ones, or only those in ``wanting``, need a gradient."""

        def copied(name: str, value: Any) -> Any:
            wants = self.wanting is None or name in self.wanting

            def copy(leaf: Any) -> Any:
                if not isinstance(leaf, Tensor):
                    return copied_object(leaf)  # such as a cache, which each model fills for itself
                new = leaf.detach().to(device, copy=True)
                return new.requires_grad_(wants and (new.is_floating_point() or new.is_complex()))

            return pytree.tree_map(copy, value)

        args = tuple(copied(name, value) for name, value in zip(self.names, self.args, strict=True))
        kwargs = {name: copied(name, value) for name, value in self.kwargs.items()}
        return Call(args, kwargs, self.names, self.wanting)


@dataclass(slots=True)
class Outcome:
    """Result of a forward pass.

    ``held`` names the tensors inside objects, such as a cache: a process may hold only its part of them, and
    no gradient starts from them.
    """

    leaves: dict[str, Tensor]
    passed: dict[str, Tensor]
    structure: pytree.TreeSpec
    tensors: dict[str, Tensor]
    loss: Tensor | None = None
    others: dict[str, Any] = field(default_factory=dict)
    held: frozenset[str] = frozenset()

    def changed_inputs(self) -> list[str]:
        """Return the names of arguments that the model has changed in place."""
        return [
            name
            for name, leaf in self.leaves.items()
            if not torch.equal(self.passed[name].detach().nan_to_num(), leaf.detach().nan_to_num())
        ]


def call_from(inputs: Inputs, seed: int) -> Call:
    """Return the call for a user's inputs: positional or keyword arguments, or a function that draws them."""
    drawn = inputs(torch.Generator().manual_seed(seed)) if callable(inputs) else inputs
    if isinstance(drawn, Tensor):
        return Call((drawn,), {})
    if isinstance(drawn, Mapping) and all(isinstance(name, str) for name in drawn):
        return Call((), dict(drawn))
    if isinstance(drawn, Sequence) and not isinstance(drawn, str):
        return Call(tuple(drawn), {})
    raise KindError(
        f"Verify: example inputs are {type(drawn).__name__}; expected a tensor, a sequence of positional "
        "arguments, a mapping of keyword arguments, or a function of a generator that returns one of these"
    )


def checked_call(model: nn.Module, call: Call, path: str, wanting: Sequence[str] | None) -> Call:
    """Name the arguments; reject those that the forward pass does not take."""
    signature = inspect.signature(model.forward)
    try:
        signature.bind(*call.args, **call.kwargs)
    except TypeError as error:
        raise KindError(
            f"Verify of {path!r}: the example inputs do not fit {type(model).__name__}.forward"
            f"{signature}: {error}"
        ) from None
    known = [
        parameter.name
        for parameter in signature.parameters.values()
        if parameter.kind is not parameter.VAR_POSITIONAL
    ]
    names = tuple([*known, *map(str, range(len(call.args)))][: len(call.args)])
    is_list = isinstance(wanting, Collection) and not isinstance(wanting, str)
    if wanting is not None and not (is_list and set(wanting) <= {*names, *call.kwargs}):
        known_names = ", ".join([*names, *call.kwargs])
        raise ArgumentError(
            f"Verify of {path!r}: input_grads is {wanting!r}; expected names among {known_names}"
        )
    return Call(call.args, call.kwargs, names, None if wanting is None else frozenset(wanting))


def named_tensors(tree: Any) -> dict[str, Tensor]:
    """Return the tensors in a tree by their path in it."""
    leaves, _ = pytree.tree_flatten_with_path(tree)
    return {_tensor_name(place): leaf for place, leaf in leaves if isinstance(leaf, Tensor)}


def _tensor_name(place: tuple[Any, ...]) -> str:
    if not place:
        return "itself"
    first, others = place[:1], place[1:]
    return pytree.keystr(first).strip("[].'") + pytree.keystr(others).replace("'", "")


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch, Python and NumPy; restore the generators at the end."""
    devices = [device] if device.type == "cuda" else []
    of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - models may draw from it
    try:
        with torch.random.fork_rng(devices):
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)  # noqa: NPY002
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002


@contextmanager
def without_dropout() -> Iterator[None]:
    """Make dropout in training mode neither drop values nor draw random numbers.

    Otherwise models could not be compared, since the dropped values depend on the order of all draws and on
    the split of tensors. The functions are replaced rather than intercepted, because no interception of torch
    reaches the recomputation in a backward pass. Compiled code runs eagerly in the block.
    """
    compiler = sys.modules.get("torch._dynamo")  # loaded only if compiled code has run
    with ExitStack() as stack:
        if compiler is not None:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for space, rates in ((torch.nn.functional, _RATES), (torch, _RATES), (torch._VF, _RATES_OF_LAYERS)):
            for name, place in rates.items():
                if callable(dropping := getattr(space, name, None)):
                    stack.enter_context(mock.patch.object(space, name, _at_rate_of_zero(dropping, place)))
        yield


_RATES: Mapping[str, tuple[str, int | None]] = {
    name: ("p", 1)
    for plain in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout",
                  "feature_alpha_dropout", "native_dropout")
    for name in (plain, f"{plain}_")
} | {
    "scaled_dot_product_attention": ("dropout_p", 4),
    "multi_head_attention_forward": ("dropout_p", 10),
}  # fmt: skip
"""Functions with dropout: name and position of the rate."""
_RATES_OF_LAYERS: Mapping[str, tuple[str, int | None]] = dict.fromkeys(
    ("lstm", "gru", "rnn_tanh", "rnn_relu"), ("dropout", None)
)
"""The same for recurrent layers; their only argument of type float is the rate."""


def _at_rate_of_zero(dropping: Callable[..., Any], rate: tuple[str, int | None]) -> Callable[..., Any]:
    name, place = rate

    @functools.wraps(dropping)
    def keep_all(*args: Any, **kwargs: Any) -> Any:
        if place is None:
            return dropping(
                *(0.0 if isinstance(argument, float) else argument for argument in args), **kwargs
            )
        if len(args) > place:
            return dropping(*args[:place], 0.0, *args[place + 1 :], **kwargs)
        return dropping(*args, **kwargs | {name: 0.0})

    return keep_all


def run_forward(
    model: nn.Module, call: Call, seed: int, device: torch.device, loss_fn: LossFunction | None
) -> Outcome:
    """Run a model forward on copies of the arguments."""
    fresh_call = call.fresh(device)
    # Clones, because a model may change its inputs in place, which autograd forbids for a leaf.
    passed = pytree.tree_map_only(Tensor, Tensor.clone, (fresh_call.args, fresh_call.kwargs))
    seen = Call(passed[0], passed[1], fresh_call.names)
    with seeded(seed, device), torch.enable_grad():
        outputs = model(*passed[0], **passed[1])
        loss = None if loss_fn is None else loss_fn(outputs)
    direct = named_tensors(outputs)
    contents = pytree.tree_map(expanded, outputs)
    leaves, structure = pytree.tree_flatten_with_path(contents)
    others = {_tensor_name(place): leaf for place, leaf in leaves if not isinstance(leaf, Tensor)}
    tensors = named_tensors(contents)
    held = frozenset(tensors.keys() - direct.keys())
    return Outcome(fresh_call.leaves(), seen.leaves(), structure, tensors, loss, others, held)


def run_backward(outcome: Outcome, seed: int, device: torch.device) -> None:
    """Run backward from the loss, or from all outputs with random gradients."""
    if outcome.loss is not None:
        ends = {"loss": outcome.loss}
    else:
        results = {name: tensor for name, tensor in outcome.tensors.items() if name not in outcome.held}
        ends = {name: tensor for name, tensor in results.items() if tensor.requires_grad}
    starts = []
    for name, end in ends.items():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        drawn = torch.randn(end.shape, generator=generator, dtype=torch.float32)
        starts.append(torch.ones_like(end) if outcome.loss is not None else drawn.to(end))
    if ends:
        with seeded(seed, device):
            torch.autograd.backward(list(ends.values()), starts)


# --- Pipeline stages in one process ---

_CUT = "cut_pipeline_stage"


class SequentialStages(nn.Module):
    """Stages that one process runs in sequence; each gets the tensors that a pipeline would send."""

    def __init__(self, parts: Partition) -> None:
        super().__init__()
        self.stages = nn.ModuleList(parts.stages)
        self._parts = parts

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run all stages."""
        return self._parts.run(*args, **kwargs)

    def stage_of(self, path: str) -> int | None:
        """Return the stage in which a module of the whole model runs, None if several share it."""
        holders = []
        for index, stage in enumerate(self.stages):
            try:
                if path and stage.get_submodule(path) is not None:
                    holders.append(index)
            except AttributeError:
                pass
        return holders[0] if len(holders) == 1 else None


def staged_copy(sch: "Schedule", copied: nn.Module) -> nn.Module:
    """Return the stages of a copy of the model, or the copy itself if the schedule cuts none."""
    if sch.parent is not None or not sch.metadata.slots[_CUT]:
        return copied
    cut_copy = create_schedule(copied, group=sch.group)
    cut_copy.metadata.slots[_CUT] = list(sch.metadata.slots[_CUT])
    return SequentialStages(partition(cut_copy))


# --- Passes of both models ---

MARGIN, ROUNDING_UNITS = 10.0, 4.0
"""Tolerated multiple of the measured noise, and rounding units by which weights change to measure it."""
_ROUNDING = 1e-2
"""Share of the median size of gradients below which a whole gradient may be rounding error."""
Tolerances = Mapping[str, Callable[[torch.dtype], Tolerance]]
_Value = TypeVar("_Value")


@dataclass
class Passes:
    """Forward and backward passes of both models on one call.

    Parameters
    ----------
    weights, call
        The models and their arguments.
    scheduled
        The scheduled model, or its stages one after the other.
    ranks, device, seed
        Processes that share the scheduled model, device, and seed of all random numbers.
    tolerances
        Tolerances by type, of outputs and of gradients.
    loss_fn, check_grad
        Loss from which gradients start, and True to compare gradients.
    suffix
        Suffix of the kind of every comparison, such as the mode of the models.
    everyone
        Groups of processes that take part, if there are others beside ``ranks``, as those that share experts.
    noise
        Change of a tensor by rounding alone, by its kind and name, relative to its largest value.
    """

    weights: Weights
    call: Call
    scheduled: nn.Module
    ranks: Ranks
    device: torch.device
    seed: int
    tolerances: Tolerances
    loss_fn: LossFunction | None
    check_grad: bool
    suffix: str = ""
    everyone: Sequence[Ranks] = ()
    noise: Mapping[tuple[str, str], float] = field(default_factory=dict)
    comparisons: list[Comparison] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def reference(self) -> Outcome:
        """Run the original model and return its outcome, with gradients."""
        expected = self._forward(self.weights.original)
        if self.check_grad:
            self._backward(expected)
        return expected

    def run(self, expected: Outcome) -> bool:
        """Run the scheduled model and compare it with the reference; return True if all processes agree."""
        buffers = {name: buffer.clone() for name, buffer in self.weights.original.named_buffers()}
        try:
            actual = self._forward(self.scheduled)
            self._compare_outputs(actual, expected)
            if self._all_agree() and self.check_grad:
                self._compare_gradients(actual, expected)
        except Exception as error:  # noqa: BLE001 - whatever a model raises
            self.faults.append(f"the scheduled model raises {type(error).__name__}: {error}")
        self._compare_buffers(buffers)
        self._clear()
        return self._all_agree()

    def _forward(self, model: nn.Module) -> Outcome:
        return run_forward(model, self.call, self.seed, self.device, self.loss_fn)

    def _backward(self, outcome: Outcome) -> None:
        run_backward(outcome, self.seed, self.device)

    def _all_agree(self) -> bool:
        agrees = not self.faults and not any(comparison.fault for comparison in self.comparisons)
        return all(self.gathered(agrees))

    def gathered(self, value: _Value) -> list[_Value]:
        """Return the values of all processes that take part."""
        return gather_over(self.everyone or (self.ranks,), value)

    def _clear(self) -> None:
        for model in (self.weights.original, self.scheduled):
            for parameter in model.parameters():
                parameter.grad = None

    def _tolerance(self, kind: str, dtype: torch.dtype) -> Tolerance:
        return self.tolerances[GRADIENT if "gradient" in kind else OUTPUT](dtype)

    def _compare(
        self, kind: str, name: str, actual: Tensor, expected: Tensor, size: float | None = None,
        source: str | None = None,
    ) -> None:  # fmt: skip
        tolerance = self._tolerance(kind, expected.dtype)
        if noise := self.noise.get((kind, name if source is None else source), 0.0):
            tolerance = Tolerance(tolerance.rtol, tolerance.atol + MARGIN * noise)
        self.comparisons.append(compare(kind + self.suffix, name, actual, expected, tolerance, size))

    def _compare_outputs(self, actual: Outcome, expected: Outcome) -> None:
        if actual.structure != expected.structure:
            structures = [short_repr(str(outcome.structure)) for outcome in (actual, expected)]
            self.faults.append(f"the output is {structures[0]}; expected {structures[1]}")
            return
        for name, tensor in expected.tensors.items():
            output = actual.tensors.get(name)
            if output is None:
                self.faults.append(f"output {name} is {short_repr(actual.others[name])}; expected a tensor")
            elif not (name in expected.held and self._is_local_part(output, tensor)):
                self._compare("output", name, output, tensor)
        if expected.loss is not None and actual.loss is not None:
            self._compare("loss", "of the outputs", actual.loss, expected.loss)
        for name, value in expected.others.items():
            other = actual.tensors.get(name, actual.others.get(name))
            if not _is_same_value(other, value):
                self.faults.append(f"output {name} is {short_repr(other)}; expected {short_repr(value)}")
        changed = sorted({*actual.changed_inputs()} ^ {*expected.changed_inputs()})
        self.faults += [f"input {name} is changed in place by one model only" for name in changed]

    def _is_local_part(self, actual: Tensor, expected: Tensor) -> bool:
        """Return True if a tensor in an object is the part of this process, such as the keys of its heads."""
        if actual.dtype != expected.dtype or actual.dim() != expected.dim():
            return False
        axes = [axis for axis in range(actual.dim()) if actual.shape[axis] != expected.shape[axis]]
        if len(axes) != 1 or expected.shape[axes[0]] != self.ranks.size * actual.shape[axes[0]]:
            return False
        tolerance = self.tolerances[OUTPUT](expected.dtype)
        return is_part(actual, expected, axes[0], self.ranks, tolerance)

    def _compare_gradients(self, actual: Outcome, expected: Outcome) -> None:
        original = dict(self.weights.original.named_parameters())
        sizes = {
            name: size_of(parameter.grad)
            for name, parameter in original.items()
            if parameter.grad is not None
        }
        floor = _ROUNDING * median(sizes.values()) if sizes else 0.0
        arrived: set[str] = set()

        def arrive(name: str, parameter: Tensor) -> None:
            source, shard = self.weights.origin[name]
            gradient, whole = parameter.grad, original[source].grad
            # Compared and dropped as it arrives: the gradients of both models never need memory at once.
            parameter.grad = None
            arrived.add(name)
            if gradient is None:
                return
            if whole is None:
                whole = torch.zeros_like(original[source])
            part = whole if shard is None else shard.part_of(whole)
            size = max(sizes.get(source, 0.0), floor)
            self._compare("parameter gradient", name, gradient, part, size, source)

        handles = []
        for name, scheduled_parameter in self.weights.scheduled.named_parameters():
            if name in self.weights.origin and scheduled_parameter.requires_grad:
                register: Callable[..., Any] = scheduled_parameter.register_post_accumulate_grad_hook
                handles.append(register(partial(arrive, name)))
        try:
            self._backward(actual)
        finally:
            for handle in handles:
                handle.remove()
        for name, (source, _) in self.weights.origin.items():
            if name not in arrived and sizes.get(source, 0.0) > floor:
                fault = f"gets no gradient; expected one with values up to {sizes[source]:.3g}"
                kind = f"parameter gradient{self.suffix}"
                self.comparisons.append(Comparison(kind, name, math.nan, math.nan, fault))
        for name, leaf in expected.leaves.items():
            if leaf.grad is not None:
                gradient = actual.leaves[name].grad
                if gradient is None:
                    gradient = torch.zeros_like(leaf)
                self._compare("input gradient", name, gradient, leaf.grad)

    def _compare_buffers(self, expected: Mapping[str, Tensor]) -> None:
        """Compare buffers after a forward pass, such as running means."""
        for name, buffer in self.weights.scheduled.named_buffers():
            shard, whole = self.weights.buffers.get(name), expected.get(name)
            if whole is not None and (shard is not None or whole.shape == buffer.shape):
                self._compare("buffer", name, buffer, whole if shard is None else shard.part_of(whole))

    def buffers(self) -> list[tuple[nn.Module, str, Tensor, Tensor]]:
        """Return the buffers of both models with their owners and names, each with a copy."""
        models = (self.weights.original, self.scheduled)
        modules = {id(module): module for model in models for module in model.modules()}
        return [
            (module, name, buffer, buffer.detach().clone())
            for module in modules.values()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    def measured_noise(self) -> dict[tuple[str, str], float]:
        """Return the change of each result of the original model if its weights change by rounding errors.

        Batch norm over a few samples divides by nearly zero, so that another order of summation changes the
        result visibly; no fixed tolerance distinguishes that from a fault.
        """
        original = self.weights.original
        generator = torch.Generator().manual_seed(self.seed)

        def moved(tensor: Tensor) -> Tensor:
            values = tensor.detach().clone()
            if not isinstance(tensor, nn.Parameter):
                return values
            if values.is_floating_point():
                unit = ROUNDING_UNITS * torch.finfo(values.dtype).eps
                drawn = 2 * torch.rand(values.shape, generator=generator, dtype=torch.float32) - 1
                values *= 1 + unit * drawn.to(values)
            return nn.Parameter(values, tensor.requires_grad)

        other = copy_module(original, moved)
        results = []
        for model in (original, other):
            outcome = self._forward(model)
            if self.check_grad:
                self._backward(outcome)
            gradients = {
                name: parameter.grad
                for name, parameter in model.named_parameters()
                if parameter.grad is not None
            }
            inputs = {name: leaf.grad for name, leaf in outcome.leaves.items() if leaf.grad is not None}
            tensors = {
                "output": outcome.tensors,
                "loss": {} if outcome.loss is None else {"of the outputs": outcome.loss},
                "parameter gradient": gradients,
                "input gradient": inputs,
                "buffer": {name: buffer.clone() for name, buffer in model.named_buffers()},
            }
            results.append(
                {(kind, name): tensor for kind, all_of in tensors.items() for name, tensor in all_of.items()}
            )
        expected, actual = results
        noise = {}
        for key, expected_tensor in expected.items():
            if expected_tensor.is_floating_point() and (size := size_of(expected_tensor)) and key in actual:
                noise[key] = size_of(actual[key].detach() - expected_tensor.detach()) / size
        self._clear()
        return noise

    def divergences(self, synced: Mapping[str, Sequence[str]]) -> list[Divergence]:
        """Run both models once more, and return the modules at which they diverge."""
        with recorded_calls(self.weights.original) as expected:
            self._run_recorded(self.weights.original, expected)
        with recorded_calls(self.weights.scheduled) as actual:
            stopped: tuple[str, int, str] | None = None
            try:
                self._run_recorded(self.scheduled, actual)
            except Exception:  # noqa: BLE001 - as it did before
                key = actual.running[-1] if actual.running else ("", 0)
                stopped = (*key, actual.calls[key].module if key in actual.calls else "")
        # An error comes first: that of the first process that stopped, and all processes that stopped there.
        stops = gather_objects(self.ranks, stopped)
        divergences: list[Divergence] = []
        if (stop := next(filter(None, stops), None)) is not None:
            path, call, module = stop
            stopped_ranks = tuple(rank for rank, other in enumerate(stops) if other == stop)
            divergences.append(Divergence("error", path, module, call, stopped_ranks))
        for first in first_divergences(expected, actual, synced, self.ranks, self.tolerances):
            returns = sharding_of(self.weights.scheduled.get_submodule(first.path)).returns
            is_partial_output = first.kind == "output" and returns == PARTIAL
            divergences.append(replace(first, is_summand=first.is_summand or is_partial_output))
        # Tensors that no module call shows are compared by their names; the last resort is the whole model.
        if not divergences:
            parameters = [name for name, _ in self.weights.scheduled.named_parameters()]
            buffers = [name for name, _ in self.weights.scheduled.named_buffers()]
            divergences = self._by_name("parameter gradient", parameters) or self._by_name("buffer", buffers)
        self._clear()
        every_rank = tuple(range(self.ranks.size))
        return divergences or [Divergence("output", "", type(self.weights.scheduled).__name__, 0, every_rank)]

    def _by_name(self, kind: str, names: Sequence[str]) -> list[Divergence]:
        """Return the module of the first tensor of a kind that differs, in the order of the model."""
        differing = {
            comparison.name
            for comparison in self.comparisons
            if comparison.kind == kind + self.suffix and comparison.fault
        }
        by_rank = gather_objects(self.ranks, differing)
        for name in names:
            if off := tuple(rank for rank, its_names in enumerate(by_rank) if name in its_names):
                path = name.rpartition(".")[0]
                module = type(self.weights.scheduled.get_submodule(path)).__name__
                return [Divergence(kind, path, module, 0, off, self._is_summand(kind, name))]
        return []

    def _is_summand(self, kind: str, name: str) -> bool:
        """Return True if the gradients of an unsharded parameter add up to the expected one."""
        source, shard = self.weights.origin.get(name, ("", None))
        if kind != "parameter gradient" or shard is not None or not source:
            return False
        gradient = self.weights.scheduled.get_parameter(name).grad
        whole = self.weights.original.get_parameter(source).grad
        # The exchange is collective: a process without a gradient joins with empty lists.
        if gradient is None or whole is None:
            return sums_agree([], [], self.ranks, self.tolerances[GRADIENT])
        return sums_agree([gradient], [whole], self.ranks, self.tolerances[GRADIENT])

    def _run_recorded(self, model: nn.Module, record: CallRecord) -> None:
        outcome = self._forward(model)
        record.is_forward = False
        if self.check_grad:
            self._backward(outcome)


@torch.no_grad()
def restore_buffers(buffers: Sequence[tuple[nn.Module, str, Tensor, Tensor]]) -> None:
    """Restore the buffers of modules, with the values of their copies."""
    for module, name, buffer, values in buffers:
        module._buffers[name] = buffer.copy_(values)


def _is_same_value(actual: Any, expected: Any) -> bool:
    """Compare values other than tensors; NaN is equal to NaN."""
    if actual is expected:
        return True
    try:
        return bool(actual == expected) or bool(actual != actual and expected != expected)
    except (ValueError, TypeError, RuntimeError):  # an array compares element by element
        return repr(actual) == repr(expected)
