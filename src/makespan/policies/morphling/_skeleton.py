"""What both variants do: draft a schedule of all known jobs, and carry out what it changes."""

from collections.abc import Callable
from dataclasses import dataclass

from makespan.hardware import ClusterSpec
from makespan.policies._placing import can_starve
from makespan.policies.morphling._draft import Draft, Task
from makespan.policies.morphling._growth import grow
from makespan.policies.morphling._options import Freedom, OptionBook
from makespan.policies.morphling._pricing import Arrivals, Moment, critical, price_tasks, rank_tasks
from makespan.policies.morphling._taking import take_devices
from makespan.policies.morphling._tuning import Tuning
from makespan.sim import Catalogue, ClusterView, Decision, JobView

__all__ = ["PolicyState", "decide", "initial_state"]


@dataclass(frozen=True, slots=True)
class PolicyState:
    """What the policies remember.

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


def initial_state(cluster: ClusterSpec, catalogue: Catalogue, freedom: Freedom) -> PolicyState:
    """Return an empty book of options and no arrivals."""
    fitting = catalogue.on(cluster)
    return PolicyState(OptionBook(fitting, freedom), can_starve(cluster, fitting), Arrivals())


def decide(
    view: ClusterView, state: PolicyState, tuning: Tuning, steps_left: Callable[[JobView], float]
) -> tuple[Decision, PolicyState]:
    """Start what fits, let blocked jobs take devices where that pays, hand out what is left.

    Parameters
    ----------
    view
        The cluster.
    state
        What was remembered.
    tuning
        Parameters.
    steps_left
        Steps that a job has left, known or estimated.
    """
    now_s, delay_s, n_gpus = view.time_s, view.restart_delay_s, max(view.n_gpus, 1)
    waiting, running = (
        [Task(job, state.book.of(job.spec), steps_left(job), now_s) for job in jobs]
        for jobs in (view.pending, view.running)
    )
    arrivals = state.arrivals.updated(waiting, now_s, tuning.arrival_memory_s)
    start_price = arrivals.per_s * tuning.start_horizon_s / n_gpus
    moment = Moment(now_s, delay_s, start_price, tuning)
    price_tasks(waiting, delay_s, start_price, tuning.cost_tolerance)
    rank_tasks(waiting, now_s, tuning, critical(waiting, running, moment, n_gpus))
    draft = Draft.of(view, running, is_tight=state.is_tight)
    blocked = draft.start(sorted(waiting, key=lambda task: task.rank))
    if blocked:
        draft, blocked = take_devices(draft, blocked, moment)
    growth_price = (arrivals.per_s * tuning.growth_horizon_s + len(blocked)) / n_gpus
    grow(draft, state.book, growth_price, moment)
    return draft.decision([*running, *waiting]), PolicyState(state.book, state.is_tight, arrivals)
