"""Morphling with knowledge of the work that jobs have left: every decision in predicted seconds."""

from dataclasses import dataclass

from makespan.hardware import ClusterSpec
from makespan.policies._placing import can_starve
from makespan.policies.morphling._draft import Draft, Task
from makespan.policies.morphling._growth import grow
from makespan.policies.morphling._options import Freedom, OptionBook
from makespan.policies.morphling._pricing import Arrivals, Moment, critical, price_tasks, rank_tasks
from makespan.policies.morphling._taking import take_devices
from makespan.policies.morphling._tuning import WorkTuning
from makespan.sim import Catalogue, ClusterView, Decision

__all__ = ["MorphlingWork", "WorkState"]


@dataclass(frozen=True, slots=True)
class WorkState:
    """What the policy remembers.

    Parameters
    ----------
    book
        Options of jobs, which depend on their requests alone.
    is_tight
        Whether nodes may run out of CPU threads or host memory.
    arrivals
        How fast jobs have been arriving.
    """

    book: OptionBook
    is_tight: bool
    arrivals: Arrivals


@dataclass(frozen=True, slots=True)
class MorphlingWork:
    """Choose devices and plans together, knowing how many steps each job has left.

    On a draft of the schedule: start what fits, little work first; let blocked jobs take devices
    where all known jobs together gain; hand what is free to the jobs that gain most. All changes of
    a decision are made at once.

    Parameters
    ----------
    freedom
        What may be chosen for a job; the ablations choose less.
    tuning
        Parameters.
    """

    freedom: Freedom = Freedom()
    tuning: WorkTuning = WorkTuning()
    name: str = "morphling-work"
    title: str = "Morphling (work-aware)"
    interval_s: float | None = None
    knows_remaining_work: bool = True
    honours_guarantees: bool = True
    is_time_driven: bool = False
    references: tuple[str, ...] = (
        "Morphling: Exploiting Job Reconfigurability for Deep Learning Cluster Scheduling. MLSys 2025.",
    )

    def initial_state(self, cluster: ClusterSpec, catalogue: Catalogue) -> WorkState:
        """Return an empty book of options and no arrivals."""
        fitting = catalogue.on(cluster)
        return WorkState(OptionBook(fitting, self.freedom), can_starve(cluster, fitting), Arrivals())

    def decide(self, view: ClusterView, state: WorkState) -> tuple[Decision, WorkState]:
        """Draft a schedule of all known jobs and return what it changes."""
        tuning, now_s, delay_s = self.tuning, view.time_s, view.restart_delay_s
        waiting = [Task(job, state.book.of(job.spec), job.steps_left, now_s) for job in view.pending]
        running = [Task(job, state.book.of(job.spec), job.steps_left, now_s) for job in view.running]
        arrivals = state.arrivals.updated(waiting, now_s, tuning.arrival_memory_s)
        n_gpus = max(view.n_gpus, 1)
        start_price = arrivals.per_s * tuning.start_horizon_s / n_gpus
        moment = Moment(now_s, delay_s, start_price, tuning)
        price_tasks(waiting, delay_s, start_price, tuning.cost_tolerance)
        first = critical(waiting, running, now_s, delay_s, n_gpus, tuning)
        rank_tasks(waiting, now_s, tuning, first)
        draft = Draft.of(view, running, is_tight=state.is_tight)
        blocked = draft.start(sorted(waiting, key=lambda task: task.rank))
        if blocked:
            draft, blocked = take_devices(draft, blocked, moment)
        growth_price = (arrivals.per_s * tuning.growth_horizon_s + len(blocked)) / n_gpus
        grow(draft, state.book, growth_price, moment)
        return draft.decision([*running, *waiting]), WorkState(state.book, state.is_tight, arrivals)
