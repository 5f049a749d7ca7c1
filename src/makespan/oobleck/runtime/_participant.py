"""A node's part of the protocol: what it does when a message comes, and what it answers."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from makespan.errors import WorkerError
from makespan.oobleck.runtime._messages import (
    Cause,
    Commit,
    Copied,
    Failed,
    Form,
    Freeze,
    Leave,
    Message,
    Prepared,
    Ready,
    Save,
    Saved,
    Train,
    Welcome,
)

__all__ = [
    "Answer",
    "Apply",
    "Compute",
    "Depart",
    "Drop",
    "Join",
    "Participation",
    "Prepare",
    "Task",
    "Write",
]


@dataclass(frozen=True, slots=True)
class Prepare:
    """Load what the run needs."""

    node: int
    request: Any


@dataclass(frozen=True, slots=True)
class Drop:
    """Give up every group, then tell what is held, as `Frozen` for this generation and step."""

    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class Join:
    """Meet the others, copy, compare; what is held of another step is worth nothing."""

    form: Form
    forgets: bool


@dataclass(frozen=True, slots=True)
class Compute:
    """Compute an iteration and reduce it."""

    iteration: int


@dataclass(frozen=True, slots=True)
class Apply:
    """Step with the gradients of an iteration."""

    iteration: int


@dataclass(frozen=True, slots=True)
class Write:
    """Write layers."""

    save: Save


@dataclass(frozen=True, slots=True)
class Answer:
    """Send a message to the coordinator."""

    message: Message


@dataclass(frozen=True, slots=True)
class Depart:
    """End this process."""

    reason: str


Task = Prepare | Drop | Join | Compute | Apply | Write | Answer | Depart


class _State(Enum):
    NEW = "new"
    IDLE = "idle"
    FROZEN = "frozen"
    FORMING = "forming"
    FORMED = "formed"
    COMPUTING = "computing"
    PREPARED = "prepared"


class Participation:
    """The machine of a node; ``step`` counts iterations that it has applied.

    A message that does not fit is one of a generation that is over, or a `makespan.errors.WorkerError`.
    """

    def __init__(self) -> None:
        self.generation, self.step, self.state = 0, 0, _State.NEW

    def receive(self, message: Message) -> list[Task]:
        """Say what a message asks for."""
        match message:
            case Welcome() if self.state is _State.NEW:
                self.state = _State.IDLE
                return [Prepare(message.node, message.request), Answer(Ready())]
            case Leave():
                return [Depart(message.reason)]
            case Freeze():
                if message.generation <= self.generation:
                    return []
                self.generation, self.state = message.generation, _State.FROZEN
                return [Drop(self.generation, self.step)]
            case Form() | Train() | Commit() | Save():
                if message.generation < self.generation:
                    return []
                self._check(message)
                return self._follow(message)
        raise WorkerError(f"the coordinator sent {message} to a node that is {self.state.value}")

    def _check(self, message: Form | Train | Commit | Save) -> None:
        fitting = {
            Form: (_State.FROZEN,),
            Train: (_State.FORMED,),
            Commit: (_State.PREPARED,),
            Save: (_State.FORMED, _State.FROZEN),
        }
        asked = message.iteration if isinstance(message, Train | Commit) else self.step
        if (
            message.generation != self.generation
            or asked != self.step
            or self.state not in fitting[type(message)]
        ):
            found = (
                f"a node that is {self.state.value} in generation {self.generation} after step {self.step}"
            )
            raise WorkerError(f"the coordinator sent {message} to {found}")

    def _follow(self, message: Form | Train | Commit | Save) -> list[Task]:
        if isinstance(message, Form):
            forgets, self.step = self.step != message.step, message.step
            self.state = _State.FORMING
            return [Join(message, forgets)]
        if isinstance(message, Save):
            return [Write(message)]
        if isinstance(message, Train):
            self.state = _State.COMPUTING
            return [Compute(self.step)]
        self.step += 1
        self.state = _State.COMPUTING if message.then == "train" else _State.FORMED
        applied: list[Task] = [Apply(message.iteration)]
        return [*applied, Compute(self.step)] if message.then == "train" else applied

    def formed(self, checksums: Mapping[str, str]) -> list[Task]:
        """Tell that groups stand and copies are there."""
        self.state = _State.FORMED
        return [Answer(Copied(self.generation, checksums))]

    def saved(self, save: Save) -> list[Task]:
        """Tell that layers are written."""
        return [Answer(Saved(save.generation, save.step))]

    def computed(self, report: Any) -> list[Task]:
        """Tell that the gradients of the iteration are complete."""
        self.state = _State.PREPARED
        return [Answer(Prepared(self.generation, self.step, report))]

    def failed(self, error: str, cause: Cause = Cause.OWN) -> list[Task]:
        """Tell that forming or computing went wrong, with groups given up."""
        self.state = _State.IDLE
        return [Answer(Failed(self.generation, error, cause))]
