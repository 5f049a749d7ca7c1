"""Verify a scheduled model against the original: outputs, gradients, buffers, and where they diverge.

Copies of both models run with the same weights, inputs and random numbers: by default first in evaluation
mode, then in training mode without dropout. If they differ, both run once more with hooks that record every
module, and the report names the modules at which they diverge.

Two rules hold throughout. Processes exchange their results before they branch on them, so that all of them
reach the same collectives. The user's model, its modes and its random generators do not change.
"""

import math
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from makespan.arguments import check_kind
from makespan.notebook import text_html
from makespan.slapo.comparison import GRADIENT, OUTPUT, Comparison, Divergence, numbered, tolerance_for
from makespan.slapo.errors import ArgumentError, KindError, VerificationError, check_device, short_repr
from makespan.slapo.layered import LayerPasses, NoLayersError
from makespan.slapo.layouts import Ranks, broadcast_object, gather_over
from makespan.slapo.passes import (
    MARGIN,
    Inputs,
    LossFunction,
    Passes,
    SequentialStages,
    call_from,
    checked_call,
    restore_buffers,
    staged_copy,
    without_dropout,
)
from makespan.slapo.schedule import JournalEntry, Schedule, digest, primitive_named
from makespan.slapo.sharding import groups_of
from makespan.slapo.weights import ORIGIN, Original, Weights, initialised, same_weights

# --- Report ---

IN_TRAINING = " in training"
"""Suffix of kinds that are compared in training mode, after evaluation mode agreed."""
_SHOWN_PLACES = 6


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Result of a verification.

    Parameters
    ----------
    path, world_size
        Path of the verified module, and number of processes that share it.
    steps
        The steps of the schedule in the verified block.
    comparisons
        All tensors that were compared, each with the worst result of all processes: those with a fault first.
    faults
        Other differences.
    divergences
        Modules at which original and scheduled model diverge; empty if they agree.
    not_compared
        Parameters of either model without a counterpart in the other.
    notes
        Remarks on the comparison.
    layers
        In a verification by layers, each compared layer with all layers of its structure, itself included.
    """

    path: str
    world_size: int
    steps: Sequence[JournalEntry]
    comparisons: Sequence[Comparison]
    faults: Sequence[str] = ()
    divergences: Sequence[Divergence] = ()
    not_compared: Sequence[str] = ()
    notes: Sequence[str] = field(default=())
    layers: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def is_equal(self) -> bool:
        """True if the scheduled model computes the same as the original one."""
        return not self.faults and all(not comparison.fault for comparison in self.comparisons)

    def largest(self, kind: str) -> tuple[float, float]:
        """Return the largest absolute and the largest relative error of a kind, 0 if there is none."""
        alike = [
            comparison
            for comparison in self.comparisons
            if comparison.kind == kind and not math.isnan(comparison.max_abs_error)
        ]
        return (
            max((comparison.max_abs_error for comparison in alike), default=0.0),
            max((comparison.max_rel_error for comparison in alike), default=0.0),
        )

    @property
    def places(self) -> Sequence[Divergence]:
        """Return `divergences`, under their name in the last version."""
        warnings.warn("VerifyReport.places is now divergences", DeprecationWarning, stacklevel=2)
        return self.divergences

    def count(self, kind: str) -> int:
        """Return how many tensors of a kind were compared."""
        return sum(comparison.kind == kind for comparison in self.comparisons)

    def _repr_html_(self) -> str:
        """Return the report in a fixed-width font."""
        return text_html(str(self))

    def __str__(self) -> str:
        """Return the report as text."""
        head = f"{self.path!r}" if self.path else "the model"
        state = "agrees with" if self.is_equal else "differs from"
        on = f"{self.world_size} process{'es' if self.world_size > 1 else ''}"
        lines = [f"{head} {state} the original on {on}, after {numbered('step', len(self.steps))}"]
        lines += [f"  {fault}" for fault in self.faults]
        wrong = [comparison for comparison in self.comparisons if comparison.fault]
        lines += _abridged([f"  {comparison}" for comparison in wrong])
        lines += [f"  {divergence}" for divergence in self.divergences]
        for kind in dict.fromkeys(comparison.kind for comparison in self.comparisons):
            absolute, relative = self.largest(kind)
            lines.append(
                f"  {self.count(kind)} x {kind}: largest error {absolute:.3g}, {relative:.3g} of the "
                "largest value of its tensor"
            )
        if self.layers:
            alike = [f"{path} for {len(others)}" for path, others in self.layers.items()]
            lines.append("  layers of the same structure were compared once: " + ", ".join(_abridged(alike)))
        lines += [f"  note: {note}" for note in self.notes]
        if self.not_compared:
            lines.append("  without counterpart: " + ", ".join(_abridged(list(self.not_compared))))
        return "\n".join(lines)


def _abridged(lines: list[str]) -> list[str]:
    more = len(lines) - _SHOWN_PLACES
    return lines if more <= 1 else [*lines[:_SHOWN_PLACES], f"  and {more} more"]


# --- Verification ---

_SHOWN_NAMES = 4


class Verify:
    """Verify the primitives that are applied in a block.

    When the block ends without an error, original and scheduled model run on the same inputs with the same
    weights. Outputs, input gradients and the gradients of all parameters must agree on every process of the
    group, and so must buffers after a step in training mode. The report names the modules at which they
    diverge. Weights with equal elements, such as biases of zero, are moved off their value in both models.
    The schedule, its model, the modes of its modules and the random generators do not change. If the schedule
    cuts a pipeline, its stages run one after the other.

    Parameters
    ----------
    sch
        The schedule, or a node of it; all processes of its group must verify it together.
    example_inputs
        A tensor, positional arguments, keyword arguments by name, or a function of a `torch.Generator` that
        draws any of these. All processes use the inputs of the first one of the group.
    device
        Device of the models; None for that of the parameters.
    eval_mode
        True to run both models in evaluation mode only, False in their own modes only. None for both modes of
        all modules: evaluation first, then training with batch statistics but without dropout. If the
        original model raises an error in training mode, only evaluation mode is compared.
    check_grad
        Compare gradients, too.
    rtol, atol
        Tolerated differences, relative to the value and to the largest value in its tensor; None for the
        defaults of the type.
    loss_fn
        Loss of the outputs, from which gradients start; None for a random gradient of every output.
    enable
        False to do nothing.
    input_grads
        Names of arguments whose gradients are compared; None for all of floating-point numbers. A mask that
        is never trained may be left out.
    seed
        Seed of drawn inputs, dropout, and gradients at the outputs.
    by_layers
        Compare repeated layers one at a time, and one of those of the same structure, which takes a fraction
        of time and memory, see Notes.

    Attributes
    ----------
    report
        The `VerifyReport` after the block, None before or if nothing was verified.

    Raises
    ------
    VerificationError
        The models differ, on every process of the group; also an `AssertionError`. The message is the report.
    KindError, ArgumentError
        The inputs have the wrong kind or do not fit the model; a tolerance is negative, or a name is not
        that of an argument.

    Notes
    -----
    A verification by layers first compares the rest of the model, with stand-ins for the layers; whatever the
    rest hands to a stand-in, and the gradients that arrive there, must agree. Then it compares layers by
    themselves, on what was handed to them. If anything differs, or if the model cannot be taken apart, the
    whole model is verified, and a note says why. A model cannot be taken apart if its layers share weights,
    draw random numbers, change their arguments or attributes, or exchange objects such as caches, or if it is
    cut into stages. State that layers keep in global variables goes unnoticed, and a branch on the values of
    weights is compared for one layer of a structure. Errors of layers add up, so that outputs and input
    gradients of a layer must agree within the tolerance of the model divided by the number of layers.

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
        by_layers: bool = False,
    ) -> None:
        if not isinstance(sch, Schedule):
            raise KindError(f"Verify got {type(sch).__name__}; expected a Schedule")
        where = f"Verify of {sch.path!r}: "
        kinds: dict[str, tuple[object, Any]] = {
            "eval_mode": (eval_mode, bool | None), "check_grad": (check_grad, bool),
            "rtol": (rtol, float | None), "atol": (atol, float | None),
            "loss_fn": (loss_fn, Callable | None), "enable": (enable, bool), "seed": (seed, int),
            "by_layers": (by_layers, bool),
        }  # fmt: skip
        for name, (value, kind) in kinds.items():
            check_kind(f"{where}{name}", value, kind, KindError)
        check_device(where, device)
        for name, limit in (("rtol", rtol), ("atol", atol)):
            if limit is not None and not limit >= 0:
                raise ArgumentError(
                    f"Verify of {sch.path!r}: {name} is {limit!r}; expected a number >= 0, or None"
                )
        self.report: VerifyReport | None = None
        self._sch, self._inputs, self._device = sch, example_inputs, device
        self._eval_mode, self._check_grad, self._loss_fn = eval_mode, check_grad, loss_fn
        self._enable, self._input_grads, self._seed = enable, input_grads, seed
        self._tolerances = {
            category: partial(tolerance_for, kind=category, rtol=rtol, atol=atol)
            for category in (OUTPUT, GRADIENT)
        }
        self._ranks = Ranks(sch.rank, sch.world_size, sch.group)
        self._everyone: tuple[Ranks, ...] = (self._ranks,)
        self._by_layers = by_layers
        self._running: nn.Module = sch.mod
        self._notes: list[str] = []

    def __enter__(self) -> Self:
        """Keep a copy of the model before the block."""
        if self._enable:
            call = call_from(self._inputs, self._seed)
            self._call = checked_call(self._sch.mod, call, self._sch.path, self._input_grads)
            self._n_steps = len(self._sch.metadata.journal)
            self._original = Original(self._sch.mod)
            self._sch.metadata.tags.add(ORIGIN)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Compare the models, unless the block raised an error."""
        if not self._enable:
            return
        try:
            if error is None:
                self.report = self._compared()
        finally:
            self._original.forget(self._sch.mod)
            self._sch.metadata.tags.discard(ORIGIN)
        if self.report is not None and not self.report.is_equal:
            raise VerificationError(str(self.report))

    def _compared(self) -> VerifyReport:
        ranks, journal = self._ranks, self._sch.metadata.journal
        # Processes that share experts exchange tokens, so that they must run the same passes.
        groups = groups_of(self._sch)
        everyone = tuple(groups[over] for over in ("experts", "context", "tensor") if over in groups)
        self._everyone = everyone = everyone or (ranks,)
        if len(set(gather_over(everyone, digest(journal)))) > 1:
            steps = gather_over(everyone, [str(step) for step in journal])
            return self._report([], [_other_steps(steps)], [])
        if self._device is not None:
            device = torch.device(self._device)
        else:
            tensors = (*self._sch.mod.parameters(), *self._sch.mod.buffers())
            devices = {tensor.device for tensor in tensors if not tensor.is_meta}
            device = next(iter(devices), torch.device("cpu"))
        call = self._call
        for group in everyone:
            call = broadcast_object(group, call)
        original = initialised(self._original.module, ranks, self._seed, device)
        weights = same_weights(original, self._sch.mod, everyone, device, self._seed)
        self._running = staged_copy(self._sch, weights.scheduled)
        passes = Passes(
            weights, call, self._running, ranks, device, self._seed, self._tolerances, self._loss_fn,
            self._check_grad, everyone=everyone,
        )  # fmt: skip
        if self._by_layers and (report := self._compared_by_layers(passes)) is not None:
            return report
        if self._eval_mode is not False:
            self._set_modes(weights, is_training=False)
        agrees = passes.run(passes.reference())
        divergences = [] if agrees else passes.divergences(self._synced_modules())
        if agrees and self._eval_mode is None:
            self._set_modes(weights, is_training=True)
            divergences = self._compared_in_training(passes)
        return self._report(*self._merged(passes), divergences, weights)

    def _merged(self, passes: Passes) -> tuple[list[Comparison], list[str]]:
        """Merge comparisons and faults of all processes."""
        faults = [*passes.faults]
        faults += [f"parameter {name} was changed in place" for name in self._original.changed()]
        results = gather_over(self._everyone, (passes.comparisons, faults, passes.weights.differed))
        passes.weights.differed = [name for _, _, names in results for name in names]
        return _merged([result[:2] for result in results])

    def _compared_by_layers(self, passes: Passes) -> VerifyReport | None:
        """Compare the rest of the model, then layers; return None if the whole model has to be compared."""
        modes = (False, True) if self._eval_mode is None else (False if self._eval_mode else None,)
        buffers = passes.buffers()
        try:
            if isinstance(self._running, SequentialStages):
                raise NoLayersError("the schedule cuts stages")
            parts = LayerPasses(passes)
            for mode in modes:
                if mode is not None:
                    self._set_modes(passes.weights, mode)
                with without_dropout() if mode else nullcontext():
                    parts.run(IN_TRAINING if mode else "")
        except NoLayersError as error:
            self._notes.append(f"compared as a whole, not by layers: {error}")
            passes._clear()
            restore_buffers(buffers)
            return None
        merged = self._merged(replace(passes, comparisons=parts.comparisons, faults=[]))
        return self._report(*merged, [], passes.weights, parts.layers)

    def _compared_in_training(self, passes: Passes) -> list[Divergence]:
        """Compare the models in training mode, too; return the modules at which they diverge."""
        training = replace(passes, suffix=IN_TRAINING, comparisons=[], faults=[])
        before = training.buffers()
        with without_dropout():
            try:
                expected = training.reference()
            except Exception as error:  # noqa: BLE001 - whatever a model raises
                why = short_repr(f"{type(error).__name__}: {error}")
                self._notes.append(f"not compared in training mode, in which the original raises {why}")
                return []
            agrees = training.run(expected)
            # A difference may be rounding alone, see `measured_noise`: compare again with that tolerance.
            if not agrees:
                restore_buffers(before)
                training.noise = training.measured_noise()
                restore_buffers(before)
                training.comparisons, training.faults = [], []
                agrees = training.run(training.reference())
                if agrees:
                    noise = max(training.noise.values(), default=0.0)
                    largest = max(gather_over(self._everyone, noise))
                    self._notes.append(
                        f"in training mode, rounding alone changes results by up to {largest:.3g} of their "
                        f"largest value; {MARGIN:g} times the change of each was tolerated"
                    )
            divergences = [] if agrees else training.divergences(self._synced_modules())
        passes.comparisons += training.comparisons
        passes.faults += [f"in training mode, {fault}" for fault in training.faults]
        return divergences

    def _set_modes(self, weights: Weights, is_training: bool) -> None:
        for module in (weights.original, weights.scheduled, self._running):
            module.train(is_training)

    def _report(
        self,
        comparisons: Sequence[Comparison],
        faults: Sequence[str],
        divergences: Sequence[Divergence],
        weights: Weights | None = None,
        layers: Mapping[str, Sequence[str]] | None = None,
    ) -> VerifyReport:
        steps = self._sch.metadata.journal[self._n_steps :]
        stages = self._running
        located = [
            replace(
                divergence,
                path=self._full_path(divergence.path),
                step=self._last_step(divergence.path),
                stage=stages.stage_of(divergence.path) if isinstance(stages, SequentialStages) else None,
            )
            for divergence in divergences
        ]
        counts = Counter(
            step.op
            for step in steps
            if (primitive := primitive_named(step.op)) is not None and not primitive.is_verifiable()
        )
        notes = [*self._notes]
        notes += [f"{count} x {op}, which may change results" for op, count in counts.items()]
        for found, remark in (
            ()
            if weights is None
            else (
                (weights.differed, "taken from the first process, since they differ between processes"),
                (
                    weights.renewed,
                    "taken from the original, since the schedule brings other values",
                ),
            )
        ):
            if names := sorted(set(found)):
                more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
                notes.append(f"{remark}: {', '.join(names[:_SHOWN_NAMES])}{more}")
        unmatched = [] if weights is None else [*weights.lost, *weights.added]
        return VerifyReport(
            self._sch.path,
            math.prod(ranks.size for ranks in self._everyone),
            steps,
            comparisons,
            faults,
            located,
            unmatched,
            notes,
            layers or {},
        )

    def _full_path(self, path: str) -> str:
        return ".".join(filter(None, (self._sch.path, path)))

    def _last_step(self, path: str) -> JournalEntry | None:
        """Return the last step at a module or above it, if possible one of the verified block."""
        full = self._full_path(path)
        for journal in (self._sch.metadata.journal[self._n_steps :], self._sch.metadata.journal):
            for entry in reversed(journal):
                if not entry.path or full == entry.path or full.startswith(f"{entry.path}."):
                    return entry
        return None

    def _synced_modules(self) -> dict[str, list[str]]:
        """Return the synchronised modules by mode."""
        synced: dict[str, list[str]] = {}
        start = f"{self._sch.path}." if self._sch.path else ""
        for entry in self._sch.metadata.journal:
            if entry.op != "sync" or entry.arguments.get("on") == "parameters":
                continue
            if f"{entry.path}.".startswith(start):
                synced.setdefault(str(entry.arguments["mode"]), []).append(entry.path.removeprefix(start))
        return synced


def _other_steps(journals: Sequence[Sequence[str]]) -> str:
    """Return a fault that names the first step at which the schedules of the processes differ."""
    length = max(map(len, journals))
    for step in range(length):
        texts = [journal[step] if step < len(journal) else "nothing" for journal in journals]
        if len(set(texts)) > 1:
            listed = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))
            return f"the schedules of the processes differ from step {step + 1} on: {listed}"
    return "the schedules of the processes differ"


def _merged(
    results: Sequence[tuple[Sequence[Comparison], Sequence[str]]],
) -> tuple[list[Comparison], list[str]]:
    """Merge the results of the processes: the worst comparison of each tensor, and all faults once."""
    worst: dict[tuple[str, str], Comparison] = {}
    for rank, (comparisons, _) in enumerate(results):
        for comparison in comparisons:
            known = worst.get((comparison.kind, comparison.name))
            if known is None or (bool(comparison.fault), comparison.max_rel_error) > (
                bool(known.fault),
                known.max_rel_error,
            ):
                where = (
                    f"on rank {rank}: {comparison.fault}"
                    if comparison.fault and len(results) > 1
                    else comparison.fault
                )
                worst[comparison.kind, comparison.name] = replace(comparison, fault=where)
    faults = dict.fromkeys(fault for _, rank_faults in results for fault in rank_faults)
    return sorted(worst.values(), key=lambda comparison: not comparison.fault), list(faults)
