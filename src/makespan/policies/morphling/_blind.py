"""Morphling without knowledge of the work that jobs have left."""

from dataclasses import dataclass, replace

from makespan.hardware import ClusterSpec
from makespan.policies.morphling._options import FULL_FREEDOM, Freedom
from makespan.policies.morphling._skeleton import PolicyState, decide, initial_state
from makespan.policies.morphling._tuning import BLIND, Tuning
from makespan.sim import Catalogue, ClusterView, Decision, JobView

__all__ = ["Morphling"]


@dataclass(frozen=True, slots=True)
class Morphling:
    """Choose devices and plans together by sensitivity curves, expecting of jobs what they showed.

    Run times are heavy-tailed, so a job that has run for long will probably run on for as long
    again. The policy expects of each job a short time at its requested speed plus a share of the
    time that it has run so far, and treats that as `makespan.policies.morphling.MorphlingWork`
    treats the true work. Of jobs from which it expects equally much, it serves the one with the
    steepest normalised curve first.

    Parameters
    ----------
    freedom
        What may be chosen for a job; the ablations choose less.
    tuning
        Parameters.
    expected_s
        Time that a job is expected to run at its requested speed when it is new [s].
    expected_share
        Share of the time that it has run which a job is expected to run on.
    look_again_s
        While devices are free beside running jobs and nobody waits, decide at multiples of this time
        [s] even if nothing happens: what is expected of a job grows as it runs, and with it what more
        devices are worth.
    """

    freedom: Freedom = FULL_FREEDOM
    tuning: Tuning = BLIND
    expected_s: float = 60.0
    expected_share: float = 0.25
    look_again_s: float = 900.0
    name: str = "morphling"
    title: str = "Morphling"
    interval_s: float | None = None
    is_clairvoyant: bool = False
    honours_guarantees: bool = True
    references: tuple[str, ...] = (
        "Morphling: Exploiting Job Reconfigurability for Deep Learning Cluster Scheduling. MLSys 2025.",
    )

    def initial_state(self, cluster: ClusterSpec, catalogue: Catalogue) -> PolicyState:
        """Return an empty book of options and no arrivals."""
        return initial_state(cluster, catalogue, self.freedom)

    def decide(self, view: ClusterView, state: PolicyState) -> tuple[Decision, PolicyState]:
        """Draft a schedule of all known jobs by estimates and return what it changes."""
        decision, state = decide(view, state, self.tuning, lambda job: self.expected_steps(job, view))
        if not view.running or view.pending or not sum(view.free_gpus):
            return decision, state
        return replace(decision, wake_up_s=_next_multiple(view.time_s, self.look_again_s)), state

    def expected_steps(self, job: JobView, view: ClusterView) -> float:
        """Estimate the steps that a job has left from the time that it has run."""
        left_s = self.expected_s + self.expected_share * job.running_time_s
        return left_s / view.catalogue.requested(job.spec).predicted_iter_time_s


def _next_multiple(time_s: float, every_s: float) -> float:
    """Return the next multiple after a time [s]: the same for all decisions in between."""
    turn = time_s // every_s + 1
    return turn * every_s if turn * every_s > time_s else (turn + 1) * every_s
