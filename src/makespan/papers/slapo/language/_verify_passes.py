"""Original and scheduled model side by side: first what they compute, and if it differs, where."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from makespan.papers.slapo.language._agreement import (
    GRADIENT,
    OUTPUT,
    Comparison,
    Tolerance,
    compare,
    size_of,
)
from makespan.papers.slapo.language._collectives import Ranks
from makespan.papers.slapo.language._verify_places import Capture, Parting, captured, first_partings
from makespan.papers.slapo.language._verify_runs import (
    Call,
    LossFunction,
    Outcome,
    run_backward,
    run_forward,
)
from makespan.papers.slapo.language._verify_weights import Weights, everywhere

__all__ = ["Passes"]

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
    comparisons: list[Comparison] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def run(self) -> bool:
        """Compare what both models compute; whether it agrees on all processes."""
        expected = self._forward(self.weights.original)
        if self.check_grad:
            self._backward(expected)
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
        self, kind: str, name: str, actual: Tensor, expected: Tensor, size: float | None = None
    ) -> None:
        what = GRADIENT if "gradient" in kind else OUTPUT
        accepted = self.accepted[what](expected.dtype)
        self.comparisons.append(compare(kind, name, actual, expected, accepted, size))

    def _compare_outputs(self, actual: Outcome, expected: Outcome) -> None:
        if actual.structure != expected.structure:
            self.faults.append(f"the output is {actual.structure}; expected: {expected.structure}")
            return
        for name, one in expected.tensors.items():
            self._note("output", name, actual.tensors[name], one)
        if expected.loss is not None and actual.loss is not None:
            self._note("loss", "of the outputs", actual.loss, expected.loss)
        for name, value in expected.others.items():
            if actual.others[name] != value:
                self.faults.append(f"output {name} is {actual.others[name]!r}; expected: {value!r}")
        changed = sorted({*actual.changed_inputs()} ^ {*expected.changed_inputs()})
        self.faults += [f"input {name} is changed in place by one model only" for name in changed]

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
            self._note("parameter gradient", name, gradient, part, max(sizes.get(source, 0.0), floor))

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
                self.comparisons.append(Comparison("parameter gradient", name, math.nan, math.nan, fault))
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
        self._clear()
        stops = {one: ranks for one, ranks in _together(everywhere(self.ranks, stopped)).items() if one}
        found = [Parting("error", path, module, call, who) for (path, call, module), who in stops.items()][:1]
        found += first_partings(expected, actual, synced, self.ranks, self.accepted)
        return found or self._by_parameter()

    def _by_parameter(self) -> list[Parting]:
        """Return the module of the first parameter whose gradient differs, in the order of the model."""
        wrong = {one.name for one in self.comparisons if one.kind == "parameter gradient" and one.fault}
        seen = everywhere(self.ranks, wrong)
        for name, _ in self.weights.scheduled.named_parameters():
            if who := tuple(rank for rank, names in enumerate(seen) if name in names):
                path = name.rpartition(".")[0]
                kind = type(self.weights.scheduled.get_submodule(path)).__name__
                return [Parting("parameter gradient", path, kind, 0, who)]
        return [
            Parting("output", "", type(self.weights.scheduled).__name__, 0, tuple(range(self.ranks.size)))
        ]

    def _recorded(self, model: nn.Module, capture: Capture) -> None:
        outcome = self._forward(model)
        capture.is_forward = False
        if self.check_grad:
            self._backward(outcome)


def _together(seen: Sequence[Any]) -> dict[Any, tuple[int, ...]]:
    return {key: tuple(rank for rank, one in enumerate(seen) if one == key) for key in dict.fromkeys(seen)}
