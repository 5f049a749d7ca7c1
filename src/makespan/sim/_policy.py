"""What a policy is and returns, and the check of a decision before anything of it is applied."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from makespan.errors import MakespanError
from makespan.hardware import ClusterSpec
from makespan.sim._catalogue import Allocation, Catalogue, Configuration
from makespan.sim._state import ClusterState, Nodes
from makespan.sim._view import ClusterView, JobView

__all__ = ["Decision", "InfeasibleDecision", "Policy", "StalledError", "checked_changes"]


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


class InfeasibleDecision(MakespanError):
    """A policy decided what cannot be done; nothing of the decision was applied, the view is as it saw it."""

    def __init__(self, message: str, view: ClusterView) -> None:
        super().__init__(message)
        self.view = view


class StalledError(MakespanError):
    """Jobs wait, nothing runs and nothing will happen any more: the policy left them behind."""


def checked_changes(
    decision: Decision, state: ClusterState, policy: Policy
) -> list[tuple[JobView, Allocation | None]]:
    """Return what really changes: suspensions first, then changes of running jobs, then starts."""
    changes, view = [], state.view
    for job_id, new in decision.changes.items():
        job = state.find(job_id)
        if job is None:
            raise _error(view, policy, job_id, "neither waits nor runs; accepted: a job of the view")
        if new == job.allocation:
            continue
        problem = _problem(job, new, view, policy)
        if problem:
            raise _error(view, policy, job_id, problem)
        changes.append((job, new))
    changes.sort(key=lambda change: (change[1] is not None, change[0].allocation is None, change[0].index))
    _check_resources(changes, view, state.nodes, policy)
    return changes


def _error(view: ClusterView, policy: Policy, job_id: str, problem: str) -> InfeasibleDecision:
    return InfeasibleDecision(f"policy {policy.name!r} at {view.time_s} s: job {job_id!r}: {problem}", view)


def _problem(job: JobView, new: Allocation | None, view: ClusterView, policy: Policy) -> str:
    keeps = policy.honours_guarantees and job.spec.is_guaranteed
    if new is None:
        return "is guaranteed and must not be suspended" if keeps else ""
    chosen = new.configuration
    if not view.catalogue.accepts(chosen):
        return f"{_label(chosen)} is not in the catalogue of this cluster"
    if chosen.workload != job.spec.workload:
        return f"trains {job.spec.workload!r}, not {chosen.workload!r}"
    if keeps:
        reference = view.catalogue.requested(job.spec)
        if not chosen.assures(reference):
            certainty = "" if chosen.is_known and reference.is_known else ", which nobody has measured"
            return (
                f"is guaranteed {reference.predicted_iter_time_s} s a step, but {_label(chosen)} takes "
                f"{chosen.predicted_iter_time_s} s{certainty}"
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
    finally:
        for allocation, sign in reversed(done):
            nodes.move(allocation, sign)
