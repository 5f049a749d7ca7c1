"""Morphling with knowledge of the work that jobs have left: every decision in predicted seconds."""

from dataclasses import dataclass

from makespan.hardware import ClusterSpec
from makespan.policies.morphling._options import FULL_FREEDOM, Freedom
from makespan.policies.morphling._skeleton import PolicyState, decide, initial_state
from makespan.policies.morphling._tuning import WORK_AWARE, Tuning
from makespan.sim import Catalogue, ClusterView, Decision, JobView

__all__ = ["MorphlingWork"]


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

    freedom: Freedom = FULL_FREEDOM
    tuning: Tuning = WORK_AWARE
    name: str = "morphling-work"
    title: str = "Morphling (work-aware)"
    interval_s: float | None = None
    is_clairvoyant: bool = True
    honours_guarantees: bool = True
    references: tuple[str, ...] = (
        "Morphling: Exploiting Job Reconfigurability for Deep Learning Cluster Scheduling. MLSys 2025.",
    )

    def initial_state(self, cluster: ClusterSpec, catalogue: Catalogue) -> PolicyState:
        """Return an empty book of options and no arrivals."""
        return initial_state(cluster, catalogue, self.freedom)

    def decide(self, view: ClusterView, state: PolicyState) -> tuple[Decision, PolicyState]:
        """Draft a schedule of all known jobs and return what it changes."""
        return decide(view, state, self.tuning, _steps_left)


def _steps_left(job: JobView) -> float:
    return job.steps_left
