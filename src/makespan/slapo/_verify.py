"""Check that a scheduled model computes what the original one does: outputs and gradients, everywhere."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch
from torch import nn

from makespan.slapo._agreement import GRADIENT, OUTPUT, Comparison, tolerance_for
from makespan.slapo._collectives import Ranks
from makespan.slapo._errors import ArgumentError, VerificationError, shown
from makespan.slapo._journal import JournalEntry, digest
from makespan.slapo._registry import primitive_named
from makespan.slapo._verify_passes import MARGIN, Passes, put_back
from makespan.slapo._verify_places import Parting
from makespan.slapo._verify_report import IN_TRAINING, Place, VerifyReport
from makespan.slapo._verify_runs import Inputs, LossFunction, call_from, checked_call, without_dropout
from makespan.slapo._verify_stages import Staged, in_stages
from makespan.slapo._verify_weights import (
    ORIGIN,
    Original,
    Weights,
    everywhere,
    filled,
    from_first,
    same_weights,
)

if TYPE_CHECKING:
    from makespan.slapo._schedule import Schedule

__all__ = ["Verify"]

_SHOWN = 4


class Verify:
    """Verify the primitives that are applied in a block.

    On leaving the block without an error, original and scheduled model are run on the same inputs with the
    same weights: outputs, input gradients and the gradient of every parameter must agree on every process of
    the group, and so must what a step in training mode leaves in buffers. What differs is reported by place.
    Weights that are all one number, such as biases of zero, are moved off it in both. The schedule, its
    model, the modes of its modules and the generators of random numbers stay as they were. Where the schedule
    cuts a pipeline, its stages run one after the other.

    Parameters
    ----------
    sch
        The schedule, or a node of it; all processes of its group must verify it together.
    example_inputs
        A tensor, positional arguments, keyword arguments by name, or a function of a `torch.Generator` that
        draws any of these. Those of the first process of the group are taken.
    device
        Where the models run; None for where the parameters are.
    eval_mode
        True to run both models in evaluation mode only, False in their own modes only. None for both modes of
        all modules: evaluation first, then training, where batch norm counts but nothing is dropped. Where
        the original model raises an error in training mode, evaluation mode alone is compared.
    check_grad
        Whether gradients are compared, too.
    rtol, atol
        Accepted differences, of the value and of the largest value in its tensor; None for those of the type.
    loss_fn
        Loss of the outputs, from which gradients start; None for a random gradient of every output.
    enable
        False to do nothing.
    input_grads
        Names of arguments whose gradients are compared; None for all that are real numbers. A mask that is
        never trained may be left out.
    seed
        Of inputs that are drawn, dropout and gradients at the outputs.

    Attributes
    ----------
    report
        The `VerifyReport` after the block, None before or where nothing was verified.

    Raises
    ------
    VerificationError
        The models differ, on every process of the group; also an `AssertionError`. The message is the report.
    KindError, ArgumentError
        The inputs are of another kind than accepted, or do not fit the model; a tolerance is negative, or a
        name is not one of an argument.

    References
    ----------
    Slapo, section 3.5, verification.
    """

    def __init__(
        self,
        sch: "Schedule",
        example_inputs: Inputs,
        device: torch.device | str | None = None,
        eval_mode: bool | None = None,
        check_grad: bool = True,
        rtol: float | None = None,
        atol: float | None = None,
        loss_fn: LossFunction | None = None,
        enable: bool = True,
        *,
        input_grads: Sequence[str] | None = None,
        seed: int = 0,
    ) -> None:
        for name, one in (("rtol", rtol), ("atol", atol)):
            if one is not None and not one >= 0:
                raise ArgumentError(
                    f"Verify of {sch.path!r}: {name} is {one!r}; accepted: a number >= 0, or None"
                )
        self.report: VerifyReport | None = None
        self._sch, self._inputs, self._device = sch, example_inputs, device
        self._eval_mode, self._check_grad, self._loss_fn = eval_mode, check_grad, loss_fn
        self._enable, self._input_grads, self._seed = enable, input_grads, seed
        self._accepted = {
            what: partial(tolerance_for, what=what, rtol=rtol, atol=atol) for what in (OUTPUT, GRADIENT)
        }
        self._ranks = Ranks(sch.rank, sch.world_size, sch.group)
        self._running: nn.Module = sch.mod
        self._notes: list[str] = []

    def __enter__(self) -> Self:
        """Keep the model as it is."""
        if self._enable:
            given = call_from(self._inputs, self._seed)
            self._call = checked_call(self._sch.mod, given, self._sch.path, self._input_grads)
            self._n_steps = len(self._sch.metadata.journal)
            self._original = Original(self._sch.mod)
            self._sch.metadata.tags.add(ORIGIN)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Compare the models, unless the block has failed."""
        if not self._enable:
            return
        try:
            if error is None:
                self.report = self._verified()
        finally:
            self._original.forget(self._sch.mod)
            self._sch.metadata.tags.discard(ORIGIN)
        if self.report is not None and not self.report.is_equal:
            raise VerificationError(str(self.report))

    def _verified(self) -> VerifyReport:
        ranks, journal = self._ranks, self._sch.metadata.journal
        if len(set(everywhere(ranks, digest(journal)))) > 1:
            return self._report([], [_other_steps(everywhere(ranks, [str(one) for one in journal]))], [])
        device = torch.device(self._device) if self._device is not None else _device_of(self._sch.mod)
        call = from_first(ranks, self._call)
        original = filled(self._original.module, ranks, self._seed, device)
        weights = same_weights(original, self._sch.mod, ranks, device, self._seed)
        self._running = in_stages(self._sch, weights.scheduled)
        if self._eval_mode is not False:
            self._switch(weights, is_training=False)
        passes = Passes(
            weights, call, self._running, ranks, device, self._seed, self._accepted, self._loss_fn,
            self._check_grad,
        )  # fmt: skip
        agrees = passes.run(passes.reference())
        places = [] if agrees else passes.partings(self._synced())
        if agrees and self._eval_mode is None:
            self._switch(weights, is_training=True)
            places = self._trained(passes)
        faults = [*passes.faults]
        faults += [f"parameter {name} was changed in place" for name in self._original.changed()]
        found = everywhere(ranks, (passes.comparisons, faults, weights.differed))
        weights.differed = [name for _, _, names in found for name in names]
        merged = _merged([one[:2] for one in found])
        return self._report(*merged, places, weights)

    def _trained(self, passes: Passes) -> list[Parting]:
        """Compare the models in training mode, too; return where they part."""
        training = replace(passes, suffix=IN_TRAINING, comparisons=[], faults=[])
        before = training.buffers()
        with without_dropout():
            try:
                expected = training.reference()
            except Exception as error:  # noqa: BLE001 - whatever a model raises
                why = shown(f"{type(error).__name__}: {error}")
                self._notes.append(f"not compared in training mode, where the original raises {why}")
                return []
            agrees = training.run(expected)
            if not agrees:
                put_back(before)
                training.noise = training.measured_noise()
                put_back(before)
                training.comparisons, training.faults = [], []
                agrees = training.run(training.reference())
                if agrees:
                    largest = max(everywhere(self._ranks, max(training.noise.values(), default=0.0)))
                    self._notes.append(
                        f"in training mode rounding alone changes results by up to {largest:.3g} of their "
                        f"largest value; {MARGIN:g} times what it changes of each was accepted"
                    )
            places = [] if agrees else training.partings(self._synced())
        passes.comparisons += training.comparisons
        passes.faults += [f"in training mode, {one}" for one in training.faults]
        return places

    def _switch(self, weights: Weights, is_training: bool) -> None:
        for one in (weights.original, weights.scheduled, self._running):
            one.train(is_training)

    def _report(
        self,
        comparisons: Sequence[Comparison],
        faults: Sequence[str],
        partings: Sequence[Parting],
        weights: Weights | None = None,
    ) -> VerifyReport:
        steps = self._sch.metadata.journal[self._n_steps :]
        places = [
            Place(
                one.what,
                self._full(one.path),
                one.module,
                one.call,
                one.ranks,
                self._step(one.path),
                self._stage(one.path),
                one.is_summand,
            )
            for one in partings
        ]
        counts = Counter(
            step.op
            for step in steps
            if (primitive := primitive_named(step.op)) is not None and not primitive.is_verifiable()
        )
        notes = [*self._notes]
        notes += [f"{count} x {op}, which may change results" for op, count in counts.items()]
        if weights is not None and (differed := sorted(set(weights.differed))):
            more = f" and {len(differed) - _SHOWN} more" if len(differed) > _SHOWN else ""
            names = ", ".join(differed[:_SHOWN]) + more
            notes.append(f"as the first process has them, since they differ between processes: {names}")
        lost = [] if weights is None else [*weights.lost, *weights.own]
        return VerifyReport(self._sch.path, self._ranks.size, steps, comparisons, faults, places, lost, notes)

    def _full(self, path: str) -> str:
        return ".".join(filter(None, (self._sch.path, path)))

    def _stage(self, path: str) -> int | None:
        running = self._running
        return running.stage_of(path) if isinstance(running, Staged) else None

    def _step(self, path: str) -> JournalEntry | None:
        """Return the last step at a module or above it, of the block if there is one."""
        full = self._full(path)
        for journal in (self._sch.metadata.journal[self._n_steps :], self._sch.metadata.journal):
            for entry in reversed(journal):
                if not entry.path or full == entry.path or full.startswith(f"{entry.path}."):
                    return entry
        return None

    def _synced(self) -> dict[str, list[str]]:
        """Return the modules that are synchronised, by the mode."""
        found: dict[str, list[str]] = {}
        start = f"{self._sch.path}." if self._sch.path else ""
        for entry in self._sch.metadata.journal:
            if entry.op != "sync" or entry.arguments.get("on") == "parameters":
                continue
            if f"{entry.path}.".startswith(start):
                found.setdefault(str(entry.arguments["mode"]), []).append(entry.path.removeprefix(start))
        return found


def _device_of(module: nn.Module) -> torch.device:
    devices = {one.device for one in (*module.parameters(), *module.buffers()) if not one.is_meta}
    return next(iter(devices), torch.device("cpu"))


def _other_steps(journals: Sequence[Sequence[str]]) -> str:
    """Say where the schedules of the processes part."""
    length = max(map(len, journals))
    for step in range(length):
        texts = [journal[step] if step < len(journal) else "nothing" for journal in journals]
        if len(set(texts)) > 1:
            said = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))
            return f"the processes have other schedules, from step {step + 1} on: {said}"
    return "the processes have other schedules"


def _merged(
    found: Sequence[tuple[Sequence[Comparison], Sequence[str]]],
) -> tuple[list[Comparison], list[str]]:
    """Put together what the processes found: of each tensor the worst."""
    worst: dict[tuple[str, str], Comparison] = {}
    for rank, (comparisons, _) in enumerate(found):
        for one in comparisons:
            known = worst.get((one.kind, one.name))
            if known is None or (bool(one.fault), one.max_rel_error) > (
                bool(known.fault),
                known.max_rel_error,
            ):
                where = f"on rank {rank}: {one.fault}" if one.fault and len(found) > 1 else one.fault
                worst[one.kind, one.name] = replace(one, fault=where)
    faults = dict.fromkeys(fault for _, own in found for fault in own)
    return sorted(worst.values(), key=lambda one: not one.fault), list(faults)
