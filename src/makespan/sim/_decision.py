"""The check of a decision, before anything of it is applied."""

from makespan.sim._catalogue import Allocation, Configuration
from makespan.sim._policy import Decision, InfeasibleDecision, Policy
from makespan.sim._state import ClusterState, Nodes
from makespan.sim._view import ClusterView, JobView

__all__ = ["checked_changes"]


def checked_changes(
    decision: Decision, state: ClusterState, policy: Policy
) -> list[tuple[JobView, Allocation | None]]:
    """Return what really changes: suspensions first, then changes of running jobs, then starts.

    Raises
    ------
    InfeasibleDecision
        A job is not there, a configuration may not run, resources do not suffice, or a guarantee
        would be broken by a policy that declares to keep it.
    """
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
