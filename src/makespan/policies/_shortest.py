"""SJF and SRTF: the job that ends soonest first, without and with preemption."""

from dataclasses import dataclass
from itertools import takewhile

from makespan.hardware import ClusterSpec
from makespan.policies._placing import Places
from makespan.policies._queue import Queue, acceptable, serve
from makespan.sim import Catalogue, ClusterView, Configuration, Decision, JobView

__all__ = ["POLICIES", "ShortestJobFirst", "ShortestRemainingTimeFirst"]


@dataclass(frozen=True, slots=True)
class ShortestJobFirst:
    """Start waiting jobs in the order of their run time as requested; short ones may pass others."""

    max_stretch: float = 1.0  # ratio of predicted whole runs up to which a job accepts more nodes
    name: str = "sjf"
    title: str = "SJF"
    interval_s: float | None = None
    is_clairvoyant: bool = True
    honours_guarantees: bool = False
    references: tuple[str, ...] = (
        "W. E. Smith. Various optimizers for single-stage production. Naval Research Logistics "
        "Quarterly 3, 1956.",
    )

    def initial_state(self, cluster: ClusterSpec, catalogue: Catalogue) -> Queue:
        """Return the queue, still empty."""
        return Queue(Places.on(cluster, catalogue))

    def decide(self, view: ClusterView, state: Queue) -> tuple[Decision, Queue]:
        """Serve the queue by run time."""
        catalogue, delay_s, stretch = view.catalogue, view.restart_delay_s, self.max_stretch

        def order(job: JobView) -> tuple[float]:
            return (job.steps_left * job.step_s(catalogue.requested(job.spec)),)

        def options(job: JobView) -> tuple[Configuration, ...]:
            return acceptable(job, catalogue.as_requested(job.spec), job.steps_left, delay_s, stretch)

        return serve(view, order, options, queue=state), state


@dataclass(frozen=True, slots=True)
class ShortestRemainingTimeFirst:
    """Serve jobs by remaining time, and displace running ones that have more left."""

    min_advantage: float = 6.0  # restart delays that a displaced job must have left more
    max_stretch: float = 1.0  # ratio of predicted whole runs up to which a job accepts more nodes
    name: str = "srtf"
    title: str = "SRTF"
    interval_s: float | None = None
    is_clairvoyant: bool = True
    honours_guarantees: bool = False
    references: tuple[str, ...] = (
        "L. Schrage. A proof of the optimality of the shortest remaining processing time discipline. "
        "Operations Research 16(3), 1968.",
    )

    def initial_state(self, cluster: ClusterSpec, catalogue: Catalogue) -> Queue:
        """Return the queue, still empty."""
        return Queue(Places.on(cluster, catalogue))

    def decide(self, view: ClusterView, state: Queue) -> tuple[Decision, Queue]:
        """Serve the queue by remaining time; the longest running job is displaced first."""
        catalogue, delay_s, stretch = view.catalogue, view.restart_delay_s, self.max_stretch
        left_s = {job: _remaining_time_s(job, view) for job in view.running}
        longest_first = sorted(view.running, key=lambda job: (-left_s[job], job.index))
        advantage_s = self.min_advantage * delay_s

        def order(job: JobView) -> tuple[float]:
            return (_remaining_time_s(job, view),)

        def options(job: JobView) -> tuple[Configuration, ...]:
            return acceptable(job, catalogue.as_requested(job.spec), job.steps_left, delay_s, stretch)

        def victims(job: JobView) -> list[JobView]:
            limit_s = _remaining_time_s(job, view) + advantage_s
            return list(takewhile(lambda other: left_s[other] > limit_s, longest_first))

        return serve(view, order, options, victims, state), state


def _remaining_time_s(job: JobView, view: ClusterView) -> float:
    """How long a job still holds devices if it starts now as requested, or goes on, as predicted [s]."""
    if job.allocation is None:
        step_s = job.step_s(view.catalogue.requested(job.spec))
        return view.restart_delay_s + job.steps_left * step_s
    step_s = job.step_s(job.allocation.configuration)
    return max(job.ready_time_s - view.time_s, 0.0) + job.steps_left * step_s


POLICIES = (ShortestJobFirst(), ShortestRemainingTimeFirst())
