"""Original and scheduled model side by side: first what they compute, and if it differs, where."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from makespan.slapo._agreement import GRADIENT, OUTPUT, Comparison, Tolerance, compare, size_of
from makespan.slapo._collectives import Ranks
from makespan.slapo._copies import copy_module
from makespan.slapo._errors import shown
from makespan.slapo._layouts import PARTIAL, sharding_of
from makespan.slapo._verify_places import Capture, Parting, captured, first_partings, is_part, sums_agree
from makespan.slapo._verify_runs import Call, LossFunction, Outcome, run_backward, run_forward
from makespan.slapo._verify_weights import Weights, everywhere

__all__ = ["MARGIN", "Passes", "put_back"]

MARGIN, _UNITS = 10.0, 4.0
"""Times the measured noise that is accepted, and rounding units by which weights are moved to measure it."""
_ROUNDING = 1e-2
"""Share of the usual size of gradients below which a whole tensor of them may be rounding."""
Accepted = Mapping[str, Callable[[torch.dtype], Tolerance]]


@dataclass
class Passes:
    """Forward and backward passes of both models on one call.

    Parameters
    ----------
    weights, call
        The models and their arguments.
    scheduled
        What is called of the scheduled model: itself, or its stages one after the other.
    ranks, device, seed
        Processes that share the scheduled model, where it runs, and what decides all that is drawn.
    accepted
        Accepted differences by type, of outputs and of gradients.
    loss_fn, check_grad
        Where gradients start, and whether they are asked for.
    suffix
        What is added to the kind of every comparison, such as the mode of the models.
    noise
        What rounding alone may change of a tensor, by its kind and name, relative to its largest value.
    """

    weights: Weights
    call: Call
    scheduled: nn.Module
    ranks: Ranks
    device: torch.device
    seed: int
    accepted: Accepted
    loss_fn: LossFunction | None
    check_grad: bool
    suffix: str = ""
    noise: Mapping[tuple[str, str], float] = field(default_factory=dict)
    comparisons: list[Comparison] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def reference(self) -> Outcome:
        """Return what the original model computes, with its gradients."""
        expected = self._forward(self.weights.original)
        if self.check_grad:
            self._backward(expected)
        return expected

    def run(self, expected: Outcome) -> bool:
        """Compare what the scheduled model computes with the reference; whether it agrees everywhere."""
        buffers = {name: one.clone() for name, one in self.weights.original.named_buffers()}
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
        own = not self.faults and not any(one.fault for one in self.comparisons)
        return all(everywhere(self.ranks, own))

    def _clear(self) -> None:
        for model in (self.weights.original, self.scheduled):
            for one in model.parameters():
                one.grad = None

    def _note(
        self, kind: str, name: str, actual: Tensor, expected: Tensor, size: float | None = None,
        source: str | None = None,
    ) -> None:  # fmt: skip
        what = GRADIENT if "gradient" in kind else OUTPUT
        accepted = self.accepted[what](expected.dtype)
        if noise := self.noise.get((kind, name if source is None else source), 0.0):
            accepted = Tolerance(accepted.rtol, accepted.atol + MARGIN * noise)
        self.comparisons.append(compare(kind + self.suffix, name, actual, expected, accepted, size))

    def _compare_outputs(self, actual: Outcome, expected: Outcome) -> None:
        if actual.structure != expected.structure:
            structures = [shown(str(one.structure)) for one in (actual, expected)]
            self.faults.append(f"the output is {structures[0]}; expected: {structures[1]}")
            return
        for name, one in expected.tensors.items():
            found = actual.tensors.get(name)
            if found is None:
                self.faults.append(f"output {name} is {shown(actual.others[name])}; expected: a tensor")
            elif not (name in expected.held and self._is_own_part(found, one)):
                self._note("output", name, found, one)
        if expected.loss is not None and actual.loss is not None:
            self._note("loss", "of the outputs", actual.loss, expected.loss)
        for name, value in expected.others.items():
            other = actual.tensors.get(name, actual.others.get(name))
            if not _is_same_value(other, value):
                self.faults.append(f"output {name} is {shown(other)}; expected: {shown(value)}")
        changed = sorted({*actual.changed_inputs()} ^ {*expected.changed_inputs()})
        self.faults += [f"input {name} is changed in place by one model only" for name in changed]

    def _is_own_part(self, actual: Tensor, expected: Tensor) -> bool:
        """Whether a tensor in an object is what this process has of the whole, as keys of its own heads."""
        if actual.dtype != expected.dtype or actual.dim() != expected.dim():
            return False
        axes = [axis for axis in range(actual.dim()) if actual.shape[axis] != expected.shape[axis]]
        if len(axes) != 1 or expected.shape[axes[0]] != self.ranks.size * actual.shape[axes[0]]:
            return False
        accepted = self.accepted[OUTPUT](expected.dtype)
        return is_part(actual, expected, axes[0], self.ranks, accepted)

    def _compare_gradients(self, actual: Outcome, expected: Outcome) -> None:
        original = dict(self.weights.original.named_parameters())
        sizes = {name: size_of(one.grad) for name, one in original.items() if one.grad is not None}
        floor = _ROUNDING * median(sizes.values()) if sizes else 0.0
        arrived: set[str] = set()

        def arrive(name: str, parameter: Tensor) -> None:
            source, shard = self.weights.origin[name]
            gradient, whole = parameter.grad, original[source].grad
            parameter.grad = None  # compared and dropped, so that both gradients never stand side by side
            arrived.add(name)
            if gradient is None:
                return
            if whole is None:
                whole = torch.zeros_like(original[source])
            part = whole if shard is None else shard.part_of(whole)
            size = max(sizes.get(source, 0.0), floor)
            self._note("parameter gradient", name, gradient, part, size, source)

        handles = []
        for name, one in self.weights.scheduled.named_parameters():
            if name in self.weights.origin and one.requires_grad:
                register: Callable[..., Any] = one.register_post_accumulate_grad_hook
                handles.append(register(partial(arrive, name)))
        try:
            self._backward(actual)
        finally:
            for handle in handles:
                handle.remove()
        for name, (source, _) in self.weights.origin.items():
            if name not in arrived and sizes.get(source, 0.0) > floor:
                fault = f"gets no gradient; expected: one with values up to {sizes[source]:.3g}"
                kind = f"parameter gradient{self.suffix}"
                self.comparisons.append(Comparison(kind, name, math.nan, math.nan, fault))
        for name, leaf in expected.leaves.items():
            if leaf.grad is not None:
                own = actual.leaves[name].grad
                self._note("input gradient", name, torch.zeros_like(leaf) if own is None else own, leaf.grad)

    def _compare_buffers(self, expected: Mapping[str, Tensor]) -> None:
        """Compare what a forward pass leaves in buffers, such as running means."""
        for name, one in self.weights.scheduled.named_buffers():
            shard, whole = self.weights.buffers.get(name), expected.get(name)
            if whole is not None and (shard is not None or whole.shape == one.shape):
                self._note("buffer", name, one, whole if shard is None else shard.part_of(whole))

    def buffers(self) -> list[tuple[nn.Module, str, Tensor, Tensor]]:
        """Return the buffers of both models with their owners and names, each with a copy."""
        models = (self.weights.original, self.scheduled)
        modules = {id(one): one for model in models for one in model.modules()}
        return [
            (module, name, one, one.detach().clone())
            for module in modules.values()
            for name, one in module._buffers.items()
            if one is not None
        ]

    def measured_noise(self) -> dict[tuple[str, str], float]:
        """Return by how much the original model changes when its weights change by rounding alone.

        Batch norm over a few samples divides by what is nearly nothing, so that a sum in another order is
        seen in the result; no fixed tolerance tells that from a mistake.
        """
        original = self.weights.original
        generator = torch.Generator().manual_seed(self.seed)

        def moved(tensor: Tensor) -> Tensor:
            values = tensor.detach().clone()
            if not isinstance(tensor, nn.Parameter):
                return values
            if values.is_floating_point():
                unit = _UNITS * torch.finfo(values.dtype).eps
                drawn = 2 * torch.rand(values.shape, generator=generator, dtype=torch.float32) - 1
                values *= 1 + unit * drawn.to(values)
            return nn.Parameter(values, tensor.requires_grad)

        other = copy_module(original, moved)
        found = []
        for model in (original, other):
            outcome = self._forward(model)
            if self.check_grad:
                self._backward(outcome)
            gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
            inputs = {name: one.grad for name, one in outcome.leaves.items() if one.grad is not None}
            tensors = {
                "output": outcome.tensors,
                "loss": {} if outcome.loss is None else {"of the outputs": outcome.loss},
                "parameter gradient": gradients,
                "input gradient": inputs,
                "buffer": {name: one.clone() for name, one in model.named_buffers()},
            }
            found.append(
                {(kind, name): one for kind, all_of in tensors.items() for name, one in all_of.items()}
            )
        expected, actual = found
        noise = {}
        for key, one in expected.items():
            if one.is_floating_point() and (size := size_of(one)) and key in actual:
                noise[key] = size_of(actual[key].detach() - one.detach()) / size
        self._clear()
        return noise

    def partings(self, synced: Mapping[str, Sequence[str]]) -> list[Parting]:
        """Run both models once more, and return where they part."""
        with captured(self.weights.original) as expected:
            self._recorded(self.weights.original, expected)
        with captured(self.weights.scheduled) as actual:
            stopped: tuple[str, int, str] | None = None
            try:
                self._recorded(self.scheduled, actual)
            except Exception:  # noqa: BLE001 - as it did before
                key = actual.running[-1] if actual.running else ("", 0)
                stopped = (*key, actual.passages[key].module if key in actual.passages else "")
        stops = {one: ranks for one, ranks in _together(everywhere(self.ranks, stopped)).items() if one}
        found = [Parting("error", path, module, call, who) for (path, call, module), who in stops.items()][:1]
        for one in first_partings(expected, actual, synced, self.ranks, self.accepted):
            returns = sharding_of(self.weights.scheduled.get_submodule(one.path)).returns
            found.append(
                replace(one, is_summand=one.is_summand or (one.what == "output" and returns == PARTIAL))
            )
        parameters = [name for name, _ in self.weights.scheduled.named_parameters()]
        buffers = [name for name, _ in self.weights.scheduled.named_buffers()]
        found = found or self._by_name("parameter gradient", parameters) or self._by_name("buffer", buffers)
        self._clear()
        return found or [
            Parting("output", "", type(self.weights.scheduled).__name__, 0, tuple(range(self.ranks.size)))
        ]

    def _by_name(self, kind: str, names: Sequence[str]) -> list[Parting]:
        """Return the module of the first tensor of a kind that differs, in the order of the model."""
        wrong = {one.name for one in self.comparisons if one.kind == kind + self.suffix and one.fault}
        seen = everywhere(self.ranks, wrong)
        for name in names:
            if who := tuple(rank for rank, own in enumerate(seen) if name in own):
                path = name.rpartition(".")[0]
                module = type(self.weights.scheduled.get_submodule(path)).__name__
                return [Parting(kind, path, module, 0, who, self._is_summand(kind, name))]
        return []

    def _is_summand(self, kind: str, name: str) -> bool:
        """Whether the gradients that the processes have of a whole parameter add up to what is expected."""
        source, shard = self.weights.origin.get(name, ("", None))
        if kind != "parameter gradient" or shard is not None or not source:
            return False
        own = self.weights.scheduled.get_parameter(name).grad
        whole = self.weights.original.get_parameter(source).grad
        pairs = [] if own is None or whole is None else [(own, whole)]
        actual, expected = [one for one, _ in pairs], [one for _, one in pairs]
        return sums_agree(actual, expected, self.ranks, self.accepted[GRADIENT])

    def _recorded(self, model: nn.Module, capture: Capture) -> None:
        outcome = self._forward(model)
        capture.is_forward = False
        if self.check_grad:
            self._backward(outcome)


@torch.no_grad()
def put_back(buffers: Sequence[tuple[nn.Module, str, Tensor, Tensor]]) -> None:
    """Give modules the buffers that they had, with the values of their copies."""
    for module, name, one, values in buffers:
        module._buffers[name] = one.copy_(values)


def _is_same_value(found: Any, expected: Any) -> bool:
    """Compare what is no tensor; what is no number is equal to itself."""
    if found is expected:
        return True
    try:
        return bool(found == expected) or bool(found != found and expected != expected)
    except (ValueError, TypeError, RuntimeError):  # an array has an answer for each element
        return repr(found) == repr(expected)


def _together(seen: Sequence[Any]) -> dict[Any, tuple[int, ...]]:
    return {key: tuple(rank for rank, one in enumerate(seen) if one == key) for key in dict.fromkeys(seen)}
