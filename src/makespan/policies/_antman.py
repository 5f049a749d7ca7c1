"""AntMan: guaranteed jobs get what they asked for, best-effort jobs use what is left over."""

from dataclasses import dataclass

from makespan.hardware import ClusterSpec
from makespan.policies._queue import acceptable, serve
from makespan.sim import Catalogue, ClusterView, Configuration, Decision, JobView

__all__ = ["POLICIES", "AntMan"]


@dataclass(frozen=True, slots=True)
class AntMan:
    """Run guaranteed jobs as requested and best-effort jobs on left-overs, first come first served.

    A guaranteed job takes free devices, or those of best-effort jobs: the latest start goes first, and
    no more than needed. It accepts no placement that is slower than its request, and keeps its
    devices to the end. A best-effort job never displaces anybody.

    Deviation: the original lets jobs share a device, best-effort ones in the idle moments of guaranteed
    ones; here a device belongs to one job, so a best-effort job in the way is suspended.

    Parameters
    ----------
    max_slowdown
        Ratio of predicted steps up to which a best-effort job accepts a placement on more nodes.
    """

    max_slowdown: float = 1.5
    name: str = "antman"
    title: str = "AntMan"
    interval_s: float | None = None
    is_clairvoyant: bool = False
    honours_guarantees: bool = True
    references: tuple[str, ...] = (
        "W. Xiao et al. AntMan: dynamic scaling on GPU clusters for deep learning. OSDI 2020.",
    )

    def initial_state(self, cluster: ClusterSpec, catalogue: Catalogue) -> None:
        """Return nothing: all that counts is in the view."""

    def decide(self, view: ClusterView, state: None) -> tuple[Decision, None]:
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
            return acceptable(requested, 1.0, 0.0, self.max_slowdown)

        def victims(job: JobView) -> list[JobView]:
            return candidates if job.spec.is_guaranteed else []

        return serve(view, order, options, victims), None


POLICIES = (AntMan(),)
