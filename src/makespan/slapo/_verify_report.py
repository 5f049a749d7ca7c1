"""What a verification found."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from makespan.slapo._agreement import Comparison
from makespan.slapo._journal import JournalEntry

__all__ = ["IN_TRAINING", "Place", "VerifyReport"]

IN_TRAINING = " in training"
"""End of the kind of what was compared in training mode, after it had agreed in evaluation mode."""
_SHOWN = 6


@dataclass(frozen=True, slots=True)
class Place:
    """A module at which original and scheduled model part.

    Parameters
    ----------
    what
        ``output``, ``input gradient``, ``parameter gradient``, ``buffer`` or ``error``.
    path, module
        Path of the module in the scheduled model, and its class.
    call
        Which call of the module it is, from 0.
    ranks
        Processes of the group that see it.
    step
        The last step of the schedule at the module or above it, None without one.
    stage
        The pipeline stage in which the module runs, None where the schedule has no stages.
    is_summand
        Whether the processes have summands of what is expected, so that an exchange is missing.
    """

    what: str
    path: str
    module: str
    call: int
    ranks: tuple[int, ...]
    step: JournalEntry | None
    stage: int | None = None
    is_summand: bool = False

    def __str__(self) -> str:
        """Return it as a line of a report."""
        which = {
            "output": "first output that differs",
            "input gradient": "last input gradient that differs",
            "parameter gradient": "first parameter gradient that differs",
            "buffer": "first buffer that differs",
            "error": "the error was raised in",
        }[self.what]
        again = f", call {self.call}" if self.call else ""
        stage = "" if self.stage is None else f" in stage {self.stage}"
        where = f"{which}: {self.path!r} ({self.module}){stage}{again}, seen by {_listed('rank', self.ranks)}"
        remedy = ""
        if self.is_summand:
            missing = {
                "output": "sync('fwd_post', 'all_reduce') is missing there",
                "input gradient": "sync('bwd_post', 'all_reduce') is missing there or above",
                "parameter gradient": "sync('bwd_post', 'all_reduce', on='parameters') is missing there, or "
                "sync('bwd_post', 'all_reduce') after it",
            }[self.what]
            remedy = f"; the processes have summands of what is expected: {missing}"
        return f"{where}; last step there: {self.step if self.step is not None else 'none'}{remedy}"


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What a verification found.

    Parameters
    ----------
    path, world_size
        What was verified, and the number of processes that share it.
    steps
        The steps of the schedule in the block that was verified.
    comparisons
        Every tensor that was compared, of all processes together: those with a fault first.
    faults
        What else is wrong.
    places
        Where original and scheduled model part; empty where they agree.
    not_compared
        Parameters of either model without a counterpart in the other.
    notes
        What one should know of the comparison.
    """

    path: str
    world_size: int
    steps: Sequence[JournalEntry]
    comparisons: Sequence[Comparison]
    faults: Sequence[str] = ()
    places: Sequence[Place] = ()
    not_compared: Sequence[str] = ()
    notes: Sequence[str] = field(default=())

    @property
    def is_equal(self) -> bool:
        """Whether the scheduled model computes what the original one does."""
        return not self.faults and all(not one.fault for one in self.comparisons)

    def largest(self, kind: str) -> tuple[float, float]:
        """Return the largest absolute and the largest relative error of a kind, 0 where there is none."""
        alike = [one for one in self.comparisons if one.kind == kind and not math.isnan(one.max_abs_error)]
        return (
            max((one.max_abs_error for one in alike), default=0.0),
            max((one.max_rel_error for one in alike), default=0.0),
        )

    def count(self, kind: str) -> int:
        """Return how many tensors of a kind were compared."""
        return sum(one.kind == kind for one in self.comparisons)

    def __str__(self) -> str:
        """Return the report as text."""
        head = f"{self.path!r}" if self.path else "the model"
        state = "agrees with" if self.is_equal else "differs from"
        on = f"{self.world_size} process{'es' if self.world_size > 1 else ''}"
        lines = [f"{head} {state} the original on {on}, after {_listed('step', len(self.steps))}"]
        lines += [f"  {fault}" for fault in self.faults]
        wrong = [one for one in self.comparisons if one.fault]
        lines += _few([f"  {one}" for one in wrong])
        lines += [f"  {place}" for place in self.places]
        for kind in dict.fromkeys(one.kind for one in self.comparisons):
            absolute, relative = self.largest(kind)
            lines.append(
                f"  {self.count(kind)} x {kind}: largest error {absolute:.3g}, {relative:.3g} of the "
                "largest value of its tensor"
            )
        lines += [f"  note: {note}" for note in self.notes]
        if self.not_compared:
            lines.append("  without counterpart: " + ", ".join(_few(list(self.not_compared))))
        return "\n".join(lines)


def _few(lines: list[str]) -> list[str]:
    more = len(lines) - _SHOWN
    return lines if more <= 1 else [*lines[:_SHOWN], f"  and {more} more"]


def _listed(what: str, which: Iterable[int] | int) -> str:
    if isinstance(which, int):
        return f"{which} {what}{'' if which == 1 else 's'}"
    numbers = list(which)
    return f"{what}{'' if len(numbers) == 1 else 's'} {', '.join(map(str, numbers))}"
