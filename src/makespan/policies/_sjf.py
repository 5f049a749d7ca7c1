"""Shortest job first: the waiting job with the least run time starts first, nobody is displaced."""

from dataclasses import dataclass

from makespan.hardware import ClusterSpec
from makespan.policies._queue import acceptable, serve
from makespan.sim import Catalogue, ClusterView, Configuration, Decision, JobView

__all__ = ["POLICIES", "ShortestJobFirst"]


@dataclass(frozen=True, slots=True)
class ShortestJobFirst:
    """Start waiting jobs in the order of their run time as requested.

    Short jobs that fit may pass longer ones that do not; a job keeps its devices to the end.

    Parameters
    ----------
    max_stretch
        A job accepts a placement on more nodes if its whole run, restart delay included, is
        predicted at most this many times as long there.
    """

    max_stretch: float = 1.0
    name: str = "sjf"
    title: str = "SJF"
    interval_s: float | None = None
    is_clairvoyant: bool = True
    honours_guarantees: bool = False
    references: tuple[str, ...] = (
        "W. E. Smith. Various optimizers for single-stage production. Naval Research Logistics "
        "Quarterly 3, 1956.",
    )

    def initial_state(self, cluster: ClusterSpec, catalogue: Catalogue) -> None:
        """Return nothing: the order follows from the view alone."""

    def decide(self, view: ClusterView, state: None) -> tuple[Decision, None]:
        """Serve the queue by run time."""
        catalogue, delay_s, stretch = view.catalogue, view.restart_delay_s, self.max_stretch

        def order(job: JobView) -> tuple[float]:
            return (job.steps_left * catalogue.requested(job.spec).predicted_iter_time_s,)

        def options(job: JobView) -> tuple[Configuration, ...]:
            return acceptable(catalogue.as_requested(job.spec), job.steps_left, delay_s, stretch)

        return serve(view, order, options), None


POLICIES = (ShortestJobFirst(),)
