"""AntMan: guaranteed jobs get what they asked for, best-effort jobs use what is left over."""

from dataclasses import dataclass

from makespan.hardware import ClusterSpec
from makespan.policies._queue import Queue, acceptable, serve
from makespan.sim import Catalogue, ClusterView, Configuration, Decision, JobView

__all__ = ["POLICIES", "AntMan"]


@dataclass(frozen=True, slots=True)
class AntMan:
    """Run guaranteed jobs as requested and best-effort jobs on left-overs, first come first served.

    Deviation: the original lets jobs share a device; here a best-effort job in the way is suspended, latest
    start first. Best-effort jobs accept more nodes up to ``max_slowdown`` times the predicted step.
    """

    max_slowdown: float = 1.5  # ratio of predicted steps up to which best-effort jobs accept more nodes
    name: str = "antman"
    title: str = "AntMan"
    interval_s: float | None = None
    is_clairvoyant: bool = False
    honours_guarantees: bool = True
    references: tuple[str, ...] = (
        "W. Xiao et al. AntMan: dynamic scaling on GPU clusters for deep learning. OSDI 2020.",
    )

    def initial_state(self, cluster: ClusterSpec, catalogue: Catalogue) -> Queue:
        """Return the queue, still empty."""
        return Queue()

    def decide(self, view: ClusterView, state: Queue) -> tuple[Decision, Queue]:
        """Serve guaranteed jobs, then the others, each by submission."""
        catalogue = view.catalogue
        candidates = sorted(
            (job for job in view.running if not job.spec.is_guaranteed),
            key=lambda job: (-job.held_since_s, job.index),
        )

        def order(job: JobView) -> tuple[bool, float]:
            return (not job.spec.is_guaranteed, job.spec.submit_time_s)

        def options(job: JobView) -> tuple[Configuration, ...]:
            requested = catalogue.as_requested(job.spec)
            if job.spec.is_guaranteed:
                return requested[:1]
            return acceptable(job, requested, 1.0, 0.0, self.max_slowdown)

        def victims(job: JobView) -> list[JobView]:
            return candidates if job.spec.is_guaranteed else []

        return serve(view, order, options, victims, state), state


POLICIES = (AntMan(),)
