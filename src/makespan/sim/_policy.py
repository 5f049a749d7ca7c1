"""What a policy is and returns, asking it, and the check of a decision before anything of it is applied."""

import math
import re
import reprlib
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Protocol, TypeGuard

from makespan.errors import MakespanError, failed_at, short_path
from makespan.hardware import ClusterSpec
from makespan.sim._catalogue import Allocation, Catalogue, Configuration
from makespan.sim._state import ClusterState, Nodes
from makespan.sim._view import ClusterView, JobView
from makespan.sim._watch import TookTooLong, Watch
from makespan.units import format_bytes

__all__ = [
    "Adviser",
    "Decision",
    "InfeasibleDecision",
    "Policy",
    "PolicyError",
    "StalledError",
    "check_policy",
    "checked_changes",
    "known_as",
]

_NAME = re.compile(r"\w[\w.+-]*", re.ASCII)
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 80
_MAX_SHOWN = 160


@dataclass(frozen=True, slots=True)
class Decision:
    """What shall change, all at once, so that jobs may swap devices.

    Parameters
    ----------
    changes
        From job to its new allocation, or None to take all devices away; all others go on as they are.
    wake_up_s
        Ask again at this time [s], or the first round after it, even if nothing happens before.
    """

    changes: Mapping[str, Allocation | None] = field(default_factory=dict)
    wake_up_s: float | None = None


class Policy(Protocol):
    """A scheduling policy: an immutable object with typed fields and one pure function.

    It holds nothing between calls but the state that `decide` gets back, and draws no random numbers but
    from a generator in there.
    """

    @property
    def name(self) -> str:
        """Key in the registry and in tables: lower case words joined by ``-``."""

    @property
    def title(self) -> str:
        """Name in figures."""

    @property
    def interval_s(self) -> float | None:
        """Length of a round [s]; None to be asked after every arrival, completion and node event."""

    @property
    def is_clairvoyant(self) -> bool:
        """Whether the policy reads `JobView.steps_left`; the view refuses it to all others."""

    @property
    def honours_guarantees(self) -> bool:
        """Whether the engine holds it to this: no guaranteed job is suspended or slower than requested."""

    @property
    def references(self) -> tuple[str, ...]:
        """Literature that the policy implements."""

    def initial_state(self, cluster: ClusterSpec, catalogue: Catalogue) -> Any:
        """Return what the policy remembers before the first decision; None if nothing."""

    def decide(self, view: ClusterView, state: Any) -> tuple[Decision, Any]:
        """Return what shall change now, and what to remember; the view is valid during the call only."""


class PolicyError(MakespanError):
    """A policy raised, took too long, returned no decision, or is none; names its file, and line if known."""


class InfeasibleDecision(PolicyError):
    """A policy decided what cannot be done; nothing of the decision was applied, the view is as it saw it."""

    def __init__(self, message: str, view: ClusterView) -> None:
        super().__init__(message)
        self.view = view


class StalledError(MakespanError):
    """Jobs wait, nothing runs and nothing will happen any more: the policy left them behind."""


def _shown(value: object) -> str:
    text = _REPR.repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _file(policy: object) -> str:
    kind = policy if isinstance(policy, type) else type(policy)
    return getattr(sys.modules.get(kind.__module__), "__file__", None) or ""


def known_as(policy: Policy, line: int | None = None) -> str:
    """Return file, line if known, and name of a policy for messages; its class where no file is known."""
    file = _file(policy)
    where = short_path(file) if file else f"class {type(policy).__name__}"
    return f"{where}{f', line {line}' if line else ''}: policy {policy.name!r}"


_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "name": (
        lambda it: isinstance(it, str) and _NAME.fullmatch(it) is not None,
        "letters, digits, and '-', '_', '.' or '+' after the first",
    ),
    "title": (lambda it: isinstance(it, str) and it.isprintable() and bool(it), "a text"),
    "interval_s": (
        lambda it: it is None or (isinstance(it, Real) and math.isfinite(it) and float(it) >= 0),
        "a finite time in s, or None",
    ),
    "is_clairvoyant": (lambda it: isinstance(it, bool), "True or False"),
    "honours_guarantees": (lambda it: isinstance(it, bool), "True or False"),
    "references": (
        lambda it: isinstance(it, tuple) and all(isinstance(text, str) for text in it),
        "a tuple of texts",
    ),
    "initial_state": (callable, "a method"),
    "decide": (callable, "a method"),
}


def check_policy(policy: Policy) -> None:
    """Check that an object is a policy: that it has every field and method of `Policy`, of the right kind.

    Raises
    ------
    PolicyError
        It is not; says what was found where, and what is accepted.
    """
    kind = policy if isinstance(policy, type) else type(policy)
    where = f"{short_path(_file(policy))}: " if _file(policy) else ""
    if isinstance(policy, type):
        raise PolicyError(f"{where}{kind.__name__} is a class; accepted: an object of it, {kind.__name__}()")
    for name, (accepts, accepted) in _FIELDS.items():
        try:
            found = getattr(policy, name)
        except Exception as error:
            found_text = f"{kind.__name__} is no policy, it has no {name} ({type(error).__name__}: {error})"
            raise PolicyError(f"{where}{found_text}; accepted: an object like makespan.sim.Policy") from error
        if not accepts(found):
            raise PolicyError(f"{where}{kind.__name__}.{name} is {_shown(found)}; accepted: {accepted}")


class Adviser:
    """Asks a policy, ends what takes too long, and takes nothing but a decision for an answer."""

    def __init__(self, policy: Policy, limit_s: float | None) -> None:
        self.policy = policy
        self.watch = Watch(limit_s)

    def initial_state(self, cluster: ClusterSpec, catalogue: Catalogue) -> Any:
        """Return what the policy remembers before the first decision."""
        with self.watch:
            return self._call(self.policy.initial_state, None, cluster, catalogue)

    def decide(self, view: ClusterView, state: Any) -> tuple[Decision, Any]:
        """Return what shall change, and what the policy remembers."""
        answer = self._call(self.policy.decide, view, view, state)
        if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[0], Decision)):
            accepted = "a pair of a Decision and what to remember, (Decision(changes), state)"
            raise self._refused(view, f"decide returned {_shown(answer)}; accepted: {accepted}")
        changes, wake_up_s = (getattr(answer[0], name) for name in ("changes", "wake_up_s"))
        if not isinstance(changes, Mapping):
            accepted = "a mapping from the name of a job to an Allocation or None, each job once"
            found = f"changes are {_shown(changes)}"
            raise self._refused(view, f"{found}; accepted: {accepted}")
        if not (wake_up_s is None or _is_later(wake_up_s, view.time_s)):
            raise self._refused(view, f"wake_up_s is {_shown(wake_up_s)}; accepted: a later time")
        return answer

    def _refused(self, view: ClusterView, problem: str) -> InfeasibleDecision:
        return InfeasibleDecision(f"{known_as(self.policy)} at {view.time_s} s: {problem}", view)

    def _call(self, function: Callable[..., Any], view: ClusterView | None, *arguments: object) -> Any:
        try:
            return self.watch.call(function, *arguments)
        except (Exception, SystemExit, TookTooLong) as error:
            line = failed_at(error.__traceback__, _file(self.policy))
            at = "" if view is None else f" at {view.time_s} s"
            what = f"{getattr(function, '__name__', 'the call')} raised {type(error).__name__}: {error}"
            if isinstance(error, TookTooLong):
                what = (
                    f"interrupted by the decision limit, {self.watch.limit_s:g} s for one call; accepted: "
                    "a policy that decides sooner, or a higher limit (--decision-limit, decision_limit_s)"
                )
            raise PolicyError(f"{known_as(self.policy, line)}{at}: {what}") from error


def checked_changes(
    decision: Decision, state: ClusterState, policy: Policy
) -> list[tuple[JobView, Allocation | None]]:
    """Return what really changes: suspensions first, then changes of running jobs, then starts."""
    changes, view = [], state.view
    found: Iterable[tuple[object, object]] = decision.changes.items()  # whoever wrote it, checked or not
    for job_id, new in found:
        job = state.find(job_id) if isinstance(job_id, str) else None
        if job is None:
            raise _error(view, policy, job_id, "neither waits nor runs; accepted: a job of the view")
        if not (new is None or _is_allocation(new)):
            accepted = "an Allocation of a Configuration on nodes, which are whole numbers, or None"
            raise _error(view, policy, job_id, f"shall have {_shown(new)}; accepted: {accepted}")
        if new == job.allocation:
            continue
        problem = _problem(job, new, view, policy)
        if problem:
            raise _error(view, policy, job_id, problem)
        changes.append((job, new))
    changes.sort(key=lambda change: (change[1] is not None, change[0].allocation is None, change[0].index))
    _check_resources(changes, view, state.nodes, policy)
    return changes


def _error(view: ClusterView, policy: Policy, job_id: object, problem: str) -> InfeasibleDecision:
    where = f"{known_as(policy)} at {view.time_s} s: job {_shown(job_id)}"
    return InfeasibleDecision(f"{where}: {problem}", view)


def _is_allocation(new: object) -> TypeGuard[Allocation]:
    configuration, nodes = (getattr(new, name, None) for name in ("configuration", "nodes"))
    is_placed = isinstance(nodes, tuple) and all(isinstance(node, Integral) for node in nodes)
    is_whole = is_placed and isinstance(configuration, Configuration)
    return isinstance(new, Allocation) and is_whole and isinstance(new.is_guest, bool)


def _is_later(wake_up_s: object, now_s: float) -> bool:
    return isinstance(wake_up_s, Real) and math.isfinite(wake_up_s) and float(wake_up_s) > now_s


def _problem(job: JobView, new: Allocation | None, view: ClusterView, policy: Policy) -> str:
    keeps = policy.honours_guarantees and job.spec.is_guaranteed
    if new is None:
        return "is guaranteed and must not be suspended" if keeps else ""
    chosen = new.configuration
    if new.is_guest and (keeps or not view.shares_devices):
        why = "it is guaranteed" if keeps else "processes run on devices of their own"
        return f"shall be a guest, but {why}"
    if not view.catalogue.accepts(chosen):
        return f"{_label(chosen)} is not in the catalogue of this cluster"
    if chosen.workload != job.spec.workload:
        return f"trains {job.spec.workload!r}, not {chosen.workload!r}"
    if keeps:
        reference = view.catalogue.requested(job.spec)
        if not job.assures(chosen):
            certainty = "" if job.knows(chosen) and job.knows(reference) else ", which nobody has measured"
            return (
                f"is guaranteed {job.step_s(reference)} s a step, but {_label(chosen)} takes "
                f"{job.step_s(chosen)} s{certainty}"
            )
    return ""


def _label(chosen: Configuration) -> str:
    return f"plan {chosen.plan!r} on {chosen.placement.text} with {chosen.cpu_threads} thread(s) a GPU"


def _check_resources(
    changes: list[tuple[JobView, Allocation | None]], view: ClusterView, nodes: Nodes, policy: Policy
) -> None:
    """Try all changes at once on the real nodes, and undo them."""
    done: list[tuple[Allocation, int]] = []
    try:
        for job, _ in changes:
            if job.allocation is not None:
                nodes.move(job.allocation, 1)
                done.append((job.allocation, -1))
        for job, new in changes:
            if new is None:
                continue
            shortage = nodes.shortage(new)
            if shortage:
                raise _error(view, policy, job.spec.job_id, f"cannot have {new.text}: {shortage}")
            nodes.move(new, -1)
            done.append((new, 1))
        if any(nodes.guests):
            _check_memory(changes, view, policy)
    finally:
        for allocation, sign in reversed(done):
            nodes.move(allocation, sign)


def _check_memory(
    changes: list[tuple[JobView, Allocation | None]], view: ClusterView, policy: Policy
) -> None:
    """Check that each guest finds a device with memory for it."""
    sharing, touched = view.sharing(), set[int]()
    for job, _ in changes:
        if job.allocation is not None:
            sharing.remove(job.index, job.allocation)
            touched.update(job.allocation.nodes)
    for job, new in changes:
        if new is not None:
            sharing.add(job.index, new)
            touched.update(new.nodes)
    for node in sorted(touched):
        own_bytes = sharing.on(node).crowded_bytes
        if own_bytes is not None:
            after = {job.spec.job_id: job.allocation for job in view.running}
            after |= {job.spec.job_id: new for job, new in changes}
            job_id = next(name for name, held in after.items() if _is_guest_with(held, node, own_bytes))
            there = format_bytes(view.cluster.nodes[node].gpu.usable_bytes)
            found = f"needs {format_bytes(own_bytes)} on a device of node {node} beside what others need"
            raise _error(view, policy, job_id, f"{found}; accepted: {there} for both")


def _is_guest_with(held: Allocation | None, node: int, own_bytes: float) -> bool:
    if held is None or not held.is_guest or node not in held.nodes:
        return False
    return held.configuration.device_memory_bytes_per_gpu == own_bytes
