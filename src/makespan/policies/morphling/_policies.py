"""Our policies after Morphling: clairvoyant or not, and what each loses with less to choose."""

from collections.abc import Callable
from dataclasses import dataclass

from makespan.hardware import ClusterSpec
from makespan.policies._placing import Places
from makespan.policies.morphling._growth import grow
from makespan.policies.morphling._options import FULL_FREEDOM, LESS, Freedom, OptionTable
from makespan.policies.morphling._preemption import preempt
from makespan.policies.morphling._schedule import Arrivals, Context, Schedule, Task
from makespan.policies.morphling._sharing import start_guests, with_guests
from makespan.policies.morphling._tuning import CLAIRVOYANT, NON_CLAIRVOYANT, Tuning
from makespan.sim import Catalogue, ClusterView, Decision, JobView

__all__ = ["POLICIES", "MorphlingLookahead", "MorphlingWork"]

_REFERENCES = (
    "Morphling: Exploiting Job Reconfigurability for Deep Learning Cluster Scheduling. MLSys 2025.",
)


@dataclass(frozen=True, slots=True)
class PolicyState:
    """What the policies remember."""

    options: OptionTable
    places: Places
    arrivals: Arrivals


def _decide(
    view: ClusterView,
    state: PolicyState,
    tuning: Tuning,
    steps_left: Callable[[JobView], float],
    shares: bool,
) -> tuple[Decision, PolicyState]:
    """Start what fits, let blocked jobs preempt others where that pays, hand out what is left, and share."""
    now_s, n_gpus = view.time_s, max(view.n_gpus, 1)
    waiting, there = (
        [Task(job, state.options.of(job), steps_left(job), now_s) for job in jobs]
        for jobs in (view.pending, view.running)
    )
    running = [task for task in there if task.held is not None]
    waiting += [task for task in there if task.guest is not None]
    arrivals = state.arrivals.updated(waiting, now_s, tuning.arrival_memory_s)
    per_gpu_s = arrivals.per_s / n_gpus
    start_price, preempt_price = per_gpu_s * tuning.start_horizon_s, per_gpu_s * tuning.preempt_horizon_s
    last_weight = tuning.last_share * (len(waiting) + len(running))
    prices = start_price, preempt_price
    context = Context(now_s, view.restart_delay_s, *prices, last_weight, n_gpus, tuning)
    schedule = Schedule.of(view, running, state.places)
    ranked = start_guests(context.admit(waiting), schedule, context)
    queue, held = context.held_back(ranked, running, arrivals)
    blocked = schedule.start(queue)
    if blocked:
        schedule, blocked = preempt(schedule, blocked, context)
    growth_price = (arrivals.per_s * tuning.growth_horizon_s + len(blocked)) / n_gpus
    grow(schedule, growth_price, context)
    has_idle = schedule.room.n_gpus > 0 and bool(schedule.slots or held)
    wake_up_s = _next_multiple(now_s, tuning.look_again_s) if has_idle else None
    tasks = [*running, *waiting]
    decision = schedule.decision(tasks, wake_up_s)
    if shares and view.shares_devices:
        decision = with_guests(decision, view, schedule, tasks, context)
    return decision, PolicyState(state.options, state.places, arrivals)


@dataclass(frozen=True, slots=True)
class _Variant:
    """What both variants have; whether best-effort jobs may be guests, where the engine lets them."""

    freedom: Freedom = FULL_FREEDOM
    tuning: Tuning = CLAIRVOYANT
    shares: bool = True

    def initial_state(self, cluster: ClusterSpec, catalogue: Catalogue) -> PolicyState:
        """Return an empty table of options and no arrivals."""
        fitting = catalogue.on(cluster)
        return PolicyState(OptionTable(fitting, self.freedom), Places.on(cluster, fitting), Arrivals())


@dataclass(frozen=True, slots=True)
class MorphlingLookahead(_Variant):
    """Choose devices and plans together by sensitivity curves, expecting of jobs what they showed.

    Run times are heavy-tailed, so a job that has run for long will probably run on for as long again. Of jobs
    from which equally much is expected, the one with the steepest normalised curve is served first.

    Parameters
    ----------
    tuning
        Parameters shared with the variant that knows run times.
    expected_s
        Time that a new job is expected to run at its requested speed [s].
    expected_share
        Share of the time that a job has run which it is expected to run on.
    """

    tuning: Tuning = NON_CLAIRVOYANT
    expected_s: float = 35.0
    expected_share: float = 0.8
    name: str = "morphling-lookahead"
    title: str = "Morphling (lookahead)"
    interval_s: float | None = None
    is_clairvoyant: bool = False
    honours_guarantees: bool = True
    references: tuple[str, ...] = _REFERENCES

    def decide(self, view: ClusterView, state: PolicyState) -> tuple[Decision, PolicyState]:
        """Schedule all known jobs by estimates and return what changes."""
        return _decide(view, state, self.tuning, lambda job: self.expected_steps(job, view), self.shares)

    def expected_steps(self, job: JobView, view: ClusterView) -> float:
        """Estimate the steps that a job has left from the time that it has run."""
        reference_s = job.step_s(view.catalogue.requested(job.spec))
        left_s = self.expected_s + self.expected_share * job.running_time_s
        return left_s / reference_s


def _next_multiple(time_s: float, every_s: float) -> float:
    """Return the next multiple after a time [s]: the same for all decisions in between."""
    turn = time_s // every_s + 1
    return turn * every_s if turn * every_s > time_s else (turn + 1) * every_s


@dataclass(frozen=True, slots=True)
class MorphlingWork(_Variant):
    """Choose devices and plans together, knowing how many steps each job has left."""

    name: str = "morphling-work"
    title: str = "Morphling (work-aware)"
    interval_s: float | None = None
    is_clairvoyant: bool = True
    honours_guarantees: bool = True
    references: tuple[str, ...] = _REFERENCES

    def decide(self, view: ClusterView, state: PolicyState) -> tuple[Decision, PolicyState]:
        """Schedule all known jobs and return what changes."""
        return _decide(view, state, self.tuning, lambda job: job.steps_left, self.shares)


_OWN = "devices of its own"

POLICIES = (
    MorphlingLookahead(),
    MorphlingWork(),
    MorphlingLookahead(shares=False, name="morphling-lookahead-s", title=f"Morphling (lookahead, {_OWN})"),
    MorphlingWork(shares=False, name="morphling-work-s", title=f"Morphling (work-aware, {_OWN})"),
    *(
        MorphlingLookahead(
            freedom, name=f"morphling-lookahead{suffix}", title=f"Morphling (lookahead, {title})"
        )
        for suffix, (freedom, title) in LESS.items()
    ),
    *(
        MorphlingWork(freedom, name=f"morphling-work{suffix}", title=f"Morphling (work-aware, {title})")
        for suffix, (freedom, title) in LESS.items()
    ),
)
"""Both variants, each also without guests and with less to choose."""
