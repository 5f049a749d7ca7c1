"""Morphling without knowledge of the work that jobs have left: five rules on sensitivity curves."""

from dataclasses import dataclass, field

from makespan.hardware import ClusterSpec
from makespan.policies._placing import can_starve
from makespan.policies.morphling._draft import Draft, Task
from makespan.policies.morphling._handing import hand_out
from makespan.policies.morphling._options import Freedom, OptionBook
from makespan.policies.morphling._shrinking import shrink_for
from makespan.policies.morphling._slopes import Curve
from makespan.policies.morphling._tuning import RuleTuning
from makespan.sim import Catalogue, ClusterView, Decision, JobView
from makespan.workloads import JobSpec

__all__ = ["Morphling", "RuleState"]


@dataclass(frozen=True, slots=True)
class RuleState:
    """What the policy remembers; all of it follows from the requests alone.

    Parameters
    ----------
    book
        Options of jobs.
    is_tight
        Whether nodes may run out of CPU threads or host memory.
    """

    book: OptionBook
    is_tight: bool
    _curves: dict[tuple[str, str, int, bool], Curve] = field(default_factory=dict)

    def curve(self, job: JobSpec) -> Curve:
        """Return the sensitivity curve of a job."""
        key = (job.workload, job.plan, job.n_gpus, job.is_guaranteed)
        found = self._curves.get(key)
        if found is None:
            reference_s = self.book.catalogue.requested(job).predicted_iter_time_s
            found = self._curves[key] = Curve(self.book.of(job), reference_s)
        return found


@dataclass(frozen=True, slots=True)
class Morphling:
    """Choose devices and plans together by how steeply each job's speed depends on them.

    Parameters
    ----------
    freedom
        What may be chosen for a job; the ablations choose less.
    tuning
        Parameters.
    """

    freedom: Freedom = Freedom()
    tuning: RuleTuning = RuleTuning()
    name: str = "morphling"
    title: str = "Morphling"
    interval_s: float | None = None
    knows_remaining_work: bool = False
    honours_guarantees: bool = True
    is_time_driven: bool = False
    references: tuple[str, ...] = (
        "Morphling: Exploiting Job Reconfigurability for Deep Learning Cluster Scheduling. MLSys 2025.",
    )

    def initial_state(self, cluster: ClusterSpec, catalogue: Catalogue) -> RuleState:
        """Return an empty book of options."""
        fitting = catalogue.on(cluster)
        return RuleState(OptionBook(fitting, self.freedom), can_starve(cluster, fitting))

    def decide(self, view: ClusterView, state: RuleState) -> tuple[Decision, RuleState]:
        """Serve the queue by class and slope, then hand out what is left."""
        tuning = self.tuning
        waiting = [_task(job, state, view) for job in view.pending]
        running = [_task(job, state, view) for job in view.running]
        draft = Draft.of(view, running, is_tight=state.is_tight)
        for task in waiting:
            _aim(task, state.curve(task.job.spec), view.time_s, tuning)
        serve(draft, sorted(waiting, key=lambda task: task.rank), view, state, tuning)
        if draft.room.n_gpus and tuning.hands_out:
            hand_out(draft, view, state.curve, tuning)
        return draft.decision([*running, *waiting]), state


def _task(job: JobView, state: RuleState, view: ClusterView) -> Task:
    return Task(job, state.book.of(job.spec), 0.0, view.time_s)


def _aim(task: Task, curve: Curve, now_s: float, tuning: RuleTuning) -> None:
    """Set what a waiting job starts with, and its place in the queue (rule 1)."""
    tolerance = 0.0 if task.is_guaranteed else tuning.efficiency_tolerance
    task.choices = curve.efficient(tolerance)
    task.least_gpus = min(item.n_gpus for item in task.choices)
    slope = curve.efficiency(task.choices[0])
    starves = now_s - task.job.waiting_since_s > tuning.age_limit_s
    if starves:
        task.rank = (not task.is_guaranteed, False, task.index)
    else:
        task.rank = (not task.is_guaranteed, True, -slope, task.index)


def serve(
    draft: Draft, queue: list[Task], view: ClusterView, state: RuleState, tuning: RuleTuning
) -> list[Task]:
    """Start jobs in order, on free devices or on those of flatter jobs (rules 2 and 3).

    A starving job that still does not fit reserves the emptiest nodes: nobody else starts there.
    """
    n_reserved = 0
    for task in queue:
        found = draft.room.first_fit(task.choices)
        if found is not None:
            draft.place(task, *found)
            continue
        if shrink_for(draft, task, view, state.curve, tuning):
            continue
        if not task.rank[1] and n_reserved < tuning.max_reservations:
            draft.room.close(_emptiest(draft, task))
            n_reserved += 1


def _emptiest(draft: Draft, task: Task) -> list[int]:
    """Return the open nodes with the most free devices, as many as the job prefers."""
    room = draft.room
    open_nodes = [node for node in range(len(room.gpus)) if not room.is_closed(node)]
    return sorted(open_nodes, key=lambda node: (-room.gpus[node], node))[: task.choices[0].n_nodes]
