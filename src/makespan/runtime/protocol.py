"""Commit protocol of a resilient run: state machines of coordinator and node, without clock or sockets.

An iteration is a transaction: every member computes, reduces and prepares it, and the coordinator alone
commits it, once all members are prepared. Connections keep order, so a commit reaches a member before any
later message, and the loss of a member cannot leave two others at different steps.

A loss, a failure, and a node that joins or leaves begin a generation: members drop their groups and report
which layers they hold; the coordinator decides on a plan; they build groups, copy layers and compare
checksums, and resume after the last commit. A loss at any point of that begins the next generation.

Invariants, whatever is lost and in whatever order events arrive:

- The step of the coordinator only grows, by one, and only when every member has prepared that iteration. A
  member is at most one commit behind it, namely the one on its way.
- A node is a member, waits for the next generation, or is spare: never two of these.
- Answers count for the generation and phase that asked for them; every phase begins without answers.
- Generations only grow, and one has at most one plan. Members compute under the plan of their generation
  alone, because they drop all groups before they report what they hold.
- A checkpoint is of a committed step: it is written while no member computes, each layer by one node.
- The end is final: no event leads out of it.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, TypeVar

from makespan.errors import WorkerError
from makespan.runtime.messages import (
    Cause,
    Commit,
    Copied,
    Failed,
    Form,
    Freeze,
    Frozen,
    Leave,
    Message,
    Prepared,
    Ready,
    Save,
    Saved,
    Train,
    Welcome,
)

# --- Coordinator ------------------------------------------------------------------------------------

PlanT = TypeVar("PlanT")


class Phase(Enum):
    """State of the coordinator, named by the answers that it waits for."""

    STARTING = "start"
    FREEZING = "regroup"
    FORMING = "group build and copy"
    TRAINING = "training"
    SAVING = "checkpoint"
    ENDED = "end"


@dataclass(frozen=True, slots=True)
class ClusterState(Generic[PlanT]):
    """Input of a decision.

    Parameters
    ----------
    plan
        Plan of the last generation that trained; None at the start.
    members, leaving
        Nodes that are present, and those of them that leave as soon as they are not needed.
    step
        Iterations committed.
    holdings
        Layers that each node holds at this step.
    """

    plan: PlanT | None
    members: tuple[int, ...]
    leaving: tuple[int, ...]
    step: int
    holdings: Mapping[int, Collection[str]]


@dataclass(frozen=True, slots=True)
class Decision(Generic[PlanT]):
    """Outcome of a decision.

    Parameters
    ----------
    plan, work
        The plan, and the plain values from which the members carry it out.
    spare
        Members that have no place in the plan; they wait for the next one.
    """

    plan: PlanT
    work: Any
    spare: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Abort:
    """The run cannot continue; with ``saves`` it writes a checkpoint first."""

    error: Exception
    saves: bool


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to a node."""

    node: int
    message: Message


@dataclass(frozen=True, slots=True)
class Begin:
    """Begin a checkpoint, into which layers are written next."""


@dataclass(frozen=True, slots=True)
class Store:
    """Complete the checkpoint of a step from the layers that were written."""

    step: int


@dataclass(frozen=True, slots=True)
class LogEvent:
    """Entry for the record of the run."""

    kind: str
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class End:
    """The run is over; it succeeded if there is no error."""

    error: Exception | None


Action = Send | Begin | Store | LogEvent | End
Decide = Callable[[ClusterState[PlanT]], Decision[PlanT] | Abort]


class CoordinatorProtocol(Generic[PlanT]):
    """State machine of the coordinator: each event returns the actions to carry out, in order.

    Parameters
    ----------
    decide
        Returns a plan, or a halt if there is none.
    expected
        Nodes of the start; the first generation waits until each is ready or lost.
    step, end
        Iterations that are done, and the total to do.
    save_every
        Iterations between checkpoints; 0 for a checkpoint at the end only.
    failed
        Builds the error, from a text, of a run that fails for another reason than a loss.
    rejected
        Builds the error, from a text, of a run whose job cannot be trained.
    place
        Names a step in the text of an error.
    """

    def __init__(
        self,
        decide: Decide[PlanT],
        expected: Collection[int],
        end: int,
        *,
        step: int = 0,
        save_every: int = 0,
        failed: Callable[[str], Exception] = RuntimeError,
        rejected: Callable[[str], Exception] = ValueError,
        place: Callable[[int], str] = "step {}".format,
    ) -> None:
        self._decide, self._failed_error, self._input_error = decide, failed, rejected
        self._place = place
        self.expected, self.end, self.save_every = set(expected), end, save_every
        self.phase, self.generation, self.step, self.saved = Phase.STARTING, 0, step, step
        self.members, self.leaving = set[int](), set[int]()
        self.waiting, self.spare = set[int](), set[int]()
        self.plan: PlanT | None = None
        self.holdings: dict[int, Collection[str]] = {}
        self._decision: Decision[PlanT] | None = None
        self._answers: dict[int, Any] = {}
        self._writers: dict[int, tuple[str, ...]] = {}
        self._is_stopping, self._is_asked_to_save, self._suspected = False, False, -1
        self._reason = -1, "", ""
        self._halt: Abort | None = None
        self._unneeded = set[int]()

    # --- events -------------------------------------------------------------------------------

    def ready(self, node: int) -> list[Action]:
        """Admit a node: at the start at once, later at the next boundary of iterations."""
        self.expected.discard(node)
        if self.phase is not Phase.STARTING:
            self.waiting.add(node)
            return []
        self.members.add(node)
        return [] if self.expected else self._freeze()

    def lost(self, node: int) -> list[Action]:
        """Continue without a node whose process has ended; it need not have been a member."""
        self.expected.discard(node)
        for group in (self.waiting, self.spare, self.leaving):
            group.discard(node)
        self.holdings.pop(node, None)
        is_member = node in self.members
        self.members.discard(node)
        if self.phase is Phase.ENDED or (self.phase is Phase.STARTING and self.expected):
            return []
        if not is_member and self.phase is not Phase.STARTING:
            return []
        self._suspected = -1  # the loss explains an earlier failure
        return self._freeze()

    def drain(self, nodes: Collection[int]) -> list[Action]:
        """Release nodes at the next boundary of iterations; none to end the run with a checkpoint."""
        if not nodes:
            return self.stop()
        self.leaving |= set(nodes) & (self.members | self.waiting | self.spare)
        return []

    def stop(self) -> list[Action]:
        """End the run with a checkpoint at the next boundary of iterations."""
        self._is_stopping = True
        # At the start nothing was done yet, so there is nothing to save.
        return self._finish() if self.phase is Phase.STARTING else []

    def save_next(self) -> None:
        """Write a checkpoint at the next boundary of iterations, besides those that are due anyway."""
        self._is_asked_to_save = True

    def made_progress(self) -> None:
        """Forget an earlier failure: members have computed since, so the next one has another reason."""
        self._suspected = -1

    @property
    def unfrozen(self) -> set[int]:
        """Return the members that have not yet dropped the groups of an earlier generation."""
        return self.members - set(self._answers) if self.phase is Phase.FREEZING else set()

    def receive(self, node: int, message: Message) -> list[Action]:
        """Handle an answer of a member; answers of an earlier generation are ignored."""
        if node not in self.members:
            return []
        match message:
            case Frozen() if not self._is_stale(message.generation, Phase.FREEZING):
                return self._gather(node, message, self._regroup)
            case Copied() if not self._is_stale(message.generation, Phase.FORMING):
                return self._gather(node, message, self._compare)
            case Prepared() if not self._is_stale(message.generation, Phase.TRAINING):
                return self._gather(node, message, self._commit) if message.iteration == self.step else []
            case Saved() if not self._is_stale(message.generation, Phase.SAVING):
                return self._gather(node, message, self._store, among=self._writers)
            case Failed():
                return self._failed(node, message)
            case _:
                return []

    def _is_stale(self, generation: int, phase: Phase) -> bool:
        return generation != self.generation or self.phase is not phase

    def _gather(
        self, node: int, answer: Message, follow: Callable[[], list[Action]], among: Collection[int] = ()
    ) -> list[Action]:
        """Keep an answer, and continue once all members, or those of ``among``, have answered."""
        self._answers[node] = answer
        awaited, answers = among or self.members, self._answers
        # Lengths first: that takes a thousand members a thousand times less often through all answers.
        is_complete = len(answers) >= len(awaited) and all(other in answers for other in awaited)
        return follow() if is_complete else []

    # --- generations --------------------------------------------------------------------------

    def _freeze(self) -> list[Action]:
        """Begin a generation with all nodes that are present."""
        self.generation += 1
        self.members |= self.waiting | self.spare
        self.waiting.clear()
        self.spare.clear()
        self.phase, self._answers, self._decision, self._halt = Phase.FREEZING, {}, None, None
        if not self.members:
            return self._plan()
        note = LogEvent("freeze", {"generation": self.generation, "members": sorted(self.members)})
        return [note, *self._to_all(Freeze(self.generation))]

    def _regroup(self) -> list[Action]:
        """Collect which node holds which layers, and decide."""
        # State of any other step than the committed one is of no use.
        self.holdings = {
            node: answer.layers if answer.step == self.step else () for node, answer in self._answers.items()
        }
        return self._plan()

    def _plan(self) -> list[Action]:
        members, leaving = tuple(sorted(self.members)), tuple(sorted(self.leaving & self.members))
        decided = self._decide(ClusterState(self.plan, members, leaving, self.step, self.holdings))
        if isinstance(decided, Abort):
            if decided.saves and (self._is_stopping or self.step >= self.end):
                return self._go_on()  # nothing is left to train, so no plan is needed
            self._halt = decided
            return self._save() if decided.saves and self.saved != self.step else self._finish()
        self.spare = set(decided.spare)
        self._unneeded = set(leaving)
        self.members -= self.spare
        self.phase, self._answers, self._decision = Phase.FORMING, {}, decided
        form = Form(self.generation, self.step, tuple(sorted(self.members)), decided.work)
        return [LogEvent("plan", {"generation": self.generation, "work": decided.work}), *self._to_all(form)]

    def _compare(self) -> list[Action]:
        """Resume if all copies of each layer are equal, and release the nodes that leave."""
        seen: dict[str, tuple[str, int]] = {}
        for node, answer in sorted(self._answers.items()):
            for layer, checksum in answer.checksums.items():
                first, other = seen.setdefault(layer, (checksum, node))
                if first != checksum:
                    text = f"layer {layer} differs between nodes {other} and {node} after step {self.step}"
                    return self._finish(self._failed_error(text))
        # Only nodes that the plan was made without; one that asked to leave since then has a stage in it.
        going = self._unneeded & self.leaving & self.members
        self.members -= going
        self.leaving -= going
        self.holdings = {node: tuple(self._answers[node].checksums) for node in self.members}
        if self._decision is not None:
            self.plan = self._decision.plan
        told: list[Action] = [Send(node, Leave("drained")) for node in sorted(going)]
        return [*told, LogEvent("resume", {"generation": self.generation, "step": self.step}), *self._go_on()]

    def _failed(self, node: int, failure: Failed) -> list[Action]:
        """Try once more in a new generation: the loss behind the failure may not have been detected yet."""
        if self.phase in (Phase.STARTING, Phase.ENDED):
            return []
        if failure.cause == Cause.INPUT:
            return self._finish(self._input_error(failure.error))
        if failure.cause == Cause.OWN:
            # Its peers fail with it and may report first, but their reports are not the reason.
            self._reason = self.step, f"node {node}", failure.error
        if failure.generation != self.generation:
            return []
        if self._suspected == self.step:
            step, who, error = self._reason
            if step != self.step:
                who, error = f"node {node}", failure.error
            return self._finish(
                self._failed_error(f"{who} failed twice after {self._place(self.step)}: {error}")
            )
        self._suspected = self.step
        return [LogEvent("failure", {"node": node, "error": failure.error}), *self._freeze()]

    # --- iterations ---------------------------------------------------------------------------

    def _commit(self) -> list[Action]:
        iteration, reports = self.step, {node: answer.report for node, answer in self._answers.items()}
        self.step += 1
        self._answers = {}
        waits = self._is_stopping or self.step >= self.end or self._is_due() or self.waiting or self.leaving
        then: Any = "wait" if waits else "train"
        told = self._to_all(Commit(self.generation, iteration, then))
        note = LogEvent(
            "commit", {"iteration": iteration, "reports": reports, "members": sorted(self.members)}
        )
        return [note, *told, *(self._go_on() if waits else [])]

    def _is_due(self) -> bool:
        is_wanted = self._is_stopping or self._is_asked_to_save or self.step >= self.end
        every = self.save_every
        return self.saved != self.step and (is_wanted or (every > 0 and self.step % every == 0))

    def _go_on(self) -> list[Action]:
        """Save, end or regroup between two iterations if that is due, else train the next iteration."""
        if self._is_due():
            return self._save()
        if self._is_stopping or self.step >= self.end:
            return self._finish()
        if self.waiting or self.leaving & self.members:
            return self._freeze()
        self.phase, self._answers = Phase.TRAINING, {}
        return self._to_all(Train(self.generation, self.step))

    def _save(self) -> list[Action]:
        """Begin a checkpoint: each layer is written by one node that holds it, the one with the fewest."""
        written: dict[int, list[str]] = {}
        for layer in sorted({layer for held in self.holdings.values() for layer in held}):
            holders = [node for node in sorted(self.members) if layer in self.holdings.get(node, ())]
            chosen = min(holders, key=lambda node: (len(written.get(node, ())), node))
            written.setdefault(chosen, []).append(layer)
        self._writers = {node: tuple(layers) for node, layers in written.items()}
        self.phase, self._answers = Phase.SAVING, {}
        told = [
            Send(node, Save(self.generation, self.step, layers)) for node, layers in self._writers.items()
        ]
        return [Begin(), *told]

    def _store(self) -> list[Action]:
        self.saved, self._is_asked_to_save = self.step, False
        return [Store(self.step), *(self._go_on() if self._halt is None else self._finish())]

    def _finish(self, error: Exception | None = None) -> list[Action]:
        self.phase = Phase.ENDED
        error = self._halt.error if error is None and self._halt is not None else error
        everybody = sorted(self.members | self.waiting | self.spare)
        told: list[Action] = [
            Send(node, Leave("finished" if error is None else str(error))) for node in everybody
        ]
        return [*told, End(error)]

    def _to_all(self, message: Message) -> list[Action]:
        return [Send(node, message) for node in sorted(self.members)]


# --- Node -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prepare:
    """Load the job of the request."""

    node: int
    request: Any


@dataclass(frozen=True, slots=True)
class Drop:
    """Drop every group, then report the layers held, as `Frozen` for this generation and step."""

    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class Join:
    """Build groups, copy and compare; with ``forgets`` the state held is of another step and is dropped."""

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


class WorkerProtocol:
    """State machine of a node; ``step`` counts iterations that it has applied.

    A message that does not fit the state is ignored if its generation is over; otherwise it raises
    `makespan.errors.WorkerError`.
    """

    def __init__(self) -> None:
        self.generation, self.step, self.state = 0, 0, _State.NEW

    def receive(self, message: Message) -> list[Task]:
        """Return the tasks that a message asks for."""
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
        iteration = message.iteration if isinstance(message, Train | Commit) else self.step
        if (
            message.generation != self.generation
            or iteration != self.step
            or self.state not in fitting[type(message)]
        ):
            state = f"{self.state.value} in generation {self.generation} after step {self.step}"
            raise WorkerError(f"the coordinator sent {message} to a node that is {state}")

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
        """Report that groups are built and copies have arrived."""
        self.state = _State.FORMED
        return [Answer(Copied(self.generation, checksums))]

    def saved(self, save: Save) -> list[Task]:
        """Report that layers are written."""
        return [Answer(Saved(save.generation, save.step))]

    def computed(self, report: Any) -> list[Task]:
        """Report that the gradients of the iteration are complete."""
        self.state = _State.PREPARED
        return [Answer(Prepared(self.generation, self.step, report))]

    def failed(self, error: str, cause: Cause = Cause.OWN) -> list[Task]:
        """Report that forming or computing failed, after the groups were dropped."""
        self.state = _State.IDLE
        return [Answer(Failed(self.generation, error, cause))]
